"""What recording costs: step times with and without memtrace's recording, in one process, in turns.

    python3 tests/gpu/overhead.py --out $OUT --wheels .whl

Each model trains with ZeRO-3 as rank 0 of 8, by means of the job's own (jobs/alone.py): with a batch so small that the
GPU waits for Python, which is the worst case, and with one that keeps it busy. jobs/compare.py switches recording on
and off every few steps: two equal processes differ by up to 20 % on such machines, more than any recording costs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record_driver import HERE, Machine, ask, say

CASES = {
    "gpt2": "--model gpt2 --bs 4 --seq 512",
    "llama-1b": "--model llama-1b --bs 1 --seq 512",
    "gpt2-busy": "--model gpt2 --bs 64 --seq 1024",
    "llama-1b-busy": "--model llama-1b --bs 24 --seq 1024",
}


def run(machine: Machine, name: str, rounds: int) -> dict[str, Any]:
    """One case: its table, or what went wrong."""
    times, folder = machine.work / f"{name}.times.json", machine.recordings / name
    shape = "--model tiny --bs 1 --seq 32" if machine.is_cpu else CASES[name]
    job = f"train_zero.py {shape} --stage 3 --adam torch --alone 8 --rounds {rounds} --times {times}"
    script, *arguments = f"{job} --recordings {folder}".split()
    environment = machine.environment(*machine.memtrace_site())
    with (machine.logs / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [machine.python, str(HERE / "jobs" / script), *arguments],
            stdout=log, stderr=log, env=environment, timeout=max(machine.left(), 1),
        )  # fmt: skip
    if done.returncode or not times.exists():
        return {"exit": done.returncode, "log": (machine.logs / f"{name}.log").read_text("utf-8", "replace")[-800:]}
    shutil.copy(times, machine.out)  # runs can be put together: one alone says little on a noisy machine
    made = sorted(folder.glob("*/rank0000.pickle*"))
    return {**compare(json.loads(times.read_text())), "recordings": [recorded(machine, path) for path in made[-1:]]}


def recorded(machine: Machine, path: Path) -> dict[str, Any]:
    """Events and bytes of one recording, and what its log says of the time that it took."""
    _, document = ask(machine, "info", str(path))
    events = (document.get("snapshot") or {}).get("events") or 0
    log = (path.parent / "log").read_text("utf-8", "replace").splitlines()
    return {
        "events": events,
        "bytes": path.stat().st_size,
        "bytes_per_event": round(path.stat().st_size / max(events, 1), 1),
        "log": [line[-200:] for line in log if "wrote" in line],
    }


def compare(times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians and fastest steps in milliseconds, and what each way adds to those that were not recorded.

    `paired_percent` compares each block with the unrecorded one of its round: the median over rounds and that median's
    standard error. `noise_percent` is half the range in which the middle half of the unrecorded blocks' medians lies.
    """
    table: dict[str, Any] = {"steps": {way: sum(map(len, found)) for way, found in times.items()}}
    for name, choose in (("median", statistics.median), ("fastest", min)):
        chosen = {way: choose([step for block in found for step in block]) * 1e3 for way, found in times.items()}
        table[f"{name}_ms"] = {way: round(value, 2) for way, value in chosen.items()}
        table[f"{name}_percent"] = {way: round(100 * (value / chosen["off"] - 1), 1) for way, value in chosen.items()}
    blocks = [statistics.median(block) for block in times["off"]]
    table["paired_percent"] = {way: _paired(found, blocks) for way, found in times.items() if way != "off"}
    low, middle, high = statistics.quantiles(blocks, n=4) if len(blocks) > 1 else blocks * 3
    table["noise_percent"] = round(100 * (high - low) / 2 / middle, 1)
    return table


def _paired(found: list[list[float]], unrecorded: list[float]) -> list[float]:
    """What a way adds within a round: median and standard error, in percent."""
    ratios = [100 * (statistics.median(block) / other - 1) for block, other in zip(found, unrecorded, strict=True)]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return [round(statistics.median(ratios), 1), round(1.25 * spread / len(ratios) ** 0.5, 1)]


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/memtrace-overhead"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--memtrace", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of five steps of each way")
    parser.add_argument("--limit", type=float, default=420)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if not options.memtrace and options.wheels is None:
        parser.error("--wheels or --memtrace")
    machine = Machine(options)
    table = {}
    for name in [name for name in CASES if not options.only or name in options.only.split(",")]:
        if machine.left() < 40:
            say(name, "left out: no time")
            continue
        try:
            table[name] = run(machine, name, options.rounds)
        except subprocess.TimeoutExpired:
            table[name] = {"exit": "no time"}
        say(name, json.dumps(table[name]))
        (machine.out / "overhead.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
