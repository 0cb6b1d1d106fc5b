"""Where the driver puts segments: its own rules (driver-addresses.md 1-6), and the recording's word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from memtrace.allocator.simulate.driver import (
    RESERVATION,
    DivergedError,
    Draw,
    Moments,
    RecordedDriver,
    RuledDriver,
)
from memtrace.allocator.simulate.requests import SegmentEvents, SegmentKind

MiB, GiB = 1 << 20, 1 << 30
A = 1 << 46
"""The address of the old slab that the rules speak of."""
NOTHING = Moments(0, 0, 0)
HOST = Moments(0, 0, 4 * GiB)


def asked(driver: RuledDriver, size: float, row: int = 0) -> float:
    """MiB from A of a segment."""
    address = driver.allocate(row, int(size * MiB))
    assert address is not None
    return (address - A) / MiB


def given_back(driver: RuledDriver, at: float, size: float) -> None:
    driver.free(0, int(A + at * MiB), int(size * MiB))


@pytest.fixture
def plain() -> RuledDriver:
    return RuledDriver(Draw(0, NOTHING))


@pytest.fixture
def full() -> RuledDriver:
    """Without a hole in the slabs that were there: the next one is the first of torch's own."""
    driver = RuledDriver(Draw(0, NOTHING))
    assert [asked(driver, 2), asked(driver, 24)] == [-66, 8]
    return driver


TOP = -512
"""Where the first slab of 32 goes."""


# ---- the state when torch first allocates


def test_the_first_small_segment_goes_behind_the_local_memory(plain: RuledDriver) -> None:
    assert asked(plain, 2) == -66


@pytest.mark.parametrize("size", [4, 20, 24])
def test_the_first_larger_one_into_the_old_slab(plain: RuledDriver, size: int) -> None:
    assert asked(plain, size) == 8


def test_one_that_fits_in_neither_gets_a_slab_below(plain: RuledDriver) -> None:
    assert asked(plain, 26) == TOP


# ---- slabs


def test_sizes_count_in_twos(plain: RuledDriver) -> None:
    assert [asked(plain, 3), asked(plain, 2)] == [8, -66]
    assert asked(plain, 2) == 12


def test_a_new_slab_is_filled_from_its_low_end(full: RuledDriver) -> None:
    assert [asked(full, size) for size in (20, 10, 2)] == [TOP, TOP + 20, TOP + 30]


def test_a_slab_is_a_multiple_of_32(full: RuledDriver) -> None:
    """2,050 take 2,080: the 30 behind them serve the next ones."""
    first = asked(full, 2050)
    assert first == TOP + 32 - 2080
    assert asked(full, 30) == first + 2050
    assert asked(full, 32) == first - 32


def test_the_newest_slab_is_searched_first(full: RuledDriver) -> None:
    older, newer = asked(full, 24), asked(full, 20)
    assert (older, newer) == (TOP, TOP - 32)
    assert [asked(full, 8), asked(full, 4)] == [newer + 20, newer + 28]
    assert asked(full, 8) == older + 24


def test_neither_use_nor_a_free_makes_a_slab_newer(full: RuledDriver) -> None:
    older, newer = [asked(full, 16), asked(full, 16)], [asked(full, 16), asked(full, 16)]
    given_back(full, newer[0], 16)
    given_back(full, older[1], 16)
    assert [asked(full, 2), asked(full, 16)] == [newer[0], older[1]]


def test_of_a_slabs_holes_the_smallest_that_fits_and_then_the_lowest(full: RuledDriver) -> None:
    at = [asked(full, size) for size in (8, 2, 4, 2, 4, 2, 10)]
    assert at == [TOP + offset for offset in (0, 8, 10, 14, 16, 20, 22)]
    for index, size in ((0, 8), (2, 4), (4, 4)):
        given_back(full, at[index], size)
    assert [asked(full, 4), asked(full, 4), asked(full, 4)] == [at[2], at[4], at[0]]


def test_a_hole_is_taken_at_its_low_end(full: RuledDriver) -> None:
    at = [asked(full, 2), asked(full, 20), asked(full, 10)]
    given_back(full, at[1], 20)
    assert [asked(full, 6), asked(full, 14)] == [at[1], at[1] + 6]


def test_a_large_request_may_go_into_a_hole(full: RuledDriver) -> None:
    large, _ = asked(full, 650), asked(full, 22)
    given_back(full, large, 650)
    assert [asked(full, 394), asked(full, 256)] == [large, large + 394]


def test_neighbouring_holes_join(full: RuledDriver) -> None:
    at = [asked(full, 8) for _ in range(4)]
    for index in (0, 2, 1):
        given_back(full, at[index], 8)
    assert asked(full, 24) == at[0]


def test_holes_of_two_slabs_do_not_join(full: RuledDriver) -> None:
    first, second = [asked(full, 16), asked(full, 16)], [asked(full, 16), asked(full, 16)]
    given_back(full, first[0], 16)
    given_back(full, second[1], 16)
    assert second[1] + 16 == first[0]
    assert asked(full, 32) == TOP - 64


# ---- address space


def test_slabs_go_down(full: RuledDriver) -> None:
    assert [asked(full, 32) for _ in range(4)] == [TOP, TOP - 32, TOP - 64, TOP - 96]


def test_one_freed_slab_between_two_is_not_used_again(full: RuledDriver) -> None:
    at = [asked(full, 32) for _ in range(4)]
    given_back(full, at[1], 32)
    assert asked(full, 32) == at[3] - 32


def test_of_two_adjacent_ones_the_upper_is(full: RuledDriver) -> None:
    at = [asked(full, 32) for _ in range(5)]
    given_back(full, at[2], 32)
    given_back(full, at[1], 32)
    assert asked(full, 32) == at[1]
    assert asked(full, 32) == at[4] - 32


def test_three_adjacent_ones_hold_a_slab_of_64(full: RuledDriver) -> None:
    at = [asked(full, 32) for _ in range(5)]
    for index in (1, 3, 2):
        given_back(full, at[index], 32)
    assert asked(full, 64) == at[2]


def test_a_slab_goes_back_only_with_its_last_segment(full: RuledDriver) -> None:
    at = [asked(full, 32), asked(full, 16), asked(full, 16), asked(full, 32), asked(full, 32)]
    given_back(full, at[3], 32)
    given_back(full, at[1], 16)
    assert asked(full, 32) == at[4] - 32  # only the lower 32 are free
    given_back(full, at[2], 16)
    assert asked(full, 32) == at[1]


def test_what_it_did_not_give_it_takes_and_forgets(full: RuledDriver) -> None:
    given_back(full, -(1 << 20), 20)
    given_back(full, 1 << 20, 20)
    assert asked(full, 32) == TOP


def test_nothing_is_given_twice() -> None:
    """A long mix: what is held never overlaps."""
    chance = np.random.default_rng(1)
    for number in range(4):
        driver, held = RuledDriver(Draw(number, HOST)), {}
        for row in range(600):
            if held and chance.random() < 0.45:
                address = sorted(held)[int(chance.integers(len(held)))]
                driver.free(row, address, held.pop(address))
                continue
            size = int(chance.choice([2, 4, 20, 22, 32, 64, 394])) * MiB
            address = driver.allocate(row, size)
            assert address is not None
            assert address % (2 * MiB) == 0
            assert all(address + size <= other or other + held[other] <= address for other in held)
            held[address] = size


# ---- expandable segments


def test_regions_lie_apart(plain: RuledDriver) -> None:
    regions = [plain.reserve(row) for row in range(3)]
    starts = [region[0] for region in regions if region]
    assert [region[1] for region in regions if region] == [RESERVATION] * 3
    assert starts == sorted(starts, reverse=True)
    assert {high - low for high, low in pairwise(starts)} == {RESERVATION}
    assert min(starts) > A + (1 << 41)
    assert plain.map(0, starts[0], 20 * MiB)


# ---- draws


def addresses(
    number: int, moments: Moments = NOTHING, sizes: Sequence[float] = (26,) * 12, row: int = 0
) -> list[float]:
    driver = RuledDriver(Draw(number, moments))
    return [asked(driver, size, row) for size in sizes]


def test_a_draw_is_the_same_every_time() -> None:
    for number in range(6):
        assert addresses(number, HOST) == addresses(number, HOST)


def test_draws_differ_in_the_phase_of_the_address_space() -> None:
    """Slabs are aligned to 32 wherever the space begins; what else is on the device moves them by whole slabs."""
    found = [addresses(number) for number in range(21)]
    assert len({tuple(one) for one in found}) > 5
    assert all(at % 2 == 0 for one in found for at in one)


def test_the_rules_alone_have_no_unseen_blocks() -> None:
    assert addresses(0, HOST) == addresses(0, NOTHING) == [TOP - 32 * index for index in range(12)]


def test_unseen_blocks_are_placed_up_to_the_end_of_the_first_step() -> None:
    """Before: as without; after: all of them, at most 40."""
    numbers = range(1, 21)
    moments = Moments(100, 1000, 0)
    early = [addresses(number, moments, [2], row=0) for number in numbers]
    late = [addresses(number, moments, [2], row=1000) for number in numbers]
    assert sum(one == other for one, other in zip(early, late, strict=True)) < len(numbers)


def test_local_memory_moves_in_about_half_of_the_draws() -> None:
    """From the first kernels on: 414 are given up, and serve a segment of that size."""
    moments = Moments(50, 1, 0)
    before, after = 0, 0
    for number in range(1, 41):
        driver = RuledDriver(Draw(number, moments))
        found = [asked(driver, 394, 0) for _ in range(6)]
        before += any(-480 <= at < -64 for at in found)
        driver = RuledDriver(Draw(number, moments))
        found = [asked(driver, 394, 50) for _ in range(6)]
        after += any(-480 <= at < -64 for at in found)
    assert before == 0
    assert 8 < after < 32


def test_the_host_gives_address_space_back_where_it_moved_weights() -> None:
    def above(moments: Moments) -> int:
        return sum(any(at > 64 for at in addresses(number, moments, row=0)) for number in range(1, 21))

    assert above(HOST) > 10
    assert above(Moments(0, 0, GiB - 1)) == 0
    assert above(Moments(0, 0, GiB)) > 10


# ---- as recorded


def recorded(*rows: tuple[int, SegmentKind, int, int]) -> RecordedDriver:
    """`rows`: row, kind, address and size in MiB."""
    return RecordedDriver(
        SegmentEvents(
            row=np.array([row for row, *_ in rows], np.int64),
            kind=np.array([kind for _, kind, *_ in rows], np.uint8),
            address=np.array([A + at * MiB for *_, at, _ in rows], np.uint64),
            size=np.array([size * MiB for *_, size in rows], np.int64),
            stream=np.zeros(len(rows), np.int32),
        )
    )


ALLOC, FREE, MAP, UNMAP = SegmentKind


def test_it_answers_as_recorded() -> None:
    driver = recorded((0, ALLOC, 40, 20), (3, FREE, 40, 20), (3, ALLOC, 0, 30))
    assert driver.allocate(0, 20 * MiB) == A + 40 * MiB
    driver.free(3, A + 40 * MiB, 20 * MiB)
    assert driver.allocate(3, 30 * MiB) == A
    driver.finish(10)
    assert driver.refusals == []


def test_where_nothing_was_recorded_it_refused() -> None:
    driver = recorded((3, FREE, 40, 20))
    assert driver.allocate(1, 20 * MiB) is None
    assert driver.allocate(3, 20 * MiB) is None
    driver.free(3, A + 40 * MiB, 20 * MiB)
    assert driver.allocate(3, 20 * MiB) is None
    assert driver.refusals == [1, 3, 3]


def test_pages_are_mapped_as_recorded() -> None:
    driver = recorded((0, MAP, 40, 20), (2, UNMAP, 40, 20))
    assert driver.reserve(0) == (A + 40 * MiB, RESERVATION)
    assert driver.map(0, A + 40 * MiB, 20 * MiB)
    assert driver.reserve(1) is None
    assert not driver.map(1, A + 60 * MiB, 20 * MiB)
    driver.unmap(2, A + 40 * MiB, 20 * MiB)
    driver.finish(3)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (lambda driver: driver.allocate(0, 22 * MiB), "a segment of 23,068,672 bytes is asked for, not of 20,971,520"),
        (lambda driver: driver.map(0, A, 20 * MiB), "memory of another kind"),
        (lambda driver: driver.reserve(0), "memory of another kind"),
        (lambda driver: driver.free(0, A, 20 * MiB), "in the recording they are not"),
        (lambda driver: driver.unmap(0, A, 20 * MiB), "in the recording they are not"),
    ],
)
def test_another_question_parts_from_the_recording(question: Callable[[RecordedDriver], object], reason: str) -> None:
    with pytest.raises(DivergedError, match=reason) as parted:
        question(recorded((0, ALLOC, 0, 20)))
    assert (parted.value.row, parted.value.is_missed) == (0, False)


@pytest.mark.parametrize(("at", "size"), [(20, 20), (0, 40)])
def test_pages_elsewhere_part_too(at: int, size: int) -> None:
    with pytest.raises(DivergedError, match="are mapped, or elsewhere"):
        recorded((0, MAP, 0, 20)).map(0, A + at * MiB, size * MiB)


@pytest.mark.parametrize(("at", "size"), [(20, 20), (0, 40)])
def test_so_does_another_segment_given_back(at: int, size: int) -> None:
    with pytest.raises(DivergedError, match="in the recording they are not"):
        recorded((0, FREE, 0, 20)).free(0, A + at * MiB, size * MiB)


def test_an_event_that_is_not_asked_for_is_missed() -> None:
    driver = recorded((2, FREE, 0, 20), (5, ALLOC, 0, 20))
    driver.finish(2)
    with pytest.raises(DivergedError, match="a segment_free of 20,971,520 bytes here that is not needed") as parted:
        driver.finish(3)
    assert (parted.value.row, parted.value.is_missed) == (2, True)
    with pytest.raises(DivergedError, match="not needed"):
        driver.allocate(5, 20 * MiB)


def test_regions_that_were_dropped_are_not_used_up() -> None:
    """A program that empties its cache after each of very many steps takes a new region each time."""
    driver = RuledDriver(Draw(0, NOTHING))
    for row in range(3000):
        region = driver.reserve(row)
        assert region is not None, row
        assert driver.map(row, region[0], 40 * MiB)
        driver.unmap(row, region[0], 40 * MiB)
