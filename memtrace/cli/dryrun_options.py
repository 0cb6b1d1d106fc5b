"""The options of `memtrace dryrun`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace.cli.options import HISTORY, PLACE, PLAIN, ranks, size
from memtrace.cli.record import seconds

if TYPE_CHECKING:
    from memtrace.dryrun.trials import Axis

DEFAULT_GPU = "H200"
_DEFAULT_STEPS = 3


def _capability(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """`9.0` or `90`."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,2})\.?([0-9])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no compute capability; write 9.0.")
    return int(match[1]) * 10 + int(match[2])


def _assumed(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    """`mask=0.15`."""
    found = {}
    for value in values:
        match = re.fullmatch(r"mask=(0(?:\.[0-9]{1,9})?|1(?:\.0{1,9})?)", value)
        if match is None:
            raise click.BadParameter(f"{value!r}: there is mask=SHARE, with a share from 0 to 1.")
        found["mask"] = float(match[1])
    return found


def _axes(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> tuple[Axis, ...]:
    """`KEY=A,B` and `KEY=1..8`."""
    from memtrace.dryrun import trials

    try:
        return tuple(map(trials.axis, values))
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Everything but the command to run."""
    found = (
        click.option(
            "--gpu", metavar="NAME", help=f"The GPU to be: H100, A100-80, L40S, 4090... (default: {DEFAULT_GPU})."
        ),
        click.option("--gpu-memory", callback=size, metavar="SIZE", help="Its memory, where it is another: 40GiB."),
        click.option(
            "--sm", callback=_capability, metavar="X.Y", help="Its compute capability, where it is another: 9.0."
        ),
        click.option(
            "--world", type=click.IntRange(min=1), metavar="N", help="Ranks of the job (default: as the launcher says)."
        ),
        click.option(
            "--rank",
            "ranks",
            callback=ranks("auto"),
            default="0",
            show_default=True,
            metavar="R,R",
            help="The ranks to run, one after the other; auto: the first and the last.",
        ),
        click.option(
            "--steps",
            type=click.IntRange(min=0),
            default=_DEFAULT_STEPS,
            show_default=True,
            metavar="K",
            help="End the program when it has made so many steps; 0: let it run to its own end.",
        ),
        click.option(
            "--limit",
            callback=seconds,
            metavar="TIME",
            help="End each rank after 90s, 5m or 1h, with what there is until then.",
        ),
        click.option(
            "--assume",
            callback=_assumed,
            multiple=True,
            metavar="WHAT",
            help="mask=0.15: the share of large boolean masks that is true (default 0.5).",
        ),
        click.option(
            "--overflow-first",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="Let the gradients of the first N steps overflow, as fp16 does until it finds its scale.",
        ),
        *HISTORY,
        click.option(
            "--try",
            "tried",
            callback=_axes,
            multiple=True,
            metavar="KEY=A,B",
            help="Run with each of these values and print a table. KEY: micro_batch (1..8: from 1 to 8), a path into "
            "the DeepSpeed configuration (zero_optimization.stage=2,3), an option of the script (--seq-length=1,2) or "
            "a variable (PYTORCH_ALLOC_CONF=...). Repeated: every combination.",
        ),
        click.option(
            "--max-gpu-memory",
            callback=size,
            metavar="SIZE",
            help="With --try micro_batch=1..64, or another KEY=FIRST..LAST: find the largest number that fits into "
            "so much, by bisection.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(min=1),
            metavar="N",
            help="Trials at a time (default: as cores and memory allow).",
        ),
        click.option(
            "--band",
            is_flag=True,
            help="Run again with the other end of what had to be chosen (work on other streams, workspaces of "
            "convolutions), and print those peaks too.",
        ),
        click.option(
            "--beside-gpu", is_flag=True, help="Run so although this machine has a working GPU, which is left alone."
        ),
        click.option(
            "--report",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Write the answer as JSON too.",
        ),
        click.option("--local-world", type=click.IntRange(min=1), hidden=True),  # a trial has no launcher to say it
        *PLAIN,
        *PLACE,
    )
    for option in reversed(found):
        command = option(command)
    return command
