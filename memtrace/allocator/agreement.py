"""Where a run and the file disagree: the final map, and the active bytes that torch noted on the way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.logs import BEFORE, Run
from memtrace.allocator.memory_map import MemoryMap
from memtrace.allocator.result import Conflict, Lifetimes

Column = NDArray[np.int64]


def sizes_at_end(run: Run, at_end: MemoryMap) -> dict[int, int]:
    """Birth event -> size in the final map, for blocks of the run that have another size there."""
    known = {block.address: block.size for block in at_end.blocks}
    return {
        run.born_at_end[block.address]: known[block.address]
        for block in run.at_end.blocks
        if run.born_at_end[block.address] != BEFORE and known.get(block.address, block.size) != block.size
    }


def differences(run: Run, at_end: MemoryMap) -> list[Conflict]:
    """One conflict per address at which the run's last state and the file's segments or blocks differ."""

    def addresses(ours: set[tuple[int, ...]], theirs: set[tuple[int, ...]], what: str) -> Iterator[Conflict]:
        for address in sorted({item[0] for item in ours ^ theirs}):
            yield Conflict(None, f"the {what} at {address:#x} is not in the file as the replay leaves it")

    return [
        *addresses(_ranges(run.at_end), _ranges(at_end), "segment"),
        *addresses(_blocks(run.at_end), _blocks(at_end), "block"),
    ]


def active_missing(lifetimes: Lifetimes, marks: Column, noted: Column) -> tuple[Column, Column]:
    """(bytes torch noted as active beyond the replay's, by how much the replay's may be too low) at each mark."""

    def over_time(amount: Column) -> Column:
        born, died = lifetimes.born, lifetimes.died
        starts, ends = np.argsort(born, kind="stable"), np.argsort(died, kind="stable")
        begun = np.concatenate([[0], np.cumsum(amount[starts])])[np.searchsorted(born[starts], marks, side="right")]
        ended = np.concatenate([[0], np.cumsum(amount[ends])])[np.searchsorted(died[ends], marks, side="right")]
        alive: Column = begun - ended
        return alive

    return noted - over_time(lifetimes.size), over_time(lifetimes.slack_bound)


def _ranges(memory: MemoryMap) -> set[tuple[int, ...]]:
    return {(item.start, item.size, item.large, item.stream, item.expandable) for item in memory.ranges}


def _blocks(memory: MemoryMap) -> set[tuple[int, ...]]:
    return {(block.address, block.size, block.requested, block.pending) for block in memory.blocks}
