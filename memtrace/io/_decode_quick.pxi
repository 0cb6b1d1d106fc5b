"""The way that torch writes an event, read without the stack: nine tenths of a file are nothing else.

    EMPTY_DICT MEMOIZE MARK (key value)... SETITEMS      keys from the memo; values are numbers, texts, a stack of
                                                         known frames, a pool id

Whatever looks different by one byte is left to the general rules: then nothing has happened.
"""


cdef uint64_t quick_event(Machine* m, const uint8_t* data, uint64_t at, uint64_t end) noexcept nogil:
    """Reads the event that begins at `at`, if it is one as torch writes it: where it ends, else 0.

    0 with `m.failure` set: it is such an event, and cannot be taken."""
    cdef Cell[2 * MAX_KEYS] items
    cdef uint64_t weight = m.weight
    cdef uint32_t memo_count = m.memo_count
    cdef uint64_t next_at = 0
    cdef uint32_t count = 0
    cdef uint32_t index
    cdef Fresh* last
    m.failure = FINE
    if data[at + 1] != 0x94 or data[at + 2] != 0x28 or role_in_batch(m, True) != AN_EVENT:
        return 0
    last = &m.fresh[m.fresh_count - 1]
    if last.slot >= m.fence and (last.role != AN_EVENT or last.slot + 1 != m.height):
        return 0
    if weigh(m, DICT_WEIGHT) and keep_entry(m, <uint32_t>ONCE << 28):
        next_at = quick_items(m, data, at + 3, end, items, &count)
    # another batch of items could follow, or a call for it: not as torch writes
    if next_at == 0 or (data[next_at] != 0x7D and data[next_at] != 0x65):
        m.weight = weight
        m.memo_count = memo_count
        m.failure = FINE
        return 0
    if last.slot >= m.fence:
        # the event before: nothing can reach it any more
        m.fresh_count -= 1
        if not close(m, last):
            return 0
    if not start_row(m) or not push(m, EVENT, m.rows - 1):
        return 0
    for index in range(count):
        if not set_item(m, m.rows - 1, <uint32_t>items[2 * index].value, &items[2 * index + 1]):
            return 0
    return next_at


cdef inline bint keep_entry(Machine* m, uint32_t entry) noexcept nogil:
    if m.memo_count >= m.memo_capacity and not grow(
        <void**>&m.memo, &m.memo_capacity, <size_t>m.memo_count + 1, sizeof(uint32_t)
    ):
        return False
    m.memo[m.memo_count] = entry
    m.memo_count += 1
    return True


cdef inline uint64_t quick_reference(Machine* m, const uint8_t* data, uint64_t at, Cell* cell) noexcept nogil:
    """A value from the memo: where it ends, 0 if there is none at `at` or it is a container with more to it."""
    cdef uint32_t index
    if data[at] == 0x6A:
        index = <uint32_t>load_word(data + at + 1, 4)
        at += 5
    elif data[at] == 0x68:
        index = data[at + 1]
        at += 2
    else:
        return 0
    if index >= m.memo_count or m.memo[index] >= <uint32_t>OPEN << 28:
        return 0
    cell.tag = <uint8_t>(m.memo[index] >> 28)
    cell.value = m.memo[index] & 0x0FFFFFFF
    return at


cdef uint64_t quick_items(
    Machine* m, const uint8_t* data, uint64_t at, uint64_t end, Cell* items, uint32_t* count
) noexcept nogil:
    """The items (keys and values by turns) up to SETITEMS: where that ends, else 0."""
    cdef uint32_t found
    for found in range(MAX_KEYS + 1):
        if at + 2 * WIDEST > end:
            return 0
        if data[at] == 0x75:  # SETITEMS
            count[0] = found
            return at + 1 if found else 0
        if found == MAX_KEYS:
            return 0
        at = quick_reference(m, data, at, &items[2 * found])
        if at == 0 or items[2 * found].tag != TEXT or items[2 * found].value >= W_ACTIONS:
            return 0
        at = quick_value(m, data, at, end, &items[2 * found + 1])
        if at == 0:
            return 0
    return 0


cdef inline uint64_t quick_value(
    Machine* m, const uint8_t* data, uint64_t at, uint64_t end, Cell* cell
) noexcept nogil:
    """The value at `at`: where it ends, else 0."""
    cdef uint8_t opcode = data[at]
    cdef uint64_t length
    cell.tag = INTEGER
    if opcode == 0x68 or opcode == 0x6A:
        return quick_reference(m, data, at, cell)
    if opcode == 0x8A:  # LONG1
        length = data[at + 1]
        if not 1 <= length <= 7:
            return 0
        cell.value = load_word(data + at + 2, 8) & ((<uint64_t>1 << (8 * length)) - 1)
        return 0 if data[at + 1 + length] & 0x80 else at + 2 + length
    if opcode == 0x4A:  # BININT
        cell.value = load_word(data + at + 1, 4)
        return 0 if cell.value >> 31 else at + 5
    if opcode == 0x4B:  # BININT1
        if data[at + 2] == 0x4B and data[at + 4] == 0x86:
            return quick_pool(m, data, at, cell)
        cell.value = data[at + 1]
        return at + 2
    if opcode == 0x4D:  # BININT2
        cell.value = load_word(data + at + 1, 2)
        return at + 3
    if opcode == 0x5D:  # EMPTY_LIST
        return quick_stack(m, data, at, end, cell)
    if opcode == 0x8C:  # SHORT_BINUNICODE
        return quick_text(m, data, at, end, cell)
    return 0


cdef uint64_t quick_pool(Machine* m, const uint8_t* data, uint64_t at, Cell* cell) noexcept nogil:
    """A tuple of two small numbers."""
    cdef int64_t[2] pair
    cdef uint32_t index
    pair[0], pair[1] = data[at + 1], data[at + 3]
    index = intern(&m.pairs, <uint8_t*>pair, sizeof(pair), &m.secret)
    if index == FULL or data[at + 5] != 0x94 or not weigh(m, SEQUENCE_WEIGHT):
        return 0
    cell.tag = PAIR
    cell.value = index
    return at + 6 if keep_entry(m, <uint32_t>PAIR << 28 | index) else 0


cdef uint64_t quick_text(Machine* m, const uint8_t* data, uint64_t at, uint64_t end, Cell* cell) noexcept nogil:
    """A text that is kept in the memo."""
    cdef uint64_t length = data[at + 1]
    cdef uint32_t index
    if at + 2 + length + WIDEST > end or data[at + 2 + length] != 0x94 or not is_utf8(data + at + 2, <size_t>length):
        return 0
    index = intern(&m.texts, data + at + 2, <size_t>length, &m.secret)
    if index == FULL:
        return 0
    cell.tag = TEXT
    cell.value = index
    return at + 3 + length if keep_entry(m, <uint32_t>TEXT << 28 | index) else 0


cdef uint64_t quick_stack(Machine* m, const uint8_t* data, uint64_t at, uint64_t end, Cell* cell) noexcept nogil:
    """A list of frames that were read before."""
    cdef uint64_t start
    cdef uint64_t next_at
    cdef uint32_t count = 0
    cdef uint32_t kept = m.memo_count
    cdef uint32_t index
    if data[at + 1] != 0x94 or not weigh(m, SEQUENCE_WEIGHT) or not keep_entry(m, <uint32_t>ONCE << 28):
        return 0
    if data[at + 2] != 0x28:  # no MARK: the list is empty, unless APPEND follows
        next_at = quick_reference(m, data, at + 2, cell)
        if data[at + 2] != 0x75 and (next_at == 0 or data[next_at] == 0x61):
            return 0
        m.memo[kept] = <uint32_t>STACK << 28
        cell.tag = STACK
        cell.value = 0
        return at + 2
    at += 3
    start = ids_end(m)
    while True:
        if at + 2 * WIDEST > end or count >= MAX_STACK_FRAMES:
            return 0
        if data[at] == 0x65:  # APPENDS
            break
        at = quick_reference(m, data, at, cell)
        if at == 0 or cell.tag != FRAME:
            return 0
        if start + count >= m.open_ids_capacity and not grow(
            <void**>&m.open_ids, &m.open_ids_capacity, start + count + 1, sizeof(uint32_t)
        ):
            return 0
        m.open_ids[start + count] = <uint32_t>cell.value
        count += 1
    if data[at + 1] == 0x28 or count == 0:  # MARK: more of the same list
        return 0
    index = intern(&m.stacks, <uint8_t*>(m.open_ids + start), <size_t>count * 4, &m.secret)
    if index == FULL:
        return 0
    m.memo[kept] = <uint32_t>STACK << 28 | index
    cell.tag = STACK
    cell.value = index
    return at + 1
