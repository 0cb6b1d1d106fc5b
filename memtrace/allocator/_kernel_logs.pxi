# ---- what a pass over the events writes down: logs.py

cdef struct BlockLog:
    uint64_t* address
    int64_t* size
    int64_t* requested
    int64_t* born
    int64_t* freed
    int64_t* died
    int64_t* slack_bound
    uint64_t* stream
    int32_t* owner
    int32_t* stack
    Py_ssize_t count


cdef struct ChangeLog:
    int64_t* bytes
    int32_t* event
    int8_t* count
    uint8_t* large
    Py_ssize_t rows
    Py_ssize_t room


cdef struct Span:  # logs.SPAN
    uint64_t address
    int64_t size
    uint64_t stream
    int64_t born
    int64_t died
    int32_t pool
    int32_t stack
    uint8_t large
    uint8_t expandable


cdef struct SpanLog:
    Span* rows
    Py_ssize_t count
    Py_ssize_t room


cdef int changes_add(ChangeLog* log, int32_t event, int count, int64_t size, bint large) except -1 nogil:
    cdef Py_ssize_t room
    if log.rows == log.room:
        room = log.room + (log.room >> 1) + 4096
        log.bytes = <int64_t*>resized(log.bytes, room, sizeof(int64_t))
        log.event = <int32_t*>resized(log.event, room, sizeof(int32_t))
        log.count = <int8_t*>resized(log.count, room, sizeof(int8_t))
        log.large = <uint8_t*>resized(log.large, room, sizeof(uint8_t))
        log.room = room
    log.event[log.rows] = event
    log.count[log.rows] = <int8_t>count
    log.bytes[log.rows] = size
    log.large[log.rows] = large
    log.rows += 1
    return 0


cdef tuple changes_columns(ChangeLog* log):
    return (
        handed_out(<void**>&log.event, log.rows, sizeof(int32_t)),
        handed_out(<void**>&log.count, log.rows, sizeof(int8_t)),
        handed_out(<void**>&log.bytes, log.rows, sizeof(int64_t)),
        handed_out(<void**>&log.large, log.rows, sizeof(uint8_t)),
    )


cdef void changes_end(ChangeLog* log) noexcept nogil:
    free(log.event)
    free(log.count)
    free(log.bytes)
    free(log.large)


cdef int blocks_reserve(BlockLog* log, Py_ssize_t births) except -1 nogil:
    """Room for every block there can be. Pages that nobody writes to cost nothing: `slack_bound` is nearly all 0."""
    if births > INT32_MAX:
        no_memory()
    log.address = <uint64_t*>resized(NULL, births, sizeof(uint64_t))
    log.size = <int64_t*>resized(NULL, births, sizeof(int64_t))
    log.requested = <int64_t*>resized(NULL, births, sizeof(int64_t))
    log.born = <int64_t*>resized(NULL, births, sizeof(int64_t))
    log.freed = <int64_t*>resized(NULL, births, sizeof(int64_t))
    log.died = <int64_t*>resized(NULL, births, sizeof(int64_t))
    log.owner = <int32_t*>resized(NULL, births, sizeof(int32_t))
    log.stack = <int32_t*>resized(NULL, births, sizeof(int32_t))
    log.stream = <uint64_t*>resized(NULL, births, sizeof(uint64_t))
    log.slack_bound = <int64_t*>calloc(births + 1, sizeof(int64_t))
    if log.slack_bound == NULL:
        no_memory()
    return 0


cdef tuple blocks_columns(BlockLog* log):
    return (
        handed_out(<void**>&log.address, log.count, sizeof(uint64_t)),
        handed_out(<void**>&log.size, log.count, sizeof(int64_t)),
        handed_out(<void**>&log.requested, log.count, sizeof(int64_t)),
        handed_out(<void**>&log.born, log.count, sizeof(int64_t)),
        handed_out(<void**>&log.freed, log.count, sizeof(int64_t)),
        handed_out(<void**>&log.died, log.count, sizeof(int64_t)),
        handed_out(<void**>&log.owner, log.count, sizeof(int32_t)),
        handed_out(<void**>&log.stack, log.count, sizeof(int32_t)),
        handed_out(<void**>&log.stream, log.count, sizeof(uint64_t)),
        handed_out(<void**>&log.slack_bound, log.count, sizeof(int64_t)),
    )


cdef void blocks_end(BlockLog* log) noexcept nogil:
    free(log.address)
    free(log.size)
    free(log.requested)
    free(log.born)
    free(log.freed)
    free(log.died)
    free(log.owner)
    free(log.stack)
    free(log.stream)
    free(log.slack_bound)


cdef int32_t spans_add(SpanLog* log, const Range* item, int64_t born, int64_t still) except -2 nogil:
    """A new row, of a range whose extent is new: its number."""
    cdef Py_ssize_t room
    cdef Span* span
    if log.count == log.room:
        room = 2 * log.room + 64
        if room > INT32_MAX:
            no_memory()
        log.rows = <Span*>resized(log.rows, room, sizeof(Span))
        log.room = room
    span = &log.rows[log.count]
    memset(span, 0, sizeof(Span))
    span.address, span.size, span.stream = item.start, item.size, item.stream
    span.pool, span.stack = item.pool, item.stack
    span.large, span.expandable = item.large, item.expandable
    span.born, span.died = born, still
    log.count += 1
    return <int32_t>(log.count - 1)


@cython.final
cdef class _Columns:
    """The events of one device."""

    cdef const uint8_t[::1] action
    cdef const uint64_t[::1] addr
    cdef const int64_t[::1] size
    cdef const uint64_t[::1] stream
    cdef const int32_t[::1] stack
    cdef const int32_t[::1] pool
    cdef bint has_pool
    cdef Py_ssize_t count

    def __cinit__(self, events):
        self.action, self.addr, self.size = events.action, events.addr, events.size
        self.stream, self.stack = events.stream, events.stack
        self.has_pool = events.pool is not None
        if self.has_pool:
            self.pool = events.pool
        self.count = self.action.shape[0]
        lengths = {self.addr.shape[0], self.size.shape[0], self.stream.shape[0], self.stack.shape[0]}
        if lengths != {self.count} or (self.has_pool and self.pool.shape[0] != self.count):
            raise ValueError("columns of events differ in length")
        if self.count > INT32_MAX // 4:
            raise OverflowError("more events than the replay can number")

    cdef inline int32_t pool_of(self, Py_ssize_t event) noexcept nogil:
        return self.pool[event] if self.has_pool else UNKNOWN_POOL


cdef inline Range event_range(_Columns events, Py_ssize_t event, bint expandable) noexcept nogil:
    """The range of a segment event, in the pool its size says; no owner, no span."""
    cdef Range item
    item.start, item.size, item.stream = events.addr[event], events.size[event], events.stream[event]
    item.pool, item.stack = events.pool_of(event), events.stack[event]
    item.large, item.expandable = item.size != SMALL_SEGMENT, expandable
    item.owner = item.span = NONE
    return item
