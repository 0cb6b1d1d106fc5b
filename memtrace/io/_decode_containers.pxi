"""Containers: what one is, from where it is made, and what goes into it."""


cdef uint8_t role_below(uint8_t parent, uint64_t key, bint is_dict) noexcept nogil:
    """The role of a container under `key` (a text id) of a dict, or in a list (`key` ignored)."""
    if parent == TOP:
        if key == W_TRACES and not is_dict:
            return TRACES
        if key == W_SEGMENTS and not is_dict:
            return SEGMENTS
        if key == W_SETTINGS and is_dict:
            return SETTINGS
        if key == W_NOTES and not is_dict:
            return NOTES
    elif parent == TRACES and not is_dict:
        return TRACE
    elif parent == TRACE and is_dict:
        return AN_EVENT
    elif parent == SEGMENTS and is_dict:
        return SEGMENT
    elif parent == SEGMENT and key == W_BLOCKS and not is_dict:
        return BLOCKS
    elif parent == BLOCKS and is_dict:
        return BLOCK
    elif parent == BLOCK and key == W_HISTORY and not is_dict:
        return HISTORY
    elif parent == HISTORY and is_dict:
        return PAST
    elif parent == SETTINGS and is_dict:
        return TABLE
    elif parent == NOTES and is_dict:
        return NOTE
    return OTHER


cdef uint8_t role_in_batch(Machine* m, bint is_dict) noexcept nogil:
    """The role of a container made on top of the stack, if it is an item of the batch that the last mark begins."""
    cdef Fresh* owner
    cdef Mark* mark
    if m.mark_count == 0:
        return OTHER
    mark = &m.marks[m.mark_count - 1]
    if mark.fresh == 0:
        return OTHER
    owner = &m.fresh[mark.fresh - 1]
    if owner.slot + 1 != mark.slot:
        return OTHER
    if not owner.is_dict:
        return role_below(owner.role, 0, is_dict)
    if (m.height - mark.slot) % 2 and m.stack[m.height - 1].tag == TEXT:
        return role_below(owner.role, m.stack[m.height - 1].value, is_dict)
    return OTHER


cdef uint8_t role_here(Machine* m, bint is_dict) noexcept nogil:
    """The role of a container made on top of the stack: by what it will be an item of, as all picklers write."""
    cdef uint64_t slot = m.height
    cdef Fresh* last
    cdef uint8_t role
    if m.fresh_count == 0:
        return (TOP if is_dict else SEGMENTS) if slot == 0 else OTHER
    last = &m.fresh[m.fresh_count - 1]
    role = role_in_batch(m, is_dict)
    if role != OTHER or last.slot < m.fence:
        return role
    # or the only item of the container before it (APPEND, SETITEM)
    if last.is_dict:
        if last.count == 0 and last.items == 0 and slot == last.slot + 2 and m.stack[slot - 1].tag == TEXT:
            return role_below(last.role, m.stack[slot - 1].value, is_dict)
    elif slot == last.slot + 1:
        return role_below(last.role, 0, is_dict)
    return OTHER


cdef bint make(Machine* m, bint is_dict) noexcept nogil:
    """Pushes a new list or dict."""
    cdef uint8_t role = role_here(m, is_dict)
    cdef Fresh* fresh
    cdef Fresh* before
    if not weigh(m, DICT_WEIGHT if is_dict else SEQUENCE_WEIGHT):
        return False
    if (role == AN_EVENT or role == BLOCK or role == NOTE) and m.fresh_count:
        before = &m.fresh[m.fresh_count - 1]
        if before.role == role and before.slot + 1 == m.height:
            # nothing can reach the one before any more; C++ writes millions of them before it lists them
            m.fresh_count -= 1
            if not close(m, before):
                return False
    if m.fresh_count >= m.fresh_capacity and not grow(
        <void**>&m.fresh, &m.fresh_capacity, m.fresh_count + 1, sizeof(Fresh)
    ):
        return fail(m, NO_MEMORY)
    fresh = &m.fresh[m.fresh_count]
    memset(fresh, 0, sizeof(Fresh))
    fresh.slot = m.height
    fresh.role = role
    fresh.is_dict = is_dict
    fresh.height = 1
    fresh.filename = -1
    fresh.function = -1
    fresh.ids_start = ids_end(m)
    fresh.cells_start = cells_end(m)
    if role == AN_EVENT:
        if not start_event(m, fresh):
            return False
    elif role == BLOCK:
        if not start_block(m, fresh):
            return False
    elif role == NOTE:
        if not start_note(m, fresh):
            return False
    elif role == TRACE:
        if not start_trace(m):
            return False
    elif role != OTHER and role != BLOCKS and role != TRACES:
        m.containers += 1
        if m.containers > MAX_CONTAINERS:
            return fail(m, TOO_MANY_CONTAINERS)
    m.fresh_count += 1
    return push(m, OPEN, m.fresh_count - 1)


cdef inline uint64_t ids_end(const Machine* m) noexcept nogil:
    """Where the content of all fresh containers ends in `open_ids`."""
    cdef const Fresh* last
    if m.fresh_count == 0:
        return 0
    last = &m.fresh[m.fresh_count - 1]
    if last.role == OTHER and (last.holding == FRAMES or last.holding == NAMES):
        return last.ids_start + last.count
    return last.ids_start


cdef inline uint64_t cells_end(const Machine* m) noexcept nogil:
    """And in `open_cells`."""
    cdef const Fresh* last
    if m.fresh_count == 0:
        return 0
    last = &m.fresh[m.fresh_count - 1]
    return last.cells_start + (last.count if has_cells(last.role) else 0)


cdef inline bint has_cells(uint8_t role) noexcept nogil:
    """Whether the items of containers of this role are kept as cells."""
    return role != OTHER and role != AN_EVENT and role != TRACE and role != BLOCK and role != BLOCKS and (
        role != NOTE and role != NOTES
    )


cdef bint make_tuple(Machine* m, uint64_t first) noexcept nogil:
    """A tuple in place of the values from slot `first`."""
    cdef uint8_t height = 0
    cdef int64_t[2] pair
    cdef uint32_t index
    if not weigh(m, SEQUENCE_WEIGHT) or not close_above(m, first) or not holding_height(m, first, &height):
        return False
    if (
        m.height == first + 2
        and m.stack[first].tag == INTEGER
        and m.stack[first + 1].tag == INTEGER
        and <int64_t>m.stack[first].value >= 0
        and <int64_t>m.stack[first + 1].value >= 0
    ):
        pair[0], pair[1] = <int64_t>m.stack[first].value, <int64_t>m.stack[first + 1].value
        index = intern(&m.pairs, <uint8_t*>pair, sizeof(pair), &m.secret)
        if index == FULL:
            return fail(m, NO_MEMORY)
        m.height = first
        return push(m, PAIR, index)
    m.height = first
    return push(m, JUNK, height)


cdef bint holding_height(Machine* m, uint64_t first, uint8_t* height) noexcept nogil:
    """The height of a container without a role of the (closed) values from slot `first`."""
    cdef uint64_t slot
    cdef uint8_t highest = 0
    for slot in range(first, m.height):
        if m.stack[slot].tag >= EVENT:
            return fail(m, MISPLACED)
        if height_of(&m.stack[slot]) > highest:
            highest = height_of(&m.stack[slot])
    if highest >= MAX_DEPTH:
        return fail(m, TOO_DEEP)
    height[0] = highest + 1
    return True


# -- filling containers


cdef bint fill(Machine* m, uint64_t first, bint is_dict) noexcept nogil:
    """Moves the values from slot `first` into the container just below them."""
    cdef Fresh* target
    cdef bint done
    if first <= m.fence:
        return fail(m, NO_CONTAINER)
    if is_dict and not check_keys(m, first):
        return False
    if not close_above(m, first):
        return False
    if m.fresh_count == 0:
        return fail(m, NO_CONTAINER)
    target = &m.fresh[m.fresh_count - 1]
    if target.slot != first - 1 or target.is_dict != is_dict:
        return fail(m, NO_CONTAINER)
    if target.fetched:
        return fail(m, ITSELF)
    if target.role == AN_EVENT:
        done = fill_event(m, target, first)
    elif target.role == OTHER:
        done = fill_other_dict(m, target, first) if is_dict else fill_other_list(m, target, first)
    elif target.role == TRACE:
        done = fill_trace(m, first)
    elif target.role == BLOCK:
        done = fill_block(m, target, first)
    elif target.role == NOTE:
        done = fill_note(m, target, first)
    elif target.role == BLOCKS or target.role == NOTES:
        done = fill_rows(m, target, first, A_BLOCK if target.role == BLOCKS else A_NOTE)
    else:
        done = fill_node(m, target, first)
    m.height = first
    return done


cdef bint check_keys(Machine* m, uint64_t first) noexcept nogil:
    cdef uint64_t slot = first
    cdef Cell* cell
    while slot < m.height:
        cell = &m.stack[slot]
        if cell.tag != TEXT or (cell.value > W_ACTIONS and table_length(&m.texts, <uint32_t>cell.value) > MAX_KEY_BYTES):
            return fail(m, BAD_KEY)
        slot += 2
    if (m.height - first) % 2:
        return fail(m, NO_VALUE)
    return True


cdef bint fill_other_dict(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    """What memtrace does not read, or a frame: of its items only those of a frame matter."""
    cdef uint64_t slot
    cdef uint8_t height = 0
    cdef Cell* value
    if not holding_height(m, first, &height):
        return False
    if height > target.height:
        target.height = height
    for slot in range(first, m.height, 2):
        value = &m.stack[slot + 1]
        if m.stack[slot].value == W_FILENAME:
            target.filename = <int64_t>value.value if value.tag == TEXT else -2
        elif m.stack[slot].value == W_NAME:
            target.function = <int64_t>value.value if value.tag == TEXT else -2
        elif m.stack[slot].value == W_LINE:
            if value.tag == INTEGER:
                # torch writes "no line" as an unsigned -1 in some frames
                target.line = <int64_t>value.value if value.value <= 0x7FFFFFFF else 0
            else:
                target.line = 0 if value.tag == BIG else -1
    return True


cdef bint fill_other_list(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    """A stack, a list of texts, a pair of numbers, or what memtrace does not read."""
    cdef uint64_t slot
    cdef uint8_t height = 0
    cdef Cell* cell
    cdef uint8_t holding
    if not holding_height(m, first, &height):
        return False
    if height > target.height:
        target.height = height
    if target.holding != MIXED and not grow(
        <void**>&m.open_ids, &m.open_ids_capacity, target.ids_start + target.count + (m.height - first), 4
    ):
        return fail(m, NO_MEMORY)
    for slot in range(first, m.height):
        cell = &m.stack[slot]
        holding = MIXED
        if cell.tag == FRAME:
            holding = FRAMES
        elif cell.tag == TEXT:
            holding = NAMES
        elif cell.tag == INTEGER and target.count < 2:
            holding = NUMBERS
        if target.holding == NOTHING:
            target.holding = holding
        elif target.holding != holding:
            target.holding = MIXED
        if target.holding == MIXED:
            return True
        if holding == NUMBERS:
            if target.count == 0:
                target.first = <int64_t>cell.value
            else:
                target.second = <int64_t>cell.value
        else:
            m.open_ids[target.ids_start + target.count] = <uint32_t>cell.value
        target.count += 1
    return True


cdef inline uint8_t item_role(uint8_t role) noexcept nogil:
    """What every item of a list with a role must be."""
    return role_below(role, 0, role != TRACES)


cdef bint check_place(Machine* m, Fresh* target, uint64_t slot) noexcept nogil:
    """Whether what stands under the key at `slot` may stand in this dict: with a role only what was made there, once."""
    cdef uint64_t key = m.stack[slot].value
    cdef Cell* cell = &m.stack[slot + 1]
    cdef uint8_t item = m.nodes[cell.value].role if cell.tag == NODE else OTHER
    cdef uint8_t wanted = role_below(target.role, key, False)
    if wanted == OTHER:
        wanted = role_below(target.role, key, True)
    if key == W_FRAMES and has_stack(target.role) and height_of(cell) > 2:
        return fail(m, MISPLACED)
    if cell.tag >= EVENT and cell.tag != NODE:
        return fail(m, MISPLACED)
    if item != OTHER:
        # an empty dict of settings can be taken for the home of the table that follows it
        if item != wanted and not (item == TABLE and wanted == OTHER):
            return fail(m, MISPLACED)
        if target.children & 1 << item and wanted != TABLE:
            return fail(m, MISPLACED)
        target.children |= 1 << item
        return True
    if wanted == TABLE:
        return not (cell.tag == FRAME or (cell.tag == JUNK and cell.value & IS_DICT)) or fail(m, SHARED)
    return wanted == OTHER or height_of(cell) == 0 or fail(m, SHARED)


cdef inline bint has_stack(uint8_t role) noexcept nogil:
    """Whether `frames` is a stack in dicts of this role."""
    return role == AN_EVENT or role == SEGMENT or role == BLOCK or role == PAST


cdef bint fill_node(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    """A dict or list with a role: its cells are kept."""
    cdef uint64_t slot, end
    if target.is_dict:
        target.items += <uint32_t>(m.height - first) // 2
        if target.items > MAX_KEYS:
            return fail(m, TOO_MANY_KEYS)
    for slot in range(first, m.height):
        if target.is_dict:
            if (slot - first) % 2 == 0 and not check_place(m, target, slot):
                return False
        elif m.stack[slot].tag != NODE or m.nodes[m.stack[slot].value].role != item_role(target.role):
            return fail(m, MISPLACED)
    if m.height == first:
        return True
    end = target.cells_start + target.count
    if not grow(<void**>&m.open_cells, &m.open_cells_capacity, end + (m.height - first), sizeof(Cell)):
        return fail(m, NO_MEMORY)
    if target.role == SEGMENT:
        return keep_segment_items(m, target, first)
    memcpy(m.open_cells + end, m.stack + first, (m.height - first) * sizeof(Cell))
    target.count += <uint32_t>(m.height - first)
    return True


cdef bint keep_segment_items(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    """Of a segment's items those that memtrace reads, and others only in the first segment that has them."""
    cdef uint64_t slot
    cdef uint64_t end = target.cells_start + target.count
    cdef uint32_t key
    for slot in range(first, m.height):
        if (slot - first) % 2:
            continue
        key = <uint32_t>m.stack[slot].value
        if key >= W_ACTIONS:
            if key >= m.key_seen_capacity and not see_key(m, key):
                return False
            if m.key_seen[key] & SEGMENT_KEY:
                continue
            m.key_seen[key] |= SEGMENT_KEY
        m.open_cells[end] = m.stack[slot]
        m.open_cells[end + 1] = m.stack[slot + 1]
        end += 2
        target.count += 2
    return True
