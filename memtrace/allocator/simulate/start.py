"""The state before the first event, put into the simulated allocator as the recording has it, whatever the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace.allocator.simulate.blocks import FREE, LIVE, PENDING, UNMAPPED, Block, Pool, Region, link_after
from memtrace.allocator.simulate.driver import RESERVATION
from memtrace.allocator.simulate.requests import StartMap

if TYPE_CHECKING:
    from memtrace.allocator.simulate.machine import Machine


def place(machine: Machine, start: StartMap) -> None:
    """Fills an empty machine. Expandable ranges of one pool and stream count as parts of one reservation that begins
    with the lowest: what was unmapped below it, no recording shows."""
    made: list[Block] = []
    reservations: dict[tuple[bool, int], Block] = {}  # the last block of each
    columns = (start.block, start.block_address, start.block_size, start.block_pending)
    blocks = list(zip(*(column.tolist() for column in columns), strict=True))
    used = 0

    def append(
        before: Block | None, pool: Pool, stream: int, address: int, size: int, state: int, region: Region | None
    ) -> Block:
        if before is None:
            machine.segment_count += 1
        block = Block(pool, stream, address, size, state, region)
        machine.number(block, machine.segment_count if before is None else before.segment)
        if before is not None:
            link_after(before, block)
        made.append(block)
        return block

    for address, size, is_large, stream, expandable in zip(
        start.range_address.tolist(),
        start.range_size.tolist(),
        start.range_large.tolist(),
        start.range_stream.tolist(),
        start.range_expandable.tolist(),
        strict=True,
    ):
        pool = machine.large if is_large else machine.small
        before = reservations.get((is_large, stream)) if expandable else None
        region = Region(address, RESERVATION) if expandable else None
        if before is not None:
            region, behind = before.region, before.address + before.size
            before = append(before, pool, stream, behind, address - behind, UNMAPPED, region)
        cursor, end = address, address + size
        while used < len(blocks) and blocks[used][1] < end:
            row, at, length, pending = blocks[used]
            used += 1
            if at > cursor:
                before = append(before, pool, stream, cursor, at - cursor, FREE, region)
            before = append(before, pool, stream, at, length, PENDING if pending else LIVE, region)
            machine.node[row] = before
            if pending:
                machine.waiting[row] = before
            else:
                machine.allocated += length
            machine.active += length
            cursor = at + length
        if cursor < end:
            before = append(before, pool, stream, cursor, end - cursor, FREE, region)
        if expandable and before is not None:
            reservations[is_large, stream] = before
        machine.total += size
    for before in reservations.values():
        assert before.region is not None, "of an expandable range"
        end = before.address + before.size
        rest = before.region.start + before.region.size - end
        append(before, before.pool, before.stream, end, rest, UNMAPPED, before.region)
    for block in made:
        if block.state == FREE:
            machine.insert(block)
        elif block.state == UNMAPPED:
            machine.insert_unmapped(block)
    machine.total += start.private_reserved
    machine.allocated += start.private_live
    machine.active += start.private_live + start.private_pending
    machine.reserved_peak = machine.proven = machine.total
    machine.allocated_peak, machine.active_peak = machine.allocated, machine.active
