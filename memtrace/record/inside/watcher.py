"""The thread behind the wake-up descriptor: it dumps, and ends the process where nobody else handles the signal."""

from __future__ import annotations

import collections
import os
import select
import signal
import threading
import time
from typing import Any, Callable, Deque, FrozenSet, List, Optional, Set, Tuple

from . import ending, notes

Dump = Callable[[str, int], Any]

_WORD = 255
_PULSE_MS = 50
_ASKED_PATIENCE_S = 120.0
_INTERRUPT_PATIENCE_S = 300.0
_MARGIN_S = 2.0
_SAYING_S = 2.0


class _Work:
    """A dump on its way: how long it may take, who waits for it, and what the process dies of when it is over."""

    def __init__(
        self, name: str, thread: Optional[threading.Thread], until: float, *, is_asked: bool, tickets: List[Any]
    ) -> None:
        self.name, self.thread, self.until = name, thread, until
        self.is_asked, self.tickets = is_asked, tickets
        self.ends_by: Optional[int] = None

    @property
    def goes_on(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Watcher:
    """Everything comes through one pipe, in order: the signals, as bytes, and words from the main thread.

    A word is a call that this thread makes when it comes to it: whether a signal meant death when it came is decided by
    what the job had set before it, not by what it has set since. `stands(signum)`: our handler does, which a job that
    imported `signal.signal` before us may have changed without a word.
    """

    def __init__(self, dump: Dump, grace_s: float, asked: FrozenSet[int], stands: Callable[[int], bool]) -> None:
        self._dump: Optional[Dump] = dump
        self._stands = stands
        self._grace_s, self._asked = grace_s, asked
        self._managed: Set[int] = set()
        self._lethal: Set[int] = set()
        self._seen: Set[int] = set()
        self._interrupted = False
        self._work: Optional[_Work] = None
        self._stuck: Optional[threading.Thread] = None
        self._words: Deque[Callable[[], None]] = collections.deque()
        self.jobs_fd = -1
        self._forwarding = threading.Lock()
        self._reader, self.writer = _pipe()
        self._is_open = True
        self._thread = threading.Thread(target=self._watch, name="memtrace-signals", daemon=True)

    # For the main thread.

    def start(self) -> None:
        """Signals are not for this thread, nor for those it starts: a `sigwait` of the job's must get them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _asynchronous())
        try:
            self._thread.start()
        except RuntimeError:
            self.abandon()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def manage(self, signum: int) -> None:
        """A handler of ours stands for this signal."""
        self._managed.add(signum)

    def kills(self, signum: int, *, it_does: bool) -> None:
        """Whether the process is to die by the signals that come from now on."""
        self._tell(lambda: self._lethal.add(signum) if it_does else self._lethal.discard(signum))

    def wait_for(self, signum: int, *, lethal: bool) -> None:
        """Our handler runs: back when the dump is done or given up. What the job's handlers raise comes through."""
        self._hand_in(lambda ticket: self._claimed(signum, ticket, lethal=lethal), self._patience_s(signum))

    def forward_to(self, fd: int) -> int:
        """The job's own wake-up descriptor; the one before it. No byte goes to that one any more."""
        with self._forwarding:
            before, self.jobs_fd = self.jobs_fd, fd
        return before

    def finish(self, *, on_main: bool) -> None:
        """Waits for the dump that is on its way, if any, and for the death that follows it.

        The main thread alone may use the pipe; it also waits for a signal that this thread has not come to yet.
        """
        if on_main:
            self._hand_in(self._flushed, self._grace_s)
            return
        work = self._work
        if work is not None and work.thread is not None and work.thread is not threading.current_thread():
            work.thread.join(max(0.0, work.until - time.monotonic()))
            if work.ends_by is not None:
                time.sleep(_MARGIN_S)

    def silence(self) -> None:
        """No more dumps; signals still do what they do."""
        self._dump = None

    def close(self) -> None:
        """The thread ends. The descriptor must not be Python's wake-up descriptor any more."""
        os.close(self.writer)

    def abandon(self) -> None:
        """In a forked child, which has no such thread: the pipe is the parent's."""
        os.close(self.writer)
        os.close(self._reader)

    def _hand_in(self, word: Callable[[Any], None], patience_s: float) -> None:
        """Tells a word that comes with a lock, and waits until that is released."""
        if not self._thread.is_alive():
            return
        ticket = threading.Lock()
        ticket.acquire()
        self._tell(lambda: word(ticket))
        ticket.acquire(timeout=patience_s + _MARGIN_S)

    def _tell(self, word: Callable[[], None]) -> None:
        self._words.append(word)
        try:
            os.write(self.writer, bytes([_WORD]))
        except OSError:
            return

    # The thread.

    def _watch(self) -> None:
        bell = select.poll()
        bell.register(self._reader, select.POLLIN)
        while self._is_open or self._work is not None:
            self._once(bell)

    def _once(self, bell: Any) -> None:
        try:
            if bell.poll(None if self._work is None else _PULSE_MS):
                self._read(bell)
            self._look_after()
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever goes wrong
            notes.note(f"signals: {notes.described(error)}")

    def _read(self, bell: Any) -> None:
        try:
            numbers = os.read(self._reader, 4096)
        except OSError:  # the job has closed all descriptors: it may be another's by now
            self._is_open = False
            bell.unregister(self._reader)
            return
        for number in numbers:
            if number == _WORD:
                self._words.popleft()()
            else:
                self._forward(number)
                self._came(number)
        if not numbers:
            self._is_open = False
            bell.unregister(self._reader)
            os.close(self._reader)

    def _forward(self, number: int) -> None:
        """The byte that the job's own wake-up descriptor (asyncio's) would have got."""
        with self._forwarding:
            if self.jobs_fd >= 0:
                try:
                    os.write(self.jobs_fd, bytes([number]))
                except OSError:  # full, or closed: the job would not have got it either
                    return

    def _came(self, signum: int) -> None:
        if signum in self._managed:
            self._seen.add(signum)
            self._begin(signum, lethal=signum in self._lethal and self._stands(signum))
        elif signum == signal.SIGINT and not self._interrupted:
            self._interrupted = True
            self._begin(signum, lethal=False)

    def _claimed(self, signum: int, ticket: Any, *, lethal: bool) -> None:
        """Our handler runs on the main thread, and waits. It runs although no byte came if somebody took our place."""
        seen = signum in self._seen
        self._seen.discard(signum)
        if self._work is None and seen:
            ticket.release()
        else:
            self._begin(signum, lethal=lethal).tickets.append(ticket)

    def _flushed(self, ticket: Any) -> None:
        if self._work is None:
            ticket.release()
        else:
            self._work.tickets.append(ticket)

    def _begin(self, signum: int, *, lethal: bool) -> _Work:
        """One dump for all signals of its kind that come while it is written."""
        work = self._work
        if lethal and (work is None or work.ends_by is None):
            ending.die_in_time(signum, self._grace_s + _MARGIN_S / 2)
        if work is None or (work.is_asked != (signum in self._asked) and work.ends_by is None):
            work = self._work = self._new(signum, [] if work is None else work.tickets)
        if lethal and work.ends_by is None:
            work.ends_by = signum
            work.until = min(work.until, time.monotonic() + self._grace_s)
        return work

    def _new(self, signum: int, tickets: List[Any]) -> _Work:
        """Dumps asked for have files of their own: what may be the end waits for its turn, and is written as well."""
        name, until = _name(signum), time.monotonic() + self._patience_s(signum)
        return _Work(name, self._started(name, signum), until, is_asked=signum in self._asked, tickets=tickets)

    def _started(self, name: str, signum: int) -> Optional[threading.Thread]:
        """The dump on a thread of its own: it blocks for ever where a stuck thread holds the allocator's lock."""
        dump = self._dump
        if dump is None or (self._stuck is not None and self._stuck.is_alive()):
            return None

        def call() -> None:
            notes.log(f"{name}: to be dumped for")
            dump(name, signum)

        thread = _run("memtrace-dump", call)
        if thread is None:  # the interpreter ends (3.12 starts none then): here, behind the dump that main may be at
            notes.guard(call)()
        return thread

    def _look_after(self) -> None:
        work = self._work
        if work is None:
            return
        if work.goes_on and time.monotonic() < work.until:
            if work.ends_by is not None:
                ending.absorb(work.ends_by)
            return
        self._work = None
        if work.goes_on:
            self._stuck = work.thread
            saying = _run("memtrace-notes", lambda: notes.say(f"{work.name}: {_LOST}"))
            if saying is not None:
                saying.join(_SAYING_S / 2)
        for ticket in work.tickets:
            ticket.release()
        if work.ends_by is not None:
            ending.die(work.ends_by)

    def _patience_s(self, signum: int) -> float:
        if signum in self._asked:
            return _ASKED_PATIENCE_S
        return _INTERRUPT_PATIENCE_S if signum == signal.SIGINT else self._grace_s


_LOST = "no snapshot in time (the driver or the allocator is busy): it is lost"


def _run(name: str, call: Callable[[], Any]) -> Optional[threading.Thread]:
    def guarded() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a thread of ours prints no traceback into the job's output
            notes.note(f"{name}: {notes.described(error)}")

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no threads left, or none any more
        notes.note(f"{name}: {error}")
        return None
    return thread


def _pipe() -> Tuple[int, int]:
    """Not in the place of a standard stream that the job has closed: something may write there."""
    import fcntl

    ends: List[int] = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(end)
    os.set_blocking(ends[1], False)
    return ends[0], ends[1]


def _asynchronous() -> Set[int]:
    """All signals but those that a thread sends to itself by what it does."""
    own = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS}
    return {int(one) for one in signal.valid_signals()} - own


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
