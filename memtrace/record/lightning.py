"""A callback for Lightning: `Trainer(callbacks=[MemtraceCallback()])`."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from memtrace.record.api import Recording, recording


def _base() -> Any:
    """The class of the package that is installed under one of its two names."""
    try:
        return importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        return importlib.import_module("pytorch_lightning").Callback


class MemtraceCallback(_base()):  # type: ignore[misc]
    """Records from setup to teardown, the making of the optimizer too. Options are those of `memtrace.recording`."""

    def __init__(self, directory: str | None = None, **options: Any) -> None:
        super().__init__()
        self._open = contextlib.ExitStack()
        self._arguments: tuple[str | None, dict[str, Any]] = (directory, options)
        self.recording: Recording | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begins."""
        directory, options = self._arguments
        self._open.close()
        self.recording = self._open.enter_context(recording(directory, **options))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Writes."""
        self._open.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes what led there."""
        self._open.close()
