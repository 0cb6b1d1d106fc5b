"""A GPU that is none, for jobs under a CPU build of torch: just enough of torch.cuda that a recording runs its course.

A job imports this after torch. `use()` is the first use of CUDA, `alloc` and `free` make events, `oom` fails as torch
does.
What is recorded is what torch would have: the recorder itself is not told that anything is false.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from typing import Any

import torch

_state: dict[str, Any] = {
    "recording": None,
    "trace": [],
    "live": {},
    "segments": [],
    "observers": [],
    "initialized": False,
    "text": "",
}
_PID = os.getpid()  # to a forked child CUDA is not initialised
_addresses = itertools.count(0x7F0000000000, 2 << 20)
_count = {"allocated": 0, "freed": 0, "peak": 0}
calls: list[str] = []


def _stats(_device: int = 0) -> dict[str, Any]:
    live = sum(_state["live"].values())
    flat = {
        "allocation": {"current": len(_state["live"]), "allocated": _count["allocated"], "freed": _count["freed"]},
        "segment": {"current": len(_state["segments"]), "allocated": len(_state["segments"]), "freed": 0},
        "allocated_bytes": {"current": live, "peak": _count["peak"]},
        "reserved_bytes": {"current": live, "peak": _count["peak"]},
        "active_bytes": {"current": live, "peak": _count["peak"]},
    }
    return {name: {"all": values} for name, values in flat.items()}


def _record(enabled: Any = "all", context: Any = "all", stacks: str = "all", max_entries: int = sys.maxsize,
            device: Any = None, clear_history: bool = False, compile_context: bool = False,
            global_record_annotations: bool = False) -> None:  # fmt: skip
    calls.append(f"record {enabled}")
    _state["recording"] = enabled
    if enabled is None:
        _state["trace"] = []


def _event(action: str, address: int, size: int) -> None:
    if _state["recording"]:
        frames = [
            {"filename": one.filename, "name": one.name, "line": one.lineno}
            for one in reversed(traceback.extract_stack()[:-2])
        ]
        _state["trace"].append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time.time_ns() // 1000,
             "compile_context": "N/A", "user_metadata": _state["text"], "frames": frames}
        )  # fmt: skip


def alloc(size: int) -> int:
    """One segment with one block."""
    use()
    address = next(_addresses)
    _event("segment_alloc", address, 2 << 20)
    _event("alloc", address, size)
    _state["live"][address] = size
    _state["segments"].append(address)
    _count["allocated"] += 1
    _count["peak"] = max(_count["peak"], sum(_state["live"].values()))
    return address


def free(address: int) -> None:
    """The block, not the segment."""
    size = _state["live"].pop(address)
    _count["freed"] += 1
    _event("free_requested", address, size)
    _event("free_completed", address, size)


def oom(size: int) -> None:
    """Fails as the allocator does: event, observers, exception."""
    _event("oom", 0, size)
    for observer in _state["observers"]:
        observer(0, size, 80 << 30, 1 << 20)
    raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")


def _snapshot(_device: Any = None) -> dict[str, Any]:
    calls.append("snapshot")
    segments = [_segment(address, _state["live"].get(address, 0)) for address in _state["segments"]]
    return {"segments": segments, "device_traces": [list(_state["trace"])], "allocator_settings": {},
            "external_annotations": []}  # fmt: skip


def _segment(address: int, size: int) -> dict[str, Any]:
    """A segment of 2 MiB with `size` bytes of it in use."""
    live = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
    free = {"address": address + size, "size": (2 << 20) - size, "requested_size": 0, "state": "inactive", "frames": []}
    return {"device": 0, "address": address, "total_size": 2 << 20, "allocated_size": size, "active_size": size,
            "requested_size": size, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": ([live] if size else []) + [free]}  # fmt: skip


def use() -> None:
    """The first use of CUDA: torch runs what was queued."""
    if not _state["initialized"]:
        for call, _traceback in list(torch.cuda._queued_calls):
            call()
        _state["initialized"] = True


class _Properties:
    name, total_memory, major, minor, uuid = "Fake H200", 80 << 30, 9, 0, "00000000-0000"


torch.cuda.memory._record_memory_history_impl = _record
torch.cuda.memory._snapshot = _snapshot
torch.cuda.get_device_properties = lambda _device=None: _Properties
torch.cuda.mem_get_info = lambda _device=None: (70 << 30, 80 << 30)
torch.cuda.get_per_process_memory_fraction = lambda _device=None: 1.0
torch._C._cuda_memoryStats = _stats
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_memorySnapshot = lambda *_arguments: _snapshot()
torch._C._cuda_attach_out_of_memory_observer = _state["observers"].append
torch._C._cuda_setMemoryMetadata = lambda text: _state.update(text=text)
torch._C._cuda_getCurrentRawStream = lambda _device=0: 0
torch.cuda.is_initialized = lambda: _state["initialized"] and os.getpid() == _PID
torch.cuda.default_generators = (torch.Generator(),)
