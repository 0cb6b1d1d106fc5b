"""Dry runs within a dry run: the same job once more with something changed, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.io.sidecar import natural, read_json

OUTPUT = "output.txt"
"""What the job and we printed, in the folder."""
_REPORT = "report.json"
_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"(?:\[rank\d+\]: )?(?:[\w.]+(?:Error|Exception)|[\w./ -]+: error)\b")


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
    plan: Plan,
    folder: Path,
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Result:
    """To its end, with other words or more variables, under another name. `folder` exists."""
    command = [
        sys.executable, "-m", "memtrace", "dryrun", "-o", str(folder), "--report", str(folder / _REPORT),
        *plan.options, *(() if name is None else ("--name", name)), "--", *(plan.argv if argv is None else argv),
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
        allocated=_largest(ranks, "allocated_peak_bytes"),
        reserved=_largest(ranks, "reserved_peak_bytes"),
        room=row.get("room_bytes"),
        recordings=tuple(str(one["path"]) for one in ranks if one.get("path")),
        seconds=time.monotonic() - began,
    )


def last_line(folder: Path) -> str:
    """Of what was printed, the last that is not ours: where a job failed, mostly the error."""
    with contextlib.suppress(OSError), (folder / OUTPUT).open("rb") as file:
        file.seek(max(0, (folder / OUTPUT).stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
        found = [line for line in lines if line and not line.startswith("memtrace:")]
        errors = [line for line in found if _ERROR.match(line)]
        return (errors or found or [""])[-1]
    return ""


def _largest(ranks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return max((size for one in ranks if (size := natural(one.get(key))) is not None), default=None)
