"""Usable but odd recordings: answered as far as they can be, labelled, and every answer still sums."""

from __future__ import annotations

import itertools
import lzma
import pickle
from typing import Any

import pytest
from recordings import snapshot_path

from memtrace.analysis.blame import BYS
from memtrace.analysis.moment import COUNTER
from memtrace.api import Snapshot
from memtrace.io.parse import parse

FILES = ("gpt2-zero2", "two-streams", "mlp-expandable")
KINDS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_map")
SKIPPED = [drop for size in (1, 2) for drop in itertools.combinations(KINDS, size)]


def raw(name: str) -> dict[str, Any]:
    with lzma.open(snapshot_path(name)) as file:
        loaded: dict[str, Any] = pickle.load(file)
    return loaded


def with_events(snapshot: dict[str, Any], events: list[dict[str, Any]]) -> Snapshot:
    return Snapshot(parse({**snapshot, "device_traces": [events]}, path="odd", file_bytes=0))


def check_sums(snapshot: Snapshot) -> None:
    last = snapshot.replay().events - 1
    for of, at, by in itertools.product(COUNTER, ("peak", "end", -1, last // 3, last // 2), BYS):
        blame = snapshot.blame(at, of, by)
        assert sum(row.bytes for row in blame.rows) == blame.total_bytes, (of, at, by)
        assert blame.total_bytes == snapshot.series(COUNTER[of])[blame.event + 1], (of, at, by)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("skipped", SKIPPED, ids="+".join)
def test_skipped_kinds_of_events(name: str, skipped: tuple[str, ...]) -> None:
    whole = raw(name)
    events = [event for event in whole["device_traces"][0] if event["action"] not in skipped]
    if len(events) == len(whole["device_traces"][0]):
        return
    snapshot = with_events(whole, events)
    check_sums(snapshot)
    assert snapshot.notices()
    if skipped == ("free_requested",) and name != "two-streams":  # there frees complete late, so both kinds matter
        full = with_events(whole, whole["device_traces"][0])
        assert snapshot.peak().bytes == full.peak().bytes
        assert "skipped-actions" in {notice.code for notice in snapshot.notices()}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("newer", [1, 3, 10, 50])
@pytest.mark.parametrize("late", [False, True])
def test_a_final_map_newer_than_the_trace(name: str, newer: int, late: bool) -> None:
    """Another thread goes on while the snapshot is taken: the trace is copied first, the segments after it."""
    whole = raw(name)
    events = whole["device_traces"][0]
    snapshot = with_events(whole, events[len(events) // 2 if late else 0 : -newer])
    check_sums(snapshot)
    assert "inconsistent" in {notice.code for notice in snapshot.notices()}
    if not late:  # the trace alone says it all
        full = with_events(whole, events).series()
        assert (snapshot.series() == full[:-newer]).all()


@pytest.mark.parametrize("name", FILES)
def test_a_hole_and_a_repetition(name: str) -> None:
    whole = raw(name)
    events = whole["device_traces"][0]
    for changed in (
        events[:100] + events[110:],
        events[:100] + events[90:],
        events[50:100] + events[:50] + events[100:],
    ):
        snapshot = with_events(whole, changed)
        check_sums(snapshot)
        assert snapshot.notices()


@pytest.mark.parametrize("name", FILES)
def test_no_segments_in_the_file(name: str) -> None:
    whole = raw(name)
    del whole["segments"]
    snapshot = Snapshot(parse(whole, path="odd", file_bytes=0))
    assert snapshot.complete
    assert "no-segments" in {notice.code for notice in snapshot.notices()}
    check_sums(snapshot)


@pytest.mark.parametrize("name", FILES)
def test_two_events(name: str) -> None:
    whole = raw(name)
    check_sums(with_events(whole, whole["device_traces"][0][-2:]))
