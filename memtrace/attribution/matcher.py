"""Which rule decides each stack. Plain Python: stacks are few (a recording of three million events has 170)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Lifetimes
from memtrace.attribution.rule import By, Rank, Rule, Site
from memtrace.attribution.rules.cpp import CPP
from memtrace.model import StackTable
from memtrace.places import Side, is_plumbing, parts_of
from memtrace.timeline.callsites import Function, FunctionIndex, any_in_stack, frame_sides, python_depth

NO_RULE = -1
_SCALAR = 16
"""Bytes of a number or two: the sites of a function are those that make something."""
_AUTOCAST = "at::autocast::cached_cast"


@dataclass(frozen=True, slots=True, eq=False)
class StackVerdicts:
    """One row a stack. `rule` indexes the rules (-1: none), `frame` is the deciding frame's id (-1: none), `site` the
    call site of that rule (-1: it has none), `sure` whether the stack leaves no doubt.

    `python` counts Python frames; `is_own` whether the innermost telling frame is the program's own; `autocast`
    whether a C++ frame says that autocast made it; `has_cpp` whether the stack has C++ frames; `site_lines` maps a
    rule to the sites of the lines seen.
    """

    rule: NDArray[np.int16]
    frame: NDArray[np.int32]
    site: NDArray[np.int8]
    sure: NDArray[np.bool_]
    python: NDArray[np.int64]
    autocast: NDArray[np.bool_]
    is_linear: NDArray[np.bool_]
    has_cpp: NDArray[np.bool_]
    site_lines: dict[int, dict[int, int]]


@dataclass(slots=True)
class _Match:
    rule: int
    frame: int
    line: int


class _Matcher:
    def __init__(self, stacks: StackTable, rules: Sequence[Rule]) -> None:
        self.stacks, self.rules = stacks, rules
        self.sides = frame_sides(stacks)
        functions = [
            function
            for rule in rules
            for function in (rule.where, *rule.child, *rule.inside)
            if function.names and function.file != CPP
        ]
        self.number = {function: number for number, function in enumerate(dict.fromkeys(functions))}
        in_functions = FunctionIndex(list(self.number)).frames(stacks)
        self.functions = [frozenset(found) for found in in_functions]
        by_function: dict[int, list[int]] = {}
        for index, rule in enumerate(rules):
            if rule.where in self.number:
                by_function.setdefault(self.number[rule.where], []).append(index)
        of_cpp = self._cpp_rules()
        names, sides = stacks.name.tolist(), self.sides.tolist()
        self.candidates = [
            of_cpp.get(names[frame], ())
            if sides[frame] == Side.CPP
            else tuple(sorted({rule for function in found for rule in by_function.get(function, ())}))
            for frame, found in enumerate(in_functions)
        ]
        self.plumbing = [
            side == Side.CPP or is_plumbing(stacks.strings[filename], stacks.strings[name])
            for side, filename, name in zip(sides, stacks.filename.tolist(), names, strict=True)
        ]
        self.has_candidates = np.fromiter((bool(found) for found in self.candidates), np.bool_, len(self.candidates))

    def _cpp_rules(self) -> dict[int, tuple[int, ...]]:
        """Name id of a C++ frame -> the rules it matches."""
        needles = [
            (needle, index)
            for index, rule in enumerate(self.rules)
            if rule.where.file == CPP
            for needle in rule.where.names
        ]
        found: dict[int, tuple[int, ...]] = {}
        for name in np.unique(self.stacks.name[self.sides == Side.CPP]).tolist():
            text = self.stacks.strings[name]
            matched = sorted({index for needle, index in needles if needle in text})
            if matched:
                found[name] = tuple(matched)
        return found

    def match(self, frames: list[int]) -> _Match | None:
        """The rule that decides a stack (frame ids, innermost first)."""
        best: _Match | None = None
        best_rank = Rank.LAST + 1
        for place, frame in enumerate(frames):
            for index in self.candidates[frame]:
                rule = self.rules[index]
                if rule.rank < best_rank and self._holds(rule, frames, place):
                    best, best_rank = _Match(index, frame, int(self.stacks.line[frame])), int(rule.rank)
                    break
            if best_rank == Rank.DECIDES:
                break
        return best

    def _holds(self, rule: Rule, frames: list[int], place: int) -> bool:
        if rule.child and not self._child_is(rule.child, frames, place):
            return False
        if rule.inside and not any(self._is_in(frame, rule.inside) for frame in frames[place + 1 :]):
            return False
        if rule.outermost and any(self._is_in(frame, (rule.where,)) for frame in frames[place + 1 :]):
            return False
        return not rule.direct or not self._calls_its_own(rule, frames, place)

    def _is_in(self, frame: int, functions: Sequence[Function]) -> bool:
        return any(self.number[function] in self.functions[frame] for function in functions)

    def _child_is(self, functions: Sequence[Function], frames: list[int], place: int) -> bool:
        for frame in reversed(frames[:place]):
            if self._is_in(frame, functions):
                return True
            if not self.plumbing[frame]:
                return False
        return False

    def _calls_its_own(self, rule: Rule, frames: list[int], place: int) -> bool:
        """Whether another function of the rule's package stands further in."""
        package = parts_of(rule.where.file)[0]
        strings, filename = self.stacks.strings, self.stacks.filename
        return any(
            not self.plumbing[frame] and package in parts_of(strings[filename[frame]]) for frame in frames[:place]
        )


def match_stacks(stacks: StackTable, rules: Sequence[Rule], blocks: Lifetimes) -> StackVerdicts:
    """The rule that decides each stack, and where. Call sites of a function are those that made some of `blocks`."""
    matcher = _Matcher(stacks, rules)
    count = len(stacks)
    rule, frame = np.full(count, NO_RULE, np.int16), np.full(count, -1, np.int32)
    line = np.zeros(count, np.int64)
    for stack, ids in _with_candidates(stacks, matcher.has_candidates):
        found = matcher.match(ids)
        if found is not None:
            rule[stack], frame[stack], line[stack] = found.rule, found.frame, found.line
    site, sure, lines = _sites(rules, rule, line, blocks)
    _evidence_of_module_calls(matcher, rules, rule, frame)
    return StackVerdicts(
        rule=rule,
        frame=frame,
        site=site,
        sure=sure,
        python=python_depth(stacks, matcher.sides),
        autocast=_with_name(stacks, matcher.sides, _AUTOCAST),
        is_linear=_linear(matcher),
        has_cpp=any_in_stack(stacks, matcher.sides == Side.CPP),
        site_lines=lines,
    )


def _with_candidates(stacks: StackTable, wanted: NDArray[np.bool_]) -> Iterator[tuple[int, list[int]]]:
    """The stacks that have at least one frame that some rule knows."""
    for stack in np.flatnonzero(any_in_stack(stacks, wanted)).tolist():
        yield stack, stacks.ids(stack).tolist()


def _with_name(stacks: StackTable, sides: NDArray[np.uint8], needle: str) -> NDArray[np.bool_]:
    """For each stack whether a C++ frame's name has `needle` in it."""
    named = [name for name in np.unique(stacks.name[sides == Side.CPP]).tolist() if needle in stacks.strings[name]]
    return any_in_stack(stacks, np.isin(stacks.name, named) & (sides == Side.CPP))


_PRODUCTS = (
    Function("torch/nn/modules/linear.py", ("forward",)),
    Function("torch/nn/modules/conv.py", ("forward", "_conv_forward")),
    Function("torch/nn/modules/sparse.py", ("forward",)),
    Function("torch/nn/functional.py", ("linear", "multi_head_attention_forward", "bilinear", "embedding")),
    Function("transformers/pytorch_utils.py", ("forward",)),
)
"""What multiplies by a weight, and so may have autocast copy it."""


def _linear(matcher: _Matcher) -> NDArray[np.bool_]:
    found = FunctionIndex(_PRODUCTS).frames(matcher.stacks)
    marked = np.fromiter((bool(one) for one in found), np.bool_, len(found))
    stacks = matcher.stacks
    inner = np.zeros(len(stacks), np.bool_)
    for stack in np.flatnonzero(any_in_stack(stacks, marked)).tolist():
        for frame in stacks.ids(stack).tolist():
            if marked[frame] or not matcher.plumbing[frame]:
                inner[stack] = marked[frame]
                break
    return inner


def _sites(
    rules: Sequence[Rule], rule: NDArray[np.int16], line: NDArray[np.int64], blocks: Lifetimes
) -> tuple[NDArray[np.int8], NDArray[np.bool_], dict[int, dict[int, int]]]:
    """The call site of each stack whose rule has several; whether it is beyond doubt; and all lines seen."""
    site = np.full(len(rule), -1, np.int8)
    sure = np.ones(len(rule), np.bool_)
    seen: dict[int, dict[int, int]] = {}
    largest = _largest(blocks, np.array([bool(one.sites) for one in rules] + [False])[rule])
    for index in np.unique(rule[rule != NO_RULE]).tolist():
        if not rules[index].sites:
            continue
        members = (rule == index) & (largest > _SCALAR)
        places, certain = sites_of_lines(sorted(set(line[members].tolist())), rules[index].sites, rules[index].gap)
        seen[index] = places
        rows = np.flatnonzero(members)
        site[rows] = [places[number] for number in line[rows].tolist()]
        sure[members] = certain
    return site, sure, seen


def sites_of_lines(lines: list[int], sites: Sequence[Site], gap: int) -> tuple[dict[int, int], bool]:
    """Which site each line is, and whether that is beyond doubt. `lines` are sorted and distinct.

    Lines at most `gap` apart are one site. As many as there are sites, or as many without some optional ones (the
    earlier stay): they are in the source's order. Else, or where a known line says otherwise, known lines name them.

    >>> sites_of_lines([362, 460], (Site("demand"), Site("prefetch")), gap=8)
    ({362: 0, 460: 1}, True)
    """
    groups: list[list[int]] = []
    for line in lines:
        if groups and line - groups[-1][-1] <= gap:
            groups[-1].append(line)
        else:
            groups.append([line])
    if len(groups) == len(sites):
        return _placed(groups, range(len(sites))), True
    known = [_known_site(group, sites) for group in groups]
    named = [number for number in known if number is not None]
    if len(named) == len(groups) and named == sorted(set(named)):
        return _placed(groups, named), True
    chosen = list(range(len(sites)))
    for number in reversed(range(len(sites))):
        if len(chosen) > len(groups) and sites[number].optional and len(groups) < len(sites):
            chosen.remove(number)
    chosen += [chosen[-1]] * (len(groups) - len(chosen))
    return _placed(groups, chosen), False


def _largest(blocks: Lifetimes, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Bytes of the largest block of each wanted stack; 0 of the others."""
    largest = np.zeros(len(wanted), np.int64)
    rows = np.flatnonzero(np.append(wanted, False)[blocks.stack])
    np.maximum.at(largest, blocks.stack[rows], blocks.requested[rows])
    return largest


def _placed(groups: Sequence[Sequence[int]], numbers: Sequence[int]) -> dict[int, int]:
    return {line: number for number, group in zip(numbers, groups, strict=False) for line in group}


def _known_site(group: Sequence[int], sites: Sequence[Site]) -> int | None:
    """The one site that some release has at these lines."""
    found = {
        number
        for number, site in enumerate(sites)
        for first, last in site.lines
        if any(first <= line <= last for line in group)
    }
    return found.pop() if len(found) == 1 else None


def _evidence_of_module_calls(
    matcher: _Matcher, rules: Sequence[Rule], rule: NDArray[np.int16], frame: NDArray[np.int32]
) -> None:
    """A module's call is plumbing; what it called is the evidence a person wants to see."""
    for stack in np.flatnonzero(rule != NO_RULE).tolist():
        if rules[rule[stack]].rank != Rank.MODULE:
            continue
        inner = -1
        for one in matcher.stacks.ids(stack).tolist():
            if one == frame[stack]:
                break
            if not matcher.plumbing[one]:
                inner = one
        if inner >= 0:
            frame[stack] = inner


def logits_callers(stacks: StackTable, verdicts: StackVerdicts, rules: Sequence[Rule]) -> NDArray[np.bool_]:
    """Stacks of linear layers called directly by a function that calls a loss further down: the logits."""
    plumbing: dict[int, bool] = {}
    is_loss = np.array([rule.by == By.LOGITS and rule.category == "act.logits" for rule in rules] + [False])

    def caller(stack: int, inner: int) -> tuple[int, tuple[int, ...]]:
        """The function that called a frame, and all that called it: a name alone (`forward`) is many functions."""
        ids = stacks.ids(stack).tolist()
        for place in range(ids.index(inner) + 1, len(ids)):
            one = ids[place]
            if one not in plumbing:
                plumbing[one] = is_plumbing(stacks.strings[stacks.filename[one]], stacks.strings[stacks.name[one]])
            if not plumbing[one]:
                return int(stacks.line[one]), (int(stacks.filename[one]), int(stacks.name[one]), *ids[place + 1 :])
        return 0, ()

    losses: dict[tuple[int, ...], int] = {}
    for stack in np.flatnonzero(is_loss[verdicts.rule]).tolist():
        line, place = caller(stack, int(verdicts.frame[stack]))
        losses[place] = max(losses.get(place, 0), line)
    losses.pop((), None)
    heads = np.zeros(len(stacks), np.bool_)
    if not losses:
        return heads
    modules = np.array([rule.rank == Rank.MODULE for rule in rules] + [False])
    linear = FunctionIndex([Function("torch/nn/modules/linear.py", ("forward",))])
    frames = [bool(found) for found in linear.frames(stacks)]
    for stack in np.flatnonzero(modules[verdicts.rule] & verdicts.is_linear).tolist():
        inner = next((one for one in stacks.ids(stack).tolist() if frames[one]), None)
        line, place = (0, ()) if inner is None else caller(stack, inner)
        heads[stack] = line < losses.get(place, 0)
    return heads
