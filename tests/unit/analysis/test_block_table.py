"""Rows of blocks against `blame`, the counters and a slow search."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import recordings
from builders import MiB, SnapshotBuilder

import memtrace
from memtrace.analysis.block_table import OFS, ORDERS, Freed
from memtrace.errors import QuestionError
from memtrace.model import Action, Frame

FILES = (
    "mlp-adamw",
    "gpt2-zero3-oom",
    "two-streams",
    "mlp-expandable",
    "mlp-user-metadata",
    "gpt2-zero3-ring-20000",
    "mlp-adamw-cpp-stacks",
    "public-late-start-training",
    "public-private-pools-pending-free",
    "public-synthetic-not-an-allocator",
    "public-torch-2.0-history",
    "public-state-only-259-segments",
)


@pytest.fixture(scope="module", params=FILES)
def snapshot(request: pytest.FixtureRequest) -> memtrace.Snapshot:
    return memtrace.load(recordings.snapshot_path(request.param))


def moments(snapshot: memtrace.Snapshot) -> list[int]:
    """Peak, end, before the first event, every OOM, 20 at random."""
    events = snapshot.replay().events
    trace = snapshot.data.trace(snapshot.replay().device)
    ooms = np.flatnonzero(trace.action[:events] == Action.OOM).tolist()
    some = random.Random(18).sample(range(events), min(20, events))
    return [snapshot.peak().event, events - 1, -1, *ooms[:3], *some]


@pytest.mark.parametrize("of", OFS)
def test_rows_are_those_of_blame(snapshot: memtrace.Snapshot, of: str) -> None:
    table = snapshot.block_table()
    for event in moments(snapshot):
        rows = [table.row(block, event) for block in table.alive(event, of).tolist()]
        theirs = {}
        for row in snapshot.blame(event, of, "block").rows:
            assert row.block is not None
            facts = {name: getattr(row.block, name) for name in row.block.__slots__}
            more = (row.category, row.label, row.confidence, row.stack, row.evidence)
            theirs[row.block.address, row.block.born] = (row.bytes, facts, more)
        assert len(rows) == len(theirs)
        for ours in rows:
            size, facts, more = theirs[ours.address, ours.born]
            assert {name: getattr(ours, name) for name in facts} == facts
            assert (ours.category, ours.label, ours.confidence, ours.stack, ours.evidence) == more
            assert size == (ours.requested if of == "requested" else ours.size)


@pytest.mark.parametrize("of", OFS)
def test_living_blocks_sum_to_the_counter_largest_first(snapshot: memtrace.Snapshot, of: str) -> None:
    table, counter = snapshot.block_table(), snapshot.series(f"{of}_bytes")
    for event in moments(snapshot):
        rows = [table.row(block) for block in table.alive(event, of).tolist()]
        sizes = [row.requested if of == "requested" else row.size for row in rows]
        assert sum(sizes) == counter[event + 1]
        assert sizes == sorted(sizes, reverse=True)


def test_many_living_blocks_are_as_few(snapshot: memtrace.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    table, event = snapshot.block_table(), snapshot.peak().event
    few = {of: table.alive(event, of).tolist() for of in OFS}
    monkeypatch.setattr("memtrace.analysis.block_table._FEW", -1)
    assert {of: table.alive(event, of).tolist() for of in OFS} == few


def test_columns_say_what_rows_say(snapshot: memtrace.Snapshot) -> None:
    table = snapshot.block_table()
    life, life_us, module, names = table.life(), table.life_us(), table.module(), table.modules[1]
    for block in random.Random(1).sample(range(len(table)), min(300, len(table))):
        row = table.row(block)
        assert row.life_us == (None if life_us is None else life_us[block])
        assert row.died - row.born == life[block]
        assert row.module == (names[module[block]] if module[block] >= 0 else None)
        assert row.stack == table.stack[block]
        own = int(table.own()[block])
        assert row.frame == (None if own < 0 else table.shown.table.frame(own))
        assert table.frames(block) == table.shown.table.frames(row.stack)


@pytest.mark.parametrize("by", ORDERS)
def test_sorting_is_stable_and_the_unknown_come_last(snapshot: memtrace.Snapshot, by: str) -> None:
    table = snapshot.block_table()
    rows = np.array(random.Random(2).sample(range(len(table)), min(500, len(table))), np.int64)
    place = {block: number for number, block in enumerate(rows.tolist())}
    keys, is_known = ORDERS[by](table)
    missing = np.zeros(len(table), np.bool_) if is_known is None else ~is_known
    up, down = table.ordered(rows, by), table.ordered(rows, by, descending=True)
    assert up.tolist() == sorted(rows.tolist(), key=lambda row: (missing[row], 0 if missing[row] else keys[row]))
    assert down.tolist() == sorted(
        rows.tolist(), key=lambda row: (missing[row], 0 if missing[row] else -int(keys[row]), place[row])
    )


def test_events_find_their_blocks(snapshot: memtrace.Snapshot) -> None:
    table, blocks = snapshot.block_table(), snapshot.replay().lifetimes
    events = snapshot.replay().events
    found = [freed for event in range(min(events, 3000)) for freed in table.freed_at(event)]
    early = min(events, 3000)
    expected = [Freed(block, "free_requested") for block in range(len(blocks)) if 0 <= blocks.freed[block] < early]
    expected += [Freed(block, "free_completed") for block in range(len(blocks)) if 0 <= blocks.died[block] < early]
    assert sorted(found) == sorted(expected)
    action = snapshot.data.trace(snapshot.replay().device).action
    for event in range(early):
        block = table.born_at(event)
        assert (block is not None) == (action[event] == Action.ALLOC)
        assert block is None or blocks.born[block] == event


def small(tmp_path: Path) -> memtrace.Snapshot:
    """0: segment; 1, 2: blocks of stream 0; 3: freed; 4: one on another stream's wait; 5: its free asked for."""
    builder = (
        SnapshotBuilder()
        .segment(0x1000000, 20 * MiB)
        .alloc(0x1000000, 2 * MiB, stack="forward;train.py:12 main", user_metadata="phase=forward;module=net.fc")
        .alloc(0x1200000, 3 * MiB, stack="zeta.py:3 b")
        .free(0x1000000)
        .free_requested(0x1200000)
    )
    return memtrace.load(builder.pickle(tmp_path / "small.pickle"))


def test_a_row_says_what_happened_to_a_block(tmp_path: Path) -> None:
    table = small(tmp_path).block_table()
    row = table.row(0)
    assert (row.address, row.size, row.born, row.freed, row.died, row.pool) == (0x1000000, 2 * MiB, 1, 3, 4, "large")
    assert (row.segment, row.module, row.phase, row.life_us) == (0x1000000, "net.fc", "forward", 3)
    assert row.frame == Frame("model.py", 1, "forward")
    assert table.frames(0) == (Frame("model.py", 1, "forward"), Frame("train.py", 12, "main"))


def test_a_pending_block_waits_at_that_moment_only(tmp_path: Path) -> None:
    table = small(tmp_path).block_table()
    assert table.row(1).category == table.row(1, 4).category == "fwd.temp"
    assert table.row(1, 5).category == "alloc.pending"
    assert table.row(1, 5).evidence is None
    assert table.row(1).died == 6  # not in this recording


def test_a_block_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    table = small(tmp_path).block_table()
    for block in (-1, 2):
        with pytest.raises(IndexError):
            table.row(block)


def test_unknown_names_are_questions(tmp_path: Path) -> None:
    table = small(tmp_path).block_table()
    with pytest.raises(QuestionError, match="size"):
        table.ordered(np.arange(2), "sise")
    with pytest.raises(QuestionError, match="allocated"):
        table.alive(0, "reserved")


def test_the_table_is_made_once_a_device(tmp_path: Path) -> None:
    snapshot = small(tmp_path)
    assert snapshot.block_table() is snapshot.block_table(0)


def test_without_times_lives_have_none(tmp_path: Path) -> None:
    path = SnapshotBuilder(torch="2.1").alloc(0x1000000, 600).pickle(tmp_path / "old.pickle")
    table = memtrace.load(path).block_table()
    assert table.row(0).life_us is None
    assert table.life_us() is None


def test_with_cpp_frames_are_all_frames() -> None:
    snapshot = memtrace.load(recordings.snapshot_path("mlp-adamw-cpp-stacks"))
    table = snapshot.block_table()
    block = int(np.flatnonzero(table.stack >= 0)[0])
    everything = table.frames(block, cpp=True)
    assert everything == snapshot.data.stacks.frames(int(snapshot.replay().lifetimes.stack[block]))
    assert len(everything) > len(table.frames(block)) > 0
