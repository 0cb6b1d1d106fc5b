"""Random programs on a GPU under many allocator settings: does the simulator come out where torch did?

    python bench/allocator_stress.py record DIRECTORY [SEEDS]    on the GPU
    python bench/allocator_stress.py compare DIRECTORY           anywhere: each program simulated under its own setting

They allocate and free on several streams, let freed blocks wait for another stream, empty the cache, use private pools,
and run out of memory under a cap, which they survive.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
_AT_ONCE = 6
_CALLS = 3000
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


def program(seed: int, cap: int, out: Path, name: str) -> None:
    """One of them, recorded."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fixtures" / "make"))
    from recording import allocator_settings, limit_memory, save, start

    start()
    if cap:
        limit_memory(cap / 1024)
    chance = random.Random(seed)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    pool = torch.cuda.MemPool()
    live: list[Any] = []
    ooms = 0
    for _ in range(_CALLS):
        draw, size = chance.random(), int(512 * 2 ** chance.uniform(0, 18.6))
        stream, other, victim = chance.choice(streams), chance.choice(streams), chance.random()
        is_private, wait = chance.random() < 0.02, chance.randrange(1, 400_000)
        if draw < 0.52 or not live:
            try:
                with torch.cuda.stream(stream):
                    if is_private and size < 4 * MIB:
                        with torch.cuda.use_mem_pool(pool):
                            live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                    else:
                        live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError:
                ooms += 1
                live = live[::2]
        elif draw < 0.98:
            tensor = live.pop(int(victim * len(live)))
            if wait < 40_000 and other is not stream:
                with torch.cuda.stream(other):
                    torch.cuda._sleep(wait * 20)
                tensor.record_stream(other)
            del tensor
        elif draw < 0.985:
            torch.cuda.empty_cache()
        elif draw < 0.99:
            live = live[::2]
    truth = {"case": "stress", "seed": seed, "cap_mib": cap, "caught": ooms, "alloc_conf": allocator_settings()}
    save(out, name, truth)


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
            command = [sys.executable, __file__, "program", str(seed), str(cap), str(out), f"{seed}.{name}"]
            running.append((f"{seed}.{name}", subprocess.Popen(command, env=environment)))
        time.sleep(0.2)


def compare(directory: Path) -> None:
    """Whether each recording comes out as recorded, with torch's counters."""
    import memtrace

    exact = count = 0
    for path in sorted(directory.glob("*.pickle.xz")):
        truth = json.loads(path.with_name(path.name.replace(".pickle.xz", ".truth.json")).read_text())
        snapshot = memtrace.load(path, cache=False)
        simulation = snapshot.simulation(limit=truth["cap_mib"] * MIB or None)
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
    if what == "program":
        program(int(rest[0]), int(rest[1]), Path(rest[2]), rest[3])
    elif what == "record":
        record(Path(rest[0]), int(rest[1]) if len(rest) > 1 else 4)
    else:
        compare(Path(rest[0]))
