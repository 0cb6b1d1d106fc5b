"""What recording costs: step times with and without `memtrace record` around the same job, in turns.

    python3 tests/gpu/overhead.py --out $OUT --wheels .whl

Each model trains with ZeRO-3 as rank 0 of 8, by means of the job's own (jobs/alone.py), in six processes: two recorded
with default options, two not, two with torch's own recording only. All start at once; then they take turns of five
steps, so that what the machine does meanwhile hits all alike. Noise is what two processes of the same kind differ by.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record_driver import HERE, Machine, ask, say

ARMS = ("off", "on", "all", "alloc", "off", "on")
"""Unrecorded, under `memtrace record`, and with nothing but torch's own recording: of all stacks, of allocations'."""
MODELS = {"gpt2": "--bs 4 --seq 512", "llama-1b": "--bs 1 --seq 512"}


def start(machine: Machine, model: str, arm: str, turn: str, options: argparse.Namespace) -> tuple[Any, Path, Path]:
    """A job that waits for its turns; where its times and its recording will be."""
    name = f"{model}-{arm}-{turn.split(':')[1]}"
    times, folder = machine.work / f"{name}.times.json", machine.recordings / name
    job = f"train_zero.py --model {model} --stage 3 --adam torch --alone 8 {MODELS[model]}"
    if machine.is_cpu:
        job = "train_zero.py --model tiny --stage 3 --adam torch --alone 8 --seq 32"
    script, *arguments = f"{job} --blocks {options.blocks} --turns {turn} --times {times}".split()
    command = [machine.python, str(HERE / "jobs" / script), *arguments]
    if arm in ("all", "alloc"):
        command += ["--own", arm]
    if arm == "on":
        command = [*machine.memtrace, "record", "-o", str(folder), "--", *command]
    log = (machine.logs / f"{name}.log").open("w")
    environment = {**machine.environment(), "MASTER_PORT": str(29800 + int(turn.split(":")[1]))}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True), times, folder


def recorded(machine: Machine, folder: Path) -> dict[str, Any]:
    """Events, bytes and dump time of one recording."""
    facts: dict[str, Any] = {"files": {path.name: path.stat().st_size for path in sorted(folder.glob("rank*"))}}
    for path in folder.glob("rank0000.pickle*"):
        code, document = ask(machine, "info", str(path))
        events = (document.get("snapshot") or {}).get("events") or 0
        facts.update(info_exit=code, events=events)
        if events:
            facts["bytes_per_event"] = round(path.stat().st_size / events, 1)
    sidecar = folder / "rank0000.json"
    if sidecar.exists():
        dumped_us = json.loads(sidecar.read_text("utf-8")).get("dumped_us")
        facts["write_s"] = round(sidecar.stat().st_mtime - dumped_us / 1e6, 2) if dumped_us else None
    log = folder / "log"
    if log.exists():
        lines = log.read_text("utf-8", "replace").splitlines()
        facts["log"] = [re.sub(r"^\S+ ", "", line)[:200] for line in lines[-12:]]
    return facts


def compare(times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians in milliseconds, what recording costs, and by how much equal processes differ."""
    medians = {arm: [statistics.median(run) * 1e3 for run in runs] for arm, runs in times.items()}
    together = {arm: statistics.median([step for run in runs for step in run]) * 1e3 for arm, runs in times.items()}
    row: dict[str, Any] = {
        "steps": {arm: [len(run) for run in runs] for arm, runs in times.items()},
        "medians_ms": {arm: [round(value, 2) for value in values] for arm, values in medians.items()},
        "fastest_ms": {arm: [round(min(run) * 1e3, 2) for run in runs] for arm, runs in times.items()},
    }
    off = together["off"]
    for arm in times:
        row[f"{arm}_percent"] = round(100 * (together[arm] / off - 1), 2)
    row["noise_percent"] = {
        arm: round(100 * (max(values) - min(values)) / off, 2) for arm, values in medians.items()
    }  # fmt: skip
    return row


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/memtrace-overhead"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--memtrace", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--blocks", type=int, default=6, help="turns of each process")
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if not options.memtrace and options.wheels is None:
        parser.error("--wheels or --memtrace")
    machine = Machine(options)
    models = [name for name in MODELS if not options.only or name in options.only.split(",")]
    plan = [(model, arm) for model in models for arm in ARMS]
    turns = machine.work / f"turns-{os.getpid()}"
    began = time.monotonic()
    jobs = [
        (model, arm, *start(machine, model, arm, f"{turns}:{index}:{len(plan)}", options))
        for index, (model, arm) in enumerate(plan)
    ]
    while machine.left() > 0 and any(process.poll() is None for _, _, process, *_ in jobs):
        time.sleep(0.1)
    for _, _, process, *_ in jobs:
        process.kill()
        process.wait()
    table: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    for model in models:
        times: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        recordings = []
        for name, arm, process, path, folder in jobs:
            if name != model:
                continue
            if process.returncode == 0 and path.exists():
                times[arm].append(json.loads(path.read_text()))
            else:
                say(model, arm, "exit", process.returncode)
            if arm == "on" and folder.is_dir():
                recordings.append(recorded(machine, folder))
        table[model] = {**(compare(times) if all(times.values()) else {"error": "no times"}), "recordings": recordings}
        say(model, json.dumps(table[model])[:1500])
    (machine.out / "overhead.json").write_text(json.dumps(table, indent=1))
    for log in sorted(machine.logs.glob("*.log")):
        if not (machine.work / f"{log.stem}.times.json").exists():
            say(log.name, log.read_text("utf-8", "replace")[-800:])


if __name__ == "__main__":
    main()
