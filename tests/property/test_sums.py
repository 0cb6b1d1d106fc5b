"""The rows of a blame sum to torch's counter: every size, grouping and moment, on every shipped file."""

from __future__ import annotations

import itertools
import json

import pytest
from recordings import fixture_names, snapshot_path, truth_path

import memtrace
from memtrace.analysis.blame import BYS
from memtrace.analysis.moment import COUNTER
from memtrace.analysis.tree import ROOT
from memtrace.errors import QuestionError


@pytest.mark.parametrize("name", fixture_names())
def test_rows_sum_to_the_counter(name: str) -> None:
    snapshot = memtrace.load(snapshot_path(name))
    for device in snapshot.devices:
        last = snapshot.replay(device).events - 1
        for of, at in itertools.product(COUNTER, ("peak", "end", "oom", "-1", str(last // 2))):
            try:
                event = snapshot.event(at, of, device)
            except QuestionError:
                assert at == "oom"
                continue
            value = snapshot.series(COUNTER[of], device=device)[event + 1]
            for by in BYS:
                blame = snapshot.blame(event, of, by, device)
                assert sum(row.bytes for row in blame.rows) == blame.total_bytes == value, (of, at, by)
                assert all(row.category for row in blame.rows)
                if by == "tree":
                    graph = snapshot.tree(event, of, device).graph
                    assert graph.nodes[ROOT]["bytes"] == value
                    for node in graph:
                        below = sum(graph.edges[node, child]["weight"] for child in graph.successors(node))
                        assert graph.nodes[node]["bytes"] == below + graph.nodes[node]["self_bytes"]


@pytest.mark.parametrize("name", ["gpt2-zero2", "two-streams", "opt13b-zero3-deepspeed0.18.9", "mlp-expandable"])
def test_blocks_at_the_end_hold_what_torch_says_is_alive(name: str) -> None:
    """Every parameter, optimizer state and gradient that was alive lies inside a listed block."""
    truth = json.loads(truth_path(name).read_text())
    snapshot = memtrace.load(snapshot_path(name))
    rows = snapshot.blame("end", by="block").rows
    spans = sorted((row.block.address, row.block.address + row.block.size) for row in rows if row.block)
    for role in truth.get("roles", []):
        address, size = role[2], role[3]
        if size:
            assert any(start <= address and address + size <= end for start, end in spans), role


def test_reserved_is_split_by_the_contract() -> None:
    rows = {row.category: row for row in memtrace.load(snapshot_path("oom-fragmented")).blame(of="reserved").rows}
    assert {"alloc.stranded", "alloc.releasable", "alloc.slack"} <= rows.keys()
    assert all(row.blocks == 0 for name, row in rows.items() if name.startswith("alloc."))


def test_columns_cannot_be_written_to() -> None:
    snapshot = memtrace.load(snapshot_path("oom"))
    for column in (snapshot.replay().lifetimes.size, snapshot.data.blocks.size, snapshot.data.traces[0].addr):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
