"""A snapshot and its sidecar as files: whole or not at all, and never in the place of somebody else's."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import pickle
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

from . import notes, process
from .sidecar import SCHEMA

Fill = Callable[[Any], Any]

_PROTOCOL = 4
_BUFFER = 1 << 20
_TURN_PATIENCE_S = 300.0
_SLOT_PATIENCE_S = {"signal": 5.0}
_USUAL_SLOT_PATIENCE_S = 60.0
_SLOT_PAUSE_S = 0.05
_MOST_PROCESSES = 10_000
_ENDINGS = (".pickle", ".json", ".pickle.zst")


class Dumper:
    """Writes into one directory. One dump at a time in this process, `jobs` at a time on this node."""

    def __init__(self, directory: str, jobs: int) -> None:
        self.directory, self._jobs = directory, max(1, jobs)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._writer: Optional[int] = None
        self._own: Set[str] = set()
        self._claimed: Optional[str] = None

    @property
    def is_writing(self) -> bool:
        """Whether a dump is on its way, on any thread."""
        return self._writer is not None and os.getpid() == self._pid

    def choose_stem(self, rank: int) -> str:
        """`rank0003`, or `rank0003-2` and so on for further processes of that rank. Claimed by a file of its own.

        A stem chosen before, of which nothing was written, is given up.
        """
        self._after_fork()
        self._give_up()
        for number in range(1, _MOST_PROCESSES):
            stem = f"rank{rank:04d}" if number == 1 else f"rank{rank:04d}-{number}"
            if any(os.path.lexists(self._path(stem + ending)) for ending in _ENDINGS):
                continue
            try:
                os.close(os.open(self._path(_claim(stem)), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                continue
            except OSError as error:
                self._failed(stem, error)
                return stem
            self._claimed = stem
            return stem
        return f"rank{rank:04d}-{os.getpid()}"

    def write(
        self, stem: str, take: Optional[Callable[[], Any]], describe: Callable[[], Dict[str, Any]], reason: str
    ) -> Optional[str]:
        """STEM.pickle from `take` (None: no snapshot) and STEM.json from `describe`: where the second is, both are.

        Returns the path of the first, or None: what went wrong was said. A dump that is asked for while this thread
        is already writing one (an OOM inside a dump) is not made.
        """
        self._after_fork()
        if self._writer == threading.get_ident():
            return None
        if not self._turn.acquire(timeout=_TURN_PATIENCE_S):
            self._failed(stem, TimeoutError(errno.ETIMEDOUT, "another dump of this process does not end"))
            return None
        try:
            self._writer = threading.get_ident()
            with self._slot(_SLOT_PATIENCE_S.get(reason, _USUAL_SLOT_PATIENCE_S)):
                return self._pair(stem, take, describe, reason)
        except Exception as error:  # noqa: BLE001 - full disks, errors of CUDA, no memory: the job goes on
            self._failed(stem, error)
            return None
        finally:
            self._writer = None
            self._turn.release()

    def promote(self, stem: str, to: str) -> Optional[str]:
        """Gives a pair of ours another name: the OOM that ended the job is what there is to see. None: that failed."""
        try:
            self._make_room(to)
            for ending in (".pickle", ".json"):
                self._name(self._path(stem + ending), to + ending)
                self._own.discard(stem + ending)
        except OSError as error:
            self._failed(to, error)
            return None
        return self._path(f"{to}.pickle")

    # Files.

    def _pair(
        self, stem: str, take: Optional[Callable[[], Any]], describe: Callable[[], Dict[str, Any]], reason: str
    ) -> str:
        """Both are complete before either has its name, so that a reader finds a pair or nothing."""
        made: List[str] = []
        with contextlib.ExitStack() as temporary:
            if take is not None:
                with _collector_off():
                    made.append(self._temporary(temporary, f"{stem}.pickle", lambda file: _pickle(take, file)))
            text = _json(_described(describe, reason))
            made.append(self._temporary(temporary, f"{stem}.json", lambda file: file.write(text)))
            self._make_room(stem)
            for name in made:
                self._name(self._path(_temporary(name)), name)
        self._sync()
        return self._path(made[0])

    def _temporary(self, stack: contextlib.ExitStack, name: str, fill: Fill) -> str:
        """A whole file under a name that nobody looks for; gone when the stack unwinds, unless it was renamed."""
        path = self._path(_temporary(name))
        stack.callback(_unlink, path)
        with open(path, "wb", buffering=_BUFFER) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        return name

    def _make_room(self, stem: str) -> None:
        """A later dump takes the place of one of ours: its sidecar must not be read beside the new snapshot."""
        if f"{stem}.json" in self._own:
            _unlink(self._path(f"{stem}.json"))

    def _name(self, path: str, name: str) -> None:
        """A file of ours may be replaced by a later one of ours, and by nothing else."""
        target = self._path(name)
        if name in self._own:
            os.replace(path, target)
            return
        try:
            os.link(path, target)
        except FileExistsError:
            if not os.path.samefile(path, target):  # NFS may do it, and say later that it was done
                raise
            os.unlink(path)
        except OSError:  # no hard links here
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
            os.rename(path, target)
        else:
            os.unlink(path)
        self._own.add(name)

    def _sync(self) -> None:
        """The names too are on the disk; not every file system knows that of a directory."""
        with contextlib.suppress(OSError):
            where = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(where)
            finally:
                os.close(where)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    # Whose turn it is.

    def _after_fork(self) -> None:
        """A child has no part in its parent's dumps: another thread's turn would never end here."""
        if os.getpid() != self._pid:
            self._begin()

    def _give_up(self) -> None:
        claimed, self._claimed = self._claimed, None
        if claimed is not None and not any(name.startswith(f"{claimed}.") for name in self._own):
            _unlink(self._path(_claim(claimed)))

    @contextlib.contextmanager
    def _slot(self, patience_s: float) -> Iterator[None]:
        """One of the node's places; whoever waits too long goes without, since its launcher may be about to kill it."""
        held: Optional[int] = None
        try:
            until = time.monotonic() + patience_s
            while True:
                try:
                    held = self._free_slot()
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        break
                    time.sleep(_SLOT_PAUSE_S)
            yield
        finally:
            if held is not None:
                os.close(held)

    def _free_slot(self) -> Optional[int]:
        """The descriptor of a locked file; None where files cannot be locked. BlockingIOError if all are taken."""
        try:
            import fcntl
        except ImportError:
            return None
        host = "".join(one if one.isalnum() else "-" for one in process.host())
        for number in range(self._jobs):
            place: Optional[int] = None
            try:
                place = os.open(self._path(f".dump-{host}-{number}"), os.O_CREAT | os.O_RDWR, 0o644)
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return place
            except BlockingIOError:
                _close(place)
            except OSError:  # no locks on this file system, or no such directory
                _close(place)
                return None
            except BaseException:  # a signal's handler of the job's
                _close(place)
                raise
        raise BlockingIOError

    def _failed(self, stem: str, error: BaseException) -> None:
        what = getattr(error, "strerror", None) or notes.described(error)
        notes.say(f"{stem} could not be written in {self.directory}: {what}. The job goes on")
        notes.note(f"{stem}: {what}")


def _claim(stem: str) -> str:
    return f".{stem}.claim"


def _temporary(name: str) -> str:
    return f".{name}.{os.getpid()}.tmp"


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _close(descriptor: Optional[int]) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _pickle(take: Callable[[], Any], file: Any) -> None:
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


def _described(describe: Callable[[], Dict[str, Any]], reason: str) -> Dict[str, Any]:
    """The snapshot is worth keeping also where nothing can be said about it."""
    try:
        return describe()
    except Exception as error:  # noqa: BLE001 - as said
        notes.note(f"no sidecar: {notes.described(error)}")
        return {"schema": SCHEMA, "reason": reason, "notes": list(notes.NOTES)}


def _json(document: Any) -> bytes:
    """As text that every reader takes: no NaN, no halves of characters."""
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError):
        text = json.dumps(_plain(document), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """The same of what JSON knows, and names of the rest. Nobody asks a tensor what it holds: that allocates."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    try:
        return type(value).__name__ if hasattr(value, "__array__") else str(value)
    except Exception:  # noqa: BLE001 - anything may be in a configuration
        return type(value).__name__
