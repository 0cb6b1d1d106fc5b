"""Values and columns in a bundle: what comes back is what was written, and what does not fit is not written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caching import opened
from numpy.typing import NDArray

from memtrace.io.bundle import Bundle, Packed, UnfitError
from memtrace.model import StringTable


@pytest.mark.parametrize(
    "value",
    ["", "\ud800\udc00", "a\0b", "\U0001f600"],
)
def test_texts_come_back(value: str, tmp_path: Path) -> None:
    table = StringTable((value, "", "\udc00", value, "é"))
    again = written(tmp_path, {"table": (table, StringTable), "text": (value, str)})
    assert again.get("table", StringTable).values == table.values
    assert again.get("text", str) == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((1, 2), tuple[int, ...]),
        (((0, 0), (1, -5)), tuple[tuple[int, int], ...]),
        ({3: 2**70}, dict[int, int]),
        ({"a": {"b": 1}, "c": True, "d": 0.1, "e": 1, "f": "x"}, dict[str, str | int | float | bool | dict[str, int]]),
        (None, NDArray[np.int32] | None),
        (np.arange(9, dtype=np.int32), NDArray[np.int32] | None),
        (np.zeros(0, np.uint64), NDArray[np.uint64]),
        (np.arange(99999, dtype=np.int64)[::-3], NDArray[np.int64]),
    ],
)
def test_values_come_back(value: Any, kind: Any, tmp_path: Path) -> None:
    again = written(tmp_path, {"it": (value, kind)}).get("it", kind)
    if isinstance(value, np.ndarray):
        assert again.dtype == value.dtype
        assert np.array_equal(again, value)
    else:
        assert again == value
        assert repr(again) == repr(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, int),
        (1, float),
        (np.int64(1), int),
        ([1], tuple[int, ...]),
        ((1, 2, 3), tuple[int, int]),
        ("x", dict[str, int]),
        (np.zeros(2, np.int64), NDArray[np.int32]),
        (np.zeros((2, 2), np.int64), NDArray[np.int64]),
        (np.array([None]), NDArray[np.object_]),
        (StringTable((1,)), StringTable),  # type: ignore[arg-type]
    ],
)
def test_values_of_another_class_are_not_written(value: Any, kind: Any) -> None:
    with pytest.raises(UnfitError):
        Packed({"it": (value, kind)})


def written(folder: Path, values: Mapping[str, tuple[object, Any]]) -> Bundle:
    packed = Packed(values)
    path = folder / "bundle"
    with path.open("wb") as file:
        packed.write(file)
    assert path.stat().st_size == packed.size
    return opened(path)
