"""Torch's recording functions over its releases, by their signatures (snapshot-format 3.1)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memtrace.record.inside import history, notes
from memtrace.record.inside.limits import events_so_far

Calls = list[dict[str, Any]]


def torch_2_0(calls: Calls) -> Callable[..., None]:
    def record(enabled: bool, record_context: Any = True, trace_alloc_max_entries: int = 1,
               trace_alloc_record_context: bool = False, device: Any = None,
               _enable_expensive_cpp: bool = False) -> None:  # fmt: skip
        calls.append(dict(locals()))

    return record


def torch_2_1(calls: Calls) -> Callable[..., None]:
    def record(enabled: Any = "all", context: Any = "all", stacks: str = "all", max_entries: int = sys.maxsize,
               device: Any = None) -> None:  # fmt: skip
        calls.append(dict(locals()))

    return record


def torch_2_14(calls: Calls) -> Callable[..., None]:
    def record(enabled: Any = "all", context: Any = "all", stacks: str = "all", max_entries: int = sys.maxsize,
               device: Any = None, clear_history: bool = False, compile_context: bool = False,
               global_record_annotations: bool = False, skip_actions: Any = None,
               record_pinned_host_memory: bool = False, record_cuda: bool = True) -> None:  # fmt: skip
        calls.append(dict(locals()))

    return record


def fake_torch(memory: Any, **parts: Any) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(memory=memory),
        _C=SimpleNamespace(**parts),
        autograd=SimpleNamespace(profiler=SimpleNamespace(record_function=None)),
    )


def test_torch_2_0_takes_a_bool_and_other_names() -> None:
    calls: Calls = []
    torch = fake_torch(SimpleNamespace(_record_memory_history=torch_2_0(calls)))
    assert history.begin(torch, 5000, "all") is None
    (call,) = calls
    assert (call["enabled"], call["trace_alloc_max_entries"], call["trace_alloc_record_context"]) == (True, 5000, True)
    assert call["_enable_expensive_cpp"]


@pytest.mark.parametrize(("release", "annotates"), [(torch_2_1, False), (torch_2_14, True)])
def test_later_releases_take_keywords(release: Any, annotates: bool) -> None:
    calls: Calls = []
    implementation = release(calls)

    def public(enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
        implementation(enabled, *args, **kwargs)

    memory = SimpleNamespace(_record_memory_history=public, _record_memory_history_impl=implementation)
    assert (history.begin(fake_torch(memory), 7000, "python") is not None) == annotates
    (call,) = calls
    assert (call["enabled"], call["context"], call["stacks"], call["max_entries"]) == ("all", "all", "python", 7000)
    assert call.get("global_record_annotations", annotates) is annotates
    history.end(fake_torch(memory))
    assert calls[1]["enabled"] is None


def stats(allocated: int) -> dict[str, Any]:
    return {
        "allocation": {"all": {"allocated": allocated, "freed": 0}},
        "segment": {"all": {"allocated": 1, "freed": 0}},
    }


def test_counters_and_snapshot_are_of_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread allocates while the first snapshot is taken: a second one is."""
    count = [0]

    def snapshot() -> str:
        count[0] += 1
        return f"snapshot {count[0]}"

    def counters(_device: int) -> dict[str, Any]:
        return stats(min(count[0], 1))

    torch = fake_torch(SimpleNamespace(_snapshot=snapshot), _cuda_getDeviceCount=lambda: 1, _cuda_getDevice=lambda: 0,
                       _cuda_memoryStats=counters)  # fmt: skip
    found, by_device, steady = history.snapshot(torch)
    assert (found, by_device[0]["allocation.all.allocated"], steady) == ("snapshot 2", 1, True)
    monkeypatch.setattr(notes, "NOTES", [])
    torch._C._cuda_memoryStats = lambda _device: (count.__setitem__(0, count[0] + 1), stats(count[0]))[1]
    assert history.snapshot(torch)[2] is False
    assert "may be of a moment later" in notes.NOTES[0]


def test_devices_that_are_not_in_use_have_no_counters() -> None:
    def counters(device: int) -> dict[str, Any]:
        if device == 2:
            raise RuntimeError("invalid device")
        return stats(1) if device == 0 else {"segment": {"all": {"allocated": 0}}}

    torch = fake_torch(None, _cuda_getDeviceCount=lambda: 3, _cuda_getDevice=lambda: 0, _cuda_memoryStats=counters)
    assert list(history.all_stats(torch)) == [0]


def test_events_are_counted_from_the_counters() -> None:
    flat = {
        "allocation.all.allocated": 10,
        "allocation.all.freed": 4,
        "segment.all.allocated": 2,
        "segment.all.freed": 1,
    }
    assert events_so_far({0: flat, 1: flat}) == 2 * (10 + 2 * 4 + 2 + 1)
