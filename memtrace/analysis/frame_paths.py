"""Every stack of a file as a path from the root of a call tree, sorted: what all moments' trees are made of.

Folding leaves one call of each run of library frames, the innermost that does something of its own; the frames beside
it are hidden in its node, and frames that only pass a call on to the program's code are hidden in the program's frame.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis.frames import ShownStacks, display_frame
from memtrace.model import StackTable
from memtrace.places import PLUMBING, Side, is_plumbing

_NEVER = np.iinfo(np.int64).max
_PLUMBING_NAMES = frozenset(name for _, name in PLUMBING)


@dataclass(frozen=True, eq=False)
class FramePaths:
    """Distinct paths in lexicographic order of their frames, those that share a beginning side by side.

    Path i is `frames[offsets[i]:offsets[i + 1]]`, ids of frames in `shown.table` from the root on; `common[i]` is how
    many of them, from the root, path i - 1 has too. `of_stack[s]` is the path of stack s of the table, `depth[p]` the
    place in its path of the frame at position p of `table.frame_ids`, or of the one it is hidden in.
    """

    shown: ShownStacks
    is_inverted: bool
    is_folded: bool
    offsets: NDArray[np.int64]
    frames: NDArray[np.int32]
    common: NDArray[np.int64]
    of_stack: NDArray[np.int64]
    depth: NDArray[np.int32]

    def __post_init__(self) -> None:
        for column in (self.offsets, self.frames, self.common, self.of_stack, self.depth):
            column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.common)

    @property
    def table(self) -> StackTable:
        """The stacks that the paths are of."""
        return self.shown.table

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Every frame of the table as it is shown, without case: what is searched."""
        table = self.table
        return tuple(display_frame(table.frame(frame)).casefold() for frame in range(table.frame_count))

    def lengths(self, paths: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many frames each of these paths has."""
        return np.asarray(self.offsets[paths + 1] - self.offsets[paths], np.int64)

    def common_among(self, paths: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many frames each of these paths (ascending) shares with the one before it among them."""
        return least_between(self.common, paths)


def least_between(common: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """What neighbours share when only the rows `kept` (ascending) are left: the least in between. The first row shares
    nothing."""
    found = np.zeros(len(kept), np.int64)
    if len(kept) > 1:
        found[1:] = np.minimum.reduceat(common[: kept[-1] + 1], kept[:-1] + 1)
    return found


def paths_of(shown: ShownStacks, *, inverted: bool, folded: bool) -> FramePaths:
    """The paths of all stacks: from the outermost frames inwards, `inverted` from the innermost outwards."""
    table = shown.table
    stack = np.repeat(np.arange(len(table)), np.diff(table.offsets))
    node, kept = _folded(shown, stack) if folded else _each(len(stack))
    offsets = np.searchsorted(kept, table.offsets)
    frames = table.frame_ids[kept]
    depth = node - offsets[:-1][stack]
    if not inverted:
        depth = np.diff(offsets)[stack] - 1 - depth
        owner = stack[kept]
        frames = frames[offsets[:-1][owner] + offsets[1:][owner] - 1 - np.arange(len(kept))]
    # big-endian ids compare as bytes as they do as numbers
    packed, bounds = frames.astype(">i4").tobytes(), (4 * offsets).tolist()
    keys = [packed[begin:end] for begin, end in itertools.pairwise(bounds)]
    ordered = sorted(set(keys))
    number = {key: index for index, key in enumerate(ordered)}
    flat = np.frombuffer(b"".join(ordered), ">i4").astype(np.int32)
    lengths = np.fromiter((len(key) // 4 for key in ordered), np.int64, len(ordered))
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return FramePaths(
        shown=shown,
        is_inverted=inverted,
        is_folded=folded,
        offsets=begins,
        frames=flat,
        common=_common(begins, flat),
        of_stack=np.fromiter((number[key] for key in keys), np.int64, len(keys)),
        depth=depth.astype(np.int32),
    )


def _each(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every frame for itself."""
    every = np.arange(count, dtype=np.int64)
    return every, every


def _common(offsets: NDArray[np.int64], frames: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many frames each path shares with the one before it, from the root on."""
    lengths = np.diff(offsets)
    found = np.zeros(len(lengths), np.int64)
    if len(lengths) < 2:
        return found
    most = np.minimum(lengths[:-1], lengths[1:])
    pair = np.repeat(np.arange(len(most)), most)
    place = np.arange(len(pair)) - (np.cumsum(most) - most)[pair]
    differ = np.flatnonzero(frames[offsets[:-2][pair] + place] != frames[offsets[1:-1][pair] + place])
    found[1:] = most
    np.minimum.at(found, pair[differ] + 1, place[differ])
    return found


def _folded(shown: ShownStacks, stack: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every position in the stacks the number of the node it is in, by stack and innermost first; and of each node
    the position that it shows.

    Alone are the program's frames, and C++ frames further in than all of Python; between Python frames they are the
    interpreter's.
    """
    ids, offsets = shown.table.frame_ids, shown.table.offsets
    side = shown.side[ids]
    python = np.concatenate([np.zeros(1, np.int64), np.cumsum(side != Side.CPP)])
    is_alone = (side == Side.OWN) | ((side == Side.CPP) & (python[:-1] == python[offsets[:-1]][stack]))
    is_first = np.zeros(len(ids), np.bool_)
    is_first[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = is_first | is_alone
    starts[1:] |= is_alone[:-1]
    begin = np.flatnonzero(starts)
    telling = np.where((side == Side.LIBRARY) & ~_plumbing(shown)[ids], np.arange(len(ids)), _NEVER)
    shows = np.minimum.reduceat(telling, begin) if len(begin) else begin
    # a run that tells nothing is hidden in the frame inside it; where there is none it shows its innermost
    shows = np.where((shows == _NEVER) & (is_alone | is_first)[begin], begin, shows)
    has_node = shows != _NEVER
    run = np.cumsum(starts) - 1
    return np.asarray(np.cumsum(has_node)[run] - 1, np.int64), np.asarray(shows[has_node], np.int64)


def _plumbing(shown: ShownStacks) -> NDArray[np.bool_]:
    """Which frames of the table only pass a call on."""
    table = shown.table
    named = {index for index, name in enumerate(table.strings.values) if name in _PLUMBING_NAMES}
    found = np.zeros(table.frame_count, np.bool_)
    for frame in np.flatnonzero(np.isin(table.name, list(named))).tolist():
        filename, _, name = table.frame(frame)
        found[frame] = is_plumbing(filename, name)
    return found
