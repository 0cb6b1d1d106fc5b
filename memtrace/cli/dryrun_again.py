"""Dry runs within a dry run: the same job once more with something changed, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from memtrace.io.sidecar import natural, read_json

OUTPUT = "output.txt"
"""What the job and we printed, in the folder."""
_REPORT = "report.json"
_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"(?:\[rank\d+\]: )?(?:[\w.]+(?:Error|Exception)|[\w./ -]+: error)\b")

_SHELL_SIGNAL = 128
_PATIENCE_S = 30.0
_running: list[subprocess.Popen[bytes]] = []
_ending = threading.Event()


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
        _to_its_end(command, {**os.environ, **plan.environ, **(environ or {})}, output)
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


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what `run` has started, in good order, and then us. For the main thread."""

    def end(signum: int, _frame: object) -> None:
        _ending.set()
        for child in tuple(_running):
            child.terminate()
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(_SHELL_SIGNAL + signum)

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _to_its_end(command: Sequence[str], environ: Mapping[str, str], output: BinaryIO) -> None:
    if _ending.is_set():
        return
    child = subprocess.Popen(  # noqa: S603 - ourselves
        command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    _running.append(child)
    try:
        child.wait()
    except BaseException:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE_S)
        raise
    finally:
        _running.remove(child)


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
