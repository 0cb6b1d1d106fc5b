"""How little memory the recorded run could have done with: the limit is halved towards, over the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from memtrace.allocator.simulate import run as simulate
from memtrace.allocator.simulate.driver import Draw, RuledDriver
from memtrace.allocator.simulate.machine import NEVER, Outcome
from memtrace.allocator.simulate.requests import Call, Workload
from memtrace.allocator.simulate.rules import Rules
from memtrace.analysis.settings import Change
from memtrace.analysis.whatif import Progress, Simulation, sweep
from memtrace.errors import QuestionError
from memtrace.units import MiB

_GRAIN = 2 * MiB
_ENDLESS = 1 << 60
"""A limit that is never reached: with one, settings that need a limit are worth trying."""
_PROBES = 8
"""Lower limits that are tried once more: more memory can fail where less does not."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest limit in bytes under which every request is served: where the driver's rules put segments (or where
    they were recorded), and (`sure`) however they lay in the draws. `peak` is what is reserved then."""

    change: Change
    limit: int
    sure: int
    peak: int


@dataclass(frozen=True, slots=True)
class Fits:
    """`recorded` under the recorded setting; `best` under the one of those tried that needs least (maybe that one)."""

    recorded: Smallest
    best: Smallest
    tried: int


def fits(simulation: Simulation, progress: Progress | None = None) -> Fits:
    """The smallest limits of a recording whose self-check is exact (`Simulation.is_exact`).

    A setting is only looked into where it does better than the best before it.
    """
    changes = sweep(simulation, Change(limit=_ENDLESS))
    recorded = best = _smallest(simulation, Change())
    for number, change in enumerate(changes, 1):
        if progress is not None:
            progress(number, len(changes) + 1)
        best = _smaller(simulation, change, best) or best
    return Fits(recorded, best, len(changes) + 1)


def _smallest(simulation: Simulation, change: Change) -> Smallest:
    """The smallest limit with a change."""
    finder = _Finder(simulation, change)
    return finder.answer(finder.smallest(0))


def serves(simulation: Simulation, change: Change, limit: int) -> bool:
    """Whether every request is served under a limit in bytes, however segments lie: more than the smallest can fail."""
    finder = _Finder(simulation, change)
    return limit >= finder.floor and all(finder.serves(limit, draw) for draw in range(finder.draws + 1))


def _smaller(simulation: Simulation, change: Change, best: Smallest) -> Smallest | None:
    """The same if it is below the best so far; None if not, which one run tells."""
    finder = _Finder(simulation, change)
    limit = finder.below(best.sure)
    answer = None if limit is None else finder.answer(limit)
    return answer if answer is not None and answer.sure < best.sure else None


class _Finder:
    """Runs of one setting under several limits."""

    def __init__(self, simulation: Simulation, change: Change) -> None:
        self._simulation = simulation
        self._change = change = replace(change, limit=None)
        assert simulation.check is not None, "asked only of what proved itself"
        self._check = simulation.check
        self._rules = change.applied(self._check.rules)
        self._flush = simulation.flushes(change)
        self._grain = _grain(simulation, self._rules)
        needs_draws = simulate.addresses_matter(simulation.work, self._rules)
        self.draws = simulation.draws if needs_draws else 0
        # torch holds a request against the limit, and then maps whole pages
        page = self._rules.large_page if self._rules.expandable else 0
        self.floor = max(_least(simulation.work, self._rules) - page, simulation.held_at_start, 1)

    def outcome(self, limit: int | None, draw: int) -> Outcome:
        """The run under a limit; draw 0 as recorded as far as it asks what was recorded."""
        simulation, rules = self._simulation, replace(self._rules, limit=limit)
        if draw == 0:
            found = simulate.predict(simulation.work, rules, self._check, simulation.moments, self._flush, draws=0)
            return found.outcome
        driver = RuledDriver(Draw(draw, simulation.moments))
        return simulate.run(simulation.work, rules, driver, self._flush)

    def serves(self, limit: int | None, draw: int) -> bool:
        """Whether every request is served."""
        return self.outcome(limit, draw).first_oom == NEVER

    def answer(self, limit: int) -> Smallest:
        """With the limit for the rules' own run, that for all draws."""
        sure = limit
        # more can fail where less does not: all have to serve the same limit
        while (draw := next((one for one in range(self.draws + 1) if not self.serves(sure, one)), None)) is not None:
            sure = self.smallest(draw, least=sure)
        return Smallest(self._change, limit, sure, self.outcome(sure, 0).reserved_peak)

    def smallest(self, draw: int, *, least: int = 0) -> int:
        """The smallest limit that serves, `least` being one that does not."""
        free = self.outcome(None, draw)
        if free.first_oom != NEVER:
            event = self._simulation.event_of(free.first_oom)
            raise QuestionError(f"no limit is enough: the driver has no room for what event {event:,} asks for")
        low = max(-(-self.floor // self._grain), least // self._grain + 1) - 1
        high = max(-(-free.proven // self._grain), low + 1)
        while not self.serves(high * self._grain, draw):  # garbage is collected only under a limit
            high *= 2
        return self._between(low, high, draw)

    def below(self, limit: int) -> int | None:
        """The smallest limit that serves, for the rules' own run; None if it is not below `limit`."""
        high = -(-limit // self._grain) - 1
        low = -(-self.floor // self._grain) - 1
        return self._between(low, high, 0) if low < high and self.serves(high * self._grain, 0) else None

    def _between(self, low: int, high: int, draw: int) -> int:
        """Bytes of the smallest limit above `low` grains, `high` being one that serves."""
        high = self._halved(low, high, draw)
        for probe in np.unique(np.linspace(low, high, _PROBES + 2, dtype=np.int64)[1:-1]).tolist():
            if low < probe < high and self.serves(probe * self._grain, draw):
                high = self._halved(low, probe, draw)
                break
        return high * self._grain

    def _halved(self, low: int, high: int, draw: int) -> int:
        """Between a limit that cannot do and one that does, in grains."""
        while high - low > 1:
            middle = (low + high) // 2
            if self.serves(middle * self._grain, draw):
                high = middle
            else:
                low = middle
        return high


def _least(work: Workload, rules: Rules) -> int:
    """The peak of what the program holds, rounded: no allocator does with less. (What waits for a stream can be waited
    for, and how much larger a block is than what was asked depends on the limit.)"""
    requests, start = work.requests, work.start
    size = work.block_size.copy()  # of what is private, or was there
    is_made = requests.call == Call.ALLOC
    size[requests.block[is_made]] = rules.rounded(requests.size)[is_made]
    is_got = is_made | (requests.call == Call.PRIVATE_ALLOC)
    is_freed = np.isin(requests.call, (Call.FREE_REQUESTED, Call.FREE, Call.PRIVATE_FREE_REQUESTED, Call.PRIVATE_FREE))
    held = int(start.block_size[~start.block_pending].sum()) + start.private_live
    return held + int(np.cumsum(size[requests.block] * (is_got.astype(np.int64) - is_freed)).max(initial=0))


def _grain(simulation: Simulation, rules: Rules) -> int:
    """What every amount of reserved memory is a multiple of: between two such limits nothing changes."""
    work = simulation.work
    private = work.requests.size[work.requests.call == Call.PRIVATE_SEGMENT]
    sizes = (*work.start.range_size.tolist(), *private.tolist(), work.start.private_reserved, rules.large_page)
    return math.gcd(_GRAIN, *sizes)
