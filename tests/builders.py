"""Raw snapshots, as torch writes them, in a few lines.

    snapshot = (
        SnapshotBuilder()
        .alloc(0x1000, 600, stack="forward;train.py:12 main")  # makes a 2 MiB segment first
        .free(0x1000)
        .build()
    )

Sizes and addresses are bytes, times microseconds. The builder knows the allocator's rules: the segments it writes
always agree with its events, and an event the allocator could not have made is refused (`ValueError`). To write a
trace that contradicts itself on purpose, use `event`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oracle import STATES, Oracle, round_size

Raw = dict[str, Any]
PoolId = tuple[int, int]

MiB = 1 << 20
SMALL_REQUEST = 1 * MiB  # up to here (rounded) a block belongs to the small pool
ALLOCATION = "<the stack of the allocation>"

_FRAME = re.compile(r"(?P<filename>.*?):(?P<line>\d+) (?P<name>.*)")
_MAPPED = ("segment_alloc", "segment_map")


def frames_of(stack: str | None) -> list[Raw]:
    """Frame dicts of a stack written as text, innermost first: "f;g" is f, called by g.

    A frame is `name` (then its file is model.py and its line 1) or `file.py:12 name`. None and "" have no frames.

    >>> frames_of("train.py:12 main")
    [{'name': 'main', 'filename': 'train.py', 'line': 12}]
    """
    found: list[Raw] = []
    for text in stack.split(";") if stack else ():
        match = _FRAME.fullmatch(text.strip())
        filename, line, name = match.groups() if match else ("model.py", 1, text.strip())
        found.append({"name": name, "filename": filename, "line": int(line)})
    return found


def segment_size(rounded: int) -> int:
    """Bytes of the segment torch asks the driver for when no cached block holds `rounded` bytes."""
    if rounded <= SMALL_REQUEST:
        return 2 * MiB
    return 20 * MiB if rounded < 10 * MiB else -(-rounded // (2 * MiB)) * 2 * MiB


def write_pickle(snapshot: Raw | list[Raw], path: Path | str, protocol: int = 4) -> Path:
    """Write a raw snapshot as `torch.cuda.memory._dump_snapshot` does."""
    Path(path).write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return Path(path)


class SnapshotBuilder:
    """Makes the snapshot of one device, event by event; `join` puts several devices into one file.

    Every method but `build` and `pickle` returns the builder. Each event takes the clock's time and advances it by
    1 us. `torch` ("1.13", "2.0" ... "2.15") decides which keys are written. `context` is that of
    `_record_memory_history`: "alloc" or "all" (frames everywhere), "state" (blocks only), None (nowhere).
    Further keyword arguments of an event method become keys of the event: `alloc(0, 512, user_metadata="step=1")`.
    """

    def __init__(self, device: int = 0, torch: str = "2.11", context: str | None = "alloc") -> None:
        major, minor = torch.split(".")[:2]
        self.device = device
        self.torch = (int(major), int(minor))
        self.context = context
        self._clock = 1_700_000_000_000_000
        self._oracle = Oracle(default_settings(self.torch))
        self._events: list[Raw] = []
        self._annotations: list[Raw] = []
        self._segments: dict[int, Raw] = {}  # frames and pool of what was mapped, by address
        self._free_frames: dict[int, list[Raw]] = {}  # of frees under way, by address
        self._host_segments: dict[int, Raw] = {}
        self._host_events: list[Raw] = []
        self._parts = [self]

    # What happened to memory.

    def segment(
        self, addr: int, size: int, stream: int = 0, pool: PoolId | None = None, stack: str | None = None, **keys: Any
    ) -> SnapshotBuilder:
        """segment_alloc: a cudaMalloc of `size` bytes, small pool if 2 MiB. `pool` is a private pool's id."""
        return self._map("segment_alloc", addr, size, stream, pool, frames_of(stack), keys)

    def map(
        self, addr: int, size: int, stream: int = 0, pool: PoolId | None = None, stack: str | None = None, **keys: Any
    ) -> SnapshotBuilder:
        """segment_map: pages mapped into an expandable segment. Turns the setting expandable_segments on."""
        return self.settings(expandable_segments=True)._map(
            "segment_map", addr, size, stream, pool, frames_of(stack), keys
        )

    def alloc(
        self,
        addr: int,
        size: int,
        stack: str | None = "train",
        stream: int | None = None,
        pool: PoolId | None = None,
        **keys: Any,
    ) -> SnapshotBuilder:
        """alloc of `size` requested bytes at the start of a free block.

        Where torch holds no memory at `addr`, a segment of the right size is made (or mapped) there first.
        """
        frames = frames_of(stack)
        block = self._block_around(addr)
        if block is None:
            expandable = self._oracle.settings["expandable_segments"]
            rounded = round_size(size, self._oracle.settings["roundup_power2_divisions"])
            handle = 2 * MiB if rounded <= SMALL_REQUEST else 20 * MiB
            wanted = -(-rounded // handle) * handle if expandable else segment_size(rounded)
            self._map(_MAPPED[expandable], addr, wanted, stream or 0, pool, frames, {})
        elif stream is None:
            stream = block["stream"]
        return self._apply("alloc", addr=addr, size=size, stream=stream or 0, frames=frames, **keys)

    def free(self, addr: int, stack: str | None = ALLOCATION, **keys: Any) -> SnapshotBuilder:
        """Both events of a free that waits for nothing. `stack` is the free's own, else the allocation's."""
        return self.free_requested(addr, stack, **keys).free_completed(addr, **keys)

    def free_requested(self, addr: int, stack: str | None = ALLOCATION, **keys: Any) -> SnapshotBuilder:
        """The program let go of the block; it stays pending until `free_completed`."""
        block = self._block(addr, "live")
        frames = self._free_frames[addr] = block["frames"] if stack == ALLOCATION else frames_of(stack)
        return self._free("free_requested", block, frames, keys)

    def free_completed(self, addr: int, stack: str | None = ALLOCATION, **keys: Any) -> SnapshotBuilder:
        """The block is free. Without `stack` the event has that of its free_requested."""
        block = self._block(addr, "pending")
        frames = self._free_frames.pop(addr, block["frames"]) if stack == ALLOCATION else frames_of(stack)
        return self._free("free_completed", block, frames, keys)

    def segment_free(self, addr: int, stack: str | None = None, **keys: Any) -> SnapshotBuilder:
        """cudaFree of the whole free segment at `addr`."""
        block = self._block(addr, "free")
        where: Raw = {"addr": addr, "size": block["size"], "stream": block["stream"]}
        return self._apply("segment_free", **where, frames=frames_of(stack), **keys)

    def unmap(self, addr: int, size: int, stack: str | None = None, **keys: Any) -> SnapshotBuilder:
        """segment_unmap of `size` bytes inside a free expandable block."""
        block = self._block_around(addr)
        stream = block["stream"] if block else 0
        return self._apply("segment_unmap", addr=addr, size=size, stream=stream, frames=frames_of(stack), **keys)

    def oom(
        self, size: int, device_free: int = 0, stream: int = 0, stack: str | None = "train", **keys: Any
    ) -> SnapshotBuilder:
        """oom: a request failed; `size` is the rounded request, `device_free` what the driver had left (bytes)."""
        return self._apply("oom", device_free=device_free, size=size, stream=stream, frames=frames_of(stack), **keys)

    def snapshot_event(self, **keys: Any) -> SnapshotBuilder:
        """snapshot: somebody took a snapshot; its size is what was active then."""
        return self._apply("snapshot", addr=0, size=self._oracle.now["active_bytes.all"], stream=0, **keys)

    def annotate(self, addr: int, text: str, stack: str | None = "train", **keys: Any) -> SnapshotBuilder:
        """annotate (2.14+): `torch.cuda.memory._annotate_tensor` on the block at `addr`."""
        block = self._block(addr, "live")
        where: Raw = {"addr": addr, "size": block["requested"], "stream": block["stream"]}
        return self._apply("annotate", **where, user_metadata=text, frames=frames_of(stack), **keys)

    def event(self, action: str, **keys: Any) -> SnapshotBuilder:
        """Append an event as it is, without touching the allocator's state: for traces that are wrong on purpose."""
        return self._append({"action": action, **keys})

    # What else a file holds.

    def annotation(self, name: str, stage: str) -> SnapshotBuilder:
        """An external annotation (2.5+), `stage` START or END; takes one tick of the clock, like an event."""
        self._annotations.append({"stage": stage, "name": name, "device": self.device, "time_us": self._tick()})
        return self

    def settings(self, **settings: Any) -> SnapshotBuilder:
        """Change keys of allocator_settings (sizes in bytes, -1 = unlimited); call it before the first event.

        `roundup_power2_divisions` may be one number for all sixteen intervals.
        """
        divisions = settings.get("roundup_power2_divisions")
        if isinstance(divisions, int):
            settings["roundup_power2_divisions"] = {str(1 << power): divisions for power in range(16)}
        self._oracle.settings.update(settings)
        return self

    def time(self, us: int) -> SnapshotBuilder:
        """Set the clock: the next event happens at `us`, the one after at `us` + 1."""
        self._clock = us
        return self

    def start_recording(self) -> SnapshotBuilder:
        """Forget the events and stacks so far and keep the memory: a recording that began late."""
        self._events.clear()
        self._annotations.clear()
        for block in self._oracle.starts.values():
            block["frames"] = []
        for segment in self._segments.values():
            segment["frames"] = []
        return self

    def host_alloc(self, addr: int, size: int, stack: str | None = "train") -> SnapshotBuilder:
        """A pinned host block of `size` bytes, a segment of its own (2.14+; its events stand in host_traces)."""
        frames = frames_of(stack)
        self._host_segments[addr] = {"size": size, "frames": frames}
        for action in ("segment_alloc", "alloc"):
            self._host_events.append(
                self._raw({"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames})
            )
        return self

    def host_free(self, addr: int) -> SnapshotBuilder:
        """Free a pinned host block and give its segment back."""
        block = self._host_segments.pop(addr)
        for action in ("free_requested", "free_completed", "segment_free"):
            self._host_events.append(self._raw(dict(action=action, addr=addr, stream=0, **block)))
        return self

    # The result.

    def join(self, *others: SnapshotBuilder) -> SnapshotBuilder:
        """Write the devices of `others` too; settings and version are this builder's.

        `SnapshotBuilder.join(b0, b1)` and `b0.join(b1)` are the same.
        """
        self._parts += others
        devices = [part.device for part in self._parts]
        if len(set(devices)) != len(devices):
            raise ValueError(f"two builders of one device: {devices}")
        return self

    def build(self, segments: bool = True) -> Any:
        """The raw snapshot: a dict (for torch 1.13 the bare list of segments).

        With `segments=False` the list of segments is empty: history only.
        """
        parts = sorted(self._parts, key=lambda part: part.device)
        found = [segment for part in parts for segment in part._device_segments(self.torch)] if segments else []
        if self.torch < (2, 0):
            return found
        traces: list[list[Raw]] = [[] for _ in range(parts[-1].device + 1)]
        for part in parts:
            traces[part.device] = [part._event(event, self.torch) for event in part._events]
        snapshot: Raw = {"segments": found, "device_traces": traces}
        if self.torch >= (2, 3):
            snapshot["allocator_settings"] = dict(self._oracle.settings)
        if self.torch >= (2, 5):
            annotations = [annotation for part in parts for annotation in part._annotations]
            snapshot["external_annotations"] = sorted(annotations, key=lambda annotation: annotation["time_us"])
        if self.torch >= (2, 14):
            snapshot["host_segments"] = [segment for part in parts for segment in part._pinned()]
            snapshot["host_traces"] = [part._event(event, self.torch) for part in parts for event in part._host_events]
        return snapshot

    def pickle(self, path: Path | str, protocol: int = 4, segments: bool = True) -> Path:
        """Write `build()` to `path`, which is returned."""
        return write_pickle(self.build(segments), path, protocol)

    # Below: how.

    def _apply(self, action: str, **keys: Any) -> SnapshotBuilder:
        """An event that the allocator state follows."""
        event = {"action": action, **keys}
        self._oracle.step(event)
        return self._append(event)

    def _append(self, event: Raw) -> SnapshotBuilder:
        self._events.append(self._raw(event))
        return self

    def _raw(self, event: Raw) -> Raw:
        """The event with the keys of every version that it lacks; `frames` last, as torch has it."""
        pool = self._pool_at(event["addr"]) if "addr" in event else (0, 0)
        event = {"time_us": self._tick(), "compile_context": "N/A", "user_metadata": "", "pool_id": pool} | event
        first = ("action", "addr", "device_free", "size", "stream")
        order = sorted(event, key=lambda key: first.index(key) if key in first else len(first) + (key == "frames"))
        return {key: event[key] for key in order}

    def _event(self, event: Raw, torch: tuple[int, int]) -> Raw:
        """The event with the keys of one version only."""
        newer = {key for key, since in EVENT_KEYS.items() if since > torch}
        if self.context not in ("alloc", "all"):
            newer.add("frames")
        return {key: value for key, value in event.items() if key not in newer}

    def _tick(self) -> int:
        self._clock += 1
        return self._clock - 1

    def _map(
        self, action: str, addr: int, size: int, stream: int, pool: PoolId | None, frames: list[Raw], keys: Raw
    ) -> SnapshotBuilder:
        pool = pool or (0, 0)
        self._apply(action, addr=addr, size=size, stream=stream, pool_id=pool, frames=frames, **keys)
        self._segments.pop(addr, None)
        self._segments[addr] = {"end": addr + size, "pool": pool, "frames": frames}
        return self

    def _free(self, action: str, block: Raw, frames: list[Raw], keys: Raw) -> SnapshotBuilder:
        where: Raw = {"addr": block["addr"], "size": block["requested"], "stream": block["stream"]}
        return self._apply(action, **where, frames=frames, **keys)

    def _block(self, addr: int, state: str) -> Raw:
        block = self._oracle.starts.get(addr)
        if block is None or block["state"] != state:
            raise ValueError(f"there is no {state} block at {addr:#x}")
        return block

    def _block_around(self, addr: int) -> Raw | None:
        for block in self._oracle.starts.values():
            if block["addr"] <= addr < block["addr"] + block["size"]:
                return block
        return None

    def _pool_at(self, addr: int) -> PoolId:
        for start, segment in reversed(self._segments.items()):  # the youngest first
            if start <= addr < segment["end"]:
                pool: PoolId = segment["pool"]
                return pool
        return (0, 0)

    def _device_segments(self, torch: tuple[int, int]) -> Iterable[Raw]:
        for segment in self._oracle.segments():
            live = [block for block in segment["blocks"] if block["state"] == "live"]
            active = [block for block in segment["blocks"] if block["state"] != "free"]
            raw: Raw = {
                "device": self.device,
                "address": segment["address"],
                "total_size": segment["total_size"],
                "allocated_size": sum(block["size"] for block in live),
                "active_size": sum(block["size"] for block in active),
                "requested_size": sum(block["requested"] for block in active),
                "stream": segment["stream"],
                "segment_type": segment["segment_type"],
                "segment_pool_id": self._pool_at(segment["address"]),
                "is_expandable": segment["is_expandable"],
                "frames": [],
                "blocks": [self._raw_block(block, torch) for block in segment["blocks"]],
            }
            if len(segment["blocks"]) == 1 and self.context:  # torch forgets the stack when it splits the segment
                raw["frames"] = self._segments.get(segment["address"], raw)["frames"]
            yield {key: value for key, value in raw.items() if SEGMENT_KEYS.get(key, (1, 13)) <= torch}

    def _raw_block(self, block: Raw, torch: tuple[int, int]) -> Raw:
        free = block["state"] == "free"
        raw: Raw = {
            "address": block["addr"],
            "size": block["size"],
            "requested_size": block["size"] if free else block["requested"],  # of free blocks torch writes stale values
            "state": STATES[block["state"]],
            "frames": block["frames"] if self.context else [],
        }
        if torch < (2, 1) and not free:
            history = {"addr": block["addr"], "real_size": block["requested"], "frames": raw["frames"]}
            raw["history"] = [{key: value for key, value in history.items() if self.context or key != "frames"}]
        return {key: value for key, value in raw.items() if BLOCK_KEYS.get(key, (1, 13)) <= torch}

    def _pinned(self) -> Iterable[Raw]:
        for addr, block in sorted(self._host_segments.items()):
            size, frames = block["size"], block["frames"]
            raw: Raw = {"device": -1, "address": addr, "total_size": size, "allocated_size": size, "active_size": size}
            raw.update(requested_size=size, stream=0, segment_type="small", segment_pool_id=(0, 0), is_expandable=False)
            one: Raw = {
                "address": addr,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames,
            }
            yield raw | {"frames": frames, "blocks": [one]}


# The first version that writes a key; what is not here was always written.
EVENT_KEYS = {
    "time_us": (2, 2),
    "compile_context": (2, 8),
    "user_metadata": (2, 10),
    "forward_frames": (2, 11),
    "pool_id": (2, 12),
    "internal_metadata": (2, 15),
}
SEGMENT_KEYS = {"requested_size": (2, 0), "segment_pool_id": (2, 1), "is_expandable": (2, 1), "frames": (2, 1)}
BLOCK_KEYS = {"requested_size": (2, 0), "address": (2, 1), "frames": (2, 1)}
SETTING_KEYS = {"graph_capture_record_stream_reuse": (2, 9), "max_round_threshold": (2, 13), "max_cached_size": (2, 13)}


def default_settings(torch: tuple[int, int] = (2, 11)) -> Raw:
    """allocator_settings of a program that set nothing, with the keys of one torch version."""
    settings: Raw = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "max_round_threshold": -1,
        "max_cached_size": -1,
        "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
    }
    return {key: value for key, value in settings.items() if SETTING_KEYS.get(key, (2, 3)) <= max(torch, (2, 3))}
