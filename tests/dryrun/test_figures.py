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
ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "dryrun_truths.py"
CONVOLUTIONS = ROOT / "bench" / "convolutions.py"


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


@needs_standin
@pytest.mark.slow
def test_the_rule_for_convolutions_is_as_good_as_it_was(tmp_path: Path) -> None:
    """Against what an H200 took, call by call; docs/dryrun.md and bench/README.md have the share."""
    said, truth = tmp_path / "said.json", ROOT / "bench" / "convolutions-h200.json.xz"
    dry = [sys.executable, "-m", "memtrace", "dryrun", "-o", str(tmp_path / "run"), "--"]
    done = subprocess.run([*dry, PYTHON, str(CONVOLUTIONS), str(said)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, str(CONVOLUTIONS), str(truth), str(said)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "1413 of 2583 equal", done.stdout[-2000:] + done.stderr
