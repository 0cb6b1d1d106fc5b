"""Without the extension modules the answers are the same, and the command says that it is slow."""

from __future__ import annotations

import subprocess
import sys

import pytest
from recordings import snapshot_path

WITHOUT = """
import sys
sys.modules["memtrace.io._decode"] = sys.modules["memtrace.allocator._kernel"] = None
sys.argv[0] = "memtrace"
from memtrace.cli import main
main()
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", [("blame", "--peak", "--json"), ("blame", "--by", "tree"), ("info",), ("verify",)])
def test_the_same_answer_and_a_note(command: tuple[str, ...]) -> None:
    path = str(snapshot_path("gpt2-adamw"))
    plain = run(WITHOUT, *command, "--no-cache", path)
    here = run("from memtrace.cli import main; main()", *command, "--no-cache", path)
    assert plain.stdout == here.stdout
    assert plain.returncode == here.returncode == 0
    assert "without a C compiler" in plain.stderr
    assert "without a C compiler" not in run(WITHOUT, *command, "--no-cache", "-q", path).stderr
