"""The answer: a trace cut into runs of one phase and step each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns


class Phase(IntEnum):
    """What the program was doing (contract.md, Phases)."""

    OTHER = 0
    INIT = 1
    FORWARD = 2
    BACKWARD = 3
    STEP = 4
    EVAL = 5
    CHECKPOINT = 6


PHASES = tuple(phase.name.lower() for phase in Phase)
"""The names, by code."""

SOURCES = ("recorded", "annotations", "stacks", "rhythm")
"""How a phase was found, from strongest to weakest."""

NO_STEP = -1
NEVER = np.int64(1) << 62
"""An event that does not come."""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline(FrozenColumns):
    """Runs of events, in order, that cover a trace: run `i` is events `start[i]` up to `start[i + 1]`.

    `phase` holds `Phase` codes, `step` counts from 0 (-1: outside steps), `source` indexes `SOURCES`, `frame` is the
    id of the frame that told (-1: none did). `backward_from` is the event at which the next backward starts (the
    run's own, in backward), `step_from` likewise of the optimizer's step, `over` the end of the stretch of runs of
    the same phase; `NEVER` where the trace has none. `events` is the length of the trace.
    """

    start: NDArray[np.int64]
    phase: NDArray[np.uint8]
    step: NDArray[np.int32]
    source: NDArray[np.uint8]
    frame: NDArray[np.int32]
    backward_from: NDArray[np.int64]
    step_from: NDArray[np.int64]
    over: NDArray[np.int64]
    events: int

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        counts = {name: int((self.phase == code).sum()) for code, name in enumerate(PHASES)}
        parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"Timeline({self.events:,} events, {self.steps} steps: {parts})"

    @property
    def steps(self) -> int:
        """How many steps the trace shows, the unfinished last one too."""
        return int(self.step.max(initial=NO_STEP)) + 1

    def runs(self, events: NDArray[np.int64]) -> NDArray[np.int64]:
        """The run of each event; of -1 (before the first) the first run."""
        return np.asarray(np.maximum(np.searchsorted(self.start, events, side="right") - 1, 0), np.int64)

    def runs_in_order(self, events: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for events in ascending order, as those at which blocks are born: many times faster."""
        bounds = np.searchsorted(events, self.start[1:])
        counts = np.diff(np.concatenate([[0], bounds, [len(events)]]))
        return np.repeat(np.arange(len(self), dtype=np.int64), counts) if len(self) else np.zeros(len(events), np.int64)

    def run(self, event: int) -> int | None:
        """The run that holds an event; None for -1 and in an empty trace."""
        if event < 0 or not len(self):
            return None
        return int(np.searchsorted(self.start, event, side="right")) - 1

    def at(self, event: int) -> tuple[str | None, int | None]:
        """Phase name and step after an event; None where there is none."""
        run = self.run(event)
        if run is None:
            return None, None
        step = int(self.step[run])
        return PHASES[int(self.phase[run])], None if step == NO_STEP else step

    def has(self, phase: Phase) -> bool:
        """Whether the trace shows that phase."""
        return bool((self.phase == phase).any())

    def is_sound(self, events: int, frames: int) -> bool:
        """Whether it can be of a trace of that length: of columns from a cache nothing is believed unseen."""
        columns = (self.phase, self.step, self.source, self.frame, self.backward_from, self.step_from, self.over)
        if self.events != events or any(len(column) != len(self.start) for column in columns):
            return False
        if not len(self.start):
            return not events
        return bool(
            self.start[0] == 0
            and (np.diff(self.start) > 0).all()
            and self.start[-1] < max(events, 1)
            and self.phase.max() < len(PHASES)
            and self.source.max() < len(SOURCES)
            and self.step.min() >= NO_STEP
            and self.frame.min() >= -1
            and self.frame.max() < frames
            and self.over.max() <= events
            and min(self.backward_from.min(), self.step_from.min(), self.over.min()) >= 0
        )


def in_words(phase: str | None, step: int | None) -> str | None:
    """A phase and step for people; None where there is nothing to say.

    >>> in_words("step", 1)
    "the optimizer's part of step 1"
    """
    if phase in (None, "other"):
        return None
    name = "the optimizer's part" if phase == "step" else str(phase)
    return name if step is None else f"{name} of step {step}"
