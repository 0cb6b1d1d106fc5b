"""Decisions by size and place between others: workspaces, autocast's copies, buffers, graph pools, what came before."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.draft import Draft, Rows
from memtrace.attribution.lives import Context
from memtrace.attribution.matcher import NO_RULE
from memtrace.attribution.rule import By, Rank
from memtrace.attribution.rules.torch import (
    CAPTURED,
    CAST,
    KEPT_BUFFER,
    OWN_PARAMETER,
    PRIOR_BUCKET,
    PRIOR_MASTER,
    WORKSPACE,
)
from memtrace.model import Action, SnapshotData
from memtrace.timeline import Phase
from memtrace.timeline.timeline import NEVER

_WORKSPACES = (32 << 20, (4096 * 2 << 10) + (16 * 8 << 10))
"""cuBLAS workspaces torch makes by default: on Hopper and later, and before. Source: torch 2.11, CublasHandlePool."""
_LT_WORKSPACE = 1 << 20
"""cuBLASLt's, made just after by the first product with a bias."""
_DEFAULT_BUCKET = 1_000_000_000
STALE = "of an earlier step, still there"


def decide(draft: Draft, context: Context, data: SnapshotData) -> None:
    """Each in turn; the later ones look at what the earlier ones found."""
    if not len(context.timeline):
        return
    _workspaces(draft, context)
    _autocast(draft, context)
    _buffers(draft, context)
    _captured(draft, context, data)
    _own_parameters(draft, context)
    _stale_gradients(draft, context)
    _prior(draft, context)


def _decided_by_life(draft: Draft) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    by = np.array([rule.by in (By.ACTIVATION, By.BACKWARD, By.LOGITS) for rule in draft.rules] + [False])
    return np.asarray(by[draft.rule])


def _workspaces(draft: Draft, context: Context) -> None:
    """Never freed, of the known size, and first of their kind on their thread."""
    lasting = (context.freed >= context.events) & (context.born >= 0) & _decided_by_life(draft)
    sized = np.isin(context.requested, _WORKSPACES)
    large = np.flatnonzero(lasting & sized)
    if len(large):
        streams, threads = context.replay.lifetimes.stream[large], context.phase[large] == Phase.BACKWARD
        key = np.stack([streams.astype(np.int64), threads.astype(np.int64), context.requested[large]])
        large = large[np.unique(key, axis=1, return_index=True)[1]]
        draft.apply(large, WORKSPACE)
    small = np.flatnonzero(lasting & (context.requested == _LT_WORKSPACE))
    if not len(small):
        return
    after = np.isin(context.born[small] - 1, context.born[large]) & np.isin(context.stack[small], context.stack[large])
    alone = ~after & _is_only_survivor(context, small) & (context.verdicts.is_linear[context.stack[small]])
    draft.apply(small[after | alone], WORKSPACE)


def _is_only_survivor(context: Context, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each is the only lasting one of its size among several blocks of its stack."""
    stacks, counts = np.unique(context.stack[rows], return_counts=True)
    lasting = dict(zip(stacks.tolist(), counts.tolist(), strict=True))
    made = np.bincount(context.stack[context.stack >= 0])
    return np.array([lasting[stack] == 1 and made[stack] > 2 for stack in context.stack[rows].tolist()], np.bool_)


def _autocast(draft: Draft, context: Context) -> None:
    """Half of a parameter's size, in a stack that multiplies by a weight, made just before another block of it.

    The last block of such a run is the product itself. With C++ frames only autocast's own are looked at.
    """
    whole = draft.category == draft.code("param.full")
    halves = np.unique(context.requested[whole] // 2)
    if not len(halves) or not context.verdicts.is_linear.any():
        return
    by_stack = np.append(context.verdicts.is_linear, False)
    rows = np.flatnonzero(
        by_stack[context.stack]
        & ((context.phase == Phase.FORWARD) | (context.phase == Phase.EVAL))
        & (context.born >= 0)
    )
    rows = rows[np.argsort(context.born[rows], kind="stable")]
    allocs = np.flatnonzero(context.trace.action == Action.ALLOC)
    turn = np.searchsorted(allocs, context.born[rows])
    followed = np.zeros(len(rows), np.bool_)
    followed[:-1] = (np.diff(turn) == 1) & (context.stack[rows[1:]] == context.stack[rows[:-1]])
    if context.verdicts.autocast.any():
        followed = np.append(context.verdicts.autocast, False)[context.stack[rows]]
    found = followed & np.isin(context.requested[rows], halves) & (draft.category[rows] != draft.code("workspace"))
    if not _autocast_is_on(context, rows, found):
        return
    found[:-1] &= ~(found[1:] & followed[:-1])  # of two that would do, an input's copy comes before the weight's
    draft.apply(rows[found], CAST)


def _autocast_is_on(context: Context, rows: Rows, found: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bool:
    """Layers that make two blocks and more at each call: without autocast a product makes one."""
    if context.verdicts.autocast.any():
        return True
    return int(found.sum()) * 4 >= len(np.unique(context.stack[rows]))


def _buffers(draft: Draft, context: Context) -> None:
    """Kept by a module since its first forward."""
    timeline = context.timeline
    forwards = np.flatnonzero(timeline.phase == Phase.FORWARD)
    if len(forwards) < 2 or not (timeline.step[forwards] > timeline.step[forwards[0]]).any():
        return
    module = np.array([rule.rank == Rank.MODULE for rule in draft.rules] + [False])[draft.rule]
    first = timeline.step[context.run] == timeline.step[forwards[0]]
    rows = np.flatnonzero(module & first & (context.freed >= context.events) & (context.phase == Phase.FORWARD))
    later = np.unique(context.stack[module & ~first & (context.born >= 0)])
    rows = rows[(draft.category[rows] == draft.code("act.saved")) & ~np.isin(context.stack[rows], later)]
    draft.apply(rows, KEPT_BUFFER)


def _captured(draft: Draft, context: Context, data: SnapshotData) -> None:
    """In the private pool that a captured graph uses."""
    compiled = draft.code("compiled")
    spans, blocks = context.replay.spans, context.replay.lifetimes
    if not len(spans) or not (draft.category == compiled).any():
        return
    pool = np.where(blocks.span >= 0, spans.pool[blocks.span], -1)
    private = {number for number, one in enumerate(data.pools) if one != (0, 0)}
    of_graphs = [number for number in np.unique(pool[draft.category == compiled]).tolist() if number in private]
    rows = np.flatnonzero(np.isin(pool, of_graphs) & (draft.category != compiled))
    rows = rows[draft.category[rows] != draft.code("workspace")]
    draft.apply(rows, CAPTURED)


def _own_parameters(draft: Draft, context: Context) -> None:
    """A script's own tensors, set up before the first forward, that gradients are made for."""
    timeline = context.timeline
    steps = timeline.start[timeline.phase == Phase.STEP]
    if not len(steps):
        return
    rows = np.flatnonzero((draft.rule == NO_RULE) & (context.born >= 0) & (context.phase == Phase.INIT))
    rows = rows[context.freed[rows] > steps[-1]]
    gradients = np.unique(context.requested[draft.category == draft.code("grad.full")])
    draft.apply(rows[np.isin(context.requested[rows], gradients)], OWN_PARAMETER)


def _stale_gradients(draft: Draft, context: Context) -> None:
    """Stages 1 and 2, 0.8.2 to 0.17.0: a step skipped for overflow leaves its gradients to the next backward."""
    owners = [number for number, rule in enumerate(draft.rules) if rule.id == "deepspeed.zero12.owned-gradients"]
    rows = np.flatnonzero(np.isin(draft.rule, owners) & (context.born >= 0))
    step = context.timeline.step_from[context.run[rows]]
    rows = rows[step != NEVER]
    after = context.timeline.runs(step[step != NEVER])
    draft.relabel(rows[context.freed[rows] >= context.timeline.backward_from[after]], STALE)


def _prior(draft: Draft, context: Context) -> None:
    """Before the recording: what its size alone can name, in a recording of DeepSpeed."""
    rows = np.flatnonzero((context.born < 0) & (draft.rule == NO_RULE))
    zero = [number for number, rule in enumerate(draft.rules) if rule.id.startswith("deepspeed.zero")]
    if not len(rows) or not np.isin(draft.rule, zero).any():
        return
    draft.apply(rows[context.requested[rows] == _DEFAULT_BUCKET], PRIOR_BUCKET)
    states = np.unique(context.requested[(draft.category == draft.code("optim.state")) & (context.born >= 0)])
    large = states[states >= 1 << 20]
    draft.apply(rows[np.isin(context.requested[rows], large)], PRIOR_MASTER)
