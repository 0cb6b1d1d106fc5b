"""A file for the cache to keep, its entry, and whether what comes back is the same."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from builders import SnapshotBuilder

import memtrace
from memtrace import paths
from memtrace.attribution.stored import Stored
from memtrace.io import cache
from memtrace.io.bundle import Bundle

OLD_NS = 1_700_000_000_123_456_789


def odd_snapshot(path: Path) -> Path:
    """Writes a small file of two devices with names that are no Unicode."""
    builder = SnapshotBuilder().alloc(0x10000, 600, stack="forward\ud800;train.py:12 main").free(0x10000)
    for number in range(40):
        builder.alloc(0x10000 + 0x400 * number, 700, stack=f"\udc00f{number};main", user_metadata=f"step={number}")
    other = SnapshotBuilder(1).alloc(0x900000, 5000).oom(1 << 40, device_free=77)
    written = builder.annotation("step", "START").annotation("step", "END").join(other).pickle(path)
    return aged(written)


def aged(path: Path, ns: int = OLD_NS) -> Path:
    os.utime(path, ns=(ns, ns))
    return path


def remembered(path: Path) -> Path:
    opened = memtrace.load(path)
    for device in opened.devices:
        opened.replay(device)
    assert opened.remember()
    (found,) = entries()
    return found


def entries() -> list[Path]:
    folder = paths.cache_directory()
    assert folder is not None
    return sorted(folder.iterdir()) if folder.exists() else []


def is_hit(path: Path | str, max_bytes: int | None = None) -> bool:
    found = Stored.of(str(path), max_bytes)
    return found is not None and found.data() is not None


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in class, dtype and content, all the way down."""
    assert type(ours) is type(theirs)
    if isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
        assert not theirs.flags.writeable
    elif dataclasses.is_dataclass(ours):
        for field in dataclasses.fields(ours):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs)
        for mine, its in zip(ours, theirs, strict=True):
            assert_same(mine, its)
    elif isinstance(ours, Mapping):
        assert_same(tuple(ours.items()), tuple(theirs.items()))
    else:
        assert ours == theirs


def entry_of(path: Path) -> Path:
    origin, folder = cache.origin_of(str(path)), paths.cache_directory()
    assert origin is not None
    assert folder is not None
    return folder / origin.name


def opened(path: Path) -> Bundle:
    with path.open("rb") as file:
        return Bundle(file.fileno())
