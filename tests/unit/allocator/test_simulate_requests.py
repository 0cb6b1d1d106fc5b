"""What a program asked, read off a trace: calls, and the allocator's answers apart from them (snapshot-format 6.8)."""

from __future__ import annotations

from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import snapshot_path

import memtrace
from memtrace.allocator import replay
from memtrace.allocator.simulate.requests import NO_BLOCK, Call, SegmentKind, Workload, workload
from memtrace.io.parse import parse

MiB = 1 << 20
A, B, C = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
EMPTY = "memory.py:200 empty_cache;train.py:9 main"


def of(builder: SnapshotBuilder | dict[str, Any]) -> Workload:
    raw = builder.build() if isinstance(builder, SnapshotBuilder) else builder
    data = parse(raw, path="made", file_bytes=0)
    return workload(data, replay(data, 0))


def calls(work: Workload) -> list[str]:
    return [Call(call).name for call in work.requests.call.tolist()]


def answers(work: Workload) -> list[tuple[int, str, int]]:
    """Row, kind, MiB."""
    events = work.recorded
    columns = events.row.tolist(), events.kind.tolist(), events.size.tolist()
    return [(row, SegmentKind(kind).name, size // MiB) for row, kind, size in zip(*columns, strict=True)]


def test_calls_are_in_order_and_answers_apart() -> None:
    work = of(SnapshotBuilder().alloc(A, 600).alloc(B, 5 * MiB).free(A))
    assert calls(work) == ["ALLOC", "ALLOC", "FREE_REQUESTED", "FREE_COMPLETED"]
    assert work.requests.event.tolist() == [1, 3, 4, 5]
    assert work.requests.size.tolist() == [600, 5 * MiB, 600, 600]
    assert work.requests.block.tolist() == [0, 1, 0, 0]
    assert answers(work) == [(0, "ALLOC", 2), (1, "ALLOC", 20)]
    assert (work.events, work.emptied, work.has_private_pools) == (6, 0, False)
    assert (work.address.tolist(), work.block_size.tolist()) == ([A, B], [1024, 5 * MiB])


def test_a_failure_is_a_call_of_no_block() -> None:
    work = of(SnapshotBuilder().alloc(A, 5 * MiB).oom(64 * MiB, stream=0))
    assert calls(work) == ["ALLOC", "OOM"]
    assert work.requests.block.tolist() == [0, NO_BLOCK]
    assert work.requests.size.tolist()[1] == 64 * MiB


def test_streams_are_counted_in_the_order_of_their_handles() -> None:
    high = 0x55D0_0000_1234
    work = of(SnapshotBuilder().alloc(A, 512, stream=high).alloc(B, 512, stream=7).alloc(C, 512, stream=0))
    assert work.streams.tolist() == [0, 7, high]
    assert work.requests.stream.tolist() == [2, 1, 0]
    assert work.recorded.stream.tolist() == [2, 1, 0]


def test_an_explicit_empty_cache_is_one_call() -> None:
    builder = SnapshotBuilder(context="all").alloc(A, 30 * MiB).alloc(B, 40 * MiB).free(A).free(B)
    work = of(builder.segment_free(A, EMPTY).segment_free(B, EMPTY).alloc(C, 30 * MiB))
    assert calls(work)[-2:] == ["EMPTY_CACHE", "ALLOC"]
    assert calls(work).count("EMPTY_CACHE") == 1
    row = len(work.requests) - 2
    assert answers(work)[2:] == [(row, "FREE", 30), (row, "FREE", 40), (row + 1, "ALLOC", 30)]
    assert (work.emptied, work.guessed_calls) == (1, 0)


def test_two_of_them_are_two_calls() -> None:
    builder = SnapshotBuilder(context="all").alloc(A, 30 * MiB).free(A).segment_free(A, EMPTY)
    work = of(builder.alloc(B, 30 * MiB).free(B).segment_free(B, EMPTY))
    assert (calls(work).count("EMPTY_CACHE"), work.emptied) == (2, 2)


def test_what_a_request_forces_out_is_no_call() -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).free(A).segment_free(A, "big")
    work = of(builder.segment(B, 70 * MiB, stack="big").alloc(B, 70 * MiB, stack="big"))
    assert (calls(work)[-1], work.emptied) == ("ALLOC", 0)
    row = len(work.requests) - 1
    assert answers(work)[1:] == [(row, "FREE", 30), (row, "ALLOC", 70)]


def test_nor_is_what_a_failure_forces_out() -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).free(A).segment_free(A, "big").oom(70 * MiB, stack="big")
    work = of(builder)
    assert (calls(work)[-1], work.emptied) == ("OOM", 0)
    assert answers(work)[-1] == (len(work.requests) - 1, "FREE", 30)


def test_a_call_without_a_stack_is_told_by_its_place_and_that_is_said() -> None:
    builder = SnapshotBuilder(context=None).alloc(A, 30 * MiB).free(A).segment_free(A).alloc(B, 512)
    builder.free(B).segment_free(B)
    work = of(builder)
    assert work.guessed_calls == work.emptied
    assert calls(work)[-1] == "EMPTY_CACHE"


def test_pages_given_back_are_answers_too() -> None:
    builder = SnapshotBuilder(context="all").map(A, 40 * MiB).alloc(A, 30 * MiB).free(A)
    work = of(builder.unmap(A, 40 * MiB, EMPTY))
    row = len(work.requests) - 1
    assert answers(work) == [(0, "MAP", 40), (row, "UNMAP", 40)]
    assert calls(work)[row] == "EMPTY_CACHE"


@pytest.mark.parametrize("missing", ["free_requested", "free_completed"])
def test_a_recording_without_one_kind_of_free_has_both_at_once(missing: str) -> None:
    raw = SnapshotBuilder().alloc(A, 512).alloc(A + 512, 512).free(A).build()
    events = raw["device_traces"][0]
    raw["device_traces"][0] = [event for event in events if event["action"] != missing]
    assert calls(of(raw)) == ["ALLOC", "ALLOC", "FREE"]


# ---- what was there before


def test_a_window_begins_with_ranges_and_blocks() -> None:
    builder = SnapshotBuilder().alloc(B, 5 * MiB).alloc(A, 600).alloc(A + 1024, 512).free_requested(A + 1024)
    work = of(builder.start_recording().free_completed(A + 1024).alloc(A + 1024, 512))
    start = work.start
    assert start.range_address.tolist() == [A, B]
    assert start.range_size.tolist() == [2 * MiB, 20 * MiB]
    assert start.range_large.tolist() == [False, True]
    assert start.range_expandable.tolist() == [False, False]
    assert start.block_address.tolist() == [A, A + 1024, B]
    assert start.block_size.tolist() == [1024, 512, 5 * MiB]
    assert start.block_pending.tolist() == [False, True, False]
    assert calls(work) == ["FREE_COMPLETED", "ALLOC"]
    assert work.requests.block[0] == start.block[1]


def test_an_empty_allocator_has_none() -> None:
    start = of(SnapshotBuilder().alloc(A, 512)).start
    assert (len(start.range_address), len(start.block), start.private_reserved) == (0, 0, 0)


def test_expandable_ranges_are_known_as_such() -> None:
    builder = SnapshotBuilder().map(A, 20 * MiB).alloc(A, 5 * MiB).start_recording().alloc(A + 5 * MiB, 5 * MiB)
    assert of(builder).start.range_expandable.tolist() == [True]


# ---- private pools


def private() -> SnapshotBuilder:
    builder = SnapshotBuilder(torch="2.12").alloc(A, 5 * MiB)
    return builder.segment(B, 20 * MiB, pool=(1, 0)).alloc(B, 5 * MiB + 1)


def test_private_blocks_are_calls_of_their_own() -> None:
    work = of(private().free(B))
    assert calls(work) == [
        *("ALLOC", "PRIVATE_SEGMENT", "PRIVATE_ALLOC"),
        *("PRIVATE_FREE_REQUESTED", "PRIVATE_FREE_COMPLETED"),
    ]
    assert work.requests.size.tolist()[1:3] == [20 * MiB, 5 * MiB + 512]
    assert work.is_simulated.tolist() == [True, False]
    assert work.has_private_pools
    assert answers(work) == [(0, "ALLOC", 20)]


def test_private_memory_of_before_is_counted_in_bytes() -> None:
    builder = private().alloc(B + 5 * MiB + 512, 5 * MiB).free_requested(B + 5 * MiB + 512).start_recording()
    start = of(builder.free_completed(B + 5 * MiB + 512).alloc(C, 512)).start
    assert start.range_address.tolist() == [A]
    assert (start.private_reserved, start.private_live, start.private_pending) == (20 * MiB, 5 * MiB + 512, 5 * MiB)


def test_a_private_segment_given_back_is_one_too() -> None:
    work = of(private().free(B).segment_free(B, EMPTY))
    assert calls(work)[-1] == "PRIVATE_SEGMENT_FREE"
    assert (work.emptied, len(work.recorded)) == (0, 1)


# ---- recordings


def test_a_cuda_graphs_pool_is_private() -> None:
    snapshot = memtrace.load(snapshot_path("cuda-graph"), cache=False)
    work = workload(snapshot.data, snapshot.replay())
    assert work.has_private_pools
    assert not work.is_simulated.all()
    assert len(work.requests) == work.events - len(work.recorded)


@pytest.mark.parametrize("name", ["mlp-adamw", "mlp-expandable", "oom-fragmented", "alloc-retry", "two-streams"])
def test_every_event_is_a_call_or_an_answer(name: str) -> None:
    snapshot = memtrace.load(snapshot_path(name), cache=False)
    work = workload(snapshot.data, snapshot.replay())
    own = calls(work).count("EMPTY_CACHE")
    assert len(work.requests) - own + len(work.recorded) == work.events
