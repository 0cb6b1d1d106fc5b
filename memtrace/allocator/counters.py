"""torch's memory counters over time, from a replay: the value after every event, and the totals.

Names are those of `torch.cuda.memory_stats()` (snapshot-format 5.2): counts `allocation segment active
inactive_split`, bytes `allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes`,
each for `all`, `small_pool` and `large_pool`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.result import Replay
from memtrace.model import Action, Trace

COUNTERS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")

Column = NDArray[np.int64]


def changes(replay: Replay, counter: str, pool: str = "all") -> Column:
    """What each event changes: entry 0 is the state before the recording, entry e + 1 is event e."""
    delta = np.zeros(replay.events + 1, np.int64)
    if counter in ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes"):
        log = replay.segments if counter in ("segment", "reserved_bytes") else replay.splits
        amount = log.count if counter in ("segment", "inactive_split") else log.bytes
        rows = _in_pool(log.large, pool)
        np.add.at(delta, log.event[rows] + 1, amount[rows])
        return delta
    blocks = replay.lifetimes
    rows = _in_pool(blocks.large, pool)
    amount = {
        "allocation": np.ones(len(blocks), np.int64),
        "active": np.ones(len(blocks), np.int64),
        "allocated_bytes": blocks.size,
        "active_bytes": blocks.size,
        "requested_bytes": blocks.requested,
    }[counter][rows]
    born = blocks.born[rows]
    end = (blocks.freed if counter in ("allocation", "allocated_bytes") else blocks.died)[rows]
    began = end > born  # a block pending at the start was freed before it: it is not allocated in the window
    np.add.at(delta, born[began] + 1, amount[began])
    ended = began & (end < replay.events)
    np.subtract.at(delta, end[ended] + 1, amount[ended])
    return delta


def series(replay: Replay, counter: str, pool: str = "all") -> Column:
    """The counter over time: entry 0 before the recording, entry e + 1 after event e. Counts or bytes."""
    return np.cumsum(changes(replay, counter, pool))


def each_series(replay: Replay) -> Iterator[tuple[str, Column]]:
    """(`counter.pool`, its changes) for all 27."""
    for counter in COUNTERS:
        for pool in POOLS:
            yield f"{counter}.{pool}", changes(replay, counter, pool)


def stats(replay: Replay, trace: Trace) -> dict[str, int]:
    """Every number of `torch.cuda.memory_stats()` that follows from the file, under torch's flattened names.

    For a window (not complete) only `.current` and `.peak` (the highest value in the window): totals predate it.
    """
    found: dict[str, int] = {}
    for name, delta in each_series(replay):
        values = np.cumsum(delta)
        found[f"{name}.current"] = int(values[-1])
        found[f"{name}.peak"] = int(values.max())
        if replay.complete:
            found[f"{name}.allocated"] = int(delta[delta > 0].sum())
            found[f"{name}.freed"] = -int(delta[delta < 0].sum())
    if replay.complete:
        counts = np.bincount(trace.action, minlength=len(Action))
        found["num_device_alloc"] = int(counts[Action.SEGMENT_ALLOC] + counts[Action.SEGMENT_MAP])
        found["num_device_free"] = int(counts[Action.SEGMENT_FREE] + counts[Action.SEGMENT_UNMAP])
        found["num_ooms"] = int(counts[Action.OOM])
        found |= _oversize(replay)
    return found


def _oversize(replay: Replay) -> dict[str, int]:
    """`oversize_allocations` and `oversize_segments`: blocks and segments of at least `max_split_size`."""
    limit = replay.settings.max_split_size
    blocks, spans = replay.lifetimes, replay.spans
    large_blocks, large_spans = blocks.size >= limit, (spans.size >= limit) & ~spans.expandable
    found = {}
    for name, born, end in (
        ("oversize_allocations", blocks.born[large_blocks], blocks.freed[large_blocks]),
        ("oversize_segments", spans.born[large_spans], spans.died[large_spans]),
    ):
        delta = np.zeros(replay.events + 1, np.int64)
        np.add.at(delta, born + 1, 1)
        np.subtract.at(delta, end[end < replay.events] + 1, 1)
        values = np.cumsum(delta)
        found[f"{name}.current"] = int(values[-1])
        found[f"{name}.peak"] = int(values.max())
        found[f"{name}.allocated"] = len(born)
        found[f"{name}.freed"] = int((end < replay.events).sum())
    return found


def _in_pool(large: NDArray[np.bool_], pool: str) -> NDArray[np.bool_] | slice:
    if pool == "all":
        return slice(None)
    return large if pool == "large_pool" else ~large
