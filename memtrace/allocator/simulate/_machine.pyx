# distutils: language = c++
# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native machine: torch's caching allocator by the rules of `machine`, `blocks` and `start`, in C++.

Those three modules are the reference: every function here has the name of the one there that it does the work of, in
the same order, and gives the same to the last byte. The loop runs without the GIL and takes it to ask the driver, to
report progress and to look for signals. Addresses are uint64, sizes int64; rows of blocks are looked at before they are
used. What a driver answers is only ever a number, so that no answer can do harm.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cython.operator cimport dereference, predecrement, preincrement
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp.deque cimport deque
from libcpp.map cimport map as ordered_map
from libcpp.set cimport set as ordered_set
from libcpp.utility cimport pair
from libcpp.vector cimport vector

import numpy as np

from memtrace.allocator.simulate import machine as reference
from memtrace.allocator.simulate.requests import SegmentEvents

cdef enum:  # requests.Call
    CALL_ALLOC = 0
    CALL_FREE_REQUESTED = 1
    CALL_FREE_COMPLETED = 2
    CALL_FREE = 3
    CALL_OOM = 4
    CALL_EMPTY_CACHE = 5
    CALL_PRIVATE_SEGMENT = 6
    CALL_PRIVATE_SEGMENT_FREE = 7
    CALL_PRIVATE_ALLOC = 8
    CALL_PRIVATE_FREE_REQUESTED = 9
    CALL_PRIVATE_FREE_COMPLETED = 10
    CALL_PRIVATE_FREE = 11
    CALL_PRIVATE_OOM = 12

cdef enum:  # requests.SegmentKind
    SEGMENT_ALLOC = 0
    SEGMENT_FREE = 1
    SEGMENT_MAP = 2
    SEGMENT_UNMAP = 3

cdef enum:  # rules.Tie
    TIE_ADDRESS = 0
    TIE_OBJECT = 1
    TIE_SEGMENT = 2

cdef enum:  # sizes.py, rules.py
    MIN_BLOCK = 512
    SMALL_REQUEST = 1 << 20
    SMALL_SEGMENT = 2 << 20
    LARGE_REMAINDER = 1 << 20
    LARGE_REQUEST = 10 << 20
    SEGMENT_STEP = 2 << 20

cdef enum:  # the states of a block
    FREE = 0
    LIVE = 1
    PENDING = 2
    UNMAPPED = 3

cdef enum:
    LARGE = 0  # the large pool comes first where both are gone through
    SMALL = 1
    NOBODY = -1
    NEVER = -1
    PATIENCE = 1 << 20  # rows and blocks gone through between two looks for signals

cdef int64_t UNLIMITED = INT64_MAX
cdef int64_t RESERVATION = <int64_t>1 << 46  # driver.RESERVATION

include "_machine_blocks.pxi"
include "_machine_driver.pxi"
include "_machine_start.pxi"


def run(work, rules, driver, flush_before=None, progress=None):
    """`machine.Machine(work, rules, driver, flush_before, progress).run()`, native."""
    requests = work.requests
    cdef const uint8_t[::1] call = np.ascontiguousarray(requests.call, np.uint8)
    cdef const int32_t[::1] block = np.ascontiguousarray(requests.block, np.int32)
    cdef const int64_t[::1] size = np.ascontiguousarray(requests.size, np.int64)
    cdef const int64_t[::1] need = np.ascontiguousarray(rules.rounded(requests.size), np.int64)
    cdef const int32_t[::1] stream = np.ascontiguousarray(requests.stream, np.int32)
    cdef const uint8_t[::1] flush = None
    cdef Py_ssize_t row, rows = call.shape[0], heard_every = reference.HEARD_EVERY
    cdef bint flushes = flush_before is not None, is_heard = progress is not None
    cdef Machine m = machine_of(work, rules, driver)
    if {block.shape[0], size.shape[0], need.shape[0], stream.shape[0]} != {rows}:
        raise ValueError("columns of requests differ in length")
    if flushes:
        flush = np.ascontiguousarray(flush_before, np.bool_).view(np.uint8)
        if flush.shape[0] < rows:
            raise ValueError("fewer flags than requests")
    with nogil:
        for row in range(rows):
            m.row = row
            tick(m)
            if is_heard and row % heard_every == 0:
                with gil:
                    progress(row, rows)
            if flushes and flush[row]:
                release_cached(m)
            if answer(m, call[row], block[row], size[row], need[row], stream[row]):
                continue
            m.ooms += 1
            if m.first_oom == NEVER:
                m.first_oom = row
            if call[row] != CALL_OOM and call[row] != CALL_PRIVATE_OOM:
                m.stopped = row
                break
        if flushes and m.stopped == NEVER and flush.shape[0] > rows and flush[rows]:
            m.row = rows
            release_cached(m)
    return outcome(m)


cdef Machine machine_of(work, rules, driver):
    """A machine as it is before the first row."""
    cdef Machine m = Machine()
    cdef size_t rows = work.blocks
    m.driver = driver
    m.address_column, m.size_column = np.zeros(rows, np.uint64), np.zeros(rows, np.int64)
    m.address, m.size = m.address_column, m.size_column
    m.private_size = np.ascontiguousarray(work.block_size, np.int64)
    if m.private_size.shape[0] != <Py_ssize_t>rows:
        raise ValueError("columns of blocks differ in length")
    m.held.resize(rows)
    m.first_waiting = m.last_waiting = NOBODY
    m.tie = rules.tie
    m.expandable = rules.expandable
    m.max_split_size = bounded(rules.max_split_size)
    m.non_split_rounding = bounded(rules.non_split_rounding)
    m.large_page = bounded(rules.large_page)
    if m.large_page == 0:
        raise ValueError("pages have a size")
    m.limit = UNLIMITED if rules.limit is None else bounded(rules.limit)
    m.counts_age = rules.limit is not None and rules.collect_above > 0
    m.collect_to = bounded(int(rules.collect_above * rules.limit)) if m.counts_age else 0
    m.first_oom = m.first_served = m.stopped = NEVER
    m.refused = UNLIMITED
    m.passes_over = not rules.expandable and bool(work.start.range_expandable.any())
    place(m, work.start)
    return m


cdef int64_t bounded(value):
    """A size in bytes of the settings: what is above any memory is UNLIMITED."""
    return min(max(value, 0), UNLIMITED)


cdef outcome(Machine m):
    cdef Py_ssize_t index, count = m.log.size()
    rows, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
    kinds, addresses, streams = np.empty(count, np.uint8), np.empty(count, np.uint64), np.empty(count, np.int32)
    cdef int64_t[::1] row = rows, size = sizes
    cdef uint8_t[::1] kind = kinds
    cdef uint64_t[::1] address = addresses
    cdef int32_t[::1] stream = streams
    for index in range(count):
        row[index], kind[index] = m.log[index].row, m.log[index].kind
        address[index], size[index] = m.log[index].address, m.log[index].size
        stream[index] = m.log[index].stream
    return reference.Outcome(
        reserved_peak=m.reserved_peak,
        allocated_peak=m.allocated_peak,
        active_peak=m.active_peak,
        inactive_split_peak=m.split_peak,
        device_allocs=m.device_allocs,
        device_frees=m.device_frees,
        retries=m.retries,
        ooms=m.ooms,
        first_oom=m.first_oom,
        first_served=m.first_served,
        stopped=m.stopped,
        reserved_at_end=m.total,
        proven=m.proven,
        refused=None if m.refused == UNLIMITED else m.refused,
        segments=SegmentEvents(row=rows, kind=kinds, address=addresses, size=sizes, stream=streams),
        address=m.address_column,
        size=m.size_column,
    )


# ---- the calls

cdef int answer(
    Machine m, uint8_t call, int32_t row, int64_t size, int64_t need, int32_t stream
) except -1 nogil:
    """One request. 0: out of memory."""
    if call == CALL_ALLOC:
        check_row(m, row)
        return alloc(m, row, need, stream)
    elif call == CALL_FREE_REQUESTED:
        check_row(m, row)
        free_requested(m, row)
    elif call == CALL_FREE_COMPLETED:
        check_row(m, row)
        free_completed(m, row)
    elif call == CALL_FREE:
        check_row(m, row)
        free_requested(m, row)
        free_completed(m, row)
    elif call == CALL_EMPTY_CACHE:
        release_cached(m)
    elif call == CALL_PRIVATE_SEGMENT:
        return private_segment(m, size)
    elif call == CALL_PRIVATE_SEGMENT_FREE:
        m.total -= size
        m.device_frees += 1
    elif call == CALL_PRIVATE_OOM:
        return make_room(m, size) and note_served(m)
    elif call == CALL_PRIVATE_ALLOC:
        check_row(m, row)
        counted(m, m.private_size[row])
    elif call == CALL_PRIVATE_FREE_REQUESTED:
        check_row(m, row)
        m.allocated -= m.private_size[row]
    elif call == CALL_PRIVATE_FREE_COMPLETED:
        check_row(m, row)
        m.active -= m.private_size[row]
    elif call == CALL_PRIVATE_FREE:
        check_row(m, row)
        m.allocated -= m.private_size[row]
        m.active -= m.private_size[row]
    else:
        return failed_request(m, need, stream)
    return 1


cdef inline int check_row(Machine m, int32_t row) except -1 nogil:
    """Whether there is such a block. Raises IndexError."""
    if row < 0 or row >= m.address.shape[0]:
        with gil:
            raise IndexError(f"there is no block {row}")
    return 0


cdef inline int alloc(Machine m, int32_t row, int64_t need, int32_t stream) except -1 nogil:
    cdef Block* block = NULL
    if not serve(m, need, stream, &block):
        return 0
    m.held[row].block = block
    m.address[row] = block.address
    m.size[row] = block.size
    counted(m, block.size)
    return 1


cdef inline void counted(Machine m, int64_t size) noexcept nogil:
    m.allocated += size
    m.active += size
    m.allocated_peak = max(m.allocated_peak, m.allocated)
    m.active_peak = max(m.active_peak, m.active)


cdef int free_requested(Machine m, int32_t row) except -1 nogil:
    cdef Block* block = m.held[row].block
    if block == NULL:
        with gil:
            raise KeyError(row)
    block.state = PENDING
    wait_for(m, row, block)
    m.allocated -= block.size
    return 0


cdef int free_completed(Machine m, int32_t row) except -1 nogil:
    cdef Block* block = m.held[row].waiting
    if block != NULL:  # else it was waited for by a release of the cache
        waited_for(m, row)
        m.held[row].block = NULL
        m.active -= block.size
        free_block(m, block)
    return 0


cdef int failed_request(Machine m, int64_t need, int32_t stream) except -1 nogil:
    """A request that failed in the recording. Where it does not, its memory is given back at once."""
    cdef Block* block = NULL
    if not serve(m, need, stream, &block):
        return 0
    note_served(m)
    counted(m, block.size)
    m.allocated -= block.size
    m.active -= block.size
    free_block(m, block)
    return 1


cdef inline int note_served(Machine m) noexcept nogil:
    if m.first_served == NEVER:
        m.first_served = m.row
    return 1


cdef int private_segment(Machine m, int64_t size) except -1 nogil:
    """A segment of a private pool: taken as recorded, if the limit allows."""
    if not make_room(m, size):
        return 0
    m.total += size
    m.device_allocs += 1
    m.reserved_peak = max(m.reserved_peak, m.total)
    m.proven = max(m.proven, m.total)
    return 1


cdef int make_room(Machine m, int64_t size) except -1 nogil:
    """0: there is no room for a private pool's segment. Nothing is given back for it."""
    if m.counts_age:
        garbage_collect(m)
    return not is_against(m, size)


cdef int is_against(Machine m, int64_t size) except -1 nogil:
    """Whether the limit or the driver is, before anything is asked of it."""
    if is_over(m, size):
        return 1
    if driver_refuses(m):
        m.refused = min(m.refused, total_with(m, size))
        return 1
    return 0


# ---- malloc

cdef int serve(Machine m, int64_t need, int32_t stream, Block** found) except -1 nogil:
    """`malloc`: a block of at least `need` bytes, in use. 0: out of memory."""
    cdef int64_t owner = owner_of(SMALL if need <= SMALL_REQUEST else LARGE, stream)
    cdef uint64_t wanted
    cdef int served = get_free_block(m, owner, need, found)
    if not served:
        wanted = segment_size(m, need)
        if m.counts_age:
            garbage_collect(m)
        served = alloc_block(m, owner, need, wanted, found)
        if not served and release_available(m, owner, need):
            served = alloc_block(m, owner, need, wanted, found)
        if not served:
            release_cached(m)
            m.retries += 1
            served = alloc_block(m, owner, need, wanted, found)
    if served:
        found[0] = cut(m, found[0], need)
    return served


cdef inline uint64_t segment_size(Machine m, int64_t rounded) noexcept nogil:
    """`Rules.segment_size`."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if rounded < LARGE_REQUEST:
        return m.large_page
    return up_to(rounded, SEGMENT_STEP)


cdef inline Block* cut(Machine m, Block* block, int64_t need) except NULL nogil:
    """Takes what is needed off the front; `block` is in no list."""
    cdef int64_t rest = block.size - need
    cdef bint fine = pool_of(block.owner) == SMALL or m.expandable
    cdef Block* front
    if rest >= MIN_BLOCK if fine else need < m.max_split_size and rest > LARGE_REMAINDER:
        front = piece_of(m, block, block.address, need, LIVE)
        link_before(block, front)
        block.address += need
        block.size = rest
        insert(m, block)
        return front
    block.state = LIVE
    return block


cdef int get_free_block(Machine m, int64_t owner, int64_t need, Block** found) except -1 nogil:
    """The best fit among cached blocks. 0: none."""
    cdef ordered_set[Key].iterator at, end = m.free.end()
    cdef Block* block
    cdef Block* following
    if m.counts_age:
        m.searches[pool_of(owner)] += 1
    if m.passes_over:  # the walk below, in one step
        at, end = m.plain.lower_bound(first_key(owner, need)), m.plain.end()
    else:
        at = m.free.lower_bound(first_key(owner, need))
    if at == end or owner_at(at) != owner:
        return 0
    block = block_at(at)
    if block.in_region and m.expandable:
        while block.in_region:
            tick(m)
            preincrement(at)
            if at == end or owner_at(at) != owner:
                break
            following = block_at(at)
            if room_of(following) >= room_of(block):
                break
            block = following
    elif block.in_region:
        while block.in_region:
            tick(m)
            preincrement(at)
            if at == end or owner_at(at) != owner:
                return 0
            block = block_at(at)
    if need < m.max_split_size and m.max_split_size <= block.size:
        return 0
    if need >= m.max_split_size and block.size - need >= m.non_split_rounding:
        return 0
    remove(m, block)
    found[0] = block
    return 1


cdef inline bint is_over(Machine m, uint64_t size) noexcept nogil:
    return m.limit != UNLIMITED and (m.total > m.limit or size > <uint64_t>m.limit - <uint64_t>m.total)


cdef inline int64_t total_with(Machine m, uint64_t size) noexcept nogil:
    """What is reserved and so much more, UNLIMITED at most."""
    cdef uint64_t total = <uint64_t>m.total + size
    return UNLIMITED if m.total >= 0 and total > <uint64_t>UNLIMITED else <int64_t>total


cdef int alloc_block(Machine m, int64_t owner, int64_t need, uint64_t wanted, Block** found) except -1 nogil:
    """New memory from the driver, in no list; 0 if the limit or the driver is against it."""
    cdef int64_t after = total_with(m, wanted)
    cdef uint64_t address = 0
    cdef int given
    if is_over(m, wanted):
        return 0
    if driver_refuses(m):
        given = 0
    elif m.expandable:
        given = expand(m, owner, need, found)
    else:
        given = driver_allocate(m, wanted, &address)
        if given:
            found[0] = segment_of(m, owner, address, <int64_t>wanted, FREE, False)
            took(m, SEGMENT_ALLOC, owner, address, <int64_t>wanted)
    if given:
        m.proven = max(m.proven, after)
    else:
        m.refused = min(m.refused, after)
    return given


cdef int expand(Machine m, int64_t owner, int64_t need, Block** found) except -1 nogil:
    cdef Block* block = NULL
    if not expandable_candidate(m, owner, need, &block):
        return 0
    if block.state == UNMAPPED and not map_pages(m, block, min(block.size, need)):
        return 0
    while block.size < need:
        block = block.next
        if block == NULL or block.state != UNMAPPED:
            with gil:
                raise AssertionError("the candidate was found to have room")
        if not map_pages(m, block, min(need - block.prev.size, block.size)):
            return 0
    remove(m, block)
    found[0] = block
    return 1


cdef int expandable_candidate(Machine m, int64_t owner, int64_t need, Block** found) except -1 nogil:
    """The lowest unmapped block of the stream, or the free one before it, from which on there is room."""
    cdef ordered_set[Place].iterator at = m.unmapped.lower_bound(place_key(owner, 0, NULL))
    cdef uint64_t start = 0
    cdef int64_t size = 0, room
    cdef Block* block
    cdef Block* here
    while at != m.unmapped.end() and dereference(at).first.first == owner:
        block = dereference(at).second
        if block.prev != NULL and (block.prev.state == FREE or block.prev.state == UNMAPPED):
            block = block.prev
        room = 0
        here = block
        while room < need and here != NULL and (here.state == FREE or here.state == UNMAPPED):
            tick(m)
            room += here.size
            here = here.next
        if room >= need:
            found[0] = block
            return 1
        preincrement(at)
    if not driver_reserve(m, &start, &size) or size < need:
        return 0
    found[0] = segment_of(m, owner, start, size, UNMAPPED, True)
    insert_unmapped(m, found[0])
    return 1


cdef int map_pages(Machine m, Block* block, int64_t size) except -1 nogil:
    """`_map`. 0: the driver refuses."""
    cdef Block* rest
    cdef uint64_t address = block.address
    size = <int64_t>min(up_to(size, page(m, block.owner)), <uint64_t>block.size) if size > 0 else 0
    if not driver_map(m, address, size):
        return 0
    remove_unmapped(m, block)
    block.state = FREE
    if size < block.size:
        rest = piece_of(m, block, address + size, block.size - size, UNMAPPED)
        link_after(block, rest)
        block.size = size
        insert_unmapped(m, rest)
    merge(m, block, block.prev)
    merge(m, block, block.next)
    insert(m, block)
    took(m, SEGMENT_MAP, block.owner, address, size)
    return 1


# ---- giving back

cdef inline int free_block(Machine m, Block* block) except -1 nogil:
    """Back to the free list, joined with free neighbours."""
    block.state = FREE
    merge(m, block, block.prev)
    merge(m, block, block.next)
    insert(m, block)
    return 0


cdef int release_available(Machine m, int64_t owner, int64_t need) except -1 nogil:
    """Frees oversize blocks of the stream, as few as will do. Whether that gave enough."""
    cdef int64_t most = m.max_split_size, want = max(need, most), given = 0
    cdef ordered_set[Key].iterator at
    cdef Block* block
    if most == UNLIMITED:
        return 0
    at = m.free.lower_bound(first_key(owner, want))
    if at != m.free.end() and owner_at(at) == owner:
        block = block_at(at)
        if not block.in_region and not is_split(block):
            release(m, block)
            return 1
    while given < want and at != m.free.begin():
        tick(m)
        predecrement(at)
        block = block_at(at)
        if block.owner != owner or block.size < most:
            break
        if not block.in_region and not is_split(block):
            given += block.size
            preincrement(at)  # stays where it is when the block goes
            release(m, block)
    return given >= want


cdef int garbage_collect(Machine m) except -1 nogil:
    """Frees whole cached segments of the large pool that have not been used for longest."""
    cdef int64_t target = m.total - m.collect_to, age = 0, calls
    cdef int64_t reclaimed = 0
    cdef vector[Block*] old
    cdef ordered_set[Key].iterator at = m.free.begin()
    cdef Block* block
    cdef size_t index, kept
    cdef double least
    cdef bint found = True
    if target <= 0:
        return 0
    while at != m.free.end() and pool_of(owner_at(at)) == LARGE:
        tick(m)
        block = block_at(at)
        if not block.in_region and not is_split(block):
            old.push_back(block)
            age += m.searches[LARGE] - block.base
        preincrement(at)
    while reclaimed < target and found and not old.empty():
        least, found, kept = <double>age / <double>old.size(), False, 0
        for index in range(old.size()):
            block = old[index]
            calls = m.searches[LARGE] - block.base
            if calls >= least:
                found = True
                reclaimed += block.size
                age -= calls
                release(m, block)
            else:
                old[kept] = block
                kept += 1
        old.resize(kept)
    return 0


cdef int release_cached(Machine m) except -1 nogil:
    """`empty_cache()`: waits for streams, then gives back all segments that hold nothing."""
    cdef ordered_set[Key].iterator at
    cdef vector[Block*] cached
    cdef Block* block
    cdef size_t index, pieces
    cdef int pool
    while m.first_waiting != NOBODY:
        free_completed(m, m.first_waiting)
    if not m.givable:
        return 0
    for pool in range(LARGE, SMALL + 1):
        cached.clear()
        at = m.free.lower_bound(first_key(owner_of(pool, 0), 0))
        while at != m.free.end() and pool_of(owner_at(at)) == pool:
            tick(m)
            cached.push_back(block_at(at))
            preincrement(at)
        pieces = 0
        for index in range(cached.size()):
            block = cached[index]
            if block.in_region:
                cached[pieces] = block
                pieces += 1
            elif not is_split(block):
                release(m, block)
        for index in range(pieces):
            unmap(m, cached[index])
    return 0


cdef int release(Machine m, Block* block) except -1 nogil:
    remove(m, block)
    gave(m, SEGMENT_FREE, block.owner, block.address, block.size)
    drop(m, block)
    return 0


cdef int unmap(Machine m, Block* block) except -1 nogil:
    """Unmaps the whole pages inside a free block; a reservation that is left unmapped whole is dropped."""
    cdef uint64_t size = page(m, block.owner), behind = block.address + block.size
    cdef uint64_t first = block.origin + up_to(block.address - block.origin, size)
    cdef uint64_t end = block.origin + (behind - block.origin) // size * size
    cdef Block* piece
    if end <= first:
        return 0
    remove(m, block)
    if first > block.address:
        piece = piece_of(m, block, block.address, <int64_t>(first - block.address), FREE)
        link_before(block, piece)
        insert(m, piece)
    if end < behind:
        piece = piece_of(m, block, end, <int64_t>(behind - end), FREE)
        link_after(block, piece)
        insert(m, piece)
    block.address, block.size, block.state = first, <int64_t>(end - first), UNMAPPED
    merge(m, block, block.prev)
    merge(m, block, block.next)
    insert_unmapped(m, block)
    gave(m, SEGMENT_UNMAP, block.owner, first, <int64_t>(end - first))
    if not is_split(block):
        remove_unmapped(m, block)
        drop(m, block)
    return 0
