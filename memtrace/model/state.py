"""The allocator's memory map at the moment of the snapshot: segments, tiled by blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns

REQUEST_UNKNOWN = -1
"""`Blocks.requested` where the file does not say (torch 1.13)."""


class BlockState(IntEnum):
    """What a block is doing."""

    INACTIVE = 0
    ALLOCATED = 1
    PENDING = 2


@dataclass(frozen=True, slots=True, eq=False)
class Segments(FrozenColumns):
    """One row a segment (expandable: one contiguous mapped range), sorted by device and address.

    `size` is bytes taken from the driver; `large` tells the pool; `pool` indexes `SnapshotData.pools`.
    The blocks of segment `i` are rows `first_block[i]:first_block[i + 1]` of `Blocks`.
    """

    device: NDArray[np.int32]
    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    stream: NDArray[np.uint64]
    large: NDArray[np.bool_]
    pool: NDArray[np.int32]
    expandable: NDArray[np.bool_]
    stack: NDArray[np.int32]
    first_block: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks(FrozenColumns):
    """One row a block, in the order of the segments. `requested` is meaningless for inactive blocks."""

    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    requested: NDArray[np.int64]
    state: NDArray[np.uint8]
    stack: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.address)
