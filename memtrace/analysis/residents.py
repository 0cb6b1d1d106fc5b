"""The blocks in memory at one moment, the segments they lie in, and the units that torch can give back to the driver.

A unit is what goes back as a whole: a segment, or in expandable memory a page. A block that touches it pins it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.allocator.sizes import SMALL_SEGMENT
from memtrace.model.frozen import FrozenColumns

NO_SPAN = -1
NO_ONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Residents(FrozenColumns):
    """Blocks in use or pending, by address. `block` is a row of `Lifetimes`, `span` one of `Spans` (`NO_SPAN`: the
    trace contradicts itself, and it lies in none); `spans` are the rows that torch holds."""

    block: NDArray[np.int64]
    live: NDArray[np.bool_]
    span: NDArray[np.int64]
    spans: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True, eq=False)
class Units(FrozenColumns):
    """Units that cannot go back to the driver now.

    One row a unit: `span` its row of `Spans`, `free` its free bytes (stranded, all of them), `whole` the bytes that
    torch could give back if nothing touched it. One row a touch: `touched` is a row of the units, `by` one of the
    residents (`NO_ONE`: what is over at the end of an expandable range, smaller than a page, whoever else touches it).
    One row a resident: `inner`, the bytes of the pages that it fills from end to end, which are no units here.
    """

    span: NDArray[np.int64]
    free: NDArray[np.int64]
    whole: NDArray[np.int64]
    touched: NDArray[np.int64]
    by: NDArray[np.int64]
    inner: NDArray[np.int64]


def residents_at(replay: Replay, event: int) -> Residents:
    """Who is in memory after `event` (-1: before the first)."""
    blocks, spans = replay.lifetimes, replay.spans
    active = np.flatnonzero(blocks.active_at(event))
    active = active[np.argsort(blocks.address[active], kind="stable")]
    held = np.flatnonzero(spans.alive_at(event))
    span = blocks.span[active].astype(np.int64)
    loose = np.flatnonzero(span < 0)
    mapped = held[spans.expandable[held]]
    mapped = mapped[np.argsort(spans.address[mapped], kind="stable")]
    span[loose] = _containing(spans.address[mapped], spans.size[mapped], mapped, blocks.address[active[loose]])
    return Residents(block=active, live=event < blocks.freed[active], span=span, spans=held)


def _containing(
    start: NDArray[np.uint64], size: NDArray[np.int64], rows: NDArray[np.int64], address: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """The row of the range that holds each address; ranges by their start."""
    if not len(rows):
        return np.full(len(address), NO_SPAN, np.int64)
    place = np.searchsorted(start, address, side="right") - 1
    inside = (place >= 0) & (address < (start + size.astype(np.uint64))[place])
    return np.where(inside, rows[place], NO_SPAN)


def units_of(replay: Replay, residents: Residents) -> Units:
    """The units that blocks touch."""
    spans = replay.spans
    is_held = np.zeros(len(spans) + 1, np.bool_)  # the last is NO_SPAN's
    is_held[residents.spans] = True
    known = np.flatnonzero(is_held[residents.span])
    expandable = spans.expandable[residents.span[known]]
    plain, mapped = known[~expandable], known[expandable]
    rests = _rests(replay, residents)
    pages, inner = _pages(replay, residents, mapped)
    touches = _joined(
        _Touches(
            residents.span[plain],
            np.zeros(len(plain), np.int64),
            replay.lifetimes.size[residents.block[plain]],
            plain,
        ),
        pages,
        rests,
    )
    (span, page), touched = _distinct(touches.span, touches.page)
    used = np.zeros(len(span), np.int64)
    np.add.at(used, touched, touches.bytes)
    length = np.where(spans.expandable[span], _page_size(replay, span), spans.size[span])
    extent = np.minimum((page + 1) * length, spans.size[span]) - page * length
    return Units(
        span=span,
        free=np.maximum(extent - used, 0),
        whole=np.where(extent == length, length, 0),
        touched=touched,
        by=touches.by,
        inner=inner,
    )


class _Touches(NamedTuple):
    """Columns of equal length: a block (`by`, of the residents) has `bytes` in page number `page` of a span."""

    span: NDArray[np.int64]
    page: NDArray[np.int64]
    bytes: NDArray[np.int64]
    by: NDArray[np.int64]


def _joined(*parts: _Touches) -> _Touches:
    return _Touches(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _pages(replay: Replay, residents: Residents, mapped: NDArray[np.int64]) -> tuple[_Touches, NDArray[np.int64]]:
    """The first and the last page of each block in expandable memory, and the bytes of the pages between them."""
    blocks, spans = replay.lifetimes, replay.spans
    span, row = residents.span[mapped], residents.block[mapped]
    page = _page_size(replay, span)
    begin = (blocks.address[row] - spans.address[span]).astype(np.int64)
    end = np.minimum(begin + blocks.size[row], spans.size[span])
    first = begin // page
    last = np.maximum((end - 1) // page, first)
    more = last > first
    inner = np.zeros(len(residents), np.int64)
    inner[mapped] = np.maximum(last - first - 1, 0) * page
    heads = _Touches(span, first, np.minimum(end, (first + 1) * page) - begin, mapped)
    return _joined(heads, _Touches(span[more], last[more], (end - last * page)[more], mapped[more])), inner


def _rests(replay: Replay, residents: Residents) -> _Touches:
    """What expandable ranges have over whole pages, which settings other than the recording's make: it cannot be given
    back whoever touches it, and it must not be lost."""
    spans = replay.spans
    held = residents.spans[spans.expandable[residents.spans]]
    number, over = np.divmod(spans.size[held], _page_size(replay, held))
    odd = over > 0
    none = np.zeros(int(odd.sum()), np.int64)
    return _Touches(held[odd], number[odd], none, none + NO_ONE)


def _page_size(replay: Replay, span: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of a page of each expandable range."""
    return np.where(replay.spans.large[span], np.int64(replay.settings.large_page), np.int64(SMALL_SEGMENT))


def _distinct(
    span: NDArray[np.int64], page: NDArray[np.int64]
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]:
    """The distinct pairs, and the number of each."""
    order = np.lexsort((page, span))
    span, page = span[order], page[order]
    starts = np.ones(len(span), np.bool_)
    starts[1:] = (np.diff(span) != 0) | (np.diff(page) != 0)
    number = np.empty(len(span), np.int64)
    number[order] = np.cumsum(starts) - 1
    return (span[starts], page[starts]), number
