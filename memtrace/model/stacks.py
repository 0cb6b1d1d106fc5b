"""Strings, frames and stacks, each stored once and named by a small integer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns

NOT_RECORDED = -1
"""Stack id of an event or block for which torch gathered no context (no `frames` key)."""


class Frame(NamedTuple):
    """One call site, as the file has it (not escaped)."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class StringTable:
    """All distinct strings of a snapshot, by id."""

    values: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> str:
        return self.values[index]


@dataclass(frozen=True, slots=True, eq=False)
class StackTable(FrozenColumns):
    """All distinct stacks of a snapshot: lists of frame ids in CSR form, innermost frame first.

    Stack `i` is `frame_ids[offsets[i]:offsets[i + 1]]`; an empty one was recorded without any frame (a thread
    that runs no Python). Frame `f` is (`filename[f]`, `line[f]`, `name[f]`), names being ids in `strings`.
    """

    strings: StringTable
    filename: NDArray[np.int32]
    line: NDArray[np.int32]
    name: NDArray[np.int32]
    offsets: NDArray[np.int64]
    frame_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def frame_count(self) -> int:
        return len(self.line)

    def frame(self, frame_id: int) -> Frame:
        """The frame with that id."""
        strings = self.strings
        return Frame(strings[self.filename[frame_id]], int(self.line[frame_id]), strings[self.name[frame_id]])

    def ids(self, stack: int) -> NDArray[np.int32]:
        """Frame ids of a stack, innermost first; empty for `NOT_RECORDED`."""
        if stack < 0:
            return self.frame_ids[:0]
        return self.frame_ids[self.offsets[stack] : self.offsets[stack + 1]]

    def frames(self, stack: int) -> tuple[Frame, ...]:
        """Frames of a stack, innermost first; empty for `NOT_RECORDED`."""
        return tuple(self.frame(frame_id) for frame_id in self.ids(stack))

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self.ids(stack) for stack in range(len(self)))
