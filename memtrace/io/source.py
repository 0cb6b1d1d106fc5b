"""Where a snapshot's bytes come from: a file, a pipe or standard input, in whatever they were packed.

Owns opening, unpacking by content (gzip, xz, zstd, the HTML of torch's plot tool) and the limits on what unpacking
may produce. Nothing is held whole: each layer is a raw stream that makes bytes as the one above asks for them.
"""

from __future__ import annotations

import abc
import base64
import binascii
import contextlib
import difflib
import io
import itertools
import lzma
import os
import re
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from memtrace.errors import (
    GitLfsPointerError,
    MissingFileError,
    NotAPickleError,
    NotARecordingError,
    NotASnapshotError,
    SourceError,
    TooLargeError,
    TruncatedError,
    UnreadableError,
)
from memtrace.units import GiB, KiB, MiB, format_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_MAX_BYTES = 8 * GiB
STDIN = "-"

MAX_RATIO = 300  # real snapshots shrink to 1/20, with C++ stacks to 1/80
RATIO_FREE_BYTES = 256 * MiB
MAX_LAYERS = 4
FIFO_PATIENCE_S = 3.0

_BUFFER_BYTES = 128 * KiB
_XZ_MEMORY_BYTES = 144 * MiB  # a dictionary of 128 MiB, as zstd's own limit is; xz -9 takes 64 MiB
_HTML_HEAD_BYTES = 16 * MiB

_HOW_TO_WRITE = "A snapshot is what torch.cuda.memory._dump_snapshot('snapshot.pickle') writes."
_COPY_AGAIN = "Copy the file again from where it was made, or record anew: its writer may have been killed."

Progress = Callable[[int, "int | None"], None]


@dataclass(frozen=True)
class SourceInfo:
    """Which bytes were read: the path as given (`-` is standard input) and the size of that file, still packed.

    Of a pipe, whose size nobody knows, `file_bytes` is what was read so far.
    """

    path: str
    file_bytes: int


@dataclass(frozen=True)
class PickleStream:
    """The pickle in a source, unpacked as it is read."""

    reader: io.BufferedReader
    _source: _Source

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(self._source.path, self._source.known_bytes)


@contextlib.contextmanager
def open_pickle(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: Progress | None = None,
) -> Iterator[PickleStream]:
    """Opens the pickle in `path`, whatever it is packed in; `-` is standard input.

    `max_bytes` limits the file and whatever is unpacked from it. `progress(done, total)` counts bytes of the file;
    `total` is None for a pipe.
    """
    path = os.fspath(path)
    with contextlib.ExitStack() as resources:
        raw, size = (_open_stdin(), None) if path == STDIN else _open_file(path)
        if path != STDIN:
            resources.enter_context(contextlib.closing(raw))
        source = _Source(path, raw, size, max_bytes, progress)
        yield PickleStream(_unpacked(source), source)


# Opening


class _Raw(Protocol):
    def readinto(self, buffer: Buffer, /) -> int | None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def _open_stdin() -> _Raw:
    piped = "Pipe a snapshot into it, as in: ssh HOST cat snapshot.pickle | memtrace info -"
    if sys.stdin is None or sys.stdin.closed:
        raise UnreadableError("standard input is closed", hint=piped)
    if sys.stdin.isatty():
        raise UnreadableError("standard input is a terminal", hint=piped)
    return cast("_Raw", sys.stdin.buffer)


def _open_file(path: str) -> tuple[_Raw, int | None]:
    """The file and its size; the size is None for a pipe."""
    if os.path.isdir(path):
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
            names = [entry.name for entry in itertools.islice(entries, 10_000)]
    except OSError:
        return f"There is no directory {directory} that can be read."
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not near:
        return "Check the path; a relative one counts from the current directory."
    return "Did you mean " + " or ".join(os.path.join(directory, found) for found in near) + "?"


def _what_is_in(path: str) -> str:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, 10_000) if ".pickle" in entry.name)
    except OSError:
        names = []
    if not names:
        return "Name a snapshot file."
    return f"Name a snapshot file in it, as {os.path.join(path, names[0])}."


# Reading and unpacking


class _Source(io.RawIOBase):
    """The bytes as they are stored, counted; every operating system error becomes ours."""

    def __init__(self, path: str, raw: _Raw, size: int | None, max_bytes: int, progress: Progress | None) -> None:
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


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipMember:
    """zlib's decompressor with the interface that lzma's and zstd's have."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.eof and not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


@dataclass(frozen=True)
class _Packing:
    name: str
    magic: re.Pattern[bytes]
    # A new decompressor for one member, and the exception it raises on damage (imported only when needed).
    start: Callable[[], tuple[_Decompressor, type[Exception]]]


def _start_gzip() -> tuple[_Decompressor, type[Exception]]:
    return _GzipMember(), zlib.error


def _start_xz() -> tuple[_Decompressor, type[Exception]]:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES), lzma.LZMAError


def _start_zstd() -> tuple[_Decompressor, type[Exception]]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.ZstdDecompressor(), zstd.ZstdError


_PACKINGS = (
    _Packing("gzip", re.compile(rb"\x1f\x8b\x08"), _start_gzip),
    _Packing("xz", re.compile(rb"\xfd7zXZ\x00"), _start_xz),
    # The second form is a frame to skip; parallel zstd writes it first.
    _Packing("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _start_zstd),
)
_MAGIC_BYTES = 6


class _Layer(io.RawIOBase):
    """Makes bytes from those of the reader below; fills each buffer, so that one peek shows a whole head."""

    def __init__(self, below: io.BufferedReader, source: _Source) -> None:
        self._below = below
        self._source = source
        self._produced = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            piece = self._next(len(view) - filled)
            if not piece:
                break
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        self._produced += filled
        self._source.limit_unpacked(self._produced)
        return filled

    @abc.abstractmethod
    def _next(self, limit: int) -> bytes:
        """Some bytes, at most `limit`; none at the end."""


class _Unpacker(_Layer):
    """Decompresses; like the command line tools, all members one after the other, then ignores what follows."""

    def __init__(self, below: io.BufferedReader, source: _Source, packing: _Packing) -> None:
        super().__init__(below, source)
        self._packing = packing
        self._decompressor, self._error = packing.start()
        self._input = b""

    def _next(self, limit: int) -> bytes:
        name, shown = self._packing.name, self._source.shown
        try:
            return self._decompress(limit)
        except EOFError:
            raise TruncatedError(f"{shown}: the {name} data is cut off", hint=_COPY_AGAIN) from None
        except self._error as error:
            if "memory" in str(error).lower():
                raise self._needs_too_much() from None
            raise UnreadableError(f"{shown}: the {name} data is damaged ({error})", hint=_COPY_AGAIN) from error
        except MemoryError:
            raise self._needs_too_much() from None

    def _needs_too_much(self) -> TooLargeError:
        message = f"{self._source.shown}: unpacking the {self._packing.name} data needs too much memory"
        return TooLargeError(message, hint="Unpack it yourself first.")

    def _decompress(self, limit: int) -> bytes:
        while True:
            if self._decompressor.eof and not self._start_next_member():
                return b""
            data, self._input = self._input, b""
            at_end = False
            if self._decompressor.needs_input and not data:
                data = self._below.read1(_BUFFER_BYTES)
                at_end = not data
            piece = self._decompressor.decompress(data, limit)
            if piece:
                return piece
            if at_end and not self._decompressor.eof:
                raise EOFError

    def _start_next_member(self) -> bool:
        rest = self._decompressor.unused_data.lstrip(b"\0")  # members may be padded
        while len(rest) < _MAGIC_BYTES:
            more = self._below.read1(_BUFFER_BYTES)
            if not more:
                break
            rest = (rest + more).lstrip(b"\0")
        if not self._packing.magic.match(rest):
            return False
        self._decompressor, self._error = self._packing.start()
        self._input = rest
        return True


_EMBEDDED = re.compile(rb'"base64"\s{0,8}:\s{0,8}"')
_EMBEDDED_BYTES = 32  # longer than any match
_NOT_BASE64 = b"\\ \t\r\n"  # escapes and breaks that JSON and editors may put in


class _EmbeddedBase64(_Layer):
    """Decodes the base64 string that the reader below stands at, up to its closing quote."""

    def __init__(self, below: io.BufferedReader, source: _Source) -> None:
        super().__init__(below, source)
        self._decoded = b""
        self._carry = b""
        self._ended = False

    def _next(self, limit: int) -> bytes:
        while not self._decoded and not self._ended:
            self._decoded = self._decode(self._below.read1(_BUFFER_BYTES))
        piece, self._decoded = self._decoded[:limit], self._decoded[limit:]
        return piece

    def _decode(self, chunk: bytes) -> bytes:
        shown = self._source.shown
        if not chunk:
            raise TruncatedError(f"{shown}: the page is cut off inside the snapshot", hint=_COPY_AGAIN)
        text, quote, _ = chunk.partition(b'"')
        self._ended = bool(quote)
        text = self._carry + text.translate(None, _NOT_BASE64)
        whole = len(text) if self._ended else len(text) - len(text) % 4
        self._carry = text[whole:]
        try:
            return base64.b64decode(text[:whole], validate=True)
        except binascii.Error as error:
            message = f"{shown}: the snapshot in the page is damaged ({error})"
            raise UnreadableError(message, hint=_COPY_AGAIN) from None


def _unpacked(source: _Source) -> io.BufferedReader:
    reader: io.BufferedReader = io.BufferedReader(source, _BUFFER_BYTES)
    for _ in range(MAX_LAYERS + 1):
        head = reader.peek(_BUFFER_BYTES)
        packing = next((packing for packing in _PACKINGS if packing.magic.match(head)), None)
        if packing is not None:
            reader = io.BufferedReader(_Unpacker(reader, source, packing), _BUFFER_BYTES)
        elif _is_markup(head) and _skip_to_embedded(reader):
            reader = io.BufferedReader(_EmbeddedBase64(reader, source), _BUFFER_BYTES)
        elif _is_pickle(head):
            return reader
        else:
            raise _no_pickle(head, source.shown)
    message = f"{source.shown} is packed more than {MAX_LAYERS} times"
    raise NotAPickleError(message, hint="Unpack it yourself and name the snapshot inside.")


# Recognising


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and not head.startswith(_TORCH_SAVE_BEFORE_1_6)


def _is_markup(head: bytes) -> bool:
    return head[:256].removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<"


def _skip_to_embedded(reader: io.BufferedReader) -> bool:
    """Moves to the first character of the embedded snapshot, if there is one near the top."""
    tail = b""
    skipped = 0
    while skipped < _HTML_HEAD_BYTES:
        window = reader.peek(_BUFFER_BYTES)
        if not window:
            return False
        found = _EMBEDDED.search(tail + window)
        if found:
            reader.read(found.end() - len(tail))
            return True
        reader.read(len(window))
        skipped += len(window)
        tail = (tail + window)[-_EMBEDDED_BYTES:]
    return False


_TORCH_SAVE_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_PICKLES = (b"(dp", b"(lp", b"}q\x00", b"]q\x00", b"}q\x01", b"]q\x01")
_TEXT = re.compile(rb"[\t\n\f\r\x1b\x20-\x7e\x80-\xff]+")


def _no_pickle(head: bytes, shown: str) -> SourceError:
    """What `head`, the beginning of something else, is instead."""
    if not head:
        return NotAPickleError(f"{shown} is empty", hint=_COPY_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        hint = "Fetch the file itself: git lfs pull"
        return GitLfsPointerError(f"{shown} is a Git-LFS pointer, not the file it stands for", hint=hint)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        message = f"{shown} is a zip archive, as torch.save writes; snapshots are plain pickles"
        return NotAPickleError(message, hint=_HOW_TO_WRITE + " If one is inside, unzip it first.")
    if head.startswith(_TORCH_SAVE_BEFORE_1_6):
        return NotAPickleError(f"{shown} was written by torch.save", hint=_HOW_TO_WRITE)
    if head.startswith(b"BZh"):
        return NotAPickleError(f"{shown} is bzip2, which is not read", hint="Unpack it first: bunzip2")
    if head.startswith(_OLD_PICKLES):
        message = f"{shown} is a pickle of protocol 0 or 1; torch writes 2 or newer"
        return NotASnapshotError(message, hint=_HOW_TO_WRITE)
    return NotAPickleError(f"{shown} is {_kind_of_text(head)}", hint=_HOW_TO_WRITE)


def _kind_of_text(head: bytes) -> str:
    start = head[:256].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"<":
        return "a web page without a snapshot of torch's plot tool in it"
    if start[:1] in (b"{", b"["):
        return "JSON, not a pickle"
    if _TEXT.fullmatch(head[:1024]) and head.isascii():
        return "text, not a pickle"
    return f"no pickle: it begins with {head[:8]!r}"
