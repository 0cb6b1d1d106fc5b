"""What is imported when: start-up stays cheap, and each library stays in its layer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"numpy", "rich", "textual", "networkx", "torch", "pandas", "platformdirs", "backports.zstd"}
RUN_COMMAND = """
import contextlib, io
from memtrace.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main()
assert "memtrace" in out.getvalue(), "the command printed nothing"
"""
EVERY_MODULE = """
import importlib, pkgutil, memtrace
for module in pkgutil.walk_packages(memtrace.__path__, "memtrace."):
    if not module.name.endswith(("__main__", "record.sitecustomize", "record.hf", "record.lightning")):
        importlib.import_module(module.name)
"""


def imported(code: str, *arguments: str) -> set[str]:
    """The names in sys.modules after `code` ran in a fresh interpreter."""
    program = f"import json, sys\n{code}\njson.dump(sorted(sys.modules), sys.stdout)"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_and_version_import_nothing_heavy(option: str) -> None:
    assert not imported(RUN_COMMAND, option) & HEAVY


def test_importing_memtrace_imports_nothing_heavy_and_no_click() -> None:
    assert not imported("import memtrace") & (HEAVY | {"click"})


def test_no_module_of_memtrace_imports_textual_or_torch() -> None:
    modules = imported(EVERY_MODULE)
    assert not modules & {"textual", "memtrace_tui", "torch"}
    assert "memtrace.cli.blame" in modules, "the walk went through every module"


def test_the_api_imports_no_user_interface() -> None:
    assert not imported("import memtrace.api") & {"click", "rich", "textual", "torch", "pandas"}


def test_the_terminal_app_imports_no_command_line() -> None:
    assert not imported("import memtrace_tui") & {"memtrace.cli", "click", "torch"}
