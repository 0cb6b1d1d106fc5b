"""docs/cli.md, from the commands' own help: `python -m memtrace.cli.reference > docs/cli.md`."""

from __future__ import annotations

import sys

import click

from memtrace.cli import COMMANDS, cli


def text() -> str:
    """The whole page."""
    root = click.Context(cli, info_name="memtrace", help_option_names=["-h", "--help"], terminal_width=100)
    parts = [
        "# Command line\n",
        "Made by `python -m memtrace.cli.reference`; do not edit.\n",
        "## memtrace\n",
        f"```text\n{cli.get_help(root).rstrip()}\n```\n",
    ]
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None, "every name in COMMANDS is a module with a command"
        context = click.Context(command, info_name=name, parent=root, max_content_width=100, terminal_width=100)
        parts += [f"## memtrace {name}\n", f"```text\n{command.get_help(context).rstrip()}\n```\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(text())
