"""What reserved memory is made of at one moment: the ledger whole and in parts, who waits, who pins, and what else the
device holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.analysis.frames import ShownStacks
from memtrace.analysis.ledger import Ledger, Part, ledger_of, parts_of
from memtrace.analysis.pins import Pin, pins_by_stack
from memtrace.analysis.residents import Residents, residents_at, units_of
from memtrace.attribution import Attribution
from memtrace.io.sidecar import Sidecar
from memtrace.model import Frame, SnapshotData, StackTable, Trace
from memtrace.timeline import Timeline
from memtrace.units import format_bytes, plural

_RESERVED = "reserved_bytes.all.current"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Blocks of one stream that the program has freed and that still wait, in blocks and bytes.

    `waited_events` and `waited_us`: the longest that one has waited so far. `still_events` and `still_us`: the longest
    that one waits from then on, of those whose wait ends in the trace; None where none does, and `unfinished_blocks` is
    how many do not. Times are microseconds, None where the trace has none. A wait that began before the recording
    counts from the first event on.
    """

    stream: int
    bytes: int
    blocks: int
    waited_events: int
    waited_us: int | None
    still_events: int | None
    still_us: int | None
    unfinished_blocks: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The device's memory in bytes, None where nobody noted it for that moment: `capacity_bytes` = reserved +
    `outside_bytes` + `free_bytes`."""

    capacity_bytes: int | None
    free_bytes: int | None
    outside_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """Reserved memory after `event`. The `parts` sum to `ledger`, `waiting` to its pending bytes, and the hostage bytes
    of `pins` to its stranded ones. Stacks of pins are ids of `stacks`."""

    device: int
    event: int
    ledger: Ledger
    parts: tuple[Part, ...]
    waiting: tuple[Waiting, ...]
    pins: tuple[Pin, ...]
    memory: DeviceMemory
    stacks: StackTable

    def frames(self, pin: Pin) -> tuple[Frame, ...]:
        """The stack of a pin, innermost frame first; empty when it has none."""
        return self.stacks.frames(pin.stack)

    def __repr__(self) -> str:
        ledger = self.ledger
        return (
            f"Reserved({format_bytes(ledger.reserved)} after event {self.event}: {format_bytes(ledger.requested)} "
            f"requested, {format_bytes(ledger.stranded)} stranded by {plural(len(self.pins), 'stack')}, "
            f"{format_bytes(ledger.releasable)} releasable, {plural(len(self.parts), 'part')})"
        )


def reserved_at(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    attribution: Attribution,
    shown: ShownStacks,
    *,
    event: int,
    sidecar: Sidecar | None = None,
) -> Reserved:
    """What reserved memory is made of after `event` (-1: before the first)."""
    residents = residents_at(replay, event)
    units = units_of(replay, residents)
    ledger, trace = ledger_of(replay, residents, units), data.trace(replay.device)
    return Reserved(
        device=replay.device,
        event=event,
        ledger=ledger,
        parts=parts_of(replay, residents, units, data.pools),
        waiting=_waiting(replay, residents, trace, event),
        pins=pins_by_stack(replay, attribution, timeline, shown, residents, units),
        memory=device_memory(replay, trace, event, ledger.reserved, sidecar),
        stacks=shown.table,
    )


def _waiting(replay: Replay, residents: Residents, trace: Trace, event: int) -> tuple[Waiting, ...]:
    """Pending blocks by stream, most bytes first."""
    rows = residents.block[~residents.live]
    stream = replay.lifetimes.stream[rows]
    groups = [(one, rows[stream == one]) for one in np.unique(stream).tolist()]
    found = [_waiting_on(one, members, replay, trace.time_us, event) for one, members in groups]
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.stream)))


def _waiting_on(
    stream: int, rows: NDArray[np.int64], replay: Replay, time_us: NDArray[np.int64] | None, event: int
) -> Waiting:
    blocks = replay.lifetimes
    freed, died = blocks.freed[rows], blocks.died[rows]
    done = died[died < replay.events]
    first, last = int(freed.min()), int(done.max(initial=-1))
    has_times = time_us is not None and event >= 0
    return Waiting(
        stream=stream,
        bytes=int(blocks.size[rows].sum()),
        blocks=len(rows),
        waited_events=event - first,
        waited_us=int(time_us[event] - time_us[max(first, 0)]) if time_us is not None and has_times else None,
        still_events=last - event if len(done) else None,
        still_us=int(time_us[last] - time_us[event]) if time_us is not None and has_times and len(done) else None,
        unfinished_blocks=len(rows) - len(done),
    )


def device_memory(replay: Replay, trace: Trace, event: int, reserved: int, sidecar: Sidecar | None) -> DeviceMemory:
    """What is known of the whole device after `event`. What the driver had left is known at an out-of-memory event,
    where torch writes it into the trace, and at the end, where the recorder notes it beside the snapshot."""
    capacity = None if sidecar is None else sidecar.capacity_of(replay.device)
    free = trace.device_free.get(event)
    if free is None and event == replay.events - 1:
        free = _free_at_end(sidecar, replay.device, reserved)
    if capacity is None or free is None or free + reserved > capacity:
        return DeviceMemory(capacity, free, None)
    return DeviceMemory(capacity, free, capacity - free - reserved)


def _free_at_end(sidecar: Sidecar | None, device: int, reserved: int) -> int | None:
    """What the driver had left when the snapshot was taken; None also where torch's own counter then is another than
    the trace's: the two are not of one moment."""
    if sidecar is None or not sidecar.is_about(device):
        return None
    counted = (sidecar.stats_of(device) or {}).get(_RESERVED, reserved)
    return sidecar.free_bytes if counted == reserved else None
