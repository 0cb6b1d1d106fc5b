"""What other libraries add: DeepSpeed's engine, the trainers of transformers and Lightning, modules by name."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple

from . import importing, notes
from .notes import guard
from .phases import marked
from .roots import compiling

_TRAINER_PHASES = (
    ("transformers.trainer", "Trainer", "prediction_step", "eval"),
    ("transformers.trainer", "Trainer", "_save_checkpoint", "checkpoint"),
    ("transformers.trainer", "Trainer", "_load_from_checkpoint", "checkpoint"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "checkpoint"),
    ("accelerate.accelerator", "Accelerator", "save_state", "checkpoint"),
    ("accelerate.accelerator", "Accelerator", "load_state", "checkpoint"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint", "checkpoint"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint", "checkpoint"),
)
"""(module, class, method, phase). Their forward, backward and step are torch's own, and marked there."""


class Frameworks:
    """Marks of libraries, set when the job imports them."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._undo: List[Callable[[], None]] = []
        self._names: Dict[int, str] = {}
        self._path: List[str] = []
        self.deepspeed: Any = None

    def install(self) -> None:
        """Waits for each of them."""
        importing.after_import("deepspeed", self._deepspeed)
        for module, kind, method, phase in _TRAINER_PHASES:
            importing.after_import(module, functools.partial(self._method, kind=kind, method=method, phase=phase))

    def remove(self) -> None:
        """Everything as it was."""
        while self._undo:
            self._undo.pop()()
        if self.deepspeed is not None:
            self.deepspeed.remove()

    def forked(self) -> None:
        """A child marks its own gathers."""
        if self.deepspeed is not None:
            from . import gathers

            gathers.forget()

    @property
    def engines(self) -> List[Any]:
        """DeepSpeed's engines that are alive."""
        return [] if self.deepspeed is None else list(self.deepspeed.engines())

    def _deepspeed(self, _module: Any) -> None:
        from . import deepspeed_hooks

        self.deepspeed = deepspeed_hooks
        deepspeed_hooks.install(self._recorder)

    def _method(self, module: Any, kind: str, method: str, phase: str) -> None:
        owner = getattr(module, kind, None)
        original = getattr(owner, method, None)
        if original is None:
            return
        is_compiling = compiling(self._recorder.torch)
        setattr(owner, method, marked(original, self._recorder.phases, phase, kind, is_compiling))
        self._undo.append(lambda: setattr(owner, method, original))

    # --modules

    @guard
    def tag_modules(self) -> None:
        """Labels each allocation with the module that runs; in backward, with the one whose output it came through."""
        torch = self._recorder.torch
        setter = self._setter()
        if setter is None:
            notes.note("--modules: this torch has no labels for allocations (2.10 has)")
            return
        is_compiling = compiling(torch)

        def before(module: Any, _inputs: Any) -> None:
            if not is_compiling():
                self._enter_module(module, setter)

        def after(_module: Any, _inputs: Any, output: Any) -> None:
            if not is_compiling():
                self._leave_module(output, setter)

        home = torch.nn.modules.module
        for handle in (
            home.register_module_forward_pre_hook(before),
            home.register_module_forward_hook(after, always_call=True),
        ):
            self._undo.append(handle.remove)

    def _setter(self) -> Any:
        from . import history

        return history.metadata_setter(self._recorder.torch)

    @guard
    def _enter_module(self, module: Any, setter: Callable[[str], Any]) -> None:
        if not self._path:
            self._learn_names(module)
        self._path.append(self._names.get(id(module), type(module).__name__))
        setter(self._recorder.phases.text(self._path[-1]))

    @guard
    def _leave_module(self, output: Any, setter: Callable[[str], Any]) -> None:
        if not self._path:
            return
        name = self._path.pop()
        setter(self._recorder.phases.text(self._path[-1] if self._path else ""))
        text_of = self._recorder.phases.text
        for tensor in _tensors(output):
            node = getattr(tensor, "grad_fn", None)
            if node is not None:
                node.register_prehook(lambda *_, name=name: setter(text_of(name)))

    def _learn_names(self, root: Any) -> None:
        """Paths below a model; the wrappers' own parts (`module.`) are not the program's."""
        if id(root) in self._names:
            return
        if len(self._names) > 1_000_000:
            self._names.clear()
        self._names.update({id(module): name or type(root).__name__ for name, module in root.named_modules()})


def _tensors(output: Any) -> Tuple[Any, ...]:
    """The tensors directly in an output."""
    if hasattr(output, "grad_fn"):
        return (output,)
    if isinstance(output, dict):
        return tuple(value for value in output.values() if hasattr(value, "grad_fn"))
    if isinstance(output, (tuple, list)):
        return tuple(value for value in output if hasattr(value, "grad_fn"))
    return ()
