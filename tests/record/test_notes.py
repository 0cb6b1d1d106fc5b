"""What the recorder says: never an exception, never twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrace.record.inside import notes


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notes, "NOTES", [])
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setattr(notes, "_lines", 0)
    monkeypatch.delenv("RANK", raising=False)
    notes.configure(str(tmp_path))
    yield
    notes.configure(None)


def lines(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text("utf-8").splitlines()


def test_a_line_of_the_log_says_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes.log("one")
    monkeypatch.setenv("RANK", "3")
    notes.log("two\nlines, a half character \udc80 and \x1b[1m")
    first, second = lines(tmp_path)
    assert first.endswith(f" pid {os.getpid()} rank -: one")
    assert second.endswith(f" pid {os.getpid()} rank 3: two lines, a half character   and  [1m")


def test_lines_are_added_to_what_others_wrote(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n", "utf-8")
    notes.log("after")
    assert lines(tmp_path)[0] == "before"


def test_a_log_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_MOST_LINES", 3)
    for number in range(9):
        notes.log(str(number))
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("where", [None, "missing/folder", "file", "nul\0"])
def test_no_log_is_no_error(tmp_path: Path, where: str | None) -> None:
    (tmp_path / "file").touch()
    notes.configure(None if where is None else str(tmp_path / where))
    notes.log("one")
    notes.note("one")
    assert notes.NOTES == ["one"]


def test_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes.say("one")
    notes.say("one")
    notes.say("two\nlines")
    assert capsys.readouterr().err == "memtrace: one\nmemtrace: two lines\n"
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("stream", [None, object()])
def test_whatever_stands_for_stderr(stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    notes.say("one")
    assert len(lines(tmp_path)) == 1


def test_a_closed_stderr() -> None:
    script = (
        "import sys; from memtrace.record.inside import notes; notes.say('one'); sys.stderr.close(); notes.say('two')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "memtrace: one\n")


def test_notes_are_kept_once_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_MOST_NOTES", 2)
    for text in ("a\nb", "a\nb", "a b", "c", "d", "x" * 5000):
        notes.note(text)
    assert notes.NOTES == ["a b", "c"]


class SilentError(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [ValueError("why"), SilentError(), RecursionError(), MemoryError()])
def test_a_hook_never_raises(error: Exception) -> None:
    @notes.guard
    def hook(value: int) -> int:
        """Says it."""
        if value:
            raise error
        return 7

    assert hook(0) == 7
    assert hook(1) is None
    assert hook.__doc__ == "Says it."
    assert len(notes.NOTES) == 1
    assert type(error).__name__ in notes.NOTES[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_handlers_of_the_job_raise_is_the_jobs(error: type[BaseException]) -> None:
    @notes.guard
    def hook() -> None:
        raise error

    with pytest.raises(error):
        hook()
    assert notes.NOTES == []
