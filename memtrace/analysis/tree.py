"""The call tree of a blame: a networkx DiGraph from the outermost frames inwards, edges weighted in bytes.

Node 0 is the root. Every other node is a frame reached by one call path; its attributes are `frame` (None for bytes
without a stack, which carry `label`), `bytes` (of all below) and `self_bytes` (allocated by that very frame).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from memtrace.analysis.blame import Blame
from memtrace.analysis.frames import innermost_common
from memtrace.errors import QuestionError
from memtrace.model import Frame
from memtrace.model.stacks import NOT_RECORDED

ROOT = 0
MAX_NODES = 200_000
"""A real call tree has a few thousand; a file made to have millions would take gigabytes."""
Graph: TypeAlias = "nx.DiGraph[int]"


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """`dominator` is the innermost frame that all bytes with a stack pass through; `heaviest` follows the largest
    child from the root to a leaf."""

    graph: Graph
    dominator: Frame | None
    heaviest: tuple[Frame, ...]


def call_tree(blame: Blame) -> CallTree:
    """The tree of a blame made by `tree` or by `stack`: the bytes of each node sum up its children and its own."""
    graph: Graph = nx.DiGraph()
    graph.add_node(ROOT, frame=None, label="", bytes=0, self_bytes=0)
    child_of: dict[tuple[int, object], int] = {}

    def descend(node: int, step: object, frame: Frame | None, label: str, size: int) -> int:
        child = child_of.get((node, step))
        if child is None:
            child = child_of[node, step] = len(child_of) + 1
            if child > MAX_NODES:
                raise QuestionError(
                    f"the call tree has more than {MAX_NODES:,} nodes", hint="Use --by stack, or a later --at."
                )
            graph.add_node(child, frame=frame, label=label, bytes=0, self_bytes=0)
            graph.add_edge(node, child, weight=0)
        graph.nodes[child]["bytes"] += size
        graph.edges[node, child]["weight"] += size
        return child

    table = blame.stacks
    for row in blame.rows:
        node = ROOT
        graph.nodes[ROOT]["bytes"] += row.bytes
        for frame_id in table.ids(row.stack)[::-1].tolist():
            node = descend(node, frame_id, table.frame(frame_id), "", row.bytes)
        if node == ROOT:
            node = descend(ROOT, (row.category, row.label), None, f"{row.category}  {row.label}", row.bytes)
        graph.nodes[node]["self_bytes"] += row.bytes
    dominator = innermost_common(table, [row.stack for row in blame.rows if row.stack != NOT_RECORDED])
    return CallTree(graph, dominator, _heaviest_path(graph))


def children(graph: Graph, node: int) -> list[int]:
    """Children of a node, heaviest first."""
    return sorted(graph.successors(node), key=lambda child: (-graph.nodes[child]["bytes"], child))


def _heaviest_path(graph: Graph) -> tuple[Frame, ...]:
    path: list[Frame] = []
    node = ROOT
    while below := children(graph, node):
        node = below[0]
        frame = graph.nodes[node]["frame"]
        if frame is None:
            break
        path.append(frame)
    return tuple(path)
