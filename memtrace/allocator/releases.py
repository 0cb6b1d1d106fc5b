"""Memory given back to the driver: for an allocation that had failed, or because the program emptied the cache.

torch writes no event for either. What a failed allocation gives back has its stack, what an explicit call gives back
has that of the call (snapshot-format 6.8). What gives nothing back leaves no trace: every count is "at least".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.model import Action, StackTable, Trace
from memtrace.model.frozen import FrozenColumns
from memtrace.model.stacks import NOT_RECORDED

_TAKEN = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_GIVEN = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_EMPTY_CACHE = "empty_cache"


@dataclass(frozen=True, slots=True)
class Total:
    """How many times memory was given back, and how many bytes in all."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Releases(FrozenColumns):
    """One row for each time that memory was given back: its first event, the bytes, and whether a failed allocation
    forced it (else the program called `empty_cache`)."""

    event: NDArray[np.int64]
    bytes: NDArray[np.int64]
    forced: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.event)

    def before(self, event: int, *, forced: bool) -> Total:
        """Those of one kind before `event`."""
        rows = (self.event < event) & (self.forced == forced)
        return Total(int(rows.sum()), int(self.bytes[rows].sum()))


def releases_of(trace: Trace, stacks: StackTable) -> Releases:
    """Every release in a trace. Events that follow each other and share their cause are one."""
    given = np.flatnonzero(np.isin(trace.action, _GIVEN))
    if not len(given):
        return Releases(given, trace.size[given], np.zeros(0, np.bool_))
    forced = told_apart(trace, stacks, given)[0]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(given) > 1) | (forced[1:] != forced[:-1])]))
    return Releases(given[first], np.add.reduceat(trace.size[given], first), forced[first])


def told_apart(
    trace: Trace, stacks: StackTable, given: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each event that gives memory back (all, in order): whether it was forced by the allocation, or the failure,
    that comes next; and whether there was no stack to tell that by.

    Without a stack, it was forced if that allocation had to take new memory, or failed. What is given back before
    one allocation, other than by a call that is named, is forced as a whole or not at all: with context="alloc" an
    explicit call shows the stacks of the segments, one of which may be that of the allocation.
    """
    others = np.flatnonzero(~np.isin(trace.action, (*_TAKEN, *_GIVEN)) & ~waited_for(trace, given))
    turn = np.searchsorted(others, given)
    following = np.append(others, 0)[turn]
    action = np.where(turn < len(others), trace.action[following], np.uint8(255))
    stack = trace.stack[given]
    taken = np.concatenate([[0], np.cumsum(np.isin(trace.action, _TAKEN))])
    takes = (action == Action.OOM) | (taken[following] > taken[given])
    asks = (action == Action.ALLOC) | (action == Action.OOM)
    silent, named = _kinds(stacks, stack)
    forced = asks & (stack == trace.stack[following]) & ~named & (takes | ~silent)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(turn) > 0]))
    whole = np.logical_and.reduceat(forced | named, starts) if len(forced) else forced
    return forced & np.repeat(whole, np.diff(np.append(starts, len(forced)))), silent


def _kinds(stacks: StackTable, stack: NDArray[np.int32]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each stack: whether it has no frame, and whether it passes through `empty_cache`."""
    distinct, which = np.unique(stack, return_inverse=True)
    silent = [one == NOT_RECORDED or not len(stacks.ids(one)) for one in distinct.tolist()]
    named = [any(frame.name == _EMPTY_CACHE for frame in stacks.frames(one)) for one in distinct.tolist()]
    return np.array(silent, np.bool_)[which], np.array(named, np.bool_)[which]


def waited_for(trace: Trace, given: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which events are frees that completed because a release of the cache waited for their streams: they stand behind
    memory that was given back (`given`: those events, in order) with nothing else between, and have its stack."""
    found = np.zeros(len(trace), np.bool_)
    completed = np.flatnonzero(trace.action == Action.FREE_COMPLETED)
    if not len(given) or not len(completed):
        return found
    quiet = np.isin(trace.action, (*_TAKEN, *_GIVEN, Action.FREE_COMPLETED))
    loud = np.flatnonzero(~quiet)
    before = np.searchsorted(given, completed) - 1
    last = given[np.maximum(before, 0)]
    between = np.searchsorted(loud, completed) - np.searchsorted(loud, last)
    found[completed] = (before >= 0) & (between == 0) & (trace.stack[completed] == trace.stack[last])
    return found
