"""Cells, the unpickler's stack, its marks and memo, and what containers become."""


cdef inline bint fail(Machine* m, int failure) noexcept nogil:
    m.failure = failure
    return False


cdef bint grow_stack(Machine* m) noexcept nogil:
    if not grow(<void**>&m.stack, &m.stack_capacity, m.height + 1, sizeof(Cell)):
        return fail(m, NO_MEMORY)
    return True


cdef inline bint push(Machine* m, uint8_t tag, uint64_t value) noexcept nogil:
    cdef Cell* cell
    if m.height >= m.stack_capacity and not grow_stack(m):
        return False
    cell = &m.stack[m.height]
    cell.tag = tag
    cell.value = value
    m.height += 1
    return True


cdef inline uint8_t height_of(const Cell* cell) noexcept nogil:
    """How deep a container without a role nests; 0 for what is none."""
    if cell.tag == JUNK:
        return <uint8_t>cell.value & 0x7F
    if cell.tag == STACK:
        return 2 if cell.value else 1  # the empty stack is the first of all
    return 1 if cell.tag == FRAME or cell.tag == TEXTS or cell.tag == PAIR else 0


cdef inline bint weigh(Machine* m, uint32_t weight) noexcept nogil:
    m.weight += weight
    if m.weight > FREE_WEIGHT + m.consumed / 4 * 3:
        return fail(m, TOO_HEAVY)
    return True


# -- marks and memo


cdef inline bint set_mark(Machine* m) noexcept nogil:
    if m.mark_count > MAX_DEPTH:
        return fail(m, TOO_DEEP)
    m.marks[m.mark_count].slot = m.height
    m.marks[m.mark_count].fresh = m.fresh_count
    m.mark_count += 1
    m.fence = m.height
    return True


cdef inline bint take_mark(Machine* m, uint64_t* first) noexcept nogil:
    """Removes the last mark; `first` is the slot of the first value above it."""
    if m.mark_count == 0:
        return fail(m, NO_BEGINNING)
    m.mark_count -= 1
    first[0] = m.marks[m.mark_count].slot
    m.fence = m.marks[m.mark_count - 1].slot if m.mark_count else 0
    return True


cdef inline bint reach(Machine* m, uint64_t count, uint64_t* first) noexcept nogil:
    """The slot of the first of the `count` topmost values."""
    if m.height < m.fence + count:
        return fail(m, NOT_THERE)
    first[0] = m.height - count
    return True


cdef inline bint keep(Machine* m, uint32_t index) noexcept nogil:
    """Keeps the topmost value in the memo. All picklers number from 0 upwards, one by one."""
    cdef Cell* top
    cdef Fresh* fresh
    cdef uint32_t entry
    if index != m.memo_count or index == FULL:
        return fail(m, NUMBERING)
    if m.height <= m.fence:
        return fail(m, NOT_THERE)
    top = &m.stack[m.height - 1]
    if top.tag >= EVENT:
        entry = <uint32_t>ONCE << 28
    elif top.tag > ONCE:
        return fail(m, KEEPS_NUMBER)
    elif top.tag == OPEN:
        fresh = &m.fresh[top.value]
        if fresh.memo:
            return fail(m, KEPT_TWICE)
        fresh.memo = index + 1
        entry = <uint32_t>(OPEN if fresh.role == OTHER else ONCE) << 28 | <uint32_t>top.value
    else:
        entry = <uint32_t>top.tag << 28 | <uint32_t>top.value
    if index >= m.memo_capacity and not grow(<void**>&m.memo, &m.memo_capacity, <size_t>index + 1, sizeof(uint32_t)):
        return fail(m, NO_MEMORY)
    m.memo[index] = entry
    m.memo_count = index + 1
    return True


cdef bint fetch_open(Machine* m, uint32_t index) noexcept nogil:
    """Fetches a container that is still in its slot: from now on it must not change."""
    cdef Fresh* fresh = &m.fresh[m.memo[index] & 0x0FFFFFFF]
    cdef Cell cell
    if not settle(m, fresh, &cell):
        return False
    fresh.fetched = True
    fresh.settled = cell
    return push(m, cell.tag, cell.value)


# -- what containers become


cdef bint settle(Machine* m, Fresh* fresh, Cell* cell) noexcept nogil:
    """The cell of a container without a role, as it is now."""
    cdef uint32_t[4] frame
    cdef int64_t[2] pair
    cdef uint32_t index = 0
    if fresh.fetched:
        cell[0] = fresh.settled
        return True
    cell.tag = JUNK
    cell.value = fresh.height | (IS_DICT if fresh.is_dict else 0)
    if fresh.is_dict:
        if fresh.height == 1 and fresh.filename != -2 and fresh.function != -2 and fresh.line >= 0:
            frame[0] = <uint32_t>(W_EMPTY if fresh.filename < 0 else fresh.filename)
            frame[1] = <uint32_t>(W_EMPTY if fresh.function < 0 else fresh.function)
            frame[2] = <uint32_t>fresh.line
            frame[3] = 0
            index = intern(&m.frames, <uint8_t*>frame, sizeof(frame), &m.secret)
            cell.tag = FRAME
    elif fresh.holding == NOTHING:
        cell.tag = STACK
    elif fresh.holding == FRAMES and fresh.count <= MAX_STACK_FRAMES:
        index = intern(&m.stacks, <uint8_t*>(m.open_ids + fresh.ids_start), <size_t>fresh.count * 4, &m.secret)
        cell.tag = STACK
    elif fresh.holding == NAMES:
        index = intern(&m.lists, <uint8_t*>(m.open_ids + fresh.ids_start), <size_t>fresh.count * 4, &m.secret)
        cell.tag = TEXTS
    elif fresh.holding == NUMBERS and fresh.count == 2 and fresh.first >= 0 and fresh.second >= 0:
        pair[0], pair[1] = fresh.first, fresh.second
        index = intern(&m.pairs, <uint8_t*>pair, sizeof(pair), &m.secret)
        cell.tag = PAIR
    if index == FULL:
        return fail(m, NO_MEMORY)
    if cell.tag != JUNK:
        cell.value = index
    return True


cdef bint close_node(Machine* m, Fresh* fresh, Cell* cell) noexcept nogil:
    """Moves the content of a container with a role to its final place."""
    cdef Node* node
    cdef size_t count = fresh.count if has_cells(fresh.role) else 0
    if not grow(<void**>&m.nodes, &m.nodes_capacity, m.node_count + 1, sizeof(Node)) or not grow(
        <void**>&m.cells, &m.cells_capacity, m.cell_count + count + 1, sizeof(Cell)
    ):
        return fail(m, NO_MEMORY)
    node = &m.nodes[m.node_count]
    node.start = m.cell_count if has_cells(fresh.role) else fresh.row
    node.count = fresh.count
    node.role = fresh.role
    node.is_dict = fresh.is_dict
    if count:
        memcpy(m.cells + m.cell_count, m.open_cells + fresh.cells_start, count * sizeof(Cell))
    m.cell_count += count
    cell.tag = NODE
    cell.value = m.node_count
    m.node_count += 1
    return True


cdef bint close(Machine* m, Fresh* fresh) noexcept nogil:
    """A container leaves its slot: its cell there and in the memo become final."""
    cdef Cell* cell = &m.stack[fresh.slot]
    if fresh.role == OTHER:
        if not settle(m, fresh, cell):
            return False
        if fresh.memo:
            m.memo[fresh.memo - 1] = <uint32_t>cell.tag << 28 | <uint32_t>cell.value
        return True
    if fresh.role == AN_EVENT or fresh.role == BLOCK or fresh.role == NOTE:
        cell.tag = EVENT if fresh.role == AN_EVENT else A_BLOCK if fresh.role == BLOCK else A_NOTE
        cell.value = fresh.row
        return True
    return close_node(m, fresh, cell)


cdef bint close_above(Machine* m, uint64_t first) noexcept nogil:
    """Closes all containers from slot `first` on."""
    cdef uint64_t index = m.fresh_count
    cdef uint64_t last = m.fresh_count
    while index > 0 and m.fresh[index - 1].slot >= first:
        index -= 1
    m.fresh_count = index
    while index < last:
        if not close(m, &m.fresh[index]):
            return False
        index += 1
    return True
