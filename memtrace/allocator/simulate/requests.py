"""What a program asked of the allocator, one row a call, and what the allocator then did with the driver.

The events of segments are the allocator's answers: they are kept apart, to be compared with. What is not an answer is
an explicit `empty_cache()`, a call of the program's own (snapshot-format 6.8).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.releases import told_apart, waited_for
from memtrace.allocator.result import Replay
from memtrace.allocator.simulate.rules import Rules
from memtrace.model import Action, SnapshotData, Trace
from memtrace.model.frozen import FrozenColumns

NO_BLOCK = -1
BEFORE = -1
_SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_NO_CALL = 255
_GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class Call(IntEnum):
    """What a row of `Requests` asks. Private pools are not simulated: their segments and blocks are as recorded."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    FREE = 3
    """Both at once: a recording that lacks one of the two kinds of events."""
    OOM = 4
    """A request that failed; `size` is rounded."""
    EMPTY_CACHE = 5
    PRIVATE_SEGMENT = 6
    PRIVATE_SEGMENT_FREE = 7
    PRIVATE_ALLOC = 8
    PRIVATE_FREE_REQUESTED = 9
    PRIVATE_FREE_COMPLETED = 10
    PRIVATE_FREE = 11
    PRIVATE_OOM = 12
    """A request of a private pool that failed; `size` is that of the segment it needed."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests(FrozenColumns):
    """One row a call, in order. `event` is that of the trace; `block` a row of the replay's lifetimes (`NO_BLOCK`: not
    of a block); `size` bytes as asked (of a private block: its block size); `stream` an index of `streams`."""

    call: NDArray[np.uint8]
    event: NDArray[np.int64]
    block: NDArray[np.int32]
    size: NDArray[np.int64]
    stream: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.call)


class SegmentKind(IntEnum):
    """What the allocator did with the driver."""

    ALLOC = 0
    FREE = 1
    MAP = 2
    UNMAP = 3


@dataclass(frozen=True, slots=True, eq=False)
class SegmentEvents(FrozenColumns):
    """Memory taken from the driver or given back, in order; `row` is the row of `Requests` during which it was."""

    row: NDArray[np.int64]
    kind: NDArray[np.uint8]
    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    stream: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class StartMap(FrozenColumns):
    """What was held before the first event: ranges and blocks of the default pool, both by address; bytes of segments
    and of blocks (live; pending) in private pools."""

    range_address: NDArray[np.uint64]
    range_size: NDArray[np.int64]
    range_large: NDArray[np.bool_]
    range_stream: NDArray[np.int32]
    range_expandable: NDArray[np.bool_]
    block: NDArray[np.int32]
    block_address: NDArray[np.uint64]
    block_size: NDArray[np.int64]
    block_pending: NDArray[np.bool_]
    private_reserved: int
    private_live: int
    private_pending: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What events leave open, and how it is read. `late`: allocations (their events) that waited for streams after they
    had looked for a free block, not before; `private`: requests that failed in a private pool."""

    late: frozenset[int] = frozenset()
    private: frozenset[int] = frozenset()


_AS_IT_STANDS = Reading()


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A recorded program, ready to be run against an allocator.

    `recorded` is what the allocator did with the driver for it, `address` and `block_size` where each block of the
    default pool was put; `is_simulated` tells which blocks those are. `emptied` counts explicit `empty_cache()` calls
    that gave something back (others leave no event); `guessed_calls` of them are told by their place only. `reading` is
    how open events were read, and `may_be_late` are the allocations that can be read in either way.
    """

    requests: Requests
    recorded: SegmentEvents
    start: StartMap
    streams: NDArray[np.uint64]
    address: NDArray[np.uint64]
    block_size: NDArray[np.int64]
    is_simulated: NDArray[np.bool_]
    events: int
    emptied: int
    guessed_calls: int
    has_private_pools: bool
    reading: Reading = _AS_IT_STANDS
    may_be_late: frozenset[int] = frozenset()

    @property
    def blocks(self) -> int:
        return len(self.address)


def workload(data: SnapshotData, replay: Replay, reading: Reading = _AS_IT_STANDS) -> Workload:
    """What the program of a replayed trace asked. The replay must be free of conflicts (`run.unfit` says so)."""
    trace, blocks = data.trace(replay.device), replay.lifetimes
    count = replay.events
    streams, stream_of = _streams(trace, replay)
    span_pool = _span_pools(trace, replay)
    pool = _pools(trace, replay, span_pool)
    is_private = pool > 0
    action = trace.action[:count]
    segment_events = np.flatnonzero(np.isin(action, _SEGMENT_ACTIONS))
    segment_pool = _segment_pools(replay, span_pool, segment_events, count)
    groups = _groups(data, trace, segment_events, segment_pool > 0)

    call = np.full(count, _NO_CALL, np.uint8)
    block = np.full(count, NO_BLOCK, np.int32)
    rows = np.arange(len(blocks), dtype=np.int32)
    shift = np.where(is_private, np.uint8(Call.PRIVATE_ALLOC), np.uint8(0))
    born = blocks.born >= 0
    call[blocks.born[born]], block[blocks.born[born]] = Call.ALLOC + shift[born], rows[born]
    freed = (blocks.freed >= 0) & (blocks.freed < count)
    call[blocks.freed[freed]], block[blocks.freed[freed]] = Call.FREE_REQUESTED + shift[freed], rows[freed]
    died = (blocks.died >= 0) & (blocks.died < count)
    at_once = died & (blocks.died == blocks.freed)
    kind = np.where(at_once, Call.FREE, Call.FREE_COMPLETED).astype(np.uint8) + shift
    call[blocks.died[died]], block[blocks.died[died]] = kind[died], rows[died]
    ooms = np.flatnonzero(action == Action.OOM)
    said_private = np.zeros(len(ooms), np.bool_) if trace.pool is None else trace.pool[ooms] > 0
    is_of_private = said_private | np.isin(ooms, list(reading.private))
    call[ooms] = np.where(is_of_private, Call.PRIVATE_OOM, Call.OOM)
    call[groups.explicit] = Call.EMPTY_CACHE
    private = segment_events[segment_pool > 0]
    call[private] = np.where(np.isin(action[private], _GIVEN_BACK), Call.PRIVATE_SEGMENT_FREE, Call.PRIVATE_SEGMENT)

    given = segment_events[np.isin(action[segment_events], _GIVEN_BACK)]
    before = _completed_before(trace, action)
    waited = waited_for(trace, given)
    waited[: len(before)] |= np.isin(before, list(reading.late))
    event, when = _in_order(action, np.flatnonzero(call != _NO_CALL), waited, groups)
    requests = Requests(
        call=call[event],
        event=when,
        block=block[event],
        size=_sizes(trace, replay, call, block, event),
        stream=stream_of(trace.stream[:count][event]),
    )
    recorded = _recorded(trace, when, segment_events[segment_pool <= 0], groups, stream_of)
    return Workload(
        requests=requests,
        recorded=recorded,
        start=_start(replay, span_pool, is_private, rows, stream_of),
        streams=streams,
        address=blocks.address,
        block_size=blocks.size,
        is_simulated=~is_private,
        events=count,
        emptied=len(groups.explicit),
        guessed_calls=groups.guessed,
        has_private_pools=bool(is_private.any() or (span_pool > 0).any()),
        reading=reading,
        may_be_late=frozenset(np.unique(before[before >= 0]).tolist()),
    )


def _in_order(
    action: NDArray[np.uint8], event: NDArray[np.int64], waited: NDArray[np.bool_], groups: _Groups
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The events that are calls, in the order in which they are answered, and the event that each counts as.

    A free that completed while an allocation released the cache comes after that allocation: before, it would be found.
    """
    late = event[waited[event]]
    asks = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
    following = np.append(asks, len(action))[np.searchsorted(asks, late)]
    explicit = np.append(groups.explicit, -1)[np.searchsorted(groups.explicit, late, side="right") - 1]
    moves = (following < len(action)) & ~(_own_before(groups, late) & (explicit >= 0))
    when = event.copy()
    when[np.searchsorted(event, late[moves])] = following[moves]
    order = np.lexsort((event != when, when))
    return event[order], when[order]


def _completed_before(trace: Trace, action: NDArray[np.uint8]) -> NDArray[np.int64]:
    """For each event: the allocation (or failure) that a free completed right before, polled by it; -1: none."""
    found = np.full(len(action), -1, np.int64)
    completed = np.flatnonzero(action == Action.FREE_COMPLETED)
    others = np.flatnonzero(~np.isin(action, (*_SEGMENT_ACTIONS, Action.FREE_COMPLETED)))
    if not len(others):
        return found
    following = np.append(others, -1)[np.searchsorted(others, completed)]
    asks = (following >= 0) & np.isin(action[following], (Action.ALLOC, Action.OOM))
    before = np.maximum(completed - 1, 0)
    at_once = (
        (action[before] == Action.FREE_REQUESTED)
        & (trace.addr[before] == trace.addr[completed])
        & (trace.stack[before] == trace.stack[completed])
    )
    polled = asks & ~at_once & (trace.stack[completed] == trace.stack[following])
    found[completed[polled]] = following[polled]
    return found


def _own_before(groups: _Groups, late: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the last segment event before each was given back by the program's own call."""
    before = np.searchsorted(groups.events, late) - 1
    return np.append(groups.own, False)[before]


def _streams(trace: Trace, replay: Replay) -> tuple[NDArray[np.uint64], _StreamOf]:
    """The streams in ascending order, and a function from streams to their indices."""
    known = np.unique(np.concatenate([trace.stream[: replay.events], replay.lifetimes.stream, replay.spans.stream]))
    return known, _StreamOf(known)


@dataclass(frozen=True, slots=True)
class _StreamOf:
    known: NDArray[np.uint64]

    def __call__(self, streams: NDArray[np.uint64]) -> NDArray[np.int32]:
        return np.searchsorted(self.known, streams).astype(np.int32)


def _span_pools(trace: Trace, replay: Replay) -> NDArray[np.int32]:
    """The pool of each extent: 0 the default one, above it a private one. What nobody says counts as the default.

    Up to torch 2.11 only the final map says it: of an extent that was given back before, its address may say what came
    there later.
    """
    spans = replay.spans
    said = spans.pool if trace.pool is not None else np.where(spans.died >= replay.events, spans.pool, 0)
    return np.maximum(said, 0).astype(np.int32)


def _pools(trace: Trace, replay: Replay, span_pool: NDArray[np.int32]) -> NDArray[np.int32]:
    """The pool of each block, likewise."""
    blocks, spans = replay.lifetimes, replay.spans
    pool = np.zeros(len(blocks), np.int32)
    placed = blocks.span >= 0
    pool[placed] = span_pool[blocks.span[placed]]
    for row in np.flatnonzero(spans.expandable & (span_pool > 0)).tolist():
        start, size = spans.address[row], np.uint64(spans.size[row])
        inside = ~placed & (blocks.address >= start) & (blocks.address < start + size)
        pool[inside & (blocks.born <= spans.died[row]) & (blocks.died >= spans.born[row])] = span_pool[row]
    if trace.pool is not None:
        said = blocks.born >= 0
        of_event = trace.pool[np.maximum(blocks.born, 0)]
        pool = np.where(said & (of_event >= 0), of_event, pool)
    return np.maximum(pool, 0).astype(np.int32)


def _segment_pools(
    replay: Replay, span_pool: NDArray[np.int32], events: NDArray[np.int64], count: int
) -> NDArray[np.int32]:
    """The pool of each segment event, by the extent that began or ended with it."""
    spans = replay.spans
    pool = np.zeros(count + 1, np.int32)
    for at in (spans.died, spans.born):
        known = (at >= 0) & (at < count)
        pool[at[known]] = span_pool[known]
    return pool[events]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Segment events (`events`) told apart: `own` are the program's (given back by an explicit call), `explicit` the
    events at which such a call was made."""

    events: NDArray[np.int64]
    own: NDArray[np.bool_]
    explicit: NDArray[np.int64]
    guessed: int


def _groups(data: SnapshotData, trace: Trace, events: NDArray[np.int64], is_private: NDArray[np.bool_]) -> _Groups:
    """Which of the segment events (all, in order) an explicit `empty_cache()` made."""
    own = np.zeros(len(events), np.bool_)
    given = np.isin(trace.action[events], _GIVEN_BACK)
    if not given.any():
        return _Groups(events, own, np.zeros(0, np.int64), 0)
    forced, silent = np.zeros((2, len(events)), np.bool_)
    forced[given], silent[given] = told_apart(trace, data.stacks, events[given])
    own = given & ~forced & ~is_private
    # one call each: its events stand together, and no event of another kind between them
    first = np.flatnonzero(own)
    starts = first[np.concatenate([[True], np.diff(events[first]) > 1])] if len(first) else first
    return _Groups(events, own, events[starts], int(silent[starts].sum()))


def _sizes(
    trace: Trace, replay: Replay, call: NDArray[np.uint8], block: NDArray[np.int32], event: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bytes of each row: as the event has them; of blocks in private pools, the block's."""
    size = trace.size[: replay.events][event].astype(np.int64)
    calls, rows = call[event], block[event]
    private = calls == Call.PRIVATE_ALLOC
    size[private] = replay.lifetimes.size[rows[private]]
    for row in np.flatnonzero(calls == Call.PRIVATE_OOM).tolist():
        size[row] = Rules(large_page=replay.settings.large_page).segment_size(int(size[row]))
    return size


def _recorded(
    trace: Trace,
    event: NDArray[np.int64],
    segments: NDArray[np.int64],
    groups: _Groups,
    stream_of: _StreamOf,
) -> SegmentEvents:
    """The segment events of the default pool, each with the row that caused it: the next one, or the explicit call."""
    kind = np.zeros(256, np.uint8)
    for action, name in zip(_SEGMENT_ACTIONS, (0, 1, 2, 3), strict=True):
        kind[action] = name
    row = np.searchsorted(event, segments)
    own = groups.own[np.searchsorted(groups.events, segments)]
    made_by = groups.explicit[np.searchsorted(groups.explicit, segments[own], side="right") - 1]
    row[own] = np.searchsorted(event, made_by)
    return SegmentEvents(
        row=row,
        kind=kind[trace.action[segments]],
        address=trace.addr[segments].copy(),
        size=trace.size[segments].copy(),
        stream=stream_of(trace.stream[segments]),
    )


def _start(
    replay: Replay,
    span_pool: NDArray[np.int32],
    is_private: NDArray[np.bool_],
    rows: NDArray[np.int32],
    stream_of: _StreamOf,
) -> StartMap:
    blocks, spans = replay.lifetimes, replay.spans
    held = spans.born == BEFORE
    shared = np.flatnonzero(held & (span_pool <= 0))
    shared = shared[np.argsort(spans.address[shared])]
    active = (blocks.born == BEFORE) & (blocks.died > BEFORE)
    pending = active & (blocks.freed == BEFORE)
    ours = np.flatnonzero(active & ~is_private)
    ours = ours[np.argsort(blocks.address[ours])]
    return StartMap(
        range_address=spans.address[shared],
        range_size=spans.size[shared],
        range_large=spans.large[shared],
        range_stream=stream_of(spans.stream[shared]),
        range_expandable=spans.expandable[shared],
        block=rows[ours],
        block_address=blocks.address[ours],
        block_size=blocks.size[ours],
        block_pending=pending[ours],
        private_reserved=int(spans.size[held & (span_pool > 0)].sum()),
        private_live=int(blocks.size[active & is_private & ~pending].sum()),
        private_pending=int(blocks.size[pending & is_private].sum()),
    )
