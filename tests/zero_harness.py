"""DeepSpeed ZeRO as rank 0 of many, on CPU, written down as a CUDA memory snapshot with the truth beside it.

    python tests/zero_harness.py --stage 3 --out DIR      # writes DIR/snapshot.pickle and DIR/roles.json

The process group is torch's fake one. Every storage that an operation makes counts as one CUDA allocation, with the
Python stack of that moment; `legal.Machine` gives it an address by the caching allocator's rules, and frees it when
the storage dies. What the engine really holds at the end is `roles`, found by walking its objects.

Unlike on a GPU there is one stream, and memory that DeepSpeed keeps on the CPU for a while counts too. Temporaries
inside an operation do not. In a process of its own, because DeepSpeed and the fake group change the whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from legal import Machine

Raw = dict[str, Any]
Frame = tuple[str, int, str]  # filename, line, name

# Sizes are odd, so that every partition and every flat buffer is padded.
VOCABULARY, HIDDEN, INNER, LAYERS = 523, 75, 301, 4
BATCH, LENGTH = 2, 31
PERSISTENCE_THRESHOLD = 100  # elements: norms and most biases stay gathered
BUCKETS = {
    "reduce_bucket_size": 100_000,
    "allgather_bucket_size": 100_000,
    "sub_group_size": 20_000,  # three groups
    "stage3_prefetch_bucket_size": 25_000,
    "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
    "stage3_max_live_parameters": 60_000,  # else everything is prefetched, and never released in forward
    "stage3_max_reuse_distance": 0,
}
ENGINE = (("torch/autograd/graph.py", "_engine_run_backward"),)
# What torch puts between an operation and a dispatch mode's handler.
DISPATCH = (("torch/_compile.py", "inner"), ("torch/_dynamo/eval_frame.py", "_fn"))
_HIDDEN: set[CodeType] = set()  # code of this file that a job would not have


def is_available() -> bool:
    """Whether torch and DeepSpeed are installed; imports neither."""
    return all(importlib.util.find_spec(name) for name in ("torch", "deepspeed"))


def run(folder: Path, *options: object, python: str = sys.executable) -> tuple[Path, Raw]:
    """The script in a process of its own: the snapshot's path and what roles.json says."""
    run_script(__file__, "--out", folder, *options, python=python)
    return folder / "snapshot.pickle", json.loads((folder / "roles.json").read_text("utf-8"))


def run_script(script: str, *options: object, python: str = sys.executable) -> None:
    """A script of the tests to its end, without what this process has in its environment for DeepSpeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONWARN", "DS_"))}
    done = subprocess.run(
        [python, script, *map(str, options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{options} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the harness: no stack shows it."""
    _HIDDEN.add(function.__code__)
    return function


# The recorder.


@dataclass(slots=True)
class Storage:
    """A living storage: its block, and the reference that tells when it dies."""

    address: int
    bytes: int
    born: int  # event
    ref: weakref.ref[Any]


class Recorder:
    """Writes storages down as blocks. With `autograd_thread`, stacks of backward begin where CUDA's thread does."""

    def __init__(self, autograd_thread: bool = True) -> None:
        self.machine = Machine()
        self.autograd_thread = autograd_thread
        self.live: dict[int, Storage] = {}  # by the address of torch's StorageImpl
        self.stacks: dict[tuple[Frame, ...], int] = {}
        self.is_on = False
        self._busy = False
        self._dead: list[tuple[int, str]] = []  # died while the machine was at work: garbage collection

    @hidden
    def note(self, tensor: Any) -> None:
        """An operation returned `tensor`."""
        if tensor.device.type != "cpu" or tensor.layout != _torch().strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known is not None and known.bytes == size:
            return
        stack = self._stack(sys._getframe(1))
        if known is not None:  # resized
            self._release(key, stack)
        if size:
            self._at_work(lambda: self._allocate(key, size, storage, stack))

    @hidden
    def _allocate(self, key: int, size: int, storage: Any, stack: str) -> None:
        address = self.machine.malloc(size, stack=stack)
        born = len(self.machine.events) - 1
        # The address of a dead StorageImpl is used again: look whose death it is.
        self.live[key] = Storage(address, size, born, weakref.ref(storage, lambda ref: self._died(key, ref)))

    @hidden
    def _died(self, key: int, ref: weakref.ref[Any]) -> None:
        known = self.live.get(key)
        if self.is_on and known is not None and known.ref is ref:
            self._release(key, self._stack(sys._getframe(1)))

    @hidden
    def _release(self, key: int, stack: str) -> None:
        self._dead.append((self.live.pop(key).address, stack))
        self._at_work(lambda: None)

    @hidden
    def _at_work(self, work: Callable[[], None]) -> None:
        """Do `work`, then free what died meanwhile; once at a time."""
        if self._busy:
            return  # only a death can come here
        self._busy = True
        try:
            work()
            while self._dead:
                address, stack = self._dead.pop(0)
                self.machine.free(address, stack)
        finally:
            self._busy = False

    def _stack(self, frame: FrameType | None) -> str:
        """The stack from `frame` outwards, as a key of `stacks`."""
        found: list[Frame] = []
        while frame is not None and (frame.f_code in _HIDDEN or _is_any(frame.f_code, DISPATCH)):
            frame = frame.f_back
        while frame is not None:
            code = frame.f_code
            if self.autograd_thread and _is_any(code, ENGINE):
                break
            if code not in _HIDDEN:
                found.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return str(self.stacks.setdefault(tuple(found), len(self.stacks)))

    def snapshot(self) -> Raw:
        """What torch.cuda.memory._snapshot() would have said."""
        snapshot: Raw = self.machine.snapshot()
        frames = [
            [{"name": name, "filename": filename, "line": line} for filename, line, name in stack]
            for stack in self.stacks
        ]
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        for item in (*snapshot["device_traces"][0], *snapshot["segments"], *blocks):
            if item["frames"]:
                item["frames"] = frames[int(item["frames"][0]["name"])]
        return snapshot

    def place(self, tensor: Any) -> tuple[int, int] | None:
        """Address and bytes of a tensor in the invented memory; None where nothing was seen."""
        known = self.live.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        return known.address + tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()

    def event(self) -> int:
        """The last event."""
        return len(self.machine.events) - 1


_HIDDEN.update(const for const in Recorder.note.__code__.co_consts if isinstance(const, CodeType))
_HIDDEN.update(const for const in Recorder._allocate.__code__.co_consts if isinstance(const, CodeType))
_HIDDEN.update(const for const in Recorder._release.__code__.co_consts if isinstance(const, CodeType))


def _is_any(code: CodeType, places: Iterable[tuple[str, str]]) -> bool:
    return any(code.co_name == name and code.co_filename.endswith(file) for file, name in places)


def _torch() -> Any:
    import torch

    return torch


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Everything that this thread's operations return goes to `recorder`."""
    import torch
    import torch._dynamo  # the mode needs it, and cannot load it under zero.Init
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):
        @hidden
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    recorder.note(leaf)
            return result

    recorder.is_on = True
    with Mode():
        try:
            yield
        finally:
            recorder.is_on = False


# What DeepSpeed knows.


@dataclass
class Truth:
    """roles.json. Roles are [role, name, address, bytes] of what lives at the end; events are indices."""

    versions: dict[str, str]
    stage: int
    world: int
    dtype: str
    steps: int
    zero_init: bool
    numels: dict[str, int] = field(default_factory=dict)
    marks: list[tuple[str, int]] = field(default_factory=list)  # what was done, the last event then
    gathers: list[Raw] = field(default_factory=list)  # of each parameter's gathered storage
    fetch_lines: dict[str, list[int]] = field(default_factory=dict)  # of fetch_sub_module, by kind of gather
    linear_bytes: int = 0  # of all weights of Linear modules, gathered
    retained_bytes: list[int] = field(default_factory=list)  # of those, alive after each forward though released
    roles: list[tuple[str, str, int, int]] = field(default_factory=list)
    earlier: list[Raw] = field(default_factory=list)  # {what, event, roles} at the marks of the last step
    unplaced: list[tuple[str, str]] = field(default_factory=list)  # role and name of what the recorder never saw
    stats: dict[str, int] = field(default_factory=dict)  # torch's counters


def numel(parameter: Any) -> int:
    """Elements of a whole parameter, gathered or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class GatherWatch:
    """Tells demanded gathers from prefetched ones: a gather of only the fetched module's own parameters is demanded."""

    def __init__(self, recorder: Recorder, truth: Truth) -> None:
        self.recorder, self.truth = recorder, truth
        self.names: dict[int, str] = {}
        self.kinds: dict[int, str] = {}
        self.own: set[int] = set()
        self.seen: set[int] = set()

    def install(self) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        mangled = "_PartitionedParameterCoordinator__all_gather_params"
        fetch_sub_module, all_gather = Coordinator.fetch_sub_module, getattr(Coordinator, mangled)

        @hidden
        def fetch(coordinator: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = list(module.parameters(recurse=False))
            self.own = {parameter.ds_id for parameter in parameters}
            result = fetch_sub_module(coordinator, module, *args, **kwargs)
            for parameter in parameters:
                self._arrived(parameter)
            return result

        @hidden
        def gather(coordinator: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            missing = [parameter for parameter in parameters if parameter.ds_status.name == "NOT_AVAILABLE"]
            if missing:
                kind = "demand" if {parameter.ds_id for parameter in parameters} <= self.own else "prefetch"
                self.kinds.update((parameter.ds_id, kind) for parameter in missing)
                lines = self.truth.fetch_lines.setdefault(kind, [])
                line = sys._getframe(1).f_lineno
                if line not in lines:
                    lines.append(line)
            return all_gather(coordinator, parameters, *args, **kwargs)

        Coordinator.fetch_sub_module = fetch
        setattr(Coordinator, mangled, gather)

    @hidden
    def _arrived(self, parameter: Any) -> None:
        known = self.recorder.live.get(parameter.untyped_storage()._cdata)
        if known is None or known.born in self.seen or parameter.ds_id not in self.kinds:
            return
        self.seen.add(known.born)
        self.truth.gathers.append(
            {
                "event": known.born,
                "address": known.address,
                "bytes": known.bytes,
                "parameter": self.names.get(parameter.ds_id, ""),
                "kind": self.kinds[parameter.ds_id],
            }
        )


class LinearWatch:
    """Sees whether the weights that Linear modules used in forward outlive their release."""

    def __init__(self, recorder: Recorder, model: Any) -> None:
        self.recorder = recorder
        self.used: dict[int, tuple[int, Any]] = {}  # the birth and the parameter of each StorageImpl
        for module in model.modules():
            if isinstance(module, _torch().nn.Linear):
                module.register_forward_hook(self._used)

    @hidden
    def _used(self, module: Any, args: Any, output: Any) -> None:
        key = module.weight.untyped_storage()._cdata
        if key in self.recorder.live:
            self.used[key] = (self.recorder.live[key].born, module.weight)

    def retained_bytes(self) -> int:
        """Bytes that are alive and no parameter's any more."""
        living = [
            self.recorder.live[key]
            for key, (born, weight) in self.used.items()
            if key in self.recorder.live
            and self.recorder.live[key].born == born
            and weight.untyped_storage()._cdata != key
        ]
        self.used.clear()
        return sum(storage.bytes for storage in living)


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of nested lists and dicts, with a name each."""
    if isinstance(value, _torch().Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}" if isinstance(key, (int, str)) else name)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{number}")


# Attributes of the ZeRO optimizers (section 2.3 of the map), over all versions.
ATTRIBUTES = {
    "bit16_groups_flat": "param.flat",
    "fp16_partitioned_groups_flat": "param.flat",
    "lp_param_buffer": "param.flat",
    "single_partition_of_fp32_groups": "param.master",
    "fp32_partitioned_groups_flat": "param.master",
    "grad_partitions_flat_buffer": "grad.partition",
    "averaged_gradients": "grad.partition",
    "all_grad_tensors": "grad.partition",
    "grads_in_partition": "grad.partition",
    "ipg_buffer": "grad.bucket",
    "temp_grad_buffer_for_gpu_offload": "grad.bucket",
    "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer": "grad.bucket",
}


def held_by(engine: Any) -> Iterator[tuple[str, str, Any]]:
    """(role, name, tensor) of what a ZeRO engine holds."""
    optimizer = engine.optimizer
    for attribute, role in ATTRIBUTES.items():
        for name, tensor in tensors_in(getattr(optimizer, attribute, None), attribute):
            yield role, name, tensor
    for dtype, bucket in getattr(optimizer, "ipg_buckets", {}).items():
        for name, tensor in tensors_in(getattr(bucket, "buffer", None), f"ipg_buckets.{dtype}"):
            yield "grad.bucket", name, tensor
    for number, state in enumerate(optimizer.optimizer.state.values()):
        for key, value in state.items():
            for name, tensor in tensors_in(value, f"{key}.{number}"):
                yield f"optim.state.{key}", name, tensor
    for name, parameter in engine.module.named_parameters():
        is_zero3 = hasattr(parameter, "ds_tensor")
        yield "param.gathered" if is_zero3 else "param", name, parameter.data
        if is_zero3:
            yield "param.partition", name, parameter.ds_tensor.data
        if parameter.grad is not None:
            yield "grad", name, parameter.grad
    for name, tensor in engine.module.named_buffers():
        yield "buffer", name, tensor


def roles_now(truth: Truth, engine: Any, recorder: Recorder) -> list[tuple[str, str, int, int]]:
    """The roles of this moment: each tensor with memory once."""
    found: dict[tuple[str, int, int], str] = {}
    for role, name, tensor in held_by(engine):
        place = recorder.place(tensor)
        if place is not None and place[1]:
            found.setdefault((role, *place), name)
        elif tensor.numel():
            truth.unplaced.append((role, name))
    return [(role, name, address, size) for (role, address, size), name in found.items()]


# The job.


def make_model() -> Any:
    """A small transformer, one head."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
            self.inner_norm = nn.LayerNorm(HIDDEN)
            self.up = nn.Linear(HIDDEN, INNER)
            self.down = nn.Linear(INNER, HIDDEN)

        def forward(self, hidden: Any) -> Any:
            normed = self.norm(hidden)
            scores = self.query(normed) @ self.key(normed).transpose(-1, -2)
            hidden = hidden + self.out(functional.softmax(scores / HIDDEN**0.5, dim=-1) @ self.value(normed))
            return hidden + self.down(functional.gelu(self.up(self.inner_norm(hidden))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
            self.positions = nn.Embedding(LENGTH, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
            self.register_buffer("scale", torch.ones(HIDDEN))

        def forward(self, ids: Any) -> Any:
            hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            hidden = hidden * self.scale.type_as(hidden)
            for layer in self.layers:
                hidden = layer(hidden)
            logits = self.head(self.norm(hidden))
            return functional.cross_entropy(logits.view(-1, VOCABULARY).float(), ids.view(-1))

    return Model()


def deepspeed_config(stage: int, dtype: str) -> Raw:
    """What deepspeed.initialize is given."""
    # torch's own AdamW: nothing to compile
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}}
    zero: Raw = {"stage": stage, **(BUCKETS if stage == 3 else {key: BUCKETS[key] for key in list(BUCKETS)[:2]})}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),  # fp16 DeepSpeed refuses on CPU
    }


def train(recorder: Recorder, truth: Truth) -> Any:
    """The job, like anybody's but for the notes it takes. The engine that it returns holds the memory."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    config = deepspeed_config(truth.stage, truth.dtype)
    watch = GatherWatch(recorder, truth)
    watch.install()
    if truth.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = make_model()
    else:
        model = make_model()
    linears = LinearWatch(recorder, model)
    truth.marks.append(("model", recorder.event()))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    truth.marks.append(("initialize", recorder.event()))
    for name, parameter in model.named_parameters():
        truth.numels[name] = numel(parameter)
        watch.names[getattr(parameter, "ds_id", -1)] = name
    truth.linear_bytes = sum(
        numel(module.weight) * module.weight.element_size()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    )

    def mark(what: str, step: int) -> None:
        truth.marks.append((f"{what} {step}", recorder.event()))
        if step == truth.steps - 1 and what != "step":
            roles = roles_now(truth, engine, recorder)
            truth.earlier.append({"what": what, "event": recorder.event(), "roles": roles})

    for step in range(truth.steps):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
        loss = engine(ids)
        mark("forward", step)
        truth.retained_bytes.append(linears.retained_bytes())
        engine.backward(loss)
        mark("backward", step)
        engine.step()
        mark("step", step)
        del ids, loss
    truth.roles = roles_now(truth, engine, recorder)
    return engine


def join_fake_group(world: int) -> None:
    """This process is rank 0 of `world`; nobody else exists."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    os.environ.update(DS_ACCELERATOR="cpu", DS_IGNORE_CUDA_DETECTION="1")
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def tame_deepspeed() -> None:
    """What only this machine and the fake group need."""
    from deepspeed.runtime.zero import stage_1_and_2

    # The name deepspeed.comm.torch is torch itself. What the function builds would be compiled.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    # Stages 1 and 2 gather the updated parameters: the fake group would copy our shard over everybody's.
    stage_1_and_2.all_gather_dp_groups = lambda *args, **kwargs: None


def main(arguments: Iterable[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--zero-init", action="store_true")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--caller-backward", action="store_true", help="stacks of backward as of the calling thread")
    options = parser.parse_args(None if arguments is None else list(arguments))
    join_fake_group(options.world)
    tame_deepspeed()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    truth = Truth(versions, options.stage, options.world, options.dtype, options.steps, options.zero_init)
    recorder = Recorder(autograd_thread=not options.caller_backward)
    with recording(recorder):
        engine = train(recorder, truth)
    truth.stats = recorder.machine.stats()
    snapshot = recorder.snapshot()
    del engine
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "snapshot.pickle").write_bytes(pickle.dumps(snapshot, protocol=4))
    (options.out / "roles.json").write_text(json.dumps(asdict(truth), indent=1), "utf-8")


if __name__ == "__main__":
    main()
