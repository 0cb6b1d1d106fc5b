"""What commands print on real files, byte by byte.

After a wanted change: MEMTRACE_UPDATE_GOLDEN=1 python -m pytest tests/golden, and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from running import memtrace

HERE = Path(__file__).parent
COMMANDS = {
    "blame-report": ("blame", "--peak", "fixtures/opt13b-zero3-deepspeed0.18.9.pickle.xz"),
    "blame-reserved": ("blame", "--of", "reserved", "fixtures/oom-fragmented.pickle.xz"),
    "blame-tree": ("blame", "--by", "tree", "fixtures/gpt2-zero2.pickle.xz"),
    "blame-block": ("blame", "--by", "block", "--of", "active", "-n", "6", "fixtures/two-streams.pickle.xz"),
    "blame-oom": ("blame", "--at", "oom", "--by", "stack", "fixtures/gpt2-zero3-oom.pickle.xz"),
    "blame-full-stack": ("blame", "--by", "stack", "--full-stack", "-n", "2", "fixtures/mlp-adamw.pickle.xz"),
    "blame-window": ("blame", "--by", "file", "fixtures/gpt2-zero3-ring-20000.pickle.xz"),
    "blame-inconsistent": ("blame", "fixtures/public-trimmed-trace.pickle.xz"),
    "blame-json": ("blame", "--by", "block", "--json", "fixtures/oom-fragmented.pickle.xz"),
    "info": ("info", "fixtures/ragged.pickle.xz"),
    "info-json": ("info", "--json", "fixtures/mlp-annotations.pickle.xz"),
    "info-state": ("info", "fixtures/public-state-only-259-segments.pickle.xz"),
    "oom": ("oom", "fixtures/oom.pickle.xz"),
    "oom-fragmented": ("oom", "-n", "3", "fixtures/oom-fragmented.pickle.xz"),
    "oom-if": ("oom", "--if", "2GiB", "--gpu", "A100-40", "-n", "2", "fixtures/opt13b-zero3-deepspeed0.18.9.pickle.xz"),
    "oom-json": ("oom", "--json", "fixtures/oom-fragmented.pickle.xz"),
    "oom-other-streams": ("oom", "fixtures/gpt2-zero3-oom.pickle.xz"),
    "oom-outside": ("oom", "--gpu", "H200", "-n", "3", "fixtures/oom-memory-outside-torch.pickle.xz"),
    "oom-recording": ("oom", "fixtures/recordings/gpt2-oom"),
    "verify": ("verify", "fixtures/oom.pickle.xz"),
    "verify-reset": ("verify", "fixtures/mlp-peak-reset.pickle.xz", "--truth", "fixtures/mlp-peak-reset.truth.json"),
    "verify-window": (
        "verify",
        "fixtures/mlp-recorded-from-step-1.pickle.xz",
        "--truth",
        "fixtures/mlp-recorded-from-step-1.truth.json",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_output(name: str) -> None:
    ran = memtrace(*COMMANDS[name])
    shown = f"$ memtrace {' '.join(COMMANDS[name])}\n{ran.out}[stderr]\n{ran.err}[exit {ran.code}]\n"
    golden = HERE / f"{name}.txt"
    if os.environ.get("MEMTRACE_UPDATE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text()


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(COMMANDS)
