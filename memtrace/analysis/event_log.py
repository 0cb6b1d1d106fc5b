"""Every event of a device as a row for people, with the annotations between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import event_filter
from memtrace.analysis.annotated import NO_ONE, Annotated, AnnotationRow, annotated
from memtrace.analysis.block_table import BlockTable
from memtrace.analysis.conditions import Condition
from memtrace.analysis.frames import ShownStacks
from memtrace.analysis.log_lines import Lines
from memtrace.errors import QuestionError
from memtrace.model import Action, Frame, SnapshotData, Trace
from memtrace.timeline import Timeline

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event. `size` is in bytes, as in `Trace`; times are microseconds (None before torch 2.2), `since_us` from the
    first event on; `action` is the name in the file, known or not; `address` is None where the event has none.

    `block` is the row of the block that it allocated, freed or annotated, `category` and `label` what that is for (None
    without one). `stack` is an id of the shown stacks (-1: none), `frame` the frame of it that a person would look at.
    `pool` is the id of the pool (None: not said; (0, 0) is the default one), `text` the metadata that the program
    gave, `compile_context` as torch has it, `device_free` the bytes that the driver had left when memory ran out,
    `inside` the names of the annotated ranges around the event, outermost first.
    """

    event: int
    time_us: int | None
    since_us: int | None
    action: str
    size: int
    address: int | None
    stream: int
    pool: tuple[int, int] | None
    block: int | None
    category: str | None
    label: str | None
    phase: str | None
    step: int | None
    stack: int
    frame: Frame | None
    text: str | None
    compile_context: str | None
    device_free: int | None
    inside: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class EventLog:
    """The events of one device: row i is event i of the replay. What takes a while is computed once, when it is first
    asked for."""

    blocks: BlockTable

    def __len__(self) -> int:
        return self.blocks.replay.events

    def __repr__(self) -> str:
        return f"EventLog(device {self.trace.device}: {len(self):,} events, {len(self.annotated):,} annotations)"

    def row(self, event: int) -> EventRow:
        """One event. Raises IndexError."""
        if not 0 <= event < len(self):
            raise IndexError(f"no event {event} among {len(self)}")
        trace, times = self.trace, self.blocks.time_us
        block = int(self.block[event])
        what = None if block == NO_BLOCK else self.blocks.row(block)
        full = int(trace.stack[event])
        stack = int(self.shown.shown[full]) if full >= 0 else full
        phase, step = self.timeline.at(event)
        address = int(trace.addr[event])
        notes, pools = self.annotated, self.data.pools
        pool = -1 if trace.pool is None else int(trace.pool[event])
        return EventRow(
            event=event,
            time_us=None if times is None else int(times[event]),
            since_us=None if times is None else int(times[event]) - int(times[0]),
            action=self.actions[int(trace.action[event])],
            size=int(trace.size[event]),
            address=address or None,
            stream=int(trace.stream[event]),
            pool=pools[pool] if 0 <= pool < len(pools) else None,
            block=None if what is None else block,
            category=None if what is None else what.category,
            label=None if what is None else what.label,
            phase=phase,
            step=step,
            stack=stack,
            frame=None if stack < 0 else self.shown.table.frame(int(self.shown.own[stack])),
            text=self._text(trace.user_metadata, event),
            compile_context=self._text(trace.compile_context, event),
            device_free=trace.device_free.get(event),
            inside=tuple(self.data.strings[name] for name in notes.name[notes.open_at(event)].tolist()),
        )

    def frames(self, event: int, *, cpp: bool = False) -> tuple[Frame, ...]:
        """The stack of an event, innermost frame first: Python frames, with `cpp` all. Empty where there is none."""
        stack = int(self.trace.stack[event])
        if cpp or stack < 0:
            return self.data.stacks.frames(stack)
        return self.shown.table.frames(int(self.shown.shown[stack]))

    def annotation(self, annotation: int) -> AnnotationRow:
        """A row of `annotated`. Raises IndexError."""
        notes = self.annotated
        if not 0 <= annotation < len(notes):
            raise IndexError(f"no annotation {annotation} among {len(notes)}")
        time, partner = int(notes.time_us[annotation]), int(notes.partner[annotation])
        return AnnotationRow(
            annotation=annotation,
            event=int(notes.event[annotation]),
            time_us=time,
            since_us=time - notes.first_us,
            name=self.data.strings[int(notes.name[annotation])],
            is_start=bool(notes.start[annotation]),
            depth=int(notes.depth[annotation]),
            duration_us=None if partner == NO_ONE else abs(int(notes.time_us[partner]) - time),
        )

    def annotations(self) -> tuple[AnnotationRow, ...]:
        """All of them, in order of time."""
        return tuple(self.annotation(row) for row in range(len(self.annotated)))

    def matching(self, condition: Condition | str) -> NDArray[np.bool_]:
        """Of each event whether it fulfils a condition (a text is parsed: see `event_filter`). Raises QuestionError."""
        return event_filter.select(_parsed(condition), self)

    def annotations_matching(self, condition: Condition | str) -> NDArray[np.bool_]:
        """The same of each annotation. Raises QuestionError."""
        return event_filter.select_annotations(_parsed(condition), self)

    def only(self, kinds: Sequence[str]) -> NDArray[np.bool_]:
        """Of each event whether its action is one of these names, any that the file has. Raises QuestionError."""
        for kind in kinds:
            if kind not in self.actions:
                raise QuestionError.unknown("kind of event", kind, self.actions)
        meant = np.array([name in kinds for name in self.actions], np.bool_)
        return meant[self.trace.action[: len(self)]]

    def lines(self, events: NDArray[np.bool_] | None = None, annotations: NDArray[np.bool_] | None = None) -> Lines:
        """The log as lines: these events and these annotations (None: all), in order."""
        notes = np.arange(len(self.annotated)) if annotations is None else np.flatnonzero(annotations)
        chosen = None if events is None else np.flatnonzero(events)
        return Lines.of(len(self), chosen, notes, self.annotated.event[notes])

    @property
    def data(self) -> SnapshotData:
        """The snapshot."""
        return self.blocks.data

    @property
    def trace(self) -> Trace:
        """The events as columns."""
        return self.blocks.trace

    @property
    def timeline(self) -> Timeline:
        """Phases and steps."""
        return self.blocks.timeline

    @property
    def shown(self) -> ShownStacks:
        """Stacks as shown."""
        return self.blocks.shown

    @property
    def actions(self) -> tuple[str, ...]:
        """The names of all kinds of events, by code: those of this version, then others that the file has."""
        return self.data.actions

    @cached_property
    def annotated(self) -> Annotated:
        """The annotations of the device, in order of time."""
        return annotated(self.data, self.trace.device, self.blocks.time_us)

    @cached_property
    def block(self) -> NDArray[np.int32]:
        """Of each event the row of the block that it allocated, freed or annotated; `NO_BLOCK` for others. In a trace
        that contradicts itself one event may end several blocks: the one at its address, else any."""
        blocks, trace, events = self.blocks.replay.lifetimes, self.trace, len(self)
        found = np.full(events, NO_BLOCK, np.int32)
        address, action = trace.addr[:events], trace.action[:events]
        for column in (blocks.died, blocks.freed):
            rows = np.flatnonzero((column >= 0) & (column < events))
            found[column[rows]] = rows
            own = rows[blocks.address[rows] == address[column[rows]]]
            found[column[own]] = own
        rows = np.flatnonzero((blocks.born >= 0) & (blocks.born < events))
        born = blocks.born[rows]
        rows = rows[(action[born] == Action.ALLOC) & (blocks.address[rows] == address[born])]
        found[blocks.born[rows]] = rows
        noted = np.flatnonzero((action == Action.ANNOTATE) & (address > 0))
        if len(noted):
            found[noted] = self._block_at(address[noted], noted)
        return found

    def _block_at(self, address: NDArray[np.uint64], event: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block at each address after each event; `NO_BLOCK` where there is none."""
        blocks = self.blocks.replay.lifetimes
        if not len(blocks):
            return np.full(len(address), NO_BLOCK, np.int64)
        places, place = np.unique(blocks.address, return_inverse=True)
        # one number for an address and a birth, so that one search finds the youngest block there
        step = np.int64(len(self) + 2)
        key = place.ravel() * step + blocks.born + 1
        order = np.argsort(key, kind="stable")
        wanted = np.minimum(np.searchsorted(places, address), len(places) - 1)
        youngest = np.searchsorted(key[order], wanted * step + event + 1, side="right") - 1
        row = order[np.maximum(youngest, 0)]
        is_there = (youngest >= 0) & (blocks.address[row] == address) & (event < blocks.died[row])
        return np.where(is_there, row, NO_BLOCK)

    def _text(self, column: NDArray[np.int32] | None, event: int) -> str | None:
        text = -1 if column is None else int(column[event])
        return None if text < 0 else self.data.strings[text]


def _parsed(condition: Condition | str) -> Condition:
    return event_filter.parse(condition) if isinstance(condition, str) else condition


def next_match(rows: NDArray[np.int64], event: int) -> int | None:
    """The first of these events (in order) that comes after `event`."""
    place = int(np.searchsorted(rows, event, side="right"))
    return int(rows[place]) if place < len(rows) else None


def previous_match(rows: NDArray[np.int64], event: int) -> int | None:
    """The last of these events (in order) that comes before `event`."""
    place = int(np.searchsorted(rows, event, side="left"))
    return int(rows[place - 1]) if place else None
