"""Gathered parameters of ZeRO-3: which fetch they belong to, and whether anybody let go of them.

Some are put together in `wait`, one per parameter, out of a flat buffer that was made when the gather began. The stack
of `wait` does not say who asked; but the buffer is freed right after, and its stack does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.draft import INFERRED, Draft, Rows
from memtrace.attribution.lives import Context
from memtrace.attribution.rule import By
from memtrace.timeline import Phase
from memtrace.timeline.timeline import NEVER

RETAINED = "gathered, still held by autograd"
KEPT = "kept from forward to backward"
KEPT_TO_STEP = "kept until the step"
_PERSISTENCE_BYTES = 400_000
_REUSE_BYTES = 1_000_000_000
"""What `stage3_max_reuse_distance` may keep by default: half of 1e9 elements of 2 bytes."""


def decide(draft: Draft, context: Context) -> None:
    """Demand or prefetch; then retained and persistent ones by their life."""
    fetched, waited = context.rows(By.GATHER), context.rows(By.WAIT)
    if not len(fetched) and not len(waited):
        return
    is_flat = _join(draft, context, fetched, waited)
    whole = np.concatenate([fetched[~is_flat], waited])
    whole.sort()
    _by_life(draft, context, whole)


def _join(draft: Draft, context: Context, fetched: Rows, waited: Rows) -> NDArray[np.bool_]:
    """Gives blocks made in a `wait` the kind of the buffer freed after it. Returns which `fetched` are such buffers."""
    is_flat = np.zeros(len(fetched), np.bool_)
    if not len(waited) or not len(fetched):
        return is_flat
    waited = waited[np.argsort(context.born[waited], kind="stable")]
    order = np.argsort(context.freed[fetched], kind="stable")
    flats = fetched[order]
    # A buffer is freed after the last block of its wait, and before the next wait begins.
    place = np.searchsorted(context.freed[flats], context.born[waited], side="right")
    known = place < len(flats)
    group = np.where(known, place, len(flats))
    sums = np.zeros(len(flats) + 1, np.int64)
    np.add.at(sums, group, context.requested[waited])
    sizes = np.append(context.requested[flats], 0)
    counts = np.bincount(group, minlength=len(flats) + 1)
    born_before = np.append(context.born[flats], NEVER)
    first = np.full(len(flats) + 1, NEVER)
    np.minimum.at(first, group, context.born[waited])
    # Padding makes the buffer larger than its parameters, by less than a cache line a parameter and rank.
    fits = (sums <= sizes) & (sizes - sums <= counts * 4096 + sums // 8) & (born_before < first)
    fits[-1] = False
    joined = fits[group]
    rows = waited[joined]
    source = flats[group[joined]]
    draft.category[rows] = draft.category[source]
    draft.label[rows] = draft.label[source]
    draft.confidence[rows] = INFERRED
    is_flat[order[np.flatnonzero(fits[:-1] & (counts[:-1] > 0))]] = True
    return is_flat


def _by_life(draft: Draft, context: Context, rows: Rows) -> None:
    timeline, phase = context.timeline, context.phase[rows]
    run = context.run[rows]
    backward, step = timeline.backward_from[run], timeline.step_from[run]
    in_training = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    persistent = in_training & (step != NEVER) & (context.freed[rows] >= step)
    small = context.requested[rows] <= _largest_persistent(draft, context)
    draft.decide(rows[persistent & small], "param.persistent")
    draft.decide(rows[persistent & ~small], "param.gathered", label=KEPT_TO_STEP)
    held = (phase == Phase.FORWARD) & ~persistent & (backward != NEVER) & (context.freed[rows] >= backward)
    retained = held & _gathered_again(context, rows, held, phase, timeline.step[run])
    draft.decide(rows[retained], "param.retained", label=RETAINED)
    draft.decide(rows[held & ~retained], "param.gathered", label=KEPT)


def _largest_persistent(draft: Draft, context: Context) -> int:
    """Bytes of the largest parameter that is gathered after a step to stay; by default 1e5 elements of 4 bytes."""
    rules = [number for number, rule in enumerate(draft.rules) if rule.category == "param.persistent"]
    stayed = context.requested[np.isin(draft.rule, rules)]
    return int(stayed.max(initial=0)) or _PERSISTENCE_BYTES


def _gathered_again(
    context: Context, rows: Rows, held: NDArray[np.bool_], phase: NDArray[np.uint8], step: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Whether, in the step of each block, parameters are gathered anew in backward while their gathered copies live.

    Then DeepSpeed let go of them in forward, and something else (autograd) did not. Where they are not, DeepSpeed
    itself kept them: `stage3_max_reuse_distance`. Counted by size, as names are not known. A backward that the
    recording cuts short gathers less: there, and only there, more than that setting explains by default counts too.
    """
    if not held.any():
        return held
    sizes, kind = np.unique(context.requested[rows], return_inverse=True)
    key = step.astype(np.int64) * len(sizes) + kind
    key[step < 0] = 0
    length = int(key.max()) + 1
    forward = np.bincount(key[(phase == Phase.FORWARD)], minlength=length)
    alive = np.bincount(key[held], minlength=length)
    again = np.bincount(key[(phase == Phase.BACKWARD)], minlength=length)
    surplus = again > forward - alive
    steps = np.arange(length) // len(sizes)
    by_step = np.zeros(int(steps.max()) + 1, np.bool_)
    np.logical_or.at(by_step, steps, surplus & (alive > 0))
    cut = int(step.max())
    if context.timeline.step_from[-1] == NEVER and not by_step[cut]:
        of_last = held & (step == cut)
        by_step[cut] = by_step[:cut].any() or int(context.requested[rows[of_last]].sum()) > _REUSE_BYTES
    return np.asarray(by_step[np.maximum(step, 0)])
