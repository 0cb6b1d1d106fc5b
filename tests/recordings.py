"""Where recordings are: those of this repository, and more beside it on machines that have them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
SUFFIX = ".pickle.xz"
SHARED_VARIABLE = "MEMTRACE_SHARED"


def manifest() -> list[dict[str, Any]]:
    """The tables of fixtures/MANIFEST.toml."""
    with (FIXTURES / "MANIFEST.toml").open("rb") as file:
        recordings: list[dict[str, Any]] = tomllib.load(file)["recording"]
    return recordings


def fixture_names(*, complete: bool | None = None, truth: bool | None = None) -> list[str]:
    """Names of the recordings here; only those complete or not, with torch's counters or without, if asked."""
    return [
        item["name"]
        for item in manifest()
        if complete in (None, item["complete"]) and truth in (None, "truth_sha256" in item)
    ]


def snapshot_path(name: str) -> Path:
    """The compressed snapshot of that name."""
    return FIXTURES / f"{name}{SUFFIX}"


def truth_path(name: str) -> Path:
    """Torch's own counters for it."""
    return FIXTURES / f"{name}.truth.json"


def shared_snapshots() -> list[tuple[Path, Path]]:
    """Snapshots with their truths from $MEMTRACE_SHARED, or from ../shared/snapshots; none where neither is there."""
    folder = Path(os.environ.get(SHARED_VARIABLE) or ROOT.parent / "shared" / "snapshots")
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        truth = path.with_name(path.name.removesuffix(SUFFIX) + ".truth.json")
        if truth.exists():
            found.append((path, truth))
    return found
