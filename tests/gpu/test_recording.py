"""Recording on a GPU. The whole list of jobs is in record_driver.py; these take a minute."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = "gpt2,gpt2-fsdp2,gpt2-signal,gpt2-kill9,gpt2-oom"


@pytest.mark.gpu
@pytest.mark.slow
def test_recorded_jobs_are_as_they_must_be(tmp_path: Path) -> None:
    memtrace = shutil.which("memtrace", path=str(Path(sys.executable).parent)) or shutil.which("memtrace")
    if memtrace is None or not importlib.util.find_spec("transformers"):
        pytest.skip("needs the memtrace command and transformers")
    driver = [sys.executable, str(Path(__file__).with_name("record_driver.py")), "--memtrace", memtrace]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run([*driver, *folders, "--only", SCENARIOS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    rows = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert [row["scenario"] for row in rows if not row["ok"]] == []
