"""CSV as spreadsheets read it."""

from __future__ import annotations

import csv
import io
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.export.csv import write_csv
from memtrace.text import printable


def written(*rows: tuple[object, ...]) -> str:
    stream = io.StringIO(newline="")
    assert write_csv(stream, [f"c{number}" for number in range(len(rows[0]))], rows) == len(rows)  # type: ignore[arg-type]
    return stream.getvalue().split("\n", 1)[1]


def test_names_come_first_and_lines_end_in_one_character() -> None:
    stream = io.StringIO(newline="")
    write_csv(stream, ("size", "frame"), [(1, "a"), (2, "b")])
    assert stream.getvalue() == "size,frame\n1,a\n2,b\n"


def test_a_table_without_rows_has_its_names() -> None:
    stream = io.StringIO(newline="")
    assert write_csv(stream, ("size",), []) == 0
    assert stream.getvalue() == "size\n"


def test_numbers_are_whole_and_stay_numbers() -> None:
    assert (
        written((59282837504, -1, np.int64(-7), np.uint64(1 << 63), 0)) == "59282837504,-1,-7,9223372036854775808,0\n"
    )


def test_other_values_have_one_form() -> None:
    assert written((None, True, False, 1.5, "")) == ",true,false,1.5,\n"


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_a_formula_becomes_text(sign: str) -> None:
    assert written((f"{sign}1+cmd", f"a{sign}")) == f"'{sign}1+cmd,a{sign}\n"


def test_a_name_of_a_column_is_text_too() -> None:
    stream = io.StringIO(newline="")
    write_csv(stream, ("=a",), [])
    assert stream.getvalue() == "'=a\n"


def test_control_characters_are_replaced() -> None:
    assert (
        written(("a\x1b]52;c;AA\x07", "b\r\nc", "\t=1", "\u202ex"))
        == "a\ufffd]52;c;AA\ufffd,b\ufffd\ufffdc,\ufffd=1,\ufffdx\n"
    )


def test_commas_and_quotes_are_quoted() -> None:
    assert written(('a,"b"', "c")) == '"a,""b""",c\n'


@pytest.mark.parametrize("row", [(1,), (1, 2, 3)])
def test_a_row_of_another_width_is_an_error(row: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 columns"):
        write_csv(io.StringIO(), ("a", "b"), [row])


def test_a_value_without_a_form_is_an_error() -> None:
    with pytest.raises((AttributeError, TypeError)):
        written((Fraction(1, 2),))


@given(st.lists(st.tuples(st.text(), st.integers(), st.text()), min_size=1))
def test_a_reader_gets_back_what_was_written(rows: list[tuple[str, int, str]]) -> None:
    stream = io.StringIO(newline="")
    write_csv(stream, ("a", "b", "c"), rows)
    read = list(csv.reader(io.StringIO(stream.getvalue(), newline="")))[1:]
    assert [int(row[1]) for row in read] == [row[1] for row in rows]
    for ours, theirs in zip(rows, read, strict=True):
        for text, cell in ((ours[0], theirs[0]), (ours[2], theirs[2])):
            assert cell.removeprefix("'") == printable(text).removeprefix("'")
            assert not cell.startswith(("=", "+", "-", "@"))
