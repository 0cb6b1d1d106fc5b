"""The allocator's own part of reserved memory at one moment, to the byte (contract.md, Categories).

reserved = requested by live blocks + rounding + slack + pending + stranded + releasable,
whole and for each pool of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.allocator.memory_map import UNKNOWN_POOL
from memtrace.allocator.sizes import round_sizes
from memtrace.analysis.residents import NO_SPAN, Residents, Units, residents_at, units_of

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes after one event. `free` in reserved memory is `stranded + releasable`."""

    requested: int
    rounding: int
    slack: int
    pending: int
    stranded: int
    releasable: int

    @property
    def reserved(self) -> int:
        return self.requested + self.rounding + self.slack + self.pending + self.stranded + self.releasable


TERMS = ("requested", "rounding", "slack", "pending", "stranded", "releasable")
"""The terms, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one pool of one stream has of the ledger. `pool` is `small` or `large`; `pool_id` as torch writes it, (0, 0)
    being the default one, the others private; None: nobody says which."""

    pool: str
    stream: int
    pool_id: PoolId | None
    ledger: Ledger


def ledger_at(replay: Replay, event: int) -> Ledger:
    """The ledger after `event` (-1: before the first)."""
    residents = residents_at(replay, event)
    return ledger_of(replay, residents, units_of(replay, residents))


def ledger_of(replay: Replay, residents: Residents, units: Units) -> Ledger:
    """The ledger of a moment."""
    terms = (*_block_terms(replay, residents), *span_terms(replay, residents, units))
    return Ledger(*(int(term.sum()) for term in terms))


def parts_of(replay: Replay, residents: Residents, units: Units, pools: Sequence[PoolId]) -> tuple[Part, ...]:
    """The ledger by pool and stream, largest first; it sums to the whole. `pools` as in `SnapshotData`."""
    keys, of_block, of_span = part_numbers(replay, residents)
    sums = np.zeros((len(TERMS), len(keys)), np.int64)
    blocks, spans = _block_terms(replay, residents), span_terms(replay, residents, units)
    for row, term in enumerate(blocks):
        np.add.at(sums[row], of_block, term)
    for row, term in enumerate(spans, start=len(blocks)):
        np.add.at(sums[row], of_span, term)
    parts = [
        Part(
            pool="large" if large else "small",
            stream=stream,
            pool_id=pools[pool] if 0 <= pool < len(pools) else None,
            ledger=Ledger(*column),
        )
        for (large, stream, pool), column in zip(keys, sums.T.tolist(), strict=True)
    ]
    return tuple(sorted(parts, key=lambda part: (-part.ledger.reserved, part.pool, part.stream, part.pool_id or ())))


def part_numbers(
    replay: Replay, residents: Residents
) -> tuple[list[tuple[int, int, int]], NDArray[np.int64], NDArray[np.int64]]:
    """The distinct (large, stream, pool), and the number of each resident's and of each span's. What lies in no segment
    has its own stream, and a pool that nobody says."""
    blocks, spans = replay.lifetimes, replay.spans
    lost = residents.span == NO_SPAN
    home, homeless = residents.span[~lost], residents.block[lost]
    unsaid = np.full(len(homeless), UNKNOWN_POOL, np.int64)
    large = np.concatenate([spans.large[home], blocks.large[homeless], spans.large[residents.spans]])
    stream = np.concatenate([spans.stream[home], blocks.stream[homeless], spans.stream[residents.spans]])
    pool = np.concatenate([spans.pool[home], unsaid, spans.pool[residents.spans]]).astype(np.int64)
    order = np.lexsort((pool, stream, large))
    starts = np.ones(len(order), np.bool_)
    columns = [column[order] for column in (large, stream, pool)]
    starts[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(starts) - 1
    keys = list(zip(*(column[starts].tolist() for column in columns), strict=True))
    of_block = np.empty(len(residents), np.int64)
    of_block[~lost], of_block[lost] = np.split(number[: len(residents)], [len(home)])
    return keys, of_block, number[len(residents) :]


def _block_terms(replay: Replay, residents: Residents) -> tuple[NDArray[np.int64], ...]:
    """Of each resident: requested, rounding, slack, pending."""
    blocks, live = replay.lifetimes, residents.live
    requested, size = blocks.requested[residents.block], blocks.size[residents.block]
    # a rule that changed while recording can leave a block below its size by today's rounding
    rounded = np.minimum(round_sizes(requested, replay.settings.divisions), size)
    rounding = np.maximum(rounded - requested, 0)
    slack = size - requested - rounding
    return (*(np.where(live, term, 0) for term in (requested, rounding, slack)), np.where(live, 0, size))


def span_terms(replay: Replay, residents: Residents, units: Units) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each span that torch holds: stranded and releasable, free bytes beside a block and those of units that no
    block touches."""
    blocks, spans = replay.lifetimes, replay.spans
    used = np.zeros(len(spans) + 1, np.int64)  # the last is NO_SPAN's
    np.add.at(used, residents.span, blocks.size[residents.block])
    stranded = np.zeros(len(spans), np.int64)
    np.add.at(stranded, units.span, units.free)
    rows = residents.spans
    free = np.maximum(spans.size[rows] - used[rows], 0)
    return stranded[rows], free - stranded[rows]
