"""Finds the phases of a trace: what was recorded, else what the stacks say, else the rhythm of the trace.

Only allocations tell (and frees whose stack is their own, not the allocation's). Between what tells:
a thread without Python after a forward is autograd's, so that is backward; a Python stack that says nothing belongs to
the forward it stands before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes
from memtrace.io.sidecar import PhaseNote
from memtrace.model import Action, SnapshotData, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline.marks import CLEARING, FRAMELESS, UNMARKED, UNRECORDED, StackMarks, mark_stacks
from memtrace.timeline.recorded import Recorded, recorded_marks
from memtrace.timeline.timeline import NEVER, NO_STEP, SOURCES, Phase, Timeline

_RECORDED, _ANNOTATIONS, _STACKS, _RHYTHM = range(len(SOURCES))
_LEFT_OVER = 0.02
"""A call whose remains at backward are below this share of another's was not made for it."""


@dataclass(slots=True)
class _Runs:
    """The trace cut into runs. `kind` is a phase, UNMARKED or FRAMELESS; `source` as in `Timeline`; `teller` the event
    whose stack told."""

    start: NDArray[np.int64]
    kind: NDArray[np.uint8]
    source: NDArray[np.uint8]
    teller: NDArray[np.int64]

    def joined(self, steps: NDArray[np.int32] | None = None) -> tuple[_Runs, NDArray[np.bool_]]:
        """Neighbours of one kind (and step) as one run, told by its first strongest; and which runs begin one."""
        begins = np.ones(len(self.kind), np.bool_)
        begins[1:] = self.kind[1:] != self.kind[:-1]
        if steps is not None:
            begins[1:] |= steps[1:] != steps[:-1]
        first = np.flatnonzero(begins)
        if not len(first):
            return self, begins
        strongest = np.minimum.reduceat(self.source, first)
        group = np.cumsum(begins) - 1
        telling = np.flatnonzero(self.source == strongest[group])
        told = telling[np.searchsorted(group[telling], np.arange(len(first)))]
        return _Runs(self.start[first], self.kind[first], strongest, self.teller[told]), begins


def timeline_of(data: SnapshotData, device: int, lifetimes: Lifetimes, recorded: Sequence[PhaseNote] = ()) -> Timeline:
    """Phases and steps of a device's trace. `recorded` are the recorder's own, on the trace's clock."""
    trace = data.trace(device)
    marks = mark_stacks(data.stacks)
    codes = _event_codes(trace, marks, lifetimes)
    said = recorded_marks(data, trace, codes, recorded)
    runs = _runs_of(codes, trace)
    if len(runs.kind):
        runs = _split_where_stacks_recur(runs, codes, trace)
        has_phase = np.zeros(len(trace), np.bool_) if said is None else said.has_phase
        runs = _between_marks(_calls_for_evaluation(_frameless(runs), lifetimes, marks, trace, has_phase))
        if not trace.device_free:
            runs = _evaluation_only(runs, codes, has_phase)
        runs.start[0] = 0
    return _timeline(runs, trace, marks, said, np.flatnonzero(codes == CLEARING))


def _runs_of(codes: NDArray[np.uint8], trace: Trace) -> _Runs:
    """Runs of events that say the same; one of OTHER where none says anything."""
    telling = np.flatnonzero(codes != UNRECORDED)
    if not len(telling):
        start = np.zeros(min(len(trace), 1), np.int64)
        return _Runs(start, np.full(len(start), Phase.OTHER, np.uint8), np.full(len(start), _RHYTHM, np.uint8), start)
    kind = codes[telling]
    first = np.flatnonzero(np.diff(kind, prepend=np.uint8(255)))
    start = telling[first].astype(np.int64)
    source = np.where(kind[first] < UNMARKED, _STACKS, _RHYTHM).astype(np.uint8)
    return _Runs(start, kind[first], source, start.copy())


def _event_codes(trace: Trace, marks: StackMarks, lifetimes: Lifetimes) -> NDArray[np.uint8]:
    """What each event says: a phase, UNMARKED, FRAMELESS, or UNRECORDED for one that says nothing."""
    by_stack = np.append(marks.code, np.uint8(UNRECORDED))  # the last row is NOT_RECORDED's (-1)
    codes = by_stack[trace.stack]
    frees = (trace.action == Action.FREE_REQUESTED) | (trace.action == Action.FREE_COMPLETED)
    if _frees_have_own_stacks(trace, lifetimes):
        codes[frees & (codes >= UNMARKED) & (codes != CLEARING)] = UNRECORDED
    else:
        codes[frees] = UNRECORDED
    codes[(trace.action == Action.SNAPSHOT) | (trace.action == Action.SEGMENT_FREE)] = UNRECORDED
    return codes


def _frees_have_own_stacks(trace: Trace, lifetimes: Lifetimes) -> bool:
    """Torch writes the allocation's stack on a free unless it records `context="all"`."""
    rows = np.flatnonzero((lifetimes.born >= 0) & (lifetimes.freed < len(trace)))[:4096]
    stacks = trace.stack[lifetimes.freed[rows]]
    return bool(((stacks != lifetimes.stack[rows]) & (stacks != NOT_RECORDED)).any())


def _split_where_stacks_recur(runs: _Runs, codes: NDArray[np.uint8], trace: Trace) -> _Runs:
    """Cuts the first unmarked run where its stacks begin to come again later: setting up ends there, steps begin.

    The part before counts as INIT if the trace has a backward at all, so only a job that trains is cut.
    """
    start, kind = runs.start, runs.kind
    unmarked = np.flatnonzero(kind == UNMARKED)
    trains = np.isin(kind, [Phase.FORWARD, Phase.BACKWARD, Phase.STEP]).any()
    if not len(unmarked) or not trains or not np.isin(kind, [FRAMELESS, Phase.BACKWARD]).any():
        return runs
    run = int(unmarked[0])
    if (kind[:run] != Phase.INIT).any() or run + 1 >= len(kind) or kind[run + 1] == Phase.INIT:
        return runs
    end = int(start[run + 1])
    inside = np.arange(start[run], end)[codes[start[run] : end] == UNMARKED]
    later = np.unique(trace.stack[end:][codes[end:] == UNMARKED])
    again = np.flatnonzero(np.isin(trace.stack[inside], later))
    if not len(again) and kind[run + 1] == Phase.FORWARD:
        return runs
    cut = int(inside[again[0]]) if len(again) else end
    if cut == start[run]:
        return runs
    before = kind.copy()
    before[run] = Phase.INIT
    if cut == end:
        return replace(runs, kind=before)
    return _Runs(
        np.insert(start, run + 1, cut),
        np.insert(before, run + 1, UNMARKED),
        np.insert(runs.source, run + 1, _RHYTHM),
        np.insert(runs.teller, run + 1, cut),
    )


def _frameless(runs: _Runs) -> _Runs:
    """Threads without Python: after a forward (or what looks like one) they are autograd's."""
    kind = runs.kind
    if not np.isin(kind, [Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.EVAL]).any():
        # No model is called and nothing is learnt: such threads mean nothing here.
        return replace(runs, kind=np.where(kind >= UNMARKED, np.uint8(Phase.OTHER), kind))
    kind = _clearing(kind)
    before = np.concatenate([[np.uint8(Phase.OTHER)], kind[:-1]])
    backward = np.isin(before, [Phase.FORWARD, Phase.BACKWARD, UNMARKED])
    found = np.where(kind == FRAMELESS, np.where(backward, np.uint8(Phase.BACKWARD), before), kind)
    return replace(runs, kind=found).joined()[0]


def _calls_for_evaluation(
    runs: _Runs, lifetimes: Lifetimes, marks: StackMarks, trace: Trace, has_phase: NDArray[np.bool_]
) -> _Runs:
    """Of several calls of a model before one backward, those that leave nothing for it; and those after the last one.

    Calls are told apart by what the script does between them. A job that ran out of memory may have meant to go on.
    Of a call whose phase was recorded nothing else is believed.
    """
    kind = runs.kind.copy()
    starts = np.flatnonzero(kind == Phase.BACKWARD)
    if not len(starts) or not (kind == UNMARKED).any():
        return runs
    bounds = np.append(runs.start, len(trace))
    gathers = np.append(marks.gathers, False)
    first = 0
    for end in [*starts.tolist(), len(kind)]:
        calls = first + np.flatnonzero((kind[first:end] == Phase.FORWARD) & ~has_phase[runs.teller[first:end]])
        first = end + 1
        if len(calls) < 2 or (end == len(kind) and trace.device_free):
            continue
        if end == len(kind):
            kind[calls] = Phase.EVAL
            continue
        at = int(runs.start[end])
        alive = np.flatnonzero((lifetimes.born >= bounds[calls[0]]) & (lifetimes.born < at) & (lifetimes.freed >= at))
        alive = alive[~gathers[lifetimes.stack[alive]]]
        place = np.searchsorted(runs.start, lifetimes.born[alive], side="right") - 1
        left = np.bincount(place, weights=lifetimes.size[alive], minlength=len(kind))[calls]
        kind[calls[left < _LEFT_OVER * left.max()]] = Phase.EVAL
    return replace(runs, kind=kind)


def _clearing(kind: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Clearing gradients after backward or the step ends a step; before it, it belongs to what went before."""
    before = np.concatenate([[np.uint8(UNMARKED)], kind[:-1]])
    ends = np.isin(before, [Phase.BACKWARD, Phase.STEP, FRAMELESS])
    return np.where(kind == CLEARING, np.where(ends, np.uint8(Phase.STEP), before), kind)


def _between_marks(runs: _Runs) -> _Runs:
    """Gives the unmarked runs the phase that those around them tell."""
    kind = runs.kind.tolist()
    following = [UNMARKED] * len(kind)
    ahead = UNMARKED
    for run in range(len(kind) - 1, -1, -1):
        following[run] = ahead
        if kind[run] != UNMARKED:
            ahead = kind[run]
    before = UNMARKED
    for run, after in enumerate(following):
        if kind[run] == UNMARKED:
            kind[run] = _between(before, after)
        before = kind[run]
    return replace(runs, kind=np.asarray(kind, np.uint8))


def _between(before: int, after: int) -> int:
    """The phase of a run of Python stacks that say nothing, by the phases around it."""
    if after == Phase.FORWARD or (after == Phase.BACKWARD and before != Phase.EVAL):
        return Phase.FORWARD
    if after == Phase.EVAL and before != Phase.FORWARD:
        return Phase.EVAL
    if before == UNMARKED:
        return after if after in (Phase.INIT, Phase.CHECKPOINT) else Phase.OTHER
    if before == Phase.BACKWARD and after == Phase.STEP:
        return Phase.STEP
    if before == Phase.INIT and after == UNMARKED:
        return Phase.OTHER
    return before


def _evaluation_only(runs: _Runs, codes: NDArray[np.uint8], has_phase: NDArray[np.bool_]) -> _Runs:
    """A model that is called again and again and never learns is being evaluated."""
    kind = runs.kind
    if np.isin(kind, [Phase.BACKWARD, Phase.STEP]).any() or not (kind == Phase.FORWARD).any() or has_phase.any():
        return runs
    told = codes[runs.start]
    calls = int(((told[1:] == Phase.FORWARD) & (told[:-1] == UNMARKED)).sum())
    if calls < 2:
        return runs
    forward = kind == Phase.FORWARD
    return replace(
        runs,
        kind=np.where(forward, np.uint8(Phase.EVAL), kind),
        source=np.where(forward, np.uint8(_RHYTHM), runs.source),
    )


def _steps(runs: _Runs, cleared: NDArray[np.int64], ended: NDArray[np.int64]) -> list[int]:
    """The step of each run. One ends where the optimizer's phase does; where that allocates nothing (in place, fused),
    before gradients are `cleared` in the next forward, or where a range of torch's says that it `ended` (both events).
    A trace without any of these: where backward does."""
    phase = runs.kind.tolist()
    told = Phase.STEP in phase or len(cleared) or len(ended)
    last = Phase.STEP if told else Phase.BACKWARD
    bounds = np.append(runs.start, np.iinfo(np.int64).max)
    clears = np.diff(np.searchsorted(cleared, bounds)) > 0
    ends = np.diff(np.searchsorted(ended, bounds, side="right"), prepend=0)[:-1] > 0
    step, done, learnt, steps = 0, False, False, []
    for kind, clears_here, ends_before in zip(phase, clears.tolist(), ends.tolist(), strict=True):
        if learnt and told and (ends_before or (clears_here and kind == Phase.FORWARD)):
            done = True
        if kind == last:
            done = True
        elif done and kind in (Phase.FORWARD, Phase.BACKWARD):
            step, done, learnt = step + 1, False, False
        learnt = kind == Phase.BACKWARD or (learnt and kind != Phase.STEP)
        steps.append(step if kind in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP) else NO_STEP)
    return steps


def _timeline(
    runs: _Runs, trace: Trace, marks: StackMarks, said: Recorded | None, cleared: NDArray[np.int64]
) -> Timeline:
    """Joins neighbours of the same phase and step, and notes what comes next."""
    if said is not None and len(runs.start):
        recorded = said.source[runs.start]
        runs = replace(runs, source=np.where(recorded < len(SOURCES), recorded, runs.source).astype(np.uint8))
    runs = runs.joined()[0]
    ended = np.zeros(0, np.int64) if said is None else said.ended
    steps = np.asarray(_steps(runs, cleared, ended), np.int32)
    if said is not None and said.any_step:
        known = _first_said(said.step, runs.start)
        place = np.maximum.accumulate(np.where(known != NO_STEP, np.arange(len(known)), -1))
        inside = (steps != NO_STEP) & (place >= 0)
        steps[inside] = known[place[inside]]
    runs, begins = runs.joined(steps)
    frames = np.append(marks.frame, np.int32(-1))[trace.stack[runs.teller]]
    return Timeline(
        start=runs.start,
        phase=runs.kind,
        step=steps[begins],
        source=runs.source,
        frame=np.where(runs.source == _RHYTHM, np.int32(-1), frames).astype(np.int32),
        backward_from=_next_start(runs.start, runs.kind == Phase.BACKWARD),
        step_from=_next_start(runs.start, runs.kind == Phase.STEP),
        over=_stretch_end(runs.start, runs.kind, len(trace)),
        events=len(trace),
    )


def _first_said(step: NDArray[np.int32], start: NDArray[np.int64]) -> NDArray[np.int32]:
    """For each run the first step that one of its events was said to be in."""
    said = np.flatnonzero(step != NO_STEP)
    place = np.searchsorted(said, start)
    first = np.append(said, len(step))[place]
    return np.where(first < np.append(start[1:], len(step)), np.append(step, NO_STEP)[first], NO_STEP).astype(np.int32)


def _next_start(start: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each run the start of the next run that is wanted, itself included."""
    values = np.where(wanted, start, NEVER)
    return np.minimum.accumulate(values[::-1])[::-1]


def _stretch_end(start: NDArray[np.int64], phases: NDArray[np.uint8], events: int) -> NDArray[np.int64]:
    """For each run where the stretch of runs of its phase ends."""
    if not len(start):
        return np.zeros(0, np.int64)
    last = np.append(phases[1:] != phases[:-1], True)
    ends = np.where(last, np.append(start[1:], events), NEVER)
    return np.minimum.accumulate(ends[::-1])[::-1]
