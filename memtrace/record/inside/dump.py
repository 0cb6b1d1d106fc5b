"""A snapshot and its sidecar as files: whole or not at all, and never in the place of somebody else's."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pickle
import threading
import time
from typing import Any, Callable, Dict, Iterator, Optional, Set

from . import notes, process

_PROTOCOL = 4
_SLOT_PATIENCE_S = 60.0
_MOST_PROCESSES = 10_000


class Dumper:
    """Writes into one directory. One dump at a time in this process, `jobs` at a time on this node."""

    def __init__(self, directory: str, jobs: int) -> None:
        self.directory, self._jobs = directory, max(1, jobs)
        self._lock = threading.Lock()
        self._writing: Optional[int] = None
        self._own: Set[str] = set()

    @property
    def is_writing(self) -> bool:
        """Whether a dump is on its way, on any thread."""
        return self._writing is not None

    def choose_stem(self, rank: int) -> str:
        """`rank0003`, or `rank0003-2` and so on for further processes of that rank. Claimed by a file of its own."""
        for number in range(1, _MOST_PROCESSES):
            stem = f"rank{rank:04d}" if number == 1 else f"rank{rank:04d}-{number}"
            try:
                claim = os.open(self._path(f".{stem}.claim"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                continue
            except OSError as error:
                self._failed(stem, error)
                return stem
            os.close(claim)
            return stem
        return f"rank{rank:04d}-{os.getpid()}"

    def write(
        self, stem: str, take: Optional[Callable[[], Any]], describe: Callable[[], Dict[str, Any]], reason: str
    ) -> Optional[str]:
        """STEM.pickle from `take` (None: no snapshot), then STEM.json from `describe`: where the second is, both are.

        Returns the path of the first, or None: what went wrong was said. A dump that is asked for while this thread
        is already writing one (an OOM inside a dump) is not made.
        """
        if self._writing == threading.get_ident():
            return None
        with self._lock:
            self._writing = threading.get_ident()
            try:
                with self._slot():
                    return self._write(stem, take, describe)
            except (OSError, MemoryError, ValueError, TypeError, pickle.PicklingError, RuntimeError) as error:
                self._failed(stem, error)
                return None
            finally:
                self._writing = None

    def promote(self, stem: str, to: str) -> Optional[str]:
        """Gives a pair another name: the OOM that ended the job is what there is to see. None where that failed."""
        try:
            for suffix in (".pickle", ".json"):
                os.rename(self._path(stem + suffix), self._path(to + suffix))
                self._own.add(to + suffix)
        except OSError as error:
            self._failed(to, error)
            return None
        return self._path(f"{to}.pickle")

    def _write(
        self, stem: str, take: Optional[Callable[[], Any]], describe: Callable[[], Dict[str, Any]]
    ) -> Optional[str]:
        if take is not None:
            with _collector_off():
                self._file(f"{stem}.pickle", lambda file: _pickled(take, file))
        text = json.dumps(describe(), allow_nan=False, default=str).encode("utf-8", "backslashreplace")
        self._file(f"{stem}.json", lambda file: file.write(text))
        return self._path(f"{stem}.pickle" if take is not None else f"{stem}.json")

    def _file(self, name: str, fill: Callable[[Any], Any]) -> None:
        """A temporary file beside it, then the name: nobody sees half of it, after a power cut neither."""
        temporary = self._path(f".{name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb", buffering=1 << 20) as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            self._name(temporary, name)
            self._sync()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _name(self, temporary: str, name: str) -> None:
        """A file of ours may be replaced by a later one of ours, and by nothing else."""
        target = self._path(name)
        if name in self._own:
            os.replace(temporary, target)
            return
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise
        except OSError:  # no hard links here
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
            os.rename(temporary, target)
        self._own.add(name)

    def _sync(self) -> None:
        with contextlib.suppress(OSError):
            where = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(where)
            finally:
                os.close(where)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """One of the node's places; whoever waits too long goes without, since its launcher may be about to kill it."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        held: Optional[int] = None
        until = time.monotonic() + _SLOT_PATIENCE_S
        host = "".join(one if one.isalnum() else "-" for one in process.host())
        try:
            while held is None and time.monotonic() < until:
                held = self._try_slot(fcntl, host)
                if held is None:
                    time.sleep(0.05)
            yield
        finally:
            if held is not None:
                os.close(held)

    def _try_slot(self, fcntl: Any, host: str) -> Optional[int]:
        for number in range(self._jobs):
            place = os.open(self._path(f".dump-{host}-{number}"), os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return place
            except BlockingIOError:
                os.close(place)
            except OSError:  # no locks on this file system
                return place
        return None

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _failed(self, stem: str, error: BaseException) -> None:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        notes.say(f"{stem} could not be written in {self.directory}: {what}. The job goes on")
        notes.note(f"{stem}: {what}")


def _pickled(take: Callable[[], Any], file: Any) -> None:
    """`take` is called here, so that nothing else holds what it gives: three million events are 1.6 GB of dicts."""
    pickle.Pickler(file, protocol=_PROTOCOL).dump(take())


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Millions of new dicts would set the garbage collector off again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
