"""`memtrace blame`: what it prints and the document it writes (contract.md)."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES, snapshot_path
from running import memtrace

MiB = 1 << 20
REPORT = "fixtures/opt13b-zero3-deepspeed0.18.9.pickle.xz"
ROW_KEYS = {"key", "bytes", "blocks", "category", "label", "confidence", "stack", "evidence"}
BLOCK_KEYS = {"address", "size", "requested", "born", "freed", "died", "stream", "pool", "segment", "phase", "step",
              "module", "before_recording"}  # fmt: skip


def two_devices(path: Path) -> Path:
    first = SnapshotBuilder(device=0).alloc(0x7F0000000000, 4 * MiB, stack="a.py:1 small")
    second = SnapshotBuilder(device=1).alloc(0x7F0000000000, 64 * MiB, stack="b.py:2 large")
    return first.join(second).pickle(path)


def test_the_reports_case() -> None:
    """The figures of experience.md that a replay alone can give."""
    ran = memtrace("blame", "--peak", REPORT)
    assert ran.code == 0
    assert ran.out.startswith("Peak: 55.21 GiB allocated, in backward of step 1 (event 52,840 of 66,942")
    assert "= torch.cuda.max_memory_allocated(), to the byte" in ran.out
    assert "Reserved at that moment 63.31 GiB: 8.10 GiB more is the allocator's" in ran.out
    assert "Reserved was highest, 67.05 GiB" in ran.out
    assert "41 % of it is parameters that were gathered in forward and never released" in ran.out
    assert ran.err == ""


def test_the_reports_largest_call_sites() -> None:
    rows = memtrace("blame", REPORT, "--by", "stack", "--json").document["data"]["rows"]
    retained = [row for row in rows if row["stack"] and row["stack"][0]["name"] == "_all_gather_sequential"]
    optimizer = [row for row in rows if row["stack"] and row["stack"][0]["name"] == "_init_group"]
    assert 0 <= sum(row["bytes"] for row in optimizer) - 12_853_473_280 < MiB
    assert sum(row["bytes"] for row in retained) > 17 * 1024 * MiB


@pytest.mark.parametrize("by", ["category", "stack", "frame", "file", "phase", "stream", "block", "tree"])
def test_the_document(by: str) -> None:
    ran = memtrace("blame", "fixtures/two-streams.pickle.xz", "--of", "reserved", "--by", by, "--json")
    assert ran.code == 0
    assert ran.err == ""
    document = ran.document
    assert document.keys() == {"schema", "memtrace", "snapshot", "data", "warnings"}
    assert document["schema"] == "memtrace.blame/1"
    assert document["snapshot"].keys() == {"path", "bytes", "torch", "device", "events", "complete", "recording"}
    data = document["data"]
    assert {"device", "event", "time_us", "phase", "step", "of", "total_bytes", "by", "rows"} <= data.keys()
    assert sum(row["bytes"] for row in data["rows"]) == data["total_bytes"]
    for row in data["rows"]:
        assert row.keys() >= ROW_KEYS
        assert isinstance(row["bytes"], int)
        assert row["category"]
        if by == "block" and row["category"] not in (
            "alloc.rounding",
            "alloc.slack",
            "alloc.stranded",
            "alloc.releasable",
        ):
            assert row.keys() >= BLOCK_KEYS
        elif by == "block":
            assert "address" not in row
        assert (row["key"] is None) or by in ("frame", "file", "phase", "stream")


def test_the_tree_document_nests_and_sums() -> None:
    data = memtrace("blame", REPORT, "--by", "tree", "--json").document["data"]

    def check(node: dict[str, Any]) -> None:
        assert node["bytes"] == node["self_bytes"] + sum(child["bytes"] for child in node["children"])
        for child in node["children"]:
            check(child)

    check(data["tree"])
    assert data["tree"]["bytes"] == data["total_bytes"] == sum(row["bytes"] for row in data["rows"])
    assert data["heaviest_path"][-1]["name"] == "_all_gather_sequential"


def test_a_stack_deeper_than_any_recursion_limit(tmp_path: Path) -> None:
    deep = ";".join(f"deep.py:{line} f" for line in range(1, 20_000))
    path = SnapshotBuilder().alloc(0x7F0000000000, 512, stack=deep).pickle(tmp_path / "deep.pickle")
    ran = memtrace("blame", path, "--by", "tree", "--json")
    assert ran.code == 0
    assert ran.out.count('"children"') == 20_000
    assert memtrace("blame", path, "--by", "tree").code == 0


def test_more_rows_are_summed_up_in_one() -> None:
    ran = memtrace("blame", REPORT, "--by", "stack", "-n", "3")
    assert "46 more" in ran.out
    assert ran.out.count(" total ") == 1


def test_several_devices_are_never_summed(tmp_path: Path) -> None:
    path = two_devices(tmp_path / "two.pickle")
    ran = memtrace("blame", path)
    assert "64.00 MiB" in ran.out
    assert "device 1 taken (highest peak); others: 0" in ran.err
    assert memtrace("blame", path, "-d", "0", "--json").document["data"]["total_bytes"] == 4 * MiB
    wrong = memtrace("blame", path, "-d", "7")
    assert wrong.code == 2
    assert "There is: 0, 1" in wrong.err


MOMENTS = {"peak": 192, "end": 632, "0": 0, "-1": -1, "100": 100, "0s": 0}
NO_MOMENTS = ("1e3", "9999", "oom", "", "-2", "1m", "nan", "٣")


@pytest.mark.parametrize(("at", "event"), [*MOMENTS.items(), *((at, None) for at in NO_MOMENTS)])
def test_moments(at: str, event: int | None) -> None:
    ran = memtrace("blame", "fixtures/mlp-adamw.pickle.xz", f"--at={at}", "--json")
    if event is None:
        assert ran.code == 2
        assert ran.err.startswith("memtrace: error[usage]: ")
        assert "\nhint: " in ran.err
    else:
        assert ran.document["data"]["event"] == event


def test_a_time_is_the_state_after_the_last_event_by_then() -> None:
    data = memtrace("blame", REPORT, "--at", "14.352s", "--json").document["data"]
    later = memtrace("blame", REPORT, "--at", str(data["event"] + 1), "--json").document["data"]
    first = memtrace("blame", REPORT, "--at", "0", "--json").document["data"]["time_us"]
    assert data["time_us"] <= first + 14_352_000 < later["time_us"]


def test_at_oom_is_the_last_one() -> None:
    data = memtrace("blame", "fixtures/oom.pickle.xz", "--at", "oom", "--json").document["data"]
    assert data["event"] == 80
    assert data["total_bytes"] == 40 * 100 * MiB


def test_standard_input_and_every_packing(tmp_path: Path) -> None:
    with lzma.open(snapshot_path("mlp-adamw")) as file:
        plain = file.read()
    expected = memtrace("blame", "fixtures/mlp-adamw.pickle.xz", "--json").document["data"]
    for data in (plain, gzip.compress(plain), lzma.compress(plain)):
        assert memtrace("blame", "-", "--json", stdin=data).document["data"] == expected


def test_full_stacks_and_cpp_frames_only_on_demand() -> None:
    name = "fixtures/mlp-adamw-cpp-stacks.pickle.xz"
    plain = memtrace("blame", name, "--by", "stack").out
    assert "CUDACachingAllocator" not in plain
    assert "(4 library frames)" in plain
    full = memtrace("blame", name, "--by", "stack", "--full-stack").out
    assert "torch/nn/modules/module.py" in full
    assert "CUDACachingAllocator" not in full
    assert "CUDACachingAllocator" in memtrace("blame", name, "--by", "stack", "--cpp").out


def test_units() -> None:
    assert "571,720,192 B allocated" in memtrace("blame", "fixtures/mlp-adamw.pickle.xz", "--units", "bytes").out
    assert "545.23 MiB allocated" in memtrace("blame", "fixtures/mlp-adamw.pickle.xz", "--units", "MiB").out


def test_a_window_says_what_it_lacks() -> None:
    ran = memtrace("blame", "fixtures/gpt2-zero3-ring-20000.pickle.xz")
    assert "warning[incomplete]: at least 165 events happened before this trace" in ran.err
    assert "the ring of exactly 20,000 events" in ran.err
    assert "the highest that this window shows" in ran.out
    assert "max_memory_allocated" not in ran.out
    assert memtrace("blame", "-q", "fixtures/gpt2-zero3-ring-20000.pickle.xz").err == ""
    warnings = memtrace("blame", "--json", "fixtures/gpt2-zero3-ring-20000.pickle.xz").document["warnings"]
    assert [warning["code"] for warning in warnings] == ["incomplete", "size-bound"]


def test_blocks_without_a_stack_are_listed_with_the_reason(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x7F0000000000, 4 * MiB, stack="f").alloc(0x7F1000000000, 4 * MiB, stack=None)
    rows = memtrace("blame", builder.pickle(tmp_path / "x.pickle"), "--by", "block", "--json").document["data"]["rows"]
    assert sorted(row["label"] for row in rows) == ["no rule for model.py:1 f", "no stack"]
    off = SnapshotBuilder(context=None).alloc(0x7F0000000000, 4 * MiB)
    rows = memtrace("blame", off.pickle(tmp_path / "y.pickle"), "--json").document["data"]["rows"]
    assert [(row["category"], row["label"]) for row in rows] == [("unknown", "history off")]


def test_what_predates_the_recording_is_prior(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x7F0000000000, 30 * MiB, stack=None).start_recording()
    path = builder.alloc(0x7F1000000000, 4 * MiB, stack="f").free(0x7F0000000000).pickle(tmp_path / "x.pickle")
    rows = memtrace("blame", path, "--by", "block", "--json").document["data"]["rows"]
    assert {(row["category"], row["before_recording"], row["born"] < 0) for row in rows} == {
        ("prior", True, True),
        ("unknown", False, False),
    }


def test_every_hint_keeps_the_device(tmp_path: Path) -> None:
    hints = [
        line
        for line in memtrace("blame", "-d", "0", two_devices(tmp_path / "two.pickle")).out.splitlines()
        if "memtrace blame" in line
    ]
    assert hints
    assert all(" -d 0" in line for line in hints)


def test_every_hint_keeps_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "moe.toml"
    rules.write_text('[[rule]]\ncategory = "act.moe"\nfile = "model.py"\n', "utf-8")
    path = SnapshotBuilder().alloc(0x7F0000000000, 4 * MiB, stack="f").pickle(tmp_path / "x.pickle")
    hints = [line for line in memtrace("blame", "--rules", rules, path).out.splitlines() if "memtrace blame" in line]
    assert hints
    assert all(line.endswith(f" --rules {rules}") or f" --rules {rules} " in line for line in hints)


def test_a_zero_job_is_pointed_to_the_theory() -> None:
    path = FIXTURES / "gpt2-zero3-recorded-from-step-0.pickle.xz"
    assert memtrace("blame", path).out.endswith(f"\n      memtrace zero {path}\n")
    assert "memtrace zero" not in memtrace("blame", FIXTURES / "ragged.pickle.xz").out


def test_what_was_told_by_its_size_says_so() -> None:
    out = memtrace("blame", "--why", FIXTURES / "gpt2-zero3-recorded-from-step-0.pickle.xz").out
    bucket = next(line for line in out.splitlines() if line.startswith("grad.bucket  "))
    assert bucket.endswith("(from before the recording, told by its size)")
    prior = next(line for line in out.splitlines() if line.startswith("prior: "))
    assert prior == "prior: 59.67 MiB, no rule decided"


LEDGER_TERMS = {
    f"{name}_bytes" for name in ("requested", "rounding", "slack", "pending", "stranded", "releasable", "reserved")
}


@pytest.mark.parametrize("name", ["two-streams", "cuda-graph", "ragged-expandable", "gpt2-zero3"])
def test_the_documents_ledger(name: str) -> None:
    ran = memtrace("blame", f"fixtures/{name}.pickle.xz", "--of", "reserved", "--json", "-n", "1")
    data = ran.document["data"]
    ledger = data["ledger"]
    assert ledger.keys() == LEDGER_TERMS | {"parts", "pending", "pins", "device"}
    assert ledger["reserved_bytes"] == data["total_bytes"]
    rows = {row["category"]: row["bytes"] for row in data["rows"]}
    for term in ("rounding", "slack", "pending", "stranded", "releasable"):
        assert ledger[f"{term}_bytes"] == rows.get(f"alloc.{term}", 0)
    for term in LEDGER_TERMS:
        assert sum(part[term] for part in ledger["parts"]) == ledger[term]
    for part in ledger["parts"]:
        assert part.keys() == LEDGER_TERMS | {"pool", "stream", "pool_id"}
        assert part["pool"] in ("small", "large")
    for one in ledger["pending"]:
        assert one.keys() == {"stream", "bytes", "blocks", "waited_events", "waited_us", "still_events", "still_us",
                              "unfinished_blocks"}  # fmt: skip
    assert sum(one["bytes"] for one in ledger["pending"]) == ledger["pending_bytes"]
    for pin in ledger["pins"]:
        assert pin.keys() == {"stack", "category", "blocks", "pending_blocks", "bytes", "hostage_bytes", "alone_bytes",
                              "together_bytes", "born", "phase", "step"}  # fmt: skip
    assert sum(pin["hostage_bytes"] for pin in ledger["pins"]) == ledger["stranded_bytes"]
    assert ledger["device"] == {"capacity_bytes": None, "free_bytes": None, "outside_bytes": None}


def test_only_reserved_has_a_ledger() -> None:
    ran = memtrace("blame", "fixtures/two-streams.pickle.xz", "--json")
    assert "ledger" not in ran.document["data"]
    assert "pins" not in memtrace("blame", "fixtures/two-streams.pickle.xz").out


def test_the_device_of_a_recording() -> None:
    recording = str(FIXTURES / "recordings" / "gpt2-oom")
    device = memtrace("blame", recording, "--of", "reserved", "--at", "oom", "--json").document["data"]["ledger"][
        "device"
    ]
    assert device["capacity_bytes"] == 150_109_880_320
    assert device["free_bytes"] == 132_011_524_096
    assert device["outside_bytes"] == 150_109_880_320 - 132_011_524_096 - 8_029_995_008
    text = memtrace("blame", recording, "--of", "reserved", "--at", "oom").out
    assert "The device's 139.80 GiB: 7.48 GiB reserved, 9.38 GiB outside torch, 122.95 GiB free." in text
    peak = memtrace("blame", recording, "--of", "reserved").out
    assert "what of it was outside torch is not recorded for this moment" in peak


def test_what_pins_in_words() -> None:
    """Of the 397 MiB that are stranded there, four blocks of 5.9 MiB keep 366."""
    text = memtrace("blame", "fixtures/ragged.pickle.xz", "--of", "reserved", "-n", "2").out
    assert "What pins the stranded memory:\n397.29 MiB is stranded: free, but in segments that 203 live blocks" in text
    assert "Freeing the 4 of gpt2/modeling_gpt2.py:307 forward would release 370.00 MiB." in text
    table = text.split("MiB pinned", 1)[1].splitlines()
    assert table[1].split() == [
        "365.70",
        "23.44",
        "370.00",
        "4",
        "act.saved,",
        "born",
        "in",
        "forward",
        "of",
        "step",
        "5",
    ]
    assert [line.split()[-2:] for line in table if "more" in line] == [["21", "more"]]
    assert "pages" in memtrace("blame", "fixtures/ragged-expandable.pickle.xz", "--of", "reserved").out


def test_no_call_site_pins_alone(tmp_path: Path) -> None:
    path = (
        SnapshotBuilder()
        .alloc(0x7F0000000000, 3 * MiB, stack="a.py:1 one")
        .alloc(0x7F0000000000 + 3 * MiB, 3 * MiB, stack="a.py:2 two")
        .free_requested(0x7F0000000000 + 3 * MiB)
        .pickle(tmp_path / "one.pickle")
    )
    text = memtrace("blame", str(path), "--of", "reserved", "--at", "end").out
    assert (
        "14.00 MiB is stranded: free, but in segments that 1 live block and 1 pending block (6.00 MiB) pin. "
        "No call site pins a segment alone: several have to let go."
    ) in text
    assert (
        "Pending on stream 0: 3.00 MiB in 1 block, freed up to 0 events (0.000 s) before; "
        "all of it still waits when the trace ends."
    ) in text


def test_the_end_of_a_wait_in_words(tmp_path: Path) -> None:
    base = 0x7F0000000000
    path = tmp_path / "one.pickle"
    builder = (
        SnapshotBuilder().alloc(base, 2 * MiB).alloc(base + 2 * MiB, 2 * MiB).free_requested(base).start_recording()
    )
    builder.free_requested(base + 2 * MiB).alloc(base + 4 * MiB, 2 * MiB).free_completed(base).pickle(path)
    text = memtrace("blame", str(path), "--of", "reserved", "--at", "1").out
    assert (
        "Pending on stream 0: 4.00 MiB in 2 blocks, in part freed before the recording; "
        "1 never within the trace, of the others the last was free again 1 event (0.000 s) later."
    ) in text
