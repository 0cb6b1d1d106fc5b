"""torch's caching allocator, as a program meets it (snapshot-format section 6): the reference, in Python.

`_machine.pyx` is the same natively. The parts keep the names of the C++ they answer for: `malloc`, `get_free_block`,
`alloc_block`, `release_available`, `release_cached`, `garbage_collect`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.simulate.blocks import (
    FREE,
    LIVE,
    PENDING,
    UNMAPPED,
    Block,
    Key,
    Pool,
    Region,
    link_after,
    link_before,
    room_of,
    whole_segments,
)
from memtrace.allocator.simulate.driver import Driver
from memtrace.allocator.simulate.requests import Call, SegmentEvents, SegmentKind, Workload
from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.allocator.simulate.start import place
from memtrace.allocator.sizes import LARGE_REMAINDER, MIN_BLOCK, SMALL_REQUEST, UNLIMITED
from memtrace.model.frozen import FrozenColumns

NOT_PLACED = 0
NEVER = -1
HEARD_EVERY = 100_000
"""Rows between two calls of `progress`."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome(FrozenColumns):
    """What the allocator did. Peaks in bytes; `address` and `size` of each block (`NOT_PLACED`: it was not reached, or
    is private); rows of `Requests`, `NEVER` where it did not happen: of the first request that failed, of the first
    that was served and had failed in the recording, and of the one at which the run stopped.

    `proven` and `refused` bracket a limit nobody named: the driver gave memory up to `proven` bytes in all, and would
    not let torch have `refused` (None: it never refused).
    """

    reserved_peak: int
    allocated_peak: int
    active_peak: int
    inactive_split_peak: int
    device_allocs: int
    device_frees: int
    retries: int
    ooms: int
    first_oom: int
    first_served: int
    stopped: int
    reserved_at_end: int
    proven: int
    refused: int | None
    segments: SegmentEvents
    address: NDArray[np.uint64]
    size: NDArray[np.int64]


class OutOfMemoryError(Exception):
    """The allocator gives up on a request."""


class Machine:
    """One run of a workload. `flush_before` are rows before which the cache is emptied (one more: after the last);
    `progress` hears of rows done, and of how many there are."""

    def __init__(
        self,
        work: Workload,
        rules: Rules,
        driver: Driver,
        flush_before: NDArray[np.bool_] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.work, self.rules, self.driver = work, rules, driver
        self.flush_before, self.progress = flush_before, progress
        self.row = 0
        self.small, self.large = Pool(False), Pool(True)
        self.made = 0
        self.segment_count = 0
        self.total = self.reserved_peak = 0
        self.allocated = self.allocated_peak = 0
        self.active = self.active_peak = 0
        self.split = self.split_peak = 0
        self.device_allocs = self.device_frees = 0
        self.retries = self.ooms = 0
        self.first_oom = self.first_served = self.stopped = NEVER
        self.proven, self.refused = 0, UNLIMITED
        self.node: dict[int, Block] = {}
        self.waiting: dict[int, Block] = {}
        self.address = np.zeros(work.blocks, np.uint64)
        self.size = np.zeros(work.blocks, np.int64)
        self.log: list[tuple[int, int, int, int, int]] = []
        self.counts_age = rules.limit is not None and rules.collect_above > 0
        place(self, work.start)

    def run(self) -> Outcome:
        """Runs all requests, or up to the first that the recording had memory for and this allocator has not."""
        requests = self.work.requests
        rounded = self.rules.rounded(requests.size).tolist()
        private_size = self.work.block_size
        flush = None if self.flush_before is None else self.flush_before.tolist()
        for row, (call, block, size, need, stream) in enumerate(
            zip(
                requests.call.tolist(),
                requests.block.tolist(),
                requests.size.tolist(),
                rounded,
                requests.stream.tolist(),
                strict=True,
            )
        ):
            self.row = row
            if self.progress is not None and not row % HEARD_EVERY:
                self.progress(row, len(requests))
            if flush is not None and flush[row]:
                self.release_cached()
            try:
                if call == Call.ALLOC:
                    self._alloc(block, need, stream)
                elif call == Call.FREE_REQUESTED:
                    self._free_requested(block)
                elif call == Call.FREE_COMPLETED:
                    self._free_completed(block)
                elif call == Call.FREE:
                    self._free_requested(block)
                    self._free_completed(block)
                elif call == Call.EMPTY_CACHE:
                    self.release_cached()
                elif call == Call.PRIVATE_SEGMENT:
                    self._private_segment(size)
                elif call == Call.PRIVATE_SEGMENT_FREE:
                    self.total -= size
                    self.device_frees += 1
                elif call == Call.PRIVATE_OOM:
                    self._make_room(size)
                    self._note_served()
                elif call == Call.PRIVATE_ALLOC:
                    self._count(int(private_size[block]))
                elif call == Call.PRIVATE_FREE_REQUESTED:
                    self.allocated -= int(private_size[block])
                elif call == Call.PRIVATE_FREE_COMPLETED:
                    self.active -= int(private_size[block])
                elif call == Call.PRIVATE_FREE:
                    self.allocated -= int(private_size[block])
                    self.active -= int(private_size[block])
                else:
                    self._failed_request(need, stream)
            except OutOfMemoryError:
                self.ooms += 1
                if self.first_oom == NEVER:
                    self.first_oom = row
                if call not in (Call.OOM, Call.PRIVATE_OOM):
                    self.stopped = row
                    break
        if flush is not None and self.stopped == NEVER and any(flush[len(requests) :]):
            self.row = len(requests)
            self.release_cached()
        return self._outcome()

    def _outcome(self) -> Outcome:
        log = np.array(self.log, np.int64).reshape(-1, 5)
        return Outcome(
            reserved_peak=self.reserved_peak,
            allocated_peak=self.allocated_peak,
            active_peak=self.active_peak,
            inactive_split_peak=self.split_peak,
            device_allocs=self.device_allocs,
            device_frees=self.device_frees,
            retries=self.retries,
            ooms=self.ooms,
            first_oom=self.first_oom,
            first_served=self.first_served,
            stopped=self.stopped,
            reserved_at_end=self.total,
            proven=self.proven,
            refused=None if self.refused == UNLIMITED else self.refused,
            segments=SegmentEvents(
                row=log[:, 0].copy(),
                kind=log[:, 1].astype(np.uint8),
                address=log[:, 2].astype(np.uint64),
                size=log[:, 3].copy(),
                stream=log[:, 4].astype(np.int32),
            ),
            address=self.address,
            size=self.size,
        )

    # ---- the calls

    def _alloc(self, block: int, need: int, stream: int) -> None:
        node = self.malloc(need, stream)
        self.node[block] = node
        self.address[block], self.size[block] = node.address, node.size
        self._count(node.size)

    def _count(self, size: int) -> None:
        self.allocated += size
        self.active += size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.active_peak = max(self.active_peak, self.active)

    def _free_requested(self, block: int) -> None:
        node = self.node[block]
        node.state = PENDING
        self.waiting[block] = node
        self.allocated -= node.size

    def _free_completed(self, block: int) -> None:
        node = self.waiting.pop(block, None)
        if node is not None:  # else it was waited for by a release of the cache
            del self.node[block]
            self.active -= node.size
            self.free_block(node)

    def _failed_request(self, need: int, stream: int) -> None:
        """A request that failed in the recording. Where it does not, its memory is given back at once."""
        node = self.malloc(need, stream)
        self._note_served()
        self._count(node.size)
        self.allocated -= node.size
        self.active -= node.size
        self.free_block(node)

    def _note_served(self) -> None:
        if self.first_served == NEVER:
            self.first_served = self.row

    def _private_segment(self, size: int) -> None:
        """A segment of a private pool: taken as recorded, if the limit allows."""
        self._make_room(size)
        self.total += size
        self.device_allocs += 1
        self.reserved_peak = max(self.reserved_peak, self.total)
        self.proven = max(self.proven, self.total)

    def _make_room(self, size: int) -> None:
        """Raises OutOfMemoryError if there is none for a private pool's segment. While torch allocates to such a pool,
        a capture is under way for it: nothing is given back, and nothing tried again."""
        if self.counts_age:
            self.garbage_collect()
        if self._is_against(size):
            raise OutOfMemoryError

    def _is_against(self, size: int) -> bool:
        """Whether the limit or the driver is, before anything is asked of it: for a private pool nothing more is."""
        if self._over(size):
            return True
        if self.driver.refuses(self.row):
            self.refused = min(self.refused, self.total + size)
            return True
        return False

    # ---- malloc

    def malloc(self, need: int, stream: int) -> Block:
        """A block of at least `need` bytes, in use. Raises OutOfMemoryError."""
        rules = self.rules
        pool = self.small if need <= SMALL_REQUEST else self.large
        found = self.get_free_block(pool, need, stream)
        if found is None:
            wanted = rules.segment_size(need)
            if self.counts_age:
                self.garbage_collect()
            found = self.alloc_block(pool, need, wanted, stream)
            if found is None and self.release_available(pool, need, stream):
                found = self.alloc_block(pool, need, wanted, stream)
            if found is None:
                self.release_cached()
                self.retries += 1
                found = self.alloc_block(pool, need, wanted, stream)
            if found is None:
                raise OutOfMemoryError
        return self._cut(found, need)

    def _cut(self, block: Block, need: int) -> Block:
        """Takes what is needed off the front; `block` is in no list."""
        rules, pool = self.rules, block.pool
        rest = block.size - need
        fine = not pool.is_large or rules.expandable
        if rest >= MIN_BLOCK if fine else need < rules.max_split_size and rest > LARGE_REMAINDER:
            front = Block(pool, block.stream, block.address, need, LIVE, block.region)
            self.number(front, block.segment)
            front.prev, front.next = block.prev, block
            if block.prev is not None:
                block.prev.next = front
            block.prev = front
            block.address += need
            block.size = rest
            self.insert(block)
            return front
        block.state = LIVE
        return block

    def get_free_block(self, pool: Pool, need: int, stream: int) -> Block | None:
        """The best fit among cached blocks."""
        rules, free, of_key = self.rules, pool.free, pool.of_key
        if self.counts_age:
            pool.searches += 1
        index = bisect_left(free, (stream, need, -1, -1))
        if index == len(free) or free[index][0] != stream:
            return None
        block = of_key[free[index]]
        if block.region is not None and rules.expandable:
            while index + 1 < len(free) and free[index + 1][0] == stream and block.region is not None:
                following = of_key[free[index + 1]]
                if room_of(following) >= room_of(block):
                    break
                index, block = index + 1, following
        elif block.region is not None:
            while block.region is not None:
                index += 1
                if index == len(free) or free[index][0] != stream:
                    return None
                block = of_key[free[index]]
        if need < rules.max_split_size <= block.size:
            return None
        if need >= rules.max_split_size and block.size >= need + rules.non_split_rounding:
            return None
        self.remove(block)
        return block

    def _over(self, size: int) -> bool:
        return self.rules.limit is not None and self.total + size > self.rules.limit

    def alloc_block(self, pool: Pool, need: int, wanted: int, stream: int) -> Block | None:
        """New memory from the driver, in no list; None if the limit or the driver is against it."""
        if self._over(wanted):
            return None
        before = self.total
        block: Block | None
        if self.driver.refuses(self.row):
            block = None
        elif self.rules.expandable:
            block = self._expand(pool, need, stream)
        else:
            address = self.driver.allocate(self.row, wanted)
            block = None if address is None else self._segment(pool, stream, address, wanted)
        if block is None:
            self.refused = min(self.refused, before + wanted)
        else:
            self.proven = max(self.proven, before + wanted)
        return block

    def _segment(self, pool: Pool, stream: int, address: int, size: int) -> Block:
        block = Block(pool, stream, address, size, FREE, None)
        self.segment_count += 1
        self.number(block, self.segment_count)
        self._took(SegmentKind.ALLOC, stream, address, size)
        return block

    def _expand(self, pool: Pool, need: int, stream: int) -> Block | None:
        block = self._expandable_candidate(pool, need, stream)
        if block is None:
            return None
        if block.state == UNMAPPED and not self._map(block, min(block.size, need)):
            return None
        while block.size < need:
            following = block.next
            assert following is not None, "the candidate was found to have room"
            if not self._map(following, min(need - block.size, following.size)):
                return None
            block = following
        self.remove(block)
        return block

    def _expandable_candidate(self, pool: Pool, need: int, stream: int) -> Block | None:
        """The lowest unmapped block of the stream, or the free one before it, from which on there is room."""
        index = bisect_left(pool.unmapped, (stream, 0))
        while index < len(pool.unmapped) and pool.unmapped[index][0] == stream:
            block = pool.unmapped_of[pool.unmapped[index]]
            if block.prev is not None and block.prev.state in (FREE, UNMAPPED):
                block = block.prev
            room = 0
            at: Block | None = block
            while room < need and at is not None and at.state in (FREE, UNMAPPED):
                room += at.size
                at = at.next
            if room >= need:
                return block
            index += 1
        space = self.driver.reserve(self.row)
        if space is None or space[1] < need:
            return None
        block = Block(pool, stream, space[0], space[1], UNMAPPED, Region(*space))
        self.segment_count += 1
        self.number(block, self.segment_count)
        self.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        page = self.rules.page(block.pool.is_large)
        size = min(-(-size // page) * page, block.size)
        if not self.driver.map(self.row, block.address, size):
            return False
        self.remove_unmapped(block)
        block.state = FREE
        if size < block.size:
            rest = Block(block.pool, block.stream, block.address + size, block.size - size, UNMAPPED, block.region)
            self.number(rest, block.segment)
            link_after(block, rest)
            block.size = size
            self.insert_unmapped(rest)
        address = block.address
        self._merge(block, block.prev)
        self._merge(block, block.next)
        self.insert(block)
        self._took(SegmentKind.MAP, block.stream, address, size)
        return True

    # ---- giving back

    def free_block(self, block: Block) -> None:
        """Back to the free list, joined with free neighbours."""
        block.state = FREE
        for neighbour in (block.prev, block.next):
            self._merge(block, neighbour)
        self.insert(block)

    def _merge(self, block: Block, other: Block | None) -> None:
        """`block` takes over a neighbour that is free (or unmapped) as itself."""
        if other is None or other.state != block.state:
            return
        if other.state == UNMAPPED:
            self.remove_unmapped(other)
        else:
            self.remove(other)
        if other is block.prev:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size

    def release_available(self, pool: Pool, need: int, stream: int) -> bool:
        """Frees oversize blocks of the stream, as few as will do. Whether that gave enough."""
        most = self.rules.max_split_size
        if most == UNLIMITED:
            return False
        want = max(need, most)
        index = bisect_left(pool.free, (stream, want, -1, -1))
        if index < len(pool.free) and pool.free[index][0] == stream:
            block = pool.of_key[pool.free[index]]
            if block.region is None and not block.is_split:
                self._release(block)
                return True
        given = 0
        index -= 1
        while index >= 0 and given < want:
            key = pool.free[index]
            if key[0] != stream or key[1] < most:
                break
            block = pool.of_key[key]
            if block.region is None and not block.is_split:
                given += block.size
                self._release(block)
            index -= 1
        return given >= want

    def garbage_collect(self) -> None:
        """Frees whole cached segments of the large pool that have not been used for longest."""
        limit = self.rules.limit
        assert limit is not None, "only counted under a limit"
        target = self.total - int(self.rules.collect_above * limit)
        if target <= 0:
            return
        pool = self.large
        old = {key: pool.searches - block.base for key, block in whole_segments(pool)}
        age, reclaimed, found = sum(old.values()), 0, True
        while reclaimed < target and found and old:
            least, found = age / len(old), False
            for key, calls in tuple(old.items()):
                if calls >= least:
                    found = True
                    block = pool.of_key[key]
                    reclaimed += block.size
                    age -= calls
                    del old[key]
                    self._release(block)

    def release_cached(self) -> None:
        """`empty_cache()`: waits for streams, then gives back all segments that hold nothing."""
        for block in tuple(self.waiting):
            self._free_completed(block)
        for pool in (self.large, self.small):
            pieces = []
            for cached in [pool.of_key[key] for key in pool.free]:
                if cached.region is not None:
                    pieces.append(cached)
                elif not cached.is_split:
                    self._release(cached)
            for piece in pieces:
                self._unmap(piece)

    def _release(self, block: Block) -> None:
        self.remove(block)
        self._gave(SegmentKind.FREE, block.stream, block.address, block.size)

    def _unmap(self, block: Block) -> None:
        """Unmaps the whole pages inside a free block; a reservation that is left unmapped whole is dropped."""
        page = self.rules.page(block.pool.is_large)
        assert block.region is not None, "only expandable memory is unmapped"
        origin = block.region.start
        first = origin + -(-(block.address - origin) // page) * page
        end = origin + (block.address + block.size - origin) // page * page
        if end <= first:
            return
        self.remove(block)
        if first > block.address:
            piece = Block(block.pool, block.stream, block.address, first - block.address, FREE, block.region)
            self.number(piece, block.segment)
            link_before(block, piece)
            self.insert(piece)
        if end < block.address + block.size:
            size = block.address + block.size - end
            piece = Block(block.pool, block.stream, end, size, FREE, block.region)
            self.number(piece, block.segment)
            link_after(block, piece)
            self.insert(piece)
        block.address, block.size, block.state = first, end - first, UNMAPPED
        self._merge(block, block.prev)
        self._merge(block, block.next)
        self.insert_unmapped(block)
        self._gave(SegmentKind.UNMAP, block.stream, first, end - first)
        if not block.is_split:
            self.remove_unmapped(block)

    # ---- lists and counts

    def number(self, block: Block, segment: int) -> None:
        """Says when a block object was made, and of which segment it is."""
        self.made += 1
        block.made, block.segment = self.made, segment

    def _key(self, block: Block) -> Key:
        tie = self.rules.tie
        if tie == Tie.ADDRESS:
            return block.stream, block.size, block.address, 0
        if tie == Tie.OBJECT:
            return block.stream, block.size, block.made, 0
        return block.stream, block.size, block.segment, block.address

    def insert(self, block: Block) -> None:
        """Puts a free block where it can be found."""
        block.base = block.pool.searches
        key = self._key(block)
        insort(block.pool.free, key)
        block.pool.of_key[key] = block
        if block.region is None and block.is_split:
            self.split += block.size
            self.split_peak = max(self.split_peak, self.split)

    def remove(self, block: Block) -> None:
        """Takes it out again."""
        key = self._key(block)
        del block.pool.free[bisect_left(block.pool.free, key)]
        del block.pool.of_key[key]
        if block.region is None and block.is_split:
            self.split -= block.size

    def insert_unmapped(self, block: Block) -> None:
        """The same of address space without memory."""
        key = block.stream, block.address
        insort(block.pool.unmapped, key)
        block.pool.unmapped_of[key] = block

    def remove_unmapped(self, block: Block) -> None:
        """Takes it out again."""
        key = block.stream, block.address
        del block.pool.unmapped[bisect_left(block.pool.unmapped, key)]
        del block.pool.unmapped_of[key]

    def _took(self, kind: SegmentKind, stream: int, address: int, size: int) -> None:
        self.total += size
        self.device_allocs += 1
        self.reserved_peak = max(self.reserved_peak, self.total)
        self.log.append((self.row, kind, address, size, stream))

    def _gave(self, kind: SegmentKind, stream: int, address: int, size: int) -> None:
        self.total -= size
        self.device_frees += 1
        self.log.append((self.row, kind, address, size, stream))
        if kind == SegmentKind.FREE:
            self.driver.free(self.row, address, size)
        else:
            self.driver.unmap(self.row, address, size)
