"""The native reader: what only it does. That it accepts and gives what the reference does: test_native_reader."""

from __future__ import annotations

import io
import itertools
import pickle

import pytest
from builders import SnapshotBuilder

from memtrace.errors import TruncatedError
from memtrace.io.read import NATIVE
from memtrace.io.roles import BY_KEY, ITEMS, Role

if NATIVE:
    from memtrace.io import _decode
    from memtrace.io.native import walked

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native reader is not built")
MiB = 1 << 20
KEYS = ("device_traces", "segments", "allocator_settings", "external_annotations", "blocks", "history", "frames", "new")


@pytest.mark.parametrize(("parent", "key", "is_dict"), list(itertools.product(Role, KEYS, (False, True))))
def test_roles_are_those_of_the_table(parent, key, is_dict):
    expected = {
        **BY_KEY,
        **{(owner, anything): found for owner, found in ITEMS.items() for anything in KEYS},
        **{(Role.SETTINGS, anything): (True, Role.TABLE) for anything in KEYS},
    }
    must_be_dict, role = expected.get((parent, key), (is_dict, Role.OTHER))
    assert _decode.role_at(parent, key, is_dict) == (role if must_be_dict == is_dict else Role.OTHER)


def snapshot() -> bytes:
    builder = SnapshotBuilder(torch="2.11")
    for index in range(50):
        builder.alloc(0x7F0000000000 + index * 4 * MiB, 4 * MiB, stack=f"f{index};g")
    return pickle.dumps(builder.build())


class Pieces(io.RawIOBase):
    """A reader that gives little at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self.rest, self.size = memoryview(data), size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = min(self.size, len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def decoded(readinto):
    decoder = _decode.Decoder(readinto)
    decoder.run()
    columns = {key: None if column is None else bytes(column) for key, column in decoder.columns().items()}
    return decoder.root(), columns, decoder.traces(), bytes(decoder.frames())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_pieces_of_any_size_are_read(size):
    assert decoded(Pieces(snapshot(), size).readinto) == decoded(io.BytesIO(snapshot()).readinto)


@pytest.mark.parametrize("length", [255, 256, 70_000, MiB])
def test_texts_longer_than_what_is_read_at_once(length):
    data = pickle.dumps({"segments": [], "x" * length if length <= 1024 else "text": "y" * length})
    assert decoded(Pieces(data, 999).readinto)[0].keys() == pickle.loads(data).keys()


def test_an_interrupt_while_reading_passes_through():
    def interrupted(buffer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _decode.Decoder(interrupted).run()


def test_a_reader_that_lies_is_found_out():
    with pytest.raises(ValueError, match="more than there was room for"):
        _decode.Decoder(lambda buffer: len(buffer) + 1).run()


def test_what_is_not_there_cannot_be_asked_for():
    decoder = walked(io.BufferedReader(io.BytesIO(snapshot())))
    for ask in (decoder.stack, decoder.list_of_texts, lambda number: decoder.texts([number])):
        with pytest.raises((IndexError, OverflowError)):
            ask(1 << 27)
        with pytest.raises((IndexError, OverflowError)):
            ask(-1)


def test_the_end_of_the_file_is_the_end():
    with pytest.raises(TruncatedError, match="cut off"):
        walked(io.BufferedReader(io.BytesIO(snapshot()[:-1])))
