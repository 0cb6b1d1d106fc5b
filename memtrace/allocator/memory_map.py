"""The allocator's memory at one moment: ranges taken from the driver and the blocks in use inside them.

What no block covers is free; torch joins neighbouring free blocks, so each gap is one free block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

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


RANGE = np.dtype(
    [
        ("start", np.uint64),
        ("size", np.int64),
        ("stream", np.uint64),
        ("pool", np.int32),
        ("stack", np.int32),
        ("large", np.bool_),
        ("expandable", np.bool_),
    ],
    align=True,
)
"""A row of `MemoryMap.ranges`. Both row types are structs of the native kernel, too."""

BLOCK = np.dtype(
    [
        ("address", np.uint64),
        ("size", np.int64),
        ("requested", np.int64),
        ("slack_bound", np.int64),
        ("stack", np.int32),
        ("pending", np.bool_),
    ],
    align=True,
)
"""A row of `MemoryMap.blocks`."""

Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Ranges and blocks in use as rows, both sorted by address; nothing overlaps, and each block lies in a range."""

    ranges: Rows = field(default_factory=lambda: np.zeros(0, RANGE))
    blocks: Rows = field(default_factory=lambda: np.zeros(0, BLOCK))

    def __bool__(self) -> bool:
        return bool(len(self.ranges) or len(self.blocks))

    @classmethod
    def of(cls, ranges: Iterable[Range], blocks: Iterable[MapBlock]) -> MemoryMap:
        """From objects, the ranges in order of address."""
        range_rows = [
            (item.start, item.size, item.stream, item.pool, item.stack, item.large, item.expandable) for item in ranges
        ]
        block_rows = [
            (item.address, item.size, item.requested, item.slack_bound, item.stack, item.pending) for item in blocks
        ]
        found = np.array(block_rows, BLOCK)
        return cls(np.array(range_rows, RANGE), found[np.argsort(found["address"])])

    def as_ranges(self) -> list[Range]:
        """The ranges as objects to work with."""
        return [
            Range(start, size, large, stream, pool, expandable, stack)
            for start, size, stream, pool, stack, large, expandable in self.ranges.tolist()
        ]

    def as_blocks(self) -> list[MapBlock]:
        """The blocks as objects to work with."""
        return [
            MapBlock(address, size, requested, pending, stack, slack_bound)
            for address, size, requested, slack_bound, stack, pending in self.blocks.tolist()
        ]


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
    here = segments.device == device
    ranges = np.zeros(int(np.count_nonzero(here)), RANGE)
    for name in ("size", "stream", "pool", "stack", "large", "expandable"):
        ranges[name] = getattr(segments, name)[here]
    ranges["start"] = segments.address[here]
    rows = np.flatnonzero(np.repeat(here, np.diff(segments.first_block)) & (blocks.state != BlockState.INACTIVE))
    used = np.zeros(len(rows), BLOCK)
    for name in ("address", "size", "stack"):
        used[name] = getattr(blocks, name)[rows]
    requested = blocks.requested[rows]
    used["requested"] = np.where(requested == REQUEST_UNKNOWN, used["size"], requested)
    used["pending"] = blocks.state[rows] == BlockState.PENDING
    return MemoryMap(ranges, used)


@dataclass(frozen=True, slots=True)
class PrivatePools:
    """What the final map tells of private pools: whose a segment is (by its start), and which pools never split blocks
    (`MemPool(no_split=True)`, torch >= 2.10: nowhere said, so by what the blocks show)."""

    segment_start: NDArray[np.uint64]
    segment_pool: NDArray[np.int32]
    unsplit: frozenset[int]

    @classmethod
    def of(cls, at_end: MemoryMap, settings: AllocatorSettings) -> PrivatePools:
        """Pool 0, the default one, always splits."""
        plain = at_end.ranges[~at_end.ranges["expandable"]]
        home = at_end.ranges[np.searchsorted(at_end.ranges["start"], at_end.blocks["address"], side="right") - 1]
        private = (home["pool"] > 0) & ~home["expandable"]
        home, blocks = home[private], at_end.blocks[private]
        filled = blocks["size"] == home["size"]
        pools = set(home["pool"][_would_split(home, blocks, settings)].tolist())
        return cls(
            np.ascontiguousarray(plain["start"]),
            np.ascontiguousarray(plain["pool"]),
            frozenset(pools - set(home["pool"][~filled].tolist())),
        )

    @classmethod
    def none(cls) -> PrivatePools:
        """Nothing is known."""
        return cls.of(MemoryMap(), AllocatorSettings())

    def of_segments(self) -> dict[int, int]:
        """Start of a segment -> its pool."""
        return dict(zip(self.segment_start.tolist(), self.segment_pool.tolist(), strict=True))


def splits_finely(item: Range, settings: AllocatorSettings) -> bool:
    """Whether any rest of 512 bytes or more is split off in this range (else only more than 1 MiB is)."""
    if not item.large or item.expandable:
        return True
    return settings.expandable and (item.pool == 0 or not settings.custom_pools_split_plainly)


def _would_split(home: Rows, blocks: Rows, settings: AllocatorSettings) -> NDArray[np.bool_]:
    """Which blocks leave so much of their segment (`home`, a row each) that it would be split off: all are cudaMalloc's
    and of a pool of the program's."""
    rounded = round_sizes(blocks["requested"], settings.divisions)
    rest = home["size"] - rounded
    fine = ~home["large"] | (settings.expandable and not settings.custom_pools_split_plainly)
    split: NDArray[np.bool_] = np.where(
        fine, rest >= MIN_BLOCK, (rounded < settings.max_split_size) & (rest > LARGE_REMAINDER)
    )
    return split


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


def gaps(ranges: Iterable[Range], used: Iterable[MapBlock]) -> Iterator[tuple[int, int, Range]]:
    """The free blocks: (address, size, range), in order of address."""
    blocks = iter(used)
    block = next(blocks, None)
    for item in ranges:
        cursor = item.start
        while block is not None and block.address < item.end:
            if block.address > cursor:
                yield cursor, block.address - cursor, item
            cursor = block.address + block.size
            block = next(blocks, None)
        if cursor < item.end:
            yield cursor, item.end - cursor, item
