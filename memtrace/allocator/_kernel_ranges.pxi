# ---- ranges of memory: memory_map.RangeSet

cdef struct Range:
    uint64_t start
    int64_t size
    uint64_t stream
    int32_t pool
    int32_t stack
    int32_t owner
    int32_t span
    uint8_t large
    uint8_t expandable


cdef struct MapRange:  # memory_map.RANGE
    uint64_t start
    int64_t size
    uint64_t stream
    int32_t pool
    int32_t stack
    uint8_t large
    uint8_t expandable


cdef struct MapBlock:  # memory_map.BLOCK
    uint64_t address
    int64_t size
    int64_t requested
    int64_t slack_bound
    int32_t stack
    uint8_t pending


cdef struct RangeSet:
    Range* items
    int32_t* idle  # numbers of items that are not in use
    Py_ssize_t count
    Py_ssize_t idles
    Py_ssize_t room
    Order order


cdef inline uint64_t end_of(const Range* item) noexcept nogil:
    return item.start + <uint64_t>item.size


cdef int32_t ranges_add(RangeSet* ranges, Range item) except -2 nogil:
    """Adds a range: its number."""
    cdef int32_t number
    cdef Py_ssize_t room
    if ranges.idles == 0 and ranges.count == ranges.room:
        room = 2 * ranges.room + 64
        if room > INT32_MAX:
            no_memory()
        ranges.items = <Range*>resized(ranges.items, room, sizeof(Range))
        ranges.idle = <int32_t*>resized(ranges.idle, room, sizeof(int32_t))
        ranges.room = room
    if ranges.idles:
        ranges.idles -= 1
        number = ranges.idle[ranges.idles]
    else:
        number = <int32_t>ranges.count
        ranges.count += 1
    ranges.items[number] = item
    order_put(&ranges.order, item.start, number)
    return number


cdef void ranges_remove(RangeSet* ranges, int32_t number) noexcept nogil:
    order_drop(&ranges.order, ranges.items[number].start)
    ranges.idle[ranges.idles] = number
    ranges.idles += 1


cdef inline int32_t ranges_at(const RangeSet* ranges, uint64_t start) noexcept nogil:
    """The range that begins there, or NONE."""
    cdef int32_t number = order_at_most(&ranges.order, start)
    return number if number != NONE and ranges.items[number].start == start else NONE


cdef inline int32_t ranges_containing(const RangeSet* ranges, uint64_t address) noexcept nogil:
    """The range that holds an address, or NONE."""
    cdef int32_t number = order_at_most(&ranges.order, address)
    return number if number != NONE and address < end_of(&ranges.items[number]) else NONE


cdef inline bint ranges_are_clear(const RangeSet* ranges, uint64_t start, int64_t size) noexcept nogil:
    """Whether no range touches [start, start + size); size > 0."""
    cdef int32_t number = order_at_most(&ranges.order, start + <uint64_t>size - 1)
    return number == NONE or end_of(&ranges.items[number]) <= start


cdef int32_t ranges_add_mapped(RangeSet* ranges, Range item, int32_t* spans, int* joined) except -2 nogil:
    """Adds expandable pages, joined with touching ranges of the same owner: the number of the result.

    The spans of what it replaced go to `spans`, how many they are to `joined`.
    """
    cdef int32_t neighbours[2]
    cdef Range whole = item, other
    cdef int index
    neighbours[0] = order_at_most(&ranges.order, item.start - 1) if item.start else NONE
    neighbours[1] = ranges_at(ranges, end_of(&item))
    joined[0] = 0
    for index in range(2):
        if neighbours[index] == NONE:
            continue
        other = ranges.items[neighbours[index]]
        if not other.expandable or other.owner != item.owner:
            continue
        if end_of(&other) != item.start and other.start != end_of(&item):
            continue
        spans[joined[0]] = other.span
        joined[0] += 1
        ranges_remove(ranges, neighbours[index])
        other.start = min(other.start, whole.start)
        other.size += whole.size
        whole = other
    if joined[0]:
        whole.span = NONE
    return ranges_add(ranges, whole)


cdef int ranges_cut(RangeSet* ranges, int32_t inside, uint64_t start, int64_t size, int32_t* rest) except -1 nogil:
    """Takes [start, start + size) out of a range: how many ranges are left of it; their numbers go to `rest`."""
    cdef Range whole = ranges.items[inside], part
    cdef uint64_t end = start + <uint64_t>size
    cdef int count = 0
    ranges_remove(ranges, inside)
    if start > whole.start:
        part = whole
        part.size = <int64_t>(start - whole.start)
        part.span = NONE
        rest[count] = ranges_add(ranges, part)
        count += 1
    if end < end_of(&whole):
        part = whole
        part.start = end
        part.size = <int64_t>(end_of(&whole) - end)
        part.span = NONE
        rest[count] = ranges_add(ranges, part)
        count += 1
    return count


cdef void ranges_end(RangeSet* ranges) noexcept nogil:
    order_end(&ranges.order)
    free(ranges.items)
    free(ranges.idle)


cdef Column ranges_column(const RangeSet* ranges):
    """The ranges in order of address, as rows of memory_map.RANGE."""
    cdef Py_ssize_t count = ranges.count - ranges.idles, row = 0
    cdef MapRange* rows = <MapRange*>resized(NULL, count, sizeof(MapRange))
    cdef void* data = rows
    cdef const Range* item
    cdef Place place
    memset(rows, 0, count * sizeof(MapRange))
    place.chunk = place.index = 0
    while place.chunk < ranges.order.count and row < count:
        item = &ranges.items[order_value(&ranges.order, place)]
        rows[row].start, rows[row].size, rows[row].stream = item.start, item.size, item.stream
        rows[row].pool, rows[row].stack = item.pool, item.stack
        rows[row].large, rows[row].expandable = item.large, item.expandable
        row += 1
        place = order_next(&ranges.order, place)
    return handed_out(&data, row, sizeof(MapRange))


cdef inline Range range_of(const MapRange* row) noexcept nogil:
    """A range of a memory map; no owner, no span."""
    cdef Range item
    item.start, item.size, item.stream = row.start, row.size, row.stream
    item.pool, item.stack = row.pool, row.stack
    item.large, item.expandable = row.large, row.expandable
    item.owner = item.span = NONE
    return item


cdef inline uint64_t group_of(bint large, uint64_t stream) noexcept nogil:
    """The key of an expandable (large, stream); streams are below 2^63."""
    return stream << 1 | large


# ---- block sizes: sizes.round_sizes

cdef struct Rules:
    int64_t divisions[INTERVALS]
    bint divided
    int64_t max_split_size
    bint expandable
    bint custom_pools_split_plainly
    int64_t large_page


cdef Rules rules_of(settings):
    cdef Rules rules
    cdef int index
    rules.divided = False
    for index in range(INTERVALS):
        rules.divisions[index] = settings.divisions[index]
        rules.divided = rules.divided or rules.divisions[index] > 1
    rules.max_split_size = settings.max_split_size
    rules.expandable = settings.expandable
    rules.custom_pools_split_plainly = settings.custom_pools_split_plainly
    rules.large_page = settings.large_page
    return rules


cdef inline int64_t plain_size(int64_t requested) noexcept nogil:
    """The block size by the default settings: a multiple of 512."""
    return MIN_BLOCK if requested <= MIN_BLOCK else (requested + (MIN_BLOCK - 1)) // MIN_BLOCK * MIN_BLOCK


cdef int64_t divided_size(const Rules* rules, int64_t requested) noexcept nogil:
    cdef int exponent = 0
    cdef int64_t division, power, step
    while requested >> exponent > 1:
        exponent += 1
    division = rules.divisions[min(max(exponent - 20, 0), INTERVALS - 1)]
    if division <= 1 or requested <= <int64_t>(<uint64_t>MIN_BLOCK * <uint64_t>division):
        return plain_size(requested)
    power = <int64_t>1 << exponent
    if requested == power:
        return requested
    step = power // division
    if step == 0:
        return <int64_t>(<uint64_t>power * 2)
    return (requested + (step - 1)) // step * step


cdef inline int64_t rounded_size(const Rules* rules, int64_t requested) noexcept nogil:
    """The block size by the settings."""
    return divided_size(rules, requested) if rules.divided else plain_size(requested)


cdef inline bint splits_finely(const Range* item, const Rules* rules) noexcept nogil:
    if not item.large or item.expandable:
        return True
    return rules.expandable and (item.pool == 0 or not rules.custom_pools_split_plainly)
