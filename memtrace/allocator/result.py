"""What a replay gives: every block's lifetime, the segments' extents, and the changes of the split counters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.sizes import AllocatorSettings
from memtrace.model import Notice
from memtrace.model.frozen import FrozenColumns


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes(FrozenColumns):
    """One row a block. Events are indices: `born` -1 is before the recording, `died` = events is still alive.

    `freed` is when the program gave it back, `died` when it could be used again (they differ while a stream still
    uses it). `size` and `requested` in bytes; `slack_bound`: `size` may be up to this much more (spec 5.4).
    `span` is the row of its segment in `Spans`, -1 in expandable memory (look it up by address).
    """

    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    requested: NDArray[np.int64]
    born: NDArray[np.int64]
    freed: NDArray[np.int64]
    died: NDArray[np.int64]
    stack: NDArray[np.int32]
    stream: NDArray[np.uint64]
    large: NDArray[np.bool_]
    span: NDArray[np.int32]
    slack_bound: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def __repr__(self) -> str:
        return f"Lifetimes({len(self):,} blocks: {', '.join(self.__slots__)})"

    def active_at(self, event: int) -> NDArray[np.bool_]:
        """Rows in use or pending after `event` (-1: before the first)."""
        return (self.born <= event) & (event < self.died)


@dataclass(frozen=True, slots=True, eq=False)
class Spans(FrozenColumns):
    """Memory taken from the driver: one row per extent of a segment or of an expandable range, from born to died."""

    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    large: NDArray[np.bool_]
    stream: NDArray[np.uint64]
    pool: NDArray[np.int32]
    expandable: NDArray[np.bool_]
    stack: NDArray[np.int32]
    born: NDArray[np.int64]
    died: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def alive_at(self, event: int) -> NDArray[np.bool_]:
        """Rows held after `event`."""
        return (self.born <= event) & (event < self.died)


@dataclass(frozen=True, slots=True, eq=False)
class Changes(FrozenColumns):
    """Changes of a count and of bytes at events (-1: the state before), in the large pool or the small."""

    event: NDArray[np.int32]
    count: NDArray[np.int8]
    bytes: NDArray[np.int64]
    large: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something the allocator cannot have done. `event` None: the trace against the final map."""

    event: int | None
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One device replayed. `events` is the number of events replayed (a one-event trace counts as none).

    `revised_sizes`: blocks whose size the settings at the end do not explain, so they were others before.
    `complete`: began with nothing allocated and lost nothing. `lost_events_at_least`: how many events must have
    come before, by what was there at the start.
    """

    device: int
    events: int
    complete: bool
    conflicts: tuple[Conflict, ...]
    lost_events_at_least: int
    lifetimes: Lifetimes
    spans: Spans
    splits: Changes
    segments: Changes
    settings: AllocatorSettings
    revised_sizes: int
    notices: tuple[Notice, ...]

    def __repr__(self) -> str:
        state = "complete" if self.complete else "window"
        return (
            f"Replay(device {self.device}: {self.events:,} events, {state}, {len(self.lifetimes):,} blocks, "
            f"{len(self.conflicts)} conflicts)"
        )

    def noting(self, notices: tuple[Notice, ...]) -> Replay:
        """The same replay with these notices."""
        return replace(self, notices=notices)
