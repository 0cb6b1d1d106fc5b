"""Why a request for memory failed, or whether one would: the fields and the verdicts of contract.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memtrace.allocator import Replay, series
from memtrace.allocator.releases import Total, releases_of
from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.allocator.sizes import SMALL_REQUEST
from memtrace.analysis.capacity import Capacity
from memtrace.analysis.holes import Holes, holes_at
from memtrace.attribution.asked import Purpose
from memtrace.errors import QuestionError
from memtrace.model import Action, Frame, SnapshotData, Trace
from memtrace.timeline import Timeline

Verdict = Literal["fragmentation", "other-streams", "limit", "outside-torch", "lack"]

_DEFAULT_STREAM = 0
_DEFAULT_POOL = (0, 0)
_LARGEST = 1 << 50


@dataclass(frozen=True, slots=True)
class AskedBy:
    """Who asked: the stack, innermost frame first (empty where the event has none), and what it was for."""

    stack: tuple[Frame, ...]
    category: str
    label: str
    confidence: str


@dataclass(frozen=True, slots=True)
class Place:
    """When: the event and what the trace says of that moment. Times in microseconds since 1970 (None: torch < 2.2)."""

    device: int
    event: int
    events: int
    time_us: int | None
    first_us: int | None
    phase: str | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Cache:
    """Free bytes in torch's segments that a request could look at: of its own pool and stream, and of that pool in all
    other streams. Private pools never count. `releasable`: what torch can give back to the driver, of any pool."""

    free: int
    largest: int
    other_free: int
    other_largest: int
    releasable: int


@dataclass(frozen=True, slots=True)
class Oom:
    """A request that failed at an event, or (`is_hypothetical`) one that is supposed to come right after it. All sizes
    in bytes, None where neither the file nor anybody else says.

    `asked_bytes` is the rounded request, `segment_bytes` what the driver is asked for. `allocated_bytes`,
    `reserved_bytes` and `pending_bytes` are the whole device's after the event, before anything was unwound.
    `outside_torch_bytes`: what of the device is neither free nor torch's. `is_private`: a private pool asked.

    `hole_bytes`: the hole of its own pool and stream that holds it (None: there is none); `is_kept_whole`:
    `max_split_size` keeps that hole from it. `cap_at_least_bytes` and `cap_below_bytes` are what the events prove of
    the cap that refused, where the verdict is `limit` and nobody noted the cap. `fits`: None where that is not known.
    `verdict` is None where it fits or is not known to fail. `retries` and `flushes`: memory given back before it, for
    allocations that had failed and by `empty_cache()`; at least so often. `rules`: the allocator's settings.
    """

    place: Place
    stream: int
    is_hypothetical: bool
    is_private: bool
    asked_bytes: int
    segment_bytes: int
    asked_by: AskedBy
    allocated_bytes: int
    reserved_bytes: int
    pending_bytes: int
    cache: Cache
    hole_bytes: int | None
    is_kept_whole: bool
    device_free_bytes: int | None
    capacity: Capacity
    cap_at_least_bytes: int | None
    cap_below_bytes: int | None
    outside_torch_bytes: int | None
    joined_fits: bool
    other_streams_fit: bool
    device_had_room: bool | None
    fits: bool | None
    verdict: Verdict | None
    retries: Total
    flushes: Total
    rules: Rules

    @property
    def pool(self) -> str:
        """The request's pool, by its size."""
        return "large" if self.asked_bytes > SMALL_REQUEST else "small"


@dataclass(frozen=True, slots=True)
class _Room:
    """Who has room for a new segment; None: not known. `releasable` is what torch could still give back first;
    `device_free` is below 0 where torch held more than the device is supposed to have."""

    segment: int
    reserved: int
    releasable: int
    device_free: int | None
    capacity: Capacity
    outside: int | None

    @property
    def in_device(self) -> bool | None:
        """Whether the driver has room for the segment."""
        return None if self.device_free is None else self.device_free + self.releasable >= self.segment

    @property
    def under_cap(self) -> bool | None:
        """Whether torch's own cap allows the segment; None: no cap is known."""
        cap = self.capacity.limit_bytes
        return None if cap is None else self._held + self.segment <= cap

    @property
    def without_others(self) -> bool:
        """Whether it is others that take the room: with the device to itself torch could have the segment."""
        caps = [size for size in (self.capacity.capacity_bytes, self.capacity.limit_bytes) if size is not None]
        return bool(self.outside) and self._held + self.segment <= min(caps)

    @property
    def _held(self) -> int:
        return self.reserved - self.releasable


def oom_events(replay: Replay, trace: Trace) -> tuple[int, ...]:
    """The events at which a request failed for good, in order."""
    return tuple(np.flatnonzero(trace.action[: replay.events] == Action.OOM).tolist())


class Desk:
    """Answers questions about the requests of one device."""

    def __init__(self, data: SnapshotData, replay: Replay, timeline: Timeline, capacity: Capacity) -> None:
        self.data, self.replay, self.timeline, self.capacity = data, replay, timeline, capacity
        self.trace = data.trace(replay.device)
        self.rules = Rules.of(replay.settings, data.settings, Tie.ADDRESS)
        self.allocated = series(replay, "allocated_bytes")
        self.active = series(replay, "active_bytes")
        self.reserved = series(replay, "reserved_bytes")
        self.releases = releases_of(self.trace, data.stacks)

    def failed(self, events: Sequence[int], purposes: Sequence[Purpose]) -> tuple[Oom, ...]:
        """The requests that failed at these events; `purposes`: what each was for."""
        return tuple(self._failed(event, purpose) for event, purpose in zip(events, purposes, strict=True))

    def supposed(self, size: int, event: int) -> Oom:
        """Whether a request of `size` bytes on the default stream would fit after `event`.

        The driver is taken to have what torch and the others do not hold, as far as both are known.
        """
        if not 0 < size <= _LARGEST:
            raise QuestionError(f"a request of {size:,} bytes says nothing", hint="Name a size, as in --if 2GiB.")
        asked = int(self.rules.rounded(np.array([size], np.int64))[0])
        holes = holes_at(self.replay, event, self.data.pools)
        outside, capacity = self._outside(), self.capacity.capacity_bytes
        reserved = int(self.reserved[event + 1])
        left = None if capacity is None else capacity - reserved - (outside or 0)
        releasable = int(holes.releasable.sum())
        room = _Room(self.rules.segment_size(asked), reserved, releasable, left, self.capacity, outside)
        hole, is_kept = self._hole(holes, _DEFAULT_STREAM, asked)
        known = [one for one in (room.in_device, room.under_cap) if one is not None]
        fits = True if hole is not None and not is_kept else all(known) if known else None
        return self._answer(
            event,
            asked,
            _DEFAULT_STREAM,
            holes,
            room,
            purpose=None,
            fits=fits,
            refused_by_cap=room.under_cap is False and room.in_device is not False,
        )

    def _failed(self, event: int, purpose: Purpose) -> Oom:
        asked = int(self.trace.size[event])
        reserved, left = int(self.reserved[event + 1]), self.trace.device_free.get(event)
        outside = self._outside_at(event)
        room = _Room(self.rules.segment_size(asked), reserved, 0, left, self.capacity, outside)
        return self._answer(
            event,
            asked,
            int(self.trace.stream[event]),
            holes_at(self.replay, event, self.data.pools),
            room,
            purpose=purpose,
            fits=False,
            refused_by_cap=room.in_device is True,
        )

    def _answer(
        self,
        event: int,
        asked: int,
        stream: int,
        holes: Holes,
        room: _Room,
        *,
        purpose: Purpose | None,
        fits: bool | None,
        refused_by_cap: bool,
    ) -> Oom:
        """`purpose` None: nobody asked, the request is supposed."""
        is_real = purpose is not None
        cache = cache_of(holes, large=asked > SMALL_REQUEST, stream=stream)
        joined, others = cache.largest < asked <= cache.free, cache.other_largest >= asked
        hole, is_kept = self._hole(holes, stream, asked)
        verdict = None if fits is not False else _verdict(joined, others, refused_by_cap, room)
        bounds = self._cap_bounds(event, room) if is_real and verdict == "limit" else (None, None)
        return Oom(
            place=self._place(event),
            stream=stream,
            is_hypothetical=not is_real,
            is_private=is_real and self._is_private(event),
            asked_bytes=asked,
            segment_bytes=room.segment,
            asked_by=self._asked_by(event, purpose),
            allocated_bytes=int(self.allocated[event + 1]),
            reserved_bytes=room.reserved,
            pending_bytes=int(self.active[event + 1] - self.allocated[event + 1]),
            cache=cache,
            hole_bytes=hole,
            is_kept_whole=is_kept,
            device_free_bytes=None if room.device_free is None else max(0, room.device_free),
            capacity=self.capacity,
            cap_at_least_bytes=bounds[0],
            cap_below_bytes=bounds[1],
            outside_torch_bytes=room.outside,
            joined_fits=joined,
            other_streams_fit=others,
            device_had_room=room.in_device,
            fits=fits,
            verdict=verdict,
            retries=self.releases.before(event, forced=True),
            flushes=self.releases.before(event, forced=False),
            rules=self.rules,
        )

    def _hole(self, holes: Holes, stream: int, asked: int) -> tuple[int | None, bool]:
        """The hole of its own pool and stream that torch would find for a request: the smallest that holds it. And
        whether `max_split_size` forbids it: torch looks no further then."""
        sizes = holes.of_pool(large=asked > SMALL_REQUEST).of_stream(stream).size
        found = int(sizes[sizes >= asked].min(initial=np.iinfo(np.int64).max))
        if not (sizes >= asked).any():
            return None, False
        most = self.rules.max_split_size
        if asked < most:
            return found, found >= most
        return found, found >= asked + self.rules.non_split_rounding

    def _outside_at(self, event: int) -> int | None:
        capacity, left = self.capacity.capacity_bytes, self.trace.device_free.get(event)
        return None if capacity is None or left is None else max(0, capacity - left - int(self.reserved[event + 1]))

    def _outside(self) -> int | None:
        """What others held when that was last known: when a request failed, else when the snapshot was taken."""
        known = [size for event in oom_events(self.replay, self.trace) if (size := self._outside_at(event)) is not None]
        return known[-1] if known else self.capacity.outside_bytes

    def _cap_bounds(self, event: int, room: _Room) -> tuple[int | None, int | None]:
        """What torch held at most before, which the cap allowed, and what it would have held, which the cap did not.

        Of expandable memory torch maps whole pages, more than it holds against the cap: what it held proves nothing.
        """
        if room.capacity.limit_bytes is not None:
            return None, None
        allowed, refused = int(self.reserved[: event + 2].max()), room.reserved + room.segment
        if self.replay.spans.expandable.any():
            return None, refused
        return (allowed, refused) if allowed < refused else (None, None)

    def _asked_by(self, event: int, purpose: Purpose | None) -> AskedBy:
        if purpose is None:
            return AskedBy((), "unknown", "", "unknown")
        frames = self.data.stacks.frames(int(self.trace.stack[event]))
        return AskedBy(frames, purpose.category, purpose.label, purpose.confidence)

    def _is_private(self, event: int) -> bool:
        pool = -1 if self.trace.pool is None else int(self.trace.pool[event])
        return pool >= 0 and self.data.pools[pool] != _DEFAULT_POOL

    def _place(self, event: int) -> Place:
        times = self.trace.time_us
        timed = times is not None and 0 <= event < len(times)
        return Place(
            device=self.replay.device,
            event=event,
            events=self.replay.events,
            time_us=int(times[event]) if times is not None and timed else None,
            first_us=int(times[0]) if times is not None and timed else None,
            phase=self.timeline.at(event)[0],
            step=self.timeline.at(event)[1],
        )


def cache_of(holes: Holes, *, large: bool, stream: int) -> Cache:
    """What a request of that pool and stream could look at."""
    pool = holes.of_pool(large=large)
    own, others = pool.of_stream(stream), pool.of_others(stream)
    return Cache(own.total, own.largest, others.total, others.largest, int(holes.releasable.sum()))


def _verdict(joined: bool, others: bool, refused_by_cap: bool, room: _Room) -> Verdict:
    if joined:
        return "fragmentation"
    if others:
        return "other-streams"
    if refused_by_cap:
        return "limit"
    return "outside-torch" if room.in_device is False and room.without_others else "lack"
