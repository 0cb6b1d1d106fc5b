"""Size classes, and what of a file and of a release decides (snapshot-format 4, 6.2, 6.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import round_size

from memtrace.allocator.simulate.rules import NON_SPLIT_ROUNDING, Rules, Tie, conf_number, fraction_limit, tie_of
from memtrace.allocator.sizes import UNLIMITED, AllocatorSettings
from memtrace.io.versions import RELEASES

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def rounded(size: int, *divisions: int) -> int:
    table = divisions if len(divisions) == 16 else (*divisions, *(0,) * (16 - len(divisions)))
    return int(Rules(divisions=table).rounded(np.array([size], np.int64))[0])


def recorded(**raw: Any) -> Rules:
    return Rules.of(AllocatorSettings.of(raw, "2.11"), raw, Tie.ADDRESS)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512), (3 * GiB + 5, 3 * GiB + 512)],
)
def test_sizes_are_rounded_to_512(size: int, expected: int) -> None:
    assert rounded(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4 * 512, 4 * 512),  # up to 512 bytes a division: as without
        (4 * 512 - 1, 4 * 512),
        (4 * 512 + 1, 2560),
        (5 * KiB, 5 * KiB),
        (5 * KiB + 1, 6 * KiB),
        (7 * KiB + 1, 8 * KiB),
        (8 * KiB, 8 * KiB),
        (1200 * MiB, 1280 * MiB),
        (1024 * MiB, 1024 * MiB),
        (1024 * MiB + 1, 1280 * MiB),
        (1024 * MiB - 1, 1024 * MiB),
    ],
)
def test_a_division_rounds_to_a_part_of_a_power_of_two(size: int, expected: int) -> None:
    assert rounded(size, *(4,) * 16) == expected


def test_an_interval_has_its_own_division() -> None:
    size = 1024 * MiB + 1
    for index, expected in ((9, size + 511), (10, 1536 * MiB), (11, size + 511)):
        table = [0] * 16
        table[index] = 2
        assert rounded(size, *table) == expected


def test_the_first_interval_is_that_of_all_smaller_sizes_and_the_last_of_all_larger() -> None:
    assert rounded(600 * KiB, 2) == 768 * KiB
    assert rounded(600 * KiB, 0, 2) == 600 * KiB
    assert rounded(65 * GiB, *(0,) * 15, 2) == 96 * GiB
    assert rounded(65 * GiB, *(0,) * 14, 2, 0) == 65 * GiB


@pytest.mark.parametrize("parts", [2, 4, 8, 16, 1024])
def test_rounding_is_that_of_the_oracle(parts: int) -> None:
    table = {str(1 << power): parts for power in range(16)}
    near = [1 << power for power in range(9, 37)]
    sizes = [size + more for size in near for more in (-513, -512, -1, 0, 1, 511, 512, 513) if size + more > 0]
    sizes += [512 * parts + more for more in (-1, 0, 1)]
    assert [rounded(size, *(parts,) * 16) for size in sizes] == [round_size(size, table) for size in sizes]


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (12 * MiB, 12 * MiB),
        (20 * MiB + 512, 22 * MiB),
    ],
)
def test_what_the_driver_is_asked_for(need: int, expected: int) -> None:
    assert Rules().segment_size(need) == expected


def test_large_segments_have_the_size_that_is_set() -> None:
    rules = Rules(large_page=32 * MiB)
    assert [rules.segment_size(need * MiB) for need in (1, 2, 9, 10, 30)] == [
        size * MiB for size in (2, 32, 32, 10, 30)
    ]
    assert (rules.page(large=True), rules.page(large=False)) == (32 * MiB, 2 * MiB)
    assert Rules().page(large=True) == 20 * MiB


def test_the_tie_rule_changed_with_2_12_and_with_2_13() -> None:
    ties = {release: tie_of(release) for release in RELEASES}
    assert {ties[release] for release in RELEASES[: RELEASES.index("2.12")]} == {Tie.ADDRESS}
    assert ties["2.12"] == Tie.OBJECT
    assert {ties[release] for release in RELEASES[RELEASES.index("2.13") :]} == {Tie.SEGMENT}
    assert (tie_of("2.9.1"), tie_of("2.11.0"), tie_of("2.12.1")) == (Tie.ADDRESS, Tie.ADDRESS, Tie.OBJECT)


def test_what_a_file_does_not_say_has_torchs_default() -> None:
    assert recorded() == Rules()
    assert (Rules().non_split_rounding, Rules().large_page, Rules().limit) == (20 * MiB, 20 * MiB, None)


def test_the_files_settings_are_taken() -> None:
    conf = "max_non_split_rounding_mb:64, large_segment_size_mb:40"
    rules = recorded(
        PYTORCH_CUDA_ALLOC_CONF=conf,
        max_split_size=128 * MiB,
        garbage_collection_threshold=0.75,
        expandable_segments=True,
        roundup_power2_divisions={str(1 << power): 8 for power in range(16)},
    )
    assert rules == Rules((8,) * 16, 128 * MiB, True, 40 * MiB, 64 * MiB, 0.75)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.5, "0.5", None, float("nan"), float("inf")])
def test_no_threshold_is_made_of_what_is_none(threshold: object) -> None:
    assert recorded(garbage_collection_threshold=threshold).collect_above == 0.0


def test_a_split_size_of_minus_one_is_unlimited() -> None:
    assert recorded(max_split_size=-1).max_split_size == UNLIMITED


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("per_process_memory_fraction:0.5", 0.5),
        ("expandable_segments:True, per_process_memory_fraction: 0.25", 0.25),
        ("per_process_memory_fraction:1", 1.0),
        ("per_process_memory_fraction:half", None),
        ("per_process_memory_fraction:", None),
        ("per_process_memory_fraction:-1", None),
        ("per_process_memory_fraction:1e999", None),
        ("per_process_memory_fractions:1", None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_number_in_the_settings_string(conf: object, expected: float | None) -> None:
    raw = {} if conf is None else {"PYTORCH_CUDA_ALLOC_CONF": conf}
    assert conf_number(raw, "per_process_memory_fraction") == expected


def test_a_non_split_rounding_that_is_none_is_left_out() -> None:
    assert recorded(PYTORCH_CUDA_ALLOC_CONF="max_non_split_rounding_mb:x").non_split_rounding == NON_SPLIT_ROUNDING


def test_a_fraction_is_a_share_of_the_device() -> None:
    assert fraction_limit(0.5, 80 * GiB, "2.11") == 40 * GiB
    assert fraction_limit(0.3, 1001, "2.0") == 300


def test_a_fraction_of_one_is_no_limit_in_newer_releases() -> None:
    assert fraction_limit(1.0, GiB, "2.8") == GiB
    assert fraction_limit(1.0, GiB, "2.9") is None
    assert fraction_limit(1.0, GiB, "2.15") is None
    assert fraction_limit(0.999, 1000, "2.15") == 999
