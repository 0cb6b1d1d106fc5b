"""Forward replay by torch's own rules: block sizes, lifetimes, split counters, segments (snapshot-format 5.2).

The reference in Python: one loop over the events with a dict of blocks in use and a dict of free blocks.
An event that the rules do not allow is first explained by a rule that changed while recording (a block split
where the settings say it is not, or the reverse: spec 5.5); what that cannot explain raises ContradictionError.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from memtrace.allocator.initial import ContradictionError
from memtrace.allocator.logs import BEFORE, BlockLog, ChangeLog, Run, SpanLog
from memtrace.allocator.memory_map import (
    UNKNOWN_POOL,
    MapBlock,
    MemoryMap,
    PrivatePools,
    Range,
    RangeSet,
    assign_owners,
    gaps,
    splits_finely,
)
from memtrace.allocator.sizes import LARGE_REMAINDER, MIN_BLOCK, SMALL_SEGMENT
from memtrace.allocator.stream import FREE, Events
from memtrace.model import Action

_SEARCH_BUDGET = 20_000_000
"""Blocks looked at in plain searches (rare in real traces) before a trace counts as not the allocator's work."""


def forward_pass(events: Events, start: MemoryMap, private: PrivatePools, forced: dict[int, int]) -> tuple[Run, int]:
    """One pass over all events from `start`: what it recorded, and how many sizes it had to revise on the way.

    `forced` maps alloc events to block sizes known better than by the rules; sizes that had to be explained by a
    changed rule are added to it, and hold from the start in the next pass. Raises ContradictionError at the first
    event that cannot be explained.
    """
    walk = _Forwards(events, start, private, forced)
    return walk.run(), walk.revised


class _Forwards:
    def __init__(self, events: Events, start: MemoryMap, private: PrivatePools, forced: dict[int, int]) -> None:
        self.events = events.lists
        self.settings = events.settings
        self.pool_of_segment = private.of_segments()
        self.unsplit = private.unsplit
        self.forced = forced
        self.revised = 0
        self.searched = 0
        self.still = len(events)
        self.blocks, self.spans = BlockLog(), SpanLog()
        self.splits, self.segments = ChangeLog(), ChangeLog()
        self.live: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.free: dict[int, tuple[int, int]] = {}
        self.free_ends: dict[int, int] = {}
        self.owner_large: list[bool] = []
        self.owner_fine: list[bool] = []
        self.owner_unsplit: list[bool] = []
        self.owner_expandable: list[bool] = []
        self.owner_blocks: list[int] = []
        self.owner_span: list[int] = []
        self.groups: dict[tuple[bool, int], int] = {}
        self._place(start)

    def _place(self, start: MemoryMap) -> None:
        """The state before the first event."""
        ranges, blocks = start.as_ranges(), start.as_blocks()
        self.groups = assign_owners(ranges)
        for item in ranges:
            if item.owner == len(self.owner_large):
                self._new_owner(item)
            item.span = self.spans.add(item, BEFORE, self.still)
            if not item.expandable:
                self.owner_span[item.owner] = item.span
            self.segments.add(BEFORE, 0 if item.expandable else 1, item.size, item.large)
        self.ranges = RangeSet(ranges)
        for block in blocks:
            home = self.ranges.containing(block.address)
            assert home is not None, "blocks of a memory map lie in its ranges"
            index = self._born(block, home)
            (self.pending if block.pending else self.live)[block.address] = index
            self.owner_blocks[home.owner] += 1
        holes = [(address, size, self.ranges.containing(address)) for address, size, _ in gaps(ranges, blocks)]
        for address, size, home in holes:
            assert home is not None
            self.free[address] = (size, home.owner)
            self.free_ends[address + size] = address
            self.owner_blocks[home.owner] += 1
        for _, size, home in holes:
            assert home is not None
            if not home.expandable and self.owner_blocks[home.owner] > 1:
                self.splits.add(BEFORE, 1, size, home.large)

    def _born(self, block: MapBlock, home: Range) -> int:
        log = self.blocks
        log.address.append(block.address)
        log.size.append(block.size)
        log.requested.append(block.requested)
        log.born.append(BEFORE)
        log.freed.append(BEFORE if block.pending else self.still)
        log.died.append(self.still)
        log.owner.append(home.owner)
        log.stack.append(block.stack)
        log.stream.append(home.stream)
        log.slack_bound.append(block.slack_bound)
        return len(log.address) - 1

    def run(self) -> Run:
        self._loop()
        blocks = self.blocks
        last = sorted({**self.live, **self.pending}.items())
        at_end = MemoryMap.of(
            self.ranges,
            [
                MapBlock(address, blocks.size[index], blocks.requested[index], address in self.pending)
                for address, index in last
            ],
        )
        return Run(
            blocks=blocks.columns(),
            spans=self.spans.columns(),
            splits=self.splits.columns(),
            segments=self.segments.columns(),
            owner_large=np.array(self.owner_large, np.bool_),
            owner_span=np.array(self.owner_span, np.int32),
            at_end=at_end,
            born_at_end=np.array([blocks.born[index] for _, index in last], np.int64),
        )

    def _loop(self) -> None:
        events, forced, still = self.events, self.forced, self.still
        live, pending, free, free_ends = self.live, self.pending, self.free, self.free_ends
        fine, expandable, large, counts = self.owner_fine, self.owner_expandable, self.owner_large, self.owner_blocks
        unsplit = self.owner_unsplit
        blocks, splits = self.blocks, self.splits
        add_address, add_size, add_requested = blocks.address.append, blocks.size.append, blocks.requested.append
        add_born, add_owner, add_stack = blocks.born.append, blocks.owner.append, blocks.stack.append
        add_freed, add_died, add_stream = blocks.freed.append, blocks.died.append, blocks.stream.append
        freed, died, sizes, owners = blocks.freed, blocks.died, blocks.size, blocks.owner
        max_split = self.settings.max_split_size
        next_block = len(blocks.address)
        add_bound = blocks.slack_bound.append
        ALLOC, REQUESTED, COMPLETED = int(Action.ALLOC), int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)

        for event, (action, address, size, stream, stack, rounded) in enumerate(
            zip(events.action, events.addr, events.size, events.stream, events.stack, events.rounded, strict=True)
        ):
            if action == ALLOC:
                hole = free.pop(address, None)
                if hole is None:
                    hole = self._repair(event, address)
                room, owner = hole
                del free_ends[address + room]
                if event in forced:
                    block_size = forced[event]
                    split = block_size < room
                else:
                    block_size = rounded
                    rest = room - rounded
                    split = (
                        rest >= MIN_BLOCK
                        and (fine[owner] or (rounded < max_split and rest > LARGE_REMAINDER))
                        and not unsplit[owner]
                    )
                    if not split:
                        block_size = room
                if rounded > block_size or block_size > room:
                    block_size = self._by_default_rounding(event, room, owner)
                    split = block_size < room
                if split:
                    free[address + block_size] = (room - block_size, owner)
                    free_ends[address + room] = address + block_size
                    counts[owner] += 1
                    if not expandable[owner]:
                        if counts[owner] > 2:
                            splits.add(event, 0, -block_size, large[owner])
                        else:
                            splits.add(event, 1, room - block_size, large[owner])
                elif counts[owner] > 1 and not expandable[owner]:
                    splits.add(event, -1, -room, large[owner])
                live[address] = next_block
                next_block += 1
                add_address(address)
                add_size(block_size)
                add_requested(size)
                add_born(event)
                add_freed(still)
                add_died(still)
                add_owner(owner)
                add_stack(stack)
                add_stream(stream)
                add_bound(0)
            elif action == REQUESTED:
                block = live.pop(address, None)
                if block is None:
                    raise ContradictionError(event, "a block is freed that is not in use")
                pending[address] = block
                freed[block] = event
            elif action in (COMPLETED, FREE):
                block = (live if action == FREE else pending).pop(address, None)
                if block is None:
                    raise ContradictionError(event, "a free completes that was not requested")
                if action == FREE:
                    freed[block] = event
                died[block] = event
                owner = owners[block]
                start, end = address, address + sizes[block]
                merged = merged_bytes = 0
                before = free_ends.get(start)
                if before is not None and free[before][1] == owner:
                    merged_bytes = free.pop(before)[0]
                    del free_ends[start]
                    merged = 1
                    start = before
                behind = free.get(end)
                if behind is not None and behind[1] == owner:
                    del free[end]
                    end += behind[0]
                    del free_ends[end]
                    merged += 1
                    merged_bytes += behind[0]
                free[start] = (end - start, owner)
                free_ends[end] = start
                counts[owner] -= merged
                if not expandable[owner]:
                    if counts[owner] > 1:
                        splits.add(event, 1 - merged, end - start - merged_bytes, large[owner])
                    elif merged:
                        splits.add(event, -merged, -merged_bytes, large[owner])
            elif action <= Action.SEGMENT_UNMAP:
                self._segment_event(event, action, address, size, stream, stack)

    def _segment_event(self, event: int, action: int, address: int, size: int, stream: int, stack: int) -> None:
        if action == Action.SEGMENT_ALLOC:
            self._segment_alloc(event, address, size, stream, stack)
        elif action == Action.SEGMENT_FREE:
            self._segment_free(event, address, size)
        elif action == Action.SEGMENT_MAP:
            self._segment_map(event, address, size, stream, stack)
        else:
            self._segment_unmap(event, address, size)

    def _segment_alloc(self, event: int, address: int, size: int, stream: int, stack: int) -> None:
        if size == 0 or not self.ranges.is_clear(address, size):
            raise ContradictionError(event, "a segment is made where another one lies")
        large = size != SMALL_SEGMENT
        pool = self.events.pool_of(event)
        if pool == UNKNOWN_POOL:
            pool = self.pool_of_segment.get(address, UNKNOWN_POOL)
        item = Range(address, size, large, stream, pool, expandable=False, stack=stack)
        item.owner = self._new_owner(item)
        item.span = self.owner_span[item.owner] = self.spans.add(item, event, self.still)
        self.ranges.add(item)
        self.owner_blocks[item.owner] = 1
        self.free[address] = (size, item.owner)
        self.free_ends[address + size] = address
        self.segments.add(event, 1, size, large)

    def _segment_free(self, event: int, address: int, size: int) -> None:
        item = self.ranges.at(address)
        if item is None or item.size != size or self.free.get(address) != (size, item.owner):
            raise ContradictionError(event, "a segment is released that is not there or not free")
        del self.free[address]
        del self.free_ends[address + size]
        self.ranges.remove(item)
        self.spans.died[item.span] = event
        self.segments.add(event, -1, -size, item.large)

    def _segment_map(self, event: int, address: int, size: int, stream: int, stack: int) -> None:
        if size == 0 or not self.ranges.is_clear(address, size):
            raise ContradictionError(event, "pages are mapped where memory is already mapped")
        large = size != SMALL_SEGMENT
        item = Range(address, size, large, stream, self.events.pool_of(event), expandable=True, stack=stack)
        owner = self.groups.get((large, stream))
        if owner is None:
            owner = self.groups[large, stream] = self._new_owner(item)
        item.owner = owner
        whole, joined = self.ranges.add_mapped(item)
        for part in joined:
            self.spans.died[part.span] = event
        whole.span = self.spans.add(whole, event, self.still)
        first, last = address, address + size
        before = self.free_ends.get(first)
        if before is not None and self.free[before][1] == owner:
            del self.free[before]
            del self.free_ends[first]
            first = before
        behind = self.free.get(last)
        if behind is not None and behind[1] == owner:
            del self.free[last]
            last += behind[0]
            del self.free_ends[last]
        self.free[first] = (last - first, owner)
        self.free_ends[last] = first
        self.segments.add(event, 0, size, large)

    def _segment_unmap(self, event: int, address: int, size: int) -> None:
        item = self.ranges.containing(address)
        start = self._free_start(event, address) if item is not None and item.expandable and size else None
        if item is None or start is None or start + self.free[start][0] < address + size:
            raise ContradictionError(event, "pages are unmapped that are not free")
        room, owner = self.free.pop(start)
        del self.free_ends[start + room]
        if address > start:
            self.free[start] = (address - start, owner)
            self.free_ends[address] = start
        if address + size < start + room:
            self.free[address + size] = (start + room - address - size, owner)
            self.free_ends[start + room] = address + size
        self.spans.died[item.span] = event
        for rest in self.ranges.cut(item, address, size):
            rest.span = self.spans.add(rest, event, self.still)
        self.segments.add(event, 0, -size, item.large)

    def _new_owner(self, item: Range) -> int:
        self.owner_large.append(item.large)
        self.owner_fine.append(splits_finely(item, self.settings))
        self.owner_unsplit.append(item.pool in self.unsplit)
        self.owner_expandable.append(item.expandable)
        self.owner_blocks.append(0)
        self.owner_span.append(-1)
        return len(self.owner_large) - 1

    def _free_start(self, event: int, address: int) -> int | None:
        """The free block that holds an address."""
        if address in self.free:
            return address
        start = self._nearest_below(event, self.free, address)
        return start if start is not None and address < start + self.free[start][0] else None

    def _nearest_below(self, event: int, starts: Collection[int], address: int) -> int | None:
        """The highest of `starts` below an address. Rare, so a plain search, but not without end."""
        self.searched += len(starts)
        if self.searched > _SEARCH_BUDGET:
            raise ContradictionError(event, "too many events do not fit the allocator's rules")
        return max((start for start in starts if start < address), default=None)

    def _by_default_rounding(self, event: int, room: int, owner: int) -> int:
        """The size of a block that the recorded rounding setting makes too large: the setting was another then."""
        plain = self.events.plain[event]
        if event in self.forced and plain <= self.forced[event] <= room:
            return self.forced[event]
        if plain > room:
            raise ContradictionError(event, "an allocation is larger than the free block at its place")
        rest = room - plain
        whole = rest == 0 or (not self.owner_fine[owner] and rest <= LARGE_REMAINDER)
        self.forced[event] = room if whole else plain
        return self.forced[event]

    def _repair(self, event: int, address: int) -> tuple[int, int]:
        """The hole for an allocation at an address that no free block starts at, if a changed rule explains it."""
        hole = self._hole_in_slack(event, address) or self._hole_behind_larger(event, address)
        if hole is None:
            raise ContradictionError(event, "an allocation does not start where a free block starts")
        self.free.pop(address, None)
        return hole

    def _hole_in_slack(self, event: int, address: int) -> tuple[int, int] | None:
        """`address` lies in the unused end of a block: that block was split after all."""
        blocks = self.blocks
        for used in (self.live, self.pending):
            start = self._nearest_below(event, used, address)
            if start is None:
                continue
            block = used[start]
            end, born = start + blocks.size[block], blocks.born[block]
            if address >= end or born == BEFORE or self.events.plain[born] > address - start:
                continue
            owner = blocks.owner[block]
            self.forced[born] = address - start
            self.revised += 1
            blocks.size[block] = address - start
            self.owner_blocks[owner] += 1
            behind = self.free.get(end)
            if behind is not None and behind[1] == owner:
                del self.free[end]
                end += behind[0]
                self.owner_blocks[owner] -= 1
            self.free_ends[end] = address
            return end - address, owner
        return None

    def _hole_behind_larger(self, event: int, address: int) -> tuple[int, int] | None:
        """`address` lies inside a free block: the block in front of it is larger than the rules say."""
        start = self._free_start(event, address)
        if start is None:
            return None
        room, owner = self.free[start]
        blocks = self.blocks
        for used in (self.live, self.pending):
            front = self._nearest_below(event, used, start)
            if front is None:
                continue
            block = used[front]
            if front + blocks.size[block] != start or blocks.owner[block] != owner or blocks.born[block] == BEFORE:
                continue
            self.forced[blocks.born[block]] = address - front
            self.revised += 1
            blocks.size[block] = address - front
            del self.free[start]
            self.free_ends[start + room] = address
            return start + room - address, owner
        return None
