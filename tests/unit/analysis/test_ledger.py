"""Reserved memory in parts: each term, each pool and stream, who waits and who pins, on memory made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder

import memtrace
from memtrace.analysis.ledger import TERMS, Ledger
from memtrace.analysis.pins import Pin
from memtrace.analysis.reserved import DeviceMemory, Reserved

MiB = 1 << 20
BASE = 0x7F0000000000


def ledger(builder: SnapshotBuilder, folder: Path, at: str | int = "end", sidecar: Any = None) -> Reserved:
    path = builder.pickle(folder / "one.pickle")
    if sidecar is not None:
        (folder / "one.json").write_text(json.dumps({"schema": "memtrace.sidecar/1", **sidecar}))
    found = memtrace.load(path).ledger(at)
    assert sum(part.ledger.reserved for part in found.parts) == found.ledger.reserved
    assert sum(pin.hostage_bytes for pin in found.pins) == found.ledger.stranded
    assert sum(one.bytes for one in found.waiting) == found.ledger.pending
    for term in TERMS:
        assert sum(getattr(part.ledger, term) for part in found.parts) == getattr(found.ledger, term)
    return found


def pin_of(found: Reserved, name: str) -> Pin:
    return next(pin for pin in found.pins if found.frames(pin)[0].name == name)


def test_nothing() -> None:
    assert Ledger(1, 2, 3, 4, 5, 6).reserved == 21


def test_every_term(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .segment(BASE, 20 * MiB)
        .alloc(BASE, 4 * MiB - 100)  # rounded up by 100
        .segment(BASE + 32 * MiB, 12 * MiB)
        .alloc(BASE + 32 * MiB, 12 * MiB - MiB + 512)  # the rest is too small to split off
        .alloc(BASE + 4 * MiB, 2 * MiB)
        .free_requested(BASE + 4 * MiB)
        .segment(BASE + 64 * MiB, 20 * MiB)
    )
    found = ledger(builder, tmp_path)
    requested = 4 * MiB - 100 + 11 * MiB + 512
    assert found.ledger == Ledger(requested, 100, MiB - 512, 2 * MiB, 14 * MiB, 20 * MiB)
    assert found.ledger.reserved == 52 * MiB
    assert found.device == 0


def test_parts_are_pools_of_streams(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .alloc(BASE, 1000)
        .segment(BASE + 4 * MiB, 20 * MiB, stream=7)
        .alloc(BASE + 4 * MiB, 3 * MiB)
        .segment(BASE + 64 * MiB, 2 * MiB, pool=(0, 3))
        .segment(BASE + 68 * MiB, 20 * MiB, stream=7, pool=(0, 3))
        .alloc(BASE + 68 * MiB, 10 * MiB)
    )
    found = ledger(builder, tmp_path)
    assert [(part.pool, part.stream, part.pool_id, part.ledger.reserved) for part in found.parts] == [
        ("large", 7, (0, 0), 20 * MiB),
        ("large", 7, (0, 3), 20 * MiB),
        ("small", 0, (0, 0), 2 * MiB),
        ("small", 0, (0, 3), 2 * MiB),
    ]
    assert found.parts[2].ledger == Ledger(1000, 24, 0, 0, 2 * MiB - 1024, 0)
    assert found.parts[3].ledger == Ledger(0, 0, 0, 0, 0, 2 * MiB)


def test_a_pool_that_nobody_says_is_a_part_too(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(BASE, 5 * MiB).free(BASE).segment_free(BASE)
    found = ledger(builder, tmp_path, at=1)
    assert [(part.pool_id, part.ledger.reserved) for part in found.parts] == [(None, 20 * MiB)]


def test_pins_share_what_is_free_to_the_byte(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .alloc(BASE, 512, stack="a")
        .alloc(BASE + 512, 512, stack="b")
        .alloc(BASE + 1024, 1536, stack="a")
    )
    found = ledger(builder, tmp_path)
    free = 2 * MiB - 2560
    share, over = divmod(free, 3)
    assert over == 1  # the lowest address gets it
    assert pin_of(found, "a").hostage_bytes == 2 * share + 1
    assert pin_of(found, "b").hostage_bytes == share
    assert (pin_of(found, "a").blocks, pin_of(found, "a").bytes) == (2, 2048)
    assert [pin.together_bytes for pin in found.pins] == [0, 0]


def test_what_goes_when_one_lets_go_and_when_all_of_a_stack_do(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .segment(BASE, 20 * MiB)
        .alloc(BASE, 2 * MiB, stack="a")
        .alloc(BASE + 2 * MiB, 2 * MiB, stack="a")
        .segment(BASE + 32 * MiB, 20 * MiB)
        .alloc(BASE + 32 * MiB, 5 * MiB, stack="b")
        .segment(BASE + 64 * MiB, 14 * MiB)
        .alloc(BASE + 64 * MiB, 14 * MiB, stack="full")
    )
    found = ledger(builder, tmp_path)
    assert [found.frames(pin)[0].name for pin in found.pins] == ["a", "b"]  # who fills a segment pins nothing
    first, second = found.pins
    assert (first.hostage_bytes, first.alone_bytes, first.together_bytes) == (16 * MiB, 0, 20 * MiB)
    assert (second.hostage_bytes, second.alone_bytes, second.together_bytes) == (15 * MiB, 20 * MiB, 20 * MiB)
    assert (first.category, first.born, first.step) == ("unknown", 1, None)


def test_pending_blocks_pin_too(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(BASE, 5 * MiB, stack="a").free_requested(BASE)
    found = ledger(builder, tmp_path)
    (pin,) = found.pins
    assert (pin.category, pin.blocks, pin.pending_blocks) == ("alloc.pending", 1, 1)
    assert (pin.hostage_bytes, pin.alone_bytes) == (15 * MiB, 20 * MiB)


def test_expandable_memory_goes_back_by_page(tmp_path: Path) -> None:
    page = 20 * MiB
    builder = (
        SnapshotBuilder()
        .map(BASE, 7 * page)
        .alloc(BASE, 5 * MiB, stack="a")
        .alloc(BASE + 5 * MiB, 60 * MiB, stack="wide")  # from page 0 to page 3, filling 1 and 2
        .alloc(BASE + 65 * MiB, 20 * MiB, stack="b")  # pages 3 and 4
    )
    found = ledger(builder, tmp_path)
    assert found.ledger == Ledger(85 * MiB, 0, 0, 0, 15 * MiB, 2 * page)
    assert [(found.frames(pin)[0].name, pin.hostage_bytes, pin.alone_bytes) for pin in found.pins] == [
        ("b", 15 * MiB, page)
    ]  # pages 0 and 3 are full: nobody holds anything there
    later = ledger(builder.free(BASE), tmp_path)
    assert later.ledger.stranded == 20 * MiB
    wide, last = pin_of(later, "wide"), pin_of(later, "b")
    assert (wide.hostage_bytes, wide.alone_bytes, wide.together_bytes) == (5 * MiB, 3 * page, 3 * page)
    assert (last.hostage_bytes, last.alone_bytes) == (15 * MiB, page)


def test_expandable_blocks_belong_to_the_pool_they_lie_in(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .map(BASE, 2 * MiB)
        .alloc(BASE, 700)
        .map(BASE + 64 * MiB, 40 * MiB, stream=5)
        .alloc(BASE + 64 * MiB, 3 * MiB)
    )
    found = ledger(builder, tmp_path)
    assert [(part.pool, part.stream, part.ledger.requested) for part in found.parts] == [
        ("large", 5, 3 * MiB),
        ("small", 0, 700),
    ]
    assert found.parts[0].ledger == Ledger(3 * MiB, 0, 0, 0, 17 * MiB, 20 * MiB)


def test_the_rest_of_a_page_is_stranded_and_not_lost(tmp_path: Path) -> None:
    """A range that is no whole number of pages: its settings were others than those at the end."""
    builder = SnapshotBuilder().map(BASE, 26 * MiB).alloc(BASE, 20 * MiB)
    found = ledger(builder, tmp_path)
    assert (found.ledger.stranded, found.ledger.releasable) == (6 * MiB, 0)
    (pin,) = found.pins
    assert (pin.blocks, pin.hostage_bytes, pin.category) == (0, 6 * MiB, "alloc.stranded")
    touched = ledger(builder.alloc(BASE + 20 * MiB, 2 * MiB, stack="b"), tmp_path)
    (pin,) = touched.pins
    assert (pin.blocks, pin.hostage_bytes, pin.alone_bytes) == (1, 4 * MiB, 0)  # it could not go back


def test_who_waits_and_how_long(tmp_path: Path) -> None:
    builder = (
        SnapshotBuilder()
        .time(1000)
        .segment(BASE, 20 * MiB)
        .alloc(BASE, 2 * MiB)
        .alloc(BASE + 2 * MiB, 3 * MiB)
        .segment(BASE + 32 * MiB, 20 * MiB, stream=9)
        .alloc(BASE + 32 * MiB, 4 * MiB)
        .time(2000)
        .free_requested(BASE)
        .time(2500)
        .free_requested(BASE + 2 * MiB)
        .free_requested(BASE + 32 * MiB)
        .time(4000)
        .free_completed(BASE + 2 * MiB)
        .free_completed(BASE)
    )
    found = ledger(builder, tmp_path, at=7)
    other, main = sorted(found.waiting, key=lambda one: -one.stream)
    assert (main.stream, main.bytes, main.blocks) == (0, 5 * MiB, 2)
    assert (main.waited_events, main.waited_us) == (2, 501)
    assert (main.still_events, main.still_us, main.unfinished_blocks) == (2, 1500, 0)
    assert (other.stream, other.bytes, other.waited_events, other.waited_us) == (9, 4 * MiB, 0, 0)
    assert (other.still_events, other.still_us, other.unfinished_blocks) == (None, None, 1)


def test_a_trace_without_times_waits_in_events(tmp_path: Path) -> None:
    builder = SnapshotBuilder(torch="2.1").alloc(BASE, 2 * MiB).free_requested(BASE).alloc(BASE + 2 * MiB, 2 * MiB)
    (one,) = ledger(builder, tmp_path).waiting
    assert (one.waited_events, one.waited_us, one.still_us) == (1, None, None)


def test_a_wait_from_before_the_recording_counts_from_its_start(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(BASE, 2 * MiB).free_requested(BASE).start_recording()
    builder.alloc(BASE + 2 * MiB, 2 * MiB).alloc(BASE + 4 * MiB, 2 * MiB)
    (one,) = ledger(builder, tmp_path, at=1).waiting
    assert (one.bytes, one.waited_events, one.waited_us) == (2 * MiB, 2, 1)


def test_blocks_from_before_the_recording_pin(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(BASE, 5 * MiB).start_recording().alloc(BASE + 5 * MiB, 2 * MiB, stack="late")
    found = ledger(builder, tmp_path)
    before = next(pin for pin in found.pins if pin.born < 0)
    assert (before.category, before.phase, before.step, before.stack) == ("prior", None, None, -1)


DEVICE = {"index": 0, "capacity_bytes": 100 * MiB}


@pytest.mark.parametrize(
    ("sidecar", "expected"),
    [
        (None, DeviceMemory(None, None, None)),
        ({"device": DEVICE}, DeviceMemory(100 * MiB, None, None)),
        ({"device": DEVICE, "mem_get_info": [70 * MiB, 100 * MiB]}, DeviceMemory(100 * MiB, 70 * MiB, 10 * MiB)),
        ({"device": DEVICE, "mem_get_info": [90 * MiB, 100 * MiB]}, DeviceMemory(100 * MiB, 90 * MiB, None)),
        ({"device": DEVICE, "mem_get_info": "much"}, DeviceMemory(100 * MiB, None, None)),
        ({"device": {**DEVICE, "index": 1}, "mem_get_info": [70 * MiB, 1]}, DeviceMemory(None, None, None)),
        (
            {
                "device": DEVICE,
                "mem_get_info": [70 * MiB, 100 * MiB],
                "stats": {"reserved_bytes.all.current": 22 * MiB},
            },
            DeviceMemory(100 * MiB, None, None),  # taken at another moment
        ),
    ],
)
def test_the_device_at_the_end(tmp_path: Path, sidecar: Any, expected: DeviceMemory) -> None:
    builder = SnapshotBuilder().alloc(BASE, 5 * MiB).free(BASE)
    assert ledger(builder, tmp_path, sidecar=sidecar).memory == expected
    assert ledger(builder, tmp_path, at=1, sidecar=sidecar).memory.free_bytes is None


def test_the_device_at_an_out_of_memory_event(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(BASE, 5 * MiB).oom(90 * MiB, device_free=30 * MiB).free(BASE)
    found = ledger(builder, tmp_path, at="oom", sidecar={"device": DEVICE})
    assert found.memory == DeviceMemory(100 * MiB, 30 * MiB, 50 * MiB)
    (tmp_path / "one.json").unlink()
    assert ledger(builder, tmp_path, at="oom").memory == DeviceMemory(None, 30 * MiB, None)


def test_it_says_what_it_is(tmp_path: Path) -> None:
    found = ledger(SnapshotBuilder().alloc(BASE, 5 * MiB), tmp_path)
    assert repr(found) == (
        "Reserved(20.00 MiB after event 1: 5.00 MiB requested, 15.00 MiB stranded by 1 stack, 0 B releasable, 1 part)"
    )
