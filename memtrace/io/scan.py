"""The walk over a pickle's opcodes that comes before Python loads it; the reference for what `_decode` accepts.

Owns the decision what a pickle may contain to be loaded at all. A 9-byte pickle can make the C unpickler take
4 GiB, and others crash it; whatever passes here cannot: it creates only plain data, needs memory in proportion
to its bytes, has string keys only (hashing nested tuples recurses in C), is shallow and holds no cycle.

The walk keeps one byte per value on the unpickler's stack and in its memo, the value's *kind*:

    0            a text short enough to be a dict key
    1 to 7       one of the texts under which a container has a role, or a stack stands
    8, 9         a number or None, a long text
    10 + 2h (+1) a list or tuple (a dict) of height h without a role (h = 1: holds scalars only)
    80 + r       a dict or list of role r

A container may change only in the stack slot where it was made, and only until something fetches it from the
memo. All picklers write so, and it makes heights final and cycles impossible. What a container is (`roles`) follows
from where it is made, and one with a role stands only there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from memtrace.errors import NotAPickleError, TruncatedError
from memtrace.io.refusal import COPY_AGAIN, HOW_TO_WRITE, cut_off, opcode_refusal, refusal
from memtrace.io.roles import (
    BY_KEY,
    COUNTED,
    DICT_WEIGHT,
    FREE_VALUES,
    FREE_WEIGHT,
    ITEMS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DEVICES,
    MAX_INTEGER_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_TEXT_BYTES,
    SEQUENCE_WEIGHT,
    WITH_STACK,
    Role,
)
from memtrace.units import MiB

SCAN_LIMIT = 8 * MiB  # larger pickles are not walked in Python: that would take longer than loading them

_WORDS = ("device_traces", "segments", "allocator_settings", "external_annotations", "blocks", "history", "frames")
_FRAMES = 7
_WORD_KINDS = {word.encode(): kind for kind, word in enumerate(_WORDS, 1)}
_LAST_WORD = len(_WORDS)
_SCALAR, _LONG_TEXT, _FLAT = 8, 9, 10
_DEEPEST_STACK = _FLAT + 2 * 2 + 1
_WITH_ROLE = 80
_FETCHED = 128  # flag on a memo entry: the container was fetched and must not change any more

_PROTO, _FRAME, _STOP, _MARK = 0x80, 0x95, 0x2E, 0x28
_EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE = 0x7D, 0x5D, 0x29
_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = 0x74, 0x85, 0x86, 0x87
_APPEND, _APPENDS, _SETITEM, _SETITEMS = 0x61, 0x65, 0x73, 0x75
_LONG1, _LONG4 = 0x8A, 0x8B
_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8 = 0x8C, 0x58, 0x8D
_MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = 0x94, 0x71, 0x72, 0x68, 0x6A

# Scalars of fixed width: BININT BININT1 BININT2 BINFLOAT NONE NEWTRUE NEWFALSE -> bytes with the opcode.
_FIXED = {0x4A: 5, 0x4B: 2, 0x4D: 3, 0x47: 9, 0x4E: 1, 0x88: 1, 0x89: 1}
_FIXED_WIDTH = bytes(_FIXED.get(opcode, 0) for opcode in range(256))
_FETCH = {_BINGET: 2, _LONG_BINGET: 5}
_FETCH_WIDTH = bytes(_FETCH.get(opcode, 0) for opcode in range(256))

_uint32 = struct.Struct("<I").unpack_from
_uint64 = struct.Struct("<Q").unpack_from
_int32 = struct.Struct("<i").unpack_from


class _Refused(Exception):
    """Why the walk stopped (a key of `refusal.REASONS`), before the byte offset is known."""


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
        raise NotAPickleError("the file is empty", hint=COPY_AGAIN)
    if data[0] != _PROTO:
        raise NotAPickleError(f"the file begins with {data[:8]!r}, which is no pickle", hint=HOW_TO_WRITE)
    if len(data) < 2:
        raise TruncatedError("the file ends after its first byte", hint=COPY_AGAIN)
    if not 2 <= data[1] <= 5:
        raise NotAPickleError(f"the file begins like a pickle of protocol {data[1]}; 2 to 5 exist", hint=HOW_TO_WRITE)


@dataclass(slots=True)
class _Fresh:
    """A list or dict still in the slot where it was made. `memo` is 1 + its memo index, 0: none yet; `children` the
    kinds of its values that have a role."""

    slot: int
    role: Role
    is_dict: bool
    memo: int = 0
    items: int = 0
    children: set[int] = field(default_factory=set)


class _Values:
    """The unpickler's stack, marks and memo, with kinds for values."""

    __slots__ = ("_fresh", "_made", "_weight", "at", "fence", "marks", "memo", "stack")

    def __init__(self) -> None:
        self.stack = bytearray()
        self.memo = bytearray()
        self.marks: list[tuple[int, int]] = []  # the slot, and how many containers were fresh
        self.fence = 0  # what lies below the last mark is out of reach
        self.at = 0
        self._fresh: list[_Fresh] = []
        self._weight = 0
        self._made = [0] * len(Role)

    def mark(self) -> None:
        if len(self.marks) > MAX_DEPTH:
            raise _Refused("too_deep")
        self.fence = len(self.stack)
        self.marks.append((self.fence, len(self._fresh)))

    def unmark(self) -> int:
        """Removes the last mark and returns the slot of the first value above it."""
        if not self.marks:
            raise _Refused("no_beginning")
        first, _ = self.marks.pop()
        self.fence = self.marks[-1][0] if self.marks else 0
        return first

    def top(self, count: int) -> int:
        """The slot of the first of the `count` topmost values."""
        first = len(self.stack) - count
        if first < self.fence:
            raise _Refused("not_there")
        return first

    def make(self, is_dict: bool) -> None:
        """Pushes a new list or dict."""
        self._weigh(DICT_WEIGHT if is_dict else SEQUENCE_WEIGHT)
        role = self._role_here(is_dict)
        self._made[role] += 1
        if self._made[Role.TRACE] > MAX_DEVICES:
            raise _Refused("too_many_devices")
        if role in COUNTED and sum(self._made[counted] for counted in COUNTED) > MAX_CONTAINERS:
            raise _Refused("too_many_containers")
        self._fresh.append(_Fresh(len(self.stack), role, is_dict))
        self.stack.append(_WITH_ROLE + role if role else _FLAT + 2 + is_dict)

    def make_tuple(self, first: int) -> None:
        """A tuple in place of the values from slot `first`."""
        self._weigh(SEQUENCE_WEIGHT)
        kind = self._holding(first, False)
        self._drop(first)
        self.stack.append(kind)

    def fill(self, first: int, is_dict: bool) -> None:
        """Moves the values from slot `first` into the container just below them."""
        if first <= self.fence:
            raise _Refused("no_container")
        if is_dict:
            self._check_keys(first)
        values = bytes(self.stack[first:])
        other = 0
        fresh = self._fresh
        while fresh and fresh[-1].slot >= first:
            fresh.pop()
        if not fresh or fresh[-1].slot != first - 1 or fresh[-1].is_dict != is_dict:
            raise _Refused("no_container")
        target = fresh[-1]
        if target.memo and self.memo[target.memo - 1] & _FETCHED:
            raise _Refused("itself")
        if target.role == Role.OTHER:
            other = max(self._holding(first, is_dict), self.stack[target.slot])
            self.stack[target.slot] = other
            if target.memo:
                self.memo[target.memo - 1] = other
        elif is_dict:
            _check_values(target, values)
        elif set(values) - {_WITH_ROLE + ITEMS[target.role][1]}:
            raise _Refused("misplaced")
        target.items += len(values) // 2 if is_dict else len(values)
        if is_dict and target.role and target.items > MAX_KEYS:
            raise _Refused("too_many_keys")
        del self.stack[first:]

    def put(self, index: int) -> None:
        """Keeps the topmost value in the memo. All picklers number from 0 upwards, one by one."""
        if index != len(self.memo):
            raise _Refused("numbering")
        slot = self.top(1)
        kind = self.stack[slot]
        if kind == _SCALAR:
            raise _Refused("keeps_number")
        if kind > _LONG_TEXT:
            if self._fresh and self._fresh[-1].slot == slot:
                if self._fresh[-1].memo:
                    raise _Refused("kept_twice")
                self._fresh[-1].memo = index + 1
            elif kind < _WITH_ROLE:
                kind |= _FETCHED
        self.memo.append(kind)

    def _role_here(self, is_dict: bool) -> Role:
        """The role of a container made on top of the stack: by what it will be an item of, as all picklers write."""
        slot = len(self.stack)
        if not self._fresh:
            return (Role.TOP if is_dict else Role.SEGMENTS) if slot == 0 else Role.OTHER
        last = self._fresh[-1]
        role = self._role_in_batch(is_dict)
        if role or last.slot < self.fence:
            return role
        # or the only item of the container before it (APPEND, SETITEM)
        if last.is_dict:
            if not last.items and slot == last.slot + 2:
                return _role_under(last.role, self.stack[-1], is_dict)
        elif slot == last.slot + 1:
            return _role_in(last.role, is_dict)
        return Role.OTHER

    def _role_in_batch(self, is_dict: bool) -> Role:
        """The same, if it is an item of the batch that the last mark begins."""
        if not self.marks:
            return Role.OTHER
        first, fresh = self.marks[-1]
        if not fresh or self._fresh[fresh - 1].slot != first - 1:
            return Role.OTHER
        owner = self._fresh[fresh - 1]
        if not owner.is_dict:
            return _role_in(owner.role, is_dict)
        if (len(self.stack) - first) % 2:
            return _role_under(owner.role, self.stack[-1], is_dict)
        return Role.OTHER

    def _drop(self, first: int) -> None:
        del self.stack[first:]
        while self._fresh and self._fresh[-1].slot >= first:
            self._fresh.pop()

    def _holding(self, first: int, is_dict: bool) -> int:
        """The kind of a container without a role of the values from slot `first`."""
        highest = max(self.stack[first:], default=_SCALAR)
        if highest >= _WITH_ROLE:
            raise _Refused("misplaced")
        height = 1 + max(0, (highest - _FLAT) // 2)
        if height > MAX_DEPTH:
            raise _Refused("too_deep")
        return _FLAT + 2 * height + is_dict

    def _check_keys(self, first: int) -> None:
        keys = self.stack[first::2]
        if max(keys, default=0) > _LAST_WORD:
            raise _Refused("bad_key")
        if (len(self.stack) - first) % 2:
            raise _Refused("no_value")

    def _weigh(self, weight: int) -> None:
        self._weight += weight
        if self._weight > FREE_WEIGHT + self.at // 4 * 3:
            raise _Refused("too_heavy")


def _role_in(parent: Role, is_dict: bool) -> Role:
    """The role of an item of a list."""
    expected = ITEMS.get(parent)
    return expected[1] if expected is not None and expected[0] == is_dict else Role.OTHER


def _role_under(parent: Role, key: int, is_dict: bool) -> Role:
    """The role of a value in a dict; `key` is the kind of its key."""
    if parent == Role.SETTINGS and is_dict and (key <= _LAST_WORD or key == _LONG_TEXT):
        return Role.TABLE
    if 1 <= key <= _LAST_WORD:
        expected = BY_KEY.get((parent, _WORDS[key - 1]))
        if expected is not None and expected[0] == is_dict:
            return expected[1]
    return Role.OTHER


def _check_values(target: _Fresh, values: bytes) -> None:
    """Refuses containers that stand in a dict with a role under another key than where they belong, or twice there."""
    role = target.role
    for key, kind in zip(values[::2], values[1::2], strict=True):
        if key == _FRAMES and role in WITH_STACK and kind > _DEEPEST_STACK:
            raise _Refused("misplaced")
        wanted = _role_under(role, key, False) or _role_under(role, key, True)
        if kind >= _WITH_ROLE:
            # an empty dict of settings can be taken for the home of the table that follows it
            if kind - _WITH_ROLE != wanted and not (kind - _WITH_ROLE == Role.TABLE and not wanted):
                raise _Refused("misplaced")
            if kind in target.children and wanted != Role.TABLE:
                raise _Refused("misplaced")
            target.children.add(kind)
        elif kind > _LONG_TEXT and wanted and (wanted != Role.TABLE or kind % 2):
            raise _Refused("shared")


def _walk(data: bytes, whole: bool) -> None:
    check_header(data)
    size = len(data)
    values = _Values()
    stack, memo = values.stack, values.memo
    push = stack.append
    fetch_width, fixed_width, uint32 = _FETCH_WIDTH, _FIXED_WIDTH, _uint32
    texts = (0, 0, 0), (0, 0, 0)  # the last two: where the operation, its text and its end are
    frame_end = 0
    at = 2
    # One chain of comparisons, the most frequent first: at 2 million opcodes even a call each would be too much.
    # Reading past the end raises IndexError or struct.error; lengths need no check of their own.
    try:
        while True:
            opcode = data[at]
            if len(stack) > FREE_VALUES and len(stack) * 16 > at:
                raise _Refused("too_many_values")
            if width := fetch_width[opcode]:
                index = data[at + 1] if width == 2 else uint32(data, at + 1)[0]
                if index >= len(memo):
                    raise _Refused("not_kept")
                kind = memo[index]
                if kind > _LONG_TEXT:
                    if kind >= _FETCHED:
                        kind -= _FETCHED
                    elif kind >= _WITH_ROLE:
                        raise _Refused("shared")
                    else:
                        memo[index] = kind | _FETCHED
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
            elif opcode in _CONTAINERS:
                values.at = at
                _CONTAINERS[opcode](values)
                at += 1
            elif opcode in _TEXTS:
                start, end = _text_span(data, at)
                texts = texts[1], (at, start, end)
                push(_text_kind(data, start, end))
                at = end
            elif opcode == _BINPUT:
                values.put(data[at + 1])
                at += 2
            elif opcode == _LONG_BINPUT:
                values.put(uint32(data, at + 1)[0])
                at += 5
            elif opcode == _FRAME:
                frame_end = max(frame_end, at + 9 + _uint64(data, at + 1)[0])
                at += 9
            elif opcode == _STOP:
                if values.marks or not stack:
                    raise _Refused("not_there")
                if len(stack) > 1:
                    raise _Refused("left_over")
                if frame_end > at + 1:
                    raise IndexError
                return
            elif opcode == _LONG4:
                at += 5 + _integer_length(_int32(data, at + 1)[0])
                push(_SCALAR)
            else:
                raise opcode_refusal(at, data[at : at + 400], _named(data, at, *texts))
    except (IndexError, struct.error):
        if whole:
            raise cut_off(size) from None
    except _Refused as refused:
        raise refusal(str(refused), at) from None


_CONTAINERS: dict[int, Callable[[_Values], None]] = {
    _EMPTY_DICT: lambda values: values.make(True),
    _SETITEMS: lambda values: values.fill(values.unmark(), True),
    _EMPTY_LIST: lambda values: values.make(False),
    _APPENDS: lambda values: values.fill(values.unmark(), False),
    _APPEND: lambda values: values.fill(values.top(1), False),
    _SETITEM: lambda values: values.fill(values.top(2), True),
    _EMPTY_TUPLE: lambda values: values.stack.append(_FLAT + 2),
    _TUPLE1: lambda values: values.make_tuple(values.top(1)),
    _TUPLE2: lambda values: values.make_tuple(values.top(2)),
    _TUPLE3: lambda values: values.make_tuple(values.top(3)),
    _TUPLE: lambda values: values.make_tuple(values.unmark()),
}
_TEXTS = frozenset({_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8})


def _integer_length(length: int) -> int:
    if length > MAX_INTEGER_BYTES:
        raise _Refused("long_integer")
    if length < 0:
        raise _Refused("negative_length")
    return length


def _text_span(data: bytes, at: int) -> tuple[int, int]:
    """Where the text of the string opcode at `at` begins and ends."""
    opcode = data[at]
    if opcode == _SHORT_BINUNICODE:
        return at + 2, at + 2 + data[at + 1]
    if opcode == _BINUNICODE:
        return at + 5, at + 5 + int(_uint32(data, at + 1)[0])
    return at + 9, at + 9 + int(_uint64(data, at + 1)[0])


def _text_kind(data: bytes, start: int, end: int) -> int:
    if end - start > MAX_TEXT_BYTES:
        raise _Refused("long_text")
    text = data[start:end]
    if len(text) < end - start:
        raise IndexError
    if not text.isascii():
        try:
            text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _Refused("not_utf8") from None
    return _LONG_TEXT if len(text) > MAX_KEY_BYTES else _WORD_KINDS.get(text, 0)


def _named(data: bytes, at: int, module: tuple[int, int, int], name: tuple[int, int, int]) -> tuple[str, str] | None:
    """The two texts right before an opcode (each perhaps memoized): what STACK_GLOBAL names."""
    if not module[2] or name[0] - module[2] > 1 or at - name[2] > 1:
        return None
    first, second = (data[start:end][:200].decode("utf-8", "replace") for _, start, end in (module, name))
    return first, second
