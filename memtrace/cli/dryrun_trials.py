"""`memtrace dryrun --try KEY=A,B`: a job with other values in it, one dry run each, and a table of their peaks.

Here the table is the answer, on stdout; what each job printed lies beside its recording.
"""

from __future__ import annotations

import itertools
import os
import resource
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace import paths
from memtrace.cli import diagnostics, dryrun_again
from memtrace.cli.output import Column, Page
from memtrace.dryrun import trials
from memtrace.errors import DryRunError
from memtrace.text import printable
from memtrace.units import format_bytes, plural

_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Trial:
    """One combination, and in which folder it was run."""

    values: Mapping[str, str]
    folder: Path
    result: dryrun_again.Result
    holds: str


@dataclass(frozen=True, slots=True)
class Trials:
    """What is run again and again, where, and how many at a time (None: as cores and memory allow)."""

    plan: dryrun_again.Plan
    folder: Path
    jobs: int | None


def run(of: Trials, axes: Sequence[trials.Axis]) -> list[Trial]:
    """Every combination: the first alone, which shows how much memory one takes, then several at a time."""
    combinations = trials.grid(axes)
    for values in combinations:  # what has no place in the command is said before anything runs
        trials.change(of.plan.argv, of.plan.environ, values, of.folder)
    first = _one(of, 0, combinations[0])
    rest = list(enumerate(combinations))[1:]
    with ThreadPoolExecutor(of.jobs or _at_a_time()) as pool:
        return [first, *pool.map(lambda item: _one(of, *item), rest)]


def largest(of: Trials, axes: Sequence[trials.Axis]) -> list[Trial]:
    """For each combination of the other keys, the largest number that fits, by bisection: all that were run."""
    numbers_of = searched(axes)
    found: list[Trial] = []
    numbers = itertools.count()
    for others in trials.grid([one for one in axes if one is not numbers_of]):
        search = trials.bisection(int(numbers_of.values[0]), int(numbers_of.values[-1]))

        def ask(number: int, others: Mapping[str, str] = others) -> Trial:
            return _one(of, next(numbers), {**others, numbers_of.key: str(number)})

        found += _searched(search, ask)
    return found


def searched(axes: Sequence[trials.Axis]) -> trials.Axis:
    """The range of which the largest number is looked for: the micro-batch's, else the only one."""
    ranges = [one for one in axes if one.is_range]
    named = [one for one in ranges if one.key == trials.MICRO_BATCH] or ranges
    if len(named) != 1:
        raise DryRunError(
            "--max-gpu-memory looks for the largest number that fits, and was not told of which range",
            hint="Say so: --try micro_batch=1..64, or with an option of the script: --try --batch-size=1..64",
        )
    return named[0]


def show(found: Sequence[Trial], *, color: str = "auto") -> None:
    """The table, on stdout."""
    keys = list(found[0].values)
    columns = [*(Column(key, right=True) for key in keys), Column("fits"), Column("peak allocated", right=True),
               Column("peak reserved", right=True), Column("to spare", right=True), Column("most of the peak"),
               Column("s", right=True)]  # fmt: skip
    rows = [
        [
            *one.values.values(),
            {True: "yes", False: "no", None: "failed"}[one.result.fits],
            _peak(one, one.result.allocated),
            _peak(one, one.result.reserved),
            "" if one.result.room is None else format_bytes(one.result.room),
            one.holds,
            f"{one.result.seconds:.0f}",
        ]
        for one in found
    ]
    Page(color).table(columns, rows)
    for one in found:
        if one.result.fits is None:
            said = printable(dryrun_again.last_line(one.folder))
            diagnostics.note(f"failed, see {paths.shown(one.folder / dryrun_again.OUTPUT)}: {said}")


def best(found: Sequence[Trial], axis: trials.Axis) -> Iterator[str]:
    """A sentence for each combination of the other keys."""
    what = "micro-batch" if axis.key == trials.MICRO_BATCH else axis.key
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for one in found:
        key = tuple((key, value) for key, value in one.values.items() if key != axis.key)
        groups.setdefault(key, []).append(one)
    for key, group in groups.items():
        where = "".join(f", {name}={value}" for name, value in key)
        fitting = [int(one.values[axis.key]) for one in group if one.result.fits]
        if fitting:
            end = ", the last of the range: larger ones may fit too" if max(fitting) == int(axis.values[-1]) else ""
            yield f"largest {what} that fits: {max(fitting)}{where}{end}"
        elif any(one.result.fits is None for one in group):
            yield f"no {what} was seen to fit: the job failed{where}"
        else:
            yield f"not even the smallest {what} fits{where}"


def document(found: Sequence[Trial]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "values": dict(one.values),
            "directory": str(one.folder),
            "fits": one.result.fits,
            "allocated_peak_bytes": one.result.allocated,
            "reserved_peak_bytes": one.result.reserved,
            "room_bytes": one.result.room,
            "seconds": round(one.result.seconds, 1),
        }
        for one in found
    ]


def _searched(search: Any, ask: Callable[[int], Trial]) -> Iterator[Trial]:
    number = next(search)
    while True:
        trial = ask(number)
        yield trial
        try:
            number = search.send(trial.result.fits is True)
        except StopIteration:
            return


def _one(of: Trials, number: int, values: Mapping[str, str]) -> Trial:
    folder = of.folder / f"try-{number:03d}"
    folder.mkdir(parents=True)
    changed = trials.change(of.plan.argv, of.plan.environ, values, folder)
    if changed.config is not None:
        changed.config[0].write_text(changed.config[1], "utf-8")
    name = " ".join(f"{key.rpartition('.')[2].lstrip('-')}={value}" for key, value in values.items())
    result = dryrun_again.run(of.plan, folder, argv=changed.argv, environ=changed.environ, name=name)
    return Trial(values, folder, result, _holds(result.recordings[0]) if result.recordings else "")


def _holds(path: str) -> str:
    """The largest category of the peak, and its share."""
    from memtrace.api import load

    blame = load(path).blame()
    top = blame.rows[0]
    return f"{100 * top.bytes // max(blame.total_bytes, 1)} % {top.category}"


def _at_a_time() -> int:
    """As many as cores and memory allow, going by the largest process so far."""
    largest_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(_available() * _MEMORY_SHARE) // max(largest_bytes, 1)))


def _available() -> int:
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _peak(one: Trial, size: int | None) -> str:
    """What did not fit got that far, and wanted more."""
    if size is None:
        return ""
    return f"> {format_bytes(size)}" if one.result.fits is False else format_bytes(size)


def summary(found: Sequence[Trial], folder: Path) -> Iterator[str]:
    """How many fit, where everything is, and what to do next."""
    fitting = [one for one in found if one.result.fits]
    yield f"{len(fitting)} of {plural(len(found), 'trial')} fit; each is in {paths.shown(folder)}"
    recorded = [one for one in fitting or found if one.result.recordings]
    if recorded:
        largest_peak = max(recorded, key=lambda one: one.result.reserved or 0)
        yield f"next:  memtrace blame --peak {shlex.quote(str(paths.shown(largest_peak.folder)))}"
