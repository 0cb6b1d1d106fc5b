"""Marks of phases: nesting, steps, what an exception leaves open."""

from __future__ import annotations

import threading

import pytest

from memtrace.record.inside import notes
from memtrace.record.inside.phases import PhaseLog


def noted(log: PhaseLog) -> list[tuple[str, int | None]]:
    return [(note.phase, note.step) for note in log.notes]


def whole_step(log: PhaseLog) -> None:
    for phase in ("forward", "backward", "step"):
        log.end(log.begin(phase, "torch"))
    log.step_done()


def test_steps_are_counted_from_the_optimizer() -> None:
    steps: list[int] = []
    log = PhaseLog(steps.append)
    log.end(log.begin("init", "deepspeed"))
    for _ in range(3):
        whole_step(log)
    per_step = [[("forward", step), ("backward", step), ("step", step)] for step in range(3)]
    assert noted(log) == [("init", None), *per_step[0], *per_step[1], *per_step[2]]
    assert (steps, log.steps_done) == ([0, 1, 2], 3)


def test_accumulation_and_several_optimizers_share_a_step() -> None:
    steps: list[int] = []
    log = PhaseLog(steps.append)
    for _ in range(2):
        log.end(log.begin("forward", "torch"))
        log.end(log.begin("backward", "torch"))
    for _ in range(2):
        log.end(log.begin("step", "torch"))
        log.step_done()
    assert {step for _, step in noted(log)} == {0}
    assert steps == [0]


def test_what_says_nothing_new_is_not_noted() -> None:
    log = PhaseLog()
    outer = log.begin("forward", "deepspeed")
    assert log.begin("forward", "torch") is None
    log.end(outer)
    outer = log.begin("backward", "deepspeed")
    assert log.begin("forward", "torch") is None, "recomputation is a part of backward"
    log.end(outer)
    assert noted(log) == [("forward", 0), ("backward", 0)]


def test_a_closure_runs_inside_the_optimizers_step() -> None:
    log = PhaseLog()
    for _ in range(2):
        step = log.begin("step", "torch")
        for _ in range(2):
            log.end(log.begin("forward", "torch"))
            log.end(log.begin("backward", "torch"))
        log.end(step)
        log.step_done()
    calls = [("forward", 0), ("backward", 0)] * 2
    assert noted(log) == [*calls, ("step", 0), *((phase, 1) for phase, _ in calls), ("step", 1)]
    assert log.steps_done == 2


def test_an_exception_leaves_nothing_open() -> None:
    log = PhaseLog()
    forward = log.begin("forward", "torch")
    log.begin("checkpoint", "torch")
    log.end(forward)
    assert log.current is None
    log.begin("step", "torch", owner=7)
    again = log.begin("step", "torch", owner=7)
    assert again is not None
    log.end(again)
    assert log.current is None
    assert noted(log) == [("checkpoint", 0), ("forward", 0), ("step", 0), ("step", 0)]


def test_other_threads_do_not_mix_in() -> None:
    log = PhaseLog()
    forward = log.begin("forward", "torch")
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(log.begin("backward", "torch")))
    thread.start()
    thread.join()
    assert found == [None]
    log.end(forward)


def test_torch_is_told() -> None:
    texts: list[str] = []
    ranges: list[str] = []

    class Range:
        def __init__(self, text: str) -> None:
            ranges.append(text)

        def __exit__(self, *_: object) -> None:
            ranges.append("end")

    log = PhaseLog()
    log.tell_torch(texts.append, Range)
    whole_step(log)
    log.end(log.begin("forward", "torch"))
    assert texts == [
        *("", "phase=forward;step=0", "", "phase=backward;step=0", "", "phase=step;step=0"),
        *("", "phase=forward;step=1", ""),
    ]
    assert ranges[:4] == ["memtrace: phase=forward;step=0", "end", "memtrace: phase=backward;step=0", "end"]
    assert log.text("h.0") == "module=h.0"


def test_what_is_open_at_a_dump_ends_there() -> None:
    log = PhaseLog()
    log.begin("backward", "torch")
    (note,) = log.so_far()
    assert (note.phase, note.step) == ("backward", 0)
    assert note.begin_us <= note.end_us
    assert not log.notes


def test_a_broken_torch_does_not_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "NOTES", [])
    log = PhaseLog(lambda number: 1 / number)
    log.tell_torch(lambda text: None, None)
    log._set_text = lambda text: 1 / 0
    log.end(log.begin("forward", "torch"))
    log.step_done()
    assert len(notes.NOTES) >= 2
