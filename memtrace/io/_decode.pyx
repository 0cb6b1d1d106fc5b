# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""One pass over a snapshot's pickle, straight into columns. What it accepts is what `scan` accepts, nothing more.

No Python object is made for an event, a stack or a frame. Every value on the unpickler's stack is a *cell*, a tag and
64 bits: a number, the id of an interned text, frame or stack, an event that has its row, or a node of the few dicts
and lists of which objects are made at the end (segments, settings).

A container knows its *role* from where it is made (`roles`). An event's items go into its row as soon as SETITEMS
names them; of what memtrace does not read, only frames, stacks and texts are kept, because later events may share
them.

The parts, each `_decode_*.pxi`: *tables* what is interned; *machine* the state of the walk; *values* the stack and the
memo; *containers* dicts and lists; *rows* events; *blocks* blocks and annotations; *quick* events in their usual form;
*walk* the loop over opcodes. Here is what Python sees.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

import os
import struct
import sys

from memtrace.io import roles

if sys.byteorder != "little":
    raise ImportError("pickles are little-endian, and so is this reader")

cdef extern from "Python.h":
    int PyBUF_WRITE
    object PyMemoryView_FromMemory(char* memory, Py_ssize_t size, int flags)
    object PyUnicode_DecodeUTF8(const char* text, Py_ssize_t size, const char* errors)

include "../model/_column.pxi"
include "_decode_tables.pxi"
include "_decode_machine.pxi"
include "_decode_values.pxi"
include "_decode_containers.pxi"
include "_decode_rows.pxi"
include "_decode_blocks.pxi"
include "_decode_quick.pxi"
include "_decode_walk.pxi"


if (
    MAX_DEPTH, MAX_INTEGER_BYTES, MAX_KEYS, MAX_KEY_BYTES, MAX_TEXT_BYTES, DICT_WEIGHT, SEQUENCE_WEIGHT, FREE_WEIGHT,
    FREE_VALUES, MAX_DEVICES, MAX_CONTAINERS, MAX_NAMES,
) != (
    roles.MAX_DEPTH, roles.MAX_INTEGER_BYTES, roles.MAX_KEYS, roles.MAX_KEY_BYTES, roles.MAX_TEXT_BYTES,
    roles.DICT_WEIGHT, roles.SEQUENCE_WEIGHT, roles.FREE_WEIGHT, roles.FREE_VALUES, roles.MAX_DEVICES,
    roles.MAX_CONTAINERS, roles.MAX_NAMES,
):
    raise ImportError("the decoder was built for other limits: build it again")


class Opaque:
    """A value that memtrace does not read."""


Opaque.__name__ = "list or dict"  # as it is called in errors
OPAQUE = Opaque()
BLOCK_MASK = {
    "says_address": SAYS_ADDRESS,
    "says_requested": SAYS_REQUESTED,
    "bad_address": BAD_ADDRESS,
    "bad_size": BAD_SIZE,
    "bad_requested": BAD_REQUESTED,
    "bad_state": BAD_STATE,
    "bad_frames": BAD_FRAMES,
    "bad_history": BAD_HISTORY,
}


class Numbered:
    """A list that became a number. No `int`: nobody shall take one for a number of the file."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(self) is type(other) and self.number == other.number

    def __hash__(self):
        return hash(self.number)


class Stack(Numbered):
    """A list of frames, by its number; 0 is the empty list."""


class Texts(Numbered):
    """A list of texts, by its number."""


class Rows:
    """The blocks of a segment, by the numbers of their rows."""

    def __init__(self, start, count):
        self.start = start
        self.count = count

    def __eq__(self, other):
        return type(self) is type(other) and (self.start, self.count) == (other.start, other.count)

    def __hash__(self):
        return hash((self.start, self.count))


class Refused(Exception):
    """The walk stopped: why (one of `FAILURES`), at which byte of the pickle, how many were read, what stands there
    and the two texts before it; of a bad event its row and its key."""

    def __init__(self, failure, offset, end, here, texts, event, key):
        super().__init__(failure, offset)
        self.failure = failure
        self.offset = offset
        self.end = end
        self.here = here
        self.texts = texts
        self.event = event
        self.key = key


cdef class Decoder:
    """Reads one pickle from `readinto`, a reader's method. After `run` everything is taken out of it once."""

    cdef Machine machine
    cdef Input source
    cdef object readinto
    cdef dict known_texts

    def __cinit__(self, readinto):
        cdef Machine* m = &self.machine
        cdef bytes secret = os.urandom(16)
        cdef const uint8_t* random = secret
        cdef bytes word
        memset(m, 0, sizeof(Machine))
        memset(&self.source, 0, sizeof(Input))
        self.readinto = readinto
        self.known_texts = {}
        self.source.data = <uint8_t*>malloc(BUFFER + PADDING)
        m.secret.first = load_word(random, 8) | 1
        m.secret.second = load_word(random + 8, 8) | 1
        if self.source.data == NULL or not (
            table_init(&m.texts) and table_init(&m.frames) and table_init(&m.stacks) and table_init(&m.lists)
            and table_init(&m.pairs) and table_init(&m.bigs)
        ):
            raise MemoryError
        intern(&m.stacks, <const uint8_t*>"", 0, &m.secret)  # the empty stack is number 0
        for text in WORDS:
            word = text.encode()
            intern(&m.texts, <const uint8_t*>word, len(word), &m.secret)

    def __dealloc__(self):
        cdef Machine* m = &self.machine
        free(self.source.data)
        self.forget()
        table_free(&m.texts)
        table_free(&m.frames)
        table_free(&m.stacks)
        table_free(&m.lists)
        table_free(&m.pairs)
        table_free(&m.bigs)
        free(m.action)
        free(m.addr)
        free(m.size)
        free(m.stream)
        free(m.stack_id)
        free(m.time)
        free(m.pool)
        free(m.context)
        free(m.metadata)
        free(m.cells)
        free(m.nodes)
        free(m.extras)
        free(m.traces)
        free(m.key_seen)
        free(m.actions)
        free(m.block_mask)
        free(m.block_address)
        free(m.block_size)
        free(m.block_requested)
        free(m.block_state)
        free(m.block_stack)
        free(m.pasts)
        free(m.note_mask)
        free(m.note_name)
        free(m.note_stage)
        free(m.note_device)
        free(m.note_time)

    cdef void forget(self):
        """Frees what only the walk needs."""
        cdef Machine* m = &self.machine
        free(m.stack)
        free(m.memo)
        free(m.fresh)
        free(m.open_ids)
        free(m.open_cells)
        free(m.mask)
        m.stack = NULL
        m.memo = NULL
        m.fresh = NULL
        m.open_ids = NULL
        m.open_cells = NULL
        m.mask = NULL

    def run(self):
        """Walks the whole pickle. Raises Refused, MemoryError, and what `readinto` raises."""
        cdef Machine* m = &self.machine
        cdef bint done
        self.source.at = 2
        self.refill(WIDEST)
        m.consumed = 2
        while True:
            with nogil:
                done = walk(m, &self.source)
            if done:
                break
            if m.failure != NEED_INPUT:
                raise self.refused()
            self.refill(self.source.wanted)
        self.forget()

    cdef refill(self, uint64_t wanted):
        """Moves what is left to the front and reads until `wanted` bytes are there, or the input ends."""
        cdef Input* source = &self.source
        cdef uint64_t left
        cdef uint64_t room
        if source.end:
            left = source.end - source.at
            memmove(source.data, source.data + source.at, <size_t>left)
            source.at = 0
            source.end = left
        while source.end < wanted and not source.ended:
            room = BUFFER - source.end
            if room > CHUNK:
                room = CHUNK
            count = self.readinto(PyMemoryView_FromMemory(<char*>source.data + source.end, room, PyBUF_WRITE))
            if not count:
                source.ended = True
            elif not 0 < count <= room:
                raise ValueError("a reader that says it read more than there was room for")
            else:
                source.end += <uint64_t>count
        memset(source.data + source.end, 0, PADDING)

    cdef refused(self):
        cdef Machine* m = &self.machine
        cdef Input* source = &self.source
        cdef uint64_t length = source.end - source.at
        if m.failure == NO_MEMORY:
            return MemoryError()
        cdef bint right_before = (
            source.text_before_to
            and source.text_from - source.text_before_to <= 1
            and m.consumed - source.text_to <= 1
        )
        length = NAMES_ROOM if length > NAMES_ROOM else length
        return Refused(
            FAILURES[m.failure],
            m.consumed,
            m.consumed - source.at + source.end,
            (<char*>source.data)[source.at : source.at + length],
            (self.text(source.text_before), self.text(source.text)) if right_before else None,
            m.bad_row,
            WORDS[m.bad_word],
        )

    cdef text(self, uint32_t index):
        """A text: one object, however often the file refers to it."""
        text = self.known_texts.get(index)
        if text is None:
            text = self.known_texts[index] = self.decoded(index)
        return text

    cdef decoded(self, uint32_t index):
        cdef Interned* texts = &self.machine.texts
        return PyUnicode_DecodeUTF8(
            <char*>texts.data + table_start(texts, index), table_length(texts, index), "surrogatepass"
        )

    # -- what was read. A column is given away: a second call has nothing to give.

    def traces(self):
        """A tuple a device: rows from, rows to, how many have a time, whether any event says a time, whether a pool."""
        cdef uint32_t index
        cdef TraceRange* trace
        found = []
        for index in range(self.machine.trace_count):
            trace = &self.machine.traces[index]
            found.append(
                (trace.start, trace.end, trace.timed, bool(trace.time_seen), bool(trace.pool_seen))
            )
        return found

    def columns(self):
        """The events of all devices, one after the other: memory of each column, None where no event says it."""
        cdef Machine* m = &self.machine
        cdef size_t rows = m.rows
        return {
            "action": adopt(<void**>&m.action, rows),
            "addr": adopt(<void**>&m.addr, rows * 8),
            "size": adopt(<void**>&m.size, rows * 8),
            "stream": adopt(<void**>&m.stream, rows * 8),
            "stack": adopt(<void**>&m.stack_id, rows * 4),
            "time_us": adopt(<void**>&m.time, rows * 8) if m.has_time else None,
            "pool": adopt(<void**>&m.pool, rows * 4) if m.has_pool else None,
            "compile_context": adopt(<void**>&m.context, rows * 4) if m.has_context else None,
            "user_metadata": adopt(<void**>&m.metadata, rows * 4) if m.has_metadata else None,
        }

    def extras(self):
        """(row, is it `cpp_frames`?, value) of the rare values of events: `device_free` of an OOM. Before `columns`."""
        cdef uint64_t index
        cdef Extra* extra
        found = []
        for index in range(self.machine.extra_count):
            extra = &self.machine.extras[index]
            if extra.row & 1 or self.machine.action[extra.row >> 1] == OOM:
                found.append((extra.row >> 1, bool(extra.row & 1), self.value(&extra.cell)))
        return found

    def annotations(self):
        """All annotations: memory of each column; `name` and `stage` are texts' numbers, `bad` what is missing or
        wrong."""
        cdef Machine* m = &self.machine
        cdef size_t rows = m.notes
        return {
            "bad": adopt(<void**>&m.note_mask, rows),
            "name": adopt(<void**>&m.note_name, rows * 4),
            "stage": adopt(<void**>&m.note_stage, rows * 4),
            "device": adopt(<void**>&m.note_device, rows * 8),
            "time_us": adopt(<void**>&m.note_time, rows * 8),
        }

    def event_keys(self):
        """All keys that events have."""
        return self.keys(EVENT_KEY)

    def block_keys(self):
        """All keys that blocks have."""
        return self.keys(BLOCK_KEY)

    cdef keys(self, uint8_t kind):
        cdef uint32_t index
        cdef Machine* m = &self.machine
        known = min(m.key_seen_capacity, <size_t>m.texts.count)
        return [self.text(index) for index in range(known) if m.key_seen[index] & kind]

    def blocks(self):
        """All blocks, in the file's order: memory of each column. `mask` says what is said and what is bad (`BLOCK`),
        `state` is a text's number."""
        cdef Machine* m = &self.machine
        cdef size_t rows = m.blocks
        return {
            "mask": adopt(<void**>&m.block_mask, rows),
            "address": adopt(<void**>&m.block_address, rows * 8),
            "size": adopt(<void**>&m.block_size, rows * 8),
            "requested": adopt(<void**>&m.block_requested, rows * 8),
            "state": adopt(<void**>&m.block_state, rows * 4),
            "stack": adopt(<void**>&m.block_stack, rows * 4),
        }

    def histories(self):
        """(row of a block, its `history`), in the file's order."""
        cdef uint64_t index
        cdef Machine* m = &self.machine
        return [(m.pasts[index].row, self.value(&m.pasts[index].cell)) for index in range(m.past_count)]

    def strange_actions(self):
        """The names of action codes from 10 upwards."""
        return [self.text(self.machine.actions[index]) for index in range(self.machine.action_count)]

    def pairs(self):
        """Pool ids, by the numbers in the column `pool`: int64, two each."""
        return self.content(&self.machine.pairs)

    def frames(self):
        """All frames: uint32, four each (text id of the file, of the function, line, 0)."""
        return self.content(&self.machine.frames)

    @property
    def stack_count(self):
        """How many stacks there are; number 0 is the empty one."""
        return self.machine.stacks.count

    def stack_table(self, const int32_t[::1] order, int32_t count):
        """Stacks in another order (`order[id]` is the place of a stack, -1 leaves it out): memory of the offsets
        (int64, count + 1) and of the frame ids (int32)."""
        cdef Interned* stacks = &self.machine.stacks
        cdef uint32_t index
        cdef int64_t* offsets
        cdef int32_t* ids
        cdef int32_t place
        if <uint64_t>order.shape[0] != stacks.count:
            raise ValueError("an order of other stacks")
        offsets = <int64_t*>malloc((<size_t>count + 1) * sizeof(int64_t))
        if offsets == NULL:
            raise MemoryError
        memset(offsets, 0, (<size_t>count + 1) * sizeof(int64_t))
        for index in range(stacks.count):
            place = order[index]
            if place >= count:
                free(offsets)
                raise IndexError(place)
            if place >= 0:
                offsets[place + 1] = <int64_t>(table_length(stacks, index) // 4)
        for place in range(count):
            offsets[place + 1] += offsets[place]
        ids = <int32_t*>malloc(<size_t>offsets[count] * 4 + 4)
        if ids == NULL:
            free(offsets)
            raise MemoryError
        for index in range(stacks.count):
            if order[index] >= 0 and table_length(stacks, index):
                memcpy(
                    ids + offsets[order[index]], stacks.data + table_start(stacks, index), table_length(stacks, index)
                )
        total = <size_t>offsets[count] * 4
        return adopt(<void**>&offsets, (<size_t>count + 1) * sizeof(int64_t)), adopt(<void**>&ids, total)

    def stack(self, index):
        """The frame numbers of one stack."""
        return self.numbers(&self.machine.stacks, index)

    def joined(self, index, frames):
        """The number of the stack made of some more frames and those of a stack (-1: of none)."""
        cdef Interned* stacks = &self.machine.stacks
        cdef bytes content = b"".join(int(frame).to_bytes(4, "little") for frame in frames)
        cdef uint32_t number
        if index >= 0:
            number = index
            if number >= stacks.count:
                raise IndexError(index)
            start, length = table_start(stacks, number), table_length(stacks, number)
            content += (<char*>stacks.data)[start : start + length]
        number = intern(stacks, content, len(content), &self.machine.secret)
        if number == FULL:
            raise MemoryError
        return number

    def cpp_frame(self, text):
        """The number of the frame of a C++ function of which only the name is known, by the text's number."""
        cdef uint32_t[4] frame
        cdef bytes unknown = b"??"
        cdef uint32_t number = text
        if number >= self.machine.texts.count:
            raise IndexError(text)
        frame[0] = intern(&self.machine.texts, unknown, len(unknown), &self.machine.secret)
        frame[1] = number
        frame[2] = 0
        frame[3] = 0
        number = intern(&self.machine.frames, <uint8_t*>frame, sizeof(frame), &self.machine.secret)
        if frame[0] == FULL or number == FULL:
            raise MemoryError
        return number

    def texts(self, numbers):
        """Texts by their numbers."""
        for number in numbers:
            if not 0 <= number < self.machine.texts.count:
                raise IndexError(number)
        return [self.text(number) for number in numbers]

    def list_of_texts(self, index):
        """The texts of a list of them, by their numbers."""
        return self.numbers(&self.machine.lists, index)

    cdef numbers(self, const Interned* table, index):
        cdef uint32_t number = index
        if number >= table.count:
            raise IndexError(index)
        start, length = table_start(table, number), table_length(table, number)
        return memoryview((<char*>table.data)[start : start + length]).cast("I")

    def root(self):
        """The object at the top. Traces are OPAQUE in it, as is what memtrace does not read; lists of frames or texts
        are Stack and Texts."""
        return self.value(&self.machine.result)

    cdef content(self, const Interned* table):
        return bytearray((<char*>table.data)[: table_start(table, table.count)])

    cdef value(self, const Cell* cell):
        cdef uint8_t tag = cell.tag
        cdef Interned* table
        if tag == TEXT:
            return self.text(<uint32_t>cell.value)
        if tag == INTEGER:
            return <int64_t>cell.value
        if tag == BIG:
            table = &self.machine.bigs
            raw = (<char*>table.data)[cell.value * MAX_INTEGER_BYTES : (cell.value + 1) * MAX_INTEGER_BYTES]
            return int.from_bytes(raw, "little", signed=True)
        if tag == FLOAT:
            return struct.unpack(">d", int(cell.value).to_bytes(8, "little"))[0]
        if tag == BOOL:
            return cell.value != 0
        if tag == NONE:
            return None
        if tag == STACK:
            return Stack(cell.value)
        if tag == TEXTS:
            return Texts(cell.value)
        if tag == PAIR:
            raw = (<char*>self.machine.pairs.data)[cell.value * 16 : (cell.value + 1) * 16]
            return struct.unpack("<qq", raw)
        if tag == NODE:
            return self.node(&self.machine.nodes[cell.value])
        return OPAQUE

    cdef node(self, const Node* node):
        cdef uint64_t index
        cdef const Cell* cells = self.machine.cells + node.start
        if node.role == TRACES:
            return OPAQUE
        if node.role == BLOCKS or node.role == NOTES:
            return Rows(node.start, node.count)
        if node.is_dict:
            return {self.value(&cells[index]): self.value(&cells[index + 1]) for index in range(0, node.count, 2)}
        return [self.value(&cells[index]) for index in range(node.count)]


def role_at(parent, key, is_dict):
    """The role of a container by its place, for the test that holds `role_below` against `roles`."""
    return role_below(parent, WORDS.index(key) if key in WORDS else len(WORDS), is_dict)


def first_use(const int32_t[::1] column, int32_t[::1] order, int32_t count):
    """Numbers ids in the order in which columns use them: `order[id]` is its place, -1 while it has none. Ids below 0
    are none. Returns the count of places given so far (pass it on to the next column)."""
    cdef Py_ssize_t row
    cdef int32_t index
    cdef int32_t known = <int32_t>order.shape[0]
    with nogil:
        for row in range(column.shape[0]):
            index = column[row]
            if index >= 0:
                if index >= known:
                    with gil:
                        raise IndexError(index)
                if order[index] < 0:
                    order[index] = count
                    count += 1
    return count


def translate(int32_t[::1] column, const int32_t[::1] order):
    """Replaces every id by its place, in the column itself; what is below 0 stays."""
    cdef Py_ssize_t row
    cdef int32_t known = <int32_t>order.shape[0]
    with nogil:
        for row in range(column.shape[0]):
            if column[row] >= known:
                with gil:
                    raise IndexError(column[row])
            if column[row] >= 0:
                column[row] = order[column[row]]
