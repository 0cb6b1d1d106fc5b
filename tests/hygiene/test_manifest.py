"""fixtures/MANIFEST.toml and what lies beside it."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest
from recordings import FIXTURES, manifest, snapshot_path, truth_path

LIMIT = 7_500_000
PROSE = {"README.md", "MANIFEST.toml"}
REQUIRED = {"name", "what", "torch", "allocator", "complete", "sha256"}
OURS = REQUIRED | {"gpu", "made", "truth_sha256"}
THEIRS = REQUIRED | {"source", "licence"}
OPTIONAL = {"deepspeed", "transformers"}
LICENCES = {"Apache-2.0", "MIT", "BSD-3-Clause"}
MACHINE = re.compile("/(?:work|farm|root)/")
HOME = re.compile(r"(?:/home/|\\Users\\)(?!user[/\\])")

every_recording = pytest.mark.parametrize("item", manifest(), ids=lambda item: item["name"])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_public(item: dict[str, Any]) -> bool:
    return item["name"].startswith("public-")


def test_names_are_unique() -> None:
    names = [item["name"] for item in manifest()]
    assert len(names) == len(set(names))


def test_every_file_is_in_the_manifest_and_every_entry_is_a_file() -> None:
    listed = set(PROSE)
    for item in manifest():
        listed.add(snapshot_path(item["name"]).name)
        if "truth_sha256" in item:
            listed.add(truth_path(item["name"]).name)
    assert {path.name for path in FIXTURES.iterdir() if path.is_file()} == listed


def test_they_stay_small() -> None:
    total = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    assert total <= LIMIT


@every_recording
def test_the_fields_are_there_and_no_others(item: dict[str, Any]) -> None:
    assert set(item) - OPTIONAL == (THEIRS if is_public(item) else OURS)
    assert item.get("licence", "MIT") in LICENCES
    assert type(item["complete"]) is bool


@every_recording
def test_the_sums_are_right(item: dict[str, Any]) -> None:
    assert sha256(snapshot_path(item["name"])) == item["sha256"]
    if "truth_sha256" in item:
        assert sha256(truth_path(item["name"])) == item["truth_sha256"]


@every_recording
def test_the_script_that_made_it_is_here(item: dict[str, Any]) -> None:
    if not is_public(item):
        script = re.search(r"python ([\w/]+\.py) ", item["made"])
        assert script, "`made` names a script"
        assert (FIXTURES / "make" / script[1]).is_file()


@every_recording
def test_the_truth_says_the_same_versions(item: dict[str, Any]) -> None:
    if not is_public(item):
        truth = json.loads(truth_path(item["name"]).read_text("utf-8"))
        assert truth["torch"] == item["torch"]
        assert truth.get("deepspeed") == item.get("deepspeed")
        assert (truth.get("alloc_conf") or "default") == item["allocator"]


@every_recording
def test_paths_inside_are_generic(item: dict[str, Any]) -> None:
    with lzma.open(snapshot_path(item["name"])) as file:
        text = file.read().decode("latin-1")
    assert not HOME.search(text)
    assert is_public(item) or not MACHINE.search(text)
