# ---- errors

cdef int refuse(Py_ssize_t event, str reason) except -1:
    raise ContradictionError(event, reason)


cdef int no_memory() except -1 nogil:
    with gil:
        raise MemoryError


cdef void* resized(void* data, size_t count, size_t width) except NULL nogil:
    """`data` with room for `count` things of `width` bytes; it stays as it is when there is no memory for that."""
    cdef void* found = NULL
    if count <= (<size_t>-1) // 2 // width:
        found = realloc(data, (count if count else 1) * width)
    if found == NULL:
        no_memory()
    return found


# ---- memory that numpy reads in place

cdef Column handed_out(void** data, size_t count, size_t width):
    """A column that owns `data` from now on, cut to `count` things of `width` bytes."""
    return adopt(data, count * width)


# ---- address -> node: open addressing, with a mixer that only this process knows

cdef struct Slot:
    uint64_t key
    int32_t value  # NONE: the slot is empty


cdef struct Table:
    Slot* slots
    size_t mask
    size_t count
    uint64_t seed


cdef inline size_t slot_of(const Table* table, uint64_t key) noexcept nogil:
    """Where a key belongs: the finaliser of splitmix64 over the seeded key, so that nobody can choose collisions."""
    key = (key ^ table.seed) * 0x9E3779B97F4A7C15u
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u
    key = (key ^ table.seed ^ (key >> 27)) * 0x94D049BB133111EBu
    return <size_t>(key ^ (key >> 31)) & table.mask


cdef int table_start(Table* table, size_t slots, uint64_t seed) except -1 nogil:
    """Makes an empty table of so many slots, a power of two."""
    cdef size_t index
    table.slots = <Slot*>resized(NULL, slots, sizeof(Slot))
    table.mask = slots - 1
    table.count = 0
    table.seed = seed
    for index in range(slots):
        table.slots[index].value = NONE
    return 0


cdef inline int32_t table_find(const Table* table, uint64_t key) noexcept nogil:
    """The value under a key, or NONE."""
    cdef size_t at = slot_of(table, key)
    while table.slots[at].value != NONE:
        if table.slots[at].key == key:
            return table.slots[at].value
        at = (at + 1) & table.mask
    return NONE


cdef int table_grow(Table* table) except -1 nogil:
    cdef Table larger
    cdef size_t index, at
    table_start(&larger, 2 * (table.mask + 1), table.seed)
    for index in range(table.mask + 1):
        if table.slots[index].value != NONE:
            at = slot_of(&larger, table.slots[index].key)
            while larger.slots[at].value != NONE:
                at = (at + 1) & larger.mask
            larger.slots[at] = table.slots[index]
    larger.count = table.count
    free(table.slots)
    table[0] = larger
    return 0


cdef inline int table_put(Table* table, uint64_t key, int32_t value) except -1 nogil:
    """Sets the value under a key, new or not."""
    cdef size_t at
    if 2 * table.count > table.mask:
        table_grow(table)
    at = slot_of(table, key)
    while table.slots[at].value != NONE:
        if table.slots[at].key == key:
            table.slots[at].value = value
            return 0
        at = (at + 1) & table.mask
    table.slots[at].key = key
    table.slots[at].value = value
    table.count += 1
    return 0


cdef inline void table_drop(Table* table, uint64_t key) noexcept nogil:
    """Removes a key if it is there; later ones of its run move up, so that no gap hides them."""
    cdef size_t gap = slot_of(table, key), at
    while table.slots[gap].value != NONE and table.slots[gap].key != key:
        gap = (gap + 1) & table.mask
    if table.slots[gap].value == NONE:
        return
    table.count -= 1
    at = gap
    while True:
        at = (at + 1) & table.mask
        if table.slots[at].value == NONE:
            break
        if ((at - slot_of(table, table.slots[at].key)) & table.mask) >= ((at - gap) & table.mask):
            table.slots[gap] = table.slots[at]
            gap = at
    table.slots[gap].value = NONE


# ---- address -> node in order: a list of short sorted lists

cdef enum:
    CHUNK = 256


cdef struct Chunk:
    uint64_t keys[CHUNK]
    int32_t values[CHUNK]
    int32_t count  # never 0


cdef struct Order:
    Chunk** chunks
    uint64_t* firsts  # the first key of each chunk
    Py_ssize_t count
    Py_ssize_t room


cdef struct Place:
    Py_ssize_t chunk
    Py_ssize_t index  # in its chunk; -1: before the first key of all


cdef inline int32_t order_value(const Order* order, Place place) noexcept nogil:
    return order.chunks[place.chunk].values[place.index]


cdef inline uint64_t order_key(const Order* order, Place place) noexcept nogil:
    return order.chunks[place.chunk].keys[place.index]


cdef inline Place order_floor(const Order* order, uint64_t key) noexcept nogil:
    """The place of the highest key that is not above `key`."""
    cdef Py_ssize_t low = 0, high = order.count, middle
    cdef const Chunk* chunk
    cdef Place place
    while low < high:
        middle = (low + high) >> 1
        if order.firsts[middle] <= key:
            low = middle + 1
        else:
            high = middle
    place.chunk = low - 1 if low else 0
    place.index = -1
    if low:
        chunk = order.chunks[low - 1]
        low, high = 0, chunk.count
        while low < high:
            middle = (low + high) >> 1
            if chunk.keys[middle] <= key:
                low = middle + 1
            else:
                high = middle
        place.index = low - 1
    return place


cdef inline int32_t order_at_most(const Order* order, uint64_t key) noexcept nogil:
    """The value under the highest key that is not above `key`, or NONE."""
    cdef Place place = order_floor(order, key)
    return NONE if place.index < 0 else order_value(order, place)


cdef inline Place order_next(const Order* order, Place place) noexcept nogil:
    """The place behind; its chunk is `order.count` behind the last key."""
    place.index += 1
    if place.chunk < order.count and place.index == order.chunks[place.chunk].count:
        place.chunk += 1
        place.index = 0
    return place


cdef int order_open(Order* order, Py_ssize_t at) except -1 nogil:
    """A new chunk at `at`, not yet filled."""
    cdef Chunk* chunk
    cdef Py_ssize_t room
    if order.count == order.room:
        room = 2 * order.room + 8
        order.chunks = <Chunk**>resized(order.chunks, room, sizeof(Chunk*))
        order.firsts = <uint64_t*>resized(order.firsts, room, sizeof(uint64_t))
        order.room = room
    chunk = <Chunk*>resized(NULL, 1, sizeof(Chunk))
    memmove(order.chunks + at + 1, order.chunks + at, (order.count - at) * sizeof(Chunk*))
    memmove(order.firsts + at + 1, order.firsts + at, (order.count - at) * sizeof(uint64_t))
    chunk.count = 0
    order.chunks[at] = chunk
    order.count += 1
    return 0


cdef int order_put(Order* order, uint64_t key, int32_t value) except -1 nogil:
    """Sets the value under a key, new or not."""
    cdef Place place = order_floor(order, key)
    cdef Chunk* chunk
    cdef Chunk* behind
    cdef Py_ssize_t at, half
    if order.count == 0:
        order_open(order, 0)
    chunk = order.chunks[place.chunk]
    if place.index >= 0 and chunk.keys[place.index] == key:
        chunk.values[place.index] = value
        return 0
    at = place.index + 1
    if chunk.count == CHUNK:
        order_open(order, place.chunk + 1)
        behind = order.chunks[place.chunk + 1]
        # what grows at its end, as addresses do, leaves full chunks behind
        half = CHUNK - 1 if at == CHUNK and place.chunk + 2 == order.count else CHUNK // 2
        behind.count = <int32_t>(CHUNK - half)
        memcpy(behind.keys, chunk.keys + half, behind.count * sizeof(uint64_t))
        memcpy(behind.values, chunk.values + half, behind.count * sizeof(int32_t))
        chunk.count = <int32_t>half
        order.firsts[place.chunk + 1] = behind.keys[0]
        if at > half:
            place.chunk += 1
            at -= half
            chunk = behind
    memmove(chunk.keys + at + 1, chunk.keys + at, (chunk.count - at) * sizeof(uint64_t))
    memmove(chunk.values + at + 1, chunk.values + at, (chunk.count - at) * sizeof(int32_t))
    chunk.keys[at] = key
    chunk.values[at] = value
    chunk.count += 1
    if at == 0:
        order.firsts[place.chunk] = key
    return 0


cdef void order_drop(Order* order, uint64_t key) noexcept nogil:
    """Removes a key if it is there."""
    cdef Place place = order_floor(order, key)
    cdef Chunk* chunk
    cdef Py_ssize_t rest
    if place.index < 0 or order_key(order, place) != key:
        return
    chunk = order.chunks[place.chunk]
    chunk.count -= 1
    rest = chunk.count - place.index
    memmove(chunk.keys + place.index, chunk.keys + place.index + 1, rest * sizeof(uint64_t))
    memmove(chunk.values + place.index, chunk.values + place.index + 1, rest * sizeof(int32_t))
    if chunk.count == 0:
        free(chunk)
        order.count -= 1
        rest = order.count - place.chunk
        memmove(order.chunks + place.chunk, order.chunks + place.chunk + 1, rest * sizeof(Chunk*))
        memmove(order.firsts + place.chunk, order.firsts + place.chunk + 1, rest * sizeof(uint64_t))
    elif place.index == 0:
        order.firsts[place.chunk] = chunk.keys[0]


cdef void order_end(Order* order) noexcept nogil:
    cdef Py_ssize_t index
    for index in range(order.count):
        free(order.chunks[index])
    free(order.chunks)
    free(order.firsts)
