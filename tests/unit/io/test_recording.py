"""Recordings on disk: which files are whose, which is opened, and files that are not what they should be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder

from memtrace.errors import NoRecordingError, QuestionError
from memtrace.io import recording
from memtrace.io.recording import NothingRecordedError
from memtrace.io.sidecar import sidecar_path

MiB = 1 << 20


def put(folder: Path, stem: str, peak: int | None = 1, *, suffix: str = ".pickle", **content: Any) -> Path:
    """A snapshot and its sidecar."""
    folder.mkdir(parents=True, exist_ok=True)
    path = SnapshotBuilder().alloc(0x7F0000000000, (peak or 1) * MiB).pickle(folder / f"{stem}{suffix}")
    stats = {} if peak is None else {"stats": {"allocated_bytes.all.peak": peak * MiB}}
    (folder / f"{stem}.json").write_text(json.dumps({"memtrace": "1", **stats, **content}))
    return path


def without_cuda(folder: Path, rank: int, **content: Any) -> None:
    """What a rank without CUDA leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = [f"no CUDA device in rank {rank}: nothing to record"]
    (folder / f"rank{rank:04d}.json").write_text(json.dumps({"memtrace": "1", "notes": notes, **content}))


def test_the_plain_name_is_preferred_over_every_other(tmp_path: Path) -> None:
    for stem in ("rank0000.oom", "rank0000", "rank0000.every"):
        put(tmp_path, stem)
    put(tmp_path, "rank0001.every", suffix=".pickle.zst")
    put(tmp_path, "rank0001.new")
    found = recording.ranks_of(tmp_path)
    assert [(item.rank, item.path.name, item.tag) for item in found] == [
        (0, "rank0000.pickle", ""),
        (1, "rank0001.every.pickle.zst", "every"),
    ]
    assert [item.path.name for item in recording.snapshots_of(tmp_path)] == [
        "rank0000.pickle",
        "rank0000.oom.pickle",
        "rank0000.every.pickle",
        "rank0001.every.pickle.zst",
        "rank0001.new.pickle",
    ]


def test_of_two_processes_of_a_rank_the_one_with_the_higher_peak(tmp_path: Path) -> None:
    put(tmp_path, "rank0000", 4)
    put(tmp_path, "rank0000-2", 8)
    put(tmp_path, "rank0000-3.every", 6)
    chosen = recording.choose(tmp_path)
    assert (chosen.path.name, chosen.process, chosen.peak_bytes) == ("rank0000-2.pickle", 2, 8 * MiB)
    assert len(recording.snapshots_of(tmp_path)) == 3


def test_other_files_are_nobodys(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (
        *("rank0000.pickle.tmp", ".rank0000.pickle.12.tmp", "rank.json", "rankA.pickle", "meta.json", "log"),
        *("rank0000.OOM.pickle", "rank1234567890.pickle", "rank0000.pickle.bz2", "xrank0000.pickle"),
    ):
        (folder / name).write_bytes(b"{}")
    (folder / "rank0001.pickle").mkdir()
    assert recording.ranks_of(folder) == []
    assert recording.newest_in(tmp_path) is None


@pytest.mark.parametrize(
    ("snapshot", "beside"),
    [
        ("rank0000.oom.pickle.zst", "rank0000.oom.json"),
        ("rank0000-2.pickle", "rank0000-2.json"),
        ("rank0000-2.every.pickle.xz", "rank0000-2.every.json"),
    ],
)
def test_a_sidecar_has_the_name_of_its_snapshot(snapshot: str, beside: str) -> None:
    assert sidecar_path(Path(snapshot)) == Path(beside)


def test_the_sidecar_of_a_rank_is_that_of_what_is_opened(tmp_path: Path) -> None:
    put(tmp_path, "rank0000.every", 3)
    put(tmp_path, "rank0000.signal", 4)
    without_cuda(tmp_path, 1, world=2)
    assert recording.sidecar(tmp_path, 0)["stats"] == {"allocated_bytes.all.peak": 3 * MiB}
    assert recording.sidecar(tmp_path, 1)["world"] == 2
    assert recording.sidecar(tmp_path, 2) == {}


def test_ranks_without_cuda_are_a_recording_in_which_nothing_was_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    without_cuda(folder, 0)
    without_cuda(folder, 1)
    assert recording.newest_in(tmp_path) == folder
    with pytest.raises(NothingRecordedError, match="no CUDA device in rank 0, no CUDA device in rank 1: nothing was"):
        recording.choose(tmp_path)
    put(folder, "rank0001")
    assert recording.choose(tmp_path).rank == 1
    with pytest.raises(NothingRecordedError, match="no CUDA device in rank 0: nothing was recorded"):
        recording.choose(tmp_path, 0)
    with pytest.raises(QuestionError, match="There is: 1"):
        recording.choose(tmp_path, 7)


def test_a_rank_with_a_device_and_without_a_snapshot_has_lost_it(tmp_path: Path) -> None:
    without_cuda(tmp_path, 0, device={"index": 0})
    (tmp_path / "rank0001.json").write_text("{")
    assert [(one.is_lost, one.why) for one in recording.unrecorded(tmp_path)] == [
        (True, "rank 0 left no snapshot"),
        (True, "rank 1 left no snapshot"),
    ]


def test_the_newest_is_the_one_that_began_last(tmp_path: Path) -> None:
    for name, started, touched in (("b-old", 5_000_000, 9), ("a-new", 7_000_000, 2), ("c-without", None, 6)):
        put(tmp_path / name, "rank0000")
        meta = {"schema": recording.META_SCHEMA, "started_us": started}
        (tmp_path / name / "meta.json").write_text(json.dumps(meta))
        os.utime(tmp_path / name, (touched, touched))
    assert recording.newest_in(tmp_path) == tmp_path / "a-new"
    (tmp_path / "a-new" / "meta.json").write_text(json.dumps({"schema": "another/1", "started_us": 7_000_000}))
    os.utime(tmp_path / "a-new", (2, 2))
    assert recording.newest_in(tmp_path) == tmp_path / "c-without"


def test_what_meta_json_says(tmp_path: Path) -> None:
    content = {"schema": recording.META_SCHEMA, "name": "train", "started_us": 3, "ended_us": 9, "exit_code": 0}
    (tmp_path / "meta.json").write_text(json.dumps(content))
    meta = recording.read_meta(tmp_path)
    assert (meta.name, meta.started_us, meta.ended_us, meta.exit_code, meta.signal) == ("train", 3, 9, 0, None)


NOTHING = recording.Meta(None, None, None, None, None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"started_us": 3}',
        b'{"schema": "memtrace.recording/1", "started_us": true, "ended_us": 1e9, "name": 7, "exit_code": "0"}',
        b'{"schema": "memtrace.recording/1", "started_us": -3, "signal": [15], "exit_code": 99999999999999999999}',
        b'{"schema": "memtrace.recording/1", "name": "' + b"x" * (1 << 20) + b'"}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=range(8),
)
def test_a_meta_json_that_is_not_one_says_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_bytes(content)
    assert recording.read_meta(tmp_path) == NOTHING


def test_none_found_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    with pytest.raises(NoRecordingError, match="memtrace record -- COMMAND"):
        recording.newest()


def test_the_rank_that_ran_out_of_memory_first_can_be_chosen(tmp_path: Path) -> None:
    put(tmp_path, "rank0000", 64)
    put(tmp_path, "rank0001", 8, oom={"time_us": 2000})
    put(tmp_path, "rank0002", 4, oom={"time_us": 1000})
    assert recording.choose(tmp_path).rank == 0
    assert recording.choose_at_oom(tmp_path).rank == 2
    assert recording.choose_at_oom(tmp_path, 1).rank == 1
    assert recording.choose_at_oom(tmp_path, 0).rank == 0
    with pytest.raises(QuestionError):
        recording.choose_at_oom(tmp_path, 7)


def test_of_a_rank_that_went_on_its_last_snapshot_has_the_failure_too(tmp_path: Path) -> None:
    for stem in ("rank0000", "rank0000.oom"):
        put(tmp_path, stem, oom={"time_us": 1000})
    assert recording.choose_at_oom(tmp_path).path.name == "rank0000.pickle"
    (tmp_path / "rank0000.pickle").unlink()
    assert recording.choose_at_oom(tmp_path).path.name == "rank0000.oom.pickle"


@pytest.mark.parametrize("oom", [None, "yes", {}, {"time_us": -1}, {"time_us": "now"}])
def test_a_snapshot_says_by_its_name_that_memory_ran_out(tmp_path: Path, oom: object) -> None:
    put(tmp_path, "rank0000", 64, oom=oom)
    put(tmp_path, "rank0001.oom", 4, oom=oom)
    assert recording.choose_at_oom(tmp_path).rank == 1
