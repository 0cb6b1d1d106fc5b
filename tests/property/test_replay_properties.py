"""The replay against two independent judges: a small allocator that makes legal traces, and a slow oracle."""

from __future__ import annotations

import lzma
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import cut_front, legal_snapshots, random_program, ring
from oracle import replay as replay_slowly
from recordings import snapshot_path

import memtrace
from memtrace.allocator import COUNTERS, POOLS, Replay, replay, series, stats
from memtrace.io.parse import parse

EXACT = ("allocation", "segment", "active", "reserved_bytes", "requested_bytes")
BOUNDED = ("allocated_bytes", "active_bytes")


def replayed(raw: dict[str, Any]) -> Replay:
    return replay(parse(raw, path="made", file_bytes=0), 0)


def bound_over_time(window: Replay) -> np.ndarray:
    """By how much block sizes may be larger, in total, after each event (entry 0: before the first)."""
    blocks = window.lifetimes
    rows = np.flatnonzero(blocks.slack_bound)
    delta = np.zeros(window.events + 1, np.int64)
    np.add.at(delta, blocks.born[rows] + 1, blocks.slack_bound[rows])
    ended = rows[blocks.died[rows] < window.events]
    np.subtract.at(delta, blocks.died[ended] + 1, blocks.slack_bound[ended])
    return np.cumsum(delta)


def check_window(full: Replay, window: Replay, dropped: int) -> None:
    """A trace without its first events has the same counters from there on, or is off by no more than it says."""
    assert not window.conflicts
    bound = bound_over_time(window)
    for counter in (*EXACT, *BOUNDED):
        missing = series(full, counter)[dropped:] - series(window, counter)
        assert (missing >= 0).all(), counter
        assert (missing <= (bound if counter in BOUNDED else 0)).all(), counter
    if not bound.any():
        for counter in COUNTERS:
            for pool in POOLS:
                assert (series(full, counter, pool)[dropped:] == series(window, counter, pool)).all(), (counter, pool)


@given(legal_snapshots())
@settings(max_examples=60)
def test_legal_traces_replay_as_the_oracle_does(raw: dict[str, Any]) -> None:
    data = parse(raw, path="made", file_bytes=0)
    if not data.traces or len(data.traces[0]) < 2:
        return
    ours, oracle = replay(data, 0), replay_slowly(raw)
    assert ours.complete
    assert not ours.conflicts
    assert not ours.lifetimes.slack_bound.any()
    for counter in COUNTERS:
        for pool in POOLS:
            theirs = oracle.series[f"{counter}.{'all' if pool == 'all' else pool}"]
            assert series(ours, counter, pool)[1:].tolist() == theirs, (counter, pool)
    found = stats(ours, data.traces[0])
    assert {name: found[name] for name in oracle.stats()} == oracle.stats()


@given(legal_snapshots(), st.floats(0, 1))
@settings(max_examples=100)
def test_dropping_the_front_changes_nothing_after_it(raw: dict[str, Any], where: float) -> None:
    count = len(raw["device_traces"][0])
    if count < 4:
        return
    dropped = 1 + int(where * (count - 3))
    check_window(replayed(raw), replayed(cut_front(raw, dropped)), dropped)


@pytest.mark.parametrize("seed", range(20))
def test_a_wrapped_ring_is_a_window(seed: int) -> None:
    raw = random_program(random.Random(seed), 200)
    count = len(raw["device_traces"][0])
    if count < 20:
        return
    check_window(replayed(raw), replayed(ring(raw, count // 2)), count - count // 2)


SMALL = ["mlp-adamw", "mlp-expandable", "oom-fragmented", "alloc-retry", "cuda-graph", "two-streams"]


@pytest.mark.parametrize("name", [*SMALL, "ragged", "ragged-expandable", "ragged-max-split-64", "gpt2-zero2"])
def test_dropping_the_front_of_real_traces(name: str) -> None:
    full = memtrace.load(snapshot_path(name))
    raw = raw_snapshot(name)
    count = full.replay().events
    for share in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9):
        dropped = max(1, int(share * count))
        window = parse(cut_front(raw, dropped), path=name, file_bytes=0)
        check_window(full.replay(), replay(window, 0), dropped)


@pytest.mark.parametrize("name", SMALL)
def test_block_map_at_every_event_is_the_oracles(name: str) -> None:
    snapshot, oracle = memtrace.load(snapshot_path(name)), replay_slowly(raw_snapshot(name))
    blocks = snapshot.replay().lifetimes
    for event in range(0, snapshot.replay().events, 7):
        active = blocks.active_at(event)
        columns = [column[active].tolist() for column in (blocks.address, blocks.size, blocks.requested, blocks.born)]
        ours = set(zip(*columns, (event >= blocks.freed[active]).tolist(), strict=True))
        theirs = {
            (block["addr"], block["size"], block["requested"], block["born"], block["state"] == "pending")
            for block in oracle.live_at(event)
        }
        assert ours == theirs, event


@pytest.mark.parametrize("name", ["mlp-adamw", "mlp-expandable", "oom-fragmented", "cuda-graph", "ragged-expandable"])
def test_ledger_is_the_oracles_free_memory(name: str) -> None:
    """stranded + releasable = all free bytes; releasable = whole segments, and whole pages of expandable ones."""
    from memtrace.analysis.ledger import ledger_at

    snapshot, oracle = memtrace.load(snapshot_path(name)), replay_slowly(raw_snapshot(name))
    replay_ = snapshot.replay()
    for event in range(0, replay_.events, max(1, replay_.events // 60)):
        free = releasable = 0
        for segment, segment_size, addr, size, expandable, pool in oracle.free_at(event):
            free += size
            if expandable:
                page = (2 if pool == "small" else 20) << 20
                first, last = -(-(addr - segment) // page), (addr + size - segment) // page
                releasable += max(0, last - first) * page
            elif size == segment_size:
                releasable += size
        ledger = ledger_at(replay_, event)
        assert (ledger.stranded, ledger.releasable) == (free - releasable, releasable), event
        assert ledger.reserved == snapshot.series("reserved_bytes")[event + 1]


def raw_snapshot(name: str) -> dict[str, Any]:
    with lzma.open(snapshot_path(name)) as file:
        return pickle.load(file)
