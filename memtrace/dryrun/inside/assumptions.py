"""What a dry run took for granted, as rows of the sidecar: `code`, `text`, `count`, `where` (a call site, or null)."""

from __future__ import annotations

import sys
from typing import Any, Dict, List

_DEVICE = (  # the beginning of the device's note, its code
    ("convolution workspace", "convolution"),
    ("work on another stream", "streams"),
    ("batch norm", "batch-norm"),
    ("recurrent", "recurrent"),
    ("CUDA graph", "graph"),
    ("elapsed time", "time"),
    ("kernel's registers", "kernels"),
)
_UNANSWERED = "which is not answered: what it does on a GPU fails"
_THIRD_PARTY = ("flash_attn", "apex", "bitsandbytes", "xformers", "transformer_engine", "causal_conv1d", "mamba_ssm")


def rows(run: Any) -> List[Dict[str, Any]]:
    """The most important first."""
    answered = run.device.answered()
    found = [_row("refused", f"{name}: this call is not answered", count) for name, count in answered.refused.items()]
    found += [_row("unknown", f"{name} answered success and did nothing", n) for name, n in answered.unknown.items()]
    found += run.guesses.rows()
    found += [_row(_code(text), text, count) for text, count in answered.notes.items()]
    found += [_row(code, text, 1) for code, text in _of_the_run(run)]
    return found


def _of_the_run(run: Any) -> List[Any]:
    torch, found = run._torch, []
    if run.stopped_after:
        found.append(("stopped", f"the program was ended after {run.stopped_after}: what comes later was not seen"))
    world = run._recorder.settings.world
    if world > 1:
        found.append(("world", f"one of {world} ranks, alone: NCCL's own memory is not counted"))
    if not run.options.is_measured:
        size = f"{run.device.outside_bytes / (1 << 20):.0f} MiB"
        found.append(("outside", f"context and libraries take {size} beside torch, as measured on an H200"))
    if torch.backends.cudnn.benchmark:
        found.append(("benchmark", "cudnn.benchmark chooses algorithms by their speed: workspaces may be far off"))
    if not run.is_mode_hidden:
        found.append(("backward", "this torch cannot be kept from seeing memtrace: no values in backward"))
    others = [name for name in _THIRD_PARTY if name in sys.modules]
    return found + [
        ("third-party", f"{name}: kernels of its own, whose workspaces were not checked") for name in others
    ]


def _code(text: str) -> str:
    if text.endswith(_UNANSWERED):
        return "refused"
    return next((code for beginning, code in _DEVICE if text.startswith(beginning)), "device")


def _row(code: str, text: str, count: int) -> Dict[str, Any]:
    return {"code": code, "text": text, "count": count, "where": None}
