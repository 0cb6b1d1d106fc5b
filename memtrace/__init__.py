"""memtrace: where every byte of a PyTorch job's GPU memory went. Names are resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace._version import __version__

if TYPE_CHECKING:
    from memtrace.api import Peak, Snapshot, load
    from memtrace.errors import MemtraceError
    from memtrace.record.api import recording

_HOMES = {"Peak": "api", "Snapshot": "api", "load": "api", "MemtraceError": "errors", "recording": "record.api"}

__all__ = ["MemtraceError", "Peak", "Snapshot", "__version__", "load", "recording"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memtrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"memtrace.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
