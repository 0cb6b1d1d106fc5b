"""What the recorder itself knew: roles of the memory alive at the end, and marked gathers. It beats every rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.draft import RECORDED, UNDECIDED, Draft
from memtrace.attribution.gathers import RETAINED
from memtrace.attribution.lives import Context
from memtrace.attribution.rules.torch import RECORDED_GATHER, RECORDED_ROLE
from memtrace.io.sidecar import GatherNote, RoleNote, Sidecar
from memtrace.timeline import Phase
from memtrace.timeline.timeline import NEVER

_CATEGORY = {
    "param": "param.full",
    "param.partition": "param.partition",
    "param.gathered": "param.gathered",
    "param.persistent": "param.persistent",
    "param.master": "param.master",
    "grad": "grad.full",
    "grad.partition": "grad.partition",
    "grad.bucket": "grad.bucket",
    "buffer": "buffer",
}
_SHARDED_STAGE = 3
_SAYS_MORE = {"param.gathered": ("param.prefetched", "param.persistent"), "grad.full": ("grad.fp32", "grad.bucket")}
"""What stays of a block of that role: one gathered ahead is gathered, too."""
_LEAST_SHARE = 0.01
"""Of a block that a role must cover to overrule what else is known of it."""


def decide(draft: Draft, context: Context, sidecar: Sidecar) -> None:
    """Roles by address, among the blocks alive at the end; gathers by address and time."""
    _roles(draft, context, sidecar)
    _gathers(draft, context, sidecar.gathers)


def _category(note: RoleNote, stage: int | None) -> str | None:
    if note.role.startswith("optim.state"):
        return "optim.state"
    if note.role == "param.flat":
        return "param.partition" if stage == _SHARDED_STAGE else "param.full"
    if note.role == "grad" and note.name.startswith("fp32_groups_gradients"):
        return "grad.fp32"  # of DeepSpeed's BF16_Optimizer
    return _CATEGORY.get(note.role)


def _roles(draft: Draft, context: Context, sidecar: Sidecar) -> None:
    """What most of a block is, if that is not next to nothing: a view of a few bytes does not say what a bucket is."""
    for category, found in _covered(context, sidecar).items():
        rows = np.array([row for row, _ in found], np.int64)
        share = np.array([size for _, size in found]) / np.maximum(context.requested[rows], 1)
        rows = rows[(share >= _LEAST_SHARE) | (draft.confidence[rows] == UNDECIDED)]
        says_more = [draft.code(name) for name in _SAYS_MORE.get(category, ())]
        rows = rows[~np.isin(draft.category[rows], says_more)]
        draft.label[rows[draft.category[rows] != draft.code(category)]] = -1  # it was another category's
        draft.decide(rows, category, confidence=RECORDED)
        draft.rule[rows] = draft.rules.index(RECORDED_ROLE)


def _covered(context: Context, sidecar: Sidecar) -> dict[str, list[tuple[int, int]]]:
    """By category the blocks alive at the end that it has most bytes of, and how many. Of categories that have as many
    (a buffer and all of its views) the one with the largest part."""
    blocks = context.replay.lifetimes
    live = np.flatnonzero(context.freed >= context.events)
    if not len(live):
        return {}
    live = live[np.argsort(blocks.address[live], kind="stable")]
    starts = blocks.address[live].astype(np.uint64)
    ends = starts + blocks.size[live].astype(np.uint64)
    places = np.searchsorted(starts, np.array([note.address for note in sidecar.roles], np.uint64), side="right") - 1
    here = (None, "cuda", f"cuda:{context.replay.device}")
    parts: defaultdict[int, defaultdict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for note, place in zip(sidecar.roles, places.tolist(), strict=True):
        category = _category(note, sidecar.stage)
        if category is not None and place >= 0 and note.address < int(ends[place]) and note.device in here:
            end = min(note.address + note.bytes, int(ends[place]))
            parts[int(live[place])][category].append((note.address, end))
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row, by_category in parts.items():
        sizes = {name: (_length(some), max(end - start for start, end in some)) for name, some in by_category.items()}
        category = max(sizes, key=sizes.__getitem__)
        found[category].append((row, sizes[category][0]))
    return found


def _length(parts: list[tuple[int, int]]) -> int:
    """How many bytes parts cover that may overlap."""
    covered = reached = 0
    for start, end in sorted(parts):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _gathers(draft: Draft, context: Context, notes: Sequence[GatherNote]) -> None:
    """Marked parameters by address and time. One that DeepSpeed let go of and that lives on into backward (or, of a
    forward that the recording cuts short, to the end) is held by autograd."""
    times, timeline = context.trace.time_us, context.timeline
    if times is None or not notes:
        return
    events = np.searchsorted(times, np.array([note.time_us for note in notes]), side="right") - 1
    rows = _alive_at(context, np.array([note.address for note in notes], np.uint64), events)
    released = np.array([-1 if note.released_us is None else note.released_us for note in notes], np.int64)
    marks = np.array([_mark(draft, note) for note in notes], np.uint8)[rows >= 0]
    released, rows = released[rows >= 0], rows[rows >= 0]
    if not len(rows):
        return
    let_go = np.searchsorted(times, released, side="right")
    backward = timeline.backward_from[context.run[rows]] if len(timeline) else np.full(len(rows), NEVER)
    cut_short = (backward == NEVER) & (context.phase[rows] == Phase.FORWARD)
    until = np.where(cut_short, context.until + 1, backward)
    held = (released >= 0) & (let_go <= until) & (until <= context.freed[rows])
    found = np.where(held, np.uint8(draft.code("param.retained")), marks)
    draft.label[rows[found != draft.category[rows]]] = -1  # it was another category's
    draft.label[rows[held]] = draft.label_code(RETAINED)
    draft.category[rows], draft.confidence[rows] = found, RECORDED
    draft.rule[rows] = draft.rules.index(RECORDED_GATHER)


def _mark(draft: Draft, note: GatherNote) -> int:
    if note.persistent:
        return draft.code("param.persistent")
    return draft.code("param.prefetched" if note.kind == "prefetch" else "param.gathered")


def _alive_at(context: Context, address: NDArray[np.uint64], event: NDArray[np.int64]) -> NDArray[np.int64]:
    """The block that begins at each address and is in use after each event; -1 where there is none."""
    blocks, length = context.replay.lifetimes, context.events + 2
    if not len(blocks):
        return np.full(len(address), -1, np.int64)
    addresses, which = np.unique(blocks.address, return_inverse=True)
    births = which.astype(np.int64) * length + context.born + 1
    order = np.argsort(births, kind="stable")
    place = np.minimum(np.searchsorted(addresses, address), len(addresses) - 1)
    found = np.searchsorted(births[order], place * length + event + 1, side="right") - 1
    rows = order[np.maximum(found, 0)]
    fits = (found >= 0) & (blocks.address[rows] == address) & (event < context.freed[rows])
    return np.where(fits, rows, -1)
