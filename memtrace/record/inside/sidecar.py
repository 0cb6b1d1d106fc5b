"""NAME.json: what torch, DeepSpeed and the hooks knew at a dump (schema memtrace.sidecar/1, in docs/recording.md)."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from typing import Any, Dict, List, Optional

from . import notes, process
from .version import VERSION

SCHEMA = "memtrace.sidecar/1"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def describe(recorder: Any, reason: str, taken: Dict[str, Any]) -> Dict[str, Any]:
    """The document. `taken` holds what was read with the snapshot: stats by device, and the time."""
    settings = recorder.settings
    stats = taken.get("stats", {})
    device = _main_device(stats)
    start = recorder.stats_start
    document: Dict[str, Any] = {
        "schema": SCHEMA,
        "memtrace": VERSION,
        **_versions(recorder.torch),
        "rank": process.rank() or 0,
        "local_rank": process.local_rank(),
        "world": process.world(),
        "host": process.host() if settings.plain_host else _hash(process.host()),
        "pid": os.getpid(),
        "device": _part(lambda: _device(recorder.torch, device)) if taken else None,
        "started_us": recorder.started_us,
        "dumped_us": taken.get("dumped_us"),
        "reason": reason,
        "complete": bool(taken) and not any(one.get("allocation.all.allocated") for one in start.values()),
        "first_event_us": recorder.started_us,
        "settings": {name: os.environ[name] for name in _ALLOCATOR if name in os.environ},
        "limit_bytes": _part(lambda: _limit(recorder.torch, device)) if taken else None,
        "max_entries": settings.max_entries,
        "stacks": settings.stacks,
        "threaded_backward": not recorder.hooks.single_thread,
        "simulated_world": settings.world or None,
        "stats_start": start.get(device),
        "stats": stats.get(device),
        "stats_steady": taken.get("steady"),
        "other_devices": {str(other): one for other, one in stats.items() if other != device},
        "mem_get_info": _part(lambda: list(recorder.torch.cuda.mem_get_info(device))) if taken else None,
        "nvml_process_bytes": _part(lambda: _process_bytes(recorder.torch, device)) if taken else None,
        "segments_start": recorder.segments_start,
        "steps": recorder.phases.steps_done,
        "oom": recorder.oom,
        "exception": _exception(reason),
        "phases": [one._asdict() for one in recorder.phases.so_far()],
        "phases_dropped": recorder.phases.dropped,
    }
    document.update(_deepspeed(recorder))
    document["roles"] = _part(lambda: _roles(recorder)) or []
    document["dryrun"] = None if recorder.dryrun is None else _part(recorder.dryrun.describe)
    document["argv"] = list(getattr(sys, "argv", [])) if settings.plain_paths else None
    document["notes"] = list(notes.NOTES)
    return document


def _roles(recorder: Any) -> List[Dict[str, Any]]:
    from . import roles

    return roles.collect(recorder.frameworks.engines, list(recorder.hooks.optimizers), list(recorder.roots.models))


def _deepspeed(recorder: Any) -> Dict[str, Any]:
    hooks, engines = recorder.frameworks.deepspeed, recorder.frameworks.engines
    if hooks is None or not engines:
        return {"deepspeed_config": None, "zero": None, "gathers": []}
    return {
        "deepspeed_config": _part(lambda: hooks.config(engines[0])),
        "zero": _part(lambda: hooks.zero(engines[0])),
        "gathers": _part(hooks.gathers) or [],
    }


def _part(read: Any) -> Any:
    """One part; what cannot be read is noted, and the others are written all the same."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001
        notes.note(f"a part of the sidecar is missing: {type(error).__name__}: {error}")
        return None


def _versions(torch: Any) -> Dict[str, Optional[str]]:
    def of(name: str) -> Optional[str]:
        found = getattr(sys.modules.get(name), "__version__", None)
        return None if found is None else str(found)

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "deepspeed": of("deepspeed"),
        "transformers": of("transformers"),
        "accelerate": of("accelerate"),
        "python": platform.python_version(),
        "driver": _driver(),
    }


def _driver() -> Optional[str]:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\s([0-9]+(?:\.[0-9]+)+)\s", file.readline())
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None


def _main_device(stats: Dict[int, Dict[str, int]]) -> int:
    """The device with the highest peak, which is the one shown unless another is asked for."""
    return max(stats, key=lambda one: (stats[one].get("allocated_bytes.all.peak", 0), -one), default=0)


def _device(torch: Any, index: int) -> Dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    uuid = getattr(found, "uuid", None)
    return {
        "index": index,
        "name": found.name,
        "capacity_bytes": found.total_memory,
        "uuid_hash": None if uuid is None else _hash(str(uuid)),
        "capability": f"{found.major}.{found.minor}",
    }


def _process_bytes(torch: Any, index: int) -> Optional[int]:
    from . import nvml  # only here: an interpreter may be without ctypes

    return nvml.process_bytes(torch, index)


def _limit(torch: Any, index: int) -> Optional[int]:
    """What torch itself may take (`set_per_process_memory_fraction`); None: no such limit, or this torch cannot say."""
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if fraction is None:
        return None
    share = float(fraction(index))
    return None if share >= 1.0 else int(share * torch.cuda.get_device_properties(index).total_memory)


def _exception(reason: str) -> Optional[str]:
    """The name of what ended the job. Its text may hold anything, and is not kept."""
    kind = getattr(sys, "last_type", None)
    return None if reason != "exception" or kind is None else str(getattr(kind, "__name__", kind))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
