"""Columns of a snapshot by way of the native decoder: no Python object per event. `parse` is the reference.

What the decoder leaves to Python is small: segments, settings, and numbering everything as the reference does.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import NotASnapshotError, SourceError, TooLargeError, UnreadableError
from memtrace.io import _decode
from memtrace.io.columns import check_integer, check_list
from memtrace.io.events import Vocabulary
from memtrace.io.intern import MAX_CPP_FRAMES
from memtrace.io.parse import Parsed, assemble, parse_annotations, top_of
from memtrace.io.refusal import COPY_AGAIN, cut_off, opcode_refusal, refusal
from memtrace.io.scan import check_header
from memtrace.io.source import PickleStream
from memtrace.io.state import BlockColumns, block_state, parse_state
from memtrace.model import Action, Annotations, BlockState, SnapshotData, StackTable, StringTable, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.model.state import REQUEST_UNKNOWN

Ids = NDArray[np.int32]


def decode_snapshot(stream: PickleStream) -> SnapshotData:
    """Columns of the pickle in `stream`. Raises a SourceError for whatever is not a snapshot."""
    try:
        return _columns(walked(stream.reader), stream)
    except MemoryError:
        hint = "The file is damaged, built to do that, or needs a larger machine."
        raise TooLargeError("reading the pickle needs more memory than there is", hint=hint) from None


def _columns(decoder: _decode.Decoder, stream: PickleStream) -> SnapshotData:
    root = decoder.root()
    top = top_of(root)
    if top.get("device_traces", []) is not _decode.OPAQUE:
        check_list(top.get("device_traces", []), "device_traces")
    words, numbers = Vocabulary(), _Numbers(decoder)
    events = _Events(decoder, numbers, words)
    segments = check_list(top.get("segments", []), "segments")
    state = parse_state(segments, numbers, words, lambda rows: _blocks(rows, decoder, numbers))
    annotations = _annotations(top.get("external_annotations"), decoder, numbers)

    order = np.full(decoder.stack_count, -1, np.int32)
    count = 0
    for column in (events.stack, state.blocks.stack, state.segments.stack):
        count = _decode.first_use(column, order, count)
    _decode.translate(events.stack, order)
    state = replace(
        state,
        blocks=replace(state.blocks, stack=_placed(state.blocks.stack, order)),
        segments=replace(state.segments, stack=_placed(state.segments.stack, order)),
    )
    tables = numbers.tables(order, count)
    parsed = Parsed(top, isinstance(root, list), events.traces(), state, words, annotations, tables)
    return assemble(parsed, path=stream.info.path, file_bytes=stream.info.file_bytes)


def _placed(stacks: Ids, order: Ids) -> Ids:
    return np.where(stacks < 0, stacks, order[stacks]) if len(order) else stacks


def walked(stream: io.BufferedReader) -> _decode.Decoder:
    """The decoder, when it has read the whole pickle. Raises a SourceError."""
    try:
        check_header(stream.peek(2)[:8])
        decoder = _decode.Decoder(stream.readinto)
        decoder.run()
    except _decode.Refused as refused:
        raise _error(refused) from None
    except OSError as error:
        raise UnreadableError(f"reading failed: {error.strerror or error}", hint=COPY_AGAIN) from error
    return decoder


def _error(refused: _decode.Refused) -> SourceError:
    if refused.failure == "cut_off":
        return cut_off(refused.end)
    if refused.failure == "refused_opcode":
        return opcode_refusal(refused.offset, refused.here, refused.texts)
    if refused.failure == "bad_event":
        return NotASnapshotError(f"event {refused.event:,}: {refused.key} is missing or not what torch writes")
    return refusal(refused.failure, refused.offset)


def _blocks(rows: list[dict[str, object]], decoder: _decode.Decoder, numbers: _Numbers) -> BlockColumns:
    """The blocks of segments, in their order. Raises NotASnapshotError for what is none."""
    places = [place for place in (row.get("blocks") for row in rows) if isinstance(place, _decode.Rows)]
    if len(places) < len(rows):
        raise NotASnapshotError("blocks of a segment is missing or no list")
    counts = np.array([place.count for place in places], np.int64)
    first = np.array([place.start for place in places], np.int64)
    order = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    memory = decoder.blocks()
    mask = np.frombuffer(memory["mask"], np.uint8)[order]
    address, size, requested = (np.frombuffer(memory[key], np.int64)[order] for key in ("address", "size", "requested"))
    stack = np.frombuffer(memory["stack"], np.int32)[order]

    def has(kind: str) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (mask & _decode.BLOCK_MASK[kind]) != 0
        return found

    state = _states(np.frombuffer(memory["state"], np.int32)[order], has("bad_state"), decoder)
    in_use = state != BlockState.INACTIVE
    with_past = _take_histories(order, in_use, has("says_requested"), requested, stack, decoder, numbers)
    all_say_address = bool(has("says_address").all())
    for what, bad in (
        ("size", has("bad_size")),
        ("history", has("bad_history")),
        ("address", has("bad_address") & all_say_address),
        ("requested_size", has("bad_requested") & in_use),
        ("frames", has("bad_frames") & in_use & ~with_past),
    ):
        if bool(bad.any()):
            raise NotASnapshotError(f"block {int(bad.argmax()):,}: {what} is missing or not what torch writes")
    requested[~in_use] = REQUEST_UNKNOWN
    stack[~in_use] = NOT_RECORDED
    keys = set(decoder.block_keys())
    return BlockColumns(counts, address if all_say_address else None, size, requested, state, stack, keys)


def _states(texts: Ids, bad: NDArray[np.bool_], decoder: _decode.Decoder) -> NDArray[np.uint8]:
    """Codes of the states of blocks."""
    if bool(bad.any()):
        raise NotASnapshotError(f"block {int(bad.argmax()):,}: unknown state")
    distinct, inverse = np.unique(texts, return_inverse=True)
    names = decoder.texts(distinct.tolist())
    return np.array([block_state(name, 0) for name in names], np.uint8)[inverse]


def _take_histories(
    order: NDArray[np.int64],
    in_use: NDArray[np.bool_],
    says_requested: NDArray[np.bool_],
    requested: NDArray[np.int64],
    stack: Ids,
    decoder: _decode.Decoder,
    numbers: _Numbers,
) -> NDArray[np.bool_]:
    """Puts what torch 1.13 and 2.0 say of the life in a block into the columns; which blocks have such a history."""
    with_past = np.zeros(len(order), np.bool_)
    histories = dict(decoder.histories())  # the last one of a block counts
    for index, row in enumerate(order.tolist()) if histories else ():
        history = histories.get(row)
        past = history[0] if isinstance(history, list) and history else None
        if past is None:
            continue
        with_past[index] = True
        if in_use[index]:
            stack[index] = numbers.stacks([past.get("frames")], f"block {index}", [past.get("cpp_frames")])[0]
            if not says_requested[index] and past.get("real_size") is not None:
                requested[index] = check_integer(past["real_size"], "requested_size", f"block {index}")
    return with_past


def _annotations(said: object, decoder: _decode.Decoder, numbers: _Numbers) -> Annotations:
    """`external_annotations` as columns. Raises NotASnapshotError."""
    if not isinstance(said, _decode.Rows):
        return parse_annotations(said, numbers)
    memory = decoder.annotations()
    rows = slice(said.start, said.start + said.count)
    bad = np.frombuffer(memory["bad"], np.uint8)[rows] != 0
    if bool(bad.any()):
        what = "a name, a stage (START or END), a device and a time"
        raise NotASnapshotError(f"annotation {int(bad.argmax()):,} needs {what}")
    name, stage = (np.frombuffer(memory[key], np.int32)[rows] for key in ("name", "stage"))
    device, time_us = (np.frombuffer(memory[key], np.int64)[rows] for key in ("device", "time_us"))
    stages = np.unique(stage).tolist()
    starts = [number for number, text in zip(stages, decoder.texts(stages), strict=True) if text == "START"]
    return Annotations(numbers.strings_of(name), np.isin(stage, starts), device.astype(np.int32), time_us)


class _Events:
    """The columns of all devices' events, numbered as the reference numbers them, until they become traces."""

    def __init__(self, decoder: _decode.Decoder, numbers: _Numbers, words: Vocabulary) -> None:
        extras = decoder.extras()
        memory = decoder.columns()
        self.action = np.frombuffer(memory["action"], np.uint8)
        self.addr = np.frombuffer(memory["addr"], np.uint64)
        self.size = np.frombuffer(memory["size"], np.int64)
        self.stream = np.frombuffer(memory["stream"], np.uint64)
        self.stack = np.frombuffer(memory["stack"], np.int32)
        self.time_us = _optional(memory["time_us"], np.int64)
        self.pool = _optional(memory["pool"], np.int32)
        self.texts = {key: _optional(memory[key], np.int32) for key in ("compile_context", "user_metadata")}
        found = decoder.traces()
        self.ranges = [slice(start, end) for start, end, *_ in found]
        self.timed = [_all_or_none(device, *one) for device, one in enumerate(found)]
        self.pooled = [one[-1] for one in found]
        self.device_free: dict[int, object] = {}
        self.said: list[dict[str, Ids | None]] = []
        words.see(decoder.event_keys())
        self._number_actions(decoder.strange_actions(), words)
        self._take_extras(extras, numbers)
        pairs = np.frombuffer(decoder.pairs() if any(self.pooled) else b"", np.int64).reshape(-1, 2)
        for device, rows in enumerate(self.ranges):
            self.said.append({key: self._number_texts(key, rows, decoder, numbers) for key in self.texts})
            if self.pooled[device]:
                self._number_pools(rows, pairs, words)

    def traces(self) -> list[Trace]:
        """One trace a device; when its columns are final."""
        return [
            Trace(
                device=device,
                action=self.action[rows],
                addr=self.addr[rows],
                size=self.size[rows],
                stream=self.stream[rows],
                stack=self.stack[rows],
                time_us=self.time_us[rows] if self.timed[device] and self.time_us is not None else None,
                pool=self.pool[rows] if self.pooled[device] and self.pool is not None else None,
                compile_context=self.said[device]["compile_context"],
                user_metadata=self.said[device]["user_metadata"],
                device_free=self._free_at_ooms(device, rows),
            )
            for device, rows in enumerate(self.ranges)
        ]

    def _free_at_ooms(self, device: int, rows: slice) -> dict[int, int]:
        where = f"device {device}, event"
        return {
            row: check_integer(self.device_free[rows.start + row], "device_free", f"{where} {row}")
            for row in np.flatnonzero(self.action[rows] == Action.OOM).tolist()
            if rows.start + row in self.device_free
        }

    def _number_actions(self, strange: list[str], words: Vocabulary) -> None:
        """Codes of unknown kinds of events, from the order of the file to the order of their names in each trace."""
        if not strange:
            return
        known = len(Action)
        code = np.arange(known + len(strange), dtype=np.uint8)
        for rows in self.ranges:
            present = np.unique(self.action[rows])
            names = sorted(strange[index - known] for index in present[present >= known].tolist())
            words.actions += [name for name in names if name not in words.actions]
        # a name that a later one of the same event replaced is no event's
        code[known:] = [words.actions.index(name) if name in words.actions else 0 for name in strange]
        self.action[:] = code[self.action]

    def _take_extras(self, extras: list[tuple[int, bool, object]], numbers: _Numbers) -> None:
        cpp_frames: dict[int, object] = {}
        for row, is_cpp, value in extras:
            (cpp_frames if is_cpp else self.device_free)[row] = value
        for row, names in cpp_frames.items():
            self.stack[row] = numbers.joined(int(self.stack[row]), names, f"event {row}")

    def _number_texts(self, key: str, rows: slice, decoder: _decode.Decoder, numbers: _Numbers) -> Ids | None:
        """String ids of what a trace says under a key; None when it says nothing."""
        column = self.texts[key]
        if column is None:
            return None
        distinct = np.unique(column[rows])
        distinct = distinct[distinct >= 0]
        if not len(distinct):
            return None
        place = np.empty(int(distinct[-1]) + 1, np.int32)
        for text, index in sorted(zip(decoder.texts(distinct.tolist()), distinct.tolist(), strict=True)):
            place[index] = numbers.string(text)
        _decode.translate(column[rows], place)
        return column[rows]

    def _number_pools(self, rows: slice, pairs: NDArray[np.int64], words: Vocabulary) -> None:
        assert self.pool is not None, "some event of the trace says a pool"
        place = np.full(len(pairs), -1, np.int32)
        _decode.first_use(self.pool[rows], place, 0)
        for index in sorted(np.flatnonzero(place >= 0).tolist(), key=place.__getitem__):
            place[index] = words.pool(tuple(pairs[index].tolist()), "an event")
        _decode.translate(self.pool[rows], place)


def _optional(memory: object, kind: type[np.generic]) -> NDArray[Any] | None:
    return None if memory is None else np.frombuffer(memory, kind)  # type: ignore[call-overload]


def _all_or_none(device: int, start: int, end: int, timed: int, said: bool, _pooled: bool) -> bool:
    """Whether the events of a trace have a time. Raises NotASnapshotError when only some have."""
    if said and timed != end - start:
        raise NotASnapshotError(f"device {device}: time_us is missing in {end - start - timed:,} events")
    return said


class _Numbers:
    """Numbers texts as `Interner` does; stacks have their numbers already (`_order_of_use` makes them final)."""

    def __init__(self, decoder: _decode.Decoder) -> None:
        self._decoder = decoder
        self._strings: dict[str, int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self._cpp_frames = 0

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def stacks(self, frames: Sequence[object], where: str, cpp_frames: Sequence[object] | None = None) -> Ids:
        ids = np.full(len(frames), NOT_RECORDED, np.int32)
        for index, items in enumerate(frames):
            if isinstance(items, _decode.Stack):
                ids[index] = items.number
            elif items is not None:
                raise NotASnapshotError(f"{where} {index}: frames is not a list of frames")
        if cpp_frames is not None:
            for index, names in enumerate(cpp_frames):
                ids[index] = self.joined(int(ids[index]), names, f"{where} {index}")
        return ids

    def joined(self, stack: int, names: object, where: str) -> int:
        """A stack with the C++ function names of torch 2.0 in front."""
        if names is None or (isinstance(names, _decode.Stack) and names.number == 0):
            return stack
        if not isinstance(names, _decode.Texts):
            raise NotASnapshotError(f"{where}: cpp_frames is not a list of text")
        key = stack, names.number
        if key not in self._joined:
            inner = self._decoder.list_of_texts(names.number)
            self._cpp_frames += len(inner) + (len(self._decoder.stack(stack)) if stack >= 0 else 0)
            if self._cpp_frames > MAX_CPP_FRAMES:
                raise NotASnapshotError(f"{where}: stacks of more C++ frames than any program has")
            self._joined[key] = self._decoder.joined(stack, [self._decoder.cpp_frame(name) for name in inner])
        return self._joined[key]

    def tables(self, order: Ids, count: int) -> StackTable:
        """The frozen tables, stacks as `order` places them, frames and texts in the order of their first use."""
        decoder = self._decoder
        offsets, ids = decoder.stack_table(order, count)
        frame_ids = np.frombuffer(ids, np.int32)
        frames = np.frombuffer(decoder.frames(), np.uint32).reshape(-1, 4)
        places = np.full(len(frames), -1, np.int32)
        used = _decode.first_use(frame_ids, places, 0)
        _decode.translate(frame_ids, places)
        by_place = np.empty(used, np.int64)
        by_place[places[places >= 0]] = np.flatnonzero(places >= 0)
        frames = frames[by_place]
        filename, name = (self.strings_of(frames[:, column]) for column in (0, 1))
        return StackTable(
            strings=StringTable(tuple(self._strings)),
            filename=filename,
            line=frames[:, 2].astype(np.int32),
            name=name,
            offsets=np.frombuffer(offsets, np.int64),
            frame_ids=frame_ids,
        )

    def strings_of(self, texts: NDArray[Any]) -> Ids:
        """String ids of texts by their numbers, new ones in the order of their first use."""
        distinct, first, inverse = np.unique(texts, return_index=True, return_inverse=True)
        ids = np.empty(len(distinct), np.int32)
        for index in np.argsort(first).tolist():
            ids[index] = self.string(self._decoder.texts([int(distinct[index])])[0])
        return ids[inverse].astype(np.int32)
