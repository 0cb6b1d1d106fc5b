"""Lists of loaded values turned into checked numpy columns: a wrong type or range is an error that says where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import NotASnapshotError

LIMIT = 2**63
"""Addresses, sizes, streams and times must be below this."""

_MAX_KEYS = 64
_MAX_REPEATS = 100_000
_SUM_LIMIT = 2**62


def integers(values: Sequence[object], what: str, where: str) -> NDArray[np.int64]:
    """A column of integers in [0, 2^63); bool is not an integer. `where` names the rows, `what` the value.

    Raises NotASnapshotError naming the first bad row.
    """
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            column = np.fromiter(values, np.int64, len(values))
        except OverflowError:
            column = None
        if column is not None and (len(column) == 0 or int(column.min()) >= 0):
            return column
    for index, value in enumerate(values):
        check_integer(value, what, f"{where} {index}")
    raise AssertionError("unreachable: one of the values is bad")


def check_integer(value: object, what: str, where: str) -> int:
    """`value` if it is an integer in [0, 2^63). Raises NotASnapshotError else."""
    if type(value) is not int:
        raise NotASnapshotError(f"{where}: {what} is {_shown(value)}, expected an integer")
    if value < 0:
        raise NotASnapshotError(f"{where}: {what} is negative ({_digits(value)})")
    if value >= LIMIT:
        raise NotASnapshotError(f"{where}: {what} is out of range ({_digits(value)})")
    return value


def check_sum(sizes: NDArray[np.int64], where: str) -> None:
    """Refuses sizes whose sum no 64-bit counter could hold (it would wrap silently)."""
    high, low = int((sizes >> 32).sum()), int((sizes & 0xFFFFFFFF).sum())
    if (high << 32) + low >= _SUM_LIMIT:
        raise NotASnapshotError(f"{where}: the sizes add up to more than 4 EiB")


def check_list(value: object, what: str) -> list[object]:
    """`value` if it is a list. Raises NotASnapshotError else."""
    if type(value) is not list:
        raise NotASnapshotError(f"{what} is {_shown(value)}, expected a list")
    return value


def check_dicts(values: Sequence[object], where: str) -> None:
    """Refuses anything but dicts with a sane number of keys, and one dict referenced so often that a small file grows
    large (torch never writes one twice)."""
    if set(map(type, values)) <= {dict}:
        if max(map(len, values), default=0) > _MAX_KEYS:  # type: ignore[arg-type]
            raise NotASnapshotError(f"{where} has a dict of more than {_MAX_KEYS} keys: not the work of torch")
        identities = np.sort(np.fromiter(map(id, values), np.int64, len(values)))
        if int(np.count_nonzero(identities[1:] == identities[:-1])) > _MAX_REPEATS:
            raise NotASnapshotError(f"{where}: the same dict stands in the list again and again: not the work of torch")
        return
    for index, value in enumerate(values):
        if type(value) is not dict:
            raise NotASnapshotError(f"{where} {index} is {_shown(value)}, expected a dict")


def _shown(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _digits(value: int) -> str:
    return hex(value) if value.bit_length() < 256 else f"a number of {value.bit_length()} bits"
