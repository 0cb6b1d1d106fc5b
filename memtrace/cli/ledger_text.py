"""What `memtrace blame --of reserved` says below its table: the device, pools and streams, who waits, who pins."""

from __future__ import annotations

from collections.abc import Sequence

from memtrace.analysis.frames import display_frame_briefly, library_path, own_frames
from memtrace.analysis.ledger import DEFAULT_POOL, TERMS, Part
from memtrace.analysis.pins import Pin
from memtrace.analysis.reserved import Reserved, Waiting
from memtrace.cli.output import Column, Page
from memtrace.model import Frame
from memtrace.timeline import in_words
from memtrace.units import format_bytes, format_seconds, in_unit, plural, unit_of

NO_PYTHON = "(autograd's thread: no Python frame)"
WITHOUT_PYTHON = ("bwd.temp", "grad.full", "grad.partition")
"""Categories that such a thread makes."""


class LedgerText:
    """Writes the sections. `units` is auto, bytes or MiB; `top` how many rows of a table are shown; `expandable`:
    segments give memory back by page."""

    def __init__(self, page: Page, found: Reserved, units: str, top: int, *, expandable: bool) -> None:
        self.page, self.found, self.units, self.top, self.expandable = page, found, units, top, expandable

    def write(self) -> None:
        """Each section with an empty line before it; one that has nothing to say is left out."""
        for lines in (self._device(), self._waits()):
            if lines:
                self.page.line()
            for line in lines:
                self.page.line(line)
        if len(self.found.parts) > 1:
            self._parts()
        if self.found.ledger.stranded:
            self._pins()

    def _size(self, size: int) -> str:
        return format_bytes(size, self.units)

    def _unit(self, size: int) -> str:
        return {"auto": unit_of(size), "bytes": "B"}.get(self.units, self.units)

    def _device(self) -> list[str]:
        memory = self.found.memory
        if memory.capacity_bytes is None:
            return []
        whole = f"The device's {self._size(memory.capacity_bytes)}"
        if memory.free_bytes is None:
            return [f"{whole}: what of it was outside torch is not recorded for this moment."]
        if memory.outside_bytes is None:
            return [f"{whole} is less than what was reserved and free: what was outside torch is not known."]
        held, outside = self._size(self.found.ledger.reserved), self._size(memory.outside_bytes)
        return [f"{whole}: {held} reserved, {outside} outside torch, {self._size(memory.free_bytes)} free."]

    def _waits(self) -> list[str]:
        shown, hidden = self.found.waiting[: self.top], self.found.waiting[self.top :]
        lines = [self._wait(one) for one in shown]
        if hidden:
            more = plural(len(hidden), "more stream")
            lines.append(f"Pending on {more}: {self._size(sum(one.bytes for one in hidden))}.")
        return lines

    def _wait(self, one: Waiting) -> str:
        waited = f"freed up to {plural(one.waited_events, 'event')}{_seconds(one.waited_us)} before"
        if one.waited_events > self.found.event:
            waited = "in part freed before the recording" if one.blocks > 1 else "freed before the recording"
        if one.still_events is None:
            end = "all of it still waits when the trace ends"
        else:
            end = f"the last was free again {plural(one.still_events, 'event')}{_seconds(one.still_us)} later"
            if one.unfinished_blocks:
                end = f"{one.unfinished_blocks:,} never within the trace, of the others {end}"
        return (
            f"Pending on stream {one.stream}: {self._size(one.bytes)} in {plural(one.blocks, 'block')}, {waited}; "
            f"{end}."
        )

    def _parts(self) -> None:
        ledger, parts = self.found.ledger, self.found.parts
        unit = self._unit(ledger.reserved)
        shown, hidden = parts[: self.top], parts[self.top :]
        used = [name for name in TERMS if getattr(ledger, name)]

        def cells(name: str, some: Sequence[Part]) -> list[str]:
            sums = (sum(getattr(part.ledger, column) for part in some) for column in ("reserved", *used))
            return [name, *(in_unit(size, unit) for size in sums)]

        rows = [cells(_part_name(part), [part]) for part in shown]
        if hidden:
            rows.append(cells(f"{len(hidden):,} more", hidden))
        rows.append(cells("total", parts))
        self.page.line()
        self.page.line("By pool and stream:")
        columns = [Column("pool, stream"), *(Column(title, right=True) for title in (unit, *used))]
        self.page.table(columns, rows, dim_rows=frozenset({len(shown)} if hidden else ()))

    def _pins(self) -> None:
        pins, stranded = self.found.pins, self.found.ledger.stranded
        unit = self._unit(stranded)
        shown, hidden = pins[: self.top], pins[self.top :]
        columns = [
            Column(f"{unit} pinned", right=True),
            Column("own size", right=True),
            Column("frees", right=True),
            Column("blocks", right=True),
            Column("pinned by", grow=True),
        ]

        def cells(some: Sequence[Pin], frees: str, name: str) -> list[str]:
            sums = [sum(pin.hostage_bytes for pin in some), sum(pin.bytes for pin in some)]
            blocks = sum(pin.blocks for pin in some)
            return [*(in_unit(size, unit) for size in sums), frees, f"{blocks:,}", name]

        rows = [cells([pin], in_unit(pin.together_bytes, unit), self._pin_name(pin)) for pin in shown]
        if hidden:
            rows.append(cells(hidden, "", f"{len(hidden):,} more"))
        rows.append(cells(pins, "", "total"))
        self.page.line()
        self.page.line("What pins the stranded memory:")
        self.page.line(self._lead())
        self.page.table(columns, rows, dim_rows=frozenset({len(shown)} if hidden else ()))

    def _lead(self) -> str:
        pins = self.found.pins
        pending = sum(pin.pending_blocks for pin in pins)
        live = sum(pin.blocks for pin in pins) - pending
        kinds = [plural(count, f"{kind} block") for count, kind in ((live, "live"), (pending, "pending")) if count]
        units = "pages" if self.expandable else "segments"
        said = f"{self._size(self.found.ledger.stranded)} is stranded: free, but in {units} that "
        said += f"{' and '.join(kinds) or 'nothing'} ({self._size(sum(pin.bytes for pin in pins))}) "
        said += "pins" if live + pending < 2 else "pin"
        best = next((pin for pin in pins if pin.together_bytes), None)
        if best is None:
            return f"{said}. No call site pins a {units[:-1]} alone: several have to let go."
        whose = f"the {best.blocks:,} of" if best.blocks > 1 else "the one of"
        return f"{said}. Freeing {whose} {self._site(best)} would release {self._size(best.together_bytes)}."

    def _pin_name(self, pin: Pin) -> str:
        """The category, when the oldest block was made, and below it where."""
        when = in_words(pin.phase, pin.step)
        born = "" if when is None else f", born in {when}"
        if pin.blocks and pin.born < 0:
            born = ", born before the recording"
        return f"{pin.category}{born}\n  {self._site(pin)}"

    def _site(self, pin: Pin) -> str:
        frames = self.found.frames(pin)
        if frames:
            return display_frame_briefly(_telling(frames))
        if not pin.blocks:
            return "(the rest of a page)"
        return NO_PYTHON if pin.category in WITHOUT_PYTHON else f"({pin.category}: no stack)"


def _telling(frames: Sequence[Frame]) -> Frame:
    """The frame that a person would look at: the library's that says most, else the program's."""
    return (library_path(frames) or own_frames(frames) or [*frames])[0]


def _seconds(time_us: int | None) -> str:
    return "" if time_us is None else f" ({format_seconds(time_us)})"


def _part_name(part: Part) -> str:
    lines = [part.pool, f"  {part.stream}"]
    if part.pool_id is None:
        lines.append("  unknown pool")
    elif part.pool_id != DEFAULT_POOL:
        lines.append(f"  private {part.pool_id[0]}.{part.pool_id[1]}")
    return "\n".join(lines)
