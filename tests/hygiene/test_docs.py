"""The documentation says what the program does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import FIXTURES, ROOT

import memtrace

BLOCK = re.compile(r"^```(?:console|bash|sh|shell)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *FIXTURES.rglob("*.md")])


def readme_commands() -> list[str]:
    """The first two fenced command blocks of the README."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    assert len(blocks) >= 2, "the README begins with two command blocks"
    return [block.strip() for block in blocks[:2]]


def output_of(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def help_commands() -> list[str]:
    """The names under `Commands:` in `memtrace --help`."""
    text = output_of(sys.executable, "-m", "memtrace", "--help")
    return re.findall(r"^  (\w+)  ", text.partition("Commands:\n")[2].partition("\n\n")[0], re.MULTILINE)


def test_ci_runs_the_commands_of_the_readme() -> None:
    assert output_of("bash", ".ci/run", "commands").splitlines() == readme_commands()


def test_the_first_command_opens_a_recording_that_is_here() -> None:
    main = shlex.split(readme_commands()[0].rpartition("&&")[2])
    assert main[0].endswith("memtrace")
    assert [word for word in main if word.startswith("fixtures/") and (ROOT / word).is_file()]


def test_the_second_command_runs_the_tests() -> None:
    assert "-m pytest" in readme_commands()[1].rpartition("&&")[2]


def test_the_reference_is_current() -> None:
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    made = output_of(sys.executable, "-m", "memtrace.cli.reference")
    assert written == made, "run: python -m memtrace.cli.reference > docs/cli.md"


def test_the_reference_has_a_section_for_each_command() -> None:
    sections = re.findall(r"^#+ memtrace (\w+)$", (ROOT / "docs" / "cli.md").read_text("utf-8"), re.MULTILINE)
    assert help_commands(), "`memtrace --help` lists commands"
    assert set(help_commands()) == set(sections)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text("utf-8")) if not (page.parent / target).exists()]
    assert not broken


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] in ("Unreleased", memtrace.__version__)
    assert headings[0] == "Unreleased" or memtrace.__version__ in headings
