"""Memory of the host that is zero without having been touched."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_DONTNEED = 4
_library: Any = ctypes.CDLL(None)


def clear(address: int, size: int) -> None:
    """Makes it zero; where it is the process's alone, by giving its whole pages back to the kernel."""
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if first >= last or not _is_private(first, last) or not _gave_back(first, last):
        ctypes.memset(address, 0, size)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + size - last)


def _gave_back(first: int, last: int) -> bool:
    return not _library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)


def _is_private(first: int, last: int) -> bool:
    """Whether all of it is anonymous: pages of a file, or shared with others, come back as they were, not as zeros."""
    reached = first
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            for line in maps:
                span, flags, _, _, inode, *_ = line.split(maxsplit=5)
                begin, end = (int(one, 16) for one in span.split("-"))
                if end <= first or begin >= last:
                    continue
                if flags[3] != "p" or inode != "0" or begin > reached:
                    return False
                reached = end
    except OSError:
        return False
    return reached >= last
