"""Strings, frames and stacks interned while parsing: by identity first (snapshots share objects), then by content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import NotASnapshotError
from memtrace.model import StackTable, StringTable
from memtrace.model.stacks import NOT_RECORDED

_MAX_LINE = 2**31 - 1
MAX_STACK_FRAMES = 100_000
MAX_CPP_FRAMES = 4_000_000
"""One list of names may be joined to many stacks: without a limit a small file could grow without end."""


class StackIds(Protocol):
    """What numbers texts and `frames` lists while the memory map is parsed."""

    def string(self, text: str) -> int: ...
    def stacks(
        self, frames: Sequence[object], where: str, cpp_frames: Sequence[object] | None = None
    ) -> NDArray[np.int32]: ...


class Interner:
    """Collects the strings and stacks of one snapshot. Parsing only; `tables()` freezes the result.

    Identities are only valid while the loaded objects are alive: the parser holds them all until the end.
    """

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._frames: dict[tuple[str, int, str], int] = {}
        self._frame_of_id: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._keys: list[tuple[int, ...]] = []
        self._parts: dict[tuple[int, ...], int] = {}
        self._part_keys: list[tuple[int, ...]] = []
        self._joins: dict[tuple[int, int], int] = {}
        self._cpp_frames = 0

    def string(self, text: str) -> int:
        """Id of a string."""
        return self._strings.setdefault(text, len(self._strings))

    def stacks(
        self, frames: Sequence[object], where: str, cpp_frames: Sequence[object] | None = None
    ) -> NDArray[np.int32]:
        """Ids of many `frames` lists, each distinct list looked at once; `NOT_RECORDED` for None.

        `cpp_frames` are lists of the C++ function names of torch 2.0 (innermost), which go in front.
        """
        if not set(map(type, frames)) <= {list, type(None)}:
            bad = next(index for index, items in enumerate(frames) if type(items) not in (list, type(None)))
            raise NotASnapshotError(f"{where} {bad}: frames is {_kind(frames[bad])}, expected a list")
        if cpp_frames is not None:
            return self._joined_stacks(frames, cpp_frames, where)
        identities = np.fromiter(map(id, frames), np.int64, len(frames))
        _, first, inverse = np.unique(identities, return_index=True, return_inverse=True)
        order = np.argsort(first)  # in the file's order: identities differ from run to run
        ids = np.empty(len(first), np.int32)
        frame_of, known = self._frame_of_id.__getitem__, self._stacks
        for position, index in zip(order.tolist(), first[order].tolist(), strict=True):
            items = frames[index]
            try:
                ids[position] = known[tuple(map(frame_of, map(id, items)))]
            except (KeyError, TypeError):
                ids[position] = (
                    NOT_RECORDED if items is None else self._intern_stack(self._key(items, f"{where} {index}"))
                )
        return ids[inverse]

    def _joined_stacks(self, frames: Sequence[object], cpp_frames: Sequence[object], where: str) -> NDArray[np.int32]:
        ids = np.empty(len(frames), np.int32)
        inner: dict[int, int] = {}
        outer: dict[int, int] = {}
        for index, (items, names) in enumerate(zip(frames, cpp_frames, strict=True)):
            place = f"{where} {index}"
            if id(names) not in inner:
                inner[id(names)] = self._numbered(self._cpp_key(names, place))
            if id(items) not in outer:
                outer[id(items)] = NOT_RECORDED if items is None else self._numbered(self._key(items, place))
            ids[index] = self._joined(outer[id(items)], inner[id(names)], place)
        return ids

    def _numbered(self, key: tuple[int, ...]) -> int:
        """A number for a part of stacks that are to be joined: they may be long, and the same in many events."""
        number = self._parts.setdefault(key, len(self._parts))
        if number == len(self._part_keys):
            self._part_keys.append(key)
        return number

    def _joined(self, outer: int, inner: int, where: str) -> int:
        """The stack of two parts, the inner one first."""
        if (outer, inner) not in self._joins:
            front = self._part_keys[inner]
            rest = () if outer == NOT_RECORDED else self._part_keys[outer]
            empty = outer == NOT_RECORDED and not front
            self._joins[outer, inner] = NOT_RECORDED if empty else self._intern_stack(front + rest)
            self._cpp_frames += len(front) + len(rest) if front else 0
            if self._cpp_frames > MAX_CPP_FRAMES:
                raise NotASnapshotError(f"{where}: stacks of more C++ frames than any program has")
        return self._joins[outer, inner]

    def _cpp_key(self, names: object, where: str) -> tuple[int, ...]:
        if names is None:
            return ()
        if type(names) is not list or not all(type(name) is str for name in names):
            raise NotASnapshotError(f"{where}: cpp_frames is not a list of text")
        return tuple([self._intern_frame("??", 0, name) for name in names])

    def _key(self, frames: object, where: str) -> tuple[int, ...]:
        """The frame ids of a list."""
        assert isinstance(frames, list), "checked for all at once"
        if len(frames) > MAX_STACK_FRAMES:
            raise NotASnapshotError(f"{where}: a stack of {len(frames):,} frames is deeper than any program's")
        of_id = self._frame_of_id
        return tuple([of_id[id(frame)] if id(frame) in of_id else self._frame(frame, where) for frame in frames])

    def tables(self) -> StackTable:
        """The frozen tables."""
        frames = list(self._frames)
        filename = np.fromiter((self.string(frame[0]) for frame in frames), np.int32, len(frames))
        name = np.fromiter((self.string(frame[2]) for frame in frames), np.int32, len(frames))
        line = np.fromiter((frame[1] for frame in frames), np.int32, len(frames))
        lengths = np.fromiter(map(len, self._keys), np.int64, len(self._keys))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        frame_ids = np.fromiter((frame for key in self._keys for frame in key), np.int32, int(offsets[-1]))
        return StackTable(StringTable(tuple(self._strings)), filename, line, name, offsets, frame_ids)

    def _intern_stack(self, key: tuple[int, ...]) -> int:
        stack = self._stacks.setdefault(key, len(self._keys))
        if stack == len(self._keys):
            self._keys.append(key)
        return stack

    def _frame(self, frame: object, where: str) -> int:
        if type(frame) is not dict:
            raise NotASnapshotError(f"{where}: a frame is {_kind(frame)}, expected a dict")
        filename, line, name = frame.get("filename", ""), frame.get("line", 0), frame.get("name", "")
        if type(filename) is not str or type(name) is not str or type(line) is not int:
            raise NotASnapshotError(f"{where}: a frame needs text for filename and name and an integer line")
        # torch writes "no line" as an unsigned -1 (2^64 - 1) in some frames
        index = self._intern_frame(filename, line if 0 <= line <= _MAX_LINE else 0, name)
        self._frame_of_id[id(frame)] = index
        return index

    def _intern_frame(self, filename: str, line: int, name: str) -> int:
        return self._frames.setdefault((filename, line, name), len(self._frames))


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
