"""The call tree of what is alive at one moment, as columns: fast enough to be made anew for every move of a cursor.

`analysis.tree` makes the same tree as a networkx graph, for programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.analysis.blame import label_of
from memtrace.analysis.frame_paths import FramePaths, least_between
from memtrace.analysis.frames import display_frame
from memtrace.analysis.holdings import NO_BLOCK, Holdings, holdings_at
from memtrace.analysis.icicle import Cell, icicle
from memtrace.attribution import Attribution, Reason
from memtrace.model import Frame
from memtrace.model.frozen import FrozenColumns
from memtrace.model.stacks import NOT_RECORDED
from memtrace.text import printable
from memtrace.units import plural

ROOT = 0
MAX_NODES = 200_000
"""A real call tree has a few thousand; of a file made to have more the lightest stacks become one node."""
NO_SIDE = 255
"""The side of a node without a frame: the root, and bytes without a stack."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaves(FrozenColumns):
    """The stacks alive, by the path they have in the tree: ids in the table, bytes, blocks, and the number of the path
    among those of the tree (of stacks too light for a node of their own, -1, first)."""

    stack: NDArray[np.int32]
    bytes: NDArray[np.int64]
    blocks: NDArray[np.int64]
    path: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Matches:
    """What a search found: `nodes` in the order of the tree, and the memory whose stacks have a frame that matches,
    each byte and block once. It is the same in every view of the tree; a folded node can hold more than matches."""

    nodes: tuple[int, ...]
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class FrameTree(FrozenColumns):
    """One row a node, parents before children; the nodes below node n are the rows n + 1 to `end[n]` (not included).
    Row 0, the root, is everything: `bytes[0]` is the counter `of` after `event`.

    `depth` is 0 at the root. `frame` is an id in `paths.table` (-1: the node has `labels[label[n]]` instead), `side`
    whose it is (`memtrace.places.Side`, `NO_SIDE` without a frame). `bytes` are those of the node and of all below,
    `self_bytes` those whose path ends in it: a node has what its children have and its own. `category` indexes
    `categories`: the one with most bytes. `first` and `last` are the range of the node's paths among the tree's.
    """

    device: int
    event: int
    of: str
    paths: FramePaths
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    end: NDArray[np.int64]
    frame: NDArray[np.int32]
    label: NDArray[np.int32]
    side: NDArray[np.uint8]
    bytes: NDArray[np.int64]
    self_bytes: NDArray[np.int64]
    blocks: NDArray[np.int64]
    category: NDArray[np.uint8]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    labels: tuple[str, ...]
    categories: tuple[str, ...]
    leaves: Leaves

    def __len__(self) -> int:
        return len(self.parent)

    def __repr__(self) -> str:
        return f"FrameTree({len(self):,} nodes, {int(self.bytes[ROOT]):,} bytes {self.of} after event {self.event})"

    def text(self, node: int) -> str:
        """A node for people, harmless: `torch/optim/adam.py:791 _multi_tensor_adam`; of bytes without a stack what is
        known of them, in parentheses."""
        if self.frame[node] >= 0:
            return display_frame(self.paths.table.frame(int(self.frame[node])))
        return self.labels[self.label[node]] if node != ROOT else "all"

    def children(self, node: int) -> list[int]:
        """The children of a node, heaviest first."""
        below = node + 1 + np.flatnonzero(self.parent[node + 1 : self.end[node]] == node)
        return [int(child) for child in below[np.argsort(-self.bytes[below], kind="stable")]]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to a node, both included."""
        found = [node]
        while found[-1] != ROOT:
            found.append(int(self.parent[found[-1]]))
        return found[::-1]

    def key(self, node: int) -> tuple[int | str, ...]:
        """What names a node in the trees of other moments: the frames (or the label) on the way to it."""
        return tuple(
            int(self.frame[step]) if self.frame[step] >= 0 else self.labels[self.label[step]]
            for step in self.path(node)[1:]
        )

    def find(self, key: tuple[int | str, ...]) -> int:
        """The node that a key names, or the last one on the way to it that this tree has."""
        node = ROOT
        for step in key:
            column, wanted = (self.frame, step) if isinstance(step, int) else (self.label, self._label_number(step))
            child, end = node + 1, int(self.end[node])
            while child < end and column[child] != wanted:
                child = int(self.end[child])
            if child >= end:
                break
            node = child
        return node

    def stack(self, node: int) -> int:
        """The stack with most bytes through a node, an id in `paths.table`; -1 of bytes without a stack."""
        leaf = self._heaviest_leaf(node)
        return NOT_RECORDED if leaf is None else int(self.leaves.stack[leaf])

    def hidden(self, node: int) -> tuple[Frame, ...]:
        """The frames folded into a node, in the stack with most bytes through it; outermost first, as called."""
        stack = self.stack(node)
        if stack == NOT_RECORDED or self.frame[node] < 0:
            return ()
        table = self.paths.table
        begin, end = table.offsets[stack : stack + 2].tolist()
        inside = np.flatnonzero(self.paths.depth[begin:end] == self.depth[node] - 1)[::-1]
        frames = table.frame_ids[begin:end][inside]
        return tuple(table.frame(frame) for frame in frames.tolist() if frame != self.frame[node])

    def folded(self, node: int) -> int:
        """How many frames are hidden in a node, in the stack with most bytes through it."""
        return len(self.hidden(node))

    def search(self, text: str) -> Matches:
        """The nodes that show or hide a frame whose path or function contains `text`, in any case; `text` is one that a
        node could show. Nothing contains the empty text."""
        return _search(self, text.casefold()) if text else Matches((), 0, 0)

    def layout(self, root: int, width: int, rows: int) -> tuple[tuple[Cell, ...], ...]:
        """The tree below `root` as rows of cells, the root's own the first: see `icicle`."""
        return icicle(self, root, width, rows)

    def _label_number(self, label: str) -> int:
        return self.labels.index(label) if label in self.labels else len(self.labels)

    def _heaviest_leaf(self, node: int) -> int | None:
        begin, end = np.searchsorted(self.leaves.path, [self.first[node], self.last[node]]).tolist()
        return begin + int(self.leaves.bytes[begin:end].argmax()) if end > begin else None


def frame_tree_at(replay: Replay, attribution: Attribution, paths: FramePaths, *, event: int, of: str) -> FrameTree:
    """The tree of counter `of` (allocated, reserved, requested, active) after `event`.

    A tree has no more than about `MAX_NODES` nodes: stacks beyond, the lightest, are one node "N more stacks".
    """
    held = holdings_at(replay, attribution, event, of)
    stack = paths.shown.rows(held.stack)
    framed = stack != NOT_RECORDED
    ids, which = np.unique(stack[framed], return_inverse=True)
    leaf_bytes, leaf_blocks = _sums(which.ravel(), held.bytes[framed], len(ids)), np.bincount(which.ravel())
    alive, path = np.unique(paths.of_stack[ids], return_inverse=True)
    path = path.ravel()
    path_bytes = _sums(path, leaf_bytes, len(alive))
    common = paths.common_among(alive)
    kept = _heaviest_paths(paths.lengths(alive), common, path_bytes)
    number = np.full(len(alive), -1, np.int64)
    number[kept] = np.arange(len(kept))
    rest = _Rest.of(held, attribution, paths, ~framed)
    labels, of_row = list(rest.labels), np.empty(len(held), np.int64)
    of_row[framed] = number[path][which.ravel()]
    of_row[~framed] = len(kept) + rest.label
    if len(kept) < len(alive):
        of_row[framed] = np.where(of_row[framed] < 0, len(kept) + len(labels), of_row[framed])
        labels.append(f"({plural(int((number[path] < 0).sum()), 'more stack')})")
    order = np.argsort(number[path], kind="stable")
    shape = _shape(paths, alive[kept], least_between(common, kept), len(labels))
    return FrameTree(
        device=replay.device,
        event=event,
        of=of,
        paths=paths,
        **_weights(shape, held, of_row)._asdict(),
        parent=shape.parent,
        depth=shape.depth,
        end=shape.end,
        frame=shape.frame,
        label=shape.label,
        side=np.where(shape.frame < 0, NO_SIDE, np.append(paths.shown.side, NO_SIDE)[shape.frame]).astype(np.uint8),
        first=shape.first,
        last=shape.last,
        labels=tuple(labels),
        categories=attribution.categories,
        leaves=Leaves(ids[order].astype(np.int32), leaf_bytes[order], leaf_blocks[order], number[path][order]),
    )


class _Rest(NamedTuple):
    """Bytes without a stack: the label of each row, and the labels."""

    label: NDArray[np.int64]
    labels: tuple[str, ...]

    @classmethod
    def of(cls, held: Holdings, attribution: Attribution, paths: FramePaths, rows: NDArray[np.bool_]) -> _Rest:
        """By category and by what is known of them, as `blame` groups them."""
        reason, category = held.reason[rows].astype(np.int64), held.category[rows].astype(np.int64)
        own = held.block[rows] == NO_BLOCK
        key = (own * len(attribution.categories) + category) * len(Reason) + reason
        keys, label = np.unique(key, return_inverse=True)
        texts = []
        for group, number in enumerate(keys.tolist()):
            category_code = number // len(Reason) % len(attribution.categories)
            said = np.unique(held.label[rows][label.ravel() == group])
            one = int(said[0]) if len(said) == 1 else -1
            name, reason_code = attribution.category_labels[category_code], number % len(Reason)
            known = label_of(attribution, paths.shown, category_code, reason_code, one, NOT_RECORDED)
            texts.append(f"({name})" if known in (name, "") else f"({name}: {known})")
        # two groups of one text are one node
        distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        places = np.array([distinct[text] for text in texts], np.int64)
        return cls(places[label.ravel()], tuple(printable(text) for text in distinct))


def _sums(group: NDArray[np.int64], values: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total


def _heaviest_paths(
    lengths: NDArray[np.int64], common: NDArray[np.int64], size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Paths (ascending) that together have at most `MAX_NODES` nodes: all, or the heaviest."""
    every = np.arange(len(lengths))
    if int((lengths - common).sum()) <= MAX_NODES:
        return every
    order = np.lexsort((every, -size))
    enough, too_many = 0, len(order)
    while too_many - enough > 1:
        count = (enough + too_many) // 2
        kept = np.sort(order[:count])
        if int((lengths[kept] - least_between(common, kept)).sum()) <= MAX_NODES:
            enough = count
        else:
            too_many = count
    return np.sort(order[:enough])


class _Shape(NamedTuple):
    """A tree without its bytes. `leaves`: how many paths and labels it has; each is a leaf, in that order."""

    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    end: NDArray[np.int64]
    frame: NDArray[np.int32]
    label: NDArray[np.int32]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    leaves: int


def _shape(paths: FramePaths, alive: NDArray[np.int64], common: NDArray[np.int64], labels: int) -> _Shape:
    """The nodes of these paths (ascending; `common` is what each shares with the one before), then one a label.

    A path opens nodes from where it leaves the one before, and closes those of that one below. At one depth nodes close
    in the order in which they opened, which makes pairs of the two without walking the tree.
    """
    count = len(alive) + labels
    length = np.concatenate([paths.lengths(alive), np.ones(labels, np.int64)])
    common = np.concatenate([common, np.zeros(labels + 1, np.int64)])
    opened = length - common[:-1]
    begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(opened)])
    leaf = np.repeat(np.arange(count), opened)
    depth = common[leaf] + np.arange(len(leaf)) - begin[leaf]
    closing = np.repeat(np.arange(1, count + 1), length - common[1:])
    below = length - common[1:]
    closed = common[closing] + np.arange(len(closing)) - (np.cumsum(below) - below)[closing - 1]
    by_opening, by_closing = _by_depth(depth), _by_depth(closed)
    last = np.empty(len(leaf), np.int64)
    last[by_opening] = closing[by_closing]
    parent = np.arange(len(leaf))  # of most the node before; they are numbered from 1 on
    joins = begin[:-1]
    keys = depth[by_opening] * (count + 1) + leaf[by_opening]
    place = np.searchsorted(keys, (common[:-1] - 1) * (count + 1) + np.arange(count), side="right") - 1
    above = by_opening[np.maximum(place, 0)] + 1 if len(leaf) else joins
    parent[joins] = np.where(common[:-1] > 0, above, ROOT)
    is_frame = leaf < len(alive)
    frame = np.full(len(leaf), -1, np.int32)
    frame[is_frame] = paths.frames[paths.offsets[alive][leaf[is_frame]] + depth[is_frame]]
    label = np.where(is_frame, -1, leaf - len(alive))
    return _Shape(
        parent=np.concatenate([[-1], parent]).astype(np.int32),
        depth=np.concatenate([[0], depth + 1]).astype(np.int32),
        end=np.concatenate([[len(leaf) + 1], begin[last] + 1]).astype(np.int64),
        frame=np.concatenate([[-1], frame]).astype(np.int32),
        label=np.concatenate([[-1], label]).astype(np.int32),
        first=np.concatenate([[0], leaf]).astype(np.int64),
        last=np.concatenate([[count], last]).astype(np.int64),
        leaves=count,
    )


def _by_depth(depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """A stable order by depth. Of two bytes each numpy sorts in linear time."""
    small = depth.astype(np.uint16) if int(depth.max(initial=0)) < 1 << 16 else depth
    return np.asarray(np.argsort(small, kind="stable"), np.int64)


class _Weights(NamedTuple):
    """Columns of the nodes that count something."""

    bytes: NDArray[np.int64]
    self_bytes: NDArray[np.int64]
    blocks: NDArray[np.int64]
    category: NDArray[np.uint8]


def _weights(shape: _Shape, held: Holdings, leaf: NDArray[np.int64]) -> _Weights:
    """What the nodes have, `leaf` being the leaf of every row of the holdings."""

    def below(values: NDArray[np.int64], rows: NDArray[np.bool_] | slice) -> NDArray[np.int64]:
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(_sums(leaf[rows], values[rows], shape.leaves))])
        return np.asarray(total[shape.last] - total[shape.first], np.int64)

    every = slice(None)
    size = below(held.bytes, every)
    blocks = below((held.block != NO_BLOCK).astype(np.int64), every)
    inner = np.zeros(len(size), np.int64)
    np.add.at(inner, shape.parent[1:], size[1:])
    category, most = np.zeros(len(size), np.uint8), np.zeros(len(size), np.int64)
    counted = held.category
    for code in np.unique(counted).tolist():
        of_code = below(np.maximum(held.bytes, 1), counted == code)  # one byte says that it is there at all
        category = np.where(of_code > most, np.uint8(code), category)
        most = np.maximum(of_code, most)
    return _Weights(size, size - inner, blocks, category)


def _search(tree: FrameTree, text: str) -> Matches:
    """`text` without case."""
    paths, leaves, table = tree.paths, tree.leaves, tree.paths.table
    matches = np.fromiter((text in shown for shown in paths.texts), np.bool_, table.frame_count)
    counts = np.diff(table.offsets)[leaves.stack]
    leaf = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(leaf)) - (np.cumsum(counts) - counts)[leaf] + table.offsets[leaves.stack][leaf]
    found = matches[table.frame_ids[place]]
    leaf, place = leaf[found], place[found]
    stacks = np.unique(leaf)
    # not "N more stacks": its stacks are searched one by one
    searched = tree.labels[: len(tree.labels) - bool((leaves.path < 0).any())]
    named = [number for number, label in enumerate(searched) if text in label.casefold()]
    labelled = np.flatnonzero((tree.label >= 0) & np.isin(tree.label, named))
    has_node = leaves.path[leaf] >= 0
    nodes = _nodes_at(tree, paths.depth[place[has_node]] + 1, leaves.path[leaf[has_node]])
    return Matches(
        nodes=tuple(np.unique(np.concatenate([nodes, labelled])).tolist()),
        bytes=int(leaves.bytes[stacks].sum() + tree.bytes[labelled].sum()),
        blocks=int(leaves.blocks[stacks].sum() + tree.blocks[labelled].sum()),
    )


def _nodes_at(tree: FrameTree, depth: NDArray[np.int64], path: NDArray[np.int64]) -> NDArray[np.int64]:
    """The nodes of that depth on these paths."""
    order = _by_depth(tree.depth.astype(np.int64))
    width = int(tree.last[ROOT]) + 1
    keys = tree.depth[order].astype(np.int64) * width + tree.first[order]
    return np.asarray(order[np.searchsorted(keys, depth.astype(np.int64) * width + path, side="right") - 1], np.int64)
