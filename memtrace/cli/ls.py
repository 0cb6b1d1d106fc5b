"""`memtrace ls`: the recordings there are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from memtrace import paths
from memtrace.cli import diagnostics
from memtrace.io import recording
from memtrace.units import format_bytes

EXAMPLES = """\b
Examples:
  memtrace ls
  memtrace ls --json
  MEMTRACE_DIR=/scratch/recordings memtrace ls"""


@dataclass(frozen=True, slots=True)
class Found:
    """A recording. `peak_bytes` is the highest allocated peak of its ranks, None where no sidecar says one."""

    path: Path
    name: str
    started_us: int
    ended_us: int | None
    exit_code: int | None
    signal: int | None
    ranks: tuple[int, ...]
    peak_bytes: int | None
    bytes: int
    is_dry_run: bool


@click.command("ls", epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="One JSON document; sizes in bytes, times in microseconds.")
@click.option(
    "--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="Colour (default: on a terminal)."
)
def command(*, as_json: bool, color: str) -> None:
    """Recordings found, the newest first: when, name, ranks, highest peak, size.

    In .memtrace here or above, or in $MEMTRACE_DIR; then this user's recent ones elsewhere.
    """
    found = sorted(recordings(), key=lambda one: (one.started_us, one.path), reverse=True)
    if as_json:
        _write_json(found)
    elif found:
        _write_text(found, color)
    else:
        diagnostics.note("no recording found here; memtrace record -- python train.py makes one")


def recordings() -> Iterator[Found]:
    """Each recording once, of every place where one is looked for."""
    seen = set()
    for root in paths.recording_roots():
        for directory in [root, *_folders(root)]:
            place = directory.resolve()
            if place not in seen and _is_recording(directory):
                seen.add(place)
                yield _described(directory)


def _folders(root: Path) -> list[Path]:
    try:
        return [entry for entry in root.iterdir() if entry.is_dir() and paths.is_ours(entry)]
    except OSError:
        return []


def _is_recording(directory: Path) -> bool:
    """Also where no rank left anything: that is worth seeing."""
    return recording.read_meta(directory).name is not None or bool(recording.ranks_of(directory))


def _described(directory: Path) -> Found:
    from memtrace.cli import record_text
    from memtrace.record import layout

    meta = recording.read_meta(directory)
    ranks = record_text.ranks_in(directory)
    return Found(
        path=directory,
        name=meta.name or directory.name,
        started_us=recording.started_us(directory, meta),
        ended_us=meta.ended_us,
        exit_code=meta.exit_code,
        signal=meta.signal,
        ranks=tuple(sorted(one.rank for one in ranks if one.path is not None)),
        peak_bytes=max((one.allocated for one in ranks if one.allocated is not None), default=None),
        bytes=layout.size_of(directory),
        is_dry_run=any(one.sidecar.get("dryrun") for one in ranks),
    )


def _write_json(found: list[Found]) -> None:
    from memtrace.cli import output

    rows: list[dict[str, Any]] = [
        {
            "path": str(one.path),
            "name": one.name,
            "started_us": one.started_us,
            "ended_us": one.ended_us,
            "exit_code": one.exit_code,
            "signal": one.signal,
            "ranks": list(one.ranks),
            "peak_bytes": one.peak_bytes,
            "bytes": one.bytes,
            "dry_run": one.is_dry_run,
        }
        for one in found
    ]
    output.write_document("ls", None, {"recordings": rows}, [])


def _write_text(found: list[Found], color: str) -> None:
    from memtrace.cli.output import Column, Page

    columns = [Column("when"), Column("name"), Column("ranks", right=True), Column("peak", right=True),
               Column("size", right=True), Column("ended"), Column("path")]  # fmt: skip
    rows = [
        [
            _when(one.started_us),
            f"{one.name} (dry run)" if one.is_dry_run else one.name,
            str(len(one.ranks)),
            "" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            format_bytes(one.bytes),
            _ending(one),
            paths.shown(one.path),
        ]
        for one in found
    ]
    Page(color).table(columns, rows)


def _ending(one: Found) -> str:
    if one.signal is not None:
        return f"by signal {one.signal}"
    if one.exit_code is not None:
        return f"with {one.exit_code}"
    return "" if one.ended_us is not None else "not yet, or lost"


def _when(started_us: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(started_us / 1e6))
    except (OSError, OverflowError, ValueError):
        return "?"
