from collections.abc import Callable
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.initial import PageUses
from memtrace.allocator.memory_map import MemoryMap, PrivatePools
from memtrace.allocator.stream import Events

@final
class Column:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

_Columns: TypeAlias = tuple[Column, ...]
_Changes: TypeAlias = tuple[Column, Column, Column, Column]

def forward(
    events: Events, start: MemoryMap, private: PrivatePools, forced: dict[int, int], seed: int
) -> tuple[_Columns, Column, _Changes, _Changes, Column, Column, Column, Column, int, int]: ...
def backward(
    events: Events, at_end: MemoryMap, private: PrivatePools, page_uses: Callable[[], PageUses], seed: int
) -> tuple[Column, Column]: ...
def alone(events: Events, seed: int) -> tuple[_Columns, Column, _Changes, Column, Column, Column, Column]: ...
def add_lifetimes(
    delta: NDArray[np.int64],
    born: NDArray[np.int64],
    end: NDArray[np.int64],
    amount: NDArray[np.int64] | None,
    large: NDArray[np.bool_],
    pool: int,
) -> None: ...
def add_changes(
    delta: NDArray[np.int64],
    event: NDArray[np.int32],
    amount: NDArray[np.signedinteger],
    large: NDArray[np.bool_],
    pool: int,
) -> None: ...
