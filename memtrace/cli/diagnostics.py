"""The only writer to stderr: errors with their exit codes, warnings, notes, progress."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TextIO, TypeVar, cast

import click

from memtrace.errors import MemtraceError, TooLargeError
from memtrace.text import printable

Result = TypeVar("Result")

_BAR_AFTER_SECONDS = 0.5
_BAR_WIDTH = 24


class ExitCode(IntEnum):
    """Codes that are not an error class's own."""

    FINE = 0
    CHECK_FAILED = 1
    USAGE = 2
    BUG = 70
    INTERRUPTED = 130


def guarded(command: click.Command) -> int:
    """Runs a click command; every way out is an exit code and at most two lines on stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with _guarded_stdout():
            result = command.main(prog_name="memtrace", standalone_mode=False)
    except MemtraceError as error:
        report(error.code, error.message, error.hint)
        return error.exit_code
    except OutputError as error:
        _forget_stdout()
        report("output", f"the answer cannot be written: {error}", "Check the disk and what standard output leads to.")
        return ExitCode.USAGE
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "memtrace"
        report("usage", error.format_message(), f"See {path} --help.")
        return ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except ReaderGoneError:
        _forget_stdout()
        return ExitCode.FINE
    except MemoryError:
        report(TooLargeError.code, "there is not enough memory to answer this", "Ask on a machine with more of it.")
        return TooLargeError.exit_code
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug of ours, said as such
        report(
            "internal",
            f"{type(error).__name__}: {str(error)[:200]}",
            "This is a bug in memtrace. Run again with -v for the traceback, and please report it.",
        )
        if {"-v", "--verbose"} & set(sys.argv):
            _write("".join(printable(line) + "\n" for line in traceback.format_exc().splitlines()))
        return ExitCode.BUG
    return result if isinstance(result, int) else ExitCode.FINE


class OutputError(Exception):
    """Standard output refused what was written."""


class ReaderGoneError(Exception):
    """The reader has seen enough (`| head`). No BrokenPipeError, which click would turn into exit code 1."""


def _checked(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except BrokenPipeError:
        raise ReaderGoneError from None
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


class _Guarded:
    """Standard output whose failures cannot be taken for those of a file that is read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or raises OutputError or ReaderGoneError."""
        return _checked(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Flushes, with the same errors."""
        _checked(self._stream.flush)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Closed(io.TextIOBase):
    """In the place of a standard output that was closed before we began: `record` has nothing to say there."""

    def write(self, _text: str) -> int:
        """Raises OutputError."""
        raise OutputError("standard output is closed")


@contextlib.contextmanager
def _guarded_stdout() -> Iterator[None]:
    stream = sys.stdout
    sys.stdout = cast("TextIO", _Closed() if stream is None else _Guarded(stream))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream


def _forget_stdout() -> None:
    """Keeps the interpreter from failing on what is still buffered when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(code: str, message: str, hint: str | None = None) -> None:
    """An error as people see it."""
    _write(f"memtrace: error[{code}]: {printable(message)}\n")
    if hint:
        _write(f"hint: {printable(hint)}\n")


def warn(code: str, message: str) -> None:
    """Something that limits the answer."""
    _write(f"memtrace: warning[{code}]: {printable(message)}\n")


def note(message: str) -> None:
    """Something worth knowing."""
    _write(f"memtrace: {printable(message)}\n")


def _megabytes(done: int) -> str:
    return f"{done / 1e6:,.0f} MB"


@contextlib.contextmanager
def progress(
    what: str, *, enabled: bool, amount: Callable[[int], str] = _megabytes
) -> Iterator[Callable[[int, int | None], None] | None]:
    """A callback that draws a bar on a terminal once the work has taken half a second; None when not wanted. `amount`
    writes how much is done."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    began = time.monotonic()
    drawn = 0.0

    def advance(done: int, total: int | None) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - began < _BAR_AFTER_SECONDS or now - drawn < 0.1:
            return
        drawn = now
        share = min(done / total, 1.0) if total else None
        bar = "" if share is None else f"[{'#' * int(share * _BAR_WIDTH):<{_BAR_WIDTH}}] {share:4.0%} "
        eta = "" if not share else f" {(now - began) * (1 - share) / share:.0f} s left"
        _write(f"\r\x1b[K{what} {bar}{amount(done)}{eta}")

    try:
        yield advance
    finally:
        if drawn:
            _write("\r\x1b[K")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be full, closed or none at all
        sys.stderr.write(text)
        sys.stderr.flush()
