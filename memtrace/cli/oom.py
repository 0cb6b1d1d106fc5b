"""`memtrace oom`: why memory ran out, or whether a request would have fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memtrace.cli import diagnostics, options
from memtrace.cli.options import Common
from memtrace.errors import QuestionError

if TYPE_CHECKING:
    from memtrace.analysis.cures import Cures
    from memtrace.analysis.oom import Oom
    from memtrace.api import Snapshot
    from memtrace.model import Notice

EXAMPLES = """\b
Examples:
  memtrace oom                                the newest recording: the rank that ran out first
  memtrace oom snapshot.pickle
  memtrace oom --gpu H100 snapshot.pickle     what of the device was not torch's
  memtrace oom --at 125125 --json snapshot.pickle
  memtrace oom --if 2GiB --gpu 80GiB snapshot.pickle    would it have fitted at the peak?"""


@click.command("oom", epilog=EXAMPLES)
@options.snapshot_argument
@click.option(
    "--at",
    metavar="WHEN",
    help="One of several requests that failed, by its event. With --if: peak (default), end, an event or 1.42s.",
)
@click.option(
    "--if",
    "size",
    metavar="SIZE",
    callback=options.size,
    help="Whether a request of this size would have fitted, whatever failed: 2GiB.",
)
@options.gpu_option
@click.option(
    "--limit",
    metavar="SIZE",
    callback=options.size,
    help="Torch's own cap, where the recording does not say it: 40GiB.",
)
@click.option(
    "-n", "--top", type=click.IntRange(min=1), default=5, show_default=True, help="Rows of each table of text."
)
@options.rules_option
@options.device_option
@options.common
def command(
    common: Common,
    snapshot: str | None,
    at: str | None,
    size: int | None,
    gpu: int | None,
    limit: int | None,
    top: int,
    rules: tuple[str, ...],
    device: int | None,
) -> None:
    """Why SNAPSHOT ran out of memory: who asked, what was free, who holds the rest, and what kind of lack it was.

    Each request that failed for good gets one verdict: fragmentation, other-streams, limit (torch's own cap),
    outside-torch, or lack. What is shown is the moment before anything was unwound.
    """
    found = options.user_rules(rules, quiet=common.quiet)
    opened: Snapshot = options.open_snapshot(snapshot, common, found, at_oom=size is None)
    chosen = options.choose_device(opened, device, common)
    if size is None:
        answers = _failed(opened, chosen, at, gpu, limit)
    else:
        answers = (opened.would_fit(size, at or "peak", chosen, capacity=gpu, limit=limit),)
    notices = (*_on_capacity(answers[-1]), *opened.notices(chosen))
    options.show_notices(notices, common)
    tried = None if size is not None else _cures(opened, chosen, answers[-1], limit, common)
    if common.json:
        from memtrace.cli import oom_json

        oom_json.write(opened, chosen, answers, notices, tried)
    else:
        from memtrace.cli import oom_text

        oom_text.Report(opened, answers, common, top, rules=rules, when=at or "peak", tried=tried).write()


def _cures(opened: Snapshot, device: int, answer: Oom, limit: int | None, shared: Common) -> Cures:
    """The settings that would have served the request, by simulation."""
    from memtrace.analysis.cures import cures

    shown = shared.progress and not shared.quiet
    with diagnostics.progress("simulating", enabled=shown, amount=lambda done: f"setting {done}") as progress:
        return cures(opened.simulation(device, limit=limit), answer.place.event, limit, progress)


def _failed(opened: Snapshot, device: int, at: str | None, gpu: int | None, limit: int | None) -> tuple[Oom, ...]:
    """The requests that failed: all of them, or the one at that event."""
    answers = opened.ooms(device, capacity=gpu, limit=limit)
    if not answers:
        raise QuestionError(
            "no out-of-memory event in this trace",
            hint=f"{_elsewhere(opened, device)}memtrace oom --if 2GiB says whether a request would have fitted at the "
            "peak, memtrace blame --peak who holds it.",
        )
    if at is None:
        return answers
    event = opened.event(at, device=device)
    for answer in answers:
        if answer.place.event == event:
            return (answer,)
    events = ", ".join(str(answer.place.event) for answer in answers)
    raise QuestionError(f"event {event} is no out-of-memory event", hint=f"There is: {events}.")


def _elsewhere(opened: Snapshot, device: int) -> str:
    """Other devices on which a request failed."""
    from memtrace.analysis.oom import oom_events

    others = [
        str(trace.device)
        for trace in opened.data.traces
        if trace.device != device and oom_events(opened.replay(trace.device), trace)
    ]
    return f"Device {', '.join(others)} has one (-d). " if others else ""


def _on_capacity(answer: Oom) -> tuple[Notice, ...]:
    """What has to be said where --gpu contradicts the recorder."""
    from memtrace.model import Notice
    from memtrace.units import format_bytes

    given, noted = answer.capacity.capacity_bytes, answer.capacity.noted_bytes
    if given is None or noted is None or given == noted:
        return ()
    text = f"the recorder noted a device of {format_bytes(noted)}; --gpu's {format_bytes(given)} is taken"
    return (Notice("capacity", text),)
