"""The native reader where picklers, batches and buffers are unusual: held against the reference, and against itself.

`test_readers_agree` has what picklers write, and damage; here the same objects are written in every way that a pickle
allows (other opcodes, batches, numbering, sharing, keys written twice), opcodes are moved about so that most of the
pickle stays whole, and input comes in pieces of a few bytes.
"""

from __future__ import annotations

import io
import itertools
import lzma
import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import ROOT, fixture_names, snapshot_path
from sameness import differences

from memtrace.errors import SourceError
from memtrace.io.read import NATIVE, load_in_python
from memtrace.io.source import SourceInfo
from memtrace.model import SnapshotData

if NATIVE:
    from memtrace.io.native import decode_snapshot

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native reader is not built")
CORPUS = sorted((ROOT / "tests" / "corpus" / "reader").glob("*"))
PUBLIC = sorted((ROOT.parent / "shared" / "public").glob("*.pickle"))
RELEASES = ("1.13", "2.0", "2.1", "2.5", "2.8", "2.12", "2.15")
seeds = st.integers(0, 2**48)


class Pieces:
    """A reader that gives a few bytes at a time."""

    def __init__(self, data: bytes, sizes: Sequence[int]) -> None:
        self.data = data
        self.sizes = sizes
        self.at = 0
        self.reads = 0

    def peek(self, _count: int) -> bytes:
        return self.data

    def readinto(self, buffer: memoryview) -> int:
        piece = self.data[self.at :][: min(self.sizes[self.reads % len(self.sizes)], len(buffer))]
        buffer[: len(piece)] = piece
        self.at += len(piece)
        self.reads += 1
        return len(piece)


class Stream:
    """What the readers need of a `PickleStream`."""

    def __init__(self, reader: Any, size: int) -> None:
        self.reader = reader
        self.info = SourceInfo("made", size)


def outcome(read: Callable[[Any], SnapshotData], reader: Any, data: bytes) -> SnapshotData | SourceError:
    """What comes out of a reader; nothing but an error of ours may come out of it."""
    try:
        return read(Stream(reader, len(data)))
    except SourceError as error:
        return error


def native(data: bytes, sizes: Sequence[int] = ()) -> SnapshotData | SourceError:
    return outcome(decode_snapshot, Pieces(data, sizes) if sizes else io.BufferedReader(io.BytesIO(data)), data)


def check(data: bytes) -> SnapshotData | SourceError:
    """Holds both readers against each other."""
    read, expected = native(data), outcome(load_in_python, io.BufferedReader(io.BytesIO(data)), data)
    if isinstance(read, SourceError) or isinstance(expected, SourceError):
        assert type(read) is type(expected), (read, expected)
    else:
        assert not list(differences(read, expected))
    return read


def check_pieces(data: bytes, sizes: Sequence[int], whole: SnapshotData | SourceError) -> None:
    read = native(data, sizes)
    if isinstance(read, SourceError) or isinstance(whole, SourceError):
        assert type(read) is type(whole), (read, whole)
    else:
        assert not list(differences(read, whole))


# Objects: torch's, with sharing and oddities that torch does not have


class Twice(dict):
    """A dict of which items are written twice, before or after."""

    def __init__(self, items: dict[str, Any], again: list[tuple[str, Any]]) -> None:
        super().__init__(items)
        self.again = again


TEXTS = ["", "N/A", "alloc", "frames", "blocks", "history", "é", "\ud800", "\U0001f600"]
TEXTS += ["x" * 255, "x" * 256, "x" * 1025]
NUMBERS = [0, 255, 256, 65536, 2**31, 2**32 - 1, 2**55, 2**56 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**71 - 1, -1]
NUMBERS += [-128, -129, -(2**31) - 1, -(2**63), -(2**71)]
ACTIONS = "alloc free_requested free_completed segment_alloc segment_free segment_map oom snapshot annotate".split()


class Maker:
    """Makes snapshots from a seed; `odd` is how likely each value is to be something else."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.odd = rng.choice([0, 0, 0.004, 0.02])
        self.kept: dict[str, list[Any]] = {}

    def chance(self, likely: float) -> bool:
        return self.rng.random() < likely

    def kept_or(self, kind: str, make: Callable[[], Any]) -> Any:
        """One made before (then both places share it), or a new one."""
        kept = self.kept.setdefault(kind, [])
        if not kept or self.chance(0.5):
            kept.append(make())
            return kept[-1]
        return self.rng.choice(kept)

    def anything(self, depth: int = 0) -> Any:
        choice = self.rng.randrange(10)
        if choice < 3 or depth > 3:
            return self.rng.choice([*NUMBERS, None, True, False, 0.5, float("inf")])
        if choice == 3:
            return self.rng.choice(TEXTS)
        if choice == 4:
            return self.kept_or("stack", self.frames)
        if choice == 5:
            return self.kept_or("anything", lambda: self.anything(depth + 1))
        items = [self.anything(depth + 1) for _ in range(self.rng.randrange(4))]
        if choice < 8:
            return items if choice == 6 else tuple(items)
        return {self.rng.choice(TEXTS): item for item in items}

    def or_odd(self, value: Any) -> Any:
        return self.anything() if self.chance(self.odd) else value

    def frame(self) -> dict[str, Any]:
        frame = {"filename": self.rng.choice(TEXTS), "line": self.rng.randrange(300), "name": self.rng.choice(TEXTS)}
        if self.chance(0.1):
            frame["fx_node_op"] = self.rng.choice([None, "x"])
        if self.chance(0.1):
            frame.pop(self.rng.choice(list(frame)))
        return {key: self.or_odd(value) for key, value in frame.items()}

    def frames(self) -> list[Any]:
        return [self.or_odd(self.kept_or("frame", self.frame)) for _ in range(self.rng.choice([0, 1, 1, 2, 4]))]

    def row(self, items: dict[str, Any]) -> dict[str, Any]:
        """A dict in some order, with odd values, something missing or more."""
        keys = self.rng.sample(list(items), len(items)) if self.chance(0.2) else list(items)
        row = {key: self.or_odd(items[key]) for key in keys if not self.chance(self.odd)}
        if self.chance(2 * self.odd):
            row[self.rng.choice(["later", "history", "blocks", "frames", "device_free"])] = self.anything()
        if self.chance(2 * self.odd) and row:
            key = self.rng.choice(list(row))
            return Twice(row, [(key, self.rng.choice([row[key], self.anything()]))])
        return row

    def pool(self) -> Any:
        return self.rng.choice([tuple, list])(self.rng.randrange(3) for _ in range(2))

    def event(self, clock: int, says: set[str]) -> dict[str, Any]:
        rng = self.rng
        items = {
            "action": rng.choice(ACTIONS) if self.chance(0.9) else rng.choice(["segment_unmap", "new", *TEXTS[:8]]),
            "addr": rng.randrange(1 << 47),
            "size": rng.randrange(1 << 20),
            "stream": rng.choice([0, 7]),
            "frames": self.kept_or("stack", self.frames),
            "time_us": clock,
            "compile_context": rng.choice(TEXTS[:9]),
            "user_metadata": rng.choice(TEXTS[:9]),
            "pool_id": self.kept_or("pool", self.pool),
            "cpp_frames": self.kept_or("names", lambda: rng.choices(TEXTS[:9], k=rng.randrange(3))),
            "device_free": rng.randrange(9),
        }
        return self.row({key: value for key, value in items.items() if key in says})

    def block(self, address: int, says: set[str]) -> dict[str, Any]:
        stack = self.kept_or("stack", self.frames)
        past = {"addr": address, "real_size": 400, "frames": stack}
        items = {
            "size": 512,
            "state": self.rng.choice(["inactive", "active_allocated", "active_pending_free"]),
            "address": address,
            "requested_size": 500,
            "frames": stack,
            "history": [self.row(past) for _ in range(self.rng.randrange(3))],
        }
        return self.row({key: value for key, value in items.items() if key in says or key in ("size", "state")})

    def segment(self, address: int, says: set[str]) -> dict[str, Any]:
        blocks = [self.block(address + 512 * index, says) for index in range(self.rng.choice([1, 1, 2, 4]))]
        items = {
            "device": self.rng.randrange(3),
            "address": address,
            "total_size": 512 * len(blocks),
            "blocks": blocks,
            "segment_pool_id": self.kept_or("pool", self.pool),
            "is_expandable": self.chance(0.5),
            "frames": self.kept_or("stack", self.frames),
        }
        return self.row(items)

    def snapshot(self) -> Any:
        rng = self.rng
        optional = ["time_us", "compile_context", "user_metadata", "pool_id", "cpp_frames", "device_free", "frames"]
        says = {"action", "addr", "size", "stream", *rng.sample(optional, rng.randrange(8))}
        block_says = set(rng.sample(["address", "requested_size", "frames", "history"], rng.randrange(5)))
        segments = [self.segment(0x7F00_0000_0000 + (index << 30), block_says) for index in range(rng.randrange(4))]
        if self.chance(0.1):
            return segments
        lengths = rng.choices([0, 1, 2, 5, 9], k=rng.choice([1, 1, 3]))
        note = {"name": rng.choice(TEXTS[:9]), "stage": "START", "device": 0, "time_us": 1}
        items = {
            "segments": segments,
            "device_traces": [[self.event(clock, says) for clock in range(length)] for length in lengths],
            "allocator_settings": {rng.choice(TEXTS[:9]): self.anything() for _ in range(rng.randrange(3))},
            "external_annotations": [self.row(note) for _ in range(rng.randrange(3))],
        }
        return self.row(dict(list(items.items())[: rng.randrange(1, 5)]))


# Pickles: the same object, written in other ways


class Writer:
    """A pickler with habits of its own: chosen once from a seed, broken with a chance of `odd`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.out = bytearray(b"\x80" + bytes([rng.choice([2, 4, 5])]))
        self.memo: dict[int, int] = {}
        self.texts: dict[str, int] = {}
        self.count = 0
        self.keeps = rng.choice([1, 1, 1, 0.5, 0])
        self.shares = rng.choice([1, 1, 0.7])
        self.late = rng.choice([0, 0, 0.2])  # keeps a container when it is full, as TorchScript does
        self.batch = rng.choice([1000, 1000, 1, 2, 3])
        self.odd = rng.choice([0, 0.02, 0.2])
        self.memoize = rng.random() < 0.7

    def chance(self, likely: float) -> bool:
        return self.rng.random() < likely

    def keep(self) -> int:
        index, self.count = self.count, self.count + 1
        if self.memoize:
            self.out += b"\x94"
        else:
            self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)
        return index

    def fetch(self, index: int) -> None:
        short = index < 256 and not self.chance(self.odd)
        self.out += b"h" + bytes([index]) if short else b"j" + struct.pack("<I", index)

    def write(self, value: Any) -> None:
        if self.chance(self.odd / 8):
            self.out += b"\x95" + bytes(8)  # a frame of nothing
        if value is None:
            self.out += b"N"
        elif isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self.write_integer(value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self.write_text(value)
        elif id(value) in self.memo and self.chance(self.shares):
            self.fetch(self.memo[id(value)])
        else:
            self.write_container(value)

    def write_integer(self, value: int) -> None:
        length = value.bit_length() // 8 + 1
        if self.chance(self.odd) and length < 10:
            length = self.rng.randrange(length, 10)
            head = self.rng.choice([b"\x8a" + bytes([length]), b"\x8b" + struct.pack("<i", length)])
            self.out += head + value.to_bytes(length, "little", signed=True)
        elif 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            self.out += b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)

    def write_text(self, value: str) -> None:
        if value in self.texts and self.chance(self.shares):
            self.fetch(self.texts[value])
            return
        text = value.encode("utf-8", "surrogatepass")
        if len(text) < 256 and not self.chance(self.odd):
            self.out += b"\x8c" + bytes([len(text)]) + text
        elif self.chance(0.8):
            self.out += b"X" + struct.pack("<I", len(text)) + text
        else:
            self.out += b"\x8d" + struct.pack("<Q", len(text)) + text
        if self.chance(self.keeps):
            self.texts[value] = self.keep()

    def write_container(self, value: Any) -> None:
        early = not isinstance(value, tuple) and not self.chance(self.late)
        keeps = self.chance(self.keeps) and value != ()
        index = 0
        if isinstance(value, tuple):
            self.write_tuple(value)
        else:
            is_dict = isinstance(value, dict)
            self.out += b"}" if is_dict else b"]"
            if early and keeps:
                index = self.keep()
            items = [*value.items()] if is_dict else [(item,) for item in value]
            if isinstance(value, Twice):
                for item in value.again:
                    items.insert(self.rng.randrange(len(items) + 1), item)
            self.write_items(items, *((b"s", b"u") if is_dict else (b"a", b"e")))
        if keeps:
            self.memo[id(value)] = index if early else self.keep()

    def write_tuple(self, value: tuple[Any, ...]) -> None:
        marked = len(value) > 3 or self.chance(self.odd)
        self.out += b"(" if marked else b""
        for item in value:
            self.write(item)
        self.out += b"t" if marked else b")" if not value else bytes([0x84 + len(value)])

    def write_items(self, items: list[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        if not items and self.chance(self.odd):
            self.out += b"(" + many
        # SETITEM is for dicts of one item: a container in a later one has no role
        single = len(items) == 1 or one == b"a" or self.chance(self.odd)
        while items:
            size = self.rng.choice([1, 2, 5]) if self.chance(self.odd) else self.batch
            batch, items = items[:size], items[size:]
            marked = len(batch) > 1 or not single or self.chance(self.odd)
            self.out += b"(" if marked else b""
            for item in batch:
                for value in item:
                    self.write(value)
            self.out += many if marked else one


def written(value: Any, rng: random.Random) -> bytes:
    writer = Writer(rng)
    writer.write(value)
    # the quick way of reading events needs some bytes after them: half of the pickles have those
    return bytes(writer.out) + b"." + rng.choice([b"", bytes(64)])


def pickled(value: Any, rng: random.Random) -> bytes:
    return rng.choice([pickle.dumps, pickle._dumps])(value, rng.choice([2, 3, 4, 5])) + rng.choice([b"", bytes(64)])


@settings(max_examples=700, deadline=None)
@given(seeds)
def test_odd_snapshots_by_odd_picklers(seed: int) -> None:
    rng = random.Random(seed)
    value = Maker(rng).snapshot()
    data = written(value, rng)
    read = check(data)
    check_pieces(data, [rng.randrange(1, 8) for _ in range(rng.randrange(1, 6))], read)


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_however_it_is_written_it_is_the_same(seed: int) -> None:
    rng = random.Random(seed)
    maker = Maker(rng)
    maker.odd = 0
    value = maker.snapshot()
    if isinstance(value, dict) and "allocator_settings" in value:
        value["allocator_settings"] = {"of": 1, "table": {"1": 2}}  # else one table may stand in two places
    writer = Writer(rng)
    writer.odd = 0
    writer.write(value)
    data, other = pickled(value, rng), bytes(writer.out) + b"."
    expected, read = native(data), native(other)
    if isinstance(expected, SourceError) or isinstance(read, SourceError):
        assert type(expected) is type(read)
    else:
        assert list(differences(expected, read)) in ([], [f".file_bytes: {len(data)} and {len(other)}"])


def test_long_batches_and_many_of_them() -> None:
    rng = random.Random(1)
    maker = Maker(rng)
    maker.odd = 0
    says = {"action", "addr", "size", "stream", "frames", "time_us", "pool_id", "user_metadata"}
    events = [maker.event(clock, says) for clock in range(2500)]
    deep = {**events[0], "frames": [maker.frame() for _ in range(1500)]}
    raw = {"segments": [], "device_traces": [events, [], [deep]]}
    for batch in (1, 3, 1000, 10_000):
        writer = Writer(random.Random(2))
        writer.batch, writer.odd = batch, 0
        writer.write(raw)
        data = bytes(writer.out) + b"."
        read = check(data)
        assert isinstance(read, SnapshotData)
        check_pieces(data, [65_521], read)


# Opcodes moved about: what is kept is numbered anew, so that most of the pickle still means something


def small(release: str) -> Any:
    builder = SnapshotBuilder(torch=release)
    for index in range(4):
        builder.alloc(0x7F0000000000 + index * (4 << 20), 4 << 20, stack=f"f{index % 2};g")
    return builder.free(0x7F0000000000).oom(1 << 40, device_free=77).snapshot_event().build()


def opcodes(data: bytes) -> list[bytes]:
    at = [position for *_, position in pickletools.genops(data)] + [len(data)]
    return [data[start:end] for start, end in itertools.pairwise(at)]


PICKLES = [opcodes(pickle.dumps(small(release), protocol)) for release in RELEASES for protocol in (2, 4)]
PICKLES += [opcodes(pickletools.optimize(pickle.dumps(small(release), 4))) for release in RELEASES]
KEEPS = (b"\x94", b"q", b"r")
# numbers, None and True; containers, empty and begun; what ends and fills them; texts, one of them no UTF-8; a frame
HEX = """6803 4b07 8a01ff 4a00000080 8a09ffffffffffffffff00 4e 88 470000000000000000 5d 7d 29 5d94 7d94 5d28 7d28 28 74
85 86 87 61 73 65 75 94 2e 5d285d5d65 5d288c016165 5d284b014b0265 4b014b0286 8c07686973746f7279 58010000006a
8c066672616d657394 8c03eda080 8c01ff 950000000000000080"""
PUT_IN = [bytes.fromhex(opcode) for opcode in HEX.split()]


def moved(rng: random.Random) -> bytes:
    found = list(rng.choice(PICKLES))
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 5])):
        at, other, length = rng.randrange(1, len(found)), rng.randrange(1, len(found)), rng.choice([1, 1, 2, 3, 10, 30])
        choice = rng.randrange(8)
        if choice == 0:
            del found[at : at + length]
        elif choice == 1:
            found[other:other] = found[at : at + length]
        elif choice == 2:
            found[at], found[other] = found[other], found[at]
        elif choice == 3:
            found[at] = rng.choice(PUT_IN)
        elif choice == 4:
            found.insert(at, rng.choice(PUT_IN))
        elif choice == 5:
            source = rng.choice(PICKLES)
            start = rng.randrange(len(source))
            found[at:at] = source[start : start + length]
        else:  # fetch something else, in place of what is there or before it
            kept = sum(opcode[:1] in KEEPS for opcode in found[:at]) or 1
            found[at : at + rng.randrange(2)] = [b"h" + bytes([rng.randrange(min(kept, 256))])]
        if len(found) < 3:
            break
    count = 0
    for at, opcode in enumerate(found):
        if opcode[:1] in KEEPS:
            if opcode != b"\x94":
                found[at] = b"q" + bytes([count]) if count < 256 else b"r" + struct.pack("<I", count)
            count += 1
        elif opcode[:1] == b"\x95":
            found[at] = b"\x95" + bytes(8)
    return b"".join(found) + rng.choice([b"", bytes(64)])


@settings(max_examples=1500, deadline=None)
@given(seeds)
def test_opcodes_moved_about(seed: int) -> None:
    rng = random.Random(seed)
    data = moved(rng)
    read = check(data)
    if rng.random() < 0.3:
        check_pieces(data, [rng.randrange(1, 8) for _ in range(rng.randrange(1, 6))], read)


# Input in pieces


@pytest.mark.parametrize("sizes", [[1], [7], [15], [16], [17], [3, 1, 4, 1, 5]], ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_in_pieces(release: str, sizes: list[int]) -> None:
    for protocol in (2, 4):
        data = pickle.dumps(small(release), protocol)
        check_pieces(data, sizes, native(data))


@pytest.mark.parametrize("size", [300, 1 << 18, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_long_texts_in_pieces(size: int) -> None:
    raw = {"segments": [], "device_traces": [], "before": 1, "later": ["é" + "x" * (size - 2), "y" * size]}
    data = pickle.dumps(raw)
    whole = check(data)
    assert isinstance(whole, SourceError) == (size > 1 << 20)
    check_pieces(data, [65_521, 1, 2], whole)
    check_pieces(data[: size // 2], [65_521, 1, 2], native(data[: size // 2]))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_fuzzing_found(path: Path) -> None:
    data = path.read_bytes()
    whole = check(data)
    for sizes in ([1], [2, 7, 3], [40]):
        check_pieces(data, sizes, whole)


@pytest.mark.parametrize("name", [name for name in fixture_names() if snapshot_path(name).stat().st_size < 20_000])
def test_recordings_in_pieces(name: str) -> None:
    data = lzma.decompress(snapshot_path(name).read_bytes())
    whole = check(data)
    assert isinstance(whole, SnapshotData)
    check_pieces(data, [1009, 1, 17, 4096], whole)


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.name)
def test_public_files_in_pieces(path: Path) -> None:
    data = path.read_bytes()
    whole = check(data)
    assert isinstance(whole, SnapshotData)
    check_pieces(data, [100_003, 13], whole)
