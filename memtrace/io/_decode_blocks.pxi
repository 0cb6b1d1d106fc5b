"""Blocks of the memory map, and annotations: from the items of a dict to a row of columns, as with events."""

cdef enum:
    SAYS_ADDRESS = 1
    SAYS_REQUESTED = 2
    BAD_ADDRESS = 4
    BAD_SIZE = 8
    BAD_REQUESTED = 16
    BAD_STATE = 32
    BAD_FRAMES = 64
    BAD_HISTORY = 128


cdef bint grow_blocks(Machine* m) noexcept nogil:
    cdef size_t room = m.blocks_capacity * 2 if m.blocks_capacity else 1024
    if not (
        widen(<void**>&m.block_mask, room, 1)
        and widen(<void**>&m.block_address, room, 8)
        and widen(<void**>&m.block_size, room, 8)
        and widen(<void**>&m.block_requested, room, 8)
        and widen(<void**>&m.block_state, room, 4)
        and widen(<void**>&m.block_stack, room, 4)
    ):
        return False
    m.blocks_capacity = room
    return True


cdef bint start_block(Machine* m, Fresh* fresh) noexcept nogil:
    cdef uint64_t row = m.blocks
    if row >= m.blocks_capacity and not grow_blocks(m):
        return fail(m, NO_MEMORY)
    m.block_mask[row] = BAD_SIZE | BAD_STATE
    m.block_address[row] = 0
    m.block_size[row] = 0
    m.block_requested[row] = -1
    m.block_state[row] = -1
    m.block_stack[row] = -1
    m.blocks = row + 1
    fresh.row = row
    return True


cdef inline void note_block(Machine* m, uint64_t row, uint8_t bad, bint good, uint8_t says) noexcept nogil:
    """What became of an item: as with any dict, the last one of a key counts."""
    if good:
        m.block_mask[row] = (m.block_mask[row] & ~bad) | says
    else:
        m.block_mask[row] |= bad | says


cdef bint fill_block(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    cdef uint64_t slot
    cdef uint32_t key
    cdef Cell* value
    target.count += <uint32_t>((m.height - first) // 2)
    if target.count > MAX_KEYS:
        return fail(m, TOO_MANY_KEYS)
    for slot in range(first, m.height, 2):
        key = <uint32_t>m.stack[slot].value
        value = &m.stack[slot + 1]
        if key >= m.key_seen_capacity and not see_key(m, key):
            return False
        if not m.key_seen[key] & BLOCK_KEY:
            m.block_names += 1
            if m.block_names > MAX_NAMES:
                return fail(m, TOO_MANY_NAMES)
            m.key_seen[key] |= BLOCK_KEY
        if not check_place(m, target, slot) or not set_block_item(m, target.row, key, value):
            return False
    return True


cdef bint set_block_item(Machine* m, uint64_t row, uint32_t key, const Cell* value) noexcept nogil:
    cdef Extra* extra
    if key == W_ADDRESS:
        m.block_address[row] = value.value
        note_block(m, row, BAD_ADDRESS, is_count(value), SAYS_ADDRESS)
    elif key == W_SIZE:
        m.block_size[row] = <int64_t>value.value
        note_block(m, row, BAD_SIZE, is_count(value), 0)
    elif key == W_REQUESTED:
        m.block_mask[row] &= ~SAYS_REQUESTED
        m.block_requested[row] = <int64_t>value.value if is_count(value) else -1
        note_block(m, row, BAD_REQUESTED, is_count(value) or value.tag == NONE, 0 if value.tag == NONE else SAYS_REQUESTED)
    elif key == W_STATE:
        m.block_state[row] = <int32_t>value.value if value.tag == TEXT else -1
        note_block(m, row, BAD_STATE, value.tag == TEXT, 0)
    elif key == W_FRAMES:
        m.block_stack[row] = <int32_t>value.value if value.tag == STACK else -1
        note_block(m, row, BAD_FRAMES, value.tag == STACK or value.tag == NONE, 0)
    elif key == W_HISTORY:
        note_block(m, row, BAD_HISTORY, value.tag == NODE or value.tag == NONE, 0)
        if m.past_count and m.pasts[m.past_count - 1].row == row:
            m.pasts[m.past_count - 1].cell = value[0]
            return True
        if value.tag != NODE:
            return True
        if not grow(<void**>&m.pasts, &m.pasts_capacity, m.past_count + 1, sizeof(Extra)):
            return fail(m, NO_MEMORY)
        extra = &m.pasts[m.past_count]
        extra.row = row
        extra.cell = value[0]
        m.past_count += 1
    return True


cdef bint fill_rows(Machine* m, Fresh* target, uint64_t first, uint8_t tag) noexcept nogil:
    """The blocks of a segment, or annotations: each was made there, one after the other."""
    cdef uint64_t slot
    if target.count == 0 and m.height > first:
        target.row = m.stack[first].value
    for slot in range(first, m.height):
        if m.stack[slot].tag != tag or m.stack[slot].value != target.row + target.count:
            return fail(m, MISPLACED)
        target.count += 1
    return True


cdef enum:
    BAD_NAME = 1
    BAD_STAGE = 2
    BAD_DEVICE = 4
    BAD_TIME = 8
    MAX_ORDINAL = 0x7FFFFFFF


cdef bint grow_notes(Machine* m) noexcept nogil:
    cdef size_t room = m.notes_capacity * 2 if m.notes_capacity else 1024
    if not (
        widen(<void**>&m.note_mask, room, 1)
        and widen(<void**>&m.note_name, room, 4)
        and widen(<void**>&m.note_stage, room, 4)
        and widen(<void**>&m.note_device, room, 8)
        and widen(<void**>&m.note_time, room, 8)
    ):
        return False
    m.notes_capacity = room
    return True


cdef bint start_note(Machine* m, Fresh* fresh) noexcept nogil:
    cdef uint64_t row = m.notes
    if row >= m.notes_capacity and not grow_notes(m):
        return fail(m, NO_MEMORY)
    m.note_mask[row] = BAD_NAME | BAD_STAGE | BAD_TIME
    m.note_name[row] = W_EMPTY
    m.note_stage[row] = W_EMPTY
    m.note_device[row] = 0
    m.note_time[row] = 0
    m.notes = row + 1
    fresh.row = row
    return True


cdef inline void mark_note(Machine* m, uint64_t row, uint8_t bad, bint good) noexcept nogil:
    if good:
        m.note_mask[row] &= ~bad
    else:
        m.note_mask[row] |= bad


cdef bint fill_note(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    cdef uint64_t slot
    cdef uint64_t row = target.row
    cdef uint64_t key
    cdef Cell* value
    target.count += <uint32_t>((m.height - first) // 2)
    if target.count > MAX_KEYS:
        return fail(m, TOO_MANY_KEYS)
    for slot in range(first, m.height, 2):
        key = m.stack[slot].value
        value = &m.stack[slot + 1]
        if not check_place(m, target, slot):
            return False
        if key == W_NAME:
            m.note_name[row] = <int32_t>value.value if value.tag == TEXT else W_EMPTY
            mark_note(m, row, BAD_NAME, value.tag == TEXT)
        elif key == W_STAGE:
            m.note_stage[row] = <int32_t>value.value if value.tag == TEXT else W_EMPTY
            mark_note(m, row, BAD_STAGE, value.tag == TEXT and (value.value == W_START or value.value == W_END))
        elif key == W_DEVICE:
            m.note_device[row] = <int64_t>value.value
            mark_note(m, row, BAD_DEVICE, value.tag == INTEGER and -MAX_ORDINAL <= <int64_t>value.value <= MAX_ORDINAL)
        elif key == W_TIME:
            m.note_time[row] = <int64_t>value.value
            mark_note(m, row, BAD_TIME, is_count(value))
    return True
