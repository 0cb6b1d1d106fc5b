"""Why memory ran out: every verdict at its boundary, every field, and the real recordings against a second count."""

from __future__ import annotations

import json
import lzma
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import SnapshotBuilder
from oracle import replay_events
from recordings import FIXTURES, shared_snapshots, truth_path

import memtrace
from memtrace.allocator.releases import Total, releases_of
from memtrace.analysis.holes import holes_at
from memtrace.analysis.ledger import ledger_at
from memtrace.analysis.oom import Oom, oom_events
from memtrace.analysis.oom_words import Words
from memtrace.errors import QuestionError

MiB, GiB = 1 << 20, 1 << 30
A, B, C = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
PLENTY = 100 * GiB
SIDE = 7
PRIVATE = (0, 1)
ADAM = "/usr/lib/python3.12/site-packages/torch/optim/adam.py:178 _init_group;train.py:5 main"


@pytest.fixture
def failed(tmp_path: Path) -> Any:
    """The last request that failed in what a builder made."""

    def ask(builder: SnapshotBuilder, *, capacity: int | None = None, **sidecar: Any) -> Oom:
        return opened(tmp_path, builder, **sidecar).ooms(capacity=capacity)[-1]

    return ask


def opened(folder: Path, builder: SnapshotBuilder, **sidecar: Any) -> memtrace.Snapshot:
    path = builder.pickle(folder / "rank0000.pickle")
    beside = folder / "rank0000.json"
    beside.unlink(missing_ok=True)
    if sidecar:
        beside.write_text(json.dumps({"memtrace": "1", **sidecar}))
    return memtrace.load(path)


def two_halves(stream: int = 0, **settings: Any) -> SnapshotBuilder:
    """Two segments of 20 MiB, the second half of each free."""
    builder = SnapshotBuilder().settings(**settings) if settings else SnapshotBuilder()
    for address in (A, B):
        builder.segment(address, 20 * MiB, stream=stream).alloc(address, 10 * MiB)
    return builder


# The verdicts, each at its boundary.


@pytest.mark.parametrize(
    ("asked", "device_free", "verdict"),
    [
        (10 * MiB + 512, 0, "fragmentation"),  # a byte more than the largest hole is 512 more: requests are rounded
        (20 * MiB, 0, "fragmentation"),
        (20 * MiB, PLENTY, "fragmentation"),
        (20 * MiB + 512, 0, "lack"),
        (20 * MiB + 512, PLENTY, "limit"),
        (10 * MiB, 0, "lack"),
    ],
)
def test_fragmentation_is_when_the_pieces_together_hold_it_and_no_hole_does(
    failed: Any, asked: int, device_free: int, verdict: str
) -> None:
    answer = failed(two_halves().oom(asked, device_free))
    assert answer.verdict == verdict
    assert answer.joined_fits == (verdict == "fragmentation")
    assert (answer.cache.free, answer.cache.largest) == (20 * MiB, 10 * MiB)
    assert answer.hole_bytes == (10 * MiB if asked <= 10 * MiB else None)


@pytest.mark.parametrize(
    ("asked", "device_free", "verdict"),
    [
        (10 * MiB, 0, "other-streams"),
        (10 * MiB, PLENTY, "other-streams"),
        (10 * MiB + 512, 0, "lack"),
        (10 * MiB + 512, PLENTY, "limit"),
    ],
)
def test_other_streams_is_when_a_hole_of_another_stream_holds_it(
    failed: Any, asked: int, device_free: int, verdict: str
) -> None:
    answer = failed(two_halves(stream=SIDE).oom(asked, device_free))
    assert answer.verdict == verdict
    assert answer.other_streams_fit == (verdict == "other-streams")
    assert (answer.cache.free, answer.cache.largest) == (0, 0)
    assert (answer.cache.other_free, answer.cache.other_largest) == (20 * MiB, 10 * MiB)
    assert failed(two_halves(stream=SIDE).oom(asked, stream=SIDE)).cache.free == 20 * MiB


SEGMENTS = [
    (512, 2 * MiB),
    (1 * MiB, 2 * MiB),
    (1 * MiB + 512, 20 * MiB),
    (10 * MiB - 512, 20 * MiB),
    (10 * MiB, 10 * MiB),
    (10 * MiB + 512, 12 * MiB),
    (64 * MiB, 64 * MiB),
]


@pytest.mark.parametrize(("asked", "segment"), SEGMENTS)
def test_limit_is_when_the_driver_had_room_for_the_whole_segment(failed: Any, asked: int, segment: int) -> None:
    for short, verdict in ((0, "limit"), (1, "lack")):
        answer = failed(SnapshotBuilder().alloc(A, 40 * MiB).oom(asked, segment - short))
        assert answer.verdict == verdict
        assert answer.device_had_room == (verdict == "limit")
        assert (answer.asked_bytes, answer.segment_bytes) == (asked, segment)
        assert answer.pool == ("small" if asked <= MiB else "large")


def test_the_size_of_large_segments_can_be_set(failed: Any) -> None:
    builder = SnapshotBuilder().settings(PYTORCH_CUDA_ALLOC_CONF="large_segment_size_mb:64")
    assert failed(builder.alloc(A, 512).oom(2 * MiB, 64 * MiB)).segment_bytes == 64 * MiB
    assert failed(builder.oom(2 * MiB, 64 * MiB - 1)).device_had_room is False


def test_outside_torch_is_when_it_would_fit_without_the_others(failed: Any) -> None:
    held, segment = 40 * MiB, 64 * MiB
    builder = SnapshotBuilder().alloc(A, held).oom(segment, segment - 1)
    exact = failed(builder, capacity=held + segment)
    assert (exact.verdict, exact.outside_torch_bytes) == ("outside-torch", 1)
    less = failed(builder, capacity=held + segment - 1)
    assert (less.verdict, less.outside_torch_bytes) == ("lack", 0)
    assert failed(builder, capacity=held).outside_torch_bytes == 0  # a capacity that cannot be
    unknown = failed(builder)
    assert (unknown.verdict, unknown.outside_torch_bytes) == ("lack", None)
    noted = failed(builder, device={"index": 0, "capacity_bytes": held + segment})
    assert (noted.verdict, noted.capacity.capacity_bytes) == ("outside-torch", held + segment)
    assert failed(builder, device={"index": 1, "capacity_bytes": held + segment}).verdict == "lack"


def test_others_are_not_to_blame_where_torchs_own_cap_would_refuse_too(failed: Any) -> None:
    held, segment = 40 * MiB, 64 * MiB
    builder = SnapshotBuilder().alloc(A, held).oom(segment, segment - 1)
    device = {"index": 0, "capacity_bytes": GiB}
    assert failed(builder, device=device, limit_bytes=held + segment).verdict == "outside-torch"
    assert failed(builder, device=device, limit_bytes=held + segment - 1).verdict == "lack"


def test_the_capacity_that_is_given_beats_the_one_that_was_noted(failed: Any) -> None:
    builder = SnapshotBuilder().alloc(A, 40 * MiB).oom(64 * MiB)
    answer = failed(builder, capacity=GiB, device={"index": 0, "capacity_bytes": 2 * GiB})
    assert (answer.capacity.capacity_bytes, answer.capacity.noted_bytes) == (GiB, 2 * GiB)
    assert answer.outside_torch_bytes == GiB - 40 * MiB


# The fields.


def test_a_file_that_does_not_say_what_the_driver_had_left(failed: Any) -> None:
    answer = failed(SnapshotBuilder().alloc(A, 4 * MiB).event("oom", size=64 * MiB, stream=0), capacity=GiB)
    assert (answer.device_free_bytes, answer.device_had_room, answer.outside_torch_bytes) == (None, None, None)
    assert answer.verdict == "lack"


def test_sizes_of_the_whole_device_and_what_waits_for_a_stream(failed: Any) -> None:
    builder = SnapshotBuilder().alloc(A, 4 * MiB).alloc(B, 600).alloc(C, 30 * MiB).free_requested(C)
    answer = failed(builder.oom(64 * MiB, 5 * MiB).free_completed(C).free(A))
    assert (answer.allocated_bytes, answer.pending_bytes, answer.reserved_bytes) == (
        4 * MiB + 1024,
        30 * MiB,
        (20 + 2 + 30) * MiB,
    )
    assert (answer.cache.free, answer.device_free_bytes) == (16 * MiB, 5 * MiB)
    assert (answer.fits, answer.is_hypothetical) == (False, False)
    assert (answer.place.event, answer.place.events) == (7, 11)


def test_a_pool_has_its_own_free_memory(failed: Any) -> None:
    builder = two_halves().alloc(C, 512)
    assert failed(builder.oom(512)).cache.free == 2 * MiB - 512
    assert failed(builder.oom(MiB)).cache.largest == 2 * MiB - 512
    assert failed(builder.oom(MiB + 512)).cache.free == 20 * MiB


@pytest.mark.parametrize("torch", ["2.11", "2.12"])
def test_private_pools_never_count(failed: Any, torch: str) -> None:
    builder = SnapshotBuilder(torch=torch).segment(A, 20 * MiB, pool=PRIVATE).alloc(A, 2 * MiB, pool=PRIVATE)
    builder.segment(B, 20 * MiB, stream=SIDE, pool=PRIVATE).alloc(B, 2 * MiB, pool=PRIVATE)
    answer = failed(builder.oom(10 * MiB))
    assert (answer.cache.free, answer.cache.other_free, answer.is_private) == (0, 0, False)
    assert answer.reserved_bytes == 40 * MiB
    assert failed(builder.oom(10 * MiB, pool_id=PRIVATE)).is_private == (torch == "2.12")


def test_a_hole_ends_at_segments_and_at_blocks_that_wait(failed: Any) -> None:
    builder = SnapshotBuilder().alloc(A, 20 * MiB).alloc(A + 20 * MiB, 20 * MiB).free(A).free(A + 20 * MiB)
    assert failed(builder.oom(40 * MiB)).cache.largest == 20 * MiB
    builder = SnapshotBuilder().segment(A, 60 * MiB)
    for place in range(3):
        builder.alloc(A + place * 20 * MiB, 20 * MiB)
    builder.free(A).free(A + 40 * MiB).free_requested(A + 20 * MiB)
    answer = failed(builder.oom(40 * MiB))
    assert (answer.cache.free, answer.cache.largest) == (40 * MiB, 20 * MiB)
    assert failed(builder.free_completed(A + 20 * MiB).oom(80 * MiB)).cache.largest == 60 * MiB


def test_a_hole_of_expandable_memory_is_within_one_mapped_range(failed: Any) -> None:
    builder = SnapshotBuilder().map(A, 20 * MiB).map(A + 20 * MiB, 20 * MiB).map(A + 60 * MiB, 20 * MiB)
    builder.alloc(A, 5 * MiB)
    answer = failed(builder.oom(50 * MiB))
    assert (answer.cache.free, answer.cache.largest, answer.verdict) == (55 * MiB, 35 * MiB, "fragmentation")
    assert answer.cache.releasable == 40 * MiB


def test_a_hole_that_holds_it_and_was_not_taken_is_told(failed: Any) -> None:
    answer = failed(two_halves().oom(10 * MiB, PLENTY))
    assert (answer.verdict, answer.hole_bytes, answer.is_kept_whole) == ("limit", 10 * MiB, False)
    assert "it came free when torch had looked already" in " ".join(Words(answer).reasons())
    builder = SnapshotBuilder().settings(max_split_size=32 * MiB).alloc(A, 64 * MiB).free(A)
    kept = failed(builder.oom(20 * MiB, PLENTY))
    assert (kept.verdict, kept.hole_bytes, kept.is_kept_whole) == ("limit", 64 * MiB, True)
    assert "max_split_size keeps it from requests of this size" in " ".join(Words(kept).reasons())


def test_the_cap_is_bounded_by_what_torch_held_and_what_was_refused(failed: Any) -> None:
    builder = SnapshotBuilder().alloc(A, 60 * MiB).alloc(B, 20 * MiB).free(B).segment_free(B).oom(64 * MiB, PLENTY)
    answer = failed(builder)
    assert (answer.cap_at_least_bytes, answer.cap_below_bytes) == (80 * MiB, 124 * MiB)
    noted = failed(builder, device={"index": 0, "capacity_bytes": PLENTY}, limit_bytes=100 * MiB)
    assert (noted.capacity.limit_bytes, noted.cap_at_least_bytes) == (100 * MiB, None)
    pages = SnapshotBuilder().map(A, 20 * MiB).alloc(A, 12 * MiB).oom(64 * MiB, PLENTY)
    assert (failed(pages).cap_at_least_bytes, failed(pages).cap_below_bytes) == (None, 84 * MiB)
    assert "It is less than 84.00 MiB, which was refused." in " ".join(Words(failed(pages)).reasons())
    moved = failed(SnapshotBuilder().alloc(A, 90 * MiB).free(A).segment_free(A).oom(64 * MiB, PLENTY))
    assert (moved.verdict, moved.cap_at_least_bytes, moved.cap_below_bytes) == ("limit", None, None)


@pytest.mark.parametrize(
    ("sidecar", "limit"),
    [
        ({"limit_bytes": 5 * GiB}, 5 * GiB),
        ({"limit_bytes": None, "oom": {"device": 0, "total_bytes": 6 * GiB}}, 6 * GiB),
        ({"limit_bytes": None, "oom": {"device": 0, "total_bytes": 8 * GiB}}, None),
        ({"limit_bytes": None, "oom": {"device": 1, "total_bytes": 6 * GiB}}, None),
        ({"limit_bytes": "much", "oom": ["?"], "mem_get_info": 3}, None),
    ],
)
def test_torchs_own_cap_is_what_the_recorder_noted(failed: Any, sidecar: dict[str, Any], limit: int | None) -> None:
    device = {"index": 0, "capacity_bytes": 8 * GiB}
    answer = failed(SnapshotBuilder().alloc(A, MiB).oom(64 * MiB, PLENTY), device=device, **sidecar)
    assert answer.capacity.limit_bytes == limit


def test_torchs_own_cap_as_a_fraction_in_the_settings(failed: Any) -> None:
    builder = SnapshotBuilder().settings(PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.25")
    builder.alloc(A, MiB).oom(64 * MiB, PLENTY)
    assert failed(builder).capacity.limit_bytes is None
    assert failed(builder, capacity=8 * GiB).capacity.limit_bytes == 2 * GiB


# Who asked.


def test_a_request_is_what_its_stack_made_before(failed: Any) -> None:
    builder = SnapshotBuilder().alloc(A, 4 * MiB, stack=ADAM).alloc(B, 64 * MiB)
    answer = failed(builder.oom(4 * MiB, stack=ADAM))
    assert answer.asked_by.category == "optim.state"
    assert [frame.name for frame in answer.asked_by.stack] == ["_init_group", "main"]


def test_a_request_of_a_stack_that_made_nothing_is_what_the_rules_say(failed: Any) -> None:
    answer = failed(SnapshotBuilder().alloc(A, 4 * MiB, stack="train.py:1 main").oom(4 * MiB, stack=ADAM))
    assert answer.asked_by.category == "optim.state"
    unknown = failed(SnapshotBuilder().alloc(A, 4 * MiB).oom(8 * MiB, stack="train.py:9 other"))
    assert (unknown.asked_by.category, len(unknown.asked_by.stack)) == ("unknown", 1)


def test_what_is_asked_of_the_rules_changes_no_block(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().alloc(A, 4 * MiB).oom(4 * MiB, stack=ADAM).oom(8 * MiB, stack=ADAM))
    before = snapshot.attribution().category.tolist()
    assert [one.asked_by.category for one in snapshot.ooms()] == ["optim.state"] * 2
    assert snapshot.attribution().category.tolist() == before
    assert len(snapshot.replay().lifetimes) == 1


def test_the_users_rules_are_asked(tmp_path: Path) -> None:
    rules = tmp_path / "own.toml"
    rules.write_text('[[rule]]\ncategory = "act.moe"\nfile = "moe.py"\nmin_size = "8MiB"\n', "utf-8")
    builder = SnapshotBuilder().oom(8 * MiB, stack="moe.py:1 route").oom(4 * MiB, stack="moe.py:1 route")
    found = memtrace.load(builder.pickle(tmp_path / "x.pickle"), rules=str(rules)).ooms()
    assert [one.asked_by.category for one in found] == ["act.moe", "unknown"]


def test_a_thread_without_python_asks_for_a_temporary_in_backward_only(failed: Any) -> None:
    loss = "/x/site-packages/torch/autograd/graph.py:865 _engine_run_backward;train.py:3 main"
    forward = "/x/site-packages/torch/nn/modules/linear.py:134 forward;train.py:2 main"
    builder = SnapshotBuilder().alloc(A, 30 * MiB, stack=forward).alloc(B, 30 * MiB, stack=loss)
    answer = failed(builder.alloc(C, 30 * MiB, stack="").oom(64 * MiB, stack=""))
    assert (answer.place.phase, answer.asked_by.category, answer.asked_by.stack) == ("backward", "bwd.temp", ())
    assert failed(SnapshotBuilder().alloc(A, MiB).oom(64 * MiB, stack="")).asked_by.category == "unknown"
    off = failed(SnapshotBuilder(context=None).alloc(A, MiB).oom(64 * MiB))
    assert (off.asked_by.category, off.asked_by.stack) == ("unknown", ())


# What was given back to the driver before.

EMPTY = "/x/site-packages/torch/cuda/memory.py:200 empty_cache;train.py:7 main"


def test_segments_given_back_for_a_failed_allocation_and_by_the_program(failed: Any) -> None:
    builder = SnapshotBuilder(context="all")
    for place in range(6):
        builder.alloc(A + place * GiB, 30 * MiB)
    for place in range(6):
        builder.free(A + place * GiB)
    builder.segment_free(A, stack=EMPTY).segment_free(A + GiB, stack=EMPTY)
    builder.segment_free(A + 2 * GiB, stack="f").alloc(B, 40 * MiB, stack="f")
    builder.segment_free(A + 3 * GiB, stack="f").segment_free(A + 4 * GiB, stack="f").oom(300 * MiB, stack="f")
    answer = failed(builder.segment_free(A + 5 * GiB, stack="f").oom(1 << 40, stack="f"))
    assert (answer.retries, answer.flushes) == (Total(3, 120 * MiB), Total(1, 60 * MiB))
    assert Words(answer).before() == (
        "Before it, cached segments were given back to the driver at least 3 times (120.00 MiB) because an allocation "
        "had failed, at least once (60.00 MiB) by empty_cache()."
    )


def test_the_first_of_two_failures_has_what_came_before_it(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).free(A).oom(64 * MiB).segment_free(A, stack="train").oom(64 * MiB)
    first, last = opened(tmp_path, builder).ooms()
    assert (first.retries.count, last.retries) == (0, Total(1, 30 * MiB))


def test_a_release_followed_by_something_else_is_the_programs(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB, stack="f").alloc(B, 512).free(A).segment_free(A, stack="f").free(B)
    snapshot = opened(tmp_path, builder)
    found = releases_of(snapshot.data.trace(0), snapshot.data.stacks)
    assert (found.event.tolist(), found.bytes.tolist(), found.forced.tolist()) == ([6], [30 * MiB], [False])


def test_without_stacks_a_release_is_forced_where_new_memory_is_taken_next(tmp_path: Path) -> None:
    def forced(last: SnapshotBuilder) -> list[bool]:
        snapshot = opened(tmp_path, last)
        return releases_of(snapshot.data.trace(0), snapshot.data.stacks).forced.tolist()

    def begun() -> SnapshotBuilder:
        start = SnapshotBuilder(context=None).segment(B, 20 * MiB).alloc(A, 30 * MiB)
        return start.free(A).segment_free(A)

    assert forced(begun().alloc(C, 40 * MiB)) == [True]
    assert forced(begun().oom(1 << 40)) == [True]
    assert forced(begun().alloc(B, 2 * MiB)) == [False]


def test_a_trace_without_releases(failed: Any) -> None:
    answer = failed(SnapshotBuilder().alloc(A, 512).oom(MiB))
    assert (answer.retries, answer.flushes) == (Total(0, 0), Total(0, 0))
    assert Words(answer).before() == "Before it, no cached segment was given back to the driver."


# Requests that are only supposed.


def test_a_supposed_request_fits_in_a_hole_to_the_byte(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, two_halves())
    fits = snapshot.would_fit(10 * MiB - 100)
    assert (fits.fits, fits.hole_bytes, fits.asked_bytes, fits.verdict) == (True, 10 * MiB, 10 * MiB, None)
    assert (fits.is_hypothetical, fits.asked_by.stack, fits.asked_by.category) == (True, (), "unknown")
    unknown = snapshot.would_fit(10 * MiB + 1)
    assert (unknown.fits, unknown.hole_bytes, unknown.verdict) == (None, None, None)
    assert (unknown.asked_bytes, unknown.segment_bytes, unknown.device_had_room) == (10 * MiB + 512, 12 * MiB, None)


def test_a_supposed_request_is_rounded_as_the_file_says(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().settings(roundup_power2_divisions=4).alloc(A, 4 * MiB))
    assert snapshot.would_fit(33 * MiB).asked_bytes == 40 * MiB


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_a_supposed_request_needs_room_in_the_device(tmp_path: Path, spare: int, fits: bool) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().alloc(A, 40 * MiB))
    answer = snapshot.would_fit(64 * MiB, capacity=(40 + 64) * MiB + spare)
    assert (answer.fits, answer.device_had_room, answer.verdict) == (fits, fits, None if fits else "lack")
    assert answer.device_free_bytes == 64 * MiB + spare
    assert answer.outside_torch_bytes is None


@pytest.mark.parametrize(("spare", "verdict"), [(0, None), (-1, "limit")])
def test_a_supposed_request_needs_room_under_the_cap(tmp_path: Path, spare: int, verdict: str | None) -> None:
    device = {"index": 0, "capacity_bytes": PLENTY}
    snapshot = opened(tmp_path, SnapshotBuilder().alloc(A, 40 * MiB), device=device, limit_bytes=104 * MiB + spare)
    answer = snapshot.would_fit(64 * MiB)
    assert (answer.fits, answer.verdict) == (verdict is None, verdict)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_before_a_supposed_request_fails_free_segments_go_back(tmp_path: Path, spare: int, fits: bool) -> None:
    builder = SnapshotBuilder().alloc(A, 40 * MiB).alloc(B, 30 * MiB).free(B).alloc(C, 600, stream=SIDE).free(C)
    answer = opened(tmp_path, builder).would_fit(64 * MiB, "end", capacity=(40 + 64) * MiB + spare)
    assert (answer.cache.releasable, answer.fits) == (32 * MiB, fits)
    assert answer.verdict == (None if fits else "lack")


def test_a_device_smaller_than_what_torch_held_has_no_room_even_after_free_segments_went_back(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().alloc(A, 40 * MiB).alloc(B, 30 * MiB).free(B))
    answer = snapshot.would_fit(20 * MiB + 512, "end", capacity=60 * MiB)
    assert (answer.fits, answer.cache.largest) == (True, 30 * MiB)
    answer = snapshot.would_fit(32 * MiB, "end", capacity=60 * MiB)
    assert (answer.fits, answer.device_free_bytes, answer.verdict) == (False, 0, "lack")
    assert snapshot.would_fit(32 * MiB, "end", capacity=72 * MiB).fits is True


def test_a_supposed_request_that_fails_gets_the_same_verdicts(tmp_path: Path) -> None:
    assert opened(tmp_path, two_halves()).would_fit(20 * MiB, capacity=40 * MiB).verdict == "fragmentation"
    other = opened(tmp_path, two_halves(stream=SIDE))
    assert other.would_fit(10 * MiB, capacity=40 * MiB).verdict == "other-streams"
    device = {"index": 0, "capacity_bytes": GiB}
    stats = {"reserved_bytes.all.current": 40 * MiB}
    beside = opened(tmp_path, two_halves(), device=device, mem_get_info=[64 * MiB - 1, GiB], stats=stats)
    answer = beside.would_fit(64 * MiB)
    assert (answer.verdict, answer.outside_torch_bytes) == ("outside-torch", GiB - 104 * MiB + 1)
    assert answer.device_free_bytes == 64 * MiB - 1
    assert beside.would_fit(20 * MiB + 512).fits is True


def test_what_others_held_is_known_from_a_request_that_failed(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().alloc(A, 40 * MiB).oom(GiB, 60 * MiB).alloc(B, 10 * MiB))
    answer = snapshot.would_fit(52 * MiB, "peak", capacity=GiB)
    assert answer.outside_torch_bytes == GiB - 100 * MiB
    assert (answer.device_free_bytes, answer.verdict) == (50 * MiB, "outside-torch")


def test_a_block_kept_whole_is_no_hole_for_a_supposed_request(tmp_path: Path) -> None:
    builder = SnapshotBuilder().settings(max_split_size=32 * MiB).alloc(A, 64 * MiB).free(A)
    snapshot = opened(tmp_path, builder)
    answer = snapshot.would_fit(20 * MiB, "end")
    assert (answer.is_kept_whole, answer.fits) == (True, None)
    assert snapshot.would_fit(44 * MiB + 512, "end").fits is True
    assert snapshot.would_fit(44 * MiB, "end").is_kept_whole  # 20 MiB and more would be left over


@pytest.mark.parametrize("size", [0, -1, 1 << 60])
def test_a_size_that_says_nothing_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(QuestionError):
        opened(tmp_path, SnapshotBuilder().alloc(A, 512)).would_fit(size)


def test_an_empty_trace_can_be_asked_at_its_end(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().alloc(A, 4 * MiB).start_recording())
    assert snapshot.ooms() == ()
    answer = snapshot.would_fit(16 * MiB, "end")
    assert (answer.place.event, answer.fits) == (-1, True)


# Real recordings, counted a second time from the raw events.

EXPECTED = {
    "oom": ("limit", 100 * MiB, 100 * MiB),
    "oom-fragmented": ("fragmentation", 1400 * MiB, 1400 * MiB),
    "oom-memory-outside-torch": ("outside-torch", 64 * MiB, 64 * MiB),
    "gpt2-zero3-oom": ("other-streams", 4_720_128, 20 * MiB),
    "llama-oom-forward": ("fragmentation", 44 * MiB, 44 * MiB),
}
SHARED = [path for path, _ in shared_snapshots() if path.name.removesuffix(".pickle.xz") in EXPECTED]
RECORDED = sorted({*(FIXTURES / f"{name}.pickle.xz" for name in EXPECTED), *SHARED})
H200 = 150_109_880_320


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_real_recordings_field_by_field(path: Path) -> None:
    name = path.name.removesuffix(".pickle.xz")
    verdict, asked, segment = EXPECTED[name]
    truth = json.loads(truth_path(name).read_text("utf-8"))
    with lzma.open(path) as file:
        raw = pickle.load(file)
    events = raw["device_traces"][0]
    at = next(index for index, event in enumerate(events) if event["action"] == "oom")
    event, state = events[at], replay_events(events[: at + 1], raw["allocator_settings"])
    pool = "small" if asked <= MiB else "large"
    blocks = [block for segment in state.segments() for block in segment["blocks"]]
    own, others = [
        [
            block["size"]
            for block in blocks
            if block["state"] == "free"
            and block["segment"]["pool"] == pool
            and (block["segment"]["stream"] == event["stream"]) is is_own
        ]
        for is_own in (True, False)
    ]
    reserved = sum(segment["total_size"] for segment in state.segments())

    (answer,) = memtrace.load(path).ooms(capacity=H200)
    assert (answer.place.device, answer.place.event, answer.stream) == (0, at, event["stream"])
    assert (answer.asked_bytes, answer.segment_bytes) == (event["size"], segment) == (asked, segment)
    assert answer.allocated_bytes == sum(block["size"] for block in blocks if block["state"] == "live")
    assert answer.pending_bytes == sum(block["size"] for block in blocks if block["state"] == "pending") == 0
    assert answer.reserved_bytes == reserved
    assert (answer.cache.free, answer.cache.largest) == (sum(own), max(own, default=0))
    assert (answer.cache.other_free, answer.cache.other_largest) == (sum(others), max(others, default=0))
    assert answer.device_free_bytes == event["device_free"]
    assert (answer.capacity.capacity_bytes, answer.capacity.limit_bytes) == (H200, None)
    assert answer.outside_torch_bytes == H200 - event["device_free"] - reserved
    assert answer.joined_fits == (max(own, default=0) < asked <= sum(own))
    assert answer.other_streams_fit == (max(others, default=0) >= asked)
    assert answer.device_had_room == (event["device_free"] >= segment)
    assert answer.verdict == verdict
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in event["frames"]]
    assert [tuple(frame) for frame in answer.asked_by.stack] == frames
    _agrees_with_torchs_words(truth["oom"], answer)
    if answer.cap_at_least_bytes is not None and truth.get("limit"):
        assert answer.cap_at_least_bytes <= truth["limit"] < (answer.cap_below_bytes or 0)


def _agrees_with_torchs_words(text: str, answer: Oom) -> None:
    """The sizes in the error that torch raised, as far as they are written out."""
    said = {name: re.search(pattern, text) for name, pattern in TORCHS_WORDS.items()}
    sizes = {
        "segment": answer.segment_bytes,
        "free": answer.device_free_bytes,
        "allocated": answer.allocated_bytes,
        "cached": answer.reserved_bytes - answer.allocated_bytes,
    }
    for name, found in said.items():
        assert found is not None, name
        unit = {"bytes": 1, "KiB": 1 << 10, "MiB": MiB, "GiB": GiB}[found[2]]
        assert abs((sizes[name] or 0) / unit - float(found[1])) < 0.0051, name


_SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
TORCHS_WORDS = {
    "segment": rf"Tried to allocate {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "cached": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


def test_without_the_capacity_the_file_alone_cannot_blame_others() -> None:
    (answer,) = memtrace.load(FIXTURES / "oom-memory-outside-torch.pickle.xz").ooms()
    assert (answer.verdict, answer.capacity.capacity_bytes, answer.outside_torch_bytes) == ("lack", None, None)
    assert "Torch held only 2.72 GiB" in " ".join(Words(answer).reasons())


def test_a_recording_knows_its_device() -> None:
    folder = FIXTURES / "recordings" / "gpt2-oom"
    (answer,) = memtrace.load(folder, at_oom=True).ooms()
    noted = json.loads((folder / "rank0000.json").read_text("utf-8"))
    assert (answer.verdict, answer.asked_by.category) == ("limit", "bwd.temp")
    assert answer.capacity.capacity_bytes == noted["device"]["capacity_bytes"] == H200
    assert answer.capacity.limit_bytes == noted["limit_bytes"] == noted["oom"]["total_bytes"]
    assert answer.device_free_bytes == noted["oom"]["free_bytes"]
    assert answer.segment_bytes == noted["oom"]["asked_bytes"]
    assert answer.allocated_bytes == noted["stats"]["allocated_bytes.all.current"]
    assert answer.reserved_bytes == noted["stats"]["reserved_bytes.all.current"]


@pytest.mark.parametrize("name", ["two-streams", "ragged", "ragged-expandable", "oom-fragmented", "mlp-expandable"])
def test_holes_are_the_free_bytes_of_the_ledger(name: str) -> None:
    replay = memtrace.load(FIXTURES / f"{name}.pickle.xz").replay()
    for event in np.linspace(-1, replay.events - 1, 25).astype(int).tolist():
        holes, ledger = holes_at(replay, event), ledger_at(replay, event)
        assert holes.total == ledger.stranded + ledger.releasable
        assert int(holes.releasable.sum()) == ledger.releasable


def test_events_of_failures(tmp_path: Path) -> None:
    snapshot = opened(tmp_path, SnapshotBuilder().oom(512).alloc(A, 512).oom(512))
    assert oom_events(snapshot.replay(), snapshot.data.trace(0)) == (0, 3)
