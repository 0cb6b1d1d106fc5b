"""`memtrace dryrun --try KEY=A,B`: a job with other values in it, one dry run each, and a table of their peaks.

Here the table is the answer, on stdout; what each job printed lies beside its recording.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace import paths
from memtrace.cli import diagnostics
from memtrace.cli.output import Column, Page
from memtrace.dryrun import trials
from memtrace.errors import DryRunError
from memtrace.io.sidecar import natural, read_json
from memtrace.units import format_bytes, plural

_OUTPUT = "output.txt"
_REPORT = "report.json"
_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Trial:
    """One combination. `fits` None: its job failed otherwise, see its folder."""

    values: Mapping[str, str]
    folder: Path
    fits: bool | None
    allocated: int | None
    reserved: int | None
    room: int | None
    holds: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What all trials have in common: the job's command and environment, our own options, and where they are kept."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    options: Sequence[str]
    folder: Path
    jobs: int | None


def run(plan: Plan, axes: Sequence[trials.Axis]) -> list[Trial]:
    """Every combination: the first alone, which shows how much memory one takes, then several at a time."""
    combinations = trials.grid(axes)
    for values in combinations:  # what has no place in the command is said before anything runs
        trials.change(plan.argv, plan.environ, values, plan.folder)
    first = _one(plan, 0, combinations[0])
    rest = list(enumerate(combinations))[1:]
    with ThreadPoolExecutor(plan.jobs or _at_a_time()) as pool:
        return [first, *pool.map(lambda item: _one(plan, *item), rest)]


def largest(plan: Plan, axes: Sequence[trials.Axis]) -> list[Trial]:
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
            return _one(plan, next(numbers), {**others, trials.MICRO_BATCH: str(batch)})

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
            {True: "yes", False: "no", None: "failed"}[one.fits],
            _bytes(one.allocated),
            _bytes(one.reserved),
            _bytes(one.room),
            one.holds,
            f"{one.seconds:.0f}",
        ]
        for one in found
    ]
    Page(color).table(columns, rows)
    for one in found:
        if one.fits is None:
            diagnostics.note(f"failed, see {paths.shown(one.folder / _OUTPUT)}")


def best(found: Sequence[Trial]) -> Iterator[str]:
    """A sentence for each combination of the other keys."""
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for one in found:
        key = tuple((key, value) for key, value in one.values.items() if key != trials.MICRO_BATCH)
        groups.setdefault(key, []).append(one)
    for key, group in groups.items():
        where = "".join(f", {name}={value}" for name, value in key)
        fitting = [int(one.values[trials.MICRO_BATCH]) for one in group if one.fits]
        if fitting:
            yield f"largest micro-batch that fits: {max(fitting)}{where}"
        elif any(one.fits is None for one in group):
            yield f"no micro-batch was seen to fit: the job failed{where}"
        else:
            yield f"not even the smallest micro-batch fits{where}"


def document(found: Sequence[Trial]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "values": dict(one.values),
            "directory": str(one.folder),
            "fits": one.fits,
            "allocated_peak_bytes": one.allocated,
            "reserved_peak_bytes": one.reserved,
            "room_bytes": one.room,
            "seconds": round(one.seconds, 1),
        }
        for one in found
    ]


def _searched(search: Any, ask: Callable[[int], Trial]) -> Iterator[Trial]:
    number = next(search)
    while True:
        trial = ask(number)
        yield trial
        try:
            number = search.send(trial.fits is True)
        except StopIteration:
            return


def _one(plan: Plan, number: int, values: Mapping[str, str]) -> Trial:
    folder = plan.folder / f"try-{number:03d}"
    folder.mkdir(parents=True)
    changed = trials.change(plan.argv, plan.environ, values, folder)
    if changed.config is not None:
        changed.config[0].write_text(changed.config[1], "utf-8")
    report = folder / _REPORT
    command = [
        sys.executable, "-m", "memtrace", "dryrun", "-o", str(folder), "--report", str(report), *plan.options,
        "--", *changed.argv,
    ]  # fmt: skip
    began = time.monotonic()
    with (folder / _OUTPUT).open("wb") as output:
        subprocess.run(  # noqa: S603 - ourselves
            command, env={**os.environ, **plan.environ, **changed.environ}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    data = read_json(report).get("data")
    row = data if isinstance(data, dict) else {}
    ranks = [one for one in row.get("ranks", []) if isinstance(one, dict)]
    paths_of = [str(one["path"]) for one in ranks if one.get("path")]
    return Trial(
        values=values,
        folder=folder,
        fits=row.get("fits"),
        allocated=max((natural(one.get("allocated_peak_bytes")) or 0 for one in ranks), default=None),
        reserved=max((natural(one.get("reserved_peak_bytes")) or 0 for one in ranks), default=None),
        room=row.get("room_bytes"),
        holds=_holds(paths_of[0]) if paths_of else "",
        seconds=time.monotonic() - began,
    )


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


def write_json(path: Path, found: Sequence[Trial], gpu: Mapping[str, Any]) -> None:
    """The answer as a file: the document of `memtrace dryrun`, with a row for each trial."""
    from memtrace._version import __version__

    content: dict[str, Any] = {"schema": "memtrace.dryrun/1", "memtrace": __version__, "snapshot": None,
               "data": {**gpu, "trials": document(found)}, "warnings": []}  # fmt: skip
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def summary(found: Sequence[Trial], folder: Path) -> str:
    """How many fit, and where everything is."""
    fitting = sum(one.fits is True for one in found)
    return f"{fitting} of {plural(len(found), 'trial')} fit; each is in {paths.shown(folder)}"
