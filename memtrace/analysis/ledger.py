"""The allocator's own part of reserved memory at one moment, to the byte (contract.md, Categories).

reserved = requested by live blocks + rounding + slack + pending + stranded + releasable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.allocator.sizes import SMALL_SEGMENT, round_sizes


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


def ledger_at(replay: Replay, event: int) -> Ledger:
    """The ledger after `event` (-1: before the first)."""
    blocks = replay.lifetimes
    active = blocks.active_at(event)
    live = active & (event < blocks.freed)
    requested, size = blocks.requested[live], blocks.size[live]
    # a rule that changed while recording can leave a block below its size by today's rounding
    rounded = np.minimum(round_sizes(requested, replay.settings.divisions), size)
    rounding = int(np.maximum(rounded - requested, 0).sum())
    stranded, releasable = _free_at(replay, event, active)
    return Ledger(
        requested=int(requested.sum()),
        rounding=rounding,
        slack=int((size - requested).sum()) - rounding,
        pending=int(blocks.size[active & ~live].sum()),
        stranded=stranded,
        releasable=releasable,
    )


def _free_at(replay: Replay, event: int, active: NDArray[np.bool_]) -> tuple[int, int]:
    """(stranded, releasable): free bytes beside a block, and free bytes of whole segments or whole pages."""
    blocks, spans = replay.lifetimes, replay.spans
    alive = spans.alive_at(event)
    used = np.zeros(len(spans), np.int64)
    fixed = active & (blocks.span >= 0)
    np.add.at(used, blocks.span[fixed], blocks.size[fixed])
    plain = alive & ~spans.expandable
    free = np.maximum(spans.size - used, 0)[plain]
    empty = used[plain] == 0
    stranded, releasable = int(free[~empty].sum()), int(free[empty].sum())
    loose = active & (blocks.span < 0)
    starts = blocks.address[loose].astype(np.int64)
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + blocks.size[loose])[order]
    for row in np.flatnonzero(alive & spans.expandable).tolist():
        page = replay.settings.large_page if spans.large[row] else SMALL_SEGMENT
        start, size = int(spans.address[row]), int(spans.size[row])
        inside = slice(*np.searchsorted(starts, [start, start + size]))
        free_bytes = size - int((ends[inside] - starts[inside]).sum())
        whole = _free_pages(starts[inside] - start, ends[inside] - start, size, page)
        releasable += whole
        stranded += free_bytes - whole
    return stranded, releasable


def _free_pages(starts: NDArray[np.int64], ends: NDArray[np.int64], size: int, page: int) -> int:
    """Bytes of the pages of a range that no block touches; offsets from the start of the range."""
    gap_starts = np.concatenate([np.zeros(1, np.int64), ends])
    gap_ends = np.concatenate([starts, np.full(1, size, np.int64)])
    first = (gap_starts + page - 1) // page
    last = gap_ends // page
    return int(np.maximum(last - first, 0).sum()) * page
