# ---- blocks, and the lists they are kept in: blocks.py, and the last part of machine.py

cdef struct Block:
    int64_t owner  # pool and stream: `owner_of`
    uint64_t address
    int64_t size
    int64_t made
    int64_t segment
    int64_t base
    uint64_t origin  # where its region begins
    Block* prev
    Block* next
    int state
    bint in_region


ctypedef Block* BlockPointer

ctypedef pair[pair[int64_t, int64_t], pair[pair[uint64_t, uint64_t], BlockPointer]] Key
"""Place of a free block: owner and size, then what decides between equals."""

ctypedef pair[pair[int64_t, uint64_t], BlockPointer] Place
"""Place of an unmapped one: owner and address."""


cdef struct Held:
    Block* block  # of a row: the one it is in, or NULL
    Block* waiting  # the one that waits for a stream, or NULL
    int32_t before  # rows that wait, in order, or NOBODY
    int32_t after


cdef struct Event:
    int64_t row
    uint64_t address
    int64_t size
    int32_t stream
    uint8_t kind


@cython.final
cdef class Machine:
    """The state of a run; its functions are those of `machine.Machine`."""

    cdef object driver, address_column, size_column
    cdef uint64_t[::1] address
    cdef int64_t[::1] size
    cdef const int64_t[::1] private_size

    cdef int tie
    cdef bint expandable, counts_age
    cdef int64_t max_split_size, non_split_rounding, large_page, limit, collect_to

    cdef int64_t row, ticks
    cdef deque[Block] blocks  # they stay where they are
    cdef vector[Block*] spare
    cdef ordered_set[Key] free
    cdef ordered_set[Key] plain  # those of `free` in no region, where regions are only passed over
    cdef bint passes_over
    cdef int64_t givable  # blocks in `free` of which memory may be given back
    cdef ordered_set[Place] unmapped
    cdef vector[Held] held
    cdef int32_t first_waiting, last_waiting
    cdef vector[Event] log

    cdef int64_t searches[2]
    cdef int64_t made, segment_count
    cdef int64_t total, reserved_peak, allocated, allocated_peak, active, active_peak, split, split_peak
    cdef int64_t device_allocs, device_frees, retries, ooms, first_oom, first_served, stopped, proven, refused


cdef inline int tick(Machine m) except -1 nogil:
    """Counts what is gone through. Now and then it looks for signals."""
    m.ticks += 1
    if m.ticks >= PATIENCE:
        m.ticks = 0
        with gil:
            PyErr_CheckSignals()
    return 0


cdef inline int64_t owner_of(int pool, int32_t stream) noexcept nogil:
    return <int64_t>pool << 32 | <uint32_t>stream


cdef inline int pool_of(int64_t owner) noexcept nogil:
    return <int>(owner >> 32)


cdef inline uint64_t up_to(uint64_t size, uint64_t step) noexcept nogil:
    """The next multiple of a step."""
    return (size + (step - 1)) // step * step


cdef inline uint64_t page(Machine m, int64_t owner) noexcept nogil:
    """`Rules.page`."""
    return m.large_page if pool_of(owner) == LARGE else SMALL_SEGMENT


cdef inline bint is_split(const Block* block) noexcept nogil:
    return block.prev != NULL or block.next != NULL


cdef inline int64_t room_of(const Block* block) noexcept nogil:
    """The size a block can grow to where it is."""
    if block.next != NULL and block.next.state == UNMAPPED:
        return block.size + block.next.size
    return block.size


cdef inline void link_after(Block* block, Block* new) noexcept nogil:
    new.prev = block
    new.next = block.next
    if block.next != NULL:
        block.next.prev = new
    block.next = new


cdef inline void link_before(Block* block, Block* new) noexcept nogil:
    new.prev = block.prev
    new.next = block
    if block.prev != NULL:
        block.prev.next = new
    block.prev = new


cdef inline Block* new_block(Machine m) except NULL nogil:
    """One that is not in use, or one more."""
    cdef Block* block
    if m.spare.empty():
        m.blocks.resize(m.blocks.size() + 1)
        block = &m.blocks.back()
    else:
        block = m.spare.back()
        m.spare.pop_back()
    m.made += 1
    block.made = m.made
    block.prev = NULL
    block.next = NULL
    return block


cdef inline int drop(Machine m, Block* block) except -1 nogil:
    """The block is in no list and nobody's neighbour any more."""
    m.spare.push_back(block)
    return 0


cdef inline Block* piece_of(Machine m, const Block* whole, uint64_t address, int64_t size, int state) except NULL nogil:
    """A new block of the same segment, not linked yet."""
    cdef Block* block = new_block(m)
    block.owner, block.address, block.size, block.state = whole.owner, address, size, state
    block.in_region, block.origin, block.segment = whole.in_region, whole.origin, whole.segment
    return block


cdef Block* segment_of(
    Machine m, int64_t owner, uint64_t address, int64_t size, int state, bint in_region
) except NULL nogil:
    """The first block of a new segment or region."""
    cdef Block* block = new_block(m)
    m.segment_count += 1
    block.owner, block.address, block.size, block.state = owner, address, size, state
    block.in_region, block.origin, block.segment = in_region, address, m.segment_count
    return block


cdef inline Key key_of(Machine m, Block* block) noexcept nogil:
    cdef Key key
    key.first.first, key.first.second = block.owner, block.size
    if m.tie == TIE_ADDRESS:
        key.second.first.first, key.second.first.second = block.address, 0
    elif m.tie == TIE_OBJECT:
        key.second.first.first, key.second.first.second = <uint64_t>block.made, 0
    else:
        key.second.first.first, key.second.first.second = <uint64_t>block.segment, block.address
    key.second.second = block
    return key


cdef inline Key first_key(int64_t owner, int64_t size) noexcept nogil:
    """Below the keys of all blocks of an owner that are not smaller."""
    cdef Key key
    key.first.first, key.first.second = owner, size
    key.second.first.first, key.second.first.second = 0, 0
    key.second.second = NULL
    return key


cdef inline Place place_key(int64_t owner, uint64_t address, Block* block) noexcept nogil:
    cdef Place key
    key.first.first, key.first.second = owner, address
    key.second = block
    return key


cdef inline int64_t owner_at(ordered_set[Key].iterator at) noexcept nogil:
    return dereference(at).first.first


cdef inline Block* block_at(ordered_set[Key].iterator at) noexcept nogil:
    return dereference(at).second.second


cdef inline int insert(Machine m, Block* block) except -1 nogil:
    """Puts a free block where it can be found."""
    block.base = m.searches[pool_of(block.owner)]
    m.free.insert(key_of(m, block))
    if m.passes_over and not block.in_region:
        m.plain.insert(key_of(m, block))
    if block.in_region or not is_split(block):
        m.givable += 1
    else:
        m.split += block.size
        m.split_peak = max(m.split_peak, m.split)
    return 0


cdef inline void remove(Machine m, Block* block) noexcept nogil:
    """Takes it out again."""
    m.free.erase(key_of(m, block))
    if m.passes_over and not block.in_region:
        m.plain.erase(key_of(m, block))
    if block.in_region or not is_split(block):
        m.givable -= 1
    else:
        m.split -= block.size


cdef inline int insert_unmapped(Machine m, Block* block) except -1 nogil:
    """The same of address space without memory."""
    m.unmapped.insert(place_key(block.owner, block.address, block))
    return 0


cdef inline void remove_unmapped(Machine m, Block* block) noexcept nogil:
    """Takes it out again."""
    m.unmapped.erase(place_key(block.owner, block.address, block))


cdef inline int merge(Machine m, Block* block, Block* other) except -1 nogil:
    """`block` takes over a neighbour that is free (or unmapped) as itself."""
    if other == NULL or other.state != block.state:
        return 0
    if other.state == UNMAPPED:
        remove_unmapped(m, other)
    else:
        remove(m, other)
    if other == block.prev:
        block.address = other.address
        block.prev = other.prev
        if block.prev != NULL:
            block.prev.next = block
    else:
        block.next = other.next
        if block.next != NULL:
            block.next.prev = block
    block.size += other.size
    return drop(m, other)


# ---- rows that wait for a stream, in the order in which they began to

cdef void wait_for(Machine m, int32_t row, Block* block) noexcept nogil:
    cdef Held* held = &m.held[row]
    if held.waiting == NULL:
        held.before = m.last_waiting
        held.after = NOBODY
        if m.last_waiting == NOBODY:
            m.first_waiting = row
        else:
            m.held[m.last_waiting].after = row
        m.last_waiting = row
    held.waiting = block


cdef void waited_for(Machine m, int32_t row) noexcept nogil:
    cdef Held* held = &m.held[row]
    if held.before == NOBODY:
        m.first_waiting = held.after
    else:
        m.held[held.before].after = held.after
    if held.after == NOBODY:
        m.last_waiting = held.before
    else:
        m.held[held.after].before = held.before
    held.waiting = NULL
