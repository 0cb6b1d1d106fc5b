"""Our counters against torch's own (contract.md, `verify --truth`), at the end and at the moment recording began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import COUNTERS, POOLS, Replay, stats
from memtrace.allocator.counters import Column, each_series
from memtrace.errors import SourceError
from memtrace.io.sidecar import Start
from memtrace.model import SnapshotData

KINDS = ("current", "peak", "allocated", "freed")
TOTALS = ("num_device_alloc", "num_device_free", "num_ooms")
NAMES = (
    *(f"{counter}.{pool}.{kind}" for counter in COUNTERS for pool in POOLS for kind in KINDS),
    *TOTALS,
)
"""The 111 numbers that are compared."""


class BadTruthError(SourceError):
    """The truth file cannot be compared with."""

    code = "bad-truth"


@dataclass(frozen=True, slots=True)
class Difference:
    """One number that is not equal, and why: `difference`, `reset` or `before_window`."""

    name: str
    ours: int
    truth: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """One device held against itself and, with a truth, against torch. `reset_events` are the first and last event
    at which one reset of all peaks explains every peak in the truth. `start_compared` and `start_equal` count the
    numbers of the moment when recording began; in `different` their names begin with `start.`."""

    device: int
    events: int
    complete: bool
    conflicts: int
    stats: dict[str, int]
    compared: int
    equal: int
    reset_events: tuple[int, int] | None
    different: tuple[Difference, ...]
    start_compared: int = 0
    start_equal: int = 0

    @property
    def failed(self) -> bool:
        return self.conflicts > 0 or any(item.why == "difference" for item in self.different)


def verify(
    data: SnapshotData, replay: Replay, truth: Mapping[str, object] | None = None, start: Start | None = None
) -> Verdict:
    """The verdict on one device; `truth` is `torch.cuda.memory_stats()` of when the snapshot was taken, `start` what
    was noted when recording began.

    Raises BadTruthError when the truth misses one of the numbers that must be compared.
    """
    ours = stats(replay, data.trace(replay.device))
    names = [] if truth is None else [name for name in NAMES if name in ours]
    theirs = {} if truth is None else {name: _number(truth, name) for name in names}
    unequal = [name for name in names if ours[name] != theirs[name]]
    reset = _reset_events(replay, theirs) if _hints_at_reset(unequal, ours, theirs) else None
    different = tuple(
        Difference(name, ours[name], theirs[name], _why(name, ours[name], theirs[name], replay.complete, reset))
        for name in unequal
    )
    at_start = [] if start is None else _at_start(replay, start)
    wrong_at_start = tuple(item for item in at_start if item.ours != item.truth)
    return Verdict(
        device=replay.device,
        events=replay.events,
        complete=replay.complete,
        conflicts=len(replay.conflicts),
        stats=ours,
        compared=len(names),
        equal=len(names) - len(unequal),
        reset_events=reset,
        different=different + wrong_at_start,
        start_compared=len(at_start),
        start_equal=len(at_start) - len(wrong_at_start),
    )


def _at_start(replay: Replay, start: Start) -> list[Difference]:
    """The state before the trace, as we find it by walking back, beside torch's own; equal or not.

    The size of a block from before the recording may be known only within a bound: what that bound explains is
    `before_window`.
    """
    if not replay.events:
        return []
    before = {name: int(delta[0]) for name, delta in each_series(replay)}
    blocks = replay.lifetimes
    unsure = (blocks.born < 0) & (blocks.slack_bound > 0)
    found = []
    for name, ours in before.items():
        truth = None if start.stats is None else start.stats.get(f"{name}.current")
        if truth is not None:
            counter, pool = name.split(".")
            bounds = blocks.slack_bound[unsure & _in_pool(blocks.large, pool)]
            why = "before_window" if _is_within(counter, ours - truth, bounds) else "difference"
            found.append(Difference(f"start.{name}.current", ours, truth, why))
    if start.map is not None:
        bounds = blocks.slack_bound[unsure]
        for name, truth in start.map._asdict().items():
            counter = {"active_blocks": "active"}.get(name, name)
            ours = before[f"{counter}.all"]
            why = "before_window" if _is_within(counter, ours - truth, bounds) else "difference"
            found.append(Difference(f"start.segments.{name}", ours, truth, why))
    return found


def _in_pool(large: NDArray[np.bool_], pool: str) -> NDArray[np.bool_]:
    return np.ones(len(large), np.bool_) if pool == "all" else large == (pool == "large_pool")


def _is_within(counter: str, surplus: int, bounds: Column) -> bool:
    """Whether blocks larger than we take them for, each by at most its bound, explain what we have too much."""
    if counter in ("allocated_bytes", "active_bytes"):
        return 0 <= -surplus <= int(bounds.sum())
    if counter == "inactive_split_bytes":
        return 0 <= surplus <= int(bounds.sum())
    return counter == "inactive_split" and 0 <= surplus <= len(bounds)


def _number(truth: Mapping[str, object], name: str) -> int:
    value = truth.get(name)
    if type(value) is not int:
        raise BadTruthError(
            f"the truth has no integer {name!r}", hint="Save torch.cuda.memory_stats() under the key 'stats' as JSON."
        )
    return value


def _hints_at_reset(unequal: list[str], ours: Mapping[str, int], truth: Mapping[str, int]) -> bool:
    """Whether what differs can be taken for a reset of the peaks: nothing but peaks, and more than a coincidence.

    One count that is off by one fits *some* event in many traces, so it is no evidence of a reset.
    """
    if not unequal or any(not name.endswith(".peak") for name in unequal):
        return False
    return len(unequal) > 1 or abs(ours[unequal[0]] - truth[unequal[0]]) > 1


def _why(name: str, ours: int, truth: int, complete: bool, reset: tuple[int, int] | None) -> str:
    if not name.endswith(".peak"):
        return "difference"
    if reset is not None:
        return "reset"
    return "before_window" if not complete and truth > ours else "difference"


def _reset_events(replay: Replay, truth: Mapping[str, int]) -> tuple[int, int] | None:
    """First and last event after which one reset gives exactly the peaks of the truth, for every counter at once."""
    first, last = 0, replay.events - 1
    for name, delta in each_series(replay):
        found = _events_with_peak(np.cumsum(delta)[1:], truth[f"{name}.peak"])
        if found is None:
            return None
        first, last = max(first, found[0]), min(last, found[1])
    return (first, last) if first <= last else None


def _events_with_peak(values: Column, peak: int) -> tuple[int, int] | None:
    """The events r for which the highest value from r on is `peak`: always one run of events."""
    highest_from = np.maximum.accumulate(values[::-1])[::-1]
    found = np.flatnonzero(highest_from == peak)
    return (int(found[0]), int(found[-1])) if len(found) else None
