"""What a filter chooses against one that looks at one row at a time, and what it says of text that is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recordings
from builders import MiB, SnapshotBuilder
from hypothesis import given
from hypothesis import strategies as st

import memtrace
from memtrace.analysis.block_filter import KEYS, between, parse
from memtrace.analysis.block_table import BlockRow, BlockTable
from memtrace.analysis.conditions import Condition
from memtrace.errors import QuestionError
from memtrace.places import short_path

FILES = (
    "gpt2-zero3-oom",
    "two-streams",
    "llama-lora",
    "mlp-user-metadata",
    "gpt2-zero3-ring-20000",
    "public-late-start-training",
    "public-synthetic-not-an-allocator",
    "public-state-only-259-segments",
)
MB = 1 << 20

Slow = Callable[[BlockTable, BlockRow], bool]
QUESTIONS: dict[str, Slow] = {
    "": lambda table, row: True,
    "size>1MiB": lambda table, row: row.size > MB,
    "size>=1MiB": lambda table, row: row.size >= MB,
    "size < 1MiB": lambda table, row: row.size < MB,
    "SIZE<=1MiB": lambda table, row: row.size <= MB,
    "size=512": lambda table, row: row.size == 512,
    "size:512..1KiB": lambda table, row: 512 <= row.size <= 1024,
    "requested:..512": lambda table, row: row.requested <= 512,
    "!requested:512..": lambda table, row: row.requested < 512,
    "born:10..200": lambda table, row: 10 <= row.born <= 200,
    "born<0": lambda table, row: row.before_recording,
    "freed>=100": lambda table, row: 100 <= row.freed < table.replay.events,
    "life<3": lambda table, row: row.died - row.born < 3,
    "address>0x7f0000000000": lambda table, row: row.address > 0x7F0000000000,
    "stream=0": lambda table, row: row.stream == 0,
    "step=1": lambda table, row: row.step == 1,
    "step<1": lambda table, row: row.step == 0,
    "cat:act": lambda table, row: _in_category(row, "act"),
    "cat:TEMP": lambda table, row: _in_category(row, "temp"),
    "cat:state": lambda table, row: _in_category(row, "state"),
    "cat:no": lambda table, row: _in_category(row, "no"),
    "file:torch": lambda table, row: row.frame is not None and "torch" in short_path(row.frame.filename).lower(),
    "file:user/LAB/": lambda table, row: row.frame is not None and "user/lab/" in row.frame.filename,
    "frame:Forward": lambda table, row: row.frame is not None and "forward" in row.frame.name.lower(),
    "stack:optim": lambda table, row: _in_stack(table, row, "optim", cpp=True),
    "phase:back": lambda table, row: row.phase == "backward",
    "phase:s": lambda table, row: row.phase == "step",
    "pool:small": lambda table, row: row.pool == "small",
    "conf:cert": lambda table, row: row.confidence == "certain",
    "is:alive": lambda table, row: row.born <= table.replay.events - 1 < row.freed,
    "is:freed": lambda table, row: row.died < table.replay.events,
    "is:pending": lambda table, row: row.freed < table.replay.events <= row.died,
    "is:before": lambda table, row: row.before_recording,
    "optim": lambda table, row: _has_word(table, row, "optim"),
    "-forward": lambda table, row: not _has_word(table, row, "forward"),
    '"train"': lambda table, row: _has_word(table, row, "train"),
    "size>1KiB -cat:act phase:forward": lambda table, row: (
        row.size > 1024 and not _in_category(row, "act") and row.phase == "forward"
    ),
}


def _in_category(row: BlockRow, text: str) -> bool:
    return row.category.startswith(text) or f".{text}" in row.category or text in row.label.split(" for ")[0].lower()


def _in_stack(table: BlockTable, row: BlockRow, text: str, *, cpp: bool) -> bool:
    frames = table.frames(row.block, cpp=cpp)
    return any(text in short_path(frame.filename).lower() or text in frame.name.lower() for frame in frames)


def _has_word(table: BlockTable, row: BlockRow, text: str) -> bool:
    label = row.label if row.category != "unknown" else row.label.split(" for ")[0]
    words = (row.category, label.lower(), (row.module or "").lower())
    return any(text in word for word in words) or _in_stack(table, row, text, cpp=False)


@pytest.fixture(scope="module", params=FILES)
def table(request: pytest.FixtureRequest) -> BlockTable:
    return memtrace.load(recordings.snapshot_path(request.param)).block_table()


@pytest.fixture(scope="module")
def rows(table: BlockTable) -> list[BlockRow]:
    return [table.row(block) for block in range(0, len(table), max(len(table) // 3000, 1))]


@pytest.mark.parametrize("text", QUESTIONS)
def test_a_filter_chooses_what_the_rows_say(table: BlockTable, rows: list[BlockRow], text: str) -> None:
    chosen = table.matching(text)
    assert len(chosen) == len(table)
    wrong = [row for row in rows if chosen[row.block] != QUESTIONS[text](table, row)]
    assert wrong == []


def test_the_questions_tell_rows_apart() -> None:
    tables = [memtrace.load(recordings.snapshot_path(name)).block_table() for name in FILES]
    for text in QUESTIONS:
        masks = np.concatenate([table.matching(text) for table in tables])
        assert masks.any(), text
        assert text == "" or not masks.all(), text


@pytest.mark.parametrize("event", [0, 700])
def test_states_are_those_of_a_moment(table: BlockTable, event: int) -> None:
    for of, states in (("allocated", ("alive",)), ("active", ("alive", "pending"))):
        found = np.any([table.matching(f"is:{state}", event) for state in states], axis=0)
        assert set(np.flatnonzero(found).tolist()) == set(table.alive(event, of).tolist())


def test_modules_are_found_by_part_of_their_path(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x1000000, 600, user_metadata="phase=forward;module=net.0.Attn", stack="f")
    builder.alloc(0x1000400, 600, user_metadata="module=net.1.mlp", stack="f").alloc(0x1000800, 600, stack="f")
    table = memtrace.load(builder.pickle(tmp_path / "a.pickle")).block_table()
    for text, expected in (("module:net.0", [0]), ("module:attn", [0]), ("mlp", [1]), ("net", [0, 1]), ("-net", [2])):
        assert np.flatnonzero(table.matching(text)).tolist() == expected, text


def test_a_life_can_be_a_time(tmp_path: Path) -> None:
    builder = SnapshotBuilder().time(1_000_000).segment(0x1000000, 20 * MiB).alloc(0x1000000, 2 * MiB)
    builder.time(1_500_001).free(0x1000000).alloc(0x1000000, 2 * MiB)
    table = memtrace.load(builder.pickle(tmp_path / "a.pickle")).block_table()
    for text, expected in (("life>=0.5s", [0]), ("life<500.1ms", [0, 1]), ("life:1us..1ms", []), ("-life>1ms", [1])):
        assert np.flatnonzero(table.matching(text)).tolist() == expected, text


def test_a_time_without_times_is_an_error(tmp_path: Path) -> None:
    path = SnapshotBuilder(torch="2.1").alloc(0x1000000, 600).pickle(tmp_path / "old.pickle")
    table = memtrace.load(path).block_table()
    with pytest.raises(QuestionError, match=r"life>5ms.*no times"):
        table.matching("life>5ms")
    assert table.matching("life>0").tolist() == [True]


def test_file_and_line_are_found_as_they_are_shown(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x1000000, 600, stack="/home/me/my proj/attn.py:41 sdpa;/home/me/x/t.py:7 main")
    table = memtrace.load(builder.alloc(0x1000400, 600, stack=None).pickle(tmp_path / "a.pickle")).block_table()
    for text in ("attn.py:41", "file:attn.py:41", '"41 sdpa"', 'file:"my proj"', "file:/home/me", "t.py", "stack:t.py"):
        expected = text != '"41 sdpa"'  # path and function are looked at apart
        assert table.matching(text).tolist() == [expected, False], text
    assert not table.matching("file:home").any()  # is not shown
    assert not table.matching("file:t.py:7").any()  # not the frame one would look at


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cat:act sise>3", r"'sise>3': no key 'sise'. Keys: size, "),
        ("size>", "'size>': no value. After size comes a size"),
        ("size>abc", "'size>abc': not a value for size"),
        ("size:1..2..3", "not a value"),
        ("size:..", "not a value"),
        ("born>1e9", "'born>1e9': not a value for born"),
        ("cat>3", "'cat>3': cat is no number"),
        ("phase:zz", "'phase:zz': not one of phase's words. There is: other, init, forward"),
        ("is:", "After is comes alive, freed, pending, before"),
        ("life:5ms..3", "not a value for life"),
        ('a "b', "'\"b': a quote that does not end"),
        ('a"b c"', "a quote within a word"),
        ("-", "nothing to look for"),
        ('""', "nothing to look for"),
        ("C:model", "no key 'C'.*Quote it"),
        ("x" * 100_000, "a filter of 100,000 characters"),
        ("x " * 400, "more than 50 terms"),
        ("size>" + "9" * 500, "not a value for size"),
        ("born>" + "9" * 500, "not a value for born"),
        ("k" * 900 + ">3", "no key 'kkkk"),
    ],
)
def test_a_filter_that_is_none_says_which_term_and_why(text: str, said: str) -> None:
    with pytest.raises(QuestionError, match=said) as error:
        parse(text)
    assert len(str(error.value)) < 500


def test_all_keys_are_listed_nearest_first() -> None:
    with pytest.raises(QuestionError) as error:
        parse("modul:x")
    listed = str(error.value.hint).removeprefix("Keys: ").split(". ")[0].split(", ")
    assert listed[0] == "module"
    assert set(listed) == set(KEYS)


def test_what_looks_like_a_term_can_be_quoted() -> None:
    (term,) = parse('"size>3"').terms
    assert (term.key, term.text) == ("", "size>3")
    assert [term.key for term in parse("std::vector <module> a.py:3").terms] == ["", "", ""]


def test_numbers_are_read_exactly() -> None:
    terms = parse("size>1.5KiB size:80GB address=0x7F00 born:1,000..2_000 freed>-1").terms
    bounds = [(term.low, term.high) for term in terms]
    assert bounds == [(1537, None), (80 * 10**9, 80 * 10**9), (0x7F00, 0x7F00), (1000, 2000), (0, None)]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_ends_of_a_range_can_be_any_number(dtype: type[np.integer[Any]]) -> None:
    column = np.array([0, 5, np.iinfo(dtype).max], dtype)
    assert between(column, 1 << 70, None).tolist() == [False] * 3
    assert between(column, None, -(1 << 70)).tolist() == [False] * 3
    assert between(column, -(1 << 70), 1 << 70).tolist() == [True] * 3
    assert between(column, 5, None).tolist() == [False, True, True]
    assert between(column, 6, 5).tolist() == [False] * 3


@given(st.text(max_size=60) | st.text('"-!:><=. sizecatlf09..MiB', max_size=60))
def test_any_text_is_a_condition_or_a_question_error(text: str) -> None:
    try:
        found = parse(text)
    except QuestionError:
        return
    assert isinstance(found, Condition)


@pytest.mark.parametrize(
    "text", ["size" + " " * 990, '"' * 999, "-" * 1000, "a:" * 500, "." * 999, " =" * 500, "9," * 500]
)
def test_no_text_takes_forever(text: str) -> None:
    with contextlib.suppress(QuestionError):
        parse(text)
