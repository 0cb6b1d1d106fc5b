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
_LARGEST_GROUP, _MOST_LEFT = 256, 20_000
"""How many parameters one buffer may hold, and how many blocks are looked at one by one."""
_KEPT_BYTES, _IN_USE_BYTES = 3_000_000_000, 1_000_000_000
"""What `stage3_max_live_parameters` and `stage3_max_reuse_distance` may keep by default in forward, together; and
more than a module's own parameters with those that are prefetched for the next ones."""
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
    """Gives blocks made in a `wait` the kind of the buffer that they were copied from: as a rule the one that is freed
    next, and if its size does not fit one that is alive and does. Returns which `fetched` are such buffers."""
    is_flat = np.zeros(len(fetched), np.bool_)
    if not len(waited) or not len(fetched):
        return is_flat
    waited = waited[np.argsort(context.born[waited], kind="stable")]
    order = np.argsort(context.freed[fetched], kind="stable")
    source = _freed_next(context, fetched[order], waited)
    place = np.full(len(waited), -1)
    place[source >= 0] = order[source[source >= 0]]
    _alive_and_fitting(context, fetched, waited, place)
    rows, flats = waited[place >= 0], fetched[place[place >= 0]]
    draft.category[rows] = draft.category[flats]
    draft.label[rows] = draft.label[flats]
    draft.confidence[rows] = INFERRED
    is_flat[place[place >= 0]] = True
    return is_flat


def _fits(parts: NDArray[np.int64], count: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a buffer holds `count` parameters of `parts` bytes in all. Each is padded, to a multiple of the ranks."""
    return (parts <= size) & (size - parts <= count * 4096 + parts // 8)


def _freed_next(context: Context, flats: Rows, waited: Rows) -> NDArray[np.int64]:
    """For each block the row in `flats` (by death) of the buffer freed after it, if all blocks before that fit it."""
    place = np.searchsorted(context.freed[flats], context.born[waited], side="right")
    group = np.minimum(place, len(flats))
    sums = np.zeros(len(flats) + 1, np.int64)
    np.add.at(sums, group, context.requested[waited])
    counts = np.bincount(group, minlength=len(flats) + 1)
    first = np.full(len(flats) + 1, NEVER)
    np.minimum.at(first, group, context.born[waited])
    fits = _fits(sums, counts, np.append(context.requested[flats], 0))
    fits &= np.append(context.born[flats], NEVER) < first
    fits[-1] = False
    return np.where(fits[group], group, -1)


def _alive_and_fitting(context: Context, fetched: Rows, waited: Rows, place: NDArray[np.int64]) -> None:
    """Of what is left: consecutive blocks that together fill a buffer which is alive, oldest buffer first. A buffer
    outlives its `wait` while another module still has to wait for a parameter in it."""
    left = np.flatnonzero(place < 0)
    free = np.setdiff1d(np.arange(len(fetched)), place)
    if not len(left) or not len(free) or len(left) > _MOST_LEFT:
        return
    free = free[np.argsort(context.born[fetched[free]], kind="stable")]
    born, freed, size = (column[fetched[free]] for column in (context.born, context.freed, context.requested))
    taken = np.zeros(len(free), np.bool_)
    begin = 0
    while begin < len(left):
        row = waited[left[begin]]
        alive = np.flatnonzero((born < context.born[row]) & (freed > context.born[row]) & ~taken)
        found = 0
        total = 0
        for count in range(1, min(_LARGEST_GROUP, len(left) - begin) + 1):
            total += int(context.requested[waited[left[begin + count - 1]]])
            fitting = alive[_fits(np.full(len(alive), total), np.full(len(alive), count), size[alive])]
            if count > 1 and len(fitting):
                place[left[begin : begin + count]] = free[fitting[0]]
                taken[fitting[0]] = True
                found = count
                break
        begin += found or 1


def _by_life(draft: Draft, context: Context, rows: Rows) -> None:
    timeline, phase = context.timeline, context.phase[rows]
    run = context.run[rows]
    backward, step = timeline.backward_from[run], timeline.step_from[run]
    in_training = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    persistent = in_training & (step != NEVER) & (context.freed[rows] >= step)
    small = context.requested[rows] <= _largest_persistent(draft, context)
    draft.decide(rows[persistent & small], "param.persistent")
    draft.relabel(rows[persistent & ~small], KEPT_TO_STEP)
    held = (phase == Phase.FORWARD) & ~persistent & (backward != NEVER) & (context.freed[rows] >= backward)
    retained = held & _gathered_again(context, rows, held, phase, timeline.step[run])
    draft.decide(rows[retained], "param.retained", label=RETAINED)
    draft.relabel(rows[held & ~retained], KEPT)
    _in_a_forward_cut_short(draft, context, rows[(phase == Phase.FORWARD) & (backward == NEVER)])


def _in_a_forward_cut_short(draft: Draft, context: Context, rows: Rows) -> None:
    """Out of memory before any backward: more is gathered and held than DeepSpeed's own limits let it keep. What was
    gathered last is in use; what lies further back was let go of by DeepSpeed, and by nobody else."""
    alive = rows[(context.freed[rows] > context.until)]
    alive = alive[np.argsort(-context.born[alive], kind="stable")]
    so_far = np.cumsum(context.requested[alive])
    if len(alive) and so_far[-1] > _KEPT_BYTES:
        draft.decide(alive[so_far > _IN_USE_BYTES], "param.retained", label=RETAINED)


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
    kind, kinds = _alike(context.requested[rows])
    key = step.astype(np.int64) * kinds + kind
    key[step < 0] = 0
    length = int(key.max()) + 1
    forward = np.bincount(key[(phase == Phase.FORWARD)], minlength=length)
    alive = np.bincount(key[held], minlength=length)
    again = np.bincount(key[(phase == Phase.BACKWARD)], minlength=length)
    surplus = again > forward - alive
    steps = np.arange(length) // kinds
    by_step = np.zeros(int(steps.max()) + 1, np.bool_)
    np.logical_or.at(by_step, steps, surplus & (alive > 0))
    cut = int(step.max())
    if context.timeline.step_from[-1] == NEVER and not by_step[cut]:
        of_last = held & (step == cut)
        by_step[cut] = by_step[:cut].any() or int(context.requested[rows[of_last]].sum()) > _REUSE_BYTES
    return np.asarray(by_step[np.maximum(step, 0)])


def _alike(requested: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Sizes that differ by padding only, as one kind each, and how many kinds there are: a parameter is padded to the
    ranks when it is gathered alone, and not when it is copied out of a buffer."""
    sizes, which = np.unique(requested, return_inverse=True)
    kinds = np.cumsum(np.diff(sizes, prepend=sizes[:1]) > np.minimum(4096, sizes // 64))
    return kinds[which].astype(np.int64), int(kinds[-1]) + 1
