"""Parsing: every release's keys, odd but usable files, and wrong values said with their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from builders import SnapshotBuilder

from memtrace.errors import NotASnapshotError
from memtrace.io.parse import parse
from memtrace.model import Action, SnapshotData

MiB = 1 << 20
RELEASES = ("1.13", "2.0", "2.1", "2.2", "2.3", "2.5", "2.8", "2.10", "2.11", "2.12", "2.14", "2.15")


def read(raw: Any) -> SnapshotData:
    return parse(raw, path="made", file_bytes=1)


def small(torch: str = "2.11") -> Any:
    return SnapshotBuilder(torch=torch).alloc(0x7F0000000000, 4 * MiB, stack="f;g").alloc(0x7F1000000000, 512).build()


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_parses_to_the_same_blocks(release: str) -> None:
    data = read(small(release))
    assert sorted(data.blocks.requested[data.blocks.state == 1].tolist()) == [512, 4 * MiB]
    assert data.devices == (0,)
    assert not [notice for notice in data.notices if notice.code.startswith("unknown")]


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_is_in_the_range_inferred(release: str) -> None:
    found = read(small(release)).torch
    assert found.at_least is not None
    assert version(found.at_least) <= version(release)
    assert found.at_most is None or version(release) <= version(found.at_most)


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("1.13", "torch 1.13"),
        ("2.0", "torch 2.0"),
        ("2.1", "torch 2.1"),
        ("2.2", "torch 2.2"),
        ("2.11", "torch 2.10-2.11"),
        ("2.12", "torch 2.12"),
        ("2.14", "torch 2.14 or later"),
    ],
)
def test_the_range_is_as_narrow_as_the_keys_allow(release: str, expected: str) -> None:
    assert str(read(small(release)).torch) == expected


def test_stacks_are_shared_and_kept() -> None:
    data = read(small())
    (alloc,) = [row for row in range(len(data.traces[0])) if data.traces[0].size[row] == 4 * MiB
                and data.traces[0].action[row] == Action.ALLOC]  # fmt: skip
    frames = data.stacks.frames(int(data.traces[0].stack[alloc]))
    assert [frame.name for frame in frames] == ["f", "g"]


def test_the_list_of_memory_snapshot_is_a_snapshot_without_a_trace() -> None:
    data = read(small()["segments"])
    assert len(data.traces[0]) == 0
    assert "no-trace" in {notice.code for notice in data.notices}


def test_unknown_keys_and_actions_are_one_notice_each() -> None:
    raw = small()
    raw["new_part"] = {"anything": [1, 2]}
    for event in raw["device_traces"][0]:
        event["colour"] = "blue"
    raw["device_traces"][0].append({"action": "teleport", "addr": 1, "size": 2, "stream": 0, "time_us": 2**60})
    data = read(raw)
    assert [notice.code for notice in data.notices].count("unknown-keys") == 1
    assert [notice.code for notice in data.notices].count("unknown-actions") == 1
    assert data.actions[-1] == "teleport"


def test_a_clock_that_goes_back_is_put_in_order() -> None:
    raw = small()
    events = raw["device_traces"][0]
    for index, event in enumerate(events):
        event["time_us"] = 1000 + index
    raw["device_traces"][0] = events[2:] + events[:2]
    data = read(raw)
    assert data.traces[0].time_us is not None
    assert data.traces[0].time_us.tolist() == sorted(event["time_us"] for event in events)
    assert "order-broken" in {notice.code for notice in data.notices}


def test_a_line_number_of_minus_one_unsigned_is_no_line() -> None:
    raw = SnapshotBuilder().alloc(0x7F0000000000, 512, stack="f").build()
    raw["device_traces"][0][-1]["frames"] = [{"filename": "a.py", "line": 2**64 - 1, "name": "f"}]
    assert 0 in read(raw).stacks.line.tolist()


def breakages() -> list[tuple[str, Any]]:
    def event(**changes: Any) -> Any:
        return lambda raw: raw["device_traces"][0][1].update(changes)

    def block(**changes: Any) -> Any:
        return lambda raw: raw["segments"][0]["blocks"][0].update(changes)

    def segment(**changes: Any) -> Any:
        return lambda raw: raw["segments"][0].update(changes)

    def top(**changes: Any) -> Any:
        return lambda raw: raw.update(changes)

    return [
        *[(f"event {key} {value!r}"[:40], event(**{key: value}))
          for key in ("addr", "size", "stream", "time_us") for value in (-1, 2**63, 1.5, "1", None, True, [])],
        *[(f"block {key} {value!r}"[:40], block(**{key: value}))
          for key in ("address", "size") for value in (-1, 2**63, "1", None, True)],
        *[(f"segment {key} {value!r}"[:40], segment(**{key: value}))
          for key in ("address", "total_size", "stream", "device") for value in (-1, 2**63, "1", None, True)],
        ("action", event(action=7)),
        ("action list", event(action=["alloc"])),
        ("frames", event(frames="f")),
        ("frame", event(frames=["f"])),
        ("frame key types", event(frames=[{"filename": 1, "line": 2, "name": 3}])),
        ("context", event(compile_context=3)),
        ("state", block(state="busy")),
        ("state type", block(state=[])),
        ("requested", block(requested_size=-5)),
        ("type", segment(segment_type="huge")),
        ("pool", segment(segment_pool_id=(1, 2, 3))),
        ("pool types", segment(segment_pool_id=("a", 2))),
        ("blocks", segment(blocks=7)),
        ("blocks of blocks", segment(blocks=[[]])),
        ("device far away", segment(device=2**40)),
        ("traces", top(device_traces=7)),
        ("traces of traces", top(device_traces=[7])),
        ("events", top(device_traces=[[7]])),
        ("segments", top(segments="x")),
        ("segment", top(segments=["x"])),
        ("settings", top(allocator_settings=[])),
        ("annotations", top(external_annotations=[{"name": 1}])),
        ("huge sizes", lambda raw: [item.update(size=2**62) for item in raw["device_traces"][0]]),
        ("end of address space", event(addr=2**63 - 1, size=2**40)),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "breakage"), breakages(), ids=[name for name, _ in breakages()])
def test_wrong_values_are_refused_with_a_sentence(name: str, breakage: Any) -> None:
    raw = copy.deepcopy(small())
    breakage(raw)
    with pytest.raises(NotASnapshotError) as caught:
        read(raw)
    assert caught.value.message
    assert caught.value.exit_code == 3


def test_overlaps_are_refused() -> None:
    raw = small()
    raw["segments"][0]["blocks"][0]["size"] += 512
    with pytest.raises(NotASnapshotError, match=r"overlap|outside"):
        read(raw)
    raw = small()
    raw["segments"].append(copy.deepcopy(raw["segments"][0]))
    with pytest.raises(NotASnapshotError, match="overlap"):
        read(raw)


def test_shared_lists_cannot_make_a_small_file_endless() -> None:
    raw = small()
    raw["device_traces"] = [raw["device_traces"][0]] * 100
    with pytest.raises(NotASnapshotError, match="share"):
        read(raw)
    raw = small()
    raw["segments"] = [{**raw["segments"][0], "address": index << 40} for index in range(1000)]
    with pytest.raises(NotASnapshotError, match="share"):
        read(raw)


def test_one_event_referenced_a_million_times_is_refused() -> None:
    raw = small()
    raw["device_traces"][0] += [raw["device_traces"][0][-1]] * 200_000
    with pytest.raises(NotASnapshotError, match="again and again"):
        read(raw)


def test_small_files_cannot_make_many_rows() -> None:
    """One dict referenced from many lists, a million empty traces, long C++ stacks joined to long Python ones."""
    raw = small()
    event, block = raw["device_traces"][0][-1], dict(raw["segments"][0]["blocks"][0])
    del block["address"]
    many = [{**raw["segments"][0], "address": index << 44, "blocks": [block] * 50_000} for index in range(10)]
    deep = [{"filename": "a.py", "line": 1, "name": "f"}] * 99_000
    long = [{**event, "frames": deep, "cpp_frames": [str(index)]} for index in range(1000)]
    for changed in (
        {"device_traces": [[]] * 1_000_000},
        {"device_traces": [[event] * 50_000 for _ in range(10)]},
        {"segments": many},
        {"device_traces": [long]},
    ):
        with pytest.raises(NotASnapshotError):
            read({**raw, **changed})


def test_a_container_that_holds_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for raw in (loop, {"segments": loop}, {"segments": [], "device_traces": loop}):
        with pytest.raises(NotASnapshotError):
            read(raw)
    raw = small()
    raw["allocator_settings"]["itself"] = raw
    assert read(raw).devices == (0,)


@pytest.mark.parametrize("raw", [7, "text", None, {}, {"a": 1}, [1, 2], [{"a": 1}]])
def test_other_pickles_are_not_snapshots(raw: Any) -> None:
    with pytest.raises(NotASnapshotError):
        read(raw)


def test_an_empty_snapshot_has_no_device() -> None:
    assert read({"segments": [], "device_traces": [[], []]}).devices == ()


def test_nested_shared_containers_are_not_walked_into() -> None:
    """`x = (x, x)` sixty times has 2^60 leaves: hashing it or printing it would never end."""
    pair: object = (0, 0)
    for _ in range(60):
        pair = (pair, pair)
    for place, key in (
        (("segments", 0), "segment_type"),
        (("device_traces", 0, 1), "action"),
        (("device_traces", 0, 1), "pool_id"),
    ):
        raw = copy.deepcopy(small())
        target: Any = raw
        for step in place:
            target = target[step]
        target[key] = pair
        with pytest.raises(NotASnapshotError):
            read(raw)
    raw = copy.deepcopy(small())
    raw["segments"][0]["blocks"][0]["state"] = pair
    with pytest.raises(NotASnapshotError):
        read(raw)


def test_more_requested_than_there_is_is_refused() -> None:
    raw = copy.deepcopy(small())
    raw["segments"][0]["blocks"][0]["requested_size"] = 2**40
    with pytest.raises(NotASnapshotError):
        read(raw)
