"""The directory of a recording: where it is, what is in it, and what happens where nothing can be written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import small_disk

from memtrace import paths
from memtrace.io.read import read_snapshot
from memtrace.io.recording import META_SCHEMA
from memtrace.record import layout
from memtrace.record.inside.settings import Settings

NOWHERE = Path(os.devnull) / "x"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "tiny", "64k")


def made(name: str = "train", output: Path | None = None) -> Path:
    place = layout.make(name, output)
    assert place.directory is not None
    return place.directory


def test_a_recording_is_dated_and_git_ignores_it(here: Path) -> None:
    place = layout.make("train")
    assert place.notes == ()
    assert place.directory is not None
    assert place.directory.parent == here / ".memtrace"
    stamp, _, name = place.directory.name.rpartition("-")
    assert name == "train"
    assert len(stamp) == len("20261201-1432")
    assert (here / ".memtrace" / ".gitignore").read_text() == "*\n"


def test_two_at_once_do_not_share_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.time, "strftime", lambda _form: "20261201-1432")
    names = [made().name for _ in range(3)]
    assert names == ["20261201-1432-train", "20261201-1432-train-2", "20261201-1432-train-3"]


def test_the_folder_of_recordings_may_be_named(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path / "all of them"))
    assert made().parent == tmp_path / "all of them"
    assert not (tmp_path / "all of them" / ".gitignore").exists()
    assert list(here.iterdir()) == []


def test_output_is_taken_as_it_is(here: Path) -> None:
    assert layout.make("train", Path("out/deep")) == layout.Place(here / "out" / "deep")
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").touch()
    assert layout.make("train", Path("mine")) == layout.Place(here / "mine")


def test_no_recording_is_written_over(here: Path) -> None:
    first = made(output=Path("out"))
    (first / "rank0000.pickle").write_bytes(b"precious")
    place = layout.make("train", Path("out"))
    assert place.directory == here / "out-2"
    assert place.notes == (f"recording in {here / 'out-2'}",)
    assert (first / "rank0000.pickle").read_bytes() == b"precious"


def test_the_bootstrap_is_of_this_version(here: Path) -> None:
    bootstrap = made() / layout.BOOTSTRAP
    source = Path(layout.__file__).parent
    names = {file.name for file in (source / "inside").glob("*.py")}
    assert {"__init__.py", "settings.py"} <= names
    assert {file.name for file in (bootstrap / layout.PACKAGE).iterdir()} == names
    assert (bootstrap / "sitecustomize.py").read_bytes() == (source / "sitecustomize.py").read_bytes()


@pytest.mark.parametrize("output", [NOWHERE, None])
def test_where_it_cannot_be_written_it_goes_elsewhere(
    output: Path | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(NOWHERE))
    place = layout.make("train", output)
    assert place.directory is not None
    assert place.directory.parent == paths.recent_index().parent / "recordings"
    assert place.notes[0] == f"cannot record in {NOWHERE}: Not a directory"
    assert place.notes[1] == f"recording in {place.directory}"


def test_python_cannot_have_a_colon_in_its_path(here: Path) -> None:
    place = layout.make("train", here / f"a{os.pathsep}b")
    assert place.directory is not None
    assert os.pathsep not in str(place.directory)
    assert "PYTHONPATH" in place.notes[0]
    assert not (here / f"a{os.pathsep}b").exists()


def test_where_nothing_can_be_written_the_job_runs_unrecorded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(NOWHERE))
    monkeypatch.setattr(layout.tempfile, "mkdtemp", lambda prefix: os.mkdir(NOWHERE))
    place = layout.make("train", NOWHERE)
    assert place.directory is None
    assert len(place.notes) == 4
    assert place.notes[-1] == "nothing can be written: the job runs unrecorded"


def test_a_full_disk_is_left_as_it_was(here: Path, tiny_disk: Path) -> None:
    place = layout.make("train", tiny_disk / "out")
    assert place.directory is not None
    assert not place.directory.is_relative_to(tiny_disk)
    assert place.notes[0].endswith(": No space left on device")
    assert list(tiny_disk.iterdir()) == []


def test_meta_says_what_it_is_of(here: Path) -> None:
    directory = made()
    settings = Settings(str(directory), steps=(3, 5))
    layout.write_meta(directory, {"name": "train", "settings": layout.described(settings)})
    meta = json.loads((directory / "meta.json").read_text())
    assert meta["schema"] == META_SCHEMA == "memtrace.recording/1"
    assert meta["settings"]["steps"] == [3, 5]
    assert str(here) not in (directory / "meta.json").read_text()


def test_snapshots_are_packed_and_read_the_same(tmp_path: Path, unpacked: object) -> None:
    plain = unpacked(Path("fixtures/mlp-adamw.pickle.xz").absolute())  # type: ignore[operator]
    names = ["rank0000.pickle", "rank0012-2.pickle", "rank0000.oom.pickle"]
    for name in [*names, "other.pickle", ".rank0000.pickle.1.tmp"]:
        (tmp_path / name).write_bytes(plain.read_bytes())
    assert layout.pack(tmp_path) == []
    assert {file.name for file in tmp_path.iterdir()} == {
        *(f"{name}.zst" for name in names), "other.pickle", ".rank0000.pickle.1.tmp"
    }  # fmt: skip
    packed = tmp_path / "rank0000.pickle.zst"
    assert packed.stat().st_size < plain.stat().st_size / 2
    assert read_snapshot(str(packed)).trace(0).size.tolist() == read_snapshot(str(plain)).trace(0).size.tolist()


def test_what_is_packed_is_not_packed_over(tmp_path: Path) -> None:
    (tmp_path / "rank0000.pickle").write_bytes(b"new")
    (tmp_path / "rank0000.pickle.zst").write_bytes(b"old")
    layout.pack(tmp_path)
    assert (tmp_path / "rank0000.pickle").read_bytes() == b"new"
    assert (tmp_path / "rank0000.pickle.zst").read_bytes() == b"old"


def test_what_cannot_be_packed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank0000.pickle").write_bytes(b"plain")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert layout.pack(tmp_path) == ["rank0000.pickle stays unpacked: No space left on device"]
    assert [file.name for file in tmp_path.iterdir()] == ["rank0000.pickle"]


def test_a_full_disk_does_not_cost_a_snapshot(tiny_disk: Path) -> None:
    content = os.urandom(40_000)
    (tiny_disk / "rank0000.pickle").write_bytes(content)
    assert layout.pack(tiny_disk) == ["rank0000.pickle stays unpacked: No space left on device"]
    assert [file.name for file in tiny_disk.iterdir()] == ["rank0000.pickle"]
    assert (tiny_disk / "rank0000.pickle").read_bytes() == content


def test_recent_recordings_are_listed_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    places = [tmp_path / str(number) for number in range(60)]
    for place in [*places, places[30]]:
        layout.remember(place)
    listed = json.loads(paths.recent_index().read_text())["recordings"]
    newest = [places[30], *(place for place in reversed(places) if place != places[30])]
    assert listed == [str(place) for place in newest[:50]]


def test_a_broken_index_is_not_the_jobs_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths.recent_index().parent.mkdir(parents=True)
    for content in ("{", "[]", '{"recordings": 3}'):
        paths.recent_index().write_text(content)
        layout.remember(tmp_path)
        assert json.loads(paths.recent_index().read_text()) == {"recordings": [str(tmp_path)]}
    monkeypatch.setenv("XDG_STATE_HOME", str(NOWHERE))
    layout.remember(tmp_path)


def test_what_was_made_for_nothing_is_removed(here: Path) -> None:
    layout.discard(made())
    assert list(here.iterdir()) == []
    kept = made()
    (kept / "log").touch()
    layout.discard(kept)
    assert [file.name for file in kept.iterdir()] == ["log"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["deepspeed", "--num_gpus", "8", "src/train.py", "--lr", "1"], "train"),
        (["torchrun", "-m", "pkg.finetune"], "finetune"),
        (["bash", "-c", "true"], "bash"),
        (["./run it.sh"], "run-it"),
        (["srun", "python", "-m", "torch.distributed.run", "a/b.py"], "b"),
        (["/opt/\x1b]52;c\x07"], "52-c"),
        ([".."], "job"),
        (["x" * 999 + ".py"], "x" * 40),
    ],
)
def test_a_recording_is_called_after_the_script(command: list[str], name: str) -> None:
    assert layout.name_of(command) == name
