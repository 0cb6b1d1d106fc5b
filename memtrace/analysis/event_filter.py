"""Which events a filter chooses: `action:alloc size>1MiB cat:act in:Optimizer` (how one is written: `conditions`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis.block_filter import Mask, between, holding, in_category
from memtrace.analysis.conditions import WORD, Condition, Key, Kind, Term, parse_condition
from memtrace.errors import QuestionError
from memtrace.timeline import PHASES
from memtrace.timeline.callsites import any_in_stack

if TYPE_CHECKING:
    from memtrace.analysis.event_log import EventLog

KEYS = {
    "action": Key(Kind.TEXT),
    "event": Key(Kind.NUMBER),
    "time": Key(Kind.TIME),
    "size": Key(Kind.BYTES),
    "address": Key(Kind.NUMBER),
    "stream": Key(Kind.NUMBER),
    "block": Key(Kind.NUMBER),
    "step": Key(Kind.NUMBER),
    "cat": Key(Kind.TEXT),
    "file": Key(Kind.TEXT),
    "frame": Key(Kind.TEXT),
    "stack": Key(Kind.TEXT),
    "module": Key(Kind.TEXT),
    "phase": Key(Kind.CHOICE, PHASES),
    "text": Key(Kind.TEXT),
    "in": Key(Kind.TEXT),
}
"""`action`: the beginning of its name (`free` is both kinds); `time`: since the first event; `block`: all events of
that row of the blocks; `cat` and `module`: of the block; `file`, `frame`, `stack`: of the event's own stack, as for
blocks; `text`: the metadata and the compile context of the event; `in`: within an annotated range of such a name. A
word alone: action, category, label, path or function of any Python frame, metadata or compile context."""
ALIASES = {"category": "cat", "addr": "address", "function": "frame", "annotation": "in"}
ANNOTATION = "annotation"
"""The action of rows that are annotations."""
_BEGIN, _END = f"{ANNOTATION} begin", f"{ANNOTATION} end"


def parse(text: str) -> Condition:
    """The condition that a text is. Raises QuestionError, which names the term that is none.

    >>> [term.key for term in parse("action:alloc time>1.5s").terms]
    ['action', 'time']
    """
    return parse_condition(text, KEYS, ALIASES)


def select(condition: Condition, log: EventLog) -> Mask:
    """Of each event whether it fulfils the condition. Raises QuestionError where the trace cannot say."""
    return _all(condition, len(log), lambda term: _MATCHERS[term.key](log, term))


def select_annotations(condition: Condition, log: EventLog) -> Mask:
    """Of each annotation whether it fulfils the condition: a word, `text:` and `in:` look at its name, `action:` at
    `annotation`, the other keys at the event that it lies before, if they say anything of it at all."""
    return _all(condition, len(log.annotated), lambda term: _of_annotations(log, term))


def _all(condition: Condition, rows: int, found: Callable[[Term], Mask]) -> Mask:
    chosen = np.ones(rows, np.bool_)
    for term in condition.terms:
        chosen &= ~found(term) if term.negated else found(term)
    return chosen


def _of_annotations(log: EventLog, term: Term) -> Mask:
    notes = log.annotated
    if term.key in (WORD, "text", "in"):
        return _named(log, term.text)
    if term.key == "action":
        return np.where(notes.start, _BEGIN.startswith(term.text), _END.startswith(term.text))
    if term.key == "event":
        return between(notes.event, term.low, term.high)
    if term.key == "time":
        return between(notes.time_us - notes.first_us, term.low, term.high)
    if term.key in ("phase", "step") and len(log):
        return _MATCHERS[term.key](log, term)[np.minimum(notes.event, len(log) - 1)]
    return np.zeros(len(notes), np.bool_)


def _named(log: EventLog, text: str) -> Mask:
    """Of each annotation whether its name has the text."""
    names, which = np.unique(log.annotated.name, return_inverse=True)
    return holding(text, [log.data.strings[name] for name in names.tolist()], which.ravel())


def _of_actions(log: EventLog, is_meant: Callable[[str], bool]) -> Mask:
    meant = np.array([is_meant(name.casefold()) for name in log.actions], np.bool_)
    return meant[log.trace.action[: len(log)]]


def _of_blocks(log: EventLog, of_block: Mask) -> Mask:
    """Of each event what holds for its block; where it has none, nothing does."""
    return np.append(of_block, False)[log.block]


def _of_runs(log: EventLog, of_run: Mask) -> Mask:
    """Of each event what holds for its run of the timeline."""
    if not len(of_run):
        return np.zeros(len(log), np.bool_)
    ends = np.minimum(np.append(log.timeline.start, len(log)), len(log))
    return np.repeat(of_run, np.diff(ends))


def _of_stacks(log: EventLog, of_stack: Mask) -> Mask:
    """Of each event what holds for its stack (an id of all stacks)."""
    return np.append(of_stack, False)[log.trace.stack[: len(log)]]


def _of_shown(log: EventLog, of_shown: Mask) -> Mask:
    """Of each event what holds for its stack as shown."""
    return _of_stacks(log, np.append(of_shown, False)[log.shown.shown])


def _text(log: EventLog, term: Term) -> Mask:
    found = np.zeros(len(log), np.bool_)
    for column in (log.trace.user_metadata, log.trace.compile_context):
        if column is not None:
            texts = column[: len(log)]
            used = np.flatnonzero(np.bincount(texts + 1)[1:])
            place = np.full(len(log.data.strings) + 1, -1, np.int32)  # the last row is that of no text (-1)
            place[used] = np.arange(len(used))
            found |= holding(term.text, [log.data.strings[text] for text in used.tolist()], place)[texts]
    return found


def _time(log: EventLog, term: Term) -> Mask:
    times = log.blocks.time_us
    if times is None:
        raise QuestionError(
            f"{term.written!r}: this trace has no times (torch before 2.2)", hint="Write event: and a number instead."
        )
    first = int(times[0])
    low, high = (None if end is None else end + first for end in (term.low, term.high))
    return between(times, low, high)


def _step(log: EventLog, term: Term) -> Mask:
    step = log.timeline.step
    return _of_runs(log, between(step, term.low, term.high) & (step >= 0))


def _phase(log: EventLog, term: Term) -> Mask:
    meant = np.array([phase in term.choices for phase in PHASES], np.bool_)
    return _of_runs(log, meant[log.timeline.phase])


def _word(log: EventLog, term: Term) -> Mask:
    blocks = log.blocks
    found = _of_actions(log, lambda name: term.text in name)
    found |= _of_blocks(log, in_category(blocks.attribution, term.text, anywhere=True))
    found |= _of_shown(log, any_in_stack(log.shown.table, blocks.texts.anywhere(term.text)))
    return found | _text(log, term)


def _event(log: EventLog, term: Term) -> Mask:
    found = np.zeros(len(log), np.bool_)
    low = 0 if term.low is None else max(term.low, 0)
    high = len(log) if term.high is None else min(term.high + 1, len(log))
    found[min(low, len(log)) : max(high, 0)] = True
    return found


def _numbers(column: Callable[[EventLog], NDArray[Any]]) -> Callable[[EventLog, Term], Mask]:
    return lambda log, term: between(column(log)[: len(log)], term.low, term.high)


_MATCHERS: dict[str, Callable[[EventLog, Term], Mask]] = {
    "action": lambda log, term: _of_actions(log, lambda name: name.startswith(term.text)),
    "event": _event,
    "time": _time,
    "size": _numbers(lambda log: log.trace.size),
    "address": lambda log, term: _numbers(lambda log: log.trace.addr)(log, term) & (log.trace.addr[: len(log)] > 0),
    "stream": _numbers(lambda log: log.trace.stream),
    "block": lambda log, term: _numbers(lambda log: log.block)(log, term) & (log.block >= 0),
    "step": _step,
    "cat": lambda log, term: _of_blocks(log, in_category(log.blocks.attribution, term.text)),
    "file": lambda log, term: _of_shown(log, log.blocks.texts.in_path(term.text)[log.shown.own]),
    "frame": lambda log, term: _of_shown(log, log.blocks.texts.in_function(term.text)[log.shown.own]),
    "stack": lambda log, term: _of_stacks(log, any_in_stack(log.data.stacks, log.blocks.texts.anywhere(term.text))),
    "module": lambda log, term: _of_blocks(log, holding(term.text, log.blocks.modules[1], log.blocks.module())),
    "phase": _phase,
    "text": _text,
    "in": lambda log, term: log.annotated.within(_named(log, term.text), len(log)),
    WORD: _word,
}
