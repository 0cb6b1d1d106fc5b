"""The machine: by hand, against the oracle on random programs, and against real recordings."""

from __future__ import annotations

import json
import lzma
import pickle
import random
from itertools import pairwise
from typing import Any

import legal
import pytest
from hypothesis import HealthCheck, given, settings
from legal import GiB, KiB, Machine, MiB, OutOfMemory, random_program
from oracle import block_map, replay, segments_of
from recordings import snapshot_path, truth_path


def actions(machine: Machine) -> list[str]:
    return [event["action"] for event in machine.events]


def check(machine: Machine) -> None:
    """The oracle, replaying the machine's events, finds the machine's counters and blocks."""
    snapshot = machine.snapshot()
    oracle = replay(snapshot)
    own, replayed = machine.stats(), oracle.stats()
    assert {name: own[name] for name in replayed} == replayed
    assert block_map(oracle.segments()) == block_map(segments_of(snapshot))
    for index, event in enumerate(oracle.events):
        if event["action"] == "snapshot":
            assert event["size"] == oracle.series["active_bytes.all"][index]


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_replay_exactly(seed: int) -> None:
    rng = random.Random(seed)
    chosen = legal.random_settings(rng)
    check(legal.run(legal.random_operations(rng, 300), **chosen))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(legal.programs(), legal.machine_settings())
def test_any_program_replays_exactly(operations: list[tuple[Any, ...]], chosen: dict[str, Any]) -> None:
    check(legal.run(operations, **chosen))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(legal.legal_snapshots(max_operations=50))
def test_strategy_makes_snapshots(snapshot: dict[str, Any]) -> None:
    assert list(snapshot) == ["segments", "device_traces", "allocator_settings", "external_annotations"]


def test_programs_are_reproducible() -> None:
    assert random_program(random.Random(3), 200) == random_program(random.Random(3), 200)


def test_programs_reach_the_difficult_cases() -> None:
    machines = []
    for seed in range(40):
        rng = random.Random(seed)
        chosen = legal.random_settings(rng)
        machines.append(legal.run(legal.random_operations(rng, 300), **chosen))
    segments = [machine.snapshot()["segments"] for machine in machines]
    slack = [
        block.size - machine.round_size(block.requested) for machine in machines for block in machine.live.values()
    ]
    assert sum(0 < rest <= MiB for rest in slack) > 40
    assert sum(rest > MiB for rest in slack) >= 2  # oversize blocks
    assert sum(a["address"] + a["total_size"] == b["address"] for s in segments for a, b in pairwise(s)) > 100
    assert sum(segment["segment_pool_id"] != (0, 0) for s in segments for segment in s) > 100
    assert sum(machine.calls["num_alloc_retries"] > machine.calls["num_ooms"] for machine in machines) > 3
    assert {action for machine in machines for action in actions(machine)} == {
        *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
        *("alloc", "free_requested", "free_completed", "oom", "snapshot"),
    }


def test_best_fit_takes_the_lowest_address() -> None:
    machine = Machine()
    addresses = [machine.malloc(MiB) for _ in range(6)]
    for addr in addresses[::2]:
        machine.free(addr)
    assert machine.malloc(MiB) == min(addresses[::2])


def test_streams_do_not_share_blocks() -> None:
    machine = Machine()
    machine.free(machine.malloc(512))
    machine.malloc(512, stream=7)
    assert actions(machine).count("segment_alloc") == 2


def test_waiting_block_completes_at_the_next_malloc() -> None:
    machine = Machine()
    addr = machine.malloc(512)
    machine.free_later(addr)
    machine.finish(addr)
    assert actions(machine)[-1] == "free_requested"
    assert machine.malloc(512) == addr
    completed, allocated = machine.events[-2:]
    assert completed["action"] == "free_completed"
    assert completed["frames"] is allocated["frames"]


def test_poll_completes_all() -> None:
    machine = Machine()
    machine.free_later(machine.malloc(512))
    machine.poll()
    assert machine.stats()["active_bytes.all.current"] == 0
    check(machine)


def test_retry_releases_the_cache() -> None:
    machine = Machine(limit=64 * MiB)
    machine.free(machine.malloc(40 * MiB))
    machine.malloc(50 * MiB)
    assert actions(machine)[-3:] == ["segment_free", "segment_alloc", "alloc"]
    assert machine.stats()["num_alloc_retries"] == 1


def test_out_of_memory() -> None:
    machine = Machine(limit=64 * MiB, capacity=100 * MiB)
    machine.malloc(40 * MiB)
    with pytest.raises(OutOfMemory):
        machine.malloc(30 * MiB + 1)
    event = machine.events[-1]
    assert (event["action"], event["size"], event["device_free"]) == ("oom", 30 * MiB + 512, 60 * MiB)
    assert "addr" not in event


def test_expandable_segment_grows_in_place_and_shrinks() -> None:
    machine = Machine(expandable_segments=True)
    first, second = machine.malloc(15 * MiB), machine.malloc(15 * MiB)
    assert second == first + 15 * MiB
    machine.free(first)
    machine.empty_cache()  # no whole handle of 20 MiB is free
    machine.free(second)
    machine.empty_cache()
    assert [action for action in actions(machine) if "map" in action] == ["segment_map", "segment_map", "segment_unmap"]
    assert machine.snapshot()["segments"] == []


def test_oversize_block_is_neither_split_nor_given_to_small_requests() -> None:
    machine = Machine(max_split_size=32 * MiB)
    addr = machine.malloc(50 * MiB)
    machine.free(addr)
    assert machine.malloc(31 * MiB) != addr
    assert machine.malloc(40 * MiB) == addr
    assert machine.live[addr].size == 50 * MiB


def test_garbage_collection_frees_old_blocks() -> None:
    machine = Machine(limit=100 * MiB, garbage_collection_threshold=0.3)
    machine.free(machine.malloc(20 * MiB))
    machine.free(machine.malloc(22 * MiB))
    machine.malloc(24 * MiB)
    freed, mapped, allocated = machine.events[-3:]  # only the older one: its age is above the average
    assert (freed["action"], freed["size"]) == ("segment_free", 20 * MiB)
    assert freed["frames"] is mapped["frames"] is allocated["frames"]
    check(machine)


def test_private_pool_is_released_once_dropped() -> None:
    machine = Machine()
    machine.free(machine.malloc(512, pool=(1, 0)))
    machine.empty_cache()
    assert machine.snapshot()["segments"][0]["segment_pool_id"] == (1, 0)
    machine.drop_pool((1, 0))
    machine.empty_cache()
    assert machine.snapshot()["segments"] == []


def test_lost_beginnings() -> None:
    snapshot = random_program(random.Random(1), 50)
    whole = snapshot["device_traces"][0]
    assert legal.cut_front(snapshot, 10)["device_traces"] == [whole[10:]]
    assert legal.ring(snapshot, 7)["device_traces"] == [whole[-7:]]
    assert snapshot["device_traces"][0] is whole
    assert legal.ring(snapshot, 10**6) == snapshot


class RecordedAddresses:
    """A driver that gives the addresses of a recording, in its order."""

    def __init__(self, trace: list[dict[str, Any]]) -> None:
        self.allocations = [event for event in trace if event["action"] == "segment_alloc"]
        self.mappings = [event["addr"] for event in trace if event["action"] == "segment_map"]
        self.reserved: list[range] = []

    def allocate(self, size: int) -> int:
        event = self.allocations.pop(0)
        assert event["size"] == size
        return int(event["addr"])

    def reserve(self, size: int) -> int:
        addr = int(next(addr for addr in self.mappings if not any(addr in known for known in self.reserved)))
        self.reserved.append(range(addr, addr + size))
        return addr

    def release(self, addr: int, size: int) -> None:
        pass


def repeat(trace: list[dict[str, Any]], machine: Machine) -> None:
    """Make the requests of a recording again (default pools; an empty_cache only where no request follows it)."""
    for event, following in zip(trace, [*trace[1:], {"action": "", "addr": 0}], strict=True):
        action, addr = event["action"], event.get("addr", 0)
        if action == "alloc":
            assert machine.malloc(event["size"], event["stream"]) == addr
        elif action == "oom":
            with pytest.raises(OutOfMemory):
                machine.malloc(event["size"], event["stream"])
        elif action == "free_requested":
            at_once = (following["action"], following.get("addr")) == ("free_completed", addr)
            (machine.free if at_once else machine.free_later)(addr)
        elif action == "free_completed" and addr in machine.live:
            machine.finish(addr)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("alloc-retry", 4 * GiB),
        ("oom-fragmented", 4 * GiB),
        ("two-streams", None),
        ("mlp-expandable", None),
        ("ragged-expandable", None),
        ("ragged-max-split-64", None),
        ("ragged-roundup-4", None),
        ("gpt2-adamw", None),
    ],
)
def test_machine_does_what_torch_did(name: str, limit: int | None) -> None:
    with lzma.open(snapshot_path(name)) as file:
        snapshot: dict[str, Any] = pickle.load(file)
    truth = json.loads(truth_path(name).read_text())["stats"]
    (trace,) = snapshot["device_traces"]
    chosen = snapshot["allocator_settings"]
    machine = Machine(
        expandable_segments=chosen["expandable_segments"],
        max_split_size=None if chosen["max_split_size"] < 0 else chosen["max_split_size"],
        roundup=list(chosen["roundup_power2_divisions"].values()),
        limit=limit,
        capacity=139 * GiB,
        driver=RecordedAddresses(trace),
    )
    repeat(trace, machine)
    keys = ("action", "addr", "size", "stream")
    assert [[event.get(key) for key in keys] for event in machine.events] == [
        [event.get(key) for key in keys] for event in trace
    ]
    stats = machine.stats()
    assert stats == {name: truth[name] for name in stats}
    assert block_map(machine.snapshot()["segments"]) == block_map(snapshot["segments"])


def test_sizes() -> None:
    machine = Machine(roundup=4)
    assert [machine.round_size(size) for size in (1, 513, 2 * KiB + 1)] == [512, 1024, 2 * KiB + 512]
    assert machine.round_size(1100 * MiB) == 1280 * MiB
