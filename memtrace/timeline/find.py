"""Finds the phases of a trace: what was recorded, else what the stacks say, else the rhythm of the trace.

Only allocations tell (and frees whose stack is their own, not the allocation's). Between what tells:
a thread without Python after a forward is autograd's, so that is backward; a Python stack that says nothing belongs to
the forward it stands before or after.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes
from memtrace.model import Action, SnapshotData, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline.marks import FRAMELESS, UNMARKED, UNRECORDED, StackMarks, mark_stacks
from memtrace.timeline.recorded import Recorded, RecordedPhase, recorded_marks
from memtrace.timeline.timeline import NEVER, NO_STEP, SOURCES, Phase, Timeline

_RECORDED, _ANNOTATIONS, _STACKS, _RHYTHM = range(len(SOURCES))


def timeline_of(
    data: SnapshotData, device: int, lifetimes: Lifetimes, recorded: Sequence[RecordedPhase] = ()
) -> Timeline:
    """Phases and steps of a device's trace. `recorded` are the recorder's own, on the trace's clock."""
    trace = data.trace(device)
    events = len(trace)
    marks = mark_stacks(data.stacks)
    codes = _event_codes(trace, marks, lifetimes)
    said = recorded_marks(data, trace, codes, recorded)
    telling = np.flatnonzero(codes != UNRECORDED)
    if not len(telling):
        return _timeline(np.zeros(min(events, 1), np.int64), [Phase.OTHER][:events], [_RHYTHM][:events], trace, marks)
    kind = codes[telling]
    first = np.flatnonzero(np.diff(kind, prepend=np.uint8(255)))
    start = telling[first].astype(np.int64)
    start, code = _split_where_stacks_recur(start, kind[first], codes, trace)
    phase, source = _phases(code.tolist())
    if trace.device_free == {}:
        phase, source = _evaluation_only(phase, source, code.tolist())
    start[0] = 0
    return _timeline(start, phase, source, trace, marks, said)


def _event_codes(trace: Trace, marks: StackMarks, lifetimes: Lifetimes) -> NDArray[np.uint8]:
    """What each event says: a phase, UNMARKED, FRAMELESS, or UNRECORDED for one that says nothing."""
    by_stack = np.append(marks.code, np.uint8(UNRECORDED))  # the last row is NOT_RECORDED's (-1)
    codes = by_stack[trace.stack]
    frees = (trace.action == Action.FREE_REQUESTED) | (trace.action == Action.FREE_COMPLETED)
    if _frees_have_own_stacks(trace, lifetimes):
        codes[frees & (codes >= UNMARKED)] = UNRECORDED
    else:
        codes[frees] = UNRECORDED
    codes[(trace.action == Action.SNAPSHOT) | (trace.action == Action.SEGMENT_FREE)] = UNRECORDED
    return codes


def _frees_have_own_stacks(trace: Trace, lifetimes: Lifetimes) -> bool:
    """Torch writes the allocation's stack on a free unless it records `context="all"`."""
    rows = np.flatnonzero((lifetimes.born >= 0) & (lifetimes.freed < len(trace)))[:4096]
    stacks = trace.stack[lifetimes.freed[rows]]
    return bool(((stacks != lifetimes.stack[rows]) & (stacks != NOT_RECORDED)).any())


def _split_where_stacks_recur(
    start: NDArray[np.int64], code: NDArray[np.uint8], codes: NDArray[np.uint8], trace: Trace
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Cuts the first unmarked run where its stacks begin to come again later: setting up ends there, steps begin.

    The part before counts as INIT if the trace has a backward at all, so only a job that trains is cut.
    """
    unmarked = np.flatnonzero(code == UNMARKED)
    if not len(unmarked) or not ((code == FRAMELESS) | (code == Phase.BACKWARD)).any():
        return start, code
    run = int(unmarked[0])
    if (code[:run] != Phase.INIT).any() or run + 1 >= len(code) or code[run + 1] == Phase.INIT:
        return start, code
    end = int(start[run + 1])
    inside = np.arange(start[run], end)[codes[start[run] : end] == UNMARKED]
    later = np.unique(trace.stack[end:][codes[end:] == UNMARKED])
    again = np.flatnonzero(np.isin(trace.stack[inside], later))
    if not len(again):
        if code[run + 1] == Phase.FORWARD:
            return start, code
        cut = end
    else:
        cut = int(inside[again[0]])
    if cut == start[run]:
        return start, code
    code = code.copy()
    code[run] = Phase.INIT
    if cut == end:
        return start, code
    return np.insert(start, run + 1, cut), np.insert(code, run + 1, UNMARKED)


def _phases(code: list[int]) -> tuple[list[int], list[int]]:
    """The phase of each run, and where it is from. First the frameless runs, then the unmarked ones between."""
    phase = list(code)
    source = [_STACKS] * len(code)
    before = UNMARKED
    if not {Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.EVAL} & set(code):
        # No model is called and nothing is learnt: threads without Python mean nothing here.
        return [kind if kind < UNMARKED else Phase.OTHER for kind in code], source
    for run, kind in enumerate(code):
        if kind == FRAMELESS:
            after_forward = before in (Phase.FORWARD, Phase.BACKWARD) or (before == UNMARKED and run > 0)
            phase[run] = Phase.BACKWARD if after_forward else (before if before != UNMARKED else Phase.OTHER)
            source[run] = _RHYTHM
        before = phase[run]
    following = [UNMARKED] * len(code)
    ahead = UNMARKED
    for run in range(len(code) - 1, -1, -1):
        following[run] = ahead
        if phase[run] != UNMARKED:
            ahead = phase[run]
    before = UNMARKED
    for run in range(len(code)):
        if phase[run] == UNMARKED:
            phase[run] = _between(before, following[run])
            source[run] = _RHYTHM
        before = phase[run]
    return phase, source


def _between(before: int, after: int) -> int:
    """The phase of a run of Python stacks that say nothing, by the phases around it."""
    if after == Phase.FORWARD or (after == Phase.BACKWARD and before != Phase.EVAL):
        return Phase.FORWARD
    if after == Phase.EVAL and before in (UNMARKED, Phase.INIT, Phase.STEP, Phase.CHECKPOINT):
        return Phase.EVAL
    if before == UNMARKED:
        return after if after in (Phase.INIT, Phase.CHECKPOINT) else Phase.OTHER
    if before == Phase.BACKWARD and after == Phase.STEP:
        return Phase.STEP
    if before == Phase.INIT and after == UNMARKED:
        return Phase.OTHER
    return before


def _evaluation_only(phase: list[int], source: list[int], code: list[int]) -> tuple[list[int], list[int]]:
    """A model that is called again and again and never learns is being evaluated."""
    if Phase.BACKWARD in phase or Phase.STEP in phase:
        return phase, source
    calls = sum(
        1 for run in range(1, len(code)) if code[run] == Phase.FORWARD and code[run - 1] == UNMARKED
    )  # fmt: skip
    if calls < 2:
        return phase, source
    return (
        [Phase.EVAL if found == Phase.FORWARD else found for found in phase],
        [_RHYTHM if found == Phase.FORWARD else where for found, where in zip(phase, source, strict=True)],
    )


def _steps(phase: list[int]) -> list[int]:
    """The step of each run: one ends where the optimizer's phase does (a trace without one: where backward does)."""
    last = Phase.STEP if Phase.STEP in phase else Phase.BACKWARD
    step, done, steps = 0, False, []
    for kind in phase:
        if kind == last:
            done = True
        elif done and kind in (Phase.FORWARD, Phase.BACKWARD):
            step, done = step + 1, False
        steps.append(step if kind in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP) else NO_STEP)
    return steps


def _timeline(
    start: NDArray[np.int64],
    phase: Sequence[int],
    source: Sequence[int],
    trace: Trace,
    marks: StackMarks,
    said: Recorded | None = None,
) -> Timeline:
    """Joins neighbours of the same phase and step, and notes what comes next."""
    phases = np.asarray(phase, np.uint8)
    sources = np.asarray(source, np.uint8)
    steps = np.asarray(_steps(list(phase)), np.int32)
    if said is not None and said.any_step:
        known = said.step[start]
        place = np.maximum.accumulate(np.where(known != NO_STEP, np.arange(len(start)), -1))
        inside = (steps != NO_STEP) & (place >= 0)
        steps[inside] = known[place[inside]]
    if said is not None:
        sources = np.where(said.source[start] < len(SOURCES), said.source[start], sources).astype(np.uint8)
    keep = np.ones(len(start), np.bool_)
    keep[1:] = (phases[1:] != phases[:-1]) | (steps[1:] != steps[:-1])
    first = np.flatnonzero(keep)
    strongest = np.minimum.reduceat(sources, first) if len(first) else sources
    group = np.cumsum(keep) - 1
    telling = np.flatnonzero(sources == strongest[group]) if len(first) else first
    teller = start[telling[np.searchsorted(group[telling], np.arange(len(first)))]]  # the first run that told
    frames = np.append(marks.frame, np.int32(-1))[trace.stack[teller]]
    frames = np.where(strongest == _RHYTHM, np.int32(-1), frames).astype(np.int32)
    start, phases, steps = start[keep], phases[keep], steps[keep]
    return Timeline(
        start=start,
        phase=phases,
        step=steps,
        source=strongest,
        frame=frames,
        backward_from=_next_start(start, phases == Phase.BACKWARD),
        step_from=_next_start(start, phases == Phase.STEP),
        over=_stretch_end(start, phases, len(trace)),
        events=len(trace),
    )


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
