"""How long one run of the simulated allocator takes, and how much memory, against a bare `pickle.load` of the file.

    python bench/simulate.py FILE.pickle[.xz] [--runs 3] [--no-reference]

Every row is a child process of its own, which says what its last part took: processor seconds without imports and
without what comes before it, and its peak memory with all that. `x load` is over `pickle.load` with garbage collection
off. The machine is shared: read ratios of one run, not seconds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TIMED = "import json, resource, sys, time; began = time.process_time()\n{part}\n"
TIMED += "took = time.process_time() - began; unit = 1 if sys.platform == 'darwin' else 1024\n"
TIMED += "print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]))"
PREPARED = """
import sys
import memtrace
from dataclasses import replace
from memtrace.allocator.simulate import requests, run
from memtrace.allocator.simulate.driver import Draw, Moments, RecordedDriver, RuledDriver
from memtrace.allocator.simulate.rules import Rules, Tie
shot = memtrace.load(sys.argv[1], cache=False)
found = shot.replay()
"""
WORK = "work = requests.workload(shot.data, found)"
RULES = WORK + "\nrules = Rules.of(found.settings, shot.data.settings, Tie.ADDRESS)\n"
RULES += "draw = Draw(0, Moments(0, 0, 0))\n"
RECORDED = "run.run(work, rules, RecordedDriver(work.recorded), native={native})"
OTHER = "run.run(work, replace(rules, expandable=not rules.expandable), RuledDriver(draw), native={native})"
LOAD = "pickle.load, gc off"
STEPS = {
    LOAD: ("import gc, pickle, sys; gc.disable()", "kept = pickle.load(open(sys.argv[1], 'rb'))"),
    "read + replay": ("import sys, memtrace", "memtrace.load(sys.argv[1], cache=False).replay()"),
    "what the program asked": (PREPARED, WORK),
    "as recorded, native": (PREPARED + RULES, RECORDED.format(native=True)),
    "as recorded, reference": (PREPARED + RULES, RECORDED.format(native=False)),
    "expandable the other way, native": (PREPARED + RULES, OTHER.format(native=True)),
    "expandable the other way, reference": (PREPARED + RULES, OTHER.format(native=False)),
}


class Cost(NamedTuple):
    """Processor seconds of the timed part; peak memory of the child in bytes."""

    cpu: float
    peak: float


def measure(step: str, path: Path) -> Cost:
    """Runs one child."""
    before, part = STEPS[step]
    code = before + "\n" + TIMED.format(part=part)
    child = subprocess.run([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, check=True)
    return Cost(*json.loads(child.stdout))


def costs(path: Path, steps: list[str], runs: int) -> dict[str, Cost]:
    """The median of each step. Interleaved, so that a slow minute of the machine hits every row."""
    found: dict[str, list[Cost]] = {step: [] for step in steps}
    for _ in range(runs):
        for step in steps:
            found[step].append(measure(step, path))
    return {
        step: Cost(*(statistics.median(column) for column in zip(*rows, strict=True))) for step, rows in found.items()
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true")
    options = parser.parse_args()
    steps = [step for step in STEPS if not (options.no_reference and step.endswith("reference"))]
    with tempfile.TemporaryDirectory() as name:
        path = options.file
        if path.suffix == ".xz":
            path = Path(name) / path.stem
            with lzma.open(options.file) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        table = costs(path, steps, options.runs)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    print(f"{'':38}{'cpu s':>8}{'x load':>8}{'peak MB':>9}")
    for step, cost in table.items():
        print(f"{step:38}{cost.cpu:8.3f}{cost.cpu / table[LOAD].cpu:8.3f}{cost.peak / 1e6:9,.0f}")


if __name__ == "__main__":
    main()
