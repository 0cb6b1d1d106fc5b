"""Which implementation replays: the native kernel where it was built, else the reference in Python.

Both give the same, to the last byte; the reference is where the rules are written down. This is the only place that
knows that there are two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from memtrace.allocator import exact, initial, sums, tolerant
from memtrace.allocator.logs import BlockColumns, ChangeLog, Run
from memtrace.allocator.memory_map import BLOCK, RANGE, MemoryMap, PrivatePools
from memtrace.allocator.result import Changes, Spans
from memtrace.allocator.stream import Events
from memtrace.model.stacks import NOT_RECORDED

try:
    from memtrace.allocator import _kernel
except ImportError:  # no C compiler when it was installed
    HAS_NATIVE = False
else:
    HAS_NATIVE = True

Forced = dict[int, int]

_SPAN = np.dtype(
    [
        ("address", np.uint64),
        ("size", np.int64),
        ("stream", np.uint64),
        ("born", np.int64),
        ("died", np.int64),
        ("pool", np.int32),
        ("stack", np.int32),
        ("large", np.bool_),
        ("expandable", np.bool_),
    ],
    align=True,
)
"""`Span` of the native kernel."""


class Kernel(NamedTuple):
    """The loops over events, blocks and changes. The first two raise ContradictionError."""

    forward_pass: Callable[[Events, MemoryMap, PrivatePools, Forced], tuple[Run, int]]
    map_before: Callable[[Events, MemoryMap], MemoryMap]
    trace_alone: Callable[[Events], tuple[Run, list[tuple[int, str]]]]
    add_lifetimes: Callable[[Any, Any, Any, Any, Any, int], None]
    add_changes: Callable[[Any, Any, Any, Any, int], None]


def kernel(native: bool | None = None) -> Kernel:
    """The native kernel or the reference; None: the native one if it is there. Raises ImportError if it is not."""
    if native and not HAS_NATIVE:
        raise ImportError("memtrace was installed without its native kernel")
    return REFERENCE if native is False or not HAS_NATIVE else NATIVE


def _forward_pass(events: Events, start: MemoryMap, private: PrivatePools, forced: Forced) -> tuple[Run, int]:
    """`exact.forward_pass`, native."""
    blocks, spans, splits, segments, large, span, ranges, last, live, revised = _kernel.forward(
        events, start, private, forced, _seed()
    )
    columns = _blocks(blocks)
    rows = _column(last, np.int32)
    order = np.argsort(columns.address[rows])
    rows = rows[order]
    used = np.zeros(len(rows), BLOCK)
    used["address"], used["size"], used["requested"] = (
        columns.address[rows],
        columns.size[rows],
        columns.requested[rows],
    )
    used["pending"], used["stack"] = order >= live, NOT_RECORDED
    run = Run(
        blocks=columns,
        spans=_spans(spans),
        splits=_changes(splits),
        segments=_changes(segments),
        owner_large=_column(large, np.bool_),
        owner_span=_column(span, np.int32),
        at_end=MemoryMap(_column(ranges, RANGE), used),
        born_at_end=columns.born[rows],
    )
    return run, revised


def _map_before(events: Events, at_end: MemoryMap) -> MemoryMap:
    """`initial.map_before`, native."""
    private = PrivatePools.of(at_end, events.settings)
    ranges, blocks = _kernel.backward(events, at_end, private, lambda: initial.PageUses(events), _seed())
    rows = _column(blocks, BLOCK)
    return MemoryMap(_column(ranges, RANGE), rows[np.argsort(rows["address"])])


def _trace_alone(events: Events) -> tuple[Run, list[tuple[int, str]]]:
    """`tolerant.replay_trace_alone`, native."""
    blocks, spans, segments, large, span, event, reason = _kernel.alone(events, _seed())
    run = Run(
        blocks=_blocks(blocks),
        spans=_spans(spans),
        splits=ChangeLog().columns(),
        segments=_changes(segments),
        owner_large=_column(large, np.bool_),
        owner_span=_column(span, np.int32),
        at_end=MemoryMap(),
        born_at_end=np.zeros(0, np.int64),
    )
    reasons = map(tolerant.REASONS.__getitem__, _column(reason, np.uint8).tolist())
    return run, list(zip(_column(event, np.int32).tolist(), reasons, strict=True))


def _blocks(columns: tuple[Any, ...]) -> BlockColumns:
    return BlockColumns(
        address=_column(columns[0], np.uint64),
        size=_column(columns[1], np.int64),
        requested=_column(columns[2], np.int64),
        born=_column(columns[3], np.int64),
        freed=_column(columns[4], np.int64),
        died=_column(columns[5], np.int64),
        owner=_column(columns[6], np.int32),
        stack=_column(columns[7], np.int32),
        stream=_column(columns[8], np.uint64),
        slack_bound=_column(columns[9], np.int64),
    )


def _spans(memory: Any) -> Spans:
    rows = _column(memory, _SPAN)
    return Spans(**{name: np.ascontiguousarray(rows[name]) for name in Spans.__slots__})


def _changes(columns: tuple[Any, Any, Any, Any]) -> Changes:
    event, count, size, large = columns
    return Changes(_column(event, np.int32), _column(count, np.int8), _column(size, np.int64), _column(large, np.bool_))


def _column(memory: Any, kind: Any) -> Any:
    """The kernel's memory as an array, not copied."""
    return np.frombuffer(memory, kind) if len(memory) else np.zeros(0, kind)


def _seed() -> int:
    """Another one for each pass: nobody can make a file whose addresses collide."""
    return int.from_bytes(os.urandom(8), "little")


REFERENCE = Kernel(
    exact.forward_pass,
    initial.map_before,
    tolerant.replay_trace_alone,
    sums.add_lifetimes,
    sums.add_changes,
)
NATIVE = (
    Kernel(_forward_pass, _map_before, _trace_alone, _kernel.add_lifetimes, _kernel.add_changes)
    if HAS_NATIVE
    else REFERENCE
)
