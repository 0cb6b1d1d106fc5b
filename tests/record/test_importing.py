"""Callbacks after an import: the module is as without them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrace.record.inside import importing, notes


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = list(sys.meta_path)
    yield
    importing.forget()
    assert sys.meta_path == before


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_callback_comes_when_the_import_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, "some_library", "x = 1\ny = 2\n")
    seen: list[Any] = []
    importing.after_import(name, lambda found: seen.append((found.x, found.y)))
    assert not seen
    importlib.import_module(name)
    assert seen == [(1, 2)]
    importing.after_import(name, lambda found: seen.append("at once"))
    assert seen == [(1, 2), "at once"]


def test_the_loader_is_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, "other_library", "loader = __spec__.loader\n")
    importing.after_import(name, lambda _: None)
    found = importlib.import_module(name)
    assert type(found.loader).__name__ == "SourceFileLoader"
    assert found.__spec__.loader is found.loader is found.__loader__
    assert "exec_module" not in vars(found.loader)
    assert found.loader.get_source(name) == "loader = __spec__.loader\n"


def test_an_import_that_fails_fails_as_without_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, monkeypatch, "broken_library", "1 / 0\n")
    importing.after_import(name, lambda _: pytest.fail("it was not imported"))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)
    assert name not in sys.modules
    importing.after_import("no_such_library", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_library")


def test_what_a_callback_raises_is_not_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(notes, "log", said.append)
    name = module(tmp_path, monkeypatch, "third_library", "x = 1\n")
    importing.after_import(name, lambda _: 1 / 0)
    assert importlib.import_module(name).x == 1
    assert said == [f"hook on {name} failed: ZeroDivisionError: division by zero"]


def test_a_loader_that_takes_no_attribute_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted:
        __slots__ = ()

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, found: Any) -> None:
            found.x = 3

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, Slotted()) if name == "slotted_library" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    importing.after_import("slotted_library", lambda _: pytest.fail("it cannot be known"))
    assert importlib.import_module("slotted_library").x == 3
    del sys.modules["slotted_library"]
    sys.meta_path.pop()
    importing.forget()


def test_a_module_being_imported_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from memtrace.record.inside import importing\nseen = []\n"
        "importing.after_import(__name__, lambda found: seen.append(found.late))\nlate = 5\n"
    )
    name = module(tmp_path, monkeypatch, "slow_library", text)
    importing.after_import(name, lambda _: None)
    assert importlib.import_module(name).seen == [5]


def test_what_was_being_imported_before_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeed imports torch, and only then is anybody asking for deepspeed."""
    text = (
        "from memtrace.record.inside import importing\nseen = []\n"
        "importing.after_import('outer_library', lambda found: seen.append(found.late))\nlate = 7\n"
    )
    name = module(tmp_path, monkeypatch, "outer_library", text)
    importing.watch(name)
    assert importlib.import_module(name).seen == [7]
