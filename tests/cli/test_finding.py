"""Which snapshot is meant: recordings, the newest one, and how mistakes are said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES
from running import memtrace

from memtrace import api

MiB = 1 << 20
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


def recording(root: Path, name: str, peaks: dict[int, int], *, sidecars: bool = True) -> Path:
    """A recording with one rank per entry of `peaks` (MiB)."""
    folder = root / name
    folder.mkdir(parents=True)
    for rank, size in peaks.items():
        SnapshotBuilder().alloc(0x7F0000000000, size * MiB).pickle(folder / f"rank{rank:04d}.pickle")
        if sidecars:
            sidecar = {"rank": rank, "world": 8, "stats": {"allocated_bytes.all.peak": size * MiB}}
            (folder / f"rank{rank:04d}.json").write_text(json.dumps(sidecar))
    return folder


def test_a_directory_opens_its_rank_with_the_highest_peak(tmp_path: Path) -> None:
    folder = recording(tmp_path, "run", {0: 4, 3: 64, 5: 32})
    ran = memtrace("blame", folder, "--json")
    assert ran.document["data"]["total_bytes"] == 64 * MiB
    assert ran.document["snapshot"]["recording"] == {"directory": str(folder), "rank": 3, "world": 8}
    assert "using rank 3" in ran.err
    assert memtrace("blame", folder, "-r", "5", "--json").document["data"]["total_bytes"] == 32 * MiB
    wrong = memtrace("blame", folder, "-r", "7")
    assert wrong.code == 2
    assert "There is: 0, 3, 5" in wrong.err


def test_without_sidecars_the_lowest_rank_is_taken(tmp_path: Path) -> None:
    folder = recording(tmp_path, "run", {2: 4, 1: 2}, sidecars=False)
    assert memtrace("blame", folder, "--json").document["snapshot"]["recording"]["rank"] == 1


def test_no_name_means_the_newest_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    old, new = recording(tmp_path, "b-old", {0: 4}), recording(tmp_path, "a-new", {0: 8})
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    ran = memtrace("blame", "--json")
    assert ran.document["data"]["total_bytes"] == 8 * MiB
    assert "a-new" in ran.err
    assert "old" in ran.err


def test_none_to_be_found_is_exit_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    ran = memtrace("blame")
    assert ran.code == 4
    assert ran.err.startswith("memtrace: error[no-recording]: ")


def test_the_walk_up_finds_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memtrace import paths

    monkeypatch.setenv("HOME", str(tmp_path))
    deep = tmp_path / "project" / "src"
    deep.mkdir(parents=True)
    recording(tmp_path / "project" / ".memtrace", "run", {0: 4})
    assert next(iter(paths.recording_roots(deep))) == tmp_path / "project" / ".memtrace"


def test_the_walk_up_ends_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memtrace import paths

    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    recording(tmp_path / ".memtrace", "run", {0: 4})
    assert list(paths.recording_roots(home / "project")) == []


@pytest.mark.parametrize(
    ("make", "code", "error"),
    [
        (lambda path: None, 3, "missing-file"),
        (lambda path: path.mkdir(), 3, "not-a-recording"),
        (lambda path: path.write_bytes(b""), 3, "not-a-pickle"),
        (lambda path: path.write_bytes(LFS_POINTER), 3, "git-lfs-pointer"),
        (lambda path: path.write_bytes(b"PK\x03\x04rest"), 3, "not-a-pickle"),
        (lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n."), 3, "unsafe-pickle"),
        (lambda path: path.write_bytes(b"\x80\x04}\x94."), 3, "not-a-snapshot"),
        (lambda path: path.write_bytes(b"\x80\x04}\x94"), 3, "truncated"),
    ],
)  # fmt: skip
def test_every_bad_input_is_one_error_and_one_hint(tmp_path: Path, make, code: int, error: str) -> None:
    path = tmp_path / "x.pickle"
    make(path)
    for command in ("blame", "info", "verify"):
        ran = memtrace(command, path)
        assert ran.code == code
        assert ran.out == ""
        first, second = ran.err.splitlines()
        assert first.startswith(f"memtrace: error[{error}]: ")
        assert str(path) in first
        assert second.startswith("hint: ")


def test_wrong_words_are_usage_errors() -> None:
    for arguments in (["blaem"], ["blame", "--off"], ["blame", "--by", "colour"], ["blame", "-n", "0"], ["--wrong"]):
        ran = memtrace(*arguments)
        assert ran.code == 2
        assert ran.err.startswith("memtrace: error[usage]: ")
    assert "Did you mean blame?" in memtrace("blaem").err


def test_every_help_ends_with_examples() -> None:
    for command in ((), ("blame",), ("info",), ("verify",)):
        ran = memtrace(*command, "-h")
        assert ran.code == 0
        assert "Examples:\n" in ran.out
        assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_a_bug_of_ours_is_said_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError("\x1b[31mboom")

    monkeypatch.setattr(api, "load", broken)
    ran = memtrace("blame", "x")
    assert ran.code == 70
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.err
    assert "Traceback" in memtrace("blame", "-v", "x").err


def test_too_little_memory_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("memtrace.api.Snapshot.blame", full)
    ran = memtrace("blame", str(FIXTURES / "mlp-adamw.pickle.xz"))
    assert ran.code == 3
    assert ran.err.startswith("memtrace: error[too-large]")


def test_a_missing_file_names_its_neighbours_and_no_truth_file(tmp_path: Path) -> None:
    for name in ("run.pickle.xz", "run.truth.json", "other.pickle"):
        (tmp_path / name).write_bytes(b"")
    assert memtrace("info", tmp_path / "run").err.splitlines()[1] == f"hint: Did you mean {tmp_path / 'run.pickle.xz'}?"
    assert memtrace("info", tmp_path / "rum.pickle").err.splitlines()[1].startswith("hint: Did you mean ")
