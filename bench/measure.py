"""How long and how much memory an answer takes, against a bare `pickle.load` of the same file in the same run.

    python bench/measure.py FILE.pickle[.xz] ... [--runs 3] [--long LONG.pickle]

Every figure is a whole child process (imports included), by the operating system's accounting: processor seconds,
seconds on the clock, peak memory. `x load` is processor time over that of `pickle.load` with garbage collection off.
The machine is shared: read ratios of one run, not seconds. Several files show how the figures grow.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

LOAD = "pickle.load, gc off"
REPLAY = "read + replay"
ATTRIBUTION = "read + replay + attribution"
FIRST = "blame --peak --json, first open"
SECOND = "blame --peak --json, second open"
BLAME = "import sys; sys.argv[1:] = ['blame', '--peak', '--json', '-q', *{options}, sys.argv[1]]; "
BLAME += "from memtrace.cli import main; main()"
STEPS = {
    LOAD: "import gc, os, pickle, sys; gc.disable(); x = pickle.load(open(sys.argv[1], 'rb')); os._exit(0)",
    "pickle.load, gc on": "import os, pickle, sys; x = pickle.load(open(sys.argv[1], 'rb')); os._exit(0)",
    "import memtrace.api": "import memtrace.api",
    "read to columns": "import sys; from memtrace.io.read import read_snapshot; read_snapshot(sys.argv[1])",
    REPLAY: "import sys, memtrace; memtrace.load(sys.argv[1], cache=False).replay()",
    ATTRIBUTION: "import sys, memtrace; memtrace.load(sys.argv[1], cache=False).attribution()",
    "blame --peak --json --no-cache": BLAME.format(options=["--no-cache"]),
    FIRST: BLAME.format(options=[]),
    SECOND: BLAME.format(options=[]),
    "blame --peak --no-cache (text)": BLAME.format(options=["--no-cache"]).replace("'--json', ", ""),
}


class Cost(NamedTuple):
    """Of one child: processor seconds, seconds on the clock, peak memory in bytes."""

    cpu: float
    wall: float
    peak: float


def measure(code: str, path: Path, cache: Path) -> Cost:
    """Runs one child."""
    before = os.times()
    environment = {**os.environ, "MEMTRACE_CACHE_DIR": str(cache)}
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"exit code {child.returncode}: {code}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Cost(usage.ru_utime + usage.ru_stime, os.times().elapsed - before.elapsed, usage.ru_maxrss * unit)


def costs(path: Path, runs: int, folder: Path) -> dict[str, Cost]:
    """The median of each step. Interleaved, so that a slow minute of the machine hits every row."""
    found: dict[str, list[Cost]] = {name: [] for name in STEPS}
    for run in range(runs):
        cache = folder / f"cache-{path.name}-{run}"
        for name, code in STEPS.items():
            found[name].append(measure(code, path, cache))
        shutil.rmtree(cache, ignore_errors=True)
    return {
        name: Cost(*(statistics.median(column) for column in zip(*rows, strict=True))) for name, rows in found.items()
    }


def show(path: Path, table: dict[str, Cost]) -> None:
    """One file's table."""
    print(f"\n{path.name}: {path.stat().st_size:,} bytes")
    print(f"{'':36}{'cpu s':>8}{'wall s':>8}{'x load':>8}{'peak MB':>9}")
    for name, cost in table.items():
        print(f"{name:36}{cost.cpu:8.3f}{cost.wall:8.3f}{cost.cpu / table[LOAD].cpu:8.2f}{cost.peak / 1e6:9,.0f}")
    print(
        f"timeline and attribution add {100 * (table[ATTRIBUTION].cpu / table[REPLAY].cpu - 1):.0f} % to read + replay"
    )
    print(f"second open / first open: {table[SECOND].cpu / table[FIRST].cpu:.2f} cpu, ", end="")
    print(f"{table[SECOND].wall / table[FIRST].wall:.2f} wall")


def main() -> None:
    """Prints a table a file, and how the last compares with the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables = []
        for given in options.files:
            path = given
            if path.suffix == ".xz":
                path = folder / path.stem
                with lzma.open(given) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            tables.append((path, costs(path, options.runs, folder)))
            show(*tables[-1])
        if len(tables) > 1:
            (short, few), (long, many) = tables[0], tables[-1]
            size = long.stat().st_size / short.stat().st_size
            print(f"\n{long.name} is {size:.2f} times as long as {short.name}:")
            for step in few:
                cpu, peak = many[step].cpu / few[step].cpu, many[step].peak / few[step].peak
                print(f"{step:36}{cpu:8.2f} x cpu {peak:6.2f} x peak")


if __name__ == "__main__":
    main()
