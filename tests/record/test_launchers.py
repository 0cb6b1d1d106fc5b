"""Real launchers, on the CPU: every rank is entered, nothing changes for the job. A DeepSpeed launch takes a minute."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("torch", "transformers", "deepspeed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in LIBRARIES), reason="needs torch, ..."),
]

MODEL = """
import os, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
sizes = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=32, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(sizes)
ids = torch.randint(0, 101, (1, 16))
"""
DEEPSPEED = f"""
import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.parse_args()
{MODEL}
deepspeed.init_distributed("gloo")
config = {{
    "train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": True}},
    "zero_optimization": {{"stage": 3}},
    "optimizer": {{"type": "Adam", "params": {{"torch_adam": True}}}},
    "wandb": {{"enabled": False, "team": "very-secret"}},
}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
print("rank " + os.environ["RANK"] + " done\\n", end="", flush=True)  # in one piece: ranks share the output
sys.exit(3 * (os.environ["RANK"] == "1"))
"""
DDP = f"""
{MODEL}
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(input_ids=ids)
torch.distributed.destroy_process_group()
print("rank " + os.environ["RANK"] + " done\\n", end="", flush=True)  # in one piece: ranks share the output
"""


def record(folder: Path, script: str, *command: str, **variables: str) -> tuple[Any, Path]:
    """`memtrace record -- COMMAND train.py`; what came out, and where the recording is."""
    (folder / "train.py").write_text(script, "utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": path, **variables}
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "record", "-o", str(folder / "out"), "--", *command, "train.py"],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    return done, folder / "out"


def sidecars(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(directory.glob("rank????.json"))]


def steps(said: dict[str, Any]) -> list[tuple[str, int | None]]:
    return [(one["phase"], one["step"]) for one in said["phases"] if one["phase"] in ("forward", "backward", "step")]


WHOLE = [(phase, step) for step in range(2) for phase in ("forward", "backward", "step")]


def test_deepspeed(tmp_path: Path) -> None:
    done, out = record(tmp_path, DEEPSPEED, "deepspeed", "--num_gpus", "2", "--master_port", "29731")
    assert done.returncode == 3, done.stderr[-4000:]
    assert {line for line in done.stdout.splitlines() if line.startswith("rank")} == {"rank 0 done", "rank 1 done"}
    said = sidecars(out)
    assert [(one["rank"], one["world"], one["reason"]) for one in said] == [(0, 2, "exit"), (1, 2, "exit")]
    for one in said:
        assert steps(one) == WHOLE
        assert (one["zero"]["stage"], one["zero"]["world"]) == (3, 2)
        assert one["deepspeed_config"]["bf16"] == {"enabled": True}
        assert {role["role"] for role in one["roles"]} >= {"param.partition", "param.master", "optim.state.exp_avg"}
        assert {mark["kind"] for mark in one["gathers"]} >= {"demand"}
        assert f"no CUDA device in rank {one['rank']}: nothing to record" in one["notes"]
        assert "very-secret" not in json.dumps(one)
    assert "no CUDA device in rank 0: nothing to record" in done.stderr


def test_torchrun(tmp_path: Path) -> None:
    done, out = record(tmp_path, DDP, "torchrun", "--nproc-per-node", "2", "--master-port", "29732")
    assert done.returncode == 0, done.stderr[-4000:]
    assert [steps(one) for one in sidecars(out)] == [WHOLE, WHOLE]
    assert all(("eval", None) in [(one["phase"], None) for one in said["phases"]] for said in sidecars(out))


def test_plain_python(tmp_path: Path) -> None:
    script = DDP.replace('torch.distributed.init_process_group("gloo")', "").replace(
        "torch.nn.parallel.DistributedDataParallel(model)", "model"
    )
    script = script.replace("torch.distributed.destroy_process_group()", "").replace('os.environ["RANK"]', '"0"')
    done, out = record(tmp_path, script, sys.executable)
    assert (done.returncode, done.stdout) == (0, "rank 0 done\n"), done.stderr[-4000:]
    (said,) = sidecars(out)
    assert steps(said) == WHOLE
    assert {role["role"] for role in said["roles"]} >= {"param", "optim.state.exp_avg"}
    assert {role["name"] for role in said["roles"] if role["role"] == "param"} >= {"transformer.wte.weight"}
