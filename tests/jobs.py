"""Jobs to record: small programs, run as `memtrace record -- COMMAND` in processes of their own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

RECORD = (sys.executable, "-m", "memtrace", "record")
DEADLINE_SECONDS = 60

ADD_RANK = """
import json, os, pathlib, sys
here = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
"""
"""The beginning of a job that leaves files in its recording, whose directory is `here`."""


def record(*arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`memtrace record ARGUMENTS` to its end."""
    environ = {**os.environ, **(env or {})}
    return subprocess.run(
        [*RECORD, *map(str, arguments)],
        cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip


def started(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    """The same, running; its streams are pipes without buffers unless `options` say otherwise."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*RECORD, *map(str, arguments)], cwd=cwd, bufsize=0, **streams)


def read_until(descriptor: int, text: bytes) -> bytes:
    """What comes from a descriptor up to and with `text`. Fails when that takes too long."""
    read, end = b"", time.monotonic() + DEADLINE_SECONDS
    while text not in read:
        ready, _, _ = select.select([descriptor], [], [], max(0, end - time.monotonic()))
        assert ready, f"no {text!r} after {read!r}"
        part = os.read(descriptor, 4096)
        assert part, f"ended without {text!r}: {read!r}"
        read += part
    return read


def wait_until(is_so: Callable[[], bool]) -> None:
    """Asks again and again. Fails when that takes too long."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def only_recording(root: Path) -> Path:
    """The one recording in `root/.memtrace`."""
    (found,) = (entry for entry in (root / ".memtrace").iterdir() if entry.is_dir())
    return found


def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size; for a fixture. Skips the test where none can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
