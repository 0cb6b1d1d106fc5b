"""What runs inside each rank of a recorded job. Standard library only, Python 3.8 on; the job never sees it fail.

The launcher copies this folder beside the recording as `memtrace_inside` and a `sitecustomize` calls `enter`. Nothing
happens, and nothing more is imported, until the process imports torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than a helper program of the job may lose to us
if TYPE_CHECKING:
    from typing import Any

_LIBRARIES = ("deepspeed", "transformers.trainer", "transformers.modeling_utils", "accelerate.accelerator",
              "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")  # fmt: skip


def enter(text: str = "") -> None:
    """At the start of an interpreter: waits for torch. `text` are the encoded settings (default: the environment's)."""
    from . import importing

    importing.watch(*_LIBRARIES)

    def arm(torch: Any) -> None:
        from . import recorder

        recorder.enter(torch, text)

    importing.after_import("torch", arm)
