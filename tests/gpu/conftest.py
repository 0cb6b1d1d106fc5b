"""Tests that need a GPU, skipped without one; and scripts for a GPU machine, whose doctests are not for pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

collect_ignore_glob = ["jobs/*.py"]
collect_ignore = [script.name for script in Path(__file__).parent.glob("*.py") if not script.name.startswith("test_")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(Path(place).exists() for place in ("/proc/driver/nvidia/version", "/dev/nvidiactl")):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
