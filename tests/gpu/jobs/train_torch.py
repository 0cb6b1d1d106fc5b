"""Jobs without DeepSpeed: plain torch, FSDP2, ranks that wait for each other, and ways to end badly."""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from models import CONFIGS, batch, build

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="gpt2", choices=CONFIGS)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--bs", type=int, default=2)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for signals to come in")
parser.add_argument("--limit-mib", type=int, default=0, help="what torch may reserve")
parser.add_argument("--grow", action="store_true", help="a longer batch each step")
parser.add_argument("--wait-at", type=int, default=-1, help="at this step rank 0 waits for the others, who sleep")
parser.add_argument("--fail-at", type=int, default=-1, help="exit code 3 at this step")
args = parser.parse_args()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if args.limit_mib and DEVICE == "cuda":
    torch.cuda.set_per_process_memory_fraction(
        args.limit_mib * 2**20 / torch.cuda.get_device_properties(0).total_memory
    )
many = "RANK" in os.environ
if many:
    dist.init_process_group("gloo")
rank = dist.get_rank() if many else 0
model = build(args.model).to(DEVICE)
if args.fsdp:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": init_device_mesh(DEVICE, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for index in range(args.steps):
    if index == args.fail_at:
        sys.exit(3)
    if index == args.wait_at:
        print(f"rank {rank} pid {os.getpid()} waits", flush=True)
        if rank == 0:
            dist.barrier()
        time.sleep(600)
    size = args.bs << index if args.grow else args.bs
    ids = batch(model, size, args.seq, DEVICE)
    if DEVICE == "cpu" and args.limit_mib and index == 2:
        raise MemoryError("as if")  # the control flow of an OOM, where there is no GPU
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} pid {os.getpid()} step {index} loss {loss.item():.4f}", flush=True)
    time.sleep(args.pause)
