"""What the driver says this process holds, torch's part and all others: NVML through ctypes, without its package."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Optional

_NOT_AVAILABLE = (1 << 64) - 1
_MOST_PROCESSES = 1024


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(torch: Any, device: int) -> Optional[int]:
    """Bytes of this process on a device; None where the driver does not say (in most containers it does not)."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if uuid is None or library.nvmlInit_v2():
        return None
    try:
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return None
        count = ctypes.c_uint(_MOST_PROCESSES)
        found = (_Process * _MOST_PROCESSES)()
        if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
            return None
        for one in found[: count.value]:
            if one.pid == os.getpid() and one.used != _NOT_AVAILABLE:
                return int(one.used)
        return None
    finally:
        library.nvmlShutdown()
