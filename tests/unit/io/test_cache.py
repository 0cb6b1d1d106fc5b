"""The cache: what comes back is what went in, for as long as the file is the same and there is room."""

from __future__ import annotations

import importlib
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caching import OLD_NS, aged, assert_same, entries, entry_of, is_hit, odd_snapshot, remembered
from recordings import ROOT, fixture_names, snapshot_path

import memtrace
from memtrace import paths
from memtrace.allocator import stored
from memtrace.attribution.stored import Stored
from memtrace.errors import TooLargeError
from memtrace.io import cache
from memtrace.io.bundle import Packed

KEEP = """
import sys, memtrace
from memtrace.allocator import stored
stored.LEAST_ROWS = 0
for _ in range(int(sys.argv[2])):
    snapshot = memtrace.load(sys.argv[1])
    print(snapshot.blame(by="stack"))
    snapshot._has_news = True
    assert snapshot.remember()
"""


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LEAST_ROWS", 0)
    monkeypatch.setattr(cache, "_COLUMN_MAKERS", ("model",))  # somebody may be editing the others just now


@pytest.fixture
def folder() -> Path:
    found = paths.cache_directory()
    assert found is not None
    return found


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return odd_snapshot(tmp_path / "s.pickle")


@pytest.fixture
def entry(snapshot: Path) -> Path:
    """The entry of that file, with the replays of both devices."""
    return remembered(snapshot)


# What comes back


@pytest.mark.parametrize("name", fixture_names())
def test_what_comes_back_is_what_was_read(name: str) -> None:
    read = memtrace.load(snapshot_path(name), cache=False)
    first = memtrace.load(snapshot_path(name))
    for device in first.devices:
        first.peak(device=device)
    assert first.remember()
    found = Stored.of(str(snapshot_path(name)), None)
    assert found is not None
    data = found.data()
    assert data is not None
    assert_same(read.data, data)
    for device in read.devices:
        replayed = found.replay(device, data)
        assert replayed is not None
        assert_same(read.replay(device), replayed[0])
        peak = read.peak(device=device)
        assert replayed[1]["allocated"] == stored.Highest(peak.bytes, peak.event)


def test_names_that_are_no_unicode_and_several_devices(snapshot: Path, entry: Path) -> None:
    data = memtrace.load(snapshot).data
    assert_same(memtrace.load(snapshot, cache=False).data, data)
    assert any("\ud800" in text for text in data.strings.values)
    assert data.traces[1].device_free


def test_a_hit_reads_neither_file_nor_replay(snapshot: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memtrace.load(snapshot, cache=False)
    expected = [str(whole.blame(at, device=0)) for at in ("peak", 5)]
    reserved = whole.peak("reserved")
    for module, function in (("io.read", "read_snapshot"), ("allocator.replay", "replay")):
        home = importlib.import_module(f"memtrace.{module}")
        monkeypatch.setattr(home, function, lambda *_, **__: pytest.fail("read again"))
    again = memtrace.load(snapshot)
    assert [str(again.blame(at, device=0)) for at in ("peak", 5)] == expected
    assert again.peak("reserved") == reserved
    assert again.remember(), "what the blocks are for was not there"
    for module, function in (("timeline.find", "timeline_of"), ("attribution.attribute", "attribute")):
        home = importlib.import_module(f"memtrace.{module}")
        monkeypatch.setattr(home, function, lambda *_, **__: pytest.fail("decided again"))
    third = memtrace.load(snapshot)
    assert [str(third.blame(at, device=0)) for at in ("peak", 5)] == expected
    assert_same(whole.attribution(0), third.attribution(0))
    assert_same(whole.timeline(0), third.timeline(0))
    assert not third.remember(), "all of it is there"


def test_the_path_is_the_one_given_now(snapshot: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(snapshot.parent)
    assert is_hit("s.pickle")
    assert memtrace.load("s.pickle").data.path == "s.pickle"


def test_a_later_replay_joins_those_that_are_there(snapshot: Path) -> None:
    first = memtrace.load(snapshot)
    first.replay(1)
    first.remember()
    second = memtrace.load(snapshot)
    second.replay(0)
    assert second.remember()
    third = memtrace.load(snapshot)
    for device in (0, 1):
        third.replay(device)
    assert not third.remember()


# Hits and misses


def edit(path: Path) -> None:
    """In place: size, time and inode stay."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    aged(path)


def swap(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    aged(path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")
    aged(path)


@pytest.mark.parametrize("change", [lambda path: aged(path, OLD_NS + 1), edit, swap, grow])
def test_a_file_that_changed_is_read(change: Callable[[Path], object], snapshot: Path, entry: Path) -> None:
    assert is_hit(snapshot)
    change(snapshot)
    assert not is_hit(snapshot)


def test_renamed_or_linked_it_is_the_same_file(snapshot: Path, entry: Path) -> None:
    moved = snapshot.rename(snapshot.with_name("moved.pickle"))
    snapshot.symlink_to(moved)
    assert is_hit(moved)
    assert is_hit(snapshot)


@pytest.mark.parametrize("name", ["__version__", "FORMAT"])
def test_another_version_is_not_believed(name: str, snapshot: Path, entry: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache, name, 99)
    assert not is_hit(snapshot)
    assert entry.exists(), "the other version may still want it"
    assert remembered(snapshot) == entry, "one entry a file"


def test_other_source_files_are_another_version(snapshot: Path, entry: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache, "_COLUMN_MAKERS", ("io", "model"))
    assert not is_hit(snapshot)


def test_a_file_that_changes_while_it_is_read_is_not_kept(snapshot: Path) -> None:
    def touch(_done: int, _total: int | None) -> None:
        aged(snapshot, OLD_NS + 5)

    assert not memtrace.load(snapshot, progress=touch).remember()
    assert not entries()


def test_a_file_written_this_moment_is_not_kept(snapshot: Path) -> None:
    for ns in (time.time_ns(), time.time_ns() // 1_000_000_000 * 1_000_000_000, time.time_ns() + 10**12):
        assert not memtrace.load(aged(snapshot, ns)).remember()


def test_a_smaller_limit_is_not_bypassed(snapshot: Path) -> None:
    size = snapshot.stat().st_size
    roomy = memtrace.load(snapshot)
    assert roomy.remember()
    assert not is_hit(snapshot, size)
    with pytest.raises(TooLargeError):
        memtrace.load(snapshot, max_bytes=size - 1)
    narrow = memtrace.load(snapshot, max_bytes=size)
    assert narrow.remember()
    assert is_hit(snapshot, size)
    assert is_hit(snapshot)
    with pytest.raises(TooLargeError):
        memtrace.load(snapshot, max_bytes=size - 1)


def test_a_limit_above_the_default_is_not_the_default(snapshot: Path) -> None:
    assert memtrace.load(snapshot, max_bytes=1 << 50).remember()
    assert is_hit(snapshot, 1 << 50)
    assert not is_hit(snapshot)


def test_small_files_are_not_kept(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LEAST_ROWS", 1000)
    assert not memtrace.load(snapshot).remember()
    assert not entries()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_standard_input_are_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cache.origin_of(str(tmp_path / "pipe")) is None
    assert cache.origin_of("-") is None
    assert cache.origin_of(os.devnull) is None
    assert cache.origin_of(str(tmp_path)) is None
    assert cache.origin_of("a\0b") is None


# The directory


def test_what_is_written_is_private(entry: Path, folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert entries() == [entry], "nothing unfinished is left"


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_directory_that_others_can_write_to_is_not_used(mode: int, snapshot: Path, entry: Path, folder: Path) -> None:
    folder.chmod(mode)
    assert not is_hit(snapshot)
    assert not memtrace.load(snapshot).remember()


def test_somebody_elses_entries_are_not_read(snapshot: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_owner_trusted", lambda _: False)
    assert not is_hit(snapshot)


def test_links_in_the_directory_are_not_followed(snapshot: Path, entry: Path, tmp_path: Path) -> None:
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert not is_hit(snapshot)
    assert memtrace.load(snapshot).remember()
    assert not entry.is_symlink()


@pytest.mark.parametrize("place", ["/proc/none/cache", "/dev/null", "file", "file/below"])
def test_a_directory_that_cannot_be_is_no_error(
    place: str, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", str(tmp_path / place))
    assert not is_hit(snapshot)
    assert not memtrace.load(snapshot).remember()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_is_read(snapshot: Path, entry: Path, folder: Path) -> None:
    folder.chmod(0o500)
    assert is_hit(snapshot)
    opened = memtrace.load(snapshot, max_bytes=1 << 40)
    opened._has_news = True
    assert not opened.remember()


@pytest.mark.parametrize("error", [OSError(28, "full"), PermissionError(13, "no"), MemoryError()])
def test_a_full_disk_is_no_error(error: Exception, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_self: Packed, file: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(Packed, "write", write)
    assert not memtrace.load(snapshot).remember()
    assert not entries(), "nothing unfinished is left"


def test_an_interrupted_write_leaves_nothing(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_self: Packed, file: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Packed, "write", write)
    with pytest.raises(KeyboardInterrupt):
        memtrace.load(snapshot).remember()
    assert not entries()


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_directory() == tmp_path / "mine"
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sys.platform != "linux" or paths.cache_directory() == tmp_path / "xdg" / "memtrace"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    found = paths.cache_directory()
    assert found is None or found.is_absolute()
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MEMTRACE_NO_CACHE", "1")
    assert paths.cache_directory() is None


def test_switched_off_it_is_neither_read_nor_written(snapshot: Path, entry: Path, monkeypatch: Any) -> None:
    before = entry.stat()
    monkeypatch.setenv("MEMTRACE_NO_CACHE", "1")
    assert not is_hit(snapshot)
    assert not memtrace.load(snapshot).remember()
    monkeypatch.delenv("MEMTRACE_NO_CACHE")
    assert not memtrace.load(snapshot, cache=False).remember()
    assert entry.stat() == before


# Its size


@pytest.fixture
def several(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Five files of one size and room for four of their entries; the first four have one, used in this order."""
    files = [aged(Path(shutil.copy(snapshot, snapshot.with_name(f"{number}.pickle")))) for number in range(5)]
    for number, path in enumerate(files[:4]):
        assert memtrace.load(path).remember()
        os.utime(entry_of(path), (number, number))
    monkeypatch.setattr(cache, "MAX_BYTES", 4 * entry_of(files[0]).stat().st_size)
    return files


def test_those_used_longest_ago_go_first(several: list[Path]) -> None:
    assert is_hit(several[0])
    assert memtrace.load(several[4]).remember()
    assert [entry_of(path).exists() for path in several] == [True, False, True, True, True]


def test_writing_an_entry_again_takes_no_more_room(several: list[Path]) -> None:
    entry_of(several[3]).write_bytes(b"")
    assert memtrace.load(several[3]).remember()
    assert all(map(is_hit, several[:4]))


def test_an_entry_of_more_than_half_the_room_is_not_kept(several: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_BYTES", 2 * entry_of(several[0]).stat().st_size - 1)
    assert not memtrace.load(several[4]).remember()
    assert len(entries()) == 4, "nothing has to go for it"


def test_a_nearly_full_disk_is_left_alone(several: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    size = entry_of(several[0]).stat().st_size
    monkeypatch.setattr(cache, "_free_bytes", lambda _: 16 * size)  # with the four that are there: room for two
    assert memtrace.load(several[4]).remember()
    assert [entry_of(path).exists() for path in several] == [False, False, False, True, True]


def test_what_was_mapped_stays_when_its_entry_goes(several: list[Path]) -> None:
    expected, held = memtrace.load(several[0], cache=False), memtrace.load(several[0])
    os.utime(entry_of(several[0]), (0, 0))
    assert memtrace.load(several[4]).remember()
    assert not entry_of(several[0]).exists()
    assert_same(expected.data.traces, held.data.traces)


def test_what_killed_processes_left_is_swept(snapshot: Path, folder: Path) -> None:
    folder.mkdir(0o700, parents=True)
    old, young = folder / f"a{cache.UNFINISHED}", folder / f"b{cache.UNFINISHED}"
    for path in (old, young):
        path.write_bytes(b"half")
    aged(old)
    assert memtrace.load(snapshot).remember()
    assert not old.exists()
    assert young.exists(), "its writer may still be at work"


# Many at once


def test_processes_that_read_write_and_evict_at_once(snapshot: Path) -> None:
    command = [sys.executable, "-c", KEEP, str(snapshot), "15"]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for _ in range(200):
        for path in entries():
            if path.suffix == cache.ENTRY:
                path.unlink(missing_ok=True)
        time.sleep(0.005)
    out = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(out) == 1
    assert len(set(out.pop().splitlines())) < 60, "the same answer every time"
    assert not [path for path in entries() if path.suffix == cache.UNFINISHED]
