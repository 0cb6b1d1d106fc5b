"""`memtrace record`: runs a training job, and leaves a recording of it.

What is ours goes to stderr, and nothing of ours may fail: the job runs, and its exit code is the answer.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace import paths
from memtrace.cli import diagnostics
from memtrace.cli.options import HISTORY, PLACE, PLAIN, ranks

if TYPE_CHECKING:
    from memtrace.record.inside.settings import Settings
    from memtrace.record.launch import Outcome
    from memtrace.record.layout import Place

EXAMPLES = """\b
Examples:
  memtrace record -- deepspeed --num_gpus 8 train.py --deepspeed_config ds.json
  memtrace record --ranks 0,7 -- torchrun --nproc-per-node 8 train.py
  memtrace record --steps 3:5 -- accelerate launch train.py      a long job: steps 3 to 5 only
  memtrace record --every 100 -- python train.py                 keeps something even of kill -9
  memtrace record --on signal:USR1 -- srun python train.py       a dump whenever you ask, and it goes on
  memtrace record --simulate-world 8 -- deepspeed train.py       rank 0 of 8, on one GPU"""

_BASE = ("exit", "oom", "signal")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_UNBLOCKABLE = ("KILL", "STOP", "SEGV", "BUS", "FPE", "ILL", "CHLD")
_SHELL_SIGNAL = 128

# What an event takes with Python stacks: in torch's ring (an estimate: the entry and some forty frames), as Python
# objects while a dump is written, and in the file before it is packed (both measured: 620, 117 to 134).
_RING_BYTES = 1000
_DUMP_BYTES = 620
_FILE_BYTES = 150

Callback = Callable[[click.Context, click.Parameter, Any], Any]


def _span(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`3:5` is steps 3, 4 and 5; `3` is that step."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no range of steps; write 3:5, or 3 for one step.")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise click.BadParameter(f"step {last} comes before step {first}; did you mean {last}:{first}?")
    return first, last


def seconds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """`90`, `90s`, `5m`, `1h`."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smh]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no time; write 90, 90s, 5m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]


def _occasions(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """When to dump: exit, oom and signal unless some of these are named; peak and signal:NAME come on top."""
    named = list(dict.fromkeys(word for value in values for word in value.split(",")))
    for word in named:
        if word not in (*_BASE, "peak") and not _is_signal(word):
            raise click.BadParameter(f"{word!r}: there is exit, oom, signal, peak, and signal:USR1 or another signal.")
    base = [word for word in _BASE if word in named] or list(_BASE)
    return (*base, *(word for word in named if word not in _BASE))


def _is_signal(word: str) -> bool:
    kind, _, name = word.partition(":")
    return kind == "signal" and hasattr(signal, f"SIG{name}") and name.isalnum() and name not in _UNBLOCKABLE


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Everything but the command to run."""
    count, step = click.IntRange(min=1), click.IntRange(min=0)
    options = (
        *HISTORY,
        click.option(
            "--single-thread-backward/--threaded-backward",
            "single_thread_backward",
            help="Run backward on the thread that asks for it: all it allocates then has a Python stack, and cuBLAS "
            "makes one workspace less. Default: torch's own threads.",
        ),
        click.option(
            "--modules",
            is_flag=True,
            help="Tag each allocation with its module. A small model's step takes 20-30 % longer.",
        ),
        click.option(
            "--on",
            multiple=True,
            callback=_occasions,
            metavar="WHEN",
            help="When to dump: exit, oom, signal (default: these three); besides them peak, and signal:USR1 or "
            "another signal: dump and go on. A list with commas, or repeated.",
        ),
        click.option("--every", type=step, default=0, metavar="N", help="Also dump after every N steps."),
        click.option("--steps", callback=_span, metavar="A:B", help="Record steps A to B only, and dump after B."),
        click.option("--skip-first", type=step, default=0, metavar="N", help="Begin after the first N steps."),
        click.option("--duration", callback=seconds, metavar="TIME", help="Stop recording after 90s, 5m or 1h."),
        click.option(
            "--ranks",
            callback=ranks("all", "auto"),
            default="auto",
            show_default=True,
            metavar="RANKS",
            help="0,7 or all; auto: all up to 64, beyond that one a node and the last.",
        ),
        click.option(
            "--grace",
            callback=seconds,
            default="20",
            show_default=True,
            metavar="TIME",
            help="How long a rank that was told to end may take for its dump.",
        ),
        click.option(
            "--dump-jobs",
            type=count,
            default=4,
            show_default=True,
            metavar="N",
            help="Ranks of a node that dump at once.",
        ),
        *PLAIN,
        click.option(
            "--simulate-world",
            type=click.IntRange(min=2),
            metavar="N",
            help="Run one rank of a job of N on this GPU. Its memory is the real one's; what it learns is meaningless.",
        ),
        click.option("--rank", type=step, metavar="R", help="Which rank of the simulated N (default 0)."),
        *PLACE,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("record", epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})
@_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def command(command: tuple[str, ...], **options: Any) -> int:
    """Runs COMMAND, a training job that is not changed for it, and records the GPU memory of each of its ranks.

    deepspeed, torchrun, accelerate, srun, mpirun, python or a script of your own. Its output, its signals and its exit
    code are the job's own; 127: it was not found, 126: it cannot be executed.
    """
    if not command:
        raise click.UsageError("there is no command to run; memtrace record -- python train.py")
    _check_world(options["simulate_world"], options["rank"])
    quiet: bool = options["quiet"]
    settings: Settings | None = None
    with cannot_fail("the job runs unrecorded"):
        settings = _prepare(command, options)
    outcome = _run(command, settings)
    if settings is not None:
        with cannot_fail("the recording is as the ranks left it"):
            _finish(settings, command, outcome, quiet=quiet)
    return exit_as(outcome)


def _check_world(world: int | None, rank: int | None) -> None:
    if rank is not None and world is None:
        raise click.UsageError("--rank is a rank of --simulate-world N; --ranks chooses those of a real job.")
    if rank is not None and world is not None and rank >= world:
        raise click.UsageError(f"--simulate-world {world} has ranks 0 to {world - 1}, not {rank}.")


def _prepare(command: Sequence[str], options: dict[str, Any]) -> Settings | None:
    """Makes the recording's directory and says what there is to say before the job; None when it cannot be recorded."""
    from memtrace.record import launch, layout

    name = layout.clean_name(options["name"]) if options["name"] else layout.name_of(command)
    place: Place = layout.make(name, options["output"])
    for text in (*place.notes, *filter(None, [launch.obstacle(command)])):
        diagnostics.note(text)
    if place.directory is None:
        return None
    settings = _settings(place.directory, name, options)
    layout.write_meta(place.directory, meta(settings, command, None))
    if not options["quiet"]:
        diagnostics.note(f"recording to {paths.shown(place.directory)}: {_cost(settings)}")
        if settings.world:
            diagnostics.note(
                f"a simulated world of {settings.world} ranks, this one rank {settings.rank}: its memory is that of "
                "the real job, its losses and weights are meaningless"
            )
    return settings


def _settings(directory: Path, name: str, options: dict[str, Any]) -> Settings:
    from memtrace.record.inside.settings import Settings

    same = (
        "max_entries", "stacks", "modules", "on", "every", "steps", "skip_first", "ranks",
        "dump_jobs", "plain_paths", "plain_host",
    )  # fmt: skip
    return Settings(
        directory=str(directory),
        threaded_backward=not options["single_thread_backward"],
        duration_s=options["duration"] or 0.0,
        grace_s=options["grace"],
        world=options["simulate_world"] or 0,
        rank=options["rank"] or 0,
        name=name,
        **{key: options[key] for key in same},
    )


def _cost(settings: Settings) -> str:
    """What the largest recording takes, in each rank."""
    if settings.stacks == "all":
        return f"at most {settings.max_entries:,} events a rank, each several kB with C++ stacks"
    return (
        f"at most {settings.max_entries:,} events a rank, which take about "
        f"{settings.max_entries * (_RING_BYTES + _DUMP_BYTES) / 1e9:,.1f} GB of host memory while dumped and "
        f"{settings.max_entries * _FILE_BYTES / 1e6:,.0f} MB of disk (--max-entries)"
    )


def meta(settings: Settings, command: Sequence[str], outcome: Outcome | None) -> dict[str, Any]:
    """What `meta.json` says of a run: before it (`outcome` None) and after it."""
    import time

    from memtrace.record import layout

    return {
        "command": list(command) if settings.plain_paths else [Path(command[0]).name],
        "name": settings.name,
        "started_us": time.time_ns() // 1000 if outcome is None else outcome.started_us,
        "ended_us": None if outcome is None else outcome.ended_us,
        "exit_code": None if outcome is None or outcome.signal else outcome.code,
        "signal": None if outcome is None else outcome.signal,
        "settings": layout.described(settings),
        "ranks": layout.reported(Path(settings.directory)),
    }


def _run(command: Sequence[str], settings: Settings | None) -> Outcome:
    from memtrace.record import launch, layout

    try:
        return launch.run(command, settings)
    except launch.CommandError:
        if settings is not None:
            layout.discard(Path(settings.directory))
        raise


def keep(settings: Settings, command: Sequence[str], outcome: Outcome) -> None:
    """Packs what the ranks of a run left, and puts it on the list of recordings."""
    from memtrace.record import layout

    directory = Path(settings.directory)
    layout.tidy(directory)
    for problem in layout.pack(directory):
        diagnostics.note(problem)
    layout.write_meta(directory, meta(settings, command, outcome))
    if layout.reported(directory):
        layout.remember(directory)


def _finish(settings: Settings, command: Sequence[str], outcome: Outcome, *, quiet: bool) -> None:
    """Packs what the ranks left, lists it and says what there is."""
    from memtrace.cli import record_text

    directory = Path(settings.directory)
    is_quick = record_text.is_quick(directory)
    keep(settings, command, outcome)
    record_text.report(directory, with_moments=is_quick, quiet=quiet)


def exit_as(outcome: Outcome) -> int:
    """The job's exit code; if a signal ended it, the same one ends us."""
    if outcome.signal is None:
        return outcome.code
    from memtrace.record import launch

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    launch.die_by(outcome.signal)
    return _SHELL_SIGNAL + outcome.signal


@contextlib.contextmanager
def cannot_fail(otherwise: str) -> Iterator[None]:
    """Whatever goes wrong in our part, the job and its exit code are not concerned."""
    try:
        yield
    except KeyboardInterrupt:
        diagnostics.note(f"interrupted: {otherwise}")
    except Exception as error:  # noqa: BLE001 - a bug of ours must not cost anyone a job
        diagnostics.note(f"{otherwise}: {type(error).__name__}: {error}")
