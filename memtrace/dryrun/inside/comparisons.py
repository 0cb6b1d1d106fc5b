"""Comparisons of numbers that nobody computed, which are taken as finite: the answers that are known all the same.

`isfinite`, `isnan` and `isinf` are made of these, and a program that asks them would otherwise see an overflow.
"""

from __future__ import annotations

import math
from typing import Any, Optional

NAMES = {"eq", "ne", "lt", "le", "gt", "ge"}
_OF_EQUALS = {"eq", "le", "ge"}
_BELOW = {"ne", "lt", "le"}
_ABOVE = {"ne", "gt", "ge"}


def known(name: str, first: Any, second: Any) -> Optional[bool]:
    """The one answer everywhere: of a tensor with itself, or with an infinity. None: it depends."""
    if first is second:
        return name in _OF_EQUALS
    if isinstance(second, float) and math.isnan(second):
        return name == "ne"
    if isinstance(second, float) and math.isinf(second):
        return name in (_BELOW if second > 0 else _ABOVE)
    return None
