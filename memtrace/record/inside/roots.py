"""The models a job calls: found in their first calls, then marked as `forward` (or `eval`, without gradients).

Hooks on a module would be pickled with it, and global hooks cost every module a little: the class of each model found
gets a `__call__` of ours instead. To torch.compile and torch.export they are not there (`compiling`).
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from .notes import guard

_MOST_CALLS = 8


class Roots:
    """Finds them and marks their calls in `phases`. `models` are the ones alive."""

    def __init__(self, torch: Any, phases: Any) -> None:
        self._torch, self._phases = torch, phases
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patched: Dict[Any, Tuple[bool, Any]] = {}
        self._handles: List[Any] = []
        self._depth = 0
        self._calls = 0
        self._first: Optional[Tuple[int, Any]] = None

    def install(self) -> None:
        """Looks for models from now on. Not under torch 2.0, whose compiler cannot be told to look away."""
        if not hasattr(self._torch, "compiler"):
            return
        module = self._torch.nn.modules.module
        is_compiling = compiling(self._torch)

        def before(model: Any, _inputs: Any) -> None:
            if not is_compiling():
                self._before(model)

        def after(model: Any, _inputs: Any, _output: Any) -> None:
            if not is_compiling():
                self._after(model)

        self._handles = [module.register_module_forward_pre_hook(before), module.register_module_forward_hook(after)]

    def stop_looking(self) -> None:
        """The models are known."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def remove(self) -> None:
        """Everything as it was."""
        self.stop_looking()
        for kind, (had_own, call) in self._patched.items():
            if had_own:
                _set_call(kind, call)
            elif "__call__" in vars(kind):
                del kind.__call__
        self._patched.clear()

    @guard
    def _before(self, model: Any) -> None:
        """A module is called that no known model has called: it is one."""
        if self._depth or self._first is not None:
            return
        self._first = (id(model), self._phases.begin(self._phase(), "torch", owner=id(model)))
        self._add(model)

    @guard
    def _after(self, model: Any) -> None:
        if self._first is None or self._first[0] != id(model):
            return
        self._phases.end(self._first[1])
        self._first = None
        self._calls += 1
        if self._calls >= _MOST_CALLS:
            self.stop_looking()

    def _phase(self) -> str:
        return "forward" if self._torch.is_grad_enabled() else "eval"

    @guard
    def _add(self, model: Any) -> None:
        self.models.add(model)
        kind = type(model)
        if kind in self._patched or kind.__name__ == "OptimizedModule":
            return
        call = kind.__call__
        had_own = "__call__" in vars(kind)
        is_compiling, is_tracing = compiling(self._torch), self._torch.jit.is_tracing

        def __call__(model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - stands for the class's own
            if is_compiling() or self._depth or is_tracing():
                return call(model, *args, **kwargs)
            self._first = None
            self._depth += 1
            token = self._enter(model)
            try:
                return call(model, *args, **kwargs)
            finally:
                self._depth -= 1
                self._phases.end(token)

        self._patched[kind] = (had_own, call)
        _set_call(kind, __call__)

    @guard
    def _enter(self, model: Any) -> Any:
        self.models.add(model)
        return self._phases.begin(self._phase(), "torch", owner=id(model))


def _set_call(kind: Any, call: Any) -> None:
    kind.__call__ = call


def compiling(torch: Any) -> Callable[[], bool]:
    """Whether Dynamo is looking: it takes the answer for a constant, and then sees nothing of what we do."""
    found = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return found if found is not None else lambda: False
