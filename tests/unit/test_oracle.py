"""The oracle against torch's own counters, and against sums done by hand."""

from __future__ import annotations

import json
import lzma
import pickle
from typing import Any

import pytest
from builders import SnapshotBuilder
from oracle import COUNTERS, block_map, replay, replay_events, round_size, segments_of
from recordings import snapshot_path, truth_path

KiB = 1 << 10
MiB = 1 << 20
RECORDINGS = (
    "alloc-retry",
    "cuda-graph",
    "llama-resume",
    "mlp-expandable",
    "oom",
    "oom-fragmented",
    "ragged-expandable",
    "ragged-max-split-64",
    "ragged-roundup-4",
    "two-streams",
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_oracle_equals_torch(name: str) -> None:
    with lzma.open(snapshot_path(name)) as file:
        snapshot: dict[str, Any] = pickle.load(file)
    truth = json.loads(truth_path(name).read_text())["stats"]
    oracle = replay(snapshot)
    stats = oracle.stats()
    assert len(stats) == 111
    assert stats == {key: truth[key] for key in stats}
    assert block_map(oracle.segments()) == block_map(segments_of(snapshot))


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (2 * MiB, 4, 2 * MiB),
        (2 * MiB + 1, 4, 2 * MiB + 512 * KiB),
        (1200 * MiB, 4, 1280 * MiB),
        (2 * KiB, 4, 2 * KiB),  # up to 512 bytes a division, steps of 512
        (2 * KiB + 1, 4, 2 * KiB + 512),
    ],
)
def test_round_size(size: int, divisions: int, rounded: int) -> None:
    assert round_size(size, {str(1 << power): divisions for power in range(16)}) == rounded


def test_each_interval_has_its_own_division() -> None:
    assert round_size(5 * MiB + 1, {"4": 2, "8": 0}) == 6 * MiB
    assert round_size(9 * MiB + 1, {"4": 2, "8": 0}) == 9 * MiB + 512
    assert round_size(600 * KiB, {"1": 1, "2": 8}) == 600 * KiB  # below 1 MiB the first one counts


def test_series_of_a_block_that_waits() -> None:
    trace = SnapshotBuilder().alloc(0, 600).free_requested(0).free_completed(0).build()
    series = replay(trace).series
    assert series["requested_bytes.all"] == [0, 600, 600, 0]
    assert series["allocated_bytes.small_pool"] == [0, 1024, 0, 0]
    assert series["active_bytes.all"] == [0, 1024, 1024, 0]
    assert series["inactive_split_bytes.all"] == [0, 2 * MiB - 1024, 2 * MiB - 1024, 0]
    assert series["active.large_pool"] == [0, 0, 0, 0]
    assert set(COUNTERS) < set(series)


def test_live_and_free_blocks_at_an_event() -> None:
    trace = SnapshotBuilder().alloc(0, 600, stack="f").free_requested(0).free_completed(0).build()
    oracle = replay(trace)
    assert oracle.live_at(0) == []
    assert oracle.free_at(0) == [(0, 2 * MiB, 0, 2 * MiB, False, "small")]
    (block,) = oracle.live_at(2)
    assert (block["addr"], block["size"], block["requested"], block["state"]) == (0, 1024, 600, "pending")
    assert (block["born"], block["stream"], block["frames"][0]["name"]) == (1, 0, "f")
    assert oracle.free_at(2) == [(0, 2 * MiB, 1024, 2 * MiB - 1024, False, "small")]
    assert oracle.free_at(3) == oracle.free_at(0)
    assert oracle.free_at(-1) == []


def test_segments_that_touch_are_not_merged() -> None:
    trace = SnapshotBuilder().segment(0, 2 * MiB).segment(2 * MiB, 2 * MiB).alloc(0, MiB).free(0).build()
    assert [segment["total_size"] for segment in replay(trace).segments()] == [2 * MiB, 2 * MiB]


def test_large_rest_of_one_mebibyte_stays_in_the_block() -> None:
    oracle = replay(SnapshotBuilder().segment(0, 20 * MiB).alloc(0, 19 * MiB).build())
    assert oracle.now["allocated_bytes.all"] == 20 * MiB
    oracle = replay(SnapshotBuilder().segment(0, 20 * MiB).alloc(0, 19 * MiB - 512).build())
    assert oracle.now["allocated_bytes.all"] == 19 * MiB - 512


def test_oversize_blocks_are_not_split() -> None:
    builder = SnapshotBuilder().settings(max_split_size=32 * MiB)
    assert replay(builder.segment(0, 40 * MiB).alloc(0, 32 * MiB).build()).now["allocated_bytes.all"] == 40 * MiB


def test_expandable_ranges_join_and_part() -> None:
    builder = SnapshotBuilder().map(0, 20 * MiB).map(20 * MiB, 20 * MiB)
    oracle = replay(builder.unmap(0, 20 * MiB).build())
    assert [segment["total_size"] for segment in oracle.at(1).segments()] == [40 * MiB]
    assert oracle.free_at(2) == [(20 * MiB, 20 * MiB, 20 * MiB, 20 * MiB, True, "large")]
    assert oracle.stats()["segment.all.peak"] == 0


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([("alloc", 0, 512)], "event 0: alloc at 0x0 is not the start of a free block"),
        ([("segment_alloc", 0, 2 * MiB), ("alloc", 512, 512)], "event 1: alloc at 0x200"),
        ([("segment_alloc", 0, 2 * MiB), ("alloc", 0, 3 * MiB)], "needs 3145728 bytes, the free block has 2097152"),
        ([("segment_alloc", 0, 2 * MiB), ("alloc", 0, 512), ("free_completed", 0, 512)], "pending block"),
        ([("segment_alloc", 0, 2 * MiB), ("alloc", 0, 512), ("free_requested", 0, 511)], "says 511 bytes"),
        ([("segment_alloc", 0, 2 * MiB), ("segment_alloc", MiB, 2 * MiB)], "overlaps"),
        ([("segment_alloc", 0, 2 * MiB), ("segment_free", 0, MiB)], "not one whole free segment"),
        ([("segment_alloc", 0, 2 * MiB), ("segment_unmap", 0, 2 * MiB)], "not free expandable memory"),
        ([("segment_unmap", 0, 2 * MiB)], "not inside one block"),
    ],
)
def test_impossible_traces_are_refused(events: list[tuple[str, int, int]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replay_events({"action": action, "addr": addr, "size": size, "stream": 0} for action, addr, size in events)


def test_unknown_actions_change_nothing() -> None:
    trace = SnapshotBuilder(torch="2.14").alloc(0, 512).annotate(0, "weights").event("block", addr=0, size=1).build()
    assert replay(trace).stats()["active_bytes.all.peak"] == 512
