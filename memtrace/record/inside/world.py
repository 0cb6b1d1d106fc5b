"""One rank of a job of many, alone on one device: `memtrace record --simulate-world N`.

Every process group becomes torch's fake one. Its collectives complete at once; here they also fill their outputs, with
what this rank has itself, so that nothing uninitialised is trained on. What is allocated, when and for how long is what
rank R of N would see. The numbers are not: training results mean nothing.

Not simulated: memory that NCCL takes outside torch's allocator, and blocks that wait for a communication stream.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

from . import notes, process
from .importing import after_import

_NODE = 8  # ranks a node, as far as LOCAL_WORLD_SIZE says
_DEVICES = "MEMTRACE_GPU_COUNT"  # of a dry run, which has as many ranks a node
_MEANINGLESS = "simulated world: rank {rank} of {world}, alone; losses, gradients and what is saved mean nothing"

on_message: Optional[Callable[[str, Any], None]] = None
"""Is told when something that only another rank knows has to be made up: what, and the tensor or list. May raise."""

_libraries: List[Any] = []  # torch forgets what is registered in a library when the library dies
_keeping = 0  # gathers leave their output as it is, while positive


def environment(world: int, rank: int, known: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """What a launcher of `world` ranks would tell rank `rank`, given the environment `known`; on the first device."""
    local_world = str(min(world, int(known.get(_DEVICES) or _NODE)))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": local_world,
        "LOCAL_SIZE": local_world,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT") or "29500",
    }


def install(world: int, rank: int) -> None:
    """Makes this process rank `rank` of `world`. Torch has been imported; no process group exists yet."""
    if process.is_launcher():
        return
    torch: Any = sys.modules["torch"]
    try:
        if not 0 <= rank < world:
            raise ValueError(f"there is no rank {rank} in a world of {world}")
        c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        if c10d.is_initialized():
            raise RuntimeError("a process group exists already")
    except Exception as error:  # noqa: BLE001 - the job must run, as the rank it was started as
        notes.note(f"simulated world: not possible here: {type(error).__name__}: {error}")
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        notes.note(f"simulated world: the launcher started several ranks; each one plays rank {rank}")
    os.environ.update(environment(world, rank))
    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    _Work.bind(c10d.Work)
    _replace_groups(c10d, world, rank)
    _replace_collectives(c10d.ProcessGroup)
    _replace_object_collectives(c10d)
    _replace_functional(torch, c10d)
    after_import("torch.nn.parallel.distributed", _tame_ddp)
    after_import("torch.distributed.checkpoint.utils", _tame_checkpoint)
    after_import("torch.distributed.checkpoint.default_planner", _tame_planner)
    after_import("deepspeed.runtime.utils", _tame_deepspeed_gathers)
    after_import("deepspeed.runtime.zero.utils", _tame_deepspeed_checks)
    after_import("deepspeed.runtime.zero.partition_parameters", _tame_deepspeed_padding)
    notes.note(_MEANINGLESS.format(rank=rank, world=world))  # the launcher says so on stderr


# Process groups.


def _replace_groups(c10d: Any, world: int, rank: int) -> None:
    """Whatever backend and rendezvous is asked for: the fake group of `world` ranks."""
    init, helper = c10d.init_process_group, c10d._new_process_group_helper

    @functools.wraps(init)
    def init_process_group(*_: Any, **__: Any) -> Any:
        store = sys.modules["torch.distributed"].HashStore()
        store.set_timeout(timedelta(seconds=10))  # nobody else will ever set a key
        return init(backend="fake", store=store, rank=rank, world_size=world)

    @functools.wraps(helper)
    def new_process_group_helper(size: Any, own: Any, ranks: Any, _backend: Any, *rest: Any, **options: Any) -> Any:
        for name in ("pg_options", "backend_options", "device_id"):
            if name in options:
                options[name] = None
        return helper(size, own, ranks, "fake", *rest, **options)

    _replace(c10d, "init_process_group", init_process_group)
    _replace(c10d, "_new_process_group_helper", new_process_group_helper)
    _replace(c10d, "_store_based_barrier", lambda *_, **__: None)


def _replace(module: Any, name: str, new: Any) -> None:
    """Also in the modules of the same package that imported the old one by name."""
    old = getattr(module, name, None)
    if old is None:
        return
    package = module.__name__.partition(".")[0]
    for other_name, other in list(sys.modules.items()):
        if other_name.partition(".")[0] == package and vars(other).get(name) is old:
            setattr(other, name, new)


class _Work:
    """Makes handles of collectives that are done: `torch.distributed.Work` in Python.

    Like NCCL's, a handle holds the outputs, and until somebody waits the inputs too.
    """

    _class: Any = None

    @classmethod
    def bind(cls, base: Any) -> None:
        """Before the first `done`."""

        def init(self: Any, outputs: Sequence[Any], inputs: Any) -> None:
            base.__init__(self)
            self.outputs, self.inputs = list(outputs), inputs

        def wait(self: Any, *_: Any, **__: Any) -> bool:
            self.inputs = None
            return True

        def get_future(self: Any) -> Any:
            return _future(self.outputs, self.outputs)

        members = {
            "__init__": init,
            "wait": wait,
            "get_future": get_future,
            "synchronize": lambda _self: None,
            "block_current_stream": lambda _self: None,
            "is_completed": lambda _self: True,
            "is_success": lambda _self: True,
            "exception": lambda _self: None,
            "result": lambda self: self.outputs,
            "source_rank": lambda _self: 0,
        }
        cls._class = type("SimulatedWork", (base,), members)

    @classmethod
    def done(cls, outputs: Sequence[Any] = (), inputs: Any = None) -> Any:
        """A handle."""
        return cls._class(outputs, inputs)


def _future(result: Any, tensors: Sequence[Any]) -> Any:
    """A completed future. Not by `then`: that would run on streams of its own."""
    torch: Any = sys.modules["torch"]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    future = torch.futures.Future(devices=[f"cuda:{index}" for index in devices])
    future.set_result(result)
    return future


# Collectives: the methods of ProcessGroup, through which every Python caller goes.


def _spread(output: Any, shard: Any) -> None:
    """Each rank's chunk of a gather's output: our shard."""
    count = shard.numel()
    if not count or not output.numel() or _keeping:
        return
    # `.data`: like NCCL, tell autograd nothing.
    if not output.is_contiguous():
        output.data.copy_(shard.data.reshape(1, -1).expand(output.numel() // count, -1).reshape(output.shape))
        return
    rows, row = output.data.view(-1, count), shard.data.reshape(1, -1)
    begin, end = output.data_ptr(), output.data_ptr() + output.numel() * output.element_size()
    if not begin <= shard.data_ptr() < end:
        rows.copy_(row)
        return
    own = (shard.data_ptr() - begin) // (count * shard.element_size())  # gathered in place
    rows[:own].copy_(row.expand(own, -1))
    rows[own + 1 :].copy_(row.expand(rows.shape[0] - own - 1, -1))


def _take(output: Any, whole: Any, rank: int) -> None:
    """Our chunk of what is scattered."""
    count = output.numel()
    flat = whole.data.reshape(-1)[rank * count : (rank + 1) * count]
    output.data.copy_(flat.view(output.shape))


def _exchange(output: Any, sent: Any) -> None:
    """What the others send us is what we send them, as far as it goes."""
    if output.shape == sent.shape:
        output.data.copy_(sent.data)
        return
    target, source = output.data.view(-1), sent.data.reshape(-1)
    count = min(target.numel(), source.numel())
    target[:count].copy_(source[:count])
    target[count:].zero_()


def _copy(output: Any, source: Any) -> None:
    """One tensor of a list collective."""
    if output.shape == source.shape:
        if not _keeping:
            output.data.copy_(source.data)
    elif output.data_ptr() != source.data_ptr():
        _exchange(output, source)


def _lists(outer: Any) -> Iterator[Any]:
    """The tensor lists of an argument that is a list of tensors, or a list of such lists."""
    outer = list(outer)
    if outer and not isinstance(outer[0], (list, tuple)):
        yield outer
    else:
        yield from outer


def _flat(some: Any) -> List[Any]:
    """The tensors of a tensor, a list, or a list of lists."""
    if isinstance(some, (list, tuple)):
        return [tensor for part in some for tensor in _flat(part)]
    return [some]


def _allreduce(_group: Any, tensors: Any, *_: Any, **__: Any) -> Any:
    return _Work.done(_flat(tensors))


def _broadcast(group: Any, tensors: Any, options: Any = None, *_: Any, **__: Any) -> Any:
    """The sender's values are ours."""
    if getattr(options, "rootRank", 0) != group.rank():
        for tensor in _flat(tensors):
            _tell("a broadcast", tensor)
    return _Work.done(_flat(tensors))


def _barrier(_group: Any, *_: Any, **__: Any) -> Any:
    return _Work.done()


def _recv(_group: Any, tensors: Any, *_: Any, **__: Any) -> Any:
    for tensor in tensors:
        _tell("numbers", tensor)
        tensor.data.zero_()
    return _Work.done(tensors)


def _tell(what: str, place: Any) -> None:
    if on_message is not None:
        on_message(what, place)


def _allgather(_group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    for targets, source in zip(_lists(outputs), _flat(inputs)):
        for target in targets:
            _copy(target, source)
    return _Work.done(_flat(outputs), inputs)


def _allgather_coalesced(_group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    for targets in _lists(outputs):
        for target, source in zip(targets, inputs):
            _copy(target, source)
    return _Work.done(_flat(outputs), inputs)


def _allgather_base(_group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    for output, shard in zip(_flat(outputs), _flat(inputs)):
        _spread(output, shard)
    return _Work.done(_flat(outputs), inputs)


def _reduce_scatter(group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    for output, parts in zip(_flat(outputs), _lists(inputs)):
        output.data.copy_(parts[group.rank()].data.view(output.shape))
    return _Work.done(_flat(outputs), inputs)


def _reduce_scatter_base(group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    for output, whole in zip(_flat(outputs), _flat(inputs)):
        _take(output, whole, group.rank())
    return _Work.done(_flat(outputs), inputs)


def _scatter(group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    parts = _flat(inputs)
    for output in _flat(outputs):
        if parts:
            output.data.copy_(parts[group.rank()].data)
        else:
            output.data.zero_()
    return _Work.done(_flat(outputs), inputs)


def _alltoall(_group: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    for output, sent in zip(_flat(outputs), _flat(inputs)):
        _exchange(output, sent)
    return _Work.done(_flat(outputs), inputs)


_METHODS: Dict[str, Callable[..., Any]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce,
    "broadcast": _broadcast,
    "reduce": _allreduce,
    "send": _allreduce,
    "recv": _recv,
    "recv_anysource": _recv,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "_allgather_base": _allgather_base,
    "all_gather_single": _allgather_base,
    "allgather_into_tensor_coalesced": _allgather_base,
    "all_gather_single_coalesced": _allgather_base,
    "gather": _allgather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_single": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_base,
    "reduce_scatter_single_coalesced": _reduce_scatter_base,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall,
    "all_to_all_single": _alltoall,
}


def _replace_collectives(group_class: Any) -> None:
    for name, new in _METHODS.items():
        if hasattr(group_class, name):
            setattr(group_class, name, new)


def _replace_functional(torch: Any, c10d: Any) -> None:
    """Functional collectives (DTensor, torch.compile) reach the fake group from C++, which may not fill outputs."""

    def rank_in(group: Any) -> int:
        resolve = getattr(c10d, "_resolve_process_group", None)
        return int((resolve(group) if isinstance(group, str) and resolve is not None else group).rank())

    def reduce_scatter_tensor(whole: Any, _op: Any, size: int, group: Any) -> Any:
        output = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
        _take(output, whole, rank_in(group))
        return output

    def reduce_scatter_tensor_coalesced(inputs: Any, op: Any, size: int, group: Any) -> Any:
        return [reduce_scatter_tensor(whole, op, size, group) for whole in inputs]

    def all_to_all_single(sent: Any, output_splits: Any, _input_splits: Any, _group: Any) -> Any:
        output = sent.new_empty((sum(output_splits), *sent.shape[1:])) if output_splits else sent.new_empty(sent.shape)
        _exchange(output, sent)
        return output

    replacements = (reduce_scatter_tensor, reduce_scatter_tensor_coalesced, all_to_all_single)
    try:
        library = torch.library.Library("_c10d_functional", "IMPL")
        for function in replacements:
            for key in ("CPU", "CUDA"):
                library.impl(function.__name__, function, key)
        _libraries.append(library)
    except Exception as error:  # noqa: BLE001 - before torch 2.3 there are no such operators
        notes.log(f"simulated world: functional collectives left alone: {error}")


# Objects.


def _replace_object_collectives(c10d: Any) -> None:
    """The others' objects are ours; a list that would be filled keeps what it holds."""

    def all_gather_object(object_list: Any, obj: Any, *_: Any, **__: Any) -> None:
        _tell("gathered objects", object_list)
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: Any = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            _tell("gathered objects", object_gather_list)
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(
        scatter_object_output_list: Any,
        scatter_object_input_list: Any = None,
        _src: Any = None,
        group: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[c10d.get_rank(group)]
        else:
            _tell("a shared object", scatter_object_output_list)

    def broadcast_object_list(
        object_list: Any, src: Any = None, group: Any = None, *_: Any, group_src: Any = None, **__: Any
    ) -> None:
        sender, own = (src or 0, c10d.get_rank()) if group_src is None else (group_src, c10d.get_rank(group))
        if sender != own:
            _tell("a shared object", object_list)

    def recv_object_list(object_list: Any, *_: Any, **__: Any) -> None:
        _tell("an object", object_list)

    def nothing(*_: Any, **__: Any) -> None:
        """There is nobody to wait for."""

    def barrier(_group: Any = None, async_op: bool = False, *_: Any, **__: Any) -> Any:
        return _Work.done() if async_op else None

    for name, new in (
        ("all_gather_object", all_gather_object),
        ("gather_object", gather_object),
        ("scatter_object_list", scatter_object_list),
        ("broadcast_object_list", broadcast_object_list),
        ("send_object_list", nothing),
        ("recv_object_list", recv_object_list),
        ("monitored_barrier", nothing),
        ("barrier", barrier),
    ):
        _replace(c10d, name, new)


# Libraries.


def _tame_ddp(module: Any) -> None:
    """DDP's reducer reads the all-reduce's result, which the fake group does not give: reduce through a Python hook."""
    ddp = module.DistributedDataParallel
    init = ddp.__init__

    def hook(chosen: List[Any], bucket: Any) -> Any:
        if chosen:
            state, function = chosen[0]
            return function(state, bucket)
        return _future(bucket.buffer(), [bucket.buffer()])

    def chosen_of(self: Any) -> List[Any]:
        if "_memtrace_hook" not in self.__dict__:
            self.__dict__["_memtrace_hook"] = []
            module.dist._register_comm_hook(self.reducer, self.__dict__["_memtrace_hook"], hook)
        chosen: List[Any] = self.__dict__["_memtrace_hook"]
        return chosen

    @functools.wraps(init)
    def init_hooked(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        try:
            chosen_of(self)
        except Exception as error:  # noqa: BLE001 - DDP in pure Python has no reducer, and needs none of this
            notes.log(f"simulated world: DDP left alone: {error}")

    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        chosen = chosen_of(self)
        if chosen:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        chosen.append((state, hook))
        if hasattr(self, "_comm_hooks"):
            self._comm_hooks.append((hook, state))

    ddp.__init__ = init_hooked
    ddp.register_comm_hook = register_comm_hook
    ddp._register_builtin_comm_hook = lambda _self, _kind: None


def _tame_checkpoint(module: Any) -> None:
    """torch.distributed.checkpoint: each rank is its own coordinator, else a rank but the first waits for a plan."""
    wrapper = module._DistWrapper
    init = wrapper.__init__

    @functools.wraps(init)
    def init_alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        init(self, group, use_dist, module.dist.get_rank(group) if use_dist else coordinator_rank)

    wrapper.__init__ = init_alone


def _tame_planner(module: Any) -> None:
    """The gathered plans are all ours, so they overlap."""
    old = module._validate_global_plan
    answers: Any = [] if "list" in str(getattr(old, "__annotations__", {}).get("return", "")).lower() else True
    _replace(module, "_validate_global_plan", lambda *_, **__: answers)


def _tame_deepspeed_gathers(module: Any) -> None:
    """Stages 1 and 2 gather updated parameters: our shard over everybody's would ruin them. They stay as they were."""
    old = getattr(module, "all_gather_dp_groups", None)
    if old is None:
        return

    @functools.wraps(old)
    def all_gather_dp_groups(*args: Any, **options: Any) -> Any:
        global _keeping  # one thread trains
        _keeping += 1
        try:
            return old(*args, **options)
        finally:
            _keeping -= 1

    _replace(module, "all_gather_dp_groups", all_gather_dp_groups)


def _tame_deepspeed_checks(module: Any) -> None:
    """Comparisons with rank 0's numbers: they are ours. The tensors that are sent stay."""

    def sent(numbers: Any) -> Any:
        torch: Any = sys.modules["torch"]
        device = module.get_accelerator().device_name(os.environ["LOCAL_RANK"])
        return torch.tensor(numbers, dtype=torch.int64, device=device).cpu()

    def get_lst_from_rank0(lst: List[int]) -> List[int]:
        return [int(value) for value in sent(lst)]

    def assert_lst_len_same_as_other_ranks(lst: List[int]) -> None:
        sent(len(lst))

    _replace(module, "get_lst_from_rank0", get_lst_from_rank0)
    _replace(module, "assert_lst_len_same_as_other_ranks", assert_lst_len_same_as_other_ranks)


def _tame_deepspeed_padding(module: Any) -> None:
    """Stage 3 leaves the last ranks' padding uninitialised. Nobody reads it there; here every chunk is this rank's."""
    init_class = module.Init
    old = init_class._partition_param

    @functools.wraps(old)
    def partition_param(self: Any, param: Any, *args: Any, **options: Any) -> Any:
        is_first = getattr(param, "ds_tensor", None) is None
        result = old(self, param, *args, **options)
        shard = getattr(param, "ds_tensor", None)
        if is_first and shard is not None and shard.data.numel():
            filled = max(param.ds_numel - self.get_partition_rank() * shard.ds_numel, 0)
            if filled < shard.data.numel():
                shard.data[filled:].zero_()
        return result

    init_class._partition_param = partition_param
