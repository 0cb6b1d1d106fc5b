"""Runs the command line in this process, as a pipe sees it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.cli import cli, diagnostics

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Ran:
    """Exit code and what was written."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


def memtrace(*arguments: object, stdin: bytes | None = None) -> Ran:
    """`memtrace ARGUMENTS`, from the repository's root."""
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.ExitStack()
    with streams:
        streams.enter_context(_process(["memtrace", *map(str, arguments)], stdin))
        streams.enter_context(contextlib.redirect_stdout(out))
        streams.enter_context(contextlib.redirect_stderr(err))
        code = diagnostics.guarded(cli)
    return Ran(int(code), out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _process(arguments: list[str], stdin: bytes | None) -> Iterator[None]:
    before, here, was_stdin = sys.argv, Path.cwd(), sys.stdin
    sys.argv = arguments
    os.chdir(ROOT)
    if stdin is not None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.argv, sys.stdin = before, was_stdin
        os.chdir(here)
