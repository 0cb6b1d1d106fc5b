"""What a recording's truth file says of live memory, matched by address to the blocks of its replay."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import recordings

import memtrace

SHARDED = ("fsdp",)
"""Parts of the names of recordings whose parameters are shards."""


_GRADIENTS = "grad.full grad.partition grad.bucket grad.fp32"
_RIGHT = {
    "fp32_partitioned_groups_flat": "param.master",
    "single_partition_of_fp32_groups": "param.master",
    "fp32_groups_flat": "param.master",
    "fp32_groups_flat_partition": "param.master",
    "fp16_partitioned_groups_flat": "param.partition",
    "fp16_partitioned_groups": "param.partition",
    "lp_param_buffer": "param.partition",
    "bit16_groups_flat": "param.full",
    "parallel_partitioned_bit16_groups": "param.full",
    "fp16_groups_flat": "param.full",
    "bf16_groups_flat": "param.full",
    "bf16_partitioned_groups": "param.full",
    "grad": _GRADIENTS,
    "grad_partitions_flat_buffer": "grad.partition",
    "param_id_to_grad_partition": "grad.partition",
    "all_grad_tensors": "grad.partition",
    "ipg_buckets": "grad.bucket",
    "ipg_bucket_flat_buffer": "grad.bucket",
    "temp_grad_buffer_for_gpu_offload": "grad.bucket",
    "fp32_groups_gradients_flat": "grad.fp32",
    "fp32_groups_gradients": "grad.fp32",
    "fp32_groups_actual_gradients_flat": "grad.fp32",
    "fp32_groups_gradient_dict": "grad.fp32",
    "fp32_groups_gradient_flat_partition": "grad.fp32",
    "fp32_groups_flat_partition.grad": "grad.fp32",
    "non_expert_gradients": "grad.fp32",
    "fp32_groups": "param.master",
    "buffer": "buffer param.full",
    "_global_grad_norm": "optim.temp",
    "inf_or_nan_tracker": "optim.temp",
}
"""Role, or attribute of DeepSpeed's optimizer -> the categories that say so. A buffer may be made by a constructor."""


class Role(NamedTuple):
    """One tensor that was alive at the end: what it was, and the categories that say so. Sizes in bytes."""

    role: str
    name: str
    address: int
    bytes: int
    right: frozenset[str]


class Saved(NamedTuple):
    """One tensor that autograd packed: its storage, and when."""

    address: int
    bytes: int
    time_us: int


def all_truths() -> list[tuple[Path, Path]]:
    """(snapshot, truth) of the recordings here, and of those beside the repository that are not here too."""
    names = recordings.fixture_names(truth=True)
    here = [(recordings.snapshot_path(name), recordings.truth_path(name)) for name in names]
    known = {snapshot.name for snapshot, _ in here}
    return here + [pair for pair in recordings.shared_snapshots() if pair[0].name not in known]


def name_of(pair: tuple[Path, Path]) -> str:
    """The name of a recording, for the id of a test."""
    return pair[0].name.removesuffix(recordings.SUFFIX)


@lru_cache(maxsize=2)
def opened(path: Path) -> memtrace.Snapshot:
    """The recording, opened; tests of one recording follow each other."""
    return memtrace.load(path, cache=False)


def truth_of(path: Path) -> dict[str, Any]:
    """The truth file."""
    truth: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return truth


def roles_of(name: str, truth: dict[str, Any]) -> Iterator[Role]:
    """Every tensor with a role, in both forms that truth files have (shared/snapshots/README.md)."""
    for row in truth.get("roles") or []:
        if len(row) == 6:
            yield from _deepspeed(name, row)
        elif len(row) == 4:
            role, tensor, address, size = row
            yield Role(role, tensor, address, size, _right(role, any(part in name for part in SHARDED)))


def _deepspeed(name: str, row: list[Any]) -> Iterator[Role]:
    role, tensor, address, size, shard, shard_size = row
    if role != "param":
        yield Role(role, tensor, address, size, _right(role, "zero3" in name))
        return
    if address and size:
        whole = {"param.persistent", "param.gathered", "param.prefetched"} if "zero3" in name else {"param.full"}
        yield Role("param", tensor, address, size, frozenset(whole))
    if shard and shard_size:
        yield Role("ds_tensor", tensor, shard, shard_size, frozenset({"param.partition"}))


def _right(role: str, sharded: bool) -> frozenset[str]:
    if role == "param":
        return frozenset({"param.partition" if sharded else "param.full"})
    if role.startswith("state."):
        return frozenset({"optim.state", "checkpoint_io"})
    return frozenset(_RIGHT[role.removeprefix("attr.")].split())


def saved_of(truth: dict[str, Any]) -> list[Saved]:
    """What autograd packed."""
    return [Saved(*row) for row in truth.get("saved") or []]


def block_at_end(snapshot: memtrace.Snapshot, address: int) -> int | None:
    """The row of the block that held an address when the snapshot was taken."""
    blocks = snapshot.replay().lifetimes
    live = np.flatnonzero(blocks.freed >= snapshot.replay().events)
    inside = live[
        (blocks.address[live] <= address) & (address < blocks.address[live] + blocks.size[live].astype(np.uint64))
    ]
    return int(inside[0]) if len(inside) else None


def saved_blocks(snapshot: memtrace.Snapshot, saved: list[Saved]) -> set[int]:
    """The rows of the blocks that autograd packed: alive at that address at that time."""
    blocks, trace = snapshot.replay().lifetimes, snapshot.data.traces[0]
    assert trace.time_us is not None
    rows = defaultdict(list)
    for row, address in enumerate(blocks.address.tolist()):
        rows[address].append(row)
    found = set()
    for one in saved:
        event = int(np.searchsorted(trace.time_us, one.time_us, side="right")) - 1
        found |= {row for row in rows[one.address] if blocks.born[row] <= event < blocks.freed[row]}
    return found


def names_of_categories(snapshot: memtrace.Snapshot) -> np.ndarray[Any, np.dtype[np.str_]]:
    """The category of each block, by name."""
    attribution = snapshot.attribution()
    return np.array(attribution.categories)[attribution.category]
