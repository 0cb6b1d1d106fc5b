"""When to record and when to dump, by steps, time and peaks; and whether the ring is large enough."""

from __future__ import annotations

import time
from typing import Any, Optional

from . import history, notes

_RISE = 1.05
_PEAK_PAUSE = 50
_STEPS_IN_RING = 2


class Limits:
    """Asked at the end of every step. `recorder` begins, dumps and ends as this says."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._settings = recorder.settings
        self._events: Optional[int] = None
        self._seen_steps = 0
        self._highest, self._peak_step = 0, -_PEAK_PAUSE
        self._until: Optional[float] = None

    def begin(self) -> None:
        """CUDA is in use: recording begins, unless steps are to be skipped first."""
        if self._first_step() == 0:
            self._begin()

    def step_done(self, number: int) -> None:
        """Step `number` (from 0) has ended."""
        recorder, settings = self._recorder, self._settings
        if recorder.started_us is None:
            if number + 1 >= self._first_step():
                self._begin()
            return
        self._check_ring()
        if settings.every and (number + 1) % settings.every == 0:
            recorder.dump("every", ".every")
        if "peak" in settings.on:
            self._peak(number)
        if settings.steps is not None and number >= settings.steps[1]:
            self._end("steps")
        elif self._until is not None and time.monotonic() >= self._until:
            self._end("duration")

    def _first_step(self) -> int:
        first = self._settings.steps[0] if self._settings.steps is not None else 0
        return max(int(self._settings.skip_first), int(first))

    def _begin(self) -> None:
        self._recorder.begin_history()
        if self._settings.duration_s:
            self._until = time.monotonic() + self._settings.duration_s

    def _end(self, reason: str) -> None:
        self._recorder.dump("steps" if reason == "steps" else "api")
        self._recorder.end_history()
        notes.log(f"recording ended as asked ({reason})")

    def _peak(self, number: int) -> None:
        """The snapshot of the highest step so far: after a rise of more than 5 %, at most once in 50 steps."""
        stats = history.all_stats(self._recorder.torch)
        peak = max((one.get("allocated_bytes.all.peak", 0) for one in stats.values()), default=0)
        if peak > self._highest * _RISE and number - self._peak_step >= _PEAK_PAUSE:
            self._highest, self._peak_step = peak, number
            self._recorder.dump("peak", ".peak")

    def _check_ring(self) -> None:
        """After the second step, which is the first that begins and ends like all others."""
        if self._seen_steps > 1:
            return
        self._seen_steps += 1
        events = events_so_far(history.all_stats(self._recorder.torch))
        if self._events is None:
            self._events = events
            return
        step = events - self._events
        if step * _STEPS_IN_RING > self._settings.max_entries:
            notes.say(
                f"a step makes {step:,} events and --max-entries is {self._settings.max_entries:,}: "
                f"the recording will not hold {_STEPS_IN_RING} steps. "
                f"--max-entries {2 * step * _STEPS_IN_RING:,} would."
            )


def events_so_far(stats: Any) -> int:
    """Entries that torch's counters account for: one an allocation, two a free, one a segment taken or given back.

    >>> events_so_far({0: {"allocation.all.allocated": 3, "allocation.all.freed": 2, "segment.all.allocated": 1}})
    8
    """
    weights = {
        "allocation.all.allocated": 1,
        "allocation.all.freed": 2,
        "segment.all.allocated": 1,
        "segment.all.freed": 1,
    }
    return sum(weight * one.get(name, 0) for one in stats.values() for name, weight in weights.items())
