"""`memtrace whatif`: what it prints and the document it writes (contract.md)."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES, ROOT
from running import memtrace

MiB, GiB = 1 << 20, 1 << 30
A, B, C = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
MLP = FIXTURES / "mlp-adamw.pickle.xz"
RAGGED = FIXTURES / "ragged.pickle.xz"
CONTRACT = {
    *("settings", "exact_self_check", "reserved_bytes_peak", "reserved_bytes_peak_low", "reserved_bytes_peak_high"),
    *("allocated_bytes_peak", "inactive_split_bytes_peak", "num_device_alloc", "num_device_free"),
    *("num_alloc_retries", "oom_at_event"),
}
ADDED = {"num_ooms", "sure", "draws", "draws_out_of_memory"}
SETTINGS = {
    *("expandable_segments", "max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold"),
    *("large_segment_size_mb", "max_non_split_rounding_mb", "limit_bytes", "limit_source", "empty_cache_every_step"),
    *("torch", "conf"),
}
NUMBERS = {name for name in CONTRACT | ADDED if "bytes" in name or name.startswith("num_")}


def data_of(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = memtrace("whatif", *arguments, "--json").document["data"]
    return found


def scenario_of(*arguments: object) -> dict[str, Any]:
    (found,) = data_of(*arguments)["scenarios"]
    return dict(found)


def two_large(folder: Path, **settings: Any) -> Path:
    """30 MiB come and go, then 44: each has a segment of its own."""
    builder = SnapshotBuilder().settings(**settings) if settings else SnapshotBuilder()
    return builder.alloc(A, 30 * MiB).free(A).alloc(B, 44 * MiB).pickle(folder / "x.pickle")


def shown(out: str) -> list[str]:
    """The names in the table, from the second row on."""
    rows = out.partition("as recorded ")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r"\s{2,}", row)[0] for row in rows if not row.startswith("  ")]


# ---- the document


def test_the_document_has_the_fields_of_the_contract() -> None:
    ran = memtrace("whatif", MLP, "--expandable-segments", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = ran.document
    assert document["schema"] == "memtrace.whatif/1"
    data = document["data"]
    assert data.keys() == {"recorded", "scenarios", "self_check"}
    assert data["self_check"] == {"exact": True, "reason": None, "event": None, "segment_events": 33}
    (scenario,) = data["scenarios"]
    for one in (data["recorded"], scenario):
        assert one.keys() == CONTRACT | ADDED
        assert one["settings"].keys() == SETTINGS
        assert one["exact_self_check"] is True
        assert all(type(one[name]) is int for name in NUMBERS)
    assert scenario["reserved_bytes_peak"] == 610_271_232
    assert scenario["settings"]["conf"] == "expandable_segments:True"
    assert {warning["code"] for warning in document["warnings"]} == {"same-requests", "no-limit"}


def test_the_recorded_numbers_are_torchs() -> None:
    stats = json.loads((FIXTURES / "mlp-adamw.truth.json").read_text())["stats"]
    recorded = data_of(MLP, "--limit", "1GiB")["recorded"]
    assert recorded["reserved_bytes_peak"] == stats["reserved_bytes.all.peak"]
    assert (
        recorded["reserved_bytes_peak_low"] == recorded["reserved_bytes_peak_high"] == recorded["reserved_bytes_peak"]
    )
    assert recorded["allocated_bytes_peak"] == stats["allocated_bytes.all.peak"]
    assert recorded["inactive_split_bytes_peak"] == stats["inactive_split_bytes.all.peak"]
    for name in ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms"):
        assert recorded[name] == stats[name]
    assert (recorded["settings"]["limit_bytes"], recorded["settings"]["limit_source"]) == (None, None)


def test_all_options_of_one_call_make_one_setting(tmp_path: Path) -> None:
    settings = scenario_of(
        *("--no-expandable-segments", "--max-split-size-mb", 128, "--roundup-power2-divisions", 8),
        *("--garbage-collection-threshold", 0.8, "--large-segment-size-mb", 32, "--limit", "1GiB", "--torch", "2.15.0"),
        two_large(tmp_path, expandable_segments=False, max_split_size=64 * MiB),
    )["settings"]
    assert settings == {
        "expandable_segments": False,
        "max_split_size_mb": 128,
        "roundup_power2_divisions": 8,
        "garbage_collection_threshold": 0.8,
        "large_segment_size_mb": 32,
        "max_non_split_rounding_mb": 20,
        "limit_bytes": GiB,
        "limit_source": "given",
        "empty_cache_every_step": False,
        "torch": "2.15",
        "conf": "expandable_segments:False,max_split_size_mb:128,roundup_power2_divisions:8,"
        "garbage_collection_threshold:0.8,large_segment_size_mb:32",
    }


def test_what_is_not_named_is_as_recorded(tmp_path: Path) -> None:
    table = {str(1 << power): 4 if power > 9 else 0 for power in range(16)}
    path = two_large(tmp_path, max_split_size=64 * MiB, roundup_power2_divisions=table)
    settings = scenario_of(path, "--expandable-segments")["settings"]
    assert (settings["max_split_size_mb"], settings["roundup_power2_divisions"]) == (64, table)
    assert scenario_of(path, "--max-split-size-mb", 0)["settings"]["max_split_size_mb"] is None
    assert scenario_of(path, "--roundup-power2-divisions", 0)["settings"]["roundup_power2_divisions"] == 0


def test_numbers_are_exact(tmp_path: Path) -> None:
    scenario = scenario_of(two_large(tmp_path), "--limit", 44 * MiB)
    assert (scenario["reserved_bytes_peak"], scenario["allocated_bytes_peak"]) == (44 * MiB, 44 * MiB)
    assert (scenario["num_device_alloc"], scenario["num_device_free"], scenario["num_alloc_retries"]) == (2, 1, 1)
    assert (scenario["oom_at_event"], scenario["num_ooms"], scenario["sure"]) == (None, 0, True)


# ---- the page


def test_the_answer_comes_first_and_then_why_to_believe_it() -> None:
    ran = memtrace("whatif", MLP, "--expandable-segments")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "With expandable_segments:True: reserved peak 562.00 MiB -> 582.00 MiB (+3.6 %)."
    assert lines[1] == (
        "Self-check exact: the recorded setting, simulated with the recorded addresses, places 210 blocks and makes "
        "33 segment events as recorded."
    )
    assert lines[3].split("  ")[0] == "setting"
    assert "retries" not in lines[3]  # nothing to say in that column
    assert lines[4].split() == ["as", "recorded", "562.00", "545.23", "33"]
    assert lines[5].split() == ["expandable_segments:True", "582.00", "+3.6", "%", "545.23", "30"]
    assert "Assumed: the program asks for the same memory in the same order, whatever the setting." in lines
    assert lines[-3:] == [
        f"next: memtrace whatif {MLP} --sweep",
        f"      memtrace fits {MLP} --gpu A100-40",
        f"      memtrace blame {MLP} --of reserved",
    ]


def test_a_setting_that_helps_is_ready_to_be_used(tmp_path: Path) -> None:
    out = memtrace("whatif", two_large(tmp_path), "--expandable-segments").out
    assert out.startswith("With expandable_segments:True: reserved peak 74.00 MiB -> 60.00 MiB (-18.9 %).\n")
    assert "next: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True memtrace record -- COMMAND\n" in out


def test_a_setting_that_changes_nothing_is_said_to(tmp_path: Path) -> None:
    out = memtrace("whatif", two_large(tmp_path), "--no-expandable-segments").out
    assert "74.00 MiB -> 74.00 MiB (no change)" in out


def test_a_limit_that_is_too_small_names_the_event(tmp_path: Path) -> None:
    path = two_large(tmp_path)
    ran = memtrace("whatif", path, "--limit", "40MiB")
    assert ran.code == 0
    assert ran.out.startswith("With limit 40.00 MiB: out of memory under 40.00 MiB at event 5")
    assert "event 5" in ran.out.partition("as recorded")[2]
    assert scenario_of(path, "--limit", "40MiB")["oom_at_event"] == 5


def test_one_that_is_enough_says_that_all_is_served(tmp_path: Path) -> None:
    out = memtrace("whatif", two_large(tmp_path), "--limit", "44MiB").out
    assert out.splitlines()[0] == (
        "With limit 44.00 MiB: reserved peak 74.00 MiB -> 44.00 MiB (-40.5 %); every request is served."
    )
    assert "Assumed: no limit" not in out


def test_sizes_in_other_units(tmp_path: Path) -> None:
    out = memtrace("whatif", two_large(tmp_path), "--expandable-segments", "--units", "bytes").out
    assert "reserved peak 77,594,624 B -> 62,914,560 B" in out
    assert "reserved B" in out


def test_a_range_is_given_where_segments_may_lie_otherwise() -> None:
    scenario = scenario_of(MLP, "--empty-cache-every-step")
    low, high = scenario["reserved_bytes_peak_low"], scenario["reserved_bytes_peak_high"]
    assert low <= scenario["reserved_bytes_peak"] <= high
    assert scenario["draws"] == 21
    out = memtrace("whatif", MLP, "--empty-cache-every-step").out
    assert ("as segments may lie" in out.splitlines()[0]) == (low < high)
    assert "20 draws" in out


def test_at_80_columns_nothing_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = two_large(tmp_path)
    given = ("--roundup-power2-divisions", 2, "--garbage-collection-threshold", 0.8, "--limit", "100MiB")
    out = re.sub(r"\x1b\[[0-9;]*m", "", memtrace("whatif", path, *given, "--sweep").out)
    joined = re.sub(r"\s+", "", out)
    assert "roundup_power2_divisions:2,garbage_collection_threshold:0.8,limit100.00MiB" in joined
    assert "expandable_segments:True" in joined
    assert "…" not in out


def test_nothing_is_cut_in_a_pipe() -> None:
    given = ["--sweep", "--limit", "3800MiB", "--garbage-collection-threshold", "0.7", "--large-segment-size-mb", "32"]
    ran = subprocess.run(
        [sys.executable, "-m", "memtrace", "whatif", str(RAGGED), *given],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"COLUMNS": "60", "PATH": "/usr/bin"},
    )
    name = "expandable_segments:True,garbage_collection_threshold:0.7,large_segment_size_mb:32, limit 3.71 GiB"
    assert any(line.startswith(name) for line in ran.stdout.splitlines())
    assert "…" not in ran.stdout


# ---- sweeps


def test_a_sweep_is_ranked() -> None:
    scenarios = data_of(RAGGED, "--sweep", "--limit", "3800MiB")["scenarios"]
    completes = [one["sure"] and one["oom_at_event"] is None for one in scenarios]
    assert completes == sorted(completes, reverse=True)
    assert 0 < sum(completes) < len(completes)
    for good in (True, False):
        ranks = [
            (one["reserved_bytes_peak_high"], one["num_device_alloc"])
            for one, is_good in zip(scenarios, completes, strict=True)
            if is_good is good
        ]
        assert ranks == sorted(ranks)
    assert all(one["settings"]["limit_bytes"] == 3800 * MiB for one in scenarios)
    alone = [one for one in scenarios if not one["settings"]["conf"] and not one["settings"]["empty_cache_every_step"]]
    assert len(alone) == 1
    assert alone[0]["oom_at_event"] is not None


def test_the_page_of_a_sweep_is_in_the_same_order() -> None:
    out = memtrace("whatif", RAGGED, "--sweep", "--limit", "3800MiB").out
    scenarios = data_of(RAGGED, "--sweep", "--limit", "3800MiB")["scenarios"]
    confs = [one["settings"]["conf"] for one in scenarios]
    names = shown(out)
    assert len(names) == len(confs)
    assert all(name.startswith(conf) for name, conf in zip(names, confs, strict=True))
    assert out.startswith(f"Best of {len(confs)}: With {names[0]}: reserved peak 5.96 GiB -> ")
    assert f"PYTORCH_CUDA_ALLOC_CONF={confs[0]} memtrace record" in out
    assert "--sweep" not in out.partition("next:")[2]


def test_a_sweep_alone_tries_what_is_not_set() -> None:
    confs = [one["settings"]["conf"] for one in data_of(MLP, "--sweep")["scenarios"]]
    assert "expandable_segments:True" in confs
    assert not [conf for conf in confs if "garbage" in conf]
    assert len(confs) == len(set(confs)) == 9


def test_a_sweep_that_finds_nothing_says_so() -> None:
    out = memtrace("whatif", MLP, "--sweep").out
    assert out.startswith("None of 9 settings reserves less than the recorded 562.00 MiB.\n")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in out


def test_a_sweep_in_which_nothing_is_enough(tmp_path: Path) -> None:
    out = memtrace("whatif", two_large(tmp_path), "--sweep", "--limit", "20MiB").out
    assert re.match(r"None of \d+ settings surely serves every request\.\n", out)


# ---- limits that nobody named


def test_the_limit_of_retries_is_inferred() -> None:
    path = FIXTURES / "alloc-retry.pickle.xz"
    document = memtrace("whatif", path, "--expandable-segments", "--json").document
    settings = document["data"]["scenarios"][0]["settings"]
    assert settings["limit_source"] == "inferred"
    assert settings["limit_bytes"] <= 4 * GiB
    assert "limit-inferred" in {warning["code"] for warning in document["warnings"]}
    assert "the limit is not recorded; what was served and what was refused puts it from" in (
        memtrace("whatif", path, "--expandable-segments").out
    )


def test_so_is_that_of_a_failure() -> None:
    path = FIXTURES / "oom.pickle.xz"
    data = data_of(path, "--roundup-power2-divisions", 4)
    assert (data["recorded"]["oom_at_event"], data["scenarios"][0]["oom_at_event"]) == (80, 71)
    assert (data["recorded"]["num_ooms"], data["recorded"]["num_alloc_retries"]) == (1, 1)
    assert data["scenarios"][0]["settings"]["limit_source"] == "inferred"
    more = scenario_of(path, "--limit", "8GiB")
    assert (more["oom_at_event"], more["num_ooms"], more["settings"]["limit_source"]) == (None, 0, "given")


def test_a_failure_that_stays_is_named_as_the_recorded_one() -> None:
    out = memtrace("whatif", FIXTURES / "oom.pickle.xz", "--limit", "4GiB").out
    assert out.startswith(
        "With limit 4.00 GiB: out of memory under 4.00 GiB at event 80, the same request as recorded."
    )


def test_what_cannot_be_told_for_sure_is_said_to(tmp_path: Path) -> None:
    """The limit is from 72 to below 134 MiB; rounded up, 82 are needed."""
    builder = SnapshotBuilder().alloc(A, 70 * MiB).oom(64 * MiB).alloc(B, 512)
    path = builder.pickle(tmp_path / "x.pickle")
    scenario = scenario_of(path, "--roundup-power2-divisions", 4)
    assert scenario["sure"] is False
    out = memtrace("whatif", path, "--roundup-power2-divisions", 4).out
    assert "cannot be told for sure" in out.splitlines()[0]
    assert "maybe event" in out


def test_the_recorders_limit_is_known() -> None:
    recorded = data_of(FIXTURES / "recordings" / "gpt2-oom", "--limit", "16GiB")["recorded"]
    assert recorded["settings"]["limit_bytes"] == 8_388_608_000
    assert recorded["settings"]["limit_source"] == "recorded"


# ---- other recordings


def test_private_pools_are_said_to_stay() -> None:
    ran = memtrace("whatif", FIXTURES / "cuda-graph.pickle.xz", "--expandable-segments")
    assert ran.code == 0
    assert "Assumed: private pools (CUDA graphs, MemPool) are as they were recorded." in ran.out


def test_a_window_is_said_to_begin_with_what_was_there() -> None:
    path = FIXTURES / "gpt2-zero3-recorded-from-step-0.pickle.xz"
    ran = memtrace("whatif", path, "--expandable-segments")
    assert ran.code == 0
    assert "Assumed: memory from before the recording stays where it was" in ran.out
    assert scenario_of(path, "--expandable-segments")["exact_self_check"] is True


def test_a_device_can_be_picked(tmp_path: Path) -> None:
    high = SnapshotBuilder(device=0).alloc(A, 64 * MiB).alloc(B, 512)
    low = SnapshotBuilder(device=1).alloc(A, 5 * MiB).alloc(B, 512)
    path = high.join(low).pickle(tmp_path / "two.pickle")
    assert scenario_of(path, "-d", 1, "--expandable-segments")["reserved_bytes_peak"] == 22 * MiB
    assert scenario_of(path, "--expandable-segments")["reserved_bytes_peak"] == 82 * MiB
    out = memtrace("whatif", path, "-d", 1, "--expandable-segments").out
    assert all(line.endswith(" -d 1") for line in out.partition("next: ")[2].splitlines() if "memtrace w" in line)
    assert memtrace("whatif", path, "-d", 7, "--expandable-segments").code == 2


@pytest.mark.parametrize("text", ["foo[/bar].py", "[red]x[/red]", "\x1b]52;c;AAAA\x07", "line\nbreak", "\u202egnp.exe"])
def test_names_do_no_harm(tmp_path: Path, text: str) -> None:
    raw = SnapshotBuilder().alloc(A, 30 * MiB).free(A).alloc(B, 44 * MiB).build()
    for event in raw["device_traces"][0]:
        event["frames"] = [{"filename": text, "line": 1, "name": text}]
        event["user_metadata"] = text
    raw["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = text
    raw["external_annotations"] = [{"stage": "START", "name": text, "device": 0, "time_us": 1}]
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(raw))
    for given in (("--limit", "40MiB"), ("--sweep",)):
        ran = memtrace("whatif", path, *given)
        assert ran.code == 0
        assert not re.search("[\x1b\x07\u202e]|^break", ran.out + ran.err, re.MULTILINE)


def test_a_path_is_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    out = memtrace("whatif", two_large(folder), "--expandable-segments").out
    assert f"memtrace fits '{folder}/x.pickle' --gpu A100-40" in out


# ---- no prediction


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("public-state-only-259-segments", "the file has no trace, only the last state"),
        ("public-trimmed-trace", "the trace contradicts itself, so what the program asked is not known"),
    ],
)
def test_without_a_sound_trace_there_is_no_prediction(name: str, reason: str) -> None:
    path = FIXTURES / f"{name}.pickle.xz"
    ran = memtrace("whatif", path, "--expandable-segments")
    assert (ran.code, ran.out) == (0, f"No prediction: {reason}.\n")
    assert memtrace("whatif", path, "--sweep").out == ran.out
    data = data_of(path, "--expandable-segments")
    assert data["self_check"]["exact"] is False
    assert data["self_check"]["reason"] == reason
    for one in (data["recorded"], *data["scenarios"]):
        assert one.keys() == CONTRACT | ADDED
        assert one["exact_self_check"] is False
        assert {one[name] for name in NUMBERS} == {None}


def test_nor_where_the_self_check_fails(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(A, 30 * MiB).alloc(B, 30 * MiB).free(A).free(B).alloc(B, 30 * MiB)
    path = builder.pickle(tmp_path / "x.pickle")
    ran = memtrace("whatif", path, "--expandable-segments")
    assert ran.code == 0
    assert ran.out.startswith("No prediction: a block is put elsewhere than in the recording (event 8).\n")
    assert "would be worth nothing" in ran.out
    data = data_of(path, "--expandable-segments")
    assert data["self_check"]["event"] == 8
    assert data["scenarios"][0]["reserved_bytes_peak"] is None


# ---- what is refused


@pytest.mark.parametrize(
    "given",
    [
        ("--max-split-size-mb", "20"),
        ("--max-split-size-mb=-1",),
        ("--max-split-size-mb", "x"),
        ("--roundup-power2-divisions", "3"),
        ("--garbage-collection-threshold", "1"),
        ("--garbage-collection-threshold", "nan"),
        ("--large-segment-size-mb", "10"),
        ("--torch", "9.9"),
        ("--limit", "much"),
        ("--limit", "0"),
        (),
        ("--empty-cache-every-steps",),
    ],
)
def test_what_no_allocator_can_be_set_to_is_refused(given: tuple[str, ...]) -> None:
    ran = memtrace("whatif", MLP, *given)
    assert (ran.code, ran.out) == (2, "")
    assert "\nhint: " in ran.err
    assert ran.err.startswith("memtrace: error[usage]: ")


def test_nothing_to_change_is_said() -> None:
    assert "nothing to change: name a setting, or --sweep" in memtrace("whatif", MLP).err


def test_a_near_miss_of_a_release_is_helped_with() -> None:
    assert "2.11" in memtrace("whatif", MLP, "--torch", "2.111").err


def test_without_steps_the_cache_cannot_be_emptied_after_them(tmp_path: Path) -> None:
    ran = memtrace("whatif", two_large(tmp_path), "--empty-cache-every-step")
    assert (ran.code, ran.out) == (2, "")
    assert "the recording shows no end of a step" in ran.err


def test_a_file_that_is_not_there_is_another_error(tmp_path: Path) -> None:
    assert memtrace("whatif", tmp_path / "none.pickle", "--sweep").code == 3
