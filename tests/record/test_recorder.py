"""A rank from its first use of CUDA to its end, on a GPU that is none (fake_cuda): what is left in the directory."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import record_jobs as jobs
from record_jobs import needs_torch

import memtrace

pytestmark = needs_torch
MiB = 1 << 20

TRAINING = """
import os, signal, sys, time
import torch, fake_cuda
class Model(torch.nn.Linear):
    def forward(self, inputs):
        self.block = fake_cuda.alloc(1 << 20)
        return torch.nn.functional.linear(inputs, self.weight, self.bias)
model = Model(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = fake_cuda.alloc(1 << 20)
def train(steps):
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        fake_cuda.free(model.block)
        optimizer.step()
        optimizer.zero_grad()
train(4)
"""

WITHOUT_CUDA = "".join(line for line in TRAINING.splitlines(keepends=True) if "fake_cuda." not in line).replace(
    ", fake_cuda", ""
)
"""The same on the CPU."""


def test_a_job_that_ends_well(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "print('hello'); sys.exit(3)")
    assert (job.code, job.out, job.err) == (3, "hello\n", "")
    assert job.files == {"rank0000.pickle", "rank0000.json"}
    said = job.sidecar()
    assert (said["reason"], said["complete"], said["steps"], said["rank"]) == ("exit", True, 4, 0)
    assert said["device"]["capacity_bytes"] == 80 << 30
    assert said["stats"]["allocated_bytes.all.current"] == MiB
    assert job.phases()[:3] == [("forward", 0), ("backward", 0), ("step", 0)]
    assert not said["notes"]
    snapshot = memtrace.load(job.directory / "rank0000.pickle")
    assert (snapshot.peak().bytes, len(snapshot.replay().conflicts)) == (2 * MiB, 0)
    texts = snapshot.data.traces[0].user_metadata
    assert texts is not None
    said_in_trace = {snapshot.data.strings[text] for text in texts.tolist() if text >= 0}
    assert said_in_trace >= {f"phase=forward;step={step}" for step in range(4)}
    assert snapshot.timeline().at(3) == ("forward", 0)


def test_an_exception(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "raise KeyError('secret')")
    assert job.code == 1
    assert job.err.endswith("KeyError: 'secret'\n")
    assert (job.sidecar()["reason"], job.sidecar()["exception"]) == ("exception", "KeyError")
    assert "secret" not in (job.directory / "rank0000.json").read_text("utf-8")


def test_an_oom_that_ends_the_job_is_what_is_kept(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "fake_cuda.alloc(1 << 20)\nfake_cuda.oom(1 << 30)")
    assert job.code == 1
    assert job.files == {"rank0000.pickle", "rank0000.json"}
    said = job.sidecar()
    assert (said["reason"], said["oom"]["asked_bytes"]) == ("oom", 1 << 30)
    assert said["stats"]["allocated_bytes.all.current"] == 2 * MiB
    oom = memtrace.load(job.directory / "rank0000.pickle").blame(at="oom")
    assert oom.total_bytes == 2 * MiB


def test_an_oom_that_was_caught_is_kept_beside_the_end(tmp_path: Path) -> None:
    script = TRAINING + (
        "for _ in range(3):\n    try: fake_cuda.oom(1 << 30)\n    except torch.OutOfMemoryError: pass\ntrain(2)\n"
        "assert fake_cuda.calls.count('snapshot') == 1"
    )
    job = jobs.run(tmp_path, script)
    assert job.code == 0, job.err
    assert job.files == {"rank0000.pickle", "rank0000.json", "rank0000.oom.pickle", "rank0000.oom.json"}
    assert (job.sidecar()["reason"], job.sidecar("rank0000.oom")["reason"]) == ("exit", "oom")


def test_sigterm_dumps_and_kills(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)")
    assert job.code == -signal.SIGTERM
    assert job.sidecar()["reason"] == "signal"


def test_sigterm_while_the_main_thread_never_comes_back(tmp_path: Path) -> None:
    script = TRAINING + (
        "import ctypes\nlocked = ctypes.create_string_buffer(64)\nprint('stuck', flush=True)\n"
        "while True: ctypes.CDLL(None).sem_wait(ctypes.byref(locked))\n"
    )
    process = jobs.start(tmp_path, script)
    assert process.stdout.readline() == "stuck\n"
    process.terminate()
    _, err = process.communicate(timeout=60)
    job = jobs.Job(tmp_path / "recording", process.returncode, "", err)
    assert (job.code, job.sidecar()["reason"]) == (-signal.SIGTERM, "signal")


def test_os_exit_dumps_too(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "os._exit(7)")
    assert (job.code, job.sidecar()["reason"]) == (7, "exit")


def test_a_signal_that_was_asked_for_goes_on(tmp_path: Path) -> None:
    script = TRAINING + "os.kill(os.getpid(), signal.SIGUSR1); train(2); sys.exit(5)"
    job = jobs.run(tmp_path, script, on=("exit", "signal:USR1"))
    assert job.code == 5
    assert job.files >= {"rank0000.pickle", "rank0000.signal.pickle", "rank0000.signal.json"}
    assert job.sidecar("rank0000.signal")["steps"] == 4
    assert job.sidecar()["steps"] == 6


def test_sigusr1_is_nobodys_unless_asked(tmp_path: Path) -> None:
    script = TRAINING + (
        "assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "os.kill(os.getpid(), signal.SIGUSR1); time.sleep(60)"
    )
    assert jobs.run(tmp_path, script).code == -signal.SIGUSR1


def test_kill_9_leaves_the_rolling_snapshot(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "os.kill(os.getpid(), signal.SIGKILL)", every=2)
    assert job.code == -signal.SIGKILL
    assert job.files == {"rank0000.every.pickle", "rank0000.every.json"}
    assert job.sidecar("rank0000.every")["steps"] == 4


def test_a_range_of_steps(tmp_path: Path) -> None:
    expected = ["snapshot", "record all", "snapshot", "record None"]
    script = TRAINING + f"assert fake_cuda.calls == {expected}, fake_cuda.calls"
    job = jobs.run(tmp_path, script, steps=(2, 2))
    assert job.code == 0, job.err
    said = job.sidecar()
    assert (said["reason"], said["complete"]) == ("steps", False)
    assert said["stats_start"]["allocated_bytes.all.current"] == MiB
    assert said["segments_start"]
    snapshot = memtrace.load(job.directory / "rank0000.pickle")
    assert len(snapshot.data.traces[0]) == 4
    assert not snapshot.replay().complete


def test_the_highest_step_so_far(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING, on=("exit", "peak"))
    assert job.files >= {"rank0000.peak.pickle", "rank0000.pickle"}
    assert job.sidecar("rank0000.peak")["steps"] == 1


def test_a_ring_too_small_is_said(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING, max_entries=7)
    assert "a step makes 4 events and --max-entries is 7" in job.err
    assert jobs.run(tmp_path / "other", TRAINING.replace("train.py", ""), max_entries=8).err == ""


def test_a_rank_that_was_not_chosen_is_left_alone(tmp_path: Path) -> None:
    script = TRAINING + "assert fake_cuda.calls == []"
    job = jobs.run(tmp_path, script, environ={"RANK": "3", "WORLD_SIZE": "8"}, ranks=(0, 7))
    assert (job.code, job.files) == (0, set()), job.err


@pytest.mark.parametrize(("rank", "recorded"), [("0", True), ("1", False), ("8", True), ("127", True)])
def test_auto_takes_one_rank_a_node_and_the_last(tmp_path: Path, rank: str, recorded: bool) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "128", "LOCAL_RANK": str(int(rank) % 8)}
    assert bool(jobs.run(tmp_path, TRAINING, environ=variables).files) is recorded


def test_two_processes_of_one_rank_leave_two_recordings(tmp_path: Path) -> None:
    jobs.run(tmp_path, TRAINING)
    environ = jobs.environment(tmp_path / "recording")
    subprocess.run([sys.executable, str(tmp_path / "train.py")], env=environ, check=True, timeout=120)
    assert {path.name for path in (tmp_path / "recording").glob("rank*.pickle")} == {
        "rank0000.pickle", "rank0000-2.pickle",
    }  # fmt: skip


def test_a_job_that_switches_recording_off_itself_loses_nothing(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, TRAINING + "torch.cuda.memory._record_memory_history(enabled=None)\ntrain(1)")
    assert job.code == 0, job.err
    assert job.sidecar()["reason"] == "api"
    assert len(memtrace.load(job.directory / "rank0000.pickle").data.traces[0]) > 10


def test_forked_children_are_not_ours(tmp_path: Path) -> None:
    script = TRAINING + (
        "pid = os.fork()\n"
        "if not pid:\n    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL; os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9\n"
    )
    job = jobs.run(tmp_path, script)
    assert (job.code, job.files) == (0, {"rank0000.pickle", "rank0000.json"}), job.err


def test_data_loader_workers_change_nothing(tmp_path: Path) -> None:
    script = TRAINING + (
        "from torch.utils.data import DataLoader\n"
        "print(sum(batch.sum().item() for batch in DataLoader(torch.ones(64, 2), batch_size=8, num_workers=2)))\n"
    )
    job = jobs.run(tmp_path, script)
    assert (job.code, job.out) == (0, "128.0\n"), job.err
    assert job.files == {"rank0000.pickle", "rank0000.json"}


def test_a_directory_that_vanishes_does_not_stop_the_job(tmp_path: Path) -> None:
    script = TRAINING + "import shutil; shutil.rmtree(sys.argv[0].replace('train.py', 'recording'))\nsys.exit(4)"
    job = jobs.run(tmp_path, script)
    assert job.code == 4
    assert "could not be written" in job.err
    assert "The job goes on" in job.err


def test_models_can_be_saved_copied_scripted_and_compiled(tmp_path: Path) -> None:
    script = WITHOUT_CUDA + (
        "import copy, io\n"
        "saved = io.BytesIO(); torch.save(model, saved); assert b'memtrace' not in saved.getvalue()\n"
        "copy.deepcopy(model); torch.jit.script(model); traced = torch.jit.trace(model, torch.ones(2, 4))\n"
        "assert 'profiler' not in str(traced.graph)\n"
        "exported = torch.export.export(model, (torch.ones(2, 4),))\n"
        "assert 'profiler' not in str(exported.graph)\n"
        "fx = torch.fx.symbolic_trace(torch.nn.Sequential(model)); fx(torch.ones(2, 4))\n"
        "compiled = torch.compile(model, fullgraph=True, backend='eager')\n"
        "compiled(torch.ones(2, 4)).sum().backward()\n"
    )
    job = jobs.run(tmp_path, script)
    assert job.code == 0, job.err


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    script = (
        "import torch; torch.manual_seed(0)\n"
        "m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))\n"
        "o = torch.optim.AdamW(m.parameters())\n"
        "for _ in range(5):\n    loss = m(torch.randn(4, 8)).sum(); loss.backward(); o.step(); o.zero_grad()\n"
        "print(loss.item(), [p.sum().item() for p in m.parameters()])"
    )
    job = jobs.run(tmp_path, script)
    alone = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert job.out == alone.stdout


def test_a_rank_without_cuda_says_so(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, WITHOUT_CUDA, environ={"RANK": "1", "WORLD_SIZE": "2"})
    assert (job.code, job.files) == (0, {"rank0001.json"}), job.err
    said = job.sidecar("rank0001")
    assert said["notes"] == ["no CUDA device in rank 1: nothing to record"]
    assert said["steps"] == 4
    assert {phase for phase, _ in job.phases("rank0001")} == {"forward", "backward", "step"}


def test_a_process_that_only_imports_torch_leaves_nothing(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, "import torch; print(torch.ones(2).sum().item())")
    assert (job.code, job.out, job.files, job.log) == (0, "2.0\n", set(), "")


def test_a_process_without_torch_pays_nothing(tmp_path: Path) -> None:
    script = "import sys; print(sorted(m for m in sys.modules if m.startswith('memtrace')), 'json' in sys.modules)"
    assert jobs.run(tmp_path, script).out == "['memtrace_inside', 'memtrace_inside.importing'] False\n"
