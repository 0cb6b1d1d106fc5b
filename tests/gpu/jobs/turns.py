"""Several processes time their steps in turns, a few at a time, so that what the machine does meanwhile hits all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PATIENCE_S = 240


class Turns:
    """`FILE:K:N`: participant K of N. FILE.K says that K is there; FILE holds the number of turns taken."""

    def __init__(self, text: str) -> None:
        self.file: Path | None = None
        if text:
            name, index, count = text.rsplit(":", 2)
            self.file, self.index, self.count = Path(name), int(index), int(count)

    def timed(self, step: Callable[[], Any], blocks: int, steps: int) -> list[float]:
        """Seconds of each step. The first one of each block only wakes the device."""
        times = []
        self._wait_for_all()
        for block in range(blocks):
            with self._turn(block):
                step()
                for _ in range(steps):
                    _synchronize()
                    began = time.perf_counter()
                    step()
                    _synchronize()
                    times.append(time.perf_counter() - began)
        return times

    def _wait_for_all(self) -> None:
        if self.file is None:
            return
        self._beside(self.index).touch()
        self._wait(lambda: all(self._beside(index).exists() for index in range(self.count)))

    @contextlib.contextmanager
    def _turn(self, block: int) -> Iterator[None]:
        """Turn number block * N + K."""
        mine = 0 if self.file is None else block * self.count + self.index
        self._wait(lambda: self._taken() >= mine)
        try:
            yield
        finally:
            if self.file is not None:
                new = self.file.with_name(f"{self.file.name}.new")
                new.write_text(str(mine + 1))
                os.replace(new, self.file)

    def _beside(self, index: int) -> Path:
        assert self.file is not None
        return self.file.with_name(f"{self.file.name}.{index}")

    def _taken(self) -> int:
        try:
            return 0 if self.file is None else int(self.file.read_text())
        except FileNotFoundError:
            return 0

    def _wait(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError("the others do not come")
            time.sleep(0.002)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
