"""What the recorder itself knew: roles of the memory alive at the end, and marked gathers. It beats every rule."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.draft import RECORDED, Draft
from memtrace.attribution.gathers import RETAINED
from memtrace.attribution.lives import Context
from memtrace.attribution.rules.torch import RECORDED_GATHER, RECORDED_ROLE
from memtrace.io.sidecar import GatherNote, Sidecar
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


def decide(draft: Draft, context: Context, sidecar: Sidecar) -> None:
    """Roles by address, among the blocks alive at the end; gathers by address and time."""
    _roles(draft, context, sidecar)
    _gathers(draft, context, sidecar.gathers)


def _category(role: str, stage: int | None) -> str | None:
    if role.startswith("optim.state"):
        return "optim.state"
    if role == "param.flat":
        return "param.partition" if stage == _SHARDED_STAGE else "param.full"
    return _CATEGORY.get(role)


def _roles(draft: Draft, context: Context, sidecar: Sidecar) -> None:
    blocks = context.replay.lifetimes
    live = np.flatnonzero(context.freed >= context.events)
    if not len(live) or not sidecar.roles:
        return
    live = live[np.argsort(blocks.address[live], kind="stable")]
    starts = blocks.address[live].astype(np.uint64)
    ends = starts + blocks.size[live].astype(np.uint64)
    most: dict[int, tuple[int, str]] = {}
    for note in sidecar.roles:
        category = _category(note.role, sidecar.stage)
        place = int(np.searchsorted(starts, np.uint64(note.address), side="right")) - 1
        if category is None or place < 0 or note.address >= int(ends[place]):
            continue
        row = int(live[place])
        if note.bytes > most.get(row, (-1, ""))[0]:  # views of one block: the largest says what the block is
            most[row] = (note.bytes, category)
    for category in {one for _, one in most.values()}:
        rows = np.array([row for row, (_, one) in most.items() if one == category], np.int64)
        draft.decide(rows, category, confidence=RECORDED)
        draft.rule[rows] = draft.rules.index(RECORDED_ROLE)


def _gathers(draft: Draft, context: Context, notes: tuple[GatherNote, ...]) -> None:
    times, blocks = context.trace.time_us, context.replay.lifetimes
    if times is None or not notes:
        return
    order = np.argsort(blocks.address, kind="stable")
    addresses = blocks.address[order]
    events = np.searchsorted(times, np.array([note.time_us for note in notes]), side="right") - 1
    names = {"demand": "param.gathered", "prefetch": "param.prefetched"}
    rule = draft.rules.index(RECORDED_GATHER)
    for note, event in zip(notes, events.tolist(), strict=True):
        low, high = np.searchsorted(addresses, [np.uint64(note.address), np.uint64(note.address + 1)])
        rows = order[low:high]
        rows = rows[(context.born[rows] <= event) & (event < context.freed[rows])]
        if not len(rows):
            continue
        draft.rule[rows] = rule
        row = int(rows[-1])
        backward = int(context.timeline.backward_from[context.run[row]]) if len(context.timeline) else int(NEVER)
        let_go = None if note.released_us is None else int(np.searchsorted(times, note.released_us, side="right"))
        held = let_go is not None and let_go <= backward <= int(context.freed[row]) and backward != NEVER
        if held:
            draft.decide(rows, "param.retained", label=RETAINED, confidence=RECORDED)
        else:
            draft.decide(rows, names[note.kind], confidence=RECORDED)
