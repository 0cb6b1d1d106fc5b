"""A second, plain replay to check the real one against: dicts only, slow, and nothing imported from memtrace.

It handles COMPLETE traces (recorded from an empty allocator, nothing lost) and refuses anything the allocator cannot
do with a `ValueError` naming the event. All sizes and addresses are bytes; events are indices into the device's trace,
and "at event e" is the state after it (-1: before the first).

    oracle = replay(snapshot, device=0)
    oracle.series["allocated_bytes.all"][7]    # the counter after event 7
    oracle.stats()["active.small_pool.peak"]   # torch's flattened names
    oracle.live_at(7), oracle.free_at(7)       # what was in memory then
    oracle.segments() == segments_of(snapshot) # the final block map, and what torch wrote
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Raw = dict[str, Any]

MIN_BLOCK = 512
SMALL_SEGMENT = 2 << 20  # the size of every cudaMalloc, and of every mapping, of the small pool
LARGE_SLACK = 1 << 20  # in the large pool a rest up to this size is not split off
UNLIMITED = 1 << 63

COUNTS = ("allocation", "segment", "active", "inactive_split")
BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
POOLS = ("all", "small_pool", "large_pool")
COUNTERS = tuple(f"{family}.{pool}" for family in COUNTS + BYTES for pool in POOLS)
ACTIONS = (
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("alloc", "free_requested", "free_completed", "oom"),
)
CALLS = ("num_device_alloc", "num_device_free", "num_ooms")


def round_size(size: int, divisions: dict[str, int] | None = None) -> int:
    """Bytes the allocator sets aside for `size` bytes; `divisions` is the table of the file's allocator_settings.

    >>> round_size(1), round_size(513), round_size(1200 << 20, {"1024": 4}) >> 20
    (512, 1024, 1280)
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    power = 1 << (size.bit_length() - 1)  # the largest power of two that is not above `size`
    parts = (divisions or {}).get(str(min(max(power >> 20, 1), 32768)), 0)
    step = power // parts if parts > 1 and size > MIN_BLOCK * parts else MIN_BLOCK
    return -(-size // step) * step


class Oracle:
    """The allocator's state after the events given to `step`, and every counter after each of them.

    A block is a dict: addr, size, requested (bytes), state (free, live, pending), born (event), frames, stream,
    segment (the dict its blocks share: addr, size, expandable, pool "small" or "large", stream; for expandable memory
    one endless pseudo segment, of which `segments()` lists the mapped ranges).
    """

    def __init__(self, settings: Raw | None = None) -> None:
        self.settings: Raw = settings or {}
        self.events: list[Raw] = []
        self.starts: dict[int, Raw] = {}  # every block, by its first byte
        self.ends: dict[int, Raw] = {}  # the same blocks, by the byte behind them
        self.arenas: dict[object, Raw] = {}  # one pseudo segment for all expandable memory of a (pool, stream)
        self.now: dict[str, int] = dict.fromkeys(COUNTERS + CALLS, 0)
        self.series: dict[str, list[int]] = {name: [] for name in self.now}

    def step(self, event: Raw) -> None:
        """Apply one trace event (a raw dict); events that do not allocate or free change nothing."""
        if event["action"] in ACTIONS:
            getattr(self, f"_{event['action']}")(event)
        self.events.append(event)
        for name, values in self.series.items():
            values.append(self.now[name])

    def at(self, event: int) -> Oracle:
        """A fresh replay that stops after `event`."""
        return replay_events(self.events[: event + 1], self.settings)

    def live_at(self, event: int) -> list[Raw]:
        """Blocks live or pending after `event`, by address."""
        return [block for block in self.at(event).blocks() if block["state"] != "free"]

    def free_at(self, event: int) -> list[tuple[int, int, int, int, bool, str]]:
        """Free blocks after `event`: (segment address, segment size, address, size, expandable, "small" or "large")."""
        return [
            (segment["address"], segment["total_size"], block["addr"], block["size"], *_kind(block))
            for segment in self.at(event).segments()
            for block in segment["blocks"]
            if block["state"] == "free"
        ]

    def blocks(self) -> list[Raw]:
        """All blocks now, free ones too, by address."""
        return [self.starts[addr] for addr in sorted(self.starts)]

    def segments(self) -> list[Raw]:
        """Contiguous mapped ranges by address: address, total_size, stream, segment_type, is_expandable, blocks."""
        found: list[Raw] = []
        for block in self.blocks():
            before = self.ends.get(block["addr"])
            if before is None or before["segment"] is not block["segment"]:
                expandable, pool = _kind(block)
                found.append({"address": block["addr"], "total_size": 0, "stream": block["segment"]["stream"]})
                found[-1].update(segment_type=pool, is_expandable=expandable, blocks=[])
            found[-1]["blocks"].append(block)
            found[-1]["total_size"] += block["size"]
        return found

    def stats(self) -> dict[str, int]:
        """The 111 numbers, named as torch.cuda.memory_stats() names them."""
        stats = {name: self.now[name] for name in CALLS}
        for name in COUNTERS:
            values = self.series[name]
            changes = [after - before for before, after in zip([0, *values], values, strict=False)]
            stats[f"{name}.current"] = self.now[name]
            stats[f"{name}.peak"] = max(values, default=0)
            stats[f"{name}.allocated"] = sum(change for change in changes if change > 0)
            stats[f"{name}.freed"] = -sum(change for change in changes if change < 0)
        return stats

    # One method per action, and what they share.

    def _segment_alloc(self, event: Raw) -> None:
        pool = "small" if event["size"] == SMALL_SEGMENT else "large"
        self._add_free(event, {"addr": event["addr"], "size": event["size"], "expandable": False, "pool": pool})
        self._count(pool, segment=1, reserved_bytes=event["size"])
        self.now["num_device_alloc"] += 1

    def _segment_free(self, event: Raw) -> None:
        block = self._block(event, "free")
        segment = block["segment"]
        if segment["expandable"] or block["size"] != segment["size"] or event["size"] != block["size"]:
            raise self._error(event, "is not one whole free segment")
        self._remove(block)
        self._count(segment["pool"], segment=-1, reserved_bytes=-event["size"])
        self.now["num_device_free"] += 1

    def _segment_map(self, event: Raw) -> None:
        pool = "small" if event["size"] == SMALL_SEGMENT else "large"
        key = (pool, event["stream"], tuple(event.get("pool_id", ())))
        arena = self.arenas.setdefault(key, {"addr": 0, "size": UNLIMITED, "expandable": True, "pool": pool})
        self._join(self._add_free(event, arena))
        self._count(pool, reserved_bytes=event["size"])
        self.now["num_device_alloc"] += 1

    def _segment_unmap(self, event: Raw) -> None:
        start, end = event["addr"], event["addr"] + event["size"]
        for block in self.starts.values():
            if block["addr"] <= start and end <= block["addr"] + block["size"]:
                break
        else:
            raise self._error(event, "is not inside one block")
        if block["state"] != "free" or not block["segment"]["expandable"]:
            raise self._error(event, "is not free expandable memory")
        self._remove(block)
        for addr, stop in ((block["addr"], start), (end, block["addr"] + block["size"])):
            if addr < stop:
                self._place({**block, "addr": addr, "size": stop - addr})
        self._count(block["segment"]["pool"], reserved_bytes=-event["size"])
        self.now["num_device_free"] += 1

    def _alloc(self, event: Raw) -> None:
        found = self._block(event, "free")
        segment, available = found["segment"], found["size"]
        size = round_size(event["size"], self.settings.get("roundup_power2_divisions"))
        if size > available:
            raise self._error(event, f"needs {size} bytes, the free block has {available}")
        rest = available - size
        if segment["expandable"] or segment["pool"] == "small":
            split = rest >= MIN_BLOCK
        else:
            limit = self.settings.get("max_split_size", -1)
            split = rest > LARGE_SLACK and (limit < 0 or size < limit)
        was_split = available != segment["size"]
        if not split:
            size = available
        if segment["expandable"]:
            pass
        elif split and was_split:
            self._count(segment["pool"], inactive_split_bytes=-size)
        elif split:
            self._count(segment["pool"], inactive_split=1, inactive_split_bytes=rest)
        elif was_split:
            self._count(segment["pool"], inactive_split=-1, inactive_split_bytes=-available)
        self._remove(found)
        if split:
            self._place({**found, "addr": found["addr"] + size, "size": rest})
        self._place(
            {"addr": event["addr"], "size": size, "requested": event["size"], "state": "live", "born": len(self.events)}
            | {"frames": event.get("frames", []), "stream": event["stream"], "segment": segment}
        )
        self._count(segment["pool"], allocation=1, allocated_bytes=size, active=1, active_bytes=size)
        self._count(segment["pool"], requested_bytes=event["size"])

    def _free_requested(self, event: Raw) -> None:
        block = self._block(event, "live")
        block["state"] = "pending"
        self._count(block["segment"]["pool"], allocation=-1, allocated_bytes=-block["size"])

    def _free_completed(self, event: Raw) -> None:
        block = self._block(event, "pending")
        size, segment = block["size"], block["segment"]
        block.update(state="free", requested=0, born=-1, frames=[])
        joined = self._join(block)
        if not segment["expandable"]:
            split = block["size"] != segment["size"]
            after = block["size"] if split else 0
            self._count(segment["pool"], inactive_split=split - len(joined), inactive_split_bytes=after - sum(joined))
        self._count(segment["pool"], active=-1, active_bytes=-size, requested_bytes=-event["size"])

    def _oom(self, event: Raw) -> None:
        self.now["num_ooms"] += 1

    def _count(self, pool: str, **changes: int) -> None:
        for family, change in changes.items():
            self.now[f"{family}.all"] += change
            self.now[f"{family}.{pool}_pool"] += change

    def _block(self, event: Raw, state: str) -> Raw:
        block = self.starts.get(event["addr"])
        if block is None or block["state"] != state:
            raise self._error(event, f"is not the start of a {state} block, but of {block and block['state']}")
        if state != "free" and event["size"] != block["requested"]:
            raise self._error(event, f"says {event['size']} bytes, allocated were {block['requested']}")
        return block

    def _add_free(self, event: Raw, segment: Raw) -> Raw:
        start, end = event["addr"], event["addr"] + event["size"]
        if any(start < block["addr"] + block["size"] and block["addr"] < end for block in self.starts.values()):
            raise self._error(event, "overlaps memory that torch holds already")
        segment["stream"] = event["stream"]
        block = {"addr": start, "size": event["size"], "requested": 0, "state": "free", "born": -1, "frames": []}
        return self._place(block | {"stream": event["stream"], "segment": segment})

    def _join(self, block: Raw) -> list[int]:
        """Merge `block` with the free blocks touching it in its own segment; the bytes of each that was merged."""
        joined = []
        for other in (self.ends.get(block["addr"]), self.starts.get(block["addr"] + block["size"])):
            if other is not None and other["state"] == "free" and other["segment"] is block["segment"]:
                self._remove(other)
                self._remove(block)
                block["addr"] = min(block["addr"], other["addr"])
                block["size"] += other["size"]
                self._place(block)
                joined.append(other["size"])
        return joined

    def _place(self, block: Raw) -> Raw:
        self.starts[block["addr"]] = self.ends[block["addr"] + block["size"]] = block
        return block

    def _remove(self, block: Raw) -> None:
        del self.starts[block["addr"]], self.ends[block["addr"] + block["size"]]

    def _error(self, event: Raw, problem: str) -> ValueError:
        return ValueError(f"event {len(self.events)}: {event['action']} at {event['addr']:#x} {problem}")


def _kind(block: Raw) -> tuple[bool, str]:
    return block["segment"]["expandable"], block["segment"]["pool"]


def replay_events(events: Iterable[Raw], settings: Raw | None = None) -> Oracle:
    """Replay one device's events from an empty allocator under `settings` (a file's allocator_settings)."""
    oracle = Oracle(settings)
    for event in events:
        oracle.step(event)
    return oracle


def replay(snapshot: Raw, device: int = 0) -> Oracle:
    """Replay the complete trace of `device` in a raw snapshot."""
    return replay_events(snapshot["device_traces"][device], snapshot.get("allocator_settings"))


STATES = {"free": "inactive", "live": "active_allocated", "pending": "active_pending_free"}


def block_map(segments: Iterable[Raw]) -> list[Any]:
    """Segments of an `Oracle` or of a snapshot (2.1+) in one comparable form.

    [(address, size, stream, type, expandable, [(address, size, state, requested or None if free), ...]), ...]
    """
    keys = ("address", "total_size", "stream", "segment_type", "is_expandable")
    return [(*(segment[key] for key in keys), [_row(block) for block in segment["blocks"]]) for segment in segments]


def segments_of(snapshot: Raw, device: int = 0) -> list[Raw]:
    """The segments of `device` as the snapshot has them."""
    return [segment for segment in snapshot["segments"] if segment["device"] == device]


def _row(block: Raw) -> tuple[int, int, str, int | None]:
    if "addr" in block:  # one of ours
        block = {
            **block,
            "address": block["addr"],
            "requested_size": block["requested"],
            "state": STATES[block["state"]],
        }
    requested = None if block["state"] == "inactive" else block["requested_size"]
    return block["address"], block["size"], block["state"], requested
