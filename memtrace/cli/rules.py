"""`memtrace rules`: the rules that say what memory is for, each with its explanation."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from memtrace.cli import options
from memtrace.errors import QuestionError
from memtrace.units import format_bytes, plural

if TYPE_CHECKING:
    from memtrace.attribution.rule import Rule
    from memtrace.attribution.user_rules import Origin
    from memtrace.timeline.callsites import Function

LIBRARIES = ("deepspeed", "fsdp", "torch", "transformers", "user")
EXAMPLES = """\b
Examples:
  memtrace rules
  memtrace rules deepspeed.zero3.fetch       one rule, with all it looks at
  memtrace rules param.retained              the rules that may give a category
  memtrace rules --library torch
  memtrace rules --rules moe.toml --library user
  memtrace rules --json"""

_LIBRARY_OF = {
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "ddp": "fsdp",
    "transformers": "transformers",
    "accelerate": "transformers",
    "peft": "transformers",
}
"""First part of an id -> library; the rest is torch's, C++ and the script's own code included."""

_WIDEST = 100
_PIPE_WIDTH = 80
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Listed:
    """A rule, and where it is written if it is the user's."""

    rule: Rule
    library: str
    origin: Origin | None


@click.command("rules", epilog=EXAMPLES)
@click.argument("ids", nargs=-1, metavar="[ID|CATEGORY]...")
@click.option("--library", type=click.Choice(LIBRARIES), help="Only the rules of one library, or your own.")
@options.rules_option
@click.option("--json", is_flag=True, help="One JSON document.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colour (default: on a terminal, unless NO_COLOR is set).",
)
@click.option("-q", "--quiet", is_flag=True, help="No notes on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an internal error.")
def command(
    ids: tuple[str, ...],
    library: str | None,
    rules: tuple[str, ...],
    json: bool,
    color: str,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 - `diagnostics.guarded` looks at the command line itself
) -> None:
    """The rules that say what memory is for: where each looks, what decides, and why.

    With ID all about one rule, with CATEGORY (act.saved) all that may give it.

    Your own rules come first: those of --rules, then [tool.memtrace] of the nearest pyproject.toml (docs/rules.md).
    """
    listed = chosen(every_rule(options.user_rules(rules, quiet=quiet)), library, ids)
    if json:
        from memtrace.cli import output

        output.write_document("rules", None, {"rules": [document(one) for one in listed]}, ())
    else:
        _write_text(listed, color, in_full=bool(ids) and {one.rule.id for one in listed} <= set(ids))


def every_rule(user_rules: Any) -> list[Listed]:
    """The user's own (`UserRules` or None), then ours."""
    from memtrace.attribution.rules import ALL

    pairs = () if user_rules is None else zip(user_rules.rules, user_rules.origins, strict=True)
    own = [Listed(rule, "user", origin) for rule, origin in pairs]
    return own + [Listed(rule, _LIBRARY_OF.get(rule.id.split(".")[0], "torch"), None) for rule in ALL]


def chosen(listed: Sequence[Listed], library: str | None, ids: Sequence[str]) -> list[Listed]:
    """The rules asked for, in the order of `ids` where those are given. Raises QuestionError."""
    if library is not None:
        listed = [one for one in listed if one.library == library]
    if not ids:
        return list(listed)
    found: dict[str, Listed] = {}
    for name in ids:
        named = [one for one in listed if name == one.rule.id]
        if not named and name != "unknown":
            named = [one for one in listed if name in one.rule.categories]
        if not named:
            where = "memtrace" if library is None else f"the rules of {library}"
            raise QuestionError(f"no rule {name!r} in {where}", hint=_nearest(name, [one.rule.id for one in listed]))
        found |= {one.rule.id: one for one in named}
    return list(found.values())


def _nearest(name: str, known: Sequence[str]) -> str:
    from memtrace.attribution.categories import CATEGORIES, LABELS

    if name in CATEGORIES:
        return f"It is a category ({LABELS[name]}), and none of these rules gives it: docs/rules.md tells of each."
    within = [one for one in known if one.startswith(name) or name in one.split(".")]
    near = (within or difflib.get_close_matches(name[:200], known, n=5, cutoff=0.5))[:5]
    return f"The nearest: {', '.join(near)}." if near else "memtrace rules lists them all."


# The document.


def document(one: Listed) -> dict[str, Any]:
    """One element of `data.rules`."""
    from memtrace.attribution.rule import BY_TEXT
    from memtrace.timeline import PHASES

    rule = one.rule
    return {
        "id": rule.id,
        "library": one.library,
        "category": rule.category,
        "label": rule.label,
        "file": rule.where.file if rule.where.names else None,
        "functions": list(rule.where.names),
        "calls": [_function(function) for function in rule.child],
        "inside": [_function(function) for function in rule.inside],
        "outermost": rule.outermost,
        "direct": rule.direct,
        "rank": rule.rank.name.lower(),
        "decided_by": rule.by.name.lower(),
        "decides": BY_TEXT[rule.by],
        "sites": [
            {
                "category": site.category,
                "label": site.label,
                "lines": [list(lines) for lines in site.lines],
                "optional": site.optional,
            }
            for site in rule.sites
        ],
        "min_bytes": rule.min_bytes,
        "max_bytes": rule.max_bytes,
        "phases": [PHASES[phase] for phase in rule.phases],
        "lines": [list(span) for span in rule.lines],
        "was": list(rule.was),
        "since": rule.since,
        "until": rule.until,
        "knob": rule.knob,
        "note": rule.note,
        "source": None if one.origin is None else {"file": one.origin.file, "line": one.origin.line},
    }


def _function(function: Function) -> dict[str, Any]:
    return {"file": function.file, "functions": list(function.names)}


# The page.


def _write_text(listed: Sequence[Listed], color: str, *, in_full: bool) -> None:
    from memtrace.cli.output import Page

    page = Page(color)
    width = min(max(page.width, _WIDEST // 4), _WIDEST) if sys.stdout.isatty() else _PIPE_WIDTH
    if not in_full:
        for line in textwrap.wrap(_sentence(listed), width):
            page.line(line, "bold")
        page.line()
    for number, one in enumerate(listed):
        if number:
            page.line()
        lines = described(one, width, in_full=in_full)
        page.line(next(lines), "bold")
        for line in lines:
            page.line(line)
    if not in_full and listed:
        page.line()
        page.line(f"next: memtrace rules {listed[0].rule.id}", wrap=False)


def _sentence(listed: Sequence[Listed]) -> str:
    if not listed:
        return "No rules of your own: docs/rules.md shows how to write them."
    counts = Counter(one.library for one in listed)
    parts = (
        ", ".join(f"{count} {library}" for library, count in counts.items()) if len(counts) > 1 else listed[0].library
    )
    return (
        f"{plural(len(listed), 'rule')} ({parts}). Of a stack the innermost frame that a rule knows decides; "
        "your own rules come first, in their order."
    )


def described(one: Listed, width: int, *, in_full: bool) -> Iterator[str]:
    """The lines of one rule: id and category, then what it looks at."""
    rule = one.rule
    heading = f"{rule.id}  {rule.category}{f'  {rule.label}' if rule.label else ''}"
    yield from _wrapped(heading, width, "")
    for text in _facts(one) if in_full else _short_facts(one):
        yield from _wrapped(text, width, _INDENT)


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Lines of at most `width`; those after the first are indented further."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short_facts(one: Listed) -> Iterator[str]:
    rule = one.rule
    yield f"where: {_place(rule.where)}"
    if rule.rank >= 0:
        yield _decides(rule)
    yield from _conditions(rule)
    yield from _releases(rule)
    if rule.knob:
        yield f"setting: {rule.knob}"
    if rule.note:
        yield rule.note
    if one.origin is not None:
        yield f"from {one.origin.file}, line {one.origin.line}"


def _facts(one: Listed) -> Iterator[str]:
    """Everything about one rule, as sentences."""
    from memtrace.attribution.categories import LABELS

    rule = one.rule
    if rule.note:
        yield rule.note
    if rule.category in LABELS:
        yield f"category: {LABELS[rule.category]}"
    yield f"where: {_place(rule.where)}"
    for text, functions in (("and it calls", rule.child), ("and it was called, directly or not, by", rule.inside)):
        if functions:
            yield f"{text}: {' or '.join(_place(function) for function in functions)}"
    if rule.outermost:
        yield "and no frame further out is in it"
    if rule.direct:
        yield "and no other function of the same package further in"
    yield from _conditions(rule)
    if rule.where.names:
        yield _rank(rule)
    if rule.rank >= 0:
        yield _decides(rule)
    if rule.sites:
        yield "the call sites in that function, in their order in the file (line numbers differ between releases):"
        for number, site in enumerate(rule.sites, 1):
            yield f"{number}. {_site(site.category, site.label, site.lines, optional=site.optional)}"
    yield from _releases(rule)
    if rule.knob:
        yield f"setting: {rule.knob}"
    if one.origin is not None:
        yield f"from {one.origin.file}, line {one.origin.line}"


def _decides(rule: Rule) -> str:
    from memtrace.attribution.rule import BY_TEXT

    return f"decided by {BY_TEXT[rule.by] if rule.where.names else 'more than a stack: size, order, phase'}"


def _place(function: Function) -> str:
    """`file: function, function`."""
    from memtrace.attribution.rules.cpp import CPP

    if not function.names:
        return "no frame of its own"
    names = ", ".join(function.names)
    if function.file == CPP:
        return f"C++ frames with {names} in their name"
    return f"{function.file}: {'any function' if function.names == ('*',) else names}"


def _site(category: str, label: str, lines: Sequence[tuple[int, int]], *, optional: bool) -> str:
    parts = [category, label, _spans(lines) if lines else "", "not in every job" if optional else ""]
    return "; ".join(part for part in parts if part)


def _spans(lines: Sequence[tuple[int, int]]) -> str:
    return "line " + ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in lines)


def _conditions(rule: Rule) -> Iterator[str]:
    """What a rule of the user's asks of the block."""
    from memtrace.timeline import PHASES

    if rule.min_bytes:
        yield f"only blocks of {format_bytes(rule.min_bytes)} and more"
    if rule.max_bytes is not None:
        yield f"only blocks of at most {format_bytes(rule.max_bytes)}"
    if rule.phases:
        yield f"only blocks born in {' or '.join(PHASES[phase] for phase in rule.phases)}"
    if rule.lines:
        yield f"only on {_spans(rule.lines)}"
    if rule.was:
        yield f"only what memtrace itself takes for {' or '.join(rule.was)}"


def _releases(rule: Rule) -> Iterator[str]:
    if rule.since or rule.until:
        yield "releases: " + " ".join(
            text for text in (rule.since and f"from {rule.since}", rule.until and f"until {rule.until}") if text
        )


def _rank(rule: Rule) -> str:
    from memtrace.attribution.rule import Rank

    return {
        Rank.USER: "yours: it decides before all of ours, and the first of yours before the others",
        Rank.DECIDES: "it decides wherever its frame is the innermost that a rule knows",
        Rank.FALLBACK: "it decides where no more exact rule matches the stack",
        Rank.MODULE: "it decides where only a module's call is known of the stack",
        Rank.LAST: "it decides where no other rule matches the stack",
    }[rule.rank]
