"""Phases of plain torch: optimizers, backward, torch.save and torch.load. And backward on the thread that calls it."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable

from .notes import guard
from .phases import marked
from .roots import compiling


class TorchHooks:
    """Marks them in `phases`. `optimizers` are the ones that have stepped and are alive."""

    def __init__(self, torch: Any, phases: Any) -> None:
        self._torch, self._phases = torch, phases
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        self._tokens: dict[int, Any] = {}
        self.single_thread = False

    def install(self) -> None:
        """From now on, on whatever torch has."""
        self._optimizers()
        self._backward()
        for name in ("save", "load"):
            self._wrap(self._torch, name, "checkpoint")

    def remove(self) -> None:
        """Everything as it was."""
        while self._undo:
            self._undo.pop()()

    def _optimizers(self) -> None:
        optimizer: Any = sys.modules["torch.optim.optimizer"]  # torch.optim hides its name
        is_compiling = compiling(self._torch)

        def before(one: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                self._before_step(one)

        def after(one: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                self._after_step(one)

        for register, hook in (
            ("register_optimizer_step_pre_hook", before),
            ("register_optimizer_step_post_hook", after),
        ):
            if hasattr(optimizer, register):
                self._undo.append(getattr(optimizer, register)(hook).remove)

    @guard
    def _before_step(self, one: Any) -> None:
        self.optimizers.add(one)
        self._tokens[id(one)] = self._phases.begin("step", "torch", owner=id(one))

    @guard
    def _after_step(self, one: Any) -> None:
        token = self._tokens.pop(id(one), None)
        if token is not None:  # None: DeepSpeed's step is around it, and knows better when a step is done
            self._phases.end(token)
            self._phases.step_done()

    def _backward(self) -> None:
        autograd = self._torch.autograd
        original = autograd.backward
        is_compiling = compiling(self._torch)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            self._on_this_thread()
            token = self._phases.begin("backward", "torch")
            self._label_nodes(args[0] if args else kwargs.get("tensors"))
            try:
                return original(*args, **kwargs)
            finally:
                self._phases.end(token)

        autograd.backward = backward
        self._undo.append(lambda: setattr(autograd, "backward", original))

    @guard
    def _label_nodes(self, tensors: Any) -> None:
        """Autograd's threads run no Python where their allocations could be told by a stack: the first node of the
        graph labels what its thread allocates from there on."""
        label = self._phases.label()
        compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        if label is None or getattr(compiled, "compiled_autograd_enabled", False):
            return
        for tensor in (tensors,) if hasattr(tensors, "grad_fn") else tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda *_: label())

    def backward_here(self) -> None:
        """Autograd's nodes run on the thread that asks for backward: then what they allocate has a Python stack."""
        self.single_thread = True
        self._on_this_thread()

    @guard
    def _on_this_thread(self) -> None:
        if self.single_thread and self._torch._C._is_multithreading_enabled():
            self._torch._C._set_multithreading_enabled(False)

    def threads_again(self) -> None:
        """Torch's own way, on this thread."""
        if self.single_thread:
            self.single_thread = False
            self._torch._C._set_multithreading_enabled(True)

    def _wrap(self, home: Any, name: str, phase: str) -> None:
        original = getattr(home, name)
        setattr(home, name, marked(original, self._phases, phase, "torch", compiling(self._torch)))
        self._undo.append(lambda: setattr(home, name, original))
