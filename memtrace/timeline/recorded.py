"""Phases that somebody wrote down while the job ran: in the sidecar, as annotations, as metadata of allocations.

Understood are `phase=forward;step=3` (as a `record_function` range or as `_set_memory_metadata` text), torch's own
`Optimizer.step#...` ranges, and the profiler's `ProfilerStep#3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.io.sidecar import PhaseNote
from memtrace.model import SnapshotData, Trace
from memtrace.timeline.marks import FRAMELESS, UNMARKED
from memtrace.timeline.timeline import NO_STEP, SOURCES, Phase

_PAIR = re.compile(r"\b(phase|step)=([A-Za-z0-9_-]+)")
_MODULE = re.compile(r"(?:^|;)module=([^;]+)")
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_PROFILER = re.compile(r"ProfilerStep#(\d+)$")
_NAMES = {
    "init": Phase.INIT,
    "forward": Phase.FORWARD,
    "fwd": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "bwd": Phase.BACKWARD,
    "step": Phase.STEP,
    "optimizer": Phase.STEP,
    "optimizer_step": Phase.STEP,
    "optim": Phase.STEP,
    "eval": Phase.EVAL,
    "evaluate": Phase.EVAL,
    "validation": Phase.EVAL,
    "checkpoint": Phase.CHECKPOINT,
    "save": Phase.CHECKPOINT,
    "other": Phase.OTHER,
}
_UNSAID = len(SOURCES)
_UNSAID_PHASE = 255
_MOST_STEPS = 1 << 30
_LAST_US = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One row an event: the step it was said to be in (-1: not said), by whom (a code of `SOURCES`, or none), and
    whether the phase was said, by the recorder or the program. `ended`: the first events after an optimizer's step, by
    torch's own ranges."""

    step: NDArray[np.int32]
    source: NDArray[np.uint8]
    has_phase: NDArray[np.bool_]
    any_step: bool
    ended: NDArray[np.int64]


class _Range(NamedTuple):
    phase: Phase | None
    step: int
    begin_us: int
    end_us: int
    is_torch: bool


def phase_of_text(text: str) -> tuple[Phase | None, int]:
    """What a text says of phase and step (-1: nothing).

    >>> phase_of_text("step=2;phase=optimizer")
    (<Phase.STEP: 4>, 2)
    """
    phase, step = None, NO_STEP
    for key, value in _PAIR.findall(text):
        if key == "phase":
            phase = _NAMES.get(value.lower())
        elif value.isascii() and value.isdigit() and len(value) < 10:
            step = min(int(value), _MOST_STEPS)
    return phase, step


def module_of_text(text: str) -> str | None:
    """The path of the module that a text names.

    >>> module_of_text("phase=forward;step=3;module=transformer.h.0.attn")
    'transformer.h.0.attn'
    """
    found = _MODULE.search(text)
    return found[1] if found else None


def recorded_marks(
    data: SnapshotData, trace: Trace, codes: NDArray[np.uint8], recorded: Sequence[PhaseNote]
) -> Recorded | None:
    """Writes what was recorded into `codes`; None when nothing was. The more exact comes later and beats what came
    before: torch's own ranges, then named ranges and the recorder's notes by time, then what an event itself says."""
    ranges = [*_annotated(data, trace.device), *_noted(recorded)]
    texts = trace.user_metadata
    if not ranges and texts is None:
        return None
    said = Recorded(
        step=np.full(len(trace), NO_STEP, np.int32),
        source=np.full(len(trace), _UNSAID, np.uint8),
        has_phase=np.zeros(len(trace), np.bool_),
        any_step=False,
        ended=np.zeros(0, np.int64),
    )
    ended = []
    if trace.time_us is not None and ranges:
        ranges.sort(key=lambda one: (not one.is_torch, one.begin_us, -one.end_us))  # what is inside says more
        bounds = np.array([(one.begin_us, one.end_us) for one in ranges], np.int64)
        places = np.searchsorted(trace.time_us, bounds, side="left").tolist()
        for one, (low, high) in zip(ranges, places, strict=True):
            if one.is_torch:
                ended.append(high)
                _say_of_torch(slice(low, high), one.phase, codes, said)
            elif low < high:
                _say(slice(low, high), one, codes, said)
    if texts is not None:
        _say_of_texts(texts, data, codes, said)
    if not ended and not (said.source != _UNSAID).any():
        return None
    return replace(said, any_step=bool((said.step != NO_STEP).any()), ended=np.array(sorted(ended), np.int64))


def _say(inside: slice, one: _Range, codes: NDArray[np.uint8], said: Recorded) -> None:
    if one.phase is not None:
        codes[inside] = one.phase
        said.has_phase[inside] = True
    if one.step != NO_STEP:
        said.step[inside] = one.step
    said.source[inside] = 0


def _say_of_torch(inside: slice, phase: Phase | None, codes: NDArray[np.uint8], said: Recorded) -> None:
    """Torch's own names add to the stacks, and do not overrule them."""
    within = codes[inside]
    if phase is None or ((within == Phase.FORWARD) | (within == Phase.BACKWARD)).any():
        return  # the optimizer calls the model itself (a closure)
    open_events = (within == UNMARKED) | (within == FRAMELESS)
    within[open_events] = phase
    said.source[inside][open_events] = 1


def _say_of_texts(texts: NDArray[np.int32], data: SnapshotData, codes: NDArray[np.uint8], said: Recorded) -> None:
    """What the events themselves say. There may be as many texts as modules: each is looked at once."""
    phase_of = np.full(len(data.strings) + 1, _UNSAID_PHASE, np.uint8)  # the last row is that of no text (-1)
    step_of = np.full(len(data.strings) + 1, NO_STEP, np.int32)
    for text in np.flatnonzero(np.bincount(texts + 1)[1:]).tolist():
        phase, step_of[text] = phase_of_text(data.strings[text])
        phase_of[text] = _UNSAID_PHASE if phase is None else phase
    phases, steps = phase_of[texts], step_of[texts]
    has_phase, has_step = phases != _UNSAID_PHASE, steps != NO_STEP
    codes[has_phase] = phases[has_phase]
    said.has_phase[has_phase] = True
    said.step[has_step] = steps[has_step]
    said.source[has_phase | has_step] = 0


def _noted(notes: Sequence[PhaseNote]) -> Iterator[_Range]:
    """The recorder's own."""
    for note in notes:
        step = NO_STEP if note.step is None else min(note.step, _MOST_STEPS)
        yield _Range(_NAMES.get(note.phase), step, note.begin_us, note.end_us, is_torch=False)


def _annotated(data: SnapshotData, device: int) -> Iterator[_Range]:
    """The ranges whose names mean something, from their START and END rows."""
    notes = data.annotations
    said: dict[int, tuple[Phase | None, int, bool] | None] = {}
    open_ranges: dict[int, list[int]] = {}
    for name, is_start, where, time in zip(
        notes.name.tolist(), notes.start.tolist(), notes.device.tolist(), notes.time_us.tolist(), strict=True
    ):
        if where != device:
            continue
        if name not in said:
            said[name] = _said_by_name(data.strings[name])
        meaning = said[name]
        if meaning is None:
            continue
        if is_start:
            open_ranges.setdefault(name, []).append(time)
        elif open_ranges.get(name):
            phase, step, is_torch = meaning
            yield _Range(phase, step, open_ranges[name].pop(), time, is_torch)
    for name, begun in open_ranges.items():
        phase, step, is_torch = said[name] or (None, NO_STEP, True)
        if not is_torch:  # still open when the snapshot was taken, as when memory ran out
            yield from (_Range(phase, step, time, _LAST_US, is_torch) for time in begun)


def _said_by_name(name: str) -> tuple[Phase | None, int, bool] | None:
    if _OPTIMIZER.match(name):
        return Phase.STEP, NO_STEP, True
    profiler = _PROFILER.match(name)
    if profiler and len(profiler[1]) < 10:
        return None, int(profiler[1]), False
    phase, step = phase_of_text(name)
    return None if phase is None and step == NO_STEP else (phase, step, False)
