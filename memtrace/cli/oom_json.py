"""The JSON document of `memtrace oom` (contract.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memtrace.analysis.cures import Cures
from memtrace.analysis.oom import Oom
from memtrace.api import Snapshot
from memtrace.cli import output
from memtrace.cli.blame_json import json_frame, json_row
from memtrace.model import Notice


def write(
    opened: Snapshot,
    device: int,
    answers: Sequence[Oom],
    notices: Iterable[Notice],
    tried: Cures | None,
) -> None:
    """Prints the document. `tried`: settings that might have served the last request; None of one that never was."""
    data: dict[str, Any] = {"events": (_event(opened, answer) for answer in answers)}
    if tried is not None:
        data["would_fit"] = _would_fit(tried)
    output.write_document("oom", output.snapshot_facts(opened, device), data, notices)


def _would_fit(tried: Cures) -> dict[str, Any]:
    settings = [
        {"setting": one.change.in_words(), "conf": one.change.conf(), "fits": one.serves, "oom_at_event": one.oom_event}
        for one in tried.tried
    ]
    return {"event": tried.event, "limit_bytes": tried.limit, "reason": tried.reason, "settings": settings}


def _event(opened: Snapshot, answer: Oom) -> dict[str, Any]:
    place, cache = answer.place, answer.cache
    holds = opened.blame(place.event, "allocated", "category", place.device)
    return {
        "event": place.event,
        "device": place.device,
        "stream": answer.stream,
        "time_us": place.time_us,
        "phase": place.phase,
        "step": place.step,
        "hypothetical": answer.is_hypothetical,
        "fits": answer.fits,
        "asked_bytes": answer.asked_bytes,
        "asked_by": {
            "stack": [json_frame(frame) for frame in answer.asked_by.stack],
            "category": answer.asked_by.category,
        },
        "segment_bytes": answer.segment_bytes,
        "allocated_bytes": answer.allocated_bytes,
        "reserved_bytes": answer.reserved_bytes,
        "pending_bytes": answer.pending_bytes,
        "free_bytes": cache.free,
        "largest_hole_bytes": cache.largest,
        "free_other_streams_bytes": cache.other_free,
        "largest_hole_other_streams_bytes": cache.other_largest,
        "device_free_bytes": answer.device_free_bytes,
        "capacity_bytes": answer.capacity.capacity_bytes,
        "limit_bytes": answer.capacity.limit_bytes,
        "outside_torch_bytes": answer.outside_torch_bytes,
        "joined_fits": answer.joined_fits,
        "other_streams_fit": answer.other_streams_fit,
        "device_had_room": answer.device_had_room,
        "verdict": answer.verdict,
        "retries": {"count": answer.retries.count, "bytes": answer.retries.bytes},
        "flushes": {"count": answer.flushes.count, "bytes": answer.flushes.bytes},
        "rows": [json_row(holds, row) for row in holds.rows],
    }
