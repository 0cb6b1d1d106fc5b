"""`memtrace verify` of a recording: every snapshot against the counters beside it, at the end and at the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from oracle import COUNTERS
from recordings import snapshot_path, truth_path
from running import memtrace

MiB = 1 << 20
NAMES = ("mlp-adamw", "mlp-peak-reset", "mlp-recorded-from-step-1")


def fixture(folder: Path, name: str, stem: str, **content: Any) -> Path:
    """A recording of this repository as a rank of one, with torch's own counters in its sidecar."""
    folder.mkdir(exist_ok=True)
    shutil.copy(snapshot_path(name), folder / f"{stem}.pickle.xz")
    stats = json.loads(truth_path(name).read_text())["stats"]
    return sidecar(folder, stem, stats=stats, **content)


def sidecar(folder: Path, stem: str, **content: Any) -> Path:
    path = folder / f"{stem}.json"
    path.write_text(json.dumps({"schema": "memtrace.sidecar/1", "memtrace": "1", **content}))
    return path


def late(folder: Path, stem: str = "rank0000", **content: Any) -> Path:
    """A recording that began with 12 MiB in use."""
    folder.mkdir(exist_ok=True)
    builder = SnapshotBuilder().alloc(0x7F0000000000, 4 * MiB).alloc(0x7F1000000000, 8 * MiB).alloc(0x7F2000000000, 512)
    start, segments = counters(builder), builder.build()["segments"]
    builder.start_recording().alloc(0x7F3000000000, 32 * MiB).free(0x7F0000000000).free(0x7F3000000000)
    builder.pickle(folder / f"{stem}.pickle")
    known = {"stats_start": start, "segments_start": segments, "stats": builder._oracle.stats(), "max_entries": 1000}
    return sidecar(folder, stem, **(known | content))


def counters(builder: SnapshotBuilder) -> dict[str, int]:
    return {f"{name}.current": builder._oracle.now[name] for name in COUNTERS}


def test_every_rank_is_equal_to_the_byte(tmp_path: Path) -> None:
    for rank, name in enumerate(NAMES):
        fixture(tmp_path, name, f"rank{rank:04d}")
    fixture(tmp_path, "oom", "rank0001.oom")
    ran = memtrace("verify", tmp_path, "--json")
    assert ran.code == 0
    ranks = ran.document["data"]["ranks"]
    assert ran.document["snapshot"] is None
    assert [(one["rank"], one["tag"], one["error"]) for one in ranks] == [
        (0, "", None),
        (1, "", None),
        (1, "oom", None),
        (2, "", None),
    ]
    devices = [device for one in ranks for device in one["devices"]]
    assert [(device["compared"], device["equal"]) for device in devices] == [
        (111, 111),
        (111, 98),
        (111, 111),
        (54, 49),
    ]
    text = memtrace("verify", tmp_path)
    assert text.code == 0
    lines = text.out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["0", "rank0000.pickle.xz"],
        ["1", "rank0001.pickle.xz"],
        ["1", "rank0001.oom.pickle.xz"],
        ["2", "rank0002.pickle.xz"],
    ]
    assert "111 of 111 equal" in lines[1]
    assert lines[-1] == f"4 of 4 equal in {tmp_path}"


def test_one_wrong_number_in_one_rank_is_exit_1(tmp_path: Path) -> None:
    fixture(tmp_path, "mlp-adamw", "rank0000")
    beside = fixture(tmp_path, "mlp-adamw", "rank0001")
    content = json.loads(beside.read_text())
    content["stats"]["requested_bytes.large_pool.freed"] += 1
    beside.write_text(json.dumps(content))
    ran = memtrace("verify", tmp_path)
    assert ran.code == 1
    assert "110 of 111 equal" in ran.out
    assert "rank 1 (rank0001.pickle.xz), device 0:" in ran.out
    assert "requested_bytes.large_pool.freed" in ran.out
    assert f"1 of 2 equal, 1 different in {tmp_path}" in ran.out
    assert memtrace("verify", tmp_path, "-r", "0").code == 0
    assert memtrace("verify", tmp_path, "-r", "1").code == 1


@pytest.mark.parametrize("content", [b"", b"\x80\x04cos\nsystem\n."])
def test_an_unreadable_rank_is_exit_3_and_the_others_are_checked(content: bytes, tmp_path: Path) -> None:
    fixture(tmp_path, "mlp-adamw", "rank0001")
    (tmp_path / "rank0000.pickle").write_bytes(content)
    ran = memtrace("verify", tmp_path, "--json")
    assert ran.code == 3
    first, second = ran.document["data"]["ranks"]
    assert str(tmp_path / "rank0000.pickle") in first["error"]
    assert first["devices"] == []
    assert second["devices"][0]["equal"] == 111
    assert "unreadable" in memtrace("verify", tmp_path).out


def test_counters_that_are_none_are_an_error_of_that_rank(tmp_path: Path) -> None:
    late(tmp_path, stats={"num_ooms": 0})
    ran = memtrace("verify", tmp_path)
    assert ran.code == 3
    assert "the truth has no integer" in ran.out


def test_without_counters_a_snapshot_is_held_against_itself(tmp_path: Path) -> None:
    SnapshotBuilder().alloc(0x7F0000000000, 4 * MiB).pickle(tmp_path / "rank0000.pickle")
    ran = memtrace("verify", tmp_path)
    assert ran.code == 0
    assert "warning[no-truth]: rank 0 (rank0000.pickle): no counters" in ran.err
    assert "not there" in ran.out


def test_the_state_when_recording_began_is_checked(tmp_path: Path) -> None:
    late(tmp_path)
    device = memtrace("verify", tmp_path, "--json").document["data"]["ranks"][0]["devices"][0]
    assert (device["start_compared"], device["start_equal"]) == (30, 30)
    assert not [item for item in device["different"] if item["name"].startswith("start.")]
    assert "30 of 30 equal" in memtrace("verify", tmp_path).out


def test_another_start_is_a_difference(tmp_path: Path) -> None:
    content = json.loads(late(tmp_path).read_text())
    content["stats_start"]["requested_bytes.all.current"] += 512
    content["segments_start"][0]["total_size"] += 2 * MiB
    (tmp_path / "rank0000.json").write_text(json.dumps(content))
    ran = memtrace("verify", tmp_path, "--json")
    assert ran.code == 1
    different = ran.document["data"]["ranks"][0]["devices"][0]["different"]
    assert {
        (item["name"], item["truth"] - item["ours"], item["why"]) for item in different if "start" in item["name"]
    } == {
        ("start.requested_bytes.all.current", 512, "difference"),
        ("start.segments.reserved_bytes", 2 * MiB, "difference"),
    }
    assert "start.requested_bytes.all.current" in memtrace("verify", tmp_path).out


def test_a_full_ring_does_not_go_back_to_the_start(tmp_path: Path) -> None:
    beside = late(tmp_path)
    content = json.loads(beside.read_text())
    content["stats_start"] = dict.fromkeys(content["stats_start"], 0)
    content |= {"segments_start": None, "max_entries": 6}
    beside.write_text(json.dumps(content))
    ran = memtrace("verify", tmp_path, "--json")
    assert ran.code == 0
    assert ran.document["data"]["ranks"][0]["devices"][0]["start_compared"] == 0
    (warning,) = [one["message"] for one in ran.document["warnings"] if one["code"] == "incomplete"]
    assert "torch's ring of 6 events was full and lost the oldest" in warning


def test_a_ring_that_was_not_full_began_late(tmp_path: Path) -> None:
    late(tmp_path)
    ran = memtrace("blame", tmp_path)
    assert "recording began when memory was allocated already, by at least " in ran.err
    assert "since then nothing was lost. Counters are exact from the trace's start on" in ran.err


def test_a_size_known_within_a_bound_is_no_difference(tmp_path: Path) -> None:
    content = json.loads(late(tmp_path).read_text())
    content["stats_start"]["allocated_bytes.all.current"] += 512
    content["stats_start"]["inactive_split_bytes.all.current"] -= 512
    (tmp_path / "rank0000.json").write_text(json.dumps(content))
    ran = memtrace("verify", tmp_path, "--json")
    assert ran.code == 0
    different = ran.document["data"]["ranks"][0]["devices"][0]["different"]
    assert [item["why"] for item in different if "start" in item["name"]] == ["before_window", "before_window"]


@pytest.mark.parametrize("segments", [7, [7], [{"total_size": 1}], [{"total_size": 1, "blocks": [{"size": "x"}]}]])
def test_a_start_of_another_form_is_not_compared(segments: object, tmp_path: Path) -> None:
    late(tmp_path, segments_start=segments)
    device = memtrace("verify", tmp_path, "--json").document["data"]["ranks"][0]["devices"][0]
    assert device["start_compared"] == 27


def test_each_device_has_its_own_counters(tmp_path: Path) -> None:
    builders = [SnapshotBuilder(device=device).alloc(0x7F0000000000, (device + 1) * MiB) for device in range(2)]
    first, second = (builder._oracle.stats() for builder in builders)
    builders[0].join(builders[1]).pickle(tmp_path / "rank0000.pickle")
    sidecar(tmp_path, "rank0000", device={"index": 1}, stats=second, other_devices={"0": first, "x": 3})
    ran = memtrace("verify", tmp_path, "--json")
    assert ran.code == 0
    assert [device["equal"] for device in ran.document["data"]["ranks"][0]["devices"]] == [111, 111]
    assert len(memtrace("verify", tmp_path, "-d", "1", "--json").document["data"]["ranks"][0]["devices"]) == 1
    assert memtrace("verify", tmp_path, "-d", "5").code == 2


def test_ranks_without_cuda_are_named(tmp_path: Path) -> None:
    sidecar(tmp_path, "rank0001", device=None)
    ran = memtrace("verify", tmp_path)
    assert ran.code == 3
    assert ran.err.startswith("memtrace: error[nothing-recorded]: no CUDA device in rank 1: nothing was recorded in ")
    late(tmp_path)
    ran = memtrace("verify", tmp_path)
    assert ran.code == 0
    assert "rank 1: no CUDA device in rank 1: nothing was recorded" in ran.out
    sidecar(tmp_path, "rank0001", device={"index": 0})
    assert memtrace("verify", tmp_path).code == 3


def test_none_named_means_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late(tmp_path / "run")
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    assert memtrace("verify", "--json").document["data"]["directory"] == str(tmp_path / "run")
    assert memtrace("verify", tmp_path, "--json").document["data"]["directory"] == str(tmp_path / "run")


def test_with_a_truth_one_rank_is_compared_with_that(tmp_path: Path) -> None:
    fixture(tmp_path, "mlp-adamw", "rank0000")
    ran = memtrace("verify", tmp_path, "--truth", truth_path("mlp-adamw"), "--json")
    assert ran.document["data"]["devices"][0]["equal"] == 111
