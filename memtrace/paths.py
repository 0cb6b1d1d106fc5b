"""Where things are on disk. The only module that knows directories and environment variables."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

RECORDINGS_VARIABLE = "MEMTRACE_DIR"
RECORDINGS_NAME = ".memtrace"
CACHE_VARIABLE = "MEMTRACE_CACHE_DIR"
NO_CACHE_VARIABLE = "MEMTRACE_NO_CACHE"
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
    for folder in upward(start):
        nearest = folder / RECORDINGS_NAME
        if is_ours(nearest) and nearest.is_dir():
            yield nearest
            break
    yield from _recent()


def upward(start: Path | None = None) -> Iterator[Path]:
    """`start` (default: the current directory) and the directories above it, nearest first.

    The walk ends at another owner's directory, at a file-system boundary and at the home directory.
    """
    try:
        here = (start or Path.cwd()).resolve()
        device = here.stat().st_dev
    except OSError:  # the directory is gone
        return
    try:
        home: Path | None = Path.home().resolve()
    except (OSError, RuntimeError):  # a user without a home
        home = None
    for folder in (here, *here.parents):
        try:
            if folder.stat().st_dev != device:
                return
        except OSError:
            return
        yield folder
        if folder == home or not is_ours(folder):
            return


def recent_index() -> Path:
    """The file that lists recent recordings, newest first."""
    import platformdirs

    return platformdirs.user_state_path("memtrace") / "recent.json"


def cache_directory() -> Path | None:
    """Where snapshots that were read are kept as columns: `$MEMTRACE_CACHE_DIR`, else the user's cache directory.

    None when there is no such directory (no home), or `$MEMTRACE_NO_CACHE` is set. It need not exist.
    """
    if os.environ.get(NO_CACHE_VARIABLE):
        return None
    named = os.environ.get(CACHE_VARIABLE)
    try:
        if named:
            return Path(named).expanduser().absolute()
        found = _user_cache()
    except (OSError, RuntimeError):  # no home, or the current directory is gone
        return None
    return found if found.is_absolute() else None


@contextlib.contextmanager
def environment_with(variable: str, value: str) -> Iterator[None]:
    """Sets a variable that is not set, for as long as this lasts: programs started later do not inherit it."""
    if variable in os.environ:
        yield
        return
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]


def shown(path: Path) -> str:
    """A path as short as it can be typed here."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def is_ours(path: Path) -> bool:
    """Whether a file belongs to this user or to root: what somebody else left in a shared directory is not opened."""
    try:
        return is_owner_trusted(path.stat().st_uid)
    except OSError:
        return False


def is_owner_trusted(owner: int) -> bool:
    """Whether a user id is this user's or root's. Where files have no such owner, yes."""
    return not hasattr(os, "getuid") or owner in (os.getuid(), 0)


def is_private(folder: Path) -> bool:
    """Whether this is a directory of ours into which nobody else can put anything."""
    try:
        status = folder.stat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode) or not is_owner_trusted(status.st_uid):
        return False
    return not hasattr(os, "getuid") or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _user_cache() -> Path:
    """Our part of the user's cache. On Linux found without platformdirs: importing it takes 4 ms at every start."""
    if sys.platform == "linux":
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (named if named.is_absolute() else Path.home() / ".cache") / "memtrace"
    import platformdirs

    return platformdirs.user_cache_path("memtrace", appauthor=False)


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
