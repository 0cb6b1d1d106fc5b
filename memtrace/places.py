"""Where code lives, told by paths alone: whose a file is, what to call it, and whether it is a given library's file."""

from __future__ import annotations

import functools
import re
from enum import IntEnum
from fnmatch import fnmatchcase

_CPP = re.compile(r"(?:\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|hxx|inl|inc|s)|\.so(?:\.[0-9]+)*)$|^$|^\?\?$", re.IGNORECASE)
_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python[0-9]|[/\\]Python3?[0-9]*[/\\]lib[/\\]|^<frozen |"
    r"^<__array_function__|^<eval_with_key>|^torch_compiled_|[/\\]torchinductor_",
    re.IGNORECASE,
)
_RECORDER = re.compile(r"(?:^|[/\\])(?:memtrace_inside|memtrace[/\\]record[/\\]inside)[/\\]")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]|.*[/\\]lib(?:64)?[/\\]python[0-9.]+[/\\]", re.IGNORECASE)


PLUMBING = frozenset(
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
    """Whose a file is."""

    OWN = 0
    LIBRARY = 1
    CPP = 2


@functools.lru_cache(maxsize=1 << 16)
def side_of(filename: str) -> Side:
    """Whose a file is, by its path."""
    if _CPP.search(filename):
        return Side.CPP
    return Side.LIBRARY if _LIBRARY.search(filename) else Side.OWN


def is_recorders(filename: str) -> bool:
    """Whether a file is of the recorder's part that runs in the job.

    >>> is_recorders("/job/.memtrace/20251202-1450-train/.bootstrap/memtrace_inside/gathers.py")
    True
    >>> is_recorders("/opt/py/site-packages/memtrace/record/launch.py")
    False
    """
    return _RECORDER.search(filename) is not None


@functools.lru_cache(maxsize=1 << 16)
def short_path(filename: str) -> str:
    """A path for people: from the package on (`torch/optim/adam.py`), else its last two parts."""
    in_package = _PACKAGES.match(filename)
    if in_package:
        return filename[in_package.end() :].replace("\\", "/")
    parts = re.split(r"[/\\]", filename)
    return "/".join(parts[-2:]).lstrip("/")


@functools.lru_cache(maxsize=1 << 16)
def parts_of(filename: str) -> tuple[str, ...]:
    """The parts of a path, outermost first; `\\` separates as `/` does."""
    return tuple(filename.replace("\\", "/").split("/"))


def is_file(filename: str, pattern: str) -> bool:
    """Whether a path ends in `pattern`, part by part; `*` and `?` stand for characters within one part.

    >>> is_file("/opt/py/site-packages/torch/optim/adam.py", "torch/optim/*.py")
    True
    >>> is_file("/home/me/mytorch/optim/adam.py", "torch/optim/*.py")
    False
    """
    wanted, parts = parts_of(pattern), parts_of(filename)
    return len(parts) >= len(wanted) and all(
        part == want or ("*" in want and fnmatchcase(part, want))
        for part, want in zip(parts[-len(wanted) :], wanted, strict=True)
    )


@functools.lru_cache(maxsize=1 << 16)
def is_plumbing(filename: str, function: str) -> bool:
    """Whether a library's function only passes a call on."""
    return (short_path(filename), function) in PLUMBING or any(
        function == name and is_file(filename, file) for file, name in PLUMBING
    )
