# ---- what a trace alone supports

cdef enum:  # numbers of the reasons in tolerant.py, as `kernel` lists them
    NOT_IN_USE = 0
    NOT_SEEN_ALLOCATED = 1
    STILL_IN_USE = 2
    SEGMENT_IN_THE_WAY = 3
    SEGMENT_NOT_THERE = 4


cdef struct Use:  # an interval that became free
    uint64_t end
    int32_t event


@cython.final
cdef class _Alone:
    """tolerant._Walk. A block in use is live until it has its `freed`."""

    cdef _Columns events
    cdef Rules rules
    cdef int32_t still
    cdef BlockLog blocks
    cdef ChangeLog segments
    cdef SpanLog spans
    cdef uint8_t* large_of_block
    cdef int32_t* span_of_block
    cdef int32_t* conflict_event
    cdef uint8_t* conflict_reason
    cdef Py_ssize_t conflict_count
    cdef Py_ssize_t conflict_room
    cdef Table starts  # address -> block in use
    cdef Order in_use  # the same in order
    cdef Table groups
    cdef int32_t group_count
    cdef RangeSet ranges
    cdef RangeSet made  # before the pass: to tell which segments are from `before`
    cdef RangeSet before
    cdef Order uses  # start -> row of `use`
    cdef Use* use
    cdef int32_t* idle  # rows of `use` that are not in use
    cdef Py_ssize_t use_count
    cdef Py_ssize_t use_room
    cdef Py_ssize_t idles

    def __cinit__(self, events, seed):
        self.events = _Columns(events)
        self.rules = rules_of(events.settings)
        self.still = <int32_t>self.events.count
        table_start(&self.starts, 1024, seed)
        table_start(&self.groups, 64, seed)

    def __dealloc__(self):
        blocks_end(&self.blocks)
        changes_end(&self.segments)
        free(self.spans.rows)
        free(self.large_of_block)
        free(self.span_of_block)
        free(self.conflict_event)
        free(self.conflict_reason)
        free(self.starts.slots)
        free(self.groups.slots)
        free(self.use)
        free(self.idle)
        order_end(&self.in_use)
        order_end(&self.uses)
        ranges_end(&self.ranges)
        ranges_end(&self.made)
        ranges_end(&self.before)

    cdef int place(self) except -1 nogil:
        """Segments from before the recording, and room for what is to come."""
        cdef Py_ssize_t event, births = 0
        cdef uint8_t action
        cdef Place place
        for event in range(self.events.count):
            action = self.events.action[event]
            births += action <= FREE_COMPLETED or action == FREE
        blocks_reserve(&self.blocks, births)
        self.large_of_block = <uint8_t*>resized(NULL, births, sizeof(uint8_t))
        self.span_of_block = <int32_t*>resized(NULL, births, sizeof(int32_t))
        self._find_ranges_before()
        place.chunk = place.index = 0
        while place.chunk < self.before.order.count:
            self._add_range(&self.before.items[order_value(&self.before.order, place)], BEFORE)
            place = order_next(&self.before.order, place)
        return 0

    cdef int _find_ranges_before(self) except -1 nogil:
        """tolerant._ranges_before: segments that are released without having been made go to `before`."""
        cdef Py_ssize_t event
        cdef Range item
        cdef int32_t inside
        cdef int32_t rest[2]
        cdef uint8_t action
        for event in range(self.events.count):
            action = self.events.action[event]
            if action < SEGMENT_ALLOC or action > SEGMENT_UNMAP or self.events.size[event] <= 0:
                continue
            item = event_range(self.events, event, action == SEGMENT_MAP or action == SEGMENT_UNMAP)
            if action == SEGMENT_ALLOC or action == SEGMENT_MAP:
                if ranges_are_clear(&self.made, item.start, item.size):
                    ranges_add(&self.made, item)
                continue
            item.stack = NOT_RECORDED
            inside = ranges_containing(&self.made, item.start)
            if inside != NONE and end_of(&item) <= end_of(&self.made.items[inside]):
                ranges_cut(&self.made, inside, item.start, item.size, rest)
            elif ranges_are_clear(&self.made, item.start, item.size):
                if ranges_are_clear(&self.before, item.start, item.size):
                    ranges_add(&self.before, item)
        return 0

    cdef int loop(self) except -1 nogil:
        cdef int32_t event
        cdef uint8_t action
        for event in range(self.still):
            action = self.events.action[event]
            if action == ALLOC:
                self._end_overlapped(event, self.events.addr[event], rounded_size(&self.rules, self.events.size[event]))
                self._begin(event, event, self.events.stack[event])
            elif action == FREE_REQUESTED:
                self._requested(event)
            elif action == FREE_COMPLETED or action == FREE:
                self._completed(event)
            elif action == SEGMENT_ALLOC or action == SEGMENT_MAP:
                self._make_range(event, action == SEGMENT_MAP)
            elif action == SEGMENT_FREE or action == SEGMENT_UNMAP:
                self._drop_range(event)
        return 0

    cdef int _conflict(self, int32_t event, uint8_t reason) except -1 nogil:
        cdef Py_ssize_t room
        if self.conflict_count == self.conflict_room:
            room = 2 * self.conflict_room + 64
            self.conflict_event = <int32_t*>resized(self.conflict_event, room, sizeof(int32_t))
            self.conflict_reason = <uint8_t*>resized(self.conflict_reason, room, sizeof(uint8_t))
            self.conflict_room = room
        self.conflict_event[self.conflict_count] = event
        self.conflict_reason[self.conflict_count] = reason
        self.conflict_count += 1
        return 0

    # blocks

    cdef inline bint _is_live(self, int32_t block) noexcept nogil:
        return self.blocks.freed[block] == self.still

    cdef inline uint64_t _end_of(self, int32_t block) noexcept nogil:
        return self.blocks.address[block] + <uint64_t>self.blocks.size[block]

    cdef int _requested(self, int32_t event) except -1 nogil:
        cdef int32_t block = table_find(&self.starts, self.events.addr[event])
        if block == NONE or not self._is_live(block):
            block = self._from_before(event)
        if block != NONE:
            self.blocks.freed[block] = event
        return 0

    cdef int _completed(self, int32_t event) except -1 nogil:
        cdef int32_t block = table_find(&self.starts, self.events.addr[event])
        if block == NONE:
            block = self._from_before(event)
            if block == NONE:
                return 0
        if self._is_live(block):
            self.blocks.freed[block] = event
        self._end(event, block)
        return 0

    cdef int32_t _from_before(self, int32_t event) except -2 nogil:
        cdef uint64_t start = self.events.addr[event]
        cdef uint64_t end = start + <uint64_t>rounded_size(&self.rules, self.events.size[event])
        cdef int32_t last = order_at_most(&self.in_use, end - 1), born
        if last != NONE and self._end_of(last) > start:
            self._conflict(event, NOT_IN_USE)
            return NONE
        born = self._latest(start, end)
        if born > BEFORE:
            self._conflict(event, NOT_SEEN_ALLOCATED)
        return self._begin(event, born, NOT_RECORDED)

    cdef int32_t _begin(self, int32_t event, int32_t born, int32_t stack) except -2 nogil:
        cdef BlockLog* log = &self.blocks
        cdef int32_t block = <int32_t>log.count, home, span
        cdef Range item
        item.start, item.size = self.events.addr[event], rounded_size(&self.rules, self.events.size[event])
        item.large = item.size > SMALL_REQUEST
        home = ranges_containing(&self.ranges, item.start)
        if home != NONE and end_of(&item) <= end_of(&self.ranges.items[home]):
            span = NONE if self.ranges.items[home].expandable else self.ranges.items[home].span
            item.large = self.ranges.items[home].large
        else:
            item.stream, item.pool, item.stack = self.events.stream[event], self.events.pool_of(event), NOT_RECORDED
            item.expandable = False
            span = spans_add(&self.spans, &item, born, self.still)
            changes_add(&self.segments, born, 0, item.size, item.large)
        log.address[block] = item.start
        log.size[block] = item.size
        log.requested[block] = self.events.size[event]
        log.born[block] = born
        log.freed[block] = self.still
        log.died[block] = self.still
        log.owner[block] = block
        log.stack[block] = stack
        log.stream[block] = self.events.stream[event]
        log.count += 1
        self.span_of_block[block] = span
        self.large_of_block[block] = item.large
        table_put(&self.starts, item.start, block)
        order_put(&self.in_use, item.start, block)
        return block

    cdef int _end(self, int32_t event, int32_t block) except -1 nogil:
        cdef uint64_t start = self.blocks.address[block]
        cdef int32_t span = self.span_of_block[block], home
        table_drop(&self.starts, start)
        order_drop(&self.in_use, start)
        self.blocks.died[block] = event
        self._mark(start, self._end_of(block), event)
        if span == NONE or self.spans.rows[span].died != self.still:
            return 0
        home = ranges_containing(&self.ranges, start)
        if home == NONE or self.ranges.items[home].span != span:
            self.spans.rows[span].died = event
            changes_add(&self.segments, event, 0, -self.spans.rows[span].size, self.spans.rows[span].large)
        return 0

    cdef int _end_overlapped(self, int32_t event, uint64_t start, int64_t size) except -1 nogil:
        """Ends the blocks in use that touch [start, start + size), in order of address."""
        cdef uint64_t end = start + <uint64_t>size
        cdef Place place = order_floor(&self.in_use, start)
        cdef int32_t block
        if place.index < 0 or self._end_of(order_value(&self.in_use, place)) <= start:
            place = order_next(&self.in_use, place)
        while place.chunk < self.in_use.count and order_key(&self.in_use, place) < end:
            block = order_value(&self.in_use, place)
            self._conflict(event, STILL_IN_USE)
            if self._is_live(block):
                self.blocks.freed[block] = event
            self._end(event, block)
            place = order_next(&self.in_use, order_floor(&self.in_use, self.blocks.address[block]))
        return 0

    # memory taken from the driver

    cdef int _make_range(self, int32_t event, bint expandable) except -1 nogil:
        cdef Range item = event_range(self.events, event, expandable)
        if item.size <= 0 or not ranges_are_clear(&self.ranges, item.start, item.size):
            return self._conflict(event, SEGMENT_IN_THE_WAY)
        self._end_overlapped(event, item.start, item.size)
        return self._add_range(&item, event)

    cdef int _add_range(self, Range* item, int32_t event) except -1 nogil:
        cdef uint64_t key = group_of(item.large, item.stream)
        cdef int32_t joined[2]
        cdef int32_t number
        cdef int count = 0, index
        if item.expandable:
            item.owner = table_find(&self.groups, key)
            if item.owner == NONE:
                item.owner = self.group_count
                table_put(&self.groups, key, item.owner)
                self.group_count += 1
            number = ranges_add_mapped(&self.ranges, item[0], joined, &count)
            for index in range(count):
                self.spans.rows[joined[index]].died = event
        else:
            number = ranges_add(&self.ranges, item[0])
        self.ranges.items[number].span = spans_add(&self.spans, &self.ranges.items[number], event, self.still)
        changes_add(&self.segments, event, 0 if item.expandable else 1, item.size, item.large)
        return self._mark(item.start, end_of(item), event)

    cdef int _drop_range(self, int32_t event) except -1 nogil:
        cdef uint64_t start = self.events.addr[event]
        cdef int64_t size = self.events.size[event]
        cdef int32_t number = ranges_containing(&self.ranges, start)
        cdef int32_t rest[2]
        cdef Range item
        cdef int count, index
        if number == NONE or size <= 0:
            return self._conflict(event, SEGMENT_NOT_THERE)
        item = self.ranges.items[number]
        if start + <uint64_t>size > end_of(&item) or (
            not item.expandable and (item.start != start or item.size != size)
        ):
            return self._conflict(event, SEGMENT_NOT_THERE)
        self._end_overlapped(event, start, size)
        self.spans.rows[item.span].died = event
        count = ranges_cut(&self.ranges, number, start, size, rest)
        for index in range(count):
            number = rest[index]
            self.ranges.items[number].span = spans_add(&self.spans, &self.ranges.items[number], event, self.still)
        return changes_add(&self.segments, event, 0 if item.expandable else -1, -size, item.large)

    # tolerant._LastUses

    cdef Place _first_touching(self, uint64_t start) noexcept nogil:
        cdef Place place = order_floor(&self.uses, start)
        if place.index < 0:
            return order_next(&self.uses, place)
        if order_key(&self.uses, place) < start and self.use[order_value(&self.uses, place)].end <= start:
            return order_next(&self.uses, place)
        return place

    cdef int32_t _latest(self, uint64_t start, uint64_t end) noexcept nogil:
        cdef Place place = self._first_touching(start)
        cdef int32_t latest = BEFORE
        while place.chunk < self.uses.count and order_key(&self.uses, place) < end:
            latest = max(latest, self.use[order_value(&self.uses, place)].event)
            place = order_next(&self.uses, place)
        return latest

    cdef int _mark(self, uint64_t start, uint64_t end, int32_t event) except -1 nogil:
        cdef Place place = self._first_touching(start)
        cdef uint64_t first
        cdef int32_t row
        cdef Use old
        while place.chunk < self.uses.count and order_key(&self.uses, place) < end:
            first, row = order_key(&self.uses, place), order_value(&self.uses, place)
            old = self.use[row]
            order_drop(&self.uses, first)
            self.idle[self.idles] = row
            self.idles += 1
            if first < start:
                self._add_use(first, start, old.event)
            if old.end > end:
                self._add_use(end, old.end, old.event)
            place = self._first_touching(start)
        return self._add_use(start, end, event)

    cdef int _add_use(self, uint64_t start, uint64_t end, int32_t event) except -1 nogil:
        cdef Py_ssize_t room
        cdef int32_t row
        if self.idles == 0 and self.use_count == self.use_room:
            room = 2 * self.use_room + 256
            if room > INT32_MAX:
                no_memory()
            self.use = <Use*>resized(self.use, room, sizeof(Use))
            self.idle = <int32_t*>resized(self.idle, room, sizeof(int32_t))
            self.use_room = room
        if self.idles:
            self.idles -= 1
            row = self.idle[self.idles]
        else:
            row = <int32_t>self.use_count
            self.use_count += 1
        self.use[row].end = end
        self.use[row].event = event
        return order_put(&self.uses, start, row)

    cdef tuple result(self):
        cdef size_t blocks = self.blocks.count
        return (
            blocks_columns(&self.blocks),
            handed_out(<void**>&self.spans.rows, self.spans.count, sizeof(Span)),
            changes_columns(&self.segments),
            handed_out(<void**>&self.large_of_block, blocks, sizeof(uint8_t)),
            handed_out(<void**>&self.span_of_block, blocks, sizeof(int32_t)),
            handed_out(<void**>&self.conflict_event, self.conflict_count, sizeof(int32_t)),
            handed_out(<void**>&self.conflict_reason, self.conflict_count, sizeof(uint8_t)),
        )


def alone(events, seed):
    """The replay of a trace that contradicts itself.

    Gives the columns that `kernel.trace_alone` makes a Run of, and the events and reasons of the conflicts.
    """
    cdef _Alone walk = _Alone(events, seed)
    with nogil:
        walk.place()
        walk.loop()
    return walk.result()
