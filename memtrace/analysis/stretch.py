"""What happened in a stretch of events: what was allocated and what was freed in it, by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator import Replay
from memtrace.attribution import Attribution


@dataclass(frozen=True, slots=True)
class StretchRow:
    """Bytes and blocks of one category that were allocated and freed in the stretch."""

    category: str
    label: str
    allocated: int
    freed: int
    allocated_blocks: int
    freed_blocks: int

    @property
    def net(self) -> int:
        return self.allocated - self.freed


@dataclass(frozen=True, slots=True)
class Stretch:
    """The events `first` to `last`. `before` and `after` are the allocated bytes before the first of them and after the
    last; `after - before == allocated - freed`. `rows` sum to both, those that changed most first."""

    first: int
    last: int
    before: int
    after: int
    allocated: int
    freed: int
    allocated_blocks: int
    freed_blocks: int
    rows: tuple[StretchRow, ...]

    @property
    def net(self) -> int:
        return self.allocated - self.freed


def stretch_of(replay: Replay, attribution: Attribution, first: int, last: int) -> Stretch:
    """The events `first` to `last`, both in it (`first` at least 0)."""
    blocks = replay.lifetimes
    real = blocks.freed > blocks.born
    born = real & (blocks.born >= first) & (blocks.born <= last)
    freed = real & (blocks.freed >= first) & (blocks.freed <= last)
    there = real & (blocks.born < first) & (blocks.freed >= first)
    kinds = len(attribution.categories)
    sums = np.zeros((2, kinds), np.int64)
    counts = np.zeros((2, kinds), np.int64)
    for row, mask in enumerate((born, freed)):
        code = attribution.category[mask]
        np.add.at(sums[row], code, blocks.size[mask])
        counts[row] = np.bincount(code, minlength=kinds)
    rows = [
        StretchRow(
            attribution.categories[kind],
            attribution.category_labels[kind],
            *sums[:, kind].tolist(),
            *counts[:, kind].tolist(),
        )
        for kind in np.flatnonzero(counts.sum(axis=0)).tolist()
    ]
    rows.sort(key=lambda row: (-abs(row.net), -row.allocated, row.category))
    before, (new, gone) = int(blocks.size[there].sum()), sums.sum(axis=1).tolist()
    new_blocks, gone_blocks = counts.sum(axis=1).tolist()
    return Stretch(first, last, before, before + new - gone, new, gone, new_blocks, gone_blocks, tuple(rows))
