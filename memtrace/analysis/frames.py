"""Which frames are whose: the program's own, a Python library's, or C++; and stacks reduced to what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.model import Frame, StackTable
from memtrace.model.stacks import NOT_RECORDED
from memtrace.places import Side, is_plumbing, short_path, side_of
from memtrace.text import printable
from memtrace.timeline.callsites import frame_sides


def own_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The program's own frames of a stack, innermost first."""
    return [frame for frame in frames if side_of(frame.filename) == Side.OWN]


def innermost_common(table: StackTable, rows: Sequence[int]) -> Frame | None:
    """The innermost frame (in the first of the stacks) that all of the stacks have."""
    if not rows:
        return None
    common = set(table.ids(rows[0]).tolist())
    for row in rows[1:]:
        common.intersection_update(table.ids(row).tolist())
    return next((table.frame(frame) for frame in table.ids(rows[0]).tolist() if frame in common), None)


def library_path(frames: Sequence[Frame]) -> list[Frame]:
    """The library calls inside the program's innermost frame that say most (innermost first): of each run of frames in
    one package, the innermost that does something of its own."""
    telling: list[Frame] = []
    package = None
    for frame in frames:
        if side_of(frame.filename) == Side.OWN:
            break
        if side_of(frame.filename) != Side.LIBRARY or is_plumbing(frame.filename, frame.name):
            continue
        here = short_path(frame.filename).split("/")[0]
        if here != package:
            telling.append(frame)
        package = here
    return telling


def display_frame(frame: Frame) -> str:
    """`torch/optim/adam.py:791 _multi_tensor_adam`, made harmless."""
    return _display(frame, short_path(frame.filename))


def display_frame_briefly(frame: Frame) -> str:
    """`optim/adam.py:791 _multi_tensor_adam`: no more of the path than its last two parts."""
    return _display(frame, "/".join(short_path(frame.filename).split("/")[-2:]))


def _display(frame: Frame, path: str) -> str:
    place = f"{path}:{frame.line}" if frame.line else path
    return printable(f"{place} {frame.name}".strip())


@dataclass(frozen=True, slots=True, eq=False)
class ShownStacks:
    """Stacks with the C++ frames left out (unless asked for), by the ids of the full ones.

    `shown[s]` is the row of full stack s in `table`, stacks that differ in C++ frames only having one row;
    `own[r]` is the innermost frame of row r that is the program's own, else a library's that says something.
    """

    table: StackTable
    shown: NDArray[np.int32]
    own: NDArray[np.int32]
    side: NDArray[np.uint8]

    def rows(self, stacks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows of full stack ids; -1 where a stack is not recorded or has no frame to show."""
        if not len(self.shown):
            return np.full(len(stacks), NOT_RECORDED, np.int32)
        return np.where(stacks == NOT_RECORDED, np.int32(NOT_RECORDED), self.shown[stacks])


def shown_stacks(stacks: StackTable, *, cpp: bool = False) -> ShownStacks:
    """The stacks as shown to people; `cpp` keeps the C++ frames."""
    side = frame_sides(stacks)
    keep = np.ones(len(stacks.frame_ids), np.bool_) if cpp else side[stacks.frame_ids] != Side.CPP
    kept_ids = stacks.frame_ids[keep].tolist()
    counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
    bounds = counts[stacks.offsets].tolist()
    rows: dict[tuple[int, ...], int] = {}
    shown = np.empty(len(stacks), np.int32)
    for stack in range(len(stacks)):
        key = tuple(kept_ids[bounds[stack] : bounds[stack + 1]])
        shown[stack] = rows.setdefault(key, len(rows)) if key else NOT_RECORDED
    keys = list(rows)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(key) for key in keys], dtype=np.int64)])
    flat = np.fromiter((frame for key in keys for frame in key), np.int32, int(offsets[-1]))
    table = StackTable(stacks.strings, stacks.filename, stacks.line, stacks.name, offsets, flat)
    plumbing = np.fromiter((is_plumbing(*stacks.frame(frame)[::2]) for frame in range(len(side))), np.bool_, len(side))
    rank = side.astype(np.int64) * 2 + plumbing
    own = np.fromiter((min(key, key=rank.__getitem__) for key in keys), np.int32, len(keys))
    return ShownStacks(table, shown, own, side)
