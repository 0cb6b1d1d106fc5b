"""How we come into a Python process, and that it notices nothing. Of every Python version that is installed here."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import memtrace.record
from memtrace.record import layout
from memtrace.record.inside.settings import VARIABLE, Settings, encode

SOURCE = Path(memtrace.record.__file__).with_name("sitecustomize.py")
NAMES = ("python2.7", *(f"python3.{minor}" for minor in range(6, 16)))
STATE = """
import sys
print("sitecustomize" in sys.modules)
try:
    import sitecustomize
    print(sitecustomize.__file__)
except ImportError as error:
    print(error)
"""


def installed() -> list[str]:
    """The interpreters here: this one, and of each version one that is on the path or pyenv's."""
    on_path = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if "shims" not in folder]
    folders = os.pathsep.join([*on_path, *map(str, Path.home().glob(".pyenv/versions/*/bin"))])
    return sorted({sys.executable, *filter(None, (shutil.which(name, path=folders) for name in NAMES))})


every_python = pytest.mark.parametrize("python", installed(), ids=lambda path: Path(path).name)


@pytest.fixture
def bootstrap(tmp_path: Path) -> Path:
    place = layout.make("job", tmp_path / "a recording")
    assert place.directory is not None
    return place.directory / layout.BOOTSTRAP


def run(python: str, code: str, path: Sequence[Path], *, settings: bool = True) -> subprocess.CompletedProcess[str]:
    """`python -c code` with these folders in PYTHONPATH."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    if settings:
        environ[VARIABLE] = encode(Settings(str(path[0].parent)))
    return subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False)


def is_old(python: str) -> bool:
    asked = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info < (3, 8))"], capture_output=True, check=True
    )
    return asked.stdout.strip() == b"True"


@every_python
def test_the_path_is_the_jobs_own(python: str, bootstrap: Path, tmp_path: Path) -> None:
    code = "import sys; print(sys.path)"
    other = tmp_path / "other"
    other.mkdir()
    without = run(python, code, [other], settings=False)
    assert run(python, code, [bootstrap, other]).stdout == without.stdout
    assert str(other) in without.stdout


@every_python
def test_the_recorder_is_in_and_old_pythons_are_left_alone(python: str, bootstrap: Path) -> None:
    ran = run(python, "import sys; print('memtrace_inside' in sys.modules)", [bootstrap])
    assert ran.stdout.strip() == str(not is_old(python))
    assert ran.stderr == ""


@every_python
def test_without_settings_nothing_of_ours_is_imported(python: str, bootstrap: Path) -> None:
    code = "import sys; print(sorted(sys.modules))"
    assert run(python, code, [bootstrap], settings=False).stdout == run(python, code, [bootstrap / "no"]).stdout


@every_python
def test_the_jobs_own_sitecustomize_runs_under_its_name(python: str, bootstrap: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("VALUE = 7\nprint(__name__)\n")
    code = "import sys, sitecustomize as s; print(s.VALUE, s is sys.modules['sitecustomize'], s.__file__)"
    without, ran = run(python, code, [tmp_path], settings=False), run(python, code, [bootstrap, tmp_path])
    assert without.stdout == ran.stdout
    assert ran.stdout.startswith("sitecustomize\n")
    assert ran.stderr == without.stderr == ""


@every_python
def test_what_it_raises_is_told_as_without_us(python: str, bootstrap: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    without, ran = run(python, STATE, [tmp_path], settings=False), run(python, STATE, [bootstrap, tmp_path])
    assert (ran.stderr, ran.returncode) == (without.stderr, without.returncode)
    assert without.stderr


@every_python
def test_where_there_is_none_there_is_none(python: str, bootstrap: Path, tmp_path: Path) -> None:
    without = run(python, STATE, [tmp_path / "nothing"], settings=False)
    ran = run(python, STATE, [bootstrap])
    assert (ran.stdout, ran.stderr) == (without.stdout, without.stderr)
    assert ran.stdout


@every_python
def test_a_recorder_that_fails_fails_silently(python: str, bootstrap: Path, tmp_path: Path) -> None:
    (bootstrap / layout.PACKAGE / "__init__.py").write_text("raise RuntimeError('ours')\n")
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    ran = run(python, "print('job')", [bootstrap, tmp_path])
    assert (ran.stdout, ran.stderr) == ("mine\njob\n", "")


def test_usercustomize_still_runs(bootstrap: Path, tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("print('user')\n")
    without = run(sys.executable, "", [tmp_path], settings=False)
    assert run(sys.executable, "", [bootstrap, tmp_path]).stdout == without.stdout


def test_nothing_heavy_is_imported(bootstrap: Path) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    before = set(run(sys.executable, code, [bootstrap], settings=False).stdout.split())
    more = set(run(sys.executable, code, [bootstrap]).stdout.split()) - before
    assert not more & {"json", "base64", "socket", "threading", "subprocess", "importlib.util", "typing"}
    assert "memtrace_inside" in more


def test_it_is_of_the_oldest_syntax() -> None:
    """For where no old Python is installed: no annotations, f-strings or other words that Python 2.7 does not know."""
    tree = ast.parse(SOURCE.read_text("ascii"), feature_version=(3, 7))
    newer = (
        ast.JoinedStr,
        ast.AnnAssign,
        ast.NamedExpr,
        ast.Nonlocal,
        ast.AsyncFunctionDef,
        ast.YieldFrom,
        ast.Starred,
    )
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    assert not [
        one for one in functions if one.returns or one.args.kwonlyargs or any(a.annotation for a in one.args.args)
    ]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.cause]


def test_what_runs_in_a_rank_is_of_the_syntax_of_python_3_8() -> None:
    files = sorted((SOURCE.parent / "inside").glob("*.py"))
    assert files
    for file in files:
        ast.parse(file.read_text("utf-8"), str(file), feature_version=(3, 8))
