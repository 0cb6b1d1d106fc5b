"""A callback for the Trainer of transformers: `Trainer(..., callbacks=[MemtraceCallback()])`."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from memtrace.record.api import Recording, recording


class MemtraceCallback(TrainerCallback):  # type: ignore[misc]
    """Records a training from its beginning to its end. Options are those of `memtrace.recording`.

    The model is on the GPU before training begins: `memtrace record`, or `with memtrace.recording():` around the
    whole program, see it being made.
    """

    def __init__(self, directory: str | None = None, **options: Any) -> None:
        self._open = contextlib.ExitStack()
        self._arguments: tuple[str | None, dict[str, Any]] = (directory, options)
        self.recording: Recording | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins."""
        directory, options = self._arguments
        self._open.close()
        self.recording = self._open.enter_context(recording(directory, **options))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes. A training that fails is written at the end of the process."""
        self._open.close()
