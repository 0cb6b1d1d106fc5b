"""Torch's recording of memory, over its releases: begin, look, end. Never called before torch has a CUDA device."""

from __future__ import annotations

import inspect
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import notes

_TRIES = 3
_ours = threading.local()


def is_ours() -> bool:
    """Whether a call of torch's recording functions on this thread is made by us."""
    return bool(getattr(_ours, "calling", False))


def begin(torch: Any, max_entries: int, stacks: str) -> Optional[Callable[[str], Any]]:
    """Torch records from now on. Returns what makes a named range in the trace, or None where torch keeps none."""
    record = torch.cuda.memory._record_memory_history
    record = getattr(record, "__wrapped__", record)
    implementation = getattr(torch.cuda.memory, "_record_memory_history_impl", record)
    known = inspect.signature(implementation).parameters
    wanted: Dict[str, Any]
    if "max_entries" in known:
        wanted = {"enabled": "all", "context": "all", "stacks": stacks, "max_entries": max_entries}
        if "global_record_annotations" in known:
            wanted["global_record_annotations"] = True
    else:  # torch 2.0
        wanted = {
            "enabled": True,
            "record_context": True,
            "trace_alloc_max_entries": max_entries,
            "trace_alloc_record_context": True,
            "_enable_expensive_cpp": stacks == "all",
        }
    _call(record, **wanted)
    return _ranges(torch) if "global_record_annotations" in known else None


def end(torch: Any) -> None:
    """Torch stops, and forgets what it recorded."""
    record = torch.cuda.memory._record_memory_history
    _call(getattr(record, "__wrapped__", record), None)


def _call(record: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _ours.calling = True
    try:
        record(*args, **kwargs)
    finally:
        _ours.calling = False


def snapshot(torch: Any) -> Tuple[Any, Dict[int, Dict[str, int]], bool]:
    """(snapshot, torch's counters by device, whether they are of the same moment)."""
    for _ in range(_TRIES):
        before = _turnover(all_stats(torch))
        found = torch.cuda.memory._snapshot()
        stats = all_stats(torch)
        if before == _turnover(stats):
            return found, stats, True
    notes.note("other threads allocated while the snapshot was taken: its counters may be of a moment later")
    return found, stats, False


def _turnover(by_device: Dict[int, Dict[str, int]]) -> Tuple[int, ...]:
    return tuple(
        stats.get(f"{name}.all.{total}", 0)
        for _, stats in sorted(by_device.items())
        for name in ("allocation", "segment")
        for total in ("allocated", "freed")
    )


def all_stats(torch: Any) -> Dict[int, Dict[str, int]]:
    """Flattened counters of every device in use. Not through `torch.cuda.memory_stats`, which answers nothing while
    torch is still initialising."""
    found = {}
    for device in range(torch._C._cuda_getDeviceCount()):
        try:
            stats = flatten(torch._C._cuda_memoryStats(device))
        except Exception:  # noqa: BLE001, S112 - a device that is not in use
            continue
        if stats.get("segment.all.allocated") or device == torch._C._cuda_getDevice():
            found[device] = stats
    return found


def flatten(nested: Any) -> Dict[str, int]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, torch's own form.

    >>> flatten({"segment": {"all": {"current": 3}}, "num_ooms": 0})
    {'num_ooms': 0, 'segment.all.current': 3}
    """
    flat: Dict[str, int] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    add("", nested)
    return dict(sorted(flat.items()))


def segments(torch: Any) -> List[Any]:
    """The memory map without the trace."""
    try:
        found = torch._C._cuda_memorySnapshot(None)
    except TypeError:  # torch before 2.8
        found = torch._C._cuda_memorySnapshot()
    return list(found["segments"])


def metadata_setter(torch: Any) -> Optional[Callable[[str], Any]]:
    """What labels the allocations of the calling thread, where torch has it."""
    setter: Optional[Callable[[str], Any]] = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    return setter


def _ranges(torch: Any) -> Callable[[str], Any]:
    """Named ranges through the profiler; not where a mode or a tracer would take them for the program's."""
    record_function = torch.autograd.profiler.record_function
    depth = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

    def annotate(text: str) -> Any:
        if depth() or torch.jit.is_tracing():
            return None
        opened = record_function(text)
        opened.__enter__()
        return opened

    return annotate
