"""`memtrace verify` of a recording: each snapshot held against the counters that the recorder wrote beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrace.allocator.result import Conflict
from memtrace.analysis.verify import BadTruthError, Verdict
from memtrace.api import Snapshot, load
from memtrace.cli import diagnostics, options, output
from memtrace.cli.options import Common
from memtrace.cli.output import Column, Page
from memtrace.cli.verify import SHOWN, as_json, write_comparison, write_conflicts
from memtrace.errors import QuestionError, SourceError
from memtrace.io import recording
from memtrace.io.recording import RankFile
from memtrace.model import Notice

_UNREADABLE = 3
_ACCEPTED = {"reset": "peaks were reset", "before_window": "the rest is from before the trace"}


@dataclass(frozen=True, slots=True)
class Checked:
    """One snapshot of a rank, or a rank without one. `error` says why there is no verdict, `is_unusable` whether there
    should be one; `conflicts` are the first of each device that has some."""

    rank: int
    process: int
    tag: str
    path: Path | None
    error: str | None
    is_unusable: bool = False
    verdicts: tuple[Verdict, ...] = ()
    conflicts: Mapping[int, tuple[Conflict, ...]] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()

    @property
    def name(self) -> str:
        """The rank, and the file where it has several."""
        return f"rank {self.rank}" if self.path is None else f"rank {self.rank} ({self.path.name})"

    @property
    def failed(self) -> bool:
        return any(verdict.failed for verdict in self.verdicts)


def run(directory: Path, common: Common, device: int | None) -> int:
    """Checks all, says what came of it, and returns the exit code."""
    directory = recording.recording_at(directory)
    checked = [*_each(directory, common, device)]
    notices = [Notice(notice.code, f"{one.name}: {notice.message}") for one in checked for notice in one.notices]
    options.show_notices(notices, common)
    if common.json:
        ranks = [_as_json(one) for one in checked]
        output.write_document("verify", None, {"directory": str(directory), "ranks": ranks}, notices)
    else:
        _write_text(directory, checked, common)
    if any(one.is_unusable for one in checked):
        return _UNREADABLE
    return int(any(one.failed for one in checked))


def _each(directory: Path, common: Common, device: int | None) -> Iterator[Checked]:
    """One snapshot after the other: together they may not fit into memory."""
    recording.choose(directory, common.rank)  # raises where there is nothing to check
    for item in recording.snapshots_of(directory):
        if common.rank in (None, item.rank):
            yield _checked(item, common, device)
    for one in recording.unrecorded(directory):
        if common.rank is None:
            yield Checked(one.rank, 1, "", None, f"{one.why}: nothing was recorded", is_unusable=one.is_lost)


def _checked(item: RankFile, common: Common, device: int | None) -> Checked:
    try:
        with diagnostics.progress(item.path.name, enabled=common.progress and not common.quiet) as progress:
            opened = load(item.path, max_bytes=common.max_size, progress=progress, cache=not common.no_cache)
        devices = _devices(opened, device)
        verdicts = tuple(opened.verify_recorded(ordinal) for ordinal in devices)
    except SourceError as error:
        message = f"{item.path}: {error.message}" if isinstance(error, BadTruthError) else error.message
        return Checked(item.rank, item.process, item.tag, item.path, message, is_unusable=True)
    notices = [notice for ordinal in devices for notice in opened.file_notices(ordinal)]
    if any(verdict.events and not verdict.compared for verdict in verdicts):
        notices.append(Notice("no-truth", "no counters of torch's beside it: it was held against itself alone"))
    conflicts = {one: found[:SHOWN] for one in devices if (found := opened.replay(one).conflicts)}
    return Checked(
        rank=item.rank,
        process=item.process,
        tag=item.tag,
        path=item.path,
        error=None,
        verdicts=verdicts,
        conflicts=conflicts,
        notices=tuple(dict.fromkeys(notices)),
    )


def _devices(opened: Snapshot, device: int | None) -> tuple[int, ...]:
    if device is not None and device not in opened.devices:
        raise QuestionError.unknown("device", str(device), opened.devices)
    return opened.devices if device is None else (device,)


def _as_json(one: Checked) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "process": one.process,
        "tag": one.tag,
        "path": None if one.path is None else str(one.path),
        "error": one.error,
        "devices": [
            {**as_json(verdict), "start_compared": verdict.start_compared, "start_equal": verdict.start_equal}
            for verdict in one.verdicts
        ],
    }


def _write_text(directory: Path, checked: list[Checked], common: Common) -> None:
    """A line for each, then what differs."""
    page = Page(common.color)
    columns = [Column("rank", right=True), Column("file"), Column("events", right=True), Column("torch's counters"),
               Column("at the start"), Column("")]  # fmt: skip
    page.table(columns, [row for one in checked for row in _rows(one)])
    page.line()
    for one in checked:
        if one.error is not None:
            page.line(f"rank {one.rank}: {one.error}")
        for verdict in one.verdicts:
            if verdict.failed:
                page.line(f"{one.name}, device {verdict.device}:", "bold")
                write_conflicts(page, one.conflicts.get(verdict.device, ()))
                if verdict.compared or verdict.different:
                    write_comparison(page, verdict)
    failed, unread = sum(one.failed for one in checked), sum(one.error is not None for one in checked)
    good = len(checked) - failed - unread
    rest = [f"{count} {what}" for count, what in ((failed, "different"), (unread, "without a verdict")) if count]
    page.line(f"{good} of {len(checked)} equal{''.join(f', {part}' for part in rest)} in {directory}", "bold")


def _rows(one: Checked) -> Iterator[list[str]]:
    name = "" if one.path is None else one.path.name
    if one.error is not None:
        yield [str(one.rank), name, "", "", "", "unreadable" if one.path is not None else "no snapshot"]
    for verdict in one.verdicts:
        here = name if len(one.verdicts) == 1 else f"{name}, device {verdict.device}"
        yield [
            str(one.rank),
            here,
            f"{verdict.events:,}",
            f"{verdict.equal} of {verdict.compared} equal" if verdict.compared else "not there",
            f"{verdict.start_equal} of {verdict.start_compared} equal" if verdict.start_compared else "",
            _in_a_word(verdict),
        ]


def _in_a_word(verdict: Verdict) -> str:
    if verdict.failed:
        return "DIFFERENT"
    reasons = {item.why for item in verdict.different}
    return ", ".join(["to the byte", *(text for why, text in _ACCEPTED.items() if why in reasons)])
