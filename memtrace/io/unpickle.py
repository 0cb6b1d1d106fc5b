"""The one place where a pickle is loaded.

Owns the restricted unpickler: plain data only, no name, persistent id or extension code is ever resolved. Pickles
up to SCAN_LIMIT are walked first, so that they cannot exhaust memory either; of larger ones only the beginning.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import pickle
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from memtrace.errors import (
    NotASnapshotError,
    SourceError,
    TooLargeError,
    TruncatedError,
    UnreadableError,
    UnsafePickleError,
)
from memtrace.io.refusal import COPY_AGAIN, NOTHING_RUN, import_name
from memtrace.io.scan import SCAN_LIMIT, scan, scan_start
from memtrace.units import KiB

if TYPE_CHECKING:
    from typing_extensions import Buffer

_START_BYTES = 64 * KiB  # of a pickle too large to walk: a few per cent of the time that loading it takes
_BUFFER_BYTES = 128 * KiB


def load_snapshot_object(stream: io.BufferedReader) -> object:
    """The object pickled in `stream`: dicts, lists, tuples and scalars. Its shape is not checked here.

    Raises a SourceError for every pickle that cannot or must not be loaded.
    """
    try:
        head = stream.read(SCAN_LIMIT + 1)
    except OSError as error:
        raise UnreadableError(f"reading failed: {error.strerror or error}", hint=COPY_AGAIN) from error
    if len(head) <= SCAN_LIMIT:
        scan(head)
        return _load(io.BytesIO(head))
    scan_start(head[:_START_BYTES])
    return _load(_Rejoined(head, stream))


class _Rejoined(io.RawIOBase):
    """Bytes already read, then the rest of the stream they came from."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        if not self._head:
            return self._rest.readinto(buffer)
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._head))
        view[:count] = self._head[:count]
        self._head = self._head[count:] if count < len(self._head) else memoryview(b"")
        return count


class _PlainData(pickle.Unpickler):
    """Refuses everything that is not in the pickle itself."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        message = f"the pickle asks to import {import_name(str(module_name), str(global_name))}"
        raise UnsafePickleError(message, hint=NOTHING_RUN)

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise UnsafePickleError("the pickle asks to resolve a persistent id", hint=NOTHING_RUN)


def _load(raw: io.RawIOBase | io.BytesIO) -> object:
    # The cache would hand out what an extension code once stood for without asking find_class.
    copyreg.clear_extension_cache()
    try:
        with collection_paused():
            return _PlainData(io.BufferedReader(raw, _BUFFER_BYTES)).load()
    except SourceError:
        raise
    except EOFError:
        raise TruncatedError("the pickle is cut off before its end", hint=COPY_AGAIN) from None
    except MemoryError:
        message = "loading the pickle needs more memory than there is"
        raise TooLargeError(message, hint="The file is damaged, built to do that, or needs a larger machine.") from None
    except OSError as error:
        raise UnreadableError(f"reading failed: {error.strerror or error}", hint=COPY_AGAIN) from error
    except (TypeError, AttributeError) as error:
        message = f"the pickle combines values as no snapshot does ({error})"
        raise NotASnapshotError(message, hint=COPY_AGAIN) from None
    except (pickle.UnpicklingError, ValueError, LookupError, ArithmeticError, RecursionError, SystemError) as error:
        cut_off = "truncated" in str(error)
        message = "the pickle is cut off before its end" if cut_off else f"the pickle is damaged ({error})"
        raise TruncatedError(message, hint=COPY_AGAIN) from None


_pause_lock = threading.Lock()
_pauses = 0
_collecting_before = False


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Garbage collection off: it would visit millions of new objects again and again and free none.

    It is one switch for the process, so the first of several threads to get here turns it off and the last one
    turns it back to what it was. Hold this around loading *and* what turns the object into columns: the first
    collection after it visits everything still alive, which takes half as long again as loading did.
    """
    global _pauses, _collecting_before
    with _pause_lock:
        if _pauses == 0:
            _collecting_before = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _pause_lock:
            _pauses -= 1
            if _pauses == 0 and _collecting_before:
                gc.enable()
