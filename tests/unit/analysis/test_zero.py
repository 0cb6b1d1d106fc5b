"""Theory against measurement: on every recording of ZeRO the states are what DeepSpeed's arithmetic says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recordings import fixture_names, shared_snapshots, snapshot_path

import memtrace
from memtrace.analysis.given import Given, read_config
from memtrace.analysis.zero import Comparison, Line, compare, notices, planned
from memtrace.attribution import theory
from memtrace.attribution.theory import STATES
from memtrace.errors import QuestionError
from memtrace.timeline import Phase

OFFLOADED = [name for name in fixture_names() if "offload" in name]
ZERO = [name for name in fixture_names() if "zero" in name and name not in OFFLOADED]
SHARED = [path for path, _ in shared_snapshots() if "zero" in path.name]
OPT = [path for path in SHARED if path.name.startswith("opt13b")]
REPORT = [path for path in OPT if path.name == "opt13b-zero3-deepspeed0.18.9.pickle.xz"]
GiB = 1 << 30


def compared(path: Path, at: str = "peak", given: Given | None = None) -> Comparison:
    opened = memtrace.load(path)
    return compare(
        opened.data, opened.replay(), opened.timeline(), opened.attribution(), event=opened.event(at), given=given
    )


def line_of(answer: Comparison, name: str) -> Line:
    return next(line for line in answer.lines if line.name == name)


def check(answer: Comparison, tolerance: float = 0.005) -> None:
    assert answer.setup is not None
    assert {line.name for line in answer.lines} >= set(STATES)
    for line in answer.lines:
        assert line.why
        if line.is_state and line.implementation_bytes is not None:
            assert abs(line.difference) <= tolerance * line.implementation_bytes, line
    assert sum(line.measured_bytes for line in answer.lines) + answer.residual_bytes == answer.peak_bytes
    assert answer.residual_bytes <= 0.01 * max(answer.peak_bytes - answer.paper_bytes, 1)


@pytest.mark.parametrize("at", ["peak", "end"])
@pytest.mark.parametrize("name", ZERO)
def test_states_are_what_theory_says(name: str, at: str) -> None:
    check(compared(snapshot_path(name), at))


@pytest.mark.parametrize("at", ["peak", "end"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_what_is_offloaded_is_not_guessed(name: str, at: str) -> None:
    answer = compared(snapshot_path(name), at)
    assert (answer.setup is None) == bool(answer.lacking)
    assert all(line.implementation_bytes in (0, None) for line in answer.lines if line.name in ("masters", "moments"))
    assert sum(line.measured_bytes for line in answer.lines) + answer.residual_bytes == answer.peak_bytes
    given = compared(snapshot_path(name), at, Given(params=74_324_736, world=8))
    assert (given.params, given.world) == (74_324_736, 8)


@pytest.mark.slow
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.name)
def test_states_of_recordings_beside_the_repository(path: Path) -> None:
    check(compared(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", OPT, ids=lambda path: path.name)
def test_the_excess_over_the_paper_is_itemised(path: Path) -> None:
    answer = compared(path)
    check(answer)
    excess = answer.peak_bytes - answer.paper_bytes
    items = sum(line.measured_bytes - (line.paper_bytes or 0) for line in answer.lines)
    assert abs(excess - items) <= 0.01 * excess


@pytest.mark.slow
@pytest.mark.parametrize("path", REPORT, ids=lambda path: path.name)
def test_the_reports_case(path: Path) -> None:
    retained = line_of(compared(path), "param.retained")
    assert 22.0 * GiB <= retained.measured_bytes <= 23.0 * GiB
    assert retained.paper_bytes is retained.implementation_bytes is None
    assert "outside zero.Init" in retained.why
    assert "0.19.4 or later" in retained.why


def test_the_sum_is_the_peak_of_blame() -> None:
    opened = memtrace.load(snapshot_path("gpt2-zero3"))
    assert compared(snapshot_path("gpt2-zero3")).peak_bytes == opened.peak().bytes


def test_before_the_first_step_there_are_no_moments_in_theory_either() -> None:
    moments = line_of(compared(snapshot_path("gpt2-zero3-oom")), "moments")
    assert (moments.implementation_bytes, moments.measured_bytes) == (0, 0)
    assert moments.paper_bytes
    assert "first step" in moments.why


def test_while_initialising_states_are_missing_and_it_is_said() -> None:
    masters = line_of(compared(snapshot_path("gpt2-zero3"), "100"), "masters")
    assert masters.measured_bytes == 0
    assert "initialisation" in masters.why


def test_before_a_late_recording_partitions_are_known_by_their_size() -> None:
    answer = compared(snapshot_path("gpt2-zero3-recorded-from-step-0"))
    assert [line_of(answer, name).measured_bytes for name in ("parameters", "gradients")] == [31_109_952] * 2
    assert answer.residual_bytes < 4096


def test_gradients_that_wait_at_stage_1_are_told_from_temporaries() -> None:
    answer = compared(snapshot_path("gpt2-zero1"))
    assert answer.phase == "backward"
    assert line_of(answer, "gradients").measured_bytes == 2 * 124_439_808


def test_what_is_given_beats_the_recording_and_is_contradicted() -> None:
    given = Given(stage=2, world=4, params=10**9, dtype="fp32", optimizer="lion", knobs={"reduce_bucket": 7})
    answer = compared(snapshot_path("gpt2-zero3"), given=given)
    assert (answer.stage, answer.world, answer.params, answer.dtype, answer.optimizer) == (2, 4, 10**9, "fp32", "lion")
    codes = [notice.code for notice in notices(given, answer)]
    assert codes == ["contradiction"] * 6
    assert "another job" in line_of(answer, "masters").why
    same = Given(stage=3, world=8, params=124_439_808, dtype="bf16", optimizer="AdamW")
    assert not compared(snapshot_path("gpt2-zero3"), given=same).contradictions


@pytest.mark.parametrize(
    ("name", "kind"), [("llama-fsdp2", "FSDP2"), ("gpt2-adamw", "No ZeRO"), ("llama-fsdp1", "FSDP"), ("oom", "No ZeRO")]
)
def test_what_is_not_zero_is_measured_only(name: str, kind: str) -> None:
    answer = compared(snapshot_path(name))
    assert not answer.is_zero
    assert answer.setup is None
    assert answer.headline.startswith(kind)
    assert all(line.paper_bytes is line.implementation_bytes is None for line in answer.lines)
    assert sum(line.measured_bytes for line in answer.lines) + answer.residual_bytes == answer.peak_bytes


def test_a_configuration_is_read() -> None:
    config = {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5e7,
            "sub_group_size": "auto",
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {}},
        "train_batch_size": "auto",
    }
    given = read_config(config, "ds.json")
    assert (given.stage, given.dtype, given.optimizer) == (3, "bf16", "AdamW")
    assert given.knobs == {"reduce_bucket": 50_000_000, "overlap_comm": True, "offload_optimizer": True}
    assert given.ignored == ("zero_optimization.sub_group_size",)
    assert given.sources["stage"] == "from ds.json"
    assert read_config({}, "ds.json") == Given()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([1], "not a JSON object"),
        ({"zero_optimization": True}, "zero_optimization is not a JSON object"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is '4'"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is 'True'"),
        ({"zero_optimization": {"stage": 2.5}}, "zero_optimization.stage is '2.5'"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size is '5e8'"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size is '-1'"),
        ({"zero_optimization": {"reduce_bucket_size": float("inf")}}, "reduce_bucket_size is 'inf'"),
        ({"zero_optimization": {"reduce_bucket_size": 10**40}}, "reduce_bucket_size is '1000"),
        ({"zero_optimization": {"sub_group_size": 0}}, "sub_group_size is '0'"),
        ({"zero_optimization": {"overlap_comm": 1}}, "overlap_comm is '1'"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param is not a JSON object"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "offload_param.device is 'gpu'"),
        ({"zero_optimization": {"offload_param": {"device": []}}}, "offload_param.device is '[]'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 both"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled is 'yes'"),
        ({"optimizer": {"type": 3}}, "optimizer.type is '3'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_key(config: object, said: str) -> None:
    with pytest.raises(QuestionError, match=r"ds\.json") as error:
        read_config(config, "ds.json")
    assert said in error.value.message


def test_flags_beat_the_configuration() -> None:
    flags = Given(stage=1, sources={"stage": "--stage"})
    config = Given(stage=3, dtype="fp16", numels=(1, 2), params=3, sources={"stage": "from ds.json"})
    both = flags.over(config)
    assert (both.stage, both.dtype, both.params, both.numels) == (1, "fp16", 3, (1, 2))
    assert both.sources["stage"] == "--stage"
    assert Given(params=7).over(config).numels == ()


def test_planning_needs_parameters_and_ranks() -> None:
    with pytest.raises(QuestionError, match="ranks"):
        planned(Given(params=10))
    with pytest.raises(QuestionError, match="parameters"):
        planned(Given(world=10))
    setup = planned(Given(params=10, world=2, dtype="fp32", optimizer="sgd"))
    assert (setup.param_bytes, setup.state_bytes) == (4, 0)
    assert [notice.code for notice in notices(Given(optimizer="Mystery"))] == ["unknown-optimizer"]


@pytest.mark.parametrize(
    ("given", "temp_bytes"),
    [
        (Given(), theory.FUSED_TEMP),
        (Given(optimizer="AdamW"), theory.FUSED_TEMP),
        (Given(optimizer="AdamW", torch_adam=True), theory.FOREACH_TEMP),
        (Given(optimizer="sgd"), theory.FOREACH_TEMP),
        (Given(optimizer="Adam").over(Given(optimizer="Adam", torch_adam=True)), theory.FUSED_TEMP),
        (Given(params=5).over(read_config({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "ds")),
         theory.FOREACH_TEMP),
    ],
)  # fmt: skip
def test_of_an_optimizer_by_name_deepspeed_builds_its_own_fused_one(given: Given, temp_bytes: int) -> None:
    """engine.py, `_configure_basic_optimizer`, 0.14.5 to 0.19.8: torch's Adam only where torch_adam says so."""
    assert planned(Given(params=10, world=2).over(given)).temp_bytes == temp_bytes


@pytest.mark.parametrize(
    ("name", "torch_adam"),
    [
        ("opt13b-zero2-deepspeed0.18.9", False),
        ("opt13b-zero3-zeroinit-deepspeed0.18.9", False),
        ("opt13b-zero3", True),
    ],
)
def test_the_plan_of_a_recorded_job_bounds_what_its_recording_holds(name: str, torch_adam: bool) -> None:
    opened = memtrace.load(snapshot_path(name))
    seen = opened.zero("peak")
    assert seen.setup is not None
    job = Given(params=seen.params, world=seen.world, dtype=seen.dtype, numels=seen.setup.numels, torch_adam=torch_adam)
    setup = planned(job)
    plan = theory.plan(setup)[seen.setup.stage]
    planned_bytes = {term.name: term.kept or 0 for term in plan.terms}
    for at in ("peak", "end"):
        for line in opened.zero(at).lines:
            if line.name in planned_bytes:
                counters = 1 << 20  # of steps, norms and overflows
                assert line.measured_bytes <= planned_bytes[line.name] + counters, line
    steps = opened.timeline().phase == Phase.STEP
    temporaries = _most_requested(opened, "optim.temp")
    assert steps.any()
    assert temporaries == pytest.approx(planned_bytes[theory.STEP_TEMPORARIES], rel=0.005)


def _most_requested(opened: memtrace.Snapshot, category: str) -> int:
    """The highest sum of a category over the trace."""
    attribution, blocks = opened.attribution(), opened.replay().lifetimes
    chosen = attribution.category == attribution.categories.index(category)
    events = opened.replay().events
    change = np.zeros(events + 2, np.int64)
    np.add.at(change, np.maximum(blocks.born[chosen], 0), blocks.requested[chosen])
    np.add.at(change, np.minimum(blocks.freed[chosen], events), -blocks.requested[chosen])
    return int(np.cumsum(change).max())
