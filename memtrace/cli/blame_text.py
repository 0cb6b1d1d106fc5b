"""The page of `memtrace blame` for people: the sentence, the table that sums, where to go next."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memtrace.analysis.blame import Blame, Row
from memtrace.analysis.cause import main_cause
from memtrace.analysis.frames import display_frame, display_frame_briefly, library_path, own_frames
from memtrace.analysis.sentence import request_in_words
from memtrace.api import Snapshot
from memtrace.attribution import REASON_TEXT, Reason
from memtrace.attribution.rule import BY_TEXT, By
from memtrace.attribution.rules.torch import PRIOR_BUCKET, PRIOR_MASTER
from memtrace.cli.ledger_text import NO_PYTHON, WITHOUT_PYTHON, LedgerText
from memtrace.cli.options import Common
from memtrace.cli.output import Column, Page
from memtrace.places import Side, is_plumbing, short_path, side_of
from memtrace.text import printable
from memtrace.units import format_bytes, in_unit, plural, unit_of

if TYPE_CHECKING:
    from memtrace.analysis.tree import CallTree

_OWN_FRAMES = 3
_LIBRARY_FRAMES = 3
_FULL_FRAMES = 1000
_REASONS = 10
_DEEPEST_INDENT = 60
_LEAST_WRAP = 20
_BY_SIZE = (PRIOR_BUCKET.id, PRIOR_MASTER.id)
_UNDECIDED = {
    "prior": "Made before the recording began, so without a stack. Record from before the first allocation to name it.",
    "unknown": "Made by calls that no rule knows. --by stack shows them; docs/rules.md tells how to name them.",
}
_TREE_SHARE = 0.01
"""A branch of the tree below this share of the total is summed up in one line."""


class Report:
    """The page for people: the sentence, the table that sums, where to go next."""

    def __init__(
        self,
        opened: Snapshot,
        answer: Blame,
        shared: Common,
        when: str,
        top: int,
        *,
        rules: tuple[str, ...],
        why: bool,
        full_stack: bool,
        cpp: bool,
    ) -> None:
        self.rules = rules
        self.opened, self.answer, self.shared = opened, answer, shared
        self.when, self.top, self.why, self.full_stack, self.cpp = when, top, why, full_stack, cpp
        self.page: Page = Page(shared.color)
        self.unit = self._unit()

    def write(self) -> None:
        answer = self.answer
        self.page.line(self.opened.sentence(answer, self.when, self.shared.units), style="bold")
        request = request_in_words(self.opened.data, answer.device, answer.event, self.shared.units)
        for line in (request, main_cause(answer)):
            if line is not None:
                self.page.line(line)
        self.page.line()
        if answer.by == "tree":
            self._tree()
        else:
            self.table(answer)
            if answer.by == "module" and all(row.key is None for row in answer.rows):
                self.page.line()
                self.page.line("The recording does not say which module made what. memtrace record --modules does.")
            if answer.by == "category" and self._mostly_unknown():
                self.page.line()
                self.page.line("By stack, your own frames first:")
                self.table(self.opened.blame(answer.event, answer.of, "stack", answer.device, cpp=self.cpp))
        if answer.of == "reserved" and answer.by == "category":
            self._ledger()
        if self.why:
            self._reasons()
        self.page.line()
        for line in self._closing():
            self.page.line(line, wrap=not line.startswith(("next:", "      memtrace ")))

    def _ledger(self) -> None:
        """What is the allocator's: by pool and stream, who waits, who pins."""
        answer = self.answer
        found = self.opened.ledger(answer.event, answer.device)
        expandable = self.opened.replay(answer.device).settings.expandable
        LedgerText(self.page, found, self.shared.units, self.top, expandable=expandable).write()

    def _unit(self) -> str:
        return {"auto": unit_of(self.answer.total_bytes), "bytes": "B"}.get(self.shared.units, self.shared.units)

    def _size(self, size: int) -> str:
        return in_unit(size, self.unit)

    def _full(self, size: int) -> str:
        return format_bytes(size, self.shared.units)

    def _mostly_unknown(self) -> bool:
        unknown = sum(row.bytes for row in self.answer.rows if row.category == "unknown")
        return 2 * unknown > self.answer.total_bytes

    def _reasons(self) -> None:
        """What decided, for every category that the table shows."""
        answer = self.answer
        self.page.line()
        self.page.line("Why:", style="bold")
        found = self.opened.why(answer.event, answer.of, answer.device)
        for one in found[: max(self.top, _REASONS)]:
            label = f" ({one.label})" if one.label else ""
            self._item(
                f"{one.category}{label}: {self._full(one.bytes)}, {plural(one.blocks, 'block')}, {one.confidence} by "
                f"{one.rule.id}",
                "" if one.frame is None else f"at {display_frame(one.frame)}",
                one.rule.note,
                "" if one.rule.by == By.STACK else f"Decided by {BY_TEXT[one.rule.by]}.",
                one.rule.knob and f"Setting: {one.rule.knob}",
            )
        rest = found[max(self.top, _REASONS) :]
        if rest:
            size = self._full(sum(one.bytes for one in rest))
            self._item(f"{plural(len(rest), 'more rule')}: {size} (-n shows more)")
        undecided = Counter[str]()
        for row in self.opened.blame(answer.event, answer.of, "category", answer.device).rows:
            undecided[row.category] += row.bytes
        for category, text in _UNDECIDED.items():
            if undecided[category]:
                self._item(f"{category}: {self._full(undecided[category])}, no rule decided", text)

    def _item(self, heading: str, *facts: str) -> None:
        """A heading, and facts indented below it; on a terminal both are wrapped to its width."""
        width = max(self.page.width, _LEAST_WRAP)
        for text, indent in ((heading, ""), *((fact, "  ") for fact in facts if fact)):
            lines = textwrap.wrap(
                printable(text),
                width,
                initial_indent=indent,
                subsequent_indent=indent + "  ",
                break_on_hyphens=False,
            )
            for line in lines:
                self.page.line(line)

    def table(self, answer: Blame) -> None:
        """The rows of an answer, which need not be the page's own."""
        shown, hidden = answer.rows[: self.top], answer.rows[self.top :]
        last_title = {"category": "from", "stack": "stack", "block": "category, from"}.get(answer.by, answer.by)
        columns = [Column(self.unit, right=True), Column("%", right=True), Column("blocks", right=True)]
        if answer.by == "block":
            columns += [Column("address"), Column("born", right=True), Column("freed", right=True), Column("pool")]
        if answer.by in ("category", "stream"):
            columns.insert(0, Column(answer.by))
        columns.append(Column(last_title if answer.by != "stream" else "mostly", grow=True))
        rows = [self._row(answer, row) for row in shown]
        extra = len(columns) - 4
        lead = answer.by in ("category", "stream")

        def summary(name: str, size: int, blocks: int, remark: str) -> list[str]:
            cells = [self._size(size), self._share(size), f"{blocks:,}"]
            middle = [""] * (extra - lead)
            return [name, *cells, *middle, remark] if lead else [*cells, *middle, f"{name}  {remark}".rstrip()]

        if hidden:
            rest, blocks = sum(row.bytes for row in hidden), sum(row.blocks for row in hidden)
            rows.append(summary(f"{len(hidden):,} more", rest, blocks, ""))
        blocks = sum(row.blocks for row in answer.rows)
        rows.append(summary("total", answer.total_bytes, blocks, self._equals()))
        self.page.table(columns, rows, dim_rows=frozenset({len(shown)} if hidden else ()))

    def _share(self, size: int) -> str:
        return f"{100 * size / self.answer.total_bytes:.1f}" if self.answer.total_bytes else "0.0"

    def _row(self, answer: Blame, row: Row) -> list[str]:
        cells = [self._size(row.bytes), self._share(row.bytes), f"{row.blocks:,}" if row.blocks else ""]
        if answer.by == "category":
            return [f"{row.category}\n  {row.label}", *cells, self._origin(answer, row)]
        if answer.by == "stream":
            name = row.key if row.key is not None else f"{row.category}\n  {row.label}"
            return [name, *cells, self._origin(answer, row)]
        if answer.by == "stack":
            return [*cells, self._stack(answer, row)]
        if answer.by == "block":
            return [*cells, *self._block_cells(row), f"{row.category}  {self._origin(answer, row)}"]
        return [*cells, self._named(row)]

    def _block_cells(self, row: Row) -> list[str]:
        block = row.block
        if block is None:
            return ["", "", "", ""]
        born = "before" if block.born < 0 else f"{block.born:,}"
        freed = "alive" if block.freed >= self.answer.events else f"{block.freed:,}"
        return [f"{block.address:#x}", born, freed, block.pool]

    def _named(self, row: Row) -> str:
        """A file, frame, module or phase, or why there is none."""
        by = self.answer.by
        if row.key is None:
            return "(no module)" if by == "module" and row.blocks else f"({row.category}: {row.label})"
        return printable(short_path(row.key) if by in ("file", "frame") and not self.full_stack else row.key)

    def _origin(self, answer: Blame, row: Row) -> str:
        """The call that decided most of the row; "mostly" unless all of its bytes pass through it."""
        chosen = row.evidence.frame if row.evidence is not None else None
        frames = answer.frames(row)
        if not frames:
            if row.evidence is not None and row.evidence.rule in _BY_SIZE:
                return "(from before the recording, told by its size)"
            return NO_PYTHON if row.category in WITHOUT_PYTHON else ""
        if chosen is None or side_of(chosen.filename) == Side.CPP:
            chosen = (library_path(frames) or own_frames(frames) or [*frames])[0]
        text = display_frame_briefly(chosen)
        return text if row.is_from_one_call or chosen == row.dominator else f"mostly {text}"

    def _stack(self, answer: Blame, row: Row) -> str:
        """A stack in a few lines: the program's own frames, and the libraries' folded to the telling ones."""
        frames = answer.frames(row)
        if not frames and row.category == "unknown" and row.label == REASON_TEXT[Reason.NO_RULE]:
            return "(no Python frame; --cpp shows the C++ ones)"
        if not frames:
            return f"({row.category}: {row.label})"
        if self.full_stack or self.cpp:
            lines = [display_frame(frame) for frame in frames[:_FULL_FRAMES]]
            return "\n".join(
                lines + ([f"and {len(frames) - _FULL_FRAMES:,} more"] if len(frames) > _FULL_FRAMES else [])
            )
        own = own_frames(frames)
        folded = len(frames) - len(own)
        lines = [display_frame(frame) for frame in own[:_OWN_FRAMES]]
        if len(own) > _OWN_FRAMES:
            lines.append(f"  and {len(own) - _OWN_FRAMES} more of your frames")
        if folded:
            calls = library_path(frames)[:_LIBRARY_FRAMES]
            lines += [f"  {'in' if index == 0 else 'from'} {display_frame(call)}" for index, call in enumerate(calls)]
            lines = lines or [display_frame(frames[0])]
            lines[-1] += f"  ({plural(folded, 'library frame')})"
        return "\n".join(lines)

    def _equals(self) -> str:
        """Which of torch's own numbers the total is."""
        answer, replay = self.answer, self.opened.replay(self.answer.device)
        if replay.conflicts or replay.revised_sizes or answer.slack_bound:
            return ""
        name = {
            ("peak", "allocated"): "max_memory_allocated()",
            ("peak", "reserved"): "max_memory_reserved()",
            ("end", "allocated"): "memory_allocated()",
            ("end", "reserved"): "memory_reserved()",
            ("oom", "allocated"): "memory_allocated() then",
            ("oom", "reserved"): "memory_reserved() then",
        }.get((self.when, answer.of))
        if name is None:
            return ""
        if self.when == "peak" and not replay.complete:
            return "the highest that this window shows"
        return f"= torch.cuda.{name}, to the byte"

    def _tree(self) -> None:
        from memtrace.analysis.tree import call_tree

        tree = call_tree(self.answer)
        rows = [
            [self._size(size), self._share(size), "  " * min(depth, _DEEPEST_INDENT) + text]
            for size, depth, text in _tree_lines(tree, self.top, self.full_stack)
        ]
        rows.append(
            [self._size(self.answer.total_bytes), self._share(self.answer.total_bytes), f"total  {self._equals()}"]
        )
        self.page.table([Column(self.unit, right=True), Column("%", right=True), Column("call tree", grow=True)], rows)
        self.page.line()
        if tree.dominator is not None:
            self.page.line(f"All bytes with a stack pass through {display_frame(tree.dominator)}.")
        if tree.heaviest:
            self.page.line(f"Heaviest path ends in {display_frame(tree.heaviest[-1])}.")

    def _closing(self) -> Iterator[str]:
        answer, device = self.answer, self.answer.device
        path = self.opened.data.path
        name = "FILE" if path == "-" else shlex.quote(path if not path.startswith("-") else f"./{path}")
        if answer.of == "allocated":
            reserved = self.opened.series("reserved_bytes", device=device)
            held, highest = int(reserved[answer.event + 1]), int(reserved.argmax()) - 1
            when = f"at event {highest:,}" if highest >= 0 else "before the first event"
            yield (
                f"Reserved at that moment {self._full(held)}: {self._full(held - answer.total_bytes)} more is the "
                f"allocator's. Reserved was highest, {self._full(int(reserved.max()))}, {when}."
            )
        here = f" -d {device}" if len(self.opened.devices) > 1 else ""
        size = f" --of {answer.of}" if answer.of != "allocated" else ""
        rules = "".join(f" --rules {shlex.quote(file)}" for file in self.rules)
        options = f"--at {self.when if self.when in ('peak', 'end', 'oom') else answer.event}{size}{here}{rules}"
        steps = [f"--by {by}" for by in ("stack", "tree") if by != answer.by]
        if answer.by == "category" and not self.why:
            steps.insert(0, "--why")
        if answer.by == "stack" and not self.full_stack:
            steps.append("--by stack --full-stack")
        yield f"next: memtrace blame {name} {options} {steps[0]}"
        for step in steps[1:]:
            yield f"      memtrace blame {name} {options} {step}"
        if answer.of == "allocated":
            yield f"      memtrace blame {name} --at {answer.event} --of reserved{here}{rules}"
        job = self.opened.job(device)
        if job is not None and job.stage is not None:
            yield f"      memtrace zero {name}{here}"


def _tree_lines(tree: CallTree, top: int, every: bool) -> Iterator[tuple[int, int, str]]:
    """(bytes, depth, text) of the branches worth a line. A chain of calls that all pass the same bytes is one line."""
    from memtrace.analysis.tree import ROOT, children

    graph = tree.graph
    least = 0 if every else graph.nodes[ROOT]["bytes"] * _TREE_SHARE
    stack: list[tuple[int, int, int, str]] = []

    def push(below: list[int], depth: int) -> None:
        kept = [child for child in below[:top] if graph.nodes[child]["bytes"] >= least]
        rest = below[len(kept) :]
        if rest:
            left = sum(graph.nodes[child]["bytes"] for child in rest)
            stack.append((ROOT, depth, left, f"{len(rest)} smaller"))
        stack.extend((child, depth, graph.nodes[child]["bytes"], "") for child in reversed(kept))

    push(children(graph, ROOT), 0)
    while stack:
        node, depth, size, text = stack.pop()
        if node == ROOT:
            yield size, depth, text
            continue
        chain = [node]
        while not every and len(below := children(graph, node)) == 1 and not graph.nodes[node]["self_bytes"]:
            node = below[0]
            chain.append(node)
        frames = [graph.nodes[link]["frame"] for link in chain]
        telling = [
            frame for frame in frames if frame is not None and not is_plumbing(frame.filename, frame.name)
        ] or frames
        name = graph.nodes[chain[0]]["label"] if telling[0] is None else display_frame(telling[0])
        if len(telling) > 1:
            name += f" > {'... > ' if len(chain) > 2 else ''}{display_frame(telling[-1])}"
        yield size, depth, name
        push(children(graph, node), depth + 1)
