"""Runs a script as a rank of a recorded job: in a process of its own, under the bootstrap that the launcher copies."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memtrace.record import layout
from memtrace.record.inside.settings import VARIABLE, Settings, encode

HERE = Path(__file__).parent / "record"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@dataclass
class Job:
    """A script under the recorder, and what it left."""

    directory: Path
    code: int
    out: str
    err: str

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.directory.iterdir() if path.name.startswith("rank")}

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text("utf-8") if path.exists() else ""

    def sidecar(self, stem: str = "rank0000") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"{stem}.json").read_text("utf-8"))
        return found

    def phases(self, stem: str = "rank0000") -> list[tuple[str, int | None]]:
        return [(one["phase"], one["step"]) for one in self.sidecar(stem)["phases"]]


def environment(directory: Path, **options: Any) -> dict[str, str]:
    """Variables of a process that is recorded in `directory`."""
    settings = Settings(str(directory), **options)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MEMTRACE", "PYTHONMEMTRACE"))}
    clean.pop("PYTHONPATH", None)
    path = os.pathsep.join([str(directory / layout.BOOTSTRAP), str(HERE)])
    return {**clean, VARIABLE: encode(settings), "PYTHONPATH": path}


def place(tmp_path: Path) -> Path:
    """A recording's directory with the bootstrap in it."""
    directory = layout.make("job", tmp_path / "recording").directory
    assert directory is not None
    return directory


def start(tmp_path: Path, script: str, *, environ: dict[str, str] | None = None, **options: Any) -> Any:
    """The process, its output in pipes."""
    directory = place(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(script, "utf-8")
    return subprocess.Popen(
        [sys.executable, str(file)],
        env={**environment(directory, **options), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def run(tmp_path: Path, script: str, *, environ: dict[str, str] | None = None, **options: Any) -> Job:
    """Runs `script` to its end."""
    process = start(tmp_path, script, environ=environ, **options)
    out, err = process.communicate(timeout=300)
    return Job(tmp_path / "recording", process.returncode, out, err)
