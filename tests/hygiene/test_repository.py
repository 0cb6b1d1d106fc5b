"""No file names a path of the machine it was written on, or a registry's address."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from recordings import ROOT

SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", ".memtrace"}
SKIPPED_ENDINGS = ("_cache", ".egg-info", ".hypothesis")
FORBIDDEN = re.compile(
    "/(?:work|farm|root)/|/tmp/(?:w|claude)"
    r"|files\.pythonhosted|pypi\.org|registry\.npmjs|deb\.debian"
)


def text_files() -> Iterator[tuple[Path, str]]:
    """Every file of the working tree that is text."""
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(name for name in names if name not in SKIPPED and not name.endswith(SKIPPED_ENDINGS))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_symlink():
                continue
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                yield path.relative_to(ROOT), text


def test_no_path_of_a_machine_and_no_address_of_a_registry() -> None:
    found = [
        f"{path}:{number}: {line.strip()[:120]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_walk_sees_the_project() -> None:
    seen = {str(path) for path, _ in text_files()}
    assert {"pyproject.toml", ".ci/run", "memtrace/errors.py", "tests/hygiene/test_repository.py"} <= seen
