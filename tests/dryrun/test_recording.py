"""Recorded for real: every scenario of the GPU driver that fits into this machine, on the stand-in device.

Dump at the end, at an exception, OOM, SIGTERM to one rank while the other waits, a dump asked for, rolling dumps,
chosen steps, ZeRO-1 to 3 by the deepspeed launcher, four ranks over gloo, FSDP 2, the Trainer: each file equal to its
own counters, and no byte of a peak without an owner.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from standin import PYTHON, needs_standin

REPOSITORY = Path(__file__).parents[2]
LEAST = 14
LATE = {("gpt2-steps", 0)}  # recorded from a later step: only what changed since can be compared


@needs_standin
@pytest.mark.slow
def test_every_recording_is_as_it_must_be(tmp_path: Path) -> None:
    memtrace = tmp_path / "memtrace"
    memtrace.write_text(f'#!/bin/sh\nexec {sys.executable} -m memtrace "$@"\n')
    memtrace.chmod(0o755)
    driver = [sys.executable, str(REPOSITORY / "tests" / "gpu" / "record_driver.py"), "--standin", "--python", PYTHON]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--memtrace", str(memtrace)]
    done = subprocess.run([*driver, *folders, "--jobs", "2", "--limit", "540"], capture_output=True, text=True)
    table = tmp_path / "out" / "table.json"
    assert table.exists(), done.stdout + done.stderr
    rows = json.loads(table.read_text())["rows"]

    assert {row["scenario"]: row["problems"] for row in rows if not row["ok"]} == {}
    assert len(rows) >= LEAST
    compared = {
        (row["scenario"], rank["rank"]): (rank["compared"], rank["equal"])
        for row in rows
        for rank in row["verify"]["ranks"]
    }
    assert {key: value for key, value in compared.items() if value != (111, 111)} == dict.fromkeys(LATE, (54, 54))
