# ---- forwards

cdef struct Owner:
    int64_t blocks
    int32_t span
    uint8_t large
    uint8_t fine
    uint8_t unsplit
    uint8_t expandable


cdef struct Node:  # a block or a hole
    uint64_t address
    int64_t size
    int32_t owner
    int32_t block  # row in the log; NONE: a hole
    int32_t place  # in the list of its kind
    uint8_t kind


@cython.final
cdef class _Forwards:
    """exact._Forwards. Blocks and holes are nodes; each stands in the list of its kind, to be searched plainly."""

    cdef _Columns events
    cdef Rules rules
    cdef int32_t still
    cdef int64_t revised
    cdef int64_t searched
    cdef uint64_t seed
    cdef BlockLog blocks
    cdef ChangeLog splits
    cdef ChangeLog segments
    cdef SpanLog spans
    cdef Owner* owners
    cdef Py_ssize_t owner_count
    cdef Py_ssize_t owner_room
    cdef Node* nodes
    cdef int32_t* lists[4]
    cdef Py_ssize_t lengths[4]
    cdef Py_ssize_t node_count
    cdef Py_ssize_t node_room
    cdef Table starts  # address -> node
    cdef Table hole_ends  # end of a hole -> node
    cdef Table groups  # expandable (large, stream) -> owner
    cdef Table unsplit  # pools that never split
    cdef Table segment_rows  # start of a segment of the final map -> row of segment_pools
    cdef const int32_t[::1] segment_pools
    cdef Table forced_rows  # event -> row of forced_sizes
    cdef int64_t* forced_sizes
    cdef Py_ssize_t forced_count
    cdef Py_ssize_t forced_room
    cdef RangeSet ranges

    def __cinit__(self, events, private, forced, seed):
        cdef Py_ssize_t row
        cdef const uint64_t[::1] segment_starts
        self.events = _Columns(events)
        self.rules = rules_of(events.settings)
        self.still = <int32_t>self.events.count
        self.seed = seed
        for table in range(2):
            table_start(&self.starts if table else &self.hole_ends, 1024, self.seed)
        table_start(&self.groups, 64, self.seed)
        table_start(&self.unsplit, 64, self.seed)
        table_start(&self.segment_rows, 64, self.seed)
        table_start(&self.forced_rows, 64, self.seed)
        for pool in private.unsplit:
            table_put(&self.unsplit, <uint64_t>pool, 0)
        segment_starts, self.segment_pools = private.segment_start, private.segment_pool
        for row in range(min(segment_starts.shape[0], self.segment_pools.shape[0])):
            table_put(&self.segment_rows, segment_starts[row], <int32_t>row)
        for event, size in forced.items():
            self._force(<int64_t>event, size)

    def __dealloc__(self):
        blocks_end(&self.blocks)
        changes_end(&self.splits)
        changes_end(&self.segments)
        free(self.spans.rows)
        free(self.owners)
        free(self.nodes)
        for kind in range(4):
            free(self.lists[kind])
        free(self.starts.slots)
        free(self.hole_ends.slots)
        free(self.groups.slots)
        free(self.unsplit.slots)
        free(self.segment_rows.slots)
        free(self.forced_rows.slots)
        free(self.forced_sizes)
        ranges_end(&self.ranges)

    # nodes

    cdef int32_t _node(self, uint64_t address, int64_t size, int32_t owner, int32_t block, uint8_t kind) except -2 nogil:
        """A new node, in the list of its kind and in `starts`."""
        cdef int32_t node
        cdef Py_ssize_t room
        cdef int each
        if self.lengths[UNUSED] == 0:
            if self.node_count == self.node_room:
                room = 2 * self.node_room + 256
                if room > INT32_MAX:
                    no_memory()
                self.nodes = <Node*>resized(self.nodes, room, sizeof(Node))
                for each in range(4):
                    self.lists[each] = <int32_t*>resized(self.lists[each], room, sizeof(int32_t))
                self.node_room = room
            node = <int32_t>self.node_count
            self.node_count += 1
        else:
            self.lengths[UNUSED] -= 1
            node = self.lists[UNUSED][self.lengths[UNUSED]]
        self.nodes[node].address = address
        self.nodes[node].size = size
        self.nodes[node].owner = owner
        self.nodes[node].block = block
        self._enlist(node, kind)
        table_put(&self.starts, address, node)
        return node

    cdef inline void _enlist(self, int32_t node, uint8_t kind) noexcept nogil:
        self.nodes[node].kind = kind
        self.nodes[node].place = <int32_t>self.lengths[kind]
        self.lists[kind][self.lengths[kind]] = node
        self.lengths[kind] += 1

    cdef inline void _become(self, int32_t node, uint8_t kind) noexcept nogil:
        """Moves a node from the list of its kind to another."""
        cdef uint8_t old = self.nodes[node].kind
        cdef int32_t last
        self.lengths[old] -= 1
        last = self.lists[old][self.lengths[old]]
        self.lists[old][self.nodes[node].place] = last
        self.nodes[last].place = self.nodes[node].place
        self._enlist(node, kind)

    cdef inline void _discard(self, int32_t node) noexcept nogil:
        """Ends a node."""
        table_drop(&self.starts, self.nodes[node].address)
        self._become(node, UNUSED)

    cdef inline int32_t _at(self, uint64_t address, uint8_t kind) noexcept nogil:
        """The node of that kind that starts at an address, or NONE."""
        cdef int32_t node = table_find(&self.starts, address)
        return node if node != NONE and self.nodes[node].kind == kind else NONE

    cdef inline int32_t _hole_ending(self, uint64_t end, int32_t owner) noexcept nogil:
        cdef int32_t node = table_find(&self.hole_ends, end)
        return node if node != NONE and self.nodes[node].owner == owner else NONE

    cdef inline int32_t _hole_at(self, uint64_t address, int32_t owner) noexcept nogil:
        cdef int32_t node = self._at(address, HOLE)
        return node if node != NONE and self.nodes[node].owner == owner else NONE

    cdef inline uint64_t _end(self, int32_t node) noexcept nogil:
        return self.nodes[node].address + <uint64_t>self.nodes[node].size

    cdef int _add_hole(self, uint64_t address, int64_t size, int32_t owner) except -1 nogil:
        cdef int32_t node = self._node(address, size, owner, NONE, HOLE)
        table_put(&self.hole_ends, address + <uint64_t>size, node)
        return 0

    cdef void _drop_hole(self, int32_t node) noexcept nogil:
        table_drop(&self.hole_ends, self._end(node))
        self._discard(node)

    # forced sizes

    cdef int _force(self, int64_t event, int64_t size) except -1 nogil:
        cdef int32_t row = table_find(&self.forced_rows, <uint64_t>event)
        cdef Py_ssize_t room
        if row == NONE:
            if self.forced_count == self.forced_room:
                room = 2 * self.forced_room + 64
                if room > INT32_MAX:
                    no_memory()
                self.forced_sizes = <int64_t*>resized(self.forced_sizes, room, sizeof(int64_t))
                self.forced_room = room
            row = <int32_t>self.forced_count
            self.forced_count += 1
            table_put(&self.forced_rows, <uint64_t>event, row)
        self.forced_sizes[row] = size
        return 0

    # the state before the first event

    cdef int place(self, const MapRange* ranges, Py_ssize_t range_count, const MapBlock* blocks, Py_ssize_t count) except -1 nogil:
        cdef Py_ssize_t event, row, births = count, block = 0, first_hole
        cdef Range item
        cdef int32_t number
        cdef int32_t node
        cdef int each
        cdef uint64_t cursor
        for event in range(self.events.count):
            births += self.events.action[event] == ALLOC
        blocks_reserve(&self.blocks, births)
        for row in range(range_count):
            item = range_of(&ranges[row])
            self._own(&item)
            item.span = spans_add(&self.spans, &item, BEFORE, self.still)
            if not item.expandable:
                self.owners[item.owner].span = item.span
            changes_add(&self.segments, BEFORE, 0 if item.expandable else 1, item.size, item.large)
            number = ranges_add(&self.ranges, item)
        for row in range(count):
            number = ranges_containing(&self.ranges, blocks[row].address)
            if number == NONE:
                with gil:
                    raise ValueError("a block of a memory map lies in none of its ranges")
            self._born_before(&blocks[row], &self.ranges.items[number])
        # holes: what the blocks leave of the ranges, both in order of address
        block = 0
        for row in range(range_count):
            number = ranges_at(&self.ranges, ranges[row].start)
            item = self.ranges.items[number]
            cursor = item.start
            while block < count and blocks[block].address < end_of(&item):
                if blocks[block].address > cursor:
                    self._add_hole(cursor, <int64_t>(blocks[block].address - cursor), item.owner)
                    self.owners[item.owner].blocks += 1
                cursor = blocks[block].address + <uint64_t>blocks[block].size
                block += 1
            if cursor < end_of(&item):
                self._add_hole(cursor, <int64_t>(end_of(&item) - cursor), item.owner)
                self.owners[item.owner].blocks += 1
        for row in range(self.lengths[HOLE]):
            node = self.lists[HOLE][row]
            number = self.nodes[node].owner
            if not self.owners[number].expandable and self.owners[number].blocks > 1:
                changes_add(&self.splits, BEFORE, 1, self.nodes[node].size, self.owners[number].large)
        return 0

    cdef int _own(self, Range* item) except -1 nogil:
        """Sets the owner of a range: one for each segment, one for each expandable (large, stream)."""
        cdef uint64_t key = group_of(item.large, item.stream)
        if item.expandable:
            item.owner = table_find(&self.groups, key)
            if item.owner != NONE:
                return 0
            table_put(&self.groups, key, <int32_t>self.owner_count)
        item.owner = self._new_owner(item)
        return 0

    cdef int _born_before(self, const MapBlock* block, const Range* home) except -1 nogil:
        cdef BlockLog* log = &self.blocks
        cdef Py_ssize_t row = log.count
        log.address[row] = block.address
        log.size[row] = block.size
        log.requested[row] = block.requested
        log.born[row] = BEFORE
        log.freed[row] = BEFORE if block.pending else self.still
        log.died[row] = self.still
        log.owner[row] = home.owner
        log.stack[row] = block.stack
        log.stream[row] = home.stream
        log.slack_bound[row] = block.slack_bound
        log.count += 1
        self._node(block.address, block.size, home.owner, <int32_t>row, PENDING if block.pending else LIVE)
        self.owners[home.owner].blocks += 1
        return 0

    cdef int32_t _new_owner(self, const Range* item) except -2 nogil:
        cdef Py_ssize_t room
        cdef Owner* owner
        if self.owner_count == self.owner_room:
            room = 2 * self.owner_room + 64
            if room > INT32_MAX:
                no_memory()
            self.owners = <Owner*>resized(self.owners, room, sizeof(Owner))
            self.owner_room = room
        owner = &self.owners[self.owner_count]
        owner.blocks = 0
        owner.span = NONE
        owner.large = item.large
        owner.fine = splits_finely(item, &self.rules)
        owner.unsplit = table_find(&self.unsplit, <uint64_t><int64_t>item.pool) != NONE
        owner.expandable = item.expandable
        self.owner_count += 1
        return <int32_t>(self.owner_count - 1)

    # events

    cdef int loop(self) except -1 nogil:
        cdef int32_t event
        cdef uint8_t action
        for event in range(self.still):
            action = self.events.action[event]
            if action == ALLOC:
                self._alloc(event)
            elif action == FREE_REQUESTED:
                self._requested(event)
            elif action == FREE_COMPLETED or action == FREE:
                self._completed(event, action == FREE)
            elif action == SEGMENT_ALLOC:
                self._segment_alloc(event)
            elif action == SEGMENT_FREE:
                self._segment_free(event)
            elif action == SEGMENT_MAP:
                self._segment_map(event)
            elif action == SEGMENT_UNMAP:
                self._segment_unmap(event)
        return 0

    cdef inline int _alloc(self, int32_t event) except -1 nogil:
        cdef uint64_t address = self.events.addr[event]
        cdef int64_t requested = self.events.size[event], rounded = rounded_size(&self.rules, requested)
        cdef int64_t room, rest, size
        cdef int32_t node = self._at(address, HOLE), owner, row = NONE, rest_node
        cdef BlockLog* log = &self.blocks
        cdef Owner* home
        if node == NONE:
            node = self._repair(event, address)
        room, owner = self.nodes[node].size, self.nodes[node].owner
        home = &self.owners[owner]
        if self.forced_count:
            row = table_find(&self.forced_rows, <uint64_t>event)
        if row != NONE:
            size = self.forced_sizes[row]
        else:
            rest = room - rounded
            size = room
            if rest >= MIN_BLOCK and not home.unsplit:
                if home.fine or (rounded < self.rules.max_split_size and rest > LARGE_REMAINDER):
                    size = rounded
        if rounded > size or size > room:
            size = self._by_default_rounding(event, room, owner, row)
        if size < room:
            rest_node = self._node(address + <uint64_t>size, room - size, owner, NONE, HOLE)
            table_put(&self.hole_ends, address + <uint64_t>room, rest_node)
            home.blocks += 1
            if not home.expandable:
                if home.blocks > 2:
                    changes_add(&self.splits, event, 0, -size, home.large)
                else:
                    changes_add(&self.splits, event, 1, room - size, home.large)
        else:
            table_drop(&self.hole_ends, address + <uint64_t>room)
            if home.blocks > 1 and not home.expandable:
                changes_add(&self.splits, event, -1, -room, home.large)
        self._become(node, LIVE)
        self.nodes[node].size = size
        self.nodes[node].block = <int32_t>log.count
        log.address[log.count] = address
        log.size[log.count] = size
        log.requested[log.count] = requested
        log.born[log.count] = event
        log.freed[log.count] = self.still
        log.died[log.count] = self.still
        log.owner[log.count] = owner
        log.stack[log.count] = self.events.stack[event]
        log.stream[log.count] = self.events.stream[event]
        log.count += 1
        return 0

    cdef inline int _requested(self, int32_t event) except -1 nogil:
        cdef int32_t node = self._at(self.events.addr[event], LIVE)
        if node == NONE:
            with gil:
                refuse(event, "a block is freed that is not in use")
        self._become(node, PENDING)
        self.blocks.freed[self.nodes[node].block] = event
        return 0

    cdef inline int _completed(self, int32_t event, bint at_once) except -1 nogil:
        cdef uint64_t address = self.events.addr[event]
        cdef int32_t node = self._at(address, LIVE if at_once else PENDING), block, owner, before, behind
        cdef int64_t merged_bytes = 0
        cdef int merged = 0
        cdef Owner* home
        if node == NONE:
            with gil:
                refuse(event, "a free completes that was not requested")
        block, owner = self.nodes[node].block, self.nodes[node].owner
        if at_once:
            self.blocks.freed[block] = event
        self.blocks.died[block] = event
        home = &self.owners[owner]
        before = self._hole_ending(address, owner)
        behind = self._hole_at(self._end(node), owner)
        if before != NONE:
            merged, merged_bytes = 1, self.nodes[before].size
            table_drop(&self.hole_ends, address)
            self.nodes[before].size += self.nodes[node].size
            self._discard(node)
            node = before
        else:
            self._become(node, HOLE)
            self.nodes[node].block = NONE
        if behind != NONE:
            merged += 1
            merged_bytes += self.nodes[behind].size
            self.nodes[node].size += self.nodes[behind].size
            self._discard(behind)
        table_put(&self.hole_ends, self._end(node), node)
        home.blocks -= merged
        if not home.expandable:
            if home.blocks > 1:
                changes_add(&self.splits, event, 1 - merged, self.nodes[node].size - merged_bytes, home.large)
            elif merged:
                changes_add(&self.splits, event, -merged, -merged_bytes, home.large)
        return 0

    cdef int _segment_alloc(self, int32_t event) except -1 nogil:
        cdef Range item = event_range(self.events, event, False)
        cdef int32_t row
        if item.size <= 0 or not ranges_are_clear(&self.ranges, item.start, item.size):
            with gil:
                refuse(event, "a segment is made where another one lies")
        if item.pool == UNKNOWN_POOL:
            row = table_find(&self.segment_rows, item.start)
            if row != NONE:
                item.pool = self.segment_pools[row]
        item.owner = self._new_owner(&item)
        item.span = spans_add(&self.spans, &item, event, self.still)
        self.owners[item.owner].span = item.span
        self.owners[item.owner].blocks = 1
        ranges_add(&self.ranges, item)
        self._add_hole(item.start, item.size, item.owner)
        changes_add(&self.segments, event, 1, item.size, item.large)
        return 0

    cdef int _segment_free(self, int32_t event) except -1 nogil:
        cdef int64_t size = self.events.size[event]
        cdef int32_t number = ranges_at(&self.ranges, self.events.addr[event]), node = NONE
        cdef Range item = self.ranges.items[number] if number != NONE else event_range(self.events, event, False)
        if number != NONE:
            node = self._hole_at(item.start, item.owner)
        if node == NONE or item.size != size or self.nodes[node].size != size:
            with gil:
                refuse(event, "a segment is released that is not there or not free")
        self._drop_hole(node)
        ranges_remove(&self.ranges, number)
        self.spans.rows[item.span].died = event
        changes_add(&self.segments, event, -1, -size, item.large)
        return 0

    cdef int _segment_map(self, int32_t event) except -1 nogil:
        cdef Range item = event_range(self.events, event, True)
        cdef int32_t joined[2]
        cdef int32_t number, before, behind
        cdef uint64_t first = item.start, last = item.start + <uint64_t>item.size
        cdef int count = 0, index
        if item.size <= 0 or not ranges_are_clear(&self.ranges, item.start, item.size):
            with gil:
                refuse(event, "pages are mapped where memory is already mapped")
        self._own(&item)
        number = ranges_add_mapped(&self.ranges, item, joined, &count)
        for index in range(count):
            self.spans.rows[joined[index]].died = event
        self.ranges.items[number].span = spans_add(&self.spans, &self.ranges.items[number], event, self.still)
        before = self._hole_ending(first, item.owner)
        if before != NONE:
            first = self.nodes[before].address
            self._drop_hole(before)
        behind = self._hole_at(last, item.owner)
        if behind != NONE:
            last = self._end(behind)
            self._drop_hole(behind)
        self._add_hole(first, <int64_t>(last - first), item.owner)
        changes_add(&self.segments, event, 0, item.size, item.large)
        return 0

    cdef int _segment_unmap(self, int32_t event) except -1 nogil:
        cdef uint64_t address = self.events.addr[event], start, end
        cdef int64_t size = self.events.size[event]
        cdef int32_t number = ranges_containing(&self.ranges, address), node = NONE, owner
        cdef int32_t rest[2]
        cdef Range item
        cdef int count, index
        if number != NONE and self.ranges.items[number].expandable and size > 0:
            node = self._hole_containing(event, address)
        if node == NONE or self._end(node) < address + <uint64_t>size:
            with gil:
                refuse(event, "pages are unmapped that are not free")
        start, end, owner = self.nodes[node].address, self._end(node), self.nodes[node].owner
        self._drop_hole(node)
        if address > start:
            self._add_hole(start, <int64_t>(address - start), owner)
        if address + <uint64_t>size < end:
            self._add_hole(address + <uint64_t>size, <int64_t>(end - address - <uint64_t>size), owner)
        item = self.ranges.items[number]
        self.spans.rows[item.span].died = event
        count = ranges_cut(&self.ranges, number, address, size, rest)
        for index in range(count):
            self.ranges.items[rest[index]].span = spans_add(&self.spans, &self.ranges.items[rest[index]], event, self.still)
        changes_add(&self.segments, event, 0, -size, item.large)
        return 0

    # what the rules do not explain

    cdef int32_t _hole_containing(self, int32_t event, uint64_t address) except -2 nogil:
        """exact._free_start: the hole that holds an address, or NONE."""
        cdef int32_t node = self._at(address, HOLE)
        if node == NONE:
            node = self._nearest_below(event, HOLE, address)
            if node != NONE and address >= self._end(node):
                return NONE
        return node

    cdef int32_t _nearest_below(self, int32_t event, int kind, uint64_t address) except -2 nogil:
        """The last node of a kind that starts below an address, or NONE."""
        cdef int32_t found = NONE, node
        cdef Py_ssize_t index
        self.searched += self.lengths[kind]
        if self.searched > SEARCH_BUDGET:
            with gil:
                refuse(event, "too many events do not fit the allocator's rules")
        for index in range(self.lengths[kind]):
            node = self.lists[kind][index]
            if self.nodes[node].address < address:
                if found == NONE or self.nodes[node].address > self.nodes[found].address:
                    found = node
        return found

    cdef int64_t _by_default_rounding(self, int32_t event, int64_t room, int32_t owner, int32_t row) except -1 nogil:
        cdef int64_t plain = plain_size(self.events.size[event]), rest = room - plain
        if row != NONE and plain <= self.forced_sizes[row] <= room:
            return self.forced_sizes[row]
        if rest < 0:
            with gil:
                refuse(event, "an allocation is larger than the free block at its place")
        if rest == 0 or (not self.owners[owner].fine and rest <= LARGE_REMAINDER):
            plain = room
        self._force(event, plain)
        return plain

    cdef int32_t _repair(self, int32_t event, uint64_t address) except -2 nogil:
        cdef int32_t node = self._hole_in_slack(event, address)
        if node == NONE:
            node = self._hole_behind_larger(event, address)
        if node == NONE:
            with gil:
                refuse(event, "an allocation does not start where a free block starts")
        return node

    cdef int32_t _hole_in_slack(self, int32_t event, uint64_t address) except -2 nogil:
        cdef int kind
        cdef int32_t node, owner, behind, block
        cdef uint64_t start, end
        cdef int64_t born
        for kind in range(LIVE, PENDING + 1):
            node = self._nearest_below(event, kind, address)
            if node == NONE:
                continue
            start, end, block = self.nodes[node].address, self._end(node), self.nodes[node].block
            born = self.blocks.born[block]
            if address >= end or born == BEFORE:
                continue
            if <uint64_t>plain_size(self.events.size[born]) > address - start:
                continue
            owner = self.nodes[node].owner
            self._resize(node, <int64_t>(address - start))
            self.owners[owner].blocks += 1
            behind = self._hole_at(end, owner)
            if behind != NONE:
                end = self._end(behind)
                self._drop_hole(behind)
                self.owners[owner].blocks -= 1
            self._add_hole(address, <int64_t>(end - address), owner)
            return self._at(address, HOLE)
        return NONE

    cdef int32_t _hole_behind_larger(self, int32_t event, uint64_t address) except -2 nogil:
        cdef int32_t hole = self._hole_containing(event, address), node, owner
        cdef uint64_t start, end
        cdef int kind
        if hole == NONE:
            return NONE
        start, end, owner = self.nodes[hole].address, self._end(hole), self.nodes[hole].owner
        for kind in range(LIVE, PENDING + 1):
            node = self._nearest_below(event, kind, start)
            if node == NONE or self._end(node) != start or self.nodes[node].owner != owner:
                continue
            if self.blocks.born[self.nodes[node].block] == BEFORE:
                continue
            self._resize(node, <int64_t>(address - self.nodes[node].address))
            self._drop_hole(hole)
            self._add_hole(address, <int64_t>(end - address), owner)
            return self._at(address, HOLE)
        return NONE

    cdef int _resize(self, int32_t node, int64_t size) except -1 nogil:
        """A block turns out to have another size: from now on, and in the next pass."""
        cdef int32_t block = self.nodes[node].block
        self._force(self.blocks.born[block], size)
        self.revised += 1
        self.blocks.size[block] = size
        self.nodes[node].size = size
        return 0

    # what is handed out

    cdef tuple result(self):
        cdef BlockLog* log = &self.blocks
        cdef Py_ssize_t row, in_use = self.lengths[LIVE] + self.lengths[PENDING]
        cdef int32_t* last = <int32_t*>resized(NULL, in_use, sizeof(int32_t))
        cdef uint8_t* large = <uint8_t*>resized(NULL, self.owner_count, sizeof(uint8_t))
        cdef int32_t* span = <int32_t*>resized(NULL, self.owner_count, sizeof(int32_t))
        for row in range(self.lengths[LIVE]):
            last[row] = self.nodes[self.lists[LIVE][row]].block
        for row in range(self.lengths[PENDING]):
            last[self.lengths[LIVE] + row] = self.nodes[self.lists[PENDING][row]].block
        for row in range(self.owner_count):
            large[row], span[row] = self.owners[row].large, self.owners[row].span
        return (
            blocks_columns(log),
            handed_out(<void**>&self.spans.rows, self.spans.count, sizeof(Span)),
            changes_columns(&self.splits),
            changes_columns(&self.segments),
            handed_out(<void**>&large, self.owner_count, sizeof(uint8_t)),
            handed_out(<void**>&span, self.owner_count, sizeof(int32_t)),
            ranges_column(&self.ranges),
            handed_out(<void**>&last, in_use, sizeof(int32_t)),
            self.lengths[LIVE],
            self.revised,
        )

    cdef dict forced(self):
        """Event -> size of every block whose size is not by the rules."""
        cdef size_t slot
        found = {}
        for slot in range(self.forced_rows.mask + 1):
            if self.forced_rows.slots[slot].value != NONE:
                found[self.forced_rows.slots[slot].key] = self.forced_sizes[self.forced_rows.slots[slot].value]
        return found


def forward(events, start, private, dict forced, seed):
    """One pass over the events from `start`; sizes that a changed rule explains are added to `forced`.

    Gives the columns that `kernel.forward_pass` makes a Run of. Raises ContradictionError.
    """
    cdef _Forwards walk = _Forwards(events, private, forced, seed)
    cdef const uint8_t[::1] ranges = start.ranges.view("u1"), blocks = start.blocks.view("u1")
    cdef Py_ssize_t range_count = ranges.shape[0] // sizeof(MapRange), count = blocks.shape[0] // sizeof(MapBlock)
    cdef const MapRange* first_range = <const MapRange*>&ranges[0] if range_count else NULL
    cdef const MapBlock* first_block = <const MapBlock*>&blocks[0] if count else NULL
    with nogil:
        walk.place(first_range, range_count, first_block, count)
        walk.loop()
    forced.update(walk.forced())
    return walk.result()
