"""Cells, the unpickler's stack, its marks and memo, and the containers that are being filled."""

cdef enum:
    # limits that the loops compare with: `Decoder` holds them against `roles`
    MAX_DEPTH = 30
    MAX_INTEGER_BYTES = 9
    MAX_KEYS = 64
    MAX_KEY_BYTES = 1024
    MAX_TEXT_BYTES = 1 << 20
    DICT_WEIGHT = 12
    SEQUENCE_WEIGHT = 6
    FREE_WEIGHT = 65536
    FREE_VALUES = 1000000
    MAX_STACK_FRAMES = 100000
    MAX_DEVICES = 512
    MAX_CONTAINERS = 500000
    MAX_NAMES = 1000
    WIDEST = 16  # no opcode with its operand is longer, texts apart

cdef enum:
    # tags of cells. In the memo:
    TEXT = 0
    FRAME = 1
    STACK = 2
    TEXTS = 3
    PAIR = 4
    JUNK = 5  # another container without a role; the value is its height, + IS_DICT of a dict
    OPEN = 6  # a container in the slot where it was made; the value is its index in `fresh`
    ONCE = 7  # a container with a role
    # only on the stack and in nodes:
    INTEGER = 8
    BIG = 9  # an integer beyond 64 bits: the id of its bytes in `bigs`
    FLOAT = 10
    BOOL = 11
    NONE = 12
    EVENT = 13  # from here on: with a role
    NODE = 14
    A_BLOCK = 15
    A_NOTE = 16

cdef enum:
    IS_DICT = 0x80

cdef enum:
    OTHER = 0
    TOP = 1
    TRACES = 2
    TRACE = 3
    AN_EVENT = 4
    SEGMENTS = 5
    SEGMENT = 6
    BLOCKS = 7
    BLOCK = 8
    HISTORY = 9
    PAST = 10
    SETTINGS = 11
    TABLE = 12
    NOTES = 13
    NOTE = 14

cdef enum:
    # what a list without a role holds so far
    NOTHING = 0
    FRAMES = 1
    NAMES = 2
    NUMBERS = 3
    MIXED = 4

cdef enum:
    # ids of the texts that are interned first: `WORDS` in this order
    W_ACTION, W_ADDR, W_SIZE, W_STREAM, W_FRAMES, W_TIME, W_CONTEXT, W_METADATA, W_POOL, W_DEVICE_FREE, W_CPP
    W_TRACES, W_SEGMENTS, W_SETTINGS, W_NOTES, W_BLOCKS, W_HISTORY, W_FILENAME, W_LINE, W_NAME
    W_ADDRESS, W_REQUESTED, W_STATE, W_STAGE, W_DEVICE, W_START, W_END, W_EMPTY, W_NA
    W_ACTIONS

WORDS = (
    *"action addr size stream frames time_us compile_context user_metadata pool_id device_free cpp_frames".split(),
    *"device_traces segments allocator_settings external_annotations blocks history filename line name".split(),
    *"address requested_size state stage device START END".split(),
    "", "N/A",
    *"alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap oom snapshot".split(),
    "annotate",
)

cdef enum:
    FINE = 0
    NO_MEMORY, REFUSED_OPCODE, CUT_OFF, NOT_KEPT, NO_BEGINNING, NOT_THERE, NO_CONTAINER, KEPT_TWICE, NO_VALUE, ITSELF
    NUMBERING, KEEPS_NUMBER, TOO_DEEP, BAD_KEY, TOO_HEAVY, TOO_MANY_VALUES, TOO_MANY_KEYS, LONG_INTEGER
    NEGATIVE_LENGTH, LONG_TEXT, NOT_UTF8, SHARED, MISPLACED, LEFT_OVER
    BAD_EVENT, TOO_MANY_DEVICES, TOO_MANY_ACTIONS, TOO_MANY_CONTAINERS, TOO_MANY_NAMES

FAILURES = (
    "fine",
    *"no_memory refused_opcode cut_off not_kept no_beginning not_there no_container kept_twice no_value itself".split(),
    *"numbering keeps_number too_deep bad_key too_heavy too_many_values too_many_keys long_integer".split(),
    *"negative_length long_text not_utf8 shared misplaced left_over".split(),
    *"bad_event too_many_devices too_many_actions too_many_containers too_many_names".split(),
)

cdef struct Cell:
    uint64_t value
    uint8_t tag

cdef struct Node:
    uint64_t start  # in `cells`; of a list of blocks, its first row
    uint32_t count  # of cells: two for each item of a dict; of blocks
    uint8_t role
    bint is_dict

cdef struct Mark:
    uint64_t slot
    uint64_t fresh  # how many containers were fresh then

cdef struct Fresh:
    # a container in the stack slot where it was made: it may still grow
    uint64_t slot
    uint64_t ids_start  # where its content begins in `open_ids`, or would
    uint64_t cells_start  # and in `open_cells`
    uint64_t row
    int64_t filename  # of what may be a frame: text id, -1 not said, -2 no text
    int64_t function
    int64_t line
    int64_t first  # of a list of numbers
    int64_t second
    uint32_t memo  # index + 1; 0: not kept
    uint32_t count
    uint8_t role
    bint is_dict
    bint fetched
    uint8_t holding
    uint8_t height
    uint32_t children  # the roles of its values, as bits
    Cell settled  # what it is, once it was fetched: then it cannot change any more

cdef struct TraceRange:
    uint64_t start
    uint64_t end
    uint64_t timed
    uint64_t total
    bint time_seen
    bint pool_seen

cdef struct Extra:
    # a rare value of an event
    uint64_t row
    Cell cell

cdef struct Machine:
    uint64_t consumed  # bytes of the pickle before the opcode at hand
    Cell* stack
    size_t stack_capacity
    uint64_t height
    Mark marks[MAX_DEPTH + 2]
    uint32_t mark_count
    uint64_t fence  # what lies below the last mark is out of reach
    uint32_t* memo
    size_t memo_capacity
    uint32_t memo_count
    Fresh* fresh
    size_t fresh_capacity
    uint64_t fresh_count
    uint32_t* open_ids
    size_t open_ids_capacity
    Cell* open_cells
    size_t open_cells_capacity
    Cell* cells
    size_t cells_capacity
    uint64_t cell_count
    Node* nodes
    size_t nodes_capacity
    uint64_t node_count
    uint64_t weight

    Interned texts
    Interned frames
    Interned stacks
    Interned lists
    Interned pairs
    Interned bigs
    Secret secret

    uint8_t* action
    uint16_t* mask
    uint64_t* addr
    int64_t* size
    uint64_t* stream
    int32_t* stack_id
    size_t rows_capacity
    uint64_t rows
    int64_t* time
    int32_t* pool
    int32_t* context
    int32_t* metadata
    bint has_time
    bint has_pool
    bint has_context
    bint has_metadata
    Extra* extras  # device_free and cpp_frames: `cell.tag` tells
    size_t extras_capacity
    uint64_t extra_count
    TraceRange* traces
    size_t traces_capacity
    uint32_t trace_count
    uint8_t* key_seen  # by text id, over all events and blocks
    size_t key_seen_capacity
    uint32_t* actions  # text ids of the kinds that are not known
    size_t actions_capacity
    uint32_t action_count

    uint8_t* block_mask
    uint64_t* block_address
    int64_t* block_size
    int64_t* block_requested
    int32_t* block_state  # text ids
    int32_t* block_stack
    size_t blocks_capacity
    uint64_t blocks
    uint8_t* note_mask
    int32_t* note_name  # text ids
    int32_t* note_stage
    int64_t* note_device
    int64_t* note_time
    size_t notes_capacity
    uint64_t notes
    uint64_t containers  # segments, settings and the like
    uint32_t event_names  # different keys of events, of blocks
    uint32_t block_names
    uint64_t action_row  # the event whose action was named last, and the text
    uint32_t action_text
    bint has_action
    Extra* pasts  # `history` of blocks
    size_t pasts_capacity
    uint64_t past_count

    Cell result
    int failure
    bint has_bad_event  # the first one: what makes a file unsafe is said first
    uint64_t bad_row
    int bad_word


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


# -- making containers


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
        if last.count == 0 and slot == last.slot + 2 and m.stack[slot - 1].tag == TEXT:
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
    cdef uint64_t slot
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
    if target.is_dict and target.count + (m.height - first) > 2 * MAX_KEYS:
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
    memcpy(m.open_cells + end, m.stack + first, (m.height - first) * sizeof(Cell))
    target.count += <uint32_t>(m.height - first)
    return True
