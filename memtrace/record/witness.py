"""Tells a signal that was sent to us alone from one that was sent to everybody in our process group.

The first is the job's and has to be passed on, the second reached the job already: Slurm, timeout(1) and a shell that
hangs up signal the group, and a launcher that is told to end twice may skip its own clean-up. The signal itself does
not say. The witness is a process in our group that does nothing but wait to be asked which signals it got.
"""

from __future__ import annotations

import os
import signal
import socket
import time

_PATIENCE_SECONDS = 0.2  # who signals processes one after the other may be between us and the witness
_PAUSE_SECONDS = 0.01
_FRESH_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_MOST_DESCRIPTORS = 65536
_END = 0  # no signal has this number


class Witness:
    """A forked process that keeps `signals`, which are blocked in this one as in that one, until it is asked."""

    def __init__(self, signals: frozenset[int]) -> None:
        self._seen: dict[int, float] = {}
        self._line, its_end = socket.socketpair()
        self._line.settimeout(_ANSWER_SECONDS)
        try:
            self._pid = os.fork()
        except OSError:  # no more processes: nobody saw anything, and every signal is passed on
            self._pid = -1
        if self._pid == 0:
            try:
                _let_go_of_all_but(its_end.fileno())
                _answer(its_end, signals)
            finally:
                os._exit(0)
        its_end.close()

    def close(self) -> None:
        """Ends the process, as our own end would."""
        self._line.close()
        if self._pid > 0:
            os.waitpid(self._pid, 0)

    def saw(self, number: int) -> bool:
        """Whether a signal that just reached us reached the witness too."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            now = time.monotonic()
            self._seen.update(dict.fromkeys(self._ask(), now))
            if now - self._seen.get(number, -_FRESH_SECONDS) < _FRESH_SECONDS:
                return True
            if now >= end:
                return False
            time.sleep(_PAUSE_SECONDS)

    def _ask(self) -> bytes:
        """The signals that reached the witness since it was last asked."""
        answer = b""
        try:
            self._line.sendall(b"?")
            while not answer.endswith(bytes([_END])):
                part = self._line.recv(256)
                if not part:
                    return b""
                answer += part
        except OSError:  # it was killed
            return b""
        return answer[:-1]


def _answer(line: socket.socket, signals: frozenset[int]) -> None:
    """Until the other end is closed, or its process is gone."""
    while line.recv(1):
        found = iter(lambda: signal.sigtimedwait(signals, 0), None)
        line.sendall(bytes([*(info.si_signo for info in found), _END]))


def _let_go_of_all_but(descriptor: int) -> None:
    """Nobody is to wait for the end of a pipe, or for a directory, that only the witness still holds."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, _MOST_DESCRIPTORS)
    os.chdir("/")
