"""Memory of the host that is zero without having been touched."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_DONTNEED = 4
_library: Any = ctypes.CDLL(None)


def clear(address: int, size: int) -> None:
    """Makes it zero, and gives its whole pages back to the kernel. For memory of malloc's: private, and of no file."""
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if first >= last or _library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED):
        ctypes.memset(address, 0, size)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + size - last)
