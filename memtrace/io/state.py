"""`segments`: the memory map at the end -> `Segments` and `Blocks` columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import NotASnapshotError
from memtrace.io.columns import check_dicts, check_integer, check_list, check_sum, integers
from memtrace.io.events import Vocabulary
from memtrace.io.intern import StackIds
from memtrace.io.roles import MAX_NAMES
from memtrace.model import Blocks, BlockState, Segments
from memtrace.model.state import REQUEST_UNKNOWN

_STATES = {
    "inactive": BlockState.INACTIVE,
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.PENDING,
    # named in torch's docstring, never written by it (snapshot-format 2.4)
    "active_awaiting_free": BlockState.PENDING,
}
_SEGMENT_KEYS = frozenset(
    "device address total_size allocated_size active_size requested_size stream segment_type segment_pool_id "
    "is_expandable frames blocks forward_frames".split()
)
_BLOCK_KEYS = frozenset("address size requested_size state frames history forward_frames".split())
MAX_DEVICES = 512
_SMALL_SEGMENT = 2 * 1024 * 1024


@dataclass
class State:
    """The parsed map and what was learned about the file on the way."""

    segments: Segments
    blocks: Blocks
    block_keys: set[str]
    unknown_keys: set[str]
    tiled: bool
    totals_agree: bool


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns:
    """Blocks in the order of their segments, as the file says them: `counts` a segment, `address` None where not all
    say it (before torch 2.1), `requested` -1 where not said; an inactive block has no request and no stack."""

    counts: NDArray[np.int64]
    address: NDArray[np.int64] | None
    size: NDArray[np.int64]
    requested: NDArray[np.int64]
    state: NDArray[np.uint8]
    stack: NDArray[np.int32]
    keys: set[str]


TakeBlocks = Callable[[list[dict[str, object]]], BlockColumns]
"""The blocks of segments, in that order."""


def parse_state(raw: list[object], interner: StackIds, words: Vocabulary, take_blocks: TakeBlocks) -> State:
    """All devices' segments, sorted by device and address. Raises NotASnapshotError for overlaps and wrong kinds."""
    check_dicts(raw, "segment")
    rows: list[dict[str, object]] = raw  # type: ignore[assignment]
    where = "segment"
    device = integers([row.get("device", 0) for row in rows], "device", where)
    if len(device) and int(device.max()) >= MAX_DEVICES:
        raise NotASnapshotError(f"a segment is on device {int(device.max())}: no machine has so many")
    address = integers([row.get("address") for row in rows], "address", where)
    size = integers([row.get("total_size") for row in rows], "total_size", where)
    check_sum(size, "segments")
    if bool((size == 0).any()):
        raise NotASnapshotError("a segment has no size")
    order = np.lexsort((address, device))
    rows = [rows[index] for index in order.tolist()]
    device, address, size = device[order], address[order], size[order]
    _check_apart(device, address, size, "segments")

    found = take_blocks(rows)
    if len(found.keys) > MAX_NAMES:
        raise NotASnapshotError("blocks have more different keys than torch has names for")
    first_block = np.concatenate([np.zeros(1, np.int64), np.cumsum(found.counts)])
    blocks = _checked(found, address, first_block)
    owner = np.repeat(np.arange(len(rows)), found.counts)
    tiled = _check_inside(blocks, owner, address, size)
    segments = Segments(
        device=device.astype(np.int32),
        address=address.astype(np.uint64),
        size=size,
        stream=integers([row.get("stream", 0) for row in rows], "stream", where).astype(np.uint64),
        large=np.fromiter((_is_large(row) for row in rows), np.bool_, len(rows)),
        pool=np.fromiter((_pool(row, words) for row in rows), np.int32, len(rows)),
        expandable=np.fromiter((row.get("is_expandable") is True for row in rows), np.bool_, len(rows)),
        stack=interner.stacks([row.get("frames") for row in rows], where),
        first_block=first_block,
    )
    segment_keys = {str(key) for shape in set(map(tuple, rows)) for key in shape}
    if len(segment_keys) > MAX_NAMES:
        raise NotASnapshotError("segments have more different keys than torch has names for")
    unknown = (found.keys - _BLOCK_KEYS) | (segment_keys - _SEGMENT_KEYS)
    return State(segments, blocks, found.keys, unknown, tiled, _totals_agree(rows, blocks, owner))


def _checked(found: BlockColumns, segment_address: NDArray[np.int64], first_block: NDArray[np.int64]) -> Blocks:
    """The blocks, if their sizes can be; addresses as written, or accumulated over the sizes."""
    size, requested = found.size, found.requested
    check_sum(size, "blocks")
    check_sum(requested, "blocks")
    if bool((size == 0).any()):
        raise NotASnapshotError(f"block {int((size == 0).argmax())} has no size")
    if bool((requested > size).any()):
        raise NotASnapshotError(f"block {int((requested > size).argmax())} is smaller than what was requested")
    address = found.address
    if address is None:
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
        owner = np.repeat(np.arange(len(segment_address)), found.counts)
        address = segment_address[owner] + before[:-1] - before[first_block[owner]]
    return Blocks(address.astype(np.uint64), size, requested, found.state, found.stack)


def listed_blocks(rows: list[dict[str, object]], interner: StackIds) -> BlockColumns:
    """The blocks in the dicts of segments. Raises NotASnapshotError for wrong kinds."""
    lists = [check_list(row.get("blocks"), "blocks of a segment") for row in rows]
    if len(set(map(id, lists))) < len(lists):
        raise NotASnapshotError("two segments share one list of blocks")  # it could make a small file endless
    check_dicts([block for blocks in lists for block in blocks], "block")
    flat: list[dict[str, object]] = [block for blocks in lists for block in blocks]  # type: ignore[misc]
    where = "block"
    size = integers([block.get("size") for block in flat], "size", where)
    state = np.fromiter(
        (block_state(block.get("state"), index) for index, block in enumerate(flat)), np.uint8, len(flat)
    )
    history = [_newest(block.get("history"), index) for index, block in enumerate(flat)]
    in_use = (state != BlockState.INACTIVE).tolist()
    frames = [_frames(block, past) if used else None for block, past, used in zip(flat, history, in_use, strict=True)]
    cpp_frames = [past.get("cpp_frames") if past and used else None for past, used in zip(history, in_use, strict=True)]
    has_cpp = any(names is not None for names in cpp_frames)
    return BlockColumns(
        counts=np.fromiter(map(len, lists), np.int64, len(lists)),
        address=integers([block["address"] for block in flat], "address", where)
        if all("address" in block for block in flat)
        else None,
        size=size,
        requested=_requested(flat, history, state),
        state=state,
        stack=interner.stacks(frames, where, cpp_frames if has_cpp else None),
        keys={str(key) for shape in set(map(tuple, flat)) for key in shape},
    )


def block_state(name: object, index: int) -> BlockState:
    """The code of a block's state. Raises NotASnapshotError."""
    code = _STATES.get(name) if isinstance(name, str) else None
    if code is None:
        raise NotASnapshotError(f"block {index}: unknown state {_name(name)}")
    return code


def _newest(history: object, index: int) -> dict[str, object] | None:
    """What lives in a block, from the `history` of torch 1.13 and 2.0 (newest first)."""
    if history is None:
        return None
    newest = check_list(history, f"block {index}: history")[:1]
    check_dicts(newest, f"block {index}: history entry")
    return newest[0] if newest else None  # type: ignore[return-value]


def _frames(block: dict[str, object], past: dict[str, object] | None) -> object:
    return block.get("frames") if past is None else past.get("frames")


def _requested(
    flat: list[dict[str, object]], history: list[dict[str, object] | None], state: NDArray[np.uint8]
) -> NDArray[np.int64]:
    requested = np.full(len(flat), REQUEST_UNKNOWN, np.int64)
    for index, (block, past) in enumerate(zip(flat, history, strict=True)):
        if state[index] == BlockState.INACTIVE:
            continue
        value = block.get("requested_size")
        if value is None and past is not None:
            value = past.get("real_size")
        if value is not None:
            requested[index] = check_integer(value, "requested_size", f"block {index}")
    return requested


def _check_apart(device: NDArray[np.int64], address: NDArray[np.int64], size: NDArray[np.int64], what: str) -> None:
    ends = address.astype(np.uint64) + size.astype(np.uint64)
    if len(ends) and int(ends.max()) > 2**63:
        raise NotASnapshotError(f"{what} reach beyond the address space")
    if bool(((device[1:] == device[:-1]) & (ends[:-1] > address[1:].astype(np.uint64))).any()):
        raise NotASnapshotError(f"{what} overlap: no allocator hands out the same memory twice")


def _check_inside(
    blocks: Blocks,
    owner: NDArray[np.int64],
    address: NDArray[np.int64],
    size: NDArray[np.int64],
) -> bool:
    """Refuses blocks that overlap or leave their segment; False if they do not cover it."""
    start = blocks.address
    end = start + blocks.size.astype(np.uint64)
    segment_end = (address + size).astype(np.uint64)
    if bool(((start < address.astype(np.uint64)[owner]) | (end > segment_end[owner])).any()):
        raise NotASnapshotError("a block lies outside its segment")
    if bool(((owner[1:] == owner[:-1]) & (end[:-1] > start[1:])).any()):
        raise NotASnapshotError("blocks overlap: no allocator hands out the same memory twice")
    covered = np.zeros(len(size), np.int64)
    np.add.at(covered, owner, blocks.size)
    return bool((covered == size).all())


def _totals_agree(rows: list[dict[str, object]], blocks: Blocks, owner: NDArray[np.int64]) -> bool:
    """Whether `allocated_size` and `active_size` of each segment are the sums over its blocks."""
    for key, counted in (
        ("allocated_size", blocks.state == BlockState.ALLOCATED),
        ("active_size", blocks.state != BlockState.INACTIVE),
    ):
        sums = np.zeros(len(rows), np.int64)
        np.add.at(sums, owner[counted], blocks.size[counted])
        for row, total in zip(rows, sums.tolist(), strict=True):
            if key in row and row[key] != total:
                return False
    return True


def _is_large(row: dict[str, object]) -> bool:
    kind = row.get("segment_type")
    if kind is None:  # made by torch.profiler: by size, as the allocator does
        return row.get("total_size") != _SMALL_SEGMENT
    if not isinstance(kind, str) or kind not in ("small", "large"):
        raise NotASnapshotError(f"a segment's type is {_name(kind)}, expected small or large")
    return kind == "large"


def _pool(row: dict[str, object], words: Vocabulary) -> int:
    value = row.get("segment_pool_id")
    return 0 if value is None else words.pool(value, "a segment")


def _name(value: object) -> str:
    """A value for an error message, never walked into: it may be a tree of shared lists."""
    return repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"
