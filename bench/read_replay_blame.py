"""How long and how much memory an answer takes, against a bare `pickle.load` of the same file in the same run.

    python bench/read_replay_blame.py FILE.pickle[.xz] [--runs 3]

Every figure is a whole child process of its own (imports included), by the operating system's accounting; the
ratio is to `pickle.load` with garbage collection off. The machine is shared: read ratios, not seconds.
"""

from __future__ import annotations

import argparse
import lzma
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = {
    "pickle.load, gc off": "import gc, os, pickle, sys; gc.disable(); "
    "x = pickle.load(open(sys.argv[1], 'rb')); os._exit(0)",
    "pickle.load, gc on": "import os, pickle, sys; x = pickle.load(open(sys.argv[1], 'rb')); os._exit(0)",
    "read to columns": "import sys; from memtrace.io.read import read_snapshot; read_snapshot(sys.argv[1])",
    "read + replay": "import sys, memtrace; memtrace.load(sys.argv[1]).replay()",
    "memtrace blame --peak --json": "import sys; sys.argv[1:] = ['blame', '--peak', '--json', '-q', sys.argv[1]]; "
    "from memtrace.cli import main; main()",
}  # fmt: skip


def measure(code: str, path: Path) -> tuple[float, float, int]:
    """(processor seconds, wall seconds, peak memory in bytes) of one child."""
    before = os.times()
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"exit code {child.returncode}: {code}")
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_utime + usage.ru_stime, os.times().elapsed - before.elapsed, usage.ru_maxrss * unit


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path.suffix == ".xz":
            path = Path(folder) / path.stem
            with lzma.open(options.file) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        print(f"{options.file.name}: {path.stat().st_size:,} bytes uncompressed, median of {options.runs} runs")
        print(f"{'':32}{'cpu s':>8}{'wall s':>8}{'ratio':>8}{'peak MB':>9}")
        # interleaved, so that a slow minute of the machine hits every row
        results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in STEPS}
        for _ in range(options.runs):
            for name, code in STEPS.items():
                results[name].append(measure(code, path))
        base = statistics.median(cpu for cpu, _, _ in results["pickle.load, gc off"])
        for name, rows in results.items():
            cpu, wall = (statistics.median(row[column] for row in rows) for column in (0, 1))
            peak = max(row[2] for row in rows)
            print(f"{name:32}{cpu:8.2f}{wall:8.2f}{cpu / base:8.2f}{peak / 1e6:9,.0f}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
