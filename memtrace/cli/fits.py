"""`memtrace fits`: how little memory the recorded run could have done with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from memtrace.cli import diagnostics, options
from memtrace.cli.options import Common
from memtrace.errors import QuestionError

if TYPE_CHECKING:
    from memtrace.analysis.fits import Fits, Smallest
    from memtrace.analysis.whatif import Simulation
    from memtrace.api import Snapshot
    from memtrace.model import Notice

EXAMPLES = """\b
Examples:
  memtrace fits snapshot.pickle --gpu A100-40
  memtrace fits snapshot.pickle --gpu 24GiB --json
  memtrace fits snapshot.pickle                   the smallest limit alone"""


@click.command("fits", epilog=EXAMPLES)
@options.snapshot_argument
@click.option(
    "--gpu",
    "named",
    metavar="NAME|SIZE",
    help="Whether it fits there: by name (H100, A100-40) or size (40GiB).",
)
@options.device_option
@options.common
def command(common: Common, snapshot: str | None, named: str | None, device: int | None) -> None:
    """The smallest limit on reserved memory under which SNAPSHOT's run completes, as recorded and at best.

    The limit is torch's own (set_per_process_memory_fraction), found by simulating the recorded requests under ever
    smaller ones: cached memory is given back and asked for again, as torch does. The same is done for the settings of
    `memtrace whatif --sweep`, and the one that needs least is named.
    """
    from memtrace.analysis import fits as analysis
    from memtrace.analysis.whatif import assumptions

    room = options.gpu_bytes(named)
    opened: Snapshot = options.open_snapshot(snapshot, common)
    chosen = options.choose_device(opened, device, common)
    shown = common.progress and not common.quiet
    with diagnostics.progress("simulating", enabled=shown, amount=_settings) as progress:
        simulation = opened.simulation(chosen)
        if not simulation.is_exact:
            raise QuestionError(
                f"no prediction: {simulation.reason}",
                hint="The recorded setting is simulated first; only an exact match counts. memtrace verify FILE checks "
                "the file itself.",
            )
        answer = analysis.fits(simulation, progress)
        outside = None if opened.sidecar is None else opened.sidecar.outside_of(chosen)
        inside = None
        if room is not None:
            inside = tuple(_is_in(simulation, one, room, outside) for one in (answer.recorded, answer.best))
    said = (*assumptions(simulation, ()), *_on_outside(room, outside))
    notices = (*opened.file_notices(chosen), *said)
    options.show_notices(opened.file_notices(chosen), common)
    if common.json:
        _write_json(opened, chosen, answer, named, room, outside, inside, notices)
    else:
        _write_text(opened, chosen, answer, named, room, outside, inside, common, said)


def _settings(done: int) -> str:
    return f"setting {done:,}"


def _on_outside(room: int | None, outside: int | None) -> tuple[Notice, ...]:
    """What a device holds beside torch's memory."""
    from memtrace.model import Notice
    from memtrace.units import format_bytes

    if room is None:
        return ()
    if outside is None:
        text = "what a device holds beside torch's memory is not recorded: the context takes about 0.5 GiB, NCCL more"
        return (Notice("outside-unknown", text),)
    text = f"{format_bytes(outside)} of the recorded device was not torch's; as much is kept free of the limit"
    return (Notice("outside", text),)


def _is_in(simulation: Simulation, smallest: Smallest, room: int, outside: int | None) -> bool:
    """Whether it completes with all of the room: more than the smallest limit can fail."""
    from memtrace.analysis.fits import serves

    return smallest.sure + (outside or 0) <= room and serves(simulation, smallest.change, room - (outside or 0))


def _write_json(
    opened: Snapshot,
    device: int,
    answer: Fits,
    named: str | None,
    room: int | None,
    outside: int | None,
    inside: tuple[bool, ...] | None,
    notices: Iterable[Notice],
) -> None:
    from memtrace.cli import output

    recorded, best = answer.recorded, answer.best
    data = {
        "gpu": named,
        "limit_bytes": room,
        "outside_bytes": outside,
        "fits": None if inside is None else inside[0],
        "fits_best": None if inside is None else inside[1],
        "smallest_limit_bytes": recorded.limit,
        "smallest_limit_bytes_high": recorded.sure,
        "best_settings": best.change.conf() or best.change.in_words(),
        "smallest_limit_bytes_best": best.limit,
        "smallest_limit_bytes_best_high": best.sure,
        "settings_tried": answer.tried,
        "allocated_bytes_peak": opened.peak("allocated", device).bytes,
        "reserved_bytes_peak": opened.peak("reserved", device).bytes,
    }
    output.write_document("fits", output.snapshot_facts(opened, device), data, notices)


def _write_text(
    opened: Snapshot,
    device: int,
    answer: Fits,
    named: str | None,
    room: int | None,
    outside: int | None,
    inside: tuple[bool, ...] | None,
    shared: Common,
    said: Iterable[Notice],
) -> None:
    from memtrace.cli.output import Column, Page
    from memtrace.units import format_bytes

    page = Page(shared.color)

    def size(number: int) -> str:
        return format_bytes(number, shared.units)

    recorded, best = answer.recorded, answer.best
    if room is not None and named is not None and inside is not None:
        where = size(room) if named[:1].isdigit() else f"{named} ({size(room)})"
        page.line(_sentence(answer, where, room, outside, inside, size), "bold")
    else:
        page.line(
            f"It completes under a limit of {size(recorded.sure)} as recorded, {size(best.sure)} at best.", "bold"
        )
    page.line()
    rows = [_row("as recorded", recorded, size)]
    if best is not recorded:
        rows.append(_row(best.change.in_words(), best, size))
    columns = [
        Column("setting"),
        Column("smallest limit", right=True),
        Column("reserved under it", right=True),
    ]
    page.table(columns, rows)
    page.line()
    allocated, reserved = opened.peak("allocated", device), opened.peak("reserved", device)
    page.line(
        f"Recorded: {size(allocated.bytes)} allocated at the peak, {size(reserved.bytes)} reserved. "
        f"{answer.tried} settings were tried; memtrace whatif --sweep shows what each reserves without a limit."
    )
    page.line(
        "Near the smallest limit torch gives cached memory back and asks for it again and again, which takes time."
    )
    for notice in said:
        page.line(f"Assumed: {notice.message}.")


def _row(name: str, smallest: Smallest, size: Callable[[int], str]) -> list[str]:
    limit = size(smallest.limit)
    if smallest.sure != smallest.limit:
        limit += f"\nto {size(smallest.sure)} as segments may lie"
    return [name, limit, size(smallest.peak)]


def _sentence(
    answer: Fits,
    where: str,
    room: int,
    outside: int | None,
    inside: tuple[bool, ...],
    size: Callable[[int], str],
) -> str:
    recorded, best = answer.recorded, answer.best
    left = room - (outside or 0)
    if inside[0]:
        return f"It fits on {where} as recorded, with {size(left - recorded.sure)} to spare."
    spare = f"{size(recorded.sure - left)} is missing"
    if recorded.sure <= left:
        spare = f"it can fail with all of it, and completes under a limit of {size(recorded.sure)}"
    if inside[1]:
        return f"It does not fit on {where} as recorded ({spare}), but with {best.change.in_words()} it does."
    if best.sure <= left:
        return (
            f"It does not surely fit on {where}: under a limit of {size(best.sure)} it does ({best.change.in_words()})."
        )
    return f"It does not fit on {where}: at best ({best.change.in_words()}) {size(best.sure - left)} is missing."
