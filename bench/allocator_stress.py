"""Random programs on a GPU under many allocator settings: does the simulator come out where torch did?

    python bench/allocator_stress.py record DIRECTORY [SEEDS]    on the GPU
    python bench/allocator_stress.py compare DIRECTORY           anywhere: each program simulated under its own setting

They allocate and free on several streams, let freed blocks wait for another stream, empty the cache, use private pools,
and run out of memory under a cap, which they survive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_AT_ONCE = 6
PROGRAM = Path(__file__).resolve().parent.parent / "fixtures" / "make" / "stress.py"
SETTINGS: dict[str, tuple[str, int]] = {
    "plain": ("", 0),
    "capped": ("", 1500),
    "expandable": ("expandable_segments:True", 0),
    "expandable-capped": ("expandable_segments:True", 1500),
    "split": ("max_split_size_mb:48", 0),
    "split-capped": ("max_split_size_mb:48", 1500),
    "split-rounding": ("max_split_size_mb:32,max_non_split_rounding_mb:64", 1500),
    "collected": ("garbage_collection_threshold:0.5", 1500),
    "split-collected": ("max_split_size_mb:100,garbage_collection_threshold:0.7", 1400),
    "roundup": ("roundup_power2_divisions:4", 1500),
    "roundup-table": ("roundup_power2_divisions:[1:2,16:8,256:1,>:4]", 0),
    "segment": ("large_segment_size_mb:64", 1500),
    "expandable-segment": ("expandable_segments:True,large_segment_size_mb:32", 1500),
    "expandable-split": ("expandable_segments:True,max_split_size_mb:64", 1500),
}
"""PYTORCH_CUDA_ALLOC_CONF, and torch's cap in MiB (0: none)."""


def record(out: Path, seeds: int) -> None:
    """Every seed under every setting."""
    out.mkdir(parents=True, exist_ok=True)
    waiting = [(seed, name) for seed in range(seeds) for name in SETTINGS]
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    while waiting or running:
        for one in tuple(running):
            if one[1].poll() is not None:
                running.remove(one)
                if one[1].returncode:
                    print(one[0], "exit code", one[1].returncode, flush=True)
        while waiting and len(running) < _AT_ONCE:
            seed, name = waiting.pop(0)
            conf, cap = SETTINGS[name]
            environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf} if conf else dict(os.environ)
            command = [sys.executable, str(PROGRAM), "--seed", str(seed), "--cap", str(cap), "--out", str(out)]
            command += ["--name", f"{seed}.{name}"]
            running.append((f"{seed}.{name}", subprocess.Popen(command, env=environment)))
        time.sleep(0.2)


def compare(directory: Path) -> None:
    """Whether each recording comes out as recorded, with torch's counters."""
    import memtrace

    exact = count = 0
    for path in sorted(directory.glob("*.pickle.xz")):
        truth = json.loads(path.with_name(path.name.replace(".pickle.xz", ".truth.json")).read_text())
        snapshot = memtrace.load(path, cache=False)
        simulation = snapshot.simulation(limit=truth["limit"])
        count += 1
        check = simulation.check
        if check is None or not simulation.is_exact or check.outcome is None:
            event = None if check is None else check.event
            print(f"{path.name}: {simulation.reason} (event {event})", flush=True)
            continue
        outcome, stats = check.outcome, truth["stats"]
        wrong = {
            name: (ours, stats[name])
            for name, ours in (
                ("num_alloc_retries", outcome.retries),
                ("num_ooms", outcome.ooms),
                ("num_device_alloc", outcome.device_allocs),
                ("num_device_free", outcome.device_frees),
                ("reserved_bytes.all.peak", outcome.reserved_peak),
                ("allocated_bytes.all.peak", outcome.allocated_peak),
                ("active_bytes.all.peak", outcome.active_peak),
            )
            if ours != stats[name]
        }
        exact += not wrong
        if wrong:
            print(f"{path.name}: placed as recorded, but {wrong}; limit {simulation.limit}", flush=True)
    print(f"{exact} of {count} as recorded, with every counter")


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "record":
        record(Path(rest[0]), int(rest[1]) if len(rest) > 1 else 4)
    else:
        compare(Path(rest[0]))
