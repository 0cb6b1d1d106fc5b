"""The events of one device, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns


class Action(IntEnum):
    """Kinds of events. Codes from `len(Action)` upwards are names this version does not know.

    Source: snapshot-format 2.6; the names in a file are these in lower case.
    """

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8
    ANNOTATE = 9


@dataclass(frozen=True, slots=True, eq=False)
class Trace(FrozenColumns):
    """Columns of equal length, one row an event.

    `size` is bytes: requested bytes of alloc and free events, segment bytes of segment events, active bytes of
    `snapshot`, the rounded request of `oom`. `time_us` is microseconds since 1970, or None before torch 2.2.
    `stack` is a stack id or `NOT_RECORDED`. `pool` indexes `SnapshotData.pools` (-1: not said; None: torch < 2.12).
    `compile_context` and `user_metadata` are string ids (-1: none; None: nowhere in the trace).
    `device_free` maps an OOM event to the bytes the driver still had.
    """

    device: int
    action: NDArray[np.uint8]
    addr: NDArray[np.uint64]
    size: NDArray[np.int64]
    stream: NDArray[np.uint64]
    stack: NDArray[np.int32]
    time_us: NDArray[np.int64] | None
    pool: NDArray[np.int32] | None
    compile_context: NDArray[np.int32] | None
    user_metadata: NDArray[np.int32] | None
    device_free: dict[int, int]

    def __len__(self) -> int:
        return len(self.action)

    def take(self, rows: NDArray[np.int64]) -> Trace:
        """The trace made of these rows, in this order."""
        place = {int(row): position for position, row in enumerate(rows.tolist())}
        return Trace(
            device=self.device,
            action=self.action[rows],
            addr=self.addr[rows],
            size=self.size[rows],
            stream=self.stream[rows],
            stack=self.stack[rows],
            time_us=None if self.time_us is None else self.time_us[rows],
            pool=None if self.pool is None else self.pool[rows],
            compile_context=None if self.compile_context is None else self.compile_context[rows],
            user_metadata=None if self.user_metadata is None else self.user_metadata[rows],
            device_free={place[event]: free for event, free in self.device_free.items() if event in place},
        )

    def head(self, count: int) -> Trace:
        """The first `count` events."""
        return self.take(np.arange(count))
