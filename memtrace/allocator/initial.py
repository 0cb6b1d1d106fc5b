"""The state before the first event, by walking the trace backwards from the final map (snapshot-format 5.3, 5.4)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from memtrace.allocator.memory_map import (
    MapBlock,
    MemoryMap,
    PrivatePools,
    Range,
    RangeSet,
    assign_owners,
    gaps,
    splits_finely,
)
from memtrace.allocator.sizes import (
    LARGE_PAGE,
    LARGE_REMAINDER,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    round_sizes,
)
from memtrace.allocator.stream import FREE, Events
from memtrace.model import Action

_SEARCH_BUDGET = 100_000_000
_REHOME_BUDGET = 10_000_000


class ContradictionError(Exception):
    """An event that cannot have happened in the state at hand. Internal: `replay` decides what follows."""

    def __init__(self, event: int, reason: str) -> None:
        super().__init__(f"event {event}: {reason}")
        self.event = event
        self.reason = reason


def map_before(events: Events, at_end: MemoryMap) -> MemoryMap:
    """The memory map before the first event. Raises ContradictionError where trace and final map disagree."""
    walk = _Backwards(events, at_end)
    for event in range(len(events) - 1, -1, -1):
        walk.undo(event)
    return walk.result()


class _Backwards:
    """The map while walking back. Free blocks in `free` (start -> size, range), ordered by `starts`."""

    def __init__(self, events: Events, at_end: MemoryMap) -> None:
        self.columns = events
        self.events = events.lists
        self.settings = events.settings
        self.private = PrivatePools.of(at_end, events.settings)
        ranges, blocks = at_end.as_ranges(), at_end.as_blocks()
        self.groups = assign_owners(ranges)
        self.owners = 1 + max((item.owner for item in ranges), default=-1)
        self.ranges = RangeSet(ranges)
        self.used = {block.address: block for block in blocks}
        self.used_end = {block.address + block.size: block for block in self.used.values()}
        self.free: dict[int, tuple[int, Range]] = {start: (size, item) for start, size, item in gaps(ranges, blocks)}
        self.starts = sorted(self.free)
        self.uses: PageUses | None = None
        self.rehomed = 0

    def undo(self, event: int) -> None:
        action = self.events.action[event]
        if action == Action.ALLOC:
            self._undo_alloc(event)
        elif action == Action.FREE_COMPLETED:
            self._undo_completed(event)
        elif action == Action.FREE_REQUESTED:
            block = self.used.get(self.events.addr[event])
            if block is None or not block.pending:
                raise ContradictionError(event, "a block was freed that is not pending afterwards")
            block.pending = False
        elif action == FREE:
            self._undo_completed(event)
            self.used[self.events.addr[event]].pending = False
        elif action == Action.SEGMENT_ALLOC:
            self._undo_segment_alloc(event)
        elif action == Action.SEGMENT_FREE:
            self._undo_segment_free(event)
        elif action == Action.SEGMENT_MAP:
            self._undo_map(event)
        elif action == Action.SEGMENT_UNMAP:
            self._undo_unmap(event)

    def result(self) -> MemoryMap:
        return MemoryMap.of(self.ranges, self.used.values())

    def _undo_alloc(self, event: int) -> None:
        address = self.events.addr[event]
        block = self.used.get(address)
        if block is None or block.pending:
            raise ContradictionError(event, "an allocation is not in use afterwards")
        item = self.ranges.containing(address)
        if item is None:
            raise ContradictionError(event, "an allocation lies in no segment")
        del self.used[address]
        end = address + block.size
        del self.used_end[end]
        size = block.size
        behind = self.free.get(end)
        if behind is not None and end < item.end:
            self._drop_free(end)
            size += behind[0]
        self._add_free(address, size, item)

    def _undo_completed(self, event: int) -> None:
        """A block comes back into a free block that now holds its place; how large it was is 5.4's question."""
        events = self.events
        address = events.addr[event]
        start, free_size, item = self._free_containing(event, address)
        available = start + free_size - address
        size, bound = self._size_of(event, available, item, start == address and free_size == item.size)
        self._drop_free(start)
        front = address - start
        if front:
            before = self.used_end.get(start) if start > item.start else None
            if before is not None and 0 < front <= before.slack_bound:
                # no free block that small can exist here: the gap is the slack of the block in front of it
                del self.used_end[start]
                before.size += front
                before.slack_bound = 0
                self.used_end[address] = before
            else:
                self._add_free(start, front, item)
        block = MapBlock(address, size, events.size[event], pending=True, slack_bound=bound)
        self.used[address] = block
        self.used_end[address + size] = block
        if size < available:
            self._add_free(address + size, available - size, item)

    def _size_of(self, event: int, available: int, item: Range, is_whole: bool) -> tuple[int, int]:
        """(block size, by how much it may be larger) of a freed block with `available` bytes to the next block."""
        rounded = self.events.rounded[event]
        if rounded > available:
            rounded = self.events.plain[event]  # the rounding setting may have changed since
        if rounded > available:
            raise ContradictionError(event, "a freed block is larger than the free space at its place")
        if item.pool in self.private.unsplit and is_whole:
            return available, 0
        if splits_finely(item, self.settings):
            return rounded, 0
        rest = available - rounded
        if rest <= LARGE_REMAINDER:
            return available, 0
        if rounded >= self.settings.max_split_size:
            # a block this large is never split, so it fills its segment
            return (available, 0) if is_whole else (rounded, min(rest, LARGE_PAGE))
        return rounded, LARGE_REMAINDER

    def _undo_segment_alloc(self, event: int) -> None:
        item = self.ranges.at(self.events.addr[event])
        if item is None or item.expandable or item.size != self.events.size[event]:
            raise ContradictionError(event, "a segment is not there after it was made")
        if self.free.get(item.start, (0, item))[0] != item.size:
            raise ContradictionError(event, "a segment holds blocks before it was made")
        self._drop_free(item.start)
        self.ranges.remove(item)

    def _undo_segment_free(self, event: int) -> None:
        events = self.events
        start, size = events.addr[event], events.size[event]
        if size == 0 or not self.ranges.is_clear(start, size):
            raise ContradictionError(event, "a segment was released where another one lies")
        item = Range(
            start, size, size != SMALL_SEGMENT, events.stream[event], events.pool_of(event), expandable=False,
            owner=self._new_owner(),
        )  # fmt: skip
        self.ranges.add(item)
        self._add_free(start, size, item)

    def _undo_map(self, event: int) -> None:
        address, size = self.events.addr[event], self.events.size[event]
        start, free_size, item = self._free_containing(event, address)
        if not item.expandable or address + size > start + free_size or size == 0:
            raise ContradictionError(event, "mapped pages are not free right after they were mapped")
        self._drop_free(start)
        for rest in self.ranges.cut(item, address, size):
            self._rehome(event, rest)
        if address > start:
            self._add_free(start, address - start, self._range_of(start))
        if address + size < start + free_size:
            self._add_free(address + size, start + free_size - address - size, self._range_of(address + size))

    def _undo_unmap(self, event: int) -> None:
        events = self.events
        start, size, stream = events.addr[event], events.size[event], events.stream[event]
        if size == 0 or not self.ranges.is_clear(start, size):
            raise ContradictionError(event, "pages were unmapped where memory is still mapped")
        large = self._pool_of_pages(event)
        owner = self.groups.get((large, stream))
        if owner is None:
            owner = self.groups[large, stream] = self._new_owner()
        item = Range(start, size, large, stream, events.pool_of(event), expandable=True, owner=owner)
        whole, joined = self.ranges.add_mapped(item)
        if joined:
            self._rehome(event, whole)
        first, last = start, start + size
        if (before := self._free_ending(first, whole)) is not None:
            first = before
            self._drop_free(before)
        if (behind := self.free.get(last)) is not None and last < whole.end:
            self._drop_free(last)
            last += behind[0]
        self._add_free(first, last - first, whole)

    def _pool_of_pages(self, event: int) -> bool:
        """Whether unmapped pages were the large pool's: by what touches them, else by what last used that place."""
        events = self.events
        start, size, stream = events.addr[event], events.size[event], events.stream[event]
        for item in (self.ranges.at(start + size), self.ranges.containing(start - 1)):
            if item is not None and item.expandable and item.stream == stream:
                return item.large
        if self.uses is None:
            self.uses = PageUses(self.columns)
        known = self.uses.large_before(event, start, start + size)
        # never used in the window: large pages come in multiples of 20 MiB, small ones of 2 MiB
        return size % self.settings.large_page == 0 if known is None else known

    def _free_containing(self, event: int, address: int) -> tuple[int, int, Range]:
        index = bisect_right(self.starts, address) - 1
        if index >= 0:
            start = self.starts[index]
            size, item = self.free[start]
            if address < start + size:
                return start, size, item
        raise ContradictionError(event, "memory that was freed or mapped is in use right afterwards")

    def _free_ending(self, end: int, item: Range) -> int | None:
        index = bisect_left(self.starts, end) - 1
        if index < 0:
            return None
        start = self.starts[index]
        return start if start >= item.start and start + self.free[start][0] == end else None

    def _range_of(self, address: int) -> Range:
        item = self.ranges.containing(address)
        assert item is not None, "free memory always lies in a range"
        return item

    def _rehome(self, event: int, item: Range) -> None:
        """Points the free blocks inside a range that was cut or joined at the new range."""
        first, last = bisect_left(self.starts, item.start), bisect_left(self.starts, item.end)
        self.rehomed += last - first
        if self.rehomed > _REHOME_BUDGET:
            raise ContradictionError(event, "more pages are mapped and unmapped than can be followed")
        for index in range(first, last):
            start = self.starts[index]
            self.free[start] = (self.free[start][0], item)

    def _add_free(self, start: int, size: int, item: Range) -> None:
        self.free[start] = (size, item)
        insort(self.starts, start)

    def _drop_free(self, start: int) -> None:
        del self.free[start]
        del self.starts[bisect_left(self.starts, start)]

    def _new_owner(self) -> int:
        self.owners += 1
        return self.owners - 1


class PageUses:
    """Which pool used an address last before an event: reservations come and go, so the same place can be either's."""

    def __init__(self, events: Events) -> None:
        action, addr, size = events.action, events.addr.view(np.int64), events.size
        maps = np.flatnonzero(action == Action.SEGMENT_MAP)
        self.map_event = maps[np.argsort(addr[maps], kind="stable")]
        self.map_start = addr[self.map_event]
        self.map_size = size[self.map_event]
        self.longest_map = int(self.map_size.max(initial=0))
        self.searched = 0
        used = np.flatnonzero((action == Action.ALLOC) | (action == Action.FREE_COMPLETED) | (action == FREE))
        order = np.argsort(addr[used], kind="stable")
        self.use_event = used[order]
        self.use_start = addr[self.use_event]
        rounded = round_sizes(size[self.use_event], events.settings.divisions)
        self.use_large = rounded > SMALL_REQUEST

    def large_before(self, event: int, start: int, end: int) -> bool | None:
        """The pool of the last map, allocation or free inside [start, end) before `event`; None if there is none."""
        near = slice(*np.searchsorted(self.map_start, [start - self.longest_map, end]).tolist())
        inside = slice(*np.searchsorted(self.use_start, [start, end]).tolist())
        self.searched += near.stop - near.start + inside.stop - inside.start
        if self.searched > _SEARCH_BUDGET:
            raise ContradictionError(event, "more pages are mapped and unmapped than can be followed")
        covers = self.map_start[near] + self.map_size[near] > start
        last_map = np.where(covers & (self.map_event[near] < event), self.map_event[near], -1)
        last_use = np.where(self.use_event[inside] < event, self.use_event[inside], -1)
        latest_map, latest_use = int(last_map.max(initial=-1)), int(last_use.max(initial=-1))
        if latest_map < 0 and latest_use < 0:
            return None
        if latest_use > latest_map:
            return bool(self.use_large[inside][last_use.argmax()])
        return int(self.map_size[near][last_map.argmax()]) != SMALL_SEGMENT
