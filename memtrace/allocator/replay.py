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
from memtrace.allocator.initial import ContradictionError
from memtrace.allocator.kernel import Kernel, kernel
from memtrace.allocator.logs import BEFORE, Run, lifetimes_of, spans_of
from memtrace.allocator.memory_map import BLOCK, MemoryMap, PrivatePools, Rows, map_at_end
from memtrace.allocator.notices import notices_of
from memtrace.allocator.result import Conflict, Lifetimes, Replay
from memtrace.allocator.sizes import AllocatorSettings, round_sizes
from memtrace.allocator.stream import Events, events_of, with_one_free
from memtrace.model import Action, SnapshotData
from memtrace.model.stacks import NOT_RECORDED

_MAX_PASSES = 4
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


def replay(data: SnapshotData, device: int, *, native: bool | None = None) -> Replay:
    """Replays one device of a snapshot, as exactly as the file allows. Raises KeyError for a device not in it.

    `native`: True for the native kernel (ImportError if it was not built), False for the reference in Python, None for
    the better one there is. They give the same.
    """
    settings = AllocatorSettings.of(data.settings, data.torch.at_least)
    trace = data.trace(device)
    # history in mode "state" keeps one event, whichever was the last: no trace
    events = events_of(trace.head(0) if len(trace) == 1 else trace, settings)
    at_end = map_at_end(data, device)
    run, conflicts, complete = _Attempts(data, at_end, kernel(native)).best(events)
    result = Replay(
        device=device,
        events=len(events),
        complete=complete,
        conflicts=tuple(conflicts),
        lost_events_at_least=0 if complete else _events_before(run),
        lifetimes=lifetimes_of(run),
        spans=spans_of(run, at_end, len(events)),
        splits=run.splits,
        segments=run.segments,
        settings=settings,
        revised_sizes=run.revised_sizes,
        notices=(),
    )
    return result.noting(notices_of(data, trace, result))


class _Attempts(NamedTuple):
    """Ways to replay the events of one device, by one of the two kernels."""

    data: SnapshotData
    at_end: MemoryMap
    kernel: Kernel

    def best(self, events: Events) -> _Attempt:
        """The first attempt that fits, held against the marks where they are of the whole device."""
        attempt = self._first(events)
        if not attempt.conflicts and all(pool == (0, 0) for pool in self.data.pools):
            return self._with_marks(events, attempt)
        return attempt

    def _first(self, events: Events) -> _Attempt:
        """The first attempt that fits."""
        if not len(events):
            return _Attempt(self._run(events, self.at_end, PrivatePools.none(), {}), [], complete=not self.at_end)
        if self.data.tiled:
            found = self._exact(events)
            one_free = with_one_free(events)
            if (found is None or found.conflicts) and one_free is not None:
                found = self._exact(one_free) or found
            if found is not None:
                return found
        run, unfit = self.kernel.trace_alone(events)
        conflicts = [Conflict(event, reason) for event, reason in unfit]
        no_end = [Conflict(None, "the trace does not lead to the segments in the file")]
        return _Attempt(run, conflicts or no_end, complete=False)

    def _exact(self, events: Events) -> _Attempt | None:
        from_nothing = self._settled(events, MemoryMap(), self.at_end if self.data.has_segments else None)
        if from_nothing is not None and not from_nothing[1]:
            return _Attempt(*from_nothing, complete=True)
        if self.data.has_segments:
            late = self._from_before(events, patching=from_nothing is None)
            if late is not None:
                return late
        return None if from_nothing is None else _Attempt(*from_nothing, complete=False)

    def _from_before(self, events: Events, *, patching: bool) -> _Attempt | None:
        """From the state before the window; `patching` allows blocks of the final map newer than the trace."""
        at_end = self.at_end
        newer: list[Conflict] = []
        while True:
            try:
                before = self.kernel.map_before(events, at_end)
            except ContradictionError as contradiction:
                patched = _patched(at_end, events, contradiction.event) if patching else None
                enough = len(newer) == _MAX_PATCHES or (len(newer) + 1) * len(at_end.blocks) > _PATCH_BUDGET
                if patched is None or enough or contradiction.event < len(events) - _PATCH_WINDOW:
                    return None
                at_end = patched
                newer.append(Conflict(contradiction.event, "the final map is newer than the trace here"))
                continue
            settled = self._settled(events, before, at_end)
            return None if settled is None or settled[1] else _Attempt(settled[0], newer, complete=False)

    def _settled(self, events: Events, start: MemoryMap, at_end: MemoryMap | None) -> tuple[Run, list[Conflict]] | None:
        """The run from `start` and where it ends up elsewhere than `at_end`; None if it meets a contradiction.

        Blocks that live to the end have the size that the final map shows, where the rules give another.
        """
        private = PrivatePools.of(at_end or MemoryMap(), events.settings)
        forced: dict[int, int] = {}
        try:
            run = self._run(events, start, private, forced)
            for _ in range(_MAX_ROUNDS):
                better = {} if at_end is None else sizes_at_end(run, at_end)
                if not better:
                    break
                forced.update(better)
                del run  # a run is large: not two of them at once
                run = self._run(events, start, private, forced)
        except ContradictionError:
            return None
        run.revised_sizes = len(forced)
        return run, [] if at_end is None else differences(run, at_end)

    def _run(self, events: Events, start: MemoryMap, private: PrivatePools, forced: dict[int, int]) -> Run:
        """Passes over the events until no size has to be revised. Raises ContradictionError; see `forward_pass`."""
        for _ in range(_MAX_PASSES):
            known = len(forced)
            run, revised = self.kernel.forward_pass(events, start, private, forced)
            if len(forced) == known and not revised:
                return run
            del run
        raise ContradictionError(len(events) - 1, "block sizes do not settle")

    def _with_marks(self, events: Events, attempt: _Attempt) -> _Attempt:
        """Holds the run against the `snapshot` events, whose size is the active bytes at that moment.

        They check the replay, and settle the size of a block from before the recording when just one is unsure.
        (In a file with private pools such a mark may be of one pool only, and says nothing.)
        """
        marks = np.flatnonzero(events.action == Action.SNAPSHOT)
        run, conflicts, complete = attempt
        known: dict[int, int] = {}
        for _ in range(_MAX_SETTLED if len(marks) else 0):
            lifetimes = lifetimes_of(run)
            missing, bound = active_missing(lifetimes, marks, events.size[marks])
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
            enlarged = _enlarged(self.kernel.map_before(events, self.at_end), known)
            settled = None if enlarged is None else self._settled(events, enlarged, self.at_end)
            if settled is None or settled[1]:
                break
            run = settled[0]
        return _Attempt(run, conflicts, complete)


def _patched(at_end: MemoryMap, events: Events, event: int) -> MemoryMap | None:
    """The final map with the place of one late event put back to what the trace says of it."""
    action, address = events.action[event], int(events.addr[event])
    size = int(round_sizes(events.size[event : event + 1], events.settings.divisions)[0])
    ranges, blocks = at_end.ranges, at_end.blocks
    end = address + size
    clear = blocks[(_ends(blocks, "address") <= address) | (blocks["address"] >= end)]
    inside = bool(((ranges["start"] <= address) & (_ends(ranges, "start") >= end)).any())
    if inside and action == Action.FREE_COMPLETED and len(clear) < len(blocks):
        return MemoryMap(ranges, clear)
    if inside and action in (Action.ALLOC, Action.FREE_REQUESTED):
        pending = action == Action.FREE_REQUESTED
        block = np.array([(address, size, events.size[event], 0, NOT_RECORDED, pending)], BLOCK)
        return MemoryMap(ranges, np.insert(clear, np.searchsorted(clear["address"], np.uint64(address)), block))
    return None


def _enlarged(before: MemoryMap, known: dict[int, int]) -> MemoryMap | None:
    """The map with blocks (by address) so many bytes larger, and sure; None if there is no room for that."""
    blocks = before.blocks.copy()
    for row in np.flatnonzero(np.isin(blocks["address"], np.array(list(known), np.uint64))).tolist():
        blocks["size"][row] += known[int(blocks["address"][row])]
        blocks["slack_bound"][row] = 0
    home = before.ranges[np.searchsorted(before.ranges["start"], blocks["address"], side="right") - 1]
    ends = _ends(blocks, "address")
    if (ends > _ends(home, "start")).any() or (ends[:-1] > blocks["address"][1:]).any():
        return None
    return MemoryMap(before.ranges, blocks)


def _ends(rows: Rows, start: str) -> NDArray[np.uint64]:
    """The ends of blocks or ranges."""
    ends: NDArray[np.uint64] = rows[start] + rows["size"].astype(np.uint64)
    return ends


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
    blocks = int(np.count_nonzero(run.blocks.born == BEFORE))
    pending = int(np.count_nonzero((run.blocks.born == BEFORE) & (run.blocks.freed == BEFORE)))
    return blocks + pending + int(np.count_nonzero(run.spans.born == BEFORE))
