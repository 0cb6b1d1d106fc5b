"""`with memtrace.recording():`, and the callbacks that use it. In processes of their own, on a GPU that is none."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_jobs import HERE, needs_torch

import memtrace

pytestmark = needs_torch
TRAINING = """
import os, signal, sys
import torch, fake_cuda, memtrace
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for _ in range(3):
        block = fake_cuda.alloc(1 << 20)
        model(torch.ones(2, 4)).sum().backward()
        fake_cuda.free(block)
        optimizer.step()
        optimizer.zero_grad()
touched = lambda: (torch.autograd.backward, torch.save, torch.load, torch.nn.Linear.__call__, signal.signal, os._exit,
                   torch.cuda.memory._record_memory_history, signal.getsignal(signal.SIGTERM))
before = touched()
"""


def run(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "train.py"
    file.write_text(TRAINING + script, "utf-8")
    clean = {key: value for key, value in os.environ.items() if "MEMTRACE" not in key}
    root = str(Path(memtrace.__file__).parents[1])
    environ = {**clean, "PYTHONPATH": os.pathsep.join([str(HERE), root]), "XDG_STATE_HOME": str(tmp_path / "state")}
    return subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_writes_what_the_command_writes_and_takes_everything_back(tmp_path: Path) -> None:
    done = run(
        tmp_path, "with memtrace.recording('out') as r:\n    train()\nassert touched() == before\nprint(r.directory)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "out"
    assert done.stdout == f"{out}\n"
    assert {path.name for path in out.iterdir()} == {"log", "meta.json", "rank0000.json", "rank0000.pickle.zst"}
    said = json.loads((out / "rank0000.json").read_text("utf-8"))
    assert (said["reason"], said["steps"], said["complete"]) == ("api", 3, True)
    assert memtrace.load(out).peak().bytes == 1 << 20


def test_what_was_there_before_is_known_by_the_counters(tmp_path: Path) -> None:
    done = run(tmp_path, "old = fake_cuda.alloc(1 << 20)\nwith memtrace.recording('out'):\n    train()")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "out" / "rank0000.json").read_text("utf-8"))
    assert not said["complete"]
    assert said["stats_start"]["allocated_bytes.all.current"] == 1 << 20
    assert len(said["segments_start"]) == 1


def test_an_exception_is_the_programs_and_the_files_are_written(tmp_path: Path) -> None:
    script = (
        "try:\n    with memtrace.recording('out'):\n        train()\n        1 / 0\n"
        "except ZeroDivisionError:\n    print('seen')"
    )
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "seen\n")
    assert (tmp_path / "out" / "rank0000.pickle.zst").exists()


def test_a_second_one_has_a_place_of_its_own(tmp_path: Path) -> None:
    script = (
        "for _ in range(2):\n    with memtrace.recording(name='twice') as r:\n        train()\n"
        "    print(r.directory.name)"
    )
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first != second
    assert (tmp_path / ".memtrace" / ".gitignore").read_text("ascii") == "*\n"
    for name in (first, second):
        assert memtrace.load(tmp_path / ".memtrace" / name).peak().bytes == 1 << 20


def test_inside_another_it_does_nothing(tmp_path: Path) -> None:
    script = (
        "with memtrace.recording('out'):\n    with memtrace.recording('inner') as r:\n        train()\n"
        "    assert r.directory is None and r.dump() is None\n    assert touched() != before\n"
    )
    assert run(tmp_path, script).returncode == 0
    assert not (tmp_path / "inner").exists()
    assert memtrace.load(tmp_path / "out").peak().bytes == 1 << 20


def test_a_dump_in_the_middle(tmp_path: Path) -> None:
    done = run(tmp_path, "with memtrace.recording('out') as r:\n    train()\n    print(r.dump().name)\n    train()")
    assert done.stdout == "rank0000.api.pickle\n"
    assert (tmp_path / "out" / "rank0000.api.json").exists()


def test_nowhere_to_write_is_said_and_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file", "utf-8")
    done = run(tmp_path, "with memtrace.recording('taken') as r:\n    train()\nprint('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "taken" in done.stderr


def test_what_goes_wrong_at_the_end_is_said_and_the_program_runs(tmp_path: Path) -> None:
    broken = "from memtrace.record import layout\nlayout.remember = lambda directory: 1 / 0\n"
    done = run(tmp_path, broken + "with memtrace.recording('out'):\n    train()\nprint('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "ZeroDivisionError" in done.stderr
    assert list((tmp_path / "out").glob("rank0000.pickle*"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs transformers and accelerate")
def test_the_trainers_callback(tmp_path: Path) -> None:
    script = """
from memtrace.record.hf import MemtraceCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
sizes = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(sizes)
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
arguments = TrainingArguments(
    "trained", max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
)
Trainer(model, arguments, train_dataset=rows, callbacks=[MemtraceCallback("out")]).train()
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "out" / "rank0000.json").read_text("utf-8"))
    assert said["steps"] == 2
    assert {one["phase"] for one in said["phases"]} >= {"forward", "backward", "step"}
