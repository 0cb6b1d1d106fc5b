"""The simulator against what torch did: every recording under its own setting, and pairs recorded under two."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import fixture_names, shared_snapshots, snapshot_path, truth_path

import memtrace
from memtrace.allocator.simulate.driver import Draw, RecordedDriver, RuledDriver
from memtrace.allocator.simulate.run import run
from memtrace.api import Snapshot

SHARED = {path.name.removesuffix(".pickle.xz"): path for path, _ in shared_snapshots()}
NAMES = sorted({*fixture_names(), *SHARED})
LONG = "gpt2-zero3-700steps"
CANNOT = {"public-synthetic-not-an-allocator", "public-trimmed-trace"}


def _path(name: str) -> Path:
    return SHARED[name] if name in SHARED else snapshot_path(name)


@cache
def _snapshot(name: str) -> Snapshot:
    if not _path(name).exists():
        pytest.skip(f"no recording {name} here")
    return memtrace.load(_path(name), cache=False)


def _truth(name: str) -> dict[str, Any]:
    path = SHARED[name].with_name(f"{name}.truth.json") if name in SHARED else truth_path(name)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != LONG])
def test_the_recorded_setting_comes_out_as_recorded(name: str) -> None:
    snapshot = _snapshot(name)
    for device in snapshot.devices:
        simulation = snapshot.simulation(device)
        replay = snapshot.replay(device)
        if not replay.events or replay.conflicts or replay.revised_sizes:
            assert simulation.reason
            continue
        assert simulation.reason is None, (simulation.reason, simulation.check and simulation.check.event)
        work, outcome = simulation.work, simulation.check.outcome
        for column in outcome.segments.__slots__:
            assert np.array_equal(getattr(outcome.segments, column), getattr(work.recorded, column)), column
        born = work.is_simulated & (replay.lifetimes.born >= 0)
        assert np.array_equal(outcome.address[born], work.address[born])
        assert np.array_equal(outcome.size[born], work.block_size[born])
        for counter, peak in (
            ("reserved_bytes", outcome.reserved_peak),
            ("allocated_bytes", outcome.allocated_peak),
            ("active_bytes", outcome.active_peak),
        ):
            assert peak == snapshot.series(counter, device=device).max(), counter


@pytest.mark.parametrize("name", [name for name in NAMES if name != LONG])
def test_calls_of_the_driver_and_retries_are_torchs(name: str) -> None:
    stats = _truth(name).get("stats")
    snapshot = _snapshot(name)
    if stats is None or not snapshot.complete or not snapshot.simulation().is_exact:
        pytest.skip("no counters from the first allocation on")
    outcome = snapshot.simulation().check.outcome
    assert outcome.device_allocs == stats["num_device_alloc"]
    assert outcome.device_frees == stats["num_device_free"]
    assert outcome.retries == stats["num_alloc_retries"]
    assert outcome.ooms == stats["num_ooms"]
    if not snapshot.simulation().work.has_private_pools and name != "mlp-peak-reset":
        assert outcome.inactive_split_peak == stats["inactive_split_bytes.all.peak"]


@pytest.mark.parametrize("name", ["oom", "alloc-retry", "oom-fragmented"])
def test_a_limit_that_was_there_changes_nothing(name: str) -> None:
    snapshot, stats = _snapshot(name), _truth(name)["stats"]
    scenario = snapshot.whatif(limit=4 << 30)
    outcome = scenario.prediction.outcome
    assert outcome.reserved_peak == stats["reserved_bytes.all.peak"]
    assert outcome.retries == stats["num_alloc_retries"]
    assert outcome.device_allocs == stats["num_device_alloc"]
    ooms = snapshot.data.trace(0).action == memtrace.model.Action.OOM
    assert scenario.oom_event == (int(np.flatnonzero(ooms)[0]) if ooms.any() else None)


PLAIN = {
    "expandable_segments": False,
    "max_split_size_mb": 0,
    "roundup_power2_divisions": 0,
    "garbage_collection_threshold": 0.0,
    "limit": 1 << 50,
}
FAMILIES = (
    {"gpt2-zero3": {}, "gpt2-zero3-expandable": {"expandable_segments": True}},
    {"mlp-adamw": {}, "mlp-expandable": {"expandable_segments": True}},
    {
        "ragged": {},
        "ragged-max-split-64": {"max_split_size_mb": 64},
        "ragged-expandable": {"expandable_segments": True},
        "ragged-roundup-4": {"roundup_power2_divisions": 4},
        "ragged-collected-60": {"garbage_collection_threshold": 0.6, "limit": 4_831_838_208},
        "ragged-least": {"limit": 3_959_422_976},
        "ragged-too-little": {"limit": 3_957_325_824},
        "ragged-flushed": {"empty_cache_every_step": True},
    },
)
PAIRS = [
    (one, other, {**PLAIN, **changes})
    for family in FAMILIES
    for one in family
    for other, changes in family.items()
    if one not in (other, "ragged-flushed", "ragged-too-little")  # one has more calls than its siblings, one less
]
WIDE = {"ragged-collected-60"}
"""Where what is collected hangs on where segments lie, and with it everything after."""


@pytest.mark.parametrize(("recorded", "other", "changes"), PAIRS, ids=[f"{one}-to-{two}" for one, two, _ in PAIRS])
def test_a_setting_is_predicted_from_another(recorded: str, other: str, changes: dict[str, Any]) -> None:
    scenario, sibling = _snapshot(recorded).whatif(**changes), _snapshot(other)
    prediction, stats = scenario.prediction, _truth(other)["stats"]
    truth = stats["reserved_bytes.all.peak"]
    assert prediction.outcome.reserved_peak == truth
    assert prediction.low <= truth <= prediction.high
    assert prediction.high - prediction.low <= truth / 100 or other in WIDE
    assert prediction.outcome.device_allocs == stats["num_device_alloc"]
    assert prediction.outcome.device_frees == stats["num_device_free"]
    assert prediction.outcome.retries == stats["num_alloc_retries"]
    assert prediction.outcome.allocated_peak == stats["allocated_bytes.all.peak"]
    failed = np.flatnonzero(sibling.data.trace(0).action == memtrace.model.Action.OOM)
    assert (scenario.oom_event is None) == (not len(failed))


def test_the_smallest_limit_is_the_one_that_torch_could_do_with() -> None:
    """Both were tried on the GPU: `ragged-least` went through, `ragged-too-little` did not."""
    least = _snapshot("ragged").fits().recorded
    assert least.limit == least.sure == _truth("ragged-least")["limit"]
    assert _truth("ragged-too-little")["limit"] == least.limit - (2 << 20)
    assert _truth("ragged-too-little")["oom"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != LONG])
def test_the_truth_lies_in_the_range_of_the_drivers_rules(name: str) -> None:
    """Segments where the driver's rules put them, and 20 draws: what was recorded is one of what may be."""
    snapshot = _snapshot(name)
    simulation = snapshot.simulation()
    if not snapshot.complete or not simulation.is_exact or simulation.limit.bytes is not None:
        pytest.skip("not from the first allocation on, or under a limit that is not known")
    peaks = [
        run(simulation.work, simulation.check.rules, RuledDriver(Draw(number, simulation.moments))).reserved_peak
        for number in range(21)
    ]
    truth = snapshot.peak("reserved").bytes
    assert min(peaks) <= truth <= max(peaks)
    assert max(peaks) - min(peaks) <= truth / 100


def test_a_run_that_parts_from_the_recording_says_where() -> None:
    simulation = _snapshot("ragged").simulation()
    from dataclasses import replace

    from memtrace.allocator.simulate.driver import DivergedError

    rules = replace(simulation.check.rules, max_split_size=64 << 20)
    with pytest.raises(DivergedError) as parted:
        run(simulation.work, rules, RecordedDriver(simulation.work.recorded))
    assert 0 < parted.value.row < len(simulation.work.requests)
