"""Dry runs within a dry run: the same job once more with something changed, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrace.io.sidecar import natural, read_json

OUTPUT = "output.txt"
"""What the job and we printed, in the folder."""
_REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """What all of them have in common: the job's command and environment, and our own options."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    options: Sequence[str]


@dataclass(frozen=True, slots=True)
class Result:
    """Of all its ranks the fullest, in bytes. `fits` None: the job failed otherwise. `recordings` in order of rank."""

    fits: bool | None
    allocated: int | None
    reserved: int | None
    room: int | None
    recordings: tuple[str, ...]
    seconds: float


def run(
    plan: Plan, folder: Path, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Result:
    """To its end, with other words or more variables. `folder` exists."""
    command = [
        sys.executable, "-m", "memtrace", "dryrun", "-o", str(folder), "--report", str(folder / _REPORT),
        *plan.options, "--", *(plan.argv if argv is None else argv),
    ]  # fmt: skip
    began = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        subprocess.run(  # noqa: S603 - ourselves
            command, env={**os.environ, **plan.environ, **(environ or {})}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    data = read_json(folder / _REPORT).get("data")
    row = data if isinstance(data, dict) else {}
    ranks = [one for one in row.get("ranks", []) if isinstance(one, dict)]
    return Result(
        fits=row.get("fits"),
        allocated=max((natural(one.get("allocated_peak_bytes")) or 0 for one in ranks), default=None),
        reserved=max((natural(one.get("reserved_peak_bytes")) or 0 for one in ranks), default=None),
        room=row.get("room_bytes"),
        recordings=tuple(str(one["path"]) for one in ranks if one.get("path")),
        seconds=time.monotonic() - began,
    )
