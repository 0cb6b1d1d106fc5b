"""torch's allocator, rule by rule (snapshot-format 4 and 6), in both machines: the reference, and the native one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from memtrace.allocator.simulate.machine import NEVER, NOT_PLACED, Outcome
from memtrace.allocator.simulate.requests import (
    NO_BLOCK,
    Call,
    Requests,
    SegmentEvents,
    SegmentKind,
    StartMap,
    Workload,
)
from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.allocator.simulate.run import HAS_NATIVE, run

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
BASE = 1 << 40
FAR = 1 << 32
"""From one segment to the next, where a test does not say where they lie."""

Simulate = Callable[..., "Seen"]
Range = tuple[int, int, bool, bool, int]
"""MiB where it begins and of its size; large; expandable; stream."""


class Program:
    """What a program asks, line by line. Sizes in MiB (`bytes` more); a block is the number of its request."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.block_size: list[int] = []

    def _row(self, call: Call, block: int = NO_BLOCK, size: int = 0, stream: int = 0) -> None:
        self.rows.append((call, block, size, stream))

    def _block(self, size: int) -> int:
        self.block_size.append(size)
        return len(self.block_size) - 1

    def alloc(self, size: float, stream: int = 0, more: int = 0) -> int:
        asked = int(size * MiB) + more
        block = self._block(asked)
        self._row(Call.ALLOC, block, asked, stream)
        return block

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self.let_go(block)
            self.came_back(block)

    def let_go(self, block: int) -> None:
        self._row(Call.FREE_REQUESTED, block)

    def came_back(self, block: int) -> None:
        self._row(Call.FREE_COMPLETED, block)

    def freed_at_once(self, block: int) -> None:
        self._row(Call.FREE, block)

    def cached(self, *sizes: float, stream: int = 0) -> list[int]:
        """Segments of these sizes that hold nothing."""
        blocks = [self.alloc(size, stream) for size in sizes]
        self.free(*blocks)
        return blocks

    def fail(self, size: float, stream: int = 0) -> None:
        self._row(Call.OOM, size=int(size * MiB), stream=stream)

    def empty_cache(self) -> None:
        self._row(Call.EMPTY_CACHE)

    def private(self, call: Call, size: float, block: int = NO_BLOCK) -> None:
        self._row(call, block, int(size * MiB))

    def private_block(self, size: float) -> int:
        block = self._block(int(size * MiB))
        self._row(Call.PRIVATE_ALLOC, block, int(size * MiB))
        return block

    def before(self, size: float) -> int:
        """A block from before the first row; where it lies, `Start` says."""
        return self._block(int(size * MiB))

    def work(self, start: StartMap) -> Workload:
        call, block, size, stream = (
            np.array([row[index] for row in self.rows], kind)
            for index, kind in enumerate((np.uint8, np.int32, np.int64, np.int32))
        )
        count = len(self.block_size)
        return Workload(
            requests=Requests(call, np.arange(len(self.rows)), block, size, stream),
            recorded=events_of(()),
            start=start,
            streams=np.arange(4, dtype=np.uint64),
            address=np.zeros(count, np.uint64),
            block_size=np.array(self.block_size, np.int64),
            is_simulated=np.ones(count, np.bool_),
            events=len(self.rows),
            emptied=0,
            guessed_calls=0,
            has_private_pools=False,
        )


def events_of(rows: Sequence[tuple[int, int, int, int, int]]) -> SegmentEvents:
    kinds = (np.int64, np.uint8, np.uint64, np.int64, np.int32)
    return SegmentEvents(*(np.array([row[index] for row in rows], kind) for index, kind in enumerate(kinds)))


def start_of(
    ranges: Sequence[Range] = (),
    blocks: Sequence[tuple[int, int, int]] = (),
    pending: Sequence[int] = (),
    private: tuple[int, int, int] = (0, 0, 0),
) -> StartMap:
    """`blocks`: number, where it begins, size, in MiB; `pending`: the numbers of those that wait."""
    return StartMap(
        range_address=np.array([BASE + one[0] * MiB for one in ranges], np.uint64),
        range_size=np.array([one[1] * MiB for one in ranges], np.int64),
        range_large=np.array([one[2] for one in ranges], np.bool_),
        range_stream=np.array([one[4] for one in ranges], np.int32),
        range_expandable=np.array([one[3] for one in ranges], np.bool_),
        block=np.array([one[0] for one in blocks], np.int32),
        block_address=np.array([BASE + one[1] * MiB for one in blocks], np.uint64),
        block_size=np.array([one[2] * MiB for one in blocks], np.int64),
        block_pending=np.array([one[0] in pending for one in blocks], np.bool_),
        private_reserved=private[0] * MiB,
        private_live=private[1] * MiB,
        private_pending=private[2] * MiB,
    )


@dataclass
class Device:
    """A driver. `places`: MiB from BASE of the first segments, the rest lie behind, FAR from each other; `room` MiB of
    memory; regions of `region` MiB; `no_maps`: which calls of map it refuses."""

    places: Iterable[float] = ()
    room: float | None = None
    region: int = 1 << 20
    no_maps: Sequence[int] = ()
    used: int = 0
    regions: int = 0
    maps: int = 0
    freed: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = [int(BASE + place * MiB) for place in self.places]
        self.next = BASE + FAR

    def _has_room(self, size: int) -> bool:
        if self.room is not None and self.used + size > self.room * MiB:
            return False
        self.used += size
        return True

    def refuses(self, row: int) -> bool:
        return False

    def allocate(self, row: int, size: int) -> int | None:
        if not self._has_room(size):
            return None
        self.next += FAR
        return self.left.pop(0) if self.left else self.next

    def free(self, row: int, address: int, size: int) -> None:
        self.used -= size
        self.freed.append((address, size))

    def reserve(self, row: int) -> tuple[int, int] | None:
        self.regions += 1
        return BASE * 2 * self.regions, self.region * MiB

    def map(self, row: int, address: int, size: int) -> bool:
        self.maps += 1
        return self.maps - 1 not in self.no_maps and self._has_room(size)

    def unmap(self, row: int, address: int, size: int) -> None:
        self.used -= size


@dataclass
class Seen:
    """What came of it; `at` and `size_of` in MiB, from the first region in expandable memory."""

    outcome: Outcome
    device: Device

    def at(self, block: int) -> float:
        address = int(self.outcome.address[block])
        return (address - (BASE * 2 if address >= BASE * 2 else BASE)) / MiB

    def size_of(self, block: int) -> float:
        return float(self.outcome.size[block] / MiB)

    @property
    def asked(self) -> list[tuple[str, float]]:
        """Segment events: kind and MiB."""
        columns = self.outcome.segments.kind.tolist(), self.outcome.segments.size.tolist()
        return [(SegmentKind(kind).name, size / MiB) for kind, size in zip(*columns, strict=True)]

    @property
    def pages(self) -> list[tuple[str, float, float]]:
        """The same of expandable memory, with MiB from the first region's start."""
        events = self.outcome.segments
        places = [(int(address) - BASE * 2) / MiB for address in events.address]
        return [(kind, at, size) for (kind, size), at in zip(self.asked, places, strict=True)]

    @property
    def peak(self) -> float:
        return self.outcome.reserved_peak / MiB


@pytest.fixture(params=[False, True], ids=["reference", "native"])
def simulate(request: pytest.FixtureRequest) -> Simulate:
    """Runs a program. `limit` and `max_split` in MiB, `flush`: rows before which the cache is emptied; what else is
    named is a rule."""
    if request.param and not HAS_NATIVE:
        pytest.skip("the native machine is not built")

    def simulated(
        program: Program,
        device: Device | None = None,
        *,
        start: StartMap | None = None,
        flush: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
        **rules: Any,
    ) -> Seen:
        if "limit" in rules:
            rules["limit"] = int(rules["limit"] * MiB)
        if "max_split" in rules:
            rules["max_split_size"] = int(rules.pop("max_split") * MiB)
        device = Device() if device is None else device
        before = np.zeros(len(program.rows) + 1, np.bool_)
        before[list(flush)] = True
        outcome = run(
            program.work(start or start_of()),
            Rules(**rules),
            device,
            before if flush else None,
            progress=progress,
            native=request.param,
        )
        return Seen(outcome, device)

    return simulated


# ---- segments


@pytest.mark.parametrize(
    ("size", "more", "segment"),
    [
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 20),
        (10, -512, 20),
        (10, -511, 10),  # rounded: 10 MiB
        (10, 0, 10),
        (10, 1, 12),
        (12, 0, 12),
        (33, 0, 34),
    ],
)
def test_a_new_segment_has_the_size_of_its_class(simulate: Simulate, size: int, more: int, segment: int) -> None:
    program = Program()
    program.alloc(size, more=more)
    assert simulate(program).asked == [("ALLOC", segment)]


def test_segment_events_say_when_where_and_on_which_stream(simulate: Simulate) -> None:
    program = Program()
    program.alloc(30)
    program.free(program.alloc(30, stream=2))
    program.empty_cache()
    events = simulate(program, Device(places=(100, 50))).outcome.segments
    assert events.row.tolist() == [0, 1, 4]
    assert events.address.tolist() == [BASE + place * MiB for place in (100, 50, 50)]
    assert events.stream.tolist() == [0, 2, 2]


def test_roundup_makes_blocks_larger(simulate: Simulate) -> None:
    program = Program()
    block = program.alloc(33)
    seen = simulate(program, divisions=(4,) * 16)
    assert (seen.size_of(block), seen.asked) == (40, [("ALLOC", 40)])


def test_large_segments_of_another_size(simulate: Simulate) -> None:
    program = Program()
    program.alloc(5)
    program.alloc(24)
    assert simulate(program, large_page=32 * MiB).asked == [("ALLOC", 32)]


# ---- splitting


def test_a_small_block_is_split_if_512_bytes_are_left(simulate: Simulate) -> None:
    program = Program()
    blocks = [program.alloc(1), program.alloc(1, more=-512), program.alloc(0, more=512)]
    seen = simulate(program, Device(places=[0]))
    assert [seen.at(block) * MiB for block in blocks] == [0, MiB, 2 * MiB - 512]
    assert seen.asked == [("ALLOC", 2)]


@pytest.mark.parametrize(("more", "size"), [(0, 12.0), (-512, 11 - 512 / MiB)])
def test_a_large_block_is_split_if_more_than_one_mib_is_left(simulate: Simulate, more: int, size: float) -> None:
    program = Program()
    block = program.alloc(11, more=more)
    assert simulate(program).size_of(block) == size


def test_the_front_is_taken_and_the_rest_stays_behind_it(simulate: Simulate) -> None:
    program = Program()
    blocks = [program.alloc(5) for _ in range(4)]
    program.alloc(5)
    seen = simulate(program, Device(places=(0, 100)))
    assert [seen.at(block) for block in blocks] == [0, 5, 10, 15]
    assert seen.asked == [("ALLOC", 20)] * 2


@pytest.mark.parametrize(("need", "size"), [(62, 62), (64, 68)])
def test_a_request_of_max_split_size_takes_a_block_whole(simulate: Simulate, need: int, size: int) -> None:
    program = Program()
    program.cached(68)
    block = program.alloc(need)
    assert simulate(program, max_split=64).size_of(block) == size


def test_a_smaller_one_takes_the_front(simulate: Simulate) -> None:
    program = Program()
    program.cached(62)
    block = program.alloc(50)
    assert simulate(program, max_split=64).size_of(block) == 50


@pytest.mark.parametrize(("cached", "found"), [(62, True), (64, False)])
def test_a_request_below_max_split_size_gets_no_block_of_that_size(
    simulate: Simulate, cached: int, found: bool
) -> None:
    program = Program()
    program.cached(cached)
    program.alloc(50)
    assert simulate(program, max_split=64).asked == [("ALLOC", cached), *([] if found else [("ALLOC", 50)])]


@pytest.mark.parametrize(("cached", "found"), [(82, True), (84, False)])
def test_an_oversize_request_gets_no_block_20_mib_larger(simulate: Simulate, cached: int, found: bool) -> None:
    program = Program()
    program.cached(cached)
    program.alloc(64)
    assert simulate(program, max_split=64).asked == [("ALLOC", cached), *([] if found else [("ALLOC", 64)])]


def test_the_non_split_rounding_can_be_set(simulate: Simulate) -> None:
    program = Program()
    program.cached(84)
    block = program.alloc(64)
    seen = simulate(program, max_split=64, non_split_rounding=22 * MiB)
    assert (seen.size_of(block), len(seen.asked)) == (84, 1)


def test_without_max_split_size_any_block_is_split(simulate: Simulate) -> None:
    program = Program()
    program.cached(500)
    blocks = [program.alloc(200), program.alloc(200)]
    seen = simulate(program, Device(places=[0]))
    assert [seen.at(block) for block in blocks] == [0, 200]


# ---- which cached block


def test_the_smallest_block_that_fits_is_taken(simulate: Simulate) -> None:
    program = Program()
    program.cached(60, 30, 40)
    block = program.alloc(31)
    assert simulate(program, Device(places=(0, 100, 200))).at(block) == 200


def test_each_stream_has_its_own(simulate: Simulate) -> None:
    program = Program()
    program.cached(30, stream=1)
    program.cached(30, stream=3)
    program.alloc(30, stream=2)
    assert simulate(program).asked == [("ALLOC", 30)] * 3


def test_so_have_small_and_large_requests(simulate: Simulate) -> None:
    program = Program()
    program.cached(5)
    program.alloc(1)
    assert simulate(program).asked == [("ALLOC", 20), ("ALLOC", 2)]


@pytest.mark.parametrize(("tie", "at"), [(Tie.ADDRESS, 0), (Tie.OBJECT, 900), (Tie.SEGMENT, 900)])
def test_of_equal_segments_the_lower_one_or_the_older_one(simulate: Simulate, tie: Tie, at: int) -> None:
    program = Program()
    program.cached(30, 30, 30)
    block = program.alloc(30)
    assert simulate(program, Device(places=(900, 0, 500)), tie=tie).at(block) == at


@pytest.mark.parametrize(("tie", "at"), [(Tie.ADDRESS, 0), (Tie.OBJECT, 15), (Tie.SEGMENT, 0)])
def test_in_one_segment_the_lower_piece_or_the_older_object(simulate: Simulate, tie: Tie, at: int) -> None:
    """What is cut off is a new object; the rest keeps the first one."""
    program = Program()
    first, _, _ = program.alloc(5), program.alloc(5), program.alloc(5)
    program.free(first)
    block = program.alloc(5)
    assert simulate(program, Device(places=[0]), tie=tie).at(block) == at


@pytest.mark.parametrize(("tie", "at"), [(Tie.ADDRESS, 25), (Tie.OBJECT, 25), (Tie.SEGMENT, 905)])
def test_a_piece_of_an_older_segment_may_be_a_younger_object(simulate: Simulate, tie: Tie, at: int) -> None:
    """Free: 5 at 905, cut off the first segment late; and 5 at 25, which are what is left of the second one's block."""
    program = Program()
    program.alloc(5)
    second = program.alloc(30)
    piece, _, _ = (program.alloc(5) for _ in range(3))
    program.free(piece, second)
    program.alloc(25)
    block = program.alloc(5)
    assert simulate(program, Device(places=(900, 0)), tie=tie).at(block) == at


# ---- freeing


def test_free_neighbours_are_joined(simulate: Simulate) -> None:
    program = Program()
    blocks = [program.alloc(5) for _ in range(4)]
    program.free(blocks[0], blocks[2], blocks[1])
    block = program.alloc(15)
    seen = simulate(program, Device(places=[0]))
    assert (seen.at(block), seen.size_of(block), len(seen.asked)) == (0, 15, 1)


def test_a_block_that_waits_for_a_stream_is_not_reused(simulate: Simulate) -> None:
    program = Program()
    waiting = program.alloc(30)
    program.let_go(waiting)
    other = program.alloc(30)
    program.came_back(waiting)
    last = program.alloc(30)
    seen = simulate(program, Device(places=(0, 100)))
    assert [seen.at(block) for block in (other, last)] == [100, 0]
    assert (seen.outcome.allocated_peak, seen.outcome.active_peak) == (60 * MiB, 60 * MiB)


def test_pending_bytes_are_active_and_not_allocated(simulate: Simulate) -> None:
    program = Program()
    program.let_go(program.alloc(30))
    program.alloc(10)
    outcome = simulate(program).outcome
    assert (outcome.allocated_peak, outcome.active_peak) == (30 * MiB, 40 * MiB)


def test_both_events_of_a_free_may_be_one(simulate: Simulate) -> None:
    program = Program()
    program.freed_at_once(program.alloc(30))
    program.alloc(30)
    outcome = simulate(program).outcome
    assert (outcome.device_allocs, outcome.active_peak) == (1, 30 * MiB)


def test_stranded_bytes_are_counted_at_their_peak(simulate: Simulate) -> None:
    program = Program()
    first, second = program.alloc(5), program.alloc(5)
    program.free(first)  # 5 + 10
    program.free(second)  # whole: none
    assert simulate(program).outcome.inactive_split_peak == 15 * MiB
    assert simulate(program, expandable=True).outcome.inactive_split_peak == 0


# ---- limits and failures


@pytest.mark.parametrize(("limit", "served"), [(50, True), (50 - 1 / MiB, False)])
def test_the_limit_itself_may_be_reserved(simulate: Simulate, limit: float, served: bool) -> None:
    program = Program()
    program.alloc(20)
    program.alloc(30)
    outcome = simulate(program, limit=limit).outcome
    assert (outcome.ooms, outcome.first_oom, outcome.stopped) == ((0, NEVER, NEVER) if served else (1, 1, 1))


def test_the_run_stops_at_a_request_that_fails_for_the_first_time(simulate: Simulate) -> None:
    program = Program()
    held, never = program.alloc(20), program.alloc(40)
    after = program.alloc(4)
    seen = simulate(program, limit=30)
    outcome = seen.outcome
    assert (outcome.stopped, outcome.retries, outcome.reserved_peak) == (1, 1, 20 * MiB)
    assert [int(outcome.size[block]) for block in (held, never, after)] == [20 * MiB, 0, 0]
    assert int(outcome.address[after]) == NOT_PLACED


def test_a_request_that_failed_in_the_recording_may_fail_again(simulate: Simulate) -> None:
    program = Program()
    program.alloc(20)
    program.fail(64)
    program.fail(64)
    last = program.alloc(4)
    seen = simulate(program, limit=40)
    outcome = seen.outcome
    assert (outcome.ooms, outcome.first_oom, outcome.stopped, outcome.retries) == (2, 1, NEVER, 2)
    assert seen.size_of(last) == 4
    assert outcome.reserved_peak == 40 * MiB


def test_one_that_is_served_now_is_given_back_at_once(simulate: Simulate) -> None:
    program = Program()
    program.alloc(20)
    program.fail(64)
    block = program.alloc(64)
    seen = simulate(program, Device(places=(0, 100)))
    outcome = seen.outcome
    assert (outcome.ooms, outcome.first_oom, outcome.device_allocs, seen.at(block)) == (0, NEVER, 2, 100)
    assert (outcome.allocated_peak, outcome.active_peak) == (84 * MiB, 84 * MiB)


def test_before_it_fails_the_cache_is_given_back(simulate: Simulate) -> None:
    program = Program()
    program.cached(20, stream=1)
    program.cached(1)
    program.alloc(90)
    seen = simulate(program, limit=100)
    assert seen.asked == [("ALLOC", 20), ("ALLOC", 2), ("FREE", 20), ("FREE", 2), ("ALLOC", 90)]
    assert (seen.outcome.retries, seen.outcome.ooms, seen.outcome.device_frees) == (1, 0, 2)


def test_a_refusal_of_the_driver_is_met_the_same_way(simulate: Simulate) -> None:
    program = Program()
    program.cached(40)
    program.alloc(70)
    program.alloc(70)
    seen = simulate(program, Device(room=100))
    assert seen.asked == [("ALLOC", 40), ("FREE", 40), ("ALLOC", 70)]
    outcome = seen.outcome
    assert (outcome.retries, outcome.first_oom) == (2, len(program.rows) - 1)
    assert (outcome.proven, outcome.refused) == (70 * MiB, 110 * MiB)


def test_a_limit_is_no_refusal_of_the_driver(simulate: Simulate) -> None:
    program = Program()
    program.alloc(40)
    program.alloc(70)
    outcome = simulate(program, limit=100).outcome
    assert (outcome.proven, outcome.refused) == (40 * MiB, None)


def test_a_release_of_the_cache_waits_for_streams(simulate: Simulate) -> None:
    program = Program()
    waiting = program.alloc(40)
    program.let_go(waiting)
    block = program.alloc(70)
    program.came_back(waiting)
    program.alloc(20)
    seen = simulate(program, limit=100)
    assert seen.asked == [("ALLOC", 40), ("FREE", 40), ("ALLOC", 70), ("ALLOC", 20)]
    assert seen.size_of(block) == 70
    assert seen.outcome.active_peak == 90 * MiB


def test_a_split_segment_is_not_given_back(simulate: Simulate) -> None:
    program = Program()
    program.alloc(5)
    program.cached(15)
    program.empty_cache()
    assert simulate(program).asked == [("ALLOC", 20)]


def test_the_cache_is_given_back_in_order(simulate: Simulate) -> None:
    """The large pool before the small one; in each by stream, size, address."""
    program = Program()
    program.cached(1, 40, 30, 30)
    program.cached(24, stream=1)
    program.empty_cache()
    device = Device(places=(0, 100, 300, 200, 400))
    seen = simulate(program, device)
    assert [(int(address) - BASE) // MiB for address, _ in device.freed] == [200, 300, 100, 400, 0]
    assert seen.outcome.reserved_at_end == 0
    assert seen.peak == 2 + 40 + 30 + 30 + 24


def test_the_cache_can_be_emptied_before_a_row(simulate: Simulate) -> None:
    program = Program()
    program.cached(30)
    program.alloc(30)
    row = len(program.rows) - 1
    assert simulate(program).asked == [("ALLOC", 30)]
    seen = simulate(program, flush=[row])
    assert seen.asked == [("ALLOC", 30), ("FREE", 30), ("ALLOC", 30)]
    assert seen.outcome.segments.row.tolist() == [0, row, row]


def test_and_after_the_last_row(simulate: Simulate) -> None:
    program = Program()
    program.cached(30)
    seen = simulate(program, flush=[len(program.rows)])
    assert seen.asked == [("ALLOC", 30), ("FREE", 30)]
    assert seen.outcome.segments.row.tolist()[-1] == len(program.rows)


# ---- garbage collection


def aged() -> Program:
    """Cached on stream 0: 40 of age 2 and 44 of age 1 when 60 are asked for; 168 reserved, 84 of it cached."""
    program = Program()
    older, younger = program.alloc(40), program.alloc(44)
    program.alloc(40)
    program.free(older)
    program.alloc(44, stream=1)
    program.free(younger)
    program.alloc(60)
    return program


TAKEN = [("ALLOC", 40), ("ALLOC", 44), ("ALLOC", 40), ("ALLOC", 44)]


def test_what_is_at_least_of_average_age_is_collected(simulate: Simulate) -> None:
    seen = simulate(aged(), limit=300, collect_above=0.5)
    assert seen.asked == [*TAKEN, ("FREE", 40), ("ALLOC", 60)]
    assert (seen.outcome.retries, seen.outcome.device_frees) == (0, 1)


@pytest.mark.parametrize(("limit", "freed"), [(336, 0), (336 - 2 / MiB, 1)])
def test_only_above_the_threshold(simulate: Simulate, limit: float, freed: int) -> None:
    assert simulate(aged(), limit=limit, collect_above=0.5).outcome.device_frees == freed


def test_it_goes_on_until_enough_is_collected(simulate: Simulate) -> None:
    seen = simulate(aged(), limit=250, collect_above=0.5)  # 43 too much: the 40 of the first round are not enough
    assert seen.asked == [*TAKEN, ("FREE", 40), ("FREE", 44), ("ALLOC", 60)]
    assert seen.outcome.retries == 0


def test_a_round_is_not_cut_short(simulate: Simulate) -> None:
    program = Program()
    program.cached(40, 44)
    program.alloc(60)
    seen = simulate(program, limit=100, collect_above=0.5)  # 34 too much, both of age one: the first would do
    assert seen.asked[2:] == [("FREE", 40), ("FREE", 44), ("ALLOC", 60)]


@pytest.mark.parametrize("rules", [{"limit": 300}, {"collect_above": 0.5}, {}])
def test_without_limit_or_threshold_nothing_is_collected(simulate: Simulate, rules: dict[str, Any]) -> None:
    assert simulate(aged(), **rules).outcome.device_frees == 0


def test_nothing_is_collected_where_a_cached_block_serves(simulate: Simulate) -> None:
    program = Program()
    program.cached(80)
    program.alloc(70)
    assert simulate(program, limit=100, collect_above=0.1).asked == [("ALLOC", 80)]


def test_split_and_small_segments_are_not_collected(simulate: Simulate) -> None:
    program = Program()
    program.alloc(5)
    program.cached(15)
    program.cached(1)
    program.alloc(60)
    assert simulate(program, limit=100, collect_above=0.1).outcome.device_frees == 0


def test_segments_of_any_stream_are_collected_in_order(simulate: Simulate) -> None:
    program = Program()
    one, other = program.alloc(30, stream=1), program.alloc(20)
    program.free(one, other)
    program.alloc(60)
    device = Device(places=(0, 100))
    simulate(program, device, limit=100, collect_above=0.1)
    assert [(int(address) - BASE) // MiB for address, _ in device.freed] == [100, 0]


def test_expandable_memory_is_not_collected(simulate: Simulate) -> None:
    program = Program()
    program.cached(40)
    program.alloc(60)
    seen = simulate(program, expandable=True, limit=100, collect_above=0.1)
    assert [kind for kind, _ in seen.asked] == ["MAP", "MAP"]


# ---- release_available: oversize blocks, before the whole cache


def test_the_smallest_oversize_block_that_does_is_given_back(simulate: Simulate) -> None:
    program = Program()
    program.cached(100, 120, 140)
    program.alloc(70)  # 100 is 30 larger: not found
    seen = simulate(program, max_split=64, limit=380)
    assert seen.asked[3:] == [("FREE", 100), ("ALLOC", 70)]
    assert seen.outcome.retries == 0


def test_a_block_of_max_split_size_is_enough_for_any_smaller_request(simulate: Simulate) -> None:
    program = Program()
    program.cached(64)
    program.cached(40)
    program.alloc(60)
    seen = simulate(program, max_split=64, limit=110)
    assert seen.asked[2:] == [("FREE", 64), ("ALLOC", 60)]
    assert seen.outcome.retries == 0


def test_else_the_largest_ones_until_their_sum_does(simulate: Simulate) -> None:
    program = Program()
    program.cached(70, 82, 90)
    program.alloc(150)
    seen = simulate(program, max_split=64, limit=250)
    assert seen.asked[3:] == [("FREE", 90), ("FREE", 82), ("ALLOC", 150)]
    assert seen.outcome.retries == 0


def test_what_does_not_add_up_is_given_back_all_the_same_and_then_the_cache(simulate: Simulate) -> None:
    program = Program()
    program.cached(70)
    program.alloc(60)
    program.cached(62)  # not oversize: in the cache still
    program.alloc(180)
    seen = simulate(program, max_split=64, limit=250)
    assert seen.asked[3:] == [("FREE", 70), ("FREE", 62), ("ALLOC", 180)]
    assert seen.outcome.retries == 1


def test_oversize_blocks_of_other_streams_wait_for_the_cache_to_be_released(simulate: Simulate) -> None:
    program = Program()
    program.cached(100, stream=1)
    program.cached(100, stream=2)
    program.alloc(70)
    seen = simulate(program, max_split=64, limit=220)
    assert seen.asked[2:] == [("FREE", 100), ("FREE", 100), ("ALLOC", 70)]
    assert seen.outcome.retries == 1


def test_without_max_split_size_the_whole_cache_goes(simulate: Simulate) -> None:
    program = Program()
    program.cached(100)
    program.cached(30, stream=1)
    program.alloc(110)
    seen = simulate(program, limit=150)
    assert seen.asked[2:] == [("FREE", 100), ("FREE", 30), ("ALLOC", 110)]


# ---- expandable segments


@pytest.mark.parametrize(
    ("size", "more", "mapped"), [(0, 1, 2), (1, 0, 2), (1, 1, 20), (20, 0, 20), (20, 1, 40), (50, 0, 60)]
)
def test_whole_pages_are_mapped(simulate: Simulate, size: int, more: int, mapped: int) -> None:
    program = Program()
    program.alloc(size, more=more)
    seen = simulate(program, expandable=True)
    assert seen.pages == [("MAP", 0, mapped)]
    assert (seen.outcome.device_allocs, seen.peak) == (1, mapped)


def test_pages_have_the_size_that_is_set(simulate: Simulate) -> None:
    program = Program()
    program.alloc(5)
    assert simulate(program, expandable=True, large_page=32 * MiB).pages == [("MAP", 0, 32)]


def test_an_expandable_block_is_split_if_512_bytes_are_left(simulate: Simulate) -> None:
    program = Program()
    first, last = program.alloc(20, more=-1024), program.alloc(5)
    seen = simulate(program, expandable=True)
    assert seen.size_of(first) == 20 - 1024 / MiB
    assert seen.at(last) == 20 - 1024 / MiB
    assert seen.pages == [("MAP", 0, 20), ("MAP", 20, 20)]


def test_max_split_size_does_not_keep_expandable_blocks_whole(simulate: Simulate) -> None:
    program = Program()
    block = program.alloc(70)
    seen = simulate(program, expandable=True, max_split=64)
    assert (seen.size_of(block), seen.pages) == (70, [("MAP", 0, 80)])


def test_but_they_are_not_found_by_smaller_requests(simulate: Simulate) -> None:
    """80 mapped and cached: 50 do not get it, and the region grows behind what is free of it."""
    program = Program()
    program.cached(80)
    block = program.alloc(50)
    seen = simulate(program, expandable=True, max_split=64)
    assert seen.at(block) == 0
    assert seen.pages == [("MAP", 0, 80)]


def test_a_region_grows_by_what_is_missing(simulate: Simulate) -> None:
    program = Program()
    program.alloc(15)
    block = program.alloc(10)  # 5 are there
    more = program.alloc(36)  # 15 are there: 21 missing
    seen = simulate(program, expandable=True)
    assert [seen.at(one) for one in (block, more)] == [15, 25]
    assert seen.pages == [("MAP", 0, 20), ("MAP", 20, 20), ("MAP", 40, 40)]


def test_streams_and_pools_have_their_own_regions(simulate: Simulate) -> None:
    program = Program()
    for size, stream in ((5, 0), (1, 0), (5, 1), (5, 0)):
        program.alloc(size, stream)
    seen = simulate(program, expandable=True)
    assert seen.device.regions == 3
    assert seen.asked == [("MAP", 20), ("MAP", 2), ("MAP", 20)]


def test_the_piece_at_the_end_counts_with_the_room_behind_it(simulate: Simulate) -> None:
    """Free: 9 at 0, and 7 at 13, which can grow in expandable memory: then 5 take the former."""
    program = Program()
    first, _ = program.alloc(9), program.alloc(4)
    program.free(first)
    block = program.alloc(5)
    assert simulate(program, expandable=True).at(block) == 0
    assert simulate(program, Device(places=[0])).at(block) == 13


def holes() -> tuple[Program, list[int]]:
    """Mapped: 20 at 20 and 20 at 60, both in use; given back: 20 at 0, 20 at 40, and all behind 80."""
    program = Program()
    blocks = [program.alloc(20) for _ in range(4)]
    program.free(blocks[0], blocks[2])
    program.empty_cache()
    return program, blocks


GIVEN = [*(("MAP", at, 20) for at in (0, 20, 40, 60)), ("UNMAP", 0, 20), ("UNMAP", 40, 20)]


def test_the_lowest_hole_with_room_is_mapped_again(simulate: Simulate) -> None:
    program, _ = holes()
    blocks = [program.alloc(12), program.alloc(12), program.alloc(12)]
    seen = simulate(program, expandable=True)
    assert [seen.at(block) for block in blocks] == [0, 40, 80]
    assert seen.pages == [*GIVEN, ("MAP", 0, 20), ("MAP", 40, 20), ("MAP", 80, 20)]


def test_holes_that_are_too_small_are_left(simulate: Simulate) -> None:
    program, _ = holes()
    block = program.alloc(21)
    seen = simulate(program, expandable=True)
    assert (seen.at(block), seen.pages[len(GIVEN) :]) == (80, [("MAP", 80, 40)])


def test_holes_and_free_blocks_between_them_make_one(simulate: Simulate) -> None:
    program, blocks = holes()
    program.free(blocks[1])
    block = program.alloc(60)
    seen = simulate(program, expandable=True)
    assert (seen.at(block), seen.size_of(block)) == (0, 60)
    assert seen.pages[len(GIVEN) :] == [("MAP", 0, 20), ("MAP", 40, 20)]


def test_what_was_mapped_before_a_refusal_stays_until_the_cache_is_given_back(simulate: Simulate) -> None:
    program, blocks = holes()
    program.free(blocks[1])
    block = program.alloc(60)
    seen = simulate(program, Device(no_maps=[5]), expandable=True)
    assert seen.pages[len(GIVEN) :] == [("MAP", 0, 20), ("UNMAP", 0, 40), ("MAP", 0, 60)]
    assert (seen.outcome.retries, seen.at(block), seen.peak) == (1, 0, 80)
    assert seen.outcome.refused == 100 * MiB


def test_what_was_mapped_before_a_failure_is_no_ones(simulate: Simulate) -> None:
    program, blocks = holes()
    program.free(blocks[1])
    program.fail(60)
    block = program.alloc(20)
    seen = simulate(program, Device(no_maps=[5, 6]), expandable=True)
    assert seen.pages[len(GIVEN) :] == [("MAP", 0, 20), ("UNMAP", 0, 40), ("MAP", 0, 20)]
    assert (seen.outcome.ooms, seen.at(block)) == (1, 0)


def test_a_full_region_is_followed_by_another(simulate: Simulate) -> None:
    program = Program()
    program.alloc(30)
    program.alloc(20)
    seen = simulate(program, Device(region=40), expandable=True)
    assert seen.device.regions == 2
    assert seen.pages == [("MAP", 0, 40), ("MAP", BASE * 2 / MiB, 20)]


def test_only_whole_pages_inside_a_free_block_are_given_back(simulate: Simulate) -> None:
    program = Program()
    program.alloc(5)
    middle = program.alloc(50)
    program.alloc(5)
    program.free(middle)
    program.empty_cache()
    before, behind = program.alloc(15), program.alloc(15)
    seen = simulate(program, expandable=True)
    assert seen.pages == [("MAP", 0, 20), ("MAP", 20, 40), ("UNMAP", 20, 20)]
    assert sorted([seen.at(before), seen.at(behind)]) == [5, 40]
    assert seen.outcome.device_frees == 1


def test_a_free_block_without_a_whole_page_stays(simulate: Simulate) -> None:
    program = Program()
    program.alloc(5)
    middle = program.alloc(30)
    program.alloc(5)
    program.free(middle)
    program.empty_cache()
    assert simulate(program, expandable=True).pages == [("MAP", 0, 20), ("MAP", 20, 20)]


def test_a_region_that_holds_nothing_is_dropped(simulate: Simulate) -> None:
    program = Program()
    program.cached(30)
    program.empty_cache()
    program.alloc(5)
    seen = simulate(program, expandable=True)
    assert seen.device.regions == 2
    assert seen.asked == [("MAP", 40), ("UNMAP", 40), ("MAP", 20)]


def test_the_limit_is_held_against_the_segment_not_against_what_is_mapped(simulate: Simulate) -> None:
    """12 MiB are asked for under a limit of 12, and 20 mapped."""
    program = Program()
    program.alloc(12)
    seen = simulate(program, expandable=True, limit=12)
    assert (seen.outcome.ooms, seen.peak) == (0, 20)
    assert simulate(program, expandable=True, limit=12 - 1 / MiB).outcome.ooms == 1


def test_though_only_a_part_is_mapped_the_segment_must_be_within_the_limit(simulate: Simulate) -> None:
    program = Program()
    program.alloc(15)
    program.alloc(20)  # 5 are there: a page of 20 would do, and 20 are held against the limit
    assert simulate(program, expandable=True, limit=40).outcome.ooms == 0
    assert simulate(program, expandable=True, limit=40 - 1 / MiB).outcome.ooms == 1


# ---- what was there before


def test_a_window_begins_with_what_was_there(simulate: Simulate) -> None:
    """A segment of 40: 10 in use, 10 free, 5 waiting, 15 free; and a small one that is free."""
    program = Program()
    live, waiting = program.before(10), program.before(5)
    first, second = program.alloc(10), program.alloc(15)
    program.came_back(waiting)
    third = program.alloc(5)
    program.free(live)
    program.alloc(1)
    start = start_of([(0, 40, True, False, 0), (100, 2, False, False, 0)], [(live, 0, 10), (waiting, 20, 5)], [waiting])
    seen = simulate(program, start=start)
    assert [seen.at(block) for block in (first, second, third)] == [10, 25, 20]
    assert seen.asked == []
    assert (seen.peak, seen.outcome.proven) == (42, 42 * MiB)
    assert (seen.outcome.allocated_peak, seen.outcome.active_peak) == (40 * MiB, 40 * MiB)
    assert seen.outcome.inactive_split_peak == 25 * MiB


def test_what_waited_before_is_waited_for(simulate: Simulate) -> None:
    program = Program()
    waiting = program.before(30)
    program.alloc(50)
    start = start_of([(0, 30, True, False, 0)], [(waiting, 0, 30)], [waiting])
    assert simulate(program, start=start, limit=60).asked == [("FREE", 30), ("ALLOC", 50)]


def test_expandable_blocks_are_passed_over_once_the_setting_is_off(simulate: Simulate) -> None:
    program = Program()
    block = program.alloc(15)
    start = start_of([(0, 20, True, True, 0), (2000, 20, True, False, 0)])
    assert simulate(program, start=start).at(block) == 2000
    assert simulate(program, start=start, expandable=True).at(block) == 2000  # the smaller, as it cannot grow
    only = start_of([(0, 20, True, True, 0)])
    assert simulate(program, start=only).asked == [("ALLOC", 16)]
    assert simulate(program, start=only, expandable=True).at(block) == 0


def test_expandable_ranges_of_before_are_parts_of_one_region(simulate: Simulate) -> None:
    program = Program()
    live = program.before(20)
    block = program.alloc(45)
    start = start_of([(0, 20, True, True, 0), (60, 20, True, True, 0)], [(live, 60, 20)])
    seen = simulate(program, start=start, expandable=True)
    assert seen.at(block) == 0
    assert seen.asked == [("MAP", 40)]
    assert seen.device.regions == 0


def test_an_expandable_block_is_no_oversize_block_to_give_back(simulate: Simulate) -> None:
    """The one of 100 is expandable: the next smaller one, of 80, goes instead; the sum does not do."""
    program = Program()
    program.alloc(90)
    start = start_of([(0, 100, True, True, 0), (2000, 80, True, False, 0)])
    seen = simulate(program, start=start, max_split=64, limit=200)
    assert seen.asked == [("FREE", 80), ("UNMAP", 100), ("ALLOC", 90)]
    assert seen.outcome.retries == 1


def test_a_part_of_a_segment_is_no_oversize_block_to_give_back(simulate: Simulate) -> None:
    """The rest of 150 was split off before max_split_size was 100: a driver takes whole segments only."""
    program = Program()
    live = program.before(50)
    program.fail(120)
    program.free(live)
    program.empty_cache()
    start = start_of([(0, 200, True, False, 0)], [(live, 0, 50)])
    seen = simulate(program, start=start, max_split=100, limit=250)
    assert seen.asked == [("FREE", 200)]
    assert (seen.outcome.ooms, seen.outcome.retries, seen.outcome.reserved_at_end) == (1, 1, 0)


def test_nor_is_the_rest_of_a_large_segment_above_max_split_size(simulate: Simulate) -> None:
    program = Program()
    block = program.alloc(5)
    program.fail(120)
    program.free(block)
    program.empty_cache()
    seen = simulate(program, large_page=200 * MiB, max_split=64, limit=250)
    assert seen.asked == [("ALLOC", 200), ("FREE", 200)]
    assert seen.outcome.segments.row.tolist() == [0, len(program.rows) - 1]


# ---- private pools, as recorded


def test_private_pools_are_counted_and_not_simulated(simulate: Simulate) -> None:
    program = Program()
    program.private(Call.PRIVATE_SEGMENT, 20)
    block = program.private_block(15)
    program.alloc(30)
    program.private(Call.PRIVATE_FREE_REQUESTED, 15, block)
    program.private(Call.PRIVATE_FREE_COMPLETED, 15, block)
    program.private(Call.PRIVATE_SEGMENT_FREE, 20)
    program.alloc(40)
    seen = simulate(program, start=start_of(private=(10, 4, 2)))
    outcome = seen.outcome
    assert seen.asked == [("ALLOC", 30), ("ALLOC", 40)]
    assert (outcome.reserved_peak, outcome.reserved_at_end) == (80 * MiB, 80 * MiB)
    assert (outcome.allocated_peak, outcome.active_peak) == (74 * MiB, 76 * MiB)
    assert (outcome.device_allocs, outcome.device_frees) == (3, 1)


def test_nothing_is_given_back_for_a_private_segment(simulate: Simulate) -> None:
    program = Program()
    program.cached(30)
    program.private(Call.PRIVATE_SEGMENT, 80)
    outcome = simulate(program, limit=100).outcome
    assert (outcome.retries, outcome.ooms, outcome.stopped) == (0, 1, len(program.rows) - 1)
    assert simulate(program, limit=110).outcome.ooms == 0


def test_a_private_block_freed_at_once(simulate: Simulate) -> None:
    program = Program()
    block = program.private_block(15)
    program.private(Call.PRIVATE_FREE, 15, block)
    program.alloc(12)
    outcome = simulate(program).outcome
    assert (outcome.allocated_peak, outcome.active_peak) == (15 * MiB, 15 * MiB)


# ---- the run


def test_nothing_asked_is_nothing_done(simulate: Simulate) -> None:
    outcome = simulate(Program()).outcome
    assert (outcome.reserved_peak, outcome.proven, outcome.refused, outcome.first_oom) == (0, 0, None, NEVER)
    assert len(outcome.segments) == 0


def test_progress_is_heard(simulate: Simulate) -> None:
    heard: list[tuple[int, int]] = []
    program = Program()
    block = program.alloc(1)
    program.rows += [(Call.FREE, block, 0, 0), (Call.ALLOC, block, MiB, 0)] * 60_000
    simulate(program, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(0, 120_001), (100_000, 120_001)]


def test_the_columns_cannot_be_written_to(simulate: Simulate) -> None:
    program = Program()
    program.alloc(1)
    outcome = simulate(program).outcome
    for column in (outcome.address, outcome.size, outcome.segments.row):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
