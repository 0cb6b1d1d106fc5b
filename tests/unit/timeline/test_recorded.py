"""Phases that were written down while the job ran: by whom, how they nest, and what beats what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from stacks import BACKWARD, MODULE, STEP, chain

import memtrace
from memtrace.timeline.recorded import module_of_text

MiB = 1 << 20
START = 1_700_000_000_000_000
OWN = "train.py:3 <module>"


def note(phase: str, step: int | None, begin: int, end: int) -> dict[str, Any]:
    """An entry of the sidecar's `phases`; times from the first event's."""
    return {"phase": phase, "step": step, "begin_us": START + begin, "end_us": START + end, "source": "engine"}


def events(*stacks: str, texts: list[str] | None = None) -> SnapshotBuilder:
    """Allocations of one event each (segments are there before), at START, START + 1, ..."""
    builder = SnapshotBuilder()
    for number in range(len(stacks)):
        builder.segment(0x7F0000000000 + number * 0x100000000, 20 * MiB)
    builder.start_recording().time(START)
    for number, stack in enumerate(stacks):
        text = texts[number] if texts else ""
        builder.alloc(0x7F0000000000 + number * 0x100000000, 4 * MiB, stack=chain(stack), user_metadata=text)
    return builder


def phases(folder: Path, builder: SnapshotBuilder, *notes: dict[str, Any]) -> list[tuple[str | None, int | None]]:
    """Phase and step of each event."""
    path = builder.pickle(folder / "rank0000.pickle")
    (folder / "rank0000.json").write_text(json.dumps({"memtrace": "1", "phases": list(notes)}))
    snapshot = memtrace.load(path, cache=False)
    return [snapshot.timeline().at(event) for event in range(len(snapshot.data.traces[0]))]


@pytest.mark.parametrize("phase", ["init", "eval", "checkpoint", "other"])
def test_phases_outside_steps(phase: str, tmp_path: Path) -> None:
    found = phases(tmp_path, events(*[MODULE] * 4), note("forward", 4, 0, 1), note(phase, None, 1, 3))
    assert found[:3] == [("forward", 4), (phase, None), (phase, None)]


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_phases_of_steps(phase: str, tmp_path: Path) -> None:
    assert phases(tmp_path, events(OWN, OWN), note(phase, 7, 0, 2)) == [(phase, 7)] * 2


def test_a_closure_runs_forward_inside_the_step(tmp_path: Path) -> None:
    notes = [note("forward", 2, 1, 2), note("backward", 2, 2, 3), note("step", 2, 0, 5)]
    found = phases(tmp_path, events(STEP, STEP, STEP, STEP, STEP), *notes)
    assert found == [("step", 2), ("forward", 2), ("backward", 2), ("step", 2), ("step", 2)]


def test_a_checkpoint_inside_a_step_is_no_part_of_it(tmp_path: Path) -> None:
    notes = [note("checkpoint", 2, 1, 2), note("step", 2, 0, 3)]
    assert phases(tmp_path, events(STEP, STEP, STEP), *notes) == [("step", 2), ("checkpoint", None), ("step", 2)]


def test_named_ranges_nest_as_the_notes_do(tmp_path: Path) -> None:
    builder = SnapshotBuilder()
    for number in range(3):
        builder.segment(0x7F0000000000 + number * 0x100000000, 20 * MiB)
    builder.start_recording().annotation("memtrace: phase=step;step=4", "START")
    builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(OWN)).annotation("memtrace: phase=forward;step=4", "START")
    builder.alloc(0x7F0100000000, 4 * MiB, stack=chain(OWN)).annotation("memtrace: phase=forward;step=4", "END")
    builder.alloc(0x7F0200000000, 4 * MiB, stack=chain(OWN)).annotation("memtrace: phase=step;step=4", "END")
    assert phases(tmp_path, builder) == [("step", 4), ("forward", 4), ("step", 4)]


def test_a_range_that_is_still_open_lasts_to_the_end(tmp_path: Path) -> None:
    builder = SnapshotBuilder().annotation("memtrace: phase=eval", "START")
    builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(MODULE)).oom(1 << 40)
    assert phases(tmp_path, builder)[-1] == ("eval", None)


def test_what_an_event_says_beats_notes_by_time(tmp_path: Path) -> None:
    texts = ["phase=forward;step=1", "phase=backward;step=1;module=a.b", "", "module=a"]
    found = phases(tmp_path, events(*[OWN] * 4, texts=texts), note("forward", 1, 0, 2), note("step", 1, 2, 9))
    assert found == [("forward", 1), ("backward", 1), ("step", 1), ("step", 1)]


def test_what_was_recorded_is_not_guessed_away(tmp_path: Path) -> None:
    """Calls that leave nothing for backward look like evaluation, and calls without any backward, too."""
    builder = SnapshotBuilder().segment(0x7F0000000000, 20 * MiB).start_recording().time(START)
    for stack in (MODULE, OWN, MODULE, OWN):
        builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(stack)).free(0x7F0000000000)
    builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(BACKWARD))
    found = phases(tmp_path, builder, note("forward", 0, 0, 3), note("forward", 0, 6, 9), note("backward", 0, 12, 13))
    assert (found[0], found[7], found[12]) == (("forward", 0), ("forward", 0), ("backward", 0))
    builder = SnapshotBuilder().segment(0x7F0000000000, 20 * MiB).start_recording().time(START)
    for stack in (MODULE, OWN, MODULE, OWN):
        builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(stack)).free(0x7F0000000000)
    assert phases(tmp_path, builder, note("forward", 0, 0, 3), note("forward", 0, 6, 9))[7] == ("forward", 0)


def test_what_is_made_before_a_forward_is_of_its_step(tmp_path: Path) -> None:
    """The inputs: no note covers them, and the phase around them is the forward's."""
    stacks = (MODULE, BACKWARD, STEP, OWN, MODULE, BACKWARD)
    notes = [note("forward", 5, 0, 1), note("backward", 5, 1, 2), note("step", 5, 2, 3), note("forward", 6, 4, 5)]
    found = phases(tmp_path, events(*stacks), *notes, note("backward", 6, 5, 6))
    assert found[3] == ("forward", 6)


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("phase=forward;step=3;module=transformer.h.0.attn", "transformer.h.0.attn"),
        ("module=a b/c", "a b/c"),
        ("module=a;module=b", "a"),
        ("mymodule=a", None),
        ("phase=forward", None),
        ("module=", None),
        ("", None),
    ],
)
def test_the_module_that_a_text_names(text: str, module: str | None) -> None:
    assert module_of_text(text) == module
