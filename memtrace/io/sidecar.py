"""What the recorder wrote beside a snapshot: NAME.json, schema `memtrace.sidecar/1`. Nothing in it is believed unseen.

An entry of the wrong form is left out and counted; the rest is used. What is missing is as if nothing was recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memtrace.model import Notice

SCHEMA = "memtrace.sidecar/1"
_SUFFIX = re.compile(r"\.pickle(?:\.(?:gz|xz|zst))?$|\.(?:pkl|snapshot)$")
_MOST_BYTES = 256 << 20
_LARGEST = 1 << 62
_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}")

T = TypeVar("T")


class PhaseNote(NamedTuple):
    """A stretch of time (microseconds, the trace's clock) in one phase; `step` None outside steps."""

    phase: str
    step: int | None
    begin_us: int
    end_us: int


class RoleNote(NamedTuple):
    """Memory that was alive when the snapshot was taken: what it was. Sizes in bytes."""

    role: str
    name: str
    address: int
    bytes: int


class GatherNote(NamedTuple):
    """A gathered parameter: where, for whom (`demand` or `prefetch`), when, and when DeepSpeed let go of it."""

    address: int
    bytes: int
    parameter: str
    kind: str
    time_us: int
    released_us: int | None


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The parts of a sidecar that an analysis uses. Versions are text, or None where it does not say."""

    path: Path
    torch: str | None
    deepspeed: str | None
    world: int | None
    stage: int | None
    capacity_bytes: int | None
    phases: tuple[PhaseNote, ...]
    roles: tuple[RoleNote, ...]
    gathers: tuple[GatherNote, ...]
    notices: tuple[Notice, ...]


def sidecar_path(snapshot: Path) -> Path:
    """Where the sidecar of a snapshot would be."""
    return snapshot.with_name(_SUFFIX.sub("", snapshot.name) + ".json")


def read_sidecar(snapshot: Path) -> Sidecar | None:
    """The sidecar beside a snapshot; None where there is none of ours. Never raises for what is in the file."""
    path = sidecar_path(snapshot)
    try:
        if path == snapshot or not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("schema", SCHEMA) != SCHEMA or not _is_ours(content):
        return None
    return _sidecar(path, content)


def _is_ours(content: dict[str, Any]) -> bool:
    return "memtrace" in content or "schema" in content


def _sidecar(path: Path, content: dict[str, Any]) -> Sidecar:
    bad: list[str] = []
    zero = content.get("zero")
    zero = zero if isinstance(zero, dict) else {}
    device = content.get("device")
    device = device if isinstance(device, dict) else {}
    phases = _entries(content, "phases", _phase, bad)
    roles = _entries(content, "roles", _role, bad)
    gathers = _entries(content, "gathers", _gather, bad)
    wrong = f"{path.name}: entries of the wrong form were left out ({', '.join(bad)})"
    return Sidecar(
        path=path,
        torch=_version(content.get("torch")),
        deepspeed=_version(content.get("deepspeed")),
        world=_natural(zero.get("world")) or _natural(content.get("world")),
        stage=_natural(zero.get("stage")),
        capacity_bytes=_natural(device.get("capacity_bytes")),
        phases=phases,
        roles=roles,
        gathers=gathers,
        notices=(Notice("sidecar-entries", wrong),) if bad else (),
    )


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
    begin, end = _natural(row.get("begin_us")), _natural(row.get("end_us"))
    if not isinstance(phase, str) or begin is None or end is None or end < begin:
        return None
    if step is not None and _natural(step) is None:
        return None
    return PhaseNote(phase, step, begin, end)


def _role(row: dict[str, Any]) -> RoleNote | None:
    role, name = row.get("role"), row.get("name")
    address, size = _natural(row.get("address")), _natural(row.get("bytes"))
    if not isinstance(role, str) or not isinstance(name, str | None) or address is None or size is None:
        return None
    return RoleNote(role, name or "", address, size)


def _gather(row: dict[str, Any]) -> GatherNote | None:
    address, size, time = (_natural(row.get(key)) for key in ("address", "bytes", "time_us"))
    parameter, kind, released = row.get("parameter"), row.get("kind"), row.get("released_us")
    if address is None or size is None or time is None or kind not in ("demand", "prefetch"):
        return None
    if not isinstance(parameter, str | None) or (released is not None and _natural(released) is None):
        return None
    return GatherNote(address, size, parameter or "", kind, time, released)


def _natural(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _LARGEST else None


def _version(value: object) -> str | None:
    """The release in a version such as "2.11.0+cu130"."""
    found = _VERSION.match(value) if isinstance(value, str) else None
    return found[0] if found else None
