"""Other settings, other limits: small programs of which each number is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES, snapshot_path, truth_path

import memtrace
from memtrace.allocator.simulate.rules import Tie
from memtrace.analysis import whatif
from memtrace.analysis.settings import Change
from memtrace.analysis.whatif import SWEEP, Scenario, assumptions, ranked, sweep
from memtrace.api import Snapshot
from memtrace.errors import QuestionError

MiB, GiB = 1 << 20, 1 << 30
A, B, C, D = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000, 0x7F3000000000
EMPTY = "memory.py:200 empty_cache;train.py:9 main"
Load = Callable[..., Snapshot]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Opens what a builder made, with the words of the recorder beside it."""

    def opened(builder: SnapshotBuilder, **sidecar: Any) -> Snapshot:
        path = builder.pickle(tmp_path / "rank0000.pickle")
        if sidecar:
            (tmp_path / "rank0000.json").write_text(json.dumps({"memtrace": "1", **sidecar}))
        return memtrace.load(path, cache=False)

    return opened


def fixture(name: str) -> Snapshot:
    return memtrace.load(snapshot_path(name), cache=False)


def truth(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(truth_path(name).read_text())
    return found


def reserved(scenario: Scenario) -> float:
    assert scenario.prediction is not None
    return scenario.prediction.outcome.reserved_peak / MiB


def two_large(**settings: Any) -> SnapshotBuilder:
    """30 MiB come and go, then 44: each has a segment of its own."""
    builder = SnapshotBuilder().settings(**settings) if settings else SnapshotBuilder()
    return builder.alloc(A, 30 * MiB).free(A).alloc(B, 44 * MiB)


def steps(count: int) -> SnapshotBuilder:
    """So many steps; each leaves its segment in the cache, and the next one asks for 2 MiB more."""
    builder = SnapshotBuilder()
    for step in range(count):
        address = A + step * (B - A)
        builder.alloc(address, (30 + 2 * step) * MiB, user_metadata=f"phase=forward;step={step}")
        builder.free(address, user_metadata=f"phase=step;step={step}")
    return builder


# ---- the self-check


def test_the_recorded_setting_comes_out_as_recorded(load: Load) -> None:
    simulation = load(two_large()).simulation()
    assert (simulation.is_exact, simulation.reason) == (True, None)
    recorded = simulation.recorded
    assert (reserved(recorded), recorded.oom_event, recorded.is_sure) == (74, None, True)
    assert (recorded.settings.limit, recorded.settings.limit_source) == (None, None)
    assert recorded.prediction is not None
    assert recorded.prediction.as_recorded


@pytest.mark.parametrize(
    ("torch", "tie", "at"),
    [("2.11", Tie.ADDRESS, A), ("2.12", Tie.OBJECT, B), ("2.15", Tie.SEGMENT, B)],
)
def test_the_releases_rule_is_found(load: Load, torch: str, tie: Tie, at: int) -> None:
    """Of two segments of 30 MiB the lower one is taken up to 2.11, later the older one."""
    builder = SnapshotBuilder(torch=torch).alloc(B, 30 * MiB).alloc(A, 30 * MiB).free(A).free(B).alloc(at, 30 * MiB)
    check = load(builder).simulation().check
    assert check is not None
    assert check.is_exact
    assert check.rules.tie == tie


def test_a_recording_that_no_rule_explains_is_not_predicted(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).alloc(B, 30 * MiB).free(A).free(B).alloc(B, 30 * MiB)
    simulation = load(builder).simulation()
    assert simulation.reason == "a block is put elsewhere than in the recording"
    assert simulation.check is not None
    assert simulation.check.event == 8
    scenario = simulation.scenario(Change(expandable_segments=True))
    assert (scenario.prediction, scenario.oom_event, scenario.is_sure) == (None, None, False)
    assert not scenario.completes
    assert assumptions(simulation, [scenario]) == ()


def test_a_segment_that_was_not_needed_is_said(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).free(A).segment(B, 30 * MiB).alloc(B, 30 * MiB)
    simulation = load(builder).simulation()
    assert simulation.reason is not None
    assert simulation.check is not None
    assert simulation.check.event is not None


def test_without_a_trace_there_is_no_prediction(load: Load) -> None:
    simulation = load(SnapshotBuilder().alloc(A, 512).start_recording()).simulation()
    assert simulation.reason == "the file has no trace, only the last state"
    assert (simulation.check, simulation.recorded.prediction) == (None, None)
    assert simulation.scenario(Change(limit=GiB)).prediction is None


def test_nor_for_a_trace_that_contradicts_itself(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 512).alloc(A + 512, 512)
    builder.event("alloc", addr=A, size=512, stream=0)
    simulation = load(builder).simulation()
    assert simulation.reason == "the trace contradicts itself, so what the program asked is not known"


# ---- settings


def test_expandable_segments_join_what_was_apart(load: Load) -> None:
    """30, then 44 MiB: 40 are mapped and 20 more. Nothing depends on addresses."""
    scenario = load(two_large()).whatif(expandable_segments=True)
    prediction = scenario.prediction
    assert prediction is not None
    assert (reserved(scenario), prediction.low, prediction.high) == (60, 60 * MiB, 60 * MiB)
    assert (prediction.draws, prediction.as_recorded) == (1, False)
    assert (prediction.outcome.device_allocs, prediction.outcome.device_frees) == (2, 0)
    assert scenario.settings.expandable_segments
    assert scenario.completes


def test_and_without_them_they_are_apart(load: Load) -> None:
    builder = SnapshotBuilder().map(A, 40 * MiB).alloc(A, 30 * MiB).free(A)
    builder.map(A + 40 * MiB, 20 * MiB).alloc(A, 44 * MiB)
    assert reserved(load(builder).whatif(expandable_segments=False)) == 74


def test_a_setting_that_is_the_recorded_one_is_as_recorded(load: Load) -> None:
    prediction = load(two_large()).whatif(expandable_segments=False).prediction
    assert prediction is not None
    assert (prediction.as_recorded, prediction.draws) == (True, 1)


def test_max_split_size_keeps_a_large_block_whole(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 100 * MiB).free(A).alloc(A, 40 * MiB).alloc(A + 40 * MiB, 60 * MiB)
    snapshot = load(builder)
    assert reserved(snapshot.whatif(max_split_size_mb=64)) == 200
    assert reserved(snapshot.whatif(max_split_size_mb=100)) == 200
    assert reserved(snapshot.whatif(max_split_size_mb=101)) == 100


def test_a_recorded_max_split_size_can_be_taken_away(load: Load) -> None:
    builder = two_large(max_split_size=32 * MiB).free(B).alloc(A, 20 * MiB).alloc(C, 24 * MiB)
    snapshot = load(builder)
    assert snapshot.simulation().is_exact
    assert reserved(snapshot.simulation().recorded) == 98
    assert reserved(snapshot.whatif(max_split_size_mb=0)) == 74


def test_roundup_makes_requests_larger(load: Load) -> None:
    scenario = load(two_large()).whatif(roundup_power2_divisions=2)
    assert reserved(scenario) == 32 + 48
    assert scenario.prediction is not None
    assert scenario.prediction.outcome.allocated_peak == 48 * MiB


def test_larger_segments_for_middle_requests(load: Load) -> None:
    builder = SnapshotBuilder()
    for address in (A, B, C):
        builder.alloc(address, 9 * MiB).alloc(address + 9 * MiB, 9 * MiB)
    assert reserved(load(builder).whatif(large_segment_size_mb=54)) == 54


@pytest.mark.parametrize(("torch", "peak"), [("2.11", 90), ("2.12", 150), ("2.13", 150)])
def test_another_release_takes_another_block(load: Load, torch: str, peak: int) -> None:
    """Free: 30 behind 30 in use, in the older segment, and a lower one of 30. Who takes the former needs a new one for
    the 60 that come last."""
    builder = SnapshotBuilder().alloc(B, 60 * MiB).alloc(A, 30 * MiB).free(B).alloc(B, 30 * MiB).free(A)
    snapshot = load(builder.alloc(A, 30 * MiB).free(B).alloc(B, 60 * MiB))
    scenario = snapshot.whatif(torch=torch)
    assert (scenario.settings.torch, reserved(scenario)) == (torch, peak)
    assert scenario.prediction is not None
    assert scenario.prediction.draws == 1


def test_garbage_is_collected_before_memory_runs_out(load: Load) -> None:
    snapshot = load(two_large())
    outcome = snapshot.whatif(garbage_collection_threshold=0.2, limit=100 * MiB).prediction.outcome  # type: ignore[union-attr]
    assert (outcome.device_frees, outcome.retries, outcome.reserved_peak) == (1, 0, 44 * MiB)


def test_without_a_limit_it_is_not_and_that_is_said(load: Load) -> None:
    snapshot = load(two_large())
    scenario = snapshot.whatif(garbage_collection_threshold=0.2)
    assert reserved(scenario) == 74
    assert "gc-needs-limit" in {notice.code for notice in assumptions(snapshot.simulation(), [scenario])}


def test_the_cache_is_emptied_after_every_step(load: Load) -> None:
    snapshot = load(steps(3))
    assert reserved(snapshot.simulation().recorded) == 30 + 32 + 34
    scenario = snapshot.whatif(empty_cache_every_step=True)
    assert reserved(scenario) == 34
    assert scenario.prediction is not None
    assert scenario.prediction.outcome.device_frees == 3
    assert scenario.prediction.outcome.segments.row.tolist() == [0, 3, 3, 6, 6, 9]
    assert scenario.settings.empty_cache_every_step


def test_without_steps_there_is_none_to_empty_it_after(load: Load) -> None:
    with pytest.raises(QuestionError, match="no end of a step"):
        load(two_large()).whatif(empty_cache_every_step=True)


def test_where_addresses_decide_draws_are_made_and_said(load: Load) -> None:
    snapshot = load(two_large())
    scenario = snapshot.whatif(max_split_size_mb=32)
    assert scenario.prediction is not None
    assert scenario.prediction.draws == 21
    assert "placement" in {notice.code for notice in assumptions(snapshot.simulation(), [scenario])}
    again = snapshot.simulation().scenario(Change(max_split_size_mb=32), draws=3)
    assert again.prediction is not None
    assert again.prediction.draws == 4


def test_long_recordings_get_fewer_draws(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = load(two_large()).simulation()
    for budget, draws in ((20 * 4, 20), (10 * 4, 10), (6 * 4, 6), (1, 6)):
        monkeypatch.setattr(whatif, "_EVENT_BUDGET", budget)
        assert simulation.draws == draws


# ---- limits


def test_under_a_limit_cached_memory_is_given_back(load: Load) -> None:
    scenario = load(two_large()).whatif(limit=44 * MiB)
    assert scenario.prediction is not None
    outcome = scenario.prediction.outcome
    assert (outcome.reserved_peak, outcome.retries, outcome.device_frees) == (44 * MiB, 1, 1)
    assert scenario.completes
    assert (scenario.settings.limit, scenario.settings.limit_source) == (44 * MiB, "given")


def test_under_a_smaller_one_memory_runs_out_and_the_event_is_named(load: Load) -> None:
    scenario = load(two_large()).whatif(limit=44 * MiB - 1)
    assert (scenario.oom_event, scenario.is_sure, scenario.completes) == (5, True, False)
    assert scenario.prediction is not None
    assert (scenario.prediction.outcome.ooms, scenario.prediction.completes) == (1, False)


def test_a_limit_that_changes_nothing_leaves_segments_where_they_were(load: Load) -> None:
    prediction = load(two_large()).whatif(limit=74 * MiB).prediction
    assert prediction is not None
    assert (prediction.as_recorded, prediction.outcome.retries) == (True, 0)


def test_the_recorders_limit_is_taken(load: Load) -> None:
    device = {"index": 0, "name": "x", "capacity_bytes": GiB}
    snapshot = load(two_large(), device=device, limit_bytes=100 * MiB)
    settings = snapshot.simulation().recorded.settings
    assert (settings.limit, settings.limit_source) == (100 * MiB, "recorded")
    scenario = snapshot.whatif(roundup_power2_divisions=2)
    assert (scenario.settings.limit, scenario.settings.limit_source) == (100 * MiB, "recorded")
    assert snapshot.whatif(limit=GiB).settings.limit_source == "given"


def refused(size: int, free: int = 200 * MiB) -> SnapshotBuilder:
    """70 MiB held, and a request that the driver, or a limit, refused."""
    return SnapshotBuilder().alloc(A, 70 * MiB).oom(size, free).alloc(B, 512)


def test_a_refusal_brackets_the_limit(load: Load) -> None:
    """72 MiB were reserved, 70 + 64 refused: the limit is from 72 to below 134."""
    snapshot = load(refused(64 * MiB))
    limit = snapshot.simulation().limit
    assert (limit.bytes, limit.source, limit.below) == (72 * MiB, "inferred", 134 * MiB)
    (notice,) = [one for one in assumptions(snapshot.simulation(), [snapshot.whatif()]) if one.code == "limit-inferred"]
    assert "72.00 MiB to below 134.00 MiB" in notice.message


def test_what_hangs_on_the_limits_true_place_is_not_sure(load: Load) -> None:
    """With roundup 64 of 70 become 80: served if the limit is 82 or more, and it may be from 72 to 134."""
    snapshot = load(refused(64 * MiB))
    scenario = snapshot.whatif(roundup_power2_divisions=4)
    assert not scenario.is_sure
    assert not scenario.completes
    same = snapshot.whatif()
    assert (same.oom_event, same.is_sure) == (2, True)


def test_a_given_limit_beats_the_inferred_one(load: Load) -> None:
    scenario = load(refused(64 * MiB)).whatif(limit=136 * MiB)
    assert (scenario.oom_event, scenario.is_sure, scenario.settings.limit_source) == (None, True, "given")
    assert reserved(scenario) == 136


@pytest.mark.parametrize("name", ["alloc-retry", "oom", "oom-fragmented", "gpt2-zero3-oom"])
def test_the_true_limit_is_within_the_bracket(name: str) -> None:
    limit = fixture(name).simulation().limit
    true = truth(name).get("limit") or 2.5 * GiB
    assert limit.bytes is not None
    assert limit.below is not None
    assert limit.bytes <= true < limit.below


@pytest.mark.parametrize("name", ["oom", "oom-fragmented", "gpt2-zero3-oom"])
def test_what_failed_fails_again_as_recorded(name: str) -> None:
    snapshot = fixture(name)
    failed = int(np.flatnonzero(snapshot.data.trace(0).action == memtrace.model.Action.OOM)[0])
    scenario = snapshot.whatif()
    assert (scenario.oom_event, scenario.is_sure) == (failed, True)
    assert snapshot.simulation().recorded.oom_event == failed


def test_a_recorders_limit_in_a_recording() -> None:
    snapshot = memtrace.load(FIXTURES / "recordings" / "gpt2-oom", cache=False)
    recorded = snapshot.simulation().recorded
    assert (recorded.settings.limit, recorded.settings.limit_source) == (8_388_608_000, "recorded")
    assert recorded.oom_event is not None
    assert snapshot.whatif(limit=16 * GiB).oom_event is None


# ---- windows, private pools, other devices


def test_memory_from_before_the_recording_stays_where_it_was(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).free(A).start_recording().alloc(B, 44 * MiB).alloc(C, 512)
    snapshot = load(builder)
    scenario = snapshot.whatif(expandable_segments=True)
    assert reserved(scenario) == 30 + 60 + 2
    assert "window" in {notice.code for notice in assumptions(snapshot.simulation(), [scenario])}


def test_a_window_of_a_real_run_is_simulated() -> None:
    snapshot = fixture("gpt2-zero3-recorded-from-step-0")
    assert snapshot.simulation().is_exact
    assert not snapshot.simulation().is_complete
    scenario = snapshot.whatif(expandable_segments=True)
    assert scenario.prediction is not None
    assert scenario.prediction.low <= scenario.prediction.outcome.reserved_peak <= scenario.prediction.high


def test_private_pools_stay_as_they_were() -> None:
    snapshot = fixture("cuda-graph")
    scenario = snapshot.whatif(expandable_segments=True)
    assert scenario.prediction is not None
    assert snapshot.simulation().work.has_private_pools
    private = 6 - len(snapshot.simulation().work.recorded)
    assert scenario.prediction.outcome.device_allocs == private + len(scenario.prediction.outcome.segments)
    assert "private-pools" in {notice.code for notice in assumptions(snapshot.simulation(), [scenario])}


def test_each_device_has_its_own(load: Load) -> None:
    other = SnapshotBuilder(device=1).alloc(A, 5 * MiB)
    snapshot = load(two_large().join(other.alloc(B, 512)))
    assert reserved(snapshot.whatif(1, expandable_segments=True)) == 22
    assert reserved(snapshot.whatif(0, expandable_segments=True)) == 60


def test_calls_of_empty_cache_are_made_again(load: Load) -> None:
    builder = SnapshotBuilder(context="all").alloc(A, 30 * MiB).free(A).segment_free(A, EMPTY).alloc(B, 44 * MiB)
    snapshot = load(builder)
    scenario = snapshot.whatif(expandable_segments=True)
    assert reserved(scenario) == 60
    assert scenario.prediction is not None
    assert scenario.prediction.outcome.device_frees == 1
    (notice,) = [one for one in assumptions(snapshot.simulation(), [scenario]) if one.code == "empty-cache"]
    assert notice.message.startswith("1 call of empty_cache() in the recording is made at the same place")


# ---- sweeps


def test_a_sweep_leaves_out_what_changes_nothing(load: Load) -> None:
    simulation = load(two_large()).simulation()
    tried = sweep(simulation, Change())
    assert not [one for one in tried if one.garbage_collection_threshold or one.empty_cache_every_step]
    assert len(tried) == len(SWEEP) - 3
    under = sweep(simulation, Change(limit=GiB))
    assert len(under) == len(SWEEP) - 1
    assert all(one.limit == GiB for one in under)


def test_nor_does_it_try_what_is_set_already(load: Load) -> None:
    builder = SnapshotBuilder().settings(max_split_size=128 * MiB, expandable_segments=True).map(A, 20 * MiB)
    tried = sweep(load(builder.alloc(A, 5 * MiB)).simulation(), Change())
    assert Change(max_split_size_mb=128) not in tried
    assert Change(expandable_segments=True) not in tried
    assert Change(max_split_size_mb=64) in tried


def test_nor_what_the_release_does_not_have(load: Load) -> None:
    tried = sweep(load(SnapshotBuilder(torch="2.0").alloc(A, 5 * MiB).alloc(B, 512)).simulation(), Change())
    assert Change(expandable_segments=True) not in tried


def test_with_steps_it_tries_to_empty_the_cache(load: Load) -> None:
    assert Change(empty_cache_every_step=True) in sweep(load(steps(3)).simulation(), Change())


def test_on_top_of_a_setting_each_is_tried_once(load: Load) -> None:
    tried = sweep(load(two_large()).simulation(), Change(expandable_segments=True))
    assert all(one.expandable_segments for one in tried)
    assert len(set(tried)) == len(tried)
    assert Change(expandable_segments=True) not in tried


def test_ranking_puts_what_serves_everything_first(load: Load) -> None:
    simulation = load(two_large()).simulation()
    changes = [Change(limit=40 * MiB), Change(), Change(limit=44 * MiB), Change(expandable_segments=True)]
    found = ranked([simulation.scenario(change) for change in changes])
    assert [one.change for one in found] == [changes[2], changes[3], changes[1], changes[0]]


def test_of_equal_ones_that_which_asks_the_driver_least(load: Load) -> None:
    builder = SnapshotBuilder()
    for index in range(3):
        builder.alloc(A + index * (B - A), 20 * MiB)
    simulation = load(builder).simulation()
    most, least = Change(), Change(large_segment_size_mb=60)
    assert [one.change for one in ranked([simulation.scenario(most), simulation.scenario(least)])] == [most, least]


def test_what_a_release_lacks_is_said(load: Load) -> None:
    snapshot = load(SnapshotBuilder(torch="2.9").alloc(A, 5 * MiB).alloc(B, 512))
    scenario = snapshot.whatif(large_segment_size_mb=32)
    messages = [notice.message for notice in assumptions(snapshot.simulation(), [scenario])]
    assert "large_segment_size_mb is there since torch 2.11" in messages


def test_progress_counts_all_draws_as_one(load: Load) -> None:
    heard: list[tuple[int, int]] = []
    simulation = load(two_large()).simulation()
    simulation.scenario(Change(max_split_size_mb=32), lambda done, total: heard.append((done, total)), draws=2)
    assert heard == [(0, 12), (4, 12), (8, 12)]
