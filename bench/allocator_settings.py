"""One job under many allocator settings: recorded on a GPU, and predicted from one another here.

    python bench/allocator_settings.py record DIRECTORY      on the GPU: every job under every setting
    python bench/allocator_settings.py compare DIRECTORY     anywhere: each recording predicts each of its siblings

A row of `compare` is a recorded setting and another one: the reserved peak that was predicted, the range, and what
torch itself counted under the other setting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

MAKE = Path(__file__).resolve().parent.parent / "fixtures" / "make"
GIB = 1 << 30
_AT_ONCE = 4
_LONGER = "200,960,431,777,128,1000,300,850,64,512,999,700,420,980,150,640"


class Variant(NamedTuple):
    """A setting: PYTORCH_CUDA_ALLOC_CONF, torch's cap in bytes, and what `memtrace whatif` calls it."""

    conf: str
    limit: int | None
    changes: dict[str, Any]
    more: tuple[str, ...] = ()


def _variants(limit: int, least: int, least_expandable: int) -> dict[str, Variant]:
    return {
        "plain": Variant("", None, {}),
        "expandable": Variant("expandable_segments:True", None, {"expandable_segments": True}),
        "split-64": Variant("max_split_size_mb:64", None, {"max_split_size_mb": 64}),
        "split-128": Variant("max_split_size_mb:128", None, {"max_split_size_mb": 128}),
        "split-256": Variant("max_split_size_mb:256", None, {"max_split_size_mb": 256}),
        "roundup-8": Variant("roundup_power2_divisions:8", None, {"roundup_power2_divisions": 8}),
        "segment-40": Variant("large_segment_size_mb:40", None, {"large_segment_size_mb": 40}),
        "flushed": Variant("", None, {"empty_cache_every_step": True}, ("--empty-cache",)),
        "capped": Variant("", limit, {}),
        "collected-60": Variant("garbage_collection_threshold:0.6", limit, {"garbage_collection_threshold": 0.6}),
        "collected-80": Variant("garbage_collection_threshold:0.8", limit, {"garbage_collection_threshold": 0.8}),
        "split-128-capped": Variant("max_split_size_mb:128", limit, {"max_split_size_mb": 128}),
        "expandable-capped": Variant("expandable_segments:True", limit, {"expandable_segments": True}),
        "least": Variant("", least, {}),
        "too-little": Variant("", least - (2 << 20), {}),
        "expandable-least": Variant("expandable_segments:True", least_expandable, {"expandable_segments": True}),
        "expandable-too-little": Variant(
            "expandable_segments:True", least_expandable - (2 << 20), {"expandable_segments": True}
        ),
    }


JOBS: dict[str, tuple[tuple[str, ...], dict[str, Variant]]] = {
    "ragged": ((), _variants(int(4.5 * GIB), 3_959_422_976, 3_661_627_392)),
    "longer": (("--lengths", _LONGER, "--layers", "6"), _variants(6 * GIB, 5 * GIB, 4 * GIB)),
}
"""Arguments of ragged.py, and its settings. The least limits are those that `memtrace fits` names for `plain`."""


def record(out: Path) -> None:
    """Runs every job under every setting, some at a time."""
    waiting = [(f"{job}.{name}", args, one) for job, (args, variants) in JOBS.items() for name, one in variants.items()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    out.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        for name, process in tuple(running.items()):
            if process.poll() is not None:
                del running[name]
                print(name, "done" if not process.returncode else f"exit code {process.returncode}", flush=True)
        while waiting and len(running) < _AT_ONCE:
            name, args, one = waiting.pop(0)
            command = [sys.executable, str(MAKE / "ragged.py"), "--out", str(out), "--name", name, *args, *one.more]
            if one.limit is not None:
                command += ["--limit", str(one.limit)]
            environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": one.conf} if one.conf else dict(os.environ)
            running[name] = subprocess.Popen(command, env=environment)
        time.sleep(0.2)


def compare(directory: Path) -> None:
    """Every recording predicts every other of its job."""
    import memtrace

    for job, (_, variants) in JOBS.items():
        found = {}
        for name in variants:
            path = directory / f"{job}.{name}.pickle.xz"
            if path.exists():
                truth = json.loads((directory / f"{job}.{name}.truth.json").read_text())
                found[name] = memtrace.load(path, cache=False), truth
        for name, (snapshot, _) in found.items():
            simulation = snapshot.simulation()
            print(f"{job}.{name}: {'exact' if simulation.is_exact else simulation.reason}; limit {simulation.limit}")
            if not simulation.is_exact:
                continue
            for other, (_, truth) in found.items():
                _predicted(snapshot, name, other, variants, truth)


def _predicted(snapshot: Any, name: str, other: str, variants: dict[str, Variant], truth: dict[str, Any]) -> None:
    """One line: the setting of another recording, predicted from this one, and torch's own counters under it."""
    base, wanted = variants[name], variants[other]
    neutral = {
        "expandable_segments": False,
        "max_split_size_mb": 0,
        "roundup_power2_divisions": 0,
        "garbage_collection_threshold": 0.0,
        "large_segment_size_mb": 20,
    }
    if "empty_cache_every_step" in base.changes and "empty_cache_every_step" not in wanted.changes:
        return  # the program's own calls stay in the recording
    changes = {**neutral, **wanted.changes}
    if changes.get("empty_cache_every_step") and "empty_cache_every_step" in base.changes:
        del changes["empty_cache_every_step"]
    scenario = snapshot.whatif(limit=wanted.limit or 1 << 50, **changes)
    stats, outcome = truth["stats"], scenario.prediction.outcome
    peak = stats["reserved_bytes.all.peak"]
    low, high = scenario.prediction.low, scenario.prediction.high
    inside = low <= peak <= high
    mallocs, retries = stats["num_device_alloc"], stats["num_alloc_retries"]
    failed = (scenario.oom_event is not None) == bool(truth["oom"])
    verdict = "equal" if outcome.reserved_peak == peak else "inside" if inside else "OUTSIDE"
    print(
        f"   -> {other:24} {verdict:8} {outcome.reserved_peak - peak:+14,} of {peak:,}"
        f" width {100 * (high - low) / peak:.2f} %  mallocs {outcome.device_allocs - mallocs:+} of {mallocs}"
        f"  retries {outcome.retries - retries:+} of {retries}{'' if failed else '  OUT OF MEMORY WRONG'}",
        flush=True,
    )


if __name__ == "__main__":
    {"record": record, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
