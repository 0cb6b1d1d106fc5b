"""Where things are on disk. The only module that knows directories and environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

RECORDINGS_VARIABLE = "MEMTRACE_DIR"
RECORDINGS_NAME = ".memtrace"
_RECENT_BYTES = 1 << 20


def recording_roots(start: Path | None = None) -> Iterator[Path]:
    """Directories that may hold recordings, the first to look in first.

    `$MEMTRACE_DIR` if set, and then nothing else; else the nearest `.memtrace/` from `start` (default: here)
    upwards, then the directories of the index of recent recordings.
    """
    named = os.environ.get(RECORDINGS_VARIABLE)
    if named:
        yield Path(named).expanduser()
        return
    try:
        nearest = _nearest((start or Path.cwd()).resolve())
    except OSError:  # the current directory is gone
        nearest = None
    if nearest is not None:
        yield nearest
    yield from _recent()


def recent_index() -> Path:
    """The file that lists recent recordings, newest first."""
    import platformdirs

    return platformdirs.user_state_path("memtrace") / "recent.json"


def is_ours(path: Path) -> bool:
    """Whether a file belongs to this user or to root: what somebody else left in a shared directory is not opened."""
    if not hasattr(os, "getuid"):
        return True
    try:
        owner = path.stat().st_uid
    except OSError:
        return False
    return owner in (os.getuid(), 0)


def _nearest(here: Path) -> Path | None:
    """The walk ends at another owner's directory, at a file-system boundary and at the home directory."""
    home = Path.home().resolve()
    try:
        device = here.stat().st_dev
    except OSError:
        return None
    for folder in (here, *here.parents):
        try:
            if folder.stat().st_dev != device:
                return None
        except OSError:
            return None
        candidate = folder / RECORDINGS_NAME
        if candidate.is_dir() and is_ours(candidate):
            return candidate
        if folder == home or not is_ours(folder):
            return None
    return None


def _recent() -> Iterator[Path]:
    index = recent_index()
    try:
        if not is_ours(index) or index.stat().st_size > _RECENT_BYTES:
            return
        listed = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for item in listed.get("recordings", []) if isinstance(listed, dict) else []:
        if isinstance(item, str) and Path(item).is_dir() and is_ours(Path(item)):
            yield Path(item)
