"""What a rank is told by others that are not there. Activations have the sizes of what waits for them; sizes do not."""

from __future__ import annotations

from typing import Any

from .guesses import Guesses

_FEW = 256
"""Integers up to which a message is taken for sizes, not for data: as many as DeepSpeed's pipeline sends of them."""
_MADE_UP = {"numbers": "zeros", "a broadcast": "this rank's own numbers", "gathered objects": "this rank's own"}
_REFUSAL = (
    "this rank waits for {what} from another one, and a dry run has no other: what it allocates next may depend on it. "
    "The first stage of a pipeline can be run (--rank 0), or the job recorded for real (memtrace record)"
)


class MessageError(RuntimeError):
    """A rank waits for a message that its own memory may depend on."""


def install(world: Any, guesses: Guesses) -> None:
    """`world`: the recorder's simulation of one rank among many, which calls back."""

    def received(what: str, place: Any) -> None:
        if what == "an object" or (what == "numbers" and _may_be_sizes(place)):
            raise MessageError(_REFUSAL.format(what=what))
        if what == "a broadcast" and not _may_be_sizes(place):  # weights
            return
        made_up = _MADE_UP.get(what, "what the list held before")
        guesses.add("message", f"{what} from another rank: {made_up}", with_site=True)

    world.on_message = received


def _may_be_sizes(tensor: Any) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return bool(not is_number and tensor.numel() <= _FEW)
