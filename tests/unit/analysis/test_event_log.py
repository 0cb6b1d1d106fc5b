"""The event log against the trace, a slow search, and small traces in which everything is known."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import recordings
from builders import MiB, SnapshotBuilder
from hypothesis import given
from hypothesis import strategies as st

import memtrace
from memtrace.analysis.event_filter import KEYS, parse
from memtrace.analysis.event_log import EventLog, EventRow, next_match, previous_match
from memtrace.analysis.log_lines import Line, Lines
from memtrace.errors import QuestionError
from memtrace.model import Action, Frame
from memtrace.places import short_path

FILES = (
    "gpt2-zero3-oom",
    "two-streams",
    "llama-fsdp1",
    "mlp-user-metadata",
    "mlp-expandable",
    "public-late-start-training",
    "public-synthetic-not-an-allocator",
    "public-torch-2.0-history",
    "public-private-pools-pending-free",
)

Slow = Callable[[EventLog, EventRow], bool]
QUESTIONS: dict[str, Slow] = {
    "": lambda log, row: True,
    "action:alloc": lambda log, row: row.action == "alloc",
    "action:FREE": lambda log, row: row.action.startswith("free"),
    "-action:segment": lambda log, row: not row.action.startswith("segment"),
    "event:10..200": lambda log, row: 10 <= row.event <= 200,
    "event>500": lambda log, row: row.event > 500,
    "-event<500": lambda log, row: row.event >= 500,
    "size>1MiB": lambda log, row: row.size > MiB,
    "address>0x7f0000000000": lambda log, row: row.address is not None and row.address > 0x7F0000000000,
    "address<0x7f0000000000": lambda log, row: row.address is not None and row.address < 0x7F0000000000,
    "stream=0": lambda log, row: row.stream == 0,
    "block=7": lambda log, row: row.block == 7,
    "block<7": lambda log, row: row.block is not None and row.block < 7,
    "step>=1": lambda log, row: row.step is not None and row.step >= 1,
    "phase:back": lambda log, row: row.phase == "backward",
    "cat:act": lambda log, row: row.block is not None and _in_category(row, "act"),
    "file:lab/": lambda log, row: row.frame is not None and "lab/" in row.frame.filename.lower(),
    "frame:TRAIN": lambda log, row: row.frame is not None and "train" in row.frame.name.lower(),
    "stack:forward": lambda log, row: _in_stack(log, row, "forward", cpp=True),
    "text:optimizer": lambda log, row: "optimizer" in (row.text or "").lower() + (row.compile_context or "").lower(),
    "in:optimizer": lambda log, row: any("optimizer" in name.lower() for name in row.inside),
    "forward": lambda log, row: _has_word(log, row, "forward"),
    "-segment": lambda log, row: not _has_word(log, row, "segment"),
}


def _in_category(row: EventRow, text: str) -> bool:
    assert row.category is not None
    assert row.label is not None
    return row.category.startswith(text) or f".{text}" in row.category or text in row.label.split(" for ")[0].lower()


def _in_stack(log: EventLog, row: EventRow, text: str, *, cpp: bool) -> bool:
    frames = log.frames(row.event, cpp=cpp)
    return any(text in short_path(frame.filename).lower() or text in frame.name.lower() for frame in frames)


def _has_word(log: EventLog, row: EventRow, text: str) -> bool:
    label = (row.label or "").split(" for ")[0].lower()
    words = (row.action, row.category or "", label, (row.text or "").lower(), (row.compile_context or "").lower())
    return any(text in word for word in words) or _in_stack(log, row, text, cpp=False)


@pytest.fixture(scope="module", params=FILES)
def log(request: pytest.FixtureRequest) -> EventLog:
    return memtrace.load(recordings.snapshot_path(request.param)).event_log()


@pytest.fixture(scope="module")
def rows(log: EventLog) -> list[EventRow]:
    return [log.row(event) for event in range(0, len(log), max(len(log) // 2000, 1))]


def test_rows_say_what_the_trace_says(log: EventLog, rows: list[EventRow]) -> None:
    trace = log.trace
    for row in rows:
        assert row.action == log.data.actions[trace.action[row.event]]
        assert (row.size, row.stream, row.address or 0) == tuple(
            int(column[row.event]) for column in (trace.size, trace.stream, trace.addr)
        )
        assert (row.phase, row.step) == log.timeline.at(row.event)
        assert row.frame is None or row.frame in log.frames(row.event)
        assert log.frames(row.event) == log.shown.table.frames(row.stack)
        if trace.time_us is not None:
            assert row.since_us == trace.time_us[row.event] - trace.time_us[0]


def test_allocations_and_frees_have_their_block(log: EventLog) -> None:
    blocks, trace = log.blocks.replay.lifetimes, log.trace
    for event, block in enumerate(log.block.tolist()):
        action = trace.action[event]
        if action == Action.ALLOC:
            assert block == log.blocks.born_at(event)
        elif action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            assert block >= 0 or log.blocks.freed_at(event) == ()
            assert block < 0 or event in (blocks.freed[block], blocks.died[block])
            assert block < 0 or blocks.address[block] == trace.addr[event]
        if block >= 0:
            assert blocks.born[block] <= event <= blocks.died[block]


def test_what_an_event_is_for_is_what_its_block_is_for(log: EventLog, rows: list[EventRow]) -> None:
    for row in rows:
        block = None if row.block is None else log.blocks.row(row.block)
        assert (row.category, row.label) == ((None, None) if block is None else (block.category, block.label))
        assert row.block == (None if log.block[row.event] < 0 else log.block[row.event])


@pytest.mark.parametrize("text", QUESTIONS)
def test_a_filter_chooses_what_the_rows_say(log: EventLog, rows: list[EventRow], text: str) -> None:
    chosen = log.matching(text)
    assert len(chosen) == len(log)
    assert [row.event for row in rows if chosen[row.event] != QUESTIONS[text](log, row)] == []


def test_the_questions_tell_rows_apart() -> None:
    logs = [memtrace.load(recordings.snapshot_path(name)).event_log() for name in FILES]
    for text in QUESTIONS:
        masks = np.concatenate([log.matching(text) for log in logs])
        assert masks.any(), text
        assert text == "" or not masks.all(), text


def test_kinds_are_the_actions_of_the_file(log: EventLog) -> None:
    chosen = log.only(("alloc", "oom"))
    assert np.flatnonzero(chosen).tolist() == [
        event for event in range(len(log)) if log.actions[log.trace.action[event]] in ("alloc", "oom")
    ]
    with pytest.raises(QuestionError, match="segment_alloc"):
        log.only(("alocate",))


def test_annotations_lie_before_the_first_event_that_is_not_earlier(log: EventLog) -> None:
    times = log.blocks.time_us
    for row in log.annotations():
        assert times is not None
        assert row.event == len(log) or times[row.event] >= row.time_us
        assert row.event == 0 or times[row.event - 1] < row.time_us
        assert row.time_us == times[0] + row.since_us
        assert row.name == log.data.strings[log.annotated.name[row.annotation]]


@pytest.mark.parametrize("text", ["phase:back", "step:1", "-phase:o"])
def test_an_annotation_is_in_the_phase_of_the_event_after_it(log: EventLog, text: str) -> None:
    events, last = log.matching(text), len(log) - 1
    expected = [bool(events[min(row.event, last)]) for row in log.annotations()]
    assert log.annotations_matching(text).tolist() == expected


def test_lines_are_all_events_and_annotations_in_order(log: EventLog) -> None:
    lines = log.lines()
    shown = [lines.at(line) for line in range(len(lines))]
    expected: list[Line] = []
    positions = log.annotated.event.tolist()
    note = 0
    for event in range(len(log) + 1):
        while note < len(positions) and positions[note] == event:
            expected.append(Line("annotation", note))
            note += 1
        if event < len(log):
            expected.append(Line("event", event))
    assert shown == expected
    for line, (what, row) in enumerate(shown):
        assert line == (lines.of_event(row) if what == "event" else lines.of_annotation(row))


def everything(tmp_path: Path) -> EventLog:
    """One of each kind of event, two annotated ranges, one of them open."""
    builder = (
        SnapshotBuilder(torch="2.15")
        .time(1_000_000)
        .segment(0x1000000, 20 * MiB, stack="a.py:1 f")  # 0
        .annotation("epoch", "START")  # time 1
        .annotation("ProfilerStep#3", "START")  # time 2
        .alloc(0x1000000, 3 * MiB, stack="b.py:2 g;c.py:3 h", user_metadata="module=net.fc", compile_context="1/0")  # 1
        .annotate(0x1000000, "the weights")  # 2
        .annotation("ProfilerStep#3", "END")  # time 5
        .free(0x1000000)  # 3, 4
        .alloc(0x1000000, 2 * MiB, stack=None)  # 5
        .annotate(0x1000000, "again")  # 6
        .oom(99 * MiB, device_free=5 * MiB)  # 7
        .snapshot_event()  # 8
    )
    builder.event("telepathy", addr=0, size=3, stream=0, frames=[])  # 9
    return memtrace.load(builder.pickle(tmp_path / "all.pickle")).event_log()


def test_every_kind_of_event_is_told(tmp_path: Path) -> None:
    log = everything(tmp_path)
    rows = [log.row(event) for event in range(len(log))]
    names = ["segment_alloc", "alloc", "annotate", "free_requested", "free_completed", "alloc", "annotate", "oom"]
    assert [row.action for row in rows] == [*names, "snapshot", "telepathy"]
    assert [row.block for row in rows] == [None, 0, 0, 0, 0, 1, 1, None, None, None]
    assert [row.text for row in rows[1:3]] == ["module=net.fc", "the weights"]
    assert (rows[1].compile_context, rows[2].compile_context) == ("1/0", None)
    assert (rows[1].frame, rows[5].frame) == (Frame("b.py", 2, "g"), None)
    assert (rows[7].device_free, rows[7].size, rows[7].address) == (5 * MiB, 99 * MiB, None)
    assert rows[1].pool == (0, 0)
    assert [row.since_us for row in rows] == [0, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert [row.inside for row in rows[:4]] == [
        (),
        ("epoch", "ProfilerStep#3"),
        ("epoch", "ProfilerStep#3"),
        ("epoch",),
    ]


def test_annotations_are_rows_between_events(tmp_path: Path) -> None:
    rows = everything(tmp_path).annotations()
    assert [(row.name, row.is_start, row.event, row.depth, row.duration_us, row.since_us) for row in rows] == [
        ("epoch", True, 1, 0, None, 1),
        ("ProfilerStep#3", True, 1, 1, 3, 2),
        ("ProfilerStep#3", False, 3, 1, 3, 5),
    ]


@pytest.mark.parametrize(
    ("text", "events", "notes"),
    [
        ("module:fc", [1, 2, 3, 4], []),
        ("text:weights", [2], []),
        ("1/0", [1], []),
        ("profiler", [], [1, 2]),
        ("in:profiler", [1, 2], [1, 2]),
        ("in:epoch", list(range(1, 10)), [0]),
        ("action:annot", [2, 6], [0, 1, 2]),
        ('action:"annotation e"', [], [2]),
        ("action:tele", [9], []),
        ("time:2us..5us", [1, 2], [1, 2]),
        ("time>1s", [], []),
        ("event:3..4", [3, 4], [2]),
        ("size>=99MiB", [7], []),
        ("-size<99MiB", [7], [0, 1, 2]),
        ("-event:..8", [9], []),
    ],
)
def test_events_and_annotations_are_filtered_alike(
    tmp_path: Path, text: str, events: list[int], notes: list[int]
) -> None:
    log = everything(tmp_path)
    assert np.flatnonzero(log.matching(text)).tolist() == events
    assert np.flatnonzero(log.annotations_matching(text)).tolist() == notes
    lines = log.lines(log.matching(text), log.annotations_matching(text))
    shown = [lines.at(line) for line in range(len(lines))]
    assert sorted(shown) == sorted(
        [*(Line("event", row) for row in events), *(Line("annotation", row) for row in notes)]
    )
    positions = [(row, 1) if what == "event" else (log.annotation(row).event, 0) for what, row in shown]
    assert positions == sorted(positions)


def test_the_nearest_line_of_an_event_that_is_left_out(tmp_path: Path) -> None:
    log = everything(tmp_path)
    lines = log.lines(log.only(("alloc",)), np.zeros(3, np.bool_))  # events 1 and 5
    assert [lines.of_event(event) for event in (-1, 0, 1, 2, 5, 6, 99)] == [0, 0, 0, 1, 1, 1, 1]
    assert lines.of_annotation(1) is None
    nothing = log.lines(np.zeros(10, np.bool_), np.zeros(3, np.bool_))
    assert len(nothing) == 0
    assert nothing.of_event(3) is None
    with pytest.raises(IndexError):
        nothing.at(0)


def test_matches_before_and_after_an_event() -> None:
    rows = np.array([3, 5, 9])
    assert [next_match(rows, event) for event in (-1, 3, 4, 9)] == [3, 5, 5, None]
    assert [previous_match(rows, event) for event in (3, 4, 9, 99)] == [None, 3, 5, 9]
    assert next_match(rows[:0], 1) is previous_match(rows[:0], 1) is None


def test_rows_that_are_not_there_are_errors(tmp_path: Path) -> None:
    log = everything(tmp_path)
    for event in (-1, 10):
        with pytest.raises(IndexError):
            log.row(event)
    with pytest.raises(IndexError):
        log.annotation(3)


def test_a_trace_without_times_has_no_annotations_and_no_time(tmp_path: Path) -> None:
    path = SnapshotBuilder(torch="2.1").alloc(0x1000000, 600).pickle(tmp_path / "old.pickle")
    log = memtrace.load(path).event_log()
    assert (log.row(0).time_us, log.annotations()) == (None, ())
    with pytest.raises(QuestionError, match="no times"):
        log.matching("time>1s")
    assert log.matching("in:x").tolist() == [False, False]


def test_a_recording_without_events_has_an_empty_log() -> None:
    log = memtrace.load(recordings.snapshot_path("public-state-only-259-segments")).event_log()
    assert len(log) == len(log.lines()) == 0
    for text in QUESTIONS:
        with contextlib.suppress(QuestionError):
            assert len(log.matching(text)) == 0


def test_a_clock_that_was_set_back_disorders_nothing(tmp_path: Path) -> None:
    builder = SnapshotBuilder().time(500).segment(0x1000000, 20 * MiB)
    times = random.Random(3).sample(range(1, 1000), 40)
    for number, time in enumerate(times):
        builder.time(time).annotation("a", "START" if number % 3 else "END")
        builder.time(times[-number]).alloc(0x1000000 + number * 2048, 2048)
    log = memtrace.load(builder.pickle(tmp_path / "clock.pickle")).event_log()
    lines = log.lines()
    assert sorted(lines.at(line) for line in range(len(lines))) == sorted(
        [*(Line("event", row) for row in range(len(log))), *(Line("annotation", row) for row in range(40))]
    )
    assert log.matching("in:a").any()


def test_an_unknown_key_lists_those_of_events() -> None:
    with pytest.raises(QuestionError, match="no key 'acton'") as error:
        parse("acton:alloc")
    listed = str(error.value.hint).removeprefix("Keys: ").split(". ")[0].split(", ")
    assert listed[0] == "action"
    assert set(listed) == set(KEYS)


@given(
    st.integers(0, 30).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.none() | st.sets(st.integers(0, max(count - 1, 0)), max_size=count),
            st.lists(st.integers(0, count), max_size=8),
        )
    )
)
def test_lines_keep_every_row_once_and_in_order(case: tuple[int, set[int] | None, list[int]]) -> None:
    count, chosen, positions = case
    events = None if chosen is None else np.array(sorted(chosen), np.int64)
    position = np.array(sorted(positions), np.int64)
    lines = Lines.of(count, events, np.arange(len(position)), position)
    shown = [lines.at(line) for line in range(len(lines))]
    keys = [(row, 1) if what == "event" else (int(position[row]), 0) for what, row in shown]
    assert keys == sorted(keys)
    assert [row for what, row in shown if what == "event"] == (list(range(count)) if chosen is None else sorted(chosen))
    assert [row for what, row in shown if what == "annotation"] == list(range(len(position)))
    for line, (what, row) in enumerate(shown):
        assert line == (lines.of_event(row) if what == "event" else lines.of_annotation(row))
