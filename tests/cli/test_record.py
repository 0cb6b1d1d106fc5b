"""`memtrace record`, `ls` and `path`: what they ask, what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jobs import only_recording, record
from recordings import ROOT
from running import memtrace

from memtrace.cli import COMMANDS, record_text
from memtrace.cli import record as record_command
from memtrace.record import launch, layout
from memtrace.record.inside.settings import Settings, decode

GiB = 1 << 30
NO_CUDA = "no CUDA device in rank {}: nothing to record"


def sidecar(rank: int, allocated: int = 0, reserved: int = 0, **more: Any) -> dict[str, Any]:
    """What the recorder leaves beside a snapshot."""
    return {
        "schema": "memtrace.sidecar/1", "rank": rank, "world": 8, "reason": "exit", "complete": True, "steps": 12,
        "device": {"index": 0}, "notes": [], "phases": [], "oom": None,
        "stats": {"allocated_bytes.all.peak": allocated, "reserved_bytes.all.peak": reserved}, **more,
    }  # fmt: skip


def leave(directory: Path, document: dict[str, Any], snapshot: bytes | None = b"") -> None:
    """Files of one rank; without a snapshot when that is None."""
    stem = f"rank{document['rank']:04d}"
    (directory / f"{stem}.json").write_text(json.dumps(document))
    if snapshot is not None:
        (directory / f"{stem}.pickle.zst").write_bytes(snapshot)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty recording in the usual place of the current directory."""
    monkeypatch.chdir(tmp_path)
    place = layout.make("train")
    assert place.directory is not None
    return place.directory


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Reports a recording; the lines on stderr, with stdout empty."""

    def report(directory: Path, *, with_moments: bool = False, quiet: bool = False) -> list[str]:
        record_text.report(directory, with_moments=with_moments, quiet=quiet)
        streams = capsys.readouterr()
        assert streams.out == ""
        return streams.err.splitlines()

    return report


def settings_of(*arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """What `memtrace record ARGUMENTS -- true` would hand to the ranks."""
    monkeypatch.chdir(tmp_path)
    handed: list[Settings | None] = []

    def run(_command: Any, settings: Settings | None) -> launch.Outcome:
        handed.append(settings)
        return launch.Outcome(0, None, 1, 2)

    monkeypatch.setattr(launch, "run", run)
    ran = CliRunner().invoke(record_command.command, [*arguments, "--", "true"], standalone_mode=False)
    assert ran.exception is None, ran.exception
    (found,) = handed
    assert found is not None
    return found


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_of(monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert settings == Settings(settings.directory, name="true")
    assert Path(settings.directory).is_absolute()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--max-entries 7", "max_entries", 7),
        ("--stacks all", "stacks", "all"),
        ("--single-thread-backward", "threaded_backward", False),
        ("--modules", "modules", True),
        ("--on oom", "on", ("oom",)),
        ("--on peak", "on", ("exit", "oom", "signal", "peak")),
        ("--on signal:USR1,exit --on peak", "on", ("exit", "signal:USR1", "peak")),
        ("--every 100", "every", 100),
        ("--steps 3:6", "steps", (3, 6)),
        ("--steps 4", "steps", (4, 4)),
        ("--skip-first 2", "skip_first", 2),
        ("--duration 90", "duration_s", 90.0),
        ("--duration 90s", "duration_s", 90.0),
        ("--duration 1.5m", "duration_s", 90.0),
        ("--ranks 7,0,7", "ranks", (0, 7)),
        ("--ranks all", "ranks", "all"),
        ("--grace 5", "grace_s", 5.0),
        ("--dump-jobs 2", "dump_jobs", 2),
        ("--plain-paths", "plain_paths", True),
        ("--plain-host", "plain_host", True),
        ("--simulate-world 8", "world", 8),
        ("--simulate-world 8 --rank 3", "rank", 3),
        ("--name 'my run'", "name", "my-run"),
    ],
)
def test_options_reach_the_ranks(
    arguments: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of(*shlex.split(arguments), monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert getattr(settings, field) == value
    assert getattr(Settings("/"), field) != value


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("", "memtrace record -- python train.py"),
        ("--steps 5:3 -- true", "did you mean 3:5?"),
        ("--steps soon -- true", "write 3:5"),
        ("--duration 3d -- true", "write 90, 90s, 5m or 1h"),
        ("--ranks 0-7 -- true", "write 0,7, all or auto"),
        ("--on crash -- true", "exit, oom, signal, peak"),
        ("--on signal:NONE -- true", "signal:USR1"),
        ("--on signal:KILL -- true", "signal:USR1"),
        ("--on exit, -- true", "exit, oom, signal, peak"),
        ("--max-entries 0 -- true", "x>=1"),
        ("--rank 1 -- true", "--simulate-world"),
        ("--simulate-world 4 --rank 4 -- true", "ranks 0 to 3"),
        ("--simulate-world 1 -- true", "x>=2"),
        ("--stack all -- true", "--stacks"),
    ],
)
def test_bad_options_are_usage_and_nothing_runs(
    arguments: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("it ran"))
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    ran = memtrace("record", *shlex.split(arguments))
    assert ran.code == 2
    assert hint in ran.err
    assert "hint: " in ran.err
    assert list(tmp_path.iterdir()) == []


JOB = """
import json, os, pathlib, shutil, sys
here = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
snapshot, *documents = sys.argv[1:]
for number, document in enumerate(documents):
    (here / f"rank{number:04d}.json").write_text(document)
    shutil.copy(snapshot, here / f"rank{number:04d}.pickle")
print("trained")
sys.exit(3)
"""


def test_a_job_leaves_a_recording(tmp_path: Path, unpacked: Callable[[Path], Path]) -> None:
    """A job of two ranks, whose snapshots are a real one: packed, listed, found."""
    plain = unpacked(ROOT / "fixtures" / "mlp-adamw.pickle.xz")
    (tmp_path / "train it.py").write_text(JOB)
    documents = [json.dumps(sidecar(0, 5 * GiB, 6 * GiB)), json.dumps(sidecar(1, 7 * GiB, 8 * GiB, complete=False))]
    ran = record("--", "python3", "train it.py", plain, *documents, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (3, "trained\n")
    made = only_recording(tmp_path)
    assert made.name.endswith("-train-it")
    assert {file.name for file in made.iterdir()} >= {"rank0000.pickle.zst", "rank0001.pickle.zst", "meta.json"}
    assert not list(made.glob("*.pickle"))
    lines = ran.stderr.splitlines()
    assert lines[0].startswith(f"memtrace: recording to .memtrace/{made.name}: at most 1,000,000 events a rank")
    assert re.fullmatch(rf"memtrace: 2 ranks recorded in .memtrace/{made.name} \(.*, not from the .*\)", lines[1])
    assert lines[2].split() == "rank steps peak allocated peak reserved at events file".split()
    assert re.split(r" {2,}", lines[3].strip()) == [
        "1", "12", "7.00 GiB", "8.00 GiB", "the optimizer's part of step 0", "633", "rank0001.pickle.zst", "← highest"
    ]  # fmt: skip
    assert lines[4].split()[:2] == ["0", "12"]
    assert lines[5].startswith("memtrace: next:  memtrace blame --peak")
    meta = json.loads((made / "meta.json").read_text())
    assert (meta["exit_code"], meta["signal"], meta["ranks"], meta["command"]) == (3, None, [0, 1], ["python3"])
    assert meta["started_us"] < meta["ended_us"]


def test_the_next_commands_work(
    directory: Path, said: Callable[..., list[str]], unpacked: Callable[[Path], Path]
) -> None:
    plain = unpacked(ROOT / "fixtures" / "mlp-adamw.pickle.xz")
    leave(directory, sidecar(0, GiB, GiB), None)
    (directory / "rank0000.pickle").write_bytes(plain.read_bytes())
    words = said(directory)[-1].partition("next:")[2]
    commands = [shlex.split(one) for one in re.split(r" {2,}", words.strip())]
    assert [one[:2] for one in commands] == [["memtrace", "blame"], *(
        ["memtrace", name] for name in ("advise", "tui", "ranks", "verify") if name in COMMANDS
    )]  # fmt: skip
    assert shlex.split(commands[-1][-1]) == [str(directory.relative_to(Path.cwd()))]


def test_a_path_is_named_where_the_recording_would_not_be_found(
    tmp_path: Path, directory: Path, said: Callable[..., list[str]]
) -> None:
    elsewhere = tmp_path / "some where"
    elsewhere.mkdir()
    leave(elsewhere, sidecar(0, GiB, GiB))
    leave(directory, sidecar(0, GiB, GiB))
    assert "memtrace blame --peak 'some where'" in said(elsewhere)[-1]
    assert "memtrace blame --peak  " in said(directory)[-1] + "  "


def test_at_most_16_ranks_are_shown(directory: Path, said: Callable[..., list[str]]) -> None:
    for rank in range(20):
        leave(directory, sidecar(rank, rank * GiB + 1, rank * GiB + 1))
    lines = said(directory)
    assert lines[0].startswith("memtrace: 20 ranks recorded")
    table = [line.split() for line in lines[2:18]]
    assert [row[0] for row in table] == [str(rank) for rank in range(19, 3, -1)]
    assert [" ".join(row[-2:]) for row in table].count("← highest") == 1
    assert lines[18] == "memtrace: 4 more ranks, peaks from 1 B to 3.00 GiB"


def test_a_rank_without_cuda_says_so(directory: Path, said: Callable[..., list[str]]) -> None:
    for rank in range(2):
        leave(directory, sidecar(rank, device=None, stats=None, notes=["other", NO_CUDA.format(rank)]), None)
    assert said(directory) == ["memtrace: " + NO_CUDA.format(rank) for rank in range(2)]
    assert said(directory, quiet=True) == said(directory)


def test_a_rank_whose_snapshot_is_missing_says_why(directory: Path, said: Callable[..., list[str]]) -> None:
    leave(directory, sidecar(0, GiB, GiB))
    leave(directory, sidecar(3, notes=["the disk is full\x1b]52;c\x07"]), None)
    assert "memtrace: rank 3 left no snapshot: the disk is full\ufffd]52;c\ufffd" in said(directory)


def test_a_rolling_snapshot_is_a_report(directory: Path, said: Callable[..., list[str]]) -> None:
    """All that kill -9 leaves of a rank."""
    document = json.dumps(sidecar(2, GiB, GiB, reason="every"))
    (directory / "rank0002.every.json").write_text(document)
    (directory / "rank0002.every.pickle.zst").touch()
    assert layout.reported(directory) == [2]
    headline, _, row, *_ = said(directory)
    assert headline.startswith("memtrace: 1 rank recorded")
    assert row.split() == ["2", "12", "1.00", "GiB", "1.00", "GiB", "rank0002.every.pickle.zst"]


def test_out_of_memory_is_told(directory: Path, said: Callable[..., list[str]]) -> None:
    phases = [
        {"phase": "forward", "step": 3, "begin_us": 10, "end_us": 20, "source": "torch"},
        {"phase": "backward", "step": 3, "begin_us": 20, "end_us": 30, "source": "torch"},
        {"phase": "step", "step": 3, "begin_us": 31, "end_us": 40, "source": "torch"},
    ]
    oom = {"device": 0, "asked_bytes": 2 * GiB, "free_bytes": GiB, "total_bytes": 80 * GiB, "step": 3, "time_us": 25}
    leave(directory, sidecar(5, GiB, GiB, reason="oom", oom=oom, phases=phases))
    told = "memtrace: rank 5: out of memory in backward of step 3, asked 2.00 GiB, 1.00 GiB free on the device"
    assert told + ("; memtrace oom -r 5" if "oom" in COMMANDS else "") in said(directory)


@pytest.mark.parametrize(
    "document",
    [
        {"rank": 0}, {"rank": 0, "stats": [], "oom": [], "phases": {}, "notes": "no", "steps": "many"},
        {"rank": 0, "stats": {"allocated_bytes.all.peak": "x"}, "oom": {"time_us": 5, "step": -1}, "phases": [3, {}]},
    ],
)  # fmt: skip
def test_a_sidecar_may_say_anything(document: dict[str, Any], directory: Path, said: Callable[..., list[str]]) -> None:
    leave(directory, document)
    assert said(directory, with_moments=True)[0].startswith("memtrace: 1 rank recorded")


def test_quiet_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    ran = record("-q", "--", "python3", "job.py", os.devnull, json.dumps(sidecar(0, 1, 1)), cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (3, "")


@pytest.mark.parametrize(
    "broken", [(record_text, "report"), (layout, "pack"), (layout, "make"), (layout, "write_meta")]
)
@pytest.mark.parametrize("error", [RuntimeError("ours"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_bug_of_ours_does_not_change_the_exit_code(
    broken: tuple[Any, str], error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(*broken, fail)
    monkeypatch.setattr(launch, "run", lambda *_: launch.Outcome(3, None, 1, 2))
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    ran = memtrace("record", "--", "true")
    assert ran.code == 3
    assert ran.err


def test_the_command_is_kept_only_if_asked(tmp_path: Path) -> None:
    record("--", "sh", "-c", "true secret", cwd=tmp_path)
    assert "secret" not in (only_recording(tmp_path) / "meta.json").read_text()
    record("--plain-paths", "-o", "plain", "--", "sh", "-c", "true secret", cwd=tmp_path)
    meta = json.loads((tmp_path / "plain" / "meta.json").read_text())
    assert meta["command"] == ["sh", "-c", "true secret"]


def test_a_simulated_world_says_what_it_is_not(tmp_path: Path) -> None:
    ran = record("--simulate-world", "8", "--", "true", cwd=tmp_path)
    assert "a simulated world of 8 ranks, this one rank 0" in ran.stderr
    assert "meaningless" in ran.stderr


def test_what_is_handed_over_is_in_the_environment(tmp_path: Path) -> None:
    ran = record("--every", "7", "--", "sh", "-c", "echo $MEMTRACE_RECORD; echo $PYTHONMEMTRACE_RECORD", cwd=tmp_path)
    first, second = ran.stdout.split()
    settings = decode(first)
    assert first == second
    assert settings is not None
    assert settings.every == 7
    assert Path(settings.directory) == only_recording(tmp_path)


def test_path_is_of_the_newest_and_of_the_highest(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(directory.parent))
    assert memtrace("path").code == 4
    leave(directory, sidecar(0, GiB, GiB))
    leave(directory, sidecar(3, 2 * GiB, 2 * GiB))
    assert memtrace("path").out == f"{directory / 'rank0003.pickle.zst'}\n"
    assert memtrace("path", "-r", 0).out == f"{directory / 'rank0000.pickle.zst'}\n"
    assert memtrace("path", "--directory").out == f"{directory}\n"
    unknown = memtrace("path", "-r", 5)
    assert (unknown.code, unknown.out) == (2, "")


def test_ls_lists_what_there_is(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(directory.parent))
    layout.write_meta(
        directory, {"name": "tr\x1bain", "started_us": 2_000_000_000_000_000, "exit_code": 3, "signal": None}
    )
    leave(directory, sidecar(0, GiB, GiB), b"12345")
    leave(directory, sidecar(1, device=None, stats=None), None)
    older = layout.make("older").directory
    assert older is not None
    layout.write_meta(older, {"name": "older", "started_us": 1_000_000_000_000_000, "exit_code": None, "signal": 9})
    leave(older, sidecar(0, 2 * GiB, GiB))
    (directory.parent / "no recording").mkdir()
    ran = memtrace("ls")
    assert ran.code == 0
    rows = [re.split(r" {2,}", line) for line in ran.out.splitlines()]
    assert rows[0] == ["when", "name", "ranks", "peak", "size", "ended", "path"]
    assert rows[1][0].startswith("2033-05-")
    assert [row[1:4] for row in rows[1:]] == [["tr\ufffdain", "1", "1.00 GiB"], ["older", "1", "2.00 GiB"]]
    assert [row[5] for row in rows[1:]] == ["with 3", "by signal 9"]
    document = memtrace("ls", "--json").document
    assert (document["schema"], document["snapshot"]) == ("memtrace.ls/1", None)
    first, second = document["data"]["recordings"]
    size = sum(file.stat().st_size for file in directory.glob("rank*"))
    assert first == {
        "path": str(directory), "name": "tr\x1bain", "started_us": 2_000_000_000_000_000, "ended_us": None,
        "exit_code": 3, "signal": None, "ranks": [0], "peak_bytes": GiB, "bytes": size,
        "dry_run": False,
    }  # fmt: skip
    assert second["signal"] == 9


def test_ls_of_nothing_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path))
    ran = memtrace("ls")
    assert (ran.code, ran.out) == (0, "")
    assert "no recording found here" in ran.err
    assert memtrace("ls", "--json").document["data"] == {"recordings": []}
