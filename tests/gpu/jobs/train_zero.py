"""A DeepSpeed job: `deepspeed train_zero.py --stage 3`, or under torchrun or python."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from models import CONFIGS, batch, build

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--local_rank", type=int, default=0)  # the deepspeed launcher passes it
parser.add_argument("--model", default="gpt2", choices=CONFIGS)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--bs", type=int, default=2)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--adam", default="deepspeed", choices=("deepspeed", "torch"))
parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
parser.add_argument("--backend", default=None)
parser.add_argument("--alone", type=int, default=0, help="rank 0 of so many, without help from outside")
parser.add_argument("--rounds", type=int, default=0, help="compare ways of recording so many times, see compare.py")
parser.add_argument("--times", type=Path, help="write the step times here")
parser.add_argument("--recordings", type=Path, help="and the recordings that were made here")
args = parser.parse_args()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if args.alone:
    import alone

    alone.join(args.alone)
elif args.backend == "gloo":
    os.environ["LOCAL_RANK"] = "0"  # all ranks on the one GPU
    torch.distributed.init_process_group("gloo")
if DEVICE == "cpu":
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
deepspeed.init_distributed(dist_backend=args.backend)

dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
model = build(args.model, dtype)
config = {
    "train_micro_batch_size_per_gpu": args.bs,
    "optimizer": {"type": "Adam", "params": {"lr": 5e-5, "torch_adam": args.adam == "torch" or DEVICE == "cpu"}},
    args.dtype: {"enabled": True},
    "zero_optimization": {"stage": args.stage},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
torch.manual_seed(1)


def step() -> float:
    ids = batch(model, args.bs, args.seq, DEVICE)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss


if args.rounds:
    from compare import blocks, ways

    for _ in range(3):
        step()
    args.times.write_text(json.dumps(blocks(step, ways(args.recordings), args.rounds)))
else:
    for index in range(args.steps):
        began = time.perf_counter()
        loss = step().item()
        rank = torch.distributed.get_rank()
        print(f"rank {rank} step {index} loss {loss:.4f} {time.perf_counter() - began:.3f} s", flush=True)
