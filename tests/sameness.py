"""Whether two things made of columns are the same, and where they are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np


def differences(left: Any, right: Any, where: str = "") -> Iterator[str]:
    """The places at which two dataclasses, columns, sequences or values differ; none when they are the same."""
    if type(left) is not type(right):
        yield f"{where}: {type(left).__name__} and {type(right).__name__}"
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            yield from differences(getattr(left, field.name), getattr(right, field.name), f"{where}.{field.name}")
    elif isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            yield f"{where}: {left.dtype}{left.shape} and {right.dtype}{right.shape}"
        elif not bool((left == right).all()):
            row = int((left != right).argmax())
            yield f"{where}[{row}]: {left[row]} and {right[row]}"
    elif isinstance(left, (tuple, list)) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif left != right:
        yield f"{where}: {str(left)[:80]} and {str(right)[:80]}"
