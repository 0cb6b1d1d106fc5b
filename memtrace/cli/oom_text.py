"""The page of `memtrace oom` for people: what happened, why, who asked, who holds the rest, where to go next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from memtrace.analysis.cures import Cures
from memtrace.analysis.frames import display_frame, library_path, own_frames
from memtrace.analysis.oom import AskedBy, Oom
from memtrace.analysis.oom_words import Words
from memtrace.api import Snapshot
from memtrace.cli import blame_text
from memtrace.cli.options import Common
from memtrace.cli.output import Column, Page
from memtrace.model import Frame
from memtrace.timeline import in_words
from memtrace.units import format_bytes, format_seconds, plural

_OWN_FRAMES = 3
_LIBRARY_FRAMES = 3
_NODE = re.compile(r"\b(\w+Backward\d*)::apply\b")


class Report:
    """`answers` are requests that failed, the last of them told in full, or the one that is supposed at `when`.
    `tried`: settings that might have served it."""

    def __init__(
        self,
        opened: Snapshot,
        answers: Sequence[Oom],
        shared: Common,
        top: int,
        *,
        rules: tuple[str, ...],
        when: str,
        tried: Cures | None = None,
    ) -> None:
        self.opened, self.shared, self.top, self.rules, self.tried = opened, shared, top, rules, tried
        self.answer, self.earlier = answers[-1], answers[:-1]
        self.when = when if self.answer.is_hypothetical else "oom"
        self.page = Page(shared.color)

    def write(self) -> None:
        """Prints the page."""
        page, answer = self.page, self.answer
        words = Words(answer, self.shared.units, rank=self._rank(), at_peak=self.when == "peak")
        page.line(words.headline(), style="bold")
        for line in words.reasons():
            page.line(line)
        if not answer.is_hypothetical:
            for line in self._asked_by(answer.asked_by):
                page.line(line)
        for by in ("category", "stack"):
            page.line()
            self._holds(by)
        page.line()
        for line in (words.before(), *_would_fit(self.tried, self.shared.units)):
            page.line(line)
        if self.earlier:
            page.line()
            self._earlier()
        page.line()
        for index, step in enumerate(self._next()):
            page.line(f"{'next:' if index == 0 else '     '} memtrace {step}", wrap=False)

    def _rank(self) -> int | None:
        """The rank, in a job of several."""
        source = self.opened.recording
        return source.rank if source is not None and (source.world or 1) > 1 else None

    def _holds(self, by: str) -> None:
        """Who holds the allocated bytes: the table of `memtrace blame`."""
        place = self.answer.place
        held = self.opened.blame(place.event, "allocated", by, place.device)
        tables = blame_text.Report(
            self.opened,
            held,
            self.shared,
            self.when,
            self.top,
            rules=self.rules,
            why=False,
            full_stack=False,
            cpp=False,
        )
        tables.table(held)

    def _asked_by(self, asked: AskedBy) -> Iterator[str]:
        attribution = self.opened.attribution(self.answer.place.device)
        labels = dict(zip(attribution.categories, attribution.category_labels, strict=True))
        sure = ", as it seems" if asked.confidence == "inferred" else ""
        what = f"for {asked.category}, {asked.label or labels.get(asked.category, '')}{sure}"
        first, *rest = _calls(asked.stack) or [self._without_python(asked.stack)]
        yield f"Asked by {first}: {'no rule says what for' if asked.category == 'unknown' else what}."
        yield from (f"  {line}" for line in rest)

    def _without_python(self, frames: Sequence[Frame]) -> str:
        node = next((found[1] for frame in frames if (found := _NODE.search(frame.name))), None)
        who = "autograd's thread" if node or self.answer.place.phase == "backward" else "a thread"
        return f"{node} in {who}" if node else f"{who} (no Python frame)"

    def _earlier(self) -> None:
        """A line for each request that failed before, the latest first."""
        count = len(self.earlier)
        self.page.line(f"Before it {plural(count, 'request')} failed and the program went on:")
        columns = [Column(title, right=True) for title in ("event", "time", "asked", "held", "free")]
        columns += [Column("verdict"), Column("in", grow=True)]
        shown = [*reversed(self.earlier)][: self.top]
        rows = [self._line(one) for one in shown]
        if count > len(shown):
            rows.append(["", "", "", "", "", f"{count - len(shown):,} more", "--json lists all"])
        self.page.table(columns, rows, dim_rows=frozenset({len(shown)} if count > len(shown) else ()))

    def _line(self, one: Oom) -> list[str]:
        place = one.place
        timed = place.time_us is not None and place.first_us is not None
        return [
            f"{place.event:,}",
            format_seconds((place.time_us or 0) - (place.first_us or 0)) if timed else "",
            *(format_bytes(size, self.shared.units) for size in (one.asked_bytes, one.reserved_bytes, one.cache.free)),
            one.verdict or "",
            in_words(place.phase, place.step) or "",
        ]

    def _next(self) -> Iterator[str]:
        path, place = self.opened.data.path, self.answer.place
        name = "FILE" if path == "-" else shlex.quote(path if not path.startswith("-") else f"./{path}")
        here = f" -d {place.device}" if len(self.opened.devices) > 1 else ""
        here += "".join(f" --rules {shlex.quote(file)}" for file in self.rules)
        yield f"blame {name} --at {place.event}{here} --of reserved"
        yield f"blame {name} --at {place.event}{here} --by stack"


def _calls(frames: Sequence[Frame]) -> list[str]:
    """A stack in a few lines: the program's own frames, and the libraries' folded to the telling ones."""
    own, library = own_frames(frames), library_path(frames)
    lines = [display_frame(frame) for frame in own[:_OWN_FRAMES]]
    if len(own) > _OWN_FRAMES:
        lines.append(f"and {len(own) - _OWN_FRAMES} more of your frames")
    calls = [display_frame(frame) for frame in library[:_LIBRARY_FRAMES]]
    if not own:
        return calls
    return lines + [f"{'in' if index == 0 else 'from'} {call}" for index, call in enumerate(calls)]


def _would_fit(tried: Cures | None, units: str) -> Iterator[str]:
    """Which settings would have served it."""
    if tried is None:
        return
    if tried.reason is not None:
        yield f"What would have made it fit cannot be told: {tried.reason}."
        return
    limit = "" if tried.limit is None else f" under {format_bytes(tried.limit, units)}"
    for serves, said in (
        (True, f"It would have fitted{limit} with"),
        (None, "That hangs on what is not known (torch's cap: --limit, or where segments lie) with"),
        (False, f"It would not have fitted{limit} with"),
    ):
        names = [one.change.in_words() for one in tried.tried if one.serves is serves]
        if names:
            yield f"{said}: {_joined(names)} (simulated)."


def _joined(names: list[str]) -> str:
    """Settings, those of one name once: `max_split_size_mb:64/128`."""
    values: dict[str, list[str]] = {}
    for name in names:
        setting, colon, value = name.partition(":")
        values.setdefault(setting + colon, []).append(value)
    return ", ".join(setting + "/".join(those) for setting, those in values.items())
