"""Which blocks a filter chooses: `size>64MiB cat:act -file:attn` (how one is written: `conditions`).

A text is looked for once in every string that there is, then in the frames that have the string, then in the stacks
that have the frame; of the blocks only numbers are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis.conditions import WORD, Condition, Key, Kind, Term, parse_condition
from memtrace.attribution import CODE, CONFIDENCE, REASON_TEXT, Attribution, Reason
from memtrace.errors import QuestionError
from memtrace.timeline import PHASES
from memtrace.timeline.callsites import any_in_stack

if TYPE_CHECKING:
    from memtrace.analysis.block_table import BlockTable

Mask = NDArray[np.bool_]

STATES = ("alive", "freed", "pending", "before")
KEYS = {
    "size": Key(Kind.BYTES),
    "requested": Key(Kind.BYTES),
    "life": Key(Kind.LIFE),
    "born": Key(Kind.NUMBER),
    "freed": Key(Kind.NUMBER),
    "address": Key(Kind.NUMBER),
    "step": Key(Kind.NUMBER),
    "stream": Key(Kind.NUMBER),
    "cat": Key(Kind.TEXT),
    "file": Key(Kind.TEXT),
    "frame": Key(Kind.TEXT),
    "stack": Key(Kind.TEXT),
    "module": Key(Kind.TEXT),
    "phase": Key(Kind.CHOICE, PHASES),
    "pool": Key(Kind.CHOICE, ("small", "large")),
    "is": Key(Kind.CHOICE, STATES),
    "conf": Key(Kind.CHOICE, CONFIDENCE),
}
"""`cat`: the beginning of a category's id or of its last part, or part of the label. `file` and `frame`: path and
function of the frame that a person would look at, as `blame --by file` and `--by frame` have it; `stack`: of any frame,
C++ too. `freed` knows only blocks that were freed in the recording. A word alone: category, label, path or function of
any Python frame, or module."""
ALIASES = {"category": "cat", "addr": "address", "confidence": "conf", "function": "frame"}


def parse(text: str) -> Condition:
    """The condition that a text is. Raises QuestionError, which names the term that is none.

    >>> parse("size>=1KiB -is:freed").terms[0].low
    1024
    """
    return parse_condition(text, KEYS, ALIASES)


def select(condition: Condition, table: BlockTable, event: int | None = None) -> Mask:
    """Of each block whether it fulfils the condition. `event`: the moment of which `is:` speaks (None: the end). Raises
    QuestionError where the trace cannot say."""
    chosen = np.ones(len(table), np.bool_)
    for term in condition.terms:
        if term.key == "is":
            found = _in_state(table, term.choices, table.replay.events - 1 if event is None else event)
        else:
            found = _MATCHERS[term.key](table, term)
        chosen &= ~found if term.negated else found
    return chosen


def between(column: NDArray[Any], low: int | None, high: int | None) -> Mask:
    """Of each integer of a column whether it is in the range, both ends in it (None: no end). Any int may be an end."""
    bounds = np.iinfo(column.dtype)
    found: Mask = np.ones(len(column), np.bool_)
    least, most = int(bounds.min), int(bounds.max)
    if (low is not None and low > most) or (high is not None and high < least):
        return np.zeros(len(column), np.bool_)
    if low is not None and low > least:
        found &= column >= low
    if high is not None and high < most:
        found &= column <= high
    return found


def in_category(attribution: Attribution, text: str, *, anywhere: bool = False) -> Mask:
    """Of each block whether its category or its label is meant by a text. `anywhere`: any part of the id will do."""
    names = [name.casefold() for name in attribution.categories]
    by_id = [text in name if anywhere else name.startswith(text) or f".{text}" in name for name in names]
    labels = [text in label.casefold() for label in attribution.category_labels]
    labels[CODE["unknown"]] = False  # of those the reason is shown
    of_category = np.array(by_id, np.bool_)
    found: Mask = of_category[attribution.category]
    own = np.array([*(text in label.casefold() for label in attribution.labels), False], np.bool_)
    found |= np.where(attribution.label >= 0, own[attribution.label], np.array(labels)[attribution.category])
    reasons = np.array([bool(said := REASON_TEXT[reason].casefold()) and text in said for reason in Reason], np.bool_)
    if reasons.any():
        found |= reasons[attribution.reason] & (attribution.category == CODE["unknown"]) & (attribution.label < 0)
    return found


def holding(text: str, texts: Sequence[str], rows: NDArray[np.integer[Any]]) -> Mask:
    """Of each row of `texts` whether the text is in it; of -1 it is not."""
    found: Mask = np.array([*(text in one.casefold() for one in texts), False], np.bool_)[rows]
    return found


def _in_state(table: BlockTable, states: Sequence[str], event: int) -> Mask:
    blocks = table.replay.lifetimes
    there = blocks.born <= event
    found = np.zeros(len(table), np.bool_)
    if "alive" in states:
        found |= there & (event < blocks.freed)
    if "pending" in states:
        found |= there & (blocks.freed <= event) & (event < blocks.died)
    if "freed" in states:
        found |= there & (blocks.died <= event)
    if "before" in states:
        found |= blocks.born < 0
    return found


def _life(table: BlockTable, term: Term) -> Mask:
    if not term.is_time:
        return between(table.life(), term.low, term.high)
    life = table.life_us()
    if life is None:
        raise QuestionError(
            f"{term.written!r}: this trace has no times (torch before 2.2)", hint="Write a number of events instead."
        )
    return between(life, term.low, term.high)


def _freed(table: BlockTable, term: Term) -> Mask:
    freed = table.replay.lifetimes.freed
    return between(freed, term.low, term.high) & (freed < table.replay.events)


def _step(table: BlockTable, term: Term) -> Mask:
    step = np.append(table.timeline.step, np.int32(-1))
    of_run = between(step, term.low, term.high) & (step >= 0)
    return of_run[table.run]


def _phase(table: BlockTable, term: Term) -> Mask:
    meant = np.array([phase in term.choices for phase in PHASES], np.bool_)
    return np.append(meant[table.timeline.phase], False)[table.run]


def _own(table: BlockTable, of_frame: Mask) -> Mask:
    """Of each block whether the frame that a person would look at is one of these."""
    return np.append(of_frame[table.shown.own], False)[table.stack]


def _word(table: BlockTable, term: Term) -> Mask:
    stacks = any_in_stack(table.shown.table, table.texts.anywhere(term.text))
    found = np.append(stacks, False)[table.stack] | in_category(table.attribution, term.text, anywhere=True)
    return found | _module(table, term)


def _module(table: BlockTable, term: Term) -> Mask:
    return holding(term.text, table.modules[1], table.module())


def _stack(table: BlockTable, term: Term) -> Mask:
    stacks = any_in_stack(table.data.stacks, table.texts.anywhere(term.text))
    return np.append(stacks, False)[table.replay.lifetimes.stack]


def _pool(table: BlockTable, term: Term) -> Mask:
    large = table.replay.lifetimes.large
    return (large & ("large" in term.choices)) | (~large & ("small" in term.choices))


def _column(name: str) -> Callable[[BlockTable, Term], Mask]:
    return lambda table, term: between(getattr(table.replay.lifetimes, name), term.low, term.high)


_MATCHERS: dict[str, Callable[[BlockTable, Term], Mask]] = {
    **{name: _column(name) for name in ("size", "requested", "born", "address", "stream")},
    "life": _life,
    "freed": _freed,
    "step": _step,
    "phase": _phase,
    "cat": lambda table, term: in_category(table.attribution, term.text),
    "file": lambda table, term: _own(table, table.texts.in_path(term.text)),
    "frame": lambda table, term: _own(table, table.texts.in_function(term.text)),
    "stack": _stack,
    "module": _module,
    "pool": _pool,
    "conf": lambda table, term: np.isin(
        table.attribution.confidence, [CONFIDENCE.index(choice) for choice in term.choices]
    ),
    WORD: _word,
}
