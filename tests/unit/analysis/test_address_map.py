"""Segments at a moment: their sums against the counters and the ledger, their cells against their blocks."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import recordings
from builders import SnapshotBuilder, write_pickle
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import legal_snapshots

import memtrace
from memtrace.analysis.address_cells import NO_BLOCK, CellState, cells_of, pieces_of
from memtrace.analysis.address_map import ORDERS, AddressMap
from memtrace.analysis.holes import holes_at
from memtrace.analysis.ledger import TERMS, ledger_at
from memtrace.errors import QuestionError

MiB = 1 << 20
BASE = 0x7F00_0000_0000
FILES = (
    "two-streams",
    "oom-fragmented",
    "mlp-expandable",
    "cuda-graph",
    "mlp-compile-reduce-overhead",
    "ragged",
    "ragged-expandable",
    "ragged-max-split-64",
    "ragged-too-little",
    "gpt2-zero3-oom",
    "gpt2-zero3-ring-20000",
    "stress-expandable-split",
    "public-private-pools-pending-free",
    "public-state-only-259-segments",
    "public-synthetic-not-an-allocator",
)
UNSOUND = ("public-synthetic-not-an-allocator",)


@pytest.fixture(scope="module", params=FILES)
def snapshot(request: pytest.FixtureRequest) -> memtrace.Snapshot:
    return memtrace.load(recordings.snapshot_path(request.param))


def is_sound(snapshot: memtrace.Snapshot) -> bool:
    return not any(name in snapshot.data.path for name in UNSOUND)


def moments(snapshot: memtrace.Snapshot) -> list[int]:
    """Both peaks, end, every out of memory up to five, before the first event, and any others."""
    last = snapshot.replay().events - 1
    found = [snapshot.event("peak", "reserved"), snapshot.event("peak"), last, -1]
    found += np.random.default_rng(11).integers(-1, last + 1, 5).tolist()
    return [*found, *(oom.place.event for oom in snapshot.ooms()[:5])]


def check_sums(snapshot: memtrace.Snapshot, found: AddressMap) -> None:
    """Rows and totals sum to the counters and to the ledger; each row to its size."""
    event = found.event + 1
    reserved, allocated, active = (
        int(snapshot.series(f"{of}_bytes")[event]) for of in ("reserved", "allocated", "active")
    )
    assert found.size.sum() == reserved
    assert found.allocated.sum() + found.lost_allocated == allocated
    assert found.pending.sum() + found.lost_pending == active - allocated
    assert (found.allocated + found.pending + found.free == found.size).all()
    assert (found.free == found.stranded + found.releasable).all()
    ledger = ledger_at(snapshot.replay(), found.event)
    assert found.stranded.sum() == ledger.stranded
    assert found.releasable.sum() == ledger.releasable
    for term in TERMS:
        assert sum(getattr(total.ledger, term) for total in found.totals) == getattr(ledger, term)
    assert sum(total.reserved for total in found.totals) == reserved
    assert sum(total.allocated for total in found.totals) == allocated
    assert sum(total.free for total in found.totals) == found.free.sum()
    assert sum(total.segments for total in found.totals) == len(found)
    assert sum(total.blocks for total in found.totals) == found.blocks.sum() + len(found.lost)
    assert len(found.block) == found.blocks.sum()
    assert (np.diff(found.address.astype(np.int64)) > 0).all()


def check_cells(found: AddressMap, segment: int, width: int) -> None:
    """Each byte of a segment is in one cell, and no block vanishes."""
    pieces, cells = found.blocks_of(segment), found.cells(segment, width)
    size, length = int(found.size[segment]), np.diff(pieces.offset)
    assert (pieces.offset[0], pieces.offset[-1]) == (0, size)
    assert (length > 0).all()
    assert (np.diff(cells.offset) == cells.allocated + cells.pending + cells.free).all()
    assert (cells.offset[0], cells.offset[-1], len(cells)) == (0, size, width)
    is_block = pieces.block != NO_BLOCK
    assert cells.allocated.sum() == length[is_block & pieces.is_live].sum() == found.allocated[segment]
    assert cells.pending.sum() == length[is_block & ~pieces.is_live].sum() == found.pending[segment]
    assert cells.free.sum() == length[~is_block].sum() == found.free[segment]
    assert max(length[~is_block], default=0) == found.largest_hole[segment]
    kinds = np.stack([cells.free, cells.allocated, cells.pending])
    assert ((cells.state == CellState.MIXED) == ((kinds > 0).sum(axis=0) > 1)).all()
    for state in (CellState.FREE, CellState.ALLOCATED, CellState.PENDING):
        assert ((cells.state == state) <= (kinds[state] == np.diff(cells.offset))).all()
    for cell in range(0, width, max(width // 9, 1)):
        begin, end = cells.offset[cell : cell + 2].tolist()
        shares = {
            block: min(stop, end) - max(start, begin)
            for (start, stop), block in zip(
                itertools.pairwise(pieces.offset.tolist()), pieces.block.tolist(), strict=True
            )
            if block != NO_BLOCK and start < end and stop > begin
        }
        assert cells.block[cell] == (max(shares, key=shares.__getitem__) if shares else NO_BLOCK)


def test_rows_sum_to_the_counters(snapshot: memtrace.Snapshot) -> None:
    for event in moments(snapshot):
        found = snapshot.address_map(event)
        assert (found.event, found.device) == (event, snapshot.default_device)
        check_sums(snapshot, found)
        if is_sound(snapshot):
            assert len(found.lost) == 0


def test_every_device_has_its_map() -> None:
    path = recordings.snapshot_path("public-annotations-python-stacks")
    snapshot = memtrace.load(path)
    for device in snapshot.devices:
        found = snapshot.address_map("end", device)
        assert found.size.sum() == snapshot.series("reserved_bytes", device=device)[-1]


@pytest.mark.parametrize("width", [1, 7, 120])
def test_cells_have_every_byte_of_a_segment(snapshot: memtrace.Snapshot, width: int) -> None:
    if not is_sound(snapshot):
        pytest.skip("its blocks overlap")
    for event in moments(snapshot)[:3]:
        found = snapshot.address_map(event)
        for segment in found.order("size")[:12].tolist():
            check_cells(found, segment, width)


def test_overlapping_blocks_do_not_make_more_bytes_than_there_are() -> None:
    snapshot = memtrace.load(recordings.snapshot_path(UNSOUND[0]))
    for event in moments(snapshot):
        found = snapshot.address_map(event)
        for segment in range(len(found)):
            cells = found.cells(segment, 50)
            assert (cells.allocated + cells.pending + cells.free).sum() == found.size[segment]


def test_rows_are_what_lies_in_their_range(snapshot: memtrace.Snapshot) -> None:
    """Against the lifetimes, one block after another."""
    blocks = snapshot.replay().lifetimes
    for event in moments(snapshot)[:2]:
        found = snapshot.address_map(event)
        allocated, pending, count = Counter[int](), Counter[int](), Counter[int]()
        for row in np.flatnonzero(blocks.active_at(event)).tolist():
            address = int(blocks.address[row])
            segment = found.segment_at(address)
            if segment is None:
                assert row in found.lost
                continue
            (allocated if event < blocks.freed[row] else pending)[segment] += int(blocks.size[row])
            count[segment] += 1
            if is_sound(snapshot):
                assert found.block_at(address) == row
                assert found.block_at(address + int(blocks.size[row]) - 1) == row
                assert row in found.block[found.first[segment] : found.first[segment + 1]]
        for segment in range(len(found)):
            assert (found.allocated[segment], found.pending[segment]) == (allocated[segment], pending[segment])
            assert found.blocks[segment] == count[segment]


def test_what_is_free_is_no_block(snapshot: memtrace.Snapshot) -> None:
    found = snapshot.address_map()
    for segment in range(len(found)):
        pieces, base = found.blocks_of(segment), int(found.address[segment])
        for begin, block in zip(pieces.offset[:-1].tolist(), pieces.block.tolist(), strict=True):
            assert found.block_at(base + begin) == (None if block == NO_BLOCK else block)
        assert found.segment_at(base + int(found.size[segment])) in (None, segment + 1)
    assert found.block_at(0) is None
    assert found.block_at((1 << 64) - 1) is None


def test_totals_know_the_largest_hole_of_their_pool_and_stream(snapshot: memtrace.Snapshot) -> None:
    for event in moments(snapshot):
        found = snapshot.address_map(event)
        holes = holes_at(snapshot.replay(), event, snapshot.data.pools)
        for total in found.totals:
            segments = [
                segment
                for segment in range(len(found))
                if (bool(found.large[segment]), int(found.stream[segment]), found.pool_id(segment))
                == (total.pool == "large", total.stream, total.pool_id)
            ]
            assert total.segments == len(segments)
            assert total.largest_hole == max((int(found.largest_hole[one]) for one in segments), default=0)
        for large, stream in itertools.product((False, True), {total.stream for total in found.totals}):
            known = [
                total.largest_hole
                for total in found.totals
                if (total.pool == "large", total.stream) == (large, stream) and total.pool_id in ((0, 0), None)
            ]
            assert max(known, default=0) == holes.of_pool(large=large).of_stream(stream).largest


def test_holders_have_all_that_is_stranded(snapshot: memtrace.Snapshot) -> None:
    for event in moments(snapshot):
        found = snapshot.address_map(event)
        whole = snapshot.ledger(event)
        unpinned = sum(pin.hostage_bytes for pin in whole.pins if not pin.blocks)
        assert found.hostage.sum() + unpinned == found.stranded.sum()
        assert found.alone[found.is_pin].sum() == sum(pin.alone_bytes for pin in whole.pins)
        for segment in range(len(found)):
            holders = found.holders(segment)
            if not found.expandable[segment]:
                assert sum(holder.hostage_bytes for holder in holders) == found.stranded[segment]
            assert [holder.hostage_bytes for holder in holders] == sorted(
                (holder.hostage_bytes for holder in holders), reverse=True
            )
            assert {holder.block for holder in holders} <= set(found.blocks_of(segment).block.tolist())


@pytest.mark.parametrize("by", ORDERS)
def test_orders(snapshot: memtrace.Snapshot, by: str) -> None:
    found = snapshot.address_map()
    order = found.order(by)
    assert sorted(order.tolist()) == list(range(len(found)))
    column = getattr(found, by)[order]
    assert column.tolist() == sorted(column.tolist(), reverse=by != "address")
    same = [
        (left, right)
        for left, right in itertools.pairwise(order)
        if getattr(found, by)[left] == getattr(found, by)[right]
    ]
    assert all(left < right for left, right in same)


@pytest.mark.parametrize(
    "name",
    ["oom", "oom-fragmented", "oom-memory-outside-torch", "gpt2-zero3-oom", "llama-oom-forward", "ragged-too-little"],
)
def test_what_failed_and_the_largest_hole_are_those_of_oom(name: str) -> None:
    snapshot = memtrace.load(recordings.snapshot_path(name))
    ooms = snapshot.ooms()
    assert ooms
    for oom in ooms:
        found = snapshot.address_map(oom.place.event)
        request = found.request
        assert request is not None
        assert (request.asked_bytes, request.segment_bytes) == (oom.asked_bytes, oom.segment_bytes)
        assert (request.pool, request.stream, request.is_private) == (oom.pool, oom.stream, oom.is_private)
        assert request.cache == oom.cache
        if request.hole_segment is None or request.hole_address is None:
            assert oom.cache.largest == 0
            continue
        assert found.largest_hole[request.hole_segment] == oom.cache.largest
        assert found.block_at(request.hole_address) is None
        assert found.segment_at(request.hole_address) == request.hole_segment
        assert snapshot.address_map(oom.place.event - 1).request is None


def test_what_cannot_be_asked() -> None:
    snapshot = memtrace.load(recordings.snapshot_path("two-streams"))
    with pytest.raises(QuestionError, match="no order of segments 'weight'"):
        snapshot.address_map().order("weight")
    with pytest.raises(ValueError, match="0 cells"):
        snapshot.address_map().cells(0, 0)


# By hand.


def address_map(builder: SnapshotBuilder, folder: Path, at: str | int = "end") -> AddressMap:
    snapshot = memtrace.load(builder.pickle(folder / "one.pickle"))
    found = snapshot.address_map(at)
    check_sums(snapshot, found)
    for segment, width in itertools.product(range(len(found)), (1, 13, 100)):
        check_cells(found, segment, width)
    return found


def test_a_segment_knows_what_it_is(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .segment(BASE, 20 * MiB, stream=7, pool=(0, 3), stack="grow;train.py:3 main")
        .alloc(BASE, 2 * MiB)
        .alloc(BASE + 2 * MiB, 3 * MiB)
        .free_requested(BASE + 2 * MiB)
        .alloc(BASE + 64 * MiB, 700)
    )
    found = address_map(builder, tmp_path)
    assert found.address.tolist() == [BASE, BASE + 64 * MiB]
    assert found.size.tolist() == [20 * MiB, 2 * MiB]
    assert (found.stream.tolist(), found.large.tolist()) == ([7, 0], [True, False])
    assert [found.pool_id(segment) for segment in (0, 1)] == [(0, 3), (0, 0)]
    assert [frame.name for frame in found.frames(0)] == ["grow", "main"]
    assert (found.allocated[0], found.pending[0], found.free[0]) == (2 * MiB, 3 * MiB, 15 * MiB)
    assert (found.largest_hole[0], found.blocks[0]) == (15 * MiB, 2)
    assert not found.expandable.any()
    assert [found.is_mostly_free(segment) for segment in (0, 1)] == [True, True]


def test_the_block_that_keeps_a_mostly_free_segment(tmp_path: Path) -> None:
    builder = SnapshotBuilder().segment(BASE, 20 * MiB)
    for place in range(4):
        builder.alloc(BASE + place * 5 * MiB, 5 * MiB)
    found = address_map(builder, tmp_path)
    assert (found.holders(0), found.is_mostly_free(0)) == ((), False)
    builder.free(BASE).free(BASE + 10 * MiB).free_requested(BASE + 15 * MiB)
    found = address_map(builder, tmp_path)
    assert not found.is_mostly_free(0)  # half is not most
    builder.free_completed(BASE + 15 * MiB)
    found = address_map(builder, tmp_path)
    (holder,) = found.holders(0)
    assert (holder.hostage_bytes, holder.alone_bytes, holder.is_live) == (15 * MiB, 20 * MiB, True)
    assert found.is_mostly_free(0)
    assert found.block_at(BASE + 5 * MiB) == holder.block
    assert found.largest_hole[0] == 10 * MiB


def test_expandable_ranges_are_rows_of_their_own(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .map(BASE, 60 * MiB)
        .alloc(BASE, 5 * MiB)
        .map(BASE + 200 * MiB, 20 * MiB)
        .alloc(BASE + 200 * MiB, 20 * MiB)
    )
    found = address_map(builder, tmp_path)
    assert found.size.tolist() == [60 * MiB, 20 * MiB]
    assert found.expandable.all()
    assert (found.stranded.tolist(), found.releasable.tolist()) == ([15 * MiB, 0], [40 * MiB, 0])
    assert [(holder.hostage_bytes, holder.alone_bytes) for holder in found.holders(0)] == [(15 * MiB, 20 * MiB)]


def test_a_request_cannot_have_the_holes_of_others(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .segment(BASE, 20 * MiB)
        .alloc(BASE, 12 * MiB)
        .segment(BASE + 64 * MiB, 20 * MiB)
        .alloc(BASE + 64 * MiB, 11 * MiB)
        .segment(BASE + 128 * MiB, 40 * MiB, pool=(0, 3))
        .segment(BASE + 192 * MiB, 30 * MiB, stream=5)
        .oom(16 * MiB)
    )
    request = address_map(builder, tmp_path).request
    assert request is not None
    assert (request.asked_bytes, request.segment_bytes, request.pool) == (16 * MiB, 16 * MiB, "large")
    assert (request.hole_segment, request.hole_address) == (1, BASE + 75 * MiB)
    assert (request.cache.largest, request.cache.free, request.cache.other_largest) == (9 * MiB, 17 * MiB, 30 * MiB)
    none = address_map(SnapshotBuilder().alloc(BASE, 512).oom(16 * MiB), tmp_path).request
    assert none is not None
    assert (none.hole_segment, none.hole_address, none.cache.largest) == (None, None, 0)


def test_a_small_block_does_not_vanish_in_its_cell(tmp_path: Path) -> None:
    builder = SnapshotBuilder().segment(BASE, 2 * MiB)
    for place in range(3):
        builder.alloc(BASE + place * 512, 512)
    builder.free(BASE + 512)
    found = address_map(builder, tmp_path)
    cells = found.cells(0, 4)
    assert cells.state.tolist() == [CellState.MIXED, CellState.FREE, CellState.FREE, CellState.FREE]
    assert (cells.allocated.tolist(), cells.free[0]) == ([1024, 0, 0, 0], 512 * 1024 - 1024)
    assert cells.block.tolist() == [found.block_at(BASE), NO_BLOCK, NO_BLOCK, NO_BLOCK]  # of equals the lower
    assert [found.block_at(BASE + place * 512 + 511) is None for place in range(4)] == [False, True, False, True]


def test_more_cells_than_bytes() -> None:
    offsets = np.array([1], np.int64)
    cells = cells_of(pieces_of(3, offsets, offsets + 1, np.array([8]), np.array([True])), 7)
    assert np.diff(cells.offset).tolist() == [0, 0, 1, 0, 1, 0, 1]
    assert (cells.allocated.sum(), cells.free.sum()) == (1, 2)
    assert (cells.block == 8).sum() == 1


def test_an_empty_map(tmp_path: Path) -> None:
    found = address_map(SnapshotBuilder().alloc(BASE, 512), tmp_path, at=-1)
    assert (len(found), found.totals, found.segment_at(BASE), found.block_at(BASE)) == (0, (), None, None)
    assert found.order("free").tolist() == []


@settings(max_examples=40)
@given(legal_snapshots(60), st.floats(0, 1))
def test_any_legal_program(tmp_path_factory: pytest.TempPathFactory, raw: dict[str, object], share: float) -> None:
    snapshot = memtrace.load(write_pickle(raw, tmp_path_factory.mktemp("job") / "one.pickle"))
    if not snapshot.devices:
        return
    found = snapshot.address_map(round(share * snapshot.replay().events) - 1)
    check_sums(snapshot, found)
    for segment in range(len(found)):
        check_cells(found, segment, 17)
