"""The JSON document of `memtrace whatif` (contract.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memtrace.analysis.settings import Settings
from memtrace.analysis.whatif import Scenario, Simulation
from memtrace.api import Snapshot
from memtrace.cli import output
from memtrace.model import Notice
from memtrace.units import MiB


def write(
    opened: Snapshot, device: int, simulation: Simulation, scenarios: Iterable[Scenario], notices: Iterable[Notice]
) -> None:
    """Prints the document."""
    data = {
        "recorded": scenario_json(simulation, simulation.recorded),
        "scenarios": [scenario_json(simulation, scenario) for scenario in scenarios],
        "self_check": {
            "exact": simulation.is_exact,
            "reason": simulation.reason,
            "event": None if simulation.check is None else simulation.check.event,
            "segment_events": len(simulation.work.recorded),
        },
    }
    output.write_document("whatif", output.snapshot_facts(opened, device), data, notices)


def scenario_json(simulation: Simulation, scenario: Scenario) -> dict[str, Any]:
    """One setting; numbers are null where nothing is predicted."""
    prediction = scenario.prediction
    outcome = None if prediction is None else prediction.outcome
    return {
        "settings": settings_json(scenario),
        "exact_self_check": simulation.is_exact,
        "reserved_bytes_peak": None if outcome is None else outcome.reserved_peak,
        "reserved_bytes_peak_low": None if prediction is None else prediction.low,
        "reserved_bytes_peak_high": None if prediction is None else prediction.high,
        "allocated_bytes_peak": None if outcome is None else outcome.allocated_peak,
        "inactive_split_bytes_peak": None if outcome is None else outcome.inactive_split_peak,
        "num_device_alloc": None if outcome is None else outcome.device_allocs,
        "num_device_free": None if outcome is None else outcome.device_frees,
        "num_alloc_retries": None if outcome is None else outcome.retries,
        "num_ooms": None if outcome is None else outcome.ooms,
        "oom_at_event": scenario.oom_event,
        "sure": scenario.is_sure,
        "draws": None if prediction is None else prediction.draws,
        "draws_out_of_memory": None if prediction is None else prediction.out_of_memory,
    }


def settings_json(scenario: Scenario) -> dict[str, Any]:
    """All that decides, and `conf`: what of the change goes into PYTORCH_CUDA_ALLOC_CONF."""
    settings = scenario.settings
    return {
        "expandable_segments": settings.expandable_segments,
        "max_split_size_mb": None if settings.max_split_size is None else settings.max_split_size // MiB,
        "roundup_power2_divisions": _divisions(settings),
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "large_segment_size_mb": settings.large_segment_size // MiB,
        "max_non_split_rounding_mb": settings.non_split_rounding // MiB,
        "limit_bytes": settings.limit,
        "limit_source": settings.limit_source,
        "empty_cache_every_step": settings.empty_cache_every_step,
        "torch": settings.torch,
        "conf": scenario.change.conf(),
    }


def _divisions(settings: Settings) -> int | dict[str, int]:
    """One number if all intervals share it, else as torch's snapshot has it: from so many MiB on."""
    if settings.roundup is not None:
        return settings.roundup
    return {str(1 << index): parts for index, parts in enumerate(settings.divisions)}
