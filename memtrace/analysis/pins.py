"""Which blocks keep stranded memory from going back to the driver, and how much each of them holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.analysis.frames import ShownStacks
from memtrace.analysis.residents import NO_ONE, Residents, Units
from memtrace.attribution import CODE, Attribution, Reason
from memtrace.model.frozen import FrozenColumns
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline import Timeline

_NOBODY = np.int64(-1) << 62


@dataclass(frozen=True, slots=True, eq=False)
class PinningBlocks(FrozenColumns):
    """One row a block that pins stranded bytes, in order of address: it lies in a segment (in expandable memory: on a
    page) of which something is free.

    `block` is a row of `Lifetimes`; `hostage` its share of the stranded bytes: those of a segment or page are shared
    evenly among all who pin it, what does not divide goes to the lowest addresses; `alone` the bytes that could go back
    to the driver if this block were freed, and no other. `unpinned`: stranded bytes that no block pins (`NO_ONE` in
    `residents`). `hostage` and `unpinned` sum to the ledger's stranded bytes.
    """

    block: NDArray[np.int64]
    live: NDArray[np.bool_]
    hostage: NDArray[np.int64]
    alone: NDArray[np.int64]
    unpinned: int

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True)
class Pin:
    """Pinning blocks of one stack. `stack` is an id of the shown stacks (-1: none), `category` the one with most bytes,
    `bytes` their own size, `hostage_bytes` and `alone_bytes` as in `PinningBlocks`, summed; `together_bytes`: what
    could go back if all of them were freed. `born` is the event of the oldest (-1: before the recording), `phase` and
    `step` when that was. Without blocks: bytes that nothing pins.
    """

    stack: int
    category: str
    blocks: int
    pending_blocks: int
    bytes: int
    hostage_bytes: int
    alone_bytes: int
    together_bytes: int
    born: int
    phase: str | None
    step: int | None


def pinning_blocks(residents: Residents, units: Units) -> PinningBlocks:
    """Who pins what of the stranded bytes."""
    everyone = np.zeros(len(residents), np.int64)
    hostage, alone = everyone.copy(), units.inner.copy()
    is_pin = everyone.astype(np.bool_)
    unit, by = _touches(units)
    count = np.bincount(unit, minlength=len(units.span)).astype(np.int64)
    sharers = np.maximum(count, 1)
    first = np.cumsum(count) - count
    place = np.arange(len(unit)) - first[unit]
    share = units.free // sharers
    np.add.at(hostage, by, share[unit] + (place < (units.free - share * sharers)[unit]))
    np.add.at(alone, by, np.where(count[unit] == 1, units.whole[unit], 0))
    is_pin[by[units.free[unit] > 0]] = True
    rows = np.flatnonzero(is_pin)
    return PinningBlocks(
        block=residents.block[rows],
        live=residents.live[rows],
        hostage=hostage[rows],
        alone=alone[rows],
        unpinned=int(units.free[count == 0].sum()),
    )


def _touches(units: Units) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(unit, resident) by unit and then by address, without the touches of nobody."""
    real = units.by != NO_ONE
    unit, by = units.touched[real], units.by[real]
    order = np.lexsort((by, unit))
    return unit[order], by[order]


def pins_by_stack(
    replay: Replay,
    attribution: Attribution,
    timeline: Timeline,
    shown: ShownStacks,
    residents: Residents,
    units: Units,
) -> tuple[Pin, ...]:
    """Pins grouped by stack as shown, those without one by what is known of them; the most hostage bytes first. Their
    hostage bytes sum to the ledger's stranded bytes."""
    pins, blocks = pinning_blocks(residents, units), replay.lifetimes
    stack = shown.rows(blocks.stack[pins.block])
    category = np.where(pins.live, attribution.category[pins.block], CODE["alloc.pending"]).astype(np.int64)
    undecided = category * len(Reason) + np.where(pins.live, attribution.reason[pins.block], 0)
    keys, group = np.unique(np.where(stack == NOT_RECORDED, -1 - undecided, stack), return_inverse=True)
    group = group.ravel()
    size, born = blocks.size[pins.block], blocks.born[pins.block]
    oldest = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(oldest, group, born)
    count = len(keys)
    columns = (
        np.maximum(keys, NOT_RECORDED),
        _heaviest(category, size, group, count),
        np.bincount(group, minlength=count),
        np.bincount(group[~pins.live], minlength=count),
        _summed(size, group, count),
        _summed(pins.hostage, group, count),
        _summed(pins.alone, group, count),
        _together(residents, units, pins, group, count),
        oldest,
    )
    found = [
        Pin(key, attribution.categories[code], blocks, pending, own, held, alone, together, first, *timeline.at(first))
        for key, code, blocks, pending, own, held, alone, together, first in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]
    if pins.unpinned:
        found.append(Pin(NOT_RECORDED, "alloc.stranded", 0, 0, 0, pins.unpinned, 0, 0, -1, None, None))
    return tuple(sorted(found, key=lambda pin: (-pin.hostage_bytes, -pin.bytes, pin.category, pin.stack)))


def _together(
    residents: Residents, units: Units, pins: PinningBlocks, group: NDArray[np.int64], groups: int
) -> NDArray[np.int64]:
    """Bytes that could go back to the driver if all pins of a group were freed: of the units that only they touch."""
    of_block = np.full(len(residents), _NOBODY)
    place = np.searchsorted(residents.block[order := np.argsort(residents.block)], pins.block)
    of_block[order[place]] = group
    unit, by = _touches(units)
    lowest, highest = np.full(len(units.span), groups), np.full(len(units.span), _NOBODY)
    np.minimum.at(lowest, unit, of_block[by])
    np.maximum.at(highest, unit, of_block[by])
    own = np.flatnonzero((lowest == highest) & (highest >= 0))
    total = _summed(units.whole[own], highest[own], groups)
    np.add.at(total, group, units.inner[order[place]])
    return total


def _summed(values: NDArray[np.int64], group: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total


def _heaviest(
    values: NDArray[np.int64], size: NDArray[np.int64], group: NDArray[np.int64], groups: int
) -> NDArray[np.int64]:
    """Of each group the value with most bytes, the lowest of equals."""
    span = int(values.max(initial=0)) + 1
    pairs, which = np.unique(group * span + values, return_inverse=True)
    total = _summed(size, which.ravel(), len(pairs))
    order = np.lexsort((-pairs, total))  # the last of each group stays
    found = np.zeros(groups, np.int64)
    found[pairs[order] // span] = pairs[order] % span
    return found
