"""What each block is for. Rules (data, one module a library) decide here; what none decides says why.

Without a rule a block from before the recording of which nothing is known is `prior`; any other is `unknown`,
with the reason: no rule knows its stack, its thread had no Python stack, or no stacks were recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes
from memtrace.attribution.categories import CODE, CONFIDENCE
from memtrace.model import StackTable
from memtrace.model.stacks import NOT_RECORDED


class Reason(IntEnum):
    """Why no rule decided."""

    DECIDED = 0
    NO_RULE = 1
    NO_STACK = 2
    HISTORY_OFF = 3
    BEFORE = 4


REASON_TEXT = {
    Reason.DECIDED: "",
    Reason.NO_RULE: "no rule",
    Reason.NO_STACK: "no stack",
    Reason.HISTORY_OFF: "history off",
    Reason.BEFORE: "before the recording",
}


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """One row a block, as in `Lifetimes`: category code, confidence code, and why it is not decided."""

    category: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    reason: NDArray[np.uint8]


def attribute(lifetimes: Lifetimes, stacks: StackTable) -> Attribution:
    """The category of every block."""
    depth = np.diff(stacks.offsets)
    recorded = lifetimes.stack != NOT_RECORDED
    framed = np.zeros(len(lifetimes), np.bool_)
    framed[recorded] = depth[lifetimes.stack[recorded]] > 0
    before = (lifetimes.born < 0) & ~framed
    reason = np.select(
        [framed, before, recorded], [Reason.NO_RULE, Reason.BEFORE, Reason.NO_STACK], Reason.HISTORY_OFF
    ).astype(np.uint8)
    category = np.where(before, CODE["prior"], CODE["unknown"]).astype(np.uint8)
    return Attribution(category, np.full(len(lifetimes), CONFIDENCE.index("unknown"), np.uint8), reason)
