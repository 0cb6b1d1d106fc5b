"""The JSON of `memtrace zero` (contract.md): one document for a recording, or for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memtrace.analysis.given import Given
from memtrace.analysis.zero import ASSUMED, Comparison
from memtrace.api import Snapshot
from memtrace.attribution.theory import Setup, StagePlan, Term
from memtrace.cli import output
from memtrace.model import Notice


def write(opened: Snapshot, device: int, answer: Comparison, notices: Sequence[Notice]) -> None:
    """Of a recording: the measured bytes of the terms and `residual_bytes` sum to `peak_bytes`."""
    data = {
        "stage": answer.stage,
        "world": answer.world,
        "params": answer.params,
        "dtype": answer.dtype,
        "optimizer": answer.optimizer,
        "sources": dict(answer.sources),
        "terms": [
            {
                "name": line.name,
                "paper_bytes": line.paper_bytes,
                "implementation_bytes": line.implementation_bytes,
                "measured_bytes": line.measured_bytes,
                "why": line.why,
            }
            for line in answer.lines
        ],
        "peak_bytes": answer.peak_bytes,
        "residual_bytes": answer.residual_bytes,
        "event": answer.event,
        "phase": answer.phase,
        "step": answer.step,
    }
    output.write_document("zero", output.snapshot_facts(opened, device), data, notices)


def write_plan(given: Given, setup: Setup, stages: Sequence[StagePlan], notices: Sequence[Notice]) -> None:
    """Of a plan: `stages` has all of them, `terms` those of the stage that was asked for."""
    asked = next((plan for plan in stages if plan.stage == given.stage), None)
    data = {
        "stage": given.stage,
        "world": setup.world,
        "params": setup.params,
        "dtype": given.dtype or ASSUMED["dtype"],
        "optimizer": given.optimizer or ASSUMED["optimizer"],
        "sources": {**{key: "assumed" for key in ASSUMED if getattr(given, key) is None}, **given.sources},
        "terms": [] if asked is None else [_term(term) for term in asked.terms],
        "peak_bytes": None,
        "residual_bytes": None,
        "stages": [
            {
                "stage": plan.stage,
                "paper_bytes": plan.paper,
                "resident_bytes": plan.resident,
                "backward_bytes": plan.backward,
                "step_bytes": plan.step,
                "terms": [_term(term) for term in plan.terms],
            }
            for plan in stages
        ],
    }
    output.write_document("zero", None, data, notices)


def _term(term: Term) -> dict[str, Any]:
    return {
        "name": term.name,
        "paper_bytes": term.paper,
        "implementation_bytes": term.kept,
        "measured_bytes": None,
        "why": term.why,
    }
