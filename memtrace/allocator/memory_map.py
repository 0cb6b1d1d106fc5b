"""The allocator's memory at one moment: ranges taken from the driver and the blocks in use inside them.

What no block covers is free; torch joins neighbouring free blocks, so each gap is one free block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from memtrace.allocator.sizes import LARGE_REMAINDER, MIN_BLOCK, AllocatorSettings, round_sizes
from memtrace.model import BlockState, SnapshotData
from memtrace.model.stacks import NOT_RECORDED
from memtrace.model.state import REQUEST_UNKNOWN

UNKNOWN_POOL = -1


@dataclass(slots=True)
class Range:
    """Memory taken from the driver: a cudaMalloc segment, or one contiguous mapped part of an expandable one.

    `owner` tells free blocks that may be joined: one number per segment, and one per (pool, stream) for
    expandable ranges, which grow into each other.
    """

    start: int
    size: int
    large: bool
    stream: int
    pool: int
    expandable: bool
    stack: int = NOT_RECORDED
    owner: int = -1
    span: int = -1

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class MapBlock:
    """A block in use. `slack_bound`: the true size may be larger by up to this many bytes (spec 5.4)."""

    address: int
    size: int
    requested: int
    pending: bool
    stack: int = NOT_RECORDED
    slack_bound: int = 0


@dataclass(slots=True)
class MemoryMap:
    """Ranges and blocks in use, both sorted by address."""

    ranges: list[Range] = field(default_factory=list)
    blocks: list[MapBlock] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ranges or self.blocks)


class RangeSet:
    """Ranges by address, none overlapping another."""

    def __init__(self, ranges: list[Range]) -> None:
        self._starts = [item.start for item in ranges]
        self._of_start = {item.start: item for item in ranges}

    def __iter__(self) -> Iterator[Range]:
        return (self._of_start[start] for start in self._starts)

    def at(self, start: int) -> Range | None:
        """The range that begins there."""
        return self._of_start.get(start)

    def containing(self, address: int) -> Range | None:
        """The range that holds an address."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        found = self._of_start[self._starts[index]]
        return found if address < found.end else None

    def is_clear(self, start: int, size: int) -> bool:
        """Whether no range touches [start, start + size)."""
        index = bisect_left(self._starts, start + size) - 1
        return index < 0 or self._of_start[self._starts[index]].end <= start

    def add(self, item: Range) -> None:
        insort(self._starts, item.start)
        self._of_start[item.start] = item

    def remove(self, item: Range) -> None:
        del self._starts[bisect_left(self._starts, item.start)]
        del self._of_start[item.start]

    def add_mapped(self, item: Range) -> tuple[Range, list[Range]]:
        """Adds expandable pages, joined with touching ranges of the same owner: the result, and what it replaced."""
        index = bisect_left(self._starts, item.start)
        before = self._of_start[self._starts[index - 1]] if index else None
        after = self._of_start.get(item.end)
        joined = [
            neighbour
            for neighbour in (before, after)
            if neighbour is not None
            and neighbour.expandable
            and neighbour.owner == item.owner
            and (neighbour.end == item.start or neighbour.start == item.end)
        ]
        whole = item
        for neighbour in joined:
            self.remove(neighbour)
            whole = replace(
                neighbour, start=min(neighbour.start, whole.start), size=neighbour.size + whole.size, span=-1
            )
        self.add(whole)
        return whole, joined

    def cut(self, inside: Range, start: int, size: int) -> list[Range]:
        """Takes [start, start + size) out of a range: the one or two ranges that are left of it."""
        self.remove(inside)
        rest = []
        if start > inside.start:
            rest.append(replace(inside, size=start - inside.start, span=-1))
        if start + size < inside.end:
            rest.append(replace(inside, start=start + size, size=inside.end - start - size, span=-1))
        for item in rest:
            self.add(item)
        return rest


def map_at_end(data: SnapshotData, device: int) -> MemoryMap:
    """The memory map in the file: the state when the snapshot was taken. Without `requested`: the block size."""
    segments, blocks = data.segments, data.blocks
    result = MemoryMap()
    for row in np.flatnonzero(segments.device == device).tolist():
        result.ranges.append(
            Range(
                start=int(segments.address[row]),
                size=int(segments.size[row]),
                large=bool(segments.large[row]),
                stream=int(segments.stream[row]),
                pool=int(segments.pool[row]),
                expandable=bool(segments.expandable[row]),
                stack=int(segments.stack[row]),
            )
        )
        first, last = int(segments.first_block[row]), int(segments.first_block[row + 1])
        for index in (np.flatnonzero(blocks.state[first:last] != BlockState.INACTIVE) + first).tolist():
            size, requested = int(blocks.size[index]), int(blocks.requested[index])
            result.blocks.append(
                MapBlock(
                    address=int(blocks.address[index]),
                    size=size,
                    requested=size if requested == REQUEST_UNKNOWN else requested,
                    pending=int(blocks.state[index]) == BlockState.PENDING,
                    stack=int(blocks.stack[index]),
                )
            )
    return result


@dataclass(frozen=True, slots=True)
class PrivatePools:
    """What the final map tells of private pools: whose a segment is (by address), and which pools never split blocks
    (`MemPool(no_split=True)`, torch >= 2.10: nowhere said, so by what the blocks show)."""

    of_segment: dict[int, int]
    unsplit: frozenset[int]

    @classmethod
    def of(cls, at_end: MemoryMap, settings: AllocatorSettings) -> PrivatePools:
        """Pool 0, the default one, always splits."""
        of_segment = {item.start: item.pool for item in at_end.ranges if not item.expandable}
        by_pool: dict[int, list[tuple[Range, MapBlock]]] = {}
        ranges = RangeSet(at_end.ranges)
        for block in at_end.blocks:
            home = ranges.containing(block.address)
            if home is not None and home.pool > 0 and not home.expandable:
                by_pool.setdefault(home.pool, []).append((home, block))
        unsplit = {
            pool
            for pool, pairs in by_pool.items()
            if all(block.size == home.size for home, block in pairs)
            and any(_would_split(home, block, settings) for home, block in pairs)
        }
        return cls(of_segment, frozenset(unsplit))


def splits_finely(item: Range, settings: AllocatorSettings) -> bool:
    """Whether any rest of 512 bytes or more is split off in this range (else only more than 1 MiB is)."""
    if not item.large or item.expandable:
        return True
    return settings.expandable and (item.pool == 0 or not settings.custom_pools_split_plainly)


def _would_split(home: Range, block: MapBlock, settings: AllocatorSettings) -> bool:
    rounded = int(round_sizes(np.array([block.requested], np.int64), settings.divisions)[0])
    rest = home.size - rounded
    if splits_finely(home, settings):
        return rest >= MIN_BLOCK
    return rounded < settings.max_split_size and rest > LARGE_REMAINDER


def assign_owners(ranges: list[Range]) -> dict[tuple[bool, int], int]:
    """Numbers the owners of ranges from 0 upwards; returns the owner of each expandable (large, stream)."""
    groups: dict[tuple[bool, int], int] = {}
    count = 0
    for item in ranges:
        if item.expandable:
            key = (item.large, item.stream)
            if key not in groups:
                groups[key] = count
                count += 1
            item.owner = groups[key]
        else:
            item.owner = count
            count += 1
    return groups


def gaps(memory: MemoryMap) -> Iterator[tuple[int, int, Range]]:
    """The free blocks: (address, size, range), in order of address."""
    blocks = iter(memory.blocks)
    block = next(blocks, None)
    for item in memory.ranges:
        cursor = item.start
        while block is not None and block.address < item.end:
            if block.address > cursor:
                yield cursor, block.address - cursor, item
            cursor = block.address + block.size
            block = next(blocks, None)
        if cursor < item.end:
            yield cursor, item.end - cursor, item
