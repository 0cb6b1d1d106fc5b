"""What counters are sums of: amounts added at events. In numpy; `kernel` has the same natively."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
BOTH_POOLS = -1
"""Else a pool is 1 for the large one, 0 for the small one."""


def add_lifetimes(
    delta: Column, born: Column, end: Column, amount: Column | None, large: NDArray[np.bool_], pool: int
) -> None:
    """Adds an amount (None: 1) at every birth, and takes it away at the end if that is an event of the trace.

    `delta` has an entry for the time before the first event and one for each event. A block that ended before it was
    born (it was pending at the start) does not count.
    """
    rows = np.flatnonzero((end > born) & _in_pool(large, pool))
    np.add.at(delta, born[rows] + 1, 1 if amount is None else amount[rows])
    rows = rows[end[rows] < len(delta) - 1]
    np.subtract.at(delta, end[rows] + 1, 1 if amount is None else amount[rows])


def add_changes(
    delta: Column, event: NDArray[np.int32], amount: NDArray[np.signedinteger], large: NDArray[np.bool_], pool: int
) -> None:
    """Adds an amount at every event (-1: before the first) of a log of changes."""
    rows = np.flatnonzero(_in_pool(large, pool))
    np.add.at(delta, event[rows].astype(np.int64) + 1, amount[rows].astype(np.int64))


def _in_pool(large: NDArray[np.bool_], pool: int) -> NDArray[np.bool_]:
    return np.ones(len(large), np.bool_) if pool == BOTH_POOLS else large == bool(pool)
