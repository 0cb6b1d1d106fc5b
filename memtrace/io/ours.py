"""Frames of the recorder itself, which wraps calls of the job: they are nobody's allocation, and are left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memtrace.model import SnapshotData, StackTable
from memtrace.places import is_recorders


def without_recorder(data: SnapshotData) -> SnapshotData:
    """The same, as if the recorder's frames had never been in a stack. Stacks that are the same then are one."""
    stacks = data.stacks
    files = [number for number in np.unique(stacks.filename).tolist() if is_recorders(stacks.strings[number])]
    if not files:
        return data
    table, number = _without(stacks, np.isin(stacks.filename, files))
    numbers = np.append(number, np.int32(-1))  # the last row is NOT_RECORDED's (-1)
    return replace(
        data,
        stacks=table,
        traces=tuple(replace(trace, stack=numbers[trace.stack]) for trace in data.traces),
        segments=replace(data.segments, stack=numbers[data.segments.stack]),
        blocks=replace(data.blocks, stack=numbers[data.blocks.stack]),
    )


def _without(stacks: StackTable, ours: NDArray[np.bool_]) -> tuple[StackTable, NDArray[np.int32]]:
    """The table without these frames in its stacks, and the new number of each stack: by first appearance, as ever."""
    keep = ~ours[stacks.frame_ids]
    ids = stacks.frame_ids[keep].tolist()
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])[stacks.offsets].tolist()
    known: dict[tuple[int, ...], int] = {}
    number = np.empty(len(stacks), np.int32)
    for stack in range(len(stacks)):
        number[stack] = known.setdefault(tuple(ids[bounds[stack] : bounds[stack + 1]]), len(known))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(key) for key in known], dtype=np.int64)])
    frames = np.fromiter((frame for key in known for frame in key), np.int32, int(offsets[-1]))
    return replace(stacks, offsets=offsets, frame_ids=frames), number
