"""The recorded program under other allocator settings: simulated, after the simulation has proved itself.

First the recorded setting is simulated with the recorded addresses and held against the recording. Only where each
placement and each segment event is the recorded one, anything is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.allocator.simulate import run as simulate
from memtrace.allocator.simulate.driver import Moments
from memtrace.allocator.simulate.machine import NEVER
from memtrace.allocator.simulate.requests import Workload, workload
from memtrace.allocator.simulate.rules import Rules, Tie, tie_of
from memtrace.allocator.simulate.run import Prediction, SelfCheck
from memtrace.analysis.settings import Change, Settings, available
from memtrace.errors import QuestionError
from memtrace.io.versions import RELEASES
from memtrace.model import Notice, SnapshotData
from memtrace.timeline import Phase, Timeline
from memtrace.units import format_bytes, plural

_RUNS = (Phase.FORWARD, Phase.BACKWARD, Phase.EVAL)
_EVENT_BUDGET = 60_000_000
"""Events simulated over all draws of one scenario: of long recordings fewer draws are made, and that is said."""
_LEAST_DRAWS = 6
NAMED, NOTED, SHOWN = "given", "recorded", "inferred"

SWEEP: tuple[Change, ...] = (
    Change(expandable_segments=True),
    Change(max_split_size_mb=64),
    Change(max_split_size_mb=128),
    Change(max_split_size_mb=256),
    Change(max_split_size_mb=512),
    Change(roundup_power2_divisions=4),
    Change(roundup_power2_divisions=8),
    Change(roundup_power2_divisions=16),
    Change(garbage_collection_threshold=0.6),
    Change(garbage_collection_threshold=0.8),
    Change(empty_cache_every_step=True),
)
"""What `--sweep` tries: each setting that people are told to set, on its own."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One setting. `prediction` None: the simulation did not prove itself, nothing is predicted.

    `oom_event`: the event of the trace whose request fails first (None: none does); `is_sure`: that does not depend on
    where segments lie, nor on what is not known of the limit.
    """

    change: Change
    settings: Settings
    prediction: Prediction | None
    oom_event: int | None
    is_sure: bool

    @property
    def completes(self) -> bool:
        """Whether every request is served, surely."""
        return self.prediction is not None and self.oom_event is None and self.is_sure


@dataclass(frozen=True, slots=True)
class Limit:
    """Torch's cap on reserved memory in bytes (None: none known), and where it is from. `below`: of one that the
    recording only brackets, the least that it cannot be."""

    bytes: int | None
    source: str | None
    below: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A recording that is ready to be simulated. `reason`: why nothing can be; None: the self-check is exact."""

    work: Workload
    rules: Rules
    check: SelfCheck | None
    reason: str | None
    limit: Limit
    moments: Moments
    step_rows: NDArray[np.int64]
    torch: str
    at_most: str | None
    is_complete: bool

    @property
    def is_exact(self) -> bool:
        return self.reason is None

    @property
    def held_at_start(self) -> int:
        """Bytes that were reserved before the first event."""
        return _held_at_start(self.work)

    @property
    def recorded(self) -> Scenario:
        """The recorded setting, as simulated with the recorded addresses."""
        nothing = Change()
        if self.check is None:
            return Scenario(nothing, Settings.of(self.rules, None, nothing, self.torch), None, None, is_sure=False)
        source = self.limit.source if self.check.rules.limit is not None else None
        settings = Settings.of(self.check.rules, source, nothing, self.torch)
        outcome = self.check.outcome
        if outcome is None or not self.check.is_exact:
            return Scenario(nothing, settings, None, None, is_sure=False)
        peak = outcome.reserved_peak
        whole = Prediction(self.check.rules, outcome, peak, peak, 1, int(outcome.ooms > 0), as_recorded=True)
        return Scenario(nothing, settings, whole, self.event_of(outcome.first_oom), is_sure=True)

    def event_of(self, row: int) -> int | None:
        """The event of a row; None for `NEVER`."""
        return None if row == NEVER else int(self.work.requests.event[row])

    def scenario(self, change: Change, progress: Progress | None = None, *, draws: int | None = None) -> Scenario:
        """What the allocator would have done with these changes. Raises QuestionError for one that does not apply."""
        flush = self.flushes(change)
        limit = Limit(change.limit, NAMED) if change.limit is not None else self.limit
        base = self.rules
        if limit.source == NAMED and limit.bytes is not None and limit.bytes < self.held_at_start:
            raise QuestionError(
                f"torch held {format_bytes(self.held_at_start)} when the recording began, which no lower limit allows",
                hint="What was there before a recording began stays where it was: record from the start.",
            )
        rules = replace(change.applied(base), limit=limit.bytes)
        settings = Settings.of(rules, limit.source, change, self.torch)
        if self.check is None or not self.is_exact:
            return Scenario(change, settings, None, None, is_sure=False)
        count = self.draws if draws is None else draws
        found = simulate.predict(self.work, rules, self.check, self.moments, flush, draws=count, progress=progress)
        is_sure = found.out_of_memory in (0, found.draws)
        if is_sure and limit.below is not None and limit.below - 1 != limit.bytes:
            other = simulate.predict(
                self.work, replace(rules, limit=limit.below - 1), self.check, self.moments, flush, draws=0
            )
            is_sure = other.outcome.first_oom == found.outcome.first_oom
        return Scenario(change, settings, found, self.event_of(found.outcome.first_oom), is_sure)

    @property
    def draws(self) -> int:
        """Ways for segments to lie that are tried."""
        fit = _EVENT_BUDGET // max(len(self.work.requests), 1)
        return min(simulate.DRAWS, max(_LEAST_DRAWS, fit))

    def flushes(self, change: Change) -> NDArray[np.bool_] | None:
        """The rows before which a change empties the cache. Raises QuestionError if it cannot."""
        if not change.empty_cache_every_step:
            return None
        if not len(self.step_rows):
            raise QuestionError(
                "the recording shows no end of a step, so there is none to empty the cache after",
                hint="memtrace info tells what the file holds.",
            )
        flush = np.zeros(len(self.work.requests) + 1, np.bool_)
        flush[self.step_rows] = True
        return flush


def simulation(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    known_limit: int | None = None,
    given_limit: int | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Makes a recording ready. `known_limit`: torch's cap as recorded; `given_limit`: as somebody says it, tried where
    the recording does not fit without one."""
    reason = simulate.unfit(replay)
    check = None
    ties = _ties(data)
    rules = Rules.of(replay.settings, data.settings, ties[0])
    if reason is None:
        limits = _limits(known_limit, given_limit, rules)
        work, check = simulate.checked(data, replay, rules, ties, limits, progress)
        reason, rules = check.reason, check.rules
    else:
        work = workload(data, replay)
    return Simulation(
        work=work,
        rules=rules,
        check=check,
        reason=reason,
        limit=_limit(work, check, known_limit),
        moments=_moments(work, replay, timeline),
        step_rows=np.searchsorted(work.requests.event, _step_ends(timeline)),
        torch=str(data.torch).removeprefix("torch "),
        at_most=data.torch.at_most,
        is_complete=replay.complete,
    )


def _limits(known: int | None, given: int | None, rules: Rules) -> tuple[int | None, ...]:
    """Limits that the recording may have had, the likeliest first. One that somebody names may be another than that of
    the recording: it is tried where one is missing to tell when garbage was collected."""
    if known is not None:
        return known, None
    return (given, None) if given is not None and rules.collect_above else (None,)


def _step_ends(timeline: Timeline) -> NDArray[np.int64]:
    """The events before which a step has ended: the first of each next one, and the end of the trace after a last step
    whose optimizer ran."""
    firsts = np.sort(timeline.start[np.unique(np.maximum(timeline.step, 0), return_index=True)[1][1:]])
    is_over = ((timeline.step == timeline.steps - 1) & (timeline.phase == Phase.STEP)).any()
    return np.append(firsts, timeline.events) if timeline.steps and is_over else firsts


def _ties(data: SnapshotData) -> tuple[Tie, ...]:
    """The rules that the file's release of torch may have, the oldest first."""
    torch = data.torch
    low = RELEASES.index(torch.at_least) if torch.at_least in RELEASES else 0
    high = RELEASES.index(torch.at_most) if torch.at_most in RELEASES else len(RELEASES) - 1
    return tuple(dict.fromkeys(tie_of(release) for release in RELEASES[low : max(high, low) + 1]))


def _held_at_start(work: Workload) -> int:
    return int(work.start.range_size.sum()) + work.start.private_reserved


def _limit(work: Workload, check: SelfCheck | None, known: int | None) -> Limit:
    """The cap: as noted, as found with the self-check, or bracketed by what the driver gave and refused."""
    fitted = (
        check is None or not check.is_exact or (check.rules.limit == known and _held_at_start(work) <= (known or 0))
    )
    if known is not None and fitted:
        return Limit(known, NOTED)  # else the recording shows that it was another
    outcome = None if check is None else check.outcome
    if check is None or outcome is None or not check.is_exact:
        return Limit(None, None)
    if check.rules.limit is not None:
        return Limit(check.rules.limit, SHOWN)
    if outcome.refused is not None and outcome.proven < outcome.refused:
        return Limit(outcome.proven, SHOWN, outcome.refused)
    return Limit(None, None)


def _moments(work: Workload, replay: Replay, timeline: Timeline) -> Moments:
    """Kernels run for the first time from the first forward on, up to the end of the first step."""
    event = work.requests.event
    begun = np.flatnonzero(np.isin(timeline.phase, _RUNS))
    later = np.flatnonzero(timeline.step >= 1)
    first = int(timeline.start[begun[0]]) if len(begun) else 0
    end = int(timeline.start[later[0]]) if len(later) else work.events
    blocks = replay.lifetimes
    moved = int(blocks.size[(blocks.born < first) & (blocks.freed >= first)].sum())
    return Moments(int(np.searchsorted(event, first)), int(np.searchsorted(event, end)), moved)


def sweep(simulation: Simulation, base: Change) -> tuple[Change, ...]:
    """The settings worth trying on this recording, each on top of `base`: what is there already is left out."""
    asked = [change for change in SWEEP if not _is_idle(simulation, change.over(base))]
    found = dict.fromkeys(change.over(base) for change in asked)
    return tuple(change for change in found if change != base)


def _is_idle(simulation: Simulation, change: Change) -> bool:
    """Whether a change changes nothing, or the recorded torch does not know it."""
    check = simulation.check
    limit = change.limit if change.limit is not None else simulation.limit.bytes
    if change.empty_cache_every_step:
        return not len(simulation.step_rows)
    if change.garbage_collection_threshold and limit is None:
        return True
    same = check is not None and change.applied(check.rules) == check.rules
    return same or bool(available(change, simulation.at_most))


def ranked(scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
    """Those that serve every request first, then by the reserved peak, then by how often the driver is asked."""

    def key(scenario: Scenario) -> tuple[bool, int, int]:
        prediction = scenario.prediction
        if prediction is None:
            return True, 0, 0
        return not scenario.completes, prediction.high, prediction.outcome.device_allocs

    return tuple(sorted(scenarios, key=key))


def assumptions(simulation: Simulation, scenarios: Iterable[Scenario]) -> tuple[Notice, ...]:
    """What the answer rests on."""
    work, shown = simulation.work, tuple(scenarios)
    if not simulation.is_exact:
        return ()
    found = [Notice("same-requests", "the program asks for the same memory in the same order, whatever the setting")]
    if any(scenario.settings.limit is None for scenario in shown):
        found.append(Notice("no-limit", "no limit: the recording names none, and none was reached (--limit sets one)"))
    limit = simulation.limit
    if limit.below is not None and any(scenario.settings.limit_source == SHOWN for scenario in shown):
        found.append(
            Notice(
                "limit-inferred",
                f"the limit is not recorded; what was served and what was refused puts it from "
                f"{format_bytes(limit.bytes or 0)} to below {format_bytes(limit.below)}: the lower end is taken",
            )
        )
    if work.emptied:
        guessed = f", {work.guessed_calls} of them told by their place only" if work.guessed_calls else ""
        found.append(
            Notice(
                "empty-cache",
                f"{plural(work.emptied, 'call')} of empty_cache() in the recording "
                f"{'is' if work.emptied == 1 else 'are'} made at the same place{guessed}; "
                "calls that gave nothing back left no event",
            )
        )
    if work.has_private_pools:
        found.append(Notice("private-pools", "private pools (CUDA graphs, MemPool) are as they were recorded"))
    if not simulation.is_complete:
        found.append(
            Notice(
                "window",
                "memory from before the recording stays where it was: the setting is as if changed when it began",
            )
        )
    drawn = [scenario.prediction.draws for scenario in shown if scenario.prediction is not None]
    if drawn and max(drawn) > 1:
        found.append(
            Notice(
                "placement",
                f"where the driver puts segments decides between free blocks of one size: its rules, and "
                f"{max(drawn) - 1} draws of what else may use the address space; a range is given where they disagree",
            )
        )
    for scenario in shown:
        for name, since in available(scenario.change, simulation.at_most).items():
            found.append(Notice("not-in-this-torch", f"{name} is there since torch {since}"))
        if scenario.settings.garbage_collection_threshold and scenario.settings.limit is None:
            found.append(
                Notice(
                    "gc-needs-limit",
                    "garbage_collection_threshold does nothing without a limit: torch collects only where a memory "
                    "fraction is set",
                )
            )
    return tuple(dict.fromkeys(found))
