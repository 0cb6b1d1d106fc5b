"""Small jobs as snapshots: allocations named by call chains, at addresses that do not matter.

    job = Job()
    weight = job.alloc("torch/nn/modules/module.py:965 _apply; ...cuda; train.py:3 <module>", 4 * MiB)
    job.free(weight)
    job.category(weight)

Call chains are written innermost first, separated by `;`. A relative path stands in site-packages, unless it is the
script's own (no folder in it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from builders import SnapshotBuilder

import memtrace
from memtrace.analysis.blame import Row

MiB = 1 << 20
PACKAGES = "/opt/env/lib/python3.11/site-packages/"
SCRIPT = "train.py:9 <module>"
CALL = "torch/nn/modules/module.py:1775 _call_impl"
MODULE = f"model.py:20 forward; {CALL}; {SCRIPT}"
"""The stack of a module's forward, called by the script."""
BACKWARD = "torch/_tensor.py:630 backward; train.py:10 <module>"
STEP = "torch/optim/adam.py:238 step; torch/optim/optimizer.py:500 wrapper; train.py:11 <module>"


def chain(text: str) -> str:
    """A call chain as the builder takes it, with full paths."""
    frames = []
    for part in text.split(";"):
        frame = part.strip()
        path = frame.split(":")[0]
        frames.append(frame if "/" not in path or path.startswith(("/", "C:")) else PACKAGES + frame)
    return ";".join(frames)


@dataclass
class Job:
    """A job being recorded. `alloc` returns a handle for the others."""

    builder: SnapshotBuilder = field(default_factory=SnapshotBuilder)
    addresses: list[int] = field(default_factory=list)

    def alloc(self, stack: str | None, size: int = 4 * MiB) -> int:
        """Allocates; None is a thread without Python."""
        address = 0x7F00_0000_0000 + len(self.addresses) * 0x1_0000_0000
        self.builder.alloc(address, size, stack=None if stack is None else chain(stack))
        self.addresses.append(address)
        return len(self.addresses) - 1

    def free(self, *handles: int) -> None:
        """Frees."""
        for handle in handles:
            self.builder.free(self.addresses[handle])

    def step(self, stack: str = STEP) -> None:
        """An optimizer's step that allocates and frees one temporary."""
        self.free(self.alloc(stack))

    def snapshot(self, folder: Path) -> memtrace.Snapshot:
        """The recording."""
        return memtrace.load(self.builder.pickle(folder / "job.pickle"), cache=False)

    def rows(self, folder: Path, at: str | int = "end") -> dict[int, Row]:
        """Handle -> row of `blame --by block` at a moment."""
        found = {}
        for row in self.snapshot(folder).blame(at=at, by="block").rows:
            if row.block is not None:
                found[self.addresses.index(row.block.address)] = row
        return found

    def categories(self, folder: Path) -> list[str]:
        """The category of every allocation, in their order, dead or alive."""
        snapshot = self.snapshot(folder)
        attribution, blocks = snapshot.attribution(), snapshot.replay().lifetimes
        by_birth = sorted(range(len(blocks)), key=lambda row: int(blocks.born[row]))
        return [attribution.categories[attribution.category[row]] for row in by_birth]
