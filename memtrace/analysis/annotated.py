"""The `record_function` ranges of a device, placed between its events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.model import SnapshotData
from memtrace.model.frozen import FrozenColumns

NO_ONE = -1


@dataclass(frozen=True, slots=True)
class AnnotationRow:
    """The begin or the end of a range. It happened right before event `event` (the number of events: after the last).
    `since_us` counts from the first event and may be negative; `duration_us` is that of the whole range, None where the
    file has only one of its ends. `depth`: how many ranges were open around it."""

    annotation: int
    event: int
    time_us: int
    since_us: int
    name: str
    is_start: bool
    depth: int
    duration_us: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Annotated(FrozenColumns):
    """Begins and ends in order of time, a row each. `event` is the one that it lies before, `name` a string id,
    `partner` the row of the other end (`NO_ONE`: not in the file), `depth` how many ranges were open around it.
    `first_us` is the time of the first event."""

    event: NDArray[np.int64]
    time_us: NDArray[np.int64]
    name: NDArray[np.int32]
    start: NDArray[np.bool_]
    partner: NDArray[np.int64]
    depth: NDArray[np.int64]
    first_us: int

    def __len__(self) -> int:
        return len(self.event)

    def open_at(self, event: int) -> NDArray[np.int64]:
        """The begins of the ranges that an event is in, the outermost first."""
        begun = np.flatnonzero(self.start[: int(np.searchsorted(self.event, event, side="right"))])
        is_open: NDArray[np.bool_] = (self.partner[begun] == NO_ONE) | (self.event[self.partner[begun]] > event)
        found: NDArray[np.int64] = begun[is_open]
        return found

    def within(self, chosen: NDArray[np.bool_], events: int) -> NDArray[np.bool_]:
        """Of each of so many events whether it is in a range whose begin is chosen."""
        change = np.zeros(events + 1, np.int64)
        begins = np.flatnonzero(chosen & self.start)
        np.add.at(change, self.event[begins], 1)
        ended = self.partner[begins]
        np.subtract.at(change, self.event[ended[ended != NO_ONE]], 1)
        found: NDArray[np.bool_] = np.cumsum(change)[:events] > 0
        return found


def annotated(data: SnapshotData, device: int, time_us: NDArray[np.int64] | None) -> Annotated:
    """The annotations of a device. `time_us`: of its events; without, nothing can be placed and there are none."""
    notes = data.annotations
    rows = np.flatnonzero(notes.device == device)
    if time_us is None or not len(time_us):
        rows, time_us = rows[:0], np.zeros(1, np.int64)
    rows = rows[np.argsort(notes.time_us[rows], kind="stable")]
    partner, depth = _paired(notes.name[rows].tolist(), notes.start[rows].tolist())
    event = np.searchsorted(time_us, notes.time_us[rows], side="left")
    return Annotated(
        event=np.maximum.accumulate(event, dtype=np.int64),  # a clock that was set back disorders nothing
        time_us=notes.time_us[rows],
        name=notes.name[rows],
        start=notes.start[rows],
        partner=partner,
        depth=depth,
        first_us=int(time_us[0]),
    )


def _paired(names: list[int], starts: list[bool]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row the other end, ranges of one name being nested; and how many ranges were open."""
    partner = np.full(len(names), NO_ONE, np.int64)
    depth = np.zeros(len(names), np.int64)
    begun: dict[int, list[int]] = {}
    now = 0
    for row, (name, is_start) in enumerate(zip(names, starts, strict=True)):
        if is_start:
            begun.setdefault(name, []).append(row)
            depth[row] = now
            now += 1
            continue
        if begun.get(name):
            other = begun[name].pop()
            partner[row], partner[other] = other, row
            now -= 1
        depth[row] = now
    return partner, depth
