"""Who owns the bytes at one moment, grouped. The rows sum to torch's counter, always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes, Replay
from memtrace.analysis.frames import ShownStacks, innermost_common
from memtrace.analysis.holdings import NO_BLOCK, Holdings, holdings_at
from memtrace.attribution import CATEGORIES, CONFIDENCE, LABELS, REASON_TEXT, Attribution, Reason
from memtrace.model import Frame, SnapshotData, StackTable
from memtrace.model.stacks import NOT_RECORDED
from memtrace.units import format_bytes

By = Literal["category", "stack", "frame", "file", "stream", "block", "tree"]
_ALLOCATOR_KEYS = -(1 << 32)
BYS = ("category", "stack", "frame", "file", "stream", "block", "tree")


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


@dataclass(frozen=True, slots=True)
class Row:
    """One group. `key` is the group's name where it has one of its own (file, frame, stream); `category` is the one
    with most bytes; `stack` the heaviest, as an id of `Blame.stacks` (-1: none); `dominator` the innermost frame
    that all bytes of the group pass through, if there is one."""

    key: str | None
    bytes: int
    blocks: int
    category: str
    label: str
    confidence: str
    stack: int
    dominator: Frame | None
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
    data: SnapshotData, replay: Replay, attribution: Attribution, shown: ShownStacks, *, event: int, of: str, by: str
) -> Blame:
    """Who owns the bytes of counter `of` after `event`, grouped `by` one of `BYS` (`tree`: by call path)."""
    held = holdings_at(replay, attribution, event, of)
    groups = _Groups(held, shown, replay, event)
    rows = (
        groups.blocks()
        if by == "block"
        else [groups.row(members, by) for members in _members(_group_keys(held, shown, by))]
    )
    rows.sort(key=lambda row: (-row.bytes, row.key or "", row.category, row.stack))
    times = data.trace(replay.device).time_us
    unsure = replay.lifetimes.slack_bound[held.block[held.block != NO_BLOCK]] if of != "requested" else None
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
        rows=tuple(rows),
        stacks=shown.table,
    )


def _group_keys(held: Holdings, shown: ShownStacks, by: str) -> NDArray[np.int64]:
    """One integer per row of `held`, equal within a group. The allocator's own rows stay apart, one group each."""
    own = held.block == NO_BLOCK
    if by == "category":
        keys = held.category.astype(np.int64)
    elif by == "stream":
        keys = np.unique(held.stream, return_inverse=True)[1].astype(np.int64)
    else:
        row = shown.rows(held.stack).astype(np.int64)
        keys = row if by in ("stack", "tree") else _frame_keys(row, shown, by)
        # without a frame to group by, blocks stay together by what is known of them
        keys = np.where(row == NOT_RECORDED, -1 - held.category.astype(np.int64) * len(Reason) - held.reason, keys)
    return np.where(own, _ALLOCATOR_KEYS - held.category.astype(np.int64), keys)


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

    def __init__(self, held: Holdings, shown: ShownStacks, replay: Replay, event: int) -> None:
        self.held = held
        self.shown = shown
        self.replay = replay
        self.segments = _SegmentLookup(replay, event)
        self.shown_row = shown.rows(held.stack)

    def row(self, members: NDArray[np.int64], by: str) -> Row:
        held = self.held
        size = held.bytes[members]
        category = _heaviest(held.category[members], size)
        shown = self.shown_row[members]
        framed = shown != NOT_RECORDED  # a mixed group shows a call site where it has one
        is_block = bool(held.block[members[0]] != NO_BLOCK)
        return Row(
            key=self._key(int(members[0]), by) if is_block else None,
            bytes=int(size.sum()),
            blocks=len(members) if is_block else 0,
            category=CATEGORIES[category],
            label=self._label(members, category),
            confidence=CONFIDENCE[int(held.confidence[members].max())],
            stack=_heaviest(shown[framed], size[framed]) if framed.any() else NOT_RECORDED,
            dominator=self._dominator(shown),
        )

    def blocks(self) -> list[Row]:
        """A row for each row of the holdings. There can be hundreds of thousands: nothing is looked up twice."""
        held, table, blocks = self.held, self.shown.table, self.replay.lifetimes
        tops: dict[int, Frame | None] = {NOT_RECORDED: None}
        labels = {(code, reason): self._label_of(code, reason) for code, reason in _pairs(held.category, held.reason)}
        index = np.where(held.block == NO_BLOCK, 0, held.block)
        facts = zip(
            *(column[index].tolist() if len(blocks) else [0] * len(held) for column in _fact_columns(blocks)),
            self.segments.addresses(index) if len(blocks) else [None] * len(held),
            strict=True,
        )
        rows = []
        for size, block, category, confidence, reason, stack, fact in zip(
            held.bytes.tolist(),
            held.block.tolist(),
            held.category.tolist(),
            held.confidence.tolist(),
            held.reason.tolist(),
            self.shown_row.tolist(),
            facts,
            strict=True,
        ):
            if stack not in tops:
                tops[stack] = table.frame(int(table.ids(stack)[0]))
            rows.append(
                Row(
                    key=None,
                    bytes=size,
                    blocks=int(block != NO_BLOCK),
                    category=CATEGORIES[category],
                    label=labels[category, reason],
                    confidence=CONFIDENCE[confidence],
                    stack=stack,
                    dominator=tops[stack],
                    block=None if block == NO_BLOCK else _facts(*fact),
                )
            )
        return rows

    def _label_of(self, category: int, reason: int) -> str:
        name = CATEGORIES[category]
        return LABELS[name] if name != "unknown" else REASON_TEXT[Reason(reason)]

    def _key(self, first: int, by: str) -> str | None:
        if by == "stream":
            return str(int(self.held.stream[first]))
        row = int(self.shown_row[first])
        if by not in ("frame", "file") or row == NOT_RECORDED:
            return None
        frame = self.shown.table.frame(int(self.shown.own[row]))
        return frame.filename if by == "file" else f"{frame.filename}:{frame.line} {frame.name}"

    def _label(self, members: NDArray[np.int64], category: int) -> str:
        """The category's label; of undecided blocks, why: with bytes for each reason if there are several."""
        name = CATEGORIES[category]
        inside = members[self.held.category[members] == category]
        reason, size = self.held.reason[inside], self.held.bytes[inside]
        if name != "unknown":
            return LABELS[name]
        sums = [(int(size[reason == code].sum()), int(code)) for code in np.unique(reason)]
        if len(sums) == 1:
            return REASON_TEXT[Reason(sums[0][1])]
        return ", ".join(
            f"{REASON_TEXT[Reason(code)]} {format_bytes(part)}" for part, code in sorted(sums, reverse=True)
        )

    def _dominator(self, shown: NDArray[np.int32]) -> Frame | None:
        """The innermost frame that is in every one of the stacks."""
        rows = np.unique(shown).tolist()
        return None if NOT_RECORDED in rows else innermost_common(self.shown.table, rows)


def _pairs(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> set[tuple[int, int]]:
    return set(zip(left.tolist(), right.tolist(), strict=True))


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
) -> BlockFacts:
    pool = "large" if large else "small"
    return BlockFacts(address, size, requested, born, freed, died, stream, pool, segment, born < 0)


class _SegmentLookup:
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
