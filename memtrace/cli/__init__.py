"""The command line: one file per command, loaded when it is run.

`main` is the only place that turns errors into exit codes (contract.md, Exit codes).
"""

from __future__ import annotations

import importlib
import sys

import click

from memtrace._version import __version__

COMMANDS = {
    "blame": "Who owns the bytes at the peak, or at any moment.",
    "dryrun": "Run a training job without a GPU: does it fit, and what holds its memory.",
    "fits": "The least memory that the recorded run could have done with.",
    "info": "One page about a snapshot.",
    "ls": "The recordings there are.",
    "oom": "Why memory ran out: who asked, what was free, what holds the rest.",
    "path": "Where the newest recording is, for scripts.",
    "record": "Run a training job and record its GPU memory.",
    "rules": "The rules that say what memory is for, and yours.",
    "verify": "Check a snapshot against itself, or against torch's counters.",
    "whatif": "The recorded run under other allocator settings, simulated.",
    "zero": "ZeRO's theory against a recording, or for a job to come.",
}
"""Command -> the line in `memtrace --help`. Each is `memtrace.cli.<command>:command`."""


class _LazyGroup(click.Group):
    """Knows every command by name and imports only the one that runs: `--help` needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"memtrace.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from memtrace.errors import QuestionError

            raise QuestionError.unknown("command", args[0], COMMANDS, where="memtrace")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + (self.epilog or "") + "\n")


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Examples:\n"
    "  memtrace record -- deepspeed train.py      run a job and record it\n"
    "  memtrace dryrun -- deepspeed train.py      run it without a GPU: does it fit\n"
    "  memtrace blame --peak snapshot.pickle      who owns the peak\n"
    "  memtrace blame --at oom --by stack x.pickle\n"
    "  memtrace info x.pickle.xz                  what is in this file\n"
    "  memtrace verify x.pickle --truth x.json    is every counter right?",
)
@click.version_option(__version__, "-V", "--version", prog_name="memtrace")
def cli() -> None:
    """Where every byte of a PyTorch job's GPU memory went, from torch.cuda.memory snapshots."""


def main() -> None:
    """Runs the command line and exits with the contract's code."""
    from memtrace.cli import diagnostics

    sys.exit(diagnostics.guarded(cli))
