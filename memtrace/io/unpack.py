"""Layers of packing, each a raw stream that makes bytes as the one above asks: gzip, xz, zstd, base64 in HTML."""

from __future__ import annotations

import abc
import base64
import binascii
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memtrace.errors import TooLargeError, TruncatedError, UnreadableError
from memtrace.io.opening import BUFFER_BYTES, COPY_AGAIN, Stored
from memtrace.units import MiB

if TYPE_CHECKING:
    from typing_extensions import Buffer

_XZ_MEMORY_BYTES = 144 * MiB  # a dictionary of 128 MiB, as zstd's own limit is; xz -9 takes 64 MiB
_HTML_HEAD_BYTES = 16 * MiB
_MAX_EMPTY_MEMBERS = 1000  # each costs a copy of what follows; parallel zstd writes one before each full one


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


PACKINGS = (
    _Packing("gzip", re.compile(rb"\x1f\x8b\x08"), _start_gzip),
    _Packing("xz", re.compile(rb"\xfd7zXZ\x00"), _start_xz),
    # The second form is a frame to skip; parallel zstd writes it first.
    _Packing("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _start_zstd),
)
_MAGIC_BYTES = 6


class _Layer(io.RawIOBase):
    """Makes bytes from those of the reader below; fills each buffer, so that one peek shows a whole head."""

    def __init__(self, below: io.BufferedReader, source: Stored) -> None:
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


class Unpacker(_Layer):
    """Decompresses; like the command line tools, all members one after the other, then ignores what follows."""

    def __init__(self, below: io.BufferedReader, source: Stored, packing: _Packing) -> None:
        super().__init__(below, source)
        self._packing = packing
        self._decompressor, self._error = packing.start()
        self._input = b""
        self._empty_members = 0

    def _next(self, limit: int) -> bytes:
        name, shown = self._packing.name, self._source.shown
        try:
            return self._decompress(limit)
        except EOFError:
            raise TruncatedError(f"{shown}: the {name} data is cut off", hint=COPY_AGAIN) from None
        except self._error as error:
            if "memory" in str(error).lower():
                raise self._needs_too_much() from None
            raise UnreadableError(f"{shown}: the {name} data is damaged ({error})", hint=COPY_AGAIN) from error
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
                data = self._below.read1(BUFFER_BYTES)
                at_end = not data
            piece = self._decompressor.decompress(data, limit)
            if piece:
                self._empty_members = 0
                return piece
            if at_end and not self._decompressor.eof:
                raise EOFError

    def _start_next_member(self) -> bool:
        rest = self._decompressor.unused_data.lstrip(b"\0")  # members may be padded
        while len(rest) < _MAGIC_BYTES:
            more = self._below.read1(BUFFER_BYTES)
            if not more:
                break
            rest = (rest + more).lstrip(b"\0")
        if not self._packing.magic.match(rest):
            return False
        self._empty_members += 1
        if self._empty_members > _MAX_EMPTY_MEMBERS:
            message = (
                f"{self._source.shown}: more than {_MAX_EMPTY_MEMBERS:,} empty {self._packing.name} parts in a row"
            )
            raise UnreadableError(message, hint="No packer writes so. If you trust it, unpack it yourself first.")
        self._decompressor, self._error = self._packing.start()
        self._input = rest
        return True


_EMBEDDED = re.compile(rb'"base64"\s{0,8}:\s{0,8}"')
_EMBEDDED_BYTES = 32  # longer than any match
_NOT_BASE64 = b"\\ \t\r\n"  # escapes and breaks that JSON and editors may put in


class EmbeddedBase64(_Layer):
    """Decodes the base64 string that the reader below stands at, up to its closing quote."""

    def __init__(self, below: io.BufferedReader, source: Stored) -> None:
        super().__init__(below, source)
        self._decoded = b""
        self._carry = b""
        self._ended = False

    def _next(self, limit: int) -> bytes:
        while not self._decoded and not self._ended:
            self._decoded = self._decode(self._below.read1(BUFFER_BYTES))
        piece, self._decoded = self._decoded[:limit], self._decoded[limit:]
        return piece

    def _decode(self, chunk: bytes) -> bytes:
        shown = self._source.shown
        if not chunk:
            raise TruncatedError(f"{shown}: the page is cut off inside the snapshot", hint=COPY_AGAIN)
        text, quote, _ = chunk.partition(b'"')
        self._ended = bool(quote)
        text = self._carry + text.translate(None, _NOT_BASE64)
        whole = len(text) if self._ended else len(text) - len(text) % 4
        self._carry = text[whole:]
        try:
            return base64.b64decode(text[:whole], validate=True)
        except binascii.Error as error:
            message = f"{shown}: the snapshot in the page is damaged ({error})"
            raise UnreadableError(message, hint=COPY_AGAIN) from None


def skip_to_embedded(reader: io.BufferedReader) -> bool:
    """Moves to the first character of the embedded snapshot, if there is one near the top."""
    tail = b""
    skipped = 0
    while skipped < _HTML_HEAD_BYTES:
        window = reader.peek(BUFFER_BYTES)
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
