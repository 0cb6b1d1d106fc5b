"""The tree of a moment: its sums against the counters, against the networkx tree, and against one built plainly."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import recordings
from builders import SnapshotBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from stacks import CALL, MODULE, SCRIPT, STEP, Job

import memtrace
from memtrace.analysis import frame_tree
from memtrace.analysis.frame_tree import NO_SIDE, ROOT, FrameTree
from memtrace.analysis.frames import display_frame
from memtrace.analysis.icicle import Kind
from memtrace.analysis.moment import COUNTER
from memtrace.analysis.tree import ROOT as NX_ROOT
from memtrace.errors import QuestionError
from memtrace.model import Frame
from memtrace.model.stacks import NOT_RECORDED
from memtrace.places import Side, is_plumbing, side_of

MiB = 1 << 20
FILES = (
    "mlp-adamw",
    "gpt2-zero3-oom",
    "llama-amp-cpp-stacks",
    "llama-lora",
    "cuda-graph",
    "gpt2-zero3-ring-20000",
    "public-state-only-259-segments",
    "public-synthetic-not-an-allocator",
    "public-private-pools-pending-free",
    "public-windows-paths-empty-frames",
)
VIEWS = [dict(zip(("inverted", "folded", "cpp"), flags, strict=True)) for flags in itertools.product((0, 1), repeat=3)]
LINEAR = "torch/nn/modules/linear.py:134 forward"


@pytest.fixture(scope="module", params=FILES)
def snapshot(request: pytest.FixtureRequest) -> memtrace.Snapshot:
    return memtrace.load(recordings.snapshot_path(request.param))


def moments(snapshot: memtrace.Snapshot, of: str) -> list[int]:
    """Peak, end, out of memory where there is one, before the first event, and any others."""
    last = snapshot.replay().events - 1
    found = [snapshot.event("peak", of), last, -1]
    found += np.random.default_rng(7).integers(-1, last + 1, 4).tolist()
    try:
        return [*found, snapshot.event("oom", of)]
    except QuestionError:
        return found


def check(tree: FrameTree) -> None:
    """Every node has what its children and it itself have; columns and methods agree."""
    below, blocks = np.zeros(len(tree), np.int64), np.zeros(len(tree), np.int64)
    np.add.at(below, tree.parent[1:], tree.bytes[1:])
    np.add.at(blocks, tree.parent[1:], tree.blocks[1:])
    assert (tree.bytes == below + tree.self_bytes).all()
    assert (tree.self_bytes >= 0).all()
    assert (tree.blocks >= blocks).all()
    assert (tree.parent[1:] < np.arange(1, len(tree))).all()
    assert (tree.depth[1:] == tree.depth[tree.parent[1:]] + 1).all()
    assert (tree.end[1:] <= tree.end[tree.parent[1:]]).all()
    assert (tree.end > np.arange(len(tree))).all()
    assert ((tree.side == NO_SIDE) == (tree.frame < 0)).all()
    for node in range(min(len(tree), 300)):
        children = tree.children(node)
        assert children == sorted(np.flatnonzero(tree.parent == node), key=lambda child: (-tree.bytes[child], child))
        assert tree.find(tree.key(node)) == node
        assert len(tree.path(node)) == tree.depth[node] + 1


@pytest.mark.parametrize("of", COUNTER)
def test_the_root_is_the_counter_and_nodes_sum_to_it(snapshot: memtrace.Snapshot, of: str) -> None:
    series = snapshot.series(COUNTER[of])
    for event, view in itertools.product(moments(snapshot, of), VIEWS):
        tree = snapshot.frame_tree(event, of, **view)
        assert tree.bytes[ROOT] == series[event + 1], (event, view)
        assert (tree.event, tree.of, tree.device) == (event, of, snapshot.default_device)
        check(tree)


@pytest.mark.parametrize("of", ["allocated", "reserved"])
def test_it_is_the_networkx_tree(snapshot: memtrace.Snapshot, of: str) -> None:
    for event in moments(snapshot, of)[:3]:
        graph = snapshot.tree(event, of).graph
        theirs: dict[tuple[Frame, ...], tuple[int, int]] = {}
        unframed = 0
        walk = [(NX_ROOT, ())]
        while walk:
            node, path = walk.pop()
            for child in graph.successors(node):
                frame, facts = graph.nodes[child]["frame"], graph.nodes[child]
                if frame is None:
                    unframed += facts["bytes"]
                else:
                    theirs[(*path, frame)] = (facts["bytes"], facts["self_bytes"])
                    walk.append((child, (*path, frame)))
        tree = snapshot.frame_tree(event, of, folded=False)
        table = tree.paths.table
        framed = [node for node in range(1, len(tree)) if tree.frame[node] >= 0]
        ours = {
            tuple(table.frame(step) for step in tree.key(node)): (int(tree.bytes[node]), int(tree.self_bytes[node]))
            for node in framed
        }
        assert ours == theirs
        assert tree.bytes[tree.label >= 0].sum() == unframed


def test_the_heaviest_category_is_that_of_blame(snapshot: memtrace.Snapshot) -> None:
    for inverted in (False, True):
        tree = snapshot.frame_tree(folded=False, inverted=inverted)
        sizes: dict[int, Counter[str]] = defaultdict(Counter)
        for row in snapshot.blame(by="block").rows:
            steps = tree.paths.table.ids(row.stack).tolist()
            node = ROOT
            sizes[node][row.category] += row.bytes
            for step in steps if inverted else steps[::-1]:
                node = next(child for child in tree.children(node) if tree.frame[child] == step)
                sizes[node][row.category] += row.bytes
        for node, found in sizes.items():
            assert found[tree.categories[tree.category[node]]] == max(found.values())


def test_a_search_sums_what_matches_in_every_view(snapshot: memtrace.Snapshot) -> None:
    for text in ("forward", "ADAM", ".py:1", "torch/", "nothing has this"):
        found = set()
        for view in VIEWS[::2]:
            tree = snapshot.frame_tree(**view)
            matches = tree.search(text)
            found.add((matches.bytes, matches.blocks))
            rows = snapshot.blame(by="block").rows
            expected = [
                row
                for row in rows
                if any(text.lower() in display_frame(frame).lower() for frame in tree.paths.table.frames(row.stack))
            ]
            labelled = sum(
                int(tree.bytes[node]) for node in matches.nodes if tree.label[node] >= 0 and tree.frame[node] < 0
            )
            assert matches.bytes - labelled == sum(row.bytes for row in expected)
            if not view["folded"]:
                for node in matches.nodes:
                    assert text.lower() in tree.text(node).lower()
        assert len(found) == 1


def outline(tree: FrameTree, node: int = ROOT) -> dict[str, object]:
    """The nodes below one as they are shown: those below them, or of a leaf the MiB."""
    return {tree.text(child): outline(tree, child) or int(tree.bytes[child]) // MiB for child in tree.children(node)}


def test_library_frames_fold_into_the_call_that_says_most(tmp_path: Path) -> None:
    job = Job()
    job.alloc(f"{LINEAR}; {CALL}; {MODULE}", 4 * MiB)
    job.alloc(f"torch/nn/functional.py:2397 silu; torch/nn/modules/activation.py:9 forward; {CALL}; {MODULE}", 5 * MiB)
    job.alloc(STEP, 6 * MiB)
    job.alloc(f"{CALL}; {SCRIPT}", 7 * MiB)  # nothing is further in: it stands for itself
    snapshot = job.snapshot(tmp_path)
    tree = snapshot.frame_tree("end")
    assert outline(tree) == {
        SCRIPT: {
            "model.py:20 forward": {"torch/nn/functional.py:2397 silu": 5, LINEAR: 4},  # CALL outside it is hidden
            CALL: 7,
        },
        "train.py:11 <module>": {"torch/optim/adam.py:238 step": 6},
    }
    assert outline(snapshot.frame_tree("end", inverted=True)) == {
        CALL: {SCRIPT: 7},
        "torch/optim/adam.py:238 step": {"train.py:11 <module>": 6},
        "torch/nn/functional.py:2397 silu": {"model.py:20 forward": {SCRIPT: 5}},
        LINEAR: {"model.py:20 forward": {SCRIPT: 4}},
    }
    activation = {"torch/nn/modules/activation.py:9 forward": {"torch/nn/functional.py:2397 silu": 5}}
    whole = outline(snapshot.frame_tree("end", folded=False))
    assert whole == {
        SCRIPT: {CALL: {"model.py:20 forward": {CALL: {**activation, LINEAR: 4}}}},
        "train.py:11 <module>": {"torch/optim/optimizer.py:500 wrapper": {"torch/optim/adam.py:238 step": 6}},
    }


def test_a_folded_node_knows_what_is_in_it(tmp_path: Path) -> None:
    job = Job()
    job.alloc(f"{LINEAR}; {CALL}; torch/nn/modules/container.py:5 forward; {MODULE}", 4 * MiB)
    job.alloc(f"{LINEAR}; {CALL}; {MODULE}", 3 * MiB)
    tree = job.snapshot(tmp_path).frame_tree("end")
    script, model, linear = (tree.find(tree.key(node)) for node in (1, 2, 3))
    assert [tree.text(node) for node in tree.path(linear)] == ["all", SCRIPT, "model.py:20 forward", LINEAR]
    heaviest = ["torch/nn/modules/container.py:5 forward", CALL]
    assert [display_frame(frame) for frame in tree.hidden(linear)] == heaviest
    assert [display_frame(frame) for frame in tree.hidden(model)] == [CALL]
    assert [tree.folded(node) for node in (ROOT, script, model, linear)] == [0, 0, 1, 2]
    assert tree.side.tolist() == [NO_SIDE, Side.OWN, Side.OWN, Side.LIBRARY]
    # the hidden frame is found where it is hidden, with the bytes that pass through it and not all of the node's
    found = tree.search("Container.py")
    assert (found.nodes, found.bytes, found.blocks) == ((linear,), 4 * MiB, 1)
    assert tree.search("train").bytes == 7 * MiB
    assert tree.search("").nodes == ()


def test_no_byte_is_found_twice(tmp_path: Path) -> None:
    job = Job()
    job.alloc("model.py:3 walk; model.py:3 walk; model.py:3 walk; train.py:1 main", 4 * MiB)
    job.alloc("model.py:3 walk; train.py:1 main", 2 * MiB)
    job.alloc("model.py:9 other; train.py:1 main", 1 * MiB + 512)
    tree = job.snapshot(tmp_path).frame_tree("end")
    found = tree.search("walk")
    assert [int(tree.depth[node]) for node in found.nodes] == [2, 3, 4]  # a frame that calls itself is a node each time
    assert [int(tree.bytes[node]) for node in found.nodes] == [6 * MiB, 4 * MiB, 4 * MiB]
    assert [int(tree.self_bytes[node]) for node in found.nodes] == [2 * MiB, 0, 4 * MiB]
    assert (found.bytes, found.blocks) == (6 * MiB, 2)


def test_bytes_without_a_stack_are_nodes_with_a_label(tmp_path: Path) -> None:
    builder = SnapshotBuilder(context=None).alloc(0x7F00_0000_0000, 4 * MiB)
    path = builder.pickle(tmp_path / "one.pickle")
    tree = memtrace.load(path).frame_tree("end", "reserved")
    assert outline(tree) == {
        "(free, pinned by blocks in the same segment)": 16,
        "(not attributed: history off)": 4,
    }
    assert tree.categories[tree.category[tree.children(ROOT)[0]]] == "alloc.stranded"
    assert [int(tree.blocks[node]) for node in (ROOT, *tree.children(ROOT))] == [1, 0, 1]
    found = tree.search("PINNED")
    assert (found.nodes, found.bytes, found.blocks) == ((tree.children(ROOT)[0],), 16 * MiB, 0)
    assert tree.stack(1) == NOT_RECORDED
    assert tree.hidden(1) == ()


def test_interpreter_frames_between_python_frames_fold_too(tmp_path: Path) -> None:
    cpp = "malloc.cpp:1 malloc; ??:0 empty"
    job = Job()
    job.alloc(
        f"{cpp}; {LINEAR}; ceval.c:5 _PyEval; {CALL}; ??:0 vectorcall; model.py:20 forward; ceval.c:5 _PyEval; {SCRIPT}"
    )
    job.alloc(cpp)
    snapshot = job.snapshot(tmp_path)
    assert outline(snapshot.frame_tree("end", cpp=True)) == {
        SCRIPT: {"model.py:20 forward": {LINEAR: {"?? empty": {"malloc.cpp:1 malloc": 4}}}},
        "?? empty": {"malloc.cpp:1 malloc": 4},
    }
    assert outline(snapshot.frame_tree("end")) == {
        SCRIPT: {"model.py:20 forward": {LINEAR: 4}},
        "(backward temporaries)": 4,
    }
    unfolded = snapshot.frame_tree("end", cpp=True, folded=False)
    assert set(map(unfolded.text, range(len(unfolded)))) >= {"ceval.c:5 _PyEval", CALL}


def test_text_from_the_file_is_harmless(tmp_path: Path) -> None:
    builder = SnapshotBuilder().alloc(0x7F00_0000_0000, 512, stack="tr\x1b]52;ain.py:1 [/bold]\x07")
    tree = memtrace.load(builder.pickle(tmp_path / "one.pickle")).frame_tree("end")
    assert "\x1b" not in "".join(tree.text(node) for node in range(len(tree)))


def test_a_key_finds_the_nearest_node_in_another_moment(tmp_path: Path) -> None:
    job = Job()
    job.alloc("a.py:1 f; m.py:1 g; t.py:1 h")
    job.alloc("b.py:1 f; m.py:1 g; t.py:1 h")
    snapshot = job.snapshot(tmp_path)
    first, both = snapshot.frame_tree(1), snapshot.frame_tree("end")
    key = next(both.key(node) for node in range(len(both)) if both.text(node).startswith("b.py"))
    assert both.text(both.find(key)) == "b.py:1 f"
    assert first.text(first.find(key)) == "m.py:1 g"
    assert first.find(("a label that it has not",)) == ROOT


def test_of_too_many_stacks_the_lightest_are_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    for place, size in enumerate((9, 2, 3, 8, 2), start=1):
        job.alloc(f"model.py:{place} f; block.py:{place} g; train.py:1 main", size * MiB)
    snapshot = job.snapshot(tmp_path)
    whole = snapshot.frame_tree("end")
    assert len(whole) == 12
    monkeypatch.setattr(frame_tree, "MAX_NODES", 6)
    tree = snapshot.frame_tree("end")
    check(tree)
    assert outline(tree) == {
        "train.py:1 main": {"block.py:1 g": {"model.py:1 f": 9}, "block.py:4 g": {"model.py:4 f": 8}},
        "(3 more stacks)": 7,
    }
    assert (tree.bytes[ROOT], tree.blocks[ROOT]) == (24 * MiB, 5)
    for text in ("model.py:3", "main"):
        assert tree.search(text).bytes == whole.search(text).bytes
    assert tree.search("more").nodes == ()
    monkeypatch.setattr(frame_tree, "MAX_NODES", 1)
    assert outline(snapshot.frame_tree("end")) == {"(5 more stacks)": 24}


def test_nothing_is_alive() -> None:
    snapshot = memtrace.load(recordings.snapshot_path("mlp-adamw"))
    tree = snapshot.frame_tree(-1)
    assert (len(tree), tree.bytes[ROOT], tree.children(ROOT)) == (1, 0, [])
    assert tree.layout(ROOT, 10, 3) == (tree.layout(ROOT, 10, 1)[0],)
    assert tree.search("train").nodes == ()


# The icicle.


def check_layout(tree: FrameTree, root: int, width: int, rows: int) -> None:
    layout = tree.layout(root, width, rows)
    assert layout == tree.layout(root, width, rows)
    assert len(layout) <= rows
    assert [(cell.node, cell.start, cell.width) for cell in layout[0]] == [(root, 0, width)]
    for above, below in itertools.pairwise(layout):
        for cell in above:
            under = [one for one in below if cell.start <= one.start < cell.start + max(cell.width, 0)]
            under += [one for one in below if not one.width and one.start == cell.start + cell.width and cell.width]
            mine = {one for one in under if parent_of(tree, one) == cell.node and cell.kind is Kind.NODE}
            if cell.kind is Kind.NODE and cell.width and tree.children(cell.node):
                assert sum(one.width for one in mine) == cell.width
                assert sum(one.bytes for one in mine) == cell.bytes
                assert sum(one.nodes for one in mine) == len(tree.children(cell.node))
            else:
                assert not mine
        for left, right in itertools.pairwise(below):
            assert left.start + left.width <= right.start


def parent_of(tree: FrameTree, cell: object) -> int:
    kind, node = cell[0], cell[1]  # type: ignore[index]
    return int(tree.parent[node]) if kind is Kind.NODE else node


@pytest.mark.parametrize("width", [1, 2, 7, 80, 200])
def test_cells_sum_to_the_cell_above(snapshot: memtrace.Snapshot, width: int) -> None:
    for view in VIEWS[::2]:
        tree = snapshot.frame_tree(**view)
        for root in (ROOT, *tree.children(ROOT)[:2]):
            check_layout(tree, root, width, 12)


def flat(tmp_path: Path, *sizes: int) -> FrameTree:
    job = Job()
    for place, size in enumerate(sizes):
        job.alloc(f"model.py:{place} f", size)
    return job.snapshot(tmp_path).frame_tree("end")


def shape(tree: FrameTree, width: int) -> list[tuple[Kind, int, int]]:
    return [(cell.kind, cell.width, cell.nodes) for cell in tree.layout(ROOT, width, 9)[-1]]


def test_shares_are_rounded_to_the_largest_remainder(tmp_path: Path) -> None:
    tree = flat(tmp_path, 5 * MiB, 3 * MiB, 2 * MiB)
    assert shape(tree, 10) == [(Kind.NODE, 5, 1), (Kind.NODE, 3, 1), (Kind.NODE, 2, 1)]
    assert shape(tree, 7) == [(Kind.NODE, 4, 1), (Kind.NODE, 2, 1), (Kind.NODE, 1, 1)]  # 3.5, 2.1, 1.4
    later = flat(tmp_path, 31 * MiB, 27 * MiB, 12 * MiB)
    assert shape(later, 7) == [(Kind.NODE, 3, 1), (Kind.NODE, 3, 1), (Kind.NODE, 1, 1)]  # 3.1, 2.7, 1.2


def test_nodes_too_narrow_for_a_cell_are_one_that_counts(tmp_path: Path) -> None:
    tree = flat(tmp_path, 90 * MiB, *([512] * 6))
    assert shape(tree, 10) == [(Kind.NODE, 9, 1), (Kind.MORE, 1, 6)]
    more = tree.layout(ROOT, 10, 2)[-1][-1]
    assert (more.node, more.start, more.bytes) == (ROOT, 9, 6 * 512)
    assert shape(tree, 1) == [(Kind.NODE, 1, 1), (Kind.MORE, 0, 6)]  # no room, but not forgotten


def test_one_narrow_node_stands_for_itself(tmp_path: Path) -> None:
    assert shape(flat(tmp_path, 90 * MiB, 512), 10) == [(Kind.NODE, 9, 1), (Kind.NODE, 1, 1)]


def test_own_bytes_have_a_place_beside_the_children(tmp_path: Path) -> None:
    job = Job()
    job.alloc("model.py:1 f; train.py:1 main", 6 * MiB)
    job.alloc("train.py:1 main", 4 * MiB)
    assert shape(job.snapshot(tmp_path).frame_tree("end"), 10) == [(Kind.NODE, 6, 1), (Kind.SELF, 4, 0)]


def test_no_room_no_rows(tmp_path: Path) -> None:
    tree = flat(tmp_path, MiB)
    assert tree.layout(ROOT, 0, 5) == ()
    assert tree.layout(ROOT, 5, 0) == ()


# Against a tree built plainly.

OWN = ("train.py:1 main", "model.py:2 forward", "model.py:3 forward")
LIBRARY = (CALL, LINEAR, "torch/optim/adam.py:5 step", "deepspeed/engine.py:7 step")
CPP = ("??:0 _PyEval", "empty.cpp:3 empty")
STACKS = st.lists(st.sampled_from((*OWN, *LIBRARY, *CPP)), min_size=0, max_size=7)


def plain_path(frames: list[Frame], view: dict[str, int]) -> list[Frame]:
    """The path of a stack (innermost frame first) by the words of the documentation, one frame after another."""
    kept = [frame for frame in frames if view["cpp"] or side_of(frame.filename) != Side.CPP]
    path: list[Frame] = []
    run: list[Frame] = []

    def close() -> None:
        telling = [one for one in run if side_of(one.filename) == Side.LIBRARY and not is_plumbing(*one[::2])]
        path.extend(telling[:1] or (run[:1] if not path else []))
        run.clear()

    seen_python = False
    for frame in kept:
        side = side_of(frame.filename)
        seen_python |= side != Side.CPP
        if not view["folded"] or side == Side.OWN or not seen_python:
            close()
            path.append(frame)
        else:
            run.append(frame)
    close()
    return path if view["inverted"] else path[::-1]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(STACKS, st.integers(1, 3 * MiB)), min_size=1, max_size=10), st.sampled_from(VIEWS), st.booleans()
)
def test_the_tree_is_the_one_built_plainly(
    tmp_path_factory: pytest.TempPathFactory,
    allocations: list[tuple[list[str], int]],
    view: dict[str, int],
    is_cut: bool,
) -> None:
    job = Job()
    for stack, size in allocations:
        job.alloc("; ".join(stack) or None, size)
    snapshot = job.snapshot(tmp_path_factory.mktemp("job"))
    tree = snapshot.frame_tree("end", **view)
    sizes: Counter[tuple[Frame, ...]] = Counter()
    own: Counter[tuple[Frame, ...]] = Counter()
    for row in snapshot.blame("end", by="block", cpp=bool(view["cpp"])).rows:
        path = plain_path(list(tree.paths.table.frames(row.stack)), view)
        own[tuple(path)] += row.bytes
        for length in range(len(path) + 1):
            sizes[tuple(path[:length])] += row.bytes
    check(tree)
    table = tree.paths.table
    framed = [node for node in range(len(tree)) if tree.frame[node] >= 0 or node == ROOT]
    ours = {tuple(table.frame(step) for step in tree.key(node)): node for node in framed}  # type: ignore[arg-type]
    assert {path: int(tree.bytes[node]) for path, node in ours.items()} == sizes
    unframed = own.pop((), 0)
    assert {path: int(tree.self_bytes[node]) for path, node in ours.items() if tree.self_bytes[node]} == own
    assert tree.bytes[tree.label >= 0].sum() == unframed
    check_layout(tree, ROOT, 30, 9)
