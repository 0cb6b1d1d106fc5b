"""A simulated world: one process is rank R of N, and trains as if the others were there."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB, ROOT = Path(__file__).with_name("world_job.py"), Path(__file__).parents[2]
WORLD = 8
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
needs_deepspeed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "deepspeed"))), reason="needs torch and deepspeed"
)
at_both_ends = pytest.mark.parametrize("rank", [0, WORLD - 1])


def run(case: str, rank: int) -> dict[str, Any]:
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONWARN", "DS_"))}
    done = subprocess.run(
        [sys.executable, str(JOB), case, str(WORLD), str(rank)],
        capture_output=True,
        text=True,
        env={**names, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    (note,) = facts["notes"]
    assert note.startswith(f"simulated world: rank {rank} of {WORLD}, alone")
    return facts


@needs_torch
@at_both_ends
def test_collectives_fill_their_outputs(rank: int) -> None:
    facts = run("collectives", rank)
    own, part = [1.0, 2.0], [3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]
    assert facts["environment"] == {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    assert facts["group"] == [rank, WORLD, "fake"]
    assert facts["is_work"]
    assert facts["gathered"] == [True] * 3
    assert facts["listed"] == [own] * WORLD
    assert facts["parameter"]
    assert facts["scattered"] == [part, part]
    assert facts["functional"] == part
    assert facts["exchanged"] == [True, [*own, 0, 0, 0]]
    assert facts["received"] == [0, 0]
    assert facts["reduced"] == [own, own]
    assert facts["objects"] == [[rank] * WORLD, [rank], [rank], [rank] * WORLD]
    assert facts["groups"] == [2, own * 2, True]


@needs_torch
@at_both_ends
def test_ddp(rank: int) -> None:
    facts = run("ddp", rank)
    assert all(map(math.isfinite, facts["losses"]))
    assert "only be called once" in facts["twice"]


@needs_torch
@at_both_ends
def test_fsdp2_and_its_checkpoint(rank: int) -> None:
    facts = run("fsdp2", rank)
    assert all(map(math.isfinite, facts["losses"]))
    share, last_share = (9, 1) if rank == 0 else (65 - 7 * 9, 0)  # rows of 65 and of 3
    assert facts["rows"] == [share] * 12 + [last_share] * 2
    assert facts["numel"] == 3 * (65 * 65 + 3 * 65) + 3 * 65 + 3
    assert facts["files"] == [".metadata", f"__{rank}_0.distcp"]


@needs_deepspeed
@at_both_ends
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage: int, rank: int) -> None:
    facts = run(f"zero{stage}", rank)
    assert facts["world"] == [WORLD, rank]
    assert all(math.isfinite(loss) and loss < 1 for loss in facts["losses"])
    assert facts["losses"][0] != facts["losses"][-1]
    if stage == 3:  # each parameter by itself
        shapes = 3 * [65 * 65, 65, 65, 65] + [3 * 65, 3]
        assert facts["masters"] == facts["shards"] == sum(math.ceil(numel / WORLD) for numel in shapes)
    else:  # all in one, aligned
        assert facts["numel"] <= facts["masters"] * WORLD < facts["numel"] + 4 * WORLD
