"""Four of the recordings' jobs, whose peaks, marks and events under these versions are known to the byte.

The truths of ../../fixtures are of torch 2.11, which CI does not have; docs/dryrun.md says in what later ones differ.
After a change that is meant: python bench/dryrun_truths.py --python ... --only JOBS --figures tests/dryrun/figures.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from standin import PYTHON, needs_standin

STORED = Path(__file__).with_name("figures.json")
BENCH = Path(__file__).parents[2] / "bench" / "dryrun_truths.py"


@needs_standin
@pytest.mark.slow
def test_known_jobs_have_their_known_figures(tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text())
    found = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--python", PYTHON, "--jobs", "2", "--figures", str(found)]
    done = subprocess.run([*command, "--only", ",".join(stored["jobs"])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(found.read_text())
    if content["versions"] != stored["versions"] and not os.environ.get("CI"):
        pytest.skip(f"the figures are those of {stored['versions']}")
    assert content == stored
