"""Frames as text to look in: by path, by function, by both. Every string is looked at once, whoever has it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.model import StackTable
from memtrace.places import short_path


class FrameTexts:
    """The frames of a table. What is looked for is in lower case.

    A path is looked at as people see it (`torch/optim/adam.py`); for a text with a `/` in it, all of the path. A text
    with a `:` in it is looked for in `torch/optim/adam.py:791 step`.
    """

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
        self._files, self._file = np.unique(stacks.filename, return_inverse=True)
        self._names, self._name = np.unique(stacks.name, return_inverse=True)

    def in_path(self, text: str) -> NDArray[np.bool_]:
        """For each frame whether its path has the text."""
        text = text.replace("\\", "/")
        paths = self._whole if "/" in text else self._short
        if ":" not in text:
            return _holding(text, paths)[self._file.ravel()]
        frames = zip(self._file.ravel().tolist(), self._stacks.line.tolist(), self._name.ravel().tolist(), strict=True)
        found = (text in f"{paths[file]}:{line} {self._functions[name]}" for file, line, name in frames)
        return np.fromiter(found, np.bool_, self._stacks.frame_count)

    def in_function(self, text: str) -> NDArray[np.bool_]:
        """For each frame whether its function has the text."""
        return _holding(text, self._functions)[self._name.ravel()]

    def anywhere(self, text: str) -> NDArray[np.bool_]:
        """For each frame whether its path or its function has the text."""
        return self.in_path(text) | self.in_function(text)

    @cached_property
    def _whole(self) -> list[str]:
        return [self._stacks.strings[file].replace("\\", "/").casefold() for file in self._files.tolist()]

    @cached_property
    def _short(self) -> list[str]:
        return [short_path(self._stacks.strings[file]).casefold() for file in self._files.tolist()]

    @cached_property
    def _functions(self) -> list[str]:
        return [self._stacks.strings[name].casefold() for name in self._names.tolist()]


def _holding(text: str, texts: list[str]) -> NDArray[np.bool_]:
    return np.fromiter((text in one for one in texts), np.bool_, len(texts))
