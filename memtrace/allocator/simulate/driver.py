"""Where the driver puts segments: as recorded, or by its own rules.

The rules were measured: 58 sequences of cudaMalloc and cudaFree on an H200 (driver 580), all of their 2,193 addresses
follow from them.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from memtrace.allocator.simulate.requests import SegmentEvents, SegmentKind
from memtrace.units import GiB, MiB

_SLAB = 32 * MiB
_GRAIN = 2 * MiB
_UNALIGNED = _SLAB - 4096
_ANCHOR = 1 << 46
"""Address of an old slab; only differences to it matter."""
_CODE = 2 * MiB
"""The driver's own blocks: code of kernels, loaded at their first use."""
_LOCAL_BEFORE, _LOCAL_AFTER = 414 * MiB, 640 * MiB
_LOCAL_WITHIN = 5
"""The driver's local memory, given up and taken anew when the first larger kernels run: in the recordings that show it,
within so many segments after the first forward began, mostly."""
_HOST_LEAST, _HOST_MOST = GiB, 8
_HOST_SIZES = tuple(size * MiB for size in (64, 96, 128, 256, 512, 1024, 2048, 4096))
_HOST_ABOVE = 1 << 40
"""Weights that the host gives back once they are on the device leave ranges in which the next slabs go: seen where it
moved more than this. How many and how large is a guess, wide enough for the recordings that show it."""
RESERVATION = 1 << 46
"""Address space of an expandable segment. The true one is 9/8 of the device's memory: never filled before that is."""
_REGIONS = 1 << 13
"""Reservations that lie apart. A program that empties its cache again and again takes more, but drops those before."""
_MOST_UNSEEN = 40
_PHASES = 16


class DivergedError(Exception):
    """The allocator asks the driver for something else than it did in the recording, or (`is_missed`) does not ask."""

    def __init__(self, row: int, reason: str, *, is_missed: bool = False) -> None:
        super().__init__(reason)
        self.row, self.reason, self.is_missed = row, reason, is_missed


class Driver(Protocol):
    """Answers the allocator. `row` is the row of `Requests` at hand; None is a refusal."""

    def refuses(self, row: int) -> bool:
        """Whether it, or a cap of torch's that nobody knows, is against any new memory now."""

    def allocate(self, row: int, size: int) -> int | None:
        """Address of a new segment."""

    def free(self, row: int, address: int, size: int) -> None:
        """Takes a segment back."""

    def reserve(self, row: int) -> tuple[int, int] | None:
        """(start, size) of address space for an expandable segment."""

    def map(self, row: int, address: int, size: int) -> bool:
        """Maps pages."""

    def unmap(self, row: int, address: int, size: int) -> None:
        """Unmaps them."""


class RecordedDriver:
    """Answers as the recorded one did, and refuses when it refused: before memory was given back, and (`failed`: rows)
    where a request failed. Raises DivergedError at any other question."""

    def __init__(self, recorded: SegmentEvents, failed: Collection[int] = ()) -> None:
        columns = (recorded.row, recorded.kind, recorded.address, recorded.size)
        self._events = list(zip(*(column.tolist() for column in columns), strict=True))
        self._next = 0
        self._failed = frozenset(failed)
        self.refusals: list[int] = []
        """Rows at which it refused."""

    def _peek(self, row: int) -> tuple[int, int, int] | None:
        """The next recorded event of this row: kind, address, size."""
        if self._next < len(self._events) and self._events[self._next][0] == row:
            return self._events[self._next][1:]
        return None

    def refuses(self, row: int) -> bool:
        self.finish(row)
        found = self._peek(row)
        is_refusal = row in self._failed if found is None else found[0] in (SegmentKind.FREE, SegmentKind.UNMAP)
        if is_refusal:
            self.refusals.append(row)
        return is_refusal

    def allocate(self, row: int, size: int) -> int | None:
        found = self._take(row, SegmentKind.ALLOC)
        if found is None:
            return None
        if found[2] != size:
            raise DivergedError(row, f"a segment of {size:,} bytes is asked for, not of {found[2]:,}")
        return found[1]

    def free(self, row: int, address: int, size: int) -> None:
        self._give_back(row, SegmentKind.FREE, address, size)

    def reserve(self, row: int) -> tuple[int, int] | None:
        found = self._peek(row)
        if found is not None and found[0] == SegmentKind.MAP:
            return found[1], RESERVATION
        self._refuse(row, found)
        return None

    def map(self, row: int, address: int, size: int) -> bool:
        found = self._take(row, SegmentKind.MAP)
        if found is None:
            return False
        if found[1:] != (address, size):
            raise DivergedError(row, f"{size:,} bytes are mapped, or elsewhere, not {found[2]:,}")
        return True

    def unmap(self, row: int, address: int, size: int) -> None:
        self._give_back(row, SegmentKind.UNMAP, address, size)

    def finish(self, row: int) -> None:
        """Raises DivergedError if events up to before `row` were not asked for."""
        if self._next < len(self._events) and self._events[self._next][0] < row:
            at, kind, _, size = self._events[self._next]
            what = SegmentKind(kind).name.lower()
            said = f"the recording has a segment_{what} of {size:,} bytes here that is not needed"
            raise DivergedError(at, said, is_missed=True)

    def _take(self, row: int, wanted: SegmentKind) -> tuple[int, int, int] | None:
        self.finish(row)
        found = self._peek(row)
        if found is not None and found[0] == wanted:
            self._next += 1
            return found
        self._refuse(row, found)
        return None

    def _refuse(self, row: int, found: tuple[int, int, int] | None) -> None:
        """The driver said no: memory was given back next, or nothing followed (then the row must be a failed one)."""
        if found is not None and found[0] in (SegmentKind.ALLOC, SegmentKind.MAP):
            raise DivergedError(row, "the recording asked the driver for memory of another kind")
        self.refusals.append(row)

    def _give_back(self, row: int, kind: SegmentKind, address: int, size: int) -> None:
        self.finish(row)
        found = self._peek(row)
        if found != (kind, address, size):
            raise DivergedError(row, f"{size:,} bytes at {address:#x} are given back, in the recording they are not")
        self._next += 1


@dataclass(frozen=True, slots=True)
class Moments:
    """What of the program decides when the rest of the process uses the device and the address space.

    The first larger kernels run from row `kernels_from` of the requests on, all of them for the first time before row
    `kernels_until`. `moved` bytes were allocated when they began: weights, most of which the host held before.
    """

    kernels_from: int
    kernels_until: int
    moved: int


@dataclass(frozen=True, slots=True)
class Draw:
    """One way the rest of the process may have used both. `number` 0: the rules alone."""

    number: int
    moments: Moments


class RuledDriver:
    """The driver's own rules. Two layers: slabs with holes, newest first; and the address space they are cut from."""

    def __init__(self, draw: Draw) -> None:
        chance = random.Random(draw.number)  # noqa: S311 - a draw that is the same every time
        is_plain = draw.number == 0
        phase = 0 if is_plain else chance.randrange(_PHASES) * _GRAIN
        self._space = _AddressSpace(_ANCHOR - 480 * MiB - phase)
        self._open: dict[int, list[int]] = {}  # by the largest hole: numbers of slabs, ascending
        self._of_number: dict[int, _Slab] = {}
        self._starts: list[int] = []
        self._of_start: dict[int, _Slab] = {}
        self._made = 0
        old = self._new_slab(_ANCHOR, _SLAB)
        old.take(8 * MiB)
        self._show(old)
        recent = self._new_slab(_ANCHOR - 480 * MiB, 416 * MiB)
        recent.take(_LOCAL_BEFORE)
        self._show(recent)
        self._reserved = 0
        self._kernels_from, until = draw.moments.kernels_from, max(draw.moments.kernels_until, 1)
        unseen = 0 if is_plain else chance.randrange(_MOST_UNSEEN + 1)
        self._code = sorted(chance.randrange(until) for _ in range(unseen))
        self._until_local = chance.randint(1, _LOCAL_WITHIN) if not is_plain and chance.random() < 0.5 else 0
        self._host: list[tuple[int, int, int]] = []
        if not is_plain and draw.moments.moved >= _HOST_LEAST:
            self._host = sorted(_host_ranges(chance, until))

    def refuses(self, row: int) -> bool:
        return False

    def allocate(self, row: int, size: int) -> int | None:
        while self._host and self._host[0][0] <= row:
            self._space.give_back(*self._host.pop(0)[1:])
        while self._code and self._code[0] <= row:
            del self._code[0]
            self._place(_CODE)
        if self._until_local and row >= self._kernels_from:
            self._until_local -= 1
            if not self._until_local:
                self._take_back(_ANCHOR - 480 * MiB, _LOCAL_BEFORE)
                self._place(_LOCAL_AFTER)
        return self._place(size)

    def free(self, row: int, address: int, size: int) -> None:
        self._take_back(address, size)

    def reserve(self, row: int) -> tuple[int, int] | None:
        # far away from the slabs, one below the other as any large mapping
        self._reserved = self._reserved % _REGIONS + 1
        return (1 << 60) - self._reserved * RESERVATION, RESERVATION

    def map(self, row: int, address: int, size: int) -> bool:
        return True

    def unmap(self, row: int, address: int, size: int) -> None:
        pass

    def _place(self, size: int) -> int | None:
        size = -(-size // _GRAIN) * _GRAIN
        newest = max((numbers[-1] for room, numbers in self._open.items() if room >= size), default=0)
        if newest:
            slab = self._of_number[newest]
            self._hide(slab)
        else:
            length = -(-size // _SLAB) * _SLAB
            start = self._space.take(length)
            if start is None:
                return None
            slab = self._new_slab(start, length)
        address = slab.take(size)
        self._show(slab)
        return address

    def _show(self, slab: _Slab) -> None:
        """Lets a slab be found by its largest hole."""
        if slab.holes:
            insort(self._open.setdefault(slab.largest, []), slab.number)

    def _hide(self, slab: _Slab) -> None:
        """Takes it out again, before its holes change."""
        if slab.holes:
            numbers = self._open[slab.largest]
            del numbers[bisect_left(numbers, slab.number)]
            if not numbers:
                del self._open[slab.largest]

    def _new_slab(self, start: int, size: int) -> _Slab:
        self._made += 1
        slab = _Slab(start, size, self._made)
        insort(self._starts, start)
        self._of_start[start] = self._of_number[slab.number] = slab
        return slab

    def _take_back(self, address: int, size: int) -> None:
        size = -(-size // _GRAIN) * _GRAIN
        index = bisect_right(self._starts, address) - 1
        slab = self._of_start[self._starts[index]] if index >= 0 else None
        if slab is None or address >= slab.start + slab.size:
            return  # from before the recording: not in a slab we know
        self._hide(slab)
        slab.give_back(address, size)
        if not slab.is_empty:
            self._show(slab)
        else:
            del self._starts[index]
            del self._of_start[slab.start], self._of_number[slab.number]
            self._space.give_back(slab.start, slab.size)


def _host_ranges(chance: random.Random, until: int) -> Iterator[tuple[int, int, int]]:
    """(row, start, size) of ranges that the host gives back, all above what the slabs began with."""
    top = _ANCHOR + _HOST_ABOVE
    for _ in range(chance.randrange(_HOST_MOST + 1)):
        size = chance.choice(_HOST_SIZES)
        top -= size + 2 * _SLAB
        yield chance.randrange(until), top // _SLAB * _SLAB, size


class _Slab:
    """A piece of address space; `holes` are (size, address), ascending: the first that fits is the smallest, lowest."""

    __slots__ = ("holes", "number", "size", "start")

    def __init__(self, start: int, size: int, number: int) -> None:
        self.start, self.size, self.number = start, size, number
        self.holes = [(size, start)]

    @property
    def largest(self) -> int:
        return self.holes[-1][0] if self.holes else 0

    @property
    def is_empty(self) -> bool:
        return self.holes == [(self.size, self.start)]

    def take(self, size: int) -> int:
        """The low end of the smallest hole that fits."""
        room, address = self.holes.pop(bisect_left(self.holes, (size, 0)))
        if room > size:
            insort(self.holes, (room - size, address + size))
        return address

    def give_back(self, address: int, size: int) -> None:
        """Joins with the holes before and behind."""
        start, end = address, address + size
        for room, hole in tuple(self.holes):
            if hole + room == start or hole == end:
                self.holes.remove((room, hole))
                start, end = min(start, hole), max(end, hole + room)
        insort(self.holes, (end - start, start))


class _AddressSpace:
    """Free ranges of addresses, ascending and never touching: a slab goes into the highest that has room."""

    def __init__(self, top: int) -> None:
        self._free = [(0, top)]

    def take(self, size: int) -> int | None:
        for index in range(len(self._free) - 1, -1, -1):
            low, high = self._free[index]
            if high - low >= size + _UNALIGNED:
                start = (high - size) // _SLAB * _SLAB
                rest = [(low, start)] + ([(start + size, high)] if start + size < high else [])
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        end = start + size
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
