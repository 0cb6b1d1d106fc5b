"""`--overflow-first N`: the gradients of the first N steps are not finite, as in an fp16 run that finds its scale."""

from __future__ import annotations

from typing import Any


class Overflows:
    """Counts down the steps that are to overflow; one step asks several times."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def saw(self, name: str, args: Any, values: Any) -> None:
        """Torch's GradScaler: the check of gradients sets a flag, the update of the scale ends the step."""
        if name == "_amp_foreach_non_finite_check_and_unscale_" and self._left > 0:
            values.alias(args[1]).fill_(1)
        elif name == "_amp_update_scale_":
            self.step_ended()

    def step_ended(self) -> None:
        """A step was skipped, or made."""
        self._left -= 1

    @property
    def is_now(self) -> bool:
        return self._left > 0
