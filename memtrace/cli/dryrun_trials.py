"""`memtrace dryrun --try KEY=A,B`: a job with other values in it, one dry run each, and a table of their peaks.

Here the table is the answer, on stdout; what each job printed lies beside its recording.
"""

from __future__ import annotations

import itertools
import os
import resource
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
    """For each combination of the other keys, the largest micro-batch that fits, by bisection: all that were run."""
    batches = next((one for one in axes if one.key == trials.MICRO_BATCH), None)
    if batches is None or not batches.is_range:
        raise DryRunError(
            "--max-gpu-memory looks for the largest micro-batch that fits, and was not told among which",
            hint="Say so: --try micro_batch=1..64",
        )
    found: list[Trial] = []
    numbers = itertools.count()
    for others in trials.grid([one for one in axes if one is not batches]):
        search = trials.bisection(int(batches.values[0]), int(batches.values[-1]))

        def ask(batch: int, others: Mapping[str, str] = others) -> Trial:
            return _one(of, next(numbers), {**others, trials.MICRO_BATCH: str(batch)})

        found += _searched(search, ask)
    return found


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
            _bytes(one.result.allocated),
            _bytes(one.result.reserved),
            _bytes(one.result.room),
            one.holds,
            f"{one.result.seconds:.0f}",
        ]
        for one in found
    ]
    Page(color).table(columns, rows)
    for one in found:
        if one.result.fits is None:
            diagnostics.note(f"failed, see {paths.shown(one.folder / dryrun_again.OUTPUT)}")


def best(found: Sequence[Trial]) -> Iterator[str]:
    """A sentence for each combination of the other keys."""
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for one in found:
        key = tuple((key, value) for key, value in one.values.items() if key != trials.MICRO_BATCH)
        groups.setdefault(key, []).append(one)
    for key, group in groups.items():
        where = "".join(f", {name}={value}" for name, value in key)
        fitting = [int(one.values[trials.MICRO_BATCH]) for one in group if one.result.fits]
        if fitting:
            yield f"largest micro-batch that fits: {max(fitting)}{where}"
        elif any(one.result.fits is None for one in group):
            yield f"no micro-batch was seen to fit: the job failed{where}"
        else:
            yield f"not even the smallest micro-batch fits{where}"


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
    result = dryrun_again.run(of.plan, folder, changed.argv, changed.environ)
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


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def summary(found: Sequence[Trial], folder: Path) -> str:
    """How many fit, and where everything is."""
    fitting = sum(one.result.fits is True for one in found)
    return f"{fitting} of {plural(len(found), 'trial')} fit; each is in {paths.shown(folder)}"
