"""`memtrace blame --by module`, of recordings whose allocations name their module; and what a sidecar says exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import SnapshotBuilder
from running import memtrace

MiB = 1 << 20
TEXTS = (
    "phase=forward;step=0;module=transformer.h.0.attn",
    "phase=backward;step=0;module=transformer.h.0.attn",
    "phase=forward;step=0;module=[red]x\x1b[0m/y",
    "phase=forward;step=0",
    "",
)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    builder = SnapshotBuilder().alloc(0x7E0000000000, 32 * MiB).start_recording()
    for number, text in enumerate(TEXTS):
        builder.alloc(0x7F0000000000 + number * 0x100000000, (number + 1) * 4 * MiB, user_metadata=text)
    return builder.pickle(tmp_path / "rank0000.pickle")


def test_rows_are_modules_and_sum(snapshot: Path) -> None:
    for of in ("allocated", "reserved", "requested", "active"):
        data = memtrace("blame", snapshot, "--by", "module", "--of", of, "--json").document["data"]
        assert sum(row["bytes"] for row in data["rows"]) == data["total_bytes"]
    data = memtrace("blame", snapshot, "--by", "module", "--json").document["data"]
    assert [(row["key"], row["bytes"] // MiB, row["blocks"]) for row in data["rows"]] == [
        (None, 68, 3),
        ("[red]x\x1b[0m/y", 12, 1),
        ("transformer.h.0.attn", 12, 2),
    ]


def test_blocks_name_their_module(snapshot: Path) -> None:
    rows = memtrace("blame", snapshot, "--by", "block", "--json").document["data"]["rows"]
    assert [row["module"] for row in sorted(rows, key=lambda row: row["address"])] == [
        None, "transformer.h.0.attn", "transformer.h.0.attn", "[red]x\x1b[0m/y", None, None,
    ]  # fmt: skip


def test_the_table_names_them_whole(snapshot: Path) -> None:
    ran = memtrace("blame", snapshot, "--by", "module", "--why")
    assert "transformer.h.0.attn" in ran.out
    assert "(no module)" in ran.out
    assert "\x1b" not in ran.out
    assert "[red]x" in ran.out
    assert "memtrace record --modules" not in ran.out


def test_the_allocators_own_rows_have_their_name(snapshot: Path) -> None:
    out = memtrace("blame", snapshot, "--by", "module", "--of", "reserved").out
    assert "(no module)" in out
    assert "(alloc.stranded: " in out


def test_a_recording_without_modules_says_how_to_get_them() -> None:
    ran = memtrace("blame", "fixtures/mlp-adamw.pickle.xz", "--by", "module")
    assert "The recording does not say which module made what. memtrace record --modules does." in ran.out


def test_the_device_and_torch_are_exact(snapshot: Path) -> None:
    device = {"index": 0, "name": "NVIDIA H200", "capacity_bytes": 150_000_000_000}
    content = {"memtrace": "1", "torch": "2.11.0+cu130", "device": device}
    snapshot.with_suffix(".json").write_text(json.dumps(content))
    ran = memtrace("info", snapshot)
    assert "torch 2.11, " in ran.out
    assert "Device 0 (NVIDIA H200, 139.70 GiB): 10 events" in ran.out
    document = memtrace("info", snapshot, "--json").document
    assert document["data"]["torch"] == {"at_least": "2.11", "at_most": "2.11"}
    assert document["data"]["devices"][0]["name"] == "NVIDIA H200"
    assert document["data"]["devices"][0]["capacity_bytes"] == 150_000_000_000


@pytest.mark.parametrize(
    "device", [None, 7, {"index": 1, "name": "x"}, {"name": 3, "capacity_bytes": -1}, {"name": ""}]
)
def test_a_device_that_is_not_said_is_not_shown(device: object, snapshot: Path) -> None:
    snapshot.with_suffix(".json").write_text(json.dumps({"memtrace": "1", "device": device}))
    document = memtrace("info", snapshot, "--json").document
    assert document["data"]["devices"][0]["name"] is None
    assert "Device 0: " in memtrace("info", snapshot).out
