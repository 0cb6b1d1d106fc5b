"""Free memory inside torch's segments at one moment, hole by hole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.allocator.sizes import SMALL_SEGMENT
from memtrace.model.frozen import FrozenColumns


@dataclass(frozen=True, slots=True, eq=False)
class Holes(FrozenColumns):
    """One row a hole: a gap that ends only at blocks (live or pending) and at the ends of its segment, in expandable
    memory of its mapped range.

    `size` in bytes; `large` and `stream` are its segment's; `releasable` is how many of the bytes torch can give back
    to the driver: all, where the hole is a whole segment, whole pages in expandable memory, else none.
    """

    size: NDArray[np.int64]
    large: NDArray[np.bool_]
    stream: NDArray[np.uint64]
    releasable: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def of_pool(self, *, large: bool) -> Holes:
        """Those of the large pool, or of the small one."""
        return self._rows(self.large == large)

    def of_stream(self, stream: int) -> Holes:
        """Those of one stream's segments."""
        return self._rows(self.stream == np.uint64(stream))

    def of_others(self, stream: int) -> Holes:
        """Those of all other streams' segments."""
        return self._rows(self.stream != np.uint64(stream))

    @property
    def total(self) -> int:
        return int(self.size.sum())

    @property
    def largest(self) -> int:
        return int(self.size.max(initial=0))

    def _rows(self, rows: NDArray[np.bool_]) -> Holes:
        return Holes(self.size[rows], self.large[rows], self.stream[rows], self.releasable[rows])


def holes_at(replay: Replay, event: int, pools: Sequence[tuple[int, int]] = ((0, 0),)) -> Holes:
    """The holes after `event` (-1: before the first) in segments of the default pool. `pools`: as in `SnapshotData`; a
    segment of which nobody says the pool is the default one's."""
    spans = replay.spans
    gaps = gaps_among(replay, np.flatnonzero(spans.alive_at(event)), np.flatnonzero(replay.lifetimes.active_at(event)))
    default = spans.pool[gaps.span] < 0
    default |= np.isin(spans.pool[gaps.span], [number for number, pool in enumerate(pools) if pool == (0, 0)])
    begin, stop, row = (column[default] for column in gaps)
    start = spans.address[row]
    return Holes(
        size=(stop - begin).astype(np.int64),
        large=spans.large[row],
        stream=spans.stream[row],
        releasable=_releasable(
            (begin - start).astype(np.int64),
            (stop - start).astype(np.int64),
            spans.size[row],
            np.where(spans.large[row], replay.settings.large_page, SMALL_SEGMENT),
            spans.expandable[row],
        ),
    )


class Gaps(NamedTuple):
    """Columns of equal length: free memory from address `begin` up to `stop` (not in it), in that row of `Spans`."""

    begin: NDArray[np.uint64]
    stop: NDArray[np.uint64]
    span: NDArray[np.int64]


def gaps_among(replay: Replay, alive: NDArray[np.int64], used: NDArray[np.int64]) -> Gaps:
    """What the blocks `used` (rows of `Lifetimes`) leave free in the segments `alive` (rows of `Spans`)."""
    blocks, spans = replay.lifetimes, replay.spans
    alive = alive[np.argsort(spans.address[alive], kind="stable")]
    start = spans.address[alive]
    end = start + spans.size[alive].astype(np.uint64)
    used = used[np.argsort(blocks.address[used], kind="stable")]
    first = blocks.address[used]
    reached = np.maximum.accumulate(first + blocks.size[used].astype(np.uint64))
    reached = np.concatenate([np.zeros(1, np.uint64), reached])
    home = np.searchsorted(start, first, side="right") - 1
    inside = np.flatnonzero(home >= 0)
    inside = inside[first[inside] < end[home[inside]]]
    # before each block, then behind the last one of each segment
    begins = [np.maximum(reached[:-1][inside], start[home[inside]]), np.maximum(reached[_before(first, end)], start)]
    ends = [first[inside], end]
    place = np.concatenate([home[inside], np.arange(len(alive))])
    begin, stop = np.concatenate(begins), np.concatenate(ends)
    kept = stop > begin
    return Gaps(begin[kept], stop[kept], alive[place[kept]])


def _before(first: NDArray[np.uint64], end: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many blocks begin before each of these addresses."""
    return np.asarray(np.searchsorted(first, end, side="left"), np.int64)


def _releasable(
    begin: NDArray[np.int64],
    stop: NDArray[np.int64],
    whole: NDArray[np.int64],
    page: NDArray[np.int64],
    expandable: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Bytes of holes, given as offsets in their segments of `whole` bytes, that can go back to the driver."""
    pages = np.maximum(stop // page - (begin + page - 1) // page, 0) * page
    return np.where(expandable, pages, np.where(stop - begin == whole, whole, 0))
