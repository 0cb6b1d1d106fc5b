# ---- the state before the first event: start.py

cdef int place(Machine m, start) except -1:
    """Fills an empty machine."""
    cdef const uint64_t[::1] range_address = np.ascontiguousarray(start.range_address, np.uint64)
    cdef const int64_t[::1] range_size = np.ascontiguousarray(start.range_size, np.int64)
    cdef const uint8_t[::1] range_large = np.ascontiguousarray(start.range_large, np.bool_).view(np.uint8)
    cdef const int32_t[::1] range_stream = np.ascontiguousarray(start.range_stream, np.int32)
    cdef const uint8_t[::1] range_expandable = np.ascontiguousarray(start.range_expandable, np.bool_).view(np.uint8)
    cdef const int32_t[::1] block_row = np.ascontiguousarray(start.block, np.int32)
    cdef const uint64_t[::1] block_address = np.ascontiguousarray(start.block_address, np.uint64)
    cdef const int64_t[::1] block_size = np.ascontiguousarray(start.block_size, np.int64)
    cdef const uint8_t[::1] block_pending = np.ascontiguousarray(start.block_pending, np.bool_).view(np.uint8)
    cdef Py_ssize_t index, ranges = range_address.shape[0], used = 0, blocks = block_row.shape[0]
    if {range_size.shape[0], range_large.shape[0], range_stream.shape[0], range_expandable.shape[0]} != {ranges}:
        raise ValueError("columns of ranges differ in length")
    if {block_address.shape[0], block_size.shape[0], block_pending.shape[0]} != {blocks}:
        raise ValueError("columns of blocks differ in length")
    cdef int64_t private_live = start.private_live, private_pending = start.private_pending
    cdef int64_t private_reserved = start.private_reserved

    cdef ordered_map[int64_t, size_t] number  # of an owner in `reservations`
    cdef ordered_map[int64_t, size_t].iterator known
    cdef vector[Block*] reservations  # the last block of each
    cdef Block* before
    cdef Block* block
    cdef int64_t owner
    cdef uint64_t cursor, end
    cdef int32_t row
    cdef bint expandable
    cdef size_t made
    with nogil:
        for index in range(ranges):
            owner = owner_of(LARGE if range_large[index] else SMALL, range_stream[index])
            expandable = range_expandable[index] != 0
            cursor, end = range_address[index], range_address[index] + <uint64_t>range_size[index]
            before = NULL
            known = number.find(owner)
            if expandable and known != number.end():
                before = reservations[dereference(known).second]
                before = placed(m, before, owner, cursor, cursor, UNMAPPED, expandable)
            while used < blocks and block_address[used] < end:
                row = block_row[used]
                check_row(m, row)
                if block_address[used] > cursor:
                    before = placed(m, before, owner, cursor, block_address[used], FREE, expandable)
                cursor = block_address[used] + <uint64_t>block_size[used]
                before = placed(
                    m, before, owner, block_address[used], cursor, PENDING if block_pending[used] else LIVE, expandable
                )
                m.held[row].block = before
                if block_pending[used]:
                    wait_for(m, row, before)
                else:
                    m.allocated += block_size[used]
                m.active += block_size[used]
                used += 1
            if cursor < end:
                before = placed(m, before, owner, cursor, end, FREE, expandable)
            if expandable and before != NULL:
                if known == number.end():
                    number[owner] = reservations.size()
                    reservations.push_back(before)
                else:
                    reservations[dereference(known).second] = before
            m.total += range_size[index]
        for made in range(reservations.size()):
            before = reservations[made]
            placed(m, before, before.owner, 0, before.origin + <uint64_t>RESERVATION, UNMAPPED, True)
        for made in range(m.blocks.size()):
            block = &m.blocks[made]
            if block.state == FREE:
                insert(m, block)
            elif block.state == UNMAPPED:
                insert_unmapped(m, block)
    m.total += private_reserved
    m.allocated += private_live
    m.active += private_live + private_pending
    m.reserved_peak = m.proven = m.total
    m.allocated_peak, m.active_peak = m.allocated, m.active
    return 0


cdef Block* placed(
    Machine m, Block* before, int64_t owner, uint64_t start, uint64_t end, int state, bint expandable
) except NULL nogil:
    """A block from `start` to `end`, behind another one, or the first of its segment. What is unmapped begins where
    the block before it ends."""
    cdef Block* block
    if before == NULL:
        return segment_of(m, owner, start, <int64_t>(end - start), state, expandable)
    if state == UNMAPPED:
        start = before.address + <uint64_t>before.size
    block = piece_of(m, before, start, <int64_t>(end - start), state)
    link_after(before, block)
    return block
