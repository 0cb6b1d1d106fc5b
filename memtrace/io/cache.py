"""What was read before, kept in the user's cache directory: entries named by the file they are of.

An entry counts only for the very file that was read, unchanged, and for the very code that read it. It is written
beside its place and moved there, replaced or removed but never changed, so whoever has it mapped keeps what he has.
Nothing here raises for what is wrong with the disk, the directory or an entry: without one, the file itself is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memtrace import paths
from memtrace._version import __version__
from memtrace.io.bundle import Bundle, DamagedError, Packed
from memtrace.units import GiB, KiB

FORMAT = 1
"""Raised whenever the same file would give other values, for a reason that no source file of ours shows."""
MAX_BYTES = 2 * GiB
FREE_SHARE = 0.1
"""Entries together take no more than `MAX_BYTES`, nor than this share of what would be free without them."""
ENTRY = ".entry"
UNFINISHED = ".unfinished"
ABANDONED_SECONDS = 3600
SAMPLE_BYTES = 64 * KiB
_COLUMN_MAKERS = ("allocator", "attribution", "attribution/rules", "io", "model", "timeline")
_FINE_CLOCK_NS = 20_000_000
_COARSE_CLOCK_NS = 2_000_000_000
_HEADROOM = 2  # an entry may take half the room: others must have some too


@dataclass(frozen=True, slots=True)
class Key:
    """What must be equal for an entry to count. `samples` are CRC-32s of its head, middle and tail."""

    version: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """`max_bytes` is the limit within which the file was read, `default` the one that holds when none is given."""

    max_bytes: int
    default: int


class Origin(NamedTuple):
    """A file that entries may be of, as it was before it was read."""

    path: str
    key: Key
    settled: bool

    @property
    def unchanged(self) -> bool:
        """Whether the file is still what it was, and was old enough then for its time to show every change."""
        try:
            now = os.stat(self.path)  # noqa: PTH116 - a path of any kind, as the caller gave it
        except (OSError, ValueError):
            return False
        key = self.key
        return self.settled and _identity(now) == (key.device, key.inode, key.size, key.mtime_ns)

    @property
    def name(self) -> str:
        """The name of the entry: one a file, so that what a changed file was before does not stay."""
        return f"{self.key.device:x}-{self.key.inode:x}{ENTRY}"


def origin_of(path: str) -> Origin | None:
    """The file at a path, if it can have an entry: not standard input, no pipe, and the cache is not switched off."""
    if paths.cache_directory() is None:
        return None
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - opening a pipe would take from it
            return None
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            status = os.fstat(descriptor)
            samples = tuple(_samples(file, status.st_size))
        except OSError:
            return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Origin(path, Key(_version(), *_identity(status), samples), _settled(status.st_mtime_ns))


def find(origin: Origin, max_bytes: int | None) -> Bundle | None:
    """The entry of a file, if there is one that a reader with this limit (None: the default) could have made."""
    folder = paths.cache_directory()
    if folder is None or not paths.is_private(folder):
        return None
    path = folder / origin.name
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not paths.is_owner_trusted(status.st_uid):
            return None
        found = Bundle(descriptor)
        limit = found.get("limit", Limit)
        if found.get("key", Key) != origin.key or limit.max_bytes > (limit.default if max_bytes is None else max_bytes):
            return None
    except DamagedError:
        discard(origin)
        return None
    except (OSError, ValueError, MemoryError):
        return None
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.utime(path)  # its place in the order of use
    return found


def keep(origin: Origin, limit: Limit, values: Mapping[str, tuple[object, Any]]) -> bool:
    """Writes the entry of a file: of each name, a value and its class. Whether it is there now."""
    folder = paths.cache_directory()
    if folder is None:
        return False
    try:
        packed = Packed({"key": (origin.key, Key), "limit": (limit, Limit), **values})
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not paths.is_private(folder) or not _made_room(folder, packed.size, origin.name):
            return False
        with _unfinished(folder, origin.name) as path:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            with os.fdopen(descriptor, "wb") as file:
                packed.write(file)
            path.replace(folder / origin.name)
    except (OSError, ValueError, MemoryError):
        return False
    return True


def discard(origin: Origin) -> None:
    """Removes the entry of a file: it is damaged."""
    folder = paths.cache_directory()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / origin.name).unlink()


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _samples(file: Any, size: int) -> Iterator[int]:
    for start in (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES):
        file.seek(max(start, 0))
        yield zlib.crc32(file.read(SAMPLE_BYTES))


def _settled(mtime_ns: int) -> bool:
    """Whether a later change gives a later time: a clock of whole seconds may need two of them to move on."""
    grain = _FINE_CLOCK_NS if mtime_ns % 1_000_000_000 else _COARSE_CLOCK_NS
    return time.time_ns() - mtime_ns > grain


def _version() -> str:
    """Ours, and what changes whenever a source file does that has a part in making columns."""
    stamp = 0
    try:
        for folder in _COLUMN_MAKERS:
            with os.scandir(Path(__file__).parent.parent / folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.is_file():
                        status = entry.stat()
                        stamp = zlib.crc32(f"{entry.name} {status.st_mtime_ns} {status.st_size}".encode(), stamp)
    except OSError:  # from an archive: its files do not change
        stamp = 0
    return f"{__version__}/{FORMAT}/{sys.byteorder}/{stamp:08x}"


@contextlib.contextmanager
def _unfinished(folder: Path, name: str) -> Iterator[Path]:
    """A path for an entry to be written at; whatever is still there in the end is removed."""
    path = folder / f"{name}.{os.getpid()}-{os.urandom(4).hex()}{UNFINISHED}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _made_room(folder: Path, size: int, name: str) -> bool:
    """Makes room for an entry of that name by removing those used longest ago. False if it would take too much."""
    _sweep(folder)
    others = sorted(_listed(folder, ENTRY, but=name))
    held = sum(taken for _, taken, _ in others)
    free = _free_bytes(folder)
    bound = min(MAX_BYTES, int(FREE_SHARE * (free + held)))
    if size * _HEADROOM > bound:
        return False
    for _, taken, path in others:
        if held + size <= bound:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        held -= taken
    return True


def _sweep(folder: Path) -> None:
    """Removes what processes that were killed left unfinished."""
    for used, _, path in _listed(folder, UNFINISHED):
        if time.time() - used > ABANDONED_SECONDS:
            with contextlib.suppress(OSError):
                path.unlink()


def _listed(folder: Path, suffix: str, but: str = "") -> list[tuple[float, int, Path]]:
    """(time of last use, bytes, path) of the files in the cache with that suffix."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and entry.name != but:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, Path(entry.path)))
    return found


def _free_bytes(folder: Path) -> int:
    import shutil

    return shutil.disk_usage(folder).free
