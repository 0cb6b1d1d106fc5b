"""What the memory that is alive now is for: parameters, shards, gradients, optimizer state, by the address of each.

Tensors are only looked at: their address, size and kind. Nothing is copied, moved, gathered or kept.
"""

from __future__ import annotations

import collections
import sys
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from .eager import eagerly
from .notes import note

MOST_ROLES = 500_000
_MOST_DEPTH = 6

_HELD = (
    # ZeRO-3; what only some versions have is not found in the others
    ("lp_param_buffer", "param.flat"),
    ("fp16_partitioned_groups_flat", "param.flat"),
    ("fp32_partitioned_groups_flat", "param.master"),
    ("grad_partitions_flat_buffer", "grad.partition"),
    ("_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer", "grad.bucket"),
    # ZeRO-1 and 2
    ("bit16_groups_flat", "param.flat"),
    ("single_partition_of_fp32_groups", "param.master"),
    ("averaged_gradients", "grad.partition"),
    ("all_grad_tensors", "grad.partition"),
    ("grads_in_partition", "grad.partition"),
    ("ipg_buffer", "grad.bucket"),
    ("temp_grad_buffer_for_gpu_offload", "grad.bucket"),
    # BF16_Optimizer
    ("bf16_groups_flat", "param.flat"),
    ("fp32_groups_flat_partition", "param.master"),
    ("fp32_groups_gradients_flat", "grad"),
    # FP16_Optimizer and FP16_UnfusedOptimizer
    ("fp16_groups_flat", "param.flat"),
    ("fp32_groups_flat", "param.master"),
    ("fp32_groups", "param.master"),
)
"""Attributes of DeepSpeed's optimizers, of 0.9 to 0.19: tensors, or lists and dictionaries of them."""

_MASTERS = tuple(name for name, role in _HELD if role == "param.master")
_FLAT = (
    ("_full_param_padded", "param.gathered"),
    ("_full_prec_full_param_padded", "param.gathered"),
    ("_mp_shard", "param.partition"),
    ("_saved_grad_shard", "grad.partition"),
)
"""Attributes of a flat parameter of FSDP1, beside its `_local_shard` and `grad`."""
_FSDP_PARAM = (
    ("_sharded_param_data", "param.partition"),
    ("_sharded_post_forward_param_data", "param.partition"),
    ("_unsharded_param", "param.gathered"),
    ("_unsharded_inner_tensors", "param.gathered"),
    ("all_gather_outputs", "param.gathered"),
    ("unsharded_accumulated_grad", "grad"),
)
"""Attributes of a parameter's record in FSDP2."""
_WRAPPING = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")

Rows = List[Dict[str, Any]]
Found = Tuple[str, str, Any]
"""role, name, tensor"""


class Place(NamedTuple):
    """Where a tensor's elements are."""

    address: int
    bytes: int
    device: str


def collect(engines: Iterable[Any], optimizers: Iterable[Any], roots: Iterable[Any]) -> Rows:
    """{role, name, address, bytes, shape, dtype, device} of the tensors of DeepSpeed's engines, of optimizers, and of
    the modules `roots`. On any device; each address once for a role."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    return eagerly(_collect, torch, engines, optimizers, roots)  # not compiled, in the middle of a compiled model


def _collect(torch: Any, engines: Iterable[Any], optimizers: Iterable[Any], roots: Iterable[Any]) -> Rows:
    walk = _Walk(torch)
    with torch._C.DisableTorchFunction():
        for engine in engines:
            walk.take("an engine", walk.engine(engine))
        for root in roots:
            walk.take("a model", walk.module(root))
        for optimizer in optimizers:
            walk.take("an optimizer", walk.optimizer(optimizer))
    return walk.rows


def names_by_number(engines: Iterable[Any]) -> Dict[int, str]:
    """Names of ZeRO-3's parameters by DeepSpeed's number for them (`ds_id`)."""
    found: Dict[int, str] = {}
    for engine in engines:
        for param, name in _named(engine):
            number = getattr(param, "ds_id", None)
            if isinstance(number, int):
                found.setdefault(number, name)
    return found


class _Walk:
    """One look at everything. `names` of parameters are by identity, which holds while they are alive: during it."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.rows: Rows = []
        self.names: Dict[int, str] = {}
        self.seen: Dict[Tuple[int, str], Dict[str, Any]] = {}
        self.known: Set[int] = set()
        self.done: Set[int] = set()

    def take(self, what: str, found: Iterator[Found]) -> None:
        """Notes all of them. One that breaks ends there; what was found before that stays."""
        try:
            for role, name, tensor in found:
                for part in self.parts(tensor):
                    self.add(role, name, part)
        except Exception as error:  # noqa: BLE001 - a dump must not fail for a library's change of an attribute
            note(f"roles of {what} are incomplete: {type(error).__name__}: {error}")

    def add(self, role: str, name: str, tensor: Any) -> None:
        """Of tensors that begin at one address in one role (a buffer and its first view) the largest counts."""
        place = self.place(tensor)
        if place is None or len(self.rows) >= MOST_ROLES:
            return
        row = {
            "role": role,
            "name": name,
            "address": place.address,
            "bytes": place.bytes,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).replace("torch.", ""),
            "device": place.device,
        }
        known = self.seen.setdefault((place.address, role), row)
        if known is row:
            self.known.add(place.address)
            self.rows.append(row)
        elif known["bytes"] < place.bytes:
            known.update(row)

    def parts(self, value: Any, depth: int = 0) -> Iterator[Any]:
        """The plain tensors in a tensor of tensors (DTensor, quantized ones), a list or a dictionary."""
        if depth > _MOST_DEPTH:
            return
        if isinstance(value, self.torch.Tensor):
            flatten = getattr(type(value), "__tensor_flatten__", None)
            if flatten is None:
                yield value
                return
            for attribute in flatten(value)[0]:
                yield from self.parts(getattr(value, attribute, None), depth + 1)
        elif isinstance(value, dict):
            for item in list(value.values()):
                yield from self.parts(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for item in list(value):
                yield from self.parts(item, depth + 1)

    def place(self, tensor: Any) -> Optional[Place]:
        """None for a tensor without memory of its own: fake, meta, inside a transform, sparse, freed."""
        torch = self.torch
        if tensor.device.type == "meta" or tensor.layout is not torch.strided or not tensor.numel():
            return None
        if "Fake" in type(tensor).__name__ or _is_wrapped(torch, tensor) or _is_lazy_copy(torch, tensor):
            return None
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        address = tensor.data_ptr() if held > 0 else 0
        if not address:
            return None
        return Place(address, min(held, tensor.numel() * tensor.element_size()), str(tensor.device))

    def memory(self, tensor: Any) -> int:
        """Where the storage of a plain tensor begins; -1: it has none."""
        place = self.place(tensor) if getattr(type(tensor), "__tensor_flatten__", None) is None else None
        return -1 if place is None else int(tensor.untyped_storage().data_ptr())

    # DeepSpeed.

    def engine(self, engine: Any) -> Iterator[Found]:
        """Of an engine: what its optimizer holds, then its module."""
        for param, name in _named(engine):
            self.names.setdefault(id(param), name)
        optimizer = _get(engine, "optimizer")
        if optimizer is not None:
            yield from self.zero_optimizer(optimizer)
        module = _get(engine, "module")
        if module is not None:
            self.done.add(id(engine))
            yield from self.module(module)
            yield from self.in_flight(_get(module, "ds_inflight_param_registry"))
        for one in (optimizer, _get(engine, "basic_optimizer")):
            if one is not None:
                yield from self.optimizer(one)

    def in_flight(self, registry: Any) -> Iterator[Found]:
        """ZeRO-3: the buffers of gathers that nobody has waited for yet. `registry`: handles by parameter."""
        registries = _items(registry) if isinstance(registry, dict) else [registry]
        handles = [handle for one in registries for handle in list(_get(one, "data", {}).values())]
        for handle in handles:
            for one in _items(_get(handle, "handles")) or [handle]:
                if id(one) not in self.done:
                    self.done.add(id(one))
                    yield from self.whole("param.gathered", "in flight", _get(one, "partitions"))

    def whole(self, role: str, name: str, parts: Any) -> Iterator[Found]:
        """The buffer that the first of `parts` is a view of."""
        for part in _items(parts)[:1]:
            base = _get(part, "_base")
            yield role, name, part if base is None else base

    def zero_optimizer(self, optimizer: Any) -> Iterator[Found]:
        """Of one of DeepSpeed's own optimizers."""
        for attribute in _MASTERS:
            for number, master in enumerate(_items(_get(optimizer, attribute))):
                self.names.setdefault(id(master), f"{attribute}.{number}")
        for attribute, role in _HELD:
            short = attribute.rsplit("__", 1)[-1]
            yield from self.numbered(role, short, _get(optimizer, attribute))
        for dtype, bucket in (_get(optimizer, "ipg_buckets") or {}).items():
            kind = str(dtype).replace("torch.", "")
            yield from self.numbered("grad.bucket", f"ipg_buckets.{kind}", _get(bucket, "buffer"))
        for attribute in _MASTERS:
            for number, master in enumerate(_items(_get(optimizer, attribute))):
                if _get(master, "is_leaf") is True and master.grad is not None:
                    yield "grad.partition", f"{attribute}.{number}.grad", master.grad
        backup = _get(optimizer, "backup_optimizer")
        if backup is not None:
            yield from self.optimizer(backup)

    def numbered(self, role: str, name: str, value: Any) -> Iterator[Found]:
        """Each tensor in nested lists, with its numbers for a name."""
        if isinstance(value, self.torch.Tensor):
            yield role, name, value
        elif isinstance(value, dict):
            for key, item in list(value.items()):
                yield from self.numbered(role, f"{name}.{key}" if isinstance(key, (int, str)) else name, item)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(list(value)):
                yield from self.numbered(role, f"{name}.{number}", item)

    def zero_param(self, name: str, param: Any) -> Iterator[Found]:
        """Of a parameter that ZeRO-3 partitions: whole if it is gathered, and its shards."""
        if param.numel() == param.ds_numel:  # let go of, it is an empty tensor
            yield ("param.persistent" if _get(param, "ds_persist") else "param.gathered"), name, param
        for attribute in ("ds_tensor", "ds_secondary_tensor"):
            shard = _get(param, attribute)
            if shard is not None:
                yield "param.partition", name, shard
                yield "param.partition", f"{name}.scale", _get(shard, "ds_quant_scale")

    # Modules: plain ones, and those of FSDP.

    def module(self, root: Any) -> Iterator[Found]:
        """Parameters, gradients and buffers of a module."""
        inner = root.module if type(root).__name__ in ("DistributedDataParallel", "DataParallel") else root
        if id(root) in self.done or id(inner) in self.done:
            return
        self.done.update((id(root), id(inner)))
        managed: Set[int] = set()
        """The identities of parameters that FSDP keeps, and the addresses of the memory they may be views of."""
        for path, module in inner.named_modules():
            yield from self.flat_params(_clean(path), module, managed)
            yield from self.fsdp_params(_clean(path), module, managed)
        for path, param in inner.named_parameters():
            name = self.names.setdefault(id(param), _clean(path))
            if id(param) not in managed and self.memory(param) not in managed:
                yield from self.parameter(name, param)
        for path, tensor in inner.named_buffers():
            yield "buffer", _clean(path), tensor

    def parameter(self, name: str, param: Any) -> Iterator[Found]:
        """A parameter with its gradients."""
        if hasattr(param, "ds_tensor") and hasattr(param, "ds_numel"):
            yield from self.zero_param(name, param)
        else:
            yield ("param.partition" if _is_shard(param) else "param"), name, param
        if param.grad is not None:
            yield ("grad.partition" if _is_shard(param) else "grad"), name, param.grad
        yield "grad", name, _get(param, "grad_accum")
        held = _get(_get(param, "_hp_mapping"), "gradient_dict")
        if (
            held and id(held) not in self.done
        ):  # one for all parameters: after a skipped step the only hold on gradients
            self.done.add(id(held))
            yield from self.numbered("grad.partition", "gradient_dict", held)

    def flat_params(self, path: str, module: Any, managed: Set[int]) -> Iterator[Found]:
        """FSDP1: the flat parameter of a wrapped module."""
        for handle in _items(_get(module, "_handle")) or _items(_get(module, "_handles")):
            flat = _get(handle, "flat_param")
            if flat is None or id(flat) in managed:
                continue
            managed.add(id(flat))
            managed.update(id(param) for param in _items(_get(flat, "_params")))
            name = f"{path}._flat_param" if path else "_flat_param"
            self.names.setdefault(id(flat), name)
            whole = not _get(handle, "uses_sharded_strategy", True)
            shard = _get(flat, "_local_shard")
            managed.update(self.memory(one) for one in (flat, shard) if one is not None)
            yield ("param" if whole else "param.partition"), name, shard
            for attribute, role in _FLAT:
                yield ("param" if whole and role == "param.partition" else role), name, _get(flat, attribute)
            if flat.grad is not None:
                is_shard = not whole and shard is not None and flat.grad.numel() <= shard.numel()
                yield ("grad.partition" if is_shard else "grad"), name, flat.grad
            for param in _items(_get(flat, "_params")):
                if param.grad is not None:
                    yield "grad.partition" if not whole else "grad", self.names.get(id(param), name), param.grad

    def fsdp_params(self, path: str, module: Any, managed: Set[int]) -> Iterator[Found]:
        """FSDP2: the records of the parameters that a module's group shards."""
        get_state = _get(module, "_get_fsdp_state")
        if get_state is None:
            return
        state = get_state()
        groups = _items(_get(state, "_fsdp_param_group")) or _items(_get(state, "_fsdp_param_groups"))
        for group in groups:
            yield from self.fsdp_buffers(path, group)
            for record in _items(_get(group, "fsdp_params")):
                name = _clean(_get(record, "_param_fqn") or _fsdp_name(path, record))
                sharded, whole = _get(record, "sharded_param"), _get(record, "_unsharded_param")
                for attribute, role in _FSDP_PARAM:
                    yield role, name, _get(record, attribute)
                for param, role in ((sharded, "grad.partition"), (whole, "grad")):
                    if param is not None:
                        managed.add(id(param))
                        self.names[id(param)] = name
                        yield role, name, param.grad

    def fsdp_buffers(self, path: str, group: Any) -> Iterator[Found]:
        """FSDP2: what a group's collectives read and write, until the next one has taken over."""
        context = _get(group, "comm_ctx")
        results = [_get(group, "_all_gather_result"), _get(_get(context, "all_gather_state"), "all_gather_result")]
        for result in results:
            yield "param.gathered", f"{path}.all_gather", _get(result, "all_gather_output")
        states = _items(_get(context, "reduce_scatter_states")) or [_get(context, "reduce_scatter_state")]
        for state in states:
            yield "grad.bucket", f"{path}.reduce_scatter", _get(state, "reduce_scatter_input")
        yield "grad.bucket", f"{path}.all_reduce", _get(_get(group, "_all_reduce_state"), "all_reduce_input")
        yield "grad.partition", f"{path}.partial_reduce", _get(group, "_partial_reduce_output")

    # Optimizers.

    def optimizer(self, optimizer: Any) -> Iterator[Found]:
        """State by the names of the parameters; parameters that nothing else has named."""
        for one in _layers(optimizer):
            if id(one) in self.done:
                continue
            self.done.add(id(one))
            state = _get(one, "state")
            if not hasattr(state, "items") or _get(one, "param_groups") is None:
                continue
            yield from self.params_of(one)
            for param, values in list(state.items()):
                name = self.names.get(id(param), "")
                for key, value in list(values.items()) if isinstance(values, dict) else ():
                    yield f"optim.state.{key}", name, value

    def params_of(self, optimizer: Any) -> Iterator[Found]:
        """The parameters of an optimizer whose model was not found."""
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group.get("params", ())):
                if id(param) in self.names or not isinstance(param, self.torch.Tensor):
                    continue
                name = self.names[id(param)] = f"group.{number}.{place}"
                at = [self.place(part) for part in self.parts(param)]
                if not any(one is not None and one.address in self.known for one in at):
                    yield from self.parameter(name, param)


def _named(engine: Any) -> Iterator[Tuple[Any, str]]:
    """(parameter, name) as DeepSpeed knows them, then as the module does."""
    names = _get(engine, "param_names")
    if isinstance(names, dict):
        yield from ((param, _clean(str(name))) for param, name in list(names.items()))
    module = _get(engine, "module")
    if module is not None:
        yield from ((param, _clean(name)) for name, param in module.named_parameters())


def _layers(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it wraps (DeepSpeed's, accelerate's, LoRA+ and the like)."""
    for _ in range(_MOST_DEPTH):
        if optimizer is None:
            return
        yield optimizer
        optimizer = _get(optimizer, "optimizer")


def _get(owner: Any, name: str, default: Any = None) -> Any:
    """An attribute, or `default`: of an object half made or half taken apart too."""
    try:
        return getattr(owner, name, default)
    except Exception:  # noqa: BLE001 - some properties assert that the time is right
        return default


def _items(value: Any) -> List[Any]:
    """A list of what is one thing, several, or none."""
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, collections.deque)) else [value]


def _clean(path: str) -> str:
    """A module's or parameter's path without the parts that wrappers add."""
    for part in _WRAPPING:
        path = path.replace(part, "")
        if path.endswith("." + part[:-1]) or path == part[:-1]:
            path = path[: -len(part)]
    return path


def _fsdp_name(path: str, record: Any) -> str:
    name = str(_get(_get(record, "_module_info"), "param_name", "") or "")
    return f"{path}.{name}" if path else name


def _is_shard(param: Any) -> bool:
    """Whether a distributed tensor is spread over ranks rather than repeated on each."""
    return any(_get(one, "is_shard", bool)() for one in _get(param, "placements", ()) or ())


def _is_wrapped(torch: Any, tensor: Any) -> bool:
    """Whether it stands for another inside vmap, grad and the like."""
    check = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    return check is not None and bool(check(tensor))


def _is_lazy_copy(torch: Any, tensor: Any) -> bool:
    """Whether asking for its address would make a copy."""
    check = getattr(torch._C, "_is_cow_tensor", None)
    return check is not None and bool(check(tensor))
