"""Runs the job as a child that cannot tell us from a shell: its streams, its signals, its exit code."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrace.errors import MemtraceError
from memtrace.record.inside import world
from memtrace.record.inside.settings import TWIN, VARIABLE, Settings, encode
from memtrace.record.layout import BOOTSTRAP
from memtrace.record.witness import Witness

NOT_FOUND = 127
NOT_EXECUTABLE = 126

_SI_KERNEL = 0x80
_PR_SET_PDEATHSIG = 1
_SHEBANG_BYTES = 256
_PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM")
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*t?")


class CommandError(MemtraceError):
    """The command could not be started."""

    code = "command"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, hint="Nothing was run.")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended: with `code`, or by `signal`. Times in microseconds since 1970."""

    code: int
    signal: int | None
    started_us: int
    ended_us: int


def run(command: Sequence[str], settings: Settings | None, environ: Mapping[str, str] | None = None) -> Outcome:
    """Runs the command to its end, recorded unless `settings` is None. `environ`: the job's (default: this process's).

    Raises CommandError if it cannot be started.
    """
    environ = dict(os.environ if environ is None else environ)
    if settings is not None:
        environ = environment(settings, environ, command)
    started_us = _now_us()
    with _held_signals() as held:
        if held is None:
            code = _start(command, environ, None).wait()
        else:
            with contextlib.closing(Witness(held.passed_on)) as witness:
                code = _wait(_start(command, environ, held), held, witness)
    return Outcome(max(code, 0), -code if code < 0 else None, started_us, _now_us())


def environment(settings: Settings, environ: Mapping[str, str], command: Sequence[str] = ()) -> dict[str, str]:
    """The job's environment: the bootstrap comes first on Python's path, and finds its settings.

    Under two names, as DeepSpeed's launcher takes only PYTHON... to other nodes. There too the directory has to exist.
    A script of a simulated world that no launcher starts is told its rank before it imports torch.
    """
    if settings.world and command and _PYTHON.fullmatch(Path(command[0]).name):
        environ = {**environ, **world.environment(settings.world, settings.rank, environ)}
    path = str(Path(settings.directory) / BOOTSTRAP)
    before = environ.get("PYTHONPATH")
    text = encode(settings)
    return {**environ, "PYTHONPATH": f"{path}{os.pathsep}{before}" if before else path, VARIABLE: text, TWIN: text}


def obstacle(command: Sequence[str]) -> str | None:
    """Why a Python that the command names will not let us in; None when nothing speaks against it.

    >>> obstacle(["srun", "python3", "-uI", "train.py"])
    'python3 -uI ignores PYTHONPATH, through which the recorder comes in: it will not be recorded'
    >>> obstacle(["python", "-m", "pkg", "-E"])
    """
    for words in (list(command), _shebang(command[0]) if command else []):
        for index, word in enumerate(words):
            option = _refusing_option(words[index + 1 :]) if _PYTHON.fullmatch(Path(word).name) else None
            if option is not None:
                how = "runs no sitecustomize" if option[-1] == "S" else "ignores PYTHONPATH"
                who = f"{Path(word).name} {option}"
                return f"{who} {how}, through which the recorder comes in: it will not be recorded"
    return None


def die_by(number: int) -> None:
    """Ends this process by a signal, without a core of ours. Returns where that is impossible (process 1)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to restore
        signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


@dataclass(frozen=True, slots=True)
class _Held:
    """The signals that wait for us; those among them that may be the job's; and what the job is to have from before."""

    waiting: frozenset[int]
    passed_on: frozenset[int]
    mask: frozenset[int]
    ignores_children: bool


@contextlib.contextmanager
def _held_signals() -> Iterator[_Held | None]:
    """Signals queue up until asked for: none can kill us between two instructions and leave the job alone."""
    if not hasattr(signal, "sigwaitinfo"):
        yield None
        return
    # Where dead children are ignored their exit codes are lost.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    passed_on = frozenset(int(getattr(signal, name)) for name in _PASSED_ON)
    waiting = passed_on | {int(signal.SIGCHLD)}
    mask = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, waiting)))
    try:
        yield _Held(waiting, passed_on, mask, before == signal.SIG_IGN)
    finally:
        while signal.sigtimedwait(waiting, 0) is not None:  # what came too late for the job
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


def _start(command: Sequence[str], environ: Mapping[str, str], held: _Held | None) -> subprocess.Popen[bytes]:
    """As a shell would: every open descriptor is inherited, and a script without a first line is sh's."""
    found = shutil.which(command[0])

    def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - this is what we were asked to do
            words, env=environ, close_fds=False, preexec_fn=_before_exec(held)
        )

    try:
        try:
            return start(command)
        except OSError as error:
            if error.errno != errno.ENOEXEC or found is None or b"\0" in _head(found):
                raise
            return start(["/bin/sh", found, *command[1:]])
    except FileNotFoundError as error:
        if found is None:
            raise CommandError(f"{command[0]}: command not found", NOT_FOUND) from error
        raise CommandError(f"{command[0]}: the interpreter in its first line is not there", NOT_EXECUTABLE) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{command[0]}: cannot be executed: {reason}", NOT_EXECUTABLE) from error


def _before_exec(held: _Held | None) -> Callable[[], None] | None:
    """What the child does before it becomes the job: it gets the signals we got, and goes when we are killed."""
    if held is None:
        return None
    die_with_us = _dying_with_us()

    def prepare() -> None:
        if held.ignores_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        die_with_us()
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    return prepare


def _dying_with_us() -> Callable[[], None]:
    """Makes a child die when we are killed (Linux). Looked up here: a child between fork and exec imports nothing."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError, TypeError):
        return lambda: None

    def request() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    return request


def _wait(process: subprocess.Popen[bytes], held: _Held, witness: Witness) -> int:
    """The exit code (negative: the signal) once the job has ended. What is sent to us alone is passed on.

    A terminal's signals (Ctrl-C, hang-up) come from the kernel and reach the whole process group.
    """
    while process.poll() is None:
        info = signal.sigwaitinfo(held.waiting)
        if info.si_signo in held.passed_on and not witness.saw(info.si_signo) and info.si_code != _SI_KERNEL:
            process.send_signal(info.si_signo)
    return int(process.returncode)


def _refusing_option(words: Sequence[str]) -> str | None:
    """The interpreter option among the first words that keeps us out."""
    for word in itertools.takewhile(lambda word: word.startswith("-") and word != "-", words):
        for letter in word[1:]:
            if letter in "IES":
                return word
            if letter in "cm":
                return None
            if letter in "-WX":  # the rest is a value
                break
    return None


def _shebang(program: str) -> list[str]:
    """The words of a script's first line."""
    found = shutil.which(program)
    head = b"" if found is None else _head(found)
    return os.fsdecode(head.partition(b"\n")[0][2:]).split() if head.startswith(b"#!") else []


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a program of any name
            return file.read(_SHEBANG_BYTES)
    except OSError:
        return b""


def _now_us() -> int:
    return time.time_ns() // 1000
