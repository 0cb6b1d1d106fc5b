"""What torch holds at one moment, a row a segment: what lies where, what is free, and which blocks keep it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.allocator.sizes import SMALL_REQUEST
from memtrace.analysis.address_cells import NO_BLOCK, Cells, Pieces, cells_of, pieces_of
from memtrace.analysis.frames import ShownStacks
from memtrace.analysis.holes import Gaps, gaps_among, holes_at
from memtrace.analysis.ledger import DEFAULT_POOL, Ledger, PoolId, part_numbers, parts_of, span_terms
from memtrace.analysis.oom import Cache, cache_of
from memtrace.analysis.pins import pinning_blocks
from memtrace.analysis.residents import Residents, Units, residents_at, units_of
from memtrace.errors import QuestionError
from memtrace.model import Action, Frame, SnapshotData, StackTable
from memtrace.model.frozen import FrozenColumns

ORDERS = ("address", "size", "free", "stranded")
"""What segments can be ordered by: the address upwards, all others downwards."""


@dataclass(frozen=True, slots=True)
class Total:
    """What one pool of one stream holds, in bytes. `pool`, `stream`, `pool_id` and the ledger are as in `Part`."""

    pool: str
    stream: int
    pool_id: PoolId | None
    segments: int
    blocks: int
    largest_hole: int
    ledger: Ledger

    @property
    def reserved(self) -> int:
        return self.ledger.reserved

    @property
    def allocated(self) -> int:
        return self.ledger.requested + self.ledger.rounding + self.ledger.slack

    @property
    def free(self) -> int:
        return self.ledger.stranded + self.ledger.releasable


@dataclass(frozen=True, slots=True)
class Holder:
    """A block that keeps free memory of its segment from going back to the driver. `hostage_bytes` is its share of the
    stranded bytes, `alone_bytes` could go back if it were freed and no other."""

    block: int
    is_live: bool
    hostage_bytes: int
    alone_bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """The request that failed at an event, in bytes as in `Oom`: `asked_bytes` is the rounded one, `segment_bytes` what
    the driver was asked for, `cache` what was free for it. `hole_segment` is the segment with the largest hole of its
    pool and stream, `hole_address` where that begins; None: there is no hole at all."""

    asked_bytes: int
    segment_bytes: int
    pool: str
    stream: int
    is_private: bool
    cache: Cache
    hole_segment: int | None
    hole_address: int | None


@dataclass(frozen=True, slots=True, eq=False)
class AddressMap(FrozenColumns):
    """One row a segment (in expandable memory: a mapped range), by address. Sizes in bytes.

    `span` is its row of `Spans`; `pool` indexes `pools` (-1: nobody says); `stack` is an id of `stacks` (-1: none) for
    the call that made it. `allocated`, `pending` and `free` are what is in it: `free` is `stranded` (it has to stay)
    and `releasable` (torch could give it back). `largest_hole` is the largest run of free bytes, `blocks` counts those
    in use or pending.

    The blocks of segment i are the rows `first[i]` to `first[i + 1]` (not included) of the columns from `block` on, by
    address: `block` is a row of `Lifetimes`, `hostage` and `alone` as in `Holder`, `is_pin` says whether it is one.
    `lost` are rows of `Lifetimes` that lie in no segment, which only a recording that contradicts itself has;
    `lost_allocated` and `lost_pending` are their bytes.
    """

    device: int
    event: int
    span: NDArray[np.int64]
    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    stream: NDArray[np.uint64]
    large: NDArray[np.bool_]
    pool: NDArray[np.int32]
    expandable: NDArray[np.bool_]
    stack: NDArray[np.int32]
    allocated: NDArray[np.int64]
    pending: NDArray[np.int64]
    free: NDArray[np.int64]
    stranded: NDArray[np.int64]
    releasable: NDArray[np.int64]
    largest_hole: NDArray[np.int64]
    blocks: NDArray[np.int64]
    first: NDArray[np.int64]
    block: NDArray[np.int64]
    block_address: NDArray[np.uint64]
    block_size: NDArray[np.int64]
    is_live: NDArray[np.bool_]
    hostage: NDArray[np.int64]
    alone: NDArray[np.int64]
    is_pin: NDArray[np.bool_]
    lost: NDArray[np.int64]
    lost_allocated: int
    lost_pending: int
    totals: tuple[Total, ...]
    request: Request | None
    pools: tuple[PoolId, ...]
    stacks: StackTable

    def __len__(self) -> int:
        return len(self.span)

    def __repr__(self) -> str:
        return f"AddressMap({len(self):,} segments, {int(self.size.sum()):,} bytes after event {self.event})"

    def order(self, by: str = "address") -> NDArray[np.int64]:
        """The segments by one of `ORDERS`, those that are equal by address."""
        if by not in ORDERS:
            raise QuestionError.unknown("order of segments", by, ORDERS, where="memtrace")
        if by == "address":
            return np.arange(len(self), dtype=np.int64)
        column = {"size": self.size, "free": self.free, "stranded": self.stranded}[by]
        return np.asarray(np.argsort(-column, kind="stable"), np.int64)

    def pool_id(self, segment: int) -> PoolId | None:
        """The pool of a segment as torch writes it, (0, 0) being the default one; None: nobody says."""
        pool = int(self.pool[segment])
        return self.pools[pool] if 0 <= pool < len(self.pools) else None

    def frames(self, segment: int) -> tuple[Frame, ...]:
        """The stack that made a segment, innermost frame first; empty where none is recorded."""
        return self.stacks.frames(int(self.stack[segment]))

    def is_mostly_free(self, segment: int) -> bool:
        """Whether more than half of a segment is free."""
        return int(self.free[segment]) * 2 > int(self.size[segment])

    def holders(self, segment: int) -> tuple[Holder, ...]:
        """The blocks that keep what is free in a segment, those with most of it first."""
        rows = np.arange(self.first[segment], self.first[segment + 1])
        rows = rows[self.is_pin[rows]]
        rows = rows[np.argsort(-self.hostage[rows], kind="stable")]
        columns = (self.block, self.is_live, self.hostage, self.alone)
        return tuple(Holder(*one) for one in zip(*(column[rows].tolist() for column in columns), strict=True))

    def segment_at(self, address: int) -> int | None:
        """The segment that an address is in."""
        place = int(np.searchsorted(self.address, np.uint64(address), side="right")) - 1
        if place < 0 or address >= int(self.address[place]) + int(self.size[place]):
            return None
        return place

    def block_at(self, address: int) -> int | None:
        """The block that an address is in, a row of `Lifetimes`; None: the byte is free, or not torch's."""
        segment = self.segment_at(address)
        if segment is None:
            return None
        pieces = self.blocks_of(segment)
        offset = address - int(self.address[segment])
        block = int(pieces.block[np.searchsorted(pieces.offset, offset, side="right") - 1])
        return None if block == NO_BLOCK else block

    def blocks_of(self, segment: int) -> Pieces:
        """The blocks of a segment and the gaps between them, by address."""
        rows = slice(int(self.first[segment]), int(self.first[segment + 1]))
        begin = (self.block_address[rows] - self.address[segment]).astype(np.int64)
        end = begin + self.block_size[rows]
        return pieces_of(int(self.size[segment]), begin, end, self.block[rows], self.is_live[rows])

    def cells(self, segment: int, width: int) -> Cells:
        """A segment drawn in `width` cells, with all of its bytes. Raises ValueError for none."""
        if width < 1:
            raise ValueError(f"{width} cells")
        return cells_of(self.blocks_of(segment), width)


def address_map_at(data: SnapshotData, replay: Replay, shown: ShownStacks, event: int) -> AddressMap:
    """What torch holds after `event` (-1: before the first)."""
    blocks, spans = replay.lifetimes, replay.spans
    residents = residents_at(replay, event)
    units = units_of(replay, residents)
    by_address = np.argsort(spans.address[residents.spans], kind="stable")
    span = residents.spans[by_address]
    stranded, releasable = (term[by_address] for term in span_terms(replay, residents, units))
    gaps = gaps_among(replay, span, residents.block)
    hole = _hole_sizes(gaps)
    segment_of = np.full(len(spans) + 1, -1, np.int64)  # the last is NO_SPAN's
    segment_of[span] = np.arange(len(span))
    of_gap, home = segment_of[gaps.span], segment_of[residents.span]
    largest = np.zeros(len(span), np.int64)
    np.maximum.at(largest, of_gap, hole)
    size, live = blocks.size[residents.block], residents.live
    inside = np.flatnonzero(home >= 0)
    inside = inside[np.argsort(home[inside], kind="stable")]
    lost, row = np.flatnonzero(home < 0), residents.block[inside]
    count = np.bincount(home[inside], minlength=len(span)).astype(np.int64)
    pins = pinning_blocks(residents, units)
    hostage, alone = np.zeros(len(residents), np.int64), np.zeros(len(residents), np.int64)
    is_pin = np.isin(residents.block, pins.block)  # both are in order of address
    hostage[is_pin], alone[is_pin] = pins.hostage, pins.alone
    return AddressMap(
        device=replay.device,
        event=event,
        span=span,
        address=spans.address[span],
        size=spans.size[span],
        stream=spans.stream[span],
        large=spans.large[span],
        pool=spans.pool[span],
        expandable=spans.expandable[span],
        stack=shown.rows(spans.stack[span]).astype(np.int32),
        allocated=_summed(home[inside], np.where(live, size, 0)[inside], len(span)),
        pending=_summed(home[inside], np.where(live, 0, size)[inside], len(span)),
        free=stranded + releasable,
        stranded=stranded,
        releasable=releasable,
        largest_hole=largest,
        blocks=count,
        first=np.concatenate([np.zeros(1, np.int64), np.cumsum(count)]),
        block=row,
        block_address=blocks.address[row],
        block_size=blocks.size[row],
        is_live=live[inside],
        hostage=hostage[inside],
        alone=alone[inside],
        is_pin=is_pin[inside],
        lost=residents.block[lost],
        lost_allocated=int(size[lost][live[lost]].sum()),
        lost_pending=int(size[lost][~live[lost]].sum()),
        totals=_totals(data, replay, residents, units, largest[np.argsort(by_address)]),
        request=_request(data, replay, event, gaps, segment_of),
        pools=data.pools,
        stacks=shown.table,
    )


def _hole_sizes(gaps: Gaps) -> NDArray[np.int64]:
    return (gaps.stop - gaps.begin).astype(np.int64)


def _summed(group: NDArray[np.int64], values: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total


def _totals(
    data: SnapshotData, replay: Replay, residents: Residents, units: Units, largest: NDArray[np.int64]
) -> tuple[Total, ...]:
    """`largest`: of each of `residents.spans` its largest hole."""
    keys, of_block, of_span = part_numbers(replay, residents)
    blocks, segments = (np.bincount(number, minlength=len(keys)).tolist() for number in (of_block, of_span))
    holes = np.zeros(len(keys), np.int64)
    np.maximum.at(holes, of_span, largest)
    counts = {
        ("large" if large else "small", stream, data.pools[pool] if pool >= 0 else None): found
        for (large, stream, pool), found in zip(keys, zip(segments, blocks, holes.tolist(), strict=True), strict=True)
    }
    totals = []
    for part in parts_of(replay, residents, units, data.pools):
        made, held, hole = counts[part.pool, part.stream, part.pool_id]
        totals.append(Total(part.pool, part.stream, part.pool_id, made, held, hole, part.ledger))
    return tuple(totals)


def _request(
    data: SnapshotData, replay: Replay, event: int, gaps: Gaps, segment_of: NDArray[np.int64]
) -> Request | None:
    """What failed at an event, and the largest hole that it could have had; None where nothing failed."""
    trace, spans = data.trace(replay.device), replay.spans
    if not 0 <= event < replay.events or trace.action[event] != Action.OOM:
        return None
    asked, stream = int(trace.size[event]), int(trace.stream[event])
    is_large = asked > SMALL_REQUEST
    default = [number for number, pool in enumerate(data.pools) if pool == DEFAULT_POOL]
    pool = spans.pool[gaps.span]
    fits = ((pool < 0) | np.isin(pool, default)) & (spans.large[gaps.span] == is_large)
    rows = np.flatnonzero(fits & (spans.stream[gaps.span] == np.uint64(stream)))
    found = rows[_hole_sizes(gaps)[rows].argmax()] if len(rows) else None
    own_pool = -1 if trace.pool is None else int(trace.pool[event])
    return Request(
        asked_bytes=asked,
        segment_bytes=Rules.of(replay.settings, data.settings, Tie.ADDRESS).segment_size(asked),
        pool="large" if is_large else "small",
        stream=stream,
        is_private=own_pool >= 0 and data.pools[own_pool] != DEFAULT_POOL,
        cache=cache_of(holes_at(replay, event, data.pools), large=is_large, stream=stream),
        hole_segment=None if found is None else int(segment_of[gaps.span[found]]),
        hole_address=None if found is None else int(gaps.begin[found]),
    )
