"""The ledger of reserved memory a second time: plain loops over segments, pages and blocks, nothing from memtrace.

A segment is a dict: address, size, large, stream, expandable, blocks; a block: address, size, requested, pending. Sizes
and addresses in bytes; blocks in order of address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from oracle import Oracle, round_size

Raw = dict[str, Any]
Key = tuple[str, int]
TERMS = ("requested", "rounding", "slack", "pending", "stranded", "releasable")
SMALL_PAGE, LARGE_PAGE = 2 << 20, 20 << 20


@dataclass
class SlowLedger:
    """Terms by (pool, stream); of each block (by address) that pins something its share, and what it alone keeps."""

    parts: dict[Key, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(TERMS, 0)))
    hostage: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    alone: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    unpinned: int = 0

    def total(self, term: str) -> int:
        return sum(part[term] for part in self.parts.values())


def ledger_of(segments: Iterable[Raw], divisions: dict[str, int] | None) -> SlowLedger:
    """The ledger of a memory map."""
    found = SlowLedger()
    for segment in segments:
        part = found.parts["large" if segment["large"] else "small", segment["stream"]]
        for block in segment["blocks"]:
            _count(block, part, divisions)
        for start, end, whole in _units(segment):
            _unit(segment["blocks"], start, end, whole, part, found)
    return found


def _count(block: Raw, part: dict[str, int], divisions: dict[str, int] | None) -> None:
    size, requested = block["size"], block["requested"]
    if block["pending"]:
        part["pending"] += size
        return
    rounded = min(round_size(requested, divisions), size)
    part["requested"] += requested
    part["rounding"] += max(rounded - requested, 0)
    part["slack"] += size - max(rounded, requested)


def _units(segment: Raw) -> Iterable[tuple[int, int, bool]]:
    """Start and end of what goes back to the driver as one, and whether it can."""
    start, end = segment["address"], segment["address"] + segment["size"]
    if not segment["expandable"]:
        yield start, end, True
        return
    page = LARGE_PAGE if segment["large"] else SMALL_PAGE
    for place in range(start, end, page):
        yield place, min(place + page, end), place + page <= end


def _unit(blocks: list[Raw], start: int, end: int, whole: bool, part: dict[str, int], found: SlowLedger) -> None:
    inside = [block for block in blocks if block["address"] < end and block["address"] + block["size"] > start]
    used = sum(min(end, one["address"] + one["size"]) - max(start, one["address"]) for one in inside)
    free = end - start - used
    if len(inside) == 1 and whole:
        found.alone[inside[0]["address"]] += end - start
    if not inside and whole:
        part["releasable"] += free
        return
    part["stranded"] += free
    if not inside:
        found.unpinned += free
    elif free:
        each, over = divmod(free, len(inside))
        for number, block in enumerate(inside):
            found.hostage[block["address"]] += each + (number < over)


def segments_of_oracle(oracle: Oracle) -> list[Raw]:
    """The memory map of the oracle as it is now."""
    return [
        {
            "address": segment["address"],
            "size": segment["total_size"],
            "large": segment["segment_type"] == "large",
            "stream": segment["stream"],
            "expandable": segment["is_expandable"],
            "blocks": [
                {
                    "address": block["addr"],
                    "size": block["size"],
                    "requested": block["requested"],
                    "pending": block["state"] == "pending",
                }
                for block in segment["blocks"]
                if block["state"] != "free"
            ],
        }
        for segment in oracle.segments()
    ]


def segments_of_columns(blocks: list[Raw], spans: list[Raw], event: int) -> list[Raw]:
    """The same of the rows of a replay, one dict a row: what is in memory after `event`."""
    held = [{**span, "blocks": []} for span in spans if span["born"] <= event < span["died"]]
    for block in sorted(blocks, key=lambda one: one["address"]):
        if block["born"] <= event < block["died"]:
            home = next(one for one in held if one["address"] <= block["address"] < one["address"] + one["size"])
            home["blocks"].append({**block, "pending": event >= block["freed"]})
    return held
