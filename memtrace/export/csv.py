"""CSV for spreadsheets: RFC 4180 (but lines end in "\\n"), numbers whole and unrounded, text made harmless."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, TextIO

from memtrace.text import printable

Cell = str | bool | SupportsIndex | float | None
_FORMULA = ("=", "+", "-", "@")


def write_csv(stream: TextIO, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> int:
    """Writes a row of names and then the rows; how many those were. Open a file with `newline=""` and UTF-8.

    An integer (numpy's too) is written in digits, None as nothing, True and False as `true` and `false`; any text as
    `cell_text`. Raises ValueError for a row that has more cells than columns, or fewer.
    """
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([cell_text(name) for name in columns])
    count = 0
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells under {len(columns)} columns")
        writer.writerow([_cell(value) for value in row])
        count += 1
    return count


def cell_text(text: str) -> str:
    """Text that no spreadsheet takes for a formula, and that moves no terminal's cursor.

    >>> cell_text("=HYPERLINK(1)"), cell_text("a\\x1b[2J")
    ("'=HYPERLINK(1)", 'a\ufffd[2J')
    """
    text = printable(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _cell(value: Cell) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, str):
        return cell_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return value
    # A negative number is none of the cells that are quoted for their sign: digits alone are no formula, and quoted
    # the spreadsheet could not add them up.
    return value.__index__()
