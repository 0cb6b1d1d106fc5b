"""The one sentence about what makes up most of a moment."""

from __future__ import annotations

from memtrace.analysis.blame import Blame, Row

_WHAT = {
    "param.full": "whole parameters: no sharding divides them",
    "param.partition": "this rank's parameter partitions",
    "param.gathered": "parameters gathered whole, for use or kept for it",
    "param.prefetched": "parameters gathered ahead of their use",
    "param.persistent": "parameters below the persistence threshold, kept whole",
    "param.retained": "parameters that were gathered in forward and never released: autograd still holds them",
    "param.master": "fp32 master weights",
    "param.cast": "low-precision copies of weights that autocast made",
    "optim.state": "optimizer states",
    "optim.temp": "temporaries of the optimizer's step",
    "grad.full": "whole gradients, kept until the step",
    "grad.partition": "this rank's gradient partitions",
    "grad.bucket": "buckets in which gradients are reduced",
    "grad.fp32": "fp32 gradients",
    "act.saved": "activations that autograd keeps for backward",
    "act.checkpoint": "inputs that checkpointing keeps",
    "act.logits": "logits and what the loss makes of them",
    "fwd.temp": "temporaries of the forward",
    "bwd.temp": "temporaries of the backward: gradients of activations",
    "input": "inputs",
    "buffer": "buffers of modules",
    "comm": "buffers of collectives",
    "workspace": "workspaces of cuBLAS",
    "kv_cache": "the key-value cache",
    "checkpoint_io": "what was loaded from a checkpoint",
    "compiled": "pools of captured graphs",
    "prior": "from before the recording, and nothing is known of it",
    "unknown": "not attributed: no rule knows where it was made",
    "alloc.rounding": "rounding up of requests",
    "alloc.slack": "the unsplit rest of blocks",
    "alloc.pending": "freed, but waiting for a stream",
    "alloc.stranded": "free, but pinned by blocks in the same segment",
    "alloc.releasable": "free segments that the allocator keeps",
}
_TELLING = 0.05
"""Retained parameters of this share are the main cause even where something larger belongs there."""


def main_cause(blame: Blame) -> str | None:
    """What most of the bytes are, in a sentence; None when there are none, or the rows are not categories."""
    if blame.by != "category" or not blame.rows or not blame.total_bytes:
        return None
    row = next((one for one in blame.rows if _is_telling(one, blame)), blame.rows[0])
    own = row.category if row.label in ("", row.category) else f"{row.category} ({row.label})"
    what = _WHAT.get(row.category, own)
    share = 100 * row.bytes / blame.total_bytes
    return f"{share:.0f} % of it is {what}." if share < 99.5 else f"All of it is {what}."


def _is_telling(row: Row, blame: Blame) -> bool:
    return row.category == "param.retained" and row.bytes >= _TELLING * blame.total_bytes
