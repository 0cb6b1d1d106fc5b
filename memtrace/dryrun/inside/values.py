"""What the program reads back from a device that does not compute.

Device memory is host memory, so a CPU tensor can alias any CUDA tensor. An operator whose tensors are all small runs on
such aliases too, and is really computed: masks, lengths, indices, loss scales. A small result of large inputs (a norm,
a loss, a finite check) is a guess, and counted. All of it in a dispatch mode that torch's own code is kept from seeing:
where it sees one, it takes other paths, with other memory.

Nothing here may hold a tensor, or ask one for its storage: autograd accumulates in place only what nobody else holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any, Dict, Iterator, List, Optional, Sequence

from . import hosts, masks
from .guesses import Guesses

_FLOATS, _INTEGERS, _MASKS = 1 << 16, 1 << 24, 1 << 20
"""Bytes up to which a tensor is small, by what it holds."""
_LARGE_ON_HOST = 1 << 20
_FILLED_ON_HOST = 4 << 30
"""Bytes that the program's own lines may fill in all; many are models, and would not have room."""
_MAKERS = tuple(
    os.sep + os.path.join(*place) + os.sep
    for place in (
        ("torch", "nn"), ("torch", "optim"), ("torch", "distributed"), ("deepspeed",), ("transformers",),
        ("accelerate",), ("peft",), ("diffusers",), ("timm",), ("lightning",),
    )
)  # fmt: skip
"""Where models are made and moved: what they fill is weights, whose values nobody decides by."""
_MAKER_FRAMES = 12

_FILLS = {"normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "log_normal_", "exponential_"}
_FACTORIES = {"zeros", "ones", "rand", "randn"}
_COPIES = {"clone", "_to_copy", "copy_"}
_ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
}
_UNREAD = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias",
    "_reshape_alias", "record_stream", "resize_", "set_", "nonzero",
}  # fmt: skip
_SHAPED = {"new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1, "full_like": None, "new_full": None}
"""Their first argument gives a shape, not values. None: the value is an argument."""
_VALUE_ARGUMENT = {"full_like": 1, "new_full": 2}
_COLLECTIVES = "_c10d_functional"
_ANY = ("max", "amax")
"""Of a mask that was made numbers just before (DeepSpeed's check for what is not finite): whether any is true."""


class Values:
    """Computes, guesses, or leaves alone. `guesses` counts what was not known."""

    def __init__(self, torch: Any, guesses: Guesses, sizes: Any = None) -> None:
        modes = torch.utils._python_dispatch
        self._torch, self._guesses = torch, guesses
        self._stack, self._tree = modes._get_current_dispatch_mode_stack, torch.utils._pytree
        self._dispatches_nothing = torch.Tensor.__torch_dispatch__
        self._wait: Any = getattr(getattr(torch.ops, _COLLECTIVES).wait_tensor, "default", None)
        self._random = torch.Generator().manual_seed(1)
        self._random_state = self._random.get_state()
        self._masks = masks.Masks(torch)
        self.sizes = sizes
        self.overflows: Optional[Any] = None
        self._filled = 0
        self._numbers_of_mask = 0
        """Address of what the last operator made of a mask, if it did and the numbers are not small."""
        self.backwards = 0
        self.error: Optional[Exception] = None
        """Of the last operator that failed while any of the `backwards` ran."""

    def call(self, func: Any, types: Sequence[Any], args: Any, kwargs: Dict[str, Any]) -> Any:
        """One operator, as torch's dispatcher hands it on."""
        if self._stack():  # someone else's mode (fake tensors, tracing) is at work below
            return func(*args, **kwargs)
        if not all(map(self._is_plain, types)):  # such subclasses first take themselves apart
            return NotImplemented
        if func.is_view:  # first, as there may be thousands: ZeRO-3 takes one for each rank
            return func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if self._is_idle_on_host(name, args, kwargs):
            return self._large_on_host(name, func, args, kwargs)
        if name in _UNREAD:
            return func(*args, **kwargs)
        if name in _ATTENTION:
            self._guesses.add("attention", f"{_ATTENTION[name]} attention, as torch chooses on this GPU")
        tensors = [one for one in self._tree.tree_leaves((args, kwargs)) if isinstance(one, self._torch.Tensor)]
        are_small = all(map(self.is_small, tensors))
        if self.sizes is not None and are_small and self.sizes.knows(name) and any(one.is_cuda for one in tensors):
            return self.sizes.call(name, func, args, kwargs)
        result = func(*args, **kwargs)
        self._fill(name, func, args, kwargs, tensors, are_small, result)
        is_cast = name == "_to_copy" and args[0].dtype is self._torch.bool and not self.is_small(result)
        self._numbers_of_mask = result.data_ptr() if is_cast else 0
        if self.overflows is not None:
            self.overflows.saw(name, args, self)
        return result

    def _is_plain(self, kind: Any) -> bool:
        """Whether tensors of this class are memory, and no wrapper around others that has a say in every operator."""
        return bool(kind.__torch_dispatch__ is self._dispatches_nothing)

    def failed(self, error: Exception) -> None:
        """An operator raised it. Outside of backward nobody asks, and it would keep alive what its traceback does."""
        if self.backwards:
            self.error = error

    def is_small(self, tensor: Any) -> bool:
        """Whether it is worth computing with."""
        kind = tensor.dtype
        most = _FLOATS if kind.is_floating_point or kind.is_complex else _INTEGERS
        if kind is self._torch.bool:
            most = _MASKS
        return bool(tensor.numel() * tensor.element_size() <= most)

    def alias(self, tensor: Any) -> Any:
        """A CPU tensor over the same bytes; by address, as a storage that Python has seen counts one reference more."""
        torch = self._torch
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        memory = (ctypes.c_char * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride())

    def on_host(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        """The same operator on aliases. Random ones have a generator of their own: the program's stays as it was."""
        torch = self._torch

        def aliased(one: Any) -> Any:
            return self.alias(one) if one.is_cuda else one

        args, kwargs = self._tree.tree_map_only(torch.Tensor, aliased, (args, kwargs))
        for key, value in (("device", "cpu"), ("pin_memory", False), ("generator", self._random)):
            if kwargs.get(key) is not None:
                kwargs[key] = value
        if (
            func is torch.ops.aten.histc.default and not args[0].dtype.is_floating_point
        ):  # the CPU has none for integers
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        programs = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            return func(*args, **kwargs)
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(programs)

    def _is_idle_on_host(self, name: str, args: Any, kwargs: Dict[str, Any]) -> bool:
        """Filling, casting or copying many floats of the host: left out, so that their pages are never touched."""
        if name in _FACTORIES:
            dtype = kwargs.get("dtype") or self._torch.get_default_dtype()
            device = self._torch.device(kwargs.get("device") or "cpu")
            sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            count = 1
            for size in sizes:
                count *= int(size)
            return bool(device.type == "cpu" and dtype.is_floating_point and 4 * count >= _LARGE_ON_HOST)
        if name not in _FILLS and name not in _COPIES:
            return False
        first = args[0] if args else None
        if (
            not isinstance(first, self._torch.Tensor)
            or first.device.type != "cpu"
            or first.layout is not self._torch.strided
        ):
            return False
        if not first.dtype.is_floating_point or first.numel() * first.element_size() < _LARGE_ON_HOST:
            return False
        if name == "copy_":
            return bool(args[1].device.type == "cpu" and args[1].dtype.is_floating_point)
        if name == "_to_copy":
            dtype = kwargs.get("dtype") or first.dtype
            return self._torch.device(kwargs.get("device") or "cpu").type == "cpu" and bool(dtype.is_floating_point)
        return True

    def _large_on_host(self, name: str, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        """Weights are left as they are, zeros cost nothing, and what else the program fills it may decide by."""
        if _makes_weights():
            self._guesses.add("weights", "large weights on the host are not filled")
            return self._idle(name, func, args, kwargs)
        if name in ("zero_", "zeros"):
            result = self._idle(name, func, args, kwargs)
            if result.is_contiguous():
                hosts.clear(result.data_ptr(), result.numel() * result.element_size())
                return result
            return func(*args, **kwargs)
        if self._filled < _FILLED_ON_HOST:
            result = func(*args, **kwargs)
            self._filled += result.numel() * result.element_size()
            return result
        self._guesses.add("host", "large tensors on the host are not filled", with_site=True)
        return self._idle(name, func, args, kwargs)

    def _idle(self, name: str, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        torch = self._torch
        if name in _FACTORIES:
            wanted = {key: value for key, value in kwargs.items() if key in ("dtype", "layout", "pin_memory")}
            return torch.empty(args[0], **wanted)
        if name in ("clone", "_to_copy"):
            wanted = {key: value for key, value in kwargs.items() if key in ("dtype", "pin_memory", "memory_format")}
            return torch.empty_like(args[0], **{key: value for key, value in wanted.items() if value is not None})
        return args[0]

    def _fill(
        self, name: str, func: Any, args: Any, kwargs: Dict[str, Any], tensors: List[Any], are_small: bool, result: Any
    ) -> None:
        """Gives the small outputs their values."""
        outputs = _tensors(self._torch, result)
        if not all(self._is_plain(type(one)) for one in outputs):  # without memory of its own (DTensor's waiting ones)
            return
        if not outputs:
            if are_small and func._schema.is_mutable and tensors and all(one.is_cuda for one in tensors):
                self._try(name, [], lambda: self.on_host(func, args, kwargs))
            return
        if not outputs[0].is_cuda:
            return
        is_assumed = self._masks.follow(tensors, outputs)
        if name in ("copy_", "_to_copy") and not all(one.is_cuda for one in tensors):
            return  # the copy itself was made
        some = [one for one in outputs if self.is_small(one) and one.layout is self._torch.strided]
        if not some:
            return
        if is_assumed and name in masks.ALL_OR_ANY:
            self._guess(name, some[0])
            return
        in_place = any(one is other for one in tensors for other in outputs)
        if are_small and len(some) == len(outputs):

            def compute() -> None:
                found = _tensors(self._torch, self.on_host(func, args, kwargs))
                if func.namespace == _COLLECTIVES and func is not self._wait:  # else torch keeps it until the end
                    found = [self._wait(one) for one in found]
                if not in_place:
                    for output, value in zip(outputs, found):
                        self.alias(output).copy_(value)

            self._try(name, [] if in_place else some, compute)
        elif name in _SHAPED:
            value = _SHAPED[name]
            self.alias(some[0]).fill_(args[_VALUE_ARGUMENT[name]] if value is None else value)
        elif name in masks.COMPARISONS and not in_place:
            self._compare(name, args, some[0])
        elif not in_place:
            is_any = name in _ANY and tensors[0].data_ptr() == self._numbers_of_mask
            for one in some:
                self._guess("any" if is_any else name, one)

    def _compare(self, name: str, args: Any, output: Any) -> None:
        """A mask made of large tensors: true in as many places as is assumed, but where the question answers itself."""
        known = masks.known(name, args[0], args[1])
        if known is None:
            self._masks.assume(output, self.alias(output), self.sizes.trues_of(output))
        else:
            self.alias(output).fill_(known)

    def _try(self, name: str, outputs: List[Any], compute: Any) -> None:
        try:
            compute()
        except Exception as error:  # noqa: BLE001 - an operator that the CPU does not have, or not for this
            self._guesses.add("not-computed", f"{name}: {type(error).__name__} on the CPU")
            for one in outputs:
                with contextlib.suppress(Exception):
                    self._guess(name, one)

    def _guess(self, name: str, output: Any) -> None:
        """Finite: 1 for a number, 1 to 2 for a vector (router logits), 0 and false for integers, true for `all`."""
        alias = self.alias(output)
        is_float = output.dtype.is_floating_point
        if is_float and output.numel() > 1:
            alias.copy_(self._torch.rand(output.shape, generator=self._random) + 1)
        else:
            alias.fill_(1 if name in masks.ALL or (is_float and name != "any") else 0)
        kind = "a number" if output.numel() == 1 else "a vector"
        if is_float or output.dtype is self._torch.bool:
            self._guesses.add("value", f"{name} of large tensors, {kind}")
        else:  # by a count or an index, unlike by a loss, sizes are decided
            self._guesses.add("integer", f"{name} of large tensors taken as 0", with_site=True)


class Presence:
    """The dispatch mode that calls `values`: on this thread and, through autograd, in backward."""

    def __init__(self, torch: Any, values: Values, device: Any) -> None:
        modes = torch.utils._python_dispatch

        class Mode(modes.TorchDispatchMode):  # type: ignore[misc, name-defined]
            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                """Compiled code never sees it, so no wrapper is wanted, two frames on every stack."""
                return False

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                try:
                    return values.call(func, types, args, kwargs or {})
                except Exception as error:  # noqa: BLE001 - goes on
                    del args, kwargs  # a traceback would keep them alive, and an operator's own error has none
                    values.failed(error)
                    raise error.with_traceback(None)  # noqa: B904 - it is the same one

        self._modes, self._device, self._class = modes, device, Mode
        self._mode: Any = None

    def enter(self) -> None:
        """From now on."""
        self._mode = self._class()
        self._mode.__enter__()
        self._device.hide_mode(True)

    def leave(self) -> None:
        """For good, if it is there and nobody came after it."""
        stack = self._modes._get_current_dispatch_mode_stack()
        if self._mode is not None and stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)
        self._mode = None
        self._device.hide_mode(False)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Takes it away for a while, and only if it is there: tracing has modes of its own."""
        if not any(isinstance(one, self._class) for one in self._modes._get_current_dispatch_mode_stack()):
            yield
            return
        self._device.hide_mode(False)
        try:
            with self._modes._disable_current_modes():
                yield
        finally:
            self._device.hide_mode(True)


def _makes_weights() -> bool:
    """Whether the innermost frames that are not torch's dispatcher or ours are those of a library that makes models."""
    frame: Any = sys._getframe(2)
    for _ in range(_MAKER_FRAMES):
        if frame is None:
            return False
        if any(place in frame.f_code.co_filename for place in _MAKERS):
            return True
        frame = frame.f_back
    return False


def _tensors(torch: Any, result: Any) -> List[Any]:
    return [
        one for one in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(one, torch.Tensor)
    ]
