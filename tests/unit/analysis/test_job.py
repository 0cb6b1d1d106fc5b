"""What is inferred of a job, against what each recording was made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import fixture_names, shared_snapshots, snapshot_path, truth_path

import memtrace
from memtrace.analysis.job import Job, headline, infer_job
from memtrace.attribution.theory import Wrapper

ZERO = [name for name in fixture_names() if "zero" in name and truth_path(name).exists()]


def job_of(path: Path) -> Job | None:
    opened = memtrace.load(path)
    return infer_job(opened.data, opened.replay(), opened.timeline(), opened.attribution())


def check(job: Job | None, truth: Path) -> None:
    made = json.loads(truth.read_text())
    args = made["args"]
    assert job is not None
    assert job.stage == args["stage"] or (job.wrapper is Wrapper.BF16 and (job.stage, args["stage"]) == (1, 0))
    if "offload" in truth.name:  # fp32 masters are on the CPU: no size tells the ranks
        assert job.world in (args["world"], None)
        assert job.params in (made["params"], None)
    else:
        assert job.world == (args["world"] if job.stage else None)
        assert job.params == made["params"]
    assert job.dtype in (args["dtype"], "16-bit")
    assert job.param_bytes == 2
    assert set(job.sources) == {"stage", "world", "params", "dtype", "optimizer"}
    assert all(job.sources.values())
    if job.optimizer is not None:
        assert job.optimizer in ("Adam", "FusedAdam")
        assert job.state_bytes == 8


@pytest.mark.parametrize("name", ZERO)
def test_the_job_is_the_one_that_was_run(name: str) -> None:
    check(job_of(snapshot_path(name)), truth_path(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "truth"), [pair for pair in shared_snapshots() if "zero" in pair[0].name], ids=lambda path: path.name
)
def test_the_job_of_recordings_beside_the_repository(path: Path, truth: Path) -> None:
    check(job_of(path), truth)


@pytest.mark.parametrize("name", ["gpt2-adamw", "llama-fsdp2", "mlp-adamw", "oom"])
def test_no_job_where_deepspeed_is_not(name: str) -> None:
    assert job_of(snapshot_path(name)) is None


def test_sizes_of_parameters_and_the_rank_are_found() -> None:
    job = job_of(snapshot_path("gpt2-zero2"))
    assert job is not None
    assert (len(job.numels), sum(job.numels), job.rank) == (148, 124_439_808, 0)
    assert job.groups == (124_439_808,)


def test_a_late_recording_tells_the_ranks_by_what_is_reduced() -> None:
    job = job_of(snapshot_path("gpt2-zero3-recorded-from-step-0"))
    assert job is not None
    assert job.numels == ()
    assert "reduced" in job.sources["world"]
    assert "padding included" in job.sources["params"]


def test_the_reduce_bucket_is_measured() -> None:
    for name, bucket in (("gpt2-zero2-bucket5e7", 50_000_000), ("gpt2-zero3", 500_000_000), ("gpt2-zero0", None)):
        job = job_of(snapshot_path(name))
        assert job is not None
        assert (job.reduce_bucket, job.buckets) == (bucket, 1)


def test_before_the_first_step_the_optimizer_is_not_known() -> None:
    job = job_of(snapshot_path("gpt2-zero3-oom"))
    assert job is not None
    assert (job.optimizer, job.state_bytes) == (None, None)
    assert "before the first optimizer step" in job.sources["optimizer"]


def test_what_the_recording_notes_beats_sizes() -> None:
    opened = memtrace.load(snapshot_path("gpt2-zero2"))
    job = infer_job(opened.data, opened.replay(), opened.timeline(), opened.attribution(), world=8, rank=5)
    assert job is not None
    assert (job.world, job.rank) == (8, 5)
    assert job.sources["world"] == "the recording's own notes"


def test_headline() -> None:
    job = job_of(snapshot_path("gpt2-zero3-deepspeed0.14.5"))
    assert job is not None
    assert headline(job) == "ZeRO-3, 8 ranks, DeepSpeed 0.14.3-0.15.2"
    assert headline(replace(job, world=1, releases=None)) == "ZeRO-3, 1 rank"
    assert headline(replace(job, world=None, releases=None, stage=None)) == "DeepSpeed, ZeRO stage unknown"
