"""Interned byte strings (texts, frames, stacks, pairs): the same content has the same small id."""

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #define MEMTRACE_HIGH_BITS 0x8080808080808080ULL
    #if defined(_MSC_VER) && defined(_M_X64)
    #include <intrin.h>
    static inline uint64_t memtrace_mix(uint64_t a, uint64_t b) {
        uint64_t high, low = _umul128(a, b, &high);
        return low ^ high;
    }
    #elif defined(__SIZEOF_INT128__)
    static inline uint64_t memtrace_mix(uint64_t a, uint64_t b) {
        __uint128_t product = (__uint128_t)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    #else
    static inline uint64_t memtrace_mix(uint64_t a, uint64_t b) {
        uint64_t ah = a >> 32, al = (uint32_t)a, bh = b >> 32, bl = (uint32_t)b;
        uint64_t middle = ah * bl + ((al * bl) >> 32), other = (uint32_t)middle + al * bh;
        return (a * b) ^ (ah * bh + (middle >> 32) + (other >> 32));
    }
    #endif
    static inline uint64_t memtrace_load(const unsigned char *at, size_t count) {
        uint64_t word = 0;
        memcpy(&word, at, count);
        return word;
    }
    """
    uint64_t mix "memtrace_mix"(uint64_t a, uint64_t b) noexcept nogil
    uint64_t HIGH_BITS "MEMTRACE_HIGH_BITS"
    uint64_t load_word "memtrace_load"(const uint8_t* at, size_t count) noexcept nogil

cdef enum:
    FULL = 0xFFFFFFFF
    MAX_IDS = 1 << 28

cdef struct Secret:
    uint64_t first
    uint64_t second

cdef struct Interned:
    uint8_t* data
    size_t data_capacity
    uint64_t* ends  # ends[i]: where the content of id i ends in `data`; ends[-1] of the first is 0
    size_t ends_capacity
    uint32_t* hashes
    size_t hashes_capacity
    uint32_t count
    uint32_t* slots  # id + 1, 0 is free
    uint32_t slot_mask


cdef bint grow(void** data, size_t* capacity, size_t needed, size_t width) noexcept nogil:
    """Room for `needed` items of `width` bytes. False when there is no memory."""
    cdef size_t room = capacity[0]
    cdef void* moved
    if needed <= room:
        return True
    room = room * 2 if room * 2 > needed else needed
    if room < 256:
        room = 256
    if room > (<size_t>-1) / 2 / width:
        return False
    moved = realloc(data[0], room * width)
    if moved == NULL:
        return False
    data[0] = moved
    capacity[0] = room
    return True


cdef bint widen(void** column, size_t room, size_t width) noexcept nogil:
    """The same for one of several columns that grow together: their capacity is kept elsewhere."""
    cdef size_t held = 0
    return grow(column, &held, room, width)


cdef bint table_init(Interned* table) noexcept nogil:
    memset(table, 0, sizeof(Interned))
    table.slots = <uint32_t*>malloc(1024 * sizeof(uint32_t))
    if table.slots == NULL:
        return False
    memset(table.slots, 0, 1024 * sizeof(uint32_t))
    table.slot_mask = 1023
    return True


cdef void table_free(Interned* table) noexcept nogil:
    free(table.data)
    free(table.ends)
    free(table.hashes)
    free(table.slots)
    memset(table, 0, sizeof(Interned))


cdef inline size_t table_start(const Interned* table, uint32_t index) noexcept nogil:
    return table.ends[index - 1] if index else 0


cdef inline size_t table_length(const Interned* table, uint32_t index) noexcept nogil:
    return table.ends[index] - table_start(table, index)


cdef inline uint64_t hash_bytes(const uint8_t* data, size_t length, const Secret* secret) noexcept nogil:
    """Keyed, so that no file can choose its collisions."""
    cdef uint64_t state = secret.second ^ length
    while length >= 8:
        state = mix(load_word(data, 8) ^ secret.first, state ^ secret.second)
        data += 8
        length -= 8
    if length:
        state = mix(load_word(data, length) ^ secret.first, state ^ secret.second)
    return mix(state ^ secret.first, secret.second)


cdef bint table_rehash(Interned* table) noexcept nogil:
    cdef uint32_t mask = table.slot_mask * 2 + 1
    cdef uint32_t* slots = <uint32_t*>malloc((<size_t>mask + 1) * sizeof(uint32_t))
    cdef uint32_t index, slot
    if slots == NULL:
        return False
    memset(slots, 0, (<size_t>mask + 1) * sizeof(uint32_t))
    for index in range(table.count):
        slot = table.hashes[index] & mask
        while slots[slot]:
            slot = (slot + 1) & mask
        slots[slot] = index + 1
    free(table.slots)
    table.slots = slots
    table.slot_mask = mask
    return True


cdef uint32_t intern(Interned* table, const uint8_t* data, size_t length, const Secret* secret) noexcept nogil:
    """The id of some content; FULL when there is no memory or no id left."""
    cdef uint32_t key = <uint32_t>(hash_bytes(data, length, secret) >> 16)
    cdef uint32_t slot = key & table.slot_mask
    cdef uint32_t index
    cdef size_t used
    while table.slots[slot]:
        index = table.slots[slot] - 1
        if (
            table.hashes[index] == key
            and table_length(table, index) == length
            and memcmp(table.data + table_start(table, index), data, length) == 0
        ):
            return index
        slot = (slot + 1) & table.slot_mask
    index = table.count
    used = table_start(table, index)
    if (
        index >= MAX_IDS
        or not grow(<void**>&table.data, &table.data_capacity, used + length + 1, 1)
        or not grow(<void**>&table.ends, &table.ends_capacity, index + 1, sizeof(uint64_t))
        or not grow(<void**>&table.hashes, &table.hashes_capacity, index + 1, sizeof(uint32_t))
    ):
        return FULL
    memcpy(table.data + used, data, length)
    table.ends[index] = used + length
    table.hashes[index] = key
    table.slots[slot] = index + 1
    table.count = index + 1
    if table.count * 2 > table.slot_mask and not table_rehash(table):
        return FULL
    return index


cdef bint is_utf8(const uint8_t* text, size_t length) noexcept nogil:
    """Whether Python's unpickler would decode it: UTF-8, lone surrogates allowed."""
    cdef size_t at = 0
    cdef uint8_t lead, low, high
    cdef size_t more, index
    while at < length:
        if length - at >= 8 and not load_word(text + at, 8) & HIGH_BITS:
            at += 8
            continue
        lead = text[at]
        if lead < 0x80:
            at += 1
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            if lead == 0xE0:
                low = 0xA0
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        else:
            return False
        if length - at <= more or not low <= text[at + 1] <= high:
            return False
        for index in range(2, more + 1):
            if text[at + index] & 0xC0 != 0x80:
                return False
        at += 1 + more
    return True
