"""The stored bytes: a file, a pipe or standard input, opened so that nothing hangs, counted and limited."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import os
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from memtrace.errors import MissingFileError, NotARecordingError, TooLargeError, UnreadableError
from memtrace.units import KiB, MiB, format_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

STDIN = "-"
BUFFER_BYTES = 128 * KiB
COPY_AGAIN = "Copy the file again from where it was made, or record anew: its writer may have been killed."
MAX_RATIO = 300  # real snapshots shrink to 1/20, with C++ stacks to 1/80
RATIO_FREE_BYTES = 16 * MiB
FIFO_PATIENCE_S = 3.0

Progress = Callable[[int, "int | None"], None]


class Raw(Protocol):
    """What is read from: a file, a pipe."""

    def readinto(self, buffer: Buffer, /) -> int | None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def open_stdin() -> Raw:
    """Standard input. Raises UnreadableError for a terminal or none."""
    piped = "Pipe a snapshot into it, as in: ssh HOST cat snapshot.pickle | memtrace info -"
    if sys.stdin is None or sys.stdin.closed:
        raise UnreadableError("standard input is closed", hint=piped)
    if sys.stdin.isatty():
        raise UnreadableError("standard input is a terminal", hint=piped)
    return cast("Raw", sys.stdin.buffer)


def open_file(path: str) -> tuple[Raw, int | None]:
    """The file and its size; the size is None for a pipe."""
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises for a name that is too long
        raise NotARecordingError(f"{path} is a directory", hint=_what_is_in(path))
    # Without O_NONBLOCK, opening a pipe that nobody writes to never returns.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file", hint=_near_names(path)) from None
    except PermissionError:
        raise UnreadableError(f"{path}: permission denied", hint="Ask its owner for read access.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableError(f"{path}: {reason}", hint="Name a snapshot file.") from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return io.FileIO(descriptor), status.st_size
    if stat.S_ISFIFO(status.st_mode):
        return _Fifo(descriptor, path), None
    os.close(descriptor)
    raise UnreadableError(f"{path} is a device, not a file", hint="Name a snapshot file, or - for standard input.")


def read_small(path: str, max_bytes: int) -> bytes:
    """A whole small file or pipe, never more than `max_bytes` of it. Raises a SourceError like `open_file`."""
    raw, size = open_file(path)
    with contextlib.closing(raw), io.BufferedReader(Stored(path, raw, size, max_bytes, None), BUFFER_BYTES) as reader:
        return reader.read()


class _Fifo(io.FileIO):
    """A pipe opened without waiting for its writer: it reads as ended until there is one."""

    def __init__(self, descriptor: int, path: str) -> None:
        super().__init__(descriptor)
        self._path = path
        self._had_writer = False

    def readinto(self, buffer: Buffer, /) -> int | None:
        count: int | None = super().readinto(buffer)
        if count == 0 and not self._had_writer:
            if not select.select([self], [], [], FIFO_PATIENCE_S)[0]:
                raise UnreadableError(f"{self._path}: nothing writes into this pipe", hint="Start its writer first.")
            count = super().readinto(buffer)
        self._had_writer = True
        return count


def _near_names(path: str) -> str:
    if "://" in path:
        return "memtrace reads files and standard input: download it first."
    directory, name = os.path.split(path)
    try:
        with os.scandir(directory or os.curdir) as entries:
            names = [
                entry.name for entry in itertools.islice(entries, 10_000) if not entry.name.endswith(".truth.json")
            ]
    except OSError:
        return f"There is no directory {directory} that can be read."
    begins = sorted(found for found in names if name and found.startswith(name))[:3]
    near = begins or difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not near:
        return "Check the path; a relative one counts from the current directory."
    return "Did you mean " + " or ".join(str(Path(directory, found)) for found in near) + "?"


def _what_is_in(path: str) -> str:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, 10_000) if ".pickle" in entry.name)
    except OSError:
        names = []
    if not names:
        return "Name a snapshot file."
    return f"Name a snapshot file in it, as {Path(path, names[0])}."


class Stored(io.RawIOBase):
    """The bytes as they are stored, counted; every operating system error becomes ours."""

    def __init__(self, path: str, raw: Raw, size: int | None, max_bytes: int, progress: Progress | None) -> None:
        self.path = path
        self.size = size
        self.max_bytes = max_bytes
        self.consumed = 0
        self._raw = raw
        self._progress = progress

    @property
    def shown(self) -> str:
        return "standard input" if self.path == STDIN else self.path

    @property
    def known_bytes(self) -> int:
        return self.consumed if self.size is None else self.size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        try:
            while filled < len(view):
                count = self._raw.readinto(view[filled:])
                if count is None:  # not blocking, and nothing there yet
                    select.select([self._raw], [], [])
                elif count == 0:
                    break
                else:
                    filled += count
        except OSError as error:
            hint = "Check the disk or the network drive it is on."
            raise UnreadableError(f"{self.shown}: {error.strerror or error}", hint=hint) from error
        self.consumed += filled
        self.limit(self.consumed)
        if self._progress is not None and filled:
            self._progress(self.consumed, self.size)
        return filled

    def limit(self, count: int) -> None:
        """Refuses when `count` bytes are more than was allowed."""
        if count > self.max_bytes:
            hint = f"Raise the limit, as in --max-size {format_bytes(2 * self.max_bytes).replace(' ', '')}."
            raise TooLargeError(f"{self.shown} holds more than {format_bytes(self.max_bytes)}", hint=hint)

    def limit_unpacked(self, count: int) -> None:
        """Refuses when `count` bytes came out of this source and that is too much."""
        self.limit(count)
        if count > RATIO_FREE_BYTES and count > MAX_RATIO * self.known_bytes:
            message = f"{self.shown} unpacks to more than {MAX_RATIO} times its size and {format_bytes(count)}"
            raise TooLargeError(message, hint="No snapshot packs that well. If you trust it, unpack it yourself first.")
