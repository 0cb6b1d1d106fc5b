"""Where a run and the file disagree: the final map, and the active bytes that torch noted on the way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.logs import BEFORE, Run
from memtrace.allocator.memory_map import MemoryMap, Rows
from memtrace.allocator.result import Conflict, Lifetimes

Column = NDArray[np.int64]


def sizes_at_end(run: Run, at_end: MemoryMap) -> dict[int, int]:
    """Birth event -> size in the final map, for blocks of the run that have another size there."""
    ours, theirs, born = run.at_end.blocks, at_end.blocks, run.born_at_end
    _, here, there = np.intersect1d(ours["address"], theirs["address"], assume_unique=True, return_indices=True)
    other = (born[here] != BEFORE) & (ours["size"][here] != theirs["size"][there])
    return dict(zip(born[here[other]].tolist(), theirs["size"][there[other]].tolist(), strict=True))


def differences(run: Run, at_end: MemoryMap) -> list[Conflict]:
    """One conflict per address at which the run's last state and the file's segments or blocks differ."""

    def addresses(ours: Rows, theirs: Rows, names: tuple[str, ...], what: str) -> Iterator[Conflict]:
        for address in _differing(ours, theirs, names).tolist():
            yield Conflict(None, f"the {what} at {address:#x} is not in the file as the replay leaves it")

    return [
        *addresses(run.at_end.ranges, at_end.ranges, ("start", "size", "large", "stream", "expandable"), "segment"),
        *addresses(run.at_end.blocks, at_end.blocks, ("address", "size", "requested", "pending"), "block"),
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


def _differing(ours: Rows, theirs: Rows, names: tuple[str, ...]) -> NDArray[np.uint64]:
    """The addresses (the first of `names`), in order, of rows that have no equal on the other side."""
    key = names[0]
    _, here, there = np.intersect1d(ours[key], theirs[key], assume_unique=True, return_indices=True)
    equal = np.ones(len(here), np.bool_)
    for name in names:
        equal &= ours[name][here] == theirs[name][there]
    all_addresses = np.union1d(ours[key], theirs[key])
    return np.setdiff1d(all_addresses, ours[key][here[equal]], assume_unique=True)
