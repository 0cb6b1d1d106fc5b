"""`memtrace fits`: what it prints and the document it writes (contract.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES
from running import memtrace

MiB, GiB = 1 << 20, 1 << 30
A, B, C = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
MLP = FIXTURES / "mlp-adamw.pickle.xz"
FRAGMENTED = FIXTURES / "oom-fragmented.pickle.xz"
OOM = FIXTURES / "recordings" / "gpt2-oom"
CONTRACT = {"gpu", "limit_bytes", "fits", "smallest_limit_bytes", "best_settings", "smallest_limit_bytes_best"}
ADDED = {
    *("outside_bytes", "fits_best", "smallest_limit_bytes_high", "smallest_limit_bytes_best_high", "settings_tried"),
    *("allocated_bytes_peak", "reserved_bytes_peak"),
}


def data_of(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = memtrace("fits", *arguments, "--json").document["data"]
    return found


def two_large(folder: Path) -> Path:
    """30 MiB come and go, then 44."""
    return SnapshotBuilder().alloc(A, 30 * MiB).free(A).alloc(B, 44 * MiB).pickle(folder / "x.pickle")


def large(folder: Path, size: int = 10 * GiB, **sidecar: Any) -> Path:
    """One block, and what the recorder noted."""
    path = SnapshotBuilder().alloc(A, size).alloc(B, 512).pickle(folder / "rank0000.pickle")
    if sidecar:
        (folder / "rank0000.json").write_text(json.dumps({"memtrace": "1", **sidecar}))
    return path


# ---- the document


def test_the_document_has_the_fields_of_the_contract() -> None:
    ran = memtrace("fits", MLP, "--gpu", "A100-40", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = ran.document
    assert document["schema"] == "memtrace.fits/1"
    data = document["data"]
    assert data.keys() == CONTRACT | ADDED
    assert (data["gpu"], data["fits"], data["fits_best"]) == ("A100-40", True, True)
    assert data["limit_bytes"] == int(39.39 * GiB)
    assert data["smallest_limit_bytes"] <= data["smallest_limit_bytes_high"]
    assert data["smallest_limit_bytes_best_high"] <= data["smallest_limit_bytes_high"]
    stats = json.loads((FIXTURES / "mlp-adamw.truth.json").read_text())["stats"]
    assert data["allocated_bytes_peak"] == stats["allocated_bytes.all.peak"]
    assert data["reserved_bytes_peak"] == stats["reserved_bytes.all.peak"]
    assert {"same-requests", "outside-unknown"} <= {warning["code"] for warning in document["warnings"]}


def test_without_a_gpu_only_the_limit_is_told(tmp_path: Path) -> None:
    data = data_of(two_large(tmp_path))
    assert (data["gpu"], data["limit_bytes"], data["fits"], data["fits_best"]) == (None, None, None, None)
    assert (data["smallest_limit_bytes"], data["smallest_limit_bytes_high"]) == (44 * MiB, 44 * MiB)
    assert (data["best_settings"], data["smallest_limit_bytes_best"]) == ("as recorded", 44 * MiB)
    assert data["settings_tried"] == 11


def test_the_best_setting_is_ready_to_be_used() -> None:
    data = data_of(FRAGMENTED)
    assert data["best_settings"] == "expandable_segments:True"
    assert data["smallest_limit_bytes_best"] < data["smallest_limit_bytes"]


def test_what_the_limit_is_whatif_confirms() -> None:
    data = data_of(FRAGMENTED)
    for limit, event in ((data["smallest_limit_bytes"], None), (data["smallest_limit_bytes"] - 2 * MiB, 17)):
        document = memtrace("whatif", FRAGMENTED, "--limit", limit, "--json").document
        found = document["data"]["scenarios"][0]["oom_at_event"]
        assert (found is None) == (event is None)


# ---- the page


def test_it_fits(tmp_path: Path) -> None:
    ran = memtrace("fits", large(tmp_path), "--gpu", "A100-40")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "It fits on A100-40 (39.39 GiB) as recorded, with 29.39 GiB to spare."
    assert lines[2].split() == ["setting", "smallest", "limit", "reserved", "under", "it"]
    assert lines[3].split() == ["as", "recorded", "10.00", "GiB", "10.00", "GiB"]
    assert "Recorded: 10.00 GiB allocated at the peak, 10.00 GiB reserved. 11 settings were tried" in ran.out
    assert "Assumed: what a device holds beside torch's memory is not recorded" in ran.out


def test_it_does_not_fit(tmp_path: Path) -> None:
    ran = memtrace("fits", large(tmp_path), "--gpu", "8GiB")
    assert ran.code == 0
    assert ran.out.startswith("It does not fit on 8.00 GiB: at best (as recorded) 2.00 GiB is missing.\n")
    assert data_of(large(tmp_path), "--gpu", "8GiB")["fits"] is False


def test_it_fits_with_another_setting() -> None:
    out = memtrace("fits", FRAGMENTED, "--gpu", "4GiB").out
    assert out.startswith("It does not fit on 4.00 GiB as recorded (")
    assert "is missing), but with expandable_segments:True it does." in out.splitlines()[0]
    assert "expandable_segments:True" in out.partition("as recorded  ")[2]
    data = data_of(FRAGMENTED, "--gpu", "4GiB")
    assert (data["fits"], data["fits_best"]) == (False, True)


def test_without_a_gpu_the_limits_come_first(tmp_path: Path) -> None:
    out = memtrace("fits", two_large(tmp_path)).out
    assert out.startswith("It completes under a limit of 44.00 MiB as recorded, 44.00 MiB at best.\n")
    assert "beside torch's memory" not in out


def test_the_boundary_is_exact(tmp_path: Path) -> None:
    size = 10 * GiB + 2 * MiB
    assert data_of(large(tmp_path), "--gpu", size)["fits"] is True
    assert data_of(large(tmp_path), "--gpu", size - 1)["fits"] is False


def test_what_was_not_torchs_is_kept_free(tmp_path: Path) -> None:
    """1 GiB of the recorded device was taken by others."""
    notes = {
        "device": {"index": 0, "name": "x", "capacity_bytes": 40 * GiB},
        "mem_get_info": [29 * GiB - 2 * MiB, 40 * GiB],
        "stats": {"reserved_bytes.all.current": 10 * GiB + 2 * MiB},
    }
    path = large(tmp_path, **notes)
    assert data_of(path)["outside_bytes"] == GiB
    assert data_of(path, "--gpu", 11 * GiB + 2 * MiB)["fits"] is True
    assert data_of(path, "--gpu", 11 * GiB)["fits"] is False
    assert "1.00 GiB of the recorded device was not torch's; as much is kept free" in (
        memtrace("fits", path, "--gpu", "24GiB").out
    )
    assert "with 13.00 GiB to spare" in memtrace("fits", path, "--gpu", "24GiB").out


def test_a_recording_of_a_rank() -> None:
    ran = memtrace("fits", OOM, "--gpu", "H100", "--json")
    assert ran.code == 0
    data = ran.document["data"]
    assert data["outside_bytes"] > 0
    assert data["smallest_limit_bytes"] > 8_388_608_000


def test_sizes_in_other_units(tmp_path: Path) -> None:
    assert "46,137,344 B" in memtrace("fits", two_large(tmp_path), "--units", "bytes").out


def test_at_80_columns_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = re.sub(r"\x1b\[[0-9;]*m", "", memtrace("fits", FRAGMENTED).out)
    assert "expandable_segments:True" in out
    assert "…" not in out
    table = [line for line in out.splitlines() if line.startswith(("setting", "as recorded", "expandable"))]
    assert len(table) == 3
    assert all(len(line) <= 80 for line in table)


def test_a_device_can_be_picked(tmp_path: Path) -> None:
    high = SnapshotBuilder(device=0).alloc(A, 64 * MiB).alloc(B, 512)
    low = SnapshotBuilder(device=1).alloc(A, 30 * MiB).alloc(B, 512)
    path = high.join(low).pickle(tmp_path / "two.pickle")
    assert data_of(path, "-d", 1)["smallest_limit_bytes"] == 32 * MiB
    assert data_of(path)["smallest_limit_bytes"] == 66 * MiB


# ---- what is refused


@pytest.mark.parametrize("given", ["H300", "40", "12 parsecs", ""])
def test_what_is_no_gpu_is_refused(given: str) -> None:
    ran = memtrace("fits", MLP, "--gpu", given)
    assert (ran.code, ran.out) == (2, "")
    assert "\nhint: " in ran.err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("public-state-only-259-segments", "the file has no trace, only the last state"),
        ("public-trimmed-trace", "the trace contradicts itself, so what the program asked is not known"),
    ],
)
def test_without_a_sound_trace_there_is_no_answer(name: str, reason: str) -> None:
    for more in ((), ("--json",), ("--gpu", "H100")):
        ran = memtrace("fits", FIXTURES / f"{name}.pickle.xz", *more)
        assert (ran.code, ran.out) == (2, "")
        assert f"no prediction: {reason}\nhint: " in ran.err


def test_nor_where_the_self_check_fails(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).alloc(B, 30 * MiB).free(A).free(B).alloc(B, 30 * MiB)
    ran = memtrace("fits", builder.pickle(tmp_path / "x.pickle"))
    assert ran.code == 2
    assert "no prediction: a block is put elsewhere than in the recording" in ran.err


def test_a_file_that_is_not_there_is_another_error(tmp_path: Path) -> None:
    assert memtrace("fits", tmp_path / "none.pickle").code == 3
