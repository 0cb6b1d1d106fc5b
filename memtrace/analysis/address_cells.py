"""A segment from its first byte to its last: blocks and gaps, and the same in the cells of a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns

NO_BLOCK = -1


class CellState(IntEnum):
    """What the bytes of a cell are; `MIXED`: not all the same."""

    FREE = 0
    ALLOCATED = 1
    PENDING = 2
    MIXED = 3


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(FrozenColumns):
    """A segment in order of address: its bytes from `offset[i]` up to `offset[i + 1]` are those of `block[i]`, a row of
    `Lifetimes`, `is_live` or pending; or (`NO_BLOCK`) free.

    Each byte is one block's. Where blocks overlap, which only a recording that contradicts itself has, it is that of
    the lower address.
    """

    offset: NDArray[np.int64]
    block: NDArray[np.int64]
    is_live: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True, eq=False)
class Cells(FrozenColumns):
    """A segment in equal cells: cell i is its bytes from `offset[i]` up to `offset[i + 1]`, and
    `allocated[i] + pending[i] + free[i]` are all of them. `block` is the row of `Lifetimes` that has most of the cell
    (`NO_BLOCK`: it is free throughout), `state` a `CellState`."""

    offset: NDArray[np.int64]
    allocated: NDArray[np.int64]
    pending: NDArray[np.int64]
    free: NDArray[np.int64]
    block: NDArray[np.int64]
    state: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.block)


def pieces_of(
    size: int, begin: NDArray[np.int64], end: NDArray[np.int64], block: NDArray[np.int64], live: NDArray[np.bool_]
) -> Pieces:
    """The pieces of a segment of `size` bytes, of blocks in order of address, given by offsets in it."""
    end = np.minimum(end, size)
    reached = np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(end)])[:-1]
    begin = np.maximum(begin, np.maximum(reached, 0))
    kept = end > begin
    begin, end, block, live = begin[kept], end[kept], block[kept], live[kept]
    gap_begin, gap_end = np.concatenate([[0], end]), np.concatenate([begin, [size]])
    gaps = gap_end > gap_begin
    none = np.full(int(gaps.sum()), NO_BLOCK, np.int64)
    offset = np.concatenate([begin, gap_begin[gaps]])
    order = np.argsort(offset, kind="stable")
    return Pieces(
        offset=np.append(offset[order], size),
        block=np.concatenate([block, none])[order],
        is_live=np.concatenate([live, np.zeros(len(none), np.bool_)])[order],
    )


def cells_of(pieces: Pieces, width: int) -> Cells:
    """The pieces in `width` cells (at least 1), equal but for a byte: none of them vanishes, however small."""
    size = int(pieces.offset[-1])
    edge = np.array([size * place // width for place in range(width + 1)], np.int64)
    cuts = np.unique(np.concatenate([edge, pieces.offset]))
    length, cuts = np.diff(cuts), cuts[:-1]
    cell = np.searchsorted(edge, cuts, side="right") - 1
    piece = np.searchsorted(pieces.offset, cuts, side="right") - 1
    block = pieces.block[piece]
    live, gap = pieces.is_live[piece], block == NO_BLOCK
    allocated, pending, free = (_sums(cell, length, width, rows) for rows in (live, ~live & ~gap, gap))
    most = np.full(width, NO_BLOCK, np.int64)
    order = np.lexsort((-cuts, length, cell))  # the last of each cell stays: of equals the lowest
    order = order[~gap[order]]
    most[cell[order]] = block[order]
    state = np.where(allocated > 0, CellState.ALLOCATED, CellState.FREE)
    state = np.where(pending > 0, CellState.PENDING, state)
    mixed = (allocated > 0).astype(np.int64) + (pending > 0) + (free > 0) > 1
    return Cells(edge, allocated, pending, free, most, np.where(mixed, CellState.MIXED, state).astype(np.uint8))


def _sums(cell: NDArray[np.int64], length: NDArray[np.int64], width: int, rows: NDArray[np.bool_]) -> NDArray[np.int64]:
    total = np.zeros(width, np.int64)
    np.add.at(total, cell[rows], length[rows])
    return total
