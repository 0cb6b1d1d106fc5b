"""`memtrace info` and `memtrace verify`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from builders import SnapshotBuilder
from recordings import truth_path
from running import memtrace

from memtrace.cli import verify
from memtrace.io import opening

MiB = 1 << 20


def test_info_is_one_page() -> None:
    ran = memtrace("info", "fixtures/ragged-roundup-4.pickle.xz")
    assert ran.code == 0
    assert "torch 2.10-2.11" in ran.out
    assert "6,911 events over 2.002 s, complete" in ran.out
    assert "alloc 2,393, free_requested 2,234, free_completed 2,234, segment_alloc 50" in ran.out
    assert "PYTORCH_ALLOC_CONF 'roundup_power2_divisions:4'" in ran.out
    assert "Optimizer.step#AdamW.step x6" in ran.out
    assert len(ran.out.splitlines()) < 24


def test_info_document() -> None:
    document = memtrace("info", "--json", "fixtures/gpt2-zero3-recorded-from-step-0.pickle.xz").document
    data = document["data"]
    assert data.keys() == {"torch", "devices", "settings", "annotations", "file_bytes"}
    device = data["devices"][0]
    assert device.keys() >= {"device", "events", "first_us", "last_us", "complete", "lost_events_at_least", "actions",
                             "stacks", "current", "peak"}  # fmt: skip
    assert device["current"].keys() == device["peak"].keys() == {"requested", "allocated", "active", "reserved"}
    assert device["stacks"].keys() == {"python", "cpp", "none"}
    assert not device["complete"]
    assert device["lost_events_at_least"] > 0
    truth = json.loads(truth_path("gpt2-zero3-recorded-from-step-0").read_text())["stats"]
    assert device["current"]["allocated"] == truth["allocated_bytes.all.current"]


def test_info_of_a_file_without_a_trace() -> None:
    ran = memtrace("info", "fixtures/public-private-pools-pending-free.pickle.xz")
    assert ran.code == 0
    assert "warning[no-trace]" in ran.err


def test_verify_prints_every_counter_under_torchs_name() -> None:
    devices = memtrace("verify", "--json", "fixtures/mlp-adamw.pickle.xz").document["data"]["devices"]
    truth = json.loads(truth_path("mlp-adamw").read_text())["stats"]
    stats = devices[0]["stats"]
    assert len([name for name in stats if not name.startswith("oversize")]) == 111
    assert {name: truth[name] for name in stats} == stats
    assert devices[0]["compared"] == 0


def test_verify_document() -> None:
    ran = memtrace("verify", "--json", "fixtures/mlp-peak-reset.pickle.xz", "--truth", truth_path("mlp-peak-reset"))
    assert ran.code == 0
    device = ran.document["data"]["devices"][0]
    assert device.keys() == {"device", "events", "complete", "conflicts", "stats", "compared", "equal", "reset_events",
                             "different"}  # fmt: skip
    assert (device["compared"], device["equal"], device["reset_events"]) == (111, 98, [480, 500])
    assert all(item.keys() == {"name", "ours", "truth", "why"} for item in device["different"])


def test_verify_fails_on_one_wrong_number(tmp_path: Path) -> None:
    truth = json.loads(truth_path("mlp-adamw").read_text())
    truth["stats"]["requested_bytes.large_pool.freed"] += 1
    wrong = tmp_path / "truth.json"
    wrong.write_text(json.dumps(truth))
    ran = memtrace("verify", "fixtures/mlp-adamw.pickle.xz", "--truth", wrong)
    assert ran.code == 1
    assert "110 of 111 counters equal" in ran.out
    assert "requested_bytes.large_pool.freed" in ran.out


def test_verify_fails_on_a_file_that_contradicts_itself() -> None:
    ran = memtrace("verify", "fixtures/public-trimmed-trace.pickle.xz")
    assert ran.code == 1
    assert "contradictions" in ran.out
    assert "warning[inconsistent]" in ran.err


BAD_TRUTHS = (
    "",
    "{",
    "[]",
    "{}",
    '{"stats": 7}',
    '{"stats": {}}',
    '{"stats": {"num_ooms": 1.5}}',
    "\x00",
    "[" * 100_000,
)


@pytest.mark.parametrize("content", BAD_TRUTHS, ids=range(len(BAD_TRUTHS)))
def test_a_bad_truth_is_said(tmp_path: Path, content: str) -> None:
    path = tmp_path / "truth.json"
    path.write_text(content)
    ran = memtrace("verify", "fixtures/mlp-adamw.pickle.xz", "--truth", path)
    assert ran.code == 3
    assert ran.err.startswith("memtrace: error[bad-truth]: ")
    assert memtrace("verify", "fixtures/mlp-adamw.pickle.xz", "--truth", tmp_path / "none.json").code == 3


def test_verify_checks_every_device(tmp_path: Path) -> None:
    builders = [SnapshotBuilder(device=device).alloc(0x7F0000000000, (device + 1) * MiB) for device in range(3)]
    path = builders[0].join(*builders[1:]).pickle(tmp_path / "three.pickle")
    devices = memtrace("verify", "--json", path).document["data"]["devices"]
    assert [item["stats"]["requested_bytes.all.peak"] for item in devices] == [MiB, 2 * MiB, 3 * MiB]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_truth_that_is_a_device_is_refused() -> None:
    ran = memtrace("verify", "fixtures/oom.pickle.xz", "--truth", "/dev/zero")
    assert ran.code == 3
    assert "is a device, not a file" in ran.err


def test_a_truth_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_MAX_TRUTH_BYTES", 1000)
    ran = memtrace("verify", "fixtures/oom.pickle.xz", "--truth", truth_path("oom"))
    assert ran.code == 3
    assert "too large for a file of counters" in ran.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_truth_that_nobody_writes_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "FIFO_PATIENCE_S", 0.05)
    os.mkfifo(tmp_path / "truth.json")
    ran = memtrace("verify", "fixtures/oom.pickle.xz", "--truth", tmp_path / "truth.json")
    assert ran.code == 3
    assert "nothing writes into this pipe" in ran.err


def test_a_setting_that_is_no_number_is_no_json(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x7F0000000000, 512).settings(garbage_collection_threshold=float("nan"))
    ran = memtrace("info", "--json", builder.pickle(tmp_path / "nan.pickle"))
    assert "NaN" not in ran.out
    assert "garbage_collection_threshold" not in ran.document["data"]["settings"]
