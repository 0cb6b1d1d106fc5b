"""Ordinary scripts that nobody adapted, run without a GPU."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import sys
from pathlib import Path

import pytest
from standin import PYTHON, Dry, dryrun, memtrace, needs_standin

pytestmark = [needs_standin, pytest.mark.slow]

MLP = """
import torch, torch.nn as nn
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range({steps}):
    loss = model(torch.randn(32, 512, device="cuda")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(step, loss.item(), flush=True)
{end}
"""


def mlp(steps: int = 100, end: str = "") -> str:
    return MLP.format(steps=steps, end=end)


def snapshot(run: Dry, name: str = "rank0000.pickle.zst") -> dict[str, object]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    with zstd.open(run.folder / "rec" / name) as file:
        content: dict[str, object] = pickle.load(file)
    return content


def test_a_script_that_fits(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp())
    assert (run.code, run.out.split()[::2]) == (0, ["0", "1", "2"])
    assert all(math.isfinite(float(loss)) for loss in run.out.split()[1::2])
    report = run.report
    assert report["fits"] is True
    assert report["gpu"] == "NVIDIA H200"
    assert report["limit_bytes"] == 150_109_880_320
    rank = report["ranks"][0]
    sidecar = run.sidecar()
    assert rank["allocated_peak_bytes"] == sidecar["stats"]["allocated_bytes.all.peak"]
    assert report["room_bytes"] == report["limit_bytes"] - rank["reserved_peak_bytes"] - rank["outside_bytes"]
    assert "stopped" in run.codes()
    assert sidecar["steps"] == 3
    assert "a dry run on NVIDIA H200" in run.err
    assert "it fits" in run.err
    code, document = memtrace("verify", str(tmp_path / "rec"))
    assert code == 0
    assert [(one["compared"], one["equal"]) for one in document["data"]["ranks"][0]["devices"]] == [(111, 111)]
    code, document = memtrace("blame", "--peak", str(tmp_path / "rec"))
    assert [warning["code"] for warning in document["warnings"]] == ["dry-run"]
    categories = {row["category"] for row in document["data"]["rows"]}
    assert {"optim.state", "param.full", "grad.full", "workspace"} <= categories


def test_stacks_are_the_programs(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp())
    traces = snapshot(run)["device_traces"]
    frames = [frame for event in traces[0] for frame in event["frames"]]  # type: ignore[index]
    assert frames
    assert [frame for frame in frames if "memtrace_inside/dryrun" in frame["filename"]] == []
    assert [frame for frame in frames if frame["name"] == "__torch_dispatch__"] == []
    innermost = {event["frames"][0]["filename"].rpartition("/")[2] for event in traces[0] if event["frames"]}  # type: ignore[index]
    assert "_ops.py" not in innermost


def test_a_snapshot_that_the_program_takes_is_its_own_too(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp(steps=2, end='torch.cuda.memory._dump_snapshot("own.pickle")'), "--steps", "0")
    assert run.code == 0, run.err
    with (tmp_path / "own.pickle").open("rb") as file:
        own = pickle.load(file)
    frames = [frame for event in own["device_traces"][0] for frame in event["frames"]]
    assert frames
    assert [frame for frame in frames if "memtrace_inside/dryrun" in frame["filename"]] == []


def test_a_script_that_does_not_fit(tmp_path: Path) -> None:
    script = """
import torch
kept = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(100)]
"""
    run = dryrun(tmp_path, script, "--gpu-memory", "4GiB")
    assert run.code == 1
    assert "torch.OutOfMemoryError" in run.err
    assert run.report["fits"] is False
    assert run.report["room_bytes"] is None
    assert "does not fit" in run.err
    outside = run.report["ranks"][0]["outside_bytes"]
    tensors = ((4 << 30) - outside) // (64 << 20)
    assert run.report["ranks"][0]["allocated_peak_bytes"] == tensors * (64 << 20)


def test_an_oom_that_the_program_survives_is_no_verdict(tmp_path: Path) -> None:
    script = """
import torch
size = 1 << 33
while True:
    try:
        x = torch.empty(size, dtype=torch.uint8, device="cuda")
        break
    except torch.OutOfMemoryError:
        size //= 2
print(size)
"""
    run = dryrun(tmp_path, script, "--gpu-memory", "4GiB")
    assert (run.code, run.out) == (0, "2147483648\n")
    assert run.report["fits"] is True


def test_a_script_that_fails_for_another_reason(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp(2, "raise SystemExit(3)"))
    assert (run.code, run.report["fits"]) == (3, None)
    assert "was not seen" in run.err


def test_to_the_programs_own_end(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp(7), "--steps", "0")
    assert len(run.out.splitlines()) == 7
    assert run.sidecar()["steps"] == 7
    assert "stopped" not in run.codes()


def test_a_limit_of_time(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp(2, "import time; time.sleep(600)"), "--steps", "0", "--limit", "12")
    assert run.code == 124
    assert run.sidecar()["dryrun"]["stopped_after"] == "12 s"
    assert run.report["ranks"][0]["allocated_peak_bytes"] > 0


def test_what_a_program_reads_back_is_computed_where_it_is_small(tmp_path: Path) -> None:
    script = """
import torch
x = torch.arange(10, device="cuda")
assert x.tolist() == list(range(10))
assert (x > 6).sum().item() == 3
assert x[x % 2 == 0].tolist() == [0, 2, 4, 6, 8]
assert (x == 4).nonzero().item() == 4
assert torch.unique(torch.tensor([3, 1, 3], device="cuda")).tolist() == [1, 3]
assert torch.bincount(torch.tensor([0, 2, 2], device="cuda")).tolist() == [1, 0, 2]
assert torch.repeat_interleave(x[:3], torch.tensor([1, 2, 3], device="cuda")).tolist() == [0, 1, 1, 2, 2, 2]
mask = torch.tril(torch.ones(5, 5, device="cuda", dtype=torch.bool))
assert mask.sum().item() == 15
scale = torch.full((), 65536.0, device="cuda")
scale.mul_(0.5)
assert scale.item() == 32768.0
assert torch.isfinite(torch.randn(1 << 22, device="cuda").norm()).item()
assert not torch.isnan(torch.randn(1 << 22, device="cuda")).any().item()
torch.manual_seed(0); a = torch.rand(3)
torch.manual_seed(0); torch.rand(3, device="cuda"); b = torch.rand(3)
assert a.equal(b)
print("read back")
"""
    run = dryrun(tmp_path, script)
    assert (run.code, run.out) == (0, "read back\n"), run.err


def test_large_masks_are_assumed_and_said_with_their_place(tmp_path: Path) -> None:
    script = """
import torch
def choose(x):
    return x[x > 0]
print(choose(torch.randn(4_000_000, device="cuda")).numel())
"""
    run = dryrun(tmp_path, script, "--assume", "mask=0.25")
    assert run.out == "1000000\n"
    found = [row for row in run.report["assumptions"] if row["code"] == "mask"]
    assert [row["where"].rpartition("/")[2] for row in found] == ["job.py:4 choose"]


def test_expandable_segments_graphs_pools_streams(tmp_path: Path) -> None:
    script = """
import torch
x = torch.randn(1 << 20, device="cuda")
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(side):
    y = x * 2
torch.cuda.current_stream().wait_stream(side)
y.record_stream(torch.cuda.current_stream())
with torch.cuda.graph(graph):
    z = x + 1
graph.replay()
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    w = torch.empty(1 << 22, device="cuda")
pinned = torch.empty(1 << 20).pin_memory()
assert pinned.is_pinned()
pinned.to("cuda", non_blocking=True)
torch.cuda.synchronize()
print(sum(s["segment_type"] == "large" for s in torch.cuda.memory_snapshot()) > 0)
"""
    for setting in ("", "expandable_segments:True"):
        folder = tmp_path / (setting[:3] or "plain")
        folder.mkdir()
        run = dryrun(folder, script, **({"PYTORCH_ALLOC_CONF": setting} if setting else {}))
        assert (run.code, run.out) == (0, "True\n"), run.err
        assert memtrace("verify", str(folder / "rec"))[0] == 0
        assert "graph" in run.codes()


def test_a_conv_net_with_amp_pinned_loader_and_branches(tmp_path: Path) -> None:
    script = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.amp.GradScaler()
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
best = float("inf")
for epoch in range(5):
    for images, labels in DataLoader(data, 16, num_workers=1, pin_memory=True):
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
        if loss.item() < best:
            best = loss.item()
        assert torch.isfinite(loss).item()
print(best, scaler.get_scale())
"""
    run = dryrun(tmp_path, script, "--steps", "0")
    assert run.code == 0, run.err
    assert run.out.split()[1] == "65536.0"
    assert "convolution" in run.codes()
    assert run.sidecar()["steps"] == 20


def test_the_first_steps_overflow_if_asked(tmp_path: Path) -> None:
    script = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
for step in range(4):
    scaler.scale(model(torch.ones(2, 8, device="cuda")).sum()).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    print(scaler.get_scale())
"""
    run = dryrun(tmp_path, script, "--overflow-first", "2", "--steps", "0")
    assert run.out.split() == ["32768.0", "16384.0", "16384.0", "16384.0"]


DEEPSPEED = """
import argparse, torch, deepspeed
from transformers import GPT2Config, GPT2LMHeadModel
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--deepspeed_config")
arguments = parser.parse_args()
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=arguments.deepspeed_config)
print(engine.global_rank, engine.world_size, engine.gradient_accumulation_steps())
for step in range(100):
    ids = torch.randint(0, 1000, (engine.train_micro_batch_size_per_gpu(), 128), device="cuda")
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


def deepspeed_job(folder: Path, config: Path) -> str:
    """The script's path and arguments come after the launcher's options."""
    (folder / "train.py").write_text(DEEPSPEED)
    return str(folder / "train.py")


def launched(folder: Path, config: Path, *options: str, ranks: int = 4) -> Dry:
    script = deepspeed_job(folder, config)
    return dryrun(
        folder, "ds.json", *options,
        launcher=("deepspeed", "--num_gpus", str(ranks), script, "--deepspeed_config"),
    )  # fmt: skip


def test_deepspeed_with_scaling_clipping_accumulation(tmp_path: Path, config: Path) -> None:
    run = launched(tmp_path, config)
    assert run.code == 0, run.err
    assert "0 4 2\n" in run.out
    sidecar = run.sidecar()
    assert (sidecar["world"], sidecar["zero"]["stage"], sidecar["steps"]) == (4, 3, 3)
    assert run.report["fits"] is True
    assert memtrace("verify", str(tmp_path / "rec"))[0] == 0
    assert "refused" not in run.codes()


def test_first_and_last_rank_of_many(tmp_path: Path, config: Path) -> None:
    run = launched(tmp_path, config, "--world", "128", "--rank", "auto", "--steps", "1")
    assert run.code == 0, run.err
    assert [one["rank"] for one in sorted(run.report["ranks"], key=lambda one: one["rank"])] == [0, 127]
    assert run.sidecar(127)["world"] == 128


def test_a_grid(tmp_path: Path, config: Path) -> None:
    run = launched(tmp_path, config, "--steps", "1", "--try", "zero_optimization.stage=1,3", "--try", "micro_batch=1,4")
    assert run.code == 0, run.err
    head, *rows = run.out.splitlines()
    assert head.split()[:3] == ["zero_optimization.stage", "micro_batch", "fits"]
    assert [row.split()[:3] for row in rows] == [
        ["1", "1", "yes"],
        ["1", "4", "yes"],
        ["3", "1", "yes"],
        ["3", "4", "yes"],
    ]
    peaks = {tuple(one["values"].values()): one["allocated_peak_bytes"] for one in run.report["trials"]}
    assert peaks["1", "1"] < peaks["1", "4"]
    assert peaks["3", "1"] < peaks["3", "4"]
    assert json.loads(config.read_text()) == CONFIG


SEARCHED = """
import sys, torch
batch = int(sys.argv[1].partition("=")[2])
layer = torch.nn.Linear(1024, 1024).cuda()
kept = torch.empty(batch, 4 << 20, device="cuda")
layer(torch.randn(batch, 1024, device="cuda")).sum().backward()
"""


def test_the_largest_number_of_a_range(tmp_path: Path) -> None:
    script = tmp_path / "search.py"
    script.write_text(SEARCHED)
    run = dryrun(tmp_path, "--batch=7", "--max-gpu-memory", "2GiB", "--try", "--batch=64..96",
                 launcher=(PYTHON, str(script)))  # fmt: skip
    assert run.code == 0, run.err
    fitting = {int(one["values"]["--batch"]): one["fits"] for one in run.report["trials"]}
    best = max(batch for batch, fits in fitting.items() if fits)
    assert fitting[best + 1] is False
    # MiB: outside torch as on an H200; the layer's segment, a workspace of cuBLAS on each of two threads, small blocks.
    assert 16 * best <= 2048 - 751 - (20 + 2 * 32 + 2) < 16 * (best + 1)
    assert f"largest --batch that fits: {best}\n" in run.err
    assert re.search(r"next:  memtrace blame --peak \S*rec/try-0\d\d\n", run.err)
    failed = [row for row in run.out.splitlines() if row.split()[:2] == [str(best + 1), "no"]]
    assert "> " in failed[0]


def test_a_range_that_fits_to_its_end_and_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(SEARCHED)
    run = dryrun(tmp_path, "--batch=7", "--max-gpu-memory", "8GiB", "--try", "--batch=1..2",
                 launcher=(PYTHON, str(tmp_path / "search.py")))  # fmt: skip
    assert (run.code, "largest --batch that fits: 2, the last of the range: larger ones may fit" in run.err) == (
        0,
        True,
    )
    folder = tmp_path / "failing"
    folder.mkdir()
    run = dryrun(folder, "--batch=7", "--try", "--no-such=1,2", launcher=(PYTHON, "-c", "raise ValueError('no such')"))
    assert run.code == 1
    assert [one["fits"] for one in run.report["trials"]] == [None, None]
    assert [one["allocated_peak_bytes"] for one in run.report["trials"]] == [None, None]
    assert run.err.count("ValueError: no such") == 2


def test_a_launcher_that_would_count_gpus_is_run_as_one_rank(tmp_path: Path, config: Path) -> None:
    script = deepspeed_job(tmp_path, config)
    run = dryrun(tmp_path, "ds.json", "--steps", "1", launcher=("deepspeed", script, "--deepspeed_config"))
    assert run.code == 0, run.err
    assert "deepspeed would count the GPUs" in run.err
    assert "--world N says how many ranks the job has" in run.err
    assert run.sidecar()["world"] == 1


def test_each_of_several_ranks_is_announced(tmp_path: Path) -> None:
    run = dryrun(tmp_path, mlp(steps=1), "--world", "8", "--rank", "auto")
    assert run.code == 0, run.err
    assert run.err.index("rank 0 of 8:") < run.err.index("rank 7 of 8:")


def test_a_script_with_its_own_process_group(tmp_path: Path) -> None:
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl", rank=3, world_size=16)
torch.cuda.set_device(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
model(torch.ones(4, 64, device="cuda")).sum().backward()
x = torch.ones(8, device="cuda")
out = torch.empty(8 * 16, device="cuda")
dist.all_gather_into_tensor(out, x); dist.all_reduce(x); dist.barrier()
print(dist.get_rank(), dist.get_world_size(), out.sum().item())
"""
    run = dryrun(tmp_path, script)
    assert (run.code, run.out) == (0, "3 16 128.0\n"), run.err


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    script = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=500))
data = [{"input_ids": torch.randint(0, 500, (32,)), "labels": torch.randint(0, 500, (32,))} for _ in range(64)]
arguments = TrainingArguments("out", max_steps=4, bf16=True, report_to=[], eval_strategy="steps", eval_steps=2,
                              save_strategy="no", per_device_train_batch_size=4, gradient_accumulation_steps=2)
Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8]).train()
"""
    run = dryrun(tmp_path, script, "--steps", "0")
    if "accelerate" in run.err and run.code:
        pytest.skip("needs accelerate")
    assert run.code == 0, run.err
    assert run.sidecar()["steps"] == 4
    phases = {phase["phase"] for phase in run.sidecar()["phases"]}
    assert {"forward", "backward", "step", "eval"} <= phases


def test_compiled_code(tmp_path: Path) -> None:
    script = """
import torch
@torch.compile
def f(x):
    return (x.sin() + x.cos()).sum()
x = torch.randn(1 << 16, device="cuda", requires_grad=True)
f(x).backward()
print(x.grad.shape)
"""
    run = dryrun(tmp_path, script, "--steps", "0")
    assert run.code == 0, run.err
    assert "compiled" in run.codes()


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    cache = os.environ.get("MEMTRACE_CACHE_DIR") or str(Path.home() / ".cache" / "memtrace")
    before = dict(os.environ)
    run = dryrun(work, mlp(), HOME=str(home), MEMTRACE_CACHE_DIR=cache)
    assert run.code == 0, run.err
    assert sorted(path.name for path in work.iterdir()) == ["job.py", "rec", "report.json"]
    left = [path for path in home.rglob("*") if path.is_file() and path.name != "recent.json"]
    assert left == []
    assert dict(os.environ) == before


def test_nothing_is_preloaded_into_an_ordinary_run() -> None:
    import subprocess

    code = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    assert "LD_PRELOAD" not in os.environ
    assert done.returncode == 0
