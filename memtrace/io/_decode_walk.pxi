"""The loop over opcodes."""

cdef enum:
    NEED_INPUT = -1
    CHUNK = 1 << 18
    BUFFER = MAX_TEXT_BYTES + 2 * CHUNK
    NAMES_ROOM = 512
    PADDING = 32  # after the input: what is read there is noticed afterwards

cdef struct Input:
    uint8_t* data
    uint64_t at
    uint64_t end
    uint64_t wanted  # bytes that must be there before the walk can go on
    bint ended
    uint64_t frame_end  # where the frame that goes furthest ends in the pickle
    uint32_t text  # the last two texts, for STACK_GLOBAL, and where in the pickle they are
    uint32_t text_before
    uint64_t text_from
    uint64_t text_to
    uint64_t text_before_to


cdef bint walk(Machine* m, Input* source) noexcept nogil:
    """Reads opcodes until STOP (True) or until something has to happen: more input, or a failure (False)."""
    cdef const uint8_t* data = source.data
    cdef uint64_t at = source.at
    cdef uint64_t end = source.end
    cdef uint64_t base = m.consumed - at
    cdef uint64_t first, length, next_at
    cdef uint32_t index, entry
    cdef uint8_t opcode
    cdef bint done = True
    while True:
        if end - at < WIDEST and not source.ended:
            source.wanted = WIDEST
            source.at = at
            m.consumed = base + at
            m.failure = NEED_INPUT
            return False
        if at >= end:
            source.at = at
            m.consumed = base + at
            return fail(m, CUT_OFF)
        opcode = data[at]
        next_at = at + 1
        m.consumed = base + at
        if m.height > FREE_VALUES and m.height * 16 > m.consumed:
            source.at = at
            return fail(m, TOO_MANY_VALUES)
        if opcode == 0x68 or opcode == 0x6A:  # BINGET, LONG_BINGET
            # keys and frames: most of what a snapshot is, and often one after the other
            while True:
                if opcode == 0x68:
                    index = data[at + 1]
                    next_at = at + 2
                else:
                    index = <uint32_t>load_word(data + at + 1, 4)
                    next_at = at + 5
                if next_at > end or index >= m.memo_count:
                    done = fail(m, NOT_KEPT if next_at <= end else CUT_OFF)
                    break
                entry = m.memo[index]
                if entry >= <uint32_t>OPEN << 28:
                    done = fetch_open(m, index) if entry < <uint32_t>ONCE << 28 else fail(m, SHARED)
                    break
                if not push(m, <uint8_t>(entry >> 28), entry & 0x0FFFFFFF):
                    done = False
                    break
                if end - at < 2 * WIDEST:
                    break
                opcode = data[next_at]
                if opcode != 0x68 and opcode != 0x6A:
                    break
                if m.height > FREE_VALUES:
                    break
                at = next_at
                m.consumed = base + at
        elif opcode == 0x94:  # MEMOIZE
            done = keep(m, m.memo_count)
        elif opcode == 0x4B:  # BININT1
            next_at = at + 2
            done = push(m, INTEGER, data[at + 1])
        elif opcode == 0x8A:  # LONG1
            length = data[at + 1]
            next_at = at + 2 + length
            if length > MAX_INTEGER_BYTES:
                done = fail(m, LONG_INTEGER)
            else:
                done = push_integer(m, data + at + 2, length)
        elif opcode == 0x28:  # MARK
            done = set_mark(m)
        elif opcode == 0x7D:  # EMPTY_DICT
            next_at = quick_event(m, data, at, end)
            if next_at == 0:
                next_at = at + 1
                done = m.failure == FINE and make(m, True)
        elif opcode == 0x75:  # SETITEMS
            done = take_mark(m, &first) and fill(m, first, True)
        elif opcode == 0x5D:  # EMPTY_LIST
            done = make(m, False)
        elif opcode == 0x65:  # APPENDS
            done = take_mark(m, &first) and fill(m, first, False)
        elif opcode == 0x8C or opcode == 0x58 or opcode == 0x8D:  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            if opcode == 0x8C:
                length = data[at + 1]
                next_at = at + 2
            elif opcode == 0x58:
                length = load_word(data + at + 1, 4)
                next_at = at + 5
            else:
                length = load_word(data + at + 1, 8)
                next_at = at + 9
            if next_at > end:
                done = fail(m, CUT_OFF)
            elif length > MAX_TEXT_BYTES:
                done = fail(m, LONG_TEXT)
            elif length > end - next_at:
                if source.ended:
                    done = fail(m, CUT_OFF)
                else:
                    source.wanted = next_at - at + length + WIDEST
                    source.at = at
                    m.failure = NEED_INPUT
                    return False
            else:
                done = push_text(m, source, data + next_at, length)
                next_at += length
                source.text_before_to = source.text_to
                source.text_from = base + at
                source.text_to = base + next_at
        elif opcode == 0x4A:  # BININT
            next_at = at + 5
            done = push(m, INTEGER, <uint64_t><int64_t><int32_t><uint32_t>load_word(data + at + 1, 4))
        elif opcode == 0x4D:  # BININT2
            next_at = at + 3
            done = push(m, INTEGER, load_word(data + at + 1, 2))
        elif opcode == 0x95:  # FRAME
            next_at = at + 9
            length = load_word(data + at + 1, 8)
            if length > <uint64_t>-1 - (base + next_at):
                length = <uint64_t>-1 - (base + next_at)
            if base + next_at + length > source.frame_end:
                source.frame_end = base + next_at + length
        elif opcode == 0x71:  # BINPUT
            next_at = at + 2
            done = next_at > end or keep(m, data[at + 1])
        elif opcode == 0x72:  # LONG_BINPUT
            next_at = at + 5
            done = next_at > end or keep(m, <uint32_t>load_word(data + at + 1, 4))
        elif opcode == 0x61:  # APPEND
            done = reach(m, 1, &first) and fill(m, first, False)
        elif opcode == 0x73:  # SETITEM
            done = reach(m, 2, &first) and fill(m, first, True)
        elif opcode == 0x85 or opcode == 0x86 or opcode == 0x87:  # TUPLE1, TUPLE2, TUPLE3
            done = reach(m, opcode - 0x84, &first) and make_tuple(m, first)
        elif opcode == 0x74:  # TUPLE
            done = take_mark(m, &first) and make_tuple(m, first)
        elif opcode == 0x29:  # EMPTY_TUPLE
            done = push(m, JUNK, 1)
        elif opcode == 0x4E:  # NONE
            done = push(m, NONE, 0)
        elif opcode == 0x88 or opcode == 0x89:  # NEWTRUE, NEWFALSE
            done = push(m, BOOL, opcode == 0x88)
        elif opcode == 0x47:  # BINFLOAT
            next_at = at + 9
            done = push(m, FLOAT, load_word(data + at + 1, 8))
        elif opcode == 0x8B:  # LONG4
            length = load_word(data + at + 1, 4)
            next_at = at + 5 + length
            if at + 5 > end:
                done = fail(m, CUT_OFF)
            elif length >> 31:
                done = fail(m, NEGATIVE_LENGTH)
            elif length > MAX_INTEGER_BYTES:
                done = fail(m, LONG_INTEGER)
            else:
                done = push_integer(m, data + at + 5, length)
        elif opcode == 0x2E:  # STOP
            source.at = at
            if source.frame_end > base + next_at:
                return fail(m, CUT_OFF)
            return stop(m)
        elif end - at < NAMES_ROOM and not source.ended:
            # GLOBAL names what it asks for in two lines
            source.wanted = NAMES_ROOM
            source.at = at
            m.failure = NEED_INPUT
            return False
        else:
            done = fail(m, REFUSED_OPCODE)
        if done and next_at > end:
            done = fail(m, CUT_OFF)  # what was read there was padding
        if not done:
            source.at = at
            return False
        at = next_at


cdef inline bint push_integer(Machine* m, const uint8_t* data, uint64_t length) noexcept nogil:
    """A little-endian signed integer of up to 9 bytes."""
    cdef uint64_t word
    cdef uint32_t index
    if length == 0:
        return push(m, INTEGER, 0)
    if length <= 8:
        word = load_word(data, <size_t>length)
        if length < 8 and data[length - 1] & 0x80:
            word |= <uint64_t>-1 << (8 * length)
        return push(m, INTEGER, word)
    word = load_word(data, 8)
    if data[8] == (0xFF if word >> 63 else 0):
        return push(m, INTEGER, word)
    index = intern(&m.bigs, data, MAX_INTEGER_BYTES, &m.secret)
    if index == FULL:
        return fail(m, NO_MEMORY)
    return push(m, BIG, index)


cdef inline bint push_text(Machine* m, Input* source, const uint8_t* text, uint64_t length) noexcept nogil:
    cdef uint32_t index
    if not is_utf8(text, <size_t>length):
        return fail(m, NOT_UTF8)
    index = intern(&m.texts, text, <size_t>length, &m.secret)
    if index == FULL:
        return fail(m, NO_MEMORY)
    source.text_before = source.text
    source.text = index
    return push(m, TEXT, index)


cdef bint stop(Machine* m) noexcept nogil:
    if m.mark_count or m.height == 0:
        return fail(m, NOT_THERE)
    if m.height != 1:
        return fail(m, LEFT_OVER)
    if not close_above(m, 0):
        return False
    m.result = m.stack[0]
    if m.has_bad_event:
        return fail(m, BAD_EVENT)
    if m.has_action and not number_action(m):
        return False
    m.failure = FINE
    return True
