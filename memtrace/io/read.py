"""A path -> `SnapshotData`: the one seam between bytes and columns, and the choice between the two readers."""

from __future__ import annotations

import os
from collections.abc import Callable

from memtrace.errors import SourceError
from memtrace.io.source import DEFAULT_MAX_BYTES, PickleStream, open_pickle
from memtrace.model import SnapshotData

try:
    from memtrace.io.native import decode_snapshot
except ImportError:  # built without a C compiler
    NATIVE = False
else:
    NATIVE = True

Progress = Callable[[int, int | None], None]


def read_snapshot(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: Progress | None = None,
    native: bool = NATIVE,
) -> SnapshotData:
    """Reads a snapshot of any torch release, plain or compressed, or `-` for standard input.

    `progress(done, total)` is called with bytes of the file as they are read. `native` False takes the reference
    reader, which gives the same columns, slower. Raises a SourceError that says what is wrong with the input; nothing
    in it is ever run.
    """
    read = decode_snapshot if native else load_in_python
    with open_pickle(path, max_bytes=max_bytes, progress=progress) as stream:
        try:
            return read(stream)
        except SourceError as error:
            raise error.about(stream.info.path) from None


def load_in_python(stream: PickleStream) -> SnapshotData:
    """The reference: Python's unpickler after a walk over the opcodes, then columns of its objects."""
    from memtrace.io.parse import parse
    from memtrace.io.unpickle import collection_paused, load_snapshot_object

    with collection_paused():
        loaded = load_snapshot_object(stream.reader)
        return parse(loaded, path=stream.info.path, file_bytes=stream.info.file_bytes)
