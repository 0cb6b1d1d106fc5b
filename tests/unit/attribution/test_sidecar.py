"""What the recorder wrote beside a snapshot beats what stacks say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from stacks import BACKWARD, MODULE, STEP, Job, MiB

import memtrace
from memtrace.attribution import CONFIDENCE
from memtrace.io.sidecar import read_sidecar, sidecar_path

START = 1_700_000_000_000_000


def recorded(folder: Path, job: Job, **content: Any) -> memtrace.Snapshot:
    """The job, with a sidecar beside its snapshot."""
    path = job.builder.pickle(folder / "rank0000.pickle")
    (folder / "rank0000.json").write_text(json.dumps({"memtrace": "1", "schema": "memtrace.sidecar/1"} | content))
    return memtrace.load(path, cache=False)


def end_rows(snapshot: memtrace.Snapshot) -> dict[int, Any]:
    """Address -> row at the end."""
    return {row.block.address: row for row in snapshot.blame(at="end", by="block").rows if row.block is not None}


@pytest.mark.parametrize(
    ("role", "category"),
    [
        ("param", "param.full"),
        ("param.partition", "param.partition"),
        ("param.gathered", "param.gathered"),
        ("param.persistent", "param.persistent"),
        ("param.flat", "param.full"),
        ("param.master", "param.master"),
        ("grad", "grad.full"),
        ("grad.partition", "grad.partition"),
        ("grad.bucket", "grad.bucket"),
        ("optim.state.exp_avg", "optim.state"),
        ("optim.state.step", "optim.state"),
        ("buffer", "buffer"),
    ],
)
def test_roles_decide_by_address(role: str, category: str, tmp_path: Path) -> None:
    job = Job()
    block = job.alloc("train.py:3 <module>")
    note = {"role": role, "name": "w", "address": job.addresses[block] + 512, "bytes": 1024}
    row = end_rows(recorded(tmp_path, job, roles=[note]))[job.addresses[block]]
    assert (row.category, row.confidence) == (category, "recorded")
    assert row.evidence is not None
    assert row.evidence.rule == "recorded.role"


def test_a_few_bytes_of_a_block_do_not_say_what_it_is(tmp_path: Path) -> None:
    """A view of a loss in a bucket; unless nothing else is known of the block."""
    job = Job()
    unknown, known = job.alloc("train.py:3 <module>", 400 * MiB), job.alloc(STEP, 400 * MiB)
    notes = [{"role": "buffer", "name": "", "address": job.addresses[one], "bytes": 4} for one in (known, unknown)]
    rows = end_rows(recorded(tmp_path, job, roles=notes))
    assert (rows[job.addresses[known]].category, rows[job.addresses[known]].confidence) != ("buffer", "recorded")
    assert rows[job.addresses[unknown]].category == "buffer"
    notes[0]["bytes"] = 4 * MiB
    assert end_rows(recorded(tmp_path, job, roles=notes))[job.addresses[known]].category == "buffer"


def test_a_block_is_what_most_of_it_is(tmp_path: Path) -> None:
    """Many small views of one role beat one larger of another; a buffer that is whole beats its own views."""
    job = Job()
    views, whole = job.alloc(None, 8 * MiB), job.alloc(None, 8 * MiB)
    parts = [(views, "buffer", 0, 2)] + [(views, "param", 2 + number, 1) for number in range(6)]
    parts += [(whole, "grad", number, 1) for number in range(8)] + [(whole, "grad.bucket", 0, 8)]
    notes = [
        {"role": role, "name": "", "address": job.addresses[block] + start * MiB, "bytes": size * MiB}
        for block, role, start, size in parts
    ]
    rows = end_rows(recorded(tmp_path, job, roles=notes))
    assert [rows[job.addresses[block]].category for block in (views, whole)] == ["param.full", "grad.bucket"]


def test_views_that_overlap_count_once(tmp_path: Path) -> None:
    job = Job()
    block = job.alloc(None, 8 * MiB)
    parts = [("buffer", 0, 1)] * 9 + [("param", 1, 4)]
    notes = [
        {"role": role, "name": "", "address": job.addresses[block] + start * MiB, "bytes": size * MiB}
        for role, start, size in parts
    ]
    assert end_rows(recorded(tmp_path, job, roles=notes))[job.addresses[block]].category == "param.full"


def test_the_memory_of_another_device_is_none_of_this_one(tmp_path: Path) -> None:
    job = Job()
    block = job.alloc("train.py:3 <module>")
    note = {"role": "param", "name": "w", "address": job.addresses[block], "bytes": 4 * MiB}
    for device, category in (("cpu", "unknown"), ("cuda:1", "unknown"), ("cuda:0", "param.full")):
        row = end_rows(recorded(tmp_path, job, roles=[note | {"device": device}]))[job.addresses[block]]
        assert row.category == category


def test_gathered_ahead_says_more_than_gathered(tmp_path: Path) -> None:
    job = Job()
    wait = f"deepspeed/runtime/zero/partition_parameters.py:767 wait; {MODULE}"
    block = job.alloc(wait)
    known = {"address": job.addresses[block], "bytes": 4 * MiB}
    role = {"role": "param.gathered", "name": "w", **known}
    mark = {"kind": "prefetch", "time_us": START + 1, "released_us": None, "parameter": "w", **known}
    rows = [
        end_rows(recorded(tmp_path, job, roles=[role], gathers=gathers))[job.addresses[block]].category
        for gathers in ([], [mark], [mark | {"persistent": True}])
    ]
    assert rows == ["param.gathered", "param.prefetched", "param.persistent"]


def test_what_deepspeed_still_has_is_not_retained(tmp_path: Path) -> None:
    """By its life it looks like one that autograd holds; the role of it says that it was never let go of."""
    job = Job()
    wait = f"deepspeed/runtime/zero/partition_parameters.py:767 wait; {MODULE}"
    block = job.alloc(wait)
    job.alloc(f"{wait.replace(MODULE, BACKWARD)}")
    role = {"role": "param.gathered", "name": "w", "address": job.addresses[block], "bytes": 4 * MiB}
    plain = end_rows(recorded(tmp_path, job))[job.addresses[block]]
    row = end_rows(recorded(tmp_path, job, roles=[role]))[job.addresses[block]]
    assert (row.category, row.label, row.confidence) == ("param.gathered", "parameters gathered for use", "recorded")
    assert plain.confidence != "recorded"


def test_gradients_of_the_bf16_optimizer_are_fp32(tmp_path: Path) -> None:
    job = Job()
    block = job.alloc(None)
    note = {"role": "grad", "name": "fp32_groups_gradients_flat.0", "address": job.addresses[block], "bytes": 4 * MiB}
    assert end_rows(recorded(tmp_path, job, roles=[note]))[job.addresses[block]].category == "grad.fp32"


@pytest.mark.parametrize(("stage", "category"), [(2, "param.full"), (3, "param.partition")])
def test_a_flat_is_what_the_stage_makes_it(stage: int, category: str, tmp_path: Path) -> None:
    job = Job()
    block = job.alloc(None)
    notes = [{"role": "param.flat", "name": "0", "address": job.addresses[block], "bytes": MiB}]
    snapshot = recorded(tmp_path, job, roles=notes, zero={"stage": stage, "world": 8}, deepspeed="0.19.8")
    assert end_rows(snapshot)[job.addresses[block]].category == category


def test_memory_from_before_the_recording_gets_its_role(tmp_path: Path) -> None:
    job = Job(SnapshotBuilder())
    block = job.alloc("train.py:3 <module>")
    job.builder.start_recording()
    job.alloc(MODULE)
    notes = [{"role": "param.master", "name": "", "address": job.addresses[block], "bytes": 4 * MiB}]
    row = end_rows(recorded(tmp_path, job, roles=notes))[job.addresses[block]]
    assert (row.category, row.confidence) == ("param.master", "recorded")
    assert row.block is not None
    assert row.block.before_recording


def test_phases_and_steps_are_the_recorders(tmp_path: Path) -> None:
    job = Job()
    for _ in range(4):
        job.alloc("train.py:3 <module>")
    phases = [
        {"phase": "forward", "step": 7, "begin_us": START, "end_us": START + 4, "source": "engine"},
        {"phase": "eval", "step": None, "begin_us": START + 4, "end_us": START + 90, "source": "engine"},
    ]
    timeline = recorded(tmp_path, job, phases=phases).timeline()
    assert timeline.at(1) == ("forward", 7)
    assert timeline.at(7) == ("eval", None)


def test_a_marked_gather_is_known_by_address_and_time(tmp_path: Path) -> None:
    job = Job()
    block = job.alloc(f"deepspeed/runtime/zero/partition_parameters.py:767 wait; {MODULE}")
    other = job.alloc(f"deepspeed/runtime/zero/partition_parameters.py:767 wait; {MODULE}")
    start = job.alloc(f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}")
    job.free(block, other, start)
    job.free(job.alloc(STEP))
    known = {"bytes": 4 * MiB, "parameter": "w"}
    gathers = [
        {"address": job.addresses[block], "kind": "prefetch", "time_us": START + 1, "released_us": None, **known},
        {"address": job.addresses[other], "kind": "demand", "time_us": START + 3, "released_us": START + 3, **known},
    ]
    snapshot = recorded(tmp_path, job, gathers=gathers)
    attribution = snapshot.attribution()
    assert [attribution.categories[code] for code in attribution.category[:2]] == ["param.prefetched", "param.retained"]
    assert {CONFIDENCE[code] for code in attribution.confidence[:2]} == {"recorded"}


def test_a_gather_that_outlives_its_release_in_a_forward_cut_short_is_retained(tmp_path: Path) -> None:
    job = Job()
    wait = f"deepspeed/runtime/zero/partition_parameters.py:767 wait; {MODULE}"
    blocks = [job.alloc(wait) for _ in range(3)]
    job.alloc(MODULE)
    job.free(blocks[1])
    job.builder.oom(1 << 40, stack=None)
    known = {"bytes": 4 * MiB, "parameter": "w", "kind": "demand"}
    gathers = [
        {"address": job.addresses[block], "time_us": START + 2 * block + 1, "released_us": released, **known}
        for block, released in zip(blocks, (START + 5, START + 10, None), strict=True)
    ]
    attribution = recorded(tmp_path, job, gathers=gathers).attribution()
    found = [attribution.categories[code] for code in attribution.category[:3]]
    assert found == ["param.retained", "param.gathered", "param.gathered"]


def test_an_address_that_is_used_again_is_another_block(tmp_path: Path) -> None:
    """Marks of a block that is gone, and of addresses at which nothing is, say nothing of the one that is there."""
    job = Job()
    block = job.alloc("train.py:3 <module>")
    job.free(block)
    job.builder.alloc(job.addresses[block], 4 * MiB, stack="train.py:3 <module>")
    known = {"bytes": 4 * MiB, "parameter": "w", "kind": "demand", "released_us": None}
    where = [(job.addresses[block], START + 1), (job.addresses[block] + 512, START + 4), (1, START), (1 << 61, START)]
    gathers = [{"address": address, "time_us": time_us, **known} for address, time_us in where]
    attribution = recorded(tmp_path, job, gathers=gathers).attribution()
    named = [attribution.categories[code] for code in attribution.category.tolist()]
    assert named.count("param.gathered") == 1
    assert end_rows(recorded(tmp_path, job, gathers=gathers))[job.addresses[block]].category != "param.gathered"


def test_versions_are_exact(tmp_path: Path) -> None:
    snapshot = recorded(tmp_path, Job(SnapshotBuilder().alloc(0, 4 * MiB)), torch="2.11.0+cu130", deepspeed="0.18.9")
    assert str(snapshot.data.torch) == "torch 2.11"
    assert (snapshot.data.torch.at_least, snapshot.data.torch.at_most) == ("2.11", "2.11")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"roles": 3}',
        b'{"memtrace": 1, "roles": [1, null, {"role": 3}], "phases": {"a": 1}, "gathers": [{"kind": "x"}]}',
        b'{"memtrace": 1, "torch": ["x"], "zero": 9, "world": -1, "device": []}',
        b'{"memtrace": 1, "roles": [{"role": "param", "name": "w", "address": 1e400, "bytes": 5}]}',
        b'{"memtrace": 1, "phases": [{"phase": "forward", "step": 1, "begin_us": 9, "end_us": 3}]}',
        b'{"memtrace": 1, "gathers": [{"kind": "demand", "address": 99999999999999999999, "bytes": 1, "time_us": 1}]}',
        b'{"memtrace": 1, "stats": [], "stats_start": 7, "other_devices": {"a": 1, "0": {}}, "segments_start": {}}',
        b'{"memtrace": 1, "device": {"index": -1, "name": []}, "max_entries": "x", "rank": 1e9, "other_devices": [1]}',
        b'{"memtrace": 1, "segments_start": [{"total_size": 1, "blocks": [3, null]}], "stats": {"a": {"b": 1}}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_sidecar_that_is_not_one_harms_nothing(content: bytes, tmp_path: Path) -> None:
    job = Job()
    job.alloc("train.py:3 <module>")
    path = job.builder.pickle(tmp_path / "x.pickle")
    (tmp_path / "x.json").write_bytes(content)
    snapshot = memtrace.load(path, cache=False)
    assert [row.category for row in snapshot.blame().rows] == ["unknown"]
    assert not snapshot.verify_recorded().failed


def test_entries_of_the_wrong_form_are_counted(tmp_path: Path) -> None:
    job = Job()
    job.alloc("train.py:3 <module>")
    snapshot = recorded(tmp_path, job, roles=[{"role": "param"}, 5])
    assert [notice.code for notice in snapshot.notices() if notice.code == "sidecar-entries"] == ["sidecar-entries"]


@pytest.mark.parametrize("name", ["rank0003.pickle", "rank0003.pickle.xz", "rank0003.pickle.zst", "rank0003.pickle.gz"])
def test_its_name_is_the_snapshots(name: str, tmp_path: Path) -> None:
    assert sidecar_path(tmp_path / name) == tmp_path / "rank0003.json"
    assert read_sidecar(tmp_path / name) is None
