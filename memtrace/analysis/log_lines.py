"""Events and the annotations between them, as the numbered lines of one list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.model.frozen import FrozenColumns


class Line(NamedTuple):
    """What a line shows: an event, or a row of the annotations."""

    what: Literal["event", "annotation"]
    row: int


@dataclass(frozen=True, slots=True, eq=False)
class Lines(FrozenColumns):
    """Lines in order: `events` (ascending; None: all of `count`), and `annotations` (ascending rows), each before the
    event that it lies before. `position` is that event, `place` the line of the annotation."""

    count: int
    events: NDArray[np.int64] | None
    annotations: NDArray[np.int64]
    position: NDArray[np.int64]
    place: NDArray[np.int64]

    @classmethod
    def of(
        cls, count: int, events: NDArray[np.int64] | None, annotations: NDArray[np.int64], position: NDArray[np.int64]
    ) -> Lines:
        """The lines of some of `count` events, and of annotations at those positions (ascending)."""
        before = position if events is None else np.searchsorted(events, position)
        return cls(count, events, annotations, position, before + np.arange(len(annotations)))

    def __len__(self) -> int:
        return (self.count if self.events is None else len(self.events)) + len(self.annotations)

    def at(self, line: int) -> Line:
        """What a line shows. Raises IndexError."""
        if not 0 <= line < len(self):
            raise IndexError(f"no line {line} among {len(self)}")
        before = int(np.searchsorted(self.place, line))
        if before < len(self.place) and self.place[before] == line:
            return Line("annotation", int(self.annotations[before]))
        number = line - before
        return Line("event", number if self.events is None else int(self.events[number]))

    def of_event(self, event: int) -> int | None:
        """The line of an event; if it is not among them, that of the next one, else of the last. None: no event is."""
        count = len(self) - len(self.annotations)
        if not count:
            return None
        number = event if self.events is None else int(np.searchsorted(self.events, event))
        number = min(max(number, 0), count - 1)
        shown = number if self.events is None else int(self.events[number])
        return number + int(np.searchsorted(self.position, shown, side="right"))

    def of_annotation(self, annotation: int) -> int | None:
        """The line of a row of the annotations; None if it is not among them."""
        place = int(np.searchsorted(self.annotations, annotation))
        found = place < len(self.annotations) and self.annotations[place] == annotation
        return int(self.place[place]) if found else None
