"""Fixtures of all tests. Plain helpers are in recordings.py and builders.py, which tests import by name."""

from __future__ import annotations

import importlib.util
import itertools
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from recordings import SUFFIX

# No deadline: the machines that run the tests are shared. Streams of events are large examples by nature.
# In CI every run tries the same examples.
LARGE = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]
settings.register_profile("local", deadline=None, suppress_health_check=LARGE)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_TEST_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Decompresses NAME.pickle.xz once a session and returns the path of NAME.pickle."""
    folder = tmp_path_factory.mktemp("unpacked")
    done: dict[Path, Path] = {}

    def unpack(path: Path) -> Path:
        if path not in done:
            target = folder / f"{len(done)}-{path.name.removesuffix(SUFFIX)}.pickle"
            with lzma.open(path) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            done[path] = target
        return done[path]

    return unpack


@pytest.fixture(autouse=True)
def _nothing_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test finds the recordings, the settings or the cache of whoever runs it, nor the cache of another test."""
    state = tmp_path_factory.getbasetemp() / "state"
    monkeypatch.delenv("MEMTRACE_DIR", raising=False)
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(state))
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache" / str(next(_TEST_NUMBERS))))
    monkeypatch.delenv("MEMTRACE_NO_CACHE", raising=False)
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no GPU. Torch is imported only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs torch and a CUDA device"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
