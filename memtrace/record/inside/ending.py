"""The end of the process, from any thread, and by the kernel's clock where the interpreter cannot be had any more.

`_snapshot()` waits for the allocator's lock and keeps the interpreter's while it waits: no thread of Python, and so no
time-out of ours, runs until it returns. Timers of the kernel do.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from typing import Any, Optional

_PATIENCE_S = 5.0
_TRIES = 3
_AGAIN_S = 0.05
_SIGEV_SIGNAL, _SIGEV_THREAD = 0, 2

_library: Any = None


def prepare() -> None:
    """Loads what is needed at the end, when loading may not be possible."""
    global _library
    import ctypes

    library: Any = ctypes.CDLL(None, use_errno=True)
    for name in ("signal", "sysv_signal"):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    _library = library


def die(signum: int) -> None:
    """By the signal itself, so that the parent sees what it would have seen."""
    for _ in range(_TRIES):
        try:
            _library.signal(signum, None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
            os.kill(os.getpid(), signum)
            time.sleep(_PATIENCE_S)
            break
        except BaseException:  # noqa: BLE001, S112 - of another signal's handler, which came too late to run
            continue
    leave(128 + signum)


def leave(status: int) -> None:
    """`os._exit` as it was before anybody put something in its place."""
    import posix

    posix._exit(status)


def die_in_time(signum: int, seconds: float) -> None:
    """The kernel ends the process by `signum` after so many seconds, whatever the interpreter does."""
    if absorb(signum):
        _set_timer(_event(0, signum, _SIGEV_SIGNAL), seconds)
    else:
        leave_in_time(128 + signum, seconds)


def absorb(signum: int) -> bool:
    """The next `signum` does nothing, and the one after it what it does by default. False: not possible here."""
    if getattr(_library, "sysv_signal", None) is None:
        return False
    _library.sysv_signal(signum, _address("abs"))
    return True


def leave_in_time(status: int, seconds: float) -> None:
    """The same, by `os._exit(status)`."""
    exits = _address("_exit")
    if exits is not None:
        _set_timer(_event(status & 0xFF, 0, _SIGEV_THREAD, exits), seconds)


def _event(value: int, signum: int, notify: int, function: int = 0) -> bytes:
    """A `struct sigevent` of Linux with 64 bits."""
    return struct.pack("PiiPP32x", value, signum, notify, function, 0)


def _set_timer(event: bytes, seconds: float) -> None:
    """Fires after `seconds`, and from then on until the process is gone. Without POSIX timers: not at all."""
    import ctypes

    create, start = getattr(_library, "timer_create", None), getattr(_library, "timer_settime", None)
    if create is None or start is None or struct.calcsize("P") != 8:
        return
    timer = ctypes.c_void_p()
    whole = int(seconds)
    spec = struct.pack("4l", 0, int(_AGAIN_S * 1e9), whole, max(1, int((seconds - whole) * 1e9)))
    if create(ctypes.c_int(time.CLOCK_MONOTONIC), event, ctypes.byref(timer)) == 0:
        start(timer, ctypes.c_int(0), spec, None)


def _address(name: str) -> Optional[int]:
    import ctypes

    function = getattr(_library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
