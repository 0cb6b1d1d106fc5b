"""Jobs for test_world.py: `python world_job.py CASE WORLD RANK` prints one line of JSON, what the rank saw."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

HIDDEN, LAYERS, STEPS = 65, 3, 5
Facts = dict[str, Any]


def collectives(world: int, rank: int) -> Facts:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed import init_process_group  # bound by name, as jobs do

    init_process_group("nccl", init_method="tcp://10.0.0.1:1234", device_id=None, world_size=1, rank=0)
    own = torch.arange(2.0) + 1
    gathered = torch.full((2 * world,), math.nan)
    work = dist.all_gather_into_tensor(gathered, own, async_op=True)
    work.wait()
    in_place = torch.full((2 * world,), math.nan)
    in_place[2 * rank : 2 * rank + 2] = own
    dist.all_gather_into_tensor(in_place, in_place[2 * rank : 2 * rank + 2])
    listed = [torch.full((2,), math.nan) for _ in range(world)]
    dist.all_gather(listed, own)
    whole = torch.arange(3.0 * world)
    scattered = torch.full((3,), math.nan)
    dist.reduce_scatter_tensor(scattered, whole)
    from_list = torch.full((3,), math.nan)
    dist.reduce_scatter(from_list, list(whole.chunk(world)))
    exchanged, uneven = torch.full((2 * world,), math.nan), torch.full((5,), math.nan)
    dist.all_to_all_single(exchanged, gathered)
    dist.all_to_all_single(uneven, own, [5] + [0] * (world - 1), [2] + [0] * (world - 1))
    received = torch.full((2,), math.nan)
    dist.recv(received, src=(rank + 1) % world)
    reduced = own.clone()
    future = dist.all_reduce(reduced, async_op=True).get_future()
    parameter = torch.nn.Parameter(torch.full((2 * world,), math.nan))
    dist.all_gather_into_tensor(parameter.view(-1), own)  # autograd must not mind
    with dist._coalescing_manager(dist.group.WORLD, torch.device("cpu")):
        coalesced = torch.full((2 * world,), math.nan)
        dist.all_gather_into_tensor(coalesced, own)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, rank)
    broadcast = [rank]
    dist.broadcast_object_list(broadcast, src=(rank + 1) % world)
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, list(range(world)), src=rank)
    collected: list[Any] | None = [None] * world
    dist.gather_object(rank, collected, dst=rank)
    dist.barrier(device_ids=[0])
    dist.monitored_barrier()
    pair = dist.new_group([rank, (rank + 1) % world], backend="gloo")
    others = dist.new_group([(rank + 1) % world])
    paired = torch.full((4,), math.nan)
    dist.all_gather_into_tensor(paired, own, group=pair)
    facts = {
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")},
        "group": [dist.get_rank(), dist.get_world_size(), dist.get_backend()],
        "is_work": isinstance(work, dist.Work) and work.is_completed(),
        "gathered": [value.tolist() == own.repeat(world).tolist() for value in (gathered, in_place, coalesced)],
        "listed": [value.tolist() for value in listed],
        "parameter": bool(parameter.isfinite().all()),
        "scattered": [scattered.tolist(), from_list.tolist()],
        "exchanged": [exchanged.tolist() == gathered.tolist(), uneven.tolist()],
        "received": received.tolist(),
        "reduced": [reduced.tolist(), future.wait()[0].tolist()],
        "functional": functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD).tolist(),
        "objects": [objects, broadcast, taken, collected],
        "groups": [dist.get_world_size(pair), paired.tolist(), others is dist.GroupMember.NON_GROUP_MEMBER],
    }
    dist.destroy_process_group()
    return facts


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 3))


def train(forward: Any, parameters: Any) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = forward(torch.randn(4, HIDDEN)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(world: int, rank: int) -> Facts:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    dist.init_process_group("gloo")
    plain = torch.nn.parallel.DistributedDataParallel(model())
    losses = train(plain, plain.parameters())
    hooked = torch.nn.parallel.DistributedDataParallel(model())
    hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)
    try:
        hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)
    except RuntimeError as error:
        twice = str(error)
    return {"losses": losses + train(hooked, hooked.parameters()), "twice": twice}


def fsdp2(world: int, rank: int) -> Facts:
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    losses = train(sharded, sharded.parameters())
    rows = [parameter.to_local().shape[0] for parameter in sharded.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(sharded.state_dict(), checkpoint_id=folder)
        files = sorted(os.listdir(folder))
    total = sum(parameter.full_tensor().numel() for parameter in sharded.parameters())
    return {"losses": losses, "rows": rows, "files": files, "numel": total, "threads": torch.get_num_threads()}


def zero(stage: int) -> Callable[[int, int], Facts]:
    def job(world: int, rank: int) -> Facts:
        import importlib

        import deepspeed
        import torch

        # Its CPU backend would compile a shared-memory operator.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
        deepspeed.init_distributed()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        net = model()
        numel = sum(parameter.numel() for parameter in net.parameters())
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        losses = []
        for _ in range(STEPS):
            loss = engine(torch.randn(4, HIDDEN, dtype=torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        optimizer = engine.optimizer
        if stage == 3:
            masters = optimizer.fp32_partitioned_groups_flat
            shards = sum(parameter.ds_tensor.numel() for parameter in net.parameters())
        else:
            masters, shards = optimizer.single_partition_of_fp32_groups, 0
        return {
            "losses": losses,
            "numel": numel,
            "masters": sum(master.numel() for master in masters),
            "shards": shards,
            "world": [engine.world_size, engine.global_rank],
        }

    return job


CASES = {"collectives": collectives, "ddp": ddp, "fsdp2": fsdp2, **{f"zero{stage}": zero(stage) for stage in (1, 2, 3)}}


def main() -> None:
    case, world, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")  # as a launcher of one process says
    os.environ.update(DS_ACCELERATOR="cpu", DS_IGNORE_CUDA_DETECTION="1")
    import torch

    from memtrace.record.inside import notes
    from memtrace.record.inside import world as simulated

    torch.set_num_threads(1)
    simulated.install(world, rank)
    facts = CASES[case](world, rank)
    print(json.dumps({**facts, "notes": notes.NOTES}))


if __name__ == "__main__":
    main()
