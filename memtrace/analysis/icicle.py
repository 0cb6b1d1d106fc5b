"""A call tree drawn as an icicle: who gets how many of a terminal's cells. Whole cells, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from memtrace.analysis.frame_tree import FrameTree

NO_NODE = -1


class Kind(IntEnum):
    """What a cell stands for."""

    NODE = 0
    MORE = 1
    """Nodes too narrow for a cell each, as one."""
    SELF = 2
    """The bytes of the node above that no child has."""


class Cell(NamedTuple):
    """A stretch of a row: `width` columns of the terminal from `start` on (0: too little to be drawn, but counted).
    `node` is the tree's, of `MORE` and `SELF` the one whose children or bytes they are; `nodes` how many it stands for.
    """

    kind: Kind
    node: int
    start: int
    width: int
    bytes: int
    nodes: int


def icicle(tree: FrameTree, root: int, width: int, rows: int) -> tuple[tuple[Cell, ...], ...]:
    """Up to `rows` rows of cells, the first being `root` in all of the `width` columns.

    Below the cell of a node are its children, heaviest first, then those too narrow for a column as one cell `MORE`,
    then its own bytes: their widths sum to the width of the cell, and their bytes to its bytes. Shares are rounded to
    the largest remainder; what is narrow gets a column wherever one can be spared. Nothing is below `MORE` and `SELF`.
    """
    if width < 1 or rows < 1:
        return ()
    row: tuple[Cell, ...] = (Cell(Kind.NODE, root, 0, width, int(tree.bytes[root]), 1),)
    found = [row]
    while len(found) < rows:
        row = tuple(cell for above in row for cell in _below(tree, above))
        if not row:
            break
        found.append(row)
    return tuple(found)


def _below(tree: FrameTree, above: Cell) -> list[Cell]:
    """The cells under a cell; none under one of a node without children."""
    if above.kind is not Kind.NODE or not above.width:
        return []
    children = tree.children(above.node)
    if not children:
        return []
    sizes = [int(size) for size in tree.bytes[children]]
    wide = sum(1 for size in sizes if size * above.width >= max(above.bytes, 1))
    if not wide and 2 * sizes[0] * above.width >= max(above.bytes, 1):
        wide = 1  # of a single column, the one that has most of it
    narrow = len(children) - wide
    told = wide + (narrow == 1)  # one alone is not "1 more"
    parts = [(Kind.NODE, node, size, 1) for node, size in zip(children[:told], sizes[:told], strict=True)]
    if told < len(children):
        parts.append((Kind.MORE, above.node, sum(sizes[told:]), narrow))
    own = int(tree.self_bytes[above.node])
    if own:
        parts.append((Kind.SELF, above.node, own, 0))
    widths = _widths([part[2] for part in parts], above.width)
    if narrow and not widths[wide]:
        _spare(widths, wide)
    cells, start = [], above.start
    for (kind, node, size, nodes), columns in zip(parts, widths, strict=True):
        cells.append(Cell(kind, node, start, columns, size, nodes))
        start += columns
    return cells


def _widths(sizes: Sequence[int], width: int) -> list[int]:
    """Shares of `width` whole columns by size: rounded down, then one more for those that lost most."""
    total = sum(sizes)
    if not total:
        return [width] + [0] * (len(sizes) - 1)
    found = [size * width // total for size in sizes]
    by_loss = sorted(range(len(sizes)), key=lambda place: (-(sizes[place] * width % total), place))
    for place in by_loss[: width - sum(found)]:
        found[place] += 1
    return found


def _spare(widths: list[int], place: int) -> None:
    """Gives one column of the widest to a part that has none, if that one keeps some."""
    widest = max(range(len(widths)), key=lambda other: (widths[other], -other))
    if widths[widest] > 1:
        widths[widest] -= 1
        widths[place] += 1
