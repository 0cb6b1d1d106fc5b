"""Which process of the job this is."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, List, Optional, Tuple

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_WORLDS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
_LAUNCHER_PROGRAMS = ("deepspeed", "ds", "torchrun", "accelerate", "accelerate-launch", "dsr", "pdsh", "mpirun", "srun")
_LAUNCHER_MODULES = (
    "deepspeed.launcher",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "accelerate.commands",
)


def rank() -> Optional[int]:
    """This process's rank: of the process group if there is one, else of the launcher's variables; None: no word."""
    found = _from_group("get_rank")
    return _from_environment(_RANKS) if found is None else found


def world() -> Optional[int]:
    """The number of ranks, from the same places."""
    found = _from_group("get_world_size")
    return _from_environment(_WORLDS) if found is None else found


def local_rank() -> Optional[int]:
    """The rank within its node."""
    return _from_environment(_LOCAL_RANKS)


def local_world() -> Optional[int]:
    """The number of ranks on this node."""
    return _from_environment(_LOCAL_WORLDS)


def has_group() -> bool:
    """Whether the process takes part in a process group."""
    return _from_group("get_rank") is not None


def host() -> str:
    """The name of this machine."""
    try:
        return socket.gethostname()
    except OSError:
        return "localhost"


def command_line() -> List[str]:
    """The words this process was started with. `sys.argv` is not set yet while `-m` finds its module."""
    words = getattr(sys, "orig_argv", None)
    if words:
        return list(words)
    try:
        with open("/proc/self/cmdline", "rb") as file:  # Python 3.8 and 3.9
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return [sys.executable or "python", *getattr(sys, "argv", [])]


def is_launcher() -> bool:
    """Whether this process starts the ranks and is none itself."""
    module, script = _what_runs(command_line())
    if module is not None:
        return any(module == name or module.startswith(name + ".") for name in _LAUNCHER_MODULES)
    return script is not None and os.path.basename(script) in _LAUNCHER_PROGRAMS


def is_worker() -> bool:
    """Whether another Python process started this one through multiprocessing."""
    if any("multiprocessing" in word for word in command_line()[1:4]):
        return True
    processes: Any = sys.modules.get("multiprocessing.process")
    parent = getattr(processes, "parent_process", None)
    return parent is not None and parent() is not None


_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def _what_runs(words: List[str]) -> Tuple[Optional[str], Optional[str]]:
    """(module of -m, None) or (None, script) of an interpreter's command line."""
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return next(rest, None), None
        if word.startswith("-m") and not word.startswith("--"):
            return word[2:], None
        if word == "-c" or word == "-":
            return None, None
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return None, word
    return None, None


def _from_environment(names: Tuple[str, ...]) -> Optional[int]:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit() and len(value) < 10:
            return int(value)
    return None


def _from_group(what: str) -> Optional[int]:
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return int(getattr(distributed, what)())
    except Exception:  # noqa: BLE001 - a group being torn down answers in many ways
        return None
