"""Phases and steps: from stacks, from what was recorded, from the rhythm of the trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import SnapshotBuilder
from stacks import BACKWARD, CALL, MODULE, SCRIPT, STEP, Job, MiB, chain

import memtrace
from memtrace.timeline import PHASES, SOURCES, Phase
from memtrace.timeline.recorded import phase_of_text

MOVE = f"torch/nn/modules/module.py:965 _apply; torch/nn/modules/module.py:1384 to; {SCRIPT}"
START = f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}"


def phases_of(job: Job, folder: Path) -> list[tuple[str | None, int | None]]:
    """Phase and step of each allocation."""
    snapshot = job.snapshot(folder)
    born = np.sort(snapshot.replay().lifetimes.born)
    return [snapshot.timeline().at(int(event)) for event in born]


def one_step(job: Job) -> None:
    """Input, forward, loss, backward with a thread without Python, the optimizer's step."""
    job.alloc("train.py:5 <module>")
    job.alloc(MODULE)
    job.alloc("train.py:6 <module>")
    job.alloc(START)
    job.alloc(None)
    job.alloc(STEP)


def test_a_plain_training_job(tmp_path: Path) -> None:
    job = Job()
    job.alloc(MOVE)
    for _ in range(3):
        one_step(job)
    expected = ["forward", "forward", "forward", "backward", "backward", "step"]
    assert phases_of(job, tmp_path) == [("init", None)] + [(phase, step) for step in range(3) for phase in expected]


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        for _ in range(3):
            job.alloc(MODULE)
            job.alloc(START)
        job.alloc(STEP)
    assert phases_of(job, tmp_path) == [
        (phase, step) for step in range(2) for phase in ["forward", "backward"] * 3 + ["step"]
    ]


def test_without_any_trace_of_an_optimizer_each_backward_ends_a_step(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        job.alloc(MODULE)
        job.alloc(START)
    assert phases_of(job, tmp_path) == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        (f"model.py:3 forward; {CALL}; transformers/trainer.py:2869 evaluation_loop; {SCRIPT}", "eval"),
        (f"model.py:3 forward; {CALL}; transformers/generation/utils.py:2802 generate; {SCRIPT}", "eval"),
        (f"model.py:3 forward; {CALL}; torch/utils/checkpoint.py:1120 recompute_fn; {BACKWARD}", "backward"),
        (f"model.py:3 forward; {CALL}; torch/utils/checkpoint.py:1120 unpack_hook", "backward"),
        (f"model.py:3 forward; {CALL}; train.py:8 closure; torch/optim/lbfgs.py:300 step; {SCRIPT}", "forward"),
        ("model.py:3 backward; torch/autograd/function.py:311 apply", "backward"),
        ("mine.py:3 hook", "backward"),
        (f"torch/serialization.py:668 load; {SCRIPT}", "checkpoint"),
        (f"torch/serialization.py:668 load; transformers/modeling_utils.py:4000 from_pretrained; {SCRIPT}", "init"),
        (f"deepspeed/runtime/engine.py:2358 forward; {SCRIPT}", "forward"),
        ("deepspeed/runtime/zero/stage3.py:1333 reduce_partition_and_remove_grads", "backward"),
        (f"deepspeed/runtime/engine.py:2708 _take_model_step; {SCRIPT}", "step"),
        (f"torch/nn/utils/clip_grad.py:38 clip_grad_norm_; {SCRIPT}", "step"),
        (f"torch/amp/grad_scaler.py:372 unscale_; {SCRIPT}", "step"),
        (f"bitsandbytes/optim.py:5 step; torch/optim/optimizer.py:500 wrapper; {SCRIPT}", "step"),
    ],
)
def test_the_outermost_call_that_tells_decides(stack: str, phase: str, tmp_path: Path) -> None:
    job = Job()
    one_step(job)
    job.alloc(stack)
    assert phases_of(job, tmp_path)[-1][0] == phase


def test_functions_of_the_users_own_with_such_names_tell_nothing(tmp_path: Path) -> None:
    job = Job()
    for name in ("forward", "backward", "step", "evaluate", "load", "initialize"):
        job.alloc(f"/home/me/trainer.py:3 {name}; train.py:1 <module>")
    assert {phase for phase, _ in phases_of(job, tmp_path)} == {"other"}


def test_threads_without_python_mean_nothing_where_no_model_is_called(tmp_path: Path) -> None:
    job = Job()
    for stack in ("train.py:1 <module>", None, "train.py:2 <module>", None):
        job.alloc(stack)
    assert {phase for phase, _ in phases_of(job, tmp_path)} == {"other"}


def test_a_model_without_modules_by_its_rhythm(tmp_path: Path) -> None:
    job = Job()
    job.alloc("train.py:1 <module>")
    for _ in range(3):
        job.alloc("train.py:5 <module>")
        job.alloc(START)
        job.alloc(None)
        job.alloc(STEP)
    assert phases_of(job, tmp_path)[0] == ("init", None)
    assert [phase for phase, _ in phases_of(job, tmp_path)[1:5]] == ["forward", "backward", "backward", "step"]
    assert phases_of(job, tmp_path)[-1] == ("step", 2)


def test_called_again_and_again_and_never_learning_is_evaluation(tmp_path: Path) -> None:
    job = Job()
    for _ in range(3):
        job.alloc("train.py:5 <module>")
        job.alloc(MODULE)
    assert {phase for phase, _ in phases_of(job, tmp_path)} == {"eval"}
    job.builder.oom(64 * MiB)  # a job that broke off in its first forward may have meant to learn
    assert {phase for phase, _ in phases_of(job, tmp_path)} == {"forward"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step=2;phase=optimizer", (Phase.STEP, 2)),
        ("phase=forward", (Phase.FORWARD, -1)),
        ("phase=bwd step=3", (Phase.BACKWARD, 3)),
        ("phase=dancing;step=1", (None, 1)),
        ("step=99999999999999999999", (None, -1)),
        ("step=-4", (None, -1)),
        ("step=\u0663", (None, -1)),
        ("myphase=forward", (None, -1)),
        ("", (None, -1)),
    ],
)
def test_what_a_text_says(text: str, said: tuple[Phase | None, int]) -> None:
    assert phase_of_text(text) == said


def test_metadata_beats_stacks(tmp_path: Path) -> None:
    builder = SnapshotBuilder()
    builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(MODULE), user_metadata="step=5;phase=eval")
    builder.alloc(0x7F1000000000, 4 * MiB, stack=chain(MODULE), user_metadata="")
    timeline = memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False).timeline()
    assert timeline.at(1) == ("eval", None)
    run = timeline.run(1)
    assert run is not None
    assert SOURCES[int(timeline.source[run])] == "recorded"


def test_ranges_that_torch_records_fill_what_stacks_leave_open(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x7F0000000000, 4 * MiB, stack=chain(MODULE))
    builder.annotation("Optimizer.step#Adam.step", "START").alloc(
        0x7F1000000000, 4 * MiB, stack=chain("opt.py:3 <module>")
    )
    builder.annotation("Optimizer.step#Adam.step", "END").alloc(0x7F2000000000, 4 * MiB, stack=chain(MODULE))
    timeline = memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False).timeline()
    assert [PHASES[code] for code in timeline.phase.tolist()] == ["forward", "step", "forward"]
    assert timeline.step.tolist() == [0, 0, 1]
    assert SOURCES[int(timeline.source[1])] == "annotations"


def test_the_profilers_steps_are_taken(tmp_path: Path) -> None:
    builder = SnapshotBuilder()
    for number in (7, 8):
        builder.annotation(f"ProfilerStep#{number}", "START")
        builder.alloc(0x7F0000000000 + number * 0x100000000, 4 * MiB, stack=chain(MODULE))
        builder.free(0x7F0000000000 + number * 0x100000000)
        builder.alloc(0x7E0000000000 + number * 0x100000000, 4 * MiB, stack=chain(STEP))
        builder.annotation(f"ProfilerStep#{number}", "END")
    timeline = memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False).timeline()
    assert [(PHASES[a], b) for a, b in zip(timeline.phase.tolist(), timeline.step.tolist(), strict=True)] == [
        ("forward", 7),
        ("step", 7),
        ("forward", 8),
        ("step", 8),
    ]


@pytest.mark.parametrize("context", [None, "state", "alloc", "all"])
@pytest.mark.parametrize("torch", ["2.0", "2.1", "2.5", "2.15"])
def test_every_way_of_recording_has_a_timeline_that_covers_it(context: str | None, torch: str, tmp_path: Path) -> None:
    job = Job(SnapshotBuilder(torch=torch, context=context))
    one_step(job)
    job.free(0, 1)
    snapshot = job.snapshot(tmp_path)
    timeline = snapshot.timeline()
    assert timeline.events == len(snapshot.data.traces[0])
    assert timeline.start[0] == 0
    assert (np.diff(timeline.start) > 0).all()
    assert snapshot.blame().total_bytes == sum(row.bytes for row in snapshot.blame().rows)


ZERO_GRAD = "torch/optim/optimizer.py:990 zero_grad; train.py:12 <module>"


def recorded_with_all_stacks() -> Job:
    """A job recorded with context="all": frees have stacks of their own."""
    return Job(SnapshotBuilder(context="all"))


def free_with(job: Job, stack: str, *handles: int) -> None:
    for handle in handles:
        job.builder.free(job.addresses[handle], stack=chain(stack))


def test_gradients_cleared_between_forward_and_backward_are_no_step(tmp_path: Path) -> None:
    job = recorded_with_all_stacks()
    gradients: list[int] = []
    for _ in range(3):
        job.alloc(MODULE)
        free_with(job, ZERO_GRAD, *gradients)
        job.alloc(START)
        gradients = [job.alloc(None)]
        job.step()
    phases = [phase for phase, _ in phases_of(job, tmp_path)]
    assert phases == ["forward", "backward", "backward", "step"] * 3
    assert [step for _, step in phases_of(job, tmp_path)] == [step for step in range(3) for _ in range(4)]


def test_an_optimizer_that_allocates_nothing_is_told_by_the_gradients_it_clears(tmp_path: Path) -> None:
    for between in (True, False):
        job = recorded_with_all_stacks()
        gradients: list[int] = []
        for _ in range(3):
            job.alloc(MODULE)
            if between:
                free_with(job, ZERO_GRAD, *gradients)
            job.alloc(START)
            gradients = [job.alloc(None)]
            if not between:
                free_with(job, ZERO_GRAD, *gradients)
        steps = [step for _, step in phases_of(job, tmp_path)]
        assert steps == [step for step in range(3) for _ in range(3)]


def test_accumulation_with_such_an_optimizer(tmp_path: Path) -> None:
    job = recorded_with_all_stacks()
    gradients: list[int] = []
    for _ in range(2):
        for micro in range(3):
            job.alloc(MODULE)
            if not micro:
                free_with(job, ZERO_GRAD, *gradients)
            job.alloc(START)
            gradients = [job.alloc(None)]
    assert [step for _, step in phases_of(job, tmp_path)] == [0] * 9 + [1] * 9


def test_a_range_of_torchs_without_events_ends_a_step_too(tmp_path: Path) -> None:
    job = Job()
    for _ in range(3):
        job.alloc(MODULE)
        job.alloc(START)
        job.builder.annotation("Optimizer.step#SGD.step", "START").annotation("Optimizer.step#SGD.step", "END")
    for _ in range(2):
        job.alloc(MODULE)
        job.alloc(START)
    steps = [step for _, step in phases_of(job, tmp_path)]
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]


def call(job: Job, *, saves: bool) -> list[int]:
    """The model called on a batch; what it makes is kept for backward or not."""
    blocks = [job.alloc("train.py:5 <module>"), job.alloc(MODULE)]
    if not saves:
        job.free(*blocks)
        return []
    return blocks


def test_calls_that_leave_nothing_for_backward_are_evaluation(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        saved = call(job, saves=True)
        job.alloc(START)
        job.free(*saved)
        job.step()
        for _ in range(2):
            call(job, saves=False)
    found = phases_of(job, tmp_path)
    assert [phase for phase, _ in found] == (["forward"] * 2 + ["backward", "step"] + ["eval"] * 4) * 2
    assert {step for phase, step in found if phase == "eval"} == {None}
    assert found[8] == ("forward", 1)


def test_several_calls_before_one_backward_that_all_save_are_forward(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        saved = [*call(job, saves=True), *call(job, saves=True)]
        job.alloc(START)
        job.free(*saved)
        job.step()
    assert [phase for phase, _ in phases_of(job, tmp_path)] == (["forward"] * 4 + ["backward", "step"]) * 2
