"""`memtrace blame`: who owns the bytes at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memtrace.cli import options
from memtrace.cli.options import Common

if TYPE_CHECKING:
    from memtrace.api import Snapshot

OFS = ("allocated", "reserved", "requested", "active")
BYS = ("category", "stack", "frame", "file", "module", "phase", "stream", "block", "tree")
EXAMPLES = """\b
Examples:
  memtrace blame --peak snapshot.pickle
  memtrace blame --peak --why snapshot.pickle
  memtrace blame --at oom --by stack snapshot.pickle
  memtrace blame --of reserved --at 52840 snapshot.pickle
  memtrace blame --at 1.42s --by block --json snapshot.pickle
  memtrace blame --by tree -n 30 - < snapshot.pickle"""


@click.command("blame", epilog=EXAMPLES)
@options.snapshot_argument
@click.option("--peak", is_flag=True, help="The same as --at peak, the default.")
@click.option(
    "--at",
    metavar="WHEN",
    help="peak (of --of), end, oom (the last), an event number, or seconds since the first event: 1.42s.",
)
@click.option("--of", type=click.Choice(OFS), default="allocated", show_default=True, help="Which of torch's sizes.")
@click.option("--by", type=click.Choice(BYS), default="category", show_default=True, help="How to group.")
@click.option(
    "-n",
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Rows of text to show (of a tree: per branch).",
)
@click.option("--why", is_flag=True, help="Name the rules that decided, the frames they matched, and what they say.")
@click.option("--full-stack", is_flag=True, help="Show every Python frame of a stack, not only your own.")
@click.option("--cpp", is_flag=True, help="Keep C++ frames (where recorded), and stacks that differ in them apart.")
@options.rules_option
@options.device_option
@options.common
def command(
    common: Common,
    snapshot: str | None,
    peak: bool,
    at: str | None,
    of: str,
    by: str,
    top: int,
    why: bool,
    full_stack: bool,
    cpp: bool,
    rules: tuple[str, ...],
    device: int | None,
) -> None:
    """Who owns the bytes of SNAPSHOT at its peak, or at any moment. The rows sum to torch's counter, to the byte.

    SNAPSHOT is a pickle (plain, .gz, .xz, .zst), torch's plot HTML, a recording's directory, or - for standard
    input; left out, the newest recording.
    """
    if peak and at not in (None, "peak"):
        raise click.UsageError("--peak and --at name two moments")
    when = "peak" if at is None else at
    opened: Snapshot = options.open_snapshot(snapshot, common, options.user_rules(rules, quiet=common.quiet))
    chosen = options.choose_device(opened, device, common)
    answer = opened.blame(when, of, by, chosen, cpp=cpp)
    notices = opened.notices(chosen)
    options.show_notices(notices, common)
    if common.json:
        from memtrace.cli import blame_json

        blame_json.write(opened, answer, notices)
    else:
        from memtrace.cli import blame_text

        blame_text.Report(
            opened, answer, common, when, top, rules=rules, why=why, full_stack=full_stack, cpp=cpp
        ).write()
