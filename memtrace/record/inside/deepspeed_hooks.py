"""What DeepSpeed does and knows: phases, the engines that are alive, the configuration in force, gathers of ZeRO-3."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import gathers as marked
from . import roles
from .notes import guard, note
from .redact import redact
from .roots import compiling

_SOURCE = "deepspeed"
_ENGINE = (
    ("backward", "backward"),
    ("save_checkpoint", "checkpoint"),
    ("load_checkpoint", "checkpoint"),
    ("save_16bit_model", "checkpoint"),
    ("save_fp16_model", "checkpoint"),
    ("_zero3_consolidated_16bit_state_dict", "checkpoint"),
    ("_consolidated_16bit_state_dict", "checkpoint"),
)
"""Methods of the engine, and the phase that each is."""
_PIPELINE = (
    ("eval_batch", "eval"),
    ("_exec_load_micro_batch", "forward"),
    ("_exec_recv_activations", "forward"),
    ("_exec_forward_pass", "forward"),
    ("_exec_send_activations", "forward"),
    ("_exec_recv_grads", "backward"),
    ("_exec_backward_pass", "backward"),
    ("_exec_send_grads", "backward"),
    ("_exec_reduce_grads", "backward"),
    ("_exec_reduce_tied_grads", "backward"),
)
"""Methods of the pipeline's engine; `train_batch` is made of them."""
_ZERO = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "sub_group_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "round_robin_gradients",
    "allgather_partitions",
    "allgather_sequential",
    "use_multi_rank_bucket_allreduce",
    "use_all_reduce_for_fetch_params",
    "module_granularity_threshold",
    "memory_efficient_linear",
    "gather_16bit_weights_on_model_save",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)
"""Settings of `zero_optimization`, by the names of its own object."""
_AS_USED = ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "contiguous_gradients", "overlap_comm")
"""Those that the optimizer holds itself, and may have changed."""


class Hooks:
    """What is installed, once a process."""

    def __init__(self) -> None:
        self.engines: List[weakref.ReferenceType[Any]] = []
        self.undo: List[Callable[[], None]] = []
        self.phases: Any = None
        self.plain_paths = False
        self.is_compiling: Callable[[], bool] = bool


_HOOKS = Hooks()


@guard
def install(recorder: Any) -> None:
    """Once DeepSpeed is imported: marks its phases in `recorder.phases`, and its gathers."""
    deepspeed: Any = sys.modules.get("deepspeed")
    torch: Any = sys.modules.get("torch")
    _HOOKS.phases = recorder.phases
    _HOOKS.plain_paths = bool(getattr(getattr(recorder, "settings", None), "plain_paths", False))
    if deepspeed is None or torch is None or _HOOKS.undo:
        return
    _HOOKS.is_compiling = compiling(torch)
    for part in (_functions, _engine, _pipeline, _hybrid, _construction, _gathers):
        part(deepspeed)


@guard
def remove() -> None:
    """Everything as it was. What is known stays known."""
    marked.remove()
    while _HOOKS.undo:
        _HOOKS.undo.pop()()


def engines() -> List[Any]:
    """The engines that are alive, oldest first."""
    living = [(reference, reference()) for reference in _HOOKS.engines]
    _HOOKS.engines = [reference for reference, engine in living if engine is not None]
    return [engine for _, engine in living if engine is not None]


def gathers() -> List[Dict[str, Any]]:
    """The gathers of ZeRO-3 so far, for the sidecar."""
    return marked.marks(roles.names_by_number(engines()))


def config(engine: Any) -> Optional[Dict[str, Any]]:
    """The configuration that an engine was made with, without secrets."""
    settings = _get(engine, "_config")
    for found in (_get(settings, "_param_dict"), _get(engine, "config"), settings):
        if isinstance(found, dict):
            written: Dict[str, Any] = redact(found, _HOOKS.plain_paths)
            return written
    return None


def zero(engine: Any) -> Dict[str, Any]:
    """What of ZeRO is in force in an engine: stage, ranks, buckets and thresholds as they are used."""
    settings = _get(engine, "_config")
    of_zero, optimizer = _get(settings, "zero_config"), _get(engine, "optimizer")
    stage = _number(_get(of_zero, "stage", 0))
    found: Dict[str, Any] = {"stage": stage, "world": _world(engine)}
    for name in _ZERO:
        found[name] = _plain(_get(of_zero, name))
    if stage:
        for name in _AS_USED:
            used = _plain(_get(optimizer, name))
            found[name] = found[name] if used is None else used
    if _get(of_zero, "overlap_comm") is None:
        found["overlap_comm"] = stage == 3
    found["offload_optimizer"] = _offload(_get(of_zero, "offload_optimizer"))
    found["offload_param"] = _offload(_get(of_zero, "offload_param"))
    found["hpz_partition_size"] = _plain(_get(of_zero, "zero_hpz_partition_size"))
    found.update(_precision(engine, settings, optimizer))
    found["gradient_accumulation_steps"] = _plain(_get(settings, "gradient_accumulation_steps"))
    found["micro_batch_size"] = _plain(_get(settings, "train_micro_batch_size_per_gpu"))
    found["optimizer"] = _kind(optimizer)
    found["basic_optimizer"] = _kind(_get(engine, "basic_optimizer"))
    found.update(_sizes(engine))
    return found


# What is read of an engine.


def _get(owner: Any, name: str, default: Any = None) -> Any:
    return roles._get(owner, name, default)


def _plain(value: Any) -> Any:
    """A number, a text, a yes or no; nothing else."""
    return value if isinstance(value, (bool, int, float, str)) else None


def _number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


def _kind(value: Any) -> Optional[str]:
    return None if value is None else type(value).__name__


def _world(engine: Any) -> Optional[int]:
    """The ranks that share the states of one replica."""
    for name in ("seq_dp_world_size", "dp_world_size"):
        found = _get(engine, name)
        if isinstance(found, int):
            return found
    return None


def _offload(settings: Any) -> Optional[Dict[str, Any]]:
    """Where to, and how; no paths."""
    if settings is None:
        return None
    device = _get(settings, "device")
    found: Dict[str, Any] = {"device": str(getattr(device, "value", device))}
    if found["device"] == "none":
        return None
    for name in ("ratio", "pin_memory", "max_in_cpu", "buffer_count", "buffer_size"):
        value = _plain(_get(settings, name))
        if value is not None:
            found[name] = value
    return found


def _precision(engine: Any, settings: Any, optimizer: Any) -> Dict[str, Any]:
    """Types of numbers: of parameters, of gradients as they are added up, and on the wire."""
    types = _call(engine, "get_data_types") or (None, None)
    accumulated = _get(optimizer, "gradient_accumulation_dtype")
    return {
        "dtype": _dtype(types[0]),
        "grad_accum_dtype": _dtype(accumulated if accumulated is not None else types[1]),
        "communication_dtype": _dtype(_get(engine, "communication_data_type")),
        "master_dtype": _dtype(_get(optimizer, "master_weights_and_grads_dtype")),
        "autocast": bool(_call(engine, "torch_autocast_enabled")),
        "gradient_clipping": _plain(_get(settings, "gradient_clipping")),
    }


def _call(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)()
    except Exception:  # noqa: BLE001 - a method that this version has not, or an engine half made
        return None


def _dtype(value: Any) -> Optional[str]:
    return None if value is None else str(value).replace("torch.", "")


def _sizes(engine: Any) -> Dict[str, int]:
    """Elements of the parameters: all, trained, kept whole, and of the largest."""
    found = {"parameters": 0, "trained_parameters": 0, "persistent_parameters": 0, "largest_parameter": 0}
    module = _get(engine, "module")
    for param in [] if module is None else module.parameters():
        size = int(_get(param, "ds_numel") or param.numel())
        found["parameters"] += size
        found["trained_parameters"] += size if param.requires_grad else 0
        found["persistent_parameters"] += size if _get(param, "ds_persist") else 0
        found["largest_parameter"] = max(found["largest_parameter"], size)
    return found


# What is replaced.


def _functions(deepspeed: Any) -> None:
    """`deepspeed.initialize`: whoever calls it finds it in the module."""
    for name in ("initialize", "init_inference"):
        _mark(deepspeed, name, "init")


def _engine(deepspeed: Any) -> None:
    kind = getattr(deepspeed, "DeepSpeedEngine", None)
    if kind is None:
        note("this DeepSpeed has no DeepSpeedEngine: its phases are not marked")
        return
    _replace(kind, "_configure_distributed_model", _registering)
    _replace(kind, "forward", _forward)
    _replace(kind, "step", _step)
    for name, phase in _ENGINE:
        _mark(kind, name, phase)


def _pipeline(deepspeed: Any) -> None:
    """Its schedule holds the methods themselves, by instruction."""
    kind = getattr(deepspeed, "PipelineEngine", None)
    if kind is None:
        return
    for name, phase in _PIPELINE:
        _instruct(kind, name, functools.partial(_marked, phase=phase))
    _instruct(kind, "_exec_optimizer_step", _step)


def _hybrid(deepspeed: Any) -> None:
    """The engine of RLHF, which also generates."""
    kind = getattr(deepspeed, "DeepSpeedHybridEngine", None)
    if kind is not None:
        _mark(kind, "generate", "eval")


def _construction(_deepspeed: Any) -> None:
    """The `with` of zero.Init."""
    home: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    kind = getattr(home, "InsertPostInitMethodToModuleSubClasses", None) or getattr(home, "Init", None)
    if kind is not None:
        _replace(kind, "__enter__", _entering)
        _replace(kind, "__exit__", _leaving)


def _gathers(_deepspeed: Any) -> None:
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    partition = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if coordinator is not None and partition is not None:
        marked.install(coordinator, partition)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Tuple[Any, Any]:
    """Puts our own in the place of what `owner` itself has; (what it had, ours)."""
    original = vars(owner).get(name)
    if not callable(original):
        return None, None
    ours = make(original)
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is ours:
            setattr(owner, name, original)

    _HOOKS.undo.append(undo)
    return original, ours


def _mark(owner: Any, name: str, phase: str) -> None:
    _replace(owner, name, functools.partial(_marked, phase=phase))


def _instruct(kind: Any, name: str, make: Callable[[Any], Any]) -> None:
    """A method of the pipeline's engine, and its entries in the table of instructions."""
    original, ours = _replace(kind, name, make)
    table = vars(kind).get("_INSTRUCTION_MAP")
    if original is None or not isinstance(table, dict):
        return
    for instruction in [one for one, method in table.items() if method is original]:
        table[instruction] = ours
        _HOOKS.undo.append(functools.partial(table.__setitem__, instruction, original))


# The replacements. Each calls the original exactly once; what it raises goes through untouched.


def _marked(original: Any, phase: str) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _HOOKS.is_compiling():
            return original(*args, **kwargs)
        token = _begin(phase)
        try:
            return original(*args, **kwargs)
        finally:
            _end(token)

    return wrapped


def _forward(original: Any) -> Any:
    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _HOOKS.is_compiling():
            return original(self, *args, **kwargs)
        token = _begin(_direction(self) or "forward")
        try:
            return original(self, *args, **kwargs)
        finally:
            _end(token)

    return wrapped


def _step(original: Any) -> Any:
    """Only a call that updates the parameters is a step: between them gradients are added up."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _get(self, "global_steps")
        token = _begin("step") if _is_boundary(self) else None
        try:
            result = original(self, *args, **kwargs)
        finally:
            _end(token)
        if before is None or _get(self, "global_steps") != before:
            _step_done()
        return result

    return wrapped


def _registering(original: Any) -> Any:
    """Early in an engine's making: one that does not fit into memory is the one to know about. Not `__init__`, since
    zero.Init replaces that of every module's class."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        _register(self)
        return original(self, *args, **kwargs)

    return wrapped


def _entering(original: Any) -> Any:
    @functools.wraps(original)
    def __enter__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        _TOKENS.setdefault(id(self), []).append(_begin("init"))
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            _left(self)
            raise

    return __enter__


def _leaving(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        try:
            return original(self, *args, **kwargs)
        finally:
            _left(self)

    return __exit__


_TOKENS: Dict[int, List[Any]] = {}
"""Of each open zero.Init."""


@guard
def _left(context: Any) -> None:
    tokens = _TOKENS.get(id(context))
    if tokens:
        _end(tokens.pop())
    if not tokens:
        _TOKENS.pop(id(context), None)


@guard
def _begin(phase: str) -> Any:
    return _HOOKS.phases.begin(phase, _SOURCE)


@guard
def _end(token: Any) -> None:
    if token is not None:
        _HOOKS.phases.end(token)


@guard
def _step_done() -> None:
    _HOOKS.phases.step_done()


@guard
def _register(engine: Any) -> None:
    if not any(reference() is engine for reference in _HOOKS.engines):
        _HOOKS.engines.append(weakref.ref(engine))


@guard
def _direction(engine: Any) -> str:
    torch: Any = sys.modules["torch"]
    return "forward" if engine.training and torch.is_grad_enabled() else "eval"


@guard
def _is_boundary(engine: Any) -> bool:
    """Without DeepSpeed's counting of micro-batches (`managed_gradient_accumulation`) every step is one."""
    if _call(engine, "managed_gradient_accumulation") is False:
        return True
    return bool(engine.is_gradient_accumulation_boundary())
