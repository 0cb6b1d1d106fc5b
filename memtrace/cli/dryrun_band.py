"""`memtrace dryrun --band`: how far off the answer may be where the stand-in device had to choose.

The job runs again at the other end of each choice that it depends on; only the peaks are kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.cli import dryrun_again
from memtrace.cli.dryrun_text import Assumption
from memtrace.cli.record_text import Rank
from memtrace.units import format_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """`code` is the assumption's; `otherwise` says the other end, `environ` tells the device library of it."""

    code: str
    otherwise: str
    environ: dict[str, str]


CHOICES = (
    Choice(
        "streams", "if work on other streams is done only when the program waits", {"MEMTRACE_GPU_LATE_EVENTS": "1"}
    ),
    Choice("convolution", "if convolutions need no workspace", {"MEMTRACE_GPU_CONV": "0"}),
)


@dataclass(frozen=True, slots=True)
class End:
    """What came of one choice."""

    choice: Choice
    result: dryrun_again.Result


def has_choices(assumptions: Sequence[Assumption]) -> bool:
    """Whether any of them has another end."""
    return any(one.code == choice.code for one in assumptions for choice in CHOICES)


def run(plan: dryrun_again.Plan, assumptions: Sequence[Assumption], within: Path) -> list[End]:
    """The choices that these were about. Nothing stays in the folder `within`."""
    ends = []
    for choice in CHOICES:
        if any(one.code == choice.code for one in assumptions):
            with tempfile.TemporaryDirectory(prefix=".again-", dir=within, ignore_cleanup_errors=True) as folder:
                ends.append(End(choice, dryrun_again.run(plan, Path(folder), environ=choice.environ)))
    return ends


def sentences(ends: Sequence[End], ranks: Sequence[Rank]) -> Iterator[str]:
    """One for each, with the difference to what the `ranks` of the dry run itself had."""
    allocated = max((one.allocated or 0 for one in ranks), default=0)
    reserved = max((one.reserved or 0 for one in ranks), default=0)
    if not ends:
        yield "nothing that was chosen has another end: no work on other streams was asked for, no convolution guessed"
    for end in ends:
        found = end.result
        if found.fits is None:
            yield f"{end.choice.otherwise}: not known, the job failed"
            continue
        peaks = [
            f"{what} {format_bytes(size)} ({_signed(size - before)})" if size != before else f"{what} the same"
            for what, size, before in (
                ("allocated", found.allocated or 0, allocated),
                ("reserved", found.reserved or 0, reserved),
            )
        ]
        fits = f"fits with {format_bytes(found.room or 0)} to spare" if found.fits else "does not fit"
        yield f"{end.choice.otherwise}: peak {', '.join(peaks)}; it {fits}"


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else ''}{format_bytes(size)}"


def document(ends: Sequence[End]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "assumption": end.choice.code,
            "otherwise": end.choice.otherwise,
            "fits": end.result.fits,
            "allocated_peak_bytes": end.result.allocated,
            "reserved_peak_bytes": end.result.reserved,
            "room_bytes": end.result.room,
        }
        for end in ends
    ]
