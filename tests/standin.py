"""What tests with the stand-in device need: an interpreter with a CUDA build of torch, named by the environment.

No GPU. In .ci/run the group `dryrun` makes one; elsewhere:

    MEMTRACE_CUDA_PYTHON=/path/to/python pytest tests/dryrun
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("MEMTRACE_CUDA_PYTHON", "")
needs_standin = pytest.mark.skipif(
    not PYTHON, reason="MEMTRACE_CUDA_PYTHON names no interpreter with a CUDA build of torch"
)


@dataclass
class Dry:
    """A dry run that ended: what it printed, and what it left."""

    code: int
    out: str
    err: str
    folder: Path

    @cached_property
    def report(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / "report.json").read_text())["data"]
        return data

    def sidecar(self, rank: int = 0) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "rec" / f"rank{rank:04}.json").read_text())
        return content

    def codes(self) -> set[str]:
        return {row["code"] for row in self.report["assumptions"]}


def dryrun(folder: Path, script: str, *options: str, launcher: tuple[str, ...] = (PYTHON,), **variables: str) -> Dry:
    """Runs a script, given as text or as a path, and keeps its recording in `folder`/rec."""
    path = Path(script)
    if "\n" in script:
        path = folder / "job.py"
        path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "memtrace", "dryrun", "-o", str(folder / "rec"), "--report",
               str(folder / "report.json"), *options, "--", *launcher, str(path)]  # fmt: skip
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MEMTRACE_RECORD"))}
    environ = {**inherited, "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}",
               "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1", **variables}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, cwd=folder)
    return Dry(done.returncode, done.stdout, done.stderr, folder)


def memtrace(*words: str) -> tuple[int, dict[str, Any]]:
    """A command's exit code and JSON."""
    done = subprocess.run([sys.executable, "-m", "memtrace", *words, "--json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}
