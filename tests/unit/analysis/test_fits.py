"""How little memory a recorded run could have done with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import SnapshotBuilder
from recordings import snapshot_path

import memtrace
from memtrace.allocator.simulate.driver import Draw, RuledDriver
from memtrace.allocator.simulate.machine import NEVER
from memtrace.allocator.simulate.run import run
from memtrace.analysis import fits as analysis
from memtrace.analysis.fits import Fits, Smallest
from memtrace.analysis.settings import Change
from memtrace.api import Snapshot
from memtrace.errors import QuestionError

MiB = 1 << 20
A, B, C, D = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000, 0x7F3000000000
Load = Callable[[SnapshotBuilder], Snapshot]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda builder: memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False)


def in_mib(smallest: Smallest) -> tuple[float, float, float]:
    return smallest.limit / MiB, smallest.sure / MiB, smallest.peak / MiB


def serves(snapshot: Snapshot, limit: int, change: Change | None = None) -> bool:
    return snapshot.simulation().scenario(Change(limit=limit).over(change or Change())).completes


def fragmented() -> SnapshotBuilder:
    """Two segments of 60, half of each in use at the end, and a request of 60 that only a third one serves."""
    builder = SnapshotBuilder()
    for address in (A, B):
        builder.alloc(address, 60 * MiB).free(address).alloc(address, 30 * MiB).alloc(address + 30 * MiB, 30 * MiB)
    for address in (A, B):
        builder.free(address)
    return builder.alloc(C, 60 * MiB)


def test_the_cache_can_be_given_back(load: Load) -> None:
    snapshot = load(SnapshotBuilder().alloc(A, 30 * MiB).free(A).alloc(B, 44 * MiB))
    found = snapshot.fits()
    assert in_mib(found.recorded) == (44, 44, 44)
    assert found.best is found.recorded
    assert serves(snapshot, 44 * MiB)
    assert not serves(snapshot, 44 * MiB - 1)


def test_what_is_in_use_cannot(load: Load) -> None:
    found = load(fragmented()).fits()
    assert in_mib(found.recorded) == (180, 180, 180)


def test_the_best_setting_is_named(load: Load) -> None:
    """Expandable: 120 for the four, of which the free 60 are not in one piece but can be unmapped."""
    snapshot = load(fragmented())
    found = snapshot.fits()
    assert found.best.change == Change(expandable_segments=True)
    assert found.best.limit < found.recorded.limit
    assert serves(snapshot, found.best.sure, found.best.change)
    assert not serves(snapshot, found.best.limit - 2 * MiB, found.best.change)


def test_a_setting_that_does_as_well_is_not_better(load: Load) -> None:
    found = load(SnapshotBuilder().alloc(A, 40 * MiB).alloc(B, 40 * MiB)).fits()
    assert found.best is found.recorded
    assert found.best.change == Change()


def test_all_that_was_tried_is_counted(load: Load) -> None:
    heard: list[tuple[int, int]] = []
    simulation = load(SnapshotBuilder().alloc(A, 40 * MiB).alloc(B, 40 * MiB)).simulation()
    found = analysis.fits(simulation, lambda done, total: heard.append((done, total)))
    assert found.tried == 11
    assert heard == [(number, 11) for number in range(1, 11)]


def test_a_request_that_failed_counts_as_one_to_serve(load: Load) -> None:
    """40 and 64; the latter is free again when the last one asks for 2."""
    found = load(SnapshotBuilder().alloc(A, 40 * MiB).oom(64 * MiB).alloc(B, 512)).fits()
    assert in_mib(found.recorded) == (104, 104, 104)


def test_blocks_that_wait_for_a_stream_can_be_waited_for(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 40 * MiB).free_requested(A).alloc(B, 42 * MiB).free_completed(A)
    snapshot = load(builder)
    assert snapshot.peak("active").bytes == 82 * MiB
    assert in_mib(snapshot.fits().recorded) == (42, 42, 42)


def test_a_page_may_exceed_the_limit(load: Load) -> None:
    """Torch holds the segment against the limit, 12 MiB, and then maps a page of 20."""
    builder = SnapshotBuilder().map(A, 20 * MiB).alloc(A, 12 * MiB).alloc(A + 12 * MiB, 8 * MiB)
    assert in_mib(load(builder).fits().recorded) == (12, 12, 20)


def test_private_pools_count(load: Load) -> None:
    builder = SnapshotBuilder(torch="2.12").segment(A, 20 * MiB, pool=(1, 0)).alloc(A, 5 * MiB)
    assert in_mib(load(builder.alloc(B, 44 * MiB)).fits().recorded) == (64, 64, 64)


def test_memory_from_before_the_recording_counts(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).alloc(B, 20 * MiB).free(B).start_recording()
    assert in_mib(load(builder.alloc(C, 44 * MiB).alloc(D, 512)).fits().recorded) == (76, 76, 76)


def test_large_pages_of_odd_size_are_counted_to_the_mib(load: Load) -> None:
    conf = "large_segment_size_mb:21"
    builder = SnapshotBuilder().settings(PYTORCH_CUDA_ALLOC_CONF=conf).segment(A, 21 * MiB).alloc(A, 5 * MiB)
    snapshot = load(builder.alloc(A + 5 * MiB, 5 * MiB))
    assert snapshot.simulation().is_exact
    assert in_mib(snapshot.fits().recorded) == (21, 21, 21)


def test_what_cannot_be_simulated_cannot_be_answered(load: Load) -> None:
    with pytest.raises(QuestionError, match="no trace, only the last state"):
        load(SnapshotBuilder().alloc(A, 512).start_recording()).fits()


# ---- recordings


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Snapshot, Fits]]:
    names = ("mlp-adamw", "mlp-expandable", "alloc-retry", "oom-fragmented", "cuda-graph", "two-streams")
    found = {name: memtrace.load(snapshot_path(name), cache=False) for name in names}
    return {name: (snapshot, snapshot.fits()) for name, snapshot in found.items()}


def test_the_limits_are_in_order(answers: dict[str, tuple[Snapshot, Fits]]) -> None:
    for snapshot, found in answers.values():
        assert found.best.sure <= found.recorded.sure
        for one in (found.recorded, found.best):
            assert one.limit <= one.sure
            assert one.limit % MiB == 0
        assert found.recorded.peak >= snapshot.peak("allocated").bytes


def test_a_limit_serves_however_segments_lie_and_two_mib_less_do_not(
    answers: dict[str, tuple[Snapshot, Fits]],
) -> None:
    for name, (snapshot, found) in answers.items():
        simulation = snapshot.simulation()
        assert simulation.check is not None
        for one in (found.recorded, found.best):
            rules = one.change.applied(simulation.check.rules)
            for draw in range(6):
                driver = RuledDriver(Draw(draw, simulation.moments))
                outcome = run(simulation.work, replace(rules, limit=one.sure), driver)
                assert outcome.first_oom == NEVER, (name, draw)
            least, less = (Change(limit=limit).over(one.change) for limit in (one.limit, one.limit - 2 * MiB))
            assert simulation.scenario(least, draws=0).oom_event is None
            assert simulation.scenario(less, draws=0).oom_event is not None


def test_what_needed_no_retry_does_with_what_it_reserved(answers: dict[str, tuple[Snapshot, Fits]]) -> None:
    snapshot, found = answers["mlp-adamw"]
    assert found.recorded.limit <= snapshot.peak("reserved").bytes
    assert np.array_equal(snapshot.simulation().work.recorded.kind, np.zeros(33))
