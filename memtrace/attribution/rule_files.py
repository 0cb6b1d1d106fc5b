"""The files that user rules stand in: found, and read as text. Imports little, as every `blame` looks for one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from memtrace import paths
from memtrace.attribution.toml_lines import loads
from memtrace.errors import MissingFileError, RulesError, SourceError, TooLargeError
from memtrace.units import MiB, format_bytes

PROJECT_FILE = "pyproject.toml"
MAX_BYTES = 1 * MiB
_NAME_ONE = "Name a TOML file with [[rule]] in it."
_SECTION = re.compile(rb"^[ \t]*\[+[ \t]*tool[ \t]*\.[ \t]*memtrace\b", re.MULTILINE)


def find(start: Path | None = None) -> Path | None:
    """The nearest pyproject.toml with a `[tool.memtrace]`, from `start` (default: here) upwards.

    The walk ends where that for recordings does (`paths.upward`); a file of somebody else's is not opened.
    """
    for folder in paths.upward(start):
        file = folder / PROJECT_FILE
        if paths.is_ours(file) and file.is_file() and _has_section(file):
            return file
    return None


def text_of(name: str) -> str:
    """A whole file. Raises RulesError."""
    from memtrace.io.opening import read_small

    try:
        content = read_small(name, MAX_BYTES)
    except TooLargeError:
        raise RulesError(f"{name} is larger than {format_bytes(MAX_BYTES)}: no file of rules", hint=_NAME_ONE) from None
    except SourceError as error:
        near = error.hint if isinstance(error, MissingFileError) else _NAME_ONE
        raise RulesError(error.message, hint=near) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RulesError(f"{name}:{line}: not UTF-8, as TOML is", hint="Save the file as UTF-8.") from None


def _has_section(file: Path) -> bool:
    """Whether a pyproject.toml speaks of us. One that is broken elsewhere is somebody else's concern."""
    from memtrace.io.opening import read_small

    try:
        content = read_small(os.fspath(file), MAX_BYTES)
        if b"memtrace" not in content:
            return False
        tool = loads(content.decode("utf-8-sig")).get("tool")
    except SourceError:
        return False
    except (ValueError, RecursionError):
        return _SECTION.search(content) is not None
    return isinstance(tool, dict) and "memtrace" in tool
