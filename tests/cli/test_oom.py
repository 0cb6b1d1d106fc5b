"""`memtrace oom`: what it prints and the document it writes (contract.md)."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES
from running import memtrace

MiB, GiB = 1 << 20, 1 << 30
A, B = 0x7F0000000000, 0x7F1000000000
OUTSIDE = FIXTURES / "oom-memory-outside-torch.pickle.xz"
CONTRACT = {
    *("event", "device", "stream", "asked_bytes", "asked_by", "segment_bytes", "allocated_bytes", "reserved_bytes"),
    *("pending_bytes", "free_bytes", "largest_hole_bytes", "free_other_streams_bytes"),
    *("largest_hole_other_streams_bytes", "device_free_bytes", "capacity_bytes", "limit_bytes", "outside_torch_bytes"),
    *("joined_fits", "other_streams_fit", "device_had_room", "verdict", "rows"),
}
ADDED = {"time_us", "phase", "step", "hypothetical", "fits", "retries", "flushes"}
ROW = {"key", "bytes", "blocks", "category", "label", "confidence", "stack", "dominator", "evidence"}


def three_failures(folder: Path) -> Path:
    """Three requests that failed, each after the program had given something back."""
    builder = SnapshotBuilder().alloc(A, 40 * MiB, stack="train.py:1 first").oom(64 * MiB, 10 * MiB)
    builder.alloc(B, 20 * MiB).free(B).oom(32 * MiB, 200 * MiB).alloc(B, 4 * MiB)
    return builder.oom(2 * GiB, 5 * MiB, stack="train.py:9 last").free(A).pickle(folder / "x.pickle")


def events_of(*arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = memtrace("oom", *arguments, "--json").document["data"]["events"]
    return found


def test_the_document_has_the_fields_of_the_contract() -> None:
    ran = memtrace("oom", FIXTURES / "gpt2-zero3-oom.pickle.xz", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = ran.document
    assert document["schema"] == "memtrace.oom/1"
    assert document["data"].keys() == {"events", "would_fit"}
    assert document["data"]["would_fit"].keys() == {"event", "limit_bytes", "reason", "settings"}
    (event,) = document["data"]["events"]
    assert event.keys() == CONTRACT | ADDED
    assert event["asked_by"].keys() == {"stack", "category"}
    assert event["asked_by"]["stack"][0].keys() == {"filename", "line", "name"}
    assert event["asked_by"]["stack"][0]["name"] == "_all_gather_dtype"
    assert event["asked_by"]["category"] == "param.gathered"
    assert sum(row["bytes"] for row in event["rows"]) == event["allocated_bytes"]
    assert all(row.keys() == ROW for row in event["rows"])
    assert (event["retries"], event["flushes"]) == (
        {"count": 1, "bytes": 76 * MiB},
        {"count": 1, "bytes": 294 * MiB},
    )
    assert (event["hypothetical"], event["fits"], event["verdict"]) == (False, False, "other-streams")


@pytest.mark.parametrize("name", ["oom", "oom-fragmented", "oom-memory-outside-torch", "llama-oom-forward"])
def test_rows_sum_to_what_was_allocated(name: str) -> None:
    (event,) = events_of(FIXTURES / f"{name}.pickle.xz")
    assert sum(row["bytes"] for row in event["rows"]) == event["allocated_bytes"]
    assert type(event["allocated_bytes"]) is int


def test_the_answer_comes_first_and_in_words() -> None:
    out = memtrace("oom", FIXTURES / "oom.pickle.xz").out.splitlines()
    assert out[0] == (
        "Out of memory (event 80 of 81, 0.016 s in): asked 100.00 MiB, the driver for 100.00 MiB; torch held 3.91 GiB, "
        "none of it free for this; the device had 116.78 GiB left."
    )
    assert out[1].startswith("Torch's own cap, not the device: the driver had room for the segment.")
    assert "set_per_process_memory_fraction()" in out[1]
    assert out[2] == "Asked by lab/torch_features.py:44 <module>: no rule says what for."


def test_the_tables_are_of_five_rows_and_sum() -> None:
    ran = memtrace("oom", FIXTURES / "gpt2-zero3-oom.pickle.xz")
    lines = [line.split() for line in ran.out.splitlines()]
    assert [line[:2] for line in lines if line[-1:] == ["more"] or line[:1] == ["3"]] == [
        ["3", "more"],
        ["0.35", "14.4"],
    ]
    assert ran.out.count("= torch.cuda.memory_allocated() then, to the byte") == 2
    assert "2 more" in memtrace("oom", "-n", "6", FIXTURES / "gpt2-zero3-oom.pickle.xz").out


def test_what_was_not_torchs_needs_the_capacity() -> None:
    ran = memtrace("oom", OUTSIDE)
    assert "Plain lack, not fragmentation" in ran.out
    assert "Torch held only 2.72 GiB" in ran.out
    assert "--gpu NAME" in ran.out
    for given in ("H200", "NVIDIA H200", "139.8GiB", "150109880320"):
        out = memtrace("oom", OUTSIDE, "--gpu", given).out
        assert "Memory outside torch: of the device's 139.80 GiB torch held 2.72 GiB and others 137.02 GiB" in out
    (event,) = events_of(OUTSIDE, "--gpu", "H200")
    assert (event["verdict"], event["capacity_bytes"]) == ("outside-torch", 150_109_880_320)
    assert event["outside_torch_bytes"] == 150_109_880_320 - event["device_free_bytes"] - event["reserved_bytes"]
    (event,) = events_of(OUTSIDE)
    assert (event["verdict"], event["capacity_bytes"], event["outside_torch_bytes"]) == ("lack", None, None)


def test_a_capacity_that_contradicts_the_recorder_is_taken_and_said() -> None:
    folder = FIXTURES / "recordings" / "gpt2-oom"
    ran = memtrace("oom", "--gpu", "80GiB", folder)
    assert "warning[capacity]: the recorder noted a device of 139.80 GiB; --gpu's 80.00 GiB is taken" in ran.err
    document = memtrace("oom", "--gpu", "80GiB", "--json", folder).document
    assert [warning["code"] for warning in document["warnings"]] == ["capacity"]
    assert document["data"]["events"][0]["capacity_bytes"] == 80 * GiB
    assert "warning" not in memtrace("oom", "--gpu", "H200", folder).err


@pytest.mark.parametrize("given", ["H300", "40", "12 parsecs", ""])
def test_what_is_no_gpu_is_refused(given: str) -> None:
    ran = memtrace("oom", "--gpu", given, OUTSIDE)
    assert (ran.code, ran.out) == (2, "")
    assert "\nhint: " in ran.err


def test_without_a_failure_it_says_what_to_ask_instead() -> None:
    ran = memtrace("oom", FIXTURES / "mlp-adamw.pickle.xz")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("memtrace: error[usage]: no out-of-memory event in this trace\nhint: ")
    assert "memtrace oom --if 2GiB" in ran.err
    assert "memtrace blame --peak" in ran.err


def test_a_failure_on_another_device_is_pointed_to(tmp_path: Path) -> None:
    high = SnapshotBuilder(device=0).alloc(A, 64 * MiB).alloc(B, 512)
    low = SnapshotBuilder(device=2).alloc(A, 4 * MiB).oom(64 * MiB)
    path = high.join(low).pickle(tmp_path / "two.pickle")
    ran = memtrace("oom", path)
    assert ran.code == 2
    assert "Device 2 has one (-d)." in ran.err
    (event,) = events_of(path, "-d", "2")
    assert event["device"] == 2
    assert " -d 2" in memtrace("oom", path, "-d", "2").out.splitlines()[-1]


def test_of_several_failures_the_last_in_full_and_the_others_in_a_table(tmp_path: Path) -> None:
    path = three_failures(tmp_path)
    out = memtrace("oom", path).out
    assert out.startswith("Out of memory (event 9 of 12")
    assert "asked 2.00 GiB" in out.splitlines()[0]
    assert "Before it 2 requests failed and the program went on:" in out
    table = out.partition("went on:\n")[2].splitlines()
    assert table[0].split() == ["event", "time", "asked", "held", "free", "verdict", "in"]
    assert table[1].split()[:1] + table[1].split()[3:5] == ["7", "32.00", "MiB"]
    assert ("limit" in table[1], "lack" in table[2]) == (True, True)
    assert "1 more" in memtrace("oom", "-n", "1", path).out.partition("went on:")[2]
    assert [event["event"] for event in events_of(path)] == [2, 7, 9]


def test_one_of_several_failures_can_be_picked(tmp_path: Path) -> None:
    path = three_failures(tmp_path)
    for at in ("7", "oom", "2"):
        ran = memtrace("oom", "--at", at, path)
        assert "went on" not in ran.out
    assert "asked 64.00 MiB" in memtrace("oom", "--at", "2", path).out
    assert [event["event"] for event in events_of(path, "--at", "7")] == [7]
    assert [event["event"] for event in events_of(path, "--at", "oom")] == [9]
    wrong = memtrace("oom", "--at", "4", path)
    assert wrong.code == 2
    assert "event 4 is no out-of-memory event\nhint: There is: 2, 7, 9.\n" in wrong.err
    assert memtrace("oom", "--at", "77", path).code == 2


# --if


def test_whether_a_request_would_have_fitted(tmp_path: Path) -> None:
    path = SnapshotBuilder().alloc(A, 40 * MiB, stack="f").alloc(B, 2 * MiB).pickle(tmp_path / "x.pickle")
    hole = memtrace("oom", "--if", "18MiB", path)
    assert hole.code == 0
    assert hole.out.startswith("18.00 MiB would have fitted at the peak")
    assert "in a free hole of 18.00 MiB." in hole.out.splitlines()[0]
    assert "Asked by" not in hole.out
    open_question = memtrace("oom", "--if", "20MiB", path).out
    assert open_question.startswith("20.00 MiB would have needed a new segment of 20.00 MiB at the peak")
    assert "It fits if the driver has that much left. --gpu NAME" in open_question
    assert memtrace("oom", "--if", "20MiB", "--gpu", "1GiB", path).out.startswith("20.00 MiB would have fitted")
    refused = memtrace("oom", "--if", "980MiB", "--gpu", "1GiB", path).out
    assert refused.startswith("980.00 MiB would not have fitted at the peak")
    assert "it needs a new segment of 980.00 MiB; torch held 60.00 MiB; the device had 964.00 MiB left." in refused
    assert refused.count("= torch.cuda.max_memory_allocated(), to the byte") == 2


def test_the_document_of_a_supposed_request(tmp_path: Path) -> None:
    path = SnapshotBuilder().alloc(A, 40 * MiB).alloc(B, 2 * MiB).pickle(tmp_path / "x.pickle")
    for size, more, fits, verdict in (
        ("18MiB", (), True, None),
        ("20MiB", (), None, None),
        ("980MiB", ("--gpu", "1GiB"), False, "lack"),
    ):
        (event,) = events_of(path, "--if", size, *more)
        assert event.keys() == CONTRACT | ADDED
        assert (event["hypothetical"], event["fits"], event["verdict"]) == (True, fits, verdict)
        assert event["asked_by"] == {"stack": [], "category": "unknown"}
        assert sum(row["bytes"] for row in event["rows"]) == event["allocated_bytes"] == 42 * MiB
    (event,) = events_of(path, "--if", "1MiB", "--at", "0")
    assert (event["event"], event["allocated_bytes"]) == (0, 0)


@pytest.mark.parametrize("size", ["0", "much", "-5", "99999999TiB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    ran = memtrace("oom", f"--if={size}", FIXTURES / "mlp-adamw.pickle.xz")
    assert (ran.code, ran.out) == (2, "")


def test_a_file_with_a_failure_can_be_asked_too() -> None:
    (event,) = events_of(FIXTURES / "oom.pickle.xz", "--if", "64MiB", "--gpu", "H200")
    assert (event["hypothetical"], event["fits"]) == (True, True)


# Recordings of several ranks.


def ranks(folder: Path, ran_out: dict[int, int]) -> Path:
    """Four ranks, rank 0 with the highest peak; `ran_out`: when which rank ran out of memory."""
    for rank in range(4):
        stem = f"rank{rank:04d}"
        builder = SnapshotBuilder().alloc(A, (40 - rank) * MiB).oom(64 * MiB)
        if rank not in ran_out:
            builder = SnapshotBuilder().alloc(A, (40 - rank) * MiB).alloc(B, 512)
        builder.pickle(folder / f"{stem}.pickle")
        oom = {"device": 0, "total_bytes": GiB, "time_us": ran_out[rank]} if rank in ran_out else None
        sidecar = {"memtrace": "1", "rank": rank, "world": 4, "oom": oom}
        sidecar["stats"] = {"allocated_bytes.all.peak": (40 - rank) * MiB}
        (folder / f"{stem}.json").write_text(json.dumps(sidecar))
    return folder


def test_the_rank_that_ran_out_first_is_taken(tmp_path: Path) -> None:
    folder = ranks(tmp_path, {1: 2000, 3: 1000})
    ran = memtrace("oom", folder)
    assert f"using rank 3, which ran out of memory first: {folder}" in ran.err
    assert ran.out.startswith("Rank 3 out of memory")
    assert memtrace("oom", folder, "-r", "1").out.startswith("Rank 1 out of memory")
    assert memtrace("oom", folder, "--json").document["snapshot"]["recording"]["rank"] == 3
    assert memtrace("oom", folder, "-r", "0").code == 2
    supposed = memtrace("oom", folder, "--if", "1GiB")
    assert "using rank 0: " in supposed.err
    assert memtrace("blame", folder, "--json").document["snapshot"]["recording"]["rank"] == 0


def test_where_no_rank_ran_out_that_is_said_of_the_highest(tmp_path: Path) -> None:
    ran = memtrace("oom", ranks(tmp_path, {}))
    assert ran.code == 2
    assert "using rank 0: " in ran.err
    assert "no out-of-memory event" in ran.err


def test_the_newest_recording_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    ranks(tmp_path / "run", {2: 1000})
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    assert "using rank 2, which ran out of memory first" in memtrace("oom").err


# Text from a file.


def with_frames(path: Path, builder: SnapshotBuilder, *frames: tuple[str, str]) -> Path:
    """The last event has these frames, each a file and a function."""
    raw = builder.build()
    raw["device_traces"][0][-1]["frames"] = [{"filename": file, "line": 0, "name": name} for file, name in frames]
    path.write_bytes(pickle.dumps(raw))
    return path


@pytest.mark.parametrize("text", ["foo[/bar].py", "[red]x[/red]", "\x1b]52;c;AAAA\x07", "line\nbreak", "\u202egnp.exe"])
def test_names_do_no_harm(tmp_path: Path, text: str) -> None:
    builder = SnapshotBuilder().alloc(A, 4 * MiB).oom(64 * MiB)
    path = with_frames(tmp_path / "x.pickle", builder, (text, text))
    ran = memtrace("oom", path)
    assert ran.code == 0
    assert "Asked by" in ran.out
    assert not re.search("[\x1b\x07\u202e]|^break", ran.out, re.MULTILINE)
    assert "[" not in text or text in ran.out or "\x1b" in text
    assert memtrace("oom", "--json", path).out.isascii()


def test_the_node_of_autograd_is_named_where_cpp_frames_tell(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(A, 4 * MiB, stack="f").oom(64 * MiB)
    frames = (("??", "at::empty"), ("??", "torch::autograd::generated::NllLossBackward0::apply"))
    out = memtrace("oom", with_frames(tmp_path / "x.pickle", builder, *frames)).out
    assert "Asked by NllLossBackward0 in autograd's thread" in out


def test_sizes_in_other_units() -> None:
    out = memtrace("oom", "--units", "bytes", FIXTURES / "oom.pickle.xz").out
    assert "asked 104,857,600 B, the driver for 104,857,600 B" in out


def test_every_hint_keeps_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "moe.toml"
    rules.write_text('[[rule]]\ncategory = "act.moe"\nlabel = "experts"\nfile = "train.py"\n', "utf-8")
    out = memtrace("oom", "--rules", rules, three_failures(tmp_path)).out
    hints = [line for line in out.splitlines() if "memtrace blame" in line]
    assert len(hints) == 2
    assert all(f" --rules {rules}" in line for line in hints)
    assert "Asked by train.py:9 last: for act.moe, experts." in out
