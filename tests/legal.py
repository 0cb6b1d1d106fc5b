"""torch's caching allocator (release 2.11), small and plain: makes snapshots that could be real.

    machine = Machine(expandable_segments=True, limit=256 * MiB)
    addr = machine.malloc(3 * MiB)
    machine.free(addr)
    machine.snapshot()   # a raw snapshot dict, as torch 2.11 writes it
    machine.stats()      # torch's counters, kept while allocating (not replayed from the events)

`random_program` and the hypothesis strategy `legal_snapshots` make whole traces; `cut_front` and `ring` lose their
beginning, as a late start and a full ring buffer do. All sizes and addresses are bytes.

Not modelled: CUDA graph capture (private pools are, without it), use_on_oom and no_split pools, threads.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import strategies as st

Raw = dict[str, Any]
PoolId = tuple[int, int]
Operation = tuple[Any, ...]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
UNLIMITED = 1 << 62


class OutOfMemory(Exception):
    """What torch.OutOfMemoryError is to a program; the trace has its `oom` event."""


class Driver(Protocol):
    """Hands out addresses; whether there is room was decided before."""

    def allocate(self, size: int) -> int:
        """cudaMalloc: the address of `size` new bytes."""

    def reserve(self, size: int) -> int:
        """cuMemAddressReserve: address space of `size` bytes for an expandable segment."""

    def release(self, addr: int, size: int) -> None:
        """cudaFree, or the end of a reservation."""


class TouchingDriver:
    """Addresses in multiples of 2 MiB; new segments often touch older ones, above or below, as real ones do.

    Reservations never touch anything: nothing in a trace could tell where one ends and the next begins.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.used: list[tuple[int, int]] = []  # (start, end), sorted

    def allocate(self, size: int) -> int:
        size = -(-size // (2 * MiB)) * (2 * MiB)
        touching = [end for _, end in self.used] + [start - size for start, _ in self.used]
        touching = [start for start in touching if start > 0 and self._is_free(start, start + size)]
        if touching and self.rng.random() < 0.8:
            return self._take(self.rng.choice(touching), size)
        while True:
            start = self.rng.randrange(1 << 20, 1 << 24) * (2 * MiB)  # anywhere between 2 and 32 TiB
            if self._is_free(start, start + size):
                return self._take(start, size)

    def reserve(self, size: int) -> int:
        start = max((end for _, end in self.used), default=0) + 64 * MiB
        return self._take(-(-start // (2 * MiB)) * (2 * MiB), size + 2 * MiB)

    def release(self, addr: int, size: int) -> None:
        self.used = [(start, end) for start, end in self.used if start != addr]

    def _is_free(self, start: int, stop: int) -> bool:
        return all(stop <= used or end <= start for used, end in self.used)

    def _take(self, start: int, size: int) -> int:
        insort(self.used, (start, start + size))
        return start


@dataclass(eq=False)
class Block:
    """A piece of a segment; `previous` and `next` are its neighbours in the same segment or reservation."""

    addr: int
    size: int
    stream: int
    pool: Pool
    reservation: int = 0  # bytes of the reservation it lies in; 0 = cudaMalloc'ed
    state: str = "inactive"
    requested: int = 0  # kept when freed: torch writes the stale value
    mapped: bool = True
    frames: list[Raw] = field(default_factory=list)
    free_frames: list[Raw] = field(default_factory=list)
    segment_frames: list[Raw] = field(default_factory=list)
    searches: int = 0  # of its pool, when it became free: its age in garbage collections
    previous: Block | None = None
    next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    def piece(self, addr: int, size: int) -> Block:
        """A new, unlinked block of the same segment."""
        return Block(addr, size, self.stream, self.pool, self.reservation)

    def insert_between(self, previous: Block | None, following: Block | None) -> None:
        self.previous, self.next = previous, following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self


class Pool:
    """Free blocks of one pool, in the order (stream, size, address)."""

    def __init__(self, name: str, pool_id: PoolId) -> None:
        self.name = name  # small or large
        self.pool_id = pool_id
        self.keys: list[tuple[int, int, int]] = []
        self.free: dict[tuple[int, int, int], Block] = {}
        self.unmapped: list[Block] = []
        self.searches = 0

    def add(self, block: Block) -> None:
        if not block.mapped:
            self.unmapped.append(block)
            return
        key = (block.stream, block.size, block.addr)
        insort(self.keys, key)
        self.free[key] = block
        block.searches = self.searches

    def remove(self, block: Block) -> None:
        if not block.mapped:
            self.unmapped.remove(block)
            return
        key = (block.stream, block.size, block.addr)
        del self.keys[bisect_left(self.keys, key)], self.free[key]

    def in_order(self) -> list[Block]:
        return [self.free[key] for key in self.keys]

    def from_size(self, stream: int, size: int) -> list[Block]:
        """Free blocks of `stream` with at least `size` bytes, smallest first."""
        keys = self.keys[bisect_left(self.keys, (stream, size, 0)) : bisect_left(self.keys, (stream + 1, 0, 0))]
        return [self.free[key] for key in keys]


@dataclass
class Stat:
    """One counter of torch.cuda.memory_stats()."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def change(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount


COUNTED = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
)


class Machine:
    """The allocator of one device.

    Settings as in PYTORCH_CUDA_ALLOC_CONF, in bytes: `max_split_size` (None: unlimited), `roundup` (one number of
    divisions, or one for each of the 16 intervals from 1 MiB on), `max_non_split_rounding`, `large_segment_size`,
    `garbage_collection_threshold` (needs `limit`). `limit` is what set_per_process_memory_fraction allows, `capacity`
    what the device has. A `stack` is a text that becomes one frame.
    """

    def __init__(
        self,
        *,
        expandable_segments: bool = False,
        max_split_size: int | None = None,
        roundup: int | Iterable[int] = 0,
        garbage_collection_threshold: float = 0.0,
        max_non_split_rounding: int = 20 * MiB,
        large_segment_size: int = 20 * MiB,
        limit: int | None = None,
        capacity: int = 80 * GiB,
        driver: Driver | None = None,
    ) -> None:
        self.expandable = expandable_segments
        self.max_split_size = max_split_size or UNLIMITED
        self.roundup = [roundup] * 16 if isinstance(roundup, int) else list(roundup)
        self.gc_threshold = garbage_collection_threshold
        self.max_non_split_rounding = max_non_split_rounding
        self.large_segment_size = large_segment_size
        self.limit = limit
        self.capacity = capacity
        self.driver = driver or TouchingDriver()
        self.events: list[Raw] = []
        self.live: dict[int, Block] = {}  # allocated or pending, by address
        self.pools: dict[tuple[PoolId, str], Pool] = {}
        self.dropped: list[PoolId] = []  # private pools whose owner is gone
        self.waiting: list[Block] = []  # freed, but other streams may still use them
        self.finished: list[Block] = []  # those of `waiting` that no stream uses any more
        self.reserved = 0
        self.counters = {f"{name}.{pool}": Stat() for name in COUNTED for pool in ("all", "small_pool", "large_pool")}
        self.oversize = {name: Stat() for name in ("oversize_allocations", "oversize_segments")}
        self.calls = dict.fromkeys(("num_device_alloc", "num_device_free", "num_ooms", "num_alloc_retries"), 0)
        self.time_us = 1_700_000_000_000_000

    # What a program does.

    def malloc(self, size: int, stream: int = 0, pool: PoolId = (0, 0), stack: str = "malloc") -> int:
        """Allocate `size` bytes (> 0) for `stream` and return the address, or raise `OutOfMemory`."""
        frames = _frames(stack)
        if pool in self.dropped:
            self.dropped.remove(pool)
        self._complete_finished(frames)
        rounded = self.round_size(size)
        chosen = self._pool(pool, "small" if rounded <= MiB else "large")
        block = self._find(chosen, stream, rounded)
        if block is None:
            if self.limit is not None and self.gc_threshold > 0:
                self._collect_garbage(frames)
            block = self._grow(chosen, stream, rounded, frames)
            if block is None and self._release_available(chosen, stream, rounded, frames):
                block = self._grow(chosen, stream, rounded, frames)
            if block is None:
                self._release_cached(frames)
                self.calls["num_alloc_retries"] += 1
                block = self._grow(chosen, stream, rounded, frames)
        if block is None:
            self.calls["num_ooms"] += 1
            room = self.capacity - self.reserved
            self._record("oom", None, rounded, stream, frames, device_free=room)
            raise OutOfMemory(f"{size} bytes")
        return self._hand_out(block, size, rounded, frames)

    def free(self, addr: int, stack: str = "free") -> None:
        """Free a block that only its own stream used."""
        self._complete(self._request_free(addr, stack))

    def free_later(self, addr: int, stack: str = "free") -> None:
        """Free a block that another stream used (record_stream): it stays pending until that stream is done."""
        self.waiting.append(self._request_free(addr, stack))

    def finish(self, addr: int) -> None:
        """The other streams are done with the pending block at `addr`; the next malloc or empty_cache will notice."""
        block = self.live[addr]
        assert block in self.waiting, "not waiting for a stream"
        self.waiting.remove(block)
        self.finished.append(block)

    def poll(self) -> None:
        """All streams are done, and that is noticed at once: every pending block becomes free."""
        self._complete_waiting(_frames("poll"))

    def empty_cache(self, stack: str = "empty_cache") -> None:
        """torch.cuda.empty_cache()."""
        self._release_cached(_frames(stack))

    def drop_pool(self, pool: PoolId) -> None:
        """The graph or MemPool of a private pool is gone: empty_cache may release its segments from now on."""
        if pool != (0, 0) and pool not in self.dropped:
            self.dropped.append(pool)

    def snapshot(self) -> Raw:
        """torch.cuda.memory._snapshot(): a raw snapshot dict. Its own event shows in the next one only."""
        snapshot = {
            "segments": self._segments(),
            "device_traces": [list(self.events)],
            "allocator_settings": self._settings(),
            "external_annotations": [],
        }
        self._record("snapshot", 0, self.counters["active_bytes.all"].current, 0, None)
        return snapshot

    def stats(self) -> dict[str, int]:
        """torch.cuda.memory_stats(): the 111 counters of the contract, num_alloc_retries and oversize_*."""
        found = dict(self.calls)
        for name, stat in (*self.counters.items(), *self.oversize.items()):
            found.update({f"{name}.{key}": value for key, value in vars(stat).items()})
        return found

    # Sizes (section 4 of snapshot-format.md).

    def round_size(self, size: int) -> int:
        """Bytes set aside for `size` requested ones."""
        if size < 512:
            return 512
        exponent = size.bit_length() - 1
        divisions = self.roundup[min(max(exponent - 20, 0), 15)]
        if divisions > 1 and size > 512 * divisions:
            return _round_up(size, (1 << exponent) // divisions)
        return _round_up(size, 512)

    def _segment_size(self, rounded: int) -> int:
        if rounded <= MiB:
            return 2 * MiB
        return self.large_segment_size if rounded < 10 * MiB else _round_up(rounded, 2 * MiB)

    def _handle(self, pool: Pool) -> int:
        """Bytes of one physical piece of an expandable segment."""
        return 2 * MiB if pool.name == "small" else self.large_segment_size

    def _is_to_split(self, block: Block, rounded: int) -> bool:
        rest = block.size - rounded
        if block.pool.name == "small" or self.expandable:
            return rest >= 512
        return rounded < self.max_split_size and rest > MiB

    # Allocation (section 6).

    def _pool(self, pool: PoolId, name: str) -> Pool:
        return self.pools.setdefault((pool, name), Pool(name, pool))

    def _find(self, pool: Pool, stream: int, rounded: int) -> Block | None:
        pool.searches += 1
        candidates = pool.from_size(stream, rounded)
        if not candidates:
            return None
        block = candidates[0]
        for following in candidates[1:]:  # an expandable block is as large as it can grow
            if not block.reservation or _room(following) >= _room(block):
                break
            block = following
        if rounded < self.max_split_size <= block.size:
            return None
        if rounded >= self.max_split_size and block.size >= rounded + self.max_non_split_rounding:
            return None
        pool.remove(block)
        return block

    def _grow(self, pool: Pool, stream: int, rounded: int, frames: list[Raw]) -> Block | None:
        """New memory from the driver, taken out of the pool; None where the limit or the device refuses."""
        size = self._segment_size(rounded)
        if self.limit is not None and self.reserved + size > self.limit:
            return None
        if self.expandable:
            return self._grow_expandable(pool, stream, rounded, frames)
        if self.reserved + size > self.capacity:
            return None
        block = Block(self.driver.allocate(size), size, stream, pool, segment_frames=frames)
        self._count(pool, segment=1, reserved_bytes=size)
        self._count_oversize("oversize_segments", size, 1)
        self._device_call("num_device_alloc", "segment_alloc", block, frames)
        return block

    def _grow_expandable(self, pool: Pool, stream: int, rounded: int, frames: list[Raw]) -> Block | None:
        block = self._expandable_candidate(pool, stream, rounded)
        if not block.mapped and not self._map(block, min(block.size, rounded), frames):
            return None
        while block.size < rounded:
            following = block.next
            assert following is not None
            if not self._map(following, min(rounded - block.size, following.size), frames):
                return None
            block = following  # mapping has merged the free block before it into it
        pool.remove(block)
        return block

    def _expandable_candidate(self, pool: Pool, stream: int, rounded: int) -> Block:
        """The first of the lowest free or unmapped blocks in a row that hold `rounded` bytes together."""
        for block in sorted(pool.unmapped, key=lambda block: block.addr):
            if block.stream == stream:
                start = block
                if block.previous is not None and block.previous.state == "inactive":
                    start = block.previous
                here: Block | None = start
                room = 0
                while here is not None and here.state == "inactive" and room < rounded:
                    room += here.size
                    here = here.next
                if room >= rounded:
                    return start
        size = _round_up(self.capacity + self.capacity // 8, self._handle(pool))
        block = Block(self.driver.reserve(size), size, stream, pool, reservation=size, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int, frames: list[Raw]) -> bool:
        """Map at least `size` bytes from the start of an unmapped block; merges it with free neighbours."""
        size = _round_up(size, self._handle(block.pool))
        if self.reserved + size > self.capacity:
            return False
        start = block.addr
        block.pool.remove(block)
        block.mapped = True
        if size < block.size:
            rest = block.piece(block.addr + size, block.size - size)
            rest.mapped = False
            rest.insert_between(block, block.next)
            block.pool.add(rest)
            block.size = size
        self._merge(block)
        if block.previous is None and not block.segment_frames:
            block.segment_frames = frames
        block.pool.add(block)
        self._count(block.pool, reserved_bytes=size)
        self._device_call("num_device_alloc", "segment_map", block, frames, start, size)
        return True

    def _hand_out(self, block: Block, size: int, rounded: int, frames: list[Raw]) -> int:
        """Split a block that was taken out of its pool, and give its front to the caller."""
        was_split = block.is_split
        changes: dict[str, int] = {}
        if self._is_to_split(block, rounded):
            rest = block
            block = rest.piece(rest.addr, rounded)
            block.insert_between(rest.previous, rest)
            rest.addr += rounded
            rest.size -= rounded
            rest.pool.add(rest)
            if was_split:
                changes = {"inactive_split_bytes": -rounded}
            else:
                changes = {"inactive_split_bytes": rest.size, "inactive_split": 1}
        elif was_split:
            changes = {"inactive_split_bytes": -block.size, "inactive_split": -1}
        if not block.reservation:
            self._count(block.pool, **changes)
        block.state = "active_allocated"
        block.requested = size
        block.frames = frames
        self.live[block.addr] = block
        self._record("alloc", block.addr, size, block.stream, frames)
        self._count(block.pool, allocation=1, allocated_bytes=block.size, active=1, active_bytes=block.size)
        self._count(block.pool, requested_bytes=size)
        self._count_oversize("oversize_allocations", block.size, 1)
        return block.addr

    # Freeing.

    def _request_free(self, addr: int, stack: str) -> Block:
        block = self.live[addr]
        assert block.state == "active_allocated", "freed twice"
        block.state = "active_pending_free"
        block.free_frames = _frames(stack)
        self._record("free_requested", addr, block.requested, block.stream, block.free_frames)
        self._count(block.pool, allocation=-1, allocated_bytes=-block.size)
        self._count_oversize("oversize_allocations", block.size, -1)
        return block

    def _complete(self, block: Block, frames: list[Raw] | None = None) -> None:
        """`frames`: of whoever notices that the other streams are done."""
        del self.live[block.addr]
        requested, size = block.requested, block.size
        self._record("free_completed", block.addr, requested, block.stream, frames or block.free_frames)
        block.state = "inactive"
        block.frames = []
        merged = self._merge(block)
        block.pool.add(block)
        if not block.reservation:
            count, total = -len(merged), -sum(merged)
            if block.is_split:
                count, total = count + 1, total + block.size
            self._count(block.pool, inactive_split=count, inactive_split_bytes=total)
        self._count(block.pool, active=-1, active_bytes=-size, requested_bytes=-requested)

    def _complete_finished(self, frames: list[Raw]) -> None:
        finished, self.finished = self.finished, []
        for block in finished:
            self._complete(block, frames)

    def _complete_waiting(self, frames: list[Raw]) -> None:
        self.finished += self.waiting
        self.waiting.clear()
        self._complete_finished(frames)

    def _merge(self, block: Block) -> list[int]:
        """Let `block` swallow its free neighbours (unmapped: its unmapped ones); the bytes of each."""
        merged = []
        for other in (block.previous, block.next):
            if other is None or other.state != "inactive" or other.mapped != block.mapped:
                continue
            other.pool.remove(other)
            merged.append(other.size)
            block.size += other.size
            if other is block.previous:
                block.addr = other.addr
                block.insert_between(other.previous, block.next)
            else:
                block.insert_between(block.previous, other.next)
        return merged

    def _release_cached(self, frames: list[Raw]) -> None:
        self._complete_waiting(frames)
        default = [((0, 0), "large"), ((0, 0), "small")]
        for pool, name in default + [(pool, name) for pool in self.dropped for name in ("small", "large")]:
            blocks = self._pool(pool, name).in_order()
            for block in blocks:
                if not block.reservation and not block.is_split:
                    self._release(block, frames)
            for block in blocks:
                if block.reservation:
                    self._unmap(block, frames)

    def _release_available(self, pool: Pool, stream: int, rounded: int, frames: list[Raw]) -> bool:
        """Give back cached blocks that are too large to be split; whether that made room."""
        if self.max_split_size == UNLIMITED:
            return False
        wanted = max(rounded, self.max_split_size)
        fitting = pool.from_size(stream, wanted)
        if fitting and not fitting[0].reservation:
            self._release(fitting[0], frames)
            return True
        released = 0
        for block in reversed([block for block in pool.from_size(stream, self.max_split_size) if block.size < wanted]):
            if released < wanted and not block.reservation:
                released += block.size
                self._release(block, frames)
        return released >= wanted

    def _collect_garbage(self, frames: list[Raw]) -> None:
        assert self.limit is not None
        threshold = int(self.gc_threshold * self.limit)
        target = self.reserved - threshold
        pool = self._pool((0, 0), "large")
        candidates = [block for block in pool.in_order() if not block.is_split and not block.reservation]
        reclaimed = 0
        while reclaimed < target and candidates:
            total_age = sum(pool.searches - block.searches for block in candidates)
            average = total_age / len(candidates)
            old = [block for block in candidates if pool.searches - block.searches >= average]
            candidates = [block for block in candidates if block not in old]
            for block in old:
                reclaimed += block.size
                self._release(block, frames)

    def _release(self, block: Block, frames: list[Raw]) -> None:
        """cudaFree of a whole segment."""
        block.pool.remove(block)
        self.driver.release(block.addr, block.size)
        self._count(block.pool, segment=-1, reserved_bytes=-block.size)
        self._count_oversize("oversize_segments", block.size, -1)
        self._device_call("num_device_free", "segment_free", block, frames)

    def _unmap(self, block: Block, frames: list[Raw]) -> None:
        """Give back the whole handles inside a free expandable block."""
        base = block
        while base.previous is not None:
            base = base.previous
        handle = self._handle(block.pool)
        start = base.addr + _round_up(block.addr - base.addr, handle)
        stop = base.addr + (block.addr + block.size - base.addr) // handle * handle
        if start >= stop:
            return
        block.pool.remove(block)
        if block.addr < start:
            before = block.piece(block.addr, start - block.addr)
            before.insert_between(block.previous, block)
            block.pool.add(before)
        if stop < block.addr + block.size:
            after = block.piece(stop, block.addr + block.size - stop)
            after.insert_between(block, block.next)
            block.pool.add(after)
        block.addr, block.size, block.mapped = start, stop - start, False
        self._merge(block)
        block.pool.add(block)
        self._count(block.pool, reserved_bytes=start - stop)
        self._device_call("num_device_free", "segment_unmap", block, frames, start, stop - start)
        if not block.is_split:
            block.pool.remove(block)
            self.driver.release(block.addr, block.reservation)

    # Counters and records.

    def _count(self, pool: Pool, **changes: int) -> None:
        for name, amount in changes.items():
            self.counters[f"{name}.all"].change(amount)
            self.counters[f"{name}.{pool.name}_pool"].change(amount)

    def _count_oversize(self, name: str, size: int, amount: int) -> None:
        if size >= self.max_split_size:
            self.oversize[name].change(amount)

    def _device_call(
        self, call: str, action: str, block: Block, frames: list[Raw], addr: int = 0, size: int = 0
    ) -> None:
        addr, size = addr or block.addr, size or block.size
        self.calls[call] += 1
        self.reserved += size if call == "num_device_alloc" else -size
        self._record(action, addr, size, block.stream, frames)

    def _record(
        self, action: str, addr: int | None, size: int, stream: int, frames: list[Raw] | None, **more: int
    ) -> None:
        event: Raw = {"action": action, **more} if addr is None else {"action": action, "addr": addr}
        event.update(size=size, stream=stream, time_us=self.time_us, compile_context="N/A", user_metadata="")
        if frames is not None:
            event["frames"] = frames
        self.time_us += 1
        self.events.append(event)

    def _segments(self) -> list[Raw]:
        free = [block for pool in self.pools.values() for block in pool.in_order()]
        heads = [
            block
            for block in sorted([*self.live.values(), *free], key=lambda block: block.addr)
            if block.previous is None or not block.previous.mapped
        ]
        return [self._segment(head) for head in heads]

    def _segment(self, head: Block) -> Raw:
        blocks: list[Block] = []
        here: Block | None = head
        while here is not None and here.mapped:
            blocks.append(here)
            here = here.next
        active = [block for block in blocks if block.state != "inactive"]
        return {
            "device": 0,
            "address": head.addr,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": sum(block.size for block in active if block.state == "active_allocated"),
            "active_size": sum(block.size for block in active),
            "requested_size": sum(block.requested for block in active),
            "stream": head.stream,
            "segment_type": head.pool.name,
            "segment_pool_id": head.pool.pool_id,
            "is_expandable": head.reservation > 0,
            "frames": head.segment_frames,
            "blocks": [
                {
                    "address": block.addr,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": block.state,
                    "frames": block.frames,
                }
                for block in blocks
            ],
        }

    def _settings(self) -> Raw:
        return {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1 if self.max_split_size == UNLIMITED else self.max_split_size,
            "garbage_collection_threshold": self.gc_threshold,
            "expandable_segments": self.expandable,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "graph_capture_record_stream_reuse": False,
            "roundup_power2_divisions": {str(1 << power): parts for power, parts in enumerate(self.roundup)},
        }


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _room(block: Block) -> int:
    """Bytes of a block with the unmapped space right behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


def _frames(stack: str) -> list[Raw]:
    return [{"name": stack, "filename": "program.py", "line": 1}]


# Programs: lists of operations.
#   ("malloc", size, stream, pool)
#   ("free", i), ("free_later", i)   the i-th of the blocks that are allocated, counted round
#   ("finish", i)                    the i-th of the pending blocks
#   ("poll",), ("empty_cache",), ("snapshot",), ("drop_pool", pool)


def run(operations: Iterable[Operation], **settings: Any) -> Machine:
    """Run a program on a new `Machine`; it goes on after an out-of-memory error. `settings` as of `Machine`."""
    machine = Machine(**settings)
    alive: list[int] = []
    for number, operation in enumerate(operations):
        name, arguments = operation[0], operation[1:]
        if name == "malloc":
            with suppress(OutOfMemory):
                size, stream, pool = arguments
                alive.append(machine.malloc(size, stream, pool, stack=f"malloc {number}"))
        elif name in ("free", "free_later") and alive:
            getattr(machine, name)(alive.pop(arguments[0] % len(alive)))
        elif name == "finish" and machine.waiting:
            machine.finish(machine.waiting[arguments[0] % len(machine.waiting)].addr)
        elif name in ("poll", "empty_cache", "snapshot", "drop_pool"):
            getattr(machine, name)(*arguments)
    return machine


SIZES = {
    "tiny": (1, 4 * KiB),
    "small": (4 * KiB, MiB - 2 * KiB),
    "about 1 MiB": (MiB - KiB, MiB + KiB),
    "medium": (MiB + KiB, 10 * MiB - 2 * KiB),
    "about 10 MiB": (10 * MiB - KiB, 10 * MiB + KiB),
    "leaves slack": (19 * MiB, 20 * MiB),  # cached blocks of 20 MiB hold it, and the rest is not split off
    "large": (10 * MiB, 64 * MiB),
}
STREAMS = (0, 0, 0, 7)
PRIVATE_POOLS = ((0, 0), (0, 0), (0, 0), (0, 0), (1, 0), (0, 1))


def random_operations(rng: random.Random, n: int) -> list[Operation]:
    """A program of `n` operations that uses every size class, streams, private pools and delayed frees."""
    kinds = {"malloc": 45, "free": 40, "free_later": 5, "finish": 4, "poll": 1, "empty_cache": 2, "snapshot": 1}
    kinds["drop_pool"] = 1
    bases = [rng.randint(10 * MiB, 64 * MiB) for _ in range(3)]  # sizes that come again, a little smaller
    operations: list[Operation] = []
    for name in rng.choices(list(kinds), list(kinds.values()), k=n):
        if name == "malloc":
            size = rng.randint(*rng.choice(list(SIZES.values())))
            if rng.random() < 0.1:
                size = rng.randint(1, 64) * MiB  # now and then exactly a limit
            elif rng.random() < 0.2:
                size = rng.choice(bases) - rng.choice((0, rng.randint(1, MiB), rng.randint(1, 2 * MiB)))
            operations.append((name, size, rng.choice(STREAMS), rng.choice(PRIVATE_POOLS)))
        elif name == "drop_pool":
            operations.append((name, rng.choice(PRIVATE_POOLS)))
        elif name in ("free", "free_later", "finish"):
            operations.append((name, rng.randrange(1 << 16)))
        else:
            operations.append((name,))
    return operations


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Keyword arguments of `Machine`: plain now and then, else a mixture."""
    settings: dict[str, Any] = {"driver": TouchingDriver(random.Random(rng.random()))}
    if rng.random() < 0.7:
        settings["expandable_segments"] = rng.random() < 0.3
        settings["max_split_size"] = rng.choice((None, 21 * MiB, 32 * MiB))
        settings["roundup"] = rng.choice((0, 2, 4, 8, 16, [rng.choice((0, 1, 2, 4, 8)) for _ in range(16)]))
        settings["max_non_split_rounding"] = rng.choice((MiB, 20 * MiB, 20 * MiB))
    if rng.random() < 0.3:
        settings["limit"] = rng.randint(64, 512) * MiB
        settings["garbage_collection_threshold"] = rng.choice((0.0, 0.3, 0.8))
    if rng.random() < 0.2:
        settings["capacity"] = rng.randint(96, 512) * MiB
    return settings


def random_program(rng: random.Random, n: int, **settings: Any) -> Raw:
    """The snapshot after a random program of `n` operations under `settings` (as of `Machine`)."""
    settings.setdefault("driver", TouchingDriver(random.Random(rng.random())))
    return run(random_operations(rng, n), **settings).snapshot()


_index = st.integers(0, 1 << 16)
_whole = st.integers(1, 64).map(lambda count: count * MiB)
_size = st.one_of(*(st.integers(low, high) for low, high in SIZES.values()), _whole)
_operations: tuple[st.SearchStrategy[Operation], ...] = (
    st.tuples(st.just("malloc"), _size, st.sampled_from(STREAMS), st.sampled_from(PRIVATE_POOLS)),
    st.tuples(st.just("free"), _index),
    st.tuples(st.sampled_from(("free_later", "finish")), _index),
    st.tuples(st.sampled_from(("poll", "empty_cache", "snapshot"))),
    st.tuples(st.just("drop_pool"), st.sampled_from(PRIVATE_POOLS)),
)


@st.composite
def programs(draw: st.DrawFn, max_operations: int = 300) -> list[Operation]:
    """Lists of operations for `run`, most of them malloc and free."""
    malloc, free, *others = _operations
    length = draw(st.integers(0, max_operations))  # else hypothesis prefers lists of about five
    operations = st.one_of(malloc, malloc, malloc, free, free, *others)
    return draw(st.lists(operations, min_size=length, max_size=length))


def machine_settings() -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of `Machine`."""
    return st.builds(random_settings, st.randoms(use_true_random=False))


def legal_snapshots(max_operations: int = 300) -> st.SearchStrategy[Raw]:
    """Raw snapshots of complete, legal traces under any settings."""

    def snapshot(operations: list[Operation], settings: dict[str, Any]) -> Raw:
        return run(operations, **settings).snapshot()

    return st.builds(snapshot, programs(max_operations), machine_settings())


def cut_front(snapshot: Raw, k: int, device: int = 0) -> Raw:
    """The same snapshot whose trace of `device` lost its first `k` events: recording that began late."""
    traces = list(snapshot["device_traces"])
    traces[device] = traces[device][k:]
    return {**snapshot, "device_traces": traces}


def ring(snapshot: Raw, max_entries: int) -> Raw:
    """The same snapshot from a ring buffer that held the last `max_entries` (> 0) events of each device."""
    return {**snapshot, "device_traces": [trace[-max_entries:] for trace in snapshot["device_traces"]]}
