"""What `memtrace dryrun` refuses, before anything is written; and how a dry run is marked."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path

import pytest
from running import memtrace

from memtrace.cli import dryrun_text
from memtrace.dryrun import launch
from memtrace.errors import DryRunError
from memtrace.gpus import find
from memtrace.record import layout

GiB = 1 << 30


def refused(*words: str) -> str:
    """What is said; usage errors and things that cannot be done end with 2."""
    done = memtrace("dryrun", *words)
    assert done.code == 2, (done.out, done.err)
    assert done.out == ""
    return done.err


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path / ".memtrace"))
    monkeypatch.setenv("MEMTRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "working_gpu", lambda: None)
    return tmp_path


def test_nothing_to_run() -> None:
    assert "there is no command to run" in refused()


def test_a_gpu_that_nobody_knows() -> None:
    said = refused("--gpu", "H2000", "--", "python", "train.py")
    assert "H2000" in said
    assert "H200" in said.replace("H2000", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rank", "8", "--world", "8"), "ranks 0 to 7, not 8"),
        (("--rank", "1"), "rank 0 only, not 1"),
        (("--rank", "a"), "no list of ranks"),
        (("--sm", "nine"), "no compute capability"),
        (("--assume", "mask=2"), "share from 0 to 1"),
        (("--try", "stage"), "KEY=VALUE"),
        (("--gpu-memory", "much"), "much"),
        (("--steps", "-1"), "-1"),
    ],
)
def test_options_that_mean_nothing(words: tuple[str, ...], said: str, elsewhere: Path) -> None:
    assert said in refused(*words, "--", sys.executable, "train.py")
    assert not (elsewhere / ".memtrace").exists()


@pytest.mark.parametrize("has_torch", [False, True])
def test_an_interpreter_without_a_cuda_build(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, *, has_torch: bool
) -> None:
    """A bare one, with a CPU build or none: that of the tests may have any torch."""
    venv.create(elsewhere / "bare", with_pip=False, symlinks=True)
    (elsewhere / "site" / "torch").mkdir(parents=True)
    (elsewhere / "site" / "torch" / "__init__.py").touch()
    (elsewhere / "site" / "torch" / "version.py").write_text("__version__ = '2.99.0+cpu'\ncuda = None\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if has_torch:
        monkeypatch.setenv("PYTHONPATH", str(elsewhere / "site"))
    said = refused("--", str(elsewhere / "bare" / "bin" / "python"), "train.py")
    assert ("a CPU build cannot do it" if has_torch else "has no torch") in said
    assert "Install a build of torch for CUDA" in said.replace("\n", " ")
    assert "ENVIRONMENT/bin/python" in said or "has no torch" not in said
    assert not (elsewhere / ".memtrace").exists()


def test_a_cache_that_must_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_NO_CACHE", "1")
    assert "no cache directory for the device library" in refused("--", sys.executable, "train.py")


def test_a_working_gpu_is_not_shadowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "working_gpu", lambda: "/dev/nvidia0")
    said = refused("--", sys.executable, "train.py")
    assert "has a working GPU (/dev/nvidia0)" in said
    assert "--beside-gpu" in said
    assert "has a working GPU" not in refused("--beside-gpu", "--", sys.executable, "train.py")


def test_the_environment_of_a_rank() -> None:
    standin = launch.Standin(Path("/c/libcuda.so.1"), find("A100-40"), Path("/c/kernels"), (4096, 8192))
    given = {"LD_PRELOAD": "/lib/theirs.so", "CUDA_VISIBLE_DEVICES": "", "HOME": "/h"}
    found = launch.environment(standin, given, world=8, rank=3, devices=8)
    assert found["LD_PRELOAD"] == "/c/libcuda.so.1:/lib/theirs.so"
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert (found["RANK"], found["WORLD_SIZE"], found["HOME"]) == ("3", "8", "/h")
    assert (found["MEMTRACE_GPU_SM"], found["MEMTRACE_GPU_COUNT"]) == ("80", "8")
    assert found["MEMTRACE_GPU_DNN_SPANS"] == "4096,8192"
    assert given["LD_PRELOAD"] == "/lib/theirs.so"


# What is shown afterwards.


def leave(directory: Path, rank: int = 0, *, reserved: int, reason: str = "exit", **more: object) -> None:
    document = {
        "schema": "memtrace.sidecar/1", "rank": rank, "world": 1, "reason": reason, "complete": True, "steps": 2,
        "device": {"index": 0}, "notes": [], "phases": [], "oom": None,
        "stats": {"allocated_bytes.all.peak": reserved, "reserved_bytes.all.peak": reserved},
        "dryrun": {"gpu": "NVIDIA H200", "outside_bytes": GiB, "assumptions": [
            {"code": "value", "text": "norm of large tensors, a number", "count": 2, "where": None},
            {"code": "mask", "text": "50% of a mask", "count": 1, "where": "t.py:3 f"}]}, **more,
    }  # fmt: skip
    (directory / f"rank{rank:04d}.json").write_text(json.dumps(document))
    (directory / f"rank{rank:04d}.pickle.zst").write_bytes(b"")


@pytest.fixture
def directory() -> Path:
    place = layout.make("train")
    assert place.directory is not None
    return place.directory


def test_the_room_is_that_of_the_fullest_rank(directory: Path) -> None:
    leave(directory, 0, reserved=10 * GiB)
    leave(directory, 1, reserved=20 * GiB)
    found = dryrun_text.answer(directory, find("H200"), has_failed=False)
    assert (found.fits, found.room_bytes) == (True, find("H200").capacity_bytes - 21 * GiB)
    assert [(one.code, one.count) for one in found.assumptions] == [("mask", 2), ("value", 4)]


def test_a_job_that_ran_out_of_memory_does_not_fit(directory: Path) -> None:
    leave(directory, reserved=GiB, reason="oom", oom={"asked_bytes": 1})
    found = dryrun_text.answer(directory, find("H200"), has_failed=True)
    assert (found.fits, found.room_bytes) == (False, None)
    assert "does not fit" in dryrun_text.verdict(found)


def test_a_job_that_failed_otherwise_is_no_answer(directory: Path) -> None:
    leave(directory, reserved=GiB, reason="exception", exception="ValueError: x")
    found = dryrun_text.answer(directory, find("H200"), has_failed=True)
    assert (found.fits, found.room_bytes) == (None, None)
    assert "was not seen" in dryrun_text.verdict(found)


def test_an_error_that_the_job_survived_is_no_verdict(directory: Path) -> None:
    leave(directory, reserved=GiB, oom={"asked_bytes": 1})
    assert dryrun_text.answer(directory, find("H200"), has_failed=False).fits is True


def test_ls_marks_it(directory: Path) -> None:
    leave(directory, reserved=GiB)
    assert "(dry run)" in memtrace("ls").out
    assert memtrace("ls", "--json").document["data"]["recordings"][0]["dry_run"] is True


def test_the_refusal_has_its_exit_code() -> None:
    assert (DryRunError.code, DryRunError.exit_code) == ("dryrun", 2)
