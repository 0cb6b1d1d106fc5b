"""Which rules decided the categories of one moment, with the bytes each of them decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.allocator import Replay
from memtrace.analysis.holdings import NO_BLOCK, holdings_at
from memtrace.attribution import CONFIDENCE, Attribution
from memtrace.attribution.rule import Rule
from memtrace.model import Frame, StackTable


@dataclass(frozen=True, slots=True)
class Why:
    """What one rule decided in one category: bytes, blocks, the weakest confidence, the frame it matched most often by
    bytes (None: none), and the label it gave ("": the category's own)."""

    category: str
    rule: Rule
    label: str
    bytes: int
    blocks: int
    confidence: str
    frame: Frame | None


def why_at(
    replay: Replay,
    attribution: Attribution,
    stacks: StackTable,
    rules: Mapping[str, Rule],
    *,
    event: int,
    of: str,
) -> tuple[Why, ...]:
    """Every rule (`rules`: by id) that decided something of counter `of` after `event`, largest first. Undecided bytes
    have none."""
    held = holdings_at(replay, attribution, event, of)
    rows = np.flatnonzero((held.rule >= 0) & (held.block != NO_BLOCK))
    if not len(rows):
        return ()
    keys = np.stack([held.category[rows].astype(np.int64), held.rule[rows], held.label[rows]])
    groups, which = np.unique(keys, axis=1, return_inverse=True)
    found = []
    for number, (category, rule, label) in enumerate(zip(*groups.tolist(), strict=True)):
        members = rows[which.ravel() == number]
        frames, place = np.unique(held.frame[members], return_inverse=True)
        sums = np.bincount(place, weights=held.bytes[members])
        frame = int(frames[sums.argmax()])
        found.append(
            Why(
                category=attribution.categories[category],
                rule=rules[attribution.rule_ids[rule]],
                label="" if label < 0 else attribution.labels[label],
                bytes=int(held.bytes[members].sum()),
                blocks=len(members),
                confidence=CONFIDENCE[int(held.confidence[members].max())],
                frame=None if frame < 0 else stacks.frame(frame),
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.category, one.rule.id, one.label)))
