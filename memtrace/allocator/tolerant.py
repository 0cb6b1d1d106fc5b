"""What a trace alone supports when it contradicts itself or the final map: every allocation and free it shows.

Nothing is placed or split: an allocation has its rounded size, a free without an allocation frees a block from
before the recording, and an allocation over a block still in use ends that block (its free was not seen). Each
event that does not fit counts as a conflict. Memory in no known segment is its own segment, so that sums hold.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from memtrace.allocator.logs import BEFORE, BlockLog, ChangeLog, Run, SpanLog
from memtrace.allocator.memory_map import UNKNOWN_POOL, MemoryMap, Range, RangeSet
from memtrace.allocator.sizes import SMALL_REQUEST, SMALL_SEGMENT
from memtrace.allocator.stream import FREE, Events
from memtrace.model import Action
from memtrace.model.stacks import NOT_RECORDED

REASONS = (
    _NOT_IN_USE := "a block is freed that is not in use",
    _NOT_SEEN_ALLOCATED := "a block is freed whose allocation is not in the trace",
    _STILL_IN_USE := "memory is handed out that is still in use",
    _SEGMENT_IN_THE_WAY := "a segment is made where another one lies",
    _SEGMENT_NOT_THERE := "a segment is released that is not there",
)
"""Why an event does not fit. The native kernel numbers them in this order."""

_MADE = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_GONE = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


def replay_trace_alone(events: Events) -> tuple[Run, list[tuple[int, str]]]:
    """The run, and the events that do not fit with the reason for each."""
    walk = _Walk(events)
    for event in range(len(events)):
        walk.step(event)
    return walk.finish(), walk.conflicts


class _Walk:
    def __init__(self, events: Events) -> None:
        self.events = events.lists
        self.still = len(events)
        self.conflicts: list[tuple[int, str]] = []
        self.blocks, self.spans, self.segments = BlockLog(), SpanLog(), ChangeLog()
        self.span_of_block: list[int] = []
        self.large_of_block: list[bool] = []
        self.live: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.uses = _LastUses()
        self.starts: list[int] = []
        self.ranges = RangeSet([])
        for item in _ranges_before(events):
            self._add_range(item, BEFORE)

    def step(self, event: int) -> None:
        events = self.events
        action, address, size = events.action[event], events.addr[event], events.size[event]
        if action == Action.ALLOC:
            self._end_overlapped(event, address, events.rounded[event])
            self._begin(event, event, events.stack[event])
        elif action == Action.FREE_REQUESTED:
            block = self.live.pop(address, None)
            if block is None:
                block = self._from_before(event)
                if block is None:
                    return
                del self.live[address]
            self.pending[address] = block
            self.blocks.freed[block] = event
        elif action in (Action.FREE_COMPLETED, FREE):
            self._complete(event, address)
        elif action in _MADE:
            self._make_range(event, address, size)
        elif action in _GONE:
            self._drop_range(event, address, size)

    def finish(self) -> Run:
        """Owners are one per block here: each block knows its own pool and segment."""
        self.blocks.owner[:] = range(len(self.blocks.address))
        return Run(
            blocks=self.blocks.columns(),
            spans=self.spans.columns(),
            splits=ChangeLog().columns(),
            segments=self.segments.columns(),
            owner_large=np.array(self.large_of_block, np.bool_),
            owner_span=np.array(self.span_of_block, np.int32),
            at_end=MemoryMap(),
            born_at_end=np.zeros(0, np.int64),
        )

    def _complete(self, event: int, address: int) -> None:
        block = self.pending.pop(address, None)
        if block is not None:
            self._end(event, address, block)
            return
        block = self.live.pop(address, None)
        if block is None:
            block = self._from_before(event)
            if block is None:
                return
            del self.live[address]
        self.blocks.freed[block] = event
        self._end(event, address, block)

    def _from_before(self, event: int) -> int | None:
        """A block that is freed and was not seen allocated: from before the recording, unless memory says otherwise."""
        address, size = self.events.addr[event], self.events.rounded[event]
        if self._is_used(address, size):
            self.conflicts.append((event, _NOT_IN_USE))
            return None
        born = self.uses.latest(address, address + size)
        if born > BEFORE:  # another block, or no memory, was here before: the allocation came later and is missing
            self.conflicts.append((event, _NOT_SEEN_ALLOCATED))
        return self._begin(event, born, NOT_RECORDED)

    def _begin(self, event: int, born: int, stack: int) -> int:
        events, log = self.events, self.blocks
        address, size = events.addr[event], events.rounded[event]
        large = size > SMALL_REQUEST
        home = self.ranges.containing(address)
        if home is not None and address + size <= home.end:
            span = -1 if home.expandable else home.span
            large = home.large
        else:
            item = Range(address, size, large, events.stream[event], events.pool_of(event), expandable=False)
            span = self.spans.add(item, born, self.still)
            self.segments.add(born, 0, size, large)
        log.address.append(address)
        log.size.append(size)
        log.requested.append(events.size[event])
        log.born.append(born)
        log.freed.append(self.still)
        log.died.append(self.still)
        log.owner.append(-1)
        log.stack.append(stack)
        log.stream.append(events.stream[event])
        log.slack_bound.append(0)
        block = len(log.address) - 1
        self.span_of_block.append(span)
        self.large_of_block.append(large)
        self.live[address] = block
        insort(self.starts, address)
        return block

    def _end(self, event: int, address: int, block: int) -> None:
        del self.starts[bisect_left(self.starts, address)]
        self.blocks.died[block] = event
        self.uses.mark(address, address + self.blocks.size[block], event)
        span = self.span_of_block[block]
        home = self.ranges.containing(address)
        if span >= 0 and (home is None or home.span != span) and self.spans.died[span] == self.still:
            self.spans.died[span] = event
            self.segments.add(event, 0, -self.spans.size[span], self.spans.large[span])

    def _overlapped(self, address: int, size: int) -> list[int]:
        """Addresses of blocks in use (or pending) that touch [address, address + size)."""
        index = bisect_left(self.starts, address)
        found = []
        if index:
            start = self.starts[index - 1]
            if start + self.blocks.size[self._block_at(start)] > address:
                found.append(start)
        while index < len(self.starts) and self.starts[index] < address + size:
            found.append(self.starts[index])
            index += 1
        return found

    def _is_used(self, address: int, size: int) -> bool:
        """Whether any block in use (or pending) touches [address, address + size)."""
        index = bisect_left(self.starts, address)
        if index < len(self.starts) and self.starts[index] < address + size:
            return True
        return index > 0 and self.starts[index - 1] + self.blocks.size[self._block_at(self.starts[index - 1])] > address

    def _block_at(self, address: int) -> int:
        return self.live[address] if address in self.live else self.pending[address]

    def _end_overlapped(self, event: int, address: int, size: int) -> None:
        for start in self._overlapped(address, size):
            self.conflicts.append((event, _STILL_IN_USE))
            block = self.live.pop(start, None)
            if block is not None:
                self.blocks.freed[block] = event
            else:
                block = self.pending.pop(start)
            self._end(event, start, block)

    def _make_range(self, event: int, address: int, size: int) -> None:
        if size == 0 or not self.ranges.is_clear(address, size):
            self.conflicts.append((event, _SEGMENT_IN_THE_WAY))
            return
        self._end_overlapped(event, address, size)
        events = self.events
        item = _range(
            events.action[event], address, size, events.stream[event], events.pool_of(event), events.stack[event]
        )
        self._add_range(item, event)

    def _add_range(self, item: Range, event: int) -> None:
        if item.expandable:
            item.owner = 2 * item.stream + item.large
            whole, joined = self.ranges.add_mapped(item)
            for part in joined:
                self.spans.died[part.span] = event
        else:
            self.ranges.add(item)
            whole = item
        whole.span = self.spans.add(whole, event, self.still)
        self.segments.add(event, 0 if item.expandable else 1, item.size, item.large)
        self.uses.mark(item.start, item.end, event)

    def _drop_range(self, event: int, address: int, size: int) -> None:
        item = self.ranges.containing(address)
        whole = item is not None and (item.expandable or (item.start, item.size) == (address, size))
        if item is None or not whole or size == 0 or address + size > item.end:
            self.conflicts.append((event, _SEGMENT_NOT_THERE))
            return
        self._end_overlapped(event, address, size)
        self.spans.died[item.span] = event
        for rest in self.ranges.cut(item, address, size):
            rest.span = self.spans.add(rest, event, self.still)
        self.segments.add(event, 0 if item.expandable else -1, -size, item.large)


class _LastUses:
    """For every address the event at which the last block there ended, or memory was taken from the driver.

    Intervals that do not overlap, by start.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.uses: dict[int, tuple[int, int]] = {}
        """start -> (end, event)"""

    def latest(self, start: int, end: int) -> int:
        """The last such event anywhere in [start, end); BEFORE if there is none."""
        return max((self.uses[place][1] for place in self._touching(start, end)), default=BEFORE)

    def mark(self, start: int, end: int, event: int) -> None:
        """At `event` everything in [start, end) became free."""
        for place in self._touching(start, end):
            stop, earlier = self.uses.pop(place)
            del self.starts[bisect_left(self.starts, place)]
            if place < start:
                self._add(place, start, earlier)
            if stop > end:
                self._add(end, stop, earlier)
        self._add(start, end, event)

    def _add(self, start: int, end: int, event: int) -> None:
        self.uses[start] = (end, event)
        insort(self.starts, start)

    def _touching(self, start: int, end: int) -> list[int]:
        first = bisect_left(self.starts, start)
        if first and self.uses[self.starts[first - 1]][0] > start:
            first -= 1
        return self.starts[first : bisect_left(self.starts, end)]


def _range(action: int, address: int, size: int, stream: int, pool: int, stack: int) -> Range:
    expandable = action in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
    return Range(address, size, size != SMALL_SEGMENT, stream, pool, expandable, stack)


def _ranges_before(events: Events) -> list[Range]:
    """Segments that are released without having been made in the recording: they were there before it."""
    made, before = RangeSet([]), RangeSet([])
    for item, is_made in _segment_events(events):
        if is_made:
            if item.size and made.is_clear(item.start, item.size):
                made.add(item)
        elif item.size:
            inside = made.containing(item.start)
            if inside is not None and item.end <= inside.end:
                made.cut(inside, item.start, item.size)
            elif made.is_clear(item.start, item.size) and before.is_clear(item.start, item.size):
                before.add(item)
    return list(before)


def _segment_events(events: Events) -> Iterator[tuple[Range, bool]]:
    """The range of each segment event, and whether it was made then."""
    rows = np.flatnonzero((events.action >= Action.SEGMENT_ALLOC) & (events.action <= Action.SEGMENT_UNMAP))
    pool = np.full(len(rows), UNKNOWN_POOL) if events.pool is None else events.pool[rows]
    columns = (events.action[rows], events.addr[rows], events.size[rows], events.stream[rows], pool, events.stack[rows])
    for action, address, size, stream, where, stack in zip(*(column.tolist() for column in columns), strict=True):
        is_made = action in _MADE
        yield _range(action, address, size, stream, where, stack if is_made else NOT_RECORDED), is_made
