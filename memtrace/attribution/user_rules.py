"""The user's own rules, from TOML: `--rules FILE`, and `[tool.memtrace]` of the project's pyproject.toml.

docs/rules.md describes the format. Every mistake is a `RulesError` that names the file and the line.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memtrace.attribution.categories import BLOCK_CATEGORIES, CATEGORIES
from memtrace.attribution.result import Attribution
from memtrace.attribution.rule import Rank, Rule
from memtrace.attribution.rule_files import PROJECT_FILE, text_of
from memtrace.attribution.rules import ALL
from memtrace.attribution.rules.cpp import CPP
from memtrace.attribution.toml_lines import Place, key_lines, line_of, loads
from memtrace.errors import RulesError
from memtrace.model import Notice
from memtrace.places import Side, side_of
from memtrace.timeline import PHASES, Phase
from memtrace.timeline.callsites import Function
from memtrace.units import format_bytes, parse_bytes

MAX_RULES = 10_000
MAX_CATEGORIES = 200
"""Own ones, of all files together. A category is a byte in our columns."""

RULE_KEYS = (
    "category",
    "file",
    "function",
    "inside",
    "min_size",
    "max_size",
    "phase",
    "lines",
    "was",
    "label",
    "id",
    "note",
)
_TOP_KEYS = ("rule", "categories")
_CATEGORY = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_RESERVED = ("prior", "unknown", "outside")
_AUTOMATIC_ID = re.compile(r"user\.[0-9]+")
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_ANY = "*"
_LONGEST_NAME = 100
_SHOWN = 5
_AT_LINE = re.compile(r" ?\(at (?:line (\d+), column (\d+)|end of document)\)$")
_EXAMPLE = 'docs/rules.md shows the format; the shortest rule is: [[rule]] category = "act.moe" file = "models/moe.py"'


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a rule is written; lines count from 1."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class UserRules:
    """Rules in the order in which they are tried, and where each is written. `labels`: the text of own categories."""

    rules: tuple[Rule, ...] = ()
    origins: tuple[Origin, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def own_categories(self) -> tuple[str, ...]:
        """The categories that are not ours, in order of appearance."""
        named = dict.fromkeys((*self.labels, *(rule.category for rule in self.rules)))
        return tuple(name for name in named if name not in CATEGORIES)

    def idle(self, attribution: Attribution) -> tuple[Notice, ...]:
        """A notice for each file with rules that decide nothing. The project's own need not fit every recording."""
        busy = {attribution.rule_ids[rule] for rule in np.unique(attribution.rule).tolist() if rule >= 0}
        counts = Counter(origin.file for origin in self.origins)
        found: defaultdict[str, list[str]] = defaultdict(list)
        for rule, origin in zip(self.rules, self.origins, strict=True):
            if rule.id not in busy and re.split(r"[/\\]", origin.file)[-1] != PROJECT_FILE:
                found[origin.file].append(f"{rule.id} (line {origin.line})")
        return tuple(
            Notice("idle-rules", f"{file}: {len(idle)} of {counts[file]} rules decide nothing here: {_some(idle)}")
            for file, idle in found.items()
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


RulesLike = UserRules | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""What the Python API takes for rules: the rules themselves, or the TOML files that hold them."""


def as_rules(given: RulesLike) -> UserRules:
    """Rules as they are, or read from one file or several."""
    if isinstance(given, UserRules):
        return given
    return read([given] if isinstance(given, (str, os.PathLike)) else given)


def read(files: Iterable[str | os.PathLike[str]]) -> UserRules:
    """The rules of several files, in this order; of one category's labels the first counts. Raises RulesError."""
    rules: list[Rule] = []
    origins: list[Origin] = []
    labels: dict[str, str] = {}
    for file in files:
        name = os.fsdecode(file)
        found = parse(text_of(name), name, taken=[rule.id for rule in rules])
        rules += found.rules
        origins += found.origins
        labels = {**found.labels, **labels}
    merged = UserRules(tuple(rules), tuple(origins), labels)
    _limit(len(merged.rules), MAX_RULES, "rules", merged)
    _limit(len(merged.own_categories), MAX_CATEGORIES, "categories of your own", merged)
    return merged


def parse(text: str, name: str, taken: Sequence[str] = ()) -> UserRules:
    """The rules in a TOML text; one named pyproject.toml has them under `tool.memtrace`.

    `taken`: ids of the rules before these, which are numbered on.
    """
    document = _parsed(text, name)
    source = _Source(name, key_lines(text))
    root: Place = ()
    if re.split(r"[/\\]", name)[-1] == PROJECT_FILE:
        root = ("tool", "memtrace")
        document = _section(document, source)
    _known_keys(source, root, document, _TOP_KEYS, "the file" if not root else "[tool.memtrace]")
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        header = ".".join((*(str(part) for part in root), "rule"))
        raise source.error((*root, "rule"), "'rule' is no list of tables", f"Write [[{header}]], with two brackets.")
    if len(tables) > MAX_RULES:
        raise source.error(
            (*root, "rule", MAX_RULES),
            f"more than {MAX_RULES:,} rules",
            "Join rules that differ only in their function.",
        )
    ids = set(taken) | {rule.id for rule in ALL}
    rules: list[Rule] = []
    for number, table in enumerate(tables):
        rule = _rule(_Table(source, (*root, "rule", number), table), f"user.{len(taken) + number + 1}")
        if rule.id in ids:
            raise source.error(
                (*root, "rule", number, "id"), f"there is a rule {rule.id!r} already", "Give it another id, or none."
            )
        ids.add(rule.id)
        rules.append(rule)
    return UserRules(
        rules=tuple(rules),
        origins=tuple(Origin(name, line_of(source.lines, (*root, "rule", number))) for number in range(len(rules))),
        labels=_labels(source, (*root, "categories"), document.get("categories", {})),
    )


# The file.


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        return loads(text)
    except RecursionError:
        raise RulesError(f"{name}: nested too deeply", hint=_EXAMPLE) from None
    except ValueError as error:  # TOMLDecodeError is one, and so is an integer of 5,000 digits
        message = str(error)
        match = _AT_LINE.search(message)
        line, column = (match[1], match[2]) if match else (None, None)
        if match and line is None:
            line = str(text.count("\n", 0, len(text.rstrip())) + 1)
        where = f"{name}:{line}" if line else name
        at = f" (column {column})" if column else ""
        raise RulesError(f"{where}: {_AT_LINE.sub('', message)}{at}", hint=f"This is not TOML. {_EXAMPLE}") from None


def _section(document: Mapping[str, Any], source: _Source) -> dict[str, Any]:
    tool = document.get("tool")
    section = tool.get("memtrace") if isinstance(tool, dict) else None
    if section is None:
        raise RulesError(f"{source.name} has no [tool.memtrace]", hint="Write rules there as [[tool.memtrace.rule]].")
    if not isinstance(section, dict):
        raise source.error(("tool", "memtrace"), "'memtrace' is no table", "Write [[tool.memtrace.rule]].")
    return section


def _limit(count: int, most: int, what: str, rules: UserRules) -> None:
    if count > most:
        last = rules.origins[-1] if rules.origins else Origin("the rules", 1)
        raise RulesError(
            f"{last.file}:{last.line}: {count:,} {what}, and {most:,} is the most", hint="Join some of them."
        )


# Values, and what may be wrong with them.


@dataclass(frozen=True, slots=True)
class _Source:
    """A file and the lines of its keys."""

    name: str
    lines: Mapping[Place, int]

    def error(self, place: Place, message: str, hint: str) -> RulesError:
        return RulesError(f"{self.name}:{line_of(self.lines, place)}: {message}", hint=hint)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file: one rule."""

    source: _Source
    place: Place
    values: Mapping[str, Any]

    def error(self, key: str, message: str, hint: str) -> RulesError:
        return self.source.error((*self.place, key), message, hint)

    def text(self, key: str) -> str:
        """A text; empty where the key is not there."""
        value = self.values.get(key, "")
        if not isinstance(value, str):
            raise self.error(key, f"{key!r} is {_kind(value)}, not text", f'Write it in quotes: {key} = "..."')
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """One text or a list of them; none where the key is not there."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        hint = f'Write {key} = "..." or {key} = ["...", "..."], or leave it out.'
        if not isinstance(items, list):
            raise self.error(key, f"{key!r} is {_kind(value)}, not text or a list of texts", hint)
        for item in items:
            if not isinstance(item, str):
                raise self.error(key, f"{key!r} has {_kind(item)} among its texts", hint)
            if not item.strip():
                raise self.error(key, f"{key!r} has an empty text", hint)
        if not items:
            raise self.error(key, f"{key!r} is an empty list: this rule would never fire", hint)
        return tuple(items)

    def size(self, key: str) -> int | None:
        """Bytes, from a number or from text such as 1.5GiB."""
        value = self.values.get(key)
        hint = f'Write {key} = "512MiB", or a number of bytes.'
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise self.error(key, f"{key!r} is {_kind(value)}, not a size", hint)
        try:
            size = parse_bytes(value) if isinstance(value, str) else value
        except ValueError as error:
            raise self.error(key, f"{key!r}: {error}", hint) from None
        if size < 0:
            raise self.error(key, f"{key!r} is negative", hint)
        return size


def _kind(value: object) -> str:
    for kind, name in (
        (str, "text"),
        (bool, "true or false"),
        (int, "a number"),
        (float, "a number"),
        (list, "a list"),
        (dict, "a table"),
    ):
        if isinstance(value, kind):
            return name
    return "a date"


def _known_keys(source: _Source, place: Place, table: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in table:
        if key not in known:
            raise source.error(
                (*place, key), f"unknown key {_quoted(key)}", f"{what.capitalize()} has: {_nearest(key, known)}"
            )


def _nearest(given: str, known: Sequence[str]) -> str:
    """The valid names, and the one that was meant."""
    near = difflib.get_close_matches(given[:_LONGEST_NAME], known, n=1, cutoff=0.5)
    return f"{', '.join(known)}." + (f" Did you mean {near[0]}?" if near else "")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}...")


# One rule.


def _rule(table: _Table, automatic_id: str) -> Rule:
    _known_keys(table.source, table.place, table.values, RULE_KEYS, "a rule")
    for key in ("category", "file"):
        if key not in table.values:
            raise table.error(key, f"the rule has no {key!r}", _EXAMPLE)
    least, most = table.size("min_size"), table.size("max_size")
    if least is not None and most is not None and least > most:
        raise table.error(
            "max_size",
            f"'max_size' ({format_bytes(most)}) is less than 'min_size' ({format_bytes(least)})",
            "No block is of such a size: exchange them.",
        )
    return Rule(
        id=_id(table) or automatic_id,
        category=_category(table.source, (*table.place, "category"), table.text("category")),
        where=_function(table),
        note=table.text("note"),
        rank=Rank.USER,
        inside=tuple(_outer(table, text) for text in table.texts("inside")),
        label=table.text("label"),
        min_bytes=least or 0,
        max_bytes=most,
        phases=_phases(table),
        lines=_lines(table),
        was=_was(table),
    )


def _id(table: _Table) -> str:
    given = table.text("id")
    if "id" not in table.values:
        return ""
    if not _CATEGORY.fullmatch(given) or len(given) > _LONGEST_NAME:
        raise table.error(
            "id", f"{_quoted(given)} cannot be an id", "Use a-z, 0-9, _ and -, with dots between: my.rule"
        )
    if _AUTOMATIC_ID.fullmatch(given):
        raise table.error("id", f"{given!r} is the name of a rule without an id", "Give it another id, or none.")
    return given


def _category(source: _Source, place: Place, given: str) -> str:
    if not _CATEGORY.fullmatch(given) or len(given) > _LONGEST_NAME:
        hint = "Use a-z, 0-9, _ and -, with dots between: act.moe. What people read is the label."
        raise source.error(place, f"{_quoted(given)} cannot be a category", hint)
    if given in _RESERVED or given.split(".")[0] == "alloc":
        hint = "Use another of ours (memtrace rules shows them) or one of your own."
        raise source.error(place, f"the category {given!r} is not for rules: memtrace itself keeps it", hint)
    return given


def _function(table: _Table) -> Function:
    file, names = table.text("file"), table.texts("function")
    if file == CPP:
        if not names or _ANY in names:
            hint = 'As in: function = "at::native::cudnn". It is looked for anywhere in the demangled name.'
            raise table.error("file", f"{CPP!r} needs a 'function'", hint)
        return Function(CPP, names)
    return Function(_pattern(table, "file", file), _names(table, "function", names))


def _pattern(table: _Table, key: str, pattern: str) -> str:
    """The end of a path. What could never match is a mistake, and said."""
    hint = 'It is the end of a path, part by part: "models/moe.py", "models/*.py"; "*" is any file.'
    shown = _quoted(pattern)
    if not pattern.strip():
        raise table.error(key, f"{key!r} is empty", hint)
    parts = pattern.replace("\\", "/").split("/")
    if not parts[-1]:
        raise table.error(key, f"{key!r}: {shown} names a directory", f'{hint} All files in it: "{parts[-2]}/*".')
    if "" in parts[1:] or "." in parts or ".." in parts:
        raise table.error(key, f"{key!r}: {shown} has a part that no path has ('.', '..' or none)", hint)
    if any("**" in part for part in parts):
        raise table.error(key, f"{key!r}: {shown} has '**', but * stays within one part", hint)
    if key == "file" and re.search(r":\d+$", pattern):
        raise table.error(key, f"{key!r}: {shown} names a line", "Write the line as: lines = 31, or lines = '31-60'.")
    if side_of(pattern) == Side.CPP:
        cpp_hint = f'Frames of C++ are matched by name alone: file = "{CPP}", function = "a part of the name".'
        raise table.error(key, f"{key!r}: {shown} is not a Python file", cpp_hint)
    return pattern


def _names(table: _Table, key: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Bare names of functions; none means any."""
    for name in names:
        if name == _ANY or re.fullmatch(r"<\w+>", name):
            continue
        if not name.isidentifier():
            last = re.split(r"[.:]", name.removesuffix("()"))[-1]
            meant = f" Here: {last!r}." if last.isidentifier() else ""
            hint = (
                f"Frames have the bare name of a function, without class or module, and it is matched whole.{meant} "
                "Methods of one name are told apart by their 'lines'."
            )
            raise table.error(key, f"{key!r}: {_quoted(name)} is no function's name", hint)
    return (_ANY,) if not names or _ANY in names else tuple(dict.fromkeys(names))


def _outer(table: _Table, text: str) -> Function:
    """A frame further out: `file` or `file:function`. The colon of a drive letter is none of ours."""
    file, colon, name = text.rpartition(":")
    if not colon or "/" in name or "\\" in name:
        return Function(_pattern(table, "inside", text))
    return Function(_pattern(table, "inside", file), _names(table, "inside", (name,)))


def _phases(table: _Table) -> tuple[Phase, ...]:
    phases = []
    for name in table.texts("phase"):
        if name not in PHASES:
            raise table.error("phase", f"there is no phase {_quoted(name)}", f"There is: {_nearest(name, PHASES)}")
        phases.append(Phase(PHASES.index(name)))
    return tuple(dict.fromkeys(phases))


def _lines(table: _Table) -> tuple[tuple[int, int], ...]:
    """Lines of the file: a number, or text as "31", "31-60 84"."""
    given = table.values.get("lines")
    if given is None:
        return ()
    hint = 'Write lines = 31, or lines = "31-60 84": the lines of a class, and one more.'
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise table.error("lines", f"'lines' is {_kind(given)}, not a line or text", hint)
    text = str(given)
    spans = [_SPAN.fullmatch(part) for part in text.replace(",", " ").split()]
    if not spans or None in spans:
        raise table.error("lines", f"'lines': {_quoted(text)} names no lines", hint)
    found = tuple((int(span[1]), int(span[2] or span[1])) for span in spans if span is not None)
    if any(first < 1 or last < first for first, last in found):
        raise table.error("lines", f"'lines': {_quoted(text)} has a range that no line is in", hint)
    if table.text("file") == CPP:
        raise table.error("lines", "frames of C++ have no lines", "Leave 'lines' out.")
    return found


def _was(table: _Table) -> tuple[str, ...]:
    """What memtrace itself says of the block."""
    for name in table.texts("was"):
        if name not in BLOCK_CATEGORIES:
            hint = f"It is what memtrace itself says of the block: {_nearest(name, BLOCK_CATEGORIES)}"
            raise table.error("was", f"there is no category {_quoted(name)} of memtrace's", hint)
    return tuple(dict.fromkeys(table.texts("was")))


def _labels(source: _Source, place: Place, given: object) -> dict[str, str]:
    """`[categories]`: category -> the text people read."""
    hint = 'Write "act.moe" = "expert activations" under [categories]; a name with a dot in it goes in quotes.'
    if not isinstance(given, dict):
        raise source.error(place, "'categories' is no table", hint)
    labels = {}
    for name, label in given.items():
        category = _category(source, (*place, name), name)
        if not isinstance(label, str):
            raise source.error((*place, name), f"the label of {category!r} is {_kind(label)}, not text", hint)
        if not label.strip():
            raise source.error((*place, name), f"the label of {category!r} is empty", hint)
        labels[category] = label
    return labels
