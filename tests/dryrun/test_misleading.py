"""Jobs whose answer was once wrong without a word: each by the size that a real GPU would have seen."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from standin import PYTHON, dryrun, memtrace, needs_standin

from memtrace.dryrun.inside import hosts

GiB = 1 << 30


@pytest.mark.parametrize(("begin", "size"), [(0, 1 << 20), (100, 1 << 20), (4000, 200), (1, 4096), (5, 3)])
def test_memory_that_is_cleared_is_zero_and_its_neighbours_are_not(begin: int, size: int) -> None:
    memory = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # as malloc has it
    memory[:] = b"\1" * len(memory)
    hosts.clear(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + begin, size)
    assert memory[begin : begin + size] == bytes(size)
    assert memory[:begin] == b"\1" * begin
    assert memory[begin + size :] == b"\1" * (len(memory) - begin - size)


@pytest.mark.parametrize("kind", ["shared", "file"])
def test_memory_that_is_not_ours_alone_is_cleared_too(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\1" * (1 << 20))
    with path.open("r+b") as file:
        where = (-1, 1 << 20) if kind == "shared" else (file.fileno(), 0)
        memory = mmap.mmap(*where, flags=mmap.MAP_SHARED if kind == "shared" else mmap.MAP_PRIVATE)
    memory[:] = b"\1" * len(memory)
    hosts.clear(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
    assert memory[:] == bytes(len(memory))


@needs_standin
@pytest.mark.slow
def test_values_on_the_host_that_decide_sizes(tmp_path: Path) -> None:
    script = """
import torch
w = torch.ones(1_000_000); w /= w.sum()
print(int((w.cumsum(0) < 0.9).sum()))
print(float(torch.zeros(1_000_000).sum()), float(torch.full((1_000_000,), 2.0).zero_().sum()))
print(float(torch.full((1_000_000,), 2.0).share_memory_().zero_().sum()))
labels = torch.arange(1_000_000, dtype=torch.float64).float()
print(int(labels.max()) + 1)
x = torch.empty(int(labels.max()) + 1, 1024, device="cuda")
"""
    run = dryrun(tmp_path, script, "--steps", "0")
    lines = run.out.splitlines()
    assert abs(int(lines[0]) - 900_000) < 100
    assert lines[1:] == ["0.0 0.0", "0.0", "1000000"]
    assert run.report["ranks"][0]["allocated_peak_bytes"] == 4_096_000_000


@needs_standin
@pytest.mark.slow
def test_masks_of_large_tensors_have_the_share_that_is_assumed(tmp_path: Path) -> None:
    """Whatever the size of the mask: those of up to 1 MiB are computed with, and were all false."""
    script = """
import torch
for count in (20_000, 1_000_000, 2_000_000):
    x = torch.randn(count, device="cuda")
    chosen = x > 0.5
    print(x[chosen].numel(), x[x <= 0].numel(), torch.where(x == 0)[0].numel())
    if count < 2_000_000:
        print(int(chosen.sum()), int((chosen & ~chosen).sum()))
    print(bool(torch.isfinite(x).all()), bool((x != x).any()), bool(x.isinf().any()), bool(x.isnan().any()))
    print(bool((x.abs() == float("inf")).any()), bool((x < float("inf")).all()))
"""
    run = dryrun(tmp_path, script, "--assume", "mask=0.15")
    expected = []
    for count, chosen in ((20_000, 3_000), (1_000_000, 150_000), (2_000_000, 300_000)):
        expected.append(f"{chosen} {chosen} {chosen}")
        expected += [f"{chosen} 0"] if count < 2_000_000 else []
        expected += ["True False False False", "False True"]
    assert run.out.splitlines() == expected, run.err
    found = {row["where"].rpartition("/")[2] for row in run.report["assumptions"] if row["code"] == "mask"}
    assert found == {"job.py:5 <module>", "job.py:6 <module>"}


@needs_standin
@pytest.mark.slow
def test_a_program_that_asks_whether_all_is_well_goes_on(tmp_path: Path) -> None:
    """It would end, or repeat for ever, where a share of an assumed mask is true."""
    script = """
import torch
for count in (20_000, 1_000_000, 2_000_000):
    x = torch.randn(count, device="cuda")
    torch.distributions.Normal(x, x.exp(), validate_args=True)
    torch.distributions.Bernoulli(probs=x.sigmoid(), validate_args=True)
    assert not (x < 0).any() and (x > 0).all() and not ((x < 0) | (x > 5)).any().item()
    mask = (x < 0).view(-1, 10)
    assert mask.all(-1).all() and not mask.any(dim=1).any()
    while (x.abs() > 1e-3).any():
        x = x / 2
    del x, mask
    known = torch.ones(count, dtype=torch.bool, device="cuda")
    assert count > 1 << 20 or known.any()
    known[0] = False
    assert count > 1 << 20 or not known.all()
    sent = torch.tensor([True] * count).to("cuda")
    assert count > 1 << 20 or sent.any()
print("well")
"""
    run = dryrun(tmp_path, script)
    assert run.out == "well\n", run.err


@needs_standin
@pytest.mark.slow
def test_integers_of_the_device_that_decide_sizes(tmp_path: Path) -> None:
    script = """
import torch
labels = torch.arange(400_000, device="cuda") % 1000
print(torch.nn.functional.one_hot(labels).shape[1], torch.unique(labels).shape[0], int((labels >= 500).sum()))
print(torch.repeat_interleave(torch.ones(64, 4, device="cuda"), torch.full((64,), 2, device="cuda"), dim=0).shape[0])
print(torch.sparse.sum(torch.ones(4, 4).to_sparse().cuda(), dim=1).shape[0])
large = torch.randint(0, 1000, (40_000_000,), device="cuda")
print(int(large.max()))
"""
    run = dryrun(tmp_path, script, "--steps", "0")
    assert run.out.splitlines() == ["1000 1000 200000", "128", "4", "0"], run.err
    (row,) = [row for row in run.report["assumptions"] if row["code"] == "integer"]
    assert row["text"] == "max of large tensors taken as 0"
    assert row["where"].endswith("job.py:8 <module>")


@needs_standin
@pytest.mark.slow
def test_a_peak_that_the_program_has_torch_forget(tmp_path: Path) -> None:
    script = """
import torch
x = torch.empty(10 << 30, dtype=torch.uint8, device="cuda"); del x
torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
y = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.max_memory_allocated())
"""
    run = dryrun(tmp_path, script, "--steps", "0")
    assert run.out == f"{1 << 20}\n"
    (rank,) = run.report["ranks"]
    assert (rank["allocated_peak_bytes"], rank["reserved_peak_bytes"]) == (10 * GiB, 10 * GiB)
    assert run.report["room_bytes"] == run.report["limit_bytes"] - 10 * GiB - rank["outside_bytes"]


@needs_standin
@pytest.mark.slow
def test_the_room_is_that_of_the_fullest_device(tmp_path: Path) -> None:
    script = """
import torch
held = torch.empty(50 << 30, dtype=torch.uint8, device="cuda:1")
for size in (30, 31, 32):
    torch.empty(size << 30, dtype=torch.uint8, device="cuda:2")
"""
    run = dryrun(tmp_path, script, "--steps", "0", "--world", "3")
    assert run.code == 0, run.err
    left = run.report["limit_bytes"] - (30 + 31 + 32) * GiB
    assert left - GiB < run.report["room_bytes"] < left


@needs_standin
@pytest.mark.slow
def test_what_another_rank_broadcasts_is_named(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
count = torch.tensor([2048 if dist.get_rank() == 0 else 3], device="cuda")
dist.broadcast(count, 0)
weights = torch.ones(4096, device="cuda")
dist.broadcast(weights, 0)
print(count.item())
"""
    run = dryrun(tmp_path, script, "--world", "2", "--rank", "1")
    assert run.out == "3\n", run.err
    (row,) = [row for row in run.report["assumptions"] if row["code"] == "message"]
    assert (row["text"], row["count"]) == ("a broadcast from another rank: this rank's own numbers", 1)
    assert row["where"].endswith("job.py:5 <module>")


@needs_standin
@pytest.mark.slow
def test_a_band_has_the_launchers_devices(tmp_path: Path) -> None:
    script = """
import os, torch
side = torch.cuda.Stream()
x = torch.empty(8 << 20, device="cuda")
with torch.cuda.stream(side):
    y = x * 2
x.record_stream(side)
del x, y
z = torch.empty(torch.cuda.device_count() << 30, dtype=torch.uint8, device="cuda")
print(torch.cuda.device_count(), os.environ["LOCAL_WORLD_SIZE"])
"""
    launcher = ("torchrun", "--nnodes", "4", "--nproc-per-node", "2", "--node-rank", "0")
    run = dryrun(tmp_path, script, "--steps", "0", "--band", launcher=launcher)
    assert (run.code, run.out) == (0, "2 2\n"), run.err
    (rank,), (late,) = run.report["ranks"], run.report["band"]
    assert late["allocated_peak_bytes"] <= rank["allocated_peak_bytes"] + (64 << 20)


@needs_standin
@pytest.mark.slow
def test_a_limit_of_time_is_no_failure_and_no_gpu_no_crash(tmp_path: Path) -> None:
    slow, none = tmp_path / "slow", tmp_path / "none"
    slow.mkdir()
    none.mkdir()
    run = dryrun(slow, "import time, torch\nx = torch.ones(8, device='cuda')\ntime.sleep(60)\n", "--limit", "6s")
    assert run.code == 124
    assert run.report["fits"] is True
    assert "as far as it got in 6 s" in run.err
    run = dryrun(none, "import torch\nprint(1)\n")
    assert run.code == 0
    assert "no process used a GPU through torch" in run.err


@needs_standin
def test_what_is_wrong_with_the_options_is_said_first(tmp_path: Path) -> None:
    run = dryrun(tmp_path, "print(1)\n", "--band", "--try", "X=1,2")
    assert (run.code, run.out) == (2, "")
    assert "--band is for one run" in run.err
    command = [sys.executable, "-m", "memtrace", "dryrun", "--report", str(tmp_path / "no" / "x.json"), "--", PYTHON]
    done = subprocess.run([*command, "-c", "print(1)"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr


def started(folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(script)
    command = [sys.executable, "-m", "memtrace", "dryrun", "-o", str(folder / "rec"), *options, "--", PYTHON, "job.py"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True)


@needs_standin
@pytest.mark.slow
def test_ctrl_c_at_the_last_dump_loses_nothing(tmp_path: Path) -> None:
    import os

    script = """
import torch
for _ in range(60_000):
    torch.empty(1000, device="cuda")
print("END", flush=True)
"""
    with started(tmp_path, script, "--steps", "0") as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "END\n"
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(120) >= 0  # no crash: the interpreter may have been told to stop, and the file is there
    code, document = memtrace("verify", str(tmp_path / "rec"))
    assert code == 0, document


@needs_standin
@pytest.mark.slow
def test_sigterm_ends_the_trial_that_runs_too(tmp_path: Path) -> None:
    script = """
import pathlib, time, torch
x = torch.ones(8, device="cuda")
pathlib.Path("pid").write_text(str(__import__("os").getpid()))
time.sleep(300)
"""
    with started(tmp_path, script, "--try", "X=1,2") as run:
        until = time.monotonic() + 120
        while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
            time.sleep(0.2)
        job = Path("/proc", (tmp_path / "pid").read_text())
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    until = time.monotonic() + 30
    while job.exists() and time.monotonic() < until:
        time.sleep(0.2)
    assert not job.exists()
