"""Phases that somebody wrote down while the job ran: in the sidecar, as annotations, as metadata of allocations.

Understood are `phase=forward;step=3` (as a `record_function` range or as `_set_memory_metadata` text), torch's own
`Optimizer.step#...` ranges, and the profiler's `ProfilerStep#3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.io.sidecar import PhaseNote
from memtrace.model import SnapshotData, Trace
from memtrace.timeline.marks import FRAMELESS, UNMARKED
from memtrace.timeline.timeline import NO_STEP, SOURCES, Phase

_PAIR = re.compile(r"\b(phase|step)=([A-Za-z0-9_-]+)")
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
_MOST_STEPS = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One row an event: the step it was said to be in (-1: not said), and by whom (a code of `SOURCES`, or none).
    `ended`: the first events after an optimizer's step, by torch's own ranges."""

    step: NDArray[np.int32]
    source: NDArray[np.uint8]
    any_step: bool
    ended: NDArray[np.int64]


class _Range(NamedTuple):
    phase: Phase | None
    step: int
    begin_us: int
    end_us: int
    source: int
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


def recorded_marks(
    data: SnapshotData, trace: Trace, codes: NDArray[np.uint8], recorded: Sequence[PhaseNote]
) -> Recorded | None:
    """Writes what was recorded into `codes`; None when nothing was."""
    ranges = [*_annotated(data, trace.device), *_noted(recorded)]
    texts = trace.user_metadata
    if not ranges and texts is None:
        return None
    step = np.full(len(trace), NO_STEP, np.int32)
    source = np.full(len(trace), _UNSAID, np.uint8)
    if texts is not None:
        for text in np.unique(texts[texts >= 0]).tolist():
            phase, number = phase_of_text(data.strings[text])
            if phase is None and number == NO_STEP:
                continue
            inside = np.flatnonzero(texts == text)
            _say(inside, phase, number, codes, step, source, 0)
    ended = []
    if trace.time_us is not None:
        for one in ranges:
            low, high = np.searchsorted(trace.time_us, [one.begin_us, one.end_us], side="left")
            inside = np.arange(low, high)
            if one.is_torch:  # torch's own names add to the stacks, and do not overrule them
                ended.append(int(high))
                said = codes[low:high]
                if ((said == Phase.FORWARD) | (said == Phase.BACKWARD)).any():
                    continue  # the optimizer calls the model itself (a closure)
                inside = inside[(said == UNMARKED) | (said == FRAMELESS)]
            _say(inside, one.phase, one.step, codes, step, source, one.source)
    if not ended and not (source != _UNSAID).any():
        return None
    return Recorded(step, source, bool((step != NO_STEP).any()), np.array(sorted(ended), np.int64))


def _say(
    inside: NDArray[np.int64],
    phase: Phase | None,
    number: int,
    codes: NDArray[np.uint8],
    step: NDArray[np.int32],
    source: NDArray[np.uint8],
    by: int,
) -> None:
    if phase is not None:
        codes[inside] = phase
        source[inside] = by
    if number != NO_STEP:
        step[inside] = number
        source[inside] = np.minimum(source[inside], by)


def _noted(notes: Sequence[PhaseNote]) -> Iterator[_Range]:
    """The recorder's own, outer ones first: what is inside says more."""
    for note in sorted(notes, key=lambda note: (note.begin_us, -note.end_us)):
        step = NO_STEP if note.step is None else min(note.step, _MOST_STEPS)
        yield _Range(_NAMES.get(note.phase), step, note.begin_us, note.end_us, 0, False)


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
            yield _Range(phase, step, open_ranges[name].pop(), time, 1 if is_torch else 0, is_torch)


def _said_by_name(name: str) -> tuple[Phase | None, int, bool] | None:
    if _OPTIMIZER.match(name):
        return Phase.STEP, NO_STEP, True
    profiler = _PROFILER.match(name)
    if profiler and len(profiler[1]) < 10:
        return None, int(profiler[1]), False
    phase, step = phase_of_text(name)
    return None if phase is None and step == NO_STEP else (phase, step, False)
