"""The builder writes what torch writes: keys by version, shared stacks, segments that agree with the events."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from builders import SnapshotBuilder, frames_of
from oracle import block_map, replay, segments_of

MiB = 1 << 20


def test_alloc_makes_its_segment() -> None:
    snapshot = SnapshotBuilder().alloc(0x1000, 600, stack="f;g").build()
    (segment,) = snapshot["segments"]
    assert [event["action"] for event in snapshot["device_traces"][0]] == ["segment_alloc", "alloc"]
    assert (segment["address"], segment["total_size"], segment["segment_type"]) == (0x1000, 2 * MiB, "small")
    assert (segment["allocated_size"], segment["active_size"], segment["requested_size"]) == (1024, 1024, 600)
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    assert [frame["name"] for frame in segment["blocks"][0]["frames"]] == ["f", "g"]


@pytest.mark.parametrize(("size", "segment"), [(MiB, 2), (MiB + 1, 20), (10 * MiB - 512, 20), (11 * MiB, 12)])
def test_size_of_the_segment_made(size: int, segment: int) -> None:
    assert SnapshotBuilder().alloc(0, size).build()["segments"][0]["total_size"] == segment * MiB


def test_expandable_alloc_maps_handles() -> None:
    (segment,) = SnapshotBuilder().settings(expandable_segments=True).alloc(0, 21 * MiB).build()["segments"]
    assert (segment["total_size"], segment["is_expandable"]) == (40 * MiB, True)


def test_final_segments_agree_with_the_events() -> None:
    builder = SnapshotBuilder().alloc(0, 600).alloc(1024, 512, stream=0).free(0).alloc(4 * MiB, 5 * MiB, stream=3)
    snapshot = builder.free_requested(4 * MiB).oom(MiB, device_free=7).snapshot_event().build()
    assert block_map(replay(snapshot).segments()) == block_map(segments_of(snapshot))
    assert snapshot["device_traces"][0][-1]["size"] == 512 + 5 * MiB
    assert snapshot["device_traces"][0][-2]["device_free"] == 7
    assert "addr" not in snapshot["device_traces"][0][-2]


def test_text_of_a_stack() -> None:
    assert frames_of("at::add(at::Tensor const&);C:/a b.py:12 <lambda>") == [
        {"name": "at::add(at::Tensor const&)", "filename": "model.py", "line": 1},
        {"name": "<lambda>", "filename": "C:/a b.py", "line": 12},
    ]
    assert frames_of(None) == frames_of("") == []


def test_stacks_are_shared_as_torch_shares_them() -> None:
    snapshot = SnapshotBuilder().alloc(0, 20 * MiB).free_requested(0, stack="del").free_completed(0).build()
    mapped, allocated, requested, completed = snapshot["device_traces"][0]
    assert mapped["frames"] is allocated["frames"] is snapshot["segments"][0]["frames"]
    assert requested["frames"] is completed["frames"]
    assert requested["frames"][0]["name"] == "del"


@pytest.mark.parametrize(("context", "events", "blocks"), [("all", 1, 1), ("state", None, 1), (None, None, 0)])
def test_context_decides_where_stacks_are(context: str | None, events: int | None, blocks: int) -> None:
    snapshot = SnapshotBuilder(context=context).alloc(0, 512).build()
    frames = snapshot["device_traces"][0][1].get("frames")
    assert (frames if frames is None else len(frames)) == events
    assert len(snapshot["segments"][0]["blocks"][0]["frames"]) == blocks


TOP = {"segments", "device_traces"}
EVENT = {"action", "addr", "size", "stream", "frames"}


@pytest.mark.parametrize(
    ("torch", "top", "event"),
    [
        ("2.0", TOP, EVENT),
        ("2.1", TOP, EVENT),
        ("2.2", TOP, EVENT | {"time_us"}),
        ("2.3", TOP | {"allocator_settings"}, EVENT | {"time_us"}),
        ("2.5", TOP | {"allocator_settings", "external_annotations"}, EVENT | {"time_us"}),
        ("2.8", TOP | {"allocator_settings", "external_annotations"}, EVENT | {"time_us", "compile_context"}),
        (
            "2.11",
            TOP | {"allocator_settings", "external_annotations"},
            EVENT | {"time_us", "compile_context", "user_metadata"},
        ),
        (
            "2.12",
            TOP | {"allocator_settings", "external_annotations"},
            EVENT | {"time_us", "compile_context", "user_metadata", "pool_id"},
        ),
        (
            "2.14",
            TOP | {"allocator_settings", "external_annotations", "host_segments", "host_traces"},
            EVENT | {"time_us", "compile_context", "user_metadata", "pool_id"},
        ),
    ],
)
def test_keys_by_version(torch: str, top: set[str], event: set[str]) -> None:
    snapshot = SnapshotBuilder(torch=torch).alloc(0, 512, internal_metadata="x").build()
    assert set(snapshot) == top
    assert set(snapshot["device_traces"][0][1]) == event
    assert ("history" in snapshot["segments"][0]["blocks"][0]) == (torch == "2.0")
    assert ("address" in snapshot["segments"][0]["blocks"][0]) == (torch != "2.0")


def test_settings_by_version() -> None:
    assert [len(SnapshotBuilder(torch=torch).build()["allocator_settings"]) for torch in ("2.3", "2.9", "2.13")] == [
        8,
        9,
        11,
    ]
    settings = SnapshotBuilder().settings(roundup_power2_divisions=4).build()["allocator_settings"]
    assert set(settings["roundup_power2_divisions"].values()) == {4}


def test_the_oldest_version_is_a_list_with_history() -> None:
    (segment,) = SnapshotBuilder(torch="1.13").alloc(0, 600, stack="f").build()
    block, free = segment["blocks"]
    assert (block["history"][0]["real_size"], block["history"][0]["frames"][0]["name"]) == (600, "f")
    assert "requested_size" not in block
    assert free == {"size": 2 * MiB - 1024, "state": "inactive"}
    assert "requested_size" not in segment


def test_internal_metadata_is_written_only_where_given() -> None:
    mapped, allocated = SnapshotBuilder(torch="2.15").alloc(0, 512, internal_metadata="x").build()["device_traces"][0]
    assert ("internal_metadata" in mapped, allocated["internal_metadata"]) == (False, "x")


def test_private_pool() -> None:
    snapshot = SnapshotBuilder(torch="2.12").segment(0, 2 * MiB, pool=(1, 0)).alloc(0, 512).free(0).build()
    assert snapshot["segments"][0]["segment_pool_id"] == (1, 0)
    assert {event["pool_id"] for event in snapshot["device_traces"][0]} == {(1, 0)}


def test_clock_and_annotations() -> None:
    builder = SnapshotBuilder().time(100).annotation("step", "START").alloc(0, 512).time(200).free(0)
    snapshot = builder.annotation("step", "END").build()
    assert [event["time_us"] for event in snapshot["device_traces"][0]] == [101, 102, 200, 201]
    assert [(note["stage"], note["time_us"]) for note in snapshot["external_annotations"]] == [
        ("START", 100),
        ("END", 202),
    ]


def test_recording_that_began_late() -> None:
    snapshot = SnapshotBuilder().alloc(0, 512).start_recording().alloc(512, 512).free(0).build()
    assert [event["action"] for event in snapshot["device_traces"][0]] == ["alloc", "free_requested", "free_completed"]
    assert [block["state"] for block in snapshot["segments"][0]["blocks"]] == [
        "inactive",
        "active_allocated",
        "inactive",
    ]
    assert snapshot["device_traces"][0][1]["frames"] == []


def test_history_only() -> None:
    snapshot = SnapshotBuilder().alloc(0, 512).build(segments=False)
    assert (snapshot["segments"], len(snapshot["device_traces"][0])) == ([], 2)


def test_devices_join() -> None:
    first, third = SnapshotBuilder(device=0).alloc(0, 512), SnapshotBuilder(device=2).alloc(0, 512).alloc(512, 512)
    snapshot = SnapshotBuilder.join(first, third).build()
    assert [len(trace) for trace in snapshot["device_traces"]] == [2, 0, 3]
    assert [segment["device"] for segment in snapshot["segments"]] == [0, 2]
    with pytest.raises(ValueError, match="two builders of one device"):
        SnapshotBuilder().join(SnapshotBuilder())


def test_give_back_memory() -> None:
    snapshot = SnapshotBuilder().alloc(0, 512).free(0).segment_free(0).map(0, 20 * MiB).unmap(0, 20 * MiB).build()
    assert snapshot["segments"] == []
    assert replay(snapshot).now["reserved_bytes.all"] == 0


def test_pinned_host_memory() -> None:
    builder = SnapshotBuilder(torch="2.14").host_alloc(0x100, 4096).host_alloc(0x200, 512).host_free(0x100)
    snapshot = builder.build()
    assert [segment["address"] for segment in snapshot["host_segments"]] == [0x200]
    assert [event["action"] for event in snapshot["host_traces"]][-1] == "segment_free"
    assert snapshot["device_traces"] == [[]]


def test_what_the_allocator_cannot_do_is_refused() -> None:
    builder = SnapshotBuilder().alloc(0x1000, 2048)
    with pytest.raises(ValueError, match="alloc at 0x1200 is not the start of a free block"):
        builder.alloc(0x1200, 512)
    with pytest.raises(ValueError, match="segment_alloc at 0x0 overlaps"):
        builder.segment(0, 2 * MiB)
    builder.free(0x1000)
    with pytest.raises(ValueError, match="there is no live block at 0x1000"):
        builder.free(0x1000)


def test_wrong_on_purpose() -> None:
    snapshot = SnapshotBuilder().event("free_completed", addr=0, size=512, stream=0).build()
    assert snapshot["device_traces"][0][0]["action"] == "free_completed"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle(tmp_path: Path, protocol: int) -> None:
    builder = SnapshotBuilder().alloc(0, 512)
    path = builder.pickle(tmp_path / "snapshot.pickle", protocol)
    assert pickle.loads(path.read_bytes()) == builder.build()
