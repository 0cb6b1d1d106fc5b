"""The only writer to stdout: one JSON document, or text and tables. Piped tables are never cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memtrace._version import __version__
from memtrace.text import printable

_PIPE_WIDTH = 100_000


class Nested:
    """JSON too deep for a recursive encoder: text fragments that make one value."""

    def __init__(self, fragments: Iterable[str]) -> None:
        self.fragments = fragments


def write_document(
    command: str, snapshot: Mapping[str, Any] | None, data: Mapping[str, Any], warnings: Iterable[Any]
) -> None:
    """The one JSON document of a command (contract.md, Every JSON document)."""
    document: dict[str, Any] = {
        "schema": f"memtrace.{command}/1",
        "memtrace": __version__,
        "snapshot": snapshot,
        "data": data,
        "warnings": [{"code": notice.code, "message": notice.message} for notice in warnings],
    }
    for fragment in _encode(document):
        sys.stdout.write(fragment)
    sys.stdout.write("\n")


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
    style: str = ""


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

    def line(self, text: str = "", style: str = "") -> None:
        """One paragraph, wrapped on a terminal only."""
        from rich.text import Text

        self._console.print(Text(_clean(text), style=style), overflow="fold")

    def table(
        self, columns: Sequence[Column], rows: Iterable[Sequence[str]], *, dim_rows: frozenset[int] = frozenset()
    ) -> None:
        """A table without lines; a cell may hold several lines, those after the first are dimmed."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis" if column.grow else "fold",
                style=column.style,
                min_width=8 if column.grow else None,
                ratio=None,
            )
        for index, row in enumerate(rows):
            cells = []
            for cell in row:
                first, *rest = [_clean(part) for part in cell.split("\n")]
                text = Text(first, style="dim" if index in dim_rows else "")
                for part in rest:
                    text.append("\n" + part, style="dim")
                cells.append(text)
            table.add_row(*cells)
        with self._console.capture() as capture:
            self._console.print(table)
        for line in capture.get().splitlines():
            sys.stdout.write(_without_trailing_space(line) + "\n")


def _clean(text: str) -> str:
    return printable(text)


def _without_trailing_space(line: str) -> str:
    return line.rstrip()
