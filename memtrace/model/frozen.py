"""Columns that cannot be written to: what is derived from them is cached."""

from __future__ import annotations

import numpy as np


class FrozenColumns:
    """Base of the dataclasses of columns: their arrays become read-only."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            column = getattr(self, name)
            if isinstance(column, np.ndarray):
                column.flags.writeable = False
