"""One device's events: the columns that the replay goes through, and the same as lists for loops in Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.memory_map import UNKNOWN_POOL
from memtrace.allocator.sizes import AllocatorSettings, round_sizes
from memtrace.model import Action, Trace

FREE = 255
"""Replay-only action: freed and completed at once (a recording that skipped one of the two)."""


class EventLists(NamedTuple):
    """The columns of `Events` as lists. `rounded` is the block size by the settings, `plain` by the default settings
    (multiples of 512)."""

    action: list[int]
    addr: list[int]
    size: list[int]
    stream: list[int]
    stack: list[int]
    pool: list[int] | None
    rounded: list[int]
    plain: list[int]

    def pool_of(self, event: int) -> int:
        return UNKNOWN_POOL if self.pool is None else self.pool[event]


@dataclass(frozen=True)
class Events:
    """Contiguous columns of equal length, those of `Trace`."""

    action: NDArray[np.uint8]
    addr: NDArray[np.uint64]
    size: NDArray[np.int64]
    stream: NDArray[np.uint64]
    stack: NDArray[np.int32]
    pool: NDArray[np.int32] | None
    settings: AllocatorSettings

    def __len__(self) -> int:
        return len(self.action)

    @cached_property
    def lists(self) -> EventLists:
        """Made when first asked for: several hundred bytes an event."""
        return EventLists(
            action=self.action.tolist(),
            addr=self.addr.tolist(),
            size=self.size.tolist(),
            stream=self.stream.tolist(),
            stack=self.stack.tolist(),
            pool=None if self.pool is None else self.pool.tolist(),
            rounded=round_sizes(self.size, self.settings.divisions).tolist(),
            plain=round_sizes(self.size, (0,)).tolist(),
        )


def events_of(trace: Trace, settings: AllocatorSettings) -> Events:
    """The events of a trace; its columns are not copied."""
    return Events(
        action=np.ascontiguousarray(trace.action),
        addr=np.ascontiguousarray(trace.addr),
        size=np.ascontiguousarray(trace.size),
        stream=np.ascontiguousarray(trace.stream),
        stack=np.ascontiguousarray(trace.stack),
        pool=None if trace.pool is None else np.ascontiguousarray(trace.pool),
        settings=settings,
    )


def with_one_free(events: Events) -> Events | None:
    """The events with the one kind of free event that is there standing for both; None if both kinds are, or none.

    A recording with `skip_actions` can lack either.
    """
    kinds = [kind for kind in (Action.FREE_REQUESTED, Action.FREE_COMPLETED) if (events.action == kind).any()]
    if len(kinds) != 1:
        return None
    return replace(events, action=np.where(events.action == kinds[0], np.uint8(FREE), events.action))
