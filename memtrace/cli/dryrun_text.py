"""What `memtrace dryrun` says after a job: whether it fits, and what was assumed. The table is `record`'s."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.cli import diagnostics, record_text
from memtrace.gpus import Gpu
from memtrace.io.sidecar import natural
from memtrace.units import format_bytes, plural

_SHOWN = 12
_WORST = (
    "refused",
    "unknown",
    "not-computed",
    "size",
    "host",
    "benchmark",
    "backward",
    "integer",
    "mask",
    "message",
    "convolution",
    "streams",
)
"""Assumptions that may change the answer, the worst first."""
_MANY = {
    "value": "small results of large tensors, guessed",
    "device": "what the stand-in device does not have",
}
_GUESSED = re.compile(r"guessed as ([0-9]+) bytes: (.*)")
_NAMED = 5
_OUT_OF_MEMORY = "OutOfMemory"


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that the dry run took for granted, `count` times; `where` in the program, if that is known."""

    code: str
    text: str
    count: int
    where: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """`fits` None: the job failed before that could be seen, or used no GPU. `room_bytes`: what the fullest rank leaves
    of the GPU beside torch's reserved peak and what lies outside torch; negative or None where it does not fit.
    `stopped_after`: the time that ended it.
    """

    gpu: Gpu
    directory: Path
    fits: bool | None
    room_bytes: int | None
    ranks: tuple[record_text.Rank, ...]
    assumptions: tuple[Assumption, ...]
    has_failed: bool = False
    stopped_after: str | None = None


def answer(directory: Path, gpu: Gpu, *, has_failed: bool) -> Answer:
    """From the files that the ranks left."""
    ranks = tuple(record_text.ranks_in(directory))
    limits = [stopped for one in ranks if (stopped := _stopped_by_time(one)) is not None]
    has_failed = has_failed and not limits  # the exit code is then that of the limit
    rooms = [room for one in ranks if (room := _room(one, gpu)) is not None]
    fits: bool | None = True
    if any(_is_out_of_memory(one, has_failed=has_failed) for one in ranks):
        fits = False
    elif has_failed or not rooms:
        fits = None
    return Answer(
        gpu,
        directory,
        fits,
        min(rooms) if rooms and fits else None,
        ranks,
        _assumptions(ranks),
        has_failed,
        *limits[:1],
    )


def report(found: Answer, *, quiet: bool) -> None:
    """On stderr."""
    if quiet:
        if not found.ranks:
            diagnostics.note(record_text.nobody(found.directory))
        return
    diagnostics.note(verdict(found))
    record_text.report(found.directory, with_moments=record_text.is_quick(found.directory), quiet=False)
    if found.ranks:
        _say_assumptions(found.assumptions)


def verdict(found: Answer) -> str:
    """One sentence.

    >>> from memtrace.gpus import find
    >>> verdict(Answer(find("H200"), Path("x"), True, 3 << 30, (), ()))
    'dry run: it fits on NVIDIA H200 (139.80 GiB) with 3.00 GiB to spare'
    """
    gpu = f"{found.gpu.name} ({format_bytes(found.gpu.capacity_bytes)})"
    if found.fits is None:
        why = "the job failed before its end" if found.has_failed else "no process used a GPU through torch"
        return f"dry run: whether it fits on {gpu} was not seen, {why}"
    if not found.fits:
        return f"dry run: it does not fit on {gpu}"
    far = "" if found.stopped_after is None else f", as far as it got in {found.stopped_after}"
    return f"dry run: it fits on {gpu} with {format_bytes(found.room_bytes or 0)} to spare{far}"


def document(found: Answer) -> dict[str, Any]:
    """For JSON: the data of contract.md's `dryrun`."""
    return {
        "fits": found.fits,
        "gpu": found.gpu.name,
        "limit_bytes": found.gpu.capacity_bytes,
        "room_bytes": found.room_bytes,
        "directory": str(found.directory),
        "ranks": [
            {
                "rank": one.rank,
                "path": None if one.path is None else str(one.path),
                "allocated_peak_bytes": one.allocated,
                "reserved_peak_bytes": one.reserved,
                "outside_bytes": natural(_dry(one).get("outside_bytes")),
            }
            for one in found.ranks
        ],
        "assumptions": [
            {"code": one.code, "text": one.text, "count": one.count, "where": one.where} for one in found.assumptions
        ],
    }


def _say_assumptions(found: Sequence[Assumption]) -> None:
    from memtrace.cli.output import Column, Page

    if not found:
        diagnostics.note("nothing had to be assumed")
        return
    diagnostics.note("assumed:")
    rows = [
        [one.code, f"{one.count:,}", one.text + (f", at {one.where}" if one.where else "")] for one in _short(found)
    ]
    with contextlib.redirect_stdout(sys.stderr):
        Page("auto").table([Column("what"), Column("times", right=True), Column("", grow=True)], rows[:_SHOWN])
    if len(rows) > _SHOWN:
        diagnostics.note(f"and {plural(len(rows) - _SHOWN, 'more assumption')}, all in --report FILE")


def _short(found: Sequence[Assumption]) -> Iterable[Assumption]:
    """Those that say little each, in one row."""
    guessed = {one: match for one in found if one.code == "convolution" and (match := _GUESSED.search(one.text))}
    if guessed:
        largest = max(guessed.values(), key=lambda match: int(match[1]))
        what = f"workspaces of {plural(len(guessed), 'shape')}, guessed; the largest {format_bytes(int(largest[1]))}"
        yield Assumption("convolution", f"{what}: {largest[2]}", sum(one.count for one in guessed), None)
    for one in found:
        if one.code not in _MANY and one not in guessed:
            yield one
    for code, what in _MANY.items():
        alike = [one for one in found if one.code == code]
        if alike:
            names = list(dict.fromkeys(one.text.rpartition(": ")[2].partition(" of ")[0] for one in alike))
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield Assumption(code, f"{what}: {', '.join(names[:_NAMED])}{more}", sum(one.count for one in alike), None)


def _assumptions(ranks: Iterable[record_text.Rank]) -> tuple[Assumption, ...]:
    """Those of all ranks, the same ones added up, the worst first."""
    counts: dict[tuple[str, str, str | None], int] = {}
    for one in ranks:
        rows = _dry(one).get("assumptions")
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and isinstance(row.get("code"), str) and isinstance(row.get("text"), str):
                where = row.get("where")
                key = (row["code"], row["text"], where if isinstance(where, str) else None)
                counts[key] = counts.get(key, 0) + (natural(row.get("count")) or 0)
    found = [Assumption(code, text, count, where) for (code, text, where), count in counts.items()]
    return tuple(sorted(found, key=lambda one: _WORST.index(one.code) if one.code in _WORST else len(_WORST)))


def _stopped_by_time(one: record_text.Rank) -> str | None:
    stopped = _dry(one).get("stopped_after")
    return stopped if isinstance(stopped, str) and re.fullmatch(r"[0-9.]+ s", stopped) else None


def _room(one: record_text.Rank, gpu: Gpu) -> int | None:
    if one.reserved is None:
        return None
    measured = _dry(one).get("room_bytes")
    if isinstance(measured, int) and not isinstance(measured, bool):
        return measured
    return gpu.capacity_bytes - one.reserved - (natural(_dry(one).get("outside_bytes")) or 0)


def _is_out_of_memory(one: record_text.Rank, *, has_failed: bool) -> bool:
    """An OOM that the job survived is no verdict."""
    if not has_failed or not isinstance(one.sidecar.get("oom"), dict):
        return False
    return one.sidecar.get("reason") == "oom" or _OUT_OF_MEMORY in str(one.sidecar.get("exception") or "")


def _dry(one: record_text.Rank) -> dict[str, Any]:
    found = one.sidecar.get("dryrun")
    return found if isinstance(found, dict) else {}
