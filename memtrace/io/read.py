"""A path -> `SnapshotData`: the one seam between bytes and columns."""

from __future__ import annotations

import os
from collections.abc import Callable

from memtrace.errors import SourceError
from memtrace.io.parse import parse
from memtrace.io.source import DEFAULT_MAX_BYTES, open_pickle
from memtrace.io.unpickle import collection_paused, load_snapshot_object
from memtrace.model import SnapshotData

Progress = Callable[[int, int | None], None]


def read_snapshot(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES, progress: Progress | None = None
) -> SnapshotData:
    """Reads a snapshot of any torch release, plain or compressed, or `-` for standard input.

    `progress(done, total)` is called with bytes of the file as they are read. Raises a SourceError that says what
    is wrong with the input; nothing in it is ever run.
    """
    with open_pickle(path, max_bytes=max_bytes, progress=progress) as stream, collection_paused():
        try:
            loaded = load_snapshot_object(stream.reader)
            return parse(loaded, path=stream.info.path, file_bytes=stream.info.file_bytes)
        except SourceError as error:
            raise error.about(stream.info.path) from None
