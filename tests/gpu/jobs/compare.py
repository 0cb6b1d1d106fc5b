"""Step times of one process in several ways of recording, in turns: equal processes differ by more than recording."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Way = Callable[[], contextlib.AbstractContextManager[Any]]
WARM_STEPS, STEPS = 2, 5


def ways(recordings: Path) -> dict[str, Way]:
    """Not recorded, by torch's own call with stacks of all events, and by memtrace with the command's defaults."""
    import memtrace

    on = ("exit", "oom", "signal")
    return {
        "off": contextlib.nullcontext,
        "torch": _torch,
        "memtrace": lambda: memtrace.recording(recordings / str(time.time_ns()), on=on),
    }


def blocks(step: Callable[[], Any], ways: dict[str, Way], rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each step, in blocks of each way. Who begins changes from round to round."""
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(rounds):
        for way in order:
            with ways[way]():
                for _ in range(WARM_STEPS):
                    step()
                times[way].append([_seconds(step) for _ in range(STEPS)])
        order = order[1:] + order[:1]
    return times


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    record = torch.cuda.memory._record_memory_history
    if torch.cuda.is_available():
        record(context="all", stacks="python", max_entries=1_000_000)
    try:
        yield
    finally:
        if torch.cuda.is_available():
            record(None)


def _seconds(step: Callable[[], Any]) -> float:
    _synchronize()
    began = time.perf_counter()
    step()
    _synchronize()
    return time.perf_counter() - began


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
