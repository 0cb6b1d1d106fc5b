"""The page of `memtrace zero` for people: the job, the table that sums, a sentence for every row that differs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memtrace.analysis.given import Given
from memtrace.analysis.zero import ASSUMED, ROUNDING, Comparison, Line, is_fused
from memtrace.api import Snapshot
from memtrace.attribution.theory import FOREACH_TEMP, ORDER, Setup, StagePlan, When, step_moments, terms, total
from memtrace.attribution.theory import plan as zero_plan
from memtrace.cli.options import Common
from memtrace.cli.output import Column, Page
from memtrace.units import format_bytes, in_unit, unit_of

_SMALL_SHARE = 0.001
"""Rows below this share of the whole are summed up in one."""
_TOLD_SHARE = 0.005
"""A row that differs by less than this share, of itself or of the whole, needs no sentence."""
_NONE = "-"


def write(opened: Snapshot, answer: Comparison, when: str, shared: Common) -> None:
    """A recording's page."""
    page = Page(shared.color)
    unit = _unit(shared, answer.peak_bytes)
    for index, sentence in enumerate(_opening(answer, when, shared)):
        page.line(sentence, style="bold" if index == 0 else "")
    page.line()
    if answer.setup is None:
        _measured(page, answer, unit)
    else:
        _table(page, answer, unit)
    whys = list(_whys(answer, shared))
    if whys:
        page.line()
        for why in whys:
            page.line(why)
    if answer.setup is not None and answer.phase != "step":
        page.line(_at_the_step(answer.setup, shared))
    if answer.is_zero:
        page.line()
        for line in _sources(answer):
            page.line(line)
    page.line()
    path = opened.data.path
    name = "FILE" if path == "-" else shlex.quote(path if not path.startswith("-") else f"./{path}")
    for index, command in enumerate(_next(answer, when)):
        page.line(f"{'next:' if index == 0 else '     '} memtrace {command.format(name)}", wrap=False)


def _unit(shared: Common, size: int) -> str:
    return {"auto": unit_of(size), "bytes": "B"}.get(shared.units, shared.units)


def count(number: int) -> str:
    """Parameters for people.

    >>> count(12853473280), count(124439808), count(768)
    ('12.85 B', '124.44 M', '768')
    """
    for letter, factor in (("B", 10**9), ("M", 10**6)):
        if number >= factor:
            return f"{number / factor:,.2f} {letter}"
    return f"{number:,}"


def _opening(answer: Comparison, when: str, shared: Common) -> Iterator[str]:
    parts = [answer.headline]
    if answer.is_zero:
        head, _, rest = answer.headline.partition(", DeepSpeed")
        parts = [f"ZeRO-{answer.stage}" if answer.stage is not None else head.split(",")[0]]
        if answer.params is not None:
            parts.append(f"Ψ = {count(answer.params)}")
        if answer.world is not None:
            parts.append(f"N = {answer.world:,}")
        parts += [part for part in (answer.dtype, answer.optimizer) if part]
        parts += [f"DeepSpeed{rest}"] if rest else []
    yield ", ".join(parts)
    step = "" if answer.step is None else f" of step {answer.step}"
    phase = "the optimizer's part" if answer.phase == "step" else answer.phase
    where = f" in {phase}{step}" if answer.phase else ""
    name = {"peak": "Peak", "end": "End", "oom": "Out of memory"}.get(when, "Then")
    text = f"{name}: {format_bytes(answer.peak_bytes, shared.units)} allocated{where} (event {answer.event:,})"
    if answer.setup is None:
        yield f"{text}."
        return
    paper = answer.paper_bytes
    over = answer.peak_bytes - paper
    side = "more" if over >= 0 else "less"
    text += f": {format_bytes(abs(over), shared.units)} {side} than the paper's {format_bytes(paper, shared.units)}"
    largest = max(answer.lines, key=_excess, default=None)
    if largest is not None and over > 0 and _excess(largest) * 4 > over:
        text += f", {format_bytes(_excess(largest), shared.units)} of it {_named(largest)}"
    yield f"{text}."


def _excess(line: Line) -> int:
    return line.measured_bytes - (line.paper_bytes or 0)


def _named(line: Line) -> str:
    return f"{line.name} ({line.label})" if line.label and line.name != ROUNDING else line.name


def _cells(name: str, formula: str, figures: Sequence[int | None], unit: str) -> list[str]:
    paper, kept, measured, difference = figures
    sign = _NONE if difference is None else _signed(difference, unit)
    return [
        name,
        formula,
        *(_NONE if one is None else in_unit(one, unit) for one in (paper, kept, measured)),
        sign,
    ]


def _signed(size: int, unit: str) -> str:
    text = in_unit(size, unit).removeprefix("-")
    return text if not text.strip("0.,") else f"{'+' if size > 0 else '-'}{text}"


def _row(line: Line, unit: str) -> list[str]:
    figures = (line.paper_bytes, line.implementation_bytes, line.measured_bytes, line.difference)
    return _cells(line.name, line.formula, figures, unit)


def _sum(name: str, lines: Sequence[Line], unit: str, residual: int = 0) -> list[str]:
    papers = [line.paper_bytes for line in lines if line.paper_bytes is not None]
    kept = [line.implementation_bytes for line in lines if line.implementation_bytes is not None]
    measured = sum(line.measured_bytes for line in lines) + residual
    figures = (sum(papers) if papers else None, sum(kept) if kept else None, measured, measured - sum(kept))
    return _cells(name, "", figures, unit)


def _table(page: Page, answer: Comparison, unit: str) -> None:
    states = [line for line in answer.lines if line.is_state]
    passing = [line for line in answer.lines if not line.is_state]
    shown = [line for line in passing if _large(line, answer)]
    rest = [line for line in passing if not _large(line, answer)]
    rows = [_row(line, unit) for line in states if line.paper_bytes or line.measured_bytes or line.implementation_bytes]
    rows.append(_sum("resident", states, unit))
    rows += [_row(line, unit) for line in shown]
    if rest:
        rows.append(_sum(f"{len(rest)} more", rest, unit))
    if answer.residual_bytes:
        rows.append(_cells("not attributed", "", (None, None, answer.residual_bytes, answer.residual_bytes), unit))
    rows.append(_sum("allocated", answer.lines, unit, answer.residual_bytes))
    titles = [f"term ({unit})", "", "paper", "DeepSpeed", "measured", "difference"]
    columns = [Column(title, right=index > 1) for index, title in enumerate(titles)]
    page.table(columns, rows, dim_rows=frozenset({len(rows) - 2 - bool(answer.residual_bytes)} if rest else ()))


def _large(line: Line, answer: Comparison) -> bool:
    return max(line.measured_bytes, line.implementation_bytes or 0) >= _SMALL_SHARE * answer.peak_bytes


def _measured(page: Page, answer: Comparison, unit: str) -> None:
    """Without theory: the terms as measured."""
    rows = [
        [line.name, in_unit(line.measured_bytes, unit), f"{100 * line.measured_bytes / (answer.peak_bytes or 1):.1f}"]
        for line in answer.lines
    ]
    if answer.residual_bytes:
        share = f"{100 * answer.residual_bytes / answer.peak_bytes:.1f}"
        rows.append(["not attributed", in_unit(answer.residual_bytes, unit), share])
    rows.append(["allocated", in_unit(answer.peak_bytes, unit), "100.0"])
    page.table([Column("term"), Column(unit, right=True), Column("%", right=True)], rows)


def _whys(answer: Comparison, shared: Common) -> Iterator[str]:
    if answer.setup is None:
        return
    for line in answer.lines:
        change = line.difference
        against_paper = (line.implementation_bytes or 0) - (line.paper_bytes or 0)
        if max(abs(change), abs(against_paper)) < _TOLD_SHARE * answer.peak_bytes and not _is_off(line):
            continue
        told = abs(change) >= _TOLD_SHARE * answer.peak_bytes or _is_off(line)
        amount = f" {'+' if change > 0 else '-'}{format_bytes(abs(change), shared.units)}" if told else ""
        yield f"{line.name}{amount}: {line.why}"


def _at_the_step(setup: Setup, shared: Common) -> str:
    """What theory says of the moment that the paper leaves out."""
    states, (more, why) = total(terms(setup, When.BETWEEN)), max(step_moments(setup))
    whole = format_bytes(states + more, shared.units)
    return (
        f"In the optimizer's part of a step, {format_bytes(more, shared.units)} come on top of the "
        f"{format_bytes(states, shared.units)} that stay: {whole}. {why}"
    )


def _is_off(line: Line) -> bool:
    return (
        line.is_state
        and line.implementation_bytes is not None
        and abs(line.difference) > _TOLD_SHARE * max(line.implementation_bytes, 1)
    )


def _sources(answer: Comparison) -> Iterator[str]:
    for key, name in (
        ("params", "Ψ"),
        ("world", "N"),
        ("dtype", "dtype"),
        ("optimizer", "optimizer"),
        ("stage", "stage"),
    ):
        value = getattr(answer, key)
        if key in answer.sources:
            shown = "not known" if value is None else f"{value:,}" if isinstance(value, int) else value
            yield f"{name}: {shown}; {answer.sources[key]}."


def _next(answer: Comparison, when: str) -> Iterator[str]:
    place = when if when in ("peak", "end", "oom") else answer.event
    if not answer.is_zero:
        yield f"blame {{}} --at {place}"
        yield f"zero --params {answer.params or '13e9'} --world 8"
        return
    if answer.lacking:
        yield "zero {} --world 8"
    yield f"blame {{}} --at {place}"
    yield f"blame {{}} --at {place} --by stack"
    if when == "peak":
        yield "zero {} --at end"
    if answer.params is not None:
        yield f"zero --params {answer.params} --world {(answer.world or 8) * 2}"


def write_plan(given: Given, setup: Setup, stages: Sequence[StagePlan], shared: Common) -> None:
    """A plan's page: all stages side by side, and why, of the stage asked for."""
    page = Page(shared.color)
    unit = _unit(shared, max(plan.resident for plan in stages))
    page.line(
        f"Plan for one rank: Ψ = {count(setup.params)} parameters, N = {setup.world:,}, "
        f"{given.dtype or ASSUMED['dtype']}, {given.optimizer or ASSUMED['optimizer']}",
        style="bold",
    )
    page.line()
    names = {term.name for plan in stages for term in plan.terms}
    rows = [["the paper's sum", *(in_unit(plan.paper, unit) for plan in stages)]]
    rows += [[name, *(_plan_cell(plan, name, unit) for plan in stages)] for name in ORDER if name in names]
    rows.append(["between steps", *(in_unit(plan.resident, unit) for plan in stages)])
    rows.append(["in backward", *(in_unit(plan.backward, unit) for plan in stages)])
    rows.append(["in the step", *(in_unit(plan.step, unit) for plan in stages)])
    titles = [
        f"term ({unit})",
        *(f"ZeRO-{plan.stage}" for plan in stages),
    ]
    page.table([Column(title, right=index > 0) for index, title in enumerate(titles)], rows)
    page.line()
    for line in _plan_notes(given, setup, stages, shared):
        page.line(line)
    page.line()
    page.line("next: memtrace zero SNAPSHOT", wrap=False)
    if given.stage is None:
        page.line(f"      memtrace zero --params {setup.params} --world {setup.world} --stage 3", wrap=False)


def _plan_cell(plan: StagePlan, name: str, unit: str) -> str:
    term = next((term for term in plan.terms if term.name == name), None)
    return _NONE if term is None or term.kept is None else in_unit(term.kept, unit)


def _plan_notes(given: Given, setup: Setup, stages: Sequence[StagePlan], shared: Common) -> Iterator[str]:
    chosen = next((plan for plan in stages if plan.stage == given.stage), None)
    asked = 3 if given.stage is None else given.stage
    if chosen is not None:
        yield f"ZeRO-{chosen.stage}, term by term:"
        for term in chosen.terms:
            if term.kept:
                bound = "at most " if term.at_most else ""
                yield f"{term.name}, {bound}{format_bytes(term.kept, shared.units)}: {term.why}"
        yield ""
    yield (
        "Sums of what ZeRO keeps. Activations, logits, library workspaces and fragmentation come on top, in backward "
        "most of all: record a step to see them."
    )
    if is_fused(given) and setup.state_bytes and not setup.knobs.offload_optimizer:
        unfused = next(plan for plan in zero_plan(replace(setup, temp_bytes=FOREACH_TEMP)) if plan.stage == asked)
        fused = next(plan for plan in stages if plan.stage == asked)
        if unfused.step > fused.step:
            yield (
                f"DeepSpeed's own optimizer (fused) is assumed: one of torch's that is not fused takes "
                f"{format_bytes(unfused.step - fused.step, shared.units)} more in the step of ZeRO-{asked}."
            )
    if given.stage in (None, 3):
        size = format_bytes(setup.param_bytes * setup.params, shared.units)
        yield (
            f"ZeRO-3 with a model built outside zero.Init and DeepSpeed before 0.19.4: up to {size} more in backward, "
            "as autograd holds on to gathered weights."
        )
    if not setup.sized:
        yield (
            "Sizes of single parameters are not known (--model-config tells them): padding, parameters that stay "
            "whole, and twice the largest one among those gathered come on top."
        )
