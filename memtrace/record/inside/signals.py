"""Signals: seen while the main thread is stuck in a collective, and left to do to the job what they would have done.

Python runs a signal's handler on the main thread, when that comes back to the interpreter. The wake-up descriptor is
written to by the C handler at once, and a thread of ours reads it: it dumps, and lets the process die by the signal
where nobody else handles it. The job sees `signal` as without us: what it asks is answered by what it set itself.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any, Callable, Dict, Optional, Set, Tuple

from . import notes

Dump = Callable[[str, int], Any]

_STOP = 0
_EXIT_PATIENCE_S = 300.0
_ASKED_PATIENCE_S = 600.0
_DEATH_PATIENCE_S = 5.0


class Signals:
    """One for a process. `install` takes SIGTERM, SIGINT and what was asked for; nothing else is touched."""

    def __init__(self) -> None:
        self._dump: Optional[Dump] = None
        self._grace_s = 0.0
        self._asked: Tuple[int, ...] = ()
        self._managed: Set[int] = set()
        self._believed: Dict[int, Any] = {}
        self._jobs_fd = -1
        self._pipe: Optional[Tuple[int, int]] = None
        self._terminating = False
        self._interrupted = False
        self._seen: Dict[int, threading.Event] = {}
        self._dumping: Optional[int] = None
        self._real: Dict[str, Any] = {}
        self._before_exit: Optional[Callable[[], Any]] = None

    def install(
        self, dump: Dump, grace_s: float, asked: Tuple[int, ...] = (), before_exit: Optional[Callable[[], Any]] = None
    ) -> bool:
        """`dump(reason, signum)` is called on a thread of ours; `before_exit` before `os._exit`. On the main thread
        only: False elsewhere."""
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            return False
        self._dump, self._grace_s, self._asked, self._before_exit = dump, grace_s, asked, before_exit
        self._terminating = self._interrupted = False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._pipe = (reader, writer)
        self._jobs_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._managed = {int(one) for one in (*asked, *_fatal())}
        for signum in self._managed:
            self._seen[signum] = threading.Event()
            standing = signal.getsignal(signum)
            if standing is signal.SIG_DFL or callable(standing):
                self._believed[signum] = standing
                signal.signal(signum, self._handle)
            elif standing is None:
                notes.note(f"signal {signum} has a handler that is not Python's: it is left alone, and not dumped for")
        self._replace()
        threading.Thread(target=self._watch, args=(reader,), name="memtrace-signals", daemon=True).start()
        return True

    def disarm(self) -> None:
        """Everything as the job believes it is. In a forked child too."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        self._restore()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._jobs_fd)
            for signum, standing in self._believed.items():
                if signal.getsignal(signum) == self._handle:
                    signal.signal(signum, standing)
        self._believed.clear()
        try:
            os.write(pipe[1], bytes([_STOP]))
            os.close(pipe[1])
        except OSError:
            return

    def finish(self) -> None:
        """At the end of the process: a death that is under way is waited for."""
        if self._terminating and signal.SIGTERM in self._believed:
            self._seen[signal.SIGTERM].wait(self._grace_s)
            if self._believed.get(signal.SIGTERM) is signal.SIG_DFL:
                threading.Event().wait(_DEATH_PATIENCE_S)

    # The watcher.

    def _watch(self, reader: int) -> None:
        while True:
            try:
                numbers = os.read(reader, 512)
            except OSError:
                return
            if not numbers:
                return
            for number in numbers:
                if number == _STOP:
                    os.close(reader)
                    return
                self._forward(number)
                try:
                    self._react(number)
                except Exception as error:  # noqa: BLE001 - the watcher must outlive whatever a dump does
                    notes.note(f"signal {number}: {type(error).__name__}: {error}")

    def _forward(self, number: int) -> None:
        """The byte that the job's own wake-up descriptor (asyncio's) would have got."""
        if self._jobs_fd >= 0:
            try:
                os.write(self._jobs_fd, bytes([number]))
            except OSError:
                return

    def _react(self, signum: int) -> None:
        if signum in self._asked:
            self._run(signum, _ASKED_PATIENCE_S)
            self._seen[signum].set()
        elif signum == signal.SIGINT and not self._interrupted:
            self._interrupted = True
            self._run(signum, _EXIT_PATIENCE_S)
        elif signum in self._managed:
            self._terminating = True
            self._run(signum, self._grace_s)
            self._seen[signum].set()
            if self._believed.get(signum) is signal.SIG_DFL:
                _die(signum)
            self._terminating = False

    def _run(self, signum: int, patience_s: float) -> None:
        """The dump on a thread of its own: it blocks for ever where the allocator's lock is held by a stuck thread."""
        dump = self._dump
        if dump is None:
            return
        name = signal.Signals(signum).name
        worker = threading.Thread(target=dump, args=(name, signum), name="memtrace-dump", daemon=True)
        worker.start()
        worker.join(patience_s)
        if worker.is_alive():
            notes.say(f"{name}: no snapshot within {patience_s:g} s (the driver or the allocator is busy): it is lost")

    # Handlers.

    def _handle(self, signum: int, frame: Any) -> None:
        """On the main thread: after the watcher's dump, what the job set itself, or nothing but the end."""
        seen = self._seen[signum]
        if self._dumping != threading.get_ident():
            seen.wait(_ASKED_PATIENCE_S if signum in self._asked else self._grace_s + _DEATH_PATIENCE_S)
        seen.clear()
        standing = self._believed.get(signum)
        if callable(standing):
            standing(signum, frame)
        elif signum not in self._asked and standing is signal.SIG_DFL:
            _die(signum)

    def dumping(self, *, here: bool) -> None:
        """Said by the recorder when the calling thread begins and ends a dump: a handler must not wait for itself."""
        self._dumping = threading.get_ident() if here else None

    # What the job sees.

    def _replace(self) -> None:
        self._real = {
            "signal": signal.signal,
            "getsignal": signal.getsignal,
            "set_wakeup_fd": signal.set_wakeup_fd,
            "_exit": os._exit,
        }
        real_signal, real_getsignal = signal.signal, signal.getsignal
        real_wakeup, real_exit = signal.set_wakeup_fd, os._exit

        @functools.wraps(real_signal)
        def set_signal(signalnum: Any, handler: Any) -> Any:
            if signalnum not in self._managed or self._pipe is None:
                return real_signal(signalnum, handler)
            before = self._believed.get(signalnum)
            if handler is signal.SIG_DFL or handler == signal.SIG_DFL:
                previous = real_signal(signalnum, self._handle)
                self._believed[int(signalnum)] = signal.SIG_DFL
            else:
                previous = real_signal(signalnum, handler)
                self._believed.pop(int(signalnum), None)
            return before if before is not None else previous

        @functools.wraps(real_getsignal)
        def getsignal(signalnum: Any) -> Any:
            found = real_getsignal(signalnum)
            return self._believed.get(signalnum, found) if found == self._handle else found

        @functools.wraps(real_wakeup)
        def set_wakeup_fd(fd: Any, *args: Any, **kwargs: Any) -> Any:
            if self._pipe is None:
                return real_wakeup(fd, *args, **kwargs)
            real_wakeup(fd, *args, **kwargs)  # raises what it raises without us
            real_wakeup(self._pipe[1], warn_on_full_buffer=False)
            before, self._jobs_fd = self._jobs_fd, fd
            return before

        @functools.wraps(real_exit)
        def _exit(status: int) -> Any:
            before_exit = self._before_exit
            if self._pipe is not None and before_exit is not None:
                worker = threading.Thread(target=before_exit, name="memtrace-exit", daemon=True)
                worker.start()
                worker.join(_EXIT_PATIENCE_S)
            real_exit(status)

        signal.signal, signal.getsignal, signal.set_wakeup_fd = set_signal, getsignal, set_wakeup_fd
        os._exit = _exit
        self._ours = {"signal": set_signal, "getsignal": getsignal, "set_wakeup_fd": set_wakeup_fd, "_exit": _exit}

    def _restore(self) -> None:
        """Puts the real functions back, but where somebody has put theirs around ours."""
        for name, ours in self._ours.items():
            home: Any = os if name == "_exit" else signal
            if getattr(home, name) is ours:
                setattr(home, name, self._real[name])


def _fatal() -> Tuple[int, ...]:
    """What launchers end their ranks with. The first process of a container cannot die of a signal nobody handles."""
    return () if os.getpid() == 1 else (int(signal.SIGTERM),)


def _die(signum: int) -> None:
    """By the signal itself, from any thread, so that the parent sees what it would have seen."""
    notes.log(f"ended by signal {signum}")
    try:
        import ctypes

        library = ctypes.CDLL(None)
        library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        library.signal(signum, None)
        os.kill(os.getpid(), signum)
        threading.Event().wait(_DEATH_PATIENCE_S)
    except Exception as error:  # noqa: BLE001 - an interpreter without ctypes
        notes.log(f"signal {signum}: {type(error).__name__}: {error}")
    os.kill(os.getpid(), signal.SIGKILL)
