"""The native machine against the reference in Python: the same outcome, the same questions to the driver in the same
order, the same errors, on any workload."""

from __future__ import annotations

import functools
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import cut_front, legal_snapshots, random_program, random_settings, ring
from numpy.typing import NDArray
from recordings import fixture_names, snapshot_path

import memtrace
from memtrace.allocator import replay
from memtrace.allocator.simulate.driver import Draw, Driver, Moments, RecordedDriver, RuledDriver
from memtrace.allocator.simulate.machine import HEARD_EVERY, NEVER, Machine
from memtrace.allocator.simulate.requests import (
    NO_BLOCK,
    Call,
    Requests,
    SegmentEvents,
    StartMap,
    Workload,
    workload,
)
from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.allocator.simulate.run import HAS_NATIVE, unfit
from memtrace.allocator.sizes import UNLIMITED
from memtrace.io.parse import parse

if HAS_NATIVE:
    from memtrace.allocator.simulate import _machine

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="needs the native machine")

MiB = 1 << 20
Raw = dict[str, Any]
Made = Callable[[], Driver]
Flags = NDArray[np.bool_] | None
MOST_ROWS = 5_000
"""Of a recording under rules that are not its own: the reference takes some seconds for a million."""


def ruled(number: int = 0, kernels_from: int = 0, kernels_until: int = 0, *, narrow: bool = False) -> Driver:
    return (Narrow if narrow else RuledDriver)(Draw(number, Moments(kernels_from, kernels_until, 2 << 30)))


class Narrow(RuledDriver):
    """Regions that are soon full."""

    def reserve(self, row: int) -> tuple[int, int] | None:
        space = super().reserve(row)
        return space and (space[0], 60 * MiB)


class Noted:
    """Passes questions on and writes them down; says no to those in `refused`, and breaks at the one in `broken`."""

    def __init__(self, driver: Driver, refused: Iterable[int] = (), broken: int = -1) -> None:
        self.driver, self.refused, self.broken = driver, frozenset(refused), broken
        self.asked: list[tuple[Any, ...]] = []

    def refuses(self, row: int) -> bool:
        return not self._note("refuses", row)

    def allocate(self, row: int, size: int) -> int | None:
        return self.driver.allocate(row, size) if self._note("allocate", row, size) else None

    def free(self, row: int, address: int, size: int) -> None:
        self._note("free", row, address, size)
        self.driver.free(row, address, size)

    def reserve(self, row: int) -> tuple[int, int] | None:
        return self.driver.reserve(row) if self._note("reserve", row) else None

    def map(self, row: int, address: int, size: int) -> bool:
        return self._note("map", row, address, size) and self.driver.map(row, address, size)

    def unmap(self, row: int, address: int, size: int) -> None:
        self._note("unmap", row, address, size)
        self.driver.unmap(row, address, size)

    def _note(self, *question: Any) -> bool:
        assert {type(part) for part in question[1:]} == {int}
        number = len(self.asked)
        self.asked.append(question)
        if number == self.broken:
            raise RuntimeError("broken")
        return number not in self.refused


def flat(value: Any) -> Any:
    """Something that compares: dataclasses of columns as (name, type, values)."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.flags.writeable, value.tobytes()
    if hasattr(value, "__dataclass_fields__"):
        return [(field.name, flat(getattr(value, field.name))) for field in fields(value)]
    return type(value), value


def came_of(run: Callable[[], object]) -> Any:
    """A result, or an error."""
    try:
        return flat(run())
    except Exception as error:  # noqa: BLE001 - whichever it is, the other one has to raise it too
        return type(error), error.args


def check(
    work: Workload,
    rules: Rules,
    made: Made,
    flush: Flags = None,
    refused: Iterable[int] = (),
    broken: int = -1,
) -> Any:
    """Both machines; what came of them."""
    ours, theirs = Noted(made(), refused, broken), Noted(made(), refused, broken)
    expected = came_of(lambda: Machine(work, rules, theirs, flush).run())
    assert came_of(lambda: _machine.run(work, rules, ours, flush)) == expected
    assert ours.asked == theirs.asked
    return expected


def head(work: Workload, rows: int) -> Workload:
    """Its first requests."""
    columns = {name: getattr(work.requests, name)[:rows] for name in Requests.__slots__}
    return replace(work, requests=Requests(**columns))


# ---- recordings


@functools.cache
def recorded(name: str) -> tuple[Workload, Rules] | None:
    """A recording's workload, and its rules by the release that most of them are of; None: there is none."""
    data = memtrace.load(snapshot_path(name), cache=False).data
    found = replay(data, data.devices[0])
    if unfit(found) is not None:
        return None
    return workload(data, found), Rules.of(found.settings, data.settings, Tie.ADDRESS)


def variations(rules: Rules, peak: int) -> dict[str, Rules]:
    limit = peak * 8 // 10
    return {
        "expandable": replace(rules, expandable=not rules.expandable),
        "max_split 64": replace(rules, max_split_size=64 * MiB),
        "max_split 21": replace(rules, max_split_size=21 * MiB, non_split_rounding=MiB),
        "max_split 21, limit": replace(rules, max_split_size=21 * MiB, limit=limit),
        "roundup": replace(rules, divisions=(4,) * 16),
        "large_page": replace(rules, large_page=40 * MiB),
        "large_page, expandable": replace(rules, large_page=40 * MiB, expandable=True),
        "gc": replace(rules, collect_above=0.6, limit=limit),
        "expandable, limit": replace(rules, expandable=True, limit=limit),
        "out of memory": replace(rules, limit=peak // 2),
        "object": replace(rules, tie=Tie.OBJECT),
        "object, expandable": replace(rules, tie=Tie.OBJECT, expandable=True),
        "segment": replace(rules, tie=Tie.SEGMENT),
        "segment, expandable": replace(rules, tie=Tie.SEGMENT, expandable=True),
    }


@pytest.mark.parametrize("name", fixture_names())
def test_shipped_recordings_as_recorded(name: str) -> None:
    found = recorded(name)
    if found is None:
        return
    work, rules = found
    for tie in Tie if len(work.requests) < MOST_ROWS else (Tie.ADDRESS,):
        check(work, replace(rules, tie=tie), lambda: RecordedDriver(work.recorded))


@pytest.mark.parametrize("name", fixture_names())
def test_shipped_recordings_under_other_rules(name: str) -> None:
    found = recorded(name)
    if found is None:
        return
    work, rules = head(found[0], MOST_ROWS), found[1]
    rows = len(work.requests)
    peak = Machine(work, rules, ruled()).run().reserved_peak
    number = itertools.count()
    for other in variations(rules, peak).values():
        draw = next(number), rows // 10, rows // 5
        check(work, other, lambda draw=draw: ruled(*draw))  # type: ignore[misc]
    every = np.arange(rows) % 1000 == 0
    for other in (rules, replace(rules, expandable=not rules.expandable)):
        check(work, other, lambda: ruled(1, 0, rows), every)


@pytest.mark.slow
@pytest.mark.parametrize("name", fixture_names())
def test_whole_recordings_under_other_rules(name: str) -> None:
    found = recorded(name)
    if found is None or len(found[0].requests) <= MOST_ROWS:
        return
    work, rules = found
    peak = _machine.run(work, rules, ruled()).reserved_peak
    for other in variations(rules, peak).values():
        check(work, other, lambda: ruled(3, 100, 1000))


# ---- legal traces and windows of them: starts as a replay finds them


def check_raw(raw: Raw, rng: random.Random) -> bool:
    data = parse(raw, path="made", file_bytes=0)
    if not data.devices:
        return False
    found = replay(data, 0)
    if unfit(found) is not None:
        return False
    work = workload(data, found)
    own = Rules.of(found.settings, data.settings, Tie.ADDRESS)
    check(work, own, lambda: RecordedDriver(work.recorded))
    for _ in range(3):
        check_any(work, random_rules(rng), rng)
    return True


def check_any(work: Workload, rules: Rules, rng: random.Random) -> Any:
    """One run with a driver of its rules, which may refuse, break, or be asked to flush."""
    rows = len(work.requests)
    draw = rng.randrange(3), rng.randrange(rows + 1), rng.randrange(rows + 1)
    refused = [number for number in range(100) if rng.random() < 0.2] if rng.random() < 0.2 else []
    flush = (
        np.array([rng.random() < 0.02 for _ in range(rows + rng.randrange(2))], np.bool_)
        if rng.random() < 0.3
        else None
    )
    broken = rng.randrange(60) if rng.random() < 0.05 else -1
    narrow = rng.random() < 0.2
    return check(work, rules, lambda: ruled(*draw, narrow=narrow), flush, refused, broken)


def random_rules(rng: random.Random) -> Rules:
    limit = rng.choice((None, None, rng.randrange(8, 512) * MiB, rng.randrange(64, 2048) * MiB))
    return Rules(
        divisions=rng.choice(((0,) * 16, (0,) * 16, (4,) * 16, tuple(rng.choice((0, 1, 2, 8)) for _ in range(16)))),
        max_split_size=rng.choice((UNLIMITED, UNLIMITED, 21 * MiB, 32 * MiB, 64 * MiB)),
        expandable=rng.random() < 0.4,
        large_page=rng.choice((20, 20, 40, 11)) * MiB,
        non_split_rounding=rng.choice((20, 20, 1, 0)) * MiB,
        collect_above=rng.choice((0.0, 0.0, 0.3, 0.8, 1.0)),
        limit=limit,
        tie=rng.choice(list(Tie)),
    )


@given(legal_snapshots(200), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_legal_traces(raw: Raw, rng: random.Random) -> None:
    check_raw(raw, rng)


def test_windows() -> None:
    done = 0
    for seed in range(150):
        rng = random.Random(seed)
        raw = random_program(rng, rng.randrange(20, 300), **random_settings(rng))
        count = len(raw["device_traces"][0])
        if count > 3:
            raw = cut_front(raw, rng.randrange(count - 2)) if rng.random() < 0.5 else ring(raw, rng.randrange(2, count))
            done += check_raw(raw, rng)
    assert done > 100


# ---- workloads made as columns

START = 1 << 40
SIZES = (
    1,
    512,
    700,
    4096,
    100_000,
    MiB - 512,
    MiB,
    MiB + 1,
    3 * MiB,
    9 * MiB,
    10 * MiB,
    19 * MiB,
    20 * MiB,
    32 * MiB,
    50 * MiB,
    64 * MiB,
)


def random_start(rng: random.Random) -> tuple[StartMap, list[int]]:
    """Ranges that touch or not, of both pools, whole ones and expandable ones; and the sizes of their blocks. Those of
    one pool and stream are of one kind: a region may grow over what lies behind it, which would then be there twice."""
    ranges: list[tuple[int, int, bool, int, bool]] = []
    blocks: list[tuple[int, int, bool]] = []
    expandable = {owner: rng.random() < 0.4 for owner in itertools.product((False, True), range(2))}
    at = START
    for _ in range(rng.choice((0, 0, 1, 5, 12))):
        large, size = rng.choice(((False, 2), (False, 2), (True, 20), (True, 22), (True, 60), (True, 100)))
        at += rng.choice((0, 0, 2, 64)) * MiB
        stream = rng.randrange(2)
        ranges.append((at, size * MiB, large, stream, expandable[large, stream]))
        end, cursor = at + size * MiB, at
        while True:
            cursor += rng.choice((0, 0, rng.choice(SIZES))) // 512 * 512
            size_of = max(512, rng.choice(SIZES) // 512 * 512)
            if cursor + size_of > end or rng.random() < 0.1:
                break
            blocks.append((cursor, size_of, rng.random() < 0.2))
            cursor += size_of
        at = end
    rows = list(range(len(blocks)))
    rng.shuffle(rows)
    sizes = [0] * len(blocks)
    for row, (_, size, _) in zip(rows, blocks, strict=True):
        sizes[row] = size
    start = StartMap(
        range_address=np.array([each[0] for each in ranges], np.uint64),
        range_size=np.array([each[1] for each in ranges], np.int64),
        range_large=np.array([each[2] for each in ranges], np.bool_),
        range_stream=np.array([each[3] for each in ranges], np.int32),
        range_expandable=np.array([each[4] for each in ranges], np.bool_),
        block=np.array(rows, np.int32),
        block_address=np.array([each[0] for each in blocks], np.uint64),
        block_size=np.array([each[1] for each in blocks], np.int64),
        block_pending=np.array([each[2] for each in blocks], np.bool_),
        private_reserved=rng.choice((0, 64 * MiB)),
        private_live=rng.choice((0, 4 * MiB)),
        private_pending=rng.choice((0, MiB)),
    )
    return start, sizes


def random_work(rng: random.Random, count: int, *, mad: float = 0.0) -> Workload:
    """Requests in any order that is legal; `mad`: the share of rows where nothing is asked of legality."""
    start, sizes = random_start(rng)
    pending = start.block_pending.tolist()
    live = [row for row, waits in zip(start.block.tolist(), pending, strict=True) if not waits]
    waiting = [row for row, waits in zip(start.block.tolist(), pending, strict=True) if waits]
    private: list[int] = []
    segments = 0
    rows: list[tuple[int, int, int, int]] = []
    common = [rng.choice(SIZES) for _ in range(3)]
    for _ in range(count):
        chance = rng.random()
        size, stream = rng.choice(common if rng.random() < 0.5 else SIZES), rng.randrange(3)
        if rng.random() < mad:
            rows.append((rng.choice((*Call, 200)), rng.randrange(len(sizes) + 1), size, stream))
        elif chance < 0.45:
            rows.append((Call.ALLOC, len(sizes), size, stream))
            live.append(len(sizes))
            sizes.append(size)
        elif chance < 0.75 and live:
            block = live.pop(rng.randrange(len(live)))
            call = rng.choice((Call.FREE, Call.FREE, Call.FREE_REQUESTED))
            rows.append((call, block, size, stream))
            if call == Call.FREE_REQUESTED:
                waiting.append(block)
        elif chance < 0.84 and waiting:
            rows.append((Call.FREE_COMPLETED, waiting.pop(rng.randrange(len(waiting))), size, stream))
        elif chance < 0.86:
            rows.append((Call.EMPTY_CACHE, NO_BLOCK, 0, 0))
        elif chance < 0.88:
            rows.append((Call.OOM, NO_BLOCK, rng.choice((size, 1 << 45, 1 << 48, 1 << 51, 2**63 - 1)), stream))
        elif chance < 0.91:
            call = rng.choice((Call.PRIVATE_SEGMENT, Call.PRIVATE_SEGMENT_FREE if segments else Call.PRIVATE_SEGMENT))
            segments += 1 if call == Call.PRIVATE_SEGMENT else -1
            rows.append((call, NO_BLOCK, 20 * MiB, 0))
        elif chance < 0.95:
            rows.append((Call.PRIVATE_ALLOC, len(sizes), size, stream))
            private.append(len(sizes))
            sizes.append(size)
        elif private:
            block = private.pop()
            if rng.random() < 0.5:
                rows.append((Call.PRIVATE_FREE, block, size, stream))
            else:
                rows.append((Call.PRIVATE_FREE_REQUESTED, block, size, stream))
                rows.append((Call.PRIVATE_FREE_COMPLETED, block, size, stream))
    sizes.append(512)  # a block that nobody asks for, unless madly
    return made(rows, start, sizes)


def made(rows: Sequence[tuple[int, int, int, int]], start: StartMap, sizes: list[int]) -> Workload:
    """A workload of (call, block, size, stream)."""
    call, block, size, stream = (np.array([row[column] for row in rows], np.int64) for column in range(4))
    requests = Requests(
        call=call.astype(np.uint8),
        event=np.arange(len(rows)),
        block=block.astype(np.int32),
        size=size,
        stream=stream.astype(np.int32),
    )
    nothing = SegmentEvents(
        row=np.zeros(0, np.int64),
        kind=np.zeros(0, np.uint8),
        address=np.zeros(0, np.uint64),
        size=np.zeros(0, np.int64),
        stream=np.zeros(0, np.int32),
    )
    return Workload(
        requests=requests,
        recorded=nothing,
        start=start,
        streams=np.arange(3, dtype=np.uint64),
        address=np.zeros(len(sizes), np.uint64),
        block_size=np.array(sizes, np.int64),
        is_simulated=np.ones(len(sizes), np.bool_),
        events=len(rows),
        emptied=0,
        guessed_calls=0,
        has_private_pools=True,
    )


def empty_start() -> StartMap:
    flags, rows = np.zeros(0, np.bool_), np.zeros(0, np.int32)
    addresses, sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return StartMap(addresses, sizes, flags, rows, flags, rows, addresses, sizes, flags, 0, 0, 0)


def test_oversize_blocks_that_are_just_enough() -> None:
    count, size = 3, 32 * MiB
    rows = [(Call.ALLOC, row, size, 0) for row in range(count)] + [(Call.FREE, row, 0, 0) for row in range(count)]
    work = made([*rows, (Call.ALLOC, count, 2 * size, 0)], empty_start(), [size] * count + [2 * size])
    rules = Rules(max_split_size=size, limit=4 * size)
    check(work, rules, lambda: ruled())
    found = _machine.run(work, rules, ruled())
    assert (found.retries, found.device_frees, found.first_oom) == (0, 2, NEVER)


def test_a_region_that_is_full_is_no_garbage() -> None:
    rows = [(Call.ALLOC, 0, 60 * MiB, 0), (Call.FREE, 0, 0, 0), (Call.ALLOC, 1, 50 * MiB, 1)]
    work = made(rows, empty_start(), [60 * MiB, 50 * MiB])
    rules = Rules(expandable=True, collect_above=0.5, limit=100 * MiB)
    check(work, rules, lambda: ruled(narrow=True))
    assert _machine.run(work, rules, ruled(narrow=True)).retries == 1


@given(st.randoms(use_true_random=False), st.integers(0, 60))
@settings(max_examples=150)
def test_random_workloads(rng: random.Random, count: int) -> None:
    check_any(random_work(rng, count), random_rules(rng), rng)


def test_many_random_workloads() -> None:
    """Far more of them, longer, and all that can happen does."""
    happened: dict[str, int] = dict.fromkeys(("retries", "ooms", "stopped", "refused", "frees", "splits", "error"), 0)
    for seed in range(1500):
        rng = random.Random(seed)
        found = check_any(random_work(rng, rng.randrange(300)), random_rules(rng), rng)
        if isinstance(found, tuple):
            assert found[0] is RuntimeError, found
            happened["error"] += 1
            continue
        values = {name: value for name, (*_, value) in ((name, value) for name, value in found)}
        happened["retries"] += values["retries"] > 0
        happened["ooms"] += values["ooms"] > 0
        happened["stopped"] += values["stopped"] != NEVER
        happened["refused"] += values["refused"] is not None
        happened["frees"] += values["device_frees"] > 0
        happened["splits"] += values["inactive_split_peak"] > 0
    assert min(happened.values()) > 20, happened


def test_workloads_that_no_program_has() -> None:
    """Blocks asked for twice, freed before they were or twice: the replay lets none through, but nothing may break."""
    errors = 0
    for seed in range(500):
        rng = random.Random(seed)
        work = random_work(rng, rng.randrange(200), mad=rng.choice((0.02, 0.2, 1.0)))
        errors += isinstance(check_any(work, random_rules(rng), rng), tuple)
    assert errors > 100


@pytest.mark.parametrize("call", [call for call in Call if call.name.startswith(("PRIVATE_A", "PRIVATE_F", "A", "F"))])
@pytest.mark.parametrize("row", [-1, 1, 2**31 - 1, -(2**31)])
def test_blocks_that_there_are_not(call: Call, row: int) -> None:
    work = made([(call, row, 512, 0)], empty_start(), [512])
    with pytest.raises(IndexError, match="there is no block"):
        _machine.run(work, Rules(), ruled())


@pytest.mark.parametrize("row", [-1, 1])
def test_blocks_of_the_start_that_there_are_not(row: int) -> None:
    start = replace(
        empty_start(),
        range_address=np.array([START], np.uint64),
        range_size=np.array([2 * MiB]),
        range_large=np.zeros(1, np.bool_),
        range_stream=np.zeros(1, np.int32),
        range_expandable=np.zeros(1, np.bool_),
        block=np.array([row], np.int32),
        block_address=np.array([START], np.uint64),
        block_size=np.array([512]),
        block_pending=np.ones(1, np.bool_),
    )
    with pytest.raises(IndexError, match="there is no block"):
        _machine.run(made([], start, [512]), Rules(), ruled())
    with pytest.raises(ValueError, match="columns of ranges differ"):
        _machine.run(made([], replace(start, range_size=np.zeros(0, np.int64)), [512]), Rules(), ruled())
    with pytest.raises(ValueError, match="columns of blocks differ"):
        _machine.run(made([], replace(start, block_size=np.zeros(0, np.int64)), [512]), Rules(), ruled())


def test_columns_that_differ_in_length() -> None:
    work = made([(Call.ALLOC, 0, 512, 0)], empty_start(), [512])
    short = replace(work.requests, block=np.zeros(0, np.int32))
    for broken, flush in (
        (replace(work, requests=short), None),
        (replace(work, block_size=np.zeros(0, np.int64)), None),
        (work, np.zeros(0, np.bool_)),
    ):
        with pytest.raises(ValueError, match=r"differ in length|fewer flags"):
            _machine.run(broken, Rules(), ruled(), flush)


def test_settings_that_no_torch_takes() -> None:
    work = made([(Call.ALLOC, 0, 2 * MiB, 0)], empty_start(), [512])
    with pytest.raises(ValueError, match="pages have a size"):
        _machine.run(work, Rules(large_page=0, expandable=True), ruled())
    for rules in (Rules(limit=1 << 70), Rules(limit=0), Rules(max_split_size=1 << 70), Rules(max_split_size=0)):
        check(work, rules, lambda: ruled())


class Odd:
    """A driver that answers one thing to all."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def refuses(self, row: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: self.given


@pytest.mark.parametrize("given", ["here", -1, 1 << 64, (1, 2, 3), (-1, 1), (0, 1 << 63)])
@pytest.mark.parametrize("expandable", [True, False])
def test_drivers_that_answer_anything(given: Any, expandable: bool) -> None:
    """Nothing worse than an error comes of it, nor of segments that lie over each other."""
    work = random_work(random.Random(3), 200)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        _machine.run(work, Rules(expandable=expandable), Odd(given))


@pytest.mark.parametrize(
    "given", [0, 1 << 40, 2**63 - 1, 2**64 - 1, (0, 0), (1 << 40, MiB), (1 << 63, 2**63 - 1), (0, -1)]
)
def test_segments_that_lie_over_each_other(given: Any) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        work, rules = random_work(rng, 200), replace(random_rules(rng), expandable=isinstance(given, tuple))
        came_of(functools.partial(_machine.run, work, rules, Odd(given)))


def test_progress() -> None:
    rows = 2 * HEARD_EVERY + 1
    work = made([(Call.EMPTY_CACHE, NO_BLOCK, 0, 0)] * rows, empty_start(), [])
    heard: list[list[tuple[int, int]]] = [[], []]
    _machine.run(work, Rules(), ruled(), None, lambda *at: heard[0].append(at))
    Machine(work, Rules(), ruled(), None, lambda *at: heard[1].append(at)).run()
    assert heard[0] == heard[1] == [(0, rows), (HEARD_EVERY, rows), (2 * HEARD_EVERY, rows)]

    def stop(done: int, _: int) -> None:
        if done:
            raise RuntimeError("heard enough")

    with pytest.raises(RuntimeError, match="heard enough"):
        _machine.run(work, Rules(), ruled(), None, stop)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
def test_it_can_be_interrupted() -> None:
    """Address space full of small gaps, each looked at for each request: without a signal it takes minutes."""
    count = 200_000
    where = START + np.arange(count, dtype=np.uint64) * np.uint64(6 * MiB)
    start = replace(
        empty_start(),
        range_address=where,
        range_size=np.full(count, 4 * MiB),
        range_large=np.ones(count, np.bool_),
        range_stream=np.zeros(count, np.int32),
        range_expandable=np.ones(count, np.bool_),
        block=np.arange(count, dtype=np.int32),
        block_address=where,
        block_size=np.full(count, 4 * MiB),
        block_pending=np.zeros(count, np.bool_),
    )
    rows = [(int(Call.ALLOC), count + row, 20 * MiB, 0) for row in range(count)]
    work = made(rows, start, [4 * MiB] * (2 * count))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            _machine.run(work, Rules(expandable=True), Odd(True))
        assert time.monotonic() - began < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
