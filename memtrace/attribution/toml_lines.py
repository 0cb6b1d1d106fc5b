"""Where the keys of a TOML document stand. tomllib gives values without places; this gives places without values."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

Place = tuple[str | int, ...]
"""Keys and, in an array of tables, numbers from 0: `("rule", 2, "category")`."""

_TOKEN = re.compile(
    r"""
    "{3} (?: [^\\] | \\. )*? "{3,5}   # text over several lines; it may end in two quotes of its own
    | '{3} .*? '{3,5}
    | " (?: [^"\\\n] | \\. )* "
    | ' [^'\n]* '
    | \# [^\n]*
    | [\[\]{}\n]
    """,
    re.DOTALL | re.VERBOSE,
)
_KEY = re.compile(r"""\s*(?:([A-Za-z0-9_-]+)|("(?:[^"\\\n]|\\.)*"|'[^'\n]*'))\s*""")


def loads(text: str) -> dict[str, Any]:
    """The document. Raises ValueError, or RecursionError. Imports the parser now: most calls of memtrace need none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def key_lines(text: str) -> dict[Place, int]:
    r"""The line, from 1, of every header and of every key that begins a line. `text` is valid TOML.

    What stands inside an inline table or an array has no line of its own: `line_of` gives that of its key.

    >>> key_lines("[[rule]]\nid = 'a'\n\n[[rule]]\nid = 'b'")
    {('rule',): 1, ('rule', 0): 1, ('rule', 0, 'id'): 2, ('rule', 1): 4, ('rule', 1, 'id'): 5}
    """
    found: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()
    for line, statement in _statements(text.replace("\r\n", "\n")):
        if statement.startswith("[["):
            keys = _keys(statement[2:])
            array = (*_resolved(keys[:-1], counts), keys[-1])
            number = counts.get(array, 0)
            counts[array] = number + 1
            found.setdefault(array, line)
            table = (*array, number)
        elif statement.startswith("["):
            table = _resolved(_keys(statement[1:]), counts)
        else:
            keys = _keys(statement)
            for length in range(1, len(keys) + 1):
                found.setdefault((*table, *keys[:length]), line)
            continue
        found.setdefault(table, line)
    return found


def line_of(lines: Mapping[Place, int], place: Place) -> int:
    """The line of a key, or of the nearest table around it that has one."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each header and of each key with its value; a value may go over several lines."""
    start = depth = 0
    line = 1
    for token in _TOKEN.finditer(text + "\n"):
        kind = token[0]
        if kind in ("[", "{"):
            depth += 1
        elif kind in ("]", "}"):
            depth -= 1
        elif kind == "\n" and depth <= 0:
            statement = text[start : token.start()].strip()
            if statement and not statement.startswith("#"):
                yield line, statement
            line += text.count("\n", start, token.end())
            start, depth = token.end(), 0


def _keys(text: str) -> tuple[str, ...]:
    """The parts of a dotted key at the beginning of a text."""
    keys: list[str] = []
    end = 0
    while (match := _KEY.match(text, end)) is not None:
        bare, quoted = match.groups()
        keys.append(bare if quoted is None else str(loads(f"key = {quoted}")["key"]))
        end = match.end()
        if text[end : end + 1] != ".":
            break
        end += 1
    return tuple(keys)


def _resolved(keys: tuple[str, ...], counts: Mapping[Place, int]) -> Place:
    """The place that a header names: of an array of tables its last element."""
    place: Place = ()
    for key in keys:
        place = (*place, key)
        if place in counts:
            place = (*place, counts[place] - 1)
    return place
