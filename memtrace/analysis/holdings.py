"""What makes up a counter at one moment: one row a block, plus the allocator's own rows. The rows sum to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.analysis.ledger import ledger_at
from memtrace.attribution import CODE, CONFIDENCE, Attribution, Reason

NO_BLOCK = -1


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Columns of equal length. `block` is a row of `Lifetimes`, or `NO_BLOCK` for the allocator's own bytes.

    The others are as in `Attribution`; of a pending block and of the allocator's own bytes nothing decided but the
    allocator itself.
    """

    bytes: NDArray[np.int64]
    block: NDArray[np.int64]
    category: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    reason: NDArray[np.uint8]
    rule: NDArray[np.int16]
    frame: NDArray[np.int32]
    label: NDArray[np.int16]
    stack: NDArray[np.int32]
    stream: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def total(self) -> int:
        return int(self.bytes.sum())


def holdings_at(replay: Replay, attribution: Attribution, event: int, of: str) -> Holdings:
    """Who holds the bytes of counter `of` (allocated, reserved, requested, active) after `event`."""
    blocks = replay.lifetimes
    active = blocks.active_at(event)
    pending = active & (event >= blocks.freed)
    rows = np.flatnonzero(active & ~pending if of == "allocated" else active)
    size = blocks.requested[rows] if of in ("requested", "reserved") else blocks.size[rows]
    if of == "reserved":
        size = np.where(pending[rows], blocks.size[rows], size)
    waiting = pending[rows]
    certain = CONFIDENCE.index("certain")
    own = _allocator_rows(replay, event) if of == "reserved" else {}

    def column(values: NDArray[Any], of_pending: int, of_own: Sequence[int] | int) -> NDArray[Any]:
        """What is known of the blocks, then of the allocator's own rows."""
        tail = np.full(len(own), 0, values.dtype)
        tail[:] = of_own
        return np.concatenate([np.where(waiting, values.dtype.type(of_pending), values[rows]), tail])

    return Holdings(
        bytes=np.concatenate([size, np.array(list(own.values()), np.int64)]),
        block=np.concatenate([rows, np.full(len(own), NO_BLOCK, np.int64)]),
        category=column(attribution.category, CODE["alloc.pending"], [CODE[name] for name in own]),
        confidence=column(attribution.confidence, certain, certain),
        reason=column(attribution.reason, Reason.DECIDED, Reason.DECIDED),
        rule=column(attribution.rule, -1, -1),
        frame=column(attribution.frame, -1, -1),
        label=column(attribution.label, -1, -1),
        stack=np.concatenate([blocks.stack[rows], np.full(len(own), -1, np.int32)]).astype(np.int32),
        stream=np.concatenate([blocks.stream[rows], np.zeros(len(own), np.uint64)]),
    )


def _allocator_rows(replay: Replay, event: int) -> dict[str, int]:
    """The ledger's rows that belong to no block (pending blocks are blocks)."""
    ledger = ledger_at(replay, event)
    rows = {
        "alloc.rounding": ledger.rounding,
        "alloc.slack": ledger.slack,
        "alloc.stranded": ledger.stranded,
        "alloc.releasable": ledger.releasable,
    }
    return {name: size for name, size in rows.items() if size}
