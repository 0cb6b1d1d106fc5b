"""What each block is for. The rules (data, one module a library) decide by its stack; then its life, where one stack
makes things of several kinds; then size and place. What none decides says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.attribution import derived, gathers, lives, recorded, user_match
from memtrace.attribution.categories import CATEGORIES, LABELS
from memtrace.attribution.draft import CERTAIN, INFERRED, UNDECIDED, Draft
from memtrace.attribution.matcher import NO_RULE, StackVerdicts, logits_callers, match_stacks
from memtrace.attribution.result import Attribution, Reason
from memtrace.attribution.rule import Rank, Rule
from memtrace.attribution.rules import ALL
from memtrace.attribution.rules.torch import OWN_LOGITS
from memtrace.attribution.versions import deepspeed_facts
from memtrace.io.sidecar import Sidecar
from memtrace.model import SnapshotData
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline import Timeline


def attribute(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    rules: Sequence[Rule] = ALL,
    own_labels: Mapping[str, str] | None = None,
    sidecar: Sidecar | None = None,
) -> Attribution:
    """The category of every block of a device. `rules`: the user's own (`own_labels`: their categories), then ours.
    What the recorder wrote in a `sidecar` beats them."""
    users = tuple(rule for rule in rules if rule.rank == Rank.USER)
    all_rules, rules = tuple(rules), tuple(rules)[len(users) :]
    stacks = data.stacks
    verdicts = match_stacks(stacks, rules, replay.lifetimes)
    categories = tuple(dict.fromkeys((*CATEGORIES, *(own_labels or {}), *(rule.category for rule in all_rules))))
    draft = Draft.empty(len(replay.lifetimes), rules, categories)
    context = lives.Context.of(data, replay, timeline, verdicts, rules)
    _by_stack(draft, context, verdicts, _site_tables(rules, verdicts, draft))
    lives.decide(draft, context, logits_callers(stacks, verdicts, rules), rules.index(OWN_LOGITS))
    gathers.decide(draft, context)
    derived.decide(draft, context, data)
    if sidecar is not None:
        recorded.decide(draft, context, sidecar)
    user_match.decide(draft, context, stacks, users)
    labels = {**LABELS, **(own_labels or {})}
    return Attribution(
        category=draft.category,
        confidence=draft.confidence,
        reason=_reasons(draft, context),
        rule=draft.rule,
        frame=draft.frame,
        label=draft.label,
        categories=categories,
        category_labels=tuple(labels.get(name, name) for name in categories),
        labels=tuple(draft.labels),
        rule_ids=tuple(rule.id for rule in all_rules),
        deepspeed=deepspeed_facts(stacks, verdicts, rules, sidecar),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """For each rule and site: category code and label."""

    category: NDArray[np.uint8]
    label: NDArray[np.int16]


def _site_tables(rules: Sequence[Rule], verdicts: StackVerdicts, draft: Draft) -> _Table:
    """Category and label of each stack."""
    category = np.full(len(verdicts.rule), draft.code("unknown"), np.uint8)
    label = np.full(len(verdicts.rule), -1, np.int16)
    known: dict[tuple[int, int], tuple[int, int]] = {}
    for stack, (rule, site) in enumerate(zip(verdicts.rule.tolist(), verdicts.site.tolist(), strict=True)):
        if rule == NO_RULE:
            continue
        if (rule, site) not in known:
            one = rules[rule].sites[site] if site >= 0 else rules[rule]
            known[rule, site] = (draft.code(one.category), draft.label_code(one.label))
        category[stack], label[stack] = known[rule, site]
    return _Table(category, label)


def _by_stack(draft: Draft, context: lives.Context, verdicts: StackVerdicts, table: _Table) -> None:
    """What the stack alone says."""
    if not len(verdicts.rule):
        return
    rows = np.flatnonzero(context.stack != NOT_RECORDED)
    stack = context.stack[rows] if len(rows) < len(context.stack) else context.stack
    has_rule = verdicts.rule != NO_RULE
    confidence = np.where(has_rule, np.where(verdicts.sure, CERTAIN, INFERRED), UNDECIDED).astype(np.uint8)
    if len(rows) == len(context.stack):
        draft.category, draft.rule, draft.frame = table.category[stack], verdicts.rule[stack], verdicts.frame[stack]
        draft.label, draft.confidence = table.label[stack], confidence[stack]
        return
    draft.category[rows], draft.rule[rows] = table.category[stack], verdicts.rule[stack]
    draft.frame[rows], draft.label[rows] = verdicts.frame[stack], table.label[stack]
    draft.confidence[rows] = confidence[stack]


def _reasons(draft: Draft, context: lives.Context) -> NDArray[np.uint8]:
    """Why the undecided blocks are so; those from before the recording of which nothing is known become `prior`."""
    open_rows = np.flatnonzero(draft.confidence == UNDECIDED)
    reason = np.zeros(len(draft.category), np.uint8)
    stack = context.stack[open_rows]
    recorded = stack != NOT_RECORDED
    depth = np.append(context.depth, 0)[stack]
    before = (context.born[open_rows] < 0) & (depth == 0)
    reason[open_rows] = np.select(
        [(depth > 0) & recorded, before, recorded], [Reason.NO_RULE, Reason.BEFORE, Reason.NO_STACK], Reason.HISTORY_OFF
    )
    draft.category[open_rows[before]] = draft.code("prior")
    return reason
