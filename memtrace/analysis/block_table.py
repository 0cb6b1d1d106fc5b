"""Every block of a device as a row for people, and which rows are alive, in what order, and which an event is about."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.analysis import block_filter
from memtrace.analysis.blame import Evidence, SegmentLookup, evidence_of, label_of
from memtrace.analysis.conditions import Condition
from memtrace.analysis.frame_texts import FrameTexts
from memtrace.analysis.frames import ShownStacks, display_frame
from memtrace.attribution import CODE, CONFIDENCE, Attribution, Reason
from memtrace.errors import QuestionError
from memtrace.model import Action, Frame, SnapshotData, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline import Timeline

OFS = ("allocated", "active", "requested")
"""The counters that are made of blocks alone."""
_FEW = 20_000
_LAST = np.iinfo(np.int64).max
_PENDING = CODE["alloc.pending"]


class Freed(NamedTuple):
    """A block that an event freed (`free_requested`) or made free for use again (`free_completed`)."""

    block: int
    what: Literal["free_requested", "free_completed"]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block. Bytes are ints; `born`, `freed` and `died` are events (-1: before the recording; the number of events:
    not in it). `segment` is the address of the segment it lies in, None where none is known. `phase` and `step` are
    those of its birth. `stack` is an id of the shown stacks (-1: none), `frame` the frame of it that a person would
    look at. `life_us`: microseconds from its birth (or the first event) to its death (or the last event), None in a
    trace without times. `category` is the one of a moment if one was asked for: `alloc.pending` while it waits.
    """

    block: int
    address: int
    size: int
    requested: int
    born: int
    freed: int
    died: int
    stream: int
    pool: str
    segment: int | None
    category: str
    label: str
    confidence: str
    phase: str | None
    step: int | None
    module: str | None
    stack: int
    frame: Frame | None
    before_recording: bool
    life_us: int | None
    evidence: Evidence | None


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of one device: row i is row i of `replay.lifetimes`. What takes a while is computed once, when it is
    first asked for."""

    data: SnapshotData
    replay: Replay
    timeline: Timeline
    attribution: Attribution
    shown: ShownStacks

    def __len__(self) -> int:
        return len(self.replay.lifetimes)

    def __repr__(self) -> str:
        return f"BlockTable(device {self.replay.device}: {len(self):,} blocks)"

    def row(self, block: int, event: int | None = None) -> BlockRow:
        """A block as it is after `event`, as `blame(event, by="block")` shows it. Without one: what it is for, and the
        segment it was born in. Raises IndexError."""
        blocks, known = self.replay.lifetimes, self.attribution
        if not 0 <= block < len(blocks):
            raise IndexError(f"no block {block} among {len(blocks)}")
        born, freed, died = int(blocks.born[block]), int(blocks.freed[block]), int(blocks.died[block])
        is_there = event is not None and born <= event < died
        waits = event is not None and is_there and event >= freed
        stack = self._shown_stack(int(blocks.stack[block]))
        category = _PENDING if waits else int(known.category[block])
        reason = Reason.DECIDED if waits else int(known.reason[block])
        phase, step = self.timeline.at(born)
        return BlockRow(
            block=block,
            address=int(blocks.address[block]),
            size=int(blocks.size[block]),
            requested=int(blocks.requested[block]),
            born=born,
            freed=freed,
            died=died,
            stream=int(blocks.stream[block]),
            pool="large" if blocks.large[block] else "small",
            segment=self._segment(block, event if event is not None and is_there else born),
            category=known.categories[category],
            label=label_of(known, self.shown, category, reason, -1 if waits else int(known.label[block]), stack),
            confidence="certain" if waits else CONFIDENCE[int(known.confidence[block])],
            phase=phase,
            step=step,
            module=self._module(born),
            stack=stack,
            frame=self._frame(stack),
            before_recording=born < 0,
            life_us=self._life_us(born, died),
            evidence=None
            if waits
            else evidence_of(known, self.data.stacks, int(known.rule[block]), int(known.frame[block])),
        )

    def frames(self, block: int, *, cpp: bool = False) -> tuple[Frame, ...]:
        """The stack of a block, innermost frame first: Python frames, with `cpp` all. Empty where there is none."""
        stack = int(self.replay.lifetimes.stack[block])
        return self.data.stacks.frames(stack) if cpp else self.shown.table.frames(self._shown_stack(stack))

    def alive(self, event: int, of: str = "allocated") -> NDArray[np.int64]:
        """The blocks that counter `of` (allocated, active, requested) is made of after `event`, largest first, those of
        one size by address. Their sizes (requested ones for `requested`) sum to the counter."""
        if of not in OFS:
            raise QuestionError.unknown("counter of blocks", of, OFS, where="torch")
        blocks = self.replay.lifetimes
        there = (blocks.born <= event) & (event < (blocks.freed if of == "allocated" else blocks.died))
        rows = np.flatnonzero(there)
        if len(rows) > _FEW:  # to choose from all in their order is faster than to sort so many
            order = self._by_requested if of == "requested" else self._by_size
            return order[there[order]].astype(np.int64)
        size = blocks.requested[rows] if of == "requested" else blocks.size[rows]
        return rows[np.lexsort((blocks.address[rows], -size))]

    def ordered(self, rows: NDArray[np.int64], by: str, descending: bool = False) -> NDArray[np.int64]:
        """The same rows by one of `ORDERS`; equals keep their order. Rows of which nothing is known (no module, before
        the recording) come last either way. Raises QuestionError."""
        if by not in ORDERS:
            raise QuestionError.unknown("order of blocks", by, ORDERS, where="memtrace")
        keys, is_known = ORDERS[by](self)
        keys = keys[rows]
        if is_known is not None:
            keys = np.where(is_known[rows], keys, np.int64(-1) if descending else _LAST)
        if not descending:
            return rows[np.argsort(keys, kind="stable")]
        return rows[::-1][np.argsort(keys[::-1], kind="stable")][::-1]

    def matching(self, condition: Condition | str, event: int | None = None) -> NDArray[np.bool_]:
        """Of each block whether it fulfils a condition (a text is parsed: see `block_filter`). `event`: the moment of
        which `is:alive` speaks (None: the end). Raises QuestionError."""
        if isinstance(condition, str):
            condition = block_filter.parse(condition)
        return block_filter.select(condition, self, event)

    def born_at(self, event: int) -> int | None:
        """The block that an event allocated; None where it allocated none."""
        trace, blocks = self.trace, self.replay.lifetimes
        if not 0 <= event < self.replay.events or trace.action[event] != Action.ALLOC:
            return None
        found = self._at(blocks.born, self._born_order, event)
        # a trace that contradicts itself has blocks whose allocation was not seen: they are as old as they can be
        return next((block for block in found if blocks.address[block] == trace.addr[event]), None)

    def freed_at(self, event: int) -> tuple[Freed, ...]:
        """The blocks that an event freed, or made free for use again: one at most, unless the trace contradicts itself.
        An event that did both has both."""
        if not 0 <= event < self.replay.events:
            return ()
        blocks = self.replay.lifetimes
        freed = [Freed(block, "free_requested") for block in self._at(blocks.freed, self._freed_order, event)]
        died = [Freed(block, "free_completed") for block in self._at(blocks.died, self._died_order, event)]
        return (*freed, *died)

    @cached_property
    def trace(self) -> Trace:
        """The events of the device."""
        return self.data.trace(self.replay.device)

    @cached_property
    def time_us(self) -> NDArray[np.int64] | None:
        """When each replayed event was, microseconds since 1970; None before torch 2.2 and without any event."""
        times = self.trace.time_us
        return None if times is None or not self.replay.events else times[: self.replay.events]

    @cached_property
    def texts(self) -> FrameTexts:
        """The frames of the file as text to look in."""
        return FrameTexts(self.data.stacks)

    @cached_property
    def stack(self) -> NDArray[np.int32]:
        """Of each block the id of its stack as shown; -1 for none."""
        return self.shown.rows(self.replay.lifetimes.stack)

    @cached_property
    def run(self) -> NDArray[np.int32]:
        """Of each block the run of the timeline that it was born in; -1 before the recording."""
        born = self.replay.lifetimes.born
        if not len(self.timeline):
            return np.full(len(born), -1, np.int32)
        runs = self.timeline.runs_in_order(born) if self._born_order is None else self.timeline.runs(born)
        return np.where(born < 0, -1, runs).astype(np.int32)

    @cached_property
    def modules(self) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Of each string of the file the row of the module's name that it tells (-1: none; the last is that of no
        text), and the names."""
        from memtrace.timeline.recorded import module_of_text

        names: dict[str, int] = {}
        of_text = np.full(len(self.data.strings) + 1, -1, np.int32)
        texts = self.trace.user_metadata
        for text in [] if texts is None else np.flatnonzero(np.bincount(texts + 1)[1:]).tolist():
            name = module_of_text(self.data.strings[text])
            if name is not None:
                of_text[text] = names.setdefault(name, len(names))
        return of_text, tuple(names)

    def module(self) -> NDArray[np.int32]:
        """Of each block the row of the module that made it, in the names of `modules`; -1 where nobody says."""
        born, texts = self.replay.lifetimes.born, self.trace.user_metadata
        if texts is None or not len(texts):
            return np.full(len(born), -1, np.int32)
        return self.modules[0][np.where(born < 0, np.int32(-1), texts[born])]

    def life(self) -> NDArray[np.int64]:
        """Events from each block's birth to its death, -1 and the number of events standing for those not recorded."""
        return self.replay.lifetimes.died - self.replay.lifetimes.born

    def life_us(self) -> NDArray[np.int64] | None:
        """Of each block what `BlockRow.life_us` says."""
        if self.time_us is None:
            return None
        blocks, last = self.replay.lifetimes, len(self.time_us) - 1
        return self.time_us[np.clip(blocks.died, 0, last)] - self.time_us[np.maximum(blocks.born, 0)]

    def own(self) -> NDArray[np.int32]:
        """Of each block the id of the frame that a person would look at; -1 without one."""
        return np.append(self.shown.own, np.int32(-1))[self.stack]

    def _shown_stack(self, stack: int) -> int:
        return NOT_RECORDED if stack < 0 or not len(self.shown.shown) else int(self.shown.shown[stack])

    def _frame(self, stack: int) -> Frame | None:
        return None if stack < 0 else self.shown.table.frame(int(self.shown.own[stack]))

    def _segment(self, block: int, event: int) -> int | None:
        span = int(self.replay.lifetimes.span[block])
        if span >= 0:
            return int(self.replay.spans.address[span])
        return SegmentLookup(self.replay, event).addresses(np.array([block], np.int64))[0]

    def _module(self, born: int) -> str | None:
        texts = self.trace.user_metadata
        if texts is None or born < 0:
            return None
        of_text, names = self.modules
        module = int(of_text[texts[born]])
        return None if module < 0 else names[module]

    def _life_us(self, born: int, died: int) -> int | None:
        if self.time_us is None:
            return None
        return int(self.time_us[min(max(died, 0), len(self.time_us) - 1)]) - int(self.time_us[max(born, 0)])

    @cached_property
    def _by_size(self) -> NDArray[np.int32]:
        return self._largest_first(self.replay.lifetimes.size)

    @cached_property
    def _by_requested(self) -> NDArray[np.int32]:
        return self._largest_first(self.replay.lifetimes.requested)

    def _largest_first(self, size: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.lexsort((self.replay.lifetimes.address, -size)).astype(np.int32)

    @cached_property
    def _born_order(self) -> NDArray[np.int32] | None:
        """Blocks by birth; None where that is the order they are in."""
        born = self.replay.lifetimes.born
        return None if (born[1:] >= born[:-1]).all() else _order(born)

    @cached_property
    def _freed_order(self) -> NDArray[np.int32]:
        return _order(self.replay.lifetimes.freed)

    @cached_property
    def _died_order(self) -> NDArray[np.int32]:
        return _order(self.replay.lifetimes.died)

    @staticmethod
    def _at(column: NDArray[np.int64], order: NDArray[np.int32] | None, event: int) -> list[int]:
        """The rows of a column that have that value; `order` sorts it."""
        if order is None:
            return list(range(bisect_left(column, event), bisect_right(column, event)))

        def value(row: int) -> int:
            return int(column[row])

        # numpy would copy the order for every search
        low, high = bisect_left(order, event, key=value), bisect_right(order, event, key=value)
        found: list[int] = order[low:high].tolist()
        return found


def _order(column: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.argsort(column, kind="stable").astype(np.int32)


_Keys = tuple[NDArray[Any], "NDArray[np.bool_] | None"]
"""What to sort by, and of which blocks it is known (None: all)."""


def _plain(name: str) -> Callable[[BlockTable], _Keys]:
    return lambda table: (getattr(table.replay.lifetimes, name), None)


def _ranked(texts: list[str], of_block: NDArray[np.integer[Any]]) -> _Keys:
    """Numbers of texts, in the order of the alphabet, equal texts having one."""
    place = {text: number for number, text in enumerate(sorted(set(texts)))}
    ranks = np.array([*(place[text] for text in texts), -1], np.int64)
    return ranks[of_block], of_block >= 0


def _by_phase(table: BlockTable) -> _Keys:
    """By phase, then by step: those outside steps first."""
    if not len(table.timeline):
        return table.run, table.run >= 0
    step, phase = table.timeline.step.astype(np.int64), table.timeline.phase.astype(np.int64)
    return (phase * (table.timeline.steps + 1) + step + 1)[table.run], table.run >= 0


def _by_step(table: BlockTable) -> _Keys:
    step = np.append(table.timeline.step, np.int32(-1))[table.run].astype(np.int64)
    return step, step >= 0


def _by_frame(table: BlockTable) -> _Keys:
    stacks, shown = table.shown.table, np.unique(table.shown.own)
    place = np.full(stacks.frame_count + 1, -1, np.int32)
    place[shown] = np.arange(len(shown))
    return _ranked([display_frame(stacks.frame(frame)) for frame in shown.tolist()], place[table.own()])


ORDERS: dict[str, Callable[[BlockTable], _Keys]] = {
    "size": _plain("size"),
    "requested": _plain("requested"),
    "born": _plain("born"),
    "freed": _plain("freed"),
    "died": _plain("died"),
    "life": lambda table: (table.life(), None),
    "category": lambda table: _ranked(list(table.attribution.categories), table.attribution.category.astype(np.int64)),
    "frame": _by_frame,
    "module": lambda table: _ranked(list(table.modules[1]), table.module()),
    "address": _plain("address"),
    "stream": _plain("stream"),
    "pool": _plain("large"),
    "phase": _by_phase,
    "step": _by_step,
}
"""What blocks can be sorted by."""
