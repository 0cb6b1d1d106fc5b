"""torch's size classes in numbers: rounding, pools, splitting (snapshot-format section 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memtrace.units import MiB

MIN_BLOCK = 512
SMALL_REQUEST = 1 * MiB
"""Rounded requests up to this come from the small pool."""
SMALL_SEGMENT = 2 * MiB
"""Size of every small-pool segment and of its expandable pages."""
LARGE_PAGE = 20 * MiB
"""Default size of large-pool segments for requests under 10 MiB, and of large expandable pages."""
LARGE_REMAINDER = 1 * MiB
"""A large block is split only if more than this would be left over."""
UNLIMITED = 2**63 - 1

_INTERVALS = 16
_CUSTOM_ALLOCATOR_RULE_SINCE = (2, 10)


def round_sizes(requested: NDArray[np.int64], divisions: tuple[int, ...]) -> NDArray[np.int64]:
    """Block sizes torch makes of requests, in bytes. `divisions` is the 16-entry `roundup_power2_divisions` table.

    >>> round_sizes(np.array([1, 512, 513, 3 * MiB + 1]), (0,) * 16).tolist()
    [512, 512, 1024, 3146240]
    """
    rounded = np.maximum((requested + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK, MIN_BLOCK)
    if not any(division > 1 for division in divisions):
        return rounded
    exponent = np.frexp(np.maximum(requested, 1).astype(np.float64))[1].astype(np.int64) - 1
    # a float of 53 bits can round up to the next power of two
    exponent -= (np.int64(1) << np.minimum(exponent, 62)) > np.maximum(requested, 1)
    division = np.array(divisions, np.int64)[np.clip(exponent - 20, 0, _INTERVALS - 1)]
    power = np.int64(1) << np.minimum(exponent, 62)
    step = power // np.maximum(division, 1)
    steps = np.maximum(step, 1)
    up = np.where(step == 0, power * 2, (requested + steps - 1) // steps * steps)
    up = np.where(requested == power, requested, up)
    return np.where((division > 1) & (requested > MIN_BLOCK * division), up, rounded)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings that decide placement. Sizes in bytes.

    `custom_pools_split_plainly`: torch >= 2.10 ignores `expandable_segments` when splitting in pools with an
    allocator of their own; earlier ones apply it everywhere.
    """

    divisions: tuple[int, ...] = field(default=(0,) * _INTERVALS)
    max_split_size: int = UNLIMITED
    expandable: bool = False
    large_page: int = LARGE_PAGE
    custom_pools_split_plainly: bool = True

    @classmethod
    def of(cls, raw: Mapping[str, object], torch_at_least: str | None) -> AllocatorSettings:
        """From a file's `allocator_settings`; what is missing or malformed has torch's default."""
        table = raw.get("roundup_power2_divisions")
        divisions = [0] * _INTERVALS
        if isinstance(table, Mapping):
            for index in range(_INTERVALS):
                value = table.get(str(1 << index), 0)
                if isinstance(value, int) and 0 < value < UNLIMITED and value & (value - 1) == 0:
                    divisions[index] = value
        split = raw.get("max_split_size", -1)
        version = tuple(int(part) for part in (torch_at_least or "0").split("."))
        return cls(
            divisions=tuple(divisions),
            max_split_size=split if isinstance(split, int) and 0 <= split < UNLIMITED else UNLIMITED,
            expandable=raw.get("expandable_segments") is True,
            large_page=_large_page(raw.get("PYTORCH_CUDA_ALLOC_CONF")),
            custom_pools_split_plainly=version >= _CUSTOM_ALLOCATOR_RULE_SINCE,
        )


def _large_page(conf: object) -> int:
    """`large_segment_size_mb` from the settings string: torch does not export it on its own."""
    if isinstance(conf, str):
        for item in conf.replace(" ", "").split(","):
            key, _, value = item.partition(":")
            if key == "large_segment_size_mb" and re.fullmatch("[0-9]{1,6}", value) and int(value) > 10:
                return int(value) * MiB
    return LARGE_PAGE
