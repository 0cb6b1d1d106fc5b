"""The settings and the release of torch that decide what the allocator does (snapshot-format sections 4 and 6)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.sizes import (
    LARGE_PAGE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    UNLIMITED,
    AllocatorSettings,
    round_sizes,
)
from memtrace.units import MiB

NON_SPLIT_ROUNDING = 20 * MiB
"""Default of `max_non_split_rounding_mb`."""
LARGE_REQUEST = 10 * MiB
"""Rounded requests below this share a large-pool segment of `large_page` bytes."""
_SEGMENT_STEP = 2 * MiB
_LARGEST = 1 << 62
"""What failed may have asked for anything; nothing larger can be rounded."""
_FRACTION_ONE_IS_NO_LIMIT_SINCE = (2, 9)
_CONF = "PYTORCH_CUDA_ALLOC_CONF"


class Tie(IntEnum):
    """Which of two free blocks of one size is taken first."""

    ADDRESS = 0
    """The lower address (up to 2.11)."""
    OBJECT = 1
    """The block object made first (2.12)."""
    SEGMENT = 2
    """That of the segment made first, then the lower address (since 2.13)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides. Sizes in bytes; `limit` is torch's own cap (None: none), `collect_above` the share of it above
    which torch collects garbage (0: never)."""

    divisions: tuple[int, ...] = field(default=(0,) * 16)
    max_split_size: int = UNLIMITED
    expandable: bool = False
    large_page: int = LARGE_PAGE
    non_split_rounding: int = NON_SPLIT_ROUNDING
    collect_above: float = 0.0
    limit: int | None = None
    tie: Tie = Tie.ADDRESS

    @classmethod
    def of(cls, settings: AllocatorSettings, raw: Mapping[str, object], tie: Tie) -> Rules:
        """The recorded ones: `settings` as the replay took them, the rest from the file's `allocator_settings`."""
        threshold = raw.get("garbage_collection_threshold")
        rounding = conf_number(raw, "max_non_split_rounding_mb")
        return cls(
            divisions=settings.divisions,
            max_split_size=settings.max_split_size,
            expandable=settings.expandable,
            large_page=settings.large_page,
            non_split_rounding=NON_SPLIT_ROUNDING if rounding is None else int(rounding) * MiB,
            collect_above=threshold if isinstance(threshold, float) and 0 < threshold <= 1 else 0.0,
            tie=tie,
        )

    def rounded(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block sizes of requests."""
        return round_sizes(np.minimum(sizes, _LARGEST), self.divisions)

    def segment_size(self, rounded: int) -> int:
        """Bytes asked of the driver when no cached block holds `rounded` bytes."""
        if rounded <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if rounded < LARGE_REQUEST:
            return self.large_page
        return -(-rounded // _SEGMENT_STEP) * _SEGMENT_STEP

    def page(self, large: bool) -> int:
        """Bytes in which expandable memory of a pool is mapped."""
        return self.large_page if large else SMALL_SEGMENT


def tie_of(release: str) -> Tie:
    """The rule of a release of torch such as "2.11".

    >>> tie_of("2.11"), tie_of("2.12"), tie_of("2.15")
    (<Tie.ADDRESS: 0>, <Tie.OBJECT: 1>, <Tie.SEGMENT: 2>)
    """
    version = tuple(int(part) for part in release.split(".")[:2])
    if version <= (2, 11):
        return Tie.ADDRESS
    return Tie.OBJECT if version == (2, 12) else Tie.SEGMENT


def conf_number(raw: Mapping[str, object], key: str) -> float | None:
    """A number in the settings string of a file; None where it is not set there."""
    conf = raw.get(_CONF)
    for item in conf.replace(" ", "").split(",") if isinstance(conf, str) else ():
        name, _, value = item.partition(":")
        if name == key and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,18})?", value):
            return float(value)
    return None


def fraction_limit(fraction: float, capacity: int, release: str) -> int | None:
    """Torch's cap for a `per_process_memory_fraction` of a device; None: no cap."""
    version = tuple(int(part) for part in release.split(".")[:2])
    if fraction >= 1 and version >= _FRACTION_ONE_IS_NO_LIMIT_SINCE:
        return None
    return int(fraction * capacity)
