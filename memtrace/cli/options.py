"""Options that mean the same in every command, and the snapshot they open."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace import paths
from memtrace.cli import diagnostics
from memtrace.errors import QuestionError
from memtrace.units import GiB, parse_bytes

if TYPE_CHECKING:
    from memtrace.api import Snapshot

Command = Callable[..., Any]
Advance = Callable[[int, int | None], None]
"""Hears of progress: how much is done, and of how much."""
_LEAST_GPU = GiB // 4


def ranks(*words: str) -> Callable[..., str | tuple[int, ...]]:
    """Reads `0,7`, or one of `words`."""

    def read(_context: click.Context, _parameter: click.Parameter, value: str) -> str | tuple[int, ...]:
        if value in words:
            return value
        numbers = value.split(",")
        if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers):
            others = ", ".join(["0,7", *words[:-1]])
            raise click.BadParameter(f"{value!r} is no list of ranks; write {others} or {words[-1]}.")
        return tuple(sorted({int(number) for number in numbers}))

    return read


def size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Bytes, from `8GiB` or a number."""
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def gpu(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Bytes of a device's memory, from the name of a GPU or a size."""
    return gpu_bytes(value)


def gpu_bytes(value: str | None) -> int | None:
    """The same of an option whose text is needed, too. Raises QuestionError or click.BadParameter."""
    if value is None:
        return None
    from memtrace import gpus

    try:
        return gpus.find(value).capacity_bytes
    except QuestionError as unknown:
        try:
            capacity = parse_bytes(value)
        except ValueError:
            raise QuestionError(unknown.message, hint=f"{unknown.hint} Or write a size: 80GiB.") from None
    if capacity < _LEAST_GPU:
        raise click.BadParameter(f"{value!r} is neither a GPU's name nor the memory of one; write 80GiB.")
    return capacity


HISTORY = (
    click.option(
        "--max-entries",
        type=click.IntRange(min=1),
        default=1_000_000,
        show_default=True,
        help="Events kept in each rank, the latest. Each takes about 1 kB of host memory and 150 bytes of disk.",
    ),
    click.option(
        "--stacks",
        type=click.Choice(["python", "all"]),
        default="python",
        show_default=True,
        help="all: C++ frames too. Several kB an event, and a dump may take minutes.",
    ),
)
"""Of commands that record: how much of what happened."""
PLAIN = (
    click.option("--plain-paths", is_flag=True, help="Keep the command, its arguments and paths in the recording."),
    click.option("--plain-host", is_flag=True, help="Keep the host's name (default: a hash of it)."),
)
"""Likewise: what is kept as it is."""
PLACE = (
    click.option("--name", metavar="NAME", help="The recording's name (default: the script's)."),
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Record in DIR (default: .memtrace/TIME-NAME, or in $MEMTRACE_DIR).",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Say nothing, unless something went wrong."),
)
"""Likewise: where the recording goes."""


@dataclass(frozen=True, slots=True)
class Common:
    """The shared options of one call, and the snapshots it opened."""

    json: bool
    units: str
    color: str
    quiet: bool
    progress: bool
    no_cache: bool
    max_size: int | None
    rank: int | None
    opened: list[Snapshot] = field(default_factory=list)

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """What was read is remembered when the answer is out: nobody waits for it, and an error keeps nothing."""
        try:
            yield
            sys.stdout.flush()
        except diagnostics.ReaderGoneError:  # `| head` has seen what it wanted, and may ask again
            self._remember()
            raise
        self._remember()

    def _remember(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # whoever has the answer need not wait for this
            for snapshot in self.opened:
                snapshot.remember()


def common(command: Command) -> Command:
    """Adds the shared options; the command receives them as one `Common` named `common`."""

    @functools.wraps(command)  # with the options the command has already
    def wrapped(**options: Any) -> Any:
        names = ("json", "units", "color", "quiet", "progress", "no_cache", "max_size", "rank")
        shared = Common(**{name: options.pop(name) for name in names})
        options.pop("verbose")
        with shared.remembering():
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
            callback=size,
            help="Refuse input that unpacks to more than this (default 8GiB).",
        ),
        click.option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            help="Colour (default: on a terminal, unless NO_COLOR is set).",
        ),
        click.option("--progress/--no-progress", default=True, help="A progress bar on a terminal for slow reads."),
        click.option("--no-cache", is_flag=True, help="Read the file itself; leave the cache alone."),
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


def gpu_option(command: Command) -> Command:
    """`--gpu`: the device's memory in bytes."""
    return click.option(
        "--gpu",
        callback=gpu,
        metavar="NAME|SIZE",
        help="The device's memory, by name (H100, A100-40) or size (80GiB), where the recording does not say it.",
    )(command)


def rules_option(command: Command) -> Command:
    """`--rules`."""
    return click.option(
        "--rules", metavar="FILE", multiple=True, help="TOML with rules of your own, which come first. May be repeated."
    )(command)


def user_rules(files: tuple[str, ...], *, quiet: bool) -> Any:
    """The rules of the named files, then the project's (said on stderr). Returns `UserRules`, or None for none."""
    with _starting():
        from memtrace.attribution import rule_files

    found = rule_files.find()
    if not files and found is None:
        return None
    from memtrace.attribution.user_rules import read

    if found is None or any(Path(file).resolve() == found for file in files):
        return read(files)
    rules = read((*files, found))
    if not quiet:
        diagnostics.note(f"using the rules of {found}")
    return rules


def open_snapshot(path: str | None, shared: Common, rules: Any = None, *, at_oom: bool = False) -> Any:
    """The named snapshot, or the newest recording (said on stderr with its age). Returns a `memtrace.Snapshot`.

    `at_oom`: of a recording, that of the rank which ran out of memory first, if one did.
    """
    with _starting():
        from memtrace.api import load

    with diagnostics.progress("reading", enabled=shared.progress and not shared.quiet) as progress:
        snapshot = load(
            _newest() if path is None else path,
            rank=shared.rank,
            max_bytes=shared.max_size,
            progress=progress,
            cache=not shared.no_cache,
            rules=rules,
            at_oom=at_oom,
        )
    shared.opened.append(snapshot)
    if snapshot.was_read and not shared.quiet:
        _say_if_slow()
    source = snapshot.recording
    if source is not None and not shared.quiet:
        when = f", {_age(source.path)} old" if path is None else ""
        why = ", which ran out of memory first" if at_oom and shared.rank is None and source.oom_us is not None else ""
        diagnostics.note(f"using rank {source.rank}{why}: {source.path}{when}")
    return snapshot


def _say_if_slow() -> None:
    from memtrace.allocator.kernel import HAS_NATIVE
    from memtrace.io.read import NATIVE

    if not (NATIVE and HAS_NATIVE):
        diagnostics.note("installed without a C compiler: the same answers, large files take 10 times as long")


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Around the first import of numpy and of what stands on it, which is most of the time of an answer from the cache.

    The collector finds nothing in modules; numpy's BLAS would start a thread a core, for matrices that never come.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with paths.environment_with("OPENBLAS_NUM_THREADS", "1"):
            yield
    finally:
        if collecting:
            gc.enable()


def _newest() -> Path:
    from memtrace.io import recording

    return recording.newest()


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
