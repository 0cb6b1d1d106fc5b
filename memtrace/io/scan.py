"""The walk over a pickle's opcodes that comes before any loading of it.

Owns the decision what a pickle may contain to be loaded at all. A 9-byte pickle can make the C unpickler take
4 GiB, and others crash it; whatever passes here cannot: it creates only plain data, needs memory in proportion
to its bytes, has string keys only (hashing nested tuples recurses in C), is shallow and holds no cycle.

The walk keeps one byte per value on the unpickler's stack and in its memo, the value's *kind*:

    0      a string short enough to be a dict key
    1      any other scalar
    1 + h  a dict, list or tuple of height h (h = 1: holds scalars only)

A container may change only in the stack slot where it was made, and only until something fetches it from the
memo. All picklers write so, and it makes heights final and cycles impossible.
"""

from __future__ import annotations

import struct
from array import array
from typing import NoReturn

from memtrace.errors import NotAPickleError, NotASnapshotError, SourceError, TruncatedError, UnsafePickleError
from memtrace.units import MiB

SCAN_LIMIT = 8 * MiB  # larger pickles are not walked: that would take longer than loading them

MAX_DEPTH = 100  # snapshots are 7 deep
MAX_INTEGER_BYTES = 9  # unsigned 64 bits and a sign
MAX_KEY_BYTES = 1024  # two equal long keys, looked up again and again, would compare for minutes

# Containers are what a short pickle can make most memory with: at worst a dict takes 240 bytes and is written in 5.
# A dict weighs 12, a list or tuple 6, and a pickle may weigh 3/4 of its length. Real ones weigh 1/6, at most 1/2.
# With strings, at worst 22 bytes in memory per byte, 8 MiB stay below 300 MB.
_DICT_WEIGHT = 12
_SEQUENCE_WEIGHT = 6
_FREE_WEIGHT = 65536

_KEY, _SCALAR, _EMPTY = 0, 1, 2
_FETCHED = 128  # flag on a memo entry: the container was fetched and must not change any more

_PROTO, _FRAME, _STOP, _MARK = 0x80, 0x95, 0x2E, 0x28
_POP, _POP_MARK = 0x30, 0x31
_EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE = 0x7D, 0x5D, 0x29
_DICT, _LIST, _TUPLE, _TUPLE1, _TUPLE3 = 0x64, 0x6C, 0x74, 0x85, 0x87
_APPEND, _APPENDS, _SETITEM, _SETITEMS = 0x61, 0x65, 0x73, 0x75
_LONG1, _LONG4 = 0x8A, 0x8B
_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8 = 0x8C, 0x58, 0x8D
_MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = 0x94, 0x71, 0x72, 0x68, 0x6A
_GLOBAL, _STACK_GLOBAL = 0x63, 0x93

# Scalars of fixed width: BININT BININT1 BININT2 BINFLOAT NONE NEWTRUE NEWFALSE -> bytes with the opcode.
_FIXED = {0x4A: 5, 0x4B: 2, 0x4D: 3, 0x47: 9, 0x4E: 1, 0x88: 1, 0x89: 1}
_FIXED_WIDTH = bytes(_FIXED.get(opcode, 0) for opcode in range(256))
_FETCH = {_BINGET: 2, _LONG_BINGET: 5}
_FETCH_WIDTH = bytes(_FETCH.get(opcode, 0) for opcode in range(256))

_RUNS_CODE = {
    _GLOBAL: "import something by name",
    _STACK_GLOBAL: "import something by name",
    0x69: "create an object (INST)",
    0x6F: "create an object (OBJ)",
    0x81: "create an object (NEWOBJ)",
    0x92: "create an object (NEWOBJ_EX)",
    0x52: "call a function (REDUCE)",
    0x62: "set an object's state (BUILD)",
    0x50: "resolve a persistent id (PERSID)",
    0x51: "resolve a persistent id (BINPERSID)",
    0x82: "use an extension code (EXT1)",
    0x83: "use an extension code (EXT2)",
    0x84: "use an extension code (EXT4)",
}

_ANOTHER_PICKLE = {
    **dict.fromkeys((0x42, 0x43, 0x8E), "bytes"),
    **dict.fromkeys((0x54, 0x55), "Python 2 byte strings"),
    0x96: "a bytearray",
    **dict.fromkeys((0x97, 0x98), "a buffer outside the file"),
    **dict.fromkeys((0x8F, 0x90), "a set"),
    0x91: "a frozenset",
    **dict.fromkeys((0x49, 0x4C, 0x46, 0x53, 0x56, 0x70, 0x67, 0x32), "values of pickle protocol 0"),
}

_HOW_TO_WRITE = "A snapshot is what torch.cuda.memory._dump_snapshot('snapshot.pickle') writes."
_COPY_AGAIN = "Copy the file again from where it was made, or record anew: its writer may have been killed."
_NOTHING_RUN = "Nothing was run. Do not open this file with pickle.load: torch's snapshots hold plain data only."

_uint32 = struct.Struct("<I").unpack_from
_uint64 = struct.Struct("<Q").unpack_from
_int32 = struct.Struct("<i").unpack_from


class _Refused(Exception):
    """Why the walk stopped, before the byte offset is known."""

    def __init__(self, error: type[SourceError], what: str, hint: str) -> None:
        self.error, self.what, self.hint = error, what, hint


def scan(data: bytes | memoryview) -> None:
    """Returns if the pickle at the start of `data` is harmless, else raises what is wrong with it.

    Bytes after its STOP are ignored, as every unpickler does.
    """
    _walk(bytes(data), whole=True)


def scan_start(data: bytes | memoryview) -> None:
    """The same for the first bytes of a longer pickle: the end of `data` is not the end of the pickle."""
    _walk(bytes(data), whole=False)


def check_header(data: bytes) -> None:
    """Refuses what does not begin like a pickle of protocol 2 to 5."""
    if not data:
        raise NotAPickleError("the file is empty", hint=_COPY_AGAIN)
    if data[0] != _PROTO:
        raise NotAPickleError(f"the file begins with {data[:8]!r}, which is no pickle", hint=_HOW_TO_WRITE)
    if len(data) < 2:
        raise TruncatedError("the file ends after its first byte", hint=_COPY_AGAIN)
    if not 2 <= data[1] <= 5:
        raise NotAPickleError(f"the file begins like a pickle of protocol {data[1]}; 2 to 5 exist", hint=_HOW_TO_WRITE)


class _Values:
    """The unpickler's stack, marks and memo, with kinds for values."""

    __slots__ = ("_fresh_at", "_fresh_dict", "_fresh_memo", "_weight_left", "fence", "marks", "memo", "stack")

    def __init__(self, weight: int) -> None:
        self.stack = bytearray()
        self.memo = bytearray()
        self.marks: list[int] = []
        self.fence = 0  # what lies below the last mark is out of reach
        self._weight_left = weight
        # Containers still in the slot where they were made: the slot, 1 + memo index (0: none yet), whether a dict.
        self._fresh_at = array("Q")
        self._fresh_memo = array("Q")
        self._fresh_dict = bytearray()

    def mark(self) -> None:
        if len(self.marks) > MAX_DEPTH:
            raise _too_deep()
        self.fence = len(self.stack)
        self.marks.append(self.fence)

    def unmark(self) -> int:
        """Removes the last mark and returns the slot of the first value above it."""
        if not self.marks:
            raise _damaged("the end of a list without its beginning")
        first = self.marks.pop()
        self.fence = self.marks[-1] if self.marks else 0
        return first

    def top(self, count: int) -> int:
        """The slot of the first of the `count` topmost values."""
        first = len(self.stack) - count
        if first < self.fence:
            raise _damaged("an operation on values that are not there")
        return first

    def drop(self, first: int) -> None:
        del self.stack[first:]
        fresh_at = self._fresh_at
        while fresh_at and fresh_at[-1] >= first:
            fresh_at.pop()
            self._fresh_memo.pop()
            self._fresh_dict.pop()

    def pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.unmark()
        else:
            self.drop(self.top(1))

    def make(self, is_dict: bool, kind: int = _EMPTY) -> None:
        """Pushes a new list or dict."""
        self._weigh(_DICT_WEIGHT if is_dict else _SEQUENCE_WEIGHT)
        self._fresh_at.append(len(self.stack))
        self._fresh_memo.append(0)
        self._fresh_dict.append(is_dict)
        self.stack.append(kind)

    def make_tuple(self, first: int) -> None:
        """A tuple in place of the values from slot `first`."""
        self._weigh(_SEQUENCE_WEIGHT)
        kind = self._holding(first)
        self.drop(first)
        self.stack.append(kind)

    def make_filled(self, first: int, is_dict: bool) -> None:
        """A list or dict in place of the values from slot `first`."""
        if is_dict:
            self._check_keys(first)
        kind = self._holding(first)
        self.drop(first)
        self.make(is_dict, kind)

    def fill(self, first: int, is_dict: bool) -> None:
        """Moves the values from slot `first` into the container just below them."""
        if first <= self.fence:
            raise _damaged("values for a container that is not there")
        if is_dict:
            self._check_keys(first)
        kind = self._holding(first)
        self.drop(first)
        target = first - 1
        if not self._fresh_at or self._fresh_at[-1] != target or self._fresh_dict[-1] != is_dict:
            raise _damaged("values for something that is no " + ("dict" if is_dict else "list"))
        kind = max(kind, self.stack[target])
        self.stack[target] = kind
        index = self._fresh_memo[-1]
        if index:
            if self.memo[index - 1] >= _FETCHED:
                raise _Refused(NotASnapshotError, "holds a list or dict that contains itself", _HOW_TO_WRITE)
            self.memo[index - 1] = kind

    def put(self, index: int) -> None:
        """Keeps the topmost value in the memo. All picklers number from 0 upwards, one by one."""
        if index != len(self.memo):
            what = f"keeps a value under number {index:,} where {len(self.memo):,} is next"
            raise _Refused(UnsafePickleError, what, "The file is damaged or built to exhaust memory.")
        slot = self.top(1)
        kind = self.stack[slot]
        if kind > _SCALAR:
            if self._fresh_at and self._fresh_at[-1] == slot:
                if self._fresh_memo[-1]:
                    raise _damaged("a container kept twice")
                self._fresh_memo[-1] = index + 1
            else:
                kind |= _FETCHED
        self.memo.append(kind)

    def _holding(self, first: int) -> int:
        """The kind of a container of the values from slot `first`."""
        kind = max(self.stack[first:], default=_SCALAR) + 1
        if kind > MAX_DEPTH + _SCALAR:
            raise _too_deep()
        return max(kind, _EMPTY)

    def _check_keys(self, first: int) -> None:
        keys = self.stack[first::2]
        if keys.count(_KEY) != len(keys):
            raise _Refused(NotASnapshotError, "holds a dict whose keys are not short strings", _HOW_TO_WRITE)
        if (len(self.stack) - first) % 2:
            raise _damaged("a key without its value")

    def _weigh(self, weight: int) -> None:
        self._weight_left -= weight
        if self._weight_left < 0:
            hint = "No snapshot is written so; it would fill the memory."
            raise _Refused(UnsafePickleError, "holds more lists and dicts than a file of its length should", hint)


def _walk(data: bytes, whole: bool) -> None:
    check_header(data)
    size = len(data)
    values = _Values(_FREE_WEIGHT + size * 3 // 4 if whole else 1 << 62)
    stack, memo = values.stack, values.memo
    push = stack.append
    fetch_width, fixed_width, uint32 = _FETCH_WIDTH, _FIXED_WIDTH, _uint32
    text_at = text_before_at = 0
    at = 2
    # One chain of comparisons, the most frequent first: at 2 million opcodes even a call each would be too much.
    # Reading past the end raises IndexError or struct.error; lengths need no check of their own.
    try:
        while True:
            opcode = data[at]
            if width := fetch_width[opcode]:
                index = data[at + 1] if width == 2 else uint32(data, at + 1)[0]
                kind = memo[index]
                if kind > _SCALAR:
                    if kind < _FETCHED:
                        memo[index] = kind | _FETCHED
                    else:
                        kind -= _FETCHED
                push(kind)
                at += width
            elif width := fixed_width[opcode]:
                push(_SCALAR)
                at += width
            elif opcode == _MEMOIZE:
                values.put(len(memo))
                at += 1
            elif opcode == _LONG1:
                at += 2 + _integer_length(data[at + 1])
                push(_SCALAR)
            elif opcode == _MARK:
                values.mark()
                at += 1
            elif opcode == _EMPTY_DICT:
                values.make(True)
                at += 1
            elif opcode == _SETITEMS:
                values.fill(values.unmark(), True)
                at += 1
            elif opcode == _EMPTY_LIST:
                values.make(False)
                at += 1
            elif opcode == _APPENDS:
                values.fill(values.unmark(), False)
                at += 1
            elif opcode == _SHORT_BINUNICODE:
                text_before_at, text_at = text_at, at
                at += 2 + data[at + 1]
                push(_KEY)
            elif opcode == _BINPUT:
                values.put(data[at + 1])
                at += 2
            elif opcode == _LONG_BINPUT:
                values.put(uint32(data, at + 1)[0])
                at += 5
            elif opcode in (_BINUNICODE, _BINUNICODE8):
                text_before_at, text_at = text_at, at
                start, end = _text_span(data, at)
                push(_KEY if end - start <= MAX_KEY_BYTES else _SCALAR)
                at = end
            elif opcode == _APPEND:
                values.fill(values.top(1), False)
                at += 1
            elif opcode == _SETITEM:
                values.fill(values.top(2), True)
                at += 1
            elif _TUPLE1 <= opcode <= _TUPLE3:
                values.make_tuple(values.top(opcode - _TUPLE1 + 1))
                at += 1
            elif opcode == _FRAME:
                length = _uint64(data, at + 1)[0]
                at += 9
                if whole and at + length > size:
                    at = size
                    raise IndexError
            elif opcode == _STOP:
                values.top(1)
                return
            elif opcode == _EMPTY_TUPLE:
                push(_EMPTY)
                at += 1
            elif opcode == _TUPLE:
                values.make_tuple(values.unmark())
                at += 1
            elif opcode in (_LIST, _DICT):
                values.make_filled(values.unmark(), opcode == _DICT)
                at += 1
            elif opcode == _LONG4:
                at += 5 + _integer_length(_int32(data, at + 1)[0])
                push(_SCALAR)
            elif opcode == _POP:
                values.pop()
                at += 1
            elif opcode == _POP_MARK:
                values.drop(values.unmark())
                at += 1
            else:
                _refuse_opcode(data, at, text_before_at, text_at)
    except (IndexError, struct.error):
        if at < size and 0 < fetch_width[data[at]] <= size - at:
            message = f"the pickle is damaged: at byte {at:,} it fetches a value that was never kept"
            raise TruncatedError(message, hint=_COPY_AGAIN) from None
        if whole:
            raise TruncatedError(f"the pickle is cut off: {size:,} bytes and no end", hint=_COPY_AGAIN) from None
    except _Refused as refused:
        raise refused.error(f"at byte {at:,} the pickle {refused.what}", hint=refused.hint) from None


def _integer_length(length: int) -> int:
    if length > MAX_INTEGER_BYTES:
        raise _Refused(NotASnapshotError, f"holds an integer of {length:,} bytes", _HOW_TO_WRITE)
    if length < 0:
        raise _damaged("an integer of negative length")
    return length


def _text_span(data: bytes, at: int) -> tuple[int, int]:
    """Where the text of the string opcode at `at` begins and ends."""
    opcode = data[at]
    if opcode == _SHORT_BINUNICODE:
        return at + 2, at + 2 + data[at + 1]
    if opcode == _BINUNICODE:
        return at + 5, at + 5 + int(_uint32(data, at + 1)[0])
    return at + 9, at + 9 + int(_uint64(data, at + 1)[0])


def _damaged(what: str) -> _Refused:
    return _Refused(TruncatedError, f"is damaged: it has {what}", _COPY_AGAIN)


def _too_deep() -> _Refused:
    return _Refused(NotASnapshotError, f"nests more than {MAX_DEPTH} lists and dicts", _HOW_TO_WRITE)


def _refuse_opcode(data: bytes, at: int, text_before_at: int, text_at: int) -> NoReturn:
    opcode = data[at]
    if opcode in _RUNS_CODE:
        name = ""
        if opcode == _GLOBAL:
            name = _named_by_lines(data, at + 1)
        elif opcode == _STACK_GLOBAL:
            name = _named_by_texts(data, at, text_before_at, text_at)
        wish = f"import {name}" if name else _RUNS_CODE[opcode]
        raise _Refused(UnsafePickleError, f"asks to {wish}", _NOTHING_RUN)
    if opcode in _ANOTHER_PICKLE:
        what = f"holds {_ANOTHER_PICKLE[opcode]}, as no snapshot does: it is another pickle"
        raise _Refused(NotASnapshotError, what, _HOW_TO_WRITE)
    if at == 2:
        raise _Refused(NotAPickleError, f"has {data[at : at + 1]!r}, which is no pickle operation", _HOW_TO_WRITE)
    raise _damaged(f"{data[at : at + 1]!r}, which means nothing in a snapshot")


def import_name(module: str, name: str) -> str:
    """`module.name` of something a pickle asks for, safe to show and short."""
    return ascii(f"{module}.{name}"[:200])


def _named_by_lines(data: bytes, start: int) -> str:
    """What GLOBAL names: two lines after the opcode."""
    lines = data[start : start + 400].split(b"\n", 2)
    if len(lines) < 3:
        return ""
    return import_name(lines[0].decode("utf-8", "replace"), lines[1].decode("utf-8", "replace"))


def _named_by_texts(data: bytes, at: int, module_at: int, name_at: int) -> str:
    """What STACK_GLOBAL names, if the two strings (each perhaps memoized) stand right before it."""
    if not module_at:
        return ""
    module_start, module_end = _text_span(data, module_at)
    name_start, name_end = _text_span(data, name_at)
    if not (0 <= name_at - module_end <= 1 and 0 <= at - name_end <= 1):
        return ""
    module, name = data[module_start:module_end], data[name_start:name_end]
    return import_name(module[:200].decode("utf-8", "replace"), name[:200].decode("utf-8", "replace"))
