"""Signals: seen while the main thread is stuck in a collective, and left to do to the job what they would have done.

Python runs a signal's handler on the main thread, when that comes back to the interpreter. The wake-up descriptor is
written to by the C handler at once, and a thread of ours reads it (watcher.py). The job sees `signal` as without us:
what it asks is answered by what it set itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from . import ending, notes
from .watcher import Dump, Watcher

_EXIT_PATIENCE_S = 120.0


class Signals:
    """One for a process. `install` takes SIGTERM, SIGINT and what was asked for; nothing else is touched."""

    def __init__(self) -> None:
        self._watcher: Optional[Watcher] = None
        self._pid = 0
        self._asked: Set[int] = set()
        self._managed: Set[int] = set()
        self._believed: Dict[int, Any] = {}
        self._before_exit: Optional[Callable[[], Any]] = None
        self._holders: List[int] = []
        self._deferred: List[int] = []
        self._functions: List[Tuple[Any, str, Any, Any]] = []
        self._ours = self._handle

    def install(
        self, dump: Dump, grace_s: float, asked: Tuple[int, ...] = (), before_exit: Optional[Callable[[], Any]] = None
    ) -> bool:
        """`dump(reason, signum)` is called on a thread of ours; `before_exit` before `os._exit`.

        False where that is not possible: off the main thread, or where the system has no such signals.
        """
        if self._watcher is not None:
            return False
        if os.name != "posix" or not _is_main():
            notes.note("signals are not recorded: they can only be handled on the main thread")
            return False
        self._asked = {int(one) for one in asked} - {int(signal.SIGTERM)}
        self._before_exit = before_exit
        try:
            ending.prepare()
            watcher = Watcher(dump, grace_s, frozenset(self._asked), self._is_standing)
            self._begin(watcher)
        except Exception as error:  # noqa: BLE001 - no descriptors, no threads, no ctypes: the job goes on
            notes.note(f"signals are not recorded: {notes.described(error)}")
            self.disarm()
            return False
        return True

    def disarm(self) -> None:
        """Everything as the job believes it is. In a forked child too."""
        global _armed
        watcher = self._watcher
        if watcher is None:
            return
        forked = os.getpid() != self._pid
        if not forked and not _is_main():
            watcher.silence()  # handlers can only be set on the main thread
            return
        self._give_back(watcher)
        _armed, self._watcher = None, None
        self._managed.clear()
        self._believed.clear()
        if forked:
            self._holders.clear()
            self._deferred.clear()
            watcher.abandon()
        else:
            watcher.close()

    def finish(self) -> None:
        """At the end of the process: a dump that a signal began is waited for, and the death that it was to be."""
        if self._watcher is not None:
            self._watcher.finish(on_main=_is_main() and os.getpid() == self._pid)

    def silence(self) -> None:
        """No signal is dumped for any more; what they do, they do."""
        if self._watcher is not None:
            self._watcher.silence()

    def dumping(self, *, here: bool) -> None:
        """Said when the calling thread begins and ends a dump itself: our handler must not wait for one meanwhile."""
        me = threading.get_ident()
        if here:
            self._holders.append(me)
            return
        if me in self._holders:  # a forked child knows of none
            self._holders.remove(me)
        if me == threading.main_thread().ident and me not in self._holders:
            while self._deferred:
                self._handle(self._deferred.pop(), sys._getframe())

    def _begin(self, watcher: Watcher) -> None:
        global _armed
        watcher.start()
        self._watcher, self._pid = watcher, os.getpid()
        watcher.forward_to(signal.set_wakeup_fd(watcher.writer, warn_on_full_buffer=False))
        for signum in sorted({int(signal.SIGTERM), *self._asked}):
            self._take(watcher, signum)
        self._replace_functions()
        _register()
        _armed = self

    def _take(self, watcher: Watcher, signum: int) -> None:
        standing = signal.getsignal(signum)
        if standing is None or (standing is signal.SIG_DFL and _is_caught(signum)):
            notes.note(f"signal {signum} has a handler that is not Python's: it is left alone, and not dumped for")
        elif standing is signal.SIG_IGN:
            notes.log(f"signal {signum} is ignored by the job: it is left alone, and not dumped for")
        else:
            self._believed[signum] = standing
            try:
                signal.signal(signum, self._ours)
            except (OSError, ValueError) as error:
                notes.note(f"signal {signum} cannot be handled: {error}")
                return
            self._managed.add(signum)
            watcher.manage(signum)
            watcher.kills(signum, it_does=self._is_lethal(signum))
            if signum in self._asked and standing is signal.SIG_DFL:
                signal.siginterrupt(signum, False)  # it would have ended the job: no library expects to be interrupted

    def _give_back(self, watcher: Watcher) -> None:
        real = {name: original for _, name, original, _ in self._functions}
        for signum in self._managed:
            if self._is_standing(signum):
                real.get("signal", signal.signal)(signum, self._believed.get(signum, signal.SIG_DFL))
        set_wakeup_fd = real.get("set_wakeup_fd", signal.set_wakeup_fd)
        found = set_wakeup_fd(-1)
        with contextlib.suppress(OSError, ValueError):  # theirs, and closed
            set_wakeup_fd(watcher.jobs_fd if found == watcher.writer else found)
        for home, name, original, ours in self._functions:
            if getattr(home, name) is ours:  # else somebody has put theirs around ours
                setattr(home, name, original)
        self._functions.clear()

    # The handler.

    def _handle(self, signum: int, frame: Any) -> None:
        """On the main thread: after the watcher's dump, what the job set itself, or the end."""
        standing = self._believed.get(signum, signal.SIG_DFL)
        held = self._is_held()
        if callable(standing):
            try:
                if not held:
                    self._wait_for(signum, lethal=False)
            finally:
                standing(signum, frame)
        elif held:
            self._deferred.append(signum)
        elif self._is_lethal(signum):
            self._end(signum)
        else:
            self._wait_for(signum, lethal=False)

    def _end(self, signum: int) -> None:
        while True:
            try:
                self._wait_for(signum, lethal=True)
                break
            except BaseException:  # noqa: BLE001, S112 - of another signal's handler, which came too late to run
                continue
        ending.die(signum)

    def _wait_for(self, signum: int, *, lethal: bool) -> None:
        if self._watcher is not None:
            self._watcher.wait_for(signum, lethal=lethal)

    def _is_lethal(self, signum: int) -> bool:
        """Whether the default, if it applies, ends the process. The first one of a container does not die by it."""
        is_default = self._believed.get(signum, signal.SIG_DFL) is signal.SIG_DFL
        return is_default and signum not in self._asked and os.getpid() != 1

    def blocked_while_forking(self) -> Set[int]:
        """A child just born still has our handler, and our pipe: it must not get what would kill its parent."""
        return {signum for signum in self._managed if self._is_lethal(signum)} if self._watcher is not None else set()

    # What the job sees.

    def _replace_functions(self) -> None:
        for home, name, make in (
            (signal, "signal", self._signal_function),
            (signal, "getsignal", self._getsignal_function),
            (signal, "set_wakeup_fd", self._wakeup_function),
            (os, "_exit", self._exit_function),
        ):
            original = getattr(home, name)
            ours = functools.wraps(original)(make(original))
            self._functions.append((home, name, original, ours))
            setattr(home, name, ours)

    def _signal_function(self, real: Any) -> Any:
        def set_signal(signalnum: Any, handler: Any) -> Any:
            watcher = self._watcher
            if watcher is None or not self._is_managed(signalnum):
                return real(signalnum, handler)
            signum = int(signalnum)
            before = self._believed.get(signum, signal.SIG_DFL)
            if not callable(handler) and handler == signal.SIG_DFL:
                previous = real(signalnum, self._ours)
                self._believed[signum] = signal.SIG_DFL
                watcher.kills(signum, it_does=self._is_lethal(signum))
            else:
                watcher.kills(signum, it_does=False)
                try:
                    previous = real(signalnum, handler)
                except BaseException:
                    watcher.kills(signum, it_does=self._is_standing(signum) and self._is_lethal(signum))
                    raise
                self._believed.pop(signum, None)
            return before if previous is self._ours else previous

        return set_signal

    def _getsignal_function(self, real: Any) -> Any:
        def getsignal(signalnum: Any) -> Any:
            found = real(signalnum)
            return self._believed.get(int(signalnum), signal.SIG_DFL) if found is self._ours else found

        return getsignal

    def _wakeup_function(self, real: Any) -> Any:
        def set_wakeup_fd(fd: Any, *args: Any, **kwargs: Any) -> Any:
            watcher = self._watcher
            if watcher is None or not _is_main():
                return real(fd, *args, **kwargs)
            with self._undisturbed():
                found = real(fd, *args, **kwargs)  # which raises what it raises without us
                real(watcher.writer, warn_on_full_buffer=False)
                before = watcher.forward_to(int(fd))
            return before if found == watcher.writer else found

        return set_wakeup_fd

    def _exit_function(self, real: Any) -> Any:
        def _exit(status: Any) -> Any:
            before_exit = self._before_exit
            mine = self._watcher is not None and os.getpid() == self._pid
            if mine and before_exit is not None and isinstance(status, int) and not self._is_held():
                ending.leave_in_time(status, _EXIT_PATIENCE_S + 1)
                worker = threading.Thread(target=notes.guard(before_exit), name="memtrace-exit", daemon=True)
                with contextlib.suppress(RuntimeError):  # no threads any more
                    worker.start()
                    worker.join(_EXIT_PATIENCE_S)
            return real(status)

        return _exit

    def _is_held(self) -> bool:
        return threading.get_ident() in self._holders

    def _is_managed(self, signalnum: Any) -> bool:
        try:
            return _is_main() and signalnum in self._managed
        except TypeError:  # no number: an error, as without us
            return False

    def _is_standing(self, signum: int) -> bool:
        real = next((original for _, name, original, _ in self._functions if name == "getsignal"), signal.getsignal)
        return real(signum) is self._ours

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        self.dumping(here=True)
        try:
            yield
        finally:
            self.dumping(here=False)


_armed: Optional[Signals] = None
_registered = False
_masks = threading.local()


def _register() -> None:
    """Once for all: what is registered for forks cannot be taken back."""
    global _registered
    if not _registered:
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        _registered = True


@notes.guard
def _before_fork() -> None:
    blocked = _armed.blocked_while_forking() if _armed is not None else set()
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked) if blocked else None


@notes.guard
def _after_fork() -> None:
    before = getattr(_masks, "before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@notes.guard
def _in_child() -> None:
    if _armed is not None:
        _armed.disarm()
    _after_fork()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_caught(signum: int) -> bool:
    """Whether the system knows a handler, which Python, if it has none, does not (faulthandler's, a library's)."""
    try:
        with open("/proc/self/status", "rb") as file:
            caught = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return bool(caught >> (signum - 1) & 1)
