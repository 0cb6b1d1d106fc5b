"""Where a snapshot's bytes come from: a file, a pipe or standard input, in whatever they were packed.

Nothing is held whole: `opening` reads the stored bytes, layers of `unpack` are put on top as `recognise` tells.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass

from memtrace.errors import NotAPickleError
from memtrace.io.opening import BUFFER_BYTES, STDIN, Progress, Stored, open_file, open_stdin
from memtrace.io.recognise import is_markup, is_pickle, no_pickle
from memtrace.io.unpack import PACKINGS, EmbeddedBase64, Unpacker, skip_to_embedded
from memtrace.units import GiB

DEFAULT_MAX_BYTES = 8 * GiB
MAX_LAYERS = 4


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
    _source: Stored

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
        raw, size = (open_stdin(), None) if path == STDIN else open_file(path)
        if path != STDIN:
            resources.enter_context(contextlib.closing(raw))
        source = Stored(path, raw, size, max_bytes, progress)
        yield PickleStream(unpacked(source), source)


def unpacked(source: Stored) -> io.BufferedReader:
    """The pickle inside, below at most `MAX_LAYERS` layers of packing."""
    reader: io.BufferedReader = io.BufferedReader(source, BUFFER_BYTES)
    for _ in range(MAX_LAYERS + 1):
        head = reader.peek(BUFFER_BYTES)
        packing = next((packing for packing in PACKINGS if packing.magic.match(head)), None)
        if packing is not None:
            reader = io.BufferedReader(Unpacker(reader, source, packing), BUFFER_BYTES)
        elif is_markup(head) and skip_to_embedded(reader):
            reader = io.BufferedReader(EmbeddedBase64(reader, source), BUFFER_BYTES)
        elif is_pickle(head):
            return reader
        else:
            raise no_pickle(head, source.shown)
    message = f"{source.shown} is packed more than {MAX_LAYERS} times"
    raise NotAPickleError(message, hint="Unpack it yourself and name the snapshot inside.")
