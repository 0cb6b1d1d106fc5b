"""`memtrace verify`: a snapshot held against itself and against torch's own counters."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace.cli import options
from memtrace.cli.options import Common

if TYPE_CHECKING:
    from memtrace.allocator.result import Conflict
    from memtrace.analysis.verify import Verdict
    from memtrace.api import Snapshot
    from memtrace.cli.output import Page

EXAMPLES = """\b
Examples:
  memtrace verify snapshot.pickle
  memtrace verify .memtrace/20251202-1450-train         every rank against its own counters
  memtrace verify --json snapshot.pickle
  memtrace verify snapshot.pickle --truth stats.json    with {"stats": torch.cuda.memory_stats()}"""
_MAX_TRUTH_BYTES = 64 << 20
SHOWN = 20


@click.command("verify", epilog=EXAMPLES)
@options.snapshot_argument
@click.option(
    "--truth", type=click.Path(path_type=Path), help="JSON with torch.cuda.memory_stats() of that moment under 'stats'."
)
@options.device_option
@options.common
def command(common: Common, snapshot: str | None, truth: Path | None, device: int | None) -> int:
    """Replays SNAPSHOT and checks it: no event may contradict another, and the last state must be the file's.

    With --truth each of torch's 111 counters must be equal (of a recording that began late, the 54 that can be).
    Of a recording's directory every snapshot is checked, against the counters that the recorder wrote beside it: at
    the end, and when recording began. Exit code 1 if anything differs.
    """
    directory = None if truth is not None else _directory(snapshot)
    if directory is not None:
        from memtrace.cli import verify_recording

        return verify_recording.run(directory, common, device)
    stats = None if truth is None else _read_truth(truth)
    opened: Snapshot = options.open_snapshot(snapshot, common)
    if truth is not None or device is not None:
        devices: tuple[int, ...] = (options.choose_device(opened, device, common),)
    else:
        devices = opened.devices
    verdicts = [opened.verify(stats, ordinal) for ordinal in devices]
    notices = list(dict.fromkeys(notice for ordinal in devices for notice in opened.file_notices(ordinal)))
    options.show_notices(notices, common)
    if common.json:
        _write_json(opened, verdicts, notices)
    else:
        _write_text(opened, verdicts, common, compared=stats is not None)
    return int(any(verdict.failed for verdict in verdicts))


def _directory(snapshot: str | None) -> Path | None:
    """The recording that is meant; None where a file is."""
    if snapshot is None:
        from memtrace.io import recording

        return recording.newest()
    return Path(snapshot) if os.path.isdir(snapshot) else None  # noqa: PTH112 - a name may be too long for Path


def _read_truth(path: Path) -> dict[str, object]:
    from memtrace.analysis.verify import BadTruthError
    from memtrace.errors import TooLargeError
    from memtrace.io.opening import read_small

    hint = "Save {'stats': dict(torch.cuda.memory_stats())} as JSON."
    try:
        content = json.loads(read_small(str(path), _MAX_TRUTH_BYTES))
    except TooLargeError as error:
        raise BadTruthError(f"{path} is too large for a file of counters", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise BadTruthError(f"{path} is not readable as JSON", hint=hint) from error
    stats = content.get("stats") if isinstance(content, dict) else None
    if not isinstance(stats, dict):
        raise BadTruthError(f"{path} has no 'stats' object", hint=hint)
    return stats


def _write_json(opened: Snapshot, verdicts: list[Verdict], notices: Any) -> None:
    from memtrace.cli import output

    devices = [as_json(verdict) for verdict in verdicts]
    shown = verdicts[0].device if len(verdicts) == 1 else opened.default_device
    output.write_document("verify", output.snapshot_facts(opened, shown), {"devices": devices}, notices)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """A device's entry in `devices`."""
    return {
        "device": verdict.device,
        "events": verdict.events,
        "complete": verdict.complete,
        "conflicts": verdict.conflicts,
        "stats": verdict.stats,
        "compared": verdict.compared,
        "equal": verdict.equal,
        "reset_events": list(verdict.reset_events) if verdict.reset_events else None,
        "different": [
            {"name": item.name, "ours": item.ours, "truth": item.truth, "why": item.why} for item in verdict.different
        ],
    }


def _write_text(opened: Snapshot, verdicts: list[Verdict], shared: Common, *, compared: bool) -> None:
    from memtrace.cli.output import Column, Page
    from memtrace.units import plural

    page = Page(shared.color)
    for verdict in verdicts:
        if not compared:
            page.table(
                [Column("counter"), Column("value", right=True)],
                [[name, f"{value:,}"] for name, value in verdict.stats.items()],
            )
            page.line()
        if not verdict.events:
            page.line(f"Device {verdict.device}: no events to replay; the counters are those of the segments.", "bold")
        else:
            agrees = "no contradiction" if not verdict.conflicts else plural(verdict.conflicts, "contradiction")
            coverage = "from the first allocation on" if verdict.complete else "not from the first allocation on"
            page.line(
                f"Device {verdict.device}: {plural(verdict.events, 'event')} replayed, {coverage}; {agrees}.", "bold"
            )
            if not verdict.conflicts:
                page.line("Every segment and block of the replay's last state is in the file, and the reverse.")
        write_conflicts(page, opened.replay(verdict.device).conflicts)
        if compared:
            write_comparison(page, verdict)


def write_conflicts(page: Page, conflicts: Sequence[Conflict]) -> None:
    """What the allocator cannot have done, the first of it."""
    for conflict in conflicts[:SHOWN]:
        place = "" if conflict.event is None else f"event {conflict.event:,}: "
        page.line(f"  {place}{conflict.reason}")
    if len(conflicts) > SHOWN:
        page.line(f"  and {len(conflicts) - SHOWN:,} more")


def write_comparison(page: Page, verdict: Verdict) -> None:
    """How many counters are equal, and those that are not."""
    from memtrace.cli.output import Column

    page.line(f"{verdict.equal} of {verdict.compared} counters equal torch's own, to the byte.")
    if verdict.reset_events:
        first, last = verdict.reset_events
        page.line(f"One reset of the peaks, between events {first:,} and {last:,}, explains every peak that differs.")
    if verdict.different:
        page.table(
            [Column("counter"), Column("replayed", right=True), Column("torch", right=True), Column("why")],
            [[item.name, f"{item.ours:,}", f"{item.truth:,}", item.why] for item in verdict.different],
        )
