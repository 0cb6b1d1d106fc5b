"""Which frames are whose: the program's own, a Python library's, or C++; and stacks reduced to what is shown."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.model import Frame, StackTable
from memtrace.model.stacks import NOT_RECORDED
from memtrace.text import printable

_CPP = re.compile(r"(?:\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|hxx|inl|inc|s)|\.so(?:\.[0-9]+)*)$|^$|^\?\?$", re.IGNORECASE)
_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python[0-9]|[/\\]Python3?[0-9]*[/\\]lib[/\\]|^<frozen |"
    r"^<__array_function__|^<eval_with_key>|^torch_compiled_|[/\\]torchinductor_",
    re.IGNORECASE,
)
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]|.*[/\\]lib(?:64)?[/\\]python[0-9.]+[/\\]", re.IGNORECASE)

_PLUMBING = frozenset(
    {
        ("torch/nn/modules/module.py", "_wrapped_call_impl"),
        ("torch/nn/modules/module.py", "_call_impl"),
        ("torch/nn/modules/module.py", "inner"),
        ("torch/utils/_contextlib.py", "decorate_context"),
        ("torch/utils/_contextlib.py", "generator_context"),
        ("torch/_dynamo/eval_frame.py", "_fn"),
        ("torch/_compile.py", "inner"),
        ("torch/autograd/function.py", "apply"),
        ("torch/optim/optimizer.py", "wrapper"),
        ("torch/optim/optimizer.py", "_use_grad"),
        ("torch/optim/optimizer.py", "maybe_fallback"),
        ("torch/optim/lr_scheduler.py", "wrapper"),
        ("deepspeed/utils/nvtx.py", "wrapped_fn"),
        ("transformers/utils/generic.py", "wrapper"),
        ("transformers/utils/output_capturing.py", "wrapper"),
        ("transformers/utils/deprecation.py", "wrapped_func"),
        ("accelerate/utils/operations.py", "forward"),
    }
)
"""(path in the package, function) of decorators and dispatchers: they pass a call on and say nothing about it."""


class Side(IntEnum):
    """Whose frame it is."""

    OWN = 0
    LIBRARY = 1
    CPP = 2


@functools.lru_cache(maxsize=1 << 16)
def side_of(filename: str) -> Side:
    """Whose a file is, by its path."""
    if _CPP.search(filename):
        return Side.CPP
    return Side.LIBRARY if _LIBRARY.search(filename) else Side.OWN


@functools.lru_cache(maxsize=1 << 16)
def short_path(filename: str) -> str:
    """A path for people: from the package on (`torch/optim/adam.py`), else its last two parts."""
    in_package = _PACKAGES.match(filename)
    if in_package:
        return filename[in_package.end() :].replace("\\", "/")
    parts = re.split(r"[/\\]", filename)
    return "/".join(parts[-2:]).lstrip("/")


def sides(stacks: StackTable) -> NDArray[np.uint8]:
    """Whose each frame of a table is."""
    files = {index: side_of(stacks.strings[index]) for index in set(stacks.filename.tolist())}
    return np.fromiter((files[index] for index in stacks.filename.tolist()), np.uint8, stacks.frame_count)


def own_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The program's own frames of a stack, innermost first."""
    return [frame for frame in frames if side_of(frame.filename) == Side.OWN]


def innermost_common(table: StackTable, rows: Sequence[int]) -> Frame | None:
    """The innermost frame (in the first of the stacks) that all of the stacks have."""
    if not rows:
        return None
    common = set(table.ids(rows[0]).tolist())
    for row in rows[1:]:
        common.intersection_update(table.ids(row).tolist())
    return next((table.frame(frame) for frame in table.ids(rows[0]).tolist() if frame in common), None)


def is_plumbing(frame: Frame) -> bool:
    """Whether a library frame only passes the call on."""
    return (short_path(frame.filename), frame.name) in _PLUMBING


def library_path(frames: Sequence[Frame]) -> list[Frame]:
    """The library calls inside the program's innermost frame that say most (innermost first): of each run of frames in
    one package, the innermost that does something of its own."""
    telling: list[Frame] = []
    package = None
    for frame in frames:
        if side_of(frame.filename) == Side.OWN:
            break
        if side_of(frame.filename) != Side.LIBRARY or is_plumbing(frame):
            continue
        here = short_path(frame.filename).split("/")[0]
        if here != package:
            telling.append(frame)
        package = here
    return telling


def display_frame(frame: Frame) -> str:
    """`torch/optim/adam.py:791 _multi_tensor_adam`, made harmless."""
    place = f"{short_path(frame.filename)}:{frame.line}" if frame.line else short_path(frame.filename)
    return printable(f"{place} {frame.name}".strip())


@dataclass(frozen=True, slots=True, eq=False)
class ShownStacks:
    """Stacks with the C++ frames left out (unless asked for), by the ids of the full ones.

    `shown[s]` is the row of full stack s in `table`, stacks that differ in C++ frames only having one row;
    `own[r]` is the innermost frame of row r that is the program's own, else a library's that says something.
    """

    table: StackTable
    shown: NDArray[np.int32]
    own: NDArray[np.int32]
    side: NDArray[np.uint8]

    def rows(self, stacks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows of full stack ids; -1 where a stack is not recorded or has no frame to show."""
        if not len(self.shown):
            return np.full(len(stacks), NOT_RECORDED, np.int32)
        return np.where(stacks == NOT_RECORDED, np.int32(NOT_RECORDED), self.shown[stacks])


def shown_stacks(stacks: StackTable, *, cpp: bool = False) -> ShownStacks:
    """The stacks as shown to people; `cpp` keeps the C++ frames."""
    side = sides(stacks)
    keep = np.ones(len(stacks.frame_ids), np.bool_) if cpp else side[stacks.frame_ids] != Side.CPP
    kept_ids = stacks.frame_ids[keep].tolist()
    counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
    bounds = counts[stacks.offsets].tolist()
    rows: dict[tuple[int, ...], int] = {}
    shown = np.empty(len(stacks), np.int32)
    for stack in range(len(stacks)):
        key = tuple(kept_ids[bounds[stack] : bounds[stack + 1]])
        shown[stack] = rows.setdefault(key, len(rows)) if key else NOT_RECORDED
    keys = list(rows)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(key) for key in keys], dtype=np.int64)])
    flat = np.fromiter((frame for key in keys for frame in key), np.int32, int(offsets[-1]))
    table = StackTable(stacks.strings, stacks.filename, stacks.line, stacks.name, offsets, flat)
    plumbing = np.fromiter((is_plumbing(stacks.frame(frame)) for frame in range(len(side))), np.bool_, len(side))
    rank = side.astype(np.int64) * 2 + plumbing
    own = np.fromiter((min(key, key=rank.__getitem__) for key in keys), np.int32, len(keys))
    return ShownStacks(table, shown, own, side)
