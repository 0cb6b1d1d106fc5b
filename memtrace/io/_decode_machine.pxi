"""What the walk works on: cells, roles, failures, and the machine that holds it all."""

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
    W_ADDRESS, W_REQUESTED, W_STATE, W_STAGE, W_DEVICE, W_START, W_END
    W_TOTAL_SIZE, W_ALLOCATED_SIZE, W_ACTIVE_SIZE, W_SEGMENT_TYPE, W_SEGMENT_POOL, W_EXPANDABLE, W_EMPTY, W_NA
    W_ACTIONS

WORDS = (
    *"action addr size stream frames time_us compile_context user_metadata pool_id device_free cpp_frames".split(),
    *"device_traces segments allocator_settings external_annotations blocks history filename line name".split(),
    *"address requested_size state stage device START END".split(),
    *"total_size allocated_size active_size segment_type segment_pool_id is_expandable".split(),
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
    uint32_t count  # of what is kept of it
    uint32_t items  # of a dict whose items are kept as cells
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
