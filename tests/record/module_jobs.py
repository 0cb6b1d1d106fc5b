"""A small model trained by plain torch, DDP, FSDP1 or FSDP2 on CPU: what memtrace.record says its memory is for.

    python tests/record/module_jobs.py fsdp2-mp        # prints JSON

In a process of its own: rank 0 of four on torch's fake process group (DDP: the only one of a real group).
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
Raw = dict[str, Any]
WORLD = 4


@functools.cache
def found(kind: str, python: str = sys.executable) -> Raw:
    """The script in a process of its own, and what it found. Once a session."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONWARN")}
    done = subprocess.run([python, __file__, kind], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{kind} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def make_model() -> Any:
    import torch
    from torch import nn

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 16)
            self.register_buffer("scale", torch.ones(7))

        def forward(self, value: Any) -> Any:
            return self.down(self.up(value).relu()) * self.scale[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Part(), Part()
            self.head = nn.Linear(16, 16, bias=False)
            self.tied = nn.Linear(16, 16, bias=False)
            self.tied.weight = self.head.weight

        def forward(self, value: Any) -> Any:
            return self.tied(self.head(self.second(self.first(value))))

    return Model()


def distribute(model: Any, kind: str) -> Any:
    """The model as `kind` has it trained."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if kind == "ddp":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind.startswith("fsdp"):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        return (fsdp1 if kind.startswith("fsdp1") else fsdp2)(model, kind)
    return model


def fsdp1(model: Any, kind: str) -> Any:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    options: Raw = {"device_id": torch.device("cpu"), "use_orig_params": "orig" in kind}
    if "whole" in kind:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    if "mp" in kind:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    model.first = FullyShardedDataParallel(model.first, **options)
    model.second = FullyShardedDataParallel(model.second, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2(model: Any, kind: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: Raw = {"mesh": init_device_mesh("cpu", (WORLD,))}
    if "mp" in kind:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (model.first, model.second, model):
        fully_shard(part, **options)
    return model


def storages() -> dict[int, tuple[int, list[int]]]:
    """All storages that any tensor of the process uses: bytes, and a shape of one that does, by address."""
    import torch
    from torch.distributed.fsdp import FlatParameter

    gc.collect()
    seen: dict[int, tuple[int, list[int]]] = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) or isinstance(one, FlatParameter):
            size = one.untyped_storage().nbytes()
            if size and one.device.type == "cpu":
                seen[one.untyped_storage().data_ptr()] = (size, list(one.shape))
    return seen


def main() -> None:
    """See the module's documentation."""
    import torch

    from memtrace.record.inside import notes, roles

    kind = sys.argv[1]
    torch.manual_seed(0)
    before = storages()
    model = distribute(make_model(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report: Raw = {}

    def look(moment: str) -> None:
        report[moment] = {
            "roles": roles.collect([], [optimizer], [model, model]),
            "storages": [[address, *what] for address, what in storages().items() if address not in before],
        }

    ends = ("second.down", "second._fsdp_wrapped_module.down")
    last = next(module for name, module in model.named_modules() if name.endswith(ends))
    for step in range(2):
        inputs = torch.ones(2, 16)
        if step:
            hook = last.register_forward_pre_hook(lambda *_: look("forward"))
        loss = model(inputs).sum()
        loss.backward()
        if step:
            hook.remove()
            del inputs, loss
            look("backward")
        optimizer.step()
        optimizer.zero_grad()
    look("end")
    report["notes"] = list(notes.NOTES)
    report["only optimizer"] = roles.collect([], [optimizer], [])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
