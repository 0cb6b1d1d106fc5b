"""Marks of the parameters that DeepSpeed ZeRO-3 gathers: where, for whom (`demand` or `prefetch`), from when to when.

One fetch gathers what its module needs (demand) and then what later modules will need (prefetch), through one method; a
gather of only the module's own parameters is demanded. What a handle's `wait` makes is marked there, and what
`_partition` lets go of, there. Parameters are known by DeepSpeed's number for them: no reference to one is kept.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

from .eager import untraced
from .notes import guard, note

MOST_MARKS = 100_000
_GATHER = "_PartitionedParameterCoordinator__all_gather_params"
_HANDLES = (
    "AllGatherHandle",
    "AllGatherCoalescedHandle",
    "AllReduceCoalescedHandle",
    "NoGatherHandle",
    "NoGatherCoalescedHandle",
)
_OF_HANDLE = (
    "params",
    "_AllGatherHandle__param",
    "_NoGatherHandle__param",
    "_NoGatherCoalescedHandle__params",
)
"""Where a handle has its parameter or parameters, over the versions."""

Mark = Tuple[int, int, int, str, int, Optional[int], bool]
"""address, bytes, DeepSpeed's number of the parameter, kind, time_us, released_us, whether it is persistent"""


class Watch:
    """What is being gathered, what is there, and what was. `wanted` and `held` are by DeepSpeed's number."""

    def __init__(self) -> None:
        self.wanted: Dict[int, str] = {}
        self.held: Dict[int, Mark] = {}
        self.marks: Deque[Mark] = collections.deque(maxlen=MOST_MARKS)
        self.dropped = 0
        self.here = threading.local()

    def asked(self, params: Any, is_own: Callable[[Any, Any], bool], missing: Any) -> None:
        """A gather begins, of what is `missing` among `params`: all of it the fetched module's own, or nothing."""
        absent = [param for param in params if param.ds_status is missing]
        module = getattr(self.here, "module", None)
        if absent and module is not None:
            kind = "demand" if is_own(module, absent[0]) else "prefetch"
            for param in absent:
                self.wanted[param.ds_id] = kind

    def arrived(self, params: Any) -> None:
        """They are whole, and were waited for."""
        if not self.wanted:
            return
        now = time.time_ns() // 1000
        for param in params:
            kind = self.wanted.pop(param.ds_id, None)
            if kind is not None:
                self.hold(param, kind, now)

    def hold(self, param: Any, kind: str, now: int) -> None:
        """A parameter in memory of its own."""
        number, numel, address, shard = param.ds_id, param.ds_numel, param.data_ptr(), param.ds_tensor
        if not address or (shard is not None and shard.numel() >= numel and shard.data_ptr() == address):
            return  # of one rank: nothing was gathered
        if number in self.held:
            self.keep(self.held[number])
        self.held[number] = (address, numel * param.element_size(), number, kind, now, None, bool(param.ds_persist))

    def leaving(self, params: Any) -> None:
        """About to be partitioned: the last moment to see one that came by a way unknown to us."""
        wanted = self.wanted
        for param in params if wanted else ():
            if param.ds_id in wanted and param.numel() == param.ds_numel:
                self.arrived((param,))

    def left(self, params: Any) -> None:
        """DeepSpeed has let go of them."""
        held = self.held
        for param in params:
            mark = held.pop(param.ds_id, None)
            if mark is not None:
                self.keep((*mark[:5], time.time_ns() // 1000, mark[6]))

    def keep(self, mark: Mark) -> None:
        self.dropped += len(self.marks) == MOST_MARKS
        self.marks.append(mark)

    def failed(self, error: Exception) -> None:
        note(f"a ZeRO-3 gather was not marked: {type(error).__name__}: {error}")


WATCH = Watch()
_undo: List[Callable[[], None]] = []


@guard
def install(coordinator_module: Any, partition_module: Any) -> None:
    """From now on gathers are marked. The modules are DeepSpeed's `partitioned_param_coordinator` and
    `partition_parameters`; a version in which something is not where it is looked for goes unmarked."""
    if _undo:
        return
    coordinator = getattr(coordinator_module, "PartitionedParameterCoordinator", None)
    init = getattr(partition_module, "Init", None)
    missing = getattr(getattr(partition_module, "ZeroParamStatus", None), "NOT_AVAILABLE", None)
    if missing is None or not all(hasattr(coordinator, name) for name in ("fetch_sub_module", _GATHER)):
        note("this DeepSpeed's gathers are not where they are looked for: none is marked")
        return
    is_leaf = getattr(coordinator_module, "z3_leaf_module", lambda _module: False)
    params_of = getattr(coordinator_module, "iter_params", None) or _parameters
    is_own = functools.partial(_is_own, params_of, is_leaf)
    for function in (*vars(Watch).values(), _is_own, _parameters, _params_of):
        if callable(function):
            untraced(function)
    _wrap(coordinator, "fetch_sub_module", _fetching)
    _wrap(coordinator, _GATHER, functools.partial(_gathering, is_own=is_own, missing=missing))
    for handle in (getattr(partition_module, name, None) for name in _HANDLES):
        for kind in _family(handle):
            _wrap(kind, "wait", _waiting)
    for kind in _family(init):
        _wrap(kind, "_partition", _partitioning)


def remove() -> None:
    """Everything as it was; the marks stay."""
    while _undo:
        _undo.pop()()


def forget() -> None:
    """No marks: for a forked child."""
    WATCH.__init__()  # type: ignore[misc]


def marks(names: Dict[int, str]) -> List[Dict[str, Any]]:
    """All marks in order of time, with the `names` of parameters by DeepSpeed's number for them."""
    if WATCH.dropped:
        note(f"{WATCH.dropped} gathers before the last {MOST_MARKS} are not listed")
    rows = sorted([*WATCH.marks, *WATCH.held.values()], key=lambda mark: mark[4])
    return [_row(mark, names) for mark in rows]


def _row(mark: Mark, names: Dict[int, str]) -> Dict[str, Any]:
    address, size, number, kind, time_us, released_us, persistent = mark
    row: Dict[str, Any] = {
        "address": address,
        "bytes": size,
        "parameter": names.get(number, ""),
        "kind": kind,
        "time_us": time_us,
        "released_us": released_us,
    }
    return {**row, "persistent": True} if persistent else row


# The wrappers. Each calls the original exactly once, whatever goes wrong with us.


def _fetching(original: Callable[..., Any]) -> Callable[..., Any]:
    here = WATCH.here

    @functools.wraps(original)
    def fetch_sub_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(here, "module", None)
        here.module = args[0] if args else kwargs.get("current_submodule")
        try:
            return original(self, *args, **kwargs)
        finally:
            here.module = before

    return fetch_sub_module


def _gathering(original: Callable[..., Any], is_own: Callable[[Any, Any], bool], missing: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def __all_gather_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            WATCH.asked(params, is_own, missing)
        except Exception as error:  # noqa: BLE001
            WATCH.failed(error)
        return original(self, params, *args, **kwargs)

    return __all_gather_params


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "complete", False):
            return original(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        try:
            WATCH.arrived(_params_of(self))
        except Exception as error:  # noqa: BLE001
            WATCH.failed(error)
        return result

    return wait


def _partitioning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _partition(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            WATCH.leaving(param_list)
        except Exception as error:  # noqa: BLE001
            WATCH.failed(error)
        result = original(self, param_list, *args, **kwargs)
        try:
            WATCH.left(param_list)
        except Exception as error:  # noqa: BLE001
            WATCH.failed(error)
        return result

    return _partition


def _params_of(handle: Any) -> Any:
    for name in _OF_HANDLE:
        found = getattr(handle, name, None)
        if found is not None:
            return found if isinstance(found, (list, tuple)) else (found,)
    return ()


def _is_own(params_of: Callable[..., Any], is_leaf: Callable[[Any], bool], module: Any, param: Any) -> bool:
    """Whether a fetch of the module is for this parameter; `params_of` is DeepSpeed's way to all of them, and slow."""
    for one in module._parameters.values():
        if one is param:
            return True
    recurse = is_leaf(module)
    if not recurse and vars(module).get("_external_params", True) == {}:
        return False
    return any(one is param for one in params_of(module, recurse=recurse))


def _parameters(module: Any, recurse: bool = False) -> Any:
    return module.parameters(recurse=recurse)


def _family(kind: Any) -> Iterator[Any]:
    """A class and those made from it."""
    if isinstance(kind, type):
        yield kind
        children: List[Any] = kind.__subclasses__()
        for child in children:
            yield from _family(child)


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a method that the class itself defines, to be taken back if it is still ours then."""
    original = vars(owner).get(name)
    if original is None or not callable(original):
        return
    replacement = make(original)
    untraced(replacement)
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    _undo.append(undo)
