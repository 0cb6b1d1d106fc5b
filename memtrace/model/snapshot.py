"""A whole snapshot file as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns
from memtrace.model.stacks import StackTable, StringTable
from memtrace.model.state import Blocks, Segments
from memtrace.model.trace import Trace

Setting = str | int | float | bool | dict[str, int]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the reader of an answer must know: a stable `code` and one sentence that says what to do."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TorchRange:
    """The releases of torch that write files with these keys; `at_most` None: the newest known or later."""

    at_least: str | None
    at_most: str | None

    def __str__(self) -> str:
        if self.at_least is None:
            return "torch of unknown version" if self.at_most is None else f"torch up to {self.at_most}"
        if self.at_most is None:
            return f"torch {self.at_least} or later"
        if self.at_least == self.at_most:
            return f"torch {self.at_least}"
        return f"torch {self.at_least}-{self.at_most}"


@dataclass(frozen=True, slots=True, eq=False)
class Annotations(FrozenColumns):
    """`record_function` ranges: one row a START or an END, in the file's order."""

    name: NDArray[np.int32]
    start: NDArray[np.bool_]
    device: NDArray[np.int32]
    time_us: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotData:
    """Everything a snapshot file says. `traces` has one entry per device with events or segments, by ordinal.

    `pools` are the allocator's pool ids ((0, 0) is the default one); `actions` names every action code;
    `has_segments` is False when the file has no `segments` key; `tiled` is False when blocks leave gaps in their
    segment, which torch never writes; `settings` is as in the file, scalars and one level of dict only.
    """

    path: str
    file_bytes: int
    traces: tuple[Trace, ...]
    segments: Segments
    blocks: Blocks
    stacks: StackTable
    strings: StringTable
    pools: tuple[tuple[int, int], ...]
    actions: tuple[str, ...]
    settings: Mapping[str, Setting]
    annotations: Annotations
    torch: TorchRange
    has_segments: bool
    tiled: bool
    notices: tuple[Notice, ...]

    def __repr__(self) -> str:
        events = sum(len(trace) for trace in self.traces)
        return (
            f"SnapshotData({self.path!r}: {self.torch}, devices {list(self.devices)}, {events:,} events, "
            f"{len(self.segments):,} segments, {len(self.stacks):,} stacks)"
        )

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(trace.device for trace in self.traces)

    def trace(self, device: int) -> Trace:
        """The trace of a device. Raises KeyError for a device that is not in the file."""
        for trace in self.traces:
            if trace.device == device:
                return trace
        raise KeyError(device)
