"""The recorder's own frames are in no stack, whatever calls of the job it wraps."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import write_pickle
from recordings import fixture_names, snapshot_path
from sameness import differences

import memtrace
from memtrace.io.ours import without_recorder
from memtrace.io.read import NATIVE, read_snapshot
from memtrace.io.source import open_pickle
from memtrace.model import SnapshotData, StackTable, StringTable
from memtrace.places import is_recorders

OURS = (
    "/job/.memtrace/20251202-1450-train/.bootstrap/memtrace_inside/gathers.py",
    "/opt/env/lib/python3.11/site-packages/memtrace/record/inside/roots.py",
    "C:\\job\\.memtrace\\x\\.bootstrap\\memtrace_inside\\deepspeed_hooks.py",
)
END_TO_END = ("gpt2-zero2", "llama-fsdp2", "llama-lbfgs", "mlp-adamw-cpp-stacks")


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        *((path, True) for path in OURS),
        ("memtrace_inside/phases.py", True),
        ("/opt/py/site-packages/memtrace/record/launch.py", False),
        ("/home/me/my_memtrace_inside/model.py", False),
        ("/home/me/memtrace_inside.py", False),
        ("", False),
    ],
)
def test_which_files_are_the_recorders(path: str, is_one: bool) -> None:
    assert is_recorders(path) is is_one


def wrapped(data: SnapshotData, seed: int) -> SnapshotData:
    """The same with frames of ours between those of every stack, and stacks that differ in these alone."""
    chance, stacks = random.Random(seed), data.stacks
    strings = (*data.strings.values, *OURS, "wrapper")
    first, name = stacks.frame_count, len(strings) - 1
    table = replace(
        stacks,
        strings=StringTable(strings),
        filename=np.append(stacks.filename, [len(data.strings) + n for n in range(len(OURS))]).astype(np.int32),
        line=np.append(stacks.line, [7, 8, 9]).astype(np.int32),
        name=np.append(stacks.name, [name] * len(OURS)).astype(np.int32),
    )
    rows = []
    for stack in list(stacks) * 2:
        ids = stack.tolist()
        for _ in range(chance.randrange(4)):
            ids.insert(chance.randrange(len(ids) + 1), first + chance.randrange(len(OURS)))
        rows.append(ids)
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in rows])]).astype(np.int64)
    frames = np.array([frame for ids in rows for frame in ids], np.int32)
    table = replace(table, offsets=offsets, frame_ids=frames)

    def either(column):
        copy = np.array([chance.randrange(2) for _ in range(len(column))], np.int32) * len(stacks)
        return np.where(column < 0, column, column + copy).astype(np.int32)

    return replace(
        data,
        stacks=table,
        strings=table.strings,
        traces=tuple(replace(trace, stack=either(trace.stack)) for trace in data.traces),
        segments=replace(data.segments, stack=either(data.segments.stack)),
        blocks=replace(data.blocks, stack=either(data.blocks.stack)),
    )


def frames(stacks: StackTable, column) -> list[tuple[object, ...]]:
    known = {stack: stacks.frames(stack) for stack in np.unique(column).tolist()}
    return [known[stack] for stack in column.tolist()]


@pytest.mark.parametrize("name", fixture_names())
def test_stacks_are_as_if_we_had_not_been_there(name: str) -> None:
    plain = read_snapshot(snapshot_path(name))
    cleaned = without_recorder(wrapped(plain, seed=3))
    for before, after in zip(plain.traces, cleaned.traces, strict=True):
        assert frames(plain.stacks, before.stack) == frames(cleaned.stacks, after.stack)
    assert frames(plain.stacks, plain.blocks.stack) == frames(cleaned.stacks, cleaned.blocks.stack)
    distinct = {tuple(stack.tolist()) for stack in cleaned.stacks}
    assert len(distinct) == len(cleaned.stacks)
    assert without_recorder(plain) is plain
    one, other = memtrace.Snapshot(plain), memtrace.Snapshot(cleaned)
    for device in one.devices:
        assert named(one, device) == named(other, device)
        assert one.timeline(device).phase.tolist() == other.timeline(device).phase.tolist()
        assert one.timeline(device).start.tolist() == other.timeline(device).start.tolist()


def named(snapshot: memtrace.Snapshot, device: int) -> list[str]:
    attribution = snapshot.attribution(device)
    return [attribution.categories[code] for code in attribution.category.tolist()]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", END_TO_END)
def test_both_readers_leave_them_out(name: str, native: bool, tmp_path: Path) -> None:
    if native and not NATIVE:
        pytest.skip("the native reader is not built")
    with open_pickle(snapshot_path(name)) as stream:
        raw = pickle.load(stream.reader)
    chance, seen = random.Random(5), set()
    for event in (event for trace in raw["device_traces"] for event in trace):
        stack = event.get("frames")
        if stack and id(stack) not in seen:
            seen.add(id(stack))
            ours = {"filename": chance.choice(OURS), "line": chance.randrange(99), "name": "wrapper"}
            stack.insert(chance.randrange(len(stack) + 1), ours)
    data = read_snapshot(write_pickle(raw, tmp_path / "x.pickle"), native=native)
    plain = read_snapshot(snapshot_path(name), native=native)
    assert not any(is_recorders(data.strings[file]) for file in data.stacks.filename[data.stacks.frame_ids].tolist())
    assert frames(plain.stacks, plain.traces[0].stack) == frames(data.stacks, data.traces[0].stack)
    assert named(memtrace.Snapshot(plain), 0) == named(memtrace.Snapshot(data), 0)
    if native:
        assert not [*differences(data, read_snapshot(tmp_path / "x.pickle", native=False))]


def test_a_stack_of_ours_alone_has_no_frame(tmp_path: Path) -> None:
    from builders import SnapshotBuilder

    builder = SnapshotBuilder().alloc(0x7F0000000000, 4096, stack=f"{OURS[0]}:3 wrapper")
    snapshot = memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False)
    (row,) = snapshot.blame(by="block").rows
    assert snapshot.blame(by="block").frames(row) == ()
    assert snapshot.info().stacks.none == 1
