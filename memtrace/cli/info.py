"""`memtrace info`: one page about a snapshot."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from memtrace.cli import options
from memtrace.cli.options import Common

if TYPE_CHECKING:
    from memtrace.analysis.info import DeviceInfo
    from memtrace.api import Snapshot

EXAMPLES = """\b
Examples:
  memtrace info snapshot.pickle
  memtrace info --json snapshot.pickle.xz
  xz -dc snapshot.pickle.xz | memtrace info -"""
_SETTINGS_SHOWN = 12


@click.command("info", epilog=EXAMPLES)
@options.snapshot_argument
@options.device_option
@options.common
def command(common: Common, snapshot: str | None, device: int | None) -> None:
    """What is in SNAPSHOT: torch version, devices, events, settings, stacks, and the counters now and at the peak."""
    opened: Snapshot = options.open_snapshot(snapshot, common)
    if device is not None:
        options.choose_device(opened, device, common)
    devices = opened.devices if device is None else (device,)
    pages = [opened.info(ordinal) for ordinal in devices]
    notices = list(dict.fromkeys(notice for ordinal in devices for notice in opened.file_notices(ordinal)))
    options.show_notices(notices, common)
    if common.json:
        _write_json(opened, pages, notices, device)
    else:
        _write_text(opened, pages, common)


def _write_json(opened: Snapshot, pages: list[DeviceInfo], notices: Any, device: int | None) -> None:
    from memtrace.analysis.info import annotation_counts
    from memtrace.cli import output

    data = opened.data
    keys = (
        "device", "name", "capacity_bytes", "events", "first_us", "last_us", "complete", "lost_events_at_least",
        "actions", "stacks", "current", "peak", "peak_event", "segments", "streams",
    )  # fmt: skip
    output.write_document(
        "info",
        output.snapshot_facts(opened, opened.default_device if device is None else device),
        {
            "torch": {"at_least": data.torch.at_least, "at_most": data.torch.at_most},
            "devices": [{key: asdict(page)[key] for key in keys} for page in pages],
            "settings": dict(data.settings),
            "annotations": annotation_counts(data),
            "file_bytes": data.file_bytes,
        },
        notices,
    )


def _write_text(opened: Snapshot, pages: list[DeviceInfo], shared: Common) -> None:
    from memtrace.analysis.info import annotation_counts
    from memtrace.cli.output import Column, Page
    from memtrace.units import format_bytes, format_seconds, plural

    page, data = Page(shared.color), opened.data
    page.line(f"{data.path}: {data.torch}, {format_bytes(data.file_bytes, shared.units)} on disk", style="bold")
    for item in pages:
        page.line()
        span = (
            "no times"
            if item.first_us is None or item.last_us is None
            else format_seconds(item.last_us - item.first_us)
        )
        state = "complete" if item.complete else "not complete"
        page.line(
            f"Device {item.device}{_named(item, shared.units)}: {plural(item.events, 'event')} over {span}, {state}; "
            f"{plural(item.segments, 'segment')} at the end, {plural(item.streams, 'stream')}"
        )
        rows = [
            [
                of,
                format_bytes(item.current[of], shared.units),
                format_bytes(item.peak[of], shared.units),
                f"event {item.peak_event[of]:,}" if item.peak_event[of] >= 0 else "from the start on",
            ]
            for of in ("requested", "allocated", "active", "reserved")
        ]
        page.table([Column("bytes"), Column("at the end", right=True), Column("peak", right=True), Column("at")], rows)
        if item.actions:
            page.line("events: " + ", ".join(f"{name} {count:,}" for name, count in item.actions.items()))
        stacks = item.stacks
        page.line(
            f"stacks: {stacks.python:,} with Python frames, {stacks.cpp:,} with C++ frames, {stacks.none:,} without"
        )
    page.line()
    page.line("settings: " + (_settings(opened) or "not in the file"))
    names = annotation_counts(data)
    if names:
        shown = ", ".join(f"{name} x{count}" for name, count in list(names.items())[:_SETTINGS_SHOWN])
        page.line(
            f"annotations: {shown}"
            + (f" and {len(names) - _SETTINGS_SHOWN} more" if len(names) > _SETTINGS_SHOWN else "")
        )


def _named(item: DeviceInfo, units: str) -> str:
    """The device's name and capacity, as far as they are known."""
    from memtrace.units import format_bytes

    capacity = None if item.capacity_bytes is None else format_bytes(item.capacity_bytes, units)
    known = [part for part in (item.name, capacity) if part]
    return f" ({', '.join(known)})" if known else ""


def _settings(opened: Snapshot) -> str:
    """The settings string, and what differs from torch's defaults."""
    raw = opened.data.settings
    if not raw:
        return ""
    defaults: dict[str, Any] = {"max_split_size": -1, "garbage_collection_threshold": 0.0}
    conf = raw.get("PYTORCH_CUDA_ALLOC_CONF", raw.get("PYTORCH_ALLOC_CONF", ""))
    changed = []
    for key, value in raw.items():
        if isinstance(value, dict):
            if any(value.values()):
                changed.append(f"{key} {', '.join(f'{name}:{item}' for name, item in value.items() if item)}")
        elif not isinstance(value, str) and value != defaults.get(key, False) and key != "pinned_num_register_threads":
            changed.append(f"{key} {value}")
    return ", ".join([f"PYTORCH_ALLOC_CONF {conf!r}" if conf else "PYTORCH_ALLOC_CONF not set", *changed])
