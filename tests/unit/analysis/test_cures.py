"""Which settings would have served a request that failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import snapshot_path

import memtrace
from memtrace.analysis import cures as analysis
from memtrace.analysis.cures import Cure, Cures, cures
from memtrace.analysis.settings import Change
from memtrace.api import Snapshot

MiB, GiB = 1 << 20, 1 << 30
A, B, C = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
Load = Callable[..., Snapshot]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def opened(builder: SnapshotBuilder, **sidecar: Any) -> Snapshot:
        path = builder.pickle(tmp_path / "rank0000.pickle")
        if sidecar:
            (tmp_path / "rank0000.json").write_text(json.dumps({"memtrace": "1", **sidecar}))
        return memtrace.load(path, cache=False)

    return opened


def halves() -> SnapshotBuilder:
    """Two segments of 60 of which the first halves are free: 60 in all, and no hole for 60."""
    builder = SnapshotBuilder()
    for address in (A, B):
        builder.alloc(address, 60 * MiB).free(address).alloc(address, 30 * MiB).alloc(address + 30 * MiB, 30 * MiB)
    return builder.free(A).free(B)


FAILED = 16


def of(found: Cures, change: Change) -> Cure:
    (cure,) = [one for one in found.tried if one.change == change]
    return cure


def test_a_setting_that_serves_the_request(load: Load) -> None:
    """Under 170 MiB: 120 held and 60 more are too much. Expandable: the first 20 of each free half can be unmapped."""
    found = cures(load(halves().oom(60 * MiB)).simulation(), FAILED, 170 * MiB)
    assert (found.event, found.limit, found.reason) == (FAILED, 170 * MiB, None)
    assert of(found, Change(expandable_segments=True)) == Cure(Change(expandable_segments=True), True, None)
    assert of(found, Change(max_split_size_mb=256)) == Cure(Change(max_split_size_mb=256), False, FAILED)


def test_the_limit_is_not_part_of_the_cure(load: Load) -> None:
    found = cures(load(halves().oom(60 * MiB)).simulation(), FAILED, 170 * MiB)
    assert {one.change.limit for one in found.tried} == {None}
    assert of(found, Change(garbage_collection_threshold=0.6)).serves is False


def test_without_a_limit_nothing_can_be_tried(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).alloc(B, 512)
    found = cures(load(builder).simulation(), 3)
    assert (found.limit, found.tried) == (None, ())
    assert found.reason == "how much memory there was is neither recorded nor shown by what was refused"


def test_nor_can_it_without_an_exact_self_check(load: Load) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).alloc(B, 30 * MiB).free(A).free(B).alloc(B, 30 * MiB)
    found = cures(load(builder).simulation(), 8, GiB)
    assert found.tried == ()
    assert found.reason == ("the recorded setting cannot be simulated: a block is put elsewhere than in the recording")


def test_what_hangs_on_the_limits_true_place_is_left_open(load: Load) -> None:
    """The limit is from 120 to below 180; with expandable segments 160 are needed."""
    found = cures(load(halves().oom(60 * MiB)).simulation(), FAILED)
    assert found.limit == 120 * MiB
    cure = of(found, Change(expandable_segments=True))
    assert cure.serves is None


def test_a_failure_before_it_says_nothing_of_it_unless_the_program_died(load: Load) -> None:
    """Both fail whatever is set: of the second that is known, the program having gone on after the first."""
    builder = SnapshotBuilder().alloc(A, 30 * MiB).oom(GiB).oom(2 * GiB).alloc(B, 512)
    simulation = load(builder).simulation()
    first, second = cures(simulation, 2, 100 * MiB), cures(simulation, 3, 100 * MiB)
    assert {one.serves for one in first.tried} == {False}
    assert {one.oom_event for one in second.tried} == {2}
    assert {one.serves for one in second.tried} == {None}


def test_a_setting_that_fails_earlier_does_not_serve(load: Load) -> None:
    """Rounded up, the first request fails already."""
    builder = SnapshotBuilder().alloc(A, 66 * MiB).free(A).alloc(A, 66 * MiB).oom(GiB)
    found = cures(load(builder).simulation(), 5, 70 * MiB)
    cure = of(found, Change(roundup_power2_divisions=4))
    assert (cure.serves, cure.oom_event) == (False, 1)


def test_a_failure_after_it_is_another_matter(load: Load) -> None:
    builder = halves().oom(60 * MiB).alloc(C, 512).oom(GiB)
    found = cures(load(builder).simulation(), FAILED, 170 * MiB)
    cure = of(found, Change(expandable_segments=True))
    assert (cure.serves, cure.oom_event) == (True, FAILED + 3)


def test_long_recordings_are_simulated_once_a_setting(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = load(halves().oom(60 * MiB)).simulation()
    heard: list[int | None] = []
    scenario = type(simulation).scenario

    def noted(self: Any, change: Change, progress: Any = None, *, draws: int | None = None) -> Any:
        heard.append(draws)
        return scenario(self, change, progress, draws=draws)

    monkeypatch.setattr(type(simulation), "scenario", noted)
    cures(simulation, FAILED, 170 * MiB)
    monkeypatch.setattr(analysis, "_MOST_EVENTS", 3)
    cures(simulation, FAILED, 170 * MiB)
    half = len(heard) // 2
    assert (set(heard[:half]), set(heard[half:])) == ({4}, {0})


def test_progress_counts_settings(load: Load) -> None:
    heard: list[tuple[int, int]] = []
    found = cures(
        load(halves().oom(60 * MiB)).simulation(), FAILED, 170 * MiB, lambda done, total: heard.append((done, total))
    )
    assert heard == [(number, len(found.tried)) for number in range(len(found.tried))]


def test_a_fragmented_recording_has_its_cure() -> None:
    snapshot = memtrace.load(snapshot_path("oom-fragmented"), cache=False)
    event = snapshot.simulation().recorded.oom_event
    assert event is not None
    found = cures(snapshot.simulation(), event, 4 * GiB)
    assert of(found, Change(expandable_segments=True)).serves is True
    plain = memtrace.load(snapshot_path("oom"), cache=False)
    event = plain.simulation().recorded.oom_event
    assert event is not None
    assert not any(one.serves for one in cures(plain.simulation(), event, 4 * GiB).tried)
