"""Snapshots as files: whole or not at all, whatever the disk says."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import math
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrace.record.inside import dump as dump_module
from memtrace.record.inside import notes
from memtrace.record.inside.dump import Dumper

DEADLINE_SECONDS = 60
SNAPSHOT = {"segments": [], "device_traces": [[{"action": "alloc"}]]}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notes, "NOTES", [])
    monkeypatch.setattr(notes, "_said", set())
    yield
    notes.configure(None)


@pytest.fixture
def dumper(tmp_path: Path) -> Dumper:
    folder = tmp_path / "recording"
    folder.mkdir()
    return Dumper(str(folder), 4)


def write(dumper: Dumper, stem: str = "rank0000", take: Any = None, document: Any = None, reason: str = "exit") -> Any:
    said = {"reason": reason} if document is None else document
    return dumper.write(stem, take or (lambda: SNAPSHOT), lambda: said, reason)


def names(dumper: Dumper, *, all_of_them: bool = False) -> set[str]:
    return {name for name in os.listdir(dumper.directory) if all_of_them or not name.startswith(".")}


def snapshot(dumper: Dumper, stem: str = "rank0000") -> Any:
    return pickle.loads((Path(dumper.directory) / f"{stem}.pickle").read_bytes())


def sidecar(dumper: Dumper, stem: str = "rank0000") -> Any:
    return json.loads((Path(dumper.directory) / f"{stem}.json").read_text("utf-8"))


def test_a_pair(dumper: Dumper) -> None:
    path = write(dumper)
    assert path == os.path.join(dumper.directory, "rank0000.pickle")
    data = Path(path).read_bytes()
    assert data[:2] == b"\x80\x04"
    assert pickle.loads(data) == SNAPSHOT
    assert sidecar(dumper) == {"reason": "exit"}
    assert names(dumper) == {"rank0000.pickle", "rank0000.json"}
    assert not [name for name in names(dumper, all_of_them=True) if name.endswith(".tmp")]


def test_no_snapshot(dumper: Dumper) -> None:
    assert dumper.write("rank0001", None, dict, "exit") == os.path.join(dumper.directory, "rank0001.json")
    assert names(dumper) == {"rank0001.json"}


def test_a_later_dump_takes_the_place_of_an_earlier(dumper: Dumper) -> None:
    write(dumper, reason="signal")
    assert write(dumper, take=lambda: [2])
    assert snapshot(dumper) == [2]
    assert sidecar(dumper) == {"reason": "exit"}


def test_a_sidecar_is_never_beside_another_snapshot(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    write(dumper, document={"number": 0})
    seen: list[set[str]] = []
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        seen.append(names(dumper))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write(dumper, take=lambda: [1])
    assert seen[0] == {"rank0000.pickle"}


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("name", ["rank0000.pickle", "rank0000.json"])
def test_nobody_elses_file_is_replaced(
    dumper: Dumper, name: str, links: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuses(errno.EPERM))
    (Path(dumper.directory) / name).write_text("theirs", "utf-8")
    assert write(dumper) is None
    assert (Path(dumper.directory) / name).read_text("utf-8") == "theirs"
    assert "File exists" in capsys.readouterr().err


def refuses(number: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links(dumper: Dumper, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuses(number))
    assert write(dumper)
    assert write(dumper)
    assert names(dumper) == {"rank0000.pickle", "rank0000.json"}


def test_nfs_that_links_and_says_it_was_there(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert write(dumper)
    assert len(names(dumper, all_of_them=True)) == 3  # with the lock


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EDQUOT, errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "open", "replace", "unlink"])
def test_a_disk_that_fails(
    dumper: Dumper, call: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(dumper)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuses(number))
        if call == "open":
            patch.setattr("builtins.open", refuses(number))
        written = [write(dumper), write(dumper)]
    said = capsys.readouterr().err
    if call == "unlink":
        assert all(written)
    else:
        assert written == [None, None]
        assert said.count("\n") == 1
        assert os.strerror(number) in said
        assert "The job goes on" in said
        assert notes.NOTES
    assert write(dumper)


def test_the_directory_itself_may_know_no_fsync(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    assert write(dumper)


def test_a_directory_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for where in ("file", "vanished"):
        dumper = Dumper(str(tmp_path / where), 2)
        assert dumper.choose_stem(0) == "rank0000"
        assert write(dumper) is None
        assert dumper.promote("rank0000.oom", "rank0000") is None
    assert capsys.readouterr().err.count("could not be written") == 2


class Stubborn:
    """Does not let itself be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize(
    "take",
    [lambda: [Stubborn()], lambda: 1 / 0, lambda: (_ for _ in ()), lambda: deep(), lambda: no_memory()],
    ids=["unpicklable", "raises", "generator", "deep", "memory"],
)
def test_a_snapshot_that_cannot_be_written(dumper: Dumper, take: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(dumper, take=take) is None
    assert capsys.readouterr().err.count("The job goes on") == 1
    assert names(dumper) == set()
    assert write(dumper)


def deep() -> Any:
    nest: Any = []
    for _ in range(100_000):
        nest = [nest]
    return nest


def no_memory() -> Any:
    raise MemoryError


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_a_handler_of_the_job_raises_goes_through(dumper: Dumper, error: type[BaseException]) -> None:
    def interrupted() -> Any:
        raise error

    with pytest.raises(error):
        write(dumper, take=interrupted)
    assert not [name for name in names(dumper, all_of_them=True) if "rank" in name]
    assert gc.isenabled()
    assert write(dumper)


def test_a_sidecar_that_cannot_be_made_does_not_cost_the_snapshot(dumper: Dumper) -> None:
    def fails() -> Any:
        raise KeyError("part")

    assert dumper.write("rank0000", lambda: SNAPSHOT, fails, "oom")
    assert sidecar(dumper)["reason"] == "oom"
    assert "KeyError" in sidecar(dumper)["notes"][0]


class Tensor:
    """To say what it holds, it would allocate."""

    __array__ = None

    def __str__(self) -> str:
        raise AssertionError


def test_a_sidecar_of_anything(dumper: Dumper) -> None:
    document = {
        "nan": [math.nan, -math.inf, 1.5], "half": "\udc80", "whole": "\U0001f600", 3: (1, {2}), "tensor": Tensor(),
        "path": Path("/a"), (1, 2): None, "type": int,
    }  # fmt: skip
    assert write(dumper, document=document)
    assert sidecar(dumper) == {
        "nan": ["nan", "-inf", 1.5], "half": "?", "whole": "\U0001f600", "3": [1, [2]], "tensor": "Tensor",
        "path": "/a", "(1, 2)": None, "type": "<class 'int'>",
    }  # fmt: skip


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_rests_while_a_snapshot_is_built(dumper: Dumper, on: bool) -> None:
    seen = []

    def take() -> Any:
        seen.append(gc.isenabled())
        return SNAPSHOT

    try:
        (gc.enable if on else gc.disable)()
        write(dumper, take=take)
        assert gc.isenabled() is on
    finally:
        gc.enable()
    assert seen == [False]


class Kept:
    """Says when it is gone."""

    gone: bool | None = None

    def __del__(self) -> None:
        Kept.gone = gc.isenabled()

    def __reduce__(self) -> Any:
        return (int, ())


def test_the_snapshot_is_gone_before_the_collector_works_again(dumper: Dumper) -> None:
    assert write(dumper, take=lambda: [Kept()])
    assert Kept.gone is False


def test_a_dump_within_a_dump_is_not_made(dumper: Dumper) -> None:
    inner = []

    def take() -> Any:
        assert dumper.is_writing
        inner.append(write(dumper, stem="rank0000.oom"))
        return SNAPSHOT

    assert write(dumper, take=take)
    assert inner == [None]
    assert not dumper.is_writing


def test_one_at_a_time(dumper: Dumper) -> None:
    at_once: list[int] = []
    most = []

    def take() -> Any:
        at_once.append(1)
        most.append(len(at_once))
        at_once.pop()
        return SNAPSHOT

    threads = [threading.Thread(target=write, args=(dumper, f"rank000{n}", take)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert len(names(dumper)) == 16


def test_a_dump_that_never_ends_gives_up_its_turn(
    dumper: Dumper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dump_module, "_TURN_PATIENCE_S", 0.01)
    begun, end = threading.Event(), threading.Event()

    def take() -> Any:
        begun.set()
        end.wait(DEADLINE_SECONDS)
        return SNAPSHOT

    thread = threading.Thread(target=write, args=(dumper, "rank0000", take))
    thread.start()
    begun.wait(DEADLINE_SECONDS)
    assert write(dumper, stem="rank0001") is None
    end.set()
    thread.join()
    assert "does not end" in capsys.readouterr().err
    assert names(dumper) == {"rank0000.pickle", "rank0000.json"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_begins_anew(dumper: Dumper) -> None:
    begun, end = threading.Event(), threading.Event()

    def take() -> Any:
        begun.set()
        end.wait(DEADLINE_SECONDS)
        return SNAPSHOT

    assert dumper.choose_stem(0) == "rank0000"
    thread = threading.Thread(target=write, args=(dumper, "rank0000", take))
    thread.start()
    begun.wait(DEADLINE_SECONDS)
    pid = os.fork()
    if not pid:
        try:
            stem = dumper.choose_stem(0)
            os._exit(0 if not dumper.is_writing and stem == "rank0000-2" and write(dumper, stem=stem) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    end.set()
    thread.join()
    assert len(names(dumper)) == 4


# Names.


def test_processes_of_one_rank_have_names_of_their_own(dumper: Dumper) -> None:
    others = [Dumper(dumper.directory, 1) for _ in range(3)]
    assert [one.choose_stem(3) for one in others] == ["rank0003", "rank0003-2", "rank0003-3"]


def test_many_processes_of_one_rank(tmp_path: Path) -> None:
    script = (
        "import os, sys; from memtrace.record.inside.dump import Dumper\n"
        "sys.stdin.readline(); dumper = Dumper(sys.argv[1], 2); stem = dumper.choose_stem(0)\n"
        "assert dumper.write(stem, lambda: [os.getpid()], lambda: {'pid': os.getpid()}, 'exit'); print(stem)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(5)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    stems = {process.communicate(timeout=DEADLINE_SECONDS)[0].strip(): process.pid for process in processes}
    assert set(stems) == {"rank0000", *(f"rank0000-{number}" for number in range(2, 6))}
    for stem, pid in stems.items():
        assert pickle.loads((tmp_path / f"{stem}.pickle").read_bytes()) == [pid]
        assert json.loads((tmp_path / f"{stem}.json").read_text("utf-8")) == {"pid": pid}


@pytest.mark.parametrize("ending", [".pickle", ".json", ".pickle.zst"])
def test_names_of_an_earlier_recording_are_taken(dumper: Dumper, ending: str) -> None:
    (Path(dumper.directory) / f"rank0000{ending}").touch()
    assert dumper.choose_stem(0) == "rank0000-2"


def test_a_stem_of_which_nothing_came_is_given_up(dumper: Dumper) -> None:
    assert dumper.choose_stem(0) == "rank0000"
    assert dumper.choose_stem(1) == "rank0001"
    assert dumper.choose_stem(0) == "rank0000"
    write(dumper, stem="rank0000.oom")
    assert dumper.choose_stem(0) == "rank0000-2"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_an_oom_becomes_the_rank_itself(
    dumper: Dumper, before: bool, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuses(errno.EPERM))
    if before:
        write(dumper, reason="signal")
    write(dumper, stem="rank0000.oom", take=lambda: ["oom"], reason="oom")
    path = dumper.promote("rank0000.oom", "rank0000")
    assert path is not None
    assert pickle.loads(Path(path).read_bytes()) == ["oom"]
    assert sidecar(dumper)["reason"] == "oom"
    assert names(dumper) == {"rank0000.pickle", "rank0000.json"}
    assert write(dumper, stem="rank0000.oom")


def test_an_oom_does_not_take_the_place_of_anothers(dumper: Dumper) -> None:
    write(dumper, stem="rank0000.oom")
    (Path(dumper.directory) / "rank0000.pickle").write_text("theirs", "utf-8")
    assert dumper.promote("rank0000.oom", "rank0000") is None
    assert names(dumper) == {"rank0000.pickle", "rank0000.oom.pickle", "rank0000.oom.json"}


# Places.


def taken(folder: str, number: int) -> int:
    host = "".join(one if one.isalnum() else "-" for one in socket.gethostname())
    descriptor = os.open(os.path.join(folder, f".dump-{host}-{number}"), os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def test_no_more_at_once_than_allowed(tmp_path: Path) -> None:
    dumper, at_once = Dumper(str(tmp_path), 2), []
    held = [taken(str(tmp_path), 0), taken(str(tmp_path), 1)]
    thread = threading.Thread(target=write, args=(dumper, "rank0000", lambda: at_once.append("begun") or SNAPSHOT))
    thread.start()
    while not dumper.is_writing:
        pass
    assert at_once == []
    os.close(held[1])
    thread.join()
    assert at_once == ["begun"]
    with pytest.raises(BlockingIOError):
        taken(str(tmp_path), 0)
    os.close(taken(str(tmp_path), 1))
    os.close(held[0])


def test_who_waits_too_long_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_module, "_USUAL_SLOT_PATIENCE_S", 0.01)
    held = taken(str(tmp_path), 0)
    assert write(Dumper(str(tmp_path), 1))
    os.close(held)


def test_where_files_cannot_be_locked(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuses(errno.ENOLCK))
    assert write(dumper)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert write(dumper)


def test_no_descriptor_is_left_open(dumper: Dumper) -> None:
    write(dumper)
    before = os.listdir("/proc/self/fd")
    write(dumper)
    write(dumper, take=lambda: 1 / 0)
    assert os.listdir("/proc/self/fd") == before


# Disks that are full.

LARGE = "(lambda: [b'x' * 65536] * 1 + [bytes([n % 251]) * 4096 for n in range(400)])"
FULL = f"""
import sys; from memtrace.record.inside.dump import Dumper
dumper = Dumper(sys.argv[1], 1)
stem = dumper.choose_stem(0)
assert dumper.write(stem, lambda: [1], lambda: {{"reason": "first"}}, "exit")
assert dumper.write(stem, {LARGE}, lambda: {{"reason": "second"}}, "exit") is None
assert dumper.write(stem, {LARGE}, lambda: {{"reason": "second"}}, "exit") is None
sys.exit(5)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def filled(folder: Path, said: str, **options: Any) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        **options,
    )
    assert ran.returncode == 5, ran.stderr
    assert ran.stderr == f"memtrace: rank0000 could not be written in {folder}: {said}. The job goes on\n"
    assert {path.name for path in folder.iterdir() if "tmp" in path.name} == set()
    assert json.loads((folder / "rank0000.json").read_text("utf-8")) == {"reason": "first"}
    assert pickle.loads((folder / "rank0000.pickle").read_bytes()) == [1]


def test_a_full_disk(small_disk: Path) -> None:
    filled(small_disk, os.strerror(errno.ENOSPC))


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    filled(tmp_path, os.strerror(errno.EFBIG), preexec_fn=limit)
