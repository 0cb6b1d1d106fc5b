"""Frames by name: which frames of a table are in a given function of a given file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.model import StackTable
from memtrace.places import Side, is_file, side_of


class Function(NamedTuple):
    """Functions of one library file. `file` is the end of its path, part by part (`torch/optim/*.py`);
    `names` the bare names as frames have them, `*` any."""

    file: str
    names: tuple[str, ...] = ("*",)

    def holds(self, filename: str, name: str) -> bool:
        """Whether a frame with that path and name is in it."""
        return (name in self.names or self.names == ("*",)) and is_file(filename, self.file)


def names(words: str) -> tuple[str, ...]:
    """Names written as words."""
    return tuple(words.split())


class FunctionIndex:
    """Finds which of many functions a frame is in, looking only at those that share its name."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = functions
        self._by_name: defaultdict[str, list[int]] = defaultdict(list)
        for number, function in enumerate(functions):
            for name in function.names:
                self._by_name[name].append(number)

    def matches(self, filename: str, name: str) -> tuple[int, ...]:
        """Numbers of the functions, in order."""
        candidates = sorted([*self._by_name.get(name, ()), *self._by_name.get("*", ())])
        return tuple(number for number in candidates if is_file(filename, self._functions[number].file))

    def frames(self, stacks: StackTable) -> list[tuple[int, ...]]:
        """For each frame of a table, the numbers of the functions it is in."""
        names = set(self._by_name)
        strings = stacks.strings
        known: dict[tuple[int, int], tuple[int, ...]] = {}
        found = []
        for pair in zip(stacks.filename.tolist(), stacks.name.tolist(), strict=True):
            if pair not in known:
                name = strings[pair[1]]
                known[pair] = self.matches(strings[pair[0]], name) if name in names or "*" in names else ()
            found.append(known[pair])
        return found


def frame_sides(stacks: StackTable) -> NDArray[np.uint8]:
    """Whose each frame of a table is (`Side`)."""
    files = {index: side_of(stacks.strings[index]) for index in set(stacks.filename.tolist())}
    return np.fromiter((files[index] for index in stacks.filename.tolist()), np.uint8, stacks.frame_count)


def python_depth(stacks: StackTable, sides: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How many Python frames each stack has."""
    python = np.concatenate([np.zeros(1, np.int64), np.cumsum(sides[stacks.frame_ids] != Side.CPP)])
    return np.asarray(np.diff(python[stacks.offsets]), np.int64)


def any_in_stack(stacks: StackTable, of_frame: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each stack whether any of its frames is marked."""
    if not len(stacks.frame_ids):
        return np.zeros(len(stacks), np.bool_)
    counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_frame[stacks.frame_ids])])
    return np.asarray(np.diff(counts[stacks.offsets]) > 0)
