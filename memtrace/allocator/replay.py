"""The replay of one device: which state it started from, every block's lifetime, and what did not fit.

Order of attempts: from nothing (a complete recording); from the state that walking back from the final map gives
(recording started late, or the ring wrapped); the same with the last blocks of the map corrected (the map is
taken after the trace, so other threads may have changed it); and at last what the trace alone supports.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.agreement import active_missing, differences, sizes_at_end
from memtrace.allocator.exact import replay_exactly
from memtrace.allocator.initial import ContradictionError, map_before
from memtrace.allocator.logs import BEFORE, Run
from memtrace.allocator.memory_map import MapBlock, MemoryMap, PrivatePools, map_at_end
from memtrace.allocator.notices import notices_of
from memtrace.allocator.result import Conflict, Lifetimes, Replay, changes_of, lifetimes_of, spans_of
from memtrace.allocator.sizes import AllocatorSettings
from memtrace.allocator.stream import Events, events_of, with_one_free
from memtrace.allocator.tolerant import replay_trace_alone
from memtrace.model import Action, SnapshotData

_MAX_ROUNDS = 3
"""One size known better can change the room of later blocks; a legal trace settles in one or two rounds."""
_MAX_SETTLED = 16
"""Block sizes from before the recording settled by marks, one replay each."""
_MAX_PATCHES = 64
_PATCH_BUDGET = 1_000_000
"""Blocks looked at while patching: each patch starts the walk anew."""
_PATCH_WINDOW = 4096
"""Only the last events can be older than a block of the final map."""


Column = NDArray[np.int64]


class _Attempt(NamedTuple):
    run: Run
    conflicts: list[Conflict]
    complete: bool


def replay(data: SnapshotData, device: int) -> Replay:
    """Replays one device of a snapshot, as exactly as the file allows. Raises KeyError for a device not in it."""
    settings = AllocatorSettings.of(data.settings, data.torch.at_least)
    trace = data.trace(device)
    # history in mode "state" keeps one event, whichever was the last: no trace
    events = events_of(trace.head(0) if len(trace) == 1 else trace, settings)
    at_end = map_at_end(data, device)
    attempt = _attempt(data, events, at_end)
    if not attempt.conflicts and all(pool == (0, 0) for pool in data.pools):
        attempt = _with_marks(events, at_end, attempt)
    run, conflicts, complete = attempt
    result = Replay(
        device=device,
        events=len(events),
        complete=complete,
        conflicts=tuple(conflicts),
        lost_events_at_least=0 if complete else _events_before(run),
        lifetimes=lifetimes_of(run),
        spans=spans_of(run, at_end, len(events)),
        splits=changes_of(run.splits),
        segments=changes_of(run.segments),
        settings=settings,
        revised_sizes=run.revised_sizes,
        notices=(),
    )
    return result.noting(notices_of(data, trace, result))


def _attempt(data: SnapshotData, events: Events, at_end: MemoryMap) -> _Attempt:
    """The first attempt that fits."""
    if not len(events):
        return _Attempt(replay_exactly(events, at_end, PrivatePools({}, frozenset()), {}), [], complete=not at_end)
    if data.tiled:
        found = _exact(data, events, at_end)
        one_free = with_one_free(events)
        if (found is None or found.conflicts) and one_free is not None:
            found = _exact(data, one_free, at_end) or found
        if found is not None:
            return found
    run, unfit = replay_trace_alone(events)
    conflicts = [Conflict(event, reason) for event, reason in unfit]
    return _Attempt(run, conflicts or [Conflict(None, "the trace does not lead to the segments in the file")], False)


def _exact(data: SnapshotData, events: Events, at_end: MemoryMap) -> _Attempt | None:
    from_nothing = _settled(events, MemoryMap(), at_end if data.has_segments else None)
    if from_nothing is not None and not from_nothing[1]:
        return _Attempt(*from_nothing, complete=True)
    if data.has_segments:
        late = _from_before(events, at_end, patching=from_nothing is None)
        if late is not None:
            return late
    return None if from_nothing is None else _Attempt(*from_nothing, complete=False)


def _from_before(events: Events, at_end: MemoryMap, *, patching: bool) -> _Attempt | None:
    """From the state before the window; `patching` allows blocks of the final map that are newer than the trace."""
    newer: list[Conflict] = []
    while True:
        try:
            before = map_before(events, at_end)
        except ContradictionError as contradiction:
            patched = _patched(at_end, events, contradiction.event) if patching else None
            enough = len(newer) == _MAX_PATCHES or (len(newer) + 1) * len(at_end.blocks) > _PATCH_BUDGET
            if patched is None or enough or contradiction.event < len(events) - _PATCH_WINDOW:
                return None
            at_end = patched
            newer.append(Conflict(contradiction.event, "the final map is newer than the trace here"))
            continue
        settled = _settled(events, before, at_end)
        return None if settled is None or settled[1] else _Attempt(settled[0], newer, complete=False)


def _settled(events: Events, start: MemoryMap, at_end: MemoryMap | None) -> tuple[Run, list[Conflict]] | None:
    """The run from `start` and where it ends up elsewhere than `at_end`; None if it meets a contradiction.

    Blocks that live to the end have the size that the final map shows, where the rules give another.
    """
    private = PrivatePools.of(at_end or MemoryMap(), events.settings)
    forced: dict[int, int] = {}
    try:
        run = replay_exactly(events, start, private, forced)
        for _ in range(_MAX_ROUNDS):
            better = {} if at_end is None else sizes_at_end(run, at_end)
            if not better:
                break
            forced.update(better)
            run = replay_exactly(events, start, private, forced)
    except ContradictionError:
        return None
    run.revised_sizes = len(forced)
    return run, [] if at_end is None else differences(run, at_end)


def _patched(at_end: MemoryMap, events: Events, event: int) -> MemoryMap | None:
    """The final map with the place of one late event put back to what the trace says of it."""
    action, address, size = events.action[event], events.addr[event], events.rounded[event]
    end = address + size
    clear = [block for block in at_end.blocks if block.address + block.size <= address or end <= block.address]
    inside = any(item.start <= address and end <= item.end for item in at_end.ranges)
    if inside and action == Action.FREE_COMPLETED and len(clear) < len(at_end.blocks):
        return MemoryMap(at_end.ranges, clear)
    if inside and action in (Action.ALLOC, Action.FREE_REQUESTED):
        block = MapBlock(address, size, events.size[event], pending=action == Action.FREE_REQUESTED)
        return MemoryMap(at_end.ranges, sorted([*clear, block], key=lambda item: item.address))
    return None


def _with_marks(events: Events, at_end: MemoryMap, attempt: _Attempt) -> _Attempt:
    """Holds the run against the `snapshot` events, whose size is the active bytes at that moment.

    They check the replay, and settle the size of a block from before the recording when just one is unsure.
    (In a file with private pools such a mark may be of one pool only, and says nothing.)
    """
    marks = np.flatnonzero(np.array(events.action, np.uint8) == Action.SNAPSHOT)
    run, conflicts, complete = attempt
    known: dict[int, int] = {}
    for _ in range(_MAX_SETTLED if len(marks) else 0):
        lifetimes = lifetimes_of(run)
        missing, bound = active_missing(lifetimes, marks, np.array(events.size, np.int64)[marks])
        wrong = (missing < 0) | (missing > bound)
        if wrong.any():
            conflicts = [
                Conflict(event, "the active bytes that torch noted are not those of the replay")
                for event in marks[wrong].tolist()
            ]
            break
        found = _settled_by_marks(lifetimes, marks[missing > 0], missing[missing > 0])
        if not found:
            break
        known |= found
        before = map_before(events, at_end)
        for block in before.blocks:
            if block.address in known:
                block.size += known[block.address]
                block.slack_bound = 0
        settled = _settled(events, before, at_end)
        if settled is None or settled[1]:
            break
        run = settled[0]
    return _Attempt(run, conflicts, complete)


def _settled_by_marks(lifetimes: Lifetimes, marks: Column, missing: Column) -> dict[int, int]:
    """Address of a block from before the recording -> bytes it is larger, where it is the only unsure one alive."""
    unsure = np.flatnonzero(lifetimes.slack_bound > 0)
    found: dict[int, int] = {}
    for mark, size in zip(marks.tolist(), missing.tolist(), strict=True):
        alive = unsure[lifetimes.died[unsure] > mark]
        if len(alive) == 1:
            found.setdefault(int(lifetimes.address[alive[0]]), size)
    return found


def _events_before(run: Run) -> int:
    """Each block in use at the start was allocated, each pending one also freed, each segment made: one event each."""
    log = run.blocks
    blocks = [freed == BEFORE for born, freed in zip(log.born, log.freed, strict=True) if born == BEFORE]
    return len(blocks) + sum(blocks) + run.spans.born.count(BEFORE)
