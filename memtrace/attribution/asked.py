"""What a request that failed was for. No block was born, so the rules are asked about one that would have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes, Replay
from memtrace.allocator.sizes import SMALL_REQUEST, round_sizes
from memtrace.attribution.categories import CONFIDENCE
from memtrace.attribution.result import Attribution
from memtrace.model import SnapshotData, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline import Timeline

Attribute = Callable[[Replay, Timeline], Attribution]
_BACKWARD = "bwd.temp"


@dataclass(frozen=True, slots=True)
class Purpose:
    """A category as blocks have one, its label ("": the category's own) and the confidence."""

    category: str
    label: str
    confidence: str


_UNKNOWN = Purpose("unknown", "", CONFIDENCE[-1])


def purposes(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    attribution: Attribution,
    events: Sequence[int],
    attribute: Attribute,
) -> list[Purpose]:
    """What the requests that failed at `events` (ascending) were for. `attribute` asks all rules about a replay.

    As the last block of the same size that the same stack made in the same phase; else as the rules say of a block born
    then and never freed. A thread without Python is autograd's in backward, and makes temporaries.
    """
    trace = data.trace(replay.device)
    found: dict[int, Purpose] = {}
    for event in events:
        stack = int(trace.stack[event])
        if stack == NOT_RECORDED:
            found[event] = _UNKNOWN
        elif not len(data.stacks.ids(stack)):
            in_backward = timeline.at(event)[0] == "backward"
            found[event] = Purpose(_BACKWARD, "", "inferred") if in_backward else _UNKNOWN
        elif (row := _made_before(replay, trace, timeline, event)) is not None:
            found[event] = _of_row(attribution, row)
    others = [event for event in events if event not in found]
    if others:
        supposed, rows = _as_if_born(replay, trace, others)
        answer = attribute(supposed, timeline)
        found |= {event: _of_row(answer, row) for event, row in zip(others, rows.tolist(), strict=True)}
    return [found[event] for event in events]


def _of_row(attribution: Attribution, row: int) -> Purpose:
    label = int(attribution.label[row])
    return Purpose(
        attribution.categories[attribution.category[row]],
        "" if label < 0 else attribution.labels[label],
        CONFIDENCE[attribution.confidence[row]],
    )


def _made_before(replay: Replay, trace: Trace, timeline: Timeline, event: int) -> int | None:
    """The last block that the stack of an event made before it, in the same phase and of the same rounded size."""
    blocks = replay.lifetimes
    rows = np.flatnonzero((blocks.stack == trace.stack[event]) & (blocks.born >= 0) & (blocks.born < event))
    rows = rows[round_sizes(blocks.requested[rows], replay.settings.divisions) == trace.size[event]]
    if len(timeline):
        phase = timeline.phase[timeline.runs(np.append(blocks.born[rows], event))]
        rows = rows[phase[:-1] == phase[-1]]
    return int(rows[-1]) if len(rows) else None


def _as_if_born(replay: Replay, trace: Trace, events: Sequence[int]) -> tuple[Replay, NDArray[np.int64]]:
    """The replay with a block born at each of these events, and the rows of these blocks."""
    blocks, born = replay.lifetimes, np.array(events, np.int64)
    place = np.searchsorted(blocks.born, born)
    size, still = trace.size[born], np.full(len(born), replay.events, np.int64)
    more: dict[str, NDArray[Any]] = {
        "address": np.zeros(len(born), np.uint64),
        "size": size,
        "requested": size,
        "born": born,
        "freed": still,
        "died": still,
        "stack": trace.stack[born],
        "stream": trace.stream[born],
        "large": size > SMALL_REQUEST,
        "span": np.full(len(born), -1, np.int32),
        "slack_bound": np.zeros(len(born), np.int64),
    }
    columns = {name: np.insert(getattr(blocks, name), place, values) for name, values in more.items()}
    return replace(replay, lifetimes=Lifetimes(**columns)), place + np.arange(len(born))
