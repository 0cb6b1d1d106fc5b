"""load_snapshot_object(): loads plain data, runs nothing, and stays within its memory whatever the bytes are."""

from __future__ import annotations

import copyreg
import gc
import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import (
    NotAPickleError,
    NotASnapshotError,
    SourceError,
    TruncatedError,
    UnreadableError,
    UnsafePickleError,
)
from memtrace.io import unpickle
from memtrace.io.read import NATIVE
from memtrace.io.scan import SCAN_LIMIT
from memtrace.io.unpickle import collection_paused, load_snapshot_object
from memtrace.units import MiB

FRAMES = [{"filename": "train.py", "line": 7, "name": "step"}, {"filename": "a.py", "line": 2**40, "name": "x" * 300}]
SNAPSHOT = {
    "segments": [{"address": 2**63, "segment_pool_id": (0, 1), "is_expandable": False, "frames": FRAMES, "blocks": []}],
    "device_traces": [
        [{"action": "alloc", "addr": 7, "size": 512, "frames": FRAMES, "time_us": i} for i in range(9)],
        [],
    ],
    "allocator_settings": {"garbage_collection_threshold": 0.5, "roundup": {}, "name": None, "pinned": True},
}


def load(data: bytes) -> object:
    return load_snapshot_object(io.BufferedReader(io.BytesIO(data)))


@pytest.fixture
def unscanned(monkeypatch):
    """Treats even small pickles like those too large to walk, and looks at nothing before loading."""
    monkeypatch.setattr(unpickle, "SCAN_LIMIT", 4)
    monkeypatch.setattr(unpickle, "_START_BYTES", 2)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_loads_a_snapshot(protocol):
    assert load(pickle.dumps(SNAPSHOT, protocol) + b"\0\0") == SNAPSHOT


@pytest.mark.parametrize("protocol", [2, 4])
def test_loads_a_snapshot_too_large_to_walk(protocol):
    large = {"device_traces": [[{"action": "alloc", "addr": i, "name": f"{i} " * 150} for i in range(15_000)]]}
    data = pickle.dumps(large, protocol)
    assert len(data) > SCAN_LIMIT
    assert load(data) == large


@pytest.mark.parametrize("protocol", [2, 4])
def test_loads_the_same_without_the_walk(protocol, unscanned):
    assert load(pickle.dumps(SNAPSHOT, protocol)) == SNAPSHOT


@pytest.mark.parametrize("keep", [0.2, 0.9, 0.999])
def test_a_large_file_cut_off_is_truncated(keep):
    data = pickle.dumps({"segments": [], "more": ["x" * 1000 + str(i) for i in range(20_000)]})
    assert len(data) * 0.5 > SCAN_LIMIT
    with pytest.raises(TruncatedError):
        load(data[: int(len(data) * keep)])


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_cut_is_seen_without_the_walk(protocol, unscanned):
    data = pickle.dumps(SNAPSHOT, protocol)
    for length in range(5, len(data)):
        with pytest.raises(TruncatedError):
            load(data[:length])


# No code runs


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Stateful:
    """Creates a file when its state is set."""

    def __setstate__(self, state):
        Path(state).touch()

    def __reduce__(self):
        return Stateful, (), "sentinel"


def hostile(sentinel: Path) -> dict[str, bytes]:
    command = f"touch {sentinel}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    return {
        "global": b"\x80\x02cos\nsystem\n(" + text + b"tR.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "inst": b"\x80\x02(" + text + b"ios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "newobj": b"\x80\x02cbuiltins\neval\n" + text + b"\x85\x81.",
        "build": pickle.dumps(Stateful(), 2),
        "reduce": pickle.dumps([Touch(sentinel)]),
        "extension": b"\x80\x02\x82\xf0" + text + b"\x85R.",
        "persistent id": b"\x80\x02" + text + b"Q.",
        "persistent line": b"\x80\x02P" + command + b"\n.",
    }


@pytest.fixture
def extension_for_system():
    """os.system under an extension code, and already in the cache that bypasses find_class."""
    copyreg.add_extension("os", "system", 0xF0)
    copyreg._extension_cache[0xF0] = os.system
    yield
    copyreg.remove_extension("os", "system", 0xF0)


@pytest.mark.usefixtures("extension_for_system")
@pytest.mark.parametrize("name", hostile(Path("sentinel")))
@pytest.mark.parametrize("large", [False, True])
def test_no_code_runs(tmp_path, monkeypatch, name, large):
    if large:
        monkeypatch.setattr(unpickle, "SCAN_LIMIT", 4)
        monkeypatch.setattr(unpickle, "_START_BYTES", 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickleError) as caught:
        load(hostile(tmp_path / "sentinel")[name])
    assert list(tmp_path.iterdir()) == []
    assert caught.value.hint


def test_the_hostile_pickles_are_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(hostile(tmp_path / "sentinel")["stack global"])
    assert [path.name for path in tmp_path.iterdir()] == ["sentinel"]


def test_what_is_asked_for_is_named(unscanned):
    with pytest.raises(UnsafePickleError, match=r"'os\.system'"):
        load(b"\x80\x02cos\nsystem\n.")


# Memory and time

N = 1_000_000
AT = b"\x80\x04}\x8c\x01a\x94"  # a dict and a key for what follows, which "s." puts in
DOUBLING = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(90))


def batches(unit: bytes, room: int) -> bytes:
    """A list of `room` bytes, in batches as picklers write them."""
    batch = b"(" + unit * 1000 + b"e"
    return b"]" + batch * (room // len(batch) - 1)


BOMBS = {
    # name: (the pickle, the code of its error or None if it is harmless)
    "memo index": (b"\x80\x04Nr\xff\xff\xff\x7f.", "unsafe-pickle"),
    "memo index 1/8": (b"\x80\x04Nr\xff\xff\xff\x0f.", "unsafe-pickle"),
    "memo index before a long tail": (b"\x80\x04Nr\xff\xff\xff\x7f." + b"\0" * 9 * MiB, "unsafe-pickle"),
    "string of 2**62": (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.", "not-a-snapshot"),
    "string of 2**34": (b"\x80\x04\x8d" + struct.pack("<Q", 2**34) + b"a.", "not-a-snapshot"),
    "large file, string of 2**34": (
        AT + batches(b"N", 10 * N) + b"\x8d" + struct.pack("<Q", 2**34) + b"a.",
        ("not-a-snapshot", "truncated", "too-large"),
    ),
    "bytes of 2**40": (b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"a.", "not-a-snapshot"),
    "bytearray of 2**40": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.", "not-a-snapshot"),
    "frame of 2**40": (b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.", "truncated"),
    "integer of 2**31": (b"\x80\x02\x8b\xff\xff\xff\x7f1.", "not-a-snapshot"),
    "integer of 4 MB": (b"\x80\x02\x8b" + struct.pack("<I", 4 * N) + b"1" * 4 * N + b".", "not-a-snapshot"),
    "decimal integer": (b"\x80\x02I" + b"9" * 4 * N + b"\n.", "not-a-snapshot"),
    "lists in lists": (b"\x80\x04" + b"]" * N + b"a" * (N - 1) + b".", "unsafe-pickle"),
    "lists in lists by marks": (b"\x80\x04" + b"](" * N + b"e" * N + b".", "not-a-snapshot"),
    "tuples in tuples": (b"\x80\x04N" + b"\x85" * N + b".", "not-a-snapshot"),
    "tuples in tuples as a key": (b"\x80\x04}N" + b"\x85" * N + b"Ns.", "not-a-snapshot"),
    "tuples that double as a key": (b"\x80\x04}" + DOUBLING + b"Ns.", "not-a-snapshot"),
    "a list in itself": (b"\x80\x04]\x94h\x00a.", "not-a-snapshot"),
    "8M lists": (b"\x80\x04" + b"]" * (SCAN_LIMIT - 3) + b".", "unsafe-pickle"),
    "8M dicts": (b"\x80\x04" + b"}" * (SCAN_LIMIT - 3) + b".", "unsafe-pickle"),
    "8M marks": (b"\x80\x04" + b"(" * (SCAN_LIMIT - 3) + b".", "not-a-snapshot"),
    "8M None": (b"\x80\x04" + b"N" * (SCAN_LIMIT - 3) + b".", ("truncated", "unsafe-pickle")),
    "8M None in a list": (AT + batches(b"N", SCAN_LIMIT - 20) + b"s.", "not-a-snapshot"),
    "8M None in one batch": (AT + b"](" + b"N" * (SCAN_LIMIT - 20) + b"es.", "unsafe-pickle"),
    "8M puts": (b"\x80\x04)" + b"\x94" * (SCAN_LIMIT - 5) + b".", None),
    "2M short strings": (AT + batches(b"\x8c\x02\xc4\x80", SCAN_LIMIT - 20) + b"s.", "not-a-snapshot"),
    "as many dicts as pass": (AT + batches(b"}h\x00Ns" + b"N" * 11, SCAN_LIMIT - 20) + b"s.", "not-a-snapshot"),
    "as many lists as pass": (AT + batches(b"]Na" + b"N" * 5, SCAN_LIMIT - 20) + b"s.", "not-a-snapshot"),
    "as many events as pass": (
        b"\x80\x04}\x8c\x0ddevice_traces]" + batches(b"}" + b"\x8c\x0b" + b"a" * 11 + b"Ns", SCAN_LIMIT - 40) + b"as.",
        "not-a-snapshot",
    ),
    "a long key again and again": (
        b"\x80\x04}" + (b"X" + struct.pack("<I", MiB) + b"a" * MiB) * 2 + b"\x94(" + b"h\x00N" * N + b"u.",
        ("truncated", "not-a-snapshot", "unsafe-pickle"),
    ),
}  # fmt: skip
TEXT = "x" * (MiB - 1)
EVENT = {"action": "alloc", "addr": 0, "size": 1, "stream": 0, "frames": []}
BOMBS |= {
    "a list fetched again and again": (
        AT + b"](]\x94(" + b"h\x00" * 300_000 + b"e" + b"h\x01" * 300_000 + b"es.",
        "not-a-snapshot",
    ),
    "one text in every annotation": (
        pickle.dumps({"external_annotations": [{f"{key}": TEXT for key in range(60)} for _ in range(300)]}),
        "not-a-snapshot",
    ),
    "one text in every block": (
        pickle.dumps({"segments": [{"blocks": [{f"{key}": TEXT for key in range(60)} for _ in range(300)]}]}),
        "not-a-snapshot",
    ),
    "one text as the name of a thousand C++ frames": (
        pickle.dumps({"device_traces": [[{**EVENT, "cpp_frames": [TEXT] * 1000} for _ in range(100)]]}),
        "fine",
    ),
    "segments written without batches": (
        b"\x80\x02}X\x08\x00\x00\x00segments]("
        + b"}(X\x06\x00\x00\x00frames]X\x06\x00\x00\x00blocks]X\x04\x00\x00\x00sizeK\x07u" * 100_000
        + b"es.",
        "not-a-snapshot",
    ),
    "a key of its own in every event": (
        pickle.dumps(
            {"device_traces": [[{**EVENT, **{f"{index}-{key}": 1 for key in range(40)}} for index in range(9000)]]}
        ),
        "not-a-snapshot",
    ),
}
# Only the native reader walks pickles of any size.
LARGE_BOMBS = {
    "40M lists": (b"\x80\x04" + b"]" * 40 * N + b".", "unsafe-pickle"),
    "40M None": (b"\x80\x04" + b"N" * 40 * N + b".", "unsafe-pickle"),
    "40M None in a list": (AT + batches(b"N", 40 * N) + b"s.", "not-a-snapshot"),
    "20M references to a frame": (AT + b"}\x94" + batches(b"h\x01", 40 * N), "truncated"),
    "puts of tuples": (AT + batches(b")\x94", 40 * N) + b"s.", "not-a-snapshot"),
    "a stack a frame": (AT + b"}\x94" + batches(b"]h\x01a]h\x01a" + b"N" * 10, 40 * N) + b"s.", "not-a-snapshot"),
    "a deep stack, frame by frame": (AT + b"}\x94](" + b"h\x01" * 99_000 + b"e" + b"h\x01a" * 10 * N, "truncated"),
}  # fmt: skip

CHILD = """
import json, sys
from memtrace.errors import SourceError
from memtrace.io.read import read_snapshot

def high_water_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
before = high_water_kib()
code = None
try:
    read_snapshot(sys.argv[1], native=sys.argv[2] == "native")
except SourceError as error:
    code = error.code
print(json.dumps([code, (high_water_kib() - before) * 1024]))
"""


def set_off(path: Path, data: bytes, reader: str) -> tuple[str | None, int]:
    """The code of the error that a child got, and by how many bytes it grew."""
    path.write_bytes(data)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CHILD, str(path), reader]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    code, grown = json.loads(done.stdout)
    return code, grown


def of(expected: object) -> tuple[object, ...]:
    expected = expected if isinstance(expected, tuple) else (expected,)
    # harmless, but without segments or events
    return tuple({None: "not-a-snapshot", "fine": None}.get(code, code) for code in expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory as Linux shows it")
@pytest.mark.parametrize("reader", ["python", *(["native"] if NATIVE else [])])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_little_memory(tmp_path, name, reader):
    data, expected = BOMBS[name]
    code, grown = set_off(tmp_path / "bomb.pickle", data, reader)
    assert code in of(expected)
    assert grown < (300_000_000 if reader == "python" else 100_000_000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory as Linux shows it")
@pytest.mark.skipif(not NATIVE, reason="the native reader is not built")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LARGE_BOMBS)
def test_a_large_bomb_takes_little_memory(tmp_path, name, packed):
    data, expected = LARGE_BOMBS[name]
    code, grown = set_off(tmp_path / "bomb.pickle", gzip.compress(data, 1) if packed else data, "native")
    assert code in (of(expected) if not packed else (*of(expected), "too-large"))
    assert grown < 100_000_000


# Damage

CORPUS = [pickle.dumps(SNAPSHOT, protocol) for protocol in (2, 4)]
flips = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6)


def refusal(data: bytes) -> SourceError | None:
    try:
        load(data)
    except SourceError as error:
        return error
    return None


@settings(max_examples=400, deadline=None)
@given(data=st.sampled_from(CORPUS), flips=flips, cut=st.integers(0, 4000))
def test_damaged_bytes_raise_only_errors_of_ours(data, flips, cut):
    damaged = bytearray(data)
    for at, value in flips:
        damaged[at % len(damaged)] = value
    error = refusal(bytes(damaged[:cut]) if cut % 2 else bytes(damaged))
    assert error is None or error.hint


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02N\xff.",  # unknown operation
        b"\x80\x02h\x07.",
        b"\x80\x02NN\x86e.",
        b"\x80\x02X\x02\x00\x00\x00\xc3\x28.",
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x02Inone\n.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.",
        b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00K.",
        b"\x80\x02F1,5\n.",
    ],
)
def test_damage_met_while_loading_is_truncated(unscanned, data):
    with pytest.raises(TruncatedError):
        load(data)


@pytest.mark.parametrize("data", [b"\x80\x02}]Ns.", b"\x80\x02NNa.", b"\x80\x02N]Ns.", b"\x80\x02N}b."])
def test_values_combined_wrongly_are_no_snapshot(unscanned, data):
    with pytest.raises(NotASnapshotError):
        load(data)


@pytest.mark.parametrize("data", [b"", b"hello", b"x" * 9 * MiB])
def test_what_is_no_pickle_is_said(data):
    with pytest.raises(NotAPickleError):
        load(data)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(OSError(5, "Input/output error"), UnreadableError), (TruncatedError("cut", hint="x"), TruncatedError),
     (KeyboardInterrupt(), KeyboardInterrupt), (pickle.PickleError("cancelled"), pickle.PickleError)],
)  # fmt: skip
@pytest.mark.parametrize("after", [0, 100])
def test_errors_of_the_stream_pass_through(unscanned, raised, expected, after):
    class Failing(io.RawIOBase):
        left = after

        def readable(self):
            return True

        def readinto(self, buffer):
            if not self.left:
                raise raised
            piece = b"\x80\x02(" + b"N" * (self.left - 3)
            self.left = 0
            buffer[: len(piece)] = piece
            return len(piece)

    with pytest.raises(expected):
        load_snapshot_object(io.BufferedReader(Failing()))


# Garbage collection


@pytest.fixture
def collecting():
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.usefixtures("collecting")
def test_garbage_collection_is_off_while_loading_and_on_again_after_it(monkeypatch):
    seen = []

    class Watched(io.BytesIO):
        def readinto(self, buffer):
            seen.append(gc.isenabled())
            return super().readinto(buffer)

    unpickle._load(Watched(CORPUS[0]))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_garbage_collection_comes_back_after_an_error():
    with pytest.raises(UnsafePickleError):
        load(b"\x80\x02cos\nsystem\n.")
    assert gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_garbage_collection_that_was_off_stays_off():
    gc.disable()
    load(CORPUS[0])
    assert not gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_the_last_of_several_threads_turns_collection_on_again():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with collection_paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with collection_paused():
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
