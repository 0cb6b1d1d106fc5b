"""Stacks of a dry run are those of a run without us."""

from __future__ import annotations

from typing import Any

from memtrace.dryrun.inside import frames

OURS = "/cache/memtrace_inside/dryrun/"


def stack(*places: str) -> list[dict[str, Any]]:
    return [dict(zip(("filename", "name", "line"), (*place.split(":"), 1), strict=True)) for place in places]


def cleaned(*places: str) -> list[str]:
    frames_of_an_event = stack(*places)
    snapshot = {"device_traces": [[{"frames": frames_of_an_event}]], "segments": []}
    frames.clean(snapshot, OURS)
    return [f"{frame['filename']}:{frame['name']}" for frame in frames_of_an_event]


def test_our_frames_go_and_the_call_of_the_operator_with_them() -> None:
    assert cleaned(
        "torch/_ops.py:__call__", f"{OURS}values.py:call", f"{OURS}values.py:__torch_dispatch__", "train.py:forward"
    ) == ["train.py:forward"]


def test_what_some_releases_put_around_a_mode_goes_too() -> None:
    assert cleaned(
        "torch/_ops.py:__call__", f"{OURS}values.py:__torch_dispatch__", "torch/_dynamo/eval_frame.py:_fn",
        "torch/_compile.py:inner", "train.py:forward", "torch/_dynamo/eval_frame.py:_fn",
    ) == ["train.py:forward", "torch/_dynamo/eval_frame.py:_fn"]  # fmt: skip


def test_the_jobs_own_calls_of_operators_stay() -> None:
    places = ["torch/_ops.py:__call__", "train.py:forward"]
    assert cleaned(*places) == places


def test_blocks_and_segments_and_a_list_that_is_shared() -> None:
    shared = stack(f"{OURS}values.py:call", "train.py:forward")
    snapshot = {
        "segments": [{"frames": shared, "blocks": [{"frames": shared, "history": [{"frames": stack(f"{OURS}a:b")}]}]}],
        "device_traces": [[{"frames": shared}, {"frames": []}]],
    }
    frames.clean(snapshot, OURS)
    assert [frame["filename"] for frame in shared] == ["train.py"]
    assert snapshot["segments"][0]["blocks"][0]["history"][0]["frames"] == []  # type: ignore[index]
