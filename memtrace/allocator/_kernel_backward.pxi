# ---- the state before the first event

cdef struct Held:  # a block or a hole, while walking back
    uint64_t address
    int64_t size
    int64_t requested
    int64_t slack_bound
    int32_t stack
    int32_t range  # number of the range that a hole lies in
    uint8_t kind


@cython.final
cdef class _Backwards:
    """initial._Backwards. Blocks and holes are nodes; holes stand in `holes` by address, too."""

    cdef _Columns events
    cdef Rules rules
    cdef object page_uses
    cdef object pages
    cdef Held* nodes
    cdef int32_t* idle
    cdef Py_ssize_t idles
    cdef Py_ssize_t node_count
    cdef Py_ssize_t node_room
    cdef Py_ssize_t block_count
    cdef Table starts  # address -> node
    cdef Table block_ends  # end of a block -> node
    cdef Table groups  # expandable (large, stream) -> owner
    cdef Table unsplit
    cdef Order holes
    cdef RangeSet ranges
    cdef int32_t owners
    cdef int64_t rehomed

    def __cinit__(self, events, private, page_uses, seed):
        """`page_uses` makes an initial._PageUses when one is needed."""
        self.events = _Columns(events)
        self.rules = rules_of(events.settings)
        self.page_uses = page_uses
        table_start(&self.starts, 1024, seed)
        table_start(&self.block_ends, 1024, seed)
        table_start(&self.groups, 64, seed)
        table_start(&self.unsplit, 64, seed)
        for pool in private.unsplit:
            table_put(&self.unsplit, <uint64_t>pool, 0)

    def __dealloc__(self):
        free(self.nodes)
        free(self.idle)
        free(self.starts.slots)
        free(self.block_ends.slots)
        free(self.groups.slots)
        free(self.unsplit.slots)
        order_end(&self.holes)
        ranges_end(&self.ranges)

    # nodes

    cdef int32_t _node(self, uint64_t address, int64_t size, uint8_t kind) except -2 nogil:
        cdef int32_t node
        cdef Py_ssize_t room
        if self.idles == 0 and self.node_count == self.node_room:
            room = 2 * self.node_room + 256
            if room > INT32_MAX:
                no_memory()
            self.nodes = <Held*>resized(self.nodes, room, sizeof(Held))
            self.idle = <int32_t*>resized(self.idle, room, sizeof(int32_t))
            self.node_room = room
        if self.idles:
            self.idles -= 1
            node = self.idle[self.idles]
        else:
            node = <int32_t>self.node_count
            self.node_count += 1
        self.nodes[node].address = address
        self.nodes[node].size = size
        self.nodes[node].kind = kind
        table_put(&self.starts, address, node)
        return node

    cdef void _discard(self, int32_t node) noexcept nogil:
        table_drop(&self.starts, self.nodes[node].address)
        self.nodes[node].kind = UNUSED
        self.idle[self.idles] = node
        self.idles += 1

    cdef inline uint64_t _end(self, int32_t node) noexcept nogil:
        return self.nodes[node].address + <uint64_t>self.nodes[node].size

    cdef int _add_hole(self, uint64_t address, int64_t size, int32_t home) except -1 nogil:
        cdef int32_t node = self._node(address, size, HOLE)
        self.nodes[node].range = home
        order_put(&self.holes, address, node)
        return 0

    cdef void _drop_hole(self, int32_t node) noexcept nogil:
        order_drop(&self.holes, self.nodes[node].address)
        self._discard(node)

    cdef inline int32_t _hole_at(self, uint64_t address) noexcept nogil:
        cdef int32_t node = table_find(&self.starts, address)
        return node if node != NONE and self.nodes[node].kind == HOLE else NONE

    cdef int32_t _add_block(self, const MapBlock* block) except -2 nogil:
        cdef int32_t node = self._node(block.address, block.size, PENDING if block.pending else LIVE)
        self.nodes[node].requested = block.requested
        self.nodes[node].slack_bound = block.slack_bound
        self.nodes[node].stack = block.stack
        table_put(&self.block_ends, self._end(node), node)
        self.block_count += 1
        return node

    cdef void _drop_block(self, int32_t node) noexcept nogil:
        table_drop(&self.block_ends, self._end(node))
        self._discard(node)
        self.block_count -= 1

    # the final map

    cdef int place(self, const MapRange* ranges, Py_ssize_t range_count, const MapBlock* blocks, Py_ssize_t count) except -1 nogil:
        cdef Py_ssize_t row, block = 0
        cdef Range item
        cdef int32_t number
        cdef uint64_t cursor, key
        for row in range(range_count):
            item = range_of(&ranges[row])
            self._own(&item)
            number = ranges_add(&self.ranges, item)
            cursor = item.start
            while block < count and blocks[block].address < end_of(&item):
                if blocks[block].address > cursor:
                    self._add_hole(cursor, <int64_t>(blocks[block].address - cursor), number)
                cursor = blocks[block].address + <uint64_t>blocks[block].size
                self._add_block(&blocks[block])
                block += 1
            if cursor < end_of(&item):
                self._add_hole(cursor, <int64_t>(end_of(&item) - cursor), number)
        return 0

    cdef int _own(self, Range* item) except -1 nogil:
        cdef uint64_t key = group_of(item.large, item.stream)
        if item.expandable:
            item.owner = table_find(&self.groups, key)
            if item.owner != NONE:
                return 0
            table_put(&self.groups, key, self.owners)
        item.owner = self.owners
        self.owners += 1
        return 0

    # events, from the last to the first

    cdef int loop(self) except -1 nogil:
        cdef Py_ssize_t event
        cdef uint8_t action
        for event in range(self.events.count - 1, -1, -1):
            action = self.events.action[event]
            if action == ALLOC:
                self._undo_alloc(event)
            elif action == FREE_COMPLETED:
                self._undo_completed(event, PENDING)
            elif action == FREE_REQUESTED:
                self._undo_requested(event)
            elif action == FREE:
                self._undo_completed(event, LIVE)
            elif action == SEGMENT_ALLOC:
                self._undo_segment_alloc(event)
            elif action == SEGMENT_FREE:
                self._undo_segment_free(event)
            elif action == SEGMENT_MAP:
                self._undo_map(event)
            elif action == SEGMENT_UNMAP:
                self._undo_unmap(event)
        return 0

    cdef int _undo_requested(self, Py_ssize_t event) except -1 nogil:
        cdef int32_t node = table_find(&self.starts, self.events.addr[event])
        if node == NONE or self.nodes[node].kind != PENDING:
            with gil:
                refuse(event, "a block was freed that is not pending afterwards")
        self.nodes[node].kind = LIVE
        return 0

    cdef int _undo_alloc(self, Py_ssize_t event) except -1 nogil:
        cdef uint64_t address = self.events.addr[event], end
        cdef int32_t node = table_find(&self.starts, address), home, behind
        cdef int64_t size
        if node == NONE or self.nodes[node].kind != LIVE:
            with gil:
                refuse(event, "an allocation is not in use afterwards")
        home = ranges_containing(&self.ranges, address)
        if home == NONE:
            with gil:
                refuse(event, "an allocation lies in no segment")
        size, end = self.nodes[node].size, self._end(node)
        self._drop_block(node)
        behind = self._hole_at(end)
        if behind != NONE and end < end_of(&self.ranges.items[home]):
            size += self.nodes[behind].size
            self._drop_hole(behind)
        self._add_hole(address, size, home)
        return 0

    cdef int _undo_completed(self, Py_ssize_t event, uint8_t kind) except -1 nogil:
        cdef uint64_t address = self.events.addr[event], start
        cdef int32_t hole = self._hole_containing(event, address), home = self.nodes[hole].range, before = NONE
        cdef int64_t available = <int64_t>(self._end(hole) - address), front
        cdef Range item = self.ranges.items[home]
        cdef MapBlock block
        start = self.nodes[hole].address
        front = <int64_t>(address - start)
        self._size_of(event, available, &item, front == 0 and self.nodes[hole].size == item.size, &block)
        self._drop_hole(hole)
        if front:
            if start > item.start:
                before = table_find(&self.block_ends, start)
            if before != NONE and front <= self.nodes[before].slack_bound:
                table_drop(&self.block_ends, start)
                self.nodes[before].size += front
                self.nodes[before].slack_bound = 0
                table_put(&self.block_ends, address, before)
            else:
                self._add_hole(start, front, home)
        block.address, block.requested, block.stack = address, self.events.size[event], NOT_RECORDED
        block.pending = kind == PENDING
        self._add_block(&block)
        if block.size < available:
            self._add_hole(address + <uint64_t>block.size, available - block.size, home)
        return 0

    cdef int _size_of(self, Py_ssize_t event, int64_t available, const Range* item, bint is_whole, MapBlock* block) except -1 nogil:
        """Sets size and slack bound of a freed block with `available` bytes to the next block."""
        cdef int64_t rounded = rounded_size(&self.rules, self.events.size[event]), rest
        if rounded > available:
            rounded = plain_size(self.events.size[event])
        if rounded > available:
            with gil:
                refuse(event, "a freed block is larger than the free space at its place")
        rest = available - rounded
        block.size, block.slack_bound = available, 0
        if is_whole and table_find(&self.unsplit, <uint64_t><int64_t>item.pool) != NONE:
            return 0
        if splits_finely(item, &self.rules):
            block.size = rounded
        elif rest > LARGE_REMAINDER:
            if rounded < self.rules.max_split_size:
                block.size, block.slack_bound = rounded, LARGE_REMAINDER
            elif not is_whole:
                block.size, block.slack_bound = rounded, min(rest, <int64_t>LARGE_PAGE)
        return 0

    cdef int _undo_segment_alloc(self, Py_ssize_t event) except -1 nogil:
        cdef uint64_t start = self.events.addr[event]
        cdef int32_t number = ranges_at(&self.ranges, start), hole
        if number == NONE or self.ranges.items[number].expandable or (
            self.ranges.items[number].size != self.events.size[event]
        ):
            with gil:
                refuse(event, "a segment is not there after it was made")
        hole = self._hole_at(start)
        if hole == NONE or self.nodes[hole].size != self.ranges.items[number].size:
            with gil:
                refuse(event, "a segment holds blocks before it was made")
        self._drop_hole(hole)
        ranges_remove(&self.ranges, number)
        return 0

    cdef int _undo_segment_free(self, Py_ssize_t event) except -1 nogil:
        cdef Range item = event_range(self.events, event, False)
        if item.size <= 0 or not ranges_are_clear(&self.ranges, item.start, item.size):
            with gil:
                refuse(event, "a segment was released where another one lies")
        item.stack = NOT_RECORDED
        self._own(&item)
        self._add_hole(item.start, item.size, ranges_add(&self.ranges, item))
        return 0

    cdef int _undo_map(self, Py_ssize_t event) except -1 nogil:
        cdef uint64_t address = self.events.addr[event], start, end
        cdef int64_t size = self.events.size[event]
        cdef int32_t hole = self._hole_containing(event, address), home = self.nodes[hole].range
        cdef int32_t rest[2]
        cdef int count, index
        start, end = self.nodes[hole].address, self._end(hole)
        if not self.ranges.items[home].expandable or size <= 0 or address + <uint64_t>size > end:
            with gil:
                refuse(event, "mapped pages are not free right after they were mapped")
        self._drop_hole(hole)
        count = ranges_cut(&self.ranges, home, address, size, rest)
        for index in range(count):
            self._rehome(event, rest[index])
        if address > start:
            self._add_hole(start, <int64_t>(address - start), ranges_containing(&self.ranges, start))
        address += <uint64_t>size
        if address < end:
            self._add_hole(address, <int64_t>(end - address), ranges_containing(&self.ranges, address))
        return 0

    cdef int _undo_unmap(self, Py_ssize_t event) except -1 nogil:
        cdef Range item = event_range(self.events, event, True)
        cdef uint64_t first = item.start, last = item.start + <uint64_t>item.size
        cdef int32_t joined[2]
        cdef int32_t number, before, behind
        cdef int count = 0
        if item.size <= 0 or not ranges_are_clear(&self.ranges, item.start, item.size):
            with gil:
                refuse(event, "pages were unmapped where memory is still mapped")
        item.large = self._pool_of_pages(event)
        item.stack = NOT_RECORDED
        self._own(&item)
        number = ranges_add_mapped(&self.ranges, item, joined, &count)
        if count:
            self._rehome(event, number)
        before = self._hole_ending(first, self.ranges.items[number].start)
        if before != NONE:
            first = self.nodes[before].address
            self._drop_hole(before)
        behind = self._hole_at(last)
        if behind != NONE and last < end_of(&self.ranges.items[number]):
            last = self._end(behind)
            self._drop_hole(behind)
        self._add_hole(first, <int64_t>(last - first), number)
        return 0

    cdef int _pool_of_pages(self, Py_ssize_t event) except -1 nogil:
        """Whether unmapped pages were the large pool's: by what touches them, else by what last used that place."""
        cdef uint64_t start = self.events.addr[event], stream = self.events.stream[event]
        cdef int64_t size = self.events.size[event]
        cdef int32_t touching[2]
        cdef int index
        cdef bint large
        touching[0] = ranges_at(&self.ranges, start + <uint64_t>size)
        touching[1] = ranges_containing(&self.ranges, start - 1) if start else NONE
        for index in range(2):
            if touching[index] != NONE and self.ranges.items[touching[index]].expandable:
                if self.ranges.items[touching[index]].stream == stream:
                    return self.ranges.items[touching[index]].large
        with gil:
            if self.pages is None:
                self.pages = self.page_uses()
            known = self.pages.large_before(event, start, start + <uint64_t>size)
            large = size % self.rules.large_page == 0 if known is None else known
        return large

    cdef int32_t _hole_containing(self, Py_ssize_t event, uint64_t address) except -2 nogil:
        cdef int32_t node = self._hole_at(address)
        if node == NONE:
            node = order_at_most(&self.holes, address)
        if node == NONE or address >= self._end(node):
            with gil:
                refuse(event, "memory that was freed or mapped is in use right afterwards")
        return node

    cdef int32_t _hole_ending(self, uint64_t end, uint64_t lowest) noexcept nogil:
        """The hole that ends there and does not start below `lowest`, or NONE; end > 0."""
        cdef int32_t node = order_at_most(&self.holes, end - 1) if end else NONE
        if node != NONE and self.nodes[node].address >= lowest and self._end(node) == end:
            return node
        return NONE

    cdef int _rehome(self, Py_ssize_t event, int32_t number) except -1 nogil:
        """Points the holes inside a range that was cut or joined at the new range."""
        cdef uint64_t start = self.ranges.items[number].start, end = end_of(&self.ranges.items[number])
        cdef Place place
        if start:
            place = order_next(&self.holes, order_floor(&self.holes, start - 1))
        else:
            place.chunk = place.index = 0
        while place.chunk < self.holes.count and order_key(&self.holes, place) < end:
            self.rehomed += 1
            if self.rehomed > REHOME_BUDGET:
                with gil:
                    refuse(event, "more pages are mapped and unmapped than can be followed")
            self.nodes[order_value(&self.holes, place)].range = number
            place = order_next(&self.holes, place)
        return 0

    cdef tuple result(self):
        """Ranges in order of address, and blocks in any."""
        cdef Py_ssize_t node, row = 0
        cdef MapBlock* rows = <MapBlock*>resized(NULL, self.block_count, sizeof(MapBlock))
        cdef void* data = rows
        cdef Held* held
        memset(rows, 0, self.block_count * sizeof(MapBlock))
        for node in range(self.node_count):
            held = &self.nodes[node]
            if held.kind <= PENDING and row < self.block_count:
                rows[row].address, rows[row].size, rows[row].requested = held.address, held.size, held.requested
                rows[row].slack_bound, rows[row].stack = held.slack_bound, held.stack
                rows[row].pending = held.kind == PENDING
                row += 1
        return ranges_column(&self.ranges), handed_out(&data, row, sizeof(MapBlock))


def backward(events, at_end, private, page_uses, seed):
    """The map before the first event, as columns of rows: (ranges by address, blocks). Raises ContradictionError."""
    cdef _Backwards walk = _Backwards(events, private, page_uses, seed)
    cdef const uint8_t[::1] ranges = at_end.ranges.view("u1"), blocks = at_end.blocks.view("u1")
    cdef Py_ssize_t range_count = ranges.shape[0] // sizeof(MapRange), count = blocks.shape[0] // sizeof(MapBlock)
    cdef const MapRange* first_range = <const MapRange*>&ranges[0] if range_count else NULL
    cdef const MapBlock* first_block = <const MapBlock*>&blocks[0] if count else NULL
    with nogil:
        walk.place(first_range, range_count, first_block, count)
        walk.loop()
    return walk.result()
