"""The JSON document of `memtrace blame` (contract.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memtrace.analysis.blame import Blame, Evidence, Row
from memtrace.api import Snapshot
from memtrace.cli import output
from memtrace.model import Frame, Notice

if TYPE_CHECKING:
    from memtrace.analysis.ledger import Ledger
    from memtrace.analysis.reserved import Reserved
    from memtrace.analysis.tree import CallTree


def write(opened: Snapshot, answer: Blame, notices: Iterable[Notice]) -> None:
    """Prints the document."""
    data: dict[str, Any] = {
        "device": answer.device,
        "event": answer.event,
        "time_us": answer.time_us,
        "phase": answer.phase,
        "step": answer.step,
        "of": answer.of,
        "total_bytes": answer.total_bytes,
        "bound_bytes": answer.slack_bound,
        "by": answer.by,
        "rows": (json_row(answer, row) for row in answer.rows),
    }
    if answer.of == "reserved":
        data["ledger"] = _ledger(opened.ledger(answer.event, answer.device))
    if answer.by == "tree":
        from memtrace.analysis.tree import call_tree

        tree = call_tree(answer)
        data["dominator"] = json_frame(tree.dominator)
        data["heaviest_path"] = [json_frame(frame) for frame in tree.heaviest]
        data["tree"] = output.Nested(_tree_fragments(tree))
    output.write_document("blame", output.snapshot_facts(opened, answer.device), data, notices)


def json_row(answer: Blame, row: Row) -> dict[str, Any]:
    """A row of a table (contract.md, A row of `blame`)."""
    fields: dict[str, Any] = {
        "key": row.key,
        "bytes": row.bytes,
        "blocks": row.blocks,
        "category": row.category,
        "label": row.label,
        "confidence": row.confidence,
        "stack": [json_frame(frame) for frame in answer.stacks.frames(row.stack)],
        "dominator": json_frame(row.dominator),
        "evidence": _json_evidence(row.evidence),
    }
    if row.block is not None:
        block = row.block
        fields |= {
            "address": block.address,
            "size": block.size,
            "requested": block.requested,
            "born": block.born,
            "freed": block.freed,
            "died": block.died,
            "stream": block.stream,
            "pool": block.pool,
            "segment": block.segment,
            "phase": block.phase,
            "step": block.step,
            "module": block.module,
            "before_recording": block.before_recording,
        }
    return fields


def _ledger(found: Reserved) -> dict[str, Any]:
    """What reserved memory is made of, all lists complete."""
    return {
        **_terms(found.ledger),
        "parts": [
            {
                "pool": part.pool,
                "stream": part.stream,
                "pool_id": None if part.pool_id is None else list(part.pool_id),
                **_terms(part.ledger),
            }
            for part in found.parts
        ],
        "pending": [asdict(one) for one in found.waiting],
        "pins": (asdict(pin) | {"stack": [json_frame(frame) for frame in found.frames(pin)]} for pin in found.pins),
        "device": asdict(found.memory),
    }


def _terms(ledger: Ledger) -> dict[str, int]:
    return {f"{name}_bytes": size for name, size in asdict(ledger).items()} | {"reserved_bytes": ledger.reserved}


def _json_evidence(evidence: Evidence | None) -> dict[str, Any] | None:
    return None if evidence is None else {"rule": evidence.rule, "frame": json_frame(evidence.frame)}


def json_frame(frame: Frame | None) -> dict[str, Any] | None:
    """A frame; null where there is none."""
    return None if frame is None else {"filename": frame.filename, "line": frame.line, "name": frame.name}


def _tree_fragments(tree: CallTree) -> Iterator[str]:
    """The nested nodes as JSON text, without recursion: stacks can be deeper than a recursive encoder bears."""
    from memtrace.analysis.tree import ROOT, children

    stack: list[tuple[int, bool] | None] = [(ROOT, True)]
    while stack:
        item = stack.pop()
        if item is None:
            yield "]}"
            continue
        node, first = item
        facts = tree.graph.nodes[node]
        yield "" if first else ", "
        yield f'{{"frame": {json.dumps(json_frame(facts["frame"]))}, "bytes": {facts["bytes"]}, '
        yield f'"self_bytes": {facts["self_bytes"]}, "label": {json.dumps(facts["label"])}, "children": ['
        stack.append(None)
        below = children(tree.graph, node)
        stack.extend((child, index == 0) for index, child in reversed(list(enumerate(below))))
