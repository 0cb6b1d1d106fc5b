# ---- counters over time: sums.py

cdef inline bint counts_in(const uint8_t[::1] large, Py_ssize_t row, int pool) noexcept nogil:
    """Whether a row is of that pool: 1 the large one, 0 the small one, -1 both."""
    return pool < 0 or large[row] == pool


cdef int no_event(Py_ssize_t row) except -1:
    raise IndexError(f"row {row} is of no event of the trace")


def add_lifetimes(int64_t[::1] delta, const int64_t[::1] born, const int64_t[::1] end, amount, large, int pool):
    """Adds an amount (None: 1) at every birth, and takes it away at the end if that is an event of the trace.

    `delta` has an entry for the time before the first event and one for each event. A block that ended before it was
    born (it was pending at the start) does not count.
    """
    cdef const int64_t[::1] amounts = born if amount is None else amount
    cdef const uint8_t[::1] larges = large.view("u1")
    cdef bint each_one = amount is None
    cdef Py_ssize_t row, rows = born.shape[0], events = delta.shape[0] - 1
    cdef int64_t by = 1
    if {end.shape[0], amounts.shape[0], larges.shape[0]} != {rows}:
        raise ValueError("columns of blocks differ in length")
    with nogil:
        for row in range(rows):
            if end[row] <= born[row] or not counts_in(larges, row, pool):
                continue
            if born[row] < BEFORE or born[row] >= events:
                with gil:
                    no_event(row)
            if not each_one:
                by = amounts[row]
            delta[born[row] + 1] += by
            if end[row] < events:
                delta[end[row] + 1] -= by


ctypedef fused Amount:
    const int8_t
    const int64_t


def add_changes(int64_t[::1] delta, const int32_t[::1] event, Amount[::1] amount, large, int pool):
    """Adds an amount at every event (-1: before the first) of a log of changes."""
    cdef const uint8_t[::1] larges = large.view("u1")
    cdef Py_ssize_t row, rows = event.shape[0], events = delta.shape[0] - 1
    if {amount.shape[0], larges.shape[0]} != {rows}:
        raise ValueError("columns of changes differ in length")
    with nogil:
        for row in range(rows):
            if event[row] < BEFORE or event[row] >= events:
                with gil:
                    no_event(row)
            if counts_in(larges, row, pool):
                delta[event[row] + 1] += amount[row]
