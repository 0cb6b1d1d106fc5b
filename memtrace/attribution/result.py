"""What attribution gives: the category of every block, and why. How it is made takes longer to import."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import CATEGORIES, CONFIDENCE
from memtrace.model.frozen import FrozenColumns


@dataclass(frozen=True, slots=True)
class DeepSpeedFacts:
    """ZeRO stage (None: not told) and releases ("0.17.0-0.18.5"; None: not told), with what told each."""

    stage: int | None
    stage_from: str
    at_least: str | None
    at_most: str | None
    version_from: str

    @property
    def releases(self) -> str | None:
        """The range as text."""
        if self.at_least is None:
            return None
        if self.at_most is None:
            return f"{self.at_least} or later"
        return self.at_least if self.at_least == self.at_most else f"{self.at_least}-{self.at_most}"


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
class Attribution(FrozenColumns):
    """One row a block, as in `Lifetimes`.

    `category` indexes `categories`, `confidence` indexes `CONFIDENCE`, `reason` says why nothing is decided, `rule`
    indexes `rules` (-1: none), `frame` is the id of the frame that decided (-1: none), `label` indexes `labels`
    (-1: the category's own).
    """

    category: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    reason: NDArray[np.uint8]
    rule: NDArray[np.int16]
    frame: NDArray[np.int32]
    label: NDArray[np.int16]
    categories: tuple[str, ...]
    category_labels: tuple[str, ...]
    labels: tuple[str, ...]
    rule_ids: tuple[str, ...]
    deepspeed: DeepSpeedFacts | None

    def __len__(self) -> int:
        return len(self.category)

    def is_sound(self, blocks: int, frames: int) -> bool:
        """Whether it can be of that many blocks and frames: of columns from a cache nothing is believed unseen."""
        limits = (
            (self.category, 0, len(self.categories)),
            (self.confidence, 0, len(CONFIDENCE)),
            (self.reason, 0, len(Reason)),
            (self.rule, -1, len(self.rule_ids)),
            (self.frame, -1, frames),
            (self.label, -1, len(self.labels)),
        )
        return (
            self.categories[: len(CATEGORIES)] == CATEGORIES
            and len(self.categories) == len(self.category_labels)
            and all(len(column) == blocks for column, _, _ in limits)
            and all(not blocks or (column.min() >= low and column.max() < high) for column, low, high in limits)
        )
