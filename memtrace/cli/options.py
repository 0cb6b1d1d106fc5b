"""Options that mean the same in every command, and the snapshot they open."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from memtrace.cli import diagnostics
from memtrace.errors import QuestionError
from memtrace.units import parse_bytes

Command = Callable[..., Any]


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Bytes, from `8GiB` or a number."""
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@dataclass(frozen=True, slots=True)
class Common:
    """The shared options of one call."""

    json: bool
    units: str
    color: str
    quiet: bool
    progress: bool
    max_size: int | None
    rank: int | None


def common(command: Command) -> Command:
    """Adds the shared options; the command receives them as one `Common` named `common`."""

    @functools.wraps(command)  # with the options the command has already
    def wrapped(**options: Any) -> Any:
        names = ("json", "units", "color", "quiet", "progress", "max_size", "rank")
        shared = Common(**{name: options.pop(name) for name in names})
        options.pop("verbose")
        return command(common=shared, **options)

    options = (
        click.option(
            "-r", "--rank", type=click.IntRange(min=0), help="Which rank of a recording (default: the highest peak)."
        ),
        click.option("--json", is_flag=True, help="One JSON document; sizes in bytes, times in microseconds."),
        click.option(
            "--units",
            type=click.Choice(["auto", "bytes", "MiB"]),
            default="auto",
            show_default=True,
            help="Units of sizes in text.",
        ),
        click.option(
            "--max-size",
            metavar="SIZE",
            callback=_size,
            help="Refuse input that unpacks to more than this (default 8GiB).",
        ),
        click.option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            help="Colour (default: on a terminal, unless NO_COLOR is set).",
        ),
        click.option("--progress/--no-progress", default=True, help="A progress bar on a terminal for slow reads."),
        click.option("-q", "--quiet", is_flag=True, help="No notes or warnings on stderr."),
        click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an internal error."),
    )
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def snapshot_argument(command: Command) -> Command:
    """The optional SNAPSHOT argument."""
    return click.argument("snapshot", required=False, type=click.Path(path_type=str), metavar="[SNAPSHOT]")(command)


def device_option(command: Command) -> Command:
    """`-d/--device`."""
    return click.option(
        "-d", "--device", type=click.IntRange(min=0), help="Device ordinal (default: the one with the highest peak)."
    )(command)


def open_snapshot(path: str | None, shared: Common) -> Any:
    """The named snapshot, or the newest recording (said on stderr with its age). Returns a `memtrace.Snapshot`."""
    from memtrace.api import load
    from memtrace.io import recording
    from memtrace.io.source import DEFAULT_MAX_BYTES

    max_bytes = DEFAULT_MAX_BYTES if shared.max_size is None else shared.max_size
    chosen: str | Path = path if path is not None else recording.newest()
    with diagnostics.progress("reading", enabled=shared.progress and not shared.quiet) as progress:
        snapshot = load(chosen, rank=shared.rank, max_bytes=max_bytes, progress=progress)
    source = snapshot.recording
    if source is not None and not shared.quiet:
        when = f", {_age(source.path)} old" if path is None else ""
        diagnostics.note(f"using rank {source.rank}: {source.path}{when}")
    return snapshot


def choose_device(snapshot: Any, device: int | None, shared: Common) -> int:
    """The device asked for, or the default one; said on stderr when several have events."""
    if device is None:
        chosen: int | None = snapshot.default_device
        if chosen is None:
            raise QuestionError("the snapshot is empty: no device has events or segments")
        busy = [trace.device for trace in snapshot.data.traces if len(trace)]
        if len(busy) > 1 and not shared.quiet:
            others = ", ".join(str(other) for other in busy if other != chosen)
            diagnostics.note(f"device {chosen} taken (highest peak); others: {others} (-d)")
        return chosen
    if device not in snapshot.devices:
        raise QuestionError.unknown("device", str(device), snapshot.devices)
    return device


def show_notices(notices: Any, shared: Common) -> None:
    """Warnings on stderr; in JSON they are in the document."""
    if shared.quiet or shared.json:
        return
    for notice in notices:
        diagnostics.warn(notice.code, notice.message)


def _age(path: Path) -> str:
    seconds = max(0, int(time.time() - path.stat().st_mtime))
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{seconds} seconds"
