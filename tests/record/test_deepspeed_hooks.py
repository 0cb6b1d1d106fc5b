"""Phases, engines and configuration of DeepSpeed: of real engines on CPU, and of stand-ins for what those do not do."""

from __future__ import annotations

import gc
import json
import sys
import types
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Self

import pytest
import zero_harness
from record import zero_jobs

from memtrace.record.inside import deepspeed_hooks, notes

needs_deepspeed = pytest.mark.skipif(not zero_harness.is_available(), reason="needs torch and deepspeed")
JOBS = {
    "zero 0": ("--stage", "0"),
    "zero 1": ("--stage", "1", "--fp32-grads", "--gas", "2"),
    "zero 2": ("--stage", "2", "--gas", "2", "--evaluate", "--save"),
    "zero 3": ("--stage", "3"),
    "zero.Init": ("--stage", "3", "--zero-init"),
    "accumulating": ("--stage", "3", "--gas", "2", "--evaluate", "--save"),
    "offload": ("--stage", "3", "--offload"),
    "compiled": ("--stage", "3", "--compile"),
}


@pytest.fixture(scope="module", params=JOBS)
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return JOBS[request.param]


@needs_deepspeed
@pytest.mark.slow
class TestOfARealEngine:
    def test_training_is_the_same_to_the_bit(self, options: tuple[str, ...]) -> None:
        ours, bare = zero_jobs.found(*options), zero_jobs.found(*options, "--no-hooks")
        assert ours["losses"] == bare["losses"]
        assert len(ours["losses"]) > 3

    def test_nothing_holds_the_parameters(self, options: tuple[str, ...]) -> None:
        ours = zero_jobs.found(*options)["refcounts"]
        bare = zero_jobs.found(*options, "--no-hooks")["refcounts"]
        if "--compile" in options:  # Dynamo holds fewer, for it looks into less
            bare = {name: min(count, bare[name]) for name, count in ours.items()}
        assert ours == bare

    def test_phases_are_those_of_the_script(self, options: tuple[str, ...]) -> None:
        job = zero_jobs.found(*options)
        seen = [(phase["phase"], phase["step"]) for phase in job["phases"]]
        inits = [phase for phase, _ in seen if phase == "init"]
        assert seen[: len(inits)] == [("init", None)] * len(inits)
        assert len(inits) == (2 if "--zero-init" in options else 1)
        micro = [("forward", "backward")] * (2 if "--gas" in options else 1)
        expected = [(phase, step) for step in range(4) for phase in [*(one for pair in micro for one in pair), "step"]]
        rest = [key for key, _ in groupby(seen[len(inits) :], lambda one: one)]
        assert rest[: len(expected)] == expected
        after = ["eval"] * ("--evaluate" in options) + ["checkpoint"] * ("--save" in options)
        assert [phase for phase, _ in rest[len(expected) :]] == after
        assert job["steps"] == 4
        assert {phase["source"] for phase in job["phases"]} == {"deepspeed"}

    def test_the_engine_is_known_and_let_go(self, options: tuple[str, ...]) -> None:
        job = zero_jobs.found(*options)
        assert job["engines"] == [True]
        assert job["left_over"] == []
        assert job["notes"] == []

    def test_what_is_in_force(self, options: tuple[str, ...]) -> None:
        job = zero_jobs.found(*options)
        zero = job["zero"]
        assert zero["stage"] == int(options[1])
        assert zero["world"] == 8
        assert zero["dtype"] == "bfloat16"
        assert zero["parameters"] == sum(job["numels"].values())
        assert zero["gradient_accumulation_steps"] == (2 if "--gas" in options else 1)
        if zero["stage"] == 3:
            buckets = zero_harness.BUCKETS
            assert zero["overlap_comm"] is True
            assert zero["reduce_bucket_size"] == buckets["reduce_bucket_size"]
            assert zero["sub_group_size"] == buckets["sub_group_size"]
            assert zero["prefetch_bucket_size"] == buckets["stage3_prefetch_bucket_size"]
            assert zero["param_persistence_threshold"] == zero_harness.PERSISTENCE_THRESHOLD
            assert zero["max_live_parameters"] == buckets["stage3_max_live_parameters"]
            assert zero["max_reuse_distance"] == 0
            small = [numel for numel in job["numels"].values() if numel <= zero_harness.PERSISTENCE_THRESHOLD]
            assert zero["persistent_parameters"] == sum(small)
            offload = {"device": "cpu"} if "--offload" in options else None
            for name in ("offload_optimizer", "offload_param"):
                assert offload is None or zero[name].items() >= offload.items()
                assert offload is not None or zero[name] is None

    def test_the_configuration_without_secrets(self, options: tuple[str, ...]) -> None:
        config = zero_jobs.found(*options)["config"]
        assert config["zero_optimization"]["stage"] == int(options[1])
        assert config["wandb"] == "<redacted>"
        assert json.dumps(config).count("me") == json.dumps({**config, "wandb": 0}).count("me")


# Stand-ins: a pipeline, failures, half-made engines.


class Phases:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, phase: str, source: str) -> str:
        assert source == "deepspeed"
        self.seen.append(f"<{phase}")
        return phase

    def end(self, token: str) -> None:
        self.seen.append(f"{token}>")

    def step_done(self) -> None:
        self.seen.append("done")


class Engine:
    training = True
    every = 1

    def __init__(self) -> None:
        self.global_steps = self.micro_steps = 0
        self._configure_distributed_model("model")

    def _configure_distributed_model(self, model: str) -> None:
        self.module = None

    def forward(self, value: Any) -> Any:
        if value is None:
            raise ValueError("a forward fails")
        return value

    def backward(self, loss: Any) -> Any:
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.every == 0

    def step(self) -> str:
        if self.is_gradient_accumulation_boundary():
            self.global_steps += 1
        self.micro_steps += 1
        return "stepped"

    def save_checkpoint(self, folder: str) -> str:
        return folder


class Forward:
    pass


class Step:
    pass


class Pipeline(Engine):
    def _exec_forward_pass(self, buffer: int) -> int:
        return buffer

    def _exec_optimizer_step(self) -> None:
        self.global_steps += 1

    def train_batch(self) -> int:
        for _ in range(2):
            self._INSTRUCTION_MAP[Forward](self, 0)
        self._INSTRUCTION_MAP[Step](self)
        return 1

    def eval_batch(self) -> int:
        return self._INSTRUCTION_MAP[Forward](self, 3)

    _INSTRUCTION_MAP = {Forward: _exec_forward_pass, Step: _exec_optimizer_step}  # noqa: RUF012 - as DeepSpeed has it


class Init:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Torch(types.ModuleType):
    grad = True

    def is_grad_enabled(self) -> bool:
        return self.grad


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `deepspeed` of stand-ins with the hooks in it, `seen` what they marked."""
    deepspeed = types.ModuleType("deepspeed")
    partition = types.ModuleType("deepspeed.runtime.zero.partition_parameters")
    partition.Init = Init  # type: ignore[attr-defined]
    deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine = Engine, Pipeline  # type: ignore[attr-defined]
    deepspeed.initialize = lambda **kwargs: (Engine(), kwargs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", partition)
    monkeypatch.setitem(sys.modules, "torch", Torch("torch"))
    recorder = types.SimpleNamespace(phases=Phases(), settings=types.SimpleNamespace(plain_paths=False))
    deepspeed_hooks.install(recorder)
    deepspeed.seen = recorder.phases.seen  # type: ignore[attr-defined]
    yield deepspeed
    deepspeed_hooks.remove()
    notes.NOTES.clear()


def test_initialize_and_the_engine_it_makes(library: Any) -> None:
    engine, given = library.initialize(model=1)
    assert given == {"model": 1}
    assert library.seen == ["<init", "init>"]
    assert deepspeed_hooks.engines() == [engine]
    del engine
    gc.collect()
    assert deepspeed_hooks.engines() == []


def test_a_step_is_a_step_at_the_boundary_only(library: Any) -> None:
    engine = Engine()
    engine.every = 2
    for _ in range(4):
        assert engine.step() == "stepped"
    assert library.seen == ["<step", "step>", "done"] * 2


def test_forward_without_gradients_or_not_in_training_is_evaluation(library: Any) -> None:
    engine = Engine()
    assert engine.forward(3) == 3
    engine.training = False
    engine.forward(3)
    engine.training = True
    sys.modules["torch"].grad = False  # type: ignore[attr-defined]
    engine.forward(value=3)
    assert [one for one in library.seen if one[0] == "<"] == ["<forward", "<eval", "<eval"]


def test_an_exception_goes_through_and_ends_the_phase(library: Any) -> None:
    with pytest.raises(ValueError, match="a forward fails") as caught:
        Engine().forward(None)
    assert library.seen == ["<forward", "forward>"]
    assert caught.traceback[-1].name == "forward"


def test_checkpoints_and_backward(library: Any) -> None:
    engine = Engine()
    assert engine.backward("loss") == "loss"
    assert engine.save_checkpoint("there") == "there"
    assert library.seen == ["<backward", "backward>", "<checkpoint", "checkpoint>"]


def test_a_pipeline_runs_the_marked_instructions(library: Any) -> None:
    engine = Pipeline()
    assert engine.train_batch() == 1
    assert library.seen == ["<forward", "forward>"] * 2 + ["<step", "step>", "done"]
    del library.seen[:]
    assert engine.eval_batch() == 3
    assert library.seen == ["<eval", "<forward", "forward>", "eval>"]


def test_construction_in_zero_init(library: Any) -> None:
    with Init(), Init():
        assert library.seen == ["<init", "<init"]
    assert library.seen[2:] == ["init>", "init>"]
    with pytest.raises(KeyError), Init():
        raise KeyError
    assert library.seen[4:] == ["<init", "init>"]
    assert deepspeed_hooks._TOKENS == {}


def test_a_broken_clock_never_reaches_the_job(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    for name in ("begin", "end", "step_done"):
        monkeypatch.setattr(deepspeed_hooks._HOOKS.phases, name, broken)
    engine, _ = library.initialize()
    assert engine.forward(1) == 1
    assert engine.step() == "stepped"
    with Init():
        pass
    assert any("RuntimeError: broken" in note for note in notes.NOTES)


def test_everything_is_as_it_was_after_remove(library: Any) -> None:
    deepspeed_hooks.remove()
    engine, _ = library.initialize()
    engine.step()
    Pipeline().train_batch()
    with Init():
        pass
    assert library.seen == []
    methods = [*vars(Engine).values(), *vars(Pipeline).values(), *Pipeline._INSTRUCTION_MAP.values()]
    assert not any(hasattr(method, "__wrapped__") for method in methods)


def test_the_subject_may_be_half_made(library: Any) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert deepspeed_hooks.config(Broken()) is None
    assert deepspeed_hooks.zero(Broken())["stage"] == 0
    assert deepspeed_hooks.gathers() == []


def test_without_an_engine_class_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "torch", Torch("torch"))
    deepspeed_hooks.install(types.SimpleNamespace(phases=Phases()))
    deepspeed_hooks.remove()
    assert notes.NOTES == ["this DeepSpeed has no DeepSpeedEngine: its phases are not marked"]
    notes.NOTES.clear()
