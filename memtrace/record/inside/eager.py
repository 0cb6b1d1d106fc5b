"""Keeps torch.compile away from our own code, which may be called in the middle of what it compiles.

Dynamo looks at every Python frame that runs inside a compiled region: it would compile ours, and guard them on what the
job hands us, again and again.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, TypeVar

from .notes import guard

Hook = TypeVar("Hook", bound=Callable[..., Any])
Result = TypeVar("Result")


def _frames() -> Any:
    """The part of torch that Dynamo is hooked in by; None: this torch has none."""
    torch: Any = sys.modules.get("torch")
    return getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)


def untraced(function: Hook) -> Hook:
    """A function that Dynamo neither looks into nor compiles on its own; those that it calls are not meant. Only once
    torch is imported."""
    for one in (function, eagerly, _frames):
        _skip(one)
    return function


def eagerly(function: Callable[..., Result], *args: Any) -> Result:
    """Calls a function with Dynamo off in this thread, with all that it calls. For use in an `untraced` one."""
    set_callback = getattr(_frames(), "set_eval_frame", None)
    if set_callback is None:
        return function(*args)
    before = set_callback(None)
    try:
        return function(*args)
    finally:
        set_callback(before)


@guard
def _skip(function: Any) -> None:
    function._torchdynamo_disable = True
    frames = _frames()
    if hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)
    elif hasattr(frames, "set_code_exec_strategy"):  # newer ones
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)
