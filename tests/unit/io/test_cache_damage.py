"""Nothing that is wrong with an entry of the cache is ever more than a miss: no answer of its own, no error."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caching import assert_same, is_hit, odd_snapshot, opened, remembered

import memtrace
from memtrace.allocator import stored
from memtrace.attribution.stored import Stored
from memtrace.io import bundle, cache
from memtrace.io.bundle import DamagedError


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LEAST_ROWS", 0)
    monkeypatch.setattr(cache, "_COLUMN_MAKERS", ("model",))  # somebody may be editing the others just now


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return odd_snapshot(tmp_path / "s.pickle")


@pytest.fixture
def entry(snapshot: Path) -> Path:
    """The entry of that file, with the replays of both devices."""
    return remembered(snapshot)


def assert_harmless(snapshot: Path, expected: Any) -> None:
    """A miss, or the truth; no exception."""
    found = Stored.of(str(snapshot), None)
    assert found is not None
    data = found.data()
    if data is not None:
        assert_same(expected.data, data)
        for device in expected.devices:
            replayed = found.replay(device, data)
            if replayed is not None:
                assert_same(expected.replay(device), replayed[0])


def header_bytes(raw: bytes) -> int:
    return 16 + int(struct.unpack_from("<I", raw, 8)[0])


def test_every_byte_of_the_header_matters(snapshot: Path, entry: Path) -> None:
    raw = entry.read_bytes()
    for place in range(header_bytes(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        entry.write_bytes(damaged)
        with pytest.raises(DamagedError):
            opened(entry)
    assert not is_hit(snapshot)
    assert not entry.exists(), "a damaged entry is removed"


def test_no_flip_in_the_columns_is_believed(snapshot: Path, entry: Path) -> None:
    raw, expected, chance = entry.read_bytes(), memtrace.load(snapshot, cache=False), random.Random(1)
    start, noticed = header_bytes(raw), 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(chance.choice((1, 1, 2, 50))):
            damaged[chance.randrange(start, len(raw))] ^= 1 << chance.randrange(8)
        entry.write_bytes(damaged)
        assert_harmless(snapshot, expected)
        noticed += not entry.exists()
    assert noticed > 150, "the rest is the space between columns"


def test_no_other_length_is_believed(snapshot: Path, entry: Path) -> None:
    raw = entry.read_bytes()
    for length in [0, 1, 15, 16, 17, 100, *range(200, len(raw), 997), len(raw) - 1, len(raw) + 1, len(raw) + 4096]:
        entry.write_bytes(raw[:length].ljust(length, b"\0"))
        assert not is_hit(snapshot)
        assert not entry.exists()


def test_a_page_of_zeros_is_noticed() -> None:
    column = np.arange(1 << 16, dtype=np.int64) // 3
    zeroed, moved = column.copy(), column.copy()
    zeroed[512:1024] = 0
    moved[[3, 900]] = moved[[900, 3]]
    assert len({bundle.digest(column), bundle.digest(zeroed), bundle.digest(moved)}) == 3


def forged(raw: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same columns below a changed header, with a right checksum."""
    length = header_bytes(raw)
    content = json.loads(raw[16:length].decode("utf-8", "surrogatepass"))
    changed = change(content)
    if isinstance(changed, bytes):
        text = changed
    else:
        text = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    body = raw[length + -length % 64 :]
    head = struct.pack("<8sII", bundle.MAGIC, len(text), zlib.crc32(text)) + text
    return head + bytes(-len(head) % 64) + body


def column_of(content: dict[str, Any], *steps: str) -> list[Any]:
    """The description of the column at that place in the data."""
    value = content["values"]["data"]
    for step in steps:
        value = value[int(step)] if step.isdigit() else value[step]
    described: list[Any] = content["columns"][value["column"]]
    return described


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no JSON": lambda _: b"{",
    "no UTF-8": lambda _: b'{"a": "\xff"}',
    "deep": lambda _: b"[" * 100_000,
    "a list": lambda _: b"[]",
    "nothing": lambda _: b"{}",
    "no values": lambda content: content.pop("values"),
    "no data": lambda content: content["values"].pop("data"),
    "no key": lambda content: content["values"].pop("key"),
    "values in a list": lambda content: content.update(values=[1]),
    "columns in a dict": lambda content: content.update(columns={"a": 1}),
    "a huge number": lambda _: b'{"values": {}, "columns": [["int64", ' + b"9" * 5000 + b", 0]]}",
    "a long column": lambda content: content["columns"][0].__setitem__(1, 1 << 40),
    "an endless column": lambda content: content["columns"][0].__setitem__(1, 1 << 200),
    "a negative count": lambda content: content["columns"][0].__setitem__(1, -8),
    "a fraction": lambda content: content["columns"][0].__setitem__(1, 1.5),
    "a truth": lambda content: content["columns"][0].__setitem__(1, True),
    "objects": lambda content: content["columns"][0].__setitem__(0, "object"),
    "records": lambda content: content["columns"][0].__setitem__(0, "O,O"),
    "no dtype": lambda content: content["columns"][0].__setitem__(0, None),
    "another dtype": lambda content: column_of(content, "traces", "0", "addr").__setitem__(0, "int64"),
    "no such column": lambda content: content["values"]["data"]["traces"][0].update(addr={"column": 9999}),
    "a column before": lambda content: content["values"]["data"]["traces"][0].update(addr={"column": -1}),
    "a column missing": lambda content: content["values"]["data"]["traces"][0].update(addr=None),
    "a field missing": lambda content: content["values"]["data"].pop("tiled"),
    "a field too many": lambda content: content["values"]["data"].update(more=1),
    "a text for a number": lambda content: content["values"]["data"].update(file_bytes="1"),
    "unequal columns": lambda content: content["values"]["data"]["traces"][0].update(
        size=content["values"]["data"]["segments"]["size"]
    ),
    "one device twice": lambda content: content["values"]["data"]["traces"][1].update(device=0),
    "no strings": lambda content: content["values"]["data"].update(actions=[]),
    "texts of texts": lambda content: content["values"]["data"]["strings"].update(values={"texts": ["a", "b"]}),
    "an event beyond": lambda content: content["values"]["data"]["traces"][0].update(device_free=[[999, 1]]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_header_that_lies_is_a_miss(change: Callable[[dict[str, Any]], object], snapshot: Path, entry: Path) -> None:
    raw = entry.read_bytes()
    entry.write_bytes(forged(raw, lambda _: None))
    assert is_hit(snapshot)
    entry.write_bytes(forged(raw, change))
    assert not is_hit(snapshot)
    memtrace.load(snapshot).blame()


HOSTILE_REPLAYS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another device": lambda replay: replay.update(device=1),
    "more events": lambda replay: replay.update(events=replay["events"] + 1),
    "fewer events": lambda replay: replay.update(events=3),
    "ids of nothing": lambda replay: replay["lifetimes"].update(span=replay["lifetimes"]["stack"]),
    "unequal columns": lambda replay: replay["lifetimes"].update(size=replay["spans"]["size"]),
    "no columns": lambda replay: replay.pop("lifetimes"),
}


@pytest.mark.parametrize("change", HOSTILE_REPLAYS.values(), ids=HOSTILE_REPLAYS)
def test_a_replay_that_lies_is_made_anew(
    change: Callable[[dict[str, Any]], object], snapshot: Path, entry: Path
) -> None:
    entry.write_bytes(forged(entry.read_bytes(), lambda content: change(content["values"]["replay 0"])))
    assert is_hit(snapshot)
    again = memtrace.load(snapshot)
    assert_same(memtrace.load(snapshot, cache=False).replay(0), again.replay(0))
    assert not entry.exists()
    assert again.remember()


@pytest.mark.parametrize("event", [-2, 10_000])
def test_a_peak_that_lies_is_made_anew(event: int, snapshot: Path, entry: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["values"]["peaks 0"][0][1]["event"] = event

    entry.write_bytes(forged(entry.read_bytes(), change))
    assert memtrace.load(snapshot).peak(device=0) == memtrace.load(snapshot, cache=False).peak(device=0)
