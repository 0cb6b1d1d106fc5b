"""Masks that are made by comparing numbers that nobody computed.

A share of them is taken as true. Where the program then asks for all or any of one, it asks whether all is well, and
ends or repeats where it is not: the answers are yes and no, as for masks that are not computed with.
"""

from __future__ import annotations

import math
from typing import Any, List, Optional, Set

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
ALL = {"all", "_is_all_true"}
ALL_OR_ANY = {*ALL, "any", "_is_any_true"}
_OF_EQUALS = {"eq", "le", "ge"}
_BELOW = {"ne", "lt", "le"}
_ABOVE = {"ne", "gt", "ge"}


def known(name: str, first: Any, second: Any) -> Optional[bool]:
    """The one answer everywhere: of a tensor with itself, or with an infinity. None: it depends.

    `isfinite`, `isnan` and `isinf` are made of these, and the numbers are taken as finite.
    """
    if first is second:
        return name in _OF_EQUALS
    if isinstance(second, float) and math.isnan(second):
        return name == "ne"
    if isinstance(second, float) and math.isinf(second):
        return name in (_BELOW if second > 0 else _ABOVE)
    return None


class Masks:
    """Which masks were assumed, by their addresses, as nothing may hold a tensor."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._assumed: Set[int] = set()

    def assume(self, mask: Any, alias: Any, count: int) -> None:
        """Makes so many true, evenly spread; `alias` is its memory."""
        total = mask.numel()
        steps = self._torch.arange(total + 1) * count // max(total, 1)
        alias.copy_((steps[1:] > steps[:-1]).view(mask.shape))
        if 0 < count < total:
            self._assumed.add(mask.data_ptr())

    def follow(self, tensors: List[Any], outputs: List[Any]) -> bool:
        """An operator was called. Whether one of its tensors was assumed: then the masks it made are too."""
        if not self._assumed:
            return False
        is_assumed = any(self._is_mask(one) and one.data_ptr() in self._assumed for one in tensors)
        for one in outputs:
            if is_assumed and self._is_mask(one):
                self._assumed.add(one.data_ptr())
            elif one.layout is self._torch.strided:  # memory that a mask once had
                self._assumed.discard(one.data_ptr())
        return is_assumed

    def _is_mask(self, tensor: Any) -> bool:
        torch = self._torch
        return bool(tensor.is_cuda and tensor.dtype is torch.bool and tensor.layout is torch.strided)
