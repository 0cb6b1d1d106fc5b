"""Operators whose result is as large as what they find: the size is worked out first, and answers their own question.

ATen asks the device for the size by a small copy; that copy reads what we say, and the rest happens as ever.
"""

from __future__ import annotations

import warnings
from typing import Any, Dict, List

from .guesses import Guesses

_COUNT_BYTES = 8
_NONZERO_BYTES = 4
_SIZED = ("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount")


class Sizes:
    """`mask`: the share of a large mask that is taken as true."""

    def __init__(self, torch: Any, values: Any, presence: Any, device: Any, guesses: Guesses, mask: float) -> None:
        self._torch, self._values, self._presence = torch, values, presence
        self._device, self._guesses, self._mask = device, guesses, mask
        self._library: Any = None

    def knows(self, name: str) -> bool:
        """Whether `call` is for this operator."""
        return name in _SIZED

    def call(self, name: str, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        """The operator, all of whose tensors are small."""
        found = self._values.on_host(func, args, kwargs)
        wanted = list(found) if isinstance(found, tuple) else [found]
        count = wanted[0].shape[args[1] if name == "unique_dim" else 0]
        if name == "bincount":  # reads the minimum, then the maximum
            answers, size = [0, count - 1], args[0].element_size()
        else:
            answers, size = [count], _COUNT_BYTES
        for answer in answers:
            self._device.answer(answer, size)
        if name == "repeat_interleave":  # reads the sum, then whether none is negative
            self._device.answer(1, 1)
        try:
            result = func(*args, **kwargs)
        finally:
            self._device.forget_answers()
        self._copy(name, result, wanted)
        return result

    def _copy(self, name: str, result: Any, wanted: List[Any]) -> None:
        for output, value in zip(result if isinstance(result, tuple) else (result,), wanted):
            if output.shape == value.shape:
                self._values.alias(output).copy_(value)
            else:
                self._guesses.add("size", f"{name}: {tuple(output.shape)} for {tuple(value.shape)}", with_site=True)

    def trues_of(self, mask: Any) -> int:
        """How many of it are taken as true, as nobody can know; said with the program's line."""
        self._guesses.add("mask", f"{self._mask:.0%} of a mask of {mask.numel():,} taken as true", with_site=True)
        return int(mask.numel() * self._mask)

    def install(self) -> None:
        """`aten::nonzero` for CUDA, which also serves boolean indexing and masked_select, in and out of the mode."""
        self._library = self._torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes another's place
            self._library.impl("nonzero", self._nonzero, "CUDA")

    def _nonzero(self, mask: Any) -> Any:
        torch = self._torch
        with self._presence.away():
            found = None
            if mask.numel() == 0:
                count = 0
            elif self._values.is_small(mask):
                found = self._values.alias(mask).nonzero()
                count = found.shape[0]
            else:
                count = self.trues_of(mask)
            output = torch.empty((0,), dtype=torch.int64, device=mask.device)
            if mask.numel():
                self._device.answer(count, _NONZERO_BYTES)
            try:
                torch.ops.aten.nonzero.out(mask, out=output)
            finally:
                self._device.forget_answers()
            if found is not None and count and output.shape == found.shape:
                self._values.alias(output).copy_(found)
            return output
