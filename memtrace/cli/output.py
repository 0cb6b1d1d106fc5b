"""The only writer to stdout: one JSON document, or text and tables. Piped tables are never cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace._version import __version__
from memtrace.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_PIPE_WIDTH = 100_000
_GAP = 2
_LEAST_WIDTH = 16


class Nested:
    """JSON too deep for a recursive encoder: text fragments that make one value."""

    def __init__(self, fragments: Iterable[str]) -> None:
        self.fragments = fragments


def write_document(
    command: str, snapshot: Mapping[str, Any] | None, data: Mapping[str, Any], warnings: Iterable[Any]
) -> None:
    """The one JSON document of a command (contract.md, Every JSON document), on stdout."""
    for fragment in _encode(_document(command, snapshot, data, warnings)):
        sys.stdout.write(fragment)
    sys.stdout.write("\n")


def write_report(path: Path, command: str, data: Mapping[str, Any]) -> None:
    """The same as a file, for a command whose stdout is somebody else's. Raises OSError."""
    path.write_text(json.dumps(_document(command, None, data, ()), indent=1) + "\n", "utf-8")


def _document(
    command: str, snapshot: Mapping[str, Any] | None, data: Mapping[str, Any], warnings: Iterable[Any]
) -> dict[str, Any]:
    return {
        "schema": f"memtrace.{command}/1",
        "memtrace": __version__,
        "snapshot": snapshot,
        "data": data,
        "warnings": [{"code": notice.code, "message": notice.message} for notice in warnings],
    }


def _encode(value: Any) -> Iterator[str]:
    if isinstance(value, Nested):
        yield from value.fragments
    elif isinstance(value, Iterator):
        yield "["
        for index, item in enumerate(value):
            yield f"{', ' if index else ''}{json.dumps(item)}"
        yield "]"
    elif isinstance(value, dict) and any(isinstance(item, (Nested, dict, Iterator)) for item in value.values()):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield f"{', ' if index else ''}{json.dumps(key)}: "
            yield from _encode(item)
        yield "}"
    else:
        yield json.dumps(value)


def snapshot_facts(snapshot: Any, device: int | None) -> dict[str, Any]:
    """The `snapshot` object of a document."""
    data, source = snapshot.data, snapshot.recording
    return {
        "path": data.path,
        "bytes": data.file_bytes,
        "torch": {"at_least": data.torch.at_least, "at_most": data.torch.at_most},
        "device": device,
        "events": len(data.trace(device)) if device is not None else 0,
        "complete": snapshot.replay(device).complete if device is not None else False,
        "recording": None
        if source is None
        else {"directory": str(source.directory), "rank": source.rank, "world": source.world},
    }


@dataclass(frozen=True, slots=True)
class Column:
    """A table column; `grow` ones are cut with an ellipsis on a narrow terminal."""

    title: str
    right: bool = False
    grow: bool = False


class Page:
    """Text for people. Every string is made harmless here; styles are ours, never the file's."""

    def __init__(self, color: str) -> None:
        from rich.console import Console

        terminal = sys.stdout.isatty()
        self._console = Console(
            file=sys.stdout,
            width=None if terminal else _PIPE_WIDTH,
            force_terminal={"always": True, "never": False}.get(color),
            no_color=True if color == "never" else None,
            highlight=False,
            soft_wrap=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        self.width = self._console.width

    def line(self, text: str = "", style: str = "", *, wrap: bool = True) -> None:
        """One paragraph, wrapped on a terminal only; a command to be pasted is not."""
        from rich.text import Text

        if wrap:
            self._write(Text(printable(text), style=style))
        else:
            sys.stdout.write(printable(text) + "\n")

    def table(
        self, columns: Sequence[Column], rows: Iterable[Sequence[str]], *, dim_rows: frozenset[int] = frozenset()
    ) -> None:
        """A table without lines; a cell may hold several lines, those after the first are dimmed."""
        from rich.table import Table
        from rich.text import Text

        texts = [[self._cell(cell, dim=index in dim_rows) for cell in row] for index, row in enumerate(rows)]
        least = self._fit(columns, texts)
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        for column in columns:
            table.add_column(Text(column.title), justify="right" if column.right else "left", no_wrap=True)
        for row in texts:
            table.add_row(*row)
        self._console.width = max(self.width, least)
        self._write(table)
        self._console.width = self.width

    def _write(self, what: RenderableType) -> None:
        """Writes to stdout by ourselves: rich would end the process on a broken pipe."""
        with self._console.capture() as capture:
            self._console.print(what, overflow="fold")
        for line in capture.get().splitlines():
            sys.stdout.write(line.rstrip() + "\n")

    def _cell(self, cell: str, *, dim: bool) -> Text:
        """A cell of one or more lines; those after the first are dimmed."""
        from rich.text import Text

        first, *rest = [printable(part) for part in cell.split("\n")]
        text = Text(first, style="dim" if dim else "")
        for part in rest:
            text.append("\n" + part, style="dim")
        return text

    def _fit(self, columns: Sequence[Column], texts: list[list[Text]]) -> int:
        """Cuts the lines of the column that may grow to what the others leave of the terminal's width.

        Returns the width below which figures would be cut: a narrower terminal wraps the lines instead.
        """
        from rich.text import Text

        def width(index: int) -> int:
            cells = [Text(columns[index].title), *(row[index] for row in texts)]
            return max(line.cell_len for cell in cells for line in cell.split())

        growing = [index for index, column in enumerate(columns) if column.grow]
        others = sum(width(index) + _GAP for index in range(len(columns)) if index not in growing)
        room = max(self.width - others, _LEAST_WIDTH)
        for row in texts:
            for index in growing:
                lines = row[index].split(allow_blank=True)
                for line in lines:
                    line.truncate(room, overflow="ellipsis")
                row[index] = Text("\n").join(lines)
        return others + (_LEAST_WIDTH if growing else 0)
