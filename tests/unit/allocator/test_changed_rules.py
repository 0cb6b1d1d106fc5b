"""Traces whose allocator did not follow the settings at the snapshot (snapshot-format 5.5): explained, not refused."""

from __future__ import annotations

from typing import Any

import pytest
from builders import SnapshotBuilder

from memtrace.allocator import Replay, replay, series
from memtrace.io.parse import parse

MiB = 1 << 20
BASE = 0x7F0000000000


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, "frames": [], **more}


def freed(addr: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size), event("free_completed", addr, size)]


def segment(
    address: int, size: int, blocks: list[tuple[int, int, str]], pool: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """`blocks`: (size, requested, state)."""
    rows, at = [], address
    for block_size, requested, state in blocks:
        rows.append({"address": at, "size": block_size, "requested_size": requested, "state": state, "frames": []})
        at += block_size
    used = [row for row in rows if row["state"] != "inactive"]
    return {
        "device": 0, "address": address, "total_size": size, "stream": 0, "segment_pool_id": pool,
        "segment_type": "small" if size == 2 * MiB else "large", "is_expandable": False, "frames": [], "blocks": rows,
        "allocated_size": sum(row["size"] for row in used), "active_size": sum(row["size"] for row in used),
    }  # fmt: skip


def run(events: list[dict[str, Any]], segments: list[dict[str, Any]], **settings: Any) -> Replay:
    base = SnapshotBuilder().build()["allocator_settings"]
    raw = {"segments": segments, "device_traces": [events], "allocator_settings": {**base, **settings}}
    return replay(parse(raw, path="made", file_bytes=0), 0)


def test_a_block_split_where_the_rule_says_not_is_seen_by_what_follows_it() -> None:
    """As a CUDA graph's checkpoint restores its pool: every block of the segment, however little is left over."""
    pool = (1, 0)
    sizes = [19 * MiB + MiB // 2, MiB // 2]
    events = [
        event("segment_alloc", BASE, 20 * MiB),
        event("alloc", BASE, sizes[0]),
        event("alloc", BASE + sizes[0], sizes[1]),
        *freed(BASE + sizes[0], sizes[1]),
    ]
    found = run(
        events, [segment(BASE, 20 * MiB, [(sizes[0], sizes[0], "active_allocated"), (sizes[1], 0, "inactive")], pool)]
    )
    assert found.complete
    assert not found.conflicts
    assert series(found, "allocated_bytes")[1:].tolist() == [0, sizes[0], 20 * MiB, sizes[0], sizes[0]]
    assert series(found, "inactive_split_bytes")[1:].tolist() == [0, sizes[1], 0, 0, sizes[1]]


def test_a_pool_that_never_splits() -> None:
    """MemPool(no_split=True): 3 MiB live in a block of 20 MiB, and so did the one that is gone."""
    other = BASE + (1 << 30)
    events = [
        event("segment_alloc", BASE, 20 * MiB),
        event("alloc", BASE, 3 * MiB),
        event("segment_alloc", other, 20 * MiB),
        event("alloc", other, 4 * MiB),
        *freed(other, 4 * MiB),
    ]
    segments = [
        segment(BASE, 20 * MiB, [(20 * MiB, 3 * MiB, "active_allocated")], (0, 1)),
        segment(other, 20 * MiB, [(20 * MiB, 0, "inactive")], (0, 1)),
    ]
    found = run(events, segments)
    assert found.complete
    assert not found.conflicts
    assert series(found, "allocated_bytes").max() == 40 * MiB
    assert series(found, "inactive_split").max() == 0


def test_a_rounding_that_was_on_and_is_off_at_the_end() -> None:
    """5 MiB + 512 were rounded to 6 MiB; the next block tells."""
    size, rounded = 5 * MiB + 512, 6 * MiB
    events = [
        event("segment_alloc", BASE, 20 * MiB),
        event("alloc", BASE, size),
        event("alloc", BASE + rounded, 2 * MiB),
        *freed(BASE, size),
    ]
    blocks = [(rounded, 0, "inactive"), (2 * MiB, 2 * MiB, "active_allocated"), (12 * MiB, 0, "inactive")]
    found = run(events, [segment(BASE, 20 * MiB, blocks)])
    assert found.complete
    assert series(found, "allocated_bytes")[1:].tolist() == [0, rounded, 8 * MiB, 2 * MiB, 2 * MiB]


def test_a_rounding_that_was_off_and_is_on_at_the_end() -> None:
    size = 13 * MiB
    table = {str(1 << index): 2 for index in range(16)}
    events = [event("segment_alloc", BASE, 14 * MiB), event("alloc", BASE, size), *freed(BASE, size)]
    found = run(events, [segment(BASE, 14 * MiB, [(14 * MiB, 0, "inactive")])], roundup_power2_divisions=table)
    assert found.complete
    assert not found.conflicts
    assert series(found, "allocated_bytes").max() == 14 * MiB


def test_expandable_turned_on_after_the_segment_was_made() -> None:
    """With the setting on ordinary segments are split finely too (torch >= 2.10: in the default pool)."""
    size = 19 * MiB + MiB // 2
    events = [event("segment_alloc", BASE, 20 * MiB), event("alloc", BASE, size)]
    blocks = [(size, size, "active_allocated"), (20 * MiB - size, 0, "inactive")]
    found = run(events, [segment(BASE, 20 * MiB, blocks)], expandable_segments=True)
    assert found.complete
    assert series(found, "inactive_split_bytes")[-1] == 20 * MiB - size


def test_sizes_that_cannot_settle_end_in_a_labelled_answer() -> None:
    """A block of the final map larger than the room it had: no rule explains it, and nothing may loop."""
    events = [event("segment_alloc", BASE, 2 * MiB), event("alloc", BASE, 512), event("alloc", BASE + 512, 512)]
    found = run(events, [segment(BASE, 2 * MiB, [(2 * MiB, 512, "active_allocated")])])
    assert found.conflicts
    assert not found.complete
    assert series(found, "allocated_bytes").max() == 1024


@pytest.mark.parametrize("size_noted", [4 * MiB + 512 * 3, 4 * MiB])
def test_a_mark_settles_the_one_size_that_is_unsure(size_noted: int) -> None:
    """A large block from before the recording may hold up to 1 MiB of unsplit rest; `snapshot` events tell how much."""
    late = [
        event("snapshot", 0, size_noted),
        *freed(BASE, 4 * MiB),
    ]
    found = run(late, [segment(BASE, 20 * MiB, [(20 * MiB, 0, "inactive")])])
    assert not found.conflicts
    assert series(found, "allocated_bytes")[0] == size_noted
    wrong = run(
        [event("snapshot", 0, 6 * MiB), *freed(BASE, 4 * MiB)], [segment(BASE, 20 * MiB, [(20 * MiB, 0, "inactive")])]
    )
    assert [conflict.event for conflict in wrong.conflicts] == [0]


def test_settings_that_do_not_explain_the_sizes_are_said() -> None:
    size, rounded = 5 * MiB + 512, 6 * MiB
    events = [
        event("segment_alloc", BASE, 20 * MiB),
        event("alloc", BASE, size),
        event("alloc", BASE + rounded, 2 * MiB),
    ]
    blocks = [(rounded, size, "active_allocated"), (2 * MiB, 2 * MiB, "active_allocated"), (12 * MiB, 0, "inactive")]
    found = run(events, [segment(BASE, 20 * MiB, blocks)])
    assert "settings-changed" in {notice.code for notice in found.notices}


def test_pages_unmapped_in_a_late_recording_without_one_kind_of_free() -> None:
    """Which pool the pages were is looked up in the events, also in those of `skip_actions`."""
    events = [
        event("segment_map", BASE, 2 * MiB),
        event("alloc", BASE, 512),
        event("free_completed", BASE, 512),
        event("segment_unmap", BASE, 2 * MiB),
        event("alloc", BASE + 64 * MiB, 1024),
    ]
    late = segment(BASE + 64 * MiB, 2 * MiB, [(1024, 1024, "active_allocated"), (2 * MiB - 1024, 0, "inactive")])
    found = run(events, [late], expandable_segments=True)
    assert not found.conflicts
    assert not found.complete
    assert series(found, "allocated_bytes").tolist() == [0, 0, 512, 0, 0, 1024]


def test_a_mark_that_would_make_a_block_overlap_another_settles_nothing() -> None:
    """The block could be larger by up to 1 MiB, had there not been another one right behind it."""
    late = [
        event("snapshot", 0, 20 * MiB + MiB // 2),
        *freed(BASE + 4 * MiB, 16 * MiB),
        *freed(BASE, 4 * MiB),
    ]
    found = run(late, [segment(BASE, 20 * MiB, [(20 * MiB, 0, "inactive")])])
    assert found.lifetimes.address.tolist() == [BASE, BASE + 4 * MiB]
    assert found.lifetimes.size.tolist() == [4 * MiB, 16 * MiB]
