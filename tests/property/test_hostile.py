"""Damaged and hostile files: a clear error or an answer, never a crash (issue: truncations, byte flips).

Whatever a damaged file still loads as is taken through the whole program: replay, blame, tree.
"""

from __future__ import annotations

import lzma
import random
from pathlib import Path

import pytest
from recordings import snapshot_path

import memtrace
from memtrace.analysis.blame import BYS
from memtrace.errors import SourceError


def content(name: str) -> bytes:
    with lzma.open(snapshot_path(name)) as file:
        return file.read()


def survives(data: bytes, path: Path) -> bool:
    """Whether the damaged snapshot can still be used; anything but a SourceError is a failure."""
    path.write_bytes(data)
    try:
        snapshot = memtrace.load(path)
    except SourceError:
        return False
    for device in snapshot.devices:
        for of in ("allocated", "reserved"):
            for by in BYS:
                blame = snapshot.blame("peak", of, by, device)
                assert sum(row.bytes for row in blame.rows) == blame.total_bytes
        snapshot.verify(device=device)
        snapshot.info(device)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["oom", "alloc-retry", "cuda-graph"])
def test_every_truncation(name: str, tmp_path: Path) -> None:
    data = content(name)
    path = tmp_path / "cut.pickle"
    assert survives(data, path)
    assert not any(survives(data[:length], path) for length in range(len(data)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp-adamw", "mlp-expandable", "two-streams"])
def test_random_truncations(name: str, tmp_path: Path) -> None:
    data, rng = content(name), random.Random(name)
    assert not any(survives(data[: rng.randrange(len(data))], tmp_path / "cut.pickle") for _ in range(667))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp-adamw", "mlp-expandable", "two-streams"])
@pytest.mark.parametrize("part", range(2))
def test_random_byte_flips(name: str, part: int, tmp_path: Path) -> None:
    data, rng = content(name), random.Random(f"{name} {part}")
    usable = 0
    for _ in range(834):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        usable += survives(bytes(damaged), tmp_path / "flipped.pickle")
    assert usable  # else this would test the reader only
