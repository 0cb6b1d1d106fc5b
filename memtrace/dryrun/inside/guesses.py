"""What was assumed in place of what a GPU would have computed: counted by what and where, for the sidecar."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List, Tuple

_MOST = 200
_LIBRARIES = (f"{os.sep}torch{os.sep}", f"{os.sep}deepspeed{os.sep}")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The recorder, and this part of it."""


class Guesses:
    """Counts by (code, text, call site)."""

    def __init__(self) -> None:
        self._counts: Dict[Tuple[str, str, str], int] = {}
        self.dropped = 0

    def add(self, code: str, text: str, *, with_site: bool = False) -> None:
        """One more of this kind."""
        key = (code, text, call_site() if with_site else "")
        if key not in self._counts and len(self._counts) >= _MOST:
            self.dropped += 1
            return
        self._counts[key] = self._counts.get(key, 0) + 1

    def rows(self) -> List[Dict[str, Any]]:
        """As the sidecar has them, the most frequent first."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        return [
            {"code": code, "text": text, "count": count, "where": where or None}
            for (code, text, where), count in ordered
        ]


def call_site() -> str:
    """`file.py:12 function` of the innermost frame that is the program's; of its path, the last folder and the file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OURS) and not any(part in path for part in _LIBRARIES) and not path.startswith("<"):
            short = "/".join(path.split(os.sep)[-2:])
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
