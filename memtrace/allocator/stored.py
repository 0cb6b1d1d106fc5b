"""What is kept of a snapshot from one run to the next: its columns, the replays of its devices, their peaks.

`io.cache` says where and for how long, `io.bundle` how. What is read back is held against what indexing relies on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from typing_extensions import Self

from memtrace.allocator.result import Replay
from memtrace.io import cache
from memtrace.io.bundle import DamagedError
from memtrace.io.cache import Limit, Origin
from memtrace.model import SnapshotData

LEAST_ROWS = 30_000
"""Events and blocks of a file below which reading it again is as fast as reading what was kept."""

Kind = TypeVar("Kind")
Entry = TypeVar("Entry", bound="StoredReplays")


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest value of a counter in bytes, and the first event after which it had it (-1: before the first)."""

    bytes: int
    event: int


Peaks: TypeAlias = dict[str, Highest]
"""By what they are of: allocated, reserved, requested, active."""


class StoredReplays:
    """The entry of one file, whether there is one already or not. A damaged one is removed, and as if it were not."""

    def __init__(self, origin: Origin, max_bytes: int | None) -> None:
        self._origin = origin
        self._max_bytes = max_bytes
        self._bundle = cache.find(origin, max_bytes)

    @classmethod
    def of(cls, path: str, max_bytes: int | None) -> Self | None:
        """The entry of the file at a path, read with this limit (None: the default); None if it cannot have one."""
        origin = cache.origin_of(path)
        return None if origin is None else cls(origin, max_bytes)

    @property
    def file_unchanged(self) -> bool:
        """Whether the file is the one that was there before it was read: else what was read must not be kept."""
        return self._origin.unchanged

    def data(self) -> SnapshotData | None:
        """The columns, if they were kept; their path is the one by which the file was opened this time."""
        try:
            data = self._get("data", SnapshotData)
            _check(data is None or _data_is_sound(data))
        except DamagedError:
            self._forget()
            return None
        return None if data is None else dataclasses.replace(data, path=self._origin.path)

    def replay(self, device: int, data: SnapshotData) -> tuple[Replay, Peaks] | None:
        """The replay of a device and the peaks that are known, if they were kept."""
        try:
            replay, peaks = self._get(_replay_of(device), Replay), self._get(_peaks_of(device), Peaks)
            if replay is None or peaks is None:
                return None
            _check(_replay_is_sound(replay, device, data))
            _check(all(-1 <= peak.event < replay.events for peak in peaks.values()))
        except DamagedError:
            self._forget()
            return None
        return replay, peaks

    def keep_all(
        self,
        data: SnapshotData,
        replays: Mapping[int, Replay],
        peaks: Mapping[int, Peaks],
        more: Mapping[str, tuple[object, type]],
    ) -> bool:
        """Keeps a snapshot, its replays and `more`, if it is large enough for that to pay. Whether it is kept now."""
        if sum(map(len, data.traces)) + len(data.blocks) < LEAST_ROWS:
            return False
        values: dict[str, tuple[object, Any]] = {"data": (data, SnapshotData)}
        for device, replay in replays.items():
            values[_replay_of(device)] = (replay, Replay)
            values[_peaks_of(device)] = (peaks[device], Peaks)
        values.update(more)
        return cache.keep(self._origin, self._limit(), values)

    def _limit(self) -> Limit:
        """Of what is in the entry already, or of the read that there was instead."""
        from memtrace.io.source import DEFAULT_MAX_BYTES

        if self._bundle is not None:
            return self._bundle.get("limit", Limit)
        return Limit(DEFAULT_MAX_BYTES if self._max_bytes is None else self._max_bytes, DEFAULT_MAX_BYTES)

    def _get(self, name: str, kind: type[Kind]) -> Kind | None:
        return None if self._bundle is None or name not in self._bundle else self._bundle.get(name, kind)

    def _forget(self) -> None:
        cache.discard(self._origin)
        self._bundle = None


def _replay_of(device: int) -> str:
    return f"replay {device}"


def _peaks_of(device: int) -> str:
    return f"peaks {device}"


def _check(sound: bool) -> None:
    if not sound:
        raise DamagedError("the columns do not fit each other")


def _data_is_sound(data: SnapshotData) -> bool:
    """Whether every id is in its table, every offset in its column, and columns of a table are of equal length."""
    stacks, segments, blocks = data.stacks, data.segments, data.blocks
    strings = len(data.strings)
    return (
        all(map(_equally_long, (*data.traces, segments, blocks, data.annotations)))
        and len(stacks.filename) == len(stacks.name) == len(stacks.line)
        and _are_ids(stacks.filename, strings)
        and _are_ids(stacks.name, strings)
        and _are_ids(data.annotations.name, strings)
        and _are_ids(stacks.frame_ids, stacks.frame_count)
        and _are_bounds(stacks.offsets, len(stacks.frame_ids))
        and _are_bounds(segments.first_block, len(blocks), len(segments) + 1)
        and _are_ids(segments.pool, len(data.pools))
        and _are_ids(segments.stack, len(stacks), least=-1)
        and _are_ids(blocks.stack, len(stacks), least=-1)
        and all(len(set(data.devices)) == len(data.traces) and _trace_is_sound(trace, data) for trace in data.traces)
    )


def _trace_is_sound(trace: Any, data: SnapshotData) -> bool:
    names = (trace.compile_context, trace.user_metadata)
    return (
        _are_ids(trace.stack, len(data.stacks), least=-1)
        and _are_ids(trace.action, len(data.actions))
        and (trace.pool is None or _are_ids(trace.pool, len(data.pools), least=-1))
        and all(column is None or _are_ids(column, len(data.strings), least=-1) for column in names)
        and all(0 <= event < len(trace) for event in trace.device_free)
    )


def _replay_is_sound(replay: Replay, device: int, data: SnapshotData) -> bool:
    """The same of a replay; its events are those of its trace, or none."""
    blocks, spans, stacks, still = replay.lifetimes, replay.spans, len(data.stacks), replay.events + 1
    return (
        replay.device == device
        and replay.events in (0, len(data.trace(device)))
        and all(map(_equally_long, (blocks, spans, replay.splits, replay.segments)))
        and _are_ids(blocks.stack, stacks, least=-1)
        and _are_ids(blocks.span, len(spans), least=-1)
        and _are_ids(spans.stack, stacks, least=-1)
        and all(_are_ids(column, still, least=-1) for column in (blocks.born, blocks.freed, blocks.died))
        and all(_are_ids(column, still, least=-1) for column in (spans.born, spans.died))
        and all(_are_ids(column, replay.events, least=-1) for column in (replay.splits.event, replay.segments.event))
    )


def _equally_long(table: Any) -> bool:
    """Whether the columns of a table have one length; `first_block` of segments has one entry more."""
    columns = (getattr(table, field.name) for field in dataclasses.fields(table) if field.name != "first_block")
    return len({len(column) for column in columns if isinstance(column, np.ndarray)}) <= 1


def _are_ids(column: Any, count: int, least: int = 0) -> bool:
    """Whether all values are from `least` to below `count`."""
    return not len(column) or (int(column.min()) >= least and int(column.max()) < count)


def _are_bounds(column: Any, end: int, length: int | None = None) -> bool:
    """Whether a column climbs from 0 to `end`; of this length, if given."""
    if not len(column) or (length is not None and len(column) != length):
        return False
    return int(column[0]) == 0 and int(column[-1]) == end and bool((np.diff(column) >= 0).all())
