"""What the recorder wrote beside a snapshot: NAME.json, schema `memtrace.sidecar/1`. Nothing in it is believed unseen.

An entry of the wrong form is left out and counted; the rest is used. What is missing is as if nothing was recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memtrace.model import Notice

SCHEMA = "memtrace.sidecar/1"
_SUFFIX = re.compile(r"\.pickle(?:\.(?:gz|xz|zst))?$|\.(?:pkl|snapshot)$")
_MOST_BYTES = 256 << 20
_MOST_COUNTERS = 1 << 12
_LONGEST_NAME = 200
_LARGEST = 1 << 62
_ORDINAL = re.compile(r"[0-9]{1,4}")
_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}")

T = TypeVar("T")


class PhaseNote(NamedTuple):
    """A stretch of time (microseconds, the trace's clock) in one phase; `step` None outside steps."""

    phase: str
    step: int | None
    begin_us: int
    end_us: int


class RoleNote(NamedTuple):
    """Memory that was alive when the snapshot was taken: what it was. Sizes in bytes. `device` as torch writes it
    (`cuda:0`, `cpu`); None where it is not said."""

    role: str
    name: str
    address: int
    bytes: int
    device: str | None


class GatherNote(NamedTuple):
    """A gathered parameter: where, for whom (`demand` or `prefetch`), when, and when DeepSpeed let go of it.
    `persistent`: DeepSpeed keeps it whole."""

    address: int
    bytes: int
    parameter: str
    kind: str
    time_us: int
    released_us: int | None
    persistent: bool


class StartMap(NamedTuple):
    """Sums over the memory map at the moment when recording began."""

    reserved_bytes: int
    active_bytes: int
    active_blocks: int


class Start(NamedTuple):
    """Torch's counters and the memory map at the moment when recording began; None where that was not noted."""

    stats: Mapping[str, int] | None
    map: StartMap | None


class Device(NamedTuple):
    """The device that the sidecar is about."""

    ordinal: int | None
    name: str | None
    capacity_bytes: int | None


class OomNote(NamedTuple):
    """What torch told the recorder when a request failed for good, the first time it did. `total_bytes`: torch's own
    cap where it has one, else the device's capacity."""

    device: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The parts of a sidecar that an analysis uses. Versions are text, or None where it does not say.

    `stats` are torch's counters when the snapshot was taken, `other_stats` those of other devices; `start` is of the
    main device; `max_entries` how many events torch's ring held. `limit_bytes` is torch's own cap on the main device,
    `free_bytes` what its driver had left when the snapshot was taken.
    """

    path: Path
    torch: str | None
    deepspeed: str | None
    rank: int | None
    world: int | None
    stage: int | None
    device: Device
    limit_bytes: int | None
    free_bytes: int | None
    oom: OomNote | None
    max_entries: int | None
    stats: Mapping[str, int] | None
    other_stats: Mapping[int, Mapping[str, int]]
    start: Start
    phases: tuple[PhaseNote, ...]
    roles: tuple[RoleNote, ...]
    gathers: tuple[GatherNote, ...]
    notices: tuple[Notice, ...]

    def is_about(self, device: int) -> bool:
        """Whether a device is the main one. One that is not named is whichever the snapshot has."""
        return self.device.ordinal in (None, device)

    def stats_of(self, device: int) -> Mapping[str, int] | None:
        """Torch's counters of a device when the snapshot was taken, if they are there."""
        return self.stats if self.is_about(device) else self.other_stats.get(device)

    def capacity_of(self, device: int) -> int | None:
        """Bytes of memory that a device has, if that was noted."""
        return self.device.capacity_bytes if self.is_about(device) else None

    def limit_of(self, device: int) -> int | None:
        """Torch's own cap on a device in bytes; None: it has none, or nobody noted it."""
        if self.is_about(device) and self.limit_bytes is not None:
            return self.limit_bytes
        capacity = self.capacity_of(device)
        if self.oom is None or self.oom.device != device or capacity is None or self.oom.total_bytes >= capacity:
            return None
        return self.oom.total_bytes

    def outside_of(self, device: int) -> int | None:
        """Bytes of a device that were not torch's when the snapshot was taken, if that was noted."""
        capacity, reserved = self.capacity_of(device), (self.stats or {}).get("reserved_bytes.all.current")
        if capacity is None or self.free_bytes is None or reserved is None:
            return None
        return max(0, capacity - self.free_bytes - reserved)


def sidecar_path(snapshot: Path) -> Path:
    """Where the sidecar of a snapshot would be."""
    return snapshot.with_name(_SUFFIX.sub("", snapshot.name) + ".json")


def read_sidecar(snapshot: Path) -> Sidecar | None:
    """The sidecar beside a snapshot; None where there is none of ours. Never raises for what is in the file."""
    path = sidecar_path(snapshot)
    content = {} if path == snapshot else read_json(path)
    if content.get("schema", SCHEMA) != SCHEMA or not ("memtrace" in content or "schema" in content):
        return None
    return _sidecar(path, content)


def read_json(path: Path, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none that can be read within that size."""
    try:
        if not path.is_file() or path.stat().st_size > most_bytes:
            return {}
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _sidecar(path: Path, content: dict[str, Any]) -> Sidecar:
    bad: list[str] = []
    zero = _dict(content.get("zero"))
    device = _device(_dict(content.get("device")))
    phases = _entries(content, "phases", _phase, bad)
    roles = _entries(content, "roles", _role, bad)
    gathers = _entries(content, "gathers", _gather, bad)
    wrong = f"{path.name}: entries of the wrong form were left out ({', '.join(bad)})"
    return Sidecar(
        path=path,
        torch=_version(content.get("torch")),
        deepspeed=_version(content.get("deepspeed")),
        rank=natural(content.get("rank")),
        world=natural(zero.get("world")) or natural(content.get("world")),
        stage=natural(zero.get("stage")),
        device=device,
        limit_bytes=natural(content.get("limit_bytes")),
        free_bytes=_free(content.get("mem_get_info")),
        oom=_oom(_dict(content.get("oom"))),
        max_entries=natural(content.get("max_entries")),
        stats=_counters(content.get("stats")),
        other_stats=_other_stats(_dict(content.get("other_devices"))),
        start=Start(_counters(content.get("stats_start")), _start_map(content.get("segments_start"), device.ordinal)),
        phases=phases,
        roles=roles,
        gathers=gathers,
        notices=(*((Notice("sidecar-entries", wrong),) if bad else ()), *_dry_run(_dict(content.get("dryrun")))),
    )


def _dry_run(row: dict[str, Any]) -> tuple[Notice, ...]:
    """What has to be said of a recording that was made without a GPU, wherever it is shown."""
    if not row:
        return ()
    gpu = row.get("gpu")
    name = gpu if isinstance(gpu, str) and len(gpu) <= _LONGEST_NAME else "an unknown GPU"
    assumed = row.get("assumptions")
    count = len(assumed) if isinstance(assumed, list) else 0
    said = f", with {count} kinds of assumptions (in the sidecar)" if count else ""
    return (Notice("dry-run", f"a dry run as on {name}: recorded without a GPU{said}"),)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _device(row: dict[str, Any]) -> Device:
    name = row.get("name")
    known = name if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME else None
    return Device(natural(row.get("index")), known, natural(row.get("capacity_bytes")))


def _free(value: object) -> int | None:
    """Of `torch.cuda.mem_get_info()`, free and total bytes, the first."""
    return natural(value[0]) if isinstance(value, list) and len(value) == 2 else None


def _oom(row: dict[str, Any]) -> OomNote | None:
    device, total = natural(row.get("device")), natural(row.get("total_bytes"))
    return None if device is None or total is None else OomNote(device, total)


def _counters(value: object) -> dict[str, int] | None:
    """Torch's flattened counters; None where there are none."""
    rows = _dict(value)
    if len(rows) > _MOST_COUNTERS:
        return None
    return {name: number for name, item in rows.items() if (number := natural(item)) is not None} or None


def _other_stats(rows: dict[str, Any]) -> dict[int, dict[str, int]]:
    found = {}
    for ordinal, value in rows.items():
        stats = _counters(value)
        if stats is not None and _ORDINAL.fullmatch(ordinal):
            found[int(ordinal)] = stats
    return found


def _start_map(value: object, device: int | None) -> StartMap | None:
    """Sums over `torch.cuda.memory_snapshot()` of one device (None: of all); None where an entry is of another form."""
    if not isinstance(value, list):
        return None
    reserved = active = count = 0
    for segment in value:
        size, blocks = natural(_dict(segment).get("total_size")), _dict(segment).get("blocks")
        if size is None or not isinstance(blocks, list):
            return None
        if device is not None and segment.get("device", device) != device:
            continue
        reserved += size
        used = [natural(_dict(block).get("size")) for block in blocks if _dict(block).get("state") != "inactive"]
        active += sum(one or 0 for one in used)
        count += len(used)
        if None in used:
            return None
    return StartMap(reserved, active, count)


def _entries(
    content: dict[str, Any], key: str, read: Callable[[dict[str, Any]], T | None], bad: list[str]
) -> tuple[T, ...]:
    found = content.get(key)
    if found is None:
        return ()
    rows = found if isinstance(found, list) else [None]
    good = [one for row in rows if isinstance(row, dict) and (one := read(row)) is not None]
    if len(good) < len(rows):
        bad.append(f"{len(rows) - len(good)} of {key}")
    return tuple(good)


def _phase(row: dict[str, Any]) -> PhaseNote | None:
    phase, step = row.get("phase"), row.get("step")
    begin, end = natural(row.get("begin_us")), natural(row.get("end_us"))
    if not isinstance(phase, str) or begin is None or end is None or end < begin:
        return None
    if step is not None and natural(step) is None:
        return None
    return PhaseNote(phase, step, begin, end)


def _role(row: dict[str, Any]) -> RoleNote | None:
    role, name = row.get("role"), row.get("name")
    address, size = natural(row.get("address")), natural(row.get("bytes"))
    if not isinstance(role, str) or not isinstance(name, str | None) or address is None or size is None:
        return None
    device = row.get("device")
    return RoleNote(role, name or "", address, size, device if isinstance(device, str) else None)


def _gather(row: dict[str, Any]) -> GatherNote | None:
    address, size, time = (natural(row.get(key)) for key in ("address", "bytes", "time_us"))
    parameter, kind, released = row.get("parameter"), row.get("kind"), row.get("released_us")
    if address is None or size is None or time is None or kind not in ("demand", "prefetch"):
        return None
    if not isinstance(parameter, str | None) or (released is not None and natural(released) is None):
        return None
    return GatherNote(address, size, parameter or "", kind, time, released, row.get("persistent") is True)


def natural(value: object) -> int | None:
    """A number as a file should have it; None for anything else."""
    return value if type(value) is int and 0 <= value < _LARGEST else None


def _version(value: object) -> str | None:
    """The release in a version such as "2.11.0+cu130"."""
    found = _VERSION.match(value) if isinstance(value, str) else None
    return found[0] if found else None
