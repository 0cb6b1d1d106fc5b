"""One device's events as plain Python lists: what both replay directions loop over."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memtrace.allocator.memory_map import UNKNOWN_POOL
from memtrace.allocator.sizes import AllocatorSettings, round_sizes
from memtrace.model import Action, Trace

FREE = 1000
"""Replay-only action: freed and completed at once (a recording that skipped one of the two)."""


@dataclass(frozen=True, slots=True)
class Events:
    """`rounded` is the block size by the settings, `plain` by the default settings (multiples of 512)."""

    action: list[int]
    addr: list[int]
    size: list[int]
    stream: list[int]
    stack: list[int]
    pool: list[int] | None
    rounded: list[int]
    plain: list[int]
    settings: AllocatorSettings

    def __len__(self) -> int:
        return len(self.action)

    def pool_of(self, event: int) -> int:
        return UNKNOWN_POOL if self.pool is None else self.pool[event]


def events_of(trace: Trace, settings: AllocatorSettings) -> Events:
    """The events of a trace, ready to loop over."""
    plain = round_sizes(trace.size, (0,))
    return Events(
        action=trace.action.tolist(),
        addr=trace.addr.tolist(),
        size=trace.size.tolist(),
        stream=trace.stream.tolist(),
        stack=trace.stack.tolist(),
        pool=None if trace.pool is None else trace.pool.tolist(),
        rounded=round_sizes(trace.size, settings.divisions).tolist(),
        plain=plain.tolist(),
        settings=settings,
    )


def with_one_free(events: Events) -> Events | None:
    """The events with the one kind of free event that is there standing for both; None if both kinds are, or none.

    A recording with `skip_actions` can lack either.
    """
    kinds = {Action.FREE_REQUESTED, Action.FREE_COMPLETED}.intersection(events.action)
    if len(kinds) != 1:
        return None
    only = kinds.pop()
    return replace(events, action=[FREE if code == only else code for code in events.action])
