"""Runs a workload: under its own settings, held against the recording, and under others, wherever segments may lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.result import Replay
from memtrace.allocator.simulate.driver import DivergedError, Draw, Driver, Moments, RecordedDriver, RuledDriver
from memtrace.allocator.simulate.machine import NEVER, Machine, Outcome
from memtrace.allocator.simulate.requests import Call, Reading, SegmentKind, Workload, workload
from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.model import SnapshotData

try:
    from memtrace.allocator.simulate import _machine
except ImportError:  # no C++ compiler when it was installed
    HAS_NATIVE = False
else:
    HAS_NATIVE = True

DRAWS = 20
"""Ways in which the rest of the process may have used the device, beside the rules alone."""
_LARGEST_LIMIT = 1 << 62
_LIMIT_STEPS = 64
"""Guesses at a limit that nobody named; each halves what is left of the possible ones."""

_READINGS = 64
"""Events that are read the other way, one run each."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The recorded settings simulated with the recorded addresses. `reason` (and `event`) say where the simulation
    parts from the recording; None: each placement and each segment event is the recorded one.

    `rules` are those that fit (the release of torch, and a limit under which garbage was collected, are found so if
    they are not known). `proven` and `refused` in bytes bracket the limit that the driver showed: see `Outcome`.
    """

    rules: Rules
    outcome: Outcome | None
    reason: str | None
    event: int | None

    @property
    def is_exact(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One setting simulated. `outcome`: segments where the driver's own rules put them, or where the recording has
    them; `low`, `high`: the reserved peak over all `draws` in bytes; `out_of_memory`: in how many of them a request
    fails."""

    rules: Rules
    outcome: Outcome
    low: int
    high: int
    draws: int
    out_of_memory: int
    as_recorded: bool

    @property
    def completes(self) -> bool:
        """Whether every request is served, however the segments lie: those, too, that failed in the recording."""
        return not self.out_of_memory


def run(
    work: Workload,
    rules: Rules,
    driver: Driver,
    flush_before: NDArray[np.bool_] | None = None,
    *,
    progress: Progress | None = None,
    native: bool | None = None,
) -> Outcome:
    """One run of a workload. `flush_before`: rows before which the cache is emptied (one more: after the last).
    `progress` hears of rows done, and of how many there are.

    `native`: True for the native machine (ImportError if it was not built), False for the reference in Python, None
    for the better one there is. They give the same.
    """
    if native and not HAS_NATIVE:
        raise ImportError("memtrace was installed without its native machine")
    if HAS_NATIVE and native is not False:
        return _machine.run(work, rules, driver, flush_before, progress)
    return Machine(work, rules, driver, flush_before, progress).run()


def unfit(replay: Replay) -> str | None:
    """Why a replay is no ground for a simulation; None: it is."""
    if not replay.events:
        return "the file has no trace, only the last state"
    if replay.conflicts:
        return "the trace contradicts itself, so what the program asked is not known"
    if replay.revised_sizes:
        return "the allocator's settings changed while it was recorded: no single setting explains the block sizes"
    return None


def checked(
    data: SnapshotData,
    replay: Replay,
    rules: Rules,
    ties: Sequence[Tie],
    limits: Sequence[int | None] = (None,),
    progress: Progress | None = None,
) -> tuple[Workload, SelfCheck]:
    """A replayed trace as a workload, and its self-check. What its events leave open is read the other way where the
    simulation parts from the recording over it."""
    work = workload(data, replay)
    check = self_check(work, rules, ties, limits, progress)
    for _ in range(_READINGS):
        other = None if check.is_exact else _read_otherwise(work, check)
        if other is None:
            break
        work = workload(data, replay, other)
        check = self_check(work, rules, ties, limits, progress)
    return work, check


def _read_otherwise(work: Workload, check: SelfCheck) -> Reading | None:
    """How to read the event at which the simulation parted, if that is open and was not tried."""
    reading, event = work.reading, check.event
    if event is None:
        return None
    if event in work.may_be_late and event not in reading.late:
        return replace(reading, late=reading.late | {event})
    if work.has_private_pools and event in _failed_events(work) and event not in reading.private:
        return replace(reading, private=reading.private | {event})
    return None


def self_check(
    work: Workload,
    rules: Rules,
    ties: Sequence[Tie],
    limits: Sequence[int | None] = (None,),
    progress: Progress | None = None,
) -> SelfCheck:
    """The recorded settings against the recording: with the first of `ties` (the releases of torch it may be of) and of
    `limits` that fits. Where garbage may have been collected under a limit that is not known, one is looked for."""
    best: SelfCheck | None = None
    for limit, tie in itertools.product(limits, ties):
        check = _compared(work, replace(rules, tie=tie, limit=limit), progress)[0]
        best = check if best is None or check.is_exact else best
        if check.is_exact:
            break
    assert best is not None, "there is always a rule to try"
    is_open = not best.is_exact or (best.rules.limit is None and _retries(best) > 0)
    if rules.collect_above and is_open:
        found = _with_limit(work, best.rules, progress)
        return found if found.is_exact else best
    return best


def _compared(work: Workload, rules: Rules, progress: Progress | None) -> tuple[SelfCheck, DivergedError | None, bool]:
    """The check; where it parted from the recording; and whether the driver had just refused then."""
    driver = _recorded_driver(work)
    try:
        outcome = run(work, rules, driver, progress=progress)
        driver.finish(len(work.requests) + 1)
    except DivergedError as error:
        refused = error.row in driver.refusals
        return SelfCheck(rules, None, error.reason, _event(work, error.row)), error, refused
    return _held_against(work, rules, outcome), None, False


def _failed_rows(work: Workload) -> NDArray[np.int64]:
    return np.flatnonzero(np.isin(work.requests.call, (Call.OOM, Call.PRIVATE_OOM)))


def _failed_events(work: Workload) -> NDArray[np.int64]:
    return work.requests.event[_failed_rows(work)]


def _recorded_driver(work: Workload) -> RecordedDriver:
    return RecordedDriver(work.recorded, _failed_rows(work).tolist())


def _held_against(work: Workload, rules: Rules, outcome: Outcome) -> SelfCheck:
    """Whether each block lies where it was recorded, with its size."""
    requests = work.requests
    stopped = outcome.stopped
    if stopped != NEVER:
        return SelfCheck(rules, outcome, "a request fails that was served in the recording", _event(work, stopped))
    rows = np.flatnonzero(requests.call == Call.ALLOC)
    block = requests.block[rows]
    wrong = (outcome.address[block] != work.address[block]) | (outcome.size[block] != work.block_size[block])
    if wrong.any():
        event = _event(work, int(rows[wrong.argmax()]))
        return SelfCheck(rules, outcome, "a block is put elsewhere than in the recording", event)
    failed = _failed_rows(work)
    if outcome.ooms != len(failed):
        return SelfCheck(
            rules, outcome, "a request is served that failed in the recording", _event(work, outcome.first_served)
        )
    return SelfCheck(rules, outcome, None, None)


def _event(work: Workload, row: int) -> int | None:
    return int(work.requests.event[row]) if row < len(work.requests) else None


def _with_limit(work: Workload, rules: Rules, progress: Progress | None) -> SelfCheck:
    """The limit under which garbage was collected as recorded, by halving what is possible: too low a limit collects
    what the recording kept, too high a one keeps what the recording gave back."""
    low = _highest_reserved(work)
    high = min(int(min(low / rules.collect_above, _LARGEST_LIMIT)), _LARGEST_LIMIT) + 1
    best = SelfCheck(rules, None, "no limit explains when garbage was collected", None)
    for _ in range(_LIMIT_STEPS):
        if low >= high:
            break
        limit = (low + high) // 2
        check, error, refused = _compared(work, replace(rules, limit=limit), progress)
        if error is None and not check.is_exact:
            break
        if check.is_exact and (best.outcome is None or _retries(check) < _retries(best)):
            best = check
        if check.is_exact and not _retries(check):
            break
        # what was collected may look like what a failed allocation gave back: a lower limit may explain more of it
        if check.is_exact or refused or (error is not None and error.is_missed):
            high = limit
        else:
            low = limit + 1
    return best


def _retries(check: SelfCheck) -> int:
    return 0 if check.outcome is None else check.outcome.retries


def _highest_reserved(work: Workload) -> int:
    """The highest that was reserved in the default pool."""
    recorded = work.recorded
    taken = np.isin(recorded.kind, (SegmentKind.ALLOC, SegmentKind.MAP))
    total = int(work.start.range_size.sum()) + work.start.private_reserved
    return total + int(np.cumsum(np.where(taken, recorded.size, -recorded.size)).max(initial=0))


def predict(
    work: Workload,
    rules: Rules,
    check: SelfCheck,
    moments: Moments,
    flush_before: NDArray[np.bool_] | None = None,
    *,
    draws: int = DRAWS,
    progress: Progress | None = None,
) -> Prediction:
    """What the allocator would have done under `rules`, and over how many ways for segments to lie.

    Where it does all that was recorded, segments lie as recorded. Where their addresses decide nothing (since torch
    2.12, and in expandable memory), one run tells.
    """
    if flush_before is None and _unlimited(rules) == _unlimited(check.rules):
        recorded = _as_recorded(work, rules, progress)
        if recorded is not None:
            peak = recorded.reserved_peak
            return Prediction(rules, recorded, peak, peak, 1, int(recorded.first_oom != NEVER), as_recorded=True)
    count = draws if addresses_matter(work, rules) else 0
    outcomes = _drawn(work, rules, moments, flush_before, count, progress)
    first = next(outcomes)
    low = high = first.reserved_peak
    failed = int(first.first_oom != NEVER)
    for outcome in outcomes:
        low, high = min(low, outcome.reserved_peak), max(high, outcome.reserved_peak)
        failed += outcome.first_oom != NEVER
    return Prediction(rules, first, low, high, count + 1, failed, as_recorded=False)


def _unlimited(rules: Rules) -> Rules:
    """The rules without a limit, and without what does nothing where there is none."""
    return replace(rules, limit=None, collect_above=0.0)


def _as_recorded(work: Workload, rules: Rules, progress: Progress | None) -> Outcome | None:
    """The run with segments where they were recorded; None where it asks for others, or for one that the driver refused
    in the recording and the limit does not."""
    driver = _recorded_driver(work)
    try:
        outcome = run(work, rules, driver, progress=progress)
        driver.finish(outcome.stopped if outcome.stopped != NEVER else len(work.requests) + 1)
    except DivergedError:
        return None
    return outcome if outcome.refused is None else None


def addresses_matter(work: Workload, rules: Rules) -> bool:
    """Whether where the driver puts a segment can decide anything."""
    return rules.tie == Tie.ADDRESS and not (rules.expandable and bool(work.start.range_expandable.all()))


def _drawn(
    work: Workload,
    rules: Rules,
    moments: Moments,
    flush_before: NDArray[np.bool_] | None,
    draws: int,
    progress: Progress | None,
) -> Iterator[Outcome]:
    for number in itertools.count():
        if number > draws:
            return
        part = None if progress is None else _part(progress, number, draws + 1)
        yield run(work, rules, RuledDriver(Draw(number, moments)), flush_before, progress=part)


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """The progress of one of several runs, as that of all."""

    def hear(done: int, total: int) -> None:
        progress(number * total + done, parts * total)

    return hear
