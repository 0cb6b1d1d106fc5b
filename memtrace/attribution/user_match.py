"""The user's own rules, over everything that ours decided. Stacks are few, so matching them is plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.draft import CERTAIN, Draft, Rows
from memtrace.attribution.lives import Context
from memtrace.attribution.rule import Rule
from memtrace.attribution.rules.cpp import CPP
from memtrace.model import StackTable
from memtrace.places import Side, is_file, parts_of
from memtrace.timeline.callsites import Function, frame_sides

Matches = dict[int, dict[int, int]]
"""Rule -> stack -> the innermost frame that matches."""


def decide(draft: Draft, context: Context, stacks: StackTable, rules: Sequence[Rule]) -> None:
    """Each block is the first rule's that matches its stack and whose conditions it meets; else it stays as it is.

    Comes last: what ours say of other blocks does not depend on it. After it `draft.rule` counts the user's rules
    before ours.
    """
    if not rules:
        return
    draft.rule = np.where(draft.rule >= 0, draft.rule + len(rules), draft.rule).astype(np.int16)
    matches = match(stacks, rules)
    matched = np.zeros(len(stacks) + 1, np.bool_)
    matched[[stack for found in matches.values() for stack in found]] = True
    left = np.flatnonzero(matched[context.stack])
    for number in sorted(matches):
        frame = np.full(len(stacks) + 1, -1, np.int32)
        frame[list(matches[number])] = list(matches[number].values())
        deciding = frame[context.stack[left]]
        taken = (deciding >= 0) & _meets(draft, context, left, rules[number])
        _apply(draft, left[taken], number, rules[number], deciding[taken])
        left = left[~taken]


def _meets(draft: Draft, context: Context, rows: Rows, rule: Rule) -> NDArray[np.bool_]:
    """Whether blocks meet a rule's conditions. A block from before the recording was born in no known phase."""
    size = context.requested[rows]
    meets = size >= min(rule.min_bytes, np.iinfo(np.int64).max)
    if rule.max_bytes is not None:
        meets &= size <= min(rule.max_bytes, np.iinfo(np.int64).max)
    if rule.phases:
        known = (context.born[rows] >= 0) & bool(len(context.timeline))
        meets &= known & np.isin(context.phase[rows], rule.phases)
    if rule.was:
        meets &= np.isin(draft.category[rows], [draft.code(name) for name in rule.was])
    return np.asarray(meets)


def _apply(draft: Draft, rows: Rows, number: int, rule: Rule, frame: NDArray[np.int32]) -> None:
    if not len(rows):
        return
    draft.decide(rows, rule.category, confidence=CERTAIN)
    draft.label[rows] = draft.label_code(rule.label)
    draft.rule[rows] = number
    draft.frame[rows] = frame


def match(stacks: StackTable, rules: Sequence[Rule]) -> Matches:
    """The stacks that each rule matches. Rules after one that has no condition on the block are left out."""
    functions = list(dict.fromkeys(function for rule in rules for function in (rule.where, *rule.inside)))
    number_of = {function: number for number, function in enumerate(functions)}
    rules_of: defaultdict[int, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules):
        rules_of[number_of[rule.where]].append(index)
    insides = [[number_of[function] for function in rule.inside] for rule in rules]
    frames = _functions_of_frames(stacks, functions)
    candidates = [sorted(rule for function in found for rule in rules_of.get(function, ())) for found in frames]
    telling = np.fromiter((bool(found) for found in candidates), np.bool_, len(candidates))
    places = np.flatnonzero(telling[stacks.frame_ids]) if len(stacks.frame_ids) else np.zeros(0, np.int64)
    matches: Matches = {}
    for stack in np.unique(np.searchsorted(stacks.offsets, places, side="right") - 1).tolist():
        ids = stacks.ids(stack).tolist()
        outermost = {function: place for place, frame in enumerate(ids) for function in frames[frame]}
        found: dict[int, int] = {}
        for place, frame in enumerate(ids):
            for index in candidates[frame]:
                if index in found or not _is_on(rules[index].lines, stacks, frame):
                    continue
                if _is_inside(insides[index], outermost, place):
                    found[index] = frame
        for index in _until_unconditional(sorted(found), rules):
            matches.setdefault(index, {})[stack] = found[index]
    return matches


def _is_on(lines: Sequence[tuple[int, int]], stacks: StackTable, frame: int) -> bool:
    """Whether a frame is on one of these lines; they may be none."""
    return not lines or any(first <= stacks.line[frame] <= last for first, last in lines)


def _is_inside(functions: Sequence[int], outermost: dict[int, int], place: int) -> bool:
    """Whether a frame further out is in one of the functions; they may be none."""
    return not functions or any(outermost.get(function, -1) > place for function in functions)


def _until_unconditional(found: Iterable[int], rules: Sequence[Rule]) -> list[int]:
    kept = []
    for index in found:
        kept.append(index)
        if not rules[index].looks_at_the_block:
            break
    return kept


def _functions_of_frames(stacks: StackTable, functions: Sequence[Function]) -> list[tuple[int, ...]]:
    """For each frame of a table the numbers of the functions it is in."""
    by_end: defaultdict[str, list[int]] = defaultdict(list)
    cpp: list[int] = []
    for number, function in enumerate(functions):
        if function.file == CPP:
            cpp.append(number)
        else:
            last = parts_of(function.file)[-1]
            by_end["*" if "*" in last else last].append(number)
    strings, sides = stacks.strings, frame_sides(stacks).tolist()
    of_file: dict[int, list[int]] = {}
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    found = []
    for side, *pair in zip(sides, stacks.filename.tolist(), stacks.name.tolist(), strict=True):
        filename, name = pair
        key = (filename, name)
        if key not in known:
            text = strings[name]
            if side == Side.CPP:
                known[key] = tuple(one for one in cpp if any(part in text for part in functions[one].names))
            else:
                if filename not in of_file:
                    path = strings[filename]
                    near = sorted([*by_end.get(parts_of(path)[-1], ()), *by_end.get("*", ())])
                    of_file[filename] = [one for one in near if is_file(path, functions[one].file)]
                known[key] = tuple(
                    one
                    for one in of_file[filename]
                    if functions[one].names in (("*",), (text,)) or text in functions[one].names
                )
        found.append(known[key])
    return found
