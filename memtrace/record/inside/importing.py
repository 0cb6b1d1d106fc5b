"""Callbacks for the moment at which a module has been imported."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in __init__.py: this much runs in every helper program
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

    Callback = Callable[[Any], None]

_waiting: Dict[str, List[Callback]] = {}


def after_import(name: str, callback: Callback) -> None:
    """Calls `callback(module)` once `name` is imported: now, if it is. What the callback raises is swallowed."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        _call(callback, module)
        return
    _waiting.setdefault(name, []).append(callback)
    _look()


def watch(*names: str) -> None:
    """Names that `after_import` will be asked for when their import may have begun: deepspeed imports torch."""
    for name in names:
        if name not in sys.modules:
            _waiting.setdefault(name, [])
    _look()


def forget() -> None:
    """No callback will be called any more."""
    _waiting.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def _look() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds nothing itself: asks the finders after it, and has a say when their loader is done."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[Any]:
        """The spec that is found without us, its loader watched."""
        if name not in _waiting:
            return None
        for finder in list(sys.meta_path):
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                _watch(spec, name)
                return spec
        return None


def _watch(spec: Any, name: str) -> None:
    """Lets the loader tell us. It stays what it is: code that looks at a module's loader finds the real one."""
    loader: Any = getattr(spec, "loader", None)
    run = getattr(loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: Any) -> None:
        try:
            del loader.exec_module
        except AttributeError:
            pass
        run(module)
        for callback in _waiting.pop(name, ()):
            _call(callback, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader with slots: this module goes unrecorded rather than differently imported
        return


def _call(callback: Callback, module: Any) -> None:
    try:
        callback(module)
    except Exception as error:  # noqa: BLE001 - the import is the job's, and must succeed as without us
        from . import notes

        notes.log(f"hook on {getattr(module, '__name__', '?')} failed: {type(error).__name__}: {error}")
