"""Replay against torch's own counters: every shipped recording, and every one of the shared set where it is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recordings import fixture_names, shared_snapshots, snapshot_path, truth_path

import memtrace
from memtrace.analysis.verify import NAMES

SHARED = [pair for pair in shared_snapshots() if "700steps" not in pair[0].name]


def truth_of(path: Path) -> dict[str, int]:
    return json.loads(path.read_text())["stats"]


def check(recording: Path, truth: Path) -> None:
    verdict = memtrace.load(recording).verify(truth_of(truth))
    assert not verdict.failed, verdict.different
    assert verdict.conflicts == 0
    assert verdict.compared == (111 if verdict.complete else 54)


@pytest.mark.parametrize("name", fixture_names(truth=True))
def test_shipped_recordings_equal_torch(name: str) -> None:
    check(snapshot_path(name), truth_path(name))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED, reason="needs the shared recordings")
def test_shared_recordings_equal_torch() -> None:
    for recording, truth in SHARED:
        check(recording, truth)


@pytest.mark.parametrize(
    "name", ["mlp-adamw", "mlp-expandable", "mlp-peak-reset", "ragged", "gpt2-zero2", "alloc-retry"]
)
def test_one_wrong_number_fails(name: str) -> None:
    """Each of the 111, by one, up and down."""
    snapshot = memtrace.load(snapshot_path(name))
    truth = truth_of(truth_path(name))
    for counter in NAMES:
        for step in (1, -1):
            assert snapshot.verify({**truth, counter: truth[counter] + step}).failed, (counter, step)


@pytest.mark.parametrize("name", ["mlp-recorded-from-step-1", "gpt2-zero3-ring-20000"])
def test_one_wrong_current_of_a_window_fails(name: str) -> None:
    snapshot = memtrace.load(snapshot_path(name))
    truth = truth_of(truth_path(name))
    currents = [counter for counter in NAMES if counter.endswith(".current")]
    assert len(currents) == 27
    for counter in currents:
        for step in (1, -1):
            assert snapshot.verify({**truth, counter: truth[counter] + step}).failed, (counter, step)


def test_a_reset_of_the_peaks_is_found() -> None:
    snapshot = memtrace.load(snapshot_path("mlp-peak-reset"))
    verdict = snapshot.verify(truth_of(truth_path("mlp-peak-reset")))
    assert verdict.reset_events == (480, 500)
    assert {item.why for item in verdict.different} == {"reset"}
    assert verdict.equal == 98


def test_peaks_before_a_window_are_said_to_be() -> None:
    snapshot = memtrace.load(snapshot_path("mlp-recorded-from-step-1"))
    verdict = snapshot.verify(truth_of(truth_path("mlp-recorded-from-step-1")))
    assert (verdict.compared, verdict.equal) == (54, 49)
    assert {item.why for item in verdict.different} == {"before_window"}
    assert verdict.reset_events is None


PUBLIC = {  # name -> (requested bytes at their peak, event of it), from shared/public/README.md
    "public-small-97-events": (3_249_143_816, 52),
    "public-annotations-python-stacks": (1_783_664_516, 11205),
    "public-late-start-training": (24_207_167_496, 3737),
    "public-windows-paths-empty-frames": (13_923_997_700, 1402),
    "public-torch-2.0-history": (5_683_449_864, -1),
    "public-state-only-259-segments": (16_380_108_168, -1),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_peaks(name: str) -> None:
    peak = memtrace.load(snapshot_path(name)).peak("requested")
    assert (peak.bytes, peak.event) == PUBLIC[name]


def test_pending_blocks_are_active() -> None:
    assert memtrace.load(snapshot_path("public-private-pools-pending-free")).peak("active").bytes == 25_513_411_584


@pytest.mark.parametrize("name", ["public-trimmed-trace", "public-synthetic-not-an-allocator"])
def test_inconsistent_files_say_so_and_still_answer(name: str) -> None:
    snapshot = memtrace.load(snapshot_path(name))
    assert snapshot.verify().failed
    assert "inconsistent" in {notice.code for notice in snapshot.notices()}
    assert snapshot.peak().bytes > 0
