"""Events: from the items of a dict to a row of the columns."""

cdef enum:
    HAS_ACTION = 1
    HAS_ADDR = 2
    HAS_SIZE = 4
    HAS_TIME = 8
    BAD_ITEM = 16  # << the key's word: its value is none that torch writes (a later one of the same key counts)
    ANY_BAD = 0xFFF0

cdef enum:
    EVENT_KEY = 1
    BLOCK_KEY = 2
    SEGMENT_KEY = 4

cdef enum:
    SEGMENT_UNMAP = 6
    OOM = 7
    KNOWN_ACTIONS = 10
    MAX_ACTIONS = 255

cdef extern from *:
    """
    #define MEMTRACE_LIMIT ((uint64_t)1 << 63)
    #define MEMTRACE_SUM_LIMIT ((uint64_t)1 << 62)
    """
    uint64_t LIMIT "MEMTRACE_LIMIT"
    uint64_t SUM_LIMIT "MEMTRACE_SUM_LIMIT"


cdef bint grow_rows(Machine* m) noexcept nogil:
    cdef size_t room = m.rows_capacity * 2 if m.rows_capacity else 4096
    if not (
        widen(<void**>&m.action, room, 1)
        and widen(<void**>&m.mask, room, 2)
        and widen(<void**>&m.addr, room, 8)
        and widen(<void**>&m.size, room, 8)
        and widen(<void**>&m.stream, room, 8)
        and widen(<void**>&m.stack_id, room, 4)
        and (not m.has_time or widen(<void**>&m.time, room, 8))
        and (not m.has_pool or widen(<void**>&m.pool, room, 4))
        and (not m.has_context or widen(<void**>&m.context, room, 4))
        and (not m.has_metadata or widen(<void**>&m.metadata, room, 4))
    ):
        return False
    m.rows_capacity = room
    return True


cdef bint add_column(Machine* m, void** column, size_t width, int fill_byte) noexcept nogil:
    """A column that nothing was written to so far: every row has the empty value."""
    column[0] = malloc(m.rows_capacity * width)
    if column[0] == NULL:
        return fail(m, NO_MEMORY)
    memset(column[0], fill_byte, m.rows * width)
    return True


cdef bint start_trace(Machine* m) noexcept nogil:
    cdef TraceRange* trace
    if m.trace_count >= MAX_DEVICES:
        return fail(m, TOO_MANY_DEVICES)
    if not grow(<void**>&m.traces, &m.traces_capacity, m.trace_count + 1, sizeof(TraceRange)):
        return fail(m, NO_MEMORY)
    trace = &m.traces[m.trace_count]
    memset(trace, 0, sizeof(TraceRange))
    trace.start = m.rows
    trace.end = m.rows
    m.trace_count += 1
    return True


cdef inline bint start_row(Machine* m) noexcept nogil:
    """A row with nothing in it."""
    cdef uint64_t row = m.rows
    if m.has_action and not number_action(m):
        return False
    if row >= m.rows_capacity and not grow_rows(m):
        return fail(m, NO_MEMORY)
    m.mask[row] = 0
    m.addr[row] = 0
    m.size[row] = 0
    m.stream[row] = 0
    m.stack_id[row] = -1
    if m.has_pool:
        m.pool[row] = -1
    if m.has_context:
        m.context[row] = -1
    if m.has_metadata:
        m.metadata[row] = -1
    m.rows = row + 1
    return True


cdef bint start_event(Machine* m, Fresh* fresh) noexcept nogil:
    fresh.row = m.rows
    return start_row(m)


cdef bint bad_event(Machine* m, uint64_t row, int word) noexcept nogil:
    """The walk goes on: that a file asks for code to be run matters more."""
    if not m.has_bad_event:
        m.has_bad_event = True
        m.bad_row = row
        m.bad_word = word
    return True


cdef inline void note(Machine* m, uint64_t row, int word, bint good, int has) noexcept nogil:
    """What became of an item: as with any dict, the last one of a key counts."""
    if good:
        m.mask[row] = (m.mask[row] & ~(BAD_ITEM << word)) | has
    else:
        m.mask[row] |= BAD_ITEM << word


cdef bint fill_event(Machine* m, Fresh* target, uint64_t first) noexcept nogil:
    cdef uint64_t slot
    target.count += <uint32_t>((m.height - first) // 2)
    if target.count > MAX_KEYS:
        return fail(m, TOO_MANY_KEYS)
    for slot in range(first, m.height, 2):
        if not set_item(m, target.row, <uint32_t>m.stack[slot].value, &m.stack[slot + 1]):
            return False
    return True


cdef inline bint set_item(Machine* m, uint64_t row, uint32_t key, const Cell* value) noexcept nogil:
    """One item of an event. What is wrong in the file is BAD_EVENT; what nobody reads is let through."""
    if key >= m.key_seen_capacity and not see_key(m, key):
        return False
    if not m.key_seen[key] & EVENT_KEY:
        m.event_names += 1
        if m.event_names > MAX_NAMES:
            return fail(m, TOO_MANY_NAMES)
        m.key_seen[key] |= EVENT_KEY
    if key == W_ADDR:
        m.addr[row] = value.value
        note(m, row, key, is_count(value), HAS_ADDR)
    elif key == W_SIZE:
        m.size[row] = <int64_t>value.value
        note(m, row, key, is_count(value), HAS_SIZE)
    elif key == W_STREAM:
        m.stream[row] = value.value
        note(m, row, key, is_count(value), 0)
    elif key == W_TIME:
        return set_time(m, row, value)
    elif key == W_FRAMES:
        if height_of(value) > 2:
            return fail(m, MISPLACED)
        m.stack_id[row] = <int32_t>value.value if value.tag == STACK else -1
        note(m, row, key, value.tag == STACK or value.tag == NONE, 0)
    elif key == W_ACTION:
        return set_action(m, row, value)
    elif key == W_CONTEXT:
        return set_text(m, row, key, value)
    elif key == W_METADATA:
        return set_text(m, row, key, value)
    elif key == W_POOL:
        return set_pool(m, row, value)
    elif key == W_DEVICE_FREE or key == W_CPP:
        return set_extra(m, row, key, value)
    elif value.tag >= EVENT:
        return fail(m, MISPLACED)
    return True


cdef inline bint is_count(const Cell* value) noexcept nogil:
    """An integer in [0, 2^63)."""
    return value.tag == INTEGER and <int64_t>value.value >= 0


cdef bint see_key(Machine* m, uint32_t key) noexcept nogil:
    cdef size_t before = m.key_seen_capacity
    if not grow(<void**>&m.key_seen, &m.key_seen_capacity, <size_t>key + 1, 1):
        return fail(m, NO_MEMORY)
    memset(m.key_seen + before, 0, m.key_seen_capacity - before)
    return True


cdef bint set_time(Machine* m, uint64_t row, const Cell* value) noexcept nogil:
    if not m.has_time:
        if not add_column(m, <void**>&m.time, 8, 0):
            return False
        m.has_time = True
    m.time[row] = <int64_t>value.value
    note(m, row, W_TIME, is_count(value), HAS_TIME)
    m.traces[m.trace_count - 1].time_seen = True
    return True


cdef inline bint set_action(Machine* m, uint64_t row, const Cell* value) noexcept nogil:
    note(m, row, W_ACTION, value.tag == TEXT, HAS_ACTION)
    if value.tag == TEXT and W_ACTIONS <= value.value < W_ACTIONS + KNOWN_ACTIONS:
        m.action[row] = <uint8_t>(value.value - W_ACTIONS)
        m.has_action = False
    elif value.tag == TEXT:
        # numbered when the event is whole: a later item of the same key may replace it
        m.has_action = True
        m.action_row = row
        m.action_text = <uint32_t>value.value
    return True


cdef bint number_action(Machine* m) noexcept nogil:
    """A code for the name of an action that is not known."""
    cdef uint32_t index = 0
    m.has_action = False
    while index < m.action_count and m.actions[index] != m.action_text:
        index += 1
    if index == m.action_count:
        if KNOWN_ACTIONS + m.action_count >= MAX_ACTIONS:
            return fail(m, TOO_MANY_ACTIONS)
        if not grow(<void**>&m.actions, &m.actions_capacity, m.action_count + 1, 4):
            return fail(m, NO_MEMORY)
        m.actions[index] = m.action_text
        m.action_count += 1
    m.action[m.action_row] = <uint8_t>(KNOWN_ACTIONS + index)
    return True


cdef bint set_text(Machine* m, uint64_t row, uint32_t key, const Cell* value) noexcept nogil:
    """`compile_context` or `user_metadata`; a column is only made when one says something."""
    cdef bint says = value.tag == TEXT and value.value != W_EMPTY and not (key == W_CONTEXT and value.value == W_NA)
    note(m, row, key, value.tag == TEXT or value.tag == NONE, 0)
    if key == W_CONTEXT:
        if not m.has_context:
            if not says:
                return True
            if not add_column(m, <void**>&m.context, 4, 0xFF):
                return False
            m.has_context = True
        m.context[row] = <int32_t>value.value if says else -1
        return True
    if not m.has_metadata:
        if not says:
            return True
        if not add_column(m, <void**>&m.metadata, 4, 0xFF):
            return False
        m.has_metadata = True
    m.metadata[row] = <int32_t>value.value if says else -1
    return True


cdef bint set_pool(Machine* m, uint64_t row, const Cell* value) noexcept nogil:
    note(m, row, W_POOL, value.tag == PAIR or value.tag == NONE, 0)
    m.traces[m.trace_count - 1].pool_seen = True
    if not m.has_pool:
        if not add_column(m, <void**>&m.pool, 4, 0xFF):
            return False
        m.has_pool = True
    m.pool[row] = <int32_t>value.value if value.tag == PAIR else -1
    return True


cdef bint set_extra(Machine* m, uint64_t row, uint32_t key, const Cell* value) noexcept nogil:
    """`device_free` (a number) or `cpp_frames` (a list of texts). The last one of an event counts."""
    cdef Extra* extra
    cdef uint64_t index = m.extra_count
    cdef uint64_t tagged = row << 1 | (1 if key == W_CPP else 0)
    if key == W_CPP:
        note(m, row, key, value.tag == TEXTS or value.tag == NONE or (value.tag == STACK and value.value == 0), 0)
    if value.tag >= EVENT:
        return fail(m, MISPLACED)
    while index > 0 and m.extras[index - 1].row >> 1 == row:
        index -= 1
        if m.extras[index].row == tagged:
            m.extras[index].cell = value[0]
            return True
    if key == W_CPP and value.tag != TEXTS:
        return True  # none, and none before
    if not grow(<void**>&m.extras, &m.extras_capacity, m.extra_count + 1, sizeof(Extra)):
        return fail(m, NO_MEMORY)
    extra = &m.extras[m.extra_count]
    extra.row = tagged
    extra.cell = value[0]
    m.extra_count += 1
    return True


cdef bint fill_trace(Machine* m, uint64_t first) noexcept nogil:
    """Checks the events that go into a trace: each was made there, one after the other."""
    cdef TraceRange* trace = &m.traces[m.trace_count - 1]
    cdef uint64_t slot
    for slot in range(first, m.height):
        if m.stack[slot].tag != EVENT or m.stack[slot].value != trace.end:
            return fail(m, MISPLACED)
        if not end_event(m, trace):
            return False
    return True


cdef inline bint end_event(Machine* m, TraceRange* trace) noexcept nogil:
    """The next row of a trace is whole: what an event of its kind must say is there."""
    cdef uint64_t row = trace.end
    cdef uint16_t mask = m.mask[row]
    cdef uint8_t action
    cdef int word
    trace.end = row + 1
    if m.has_action and m.action_row == row and not number_action(m):
        return False
    if mask & ANY_BAD:
        for word in range(W_CPP + 1):
            if mask & BAD_ITEM << word:
                return bad_event(m, row, word)
    if not mask & HAS_ACTION:
        return bad_event(m, row, W_ACTION)
    action = m.action[row]
    if not mask & HAS_ADDR and action < OOM:
        return bad_event(m, row, W_ADDR)
    if not mask & HAS_SIZE and action <= OOM:
        return bad_event(m, row, W_SIZE)
    if trace.total < SUM_LIMIT:
        trace.total += <uint64_t>m.size[row]
    if trace.total >= SUM_LIMIT or (action <= SEGMENT_UNMAP and m.addr[row] + <uint64_t>m.size[row] > LIMIT):
        return bad_event(m, row, W_SIZE)
    if mask & HAS_TIME:
        trace.timed += 1
    return True
