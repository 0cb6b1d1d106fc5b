"""The ledger of reserved memory on every recording: it sums to torch's counter, and every term, every pinning block's
share and what it alone keeps are what plain loops over the memory map give."""

from __future__ import annotations

import lzma
import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from oracle import Oracle
from recordings import fixture_names, snapshot_path
from slow_ledger import TERMS, SlowLedger, ledger_of, segments_of_columns, segments_of_oracle

import memtrace
from memtrace.analysis.ledger import Ledger, ledger_at
from memtrace.analysis.pins import pinning_blocks
from memtrace.analysis.residents import residents_at, units_of

Raw = dict[str, Any]
COMPLETE = fixture_names(complete=True)
OTHERS = fixture_names(complete=False)
EVERY = 1000


def moments(snapshot: memtrace.Snapshot) -> list[int]:
    """Every 1,000th event, the state before the first, the end, and the reserved peak."""
    events = snapshot.replay().events
    return sorted({-1, *range(0, events, EVERY), events - 1, snapshot.event("peak", "reserved")})


def raw_snapshot(name: str) -> Raw:
    with lzma.open(snapshot_path(name)) as file:
        found: Raw = pickle.load(file)
    return found


def check(snapshot: memtrace.Snapshot, event: int, slow: SlowLedger) -> None:
    replay, found = snapshot.replay(), snapshot.ledger(event)
    reserved = snapshot.series("reserved_bytes")[event + 1]
    assert found.ledger.reserved == sum(part.ledger.reserved for part in found.parts) == reserved, event
    assert found.ledger == ledger_at(replay, event) == Ledger(**{term: slow.total(term) for term in TERMS}), event
    ours: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: dict.fromkeys(TERMS, 0))
    for part in found.parts:
        for term in TERMS:
            ours[part.pool, part.stream][term] += getattr(part.ledger, term)
    assert ours == slow.parts, event
    residents = residents_at(replay, event)
    pins = pinning_blocks(residents, units_of(replay, residents))
    address = replay.lifetimes.address[pins.block].tolist()
    assert {one: size for one, size in zip(address, pins.hostage.tolist(), strict=True) if size} == {
        one: size for one, size in slow.hostage.items() if size
    }, event
    assert pins.alone.tolist() == [slow.alone.get(one, 0) for one in address], event
    assert pins.unpinned == slow.unpinned
    assert sum(pin.hostage_bytes for pin in found.pins) == found.ledger.stranded, event
    assert sum(pin.alone_bytes for pin in found.pins) == int(pins.alone.sum())
    assert sum(pin.bytes for pin in found.pins) == int(replay.lifetimes.size[pins.block].sum())
    assert sum(one.bytes for one in found.waiting) == found.ledger.pending
    assert {one.stream: one.bytes for one in found.waiting} == {
        stream: size for stream, size in pending_by_stream(slow).items() if size
    }, event


def pending_by_stream(slow: SlowLedger) -> dict[int, int]:
    sums: dict[int, int] = defaultdict(int)
    for (_, stream), part in slow.parts.items():
        sums[stream] += part["pending"]
    return sums


def maps_of_oracle(name: str, wanted: list[int]) -> Iterator[tuple[int, list[Raw]]]:
    """The memory map after each of these events, by the oracle, which replays the trace once."""
    raw = raw_snapshot(name)
    oracle, ask = Oracle(raw.get("allocator_settings")), set(wanted)
    oracle.series = {}  # the counters are checked elsewhere
    for event, one in enumerate([None, *raw["device_traces"][0]], start=-1):
        if one is not None:
            oracle.step(one)
        if event in ask:
            yield event, segments_of_oracle(oracle)


@pytest.mark.parametrize("name", COMPLETE)
def test_complete_recordings(name: str) -> None:
    snapshot = memtrace.load(snapshot_path(name))
    wanted = moments(snapshot)
    divisions = raw_snapshot(name).get("allocator_settings", {}).get("roundup_power2_divisions")
    seen = []
    for event, segments in maps_of_oracle(name, wanted):
        check(snapshot, event, ledger_of(segments, divisions))
        seen.append(event)
    assert seen == wanted


def columns_as_dicts(snapshot: memtrace.Snapshot) -> tuple[list[Raw], list[Raw]]:
    """Rows of the replay, of a trace that the oracle cannot replay."""
    tables = []
    for table in (snapshot.replay().lifetimes, snapshot.replay().spans):
        names = table.__slots__
        columns = (getattr(table, name).tolist() for name in names)
        tables.append([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])
    return tables[0], tables[1]


@pytest.mark.parametrize("name", OTHERS)
def test_recordings_that_lack_their_beginning(name: str) -> None:
    snapshot = memtrace.load(snapshot_path(name))
    blocks, spans = columns_as_dicts(snapshot)
    settings = snapshot.data.settings.get("roundup_power2_divisions")
    divisions = settings if isinstance(settings, dict) else None
    for event in moments(snapshot):
        check(snapshot, event, ledger_of(segments_of_columns(blocks, spans, event), divisions))


@pytest.mark.parametrize("name", ["ragged", "ragged-expandable", "cuda-graph", "gpt2-zero2", "oom-fragmented"])
def test_what_a_call_site_keeps_is_what_goes_when_it_lets_go(name: str) -> None:
    """`together_bytes`: the releasable bytes that the loops find more when the pins of a stack are taken away."""
    snapshot = memtrace.load(snapshot_path(name))
    replay, shown = snapshot.replay(), snapshot._shown
    blocks, spans = columns_as_dicts(snapshot)
    for event in moments(snapshot)[1:]:
        found = snapshot.ledger(event)
        residents = residents_at(replay, event)
        pins = pinning_blocks(residents, units_of(replay, residents)).block
        stack = shown.rows(replay.lifetimes.stack[pins])
        for pin in [pin for pin in found.pins if pin.stack >= 0][:4]:
            gone = set(pins[stack == pin.stack].tolist())
            assert len(gone) == pin.blocks
            born = replay.lifetimes.born[np.array(sorted(gone))]
            assert pin.born == born.min()
            rest = [block for row, block in enumerate(blocks) if row not in gone]
            after = ledger_of(segments_of_columns(rest, spans, event), None)
            assert after.total("releasable") - found.ledger.releasable == pin.together_bytes, (event, pin)
