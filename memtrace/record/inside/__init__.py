"""What runs inside each rank of a recorded job. Standard library only, Python 3.8 on; the job never sees it fail.

The launcher copies this folder beside the recording as `memtrace_inside` and a `sitecustomize` calls `enter`. Nothing
happens, and nothing more is imported, until the process imports torch.
"""

from __future__ import annotations

from typing import Any


def enter(text: str = "") -> None:
    """At the start of an interpreter: waits for torch. `text` are the encoded settings (default: the environment's)."""
    from . import importing

    def arm(torch: Any) -> None:
        from . import recorder

        recorder.enter(torch, text)

    importing.after_import("torch", arm)
