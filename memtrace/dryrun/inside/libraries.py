"""What other libraries have to be told: DeepSpeed's compiled operators, torch.compile, overflow checks."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

_IDLE_BUILDERS = ("Adam", "Lamb", "Lion", "Adagrad")
"""DeepSpeed's compiled optimizers: they allocate no device memory themselves."""


def install(run: Any) -> None:
    """Each once its library is imported."""
    run.after_import("deepspeed.ops.op_builder.builder", functools.partial(_idle_operators, run))
    run.after_import("deepspeed.runtime.zero.partition_parameters", functools.partial(_step_aside_in_gathers, run))
    run.after_import("torch._inductor.config", _pad_always)
    if run.is_mode_hidden:
        _keep_errors_of_backward(run.values)
    run.after_import("torch._dynamo.eval_frame", functools.partial(_step_aside_for_compiled, run))
    if run.options.overflow_first:
        for module, name in (
            ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
            ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
            ("deepspeed.runtime.utils", "CheckOverflow"),
        ):
            run.after_import(module, functools.partial(_overflow, run, name))


def _keep_errors_of_backward(values: Any) -> None:
    """torch 2.11 loses the error of an operator under a dispatch mode in backward while memory is recorded: looking for
    the stacks of what is freed then, it clears Python's error, and a SystemError is all that is left."""
    _wrap_backward(lambda original: _with_errors(original, values))


def _wrap_backward(wrap: Callable[[Any], Any]) -> None:
    """All ways into autograd's engine."""
    for name in ("torch.autograd", "torch.autograd.graph"):
        module: Any = sys.modules.get(name)
        original = getattr(module, "_engine_run_backward", None)
        if original is not None:
            module._engine_run_backward = wrap(original)


def _with_errors(original: Any, values: Any) -> Any:
    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        values.backwards += 1
        try:
            return original(*args, **kwargs)
        except SystemError:
            if values.error is None:
                raise
            raise values.error.with_traceback(None) from None
        finally:
            values.backwards -= 1
            values.error = None

    return run_backward


def _step_aside_in_gathers(run: Any, module: Any) -> None:
    """ZeRO-3 puts each parameter together from a view of every rank's part: in a world of 1024 a thousand operators,
    of which no value is read."""
    handle = getattr(module, "AllGatherCoalescedHandle", None)
    if handle is not None:
        handle.wait = _outside(handle.wait, run.presence)


def leave_backward_alone(presence: Any) -> None:
    """Where torch's code would see the mode (this release cannot be kept from it), it is off in backward."""
    _wrap_backward(lambda original: _outside(original, presence))


def _outside(original: Any, presence: Any) -> Any:
    @functools.wraps(original)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with presence.away():
            return original(*args, **kwargs)

    return outside


class _Idle:
    """A compiled module all of whose functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _idle_operators(run: Any, module: Any) -> None:
    original = module.OpBuilder.load

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(self).__name__
        if any(word in kind for word in _IDLE_BUILDERS):
            return _Idle()
        run.guesses.add("operator", f"DeepSpeed's {kind} was loaded for real: its kernels do nothing")
        return original(self, *args, **kwargs)

    module.OpBuilder.load = load


def _pad_always(module: Any) -> None:
    """Inductor times padded products against unpadded ones, and here both take the same; padding usually wins."""
    module.force_shape_pad = True


def _step_aside_for_compiled(run: Any, module: Any) -> None:
    """Compiled code is compiled without our mode, and its values are not computed."""
    original = module._TorchDynamoContext.__call__

    @functools.wraps(original)
    def call(self: Any, function: Any) -> Any:
        compiled = original(self, function)
        if isinstance(function, (run.nn_module, type)) or not callable(compiled):
            return compiled

        def outside(*args: Any, **kwargs: Any) -> Any:
            run.guesses.add("compiled", "compiled code: its values are not computed")
            with run.presence.away():
                return compiled(*args, **kwargs)

        outside.__dict__.update(getattr(compiled, "__dict__", {}))
        return outside

    module._TorchDynamoContext.__call__ = call


def _overflow(run: Any, name: str, module: Any) -> None:
    """DeepSpeed's own check of gradients."""
    checker = getattr(module, name, None)
    original = getattr(checker, "has_overflow", None)
    if original is None:
        return

    @functools.wraps(original)
    def has_overflow(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        overflows = run.values.overflows
        if not overflows.is_now:
            return found
        overflows.step_ended()
        return True

    checker.has_overflow = has_overflow  # type: ignore[union-attr]
