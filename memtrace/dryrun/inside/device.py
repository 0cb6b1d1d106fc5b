"""The preloaded library, as far as Python talks to it (memtrace/dryrun/device/standin.h)."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, List, NamedTuple


class Answered(NamedTuple):
    """Calls that were answered without knowing. `unknown`: success, and nothing done; `refused`: an error; `notes`:
    answered by a rule. Each by name, with how often."""

    unknown: Dict[str, int]
    refused: Dict[str, int]
    notes: Dict[str, int]


class Device:
    """The stand-in. Raises OSError where it is not loaded."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        if not hasattr(self._library, "memtrace_report"):
            raise OSError("the stand-in device is not loaded: something took LD_PRELOAD away")
        self._library.memtrace_report.restype = ctypes.c_char_p
        self._library.memtrace_answer.argtypes = (ctypes.c_longlong, ctypes.c_int)
        self._library.memtrace_outside_bytes.restype = ctypes.c_ulonglong
        self._library.memtrace_least_room.restype = ctypes.c_longlong

    def answer(self, value: int, size: int) -> None:
        """The next copy of `size` bytes from the device reads `value`."""
        self._library.memtrace_answer(value, size)

    def forget_answers(self) -> None:
        """Copies read what is there."""
        self._library.memtrace_answer(0, 0)

    def hide_mode(self, is_hidden: bool) -> None:
        """Whether torch's own code is to overlook the dispatch mode of this thread."""
        self._library.memtrace_hide_mode(int(is_hidden))

    @property
    def can_hide_mode(self) -> bool:
        return bool(self._library.memtrace_can_hide())

    @property
    def outside_bytes(self) -> int:
        """What the context and the libraries take of the device's memory."""
        return int(self._library.memtrace_outside_bytes())

    @property
    def room_bytes(self) -> int:
        """What the fullest device had left when it was fullest, whatever became of torch's counters."""
        return int(self._library.memtrace_least_room())

    def answered(self) -> Answered:
        """So far."""
        found = Answered({}, {}, {})
        kinds = {"unknown": found.unknown, "refused": found.refused, "note": found.notes}
        lines: List[str] = self._library.memtrace_report().decode("utf-8", "replace").splitlines()
        for line in lines:
            kind, _, rest = line.partition("\t")
            count, _, name = rest.partition("\t")
            if kind in kinds and count.isdigit():
                kinds[kind][name] = int(count)
        return found
