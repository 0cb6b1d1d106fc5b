"""The native reader and the reference accept the same pickles and make the same columns of them, to the last byte."""

from __future__ import annotations

import io
import json
import lzma
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import ROOT, fixture_names, shared_snapshots, snapshot_path
from sameness import differences

from memtrace.errors import SourceError
from memtrace.io.opening import Stored
from memtrace.io.read import NATIVE, load_in_python, read_snapshot
from memtrace.io.source import PickleStream
from memtrace.model import SnapshotData

if NATIVE:
    from memtrace.io.native import decode_snapshot

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native reader is not built")
CORPUS = Path(__file__).parent.parent / "corpus" / "reader"
SHARED = [path for path, _ in shared_snapshots() if "700steps" not in path.name]  # that one is 6 GB of objects
RELEASES = ("1.13", "2.0", "2.1", "2.3", "2.8", "2.12", "2.15")
PICKLERS = {
    "2": lambda raw: pickle.dumps(raw, 2),
    "3": lambda raw: pickle.dumps(raw, 3),
    "4": lambda raw: pickle.dumps(raw, 4),
    "5": lambda raw: pickle.dumps(raw, 5),
    "optimized": lambda raw: pickletools.optimize(pickle.dumps(raw, 4)),
    "in Python": lambda raw: pickle._dumps(raw, 4),  # type: ignore[attr-defined]
    "through JSON": lambda raw: pickle.dumps(json.loads(json.dumps(raw))),
}


def outcome(read: Any, data: bytes) -> SnapshotData | SourceError:
    """What a reader makes of some bytes; nothing but an error of ours may come out of it."""
    source = Stored("made", io.BytesIO(data), len(data), 1 << 30, None)  # type: ignore[arg-type]
    try:
        return read(PickleStream(io.BufferedReader(source), source))
    except SourceError as error:
        return error


def check(data: bytes) -> bool:
    """Holds both readers against each other; whether they accept."""
    native, python = outcome(decode_snapshot, data), outcome(load_in_python, data)
    if isinstance(native, SourceError) or isinstance(python, SourceError):
        assert type(native) is type(python), (native, python)
        return False
    assert not list(differences(native, python))
    return True


# Recordings


@pytest.mark.parametrize("name", fixture_names())
def test_shipped_recordings(name: str) -> None:
    path = snapshot_path(name)
    found = list(differences(read_snapshot(path, native=True), read_snapshot(path, native=False)))
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.name)
def test_shared_recordings(path: Path) -> None:
    found = list(differences(read_snapshot(path, native=True), read_snapshot(path, native=False)))
    assert not found


def small(release: str) -> Any:
    builder = SnapshotBuilder(torch=release)
    for index in range(6):
        builder.alloc(0x7F0000000000 + index * (4 << 20), 4 << 20, stack=f"f{index % 2};g")
    return builder.free(0x7F0000000000).build()


@pytest.mark.parametrize("pickler", PICKLERS)
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_by_every_pickler(release: str, pickler: str) -> None:
    assert check(PICKLERS[pickler](small(release)))


# Objects: any that could be a snapshot, and some that could not

numbers = st.one_of(
    st.integers(0, 1 << 20), st.integers(-(2**63), 2**64), st.booleans(), st.none(), st.floats(allow_nan=False)
)
texts = st.one_of(st.sampled_from(["", "N/A", "alloc", "frames", "segments", "é", "\ud800"]), st.text(max_size=8))
frames = st.lists(
    st.one_of(
        st.fixed_dictionaries({"filename": texts, "line": st.integers(0, 99), "name": texts}),
        st.dictionaries(st.sampled_from(["filename", "line", "name", "fx_node_op"]), numbers | texts, max_size=3),
    ),
    max_size=4,
)
pool_ids = st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.lists(numbers, max_size=3))
anything = st.recursive(
    numbers | texts | frames | pool_ids,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
addresses = st.integers(0, 7).map(lambda index: 0x7F0000000000 + index * (2 << 20))
sizes = st.sampled_from([512, 4096, 1 << 20, 2 << 20])
actions = st.sampled_from("alloc free_requested free_completed segment_alloc segment_map oom snapshot annotate".split())
events = st.fixed_dictionaries(
    {"action": actions | texts, "addr": addresses, "size": sizes, "stream": st.integers(0, 3)},
    optional={
        "frames": frames,
        "time_us": st.integers(0, 99),
        "compile_context": texts,
        "user_metadata": texts,
        "pool_id": pool_ids,
        "device_free": numbers,
        "cpp_frames": st.lists(texts, max_size=3),
        "later": anything,
    },
)
blocks = st.fixed_dictionaries(
    {"size": sizes, "state": st.sampled_from(["inactive", "active_allocated", "active_pending_free"])},
    optional={
        "address": addresses,
        "requested_size": st.integers(0, 512),
        "frames": frames,
        "history": st.lists(
            st.fixed_dictionaries(
                {"addr": addresses, "real_size": st.integers(0, 512)},
                optional={"frames": frames, "cpp_frames": st.lists(texts, max_size=2)},
            ),
            max_size=2,
        ),
    },
)
segments = st.fixed_dictionaries(
    {"address": addresses, "total_size": sizes, "blocks": st.lists(blocks, max_size=2)},
    optional={
        "device": st.integers(0, 2),
        "stream": st.integers(0, 3),
        "segment_type": st.sampled_from(["small", "large"]),
        "segment_pool_id": pool_ids,
        "frames": frames,
        "is_expandable": st.booleans(),
        "later": anything,
    },
)
annotations = st.fixed_dictionaries(
    {"name": texts, "stage": st.sampled_from(["START", "END"]), "device": st.integers(0, 1), "time_us": st.integers(0)}
)
snapshots = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "segments": st.lists(segments, max_size=3),
            "device_traces": st.lists(st.lists(events, max_size=4), max_size=3),
            "allocator_settings": st.dictionaries(texts, anything, max_size=3),
            "external_annotations": st.lists(annotations, max_size=2),
            "later": anything,
        },
    ),
    st.lists(segments, max_size=2),
    anything,
)


def mutated(value: Any, rng: random.Random) -> Any:
    """Something in it replaced, left out, or put where something else was: also shared with where it is now."""
    places: list[tuple[Any, Any]] = []
    found, seen = [value], set()
    for item in found:
        if not isinstance(item, (dict, list)) or id(item) in seen:
            continue
        seen.add(id(item))  # what was changed before may contain itself
        places += [(item, key) for key in (item if isinstance(item, dict) else range(len(item)))]
        found += item.values() if isinstance(item, dict) else item
    if places:
        owner, key = rng.choice(places)
        choice = rng.randrange(4)
        if choice == 0:
            owner[key] = rng.choice([None, True, -1, 2**63, 2**64, 0.5, "", "x", [], {}, (), (1, 2)])
        elif choice == 1:
            del owner[key]
        elif choice == 2:
            other, place = rng.choice(places)
            owner[key] = other.get(place) if isinstance(other, dict) else other[place] if place < len(other) else None
        elif isinstance(owner, list):
            owner.append(owner[key])
    return value


picklers = st.sampled_from([pickler for name, pickler in PICKLERS.items() if name != "through JSON"])


@settings(max_examples=600, deadline=None)
@given(snapshots, picklers)
def test_odd_objects(raw: Any, pickler: Any) -> None:
    check(pickler(raw))


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(RELEASES), st.randoms(use_true_random=False), st.integers(1, 4), picklers)
def test_snapshots_with_something_changed(release: str, rng: random.Random, changes: int, pickler: Any) -> None:
    raw = small(release)
    for _ in range(changes):
        mutated(raw, rng)
    check(pickler(raw))


# Opcodes

OPCODES = [bytes([code]) for code in b"hj\x94K\x8a(}u]e\x8cXJM\x95qras\x85\x86\x87t)N\x88\x89G\x8b.c\x93R0"]
PICKLED = [pickler(small(release)) for release in RELEASES for pickler in (PICKLERS["2"], PICKLERS["4"])]
OFFSETS = [[offset for *_, offset in pickletools.genops(data)] for data in PICKLED]


def damaged(rng: random.Random) -> bytes:
    """A pickle with a few opcodes changed, moved, added or left out."""
    chosen = rng.randrange(len(PICKLED))
    data, offsets = bytearray(PICKLED[chosen]), OFFSETS[chosen]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = min(rng.choice(offsets) if rng.random() < 0.7 else rng.randrange(len(data)), len(data) - 1)
        choice = rng.randrange(6)
        if choice == 0:
            data[at] = rng.randrange(256)
        elif choice == 1:
            data[at : at + 1] = rng.choice(OPCODES)
        elif choice == 2:
            data[at:at] = rng.choice(OPCODES)
        elif choice == 3:
            del data[at : at + rng.choice([1, 2, 5, 20])]
        elif choice == 4:
            start = rng.choice(offsets)
            data[at:at] = data[start : start + 40]
        else:
            gets = [offset for offset in offsets if data[offset : offset + 1] == b"h" and offset + 1 < len(data)]
            if gets:
                data[rng.choice(gets) + 1] = rng.randrange(60)
        if not data:
            data = bytearray(b"\x80")
    return bytes(data)


@settings(max_examples=1500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_damaged_pickles(rng: random.Random) -> None:
    check(damaged(rng))


@pytest.mark.parametrize("release", ["2.0", "2.12"])
def test_every_byte_set_high(release: str) -> None:
    data = pickle.dumps(small(release))
    for at in range(2, len(data)):
        check(data[:at] + bytes([data[at] | 0x80]) + data[at + 1 :])


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*")), ids=lambda path: path.name)
def test_what_fuzzing_found(path: Path) -> None:
    check(path.read_bytes())


def test_public_files() -> None:
    paths = sorted((ROOT.parent / "shared" / "public").glob("*.pickle"))
    for path in paths:
        assert check(path.read_bytes()), path.name
    for name in fixture_names():
        if name.startswith("public-"):
            assert check(lzma.decompress(snapshot_path(name).read_bytes())), name
