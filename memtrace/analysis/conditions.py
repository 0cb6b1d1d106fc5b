"""What a person types to choose rows: `size>64MiB cat:act -file:attn "two words"`. The grammar, without any rows.

Terms are joined by spaces and all of them must hold; `-` or `!` before a term turns it around. A term is `key:value`,
a comparison (`size>=1MiB`, `born<500`), a range (`size:1MiB..2MiB`, `born:..500`), or a word to look for.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from memtrace.errors import QuestionError
from memtrace.units import parse_bytes

MOST_CHARACTERS = 1000
MOST_TERMS = 50
WORD = ""
"""The key of a term that is a word alone."""

_NUMBER = re.compile(r"-?(?:0[xX][0-9A-Fa-f]{1,32}|[0-9][0-9,_]{0,31})")
_TIME = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?)\s*(us|ms|s|min)", re.IGNORECASE)
_MICROSECONDS = {"us": 1, "ms": 1000, "s": 1_000_000, "min": 60_000_000}
_TERM = (
    r"(?P<negated>[-!])?"
    r"(?:(?P<number>{numbers})\s*(?P<compared>>=|<=|[><=])\s*|(?P<key>[A-Za-z_]+)(?P<operator>>=|<=|[><=]|:(?!:)))?"
    r'(?:"(?P<quoted>[^"]*)"|(?P<plain>[^\s"]*))(?=\s|$)'
)


class Kind(Enum):
    """What the value of a key is."""

    TEXT = "text"
    CHOICE = "one of a few words"
    BYTES = "a size, as 64MiB"
    NUMBER = "a number"
    LIFE = "a number of events, or a time with us, ms or s"
    TIME = "a time with us, ms or s"


@dataclass(frozen=True, slots=True)
class Key:
    """What a key takes. `choices`: the words of a `Kind.CHOICE`."""

    kind: Kind
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """One term. Of a number `low` and `high`, both included (None: no bound), in bytes, events, or with `is_time` in
    microseconds; of a choice the words meant; of a text the `text` in lower case. `written` is how it was typed."""

    key: str
    text: str = ""
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    is_time: bool = False
    negated: bool = False
    written: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """Terms that must all hold. Without any, everything does."""

    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return " ".join(term.written for term in self.terms)


def parse_condition(text: str, keys: Mapping[str, Key], aliases: Mapping[str, str]) -> Condition:
    """The condition that a text is. Raises QuestionError, which names the term that is none."""
    if len(text) > MOST_CHARACTERS:
        raise QuestionError(f"a filter of {len(text):,} characters", hint=f"At most {MOST_CHARACTERS:,} are read.")
    numbers = [name for name in (*keys, *aliases) if keys[aliases.get(name, name)].kind not in _IN_WORDS]
    pattern = re.compile(_TERM.format(numbers="|".join(numbers) or "(?!)"), re.IGNORECASE)
    terms: list[Term] = []
    place = _after_spaces(text, 0)
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            _fail_on_quote(text[place:])
        terms.append(_term(match, keys, aliases))
        if len(terms) > MOST_TERMS:
            raise QuestionError(f"a filter of more than {MOST_TERMS} terms", hint="Leave some out.")
        place = _after_spaces(text, match.end())
    return Condition(tuple(terms))


_IN_WORDS = (Kind.TEXT, Kind.CHOICE)


def _after_spaces(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _fail_on_quote(rest: str) -> NoReturn:
    if rest.count('"') % 2:
        raise QuestionError(f"{_short(rest)}: a quote that does not end", hint='Quotes come in pairs: file:"my file".')
    raise QuestionError(f"{_short(rest)}: a quote within a word", hint='Quote all of a value: file:"my file".')


def _term(match: re.Match[str], keys: Mapping[str, Key], aliases: Mapping[str, str]) -> Term:
    written = match[0]
    name, operator = match["number"] or match["key"], match["compared"] or match["operator"]
    value = match["plain"] if match["quoted"] is None else match["quoted"]
    negated = match["negated"] is not None
    if name is None:
        if not value.strip():
            raise QuestionError(f"{_short(written)}: nothing to look for", hint="Write a word, or key:value.")
        return Term(WORD, text=value.casefold(), negated=negated, written=written)
    key = aliases.get(name.lower(), name.lower())
    if key not in keys:
        near = sorted(keys, key=lambda known: -difflib.SequenceMatcher(None, key[:40], known).ratio())
        quoted = 'Quote it to look for the text itself: "a:b".'
        raise QuestionError(f"{_short(written)}: no key {_short(name)}", hint=f"Keys: {', '.join(near)}. {quoted}")
    if not value.strip():
        raise QuestionError(f"{_short(written)}: no value", hint=f"After {key} comes {_wanted(keys[key])}.")
    if keys[key].kind in _IN_WORDS:
        if operator not in (":", "="):
            raise QuestionError(f"{_short(written)}: {key} is no number", hint=f"Write {key}:{value[:40]}.")
        return _in_words(key, keys[key], value.strip().casefold(), negated, written)
    return _compared(key, keys[key], operator, value.strip(), negated, written)


def _in_words(key: str, known: Key, value: str, negated: bool, written: str) -> Term:
    if known.kind == Kind.TEXT:
        return Term(key, text=value, negated=negated, written=written)
    meant = tuple(choice for choice in known.choices if choice.startswith(value))
    if not meant:
        raise QuestionError(f"{_short(written)}: not one of {key}'s words", hint=f"There is: {_wanted(known)}.")
    return Term(key, choices=meant, negated=negated, written=written)


def _compared(key: str, known: Key, operator: str, value: str, negated: bool, written: str) -> Term:
    is_time = known.kind == Kind.TIME
    if known.kind == Kind.LIFE:
        is_time = all(part == "" or _TIME.fullmatch(part) for part in value.split(".."))
    read = _microseconds if is_time else _READERS[known.kind]
    try:
        if ".." in value and operator in (":", "="):
            first, last = value.split("..", 1)
            low, high = (read(part.strip()) if part.strip() else None for part in (first, last))
            if low is None and high is None:
                raise ValueError(value)
        else:
            low, high = _bounds(operator, read(value))
    except ValueError:
        raise QuestionError(f"{_short(written)}: not a value for {key}", hint=f"It takes {_wanted(known)}.") from None
    return Term(key, low=low, high=high, is_time=is_time, negated=negated, written=written)


def _bounds(operator: str, value: int) -> tuple[int | None, int | None]:
    """The least and the greatest number that compare so."""
    if operator in (":", "="):
        return value, value
    if operator in (">", ">="):
        return value + (operator == ">"), None
    return None, value - (operator == "<")


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    digits = text.replace(",", "").replace("_", "")
    return int(digits, 16 if "x" in digits.lower() else 10)


def _microseconds(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return round(float(match[1]) * _MICROSECONDS[match[2].lower()])


_READERS: dict[Kind, Callable[[str], int]] = {
    Kind.BYTES: parse_bytes,
    Kind.NUMBER: _number,
    Kind.LIFE: _number,
    Kind.TIME: _microseconds,
}


def _wanted(key: Key) -> str:
    return ", ".join(key.choices) if key.choices else key.kind.value


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")
