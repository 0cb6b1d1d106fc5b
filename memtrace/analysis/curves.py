"""A counter over the whole recording, stacked by what it is made of, and its columns at any zoom.

A column of a plot stands for many events; it is shown as it was after the event at which the counter was highest.
Stacking the highest value of each group instead would show a moment that never was, higher than the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes, Replay
from memtrace.analysis.frames import ShownStacks
from memtrace.attribution import Attribution
from memtrace.model import SnapshotData
from memtrace.model.frozen import FrozenColumns
from memtrace.model.stacks import NOT_RECORDED
from memtrace.places import short_path
from memtrace.timeline import PHASES, Timeline

Axis = Literal["event", "time"]
BANDS = ("category", "phase", "module", "file", "stream")
"""What a counter can be stacked by."""
MOST_BANDS = 12
"""Groups that are told apart; the others are one band."""
REST = "others"


@dataclass(frozen=True, slots=True, eq=False)
class Bands(FrozenColumns):
    """Allocated bytes by group, after any event. `names` are the groups, those that are largest at the peak first; the
    last one is `REST`, all others together, where there are more than `MOST_BANDS`.

    One row a birth and one a death, by group and then by event; `grown` and `shrunk` are running sums of their bytes.
    Rows `first[g]` up to `first[g + 1]` are those of group g.
    """

    by: str
    names: tuple[str, ...]
    born: NDArray[np.int32]
    grown: NDArray[np.int64]
    freed: NDArray[np.int32]
    shrunk: NDArray[np.int64]
    first: NDArray[np.int64]

    def at(self, events: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of every group (rows) after each of these events (columns; -1: before the first). A column sums to the
        counter."""
        found = np.zeros((len(self.names), len(events)), np.int64)
        wanted = events.astype(np.int32)
        for group in range(len(self.names)):
            begin, end = int(self.first[group]), int(self.first[group + 1])
            found[group] = _sum_until(self.born, self.grown, begin, end, wanted)
            found[group] -= _sum_until(self.freed, self.shrunk, begin, end, wanted)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Columns(FrozenColumns):
    """A stretch of the recording as columns: column i is of the events `edge[i]` up to `edge[i + 1]` (that one is not
    in it). `event` is the one of them after which allocated memory was highest, `allocated` those bytes; `reserved` the
    highest reserved bytes in the column. A column without an event shows the state that lasted through it."""

    axis: Axis
    edge: NDArray[np.int64]
    event: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.event)

    def column_of(self, event: int) -> int | None:
        """The column that an event is in; None outside of all."""
        if not len(self) or not self.edge[0] <= event < self.edge[-1]:
            return None
        return int(np.searchsorted(self.edge, event, side="right")) - 1


def bands_of(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    attribution: Attribution,
    shown: ShownStacks,
    *,
    by: str,
    peak: int,
) -> Bands:
    """Allocated memory of a device, grouped `by` one of `BANDS`. `peak`: the event at which the largest are told."""
    blocks = replay.lifetimes
    code, names = _largest(*_groups(data, blocks, timeline, attribution, shown, replay.device, by), blocks, peak)
    kept = np.flatnonzero(blocks.freed > blocks.born)  # one that was pending at the start is allocated nowhere
    code = code[kept]
    born, freed, size = blocks.born[kept], blocks.freed[kept], blocks.size[kept]
    by_birth = np.lexsort((born, code))
    by_death = np.lexsort((freed, code))
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(code, minlength=len(names)))])
    return Bands(
        by=by,
        names=names,
        born=born[by_birth].astype(np.int32),
        grown=np.cumsum(size[by_birth]),
        freed=freed[by_death].astype(np.int32),
        shrunk=np.cumsum(size[by_death]),
        first=first.astype(np.int64),
    )


def _sum_until(
    event: NDArray[np.int32], sums: NDArray[np.int64], begin: int, end: int, wanted: NDArray[np.int32]
) -> NDArray[np.int64]:
    """How much the running sums of one group, rows `begin` to `end`, grew up to each wanted event."""
    place = begin + np.searchsorted(event[begin:end], wanted, side="right")
    return _until(sums, place) - _until(sums, np.int64(begin))


def _until(sums: NDArray[np.int64], place: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
    """The sum of all rows before each place."""
    if not len(sums):
        return np.zeros_like(place)
    return np.where(place > 0, sums[np.maximum(place - 1, 0)], 0)


def _groups(
    data: SnapshotData,
    blocks: Lifetimes,
    timeline: Timeline,
    attribution: Attribution,
    shown: ShownStacks,
    device: int,
    by: str,
) -> tuple[NDArray[np.int64], list[str]]:
    """The group of every block, and their names."""
    if by == "category":
        return attribution.category.astype(np.int64), list(attribution.categories)
    if by == "phase":
        if not len(timeline):
            return np.zeros(len(blocks), np.int64), ["before the recording"]
        phase = timeline.phase[timeline.runs(blocks.born)].astype(np.int64)
        return np.where(blocks.born < 0, len(PHASES), phase), [*PHASES, "before the recording"]
    if by == "stream":
        streams, code = np.unique(blocks.stream, return_inverse=True)
        return code.ravel().astype(np.int64), [f"stream {stream}" for stream in streams.tolist()]
    if by == "module":
        from memtrace.analysis.blame import modules_of

        code, modules = modules_of(data, data.trace(device), blocks.born)
        return np.where(code < 0, len(modules), code), [*modules, "no module said"]
    row = shown.rows(blocks.stack).astype(np.int64)
    own = np.concatenate([shown.table.filename[shown.own], np.zeros(1, np.int32)]).astype(np.int64)
    strings, of_row = np.unique(own[:-1], return_inverse=True)
    code = np.where(row == NOT_RECORDED, len(strings), np.append(of_row.ravel(), 0)[row])
    return code, [*(short_path(data.strings[string]) for string in strings.tolist()), "no Python frame"]


def _largest(
    code: NDArray[np.int64], names: list[str], blocks: Lifetimes, peak: int
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Groups that have blocks, largest at the peak first, the small ones as one; and the group of every block."""
    alive = (blocks.born <= peak) & (blocks.freed > peak)
    there, ever = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    np.add.at(there, code[alive], blocks.size[alive])
    np.add.at(ever, code, blocks.size)
    order = np.lexsort((np.arange(len(names)), -ever, -there))
    order = order[ever[order] > 0]
    kept = order if len(order) <= MOST_BANDS else order[: MOST_BANDS - 1]
    renamed = np.full(len(names), len(kept), np.int64)
    renamed[kept] = np.arange(len(kept))
    rest = (REST,) if len(kept) < len(order) else ()
    return renamed[code], (*(names[group] for group in kept.tolist()), *rest)


def columns_of(
    allocated: NDArray[np.int64],
    reserved: NDArray[np.int64],
    time_us: NDArray[np.int64] | None,
    first: int,
    last: int,
    width: int,
    axis: Axis,
) -> Columns:
    """The events `first` to `last` (-1: the state before the first one) in `width` columns, of equal counts of events
    or of equal time. `allocated` and `reserved` as `series`: entry e + 1 is after event e."""
    edge = edges(time_us, first, last, width, axis)
    event = np.empty(width, np.int64)
    highest = np.empty(width, np.int64)
    for column, (begin, end) in enumerate(zip(edge[:-1].tolist(), edge[1:].tolist(), strict=True)):
        # an empty column shows what was there when it began
        start, stop = (begin + 1, end + 1) if end > begin else (max(begin, 0), max(begin, 0) + 1)
        event[column] = start - 1 + int(allocated[start:stop].argmax())
        highest[column] = reserved[start:stop].max()
    return Columns(axis=axis, edge=edge, event=event, allocated=allocated[event + 1], reserved=highest)


def edges(time_us: NDArray[np.int64] | None, first: int, last: int, width: int, axis: Axis) -> NDArray[np.int64]:
    """The first event of each column, and the one after the last column. The state before the first event is in the
    first column."""
    if axis == "event" or time_us is None or last <= max(first, 0):
        return first + (np.arange(width + 1, dtype=np.int64) * (last + 1 - first)) // width
    begin, end = int(time_us[max(first, 0)]), int(time_us[last])
    at = begin + (np.arange(1, width, dtype=np.int64) * (end - begin)) // width
    inner = np.searchsorted(time_us[max(first, 0) : last + 1], at, side="left") + max(first, 0)
    return np.concatenate([[first], inner, [last + 1]]).astype(np.int64)
