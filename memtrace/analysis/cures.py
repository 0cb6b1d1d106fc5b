"""Which settings of the allocator would have served a request that failed, by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memtrace.analysis.settings import Change
from memtrace.analysis.whatif import NAMED, Limit, Progress, Scenario, Simulation, sweep

_DRAWS = 4
_MOST_EVENTS = 1_000_000
"""Longer recordings are simulated once a setting: an engineer with an OOM does not wait for more."""


@dataclass(frozen=True, slots=True)
class Cure:
    """One setting. `serves`: whether the request, and every one before it, would have been served; None: that depends
    on what is not known. `oom_event`: the first request that fails (None: none)."""

    change: Change
    serves: bool | None
    oom_event: int | None


@dataclass(frozen=True, slots=True)
class Cures:
    """What was tried for the request of one event. `reason`: why nothing could be; `limit` in bytes: the cap under
    which it was tried."""

    event: int
    limit: int | None
    reason: str | None
    tried: tuple[Cure, ...]


def cures(simulation: Simulation, event: int, given: int | None = None, progress: Progress | None = None) -> Cures:
    """Tries the settings of a sweep, each alone, under the limit that the recording had, or that is given."""
    limit = simulation.limit if given is None else Limit(given, NAMED)
    if not simulation.is_exact:
        return Cures(event, None, f"the recorded setting cannot be simulated: {simulation.reason}", ())
    if limit.bytes is None:
        return Cures(event, None, "how much memory there was is neither recorded nor shown by what was refused", ())
    if limit.bytes < simulation.held_at_start:
        return Cures(event, limit.bytes, "torch held more than that when the recording began", ())
    draws = _DRAWS if len(simulation.work.requests) <= _MOST_EVENTS else 0
    changes = sweep(simulation, Change(limit=given))
    tried = []
    for number, change in enumerate(changes):
        if progress is not None:
            progress(number, len(changes))
        scenario = simulation.scenario(change, draws=draws)
        failed = scenario.oom_event
        tried.append(Cure(replace(change, limit=None), _serves(scenario, event), failed))
    return Cures(event, limit.bytes, None, tuple(tried))


def _serves(scenario: Scenario, event: int) -> bool | None:
    """Whether a setting serves the request of an event; one that fails in the recording before it says nothing."""
    failed, prediction = scenario.oom_event, scenario.prediction
    if prediction is None or not scenario.is_sure:
        return None
    if failed is None or failed > event:
        return True
    failed_before = failed < event and prediction.outcome.first_oom != prediction.outcome.stopped
    return None if failed_before else False
