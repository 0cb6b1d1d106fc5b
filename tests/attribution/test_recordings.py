"""Attribution against what the programs themselves knew: roles of live memory, what autograd saved, phases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recordings
import truths

import memtrace
from memtrace.timeline import PHASES, Phase

TRUTHS = truths.all_truths()
SCRIPTS = {"oom", "alloc-retry", "oom-fragmented", "two-streams"}
STRESS = "stress-"
"""A script's bare tensors: nothing says what they are for."""
TWINS = ("llama-fsdp2", "llama-amp", "llama-lora", "gpt2-zero3", "mlp-adamw")
MICRO = {"zero2-accum2"}
"""Its marks count micro-batches, of which two make a step."""
UNTIMED = {"gpt2-zero3-oom", "gpt2-eval-epochs"}
"""Their marks say too little: the script ran out of memory before the first, or marks evaluation only."""
HUGE = {"gpt2-zero3-700steps"}
GiB = 1 << 30


def _pairs(*, roles: bool = False, saved: bool = False, marks: bool = False, explained: bool = False) -> list[object]:
    chosen = []
    for pair in TRUTHS:
        name = truths.name_of(pair)
        if name in HUGE or (explained and (name in SCRIPTS or name.startswith(STRESS))):
            continue
        truth = truths.truth_of(pair[1])
        timed = any("time_us" in mark for mark in truth.get("marks") or [])
        if (not roles or truth.get("roles")) and (not saved or truth.get("saved")) and (not marks or timed):
            chosen.append(pytest.param(pair, id=name))
    return chosen


@pytest.mark.parametrize("pair", _pairs(roles=True))
def test_all_memory_with_a_role_is_in_its_category(pair: tuple[Path, Path]) -> None:
    snapshot = truths.opened(pair[0])
    blocks, categories = snapshot.replay().lifetimes, truths.names_of_categories(snapshot)
    seen, wrong = 0, []
    for role in truths.roles_of(truths.name_of(pair), truths.truth_of(pair[1])):
        row = truths.block_at_end(snapshot, role.address)
        if row is None:
            wrong.append((role, "no block"))
            continue
        seen += 1
        before = blocks.born[row] < 0 and categories[row] == "prior"
        if categories[row] not in role.right and not before:
            wrong.append((role, str(categories[row])))
    assert not wrong
    assert seen > 3


@pytest.mark.parametrize("pair", _pairs(saved=True))
def test_what_autograd_saved_is_an_activation_or_what_it_really_is(pair: tuple[Path, Path]) -> None:
    snapshot = truths.opened(pair[0])
    blocks, categories = snapshot.replay().lifetimes, truths.names_of_categories(snapshot)
    saved = truths.saved_blocks(snapshot, truths.saved_of(truths.truth_of(pair[1])))
    peak = snapshot.peak().event
    alive = [row for row in saved if blocks.born[row] <= peak < blocks.freed[row]]
    assert len(saved) > 30
    right = ("act.", "param.", "input", "buffer")
    for rows in (saved, alive):
        good = sum(int(blocks.size[row]) for row in rows if str(categories[row]).startswith(right))
        assert good >= 0.98 * sum(int(blocks.size[row]) for row in rows)


@pytest.mark.parametrize("pair", _pairs())
def test_nothing_born_in_backward_is_a_saved_activation(pair: tuple[Path, Path]) -> None:
    snapshot = truths.opened(pair[0])
    born = snapshot.replay().lifetimes.born
    timeline = snapshot.timeline()
    backward = (timeline.phase[timeline.runs(born)] == Phase.BACKWARD) & (born >= 0)
    assert not (backward & (truths.names_of_categories(snapshot) == "act.saved")).any()


@pytest.mark.parametrize("pair", _pairs(explained=True))
def test_every_byte_of_the_peaks_is_named(pair: tuple[Path, Path]) -> None:
    snapshot = truths.opened(pair[0])
    if not snapshot.complete:
        pytest.skip("a window: what came before it cannot all be named")
    for event in (snapshot.peak().event, snapshot.peak("reserved").event):
        blame = snapshot.blame(at=event)
        size = {row.category: row.bytes for row in blame.rows}
        assert sum(size.values()) == blame.total_bytes
        assert size.get("unknown", 0) <= 0.005 * blame.total_bytes
        assert "prior" not in size


@pytest.mark.parametrize("pair", _pairs(marks=True))
def test_phases_and_steps_are_those_of_the_script(pair: tuple[Path, Path]) -> None:
    """Marks were taken by the script between its calls: every allocation between two belongs to that phase and step."""
    snapshot = truths.opened(pair[0])
    trace, timeline = snapshot.data.traces[0], snapshot.timeline()
    assert trace.time_us is not None
    begin, checked = 0, 0
    for mark in truths.truth_of(pair[1])["marks"]:
        end = int(np.searchsorted(trace.time_us, mark["time_us"]))
        phase, _, step = mark["what"].partition(" ")
        after_mark = begin > 0 or "model built" in str(truths.truth_of(pair[1])["marks"][0]["what"])
        if phase in ("forward", "backward", "step") and step.isdigit() and after_mark:
            number = int(step) // (2 if truths.name_of(pair) in MICRO else 1)
            runs = timeline.runs(begin + np.flatnonzero(trace.action[begin:end] == 0))
            assert {PHASES[code] for code in timeline.phase[runs].tolist()} <= {phase}
            assert set(timeline.step[runs].tolist()) <= {number}
            checked += len(runs)
        begin = end
    assert checked > 200 or truths.name_of(pair) in UNTIMED


@pytest.mark.parametrize("name", TWINS)
def test_python_stacks_agree_with_their_cpp_twins(name: str) -> None:
    """The rules for threads without Python, against a recording in which C++ frames say what they ran."""
    by_name = {truths.name_of(pair): pair[0] for pair in TRUTHS}
    if name not in by_name or f"{name}-cpp-stacks" not in by_name:
        pytest.skip("one of the two recordings is not here")
    plain, cpp = memtrace.load(by_name[name], cache=False), memtrace.load(by_name[f"{name}-cpp-stacks"], cache=False)
    blocks, peak = plain.replay().lifetimes, plain.peak().event
    assert len(blocks) == len(cpp.replay().lifetimes)
    alive = (blocks.born <= peak) & (peak < blocks.freed)
    same = truths.names_of_categories(plain) == truths.names_of_categories(cpp)
    assert blocks.size[alive & same].sum() >= 0.97 * blocks.size[alive].sum()


def _bytes_of(name: str, category: str) -> int:
    path = next((pair[0] for pair in TRUTHS if truths.name_of(pair) == name), None)
    if path is None:
        pytest.skip("the recording is not here")
    return sum(row.bytes for row in memtrace.load(path, cache=False).blame().rows if row.category == category)


def test_the_reports_case_names_what_was_never_released() -> None:
    path = recordings.snapshot_path("opt13b-zero3-deepspeed0.18.9")
    row = memtrace.load(path, cache=False).blame().rows[0]
    assert row.category == "param.retained"
    assert 22.0 * GiB <= row.bytes <= 23.0 * GiB
    assert row.blocks == 234
    assert row.evidence is not None
    assert row.evidence.rule == "deepspeed.zero3.fetch"
    assert row.evidence.frame is not None
    assert row.evidence.frame.name == "_fetch_sub_module_impl"


@pytest.mark.parametrize("name", ["opt13b-zero3-zeroinit-deepspeed0.18.9", "opt13b-zero3"])
def test_under_zero_init_or_a_newer_release_they_are_released(name: str) -> None:
    assert _bytes_of(name, "param.retained") < GiB


@pytest.mark.parametrize(
    ("name", "stage", "releases"),
    [
        ("opt13b-zero3-deepspeed0.18.9", 3, "0.18.6-0.19.1"),
        ("gpt2-zero3-deepspeed0.14.5", 3, "0.14.3-0.15.2"),
        ("gpt2-zero3", 3, "0.19.3 or later"),
        ("gpt2-zero2-deepspeed0.14.5", 2, "0.14.0-0.14.5"),
        ("opt13b-zero2-deepspeed0.18.9", 2, "0.18.3-0.18.9"),
        ("gpt2-zero1", 1, "0.19.0 or later"),
        ("gpt2-zero0", 0, None),
    ],
)
def test_stage_and_release_are_told_by_the_frames(name: str, stage: int, releases: str | None) -> None:
    facts = memtrace.load(recordings.snapshot_path(name), cache=False).attribution().deepspeed
    assert facts is not None
    assert (facts.stage, facts.releases) == (stage, releases)


def test_without_deepspeed_nothing_is_said_of_it() -> None:
    assert memtrace.load(recordings.snapshot_path("llama-fsdp2"), cache=False).attribution().deepspeed is None
