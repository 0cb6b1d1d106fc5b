"""The attribution while it is being made: columns that one decision after another fills in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import CONFIDENCE
from memtrace.attribution.rule import Rule

RECORDED, CERTAIN, INFERRED, UNDECIDED = (np.uint8(CONFIDENCE.index(name)) for name in CONFIDENCE)

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Draft:
    """Columns as in `Attribution`, one row a block."""

    category: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    rule: NDArray[np.int16]
    frame: NDArray[np.int32]
    label: NDArray[np.int16]
    rules: Sequence[Rule]
    codes: dict[str, int]
    labels: list[str]

    @classmethod
    def empty(cls, blocks: int, rules: Sequence[Rule], categories: Sequence[str]) -> Draft:
        """Nothing decided."""
        codes = {name: code for code, name in enumerate(categories)}
        return cls(
            category=np.full(blocks, codes["unknown"], np.uint8),
            confidence=np.full(blocks, UNDECIDED, np.uint8),
            rule=np.full(blocks, -1, np.int16),
            frame=np.full(blocks, -1, np.int32),
            label=np.full(blocks, -1, np.int16),
            rules=rules,
            codes=codes,
            labels=[],
        )

    def code(self, category: str) -> int:
        """The code of a category."""
        return self.codes[category]

    def label_code(self, label: str) -> int:
        """The code of a label; -1 for none."""
        if not label:
            return -1
        if label not in self.labels:
            self.labels.append(label)
        return self.labels.index(label)

    def decide(self, rows: Rows, category: str, *, label: str | None = None, confidence: np.uint8 = INFERRED) -> None:
        """These blocks are of that category; the rule stays. A confidence never gets stronger than it was."""
        if not len(rows):
            return
        self.category[rows] = self.codes[category]
        self.confidence[rows] = confidence
        if label is not None:
            self.label[rows] = self.label_code(label)

    def relabel(self, rows: Rows, label: str) -> None:
        """The category stays; the label says more than the stack could."""
        self.label[rows] = self.label_code(label)
        self.confidence[rows] = np.maximum(self.confidence[rows], INFERRED)

    def apply(self, rows: Rows, rule: Rule, *, frame: int | None = None) -> None:
        """Another rule decides these blocks after all. Without `frame` the deciding frame stays."""
        if not len(rows):
            return
        self.decide(rows, rule.category, label=rule.label)
        self.rule[rows] = self.rules.index(rule)
        if frame is not None:
            self.frame[rows] = frame
