"""What a pass over the events writes down: blocks, segments, counter changes. Lists while it runs, then columns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.memory_map import MemoryMap, Range
from memtrace.allocator.result import Changes, Lifetimes, Spans

BEFORE = -1
"""Event index of what happened before the recording."""


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """One row a block, in order of birth. Events are indices; the number of events means not in this recording."""

    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    requested: NDArray[np.int64]
    born: NDArray[np.int64]
    freed: NDArray[np.int64]
    died: NDArray[np.int64]
    owner: NDArray[np.int32]
    stack: NDArray[np.int32]
    stream: NDArray[np.uint64]
    slack_bound: NDArray[np.int64]


@dataclass(slots=True)
class BlockLog:
    """`BlockColumns` while they grow."""

    address: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    requested: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    died: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    slack_bound: list[int] = field(default_factory=list)

    def columns(self) -> BlockColumns:
        """What was written so far."""
        return BlockColumns(
            address=np.array(self.address, np.uint64),
            size=np.array(self.size, np.int64),
            requested=np.array(self.requested, np.int64),
            born=np.array(self.born, np.int64),
            freed=np.array(self.freed, np.int64),
            died=np.array(self.died, np.int64),
            owner=np.array(self.owner, np.int32),
            stack=np.array(self.stack, np.int32),
            stream=np.array(self.stream, np.uint64),
            slack_bound=np.array(self.slack_bound, np.int64),
        )


@dataclass(slots=True)
class SpanLog:
    """`Spans` while they grow: an entry a range for as long as its extent did not change."""

    address: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    large: list[bool] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)
    expandable: list[bool] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    died: list[int] = field(default_factory=list)

    def add(self, item: Range, born: int, still: int) -> int:
        self.address.append(item.start)
        self.size.append(item.size)
        self.large.append(item.large)
        self.stream.append(item.stream)
        self.pool.append(item.pool)
        self.expandable.append(item.expandable)
        self.stack.append(item.stack)
        self.born.append(born)
        self.died.append(still)
        return len(self.address) - 1

    def columns(self) -> Spans:
        """What was written so far."""
        return Spans(
            address=np.array(self.address, np.uint64),
            size=np.array(self.size, np.int64),
            large=np.array(self.large, np.bool_),
            stream=np.array(self.stream, np.uint64),
            pool=np.array(self.pool, np.int32),
            expandable=np.array(self.expandable, np.bool_),
            stack=np.array(self.stack, np.int32),
            born=np.array(self.born, np.int64),
            died=np.array(self.died, np.int64),
        )


@dataclass(slots=True)
class ChangeLog:
    """`Changes` while they grow: at `event`, `count` and `bytes` by that much, in the large pool or the small."""

    event: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    large: list[bool] = field(default_factory=list)

    def add(self, event: int, count: int, size: int, large: bool) -> None:
        self.event.append(event)
        self.count.append(count)
        self.bytes.append(size)
        self.large.append(large)

    def columns(self) -> Changes:
        """What was written so far."""
        return Changes(
            np.array(self.event, np.int32),
            np.array(self.count, np.int8),
            np.array(self.bytes, np.int64),
            np.array(self.large, np.bool_),
        )


@dataclass(slots=True)
class Run:
    """What one pass recorded. `owner_large[owner]` is the pool of a block's owner."""

    blocks: BlockColumns
    spans: Spans
    splits: Changes
    segments: Changes
    owner_large: NDArray[np.bool_]
    owner_span: NDArray[np.int32]
    """The span of each owner; -1 for expandable memory, whose extent changes."""
    at_end: MemoryMap
    born_at_end: NDArray[np.int64]
    """The event that each block of `at_end` was born at."""
    revised_sizes: int = 0
    """Blocks whose size the recorded settings do not explain."""


def lifetimes_of(run: Run) -> Lifetimes:
    """The blocks of a run, in order of birth; its columns are not copied."""
    log = run.blocks
    return Lifetimes(
        address=log.address,
        size=log.size,
        requested=log.requested,
        born=log.born,
        freed=log.freed,
        died=log.died,
        stack=log.stack,
        stream=log.stream,
        large=run.owner_large[log.owner],
        span=run.owner_span[log.owner],
        slack_bound=log.slack_bound,
    )


def spans_of(run: Run, at_end: MemoryMap, still: int) -> Spans:
    """The spans of a run; where no event said which private pool, the final map does for those that live to the end."""
    spans = run.spans
    known = at_end.ranges["start"]
    unsaid = np.flatnonzero((spans.pool < 0) & (spans.died == still) & np.isin(spans.address, known))
    pool = spans.pool.copy()
    pool[unsaid] = at_end.ranges["pool"][np.searchsorted(known, spans.address[unsaid])]
    return replace(spans, pool=pool)
