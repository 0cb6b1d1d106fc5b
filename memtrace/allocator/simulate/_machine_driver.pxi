# ---- the driver, a Python object: the only one the loop asks. 0: it refuses

cdef int driver_refuses(Machine m) except -1 nogil:
    with gil:
        return bool(m.driver.refuses(m.row))


cdef int driver_allocate(Machine m, uint64_t size, uint64_t* address) except -1 nogil:
    with gil:
        found = m.driver.allocate(m.row, size)
        if found is None:
            return 0
        address[0] = found
        return 1


cdef int driver_reserve(Machine m, uint64_t* start, int64_t* size) except -1 nogil:
    with gil:
        found = m.driver.reserve(m.row)
        if found is None:
            return 0
        start[0], size[0] = found
        return 1


cdef int driver_map(Machine m, uint64_t address, int64_t size) except -1 nogil:
    with gil:
        return bool(m.driver.map(m.row, address, size))


cdef int logged(Machine m, uint8_t kind, int64_t owner, uint64_t address, int64_t size) except -1 nogil:
    cdef Event event
    event.row, event.kind, event.address, event.size = m.row, kind, address, size
    event.stream = <int32_t>owner
    m.log.push_back(event)
    return 0


cdef int took(Machine m, uint8_t kind, int64_t owner, uint64_t address, int64_t size) except -1 nogil:
    m.total += size
    m.device_allocs += 1
    m.reserved_peak = max(m.reserved_peak, m.total)
    logged(m, kind, owner, address, size)
    return 0


cdef int gave(Machine m, uint8_t kind, int64_t owner, uint64_t address, int64_t size) except -1 nogil:
    m.total -= size
    m.device_frees += 1
    logged(m, kind, owner, address, size)
    with gil:
        if kind == SEGMENT_FREE:
            m.driver.free(m.row, address, size)
        else:
            m.driver.unmap(m.row, address, size)
    return 0
