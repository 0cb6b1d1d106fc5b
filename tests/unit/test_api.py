"""The Python facade: what it takes, what it gives, how it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import snapshot_path

import memtrace
from memtrace.errors import MissingExtraError, QuestionError, SourceError


def test_a_path_may_be_text_bytes_or_a_path() -> None:
    path = snapshot_path("oom")
    peaks = {memtrace.load(form).peak().bytes for form in (path, str(path), os.fsencode(path))}
    assert len(peaks) == 1
    with pytest.raises(SourceError, match="no such file"):
        memtrace.load(b"nowhere.pickle")


def test_to_pandas_has_a_row_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frames.append))
    snapshot = memtrace.load(snapshot_path("mlp-adamw"))
    snapshot.to_pandas()
    (columns,) = frames
    assert {len(column) for column in columns.values()} == {len(snapshot.replay().lifetimes)}
    live = (columns["born"] <= 192) & (columns["freed"] > 192)
    assert columns["size"][live].sum() == snapshot.peak().bytes


def test_without_pandas_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pip install pandas") as caught:
        memtrace.load(snapshot_path("oom")).to_pandas()
    assert caught.value.exit_code == 5


def test_wrong_questions_list_what_there_is() -> None:
    snapshot = memtrace.load(snapshot_path("oom"))
    for ask in (
        lambda: snapshot.blame(by="colour"),
        lambda: snapshot.blame(of="alocated"),
        lambda: snapshot.series("bytes"),
        lambda: snapshot.replay(7),
        lambda: snapshot.blame(at=1.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(QuestionError) as caught:
            ask()
        assert caught.value.hint


def test_representations_fit_a_notebook() -> None:
    snapshot = memtrace.load(snapshot_path("mlp-adamw"))
    for thing in (
        snapshot,
        snapshot.peak(),
        snapshot.replay(),
        snapshot.replay().lifetimes,
        snapshot.data,
        snapshot.blame(),
    ):
        assert len(repr(thing)) < 1200


def test_many_unknown_actions_are_not_replayed_as_anything(tmp_path: Path) -> None:
    """Codes of unknown names reach up to 255: none may be a code that the replay uses for itself."""
    builder = SnapshotBuilder().alloc(0x7F0000000000, 512).alloc(0x7F0000000200, 512)
    for index in range(245):
        builder.event(f"strange {index:03}", addr=0x7F0000000000, size=512)
    snapshot = memtrace.load(builder.pickle(tmp_path / "x.pickle"))
    assert snapshot.series()[-1] == 1024
