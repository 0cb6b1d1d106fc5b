"""What a snapshot holds, as frozen numpy columns. Data only: nothing here reads, replays or judges."""

from memtrace.model.snapshot import Annotations, Notice, SnapshotData, TorchRange
from memtrace.model.stacks import Frame, StackTable, StringTable
from memtrace.model.state import Blocks, BlockState, Segments
from memtrace.model.trace import Action, Trace

__all__ = [
    "Action",
    "Annotations",
    "BlockState",
    "Blocks",
    "Frame",
    "Notice",
    "Segments",
    "SnapshotData",
    "StackTable",
    "StringTable",
    "TorchRange",
    "Trace",
]
