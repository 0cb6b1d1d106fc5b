"""What `memtrace record` says after a job: a table of its ranks, and the next commands. On stderr, as all of ours."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace import paths
from memtrace.cli import COMMANDS, diagnostics
from memtrace.io import recording
from memtrace.io.sidecar import natural, read_json, sidecar_path
from memtrace.units import format_bytes, plural

SHOWN = 16
_QUICK_BYTES = 200_000_000
_NEXT = ("blame --peak", "oom", "advise", "tui", "ranks", "verify")
_NOBODY = (
    "no process of the command reported: none got as far as torch, or the recorder could not come in (python -I, -E or "
    "-S, a container or another machine that does not get the environment)"
)


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank left. `path` None: no snapshot. Sizes in bytes, None where its sidecar does not say."""

    rank: int
    path: Path | None
    sidecar: dict[str, Any]

    @property
    def allocated(self) -> int | None:
        return self._stat("allocated_bytes.all.peak")

    @property
    def reserved(self) -> int | None:
        return self._stat("reserved_bytes.all.peak")

    @property
    def steps(self) -> int | None:
        return natural(self.sidecar.get("steps"))

    def _stat(self, name: str) -> int | None:
        stats = self.sidecar.get("stats")
        size = natural(stats.get(name)) if isinstance(stats, dict) else None
        before = self._before_reset(name.partition("_")[0])
        return size if before is None else max(size or 0, before)

    def _before_reset(self, what: str) -> int | None:
        """What torch counted before the program had its peaks forgotten; a dry run keeps that."""
        dry = self.sidecar.get("dryrun")
        peaks = dry.get("peaks_before_reset") if isinstance(dry, dict) else None
        return natural(peaks.get(what)) if isinstance(peaks, dict) else None


@dataclass(frozen=True, slots=True)
class Moment:
    """When a rank's peak was, in words, and how many events its snapshot has."""

    at: str
    events: str


def is_quick(directory: Path) -> bool:
    """Whether the snapshots, unpacked as they are, can be read in the time that a person waits gladly."""
    from memtrace.record import layout

    return len(layout.reported(directory)) <= SHOWN and layout.size_of(directory) <= _QUICK_BYTES


def ranks_in(directory: Path) -> list[Rank]:
    """Everything the ranks left, the highest peak first."""
    from memtrace.record import layout

    files = {item.rank: item.path for item in recording.ranks_of(directory)}
    ranks = sorted({*files, *layout.reported(directory)})
    found = [Rank(rank, files.get(rank), _sidecar(directory, rank, files.get(rank))) for rank in ranks]
    return sorted(found, key=lambda one: -1 if one.allocated is None else one.allocated, reverse=True)


def _sidecar(directory: Path, rank: int, snapshot: Path | None) -> dict[str, Any]:
    """What lies beside this snapshot, which need not be the rank's last; without one, what the rank left."""
    beside = {} if snapshot is None else read_json(sidecar_path(snapshot))
    return beside or dict(recording.sidecar(directory, rank))


def report(directory: Path, *, with_moments: bool, quiet: bool) -> None:
    """The table, the ranks that are not in it and why, and what to do next. `quiet`: only what went wrong."""
    found = ranks_in(directory)
    recorded = [one for one in found if one.path is not None]
    if not found:
        diagnostics.note(nobody(directory))
    elif recorded and not quiet:
        diagnostics.note(_headline(directory, recorded))
        _table(recorded, _moments(recorded) if with_moments else {})
    _say_unrecorded([one for one in found if one.path is None])
    if not quiet:
        for one in recorded:
            _say_oom(one)
    if recorded and not quiet:
        _say_next(directory, has_oom=any(_oom_of(one) for one in recorded))


def nobody(directory: Path) -> str:
    """Why no rank left anything, as far as that can be told."""
    meta = read_json(directory / "meta.json")
    number, code = natural(meta.get("signal")), natural(meta.get("exit_code"))
    if number is None:
        return f"the command failed (exit code {code}) and left no recording; {_NOBODY}" if code else _NOBODY
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"the command was ended by {name}, which leaves no time to write anything: there is no recording"


def _headline(directory: Path, recorded: Sequence[Rank]) -> str:
    from memtrace.record import layout

    is_complete = all(one.sidecar.get("complete") is True for one in recorded)
    size = format_bytes(layout.size_of(directory))
    state = "complete" if is_complete else "not from the first allocation on"
    how = "dry-run, no GPU used," if any(one.sidecar.get("dryrun") for one in recorded) else "recorded"
    return f"{plural(len(recorded), 'rank')} {how} in {paths.shown(directory)} ({size}, {state})"


def _table(recorded: Sequence[Rank], moments: dict[int, Moment]) -> None:
    from memtrace.cli.output import Column, Page

    columns = [Column("rank", right=True), Column("steps", right=True), Column("peak allocated", right=True),
               Column("peak reserved", right=True)]  # fmt: skip
    if moments:
        columns += [Column("at"), Column("events", right=True)]
    columns += [Column("file"), Column("")]
    rows = []
    for index, one in enumerate(recorded[:SHOWN]):
        moment = moments.get(one.rank, Moment("", ""))
        rows.append(
            [
                str(one.rank),
                "" if one.steps is None else f"{one.steps:,}",
                _bytes(one.allocated),
                _bytes(one.reserved),
                *([moment.at, moment.events] if moments else []),
                one.path.name if one.path else "",
                "← highest" if index == 0 and len(recorded) > 1 else "",
            ]
        )
    with contextlib.redirect_stdout(sys.stderr):
        page = Page("auto")
        page.table(columns, rows)
    rest = recorded[SHOWN:]
    if rest:
        peaks = f" from {_bytes(rest[-1].allocated)} to {_bytes(rest[0].allocated)}" if rest[-1].allocated else ""
        diagnostics.note(f"{plural(len(rest), 'more rank')}, peaks{peaks or ' unknown'}")


def _moments(recorded: Sequence[Rank]) -> dict[int, Moment]:
    """By rank. A snapshot that cannot be read has none: `memtrace verify` says why."""
    found = {}
    for one in recorded:
        with contextlib.suppress(Exception):
            found[one.rank] = _moment(str(one.path))
    return found


def _moment(path: str) -> Moment:
    from memtrace.api import load
    from memtrace.timeline.find import timeline_of
    from memtrace.timeline.timeline import in_words

    snapshot = load(path)
    device = snapshot.default_device
    if device is None:
        return Moment("", "0")
    phases = () if snapshot.sidecar is None else snapshot.sidecar.phases
    timeline = timeline_of(snapshot.data, device, snapshot.replay(device).lifetimes, phases)
    words = in_words(*timeline.at(snapshot.peak(device=device).event))
    return Moment(words or "", f"{len(snapshot.data.trace(device)):,}")


def _say_unrecorded(ranks: Sequence[Rank]) -> None:
    """Ranks that reported and left no snapshot."""
    for one in sorted(ranks, key=lambda one: one.rank)[:SHOWN]:
        diagnostics.note(_why_unrecorded(one))
    if len(ranks) > SHOWN:
        diagnostics.note(f"and {plural(len(ranks) - SHOWN, 'more rank')} without a snapshot")


def _why_unrecorded(one: Rank) -> str:
    notes = one.sidecar.get("notes")
    said = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    if one.sidecar and one.sidecar.get("device") is None:
        no_device = [note for note in said if note.startswith("no CUDA device")]
        return no_device[0] if no_device else f"no CUDA device in rank {one.rank}: nothing to record"
    return f"rank {one.rank} left no snapshot" + (f": {said[-1]}" if said else "")


def _say_oom(one: Rank) -> None:
    oom = _oom_of(one)
    if oom is None:
        return
    asked, free, step = (natural(oom.get(key)) for key in ("asked_bytes", "free_bytes", "step"))
    text = f"rank {one.rank}: out of memory{_when(one, oom, step)}"
    text += "" if asked is None else f", asked {format_bytes(asked)}"
    text += "" if free is None else f", {format_bytes(free)} free on the device"
    diagnostics.note(text + (f"; memtrace oom -r {one.rank}" if "oom" in COMMANDS else ""))


def _when(one: Rank, oom: dict[str, Any], step: int | None) -> str:
    """The phase of the sidecar that began last before the failure."""
    from memtrace.timeline.timeline import in_words

    time_us, phases = natural(oom.get("time_us")), one.sidecar.get("phases")
    begun = [
        phase
        for phase in (phases if isinstance(phases, list) else [])
        if isinstance(phase, dict)
        and time_us is not None
        and (natural(phase.get("begin_us")) or time_us + 1) <= time_us <= (natural(phase.get("end_us")) or time_us)
    ]
    last = max(begun, key=lambda phase: int(phase["begin_us"]), default={})
    words = in_words(str(last["phase"]) if "phase" in last else None, step)
    return f" in {words}" if words else "" if step is None else f" in step {step}"


def _oom_of(one: Rank) -> dict[str, Any] | None:
    oom = one.sidecar.get("oom")
    return oom if isinstance(oom, dict) else None


def _say_next(directory: Path, *, has_oom: bool) -> None:
    """Commands to paste; without a path where they find this recording by themselves."""
    path = "" if _is_found(directory) else " " + shlex.quote(paths.shown(directory))
    here = shlex.quote(paths.shown(directory))
    lines = []
    for words in _NEXT:
        name = words.split()[0]
        if name not in COMMANDS or (name == "oom" and not has_oom):
            continue
        lines.append(f"memtrace {words} {here}" if name == "verify" else f"memtrace {words}{path}")
    diagnostics.note("next:  " + "      ".join(lines))


def _is_found(directory: Path) -> bool:
    try:
        return os.path.samefile(recording.newest(), directory)  # noqa: PTH121 - either may be gone
    except Exception:  # noqa: BLE001 - then it is not found
        return False


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)
