"""Roles of living memory: of real engines and wrapped models on CPU, against what else in the process sees of it."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest
import zero_harness
from record import module_jobs, zero_jobs

from memtrace.record.inside import notes, roles

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
needs_deepspeed = pytest.mark.skipif(not zero_harness.is_available(), reason="needs torch and deepspeed")
ENGINES = {
    "zero 0": ("--stage", "0"),
    "zero 1": ("--stage", "1", "--gas", "2"),
    "zero 1, fp32 gradients": ("--stage", "1", "--fp32-grads", "--gas", "2"),
    "zero 2": ("--stage", "2", "--gas", "2", "--evaluate", "--save"),
    "zero 3": ("--stage", "3"),
    "zero.Init": ("--stage", "3", "--zero-init"),
    "zero 3, hpz": ("--stage", "3", "--hpz", "4"),
    "zero 3, offload": ("--stage", "3", "--offload"),
}
MOMENTS = ("in_forward", "before_step", "end")
MODELS = (
    "plain",
    "ddp",
    "compiled",
    "fsdp1",
    "fsdp1-orig",
    "fsdp1-mp",
    "fsdp1-whole",
    "fsdp1-whole-orig",
    "fsdp2",
    "fsdp2-mp",
)
SMALL = 1200  # scalars, and what a moment has of inputs


def owned(row: Any, found: list[Any]) -> bool:
    address, size, _ = row
    return any(address <= one["address"] < address + size for one in found)


def by_role(found: list[Any]) -> Counter[str]:
    return Counter(one["role"] for one in found)


def check_rows(found: list[Any], storages: list[Any]) -> None:
    """In memory that lives, once for each address and role, and said in full."""
    assert found
    keys = [(one["address"], one["role"]) for one in found]
    assert len(keys) == len(set(keys))
    for one in found:
        begin, end = one["address"], one["address"] + one["bytes"]
        assert any(address <= begin < end <= address + size for address, size, _ in storages)
        assert one["name"]
        assert one["device"] == "cpu"
        assert isinstance(one["shape"], list)
        assert not one["dtype"].startswith("torch")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {
        "stage": ENGINES[request.param][1],
        "options": ENGINES[request.param],
        **zero_jobs.found(*ENGINES[request.param]),
    }


@needs_deepspeed
@pytest.mark.slow
class TestOfARealEngine:
    @pytest.mark.parametrize("moment", MOMENTS)
    def test_what_the_engine_holds_is_there(self, engine: dict[str, Any], moment: str) -> None:
        """The harness walks the engine by its own list of attributes."""
        found = engine[moment]["roles"]
        check_rows(found, engine[moment]["storages"])
        size = Counter[int]()
        for one in found:
            size[one["address"]] = max(size[one["address"]], one["bytes"])
        for _, name, address, bytes_held in engine[moment]["truth"]:
            assert size[address] >= bytes_held, name

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_looking_changes_nothing(self, engine: dict[str, Any], moment: str) -> None:
        assert engine[moment]["untouched"]

    def test_after_the_step_nothing_large_is_without_a_role(self, engine: dict[str, Any]) -> None:
        for moment in ("before_step", "end"):
            found = engine[moment]["roles"]
            rest = [one for one in engine[moment]["storages"] if one[1] > SMALL and not owned(one, found)]
            assert rest == []

    def test_in_forward_only_activations_are_without_a_role(self, engine: dict[str, Any]) -> None:
        found = engine["in_forward"]["roles"]
        rest = [one for one in engine["in_forward"]["storages"] if one[1] > SMALL and not owned(one, found)]
        assert {tuple(shape[:2]) for _, _, shape in rest} == {(zero_harness.BATCH, zero_harness.LENGTH)}

    def test_parameters_have_their_names(self, engine: dict[str, Any]) -> None:
        roles_of = "param.partition" if engine["stage"] == "3" else "param"
        named = sorted(one["name"] for one in engine["end"]["roles"] if one["role"] == roles_of)
        assert named == engine["names"]

    def test_the_states_are_the_optimizers(self, engine: dict[str, Any]) -> None:
        count = by_role(engine["end"]["roles"])
        assert count["optim.state.exp_avg"] == count["optim.state.exp_avg_sq"] == count["param.master"] >= 1

    def test_gathered_ones_are_told_from_persistent_ones(self, engine: dict[str, Any]) -> None:
        if engine["stage"] != "3":
            assert not by_role(engine["in_forward"]["roles"])["param.gathered"]
            return
        limit = zero_harness.PERSISTENCE_THRESHOLD
        small = {name for name, numel in engine["numels"].items() if numel <= limit}
        found = engine["in_forward"]["roles"]
        assert {one["name"] for one in found if one["role"] == "param.persistent"} <= small
        gathered = {one["name"] for one in found if one["role"] == "param.gathered"} - {"in flight"}
        assert "layers.2.up.weight" in gathered
        assert not gathered & small


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
class TestOfAModel:
    def test_all_but_activations_has_a_role(self, kind: str) -> None:
        job = module_jobs.found(kind)
        for moment in {"forward", "backward", "end"} & job.keys():
            found, storages = job[moment]["roles"], job[moment]["storages"]
            check_rows(found, storages)
            rest = [shape for address, size, shape in storages if not owned((address, size, shape), found)]
            if moment == "forward":
                rest = [shape for shape in rest if shape and shape[0] != 2]  # the batch
            if kind == "ddp" and moment == "end":
                rest = [shape for shape in rest if shape != [16, 16]]  # its bucket, which no gradient is a view of now
            assert all(len(shape) == 1 and shape[0] <= module_jobs.WORLD for shape in rest if shape)  # a mesh
        assert job["notes"] == []

    def test_roles(self, kind: str) -> None:
        job = module_jobs.found(kind)
        after, end = by_role(job["backward"]["roles"]), by_role(job["end"]["roles"])
        flat = kind.startswith("fsdp1")
        is_sharded = kind.startswith("fsdp") and "whole" not in kind
        param, grad = ("param.partition", "grad.partition") if is_sharded else ("param", "grad")
        count = 3 if flat else 9  # the tied weight once
        assert after[param] == end[param] == count
        assert after[grad] == (9 if kind == "fsdp1-whole-orig" else count)
        assert after["buffer"] == 2
        assert after["param.gathered"] == 0
        assert set(after) == {
            param,
            grad,
            "buffer",
            *(f"optim.state.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
        }

    def test_names_are_the_models_own(self, kind: str) -> None:
        job = module_jobs.found(kind)
        names = {one["name"] for one in job["end"]["roles"]}
        parts = {f"{part}.{name}" for part in ("first", "second") for name in ("up.weight", "down.bias", "scale")}
        if kind.startswith("fsdp1"):
            assert names >= {"_flat_param", "first._flat_param", "second._flat_param", "first.scale", "second.scale"}
        else:
            assert names >= {*parts, "head.weight"}
        assert not any("module" in name or "_orig" in name for name in names)

    def test_an_optimizer_alone(self, kind: str) -> None:
        found = module_jobs.found(kind)["only optimizer"]
        assert by_role(found)["optim.state.exp_avg"] >= 3
        assert all(one["name"].startswith("group.0.") for one in found)


@needs_torch
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-orig", "fsdp1-mp", "fsdp2", "fsdp2-mp"])
@pytest.mark.slow
def test_unsharded_parameters_in_forward(kind: str) -> None:
    found = module_jobs.found(kind)["forward"]["roles"]
    gathered = [one for one in found if one["role"] == "param.gathered"]
    assert len(gathered) >= 2
    assert {one["dtype"] for one in gathered} == {"bfloat16" if "mp" in kind else "float32"}
    assert not by_role(found)["param"]


# In this process.


@pytest.fixture
def torch() -> Any:
    notes.NOTES.clear()
    yield pytest.importorskip("torch")
    notes.NOTES.clear()


def test_odd_tensors_are_left_out(torch: Any) -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.ones(3, device="meta"))
    module.b = torch.nn.Parameter(torch.ones(0))
    module.c = torch.nn.Parameter(torch.ones(8))
    module.register_buffer("d", torch.eye(4).to_sparse())
    module.register_buffer("e", torch.ones(4)[1:3])
    module.register_buffer("f", torch.ones(1).expand(1000))
    found = roles.collect([], [], [module])
    assert [(one["name"], one["bytes"]) for one in found] == [("c", 32), ("e", 8), ("f", 4)]
    assert found[1]["address"] == module.e.data_ptr()
    assert found[0] == {
        "role": "param",
        "name": "c",
        "address": module.c.data_ptr(),
        "bytes": 32,
        "shape": [8],
        "dtype": "float32",
        "device": "cpu",
    }


def test_a_lazy_copy_stays_lazy(torch: Any) -> None:
    if not hasattr(torch._C, "_is_cow_tensor"):
        pytest.skip("this torch has none")
    module = torch.nn.Module()
    module.register_buffer("a", torch.ones(8))
    module.register_buffer("b", torch._lazy_clone(module.a))
    roles.collect([], [], [module])
    assert torch._C._is_cow_tensor(module.b)


def test_under_a_mode_and_inside_a_transform(torch: Any) -> None:
    module = torch.nn.Linear(4, 4)
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(function)

    with Mode():
        seen.append(roles.collect([], [], [module]))

    def function(value: Any) -> Any:
        module.register_buffer("inner", value, persistent=False)
        seen.append(roles.collect([], [], [module]))
        return value.sum()

    torch.func.grad(function)(torch.ones(3))
    assert [[one["name"] for one in found] for found in seen] == [["weight", "bias"]] * 2
    assert notes.NOTES == []


def test_parts_of_a_quantized_tensor_count(torch: Any) -> None:
    class Two(torch.Tensor):  # type: ignore[misc]
        def __new__(cls, one: Any, other: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (8,), dtype=torch.float32)

        def __init__(self, one: Any, other: Any) -> None:
            self.one, self.other = one, other

        def __tensor_flatten__(self) -> Any:
            return ["one", "other"], None

        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError(args)

    module = torch.nn.Module()
    module.register_buffer("a", Two(torch.ones(8, dtype=torch.int8), torch.ones(2)))
    found = roles.collect([], [], [module])
    assert [(one["name"], one["bytes"], one["dtype"]) for one in found] == [("a", 8, "int8"), ("a", 8, "float32")]


def test_wrapped_and_nested_optimizers(torch: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    inner.step()
    inner.state[weight]["factors"] = [torch.ones(2), {"left": torch.ones(3)}]

    class Wrapper:
        optimizer = inner

    found = roles.collect([], [Wrapper(), inner], [])
    assert by_role(found) == {"param": 1, "grad": 1, "optim.state.momentum_buffer": 1, "optim.state.factors": 2}
    assert {one["name"] for one in found} == {"group.0.0"}


def test_what_breaks_is_noted_and_the_rest_is_kept(torch: Any) -> None:
    class Broken(torch.nn.Module):  # type: ignore[misc]
        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("broken")

    broken = Broken()
    broken.weight = torch.nn.Parameter(torch.ones(4))
    found = roles.collect([object()], [object()], [broken, torch.nn.Linear(2, 2)])
    assert [one["name"] for one in found] == ["weight", "weight", "bias"]
    assert notes.NOTES == ["roles of a model are incomplete: RuntimeError: broken"]


def test_without_torch_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert roles.collect([], [], []) == []


def test_fp16_optimizers_by_their_attributes(torch: Any) -> None:
    """They want a GPU: a stand-in has what FP16_Optimizer and the offloading ones hold."""

    class Optimizer:
        def __init__(self) -> None:
            self.fp16_groups_flat = [torch.ones(64)]
            self.fp32_groups_flat = [torch.ones(64, requires_grad=True)]
            self.temp_grad_buffer_for_gpu_offload = torch.ones(16)
            self.averaged_gradients = {0: [torch.ones(8), None], 1: None}
            self.optimizer = torch.optim.SGD(self.fp32_groups_flat, lr=0.1, momentum=0.9)
            self.fp32_groups_flat[0].grad = torch.ones(64)
            self.optimizer.step()

        @property
        def loss_scale(self) -> float:
            raise AssertionError("not to be asked for")

    class Engine:
        def __init__(self) -> None:
            self.module = torch.nn.Linear(2, 2)
            self.optimizer = Optimizer()
            self.basic_optimizer = self.optimizer.optimizer
            self.param_names = {param: f"module.{name}" for name, param in self.module.named_parameters()}

    found = roles.collect([Engine()], [], [])
    assert [(one["role"], one["name"]) for one in found] == [
        ("grad.partition", "averaged_gradients.0.0"),
        ("grad.bucket", "temp_grad_buffer_for_gpu_offload"),
        ("param.flat", "fp16_groups_flat.0"),
        ("param.master", "fp32_groups_flat.0"),
        ("grad.partition", "fp32_groups_flat.0.grad"),
        ("param", "module.weight"),
        ("param", "module.bias"),
        ("optim.state.momentum_buffer", "fp32_groups_flat.0"),
    ]
