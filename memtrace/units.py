"""Bytes, times and counts as people read and write them. Text only; all arithmetic stays in int."""

from __future__ import annotations

import re

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_UNITS = (("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
_FACTORS = {
    "": 1,
    "B": 1,
    "K": KiB,
    "KB": 1000,
    "KIB": KiB,
    "M": MiB,
    "MB": 1000**2,
    "MIB": MiB,
    "G": GiB,
    "GB": 1000**3,
    "GIB": GiB,
    "T": TiB,
    "TB": 1000**4,
    "TIB": TiB,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def unit_of(size: int) -> str:
    """The largest binary unit in which `size` is at least one.

    >>> unit_of(3 * 1024), unit_of(12)
    ('KiB', 'B')
    """
    for unit, factor in _UNITS:
        if abs(size) >= factor:
            return unit
    return "B"


def in_unit(size: int, unit: str) -> str:
    """`size` bytes as a number in `unit` (GiB, MiB, KiB: two decimals; B: whole, grouped).

    >>> in_unit(1536, "KiB"), in_unit(1536, "B")
    ('1.50', '1,536')
    """
    if unit == "B":
        return f"{size:,}"
    return f"{size / _FACTORS[unit.upper()]:,.2f}"


def format_bytes(size: int, units: str = "auto") -> str:
    """`size` bytes with its unit; `units` is auto, bytes or MiB.

    >>> format_bytes(59282837504), format_bytes(512), format_bytes(1536, "bytes")
    ('55.21 GiB', '512 B', '1,536 B')
    """
    unit = {"auto": unit_of(size), "bytes": "B"}.get(units, units)
    return f"{in_unit(size, unit)} {unit}"


def parse_bytes(text: str) -> int:
    """Bytes from text: `40GiB`, `1.5 GiB`, `512M` (binary), `80GB` (decimal), `123`.

    >>> parse_bytes("1.5KiB"), parse_bytes("80GB")
    (1536, 80000000000)
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text!r} (write 8GiB, 512MiB or a number of bytes)")
    if len(match[1]) > 20:
        raise ValueError("not a size: too many digits")
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_seconds(time_us: int) -> str:
    """Microseconds as seconds: `1.420 s`.

    >>> format_seconds(1420000)
    '1.420 s'
    """
    return f"{time_us / 1e6:,.3f} s"


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `12,345 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
