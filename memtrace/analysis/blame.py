"""Who owns the bytes at one moment, grouped. The rows sum to torch's counter, always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes, Replay
from memtrace.analysis.frames import ShownStacks, display_frame, innermost_common
from memtrace.analysis.holdings import NO_BLOCK, Holdings, holdings_at
from memtrace.attribution import CONFIDENCE, REASON_TEXT, Attribution, Reason
from memtrace.model import Frame, SnapshotData, StackTable, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline import PHASES, Timeline
from memtrace.timeline.timeline import NO_STEP
from memtrace.units import format_bytes

By = Literal["category", "stack", "frame", "file", "module", "phase", "stream", "block", "tree"]
_ALLOCATOR_KEYS = -(1 << 32)
BYS = ("category", "stack", "frame", "file", "module", "phase", "stream", "block", "tree")


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What `--by block` adds: addresses and sizes in bytes, events as indices (-1: before the recording)."""

    address: int
    size: int
    requested: int
    born: int
    freed: int
    died: int
    stream: int
    pool: str
    segment: int | None
    before_recording: bool
    phase: str | None
    step: int | None
    module: str | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What decided: a rule's id, and the frame it matched (None: it looked at size, life or place alone)."""

    rule: str
    frame: Frame | None


@dataclass(frozen=True, slots=True)
class Row:
    """One group. `key` is the group's name where it has one of its own (file, frame, module, phase, stream); `category`
    the one with most bytes; `stack` the heaviest, an id of `Blame.stacks` (-1: none); `dominator` the innermost frame
    that all bytes of the group pass through, if there is one; `evidence` what decided most bytes of that category;
    `is_from_one_call`: all bytes pass through the evidence's frame."""

    key: str | None
    bytes: int
    blocks: int
    category: str
    label: str
    confidence: str
    stack: int
    dominator: Frame | None
    evidence: Evidence | None
    is_from_one_call: bool
    block: BlockFacts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Blame:
    """Rows, largest first, that sum to `total_bytes`: the counter `of` after `event`."""

    device: int
    event: int
    events: int
    time_us: int | None
    first_us: int | None
    of: str
    by: str
    total_bytes: int
    slack_bound: int
    phase: str | None
    step: int | None
    rows: tuple[Row, ...]
    stacks: StackTable

    def frames(self, row: Row) -> tuple[Frame, ...]:
        """The heaviest stack of a row, innermost frame first; empty when it has none."""
        return self.stacks.frames(row.stack)

    def __repr__(self) -> str:
        rows = "".join(
            f"\n  {format_bytes(row.bytes):>12}  {row.blocks:>6} blocks  {row.key or row.category}  {row.label}"
            for row in self.rows[:8]
        )
        more = f"\n  ... {len(self.rows) - 8} more" if len(self.rows) > 8 else ""
        return f"Blame({format_bytes(self.total_bytes)} {self.of} after event {self.event}, by {self.by}){rows}{more}"


def blame_at(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    attribution: Attribution,
    shown: ShownStacks,
    *,
    event: int,
    of: str,
    by: str,
) -> Blame:
    """Who owns the bytes of counter `of` after `event`, grouped `by` one of `BYS` (`tree`: by call path)."""
    held = holdings_at(replay, attribution, event, of)
    groups = _Groups(held, shown, replay, timeline, attribution, data, event)
    rows = groups.blocks() if by == "block" else [groups.row(members, by) for members in groups.members(by)]
    rows.sort(key=lambda row: (-row.bytes, row.key or "", row.category, row.stack))
    times = data.trace(replay.device).time_us
    unsure = replay.lifetimes.slack_bound[held.block[held.block != NO_BLOCK]] if of != "requested" else None
    phase, step = timeline.at(event)
    return Blame(
        device=replay.device,
        event=event,
        events=replay.events,
        time_us=int(times[event]) if times is not None and 0 <= event < len(times) else None,
        first_us=int(times[0]) if times is not None and len(times) else None,
        of=of,
        by=by,
        total_bytes=held.total,
        slack_bound=0 if unsure is None or of == "reserved" else int(unsure.sum()),
        phase=phase,
        step=step,
        rows=tuple(rows),
        stacks=shown.table,
    )


def _frame_keys(row: NDArray[np.int64], shown: ShownStacks, by: str) -> NDArray[np.int64]:
    if not len(shown.own):
        return row
    frame = shown.own[row].astype(np.int64)
    return frame if by == "frame" else shown.table.filename[frame].astype(np.int64)


def _members(keys: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Row numbers of each group."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, cuts)


class _Groups:
    """Makes one `Row` of the rows of a group."""

    def __init__(
        self,
        held: Holdings,
        shown: ShownStacks,
        replay: Replay,
        timeline: Timeline,
        attribution: Attribution,
        data: SnapshotData,
        event: int,
    ) -> None:
        self.held = held
        self.shown = shown
        self.replay = replay
        self.attribution = attribution
        self.stacks = data.stacks
        self.timeline = timeline
        self.segments = SegmentLookup(replay, event)
        self.shown_row = shown.rows(held.stack)
        born, is_block = np.full(len(held), -1, np.int64), held.block != NO_BLOCK
        born[is_block] = replay.lifetimes.born[held.block[is_block]]
        self.run = np.where(born < 0, -1, timeline.runs(born)) if len(timeline) else np.full(len(held), -1)
        self.module, self.modules = modules_of(data, data.trace(replay.device), born)

    def members(self, by: str) -> list[NDArray[np.int64]]:
        """Row numbers of each group."""
        return _members(self._keys(by))

    def _keys(self, by: str) -> NDArray[np.int64]:
        """One integer per row, equal within a group. The allocator's own rows stay apart, one group each."""
        held = self.held
        if by == "category":
            keys = held.category.astype(np.int64)
        elif by == "stream":
            keys = np.unique(held.stream, return_inverse=True)[1].astype(np.int64)
        elif by == "phase":
            keys = self._phase_keys()
        elif by == "module":
            keys = self.module
        else:
            row = self.shown_row.astype(np.int64)
            keys = row if by in ("stack", "tree") else _frame_keys(row, self.shown, by)
            # without a frame to group by, blocks stay together by what is known of them
            keys = np.where(row == NOT_RECORDED, -1 - held.category.astype(np.int64) * len(Reason) - held.reason, keys)
        return np.where(held.block == NO_BLOCK, _ALLOCATOR_KEYS - held.category.astype(np.int64), keys)

    def _phase_keys(self) -> NDArray[np.int64]:
        timeline = self.timeline
        if not len(timeline):
            return np.full(len(self.run), -1, np.int64)
        code = timeline.phase.astype(np.int64) + (timeline.step.astype(np.int64) + 1) * len(PHASES)
        return np.where(self.run < 0, -1, code[self.run])

    def row(self, members: NDArray[np.int64], by: str) -> Row:
        held = self.held
        size = held.bytes[members]
        category = _heaviest(held.category[members], size)
        shown = self.shown_row[members]
        framed = shown != NOT_RECORDED
        if 2 * int(size[framed].sum()) < int(size.sum()) and by == "category":
            framed[:] = False  # most of it comes from threads without Python: no call site stands for it
        is_block = bool(held.block[members[0]] != NO_BLOCK)
        return Row(
            key=self._key(int(members[0]), by) if is_block else None,
            bytes=int(size.sum()),
            blocks=len(members) if is_block else 0,
            category=self.attribution.categories[category],
            label=self._label(members, category),
            confidence=CONFIDENCE[int(held.confidence[members].max())],
            stack=_heaviest(shown[framed], size[framed]) if framed.any() else NOT_RECORDED,
            dominator=self._dominator(shown),
            evidence=self._evidence(members, category),
            is_from_one_call=by == "category" and self._is_from_one_call(members, shown),
        )

    def blocks(self) -> list[Row]:
        """A row for each row of the holdings. There can be hundreds of thousands: nothing is looked up twice."""
        held, table, blocks = self.held, self.shown.table, self.replay.lifetimes
        tops: dict[int, Frame | None] = {NOT_RECORDED: None}
        labels: dict[tuple[int, int, int, int], str] = {}
        evidence: dict[tuple[int, int], Evidence | None] = {}
        index = np.where(held.block == NO_BLOCK, 0, held.block)
        columns = [column[index].tolist() if len(blocks) else [0] * len(held) for column in _fact_columns(blocks)]
        segments = self.segments.addresses(index) if len(blocks) else [None] * len(held)
        moments = {run: self._moment(run) for run in np.unique(self.run).tolist()}
        when = [moments[run] for run in self.run.tolist()]
        modules = [self._module(module) for module in self.module.tolist()]
        facts = zip(*columns, segments, when, modules, strict=True)
        rows = []
        for size, block, category, confidence, reason, rule, frame, label, stack, fact in zip(
            held.bytes.tolist(),
            held.block.tolist(),
            held.category.tolist(),
            held.confidence.tolist(),
            held.reason.tolist(),
            held.rule.tolist(),
            held.frame.tolist(),
            held.label.tolist(),
            self.shown_row.tolist(),
            facts,
            strict=True,
        ):
            if stack not in tops:
                tops[stack] = table.frame(int(table.ids(stack)[0]))
            named = (category, reason, label, stack if reason == Reason.NO_RULE else NOT_RECORDED)
            if named not in labels:
                labels[named] = self._label_of(*named)
            if (rule, frame) not in evidence:
                evidence[rule, frame] = self._evidence_of(rule, frame)
            rows.append(
                Row(
                    key=None,
                    bytes=size,
                    blocks=int(block != NO_BLOCK),
                    category=self.attribution.categories[category],
                    label=labels[named],
                    confidence=CONFIDENCE[confidence],
                    stack=stack,
                    dominator=tops[stack],
                    evidence=evidence[rule, frame],
                    is_from_one_call=frame >= 0,
                    block=None if block == NO_BLOCK else _facts(*fact),
                )
            )
        return rows

    def _moment(self, run: int) -> tuple[str | None, int | None]:
        """Phase and step of a run of the timeline."""
        if run < 0:
            return None, None
        step = int(self.timeline.step[run])
        return PHASES[int(self.timeline.phase[run])], None if step == NO_STEP else step

    def _module(self, module: int) -> str | None:
        return None if module < 0 else self.modules[module]

    def _label_of(self, category: int, reason: int, label: int, stack: int) -> str:
        """The label of one block: its rule's, else its category's; of an undecided one why, and its line."""
        return label_of(self.attribution, self.shown, category, reason, label, stack)

    def _evidence(self, members: NDArray[np.int64], category: int) -> Evidence | None:
        """What decided most bytes of a category in a group."""
        inside = members[self.held.category[members] == category]
        pair = (self.held.rule[inside].astype(np.int64) << 32) + self.held.frame[inside] + 1
        heaviest = _heaviest(pair, self.held.bytes[inside])
        return self._evidence_of(heaviest >> 32, (heaviest & 0xFFFFFFFF) - 1)

    def _is_from_one_call(self, members: NDArray[np.int64], shown: NDArray[np.int32]) -> bool:
        """Whether one frame decided all of the group, or each of its stacks has the frame that decided."""
        frames = np.unique(self.held.frame[members])
        rows = np.unique(shown).tolist()
        if len(frames) != 1 or NOT_RECORDED in rows:
            return False
        return all(int(frames[0]) in self.shown.table.ids(row) for row in rows)

    def _evidence_of(self, rule: int, frame: int) -> Evidence | None:
        return evidence_of(self.attribution, self.stacks, rule, frame)

    def _key(self, first: int, by: str) -> str | None:
        if by == "stream":
            return str(int(self.held.stream[first]))
        if by == "phase":
            phase, step = self._moment(int(self.run[first]))
            return phase if step is None else f"{phase}, step {step}"
        if by == "module":
            return self._module(int(self.module[first]))
        row = int(self.shown_row[first])
        if by not in ("frame", "file") or row == NOT_RECORDED:
            return None
        frame = self.shown.table.frame(int(self.shown.own[row]))
        return frame.filename if by == "file" else f"{frame.filename}:{frame.line} {frame.name}"

    def _label(self, members: NDArray[np.int64], category: int) -> str:
        """The category's label, or the one that all its bytes share; of undecided blocks, why: with bytes for each
        reason if there are several."""
        inside = members[self.held.category[members] == category]
        size = self.held.bytes[inside]
        if self.attribution.categories[category] != "unknown":
            labels = np.unique(self.held.label[inside])
            return self._label_of(category, Reason.DECIDED, int(labels[0]) if len(labels) == 1 else -1, NOT_RECORDED)
        texts: dict[str, int] = {}
        pairs, which = np.unique(
            np.stack([self.held.reason[inside].astype(np.int64), self._own_frame(inside)]), axis=1, return_inverse=True
        )
        sums = np.zeros(pairs.shape[1], np.int64)
        np.add.at(sums, which.ravel(), size)
        lines = int((pairs[0] == Reason.NO_RULE).sum())
        for reason, frame, part in zip(*pairs.tolist(), sums.tolist(), strict=True):
            text = REASON_TEXT[Reason(reason)]
            if reason == Reason.NO_RULE and lines == 1 and frame >= 0:
                text += f" for {display_frame(self.shown.table.frame(frame))}"
            elif reason == Reason.NO_RULE:
                text += f" for {lines} places"
            texts[text] = texts.get(text, 0) + part
        if len(texts) == 1:
            return next(iter(texts))
        return ", ".join(
            f"{text} {format_bytes(part)}" for part, text in sorted(((b, a) for a, b in texts.items()), reverse=True)
        )

    def _own_frame(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The frame that a person would look at, -1 where there is none."""
        shown = self.shown_row[rows].astype(np.int64)
        if not len(self.shown.own):
            return np.full(len(rows), -1, np.int64)
        return np.where(shown == NOT_RECORDED, -1, self.shown.own[shown].astype(np.int64))

    def _dominator(self, shown: NDArray[np.int32]) -> Frame | None:
        """The innermost frame that is in every one of the stacks."""
        rows = np.unique(shown).tolist()
        return None if NOT_RECORDED in rows else innermost_common(self.shown.table, rows)


def label_of(attribution: Attribution, shown: ShownStacks, category: int, reason: int, label: int, stack: int) -> str:
    """The label of one block: its rule's, else its category's; of an undecided one why, and its line. The numbers are
    as in `Attribution`, `stack` is an id of the shown stacks."""
    if label >= 0:
        return attribution.labels[label]
    if attribution.categories[category] != "unknown":
        return attribution.category_labels[category]
    text = REASON_TEXT[Reason(reason)]
    if reason != Reason.NO_RULE or stack == NOT_RECORDED:
        return text
    return f"{text} for {display_frame(shown.table.frame(int(shown.own[stack])))}"


def evidence_of(attribution: Attribution, stacks: StackTable, rule: int, frame: int) -> Evidence | None:
    """What decided one block, by the numbers in `Attribution`; None where nothing did."""
    if rule < 0:
        return None
    return Evidence(attribution.rule_ids[rule], None if frame < 0 else stacks.frame(frame))


def modules_of(data: SnapshotData, trace: Trace, born: NDArray[np.int64]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The modules that made the blocks born at these events (-1: before all): rows of their names, -1: not said."""
    texts = trace.user_metadata
    if texts is None or not len(texts):
        return np.full(len(born), -1, np.int64), ()
    from memtrace.timeline.recorded import module_of_text

    said, which = np.unique(np.where(born < 0, np.int32(-1), texts[born]), return_inverse=True)
    names = [module_of_text(data.strings[text]) if text >= 0 else None for text in said.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name in names if name is not None))}
    rows = np.array([-1 if name is None else numbers[name] for name in names], np.int64)
    return rows[which.ravel()] if len(rows) else np.full(len(born), -1, np.int64), tuple(numbers)


def _fact_columns(blocks: Lifetimes) -> tuple[NDArray[Any], ...]:
    """What `_facts` takes, without the address of the segment."""
    return (
        blocks.address,
        blocks.size,
        blocks.requested,
        blocks.born,
        blocks.freed,
        blocks.died,
        blocks.stream,
        blocks.large,
    )


def _facts(
    address: int,
    size: int,
    requested: int,
    born: int,
    freed: int,
    died: int,
    stream: int,
    large: bool,
    segment: int | None,
    moment: tuple[str | None, int | None],
    module: str | None,
) -> BlockFacts:
    pool = "large" if large else "small"
    return BlockFacts(address, size, requested, born, freed, died, stream, pool, segment, born < 0, *moment, module)


class SegmentLookup:
    """Address of the segment a block lies in; in expandable memory, of the mapped range at that moment."""

    def __init__(self, replay: Replay, event: int) -> None:
        self.blocks, self.spans = replay.lifetimes, replay.spans
        ranges = np.flatnonzero(self.spans.expandable & self.spans.alive_at(event))
        self.starts = np.sort(self.spans.address[ranges])

    def addresses(self, blocks: NDArray[np.int64]) -> list[int | None]:
        """Of each of these rows of the lifetimes; None where no range is known."""
        span = self.blocks.span[blocks].astype(np.int64)
        place = np.searchsorted(self.starts, self.blocks.address[blocks], side="right") - 1
        mapped = self.starts[place] if len(self.starts) else np.zeros(len(blocks), np.uint64)
        own = self.spans.address[span] if len(self.spans) else mapped
        known = (span >= 0) | (place >= 0)
        found = np.where(span >= 0, own, mapped).tolist()
        return [address if is_known else None for address, is_known in zip(found, known.tolist(), strict=True)]


def _heaviest(values: NDArray[np.generic], size: NDArray[np.int64]) -> int:
    """The value with most bytes."""
    distinct, inverse = np.unique(values, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, inverse, size)
    return int(distinct[sums.argmax()])
