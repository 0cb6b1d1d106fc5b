"""Process groups of a script that was given no world: the one it asks for itself, played by torch's fake group."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


def follow_the_script(world: Any) -> None:
    """`world`: the recorder's simulation of one rank among many, installed once the script says which."""
    import importlib

    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        backend = args[0] if args else kwargs.get("backend")
        if str(backend or "").lower() == "fake":  # it simulates one itself
            return original(*args, **kwargs)
        size, rank = _size_and_rank(kwargs)
        world._replace(c10d, "init_process_group", original)
        world.install(size, rank)
        return c10d.init_process_group(*args, **kwargs)

    world._replace(c10d, "init_process_group", init_process_group)
    sys.modules["torch.distributed"].init_process_group = init_process_group  # type: ignore[attr-defined]


def _size_and_rank(kwargs: Any) -> Any:
    size, rank = int(kwargs.get("world_size", -1)), int(kwargs.get("rank", -1))
    if size < 0:
        size = int(os.environ.get("WORLD_SIZE") or 1)
    if rank < 0:
        rank = int(os.environ.get("RANK") or 0)
    return max(size, 1), min(max(rank, 0), max(size, 1) - 1)
