"""Allocator settings as people write them: what is changed of the recorded ones, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from memtrace.allocator.simulate.rules import Rules, tie_of
from memtrace.allocator.sizes import UNLIMITED
from memtrace.errors import QuestionError
from memtrace.io.versions import RELEASES
from memtrace.units import MiB, format_bytes

_INTERVALS = 16
_LEAST_SPLIT_MB = 21
_LEAST_SEGMENT_MB = 11
_MOST_MB = 1 << 30
_MOST_DIVISIONS = 1 << 20
_LARGE_SEGMENT_SINCE = "2.11"
_EXPANDABLE_SINCE = "2.1"
_CONF_SINCE = "2.10"


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be other than recorded; None: as recorded. `max_split_size_mb` 0: unlimited;
    `roundup_power2_divisions` 0: off; `limit` in bytes."""

    expandable_segments: bool | None = None
    max_split_size_mb: int | None = None
    roundup_power2_divisions: int | None = None
    garbage_collection_threshold: float | None = None
    large_segment_size_mb: int | None = None
    limit: int | None = None
    empty_cache_every_step: bool | None = None
    torch: str | None = None

    def __post_init__(self) -> None:
        """Refuses, as torch does, what no allocator can be set to. Raises QuestionError."""
        split, parts = self.max_split_size_mb, self.roundup_power2_divisions
        share, segment = self.garbage_collection_threshold, self.large_segment_size_mb
        if split is not None and split != 0 and not _LEAST_SPLIT_MB <= split <= _MOST_MB:
            raise QuestionError(
                f"max_split_size_mb:{split} is not possible",
                hint=f"torch takes {_LEAST_SPLIT_MB} and more; 0 here means unlimited.",
            )
        if parts is not None and (not 0 <= parts <= _MOST_DIVISIONS or parts & (parts - 1)):
            raise QuestionError(
                f"roundup_power2_divisions:{parts} is not possible", hint="torch takes a power of two; 0: off."
            )
        if share is not None and not (math.isfinite(share) and 0 <= share < 1):
            raise QuestionError(
                f"garbage_collection_threshold:{share:g} is not possible",
                hint="It is a share of the limit between 0 and 1; 0: off.",
            )
        if segment is not None and not _LEAST_SEGMENT_MB <= segment <= _MOST_MB:
            raise QuestionError(
                f"large_segment_size_mb:{segment} is not possible",
                hint=f"torch takes {_LEAST_SEGMENT_MB} and more; 20 is its default.",
            )
        if self.limit is not None and self.limit <= 0:
            raise QuestionError("a limit of nothing", hint="For example --limit 40GiB.")
        if self.torch is not None:
            _release(self.torch)

    def applied(self, rules: Rules) -> Rules:
        """The rules with these changes. The limit is the caller's."""
        changed = rules
        if self.expandable_segments is not None:
            changed = replace(changed, expandable=self.expandable_segments)
        if self.max_split_size_mb is not None:
            size = self.max_split_size_mb * MiB
            changed = replace(changed, max_split_size=size or UNLIMITED)
        if self.roundup_power2_divisions is not None:
            changed = replace(changed, divisions=(self.roundup_power2_divisions,) * _INTERVALS)
        if self.garbage_collection_threshold is not None:
            changed = replace(changed, collect_above=self.garbage_collection_threshold)
        if self.large_segment_size_mb is not None:
            changed = replace(changed, large_page=self.large_segment_size_mb * MiB)
        if self.torch is not None:
            changed = replace(changed, tie=tie_of(_release(self.torch)))
        return changed

    def over(self, weaker: Change) -> Change:
        """Both; where both say something, this."""
        names = self.__slots__
        return Change(**{name: getattr(self if getattr(self, name) is not None else weaker, name) for name in names})

    @property
    def is_nothing(self) -> bool:
        return self == Change()

    def conf(self) -> str:
        """The part of it that goes into PYTORCH_ALLOC_CONF; "" if there is none."""
        parts = []
        if self.expandable_segments is not None:
            parts.append(f"expandable_segments:{self.expandable_segments}")
        if self.max_split_size_mb:
            parts.append(f"max_split_size_mb:{self.max_split_size_mb}")
        if self.roundup_power2_divisions:
            parts.append(f"roundup_power2_divisions:{self.roundup_power2_divisions}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.large_segment_size_mb is not None:
            parts.append(f"large_segment_size_mb:{self.large_segment_size_mb}")
        return ",".join(parts)

    def in_words(self) -> str:
        """What is changed, for a table."""
        parts = [self.conf()] if self.conf() else []
        if self.max_split_size_mb == 0:
            parts.append("no max_split_size_mb")
        if self.roundup_power2_divisions == 0:
            parts.append("no roundup_power2_divisions")
        if self.garbage_collection_threshold == 0:
            parts.append("no garbage_collection_threshold")
        if self.empty_cache_every_step:
            parts.append("empty_cache() after every step")
        if self.torch is not None:
            parts.append(f"torch {_release(self.torch)}")
        if self.limit is not None:
            parts.append(f"limit {format_bytes(self.limit)}")
        return ", ".join(parts) or "as recorded"


def _release(text: str) -> str:
    """The release that a version names. Raises QuestionError."""
    parts = text.split("+")[0].split(".")
    short = ".".join(parts[:2])
    if short not in RELEASES:
        raise QuestionError.unknown("release of torch", text, RELEASES, where="memtrace's table")
    return short


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides in one scenario. Sizes in bytes; None: unlimited, or none. `divisions` has 16 entries, for
    requests from 1 MiB (and below) to 32 GiB, 0: off. `limit_source`: where the limit is from."""

    expandable_segments: bool
    max_split_size: int | None
    divisions: tuple[int, ...]
    garbage_collection_threshold: float
    large_segment_size: int
    non_split_rounding: int
    limit: int | None
    limit_source: str | None
    empty_cache_every_step: bool
    torch: str

    @classmethod
    def of(cls, rules: Rules, limit_source: str | None, change: Change, torch: str) -> Settings:
        return cls(
            expandable_segments=rules.expandable,
            max_split_size=None if rules.max_split_size == UNLIMITED else rules.max_split_size,
            divisions=rules.divisions,
            garbage_collection_threshold=rules.collect_above,
            large_segment_size=rules.large_page,
            non_split_rounding=rules.non_split_rounding,
            limit=rules.limit,
            limit_source=limit_source,
            empty_cache_every_step=bool(change.empty_cache_every_step),
            torch=torch if change.torch is None else _release(change.torch),
        )

    @property
    def roundup(self) -> int | None:
        """The one number that fills the table; None where intervals differ."""
        return self.divisions[0] if len(set(self.divisions)) == 1 else None


def available(change: Change, at_most: str | None) -> Mapping[str, str]:
    """What of a change the recorded release of torch does not have yet: setting -> since when."""
    newest = RELEASES.index(at_most) if at_most in RELEASES else len(RELEASES) - 1
    if change.torch is not None:
        newest = RELEASES.index(_release(change.torch))
    asked = {}
    if change.large_segment_size_mb is not None:
        asked["large_segment_size_mb"] = _LARGE_SEGMENT_SINCE
    if change.expandable_segments:
        asked["expandable_segments"] = _EXPANDABLE_SINCE
    return {name: since for name, since in asked.items() if RELEASES.index(since) > newest}
