"""Laws of requests that failed, over random programs under a cap: what torch refused, nothing of its own would hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from builders import write_pickle
from legal import Machine, TouchingDriver, random_operations, run

import memtrace
from memtrace.analysis.oom import Oom

MiB, GiB = 1 << 20, 1 << 30
CAPACITY = 80 * GiB


def failures(folder: Path, seed: int, limit: int, *, is_expandable: bool) -> tuple[Machine, tuple[Oom, ...]]:
    rng = random.Random(seed)
    # without private pools: at an out-of-memory event torch 2.11 does not say whose pool it was
    operations = [(*one[:3], (0, 0)) if one[0] == "malloc" else one for one in random_operations(rng, 400)]
    driver = TouchingDriver(random.Random(seed))
    machine = run(operations, limit=limit, capacity=CAPACITY, driver=driver, expandable_segments=is_expandable)
    snapshot = memtrace.load(write_pickle(machine.snapshot(), folder / f"{seed}.pickle"))
    return machine, snapshot.ooms(capacity=CAPACITY) if snapshot.devices else ()


def came_free_late(machine: Machine, event: int) -> bool:
    """Whether streams were done with blocks only while torch gave back its cache: it does not look again after that."""
    before = [one["action"] for one in machine.snapshot()["device_traces"][0][:event]]
    while before[-1] in ("segment_free", "segment_unmap"):
        before.pop()
    return bool(before[-1] == "free_completed")


@pytest.mark.parametrize("is_expandable", [False, True], ids=["plain", "expandable"])
def test_what_a_cap_refused_could_not_be_had(tmp_path: Path, is_expandable: bool) -> None:
    seen = set()
    for seed in range(40):
        limit = (30 + seed * 7) * MiB
        machine, found = failures(tmp_path, seed, limit, is_expandable=is_expandable)
        assert len(found) == machine.calls["num_ooms"]
        for one in found:
            seen.add(one.verdict)
            assert one.fits is False
            assert one.device_had_room
            assert one.outside_torch_bytes == 0
            assert is_expandable or one.reserved_bytes <= limit  # pages are mapped whole, whatever the cap
            assert limit < one.reserved_bytes + one.segment_bytes
            assert (one.cap_at_least_bytes or 0) <= limit < (one.cap_below_bytes or CAPACITY)
            assert one.verdict in ("fragmentation", "other-streams", "limit")
            assert (one.verdict == "fragmentation") == one.joined_fits
            assert one.hole_bytes is None or came_free_late(machine, one.place.event)
            assert one.allocated_bytes + one.pending_bytes + one.cache.free + one.cache.other_free <= one.reserved_bytes
        if found:
            assert found[-1].retries.count <= machine.calls["num_alloc_retries"] + machine.calls["num_ooms"]
    assert {"limit", "fragmentation"} <= seen
