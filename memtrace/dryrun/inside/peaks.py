"""Torch's peaks from before the program had them forgotten (`torch.cuda.reset_peak_memory_stats`)."""

from __future__ import annotations

import functools
from typing import Any, Dict, Optional

_COUNTERS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes"}


class Peaks:
    """`before_reset`: the highest of each that was forgotten, in bytes; None where nothing was."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.before_reset: Optional[Dict[str, int]] = None

    def install(self) -> None:
        """Each reset is preceded by a look."""
        torch_c = self._torch._C
        original = torch_c._cuda_resetPeakMemoryStats

        @functools.wraps(original)
        def reset(device: Any, *args: Any, **kwargs: Any) -> Any:
            self._look(device)
            return original(device, *args, **kwargs)

        torch_c._cuda_resetPeakMemoryStats = reset

    def _look(self, device: Any) -> None:
        stats = self._torch._C._cuda_memoryStats(device)
        before = self.before_reset or dict.fromkeys(_COUNTERS, 0)
        self.before_reset = {
            name: max(before[name], int(stats[counter]["all"]["peak"])) for name, counter in _COUNTERS.items()
        }
