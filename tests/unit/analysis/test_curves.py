"""The plot's numbers against the counters and against `blame`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import recordings

import memtrace
from memtrace.analysis.curves import BANDS, MOST_BANDS, REST, columns_of
from memtrace.analysis.swings import local_peaks
from memtrace.errors import QuestionError

FILES = (
    "mlp-adamw",
    "gpt2-zero3-oom",
    "two-streams",
    "llama-lora",
    "mlp-user-metadata",
    "gpt2-zero3-ring-20000",
    "public-synthetic-not-an-allocator",
)


@pytest.fixture(scope="module", params=FILES)
def snapshot(request: pytest.FixtureRequest) -> memtrace.Snapshot:
    return memtrace.load(recordings.snapshot_path(request.param))


@pytest.mark.parametrize("by", BANDS)
def test_bands_sum_to_the_counter_after_every_event(snapshot: memtrace.Snapshot, by: str) -> None:
    allocated = snapshot.series()
    events = np.arange(-1, len(allocated) - 1)
    bands = snapshot.bands(by)
    assert (bands.at(events).sum(axis=0) == allocated).all()
    assert len(bands.names) <= MOST_BANDS
    assert (bands.at(events) >= 0).all()


def test_bands_are_the_rows_of_blame(snapshot: memtrace.Snapshot) -> None:
    bands = snapshot.bands("category")
    for event in (snapshot.peak().event, snapshot.replay().events - 1, snapshot.replay().events // 2):
        rows = {row.category: row.bytes for row in snapshot.blame(event).rows}
        shown = dict(zip(bands.names, bands.at(np.array([event]))[:, 0].tolist(), strict=True))
        rest = shown.pop(REST, 0)
        assert {name: size for name, size in shown.items() if size} == {
            name: size for name, size in rows.items() if name in shown
        }
        assert rest == sum(size for name, size in rows.items() if name not in shown)


def test_the_largest_at_the_peak_come_first(snapshot: memtrace.Snapshot) -> None:
    bands = snapshot.bands()
    sizes = bands.at(np.array([snapshot.peak().event]))[:, 0].tolist()
    told = sizes[:-1] if bands.names[-1] == REST else sizes
    assert told == sorted(told, reverse=True)


@pytest.mark.parametrize("axis", ["event", "time"])
@pytest.mark.parametrize("width", [1, 7, 80, 1000])
def test_no_zoom_loses_the_peak(snapshot: memtrace.Snapshot, axis: str, width: int) -> None:
    allocated, reserved = snapshot.series(), snapshot.series("reserved_bytes")
    times = snapshot.data.traces[0].time_us
    columns = columns_of(allocated, reserved, times, -1, len(allocated) - 2, width, axis)  # type: ignore[arg-type]
    assert len(columns) == width
    assert columns.allocated.max() == snapshot.peak().bytes
    assert columns.reserved.max() == snapshot.peak("reserved").bytes
    assert (columns.allocated == allocated[columns.event + 1]).all()
    assert (np.diff(columns.edge) >= 0).all()
    assert columns.edge[0] == -1
    assert columns.edge[-1] == len(allocated) - 1


@pytest.mark.parametrize("axis", ["event", "time"])
def test_a_column_shows_the_highest_of_its_events(snapshot: memtrace.Snapshot, axis: str) -> None:
    allocated = snapshot.series()
    last = len(allocated) - 2
    times = snapshot.data.traces[0].time_us
    columns = columns_of(allocated, allocated, times, last // 3, last // 2, 40, axis)  # type: ignore[arg-type]
    for column in range(40):
        begin, end = columns.edge[column : column + 2].tolist()
        if end > begin:
            assert columns.allocated[column] == allocated[begin + 1 : end + 1].max()
            assert columns.column_of(int(columns.event[column])) == column
        else:
            assert columns.allocated[column] == allocated[begin]


def test_columns_of_one_event_and_of_none() -> None:
    one = np.array([0, 512], np.int64)
    columns = columns_of(one, one, None, -1, 0, 5, "event")
    assert columns.allocated.max() == 512
    nothing = np.array([7], np.int64)
    assert columns_of(nothing, nothing, None, -1, -1, 3, "time").allocated.tolist() == [7, 7, 7]


def test_columns_of_time_are_equally_long() -> None:
    series = np.arange(7, dtype=np.int64)
    times = np.array([0, 1, 2, 3, 4, 100], np.int64)
    columns = columns_of(series, series, times, -1, 5, 10, "time")
    assert columns.edge.tolist() == [-1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6]
    assert columns.allocated.tolist() == [5, 5, 5, 5, 5, 5, 5, 5, 5, 6]


def test_local_peaks_are_left_by_more_than_noise(snapshot: memtrace.Snapshot) -> None:
    allocated = snapshot.series()
    least = int(allocated.max()) // 50
    peaks = local_peaks(allocated)
    assert (np.diff(peaks) > 0).all()
    assert allocated[peaks].max() == allocated.max()
    for before, after in itertools.pairwise(peaks):
        lowest = allocated[before : after + 1].min()
        assert min(allocated[before], allocated[after]) - lowest >= least


def test_local_peaks_across_chunks() -> None:
    wave = (1000 * (1 + np.sin(np.arange(50_000) / 1000))).astype(np.int64)
    assert len(local_peaks(wave, 500)) == 9  # eight crests, and the rise that the end breaks off
    assert local_peaks(np.zeros(0, np.int64)).tolist() == []
    assert local_peaks(np.array([3])).tolist() == [0]


def test_a_stretch_sums_to_the_change_of_the_counter(snapshot: memtrace.Snapshot) -> None:
    allocated, last = snapshot.series(), snapshot.replay().events - 1
    random = np.random.default_rng(3)
    for first, end in [(0, last), (last, last), *np.sort(random.integers(0, last, (10, 2)), axis=1).tolist()]:
        found = snapshot.stretch(first, end)
        assert found.before == allocated[first]
        assert found.after == allocated[end + 1]
        assert found.net == found.after - found.before
        assert sum(row.allocated for row in found.rows) == found.allocated
        assert sum(row.freed for row in found.rows) == found.freed
        assert sum(row.allocated_blocks for row in found.rows) == found.allocated_blocks


def test_what_cannot_be_asked(snapshot: memtrace.Snapshot) -> None:
    with pytest.raises(QuestionError, match="no events"):
        snapshot.stretch(5, 4)
    with pytest.raises(QuestionError, match="no grouping 'categories'"):
        snapshot.bands("categories")
