"""The cache as somebody at the command line sees it: not at all, but for the time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import ROOT, snapshot_path
from running import memtrace

from memtrace import api, paths
from memtrace.allocator import stored
from memtrace.io import cache
from memtrace.io.bundle import Packed

OLD = 1_700_000_000
NAMES = ("gpt2-adamw", "mlp-recorded-from-step-1", "two-streams", "oom", "cuda-graph")
COMMANDS = [
    ("blame",),
    ("blame", "--json", "--by", "block"),
    ("blame", "--of", "reserved", "--by", "tree", "--json"),
    ("blame", "--by", "tree"),
    ("info",),
    ("info", "--json"),
    ("verify",),
    ("verify", "--json"),
]


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LEAST_ROWS", 0)
    monkeypatch.setattr(cache, "_COLUMN_MAKERS", ("model",))  # somebody may be editing the others just now


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = Path(shutil.copy(snapshot_path("mlp-adamw"), tmp_path / "x.pickle.xz"))
    os.utime(path, (OLD, OLD))
    return path


def entries() -> dict[str, int]:
    """Name and time of writing of what is in the cache."""
    folder = paths.cache_directory()
    assert folder is not None
    return {path.name: path.stat().st_ctime_ns for path in folder.iterdir()} if folder.exists() else {}


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_read", lambda *_: pytest.fail("the file was read"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_answer_is_the_same_to_the_byte(
    command: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = snapshot_path(name)
    without = memtrace(*command, "--no-cache", path)
    assert not entries()
    first = memtrace(*command, path)
    assert len(entries()) == 1
    no_reading(monkeypatch)
    assert memtrace(*command, path) == first == without


def test_no_cache_neither_reads_nor_writes(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memtrace("blame", "--no-cache", snapshot)
    assert not entries()
    memtrace("blame", snapshot)
    before = entries()
    assert before
    reads: list[object] = []
    monkeypatch.setattr(api, "_read", lambda *given, read=api._read: reads.append(given) or read(*given))
    memtrace("blame", "--no-cache", snapshot)
    assert len(reads) == 1
    assert entries() == before


def test_a_recording_comes_from_the_cache_too(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    snapshot.rename(tmp_path / "run" / "rank0000.pickle.xz")
    first = memtrace("blame", "--json", tmp_path / "run")
    no_reading(monkeypatch)
    again = memtrace("blame", "--json", tmp_path / "run")
    assert again == first
    assert again.document["snapshot"]["recording"]["rank"] == 0


def test_the_path_in_the_answer_is_the_one_given(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memtrace("info", snapshot)
    no_reading(monkeypatch)
    other = snapshot.rename(snapshot.with_name("y.pickle.xz"))
    assert memtrace("info", "--json", other).document["snapshot"]["path"] == str(other)
    assert str(other) in memtrace("info", other).out


def test_standard_input_is_not_kept(snapshot: Path) -> None:
    assert memtrace("info", "-", stdin=snapshot.read_bytes()).code == 0
    assert not entries()


def test_a_limit_holds_for_what_is_kept(snapshot: Path) -> None:
    assert memtrace("info", snapshot).code == 0
    refused = memtrace("info", "--max-size", "1KiB", snapshot)
    assert refused.code == 3
    assert "error[too-large]" in refused.err


@pytest.mark.parametrize("arguments", [["--device", "9"], ["--at", "oom"]])
def test_a_question_that_does_not_fit_keeps_nothing_and_says_the_same(arguments: list[str], snapshot: Path) -> None:
    first = memtrace("blame", *arguments, snapshot)
    assert first.code == 2
    assert not entries()
    memtrace("blame", snapshot)
    assert memtrace("blame", *arguments, snapshot) == first


def test_what_is_kept_is_written_after_the_answer(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(_self: object) -> bool:
        seen.append(sys.stdout.getvalue())
        return True

    monkeypatch.setattr(api.Snapshot, "remember", look)
    ran = memtrace("blame", snapshot)
    assert seen == [ran.out]


def test_ctrl_c_after_the_answer_is_no_failure(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_self: Packed, _file: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Packed, "write", interrupted)
    ran = memtrace("blame", snapshot)
    assert (ran.code, bool(ran.out)) == (0, True)
    assert not entries()


def test_a_directory_that_cannot_be_made_is_not_mentioned(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = memtrace("blame", "--no-cache", snapshot)
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", "/dev/null/none")
    assert memtrace("blame", snapshot) == without


def test_a_reader_that_leaves_may_ask_again(tmp_path: Path) -> None:
    """`| head` leaves before the end; in a process of its own, on a file that is large enough."""
    snapshot = Path(shutil.copy(snapshot_path("gpt2-zero3-oom"), tmp_path / "x.pickle.xz"))
    os.utime(snapshot, (OLD, OLD))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "memtrace", "blame", "--by", "block", "--json", str(snapshot)]
    ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(entries()) == 1


def test_what_makes_the_start_quick_is_undone(snapshot: Path) -> None:
    """A program started later, such as a job to be recorded, has all of its threads."""
    program = (
        "import gc, os, sys\n"
        "from memtrace.cli import main\n"
        "try: main()\n"
        "except SystemExit: sys.exit(not gc.isenabled() or 'OPENBLAS_NUM_THREADS' in os.environ)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", program, "info", str(snapshot)]
    assert subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=False).returncode == 0


def test_a_hit_imports_neither_readers_nor_graphs(snapshot: Path) -> None:
    """What is not needed for an answer from the cache is not imported for it: start-up is most of its time."""
    program = (
        "import json, sys\n"
        "from memtrace.allocator import stored\n"
        "from memtrace.cli import main\n"
        "stored.LEAST_ROWS = 0\n"
        "try: main()\n"
        "except SystemExit: json.dump(sorted(sys.modules), sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, "blame", "--json", str(snapshot)]
    first, second = (
        set(json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stderr))
        for _ in range(2)
    )
    assert "memtrace.io.read" in first
    assert not {"networkx", "rich", "lzma", "platformdirs", "memtrace.io.read", "memtrace.io.source"} & second
