"""The categories of contract.md: ids for programs, labels for people."""

from __future__ import annotations

LABELS: dict[str, str] = {
    "param.full": "parameters, whole",
    "param.partition": "parameter partitions",
    "param.gathered": "parameters gathered for use",
    "param.prefetched": "parameters gathered ahead",
    "param.persistent": "parameters kept whole by threshold",
    "param.retained": "gathered, still held by autograd",
    "param.master": "fp32 master weights",
    "param.cast": "low-precision copies of weights",
    "optim.state": "optimizer states",
    "optim.temp": "optimizer step temporaries",
    "grad.full": "gradients, whole",
    "grad.partition": "gradient partitions",
    "grad.bucket": "gradient buckets",
    "grad.fp32": "fp32 gradients",
    "act.saved": "activations kept for backward",
    "act.checkpoint": "inputs kept by checkpointing",
    "act.logits": "logits and loss",
    "fwd.temp": "forward temporaries",
    "bwd.temp": "backward temporaries",
    "input": "inputs",
    "buffer": "buffers",
    "comm": "communication",
    "workspace": "library workspaces",
    "kv_cache": "key-value cache",
    "checkpoint_io": "loaded from a checkpoint",
    "compiled": "compiled graphs",
    "prior": "from before the recording",
    "unknown": "not attributed",
    "alloc.rounding": "rounding up of requests",
    "alloc.slack": "unsplit rest of blocks",
    "alloc.pending": "freed, waiting for a stream",
    "alloc.stranded": "free, pinned by blocks in the same segment",
    "alloc.releasable": "free segments, kept in the cache",
    "outside": "outside torch",
}

CATEGORIES = tuple(LABELS)
BLOCK_CATEGORIES = tuple(name for name in LABELS if name.split(".")[0] not in ("alloc", "outside"))
"""Those that a block may have; the others are the allocator's, or no block at all."""
CODE = {name: code for code, name in enumerate(CATEGORIES)}

CONFIDENCE = ("recorded", "certain", "inferred", "unknown")
"""From strongest to weakest."""
