"""Whatever stacks a file has: every byte has one category, the rows sum, phases cover the trace, nothing breaks."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import cut_front, legal_snapshots, ring

import memtrace
from memtrace.analysis.blame import BYS
from memtrace.attribution.rules import MATCHED
from memtrace.attribution.rules.cpp import CPP

PACKAGES = "/opt/env/lib/python3.11/site-packages/"
OWN = [
    ("train.py", "<module>"),
    ("/home/me/train_stage3.py", "forward"),
    ("", ""),
    ("/", "step"),
    ("C:\\x\\torch\\optim\\adam.py", "step"),
    ("a\x1b]52;c;x\x07/[/bold].py", "back\u202eward"),
    ("<frozen importlib>", "_call"),
    ("\ud800.py", "wait"),
    ("model.py", "__init__"),
    ("mine.py", "hook"),
    ("??", "torch::autograd::generated::MmBackward0::apply()"),
    ("x.cpp", "at::cuda::setWorkspaceForHandle(cublasContext*)"),
    ("x.so.1", "at::autocast::cached_cast(c10::ScalarType)"),
]
"""What nobody's rule means, and what only looks like it."""
LIBRARY = sorted(
    {
        (PACKAGES + rule.where.file.replace("*", "x"), name)
        for rule in MATCHED
        if rule.where.file != CPP
        for name in rule.where.names
    }
)
FRAMES = st.builds(
    lambda place, line: {"filename": place[0], "name": place[1], "line": line},
    st.sampled_from(OWN + LIBRARY),
    st.sampled_from([0, 1, 317, 362, 393, 415, 460, 624, 965, 1035, 2**31, 2**64 - 1]),
)
STACKS = st.lists(st.lists(FRAMES, max_size=7), min_size=1, max_size=12)
METADATA = st.sampled_from(["", "step=1;phase=forward", "phase=backward", "step=99999999999;phase=step", "\x1b[0m"])


def dressed(raw: Any, stacks: list[list[dict[str, Any]]], metadata: list[str], seed: int) -> Any:
    """The snapshot with other stacks and texts; an allocation and its block keep one."""
    rng = random.Random(seed)
    of_address: dict[int, list[dict[str, Any]]] = {}
    for trace in raw["device_traces"]:
        for event in trace:
            if event["action"] in ("alloc", "segment_alloc", "segment_map") or event.get("addr") not in of_address:
                of_address[event.get("addr", 0)] = rng.choice(stacks)
            if "frames" in event:
                event["frames"] = of_address[event.get("addr", 0)] if rng.random() < 0.8 else rng.choice(stacks)
            if "user_metadata" in event:
                event["user_metadata"] = rng.choice(metadata)
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            if block.get("frames") and block.get("address") in of_address:
                block["frames"] = of_address[block["address"]]
    times = [event["time_us"] for trace in raw["device_traces"] for event in trace if "time_us" in event] or [0]
    names = ["Optimizer.step#A.step", "ProfilerStep#2", "phase=eval", "FSDP::x", "phase=forward;step=3"]
    raw["external_annotations"] = sorted(
        (
            {
                "stage": rng.choice(["START", "END"]),
                "name": rng.choice(names),
                "device": 0,
                "time_us": rng.choice(times),
            }
            for _ in range(rng.randrange(8))
        ),
        key=lambda annotation: annotation["time_us"],
    )
    return raw


@settings(max_examples=150)
@given(
    raw=legal_snapshots(120),
    stacks=STACKS,
    metadata=st.lists(METADATA, min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    part=st.sampled_from(["whole", "late", "ring"]),
)
def test_every_byte_has_one_category(
    raw: Any, stacks: list[Any], metadata: list[str], seed: int, part: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = len(raw["device_traces"][0])
    if part == "late":
        raw = cut_front(raw, events // 3)
    elif part == "ring":
        raw = ring(raw, max(events // 2, 2))
    path: Path = tmp_path_factory.mktemp("x") / "x.pickle"
    path.write_bytes(pickle.dumps(dressed(raw, stacks, metadata, seed)))
    snapshot = memtrace.load(path, cache=False)
    if not snapshot.devices:
        return
    replay, timeline, attribution = snapshot.replay(), snapshot.timeline(), snapshot.attribution()
    frames = snapshot.data.stacks.frame_count
    assert (np.diff(replay.lifetimes.born) >= 0).all(), "attribution takes blocks in the order of their birth"
    assert timeline.is_sound(len(snapshot.data.traces[0]), frames)
    assert attribution.is_sound(len(replay.lifetimes), frames)
    assert ((attribution.rule >= 0) == (attribution.reason == 0)).all()
    again = memtrace.load(path, cache=False).attribution()
    assert (again.category == attribution.category).all()
    rng = random.Random(seed)
    for event in {-1, replay.events - 1, rng.randrange(-1, max(replay.events, 1))}:
        if event >= replay.events:
            continue
        for of in ("allocated", "reserved"):
            total = int(snapshot.series(f"{of}_bytes")[event + 1])
            by_category: dict[str, int] = {}
            for by in BYS:
                blame = snapshot.blame(at=str(event), of=of, by=by) if event < 0 else snapshot.blame(event, of, by)
                assert sum(row.bytes for row in blame.rows) == blame.total_bytes == total
                assert all(
                    row.bytes >= 0 and row.label and row.category in attribution.categories for row in blame.rows
                )
                sums: dict[str, int] = {}
                for row in blame.rows:
                    sums[row.category] = sums.get(row.category, 0) + row.bytes
                if by in ("category", "block"):
                    assert by_category in ({}, sums)
                    by_category = sums
        answer = snapshot.zero(at=event) if event >= 0 else None
        if answer is not None:
            assert sum(line.measured_bytes for line in answer.lines) + answer.residual_bytes == answer.peak_bytes
        why = snapshot.why(at=event) if event >= 0 else ()
        known = sum(one.bytes for one in why)
        assert known <= int(snapshot.series("allocated_bytes")[event + 1])
    assert np.isin(attribution.confidence, [0, 1, 2, 3]).all()
