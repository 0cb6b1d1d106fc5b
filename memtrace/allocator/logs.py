"""What a pass over the events writes down: blocks, segments, counter changes. `result` freezes these lists."""

from __future__ import annotations

from dataclasses import dataclass, field

from memtrace.allocator.memory_map import MemoryMap, Range

BEFORE = -1
"""Event index of what happened before the recording."""


@dataclass(slots=True)
class BlockLog:
    """One entry a block, in order of birth. Events are indices; `len(events)` means not in this recording."""

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


@dataclass(slots=True)
class SpanLog:
    """One entry a range of memory for as long as its extent did not change (expandable ranges grow and shrink)."""

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


@dataclass(slots=True)
class ChangeLog:
    """Changes of a counter pair: at `event`, `count` and `bytes` by that much, in the large pool or the small."""

    event: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    large: list[bool] = field(default_factory=list)

    def add(self, event: int, count: int, size: int, large: bool) -> None:
        self.event.append(event)
        self.count.append(count)
        self.bytes.append(size)
        self.large.append(large)


@dataclass(slots=True)
class Run:
    """What one pass recorded. `owner_large[owner]` is the pool of a block's owner."""

    blocks: BlockLog
    spans: SpanLog
    splits: ChangeLog
    segments: ChangeLog
    owner_large: list[bool]
    owner_span: list[int]
    """The span of each owner; -1 for expandable memory, whose extent changes."""
    at_end: MemoryMap
    born_at_end: dict[int, int]
    """Address of each block in use at the end -> the event it was born at."""
    revised_sizes: int = 0
    """Blocks whose size the recorded settings do not explain."""
