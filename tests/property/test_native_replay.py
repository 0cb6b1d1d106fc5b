"""The native kernel against the reference in Python: the same columns, the same contradictions, on any input."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import cut_front, legal_snapshots, random_program, random_settings, ring
from recordings import fixture_names, shared_snapshots, snapshot_path

import memtrace
from memtrace.allocator import Replay, replay
from memtrace.allocator.initial import ContradictionError
from memtrace.allocator.kernel import HAS_NATIVE, Kernel, kernel
from memtrace.allocator.memory_map import MemoryMap, PrivatePools, map_at_end
from memtrace.allocator.sizes import AllocatorSettings
from memtrace.allocator.stream import Events, events_of
from memtrace.errors import NotASnapshotError
from memtrace.io.parse import parse
from memtrace.model import Action, SnapshotData

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="needs the native kernel")

MiB = 1 << 20
Raw = dict[str, Any]
Outcome = tuple[Any, ...]


def flat(value: object) -> Any:
    """Something that compares: dataclasses of columns as (name, type, values)."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return [(field.name, flat(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, tuple):
        return [flat(item) for item in value]
    return value


def outcome(work: Callable[[], object]) -> Outcome:
    """What comes of it: a result, or a contradiction with its event and reason."""
    try:
        return "done", flat(work())
    except ContradictionError as error:
        return "contradiction", error.event, error.reason


def forward(with_: Kernel, events: Events, start: MemoryMap, private: PrivatePools, forced: dict[int, int]) -> Outcome:
    """One pass, and what it adds to the forced sizes."""
    forced = dict(forced)
    found = outcome(lambda: with_.forward_pass(events, start, private, forced))
    return (*found, forced if found[0] == "done" else None)


def check_loops(data: SnapshotData, device: int, forced: dict[int, int] | None = None) -> set[str]:
    """Each loop of the kernel alone, from every state at hand; what came of them."""
    native, reference = kernel(native=True), kernel(native=False)
    allocator = AllocatorSettings.of(data.settings, data.torch.at_least)
    events, at_end = events_of(data.trace(device), allocator), map_at_end(data, device)
    seen = set()
    starts = [MemoryMap(), at_end]
    before = outcome(lambda: reference.map_before(events, at_end))
    assert outcome(lambda: native.map_before(events, at_end)) == before
    seen.add(before[0])
    if before[0] == "done":
        starts.append(native.map_before(events, at_end))
    for start in starts:
        for private in (PrivatePools.none(), PrivatePools.of(at_end, allocator)):
            for sizes in ({}, forced or {}):
                found = forward(reference, events, start, private, sizes)
                assert forward(native, events, start, private, sizes) == found
                seen.add(found[0])
    alone = outcome(lambda: reference.trace_alone(events))
    assert outcome(lambda: native.trace_alone(events)) == alone
    return seen


def check(data: SnapshotData) -> list[Replay]:
    """Both replays of every device."""
    found = []
    for device in data.devices:
        ours = replay(data, device, native=True)
        assert flat(ours) == flat(replay(data, device, native=False))
        found.append(ours)
    return found


def parsed(raw: Raw) -> SnapshotData:
    return parse(copy.deepcopy(raw), path="made", file_bytes=0)


def mutated(raw: Raw, rng: random.Random) -> Raw:
    """The same with a few events changed, lost, doubled or moved, and now and then other settings or segments."""
    raw = copy.deepcopy(raw)
    for trace in raw["device_traces"]:
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            if trace:
                MUTATIONS[rng.randrange(len(MUTATIONS))](trace, rng)
    allocator = raw["allocator_settings"]
    if rng.random() < 0.3:
        allocator["roundup_power2_divisions"] = {str(1 << power): rng.choice((0, 1, 2, 8)) for power in range(16)}
    if rng.random() < 0.3:
        allocator["expandable_segments"] = rng.random() < 0.5
    if rng.random() < 0.3:
        allocator["max_split_size"] = rng.choice((-1, 21 * MiB, 32 * MiB))
    for segment in raw["segments"]:
        if rng.random() < 0.05:
            segment["is_expandable"] = not segment["is_expandable"]
        if rng.random() < 0.05:
            segment["segment_pool_id"] = rng.choice(((0, 0), (1, 0), (0, 1)))
    return raw


def lose(trace: list[Raw], rng: random.Random) -> None:
    del trace[rng.randrange(len(trace))]


def double(trace: list[Raw], rng: random.Random) -> None:
    trace.insert(rng.randrange(len(trace)), dict(rng.choice(trace)))


def exchange(trace: list[Raw], rng: random.Random) -> None:
    index = rng.randrange(len(trace))
    other = min(len(trace) - 1, index + rng.choice((1, 1, 2, 10)))
    trace[index], trace[other] = trace[other], trace[index]


def move_address(trace: list[Raw], rng: random.Random) -> None:
    event = rng.choice(trace)
    if "addr" in event:
        event["addr"] = max(0, event["addr"] + rng.choice((-1, 1)) * rng.choice((512, 1024, MiB, 2 * MiB, 20 * MiB)))


def borrow_address(trace: list[Raw], rng: random.Random) -> None:
    event, other = rng.choice(trace), rng.choice(trace)
    if "addr" in event and "addr" in other:
        event["addr"] = other["addr"] + rng.choice((0, 0, 512, other["size"]))


def resize(trace: list[Raw], rng: random.Random) -> None:
    event = rng.choice(trace)
    if "size" in event:
        event["size"] = max(
            0, rng.choice((event["size"] + rng.choice((-512, 512, MiB)), 2 * event["size"], 0, 2 * MiB))
        )


def rename(trace: list[Raw], rng: random.Random) -> None:
    event = rng.choice(trace)
    if "addr" in event:
        event["action"] = rng.choice(
            "alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap".split()
        )


def drop_kind(trace: list[Raw], rng: random.Random) -> None:
    kind = rng.choice(("free_requested", "free_completed"))
    trace[:] = [event for event in trace if event["action"] != kind]


def other_stream(trace: list[Raw], rng: random.Random) -> None:
    rng.choice(trace)["stream"] = rng.choice((0, 7, 2**63 - 1))


MUTATIONS = [lose, lose, double, exchange, exchange, move_address, borrow_address, resize, resize, rename, other_stream]
MUTATIONS.append(drop_kind)


def changed(seed: int, operations: int) -> Raw:
    """A mutated trace, whole, cut or from a ring."""
    rng = random.Random(seed)
    raw = random_program(rng, rng.randrange(1, operations), **random_settings(rng))
    count = len(raw["device_traces"][0])
    if count > 3 and rng.random() < 0.5:
        raw = cut_front(raw, rng.randrange(count)) if rng.random() < 0.5 else ring(raw, rng.randrange(1, count))
    return mutated(raw, rng)


def check_changed(seed: int, operations: int = 200) -> set[str]:
    """Both kernels on a mutated trace, if it can still be read; what came of the single loops."""
    try:
        data = parsed(changed(seed, operations))
    except NotASnapshotError:
        return set()
    check(data)
    rng = random.Random(seed)
    seen = set()
    for device in data.devices:
        trace = data.trace(device)
        some = rng.sample(range(len(trace)), min(len(trace), 5))
        forced = {event: max(512, int(trace.size[event]) + rng.choice((0, 512, MiB))) // 512 * 512 for event in some}
        seen |= check_loops(data, device, forced)
    return seen


@pytest.mark.parametrize("name", fixture_names())
def test_shipped_recordings(name: str) -> None:
    data = memtrace.load(snapshot_path(name)).data
    check(data)
    for device in data.devices:
        check_loops(data, device)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path, _ in shared_snapshots() if "700steps" not in path.name], ids=str)
def test_shared_recordings(path: Any) -> None:
    check(memtrace.load(path).data)


@given(legal_snapshots())
@settings(max_examples=60)
def test_legal_traces(raw: Raw) -> None:
    for found in check(parsed(raw)):
        assert not found.conflicts


@given(legal_snapshots(), st.floats(0, 1), st.booleans())
@settings(max_examples=100)
def test_windows(raw: Raw, where: float, wrapped: bool) -> None:
    count = len(raw["device_traces"][0])
    if count < 4:
        return
    dropped = 1 + int(where * (count - 3))
    check(parsed(ring(raw, count - dropped) if wrapped else cut_front(raw, dropped)))


def test_changed_traces() -> None:
    seen: set[str] = set()
    for seed in range(150):
        seen |= check_changed(seed)
    assert seen == {"done", "contradiction"}


BASE = 1 << 40
FINE = AllocatorSettings(expandable=True, custom_pools_split_plainly=False)


def made_events(rows: list[tuple[Action, int, int]]) -> Events:
    """Events of (action, address, size) on stream 0."""
    action, addr, size = (np.array(column) for column in zip(*rows, strict=True))
    return Events(
        action=action.astype(np.uint8),
        addr=addr.astype(np.uint64),
        size=size.astype(np.int64),
        stream=np.zeros(len(rows), np.uint64),
        stack=np.zeros(len(rows), np.int32),
        pool=None,
        settings=FINE,
    )


def many_blocks(count: int, rng: random.Random) -> list[tuple[Action, int, int]]:
    """One segment, filled with blocks that are freed in any order: half of the time there are many holes."""
    places = [BASE + 512 * index for index in range(count)]
    rows = [(Action.SEGMENT_ALLOC, BASE, 512 * count), *((Action.ALLOC, place, 512) for place in places)]
    for place in rng.sample(places, count):
        rows += [(Action.FREE_REQUESTED, place, 512), (Action.FREE_COMPLETED, place, 512)]
    return rows


def many_segments(count: int, rng: random.Random) -> list[tuple[Action, int, int]]:
    """Made in any order, released in another."""
    places = [BASE + 4 * MiB * index for index in range(count)]
    made = [(Action.SEGMENT_ALLOC, place, 2 * MiB) for place in rng.sample(places, count)]
    return made + [(Action.SEGMENT_FREE, place, 2 * MiB) for place in rng.sample(places, count)]


def many_pages(count: int, rng: random.Random) -> list[tuple[Action, int, int]]:
    """One row of pages, every second one given back, and some of these mapped again."""
    places = [BASE + 2 * MiB * index for index in range(count)]
    gone = rng.sample(places[::2], count // 2)
    return [
        *((Action.SEGMENT_MAP, place, 2 * MiB) for place in places),
        *((Action.SEGMENT_UNMAP, place, 2 * MiB) for place in gone),
        *((Action.SEGMENT_MAP, place, 2 * MiB) for place in rng.sample(gone, count // 4)),
    ]


@pytest.mark.parametrize("made", [many_blocks, many_segments, many_pages])
@pytest.mark.parametrize("seed", range(3))
def test_more_than_one_chunk_of_everything(
    made: Callable[[int, random.Random], list[tuple[Action, int, int]]], seed: int
) -> None:
    rows = made(2000, random.Random(seed))
    native, reference = kernel(native=True), kernel(native=False)
    ways = [rows, rows[1:], rows[len(rows) // 2 :], rows[:2000] + rows[1900:]]
    for events in map(made_events, ways):
        assert forward(native, events, MemoryMap(), PrivatePools.none(), {}) == forward(
            reference, events, MemoryMap(), PrivatePools.none(), {}
        )
        assert flat(native.trace_alone(events)) == flat(reference.trace_alone(events))
    events = made_events(rows)
    at_end = reference.forward_pass(events, MemoryMap(), PrivatePools.none(), {})[0].at_end
    for window in (events, made_events(rows[len(rows) // 3 :])):
        assert outcome(lambda window=window: native.map_before(window, at_end)) == outcome(
            lambda window=window: reference.map_before(window, at_end)
        )


@pytest.mark.parametrize("kernel_", [True, False], ids=["native", "reference"])
def test_searches_end_with_the_budget(kernel_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole that is unmapped from its middle again and again, beside many others: each time all are looked through."""
    count = 7000
    pages = [(Action.SEGMENT_MAP, BASE, 2 * MiB * count)]
    unmapped = [(Action.SEGMENT_UNMAP, BASE + 2 * MiB * index, MiB) for index in range(1, count)]
    events = made_events(pages + unmapped)
    found = forward(kernel(native=kernel_), events, MemoryMap(), PrivatePools.none(), {})
    assert found[:3] == ("contradiction", 6325, "too many events do not fit the allocator's rules")


@given(legal_snapshots(), st.floats(0, 1))
@settings(max_examples=40)
def test_sums(raw: Raw, where: float) -> None:
    data = parsed(cut_front(raw, int(where * len(raw["device_traces"][0]))))
    native, reference = kernel(native=True), kernel(native=False)
    for device in data.devices:
        found = replay(data, device)
        blocks = found.lifetimes
        for pool in (-1, 0, 1):
            for end in (blocks.freed, blocks.died):
                for amount in (None, blocks.size):
                    sums = [np.zeros(found.events + 1, np.int64) for _ in range(2)]
                    for with_, delta in zip((native, reference), sums, strict=True):
                        with_.add_lifetimes(delta, blocks.born, end, amount, blocks.large, pool)
                    assert sums[0].tolist() == sums[1].tolist()
            for log in (found.splits, found.segments):
                for amount in (log.count, log.bytes):
                    sums = [np.zeros(found.events + 1, np.int64) for _ in range(2)]
                    for with_, delta in zip((native, reference), sums, strict=True):
                        with_.add_changes(delta, log.event, amount, log.large, pool)
                    assert sums[0].tolist() == sums[1].tolist()


def test_sums_refuse_rows_of_no_event() -> None:
    """What was kept on disk may be damaged: nothing may be written outside the column."""
    column, large = np.array([5], np.int64), np.zeros(1, np.bool_)
    for born in (3, -2, 2**62, -(2**63)):
        with pytest.raises(IndexError):
            kernel(native=True).add_lifetimes(
                np.zeros(3, np.int64), np.array([born]), np.array([2**63 - 1]), column, large, -1
            )
    for event in (2, -2, 2**31 - 1, -(2**31)):
        with pytest.raises(IndexError):
            kernel(native=True).add_changes(np.zeros(3, np.int64), np.array([event], np.int32), column, large, -1)
    with pytest.raises(ValueError, match="differ in length"):
        kernel(native=True).add_changes(np.zeros(3, np.int64), np.zeros(2, np.int32), column, large, -1)


def test_nothing_native_is_asked_of_an_installation_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.allocator.kernel.HAS_NATIVE", False)
    assert kernel() is kernel(native=False)
    with pytest.raises(ImportError, match="without its native kernel"):
        kernel(native=True)
