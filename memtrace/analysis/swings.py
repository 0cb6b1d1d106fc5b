"""Local peaks of a counter: moments at which it was high, and that it left by more than a little."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST_SHARE = 0.02
"""Of the highest value: a rise or a fall that is smaller is noise."""
_CHUNK = 4096


def local_peaks(values: NDArray[np.int64], least: int | None = None) -> NDArray[np.int64]:
    """Places in `values` at which it is highest between a rise and a fall of at least `least` (default: `LEAST_SHARE`
    of the highest value), in order. The start counts as a rise where it begins high, the end as a fall; the highest
    value of all is always one of them.

    >>> local_peaks(np.array([0, 5, 4, 9, 1, 7]), 3).tolist()
    [3, 5]
    """
    if not len(values):
        return np.zeros(0, np.int64)
    top = int(values.max())
    least = max(1, int(top * LEAST_SHARE) if least is None else least)
    found: list[int] = []
    place, length = 0, len(values)
    while place < length:
        fall = _first_swing(values, place, least, down=True)
        found.append(place + int(values[place : fall or length].argmax()))
        if fall is None:
            break
        rise = _first_swing(values, fall, least, down=False)
        if rise is None:
            break
        place = rise
    return np.array(found, np.int64)


def _first_swing(values: NDArray[np.int64], start: int, least: int, *, down: bool) -> int | None:
    """The first place at or after `start` that is `least` below (or above) an earlier one, from `start` on."""
    extreme = np.maximum if down else np.minimum
    best, size = values[start], _CHUNK
    while start < len(values):
        part = values[start : start + size]
        running = extreme(extreme.accumulate(part), best)
        far = (running - part if down else part - running) >= least
        if far.any():
            return start + int(far.argmax())
        best, start, size = running[-1], start + size, size * 2
    return None
