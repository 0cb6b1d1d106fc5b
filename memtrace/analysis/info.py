"""One page about a snapshot: what is in it, and what its counters say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator import Replay, series
from memtrace.analysis.moment import COUNTER
from memtrace.io.sidecar import Device
from memtrace.model import SnapshotData, Trace
from memtrace.places import Side
from memtrace.timeline.callsites import frame_sides


@dataclass(frozen=True, slots=True)
class StackCounts:
    """How many allocation events have a stack with a Python frame, with C++ frames, and with none at all."""

    python: int
    cpp: int
    none: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: events by action, times in microseconds since 1970 (None: torch before 2.2), counters in bytes.
    Its name and capacity, where the recorder noted them."""

    device: int
    name: str | None
    capacity_bytes: int | None
    events: int
    first_us: int | None
    last_us: int | None
    complete: bool
    lost_events_at_least: int
    actions: dict[str, int]
    stacks: StackCounts
    current: dict[str, int]
    peak: dict[str, int]
    peak_event: dict[str, int]
    segments: int
    streams: int


def device_info(data: SnapshotData, replay: Replay, noted: Device | None = None) -> DeviceInfo:
    """The page of one device; `noted` is what the recorder says of the device that it saw."""
    known = noted if noted is not None and noted.ordinal in (None, replay.device) else Device(None, None, None)
    trace = data.trace(replay.device)
    values = {of: series(replay, counter) for of, counter in COUNTER.items()}
    counts = np.bincount(trace.action, minlength=len(data.actions))
    timed = trace.time_us is not None and len(trace) > 0
    return DeviceInfo(
        device=replay.device,
        name=known.name,
        capacity_bytes=known.capacity_bytes,
        events=len(trace),
        first_us=int(trace.time_us[0]) if trace.time_us is not None and timed else None,
        last_us=int(trace.time_us[-1]) if trace.time_us is not None and timed else None,
        complete=replay.complete,
        lost_events_at_least=replay.lost_events_at_least,
        actions={name: int(count) for name, count in zip(data.actions, counts, strict=True) if count},
        stacks=_stack_counts(data, trace),
        current={of: int(value[-1]) for of, value in values.items()},
        peak={of: int(value.max()) for of, value in values.items()},
        peak_event={of: int(value.argmax()) - 1 for of, value in values.items()},
        segments=int((data.segments.device == replay.device).sum()),
        streams=len(
            set(trace.stream.tolist()) | set(data.segments.stream[data.segments.device == replay.device].tolist())
        ),
    )


def annotation_counts(data: SnapshotData) -> dict[str, int]:
    """Name -> number of ranges begun, in the order of first appearance."""
    counts: dict[str, int] = {}
    for name, start in zip(data.annotations.name.tolist(), data.annotations.start.tolist(), strict=True):
        if start:
            counts[data.strings[name]] = counts.get(data.strings[name], 0) + 1
    return counts


def _stack_counts(data: SnapshotData, trace: Trace) -> StackCounts:
    """Over allocation events; over the blocks in use where there is no trace."""
    if len(trace) > 1:
        stack = trace.stack[trace.action == 0]
    else:
        owner = np.repeat(data.segments.device, np.diff(data.segments.first_block))
        stack = data.blocks.stack[(data.blocks.state != 0) & (owner == trace.device)]
    table = data.stacks
    is_cpp = frame_sides(table)[table.frame_ids] == Side.CPP
    cpp_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_cpp)])
    cpp = np.diff(cpp_before[table.offsets])
    python = np.diff(table.offsets) - cpp
    known = stack[stack >= 0]
    has_python, has_cpp = python[known] > 0, cpp[known] > 0
    return StackCounts(
        python=int(has_python.sum()),
        cpp=int(has_cpp.sum()),
        none=len(stack) - int((has_python | has_cpp).sum()),
    )
