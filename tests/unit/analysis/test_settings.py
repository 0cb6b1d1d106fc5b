"""Allocator settings as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from memtrace.allocator.simulate.rules import Rules, Tie
from memtrace.allocator.sizes import UNLIMITED
from memtrace.analysis.settings import Change, Settings, available
from memtrace.errors import QuestionError

MiB, GiB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    "change",
    [
        {"max_split_size_mb": 20},
        {"max_split_size_mb": -1},
        {"max_split_size_mb": (1 << 30) + 1},
        {"roundup_power2_divisions": 3},
        {"roundup_power2_divisions": -2},
        {"roundup_power2_divisions": 1 << 21},
        {"garbage_collection_threshold": 1.0},
        {"garbage_collection_threshold": -0.1},
        {"garbage_collection_threshold": float("nan")},
        {"garbage_collection_threshold": float("inf")},
        {"large_segment_size_mb": 10},
        {"large_segment_size_mb": 1 << 31},
        {"limit": 0},
        {"limit": -1},
        {"torch": "9.9"},
        {"torch": "2"},
        {"torch": ""},
    ],
)
def test_what_torch_would_refuse_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(QuestionError) as refused:
        Change(**change)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"max_split_size_mb": 21}, {"max_split_size": 21 * MiB}),
        ({"max_split_size_mb": 0}, {"max_split_size": UNLIMITED}),
        ({"roundup_power2_divisions": 8}, {"divisions": (8,) * 16}),
        ({"roundup_power2_divisions": 0}, {"divisions": (0,) * 16}),
        ({"roundup_power2_divisions": 1}, {"divisions": (1,) * 16}),
        ({"garbage_collection_threshold": 0.0}, {"collect_above": 0.0}),
        ({"garbage_collection_threshold": 0.99}, {"collect_above": 0.99}),
        ({"large_segment_size_mb": 11}, {"large_page": 11 * MiB}),
        ({"expandable_segments": False}, {"expandable": False}),
        ({"expandable_segments": True}, {"expandable": True}),
        ({"torch": "2.12"}, {"tie": Tie.OBJECT}),
        ({"torch": "2.13.0+cu130"}, {"tie": Tie.SEGMENT}),
        ({"limit": GiB, "empty_cache_every_step": True}, {}),
    ],
)
def test_a_change_changes_what_it_says_and_nothing_else(change: dict[str, Any], rules: dict[str, Any]) -> None:
    recorded = {"divisions": (4,) * 16, "max_split_size": 99 * MiB, "collect_above": 0.5, "large_page": 40 * MiB}
    before = Rules(**recorded, non_split_rounding=30 * MiB, expandable=True, tie=Tie.ADDRESS, limit=7 * GiB)
    after = Rules(**{name: getattr(before, name) for name in Rules.__slots__} | rules)
    assert Change(**change).applied(before) == after


def test_nothing_changed_is_nothing() -> None:
    assert Change().is_nothing
    assert not Change(max_split_size_mb=0).is_nothing
    assert not Change(expandable_segments=False).is_nothing
    assert (Change().conf(), Change().in_words()) == ("", "as recorded")


def test_the_stronger_of_two_is_taken_where_both_say_something() -> None:
    base = Change(expandable_segments=True, limit=GiB, max_split_size_mb=64)
    over = Change(expandable_segments=False, max_split_size_mb=0).over(base)
    assert over == Change(expandable_segments=False, limit=GiB, max_split_size_mb=0)
    assert Change().over(base) == base


def test_what_goes_into_the_environment() -> None:
    change = Change(True, 128, 8, 0.8, 40, GiB, True, "2.11")
    assert change.conf() == (
        "expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:8,"
        "garbage_collection_threshold:0.8,large_segment_size_mb:40"
    )
    assert change.in_words() == f"{change.conf()}, empty_cache() after every step, torch 2.11, limit 1.00 GiB"


def test_what_is_off_is_said_in_words_only() -> None:
    change = Change(max_split_size_mb=0, roundup_power2_divisions=0, garbage_collection_threshold=0.0)
    assert change.conf() == ""
    assert change.in_words() == "no max_split_size_mb, no roundup_power2_divisions, no garbage_collection_threshold"


def test_the_settings_of_a_scenario() -> None:
    rules = Rules(divisions=(2,) * 15 + (4,), limit=GiB, collect_above=0.5)
    settings = Settings.of(rules, "given", Change(), "2.10-2.11")
    assert (settings.max_split_size, settings.roundup, settings.torch) == (None, None, "2.10-2.11")
    assert (settings.limit, settings.limit_source, settings.empty_cache_every_step) == (GiB, "given", False)
    other = Settings.of(
        Rules(max_split_size=64 * MiB), None, Change(torch="2.12.1", empty_cache_every_step=True), "2.0"
    )
    assert (other.max_split_size, other.roundup, other.torch) == (64 * MiB, 0, "2.12")
    assert other.empty_cache_every_step


def test_settings_that_the_recorded_release_does_not_have() -> None:
    both = Change(large_segment_size_mb=32, expandable_segments=True)
    assert available(both, "2.0") == {"large_segment_size_mb": "2.11", "expandable_segments": "2.1"}
    assert available(both, "2.10") == {"large_segment_size_mb": "2.11"}
    assert available(both, "2.11") == available(both, None) == {}
    assert available(Change(expandable_segments=False), "2.0") == {}
    assert available(Change(large_segment_size_mb=32, torch="2.9"), None) == {"large_segment_size_mb": "2.11"}
    assert available(Change(large_segment_size_mb=32, torch="2.12"), "2.0") == {}
