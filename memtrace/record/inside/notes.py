"""What the recorder has to say: to its log, to the sidecar, and (rarely) to the person in front of the job."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any, Callable, List, Optional, Set, TypeVar

from . import process

Hook = TypeVar("Hook", bound=Callable[..., Any])

NOTES: List[str] = []
"""What could not be recorded and why: it goes into the sidecar."""

_MOST_NOTES = 100
_MOST_LINES = 10_000
_LONGEST = 1000

_directory: Optional[str] = None
_said: Set[str] = set()
_lines = 0


def configure(directory: Optional[str]) -> None:
    """Where the recording, and so the log, is. None: nowhere."""
    global _directory
    _directory = directory


def log(text: str) -> None:
    """One line in the recording's log. Never raises, and gives up silently where there is no writing."""
    global _lines
    if _directory is None or _lines >= _MOST_LINES:
        return
    _lines += 1
    try:
        rank = process.rank()
        who = f"pid {os.getpid()} rank {'-' if rank is None else rank}"
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {who}: {_one_line(text)}\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        where = os.open(os.path.join(_directory, "log"), flags, 0o644)
        try:
            os.write(where, line.encode("utf-8", "backslashreplace"))
        finally:
            os.close(where)
    except Exception:  # noqa: BLE001 - there is nobody left to tell
        return


def say(text: str) -> None:
    """One line on stderr, once for each text, and in the log."""
    log(text)
    if text in _said:
        return
    _said.add(text)
    try:
        sys.stderr.write(f"memtrace: {_one_line(text)}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - a job may put anything in the place of stderr, and close it
        return


def note(text: str) -> None:
    """Kept for the sidecar, and in the log; once for each text."""
    line = _one_line(text)
    if line in NOTES:
        return
    if len(NOTES) < _MOST_NOTES:
        NOTES.append(line)
    log(line)


def guard(hook: Hook) -> Hook:
    """A hook that never raises into the job: what goes wrong in it is noted, and it answers None.

    What is no Exception (KeyboardInterrupt, SystemExit) comes from the job's handlers of signals, and is the job's.
    """

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - that is what this is for
            try:
                note(f"{getattr(hook, '__qualname__', 'hook')}: {described(error)}")
            except Exception:  # noqa: BLE001 - at the end of the stack, or of memory
                return None
            return None

    return guarded  # type: ignore[return-value]


def described(error: BaseException) -> str:
    """`ValueError: what it says`; an error of the job's may be unable to say it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - as said
        text = "?"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _one_line(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text[:_LONGEST])
