"""The blocks of the simulated allocator, and the lists it keeps them in."""

from __future__ import annotations

FREE, LIVE, PENDING, UNMAPPED = range(4)

Key = tuple[int, int, int, int]
"""Place of a free block in its pool: stream, size, and what decides between equals."""


class Block:
    """A piece of a segment: in use, waiting for a stream, cached, or (of an expandable one) without memory. `made` and
    `segment` count blocks and segments as they are made; `base` is `Pool.searches` when it was put in the list."""

    __slots__ = ("address", "base", "made", "next", "pool", "prev", "region", "segment", "size", "state", "stream")

    def __init__(self, pool: Pool, stream: int, address: int, size: int, state: int, region: Region | None) -> None:
        self.pool, self.stream, self.address, self.size, self.state = pool, stream, address, size, state
        self.region = region
        self.prev: Block | None = None
        self.next: Block | None = None
        self.made = 0
        self.segment = 0
        self.base = 0

    @property
    def is_split(self) -> bool:
        """Whether its segment has other blocks, too."""
        return self.prev is not None or self.next is not None


class Region:
    """The address space of one expandable segment."""

    __slots__ = ("size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size


class Pool:
    """Free blocks by (stream, size, tie), and unmapped ones by (stream, address)."""

    __slots__ = ("blocks", "free", "is_large", "of_key", "searches", "unmapped", "unmapped_of")

    def __init__(self, is_large: bool) -> None:
        self.is_large = is_large
        self.searches = 0
        self.free: list[Key] = []
        self.of_key: dict[Key, Block] = {}
        self.unmapped: list[tuple[int, int]] = []
        self.unmapped_of: dict[tuple[int, int], Block] = {}


def room_of(block: Block) -> int:
    """The size a block can grow to where it is."""
    behind = block.next
    return block.size + (behind.size if behind is not None and behind.state == UNMAPPED else 0)


def whole_segments(pool: Pool) -> list[tuple[Key, Block]]:
    """The cached segments of a pool that can be given back."""
    return [
        (key, pool.of_key[key])
        for key in pool.free
        if pool.of_key[key].region is None and not pool.of_key[key].is_split
    ]


def link_after(block: Block, new: Block) -> None:
    """Puts a new block behind another one of its segment."""
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new


def link_before(block: Block, new: Block) -> None:
    """Puts it before."""
    new.prev, new.next = block.prev, block
    if block.prev is not None:
        block.prev.next = new
    block.prev = new
