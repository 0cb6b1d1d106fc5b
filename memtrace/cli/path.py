"""`memtrace path`: where the newest recording is."""

from __future__ import annotations

import sys

import click

EXAMPLES = """\b
Examples:
  memtrace path                                      the rank with the highest peak
  cp "$(memtrace path -r 3)" rank3.pickle.zst
  cd "$(memtrace path --directory)\""""


@click.command("path", epilog=EXAMPLES)
@click.option("-r", "--rank", type=click.IntRange(min=0), help="Which rank (default: the one with the highest peak).")
@click.option("--directory", is_flag=True, help="The recording's directory instead of a snapshot in it.")
def command(rank: int | None, *, directory: bool) -> None:
    """Prints the path of the newest recording's snapshot, as it is, for scripts.

    It is the recording that every command takes when none is named: in .memtrace here or above, or in $MEMTRACE_DIR,
    else the last one of this user. Exit code 4 if there is none.
    """
    from memtrace.io import recording

    chosen = recording.choose(recording.newest(), rank)
    sys.stdout.write(f"{chosen.directory if directory else chosen.path}\n")
