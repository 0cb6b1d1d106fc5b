"""torch's memory counters over time, from a replay: the value after every event, and the totals.

Names are those of `torch.cuda.memory_stats()` (snapshot-format 5.2): counts `allocation segment active
inactive_split`, bytes `allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes`,
each for `all`, `small_pool` and `large_pool`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.kernel import kernel
from memtrace.allocator.result import Replay
from memtrace.allocator.sums import BOTH_POOLS
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
_POOL = {"all": BOTH_POOLS, "small_pool": 0, "large_pool": 1}

Column = NDArray[np.int64]


def changes(replay: Replay, counter: str, pool: str = "all") -> Column:
    """What each event changes: entry 0 is the state before the recording, entry e + 1 is event e."""
    delta = np.zeros(replay.events + 1, np.int64)
    which, add = _POOL[pool], kernel()
    if counter in ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes"):
        log = replay.segments if counter in ("segment", "reserved_bytes") else replay.splits
        amount = log.count if counter in ("segment", "inactive_split") else log.bytes
        add.add_changes(delta, log.event, amount, log.large, which)
        return delta
    blocks = replay.lifetimes
    end = blocks.freed if counter in ("allocation", "allocated_bytes") else blocks.died
    size = {"requested_bytes": blocks.requested, "allocation": None, "active": None}.get(counter, blocks.size)
    add.add_lifetimes(delta, blocks.born, end, size, blocks.large, which)
    return delta


def series(replay: Replay, counter: str, pool: str = "all") -> Column:
    """The counter over time: entry 0 before the recording, entry e + 1 after event e. Counts or bytes."""
    return _running(changes(replay, counter, pool))


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
        more = int(delta.sum(where=delta > 0)) if replay.complete else 0
        less = -int(delta.sum(where=delta < 0)) if replay.complete else 0
        values = _running(delta)
        found[f"{name}.current"] = int(values[-1])
        found[f"{name}.peak"] = int(values.max())
        if replay.complete:
            found[f"{name}.allocated"] = more
            found[f"{name}.freed"] = less
    if replay.complete:
        found["num_device_alloc"] = trace_count(trace, Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
        found["num_device_free"] = trace_count(trace, Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
        found["num_ooms"] = trace_count(trace, Action.OOM)
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
        values = _running(delta)
        found[f"{name}.current"] = int(values[-1])
        found[f"{name}.peak"] = int(values.max())
        found[f"{name}.allocated"] = len(born)
        found[f"{name}.freed"] = int((end < replay.events).sum())
    return found


def trace_count(trace: Trace, *kinds: Action) -> int:
    """How many events of these kinds there are."""
    return sum(int(np.count_nonzero(trace.action == kind)) for kind in kinds)


def _running(delta: Column) -> Column:
    """The sums up to each entry, in the place of the entries: such a column is as long as the trace."""
    return np.cumsum(delta, out=delta)
