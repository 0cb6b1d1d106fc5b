"""The job under `memtrace record` cannot tell: streams, signals, exit codes, environment."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import DEADLINE_SECONDS, RECORD, read_until, record, started

from memtrace.record import launch
from memtrace.record.inside.settings import TWIN, VARIABLE, Settings, decode

COUNTING = """
import signal, sys
counts = {}
def count(number, frame):
    counts[number] = counts.get(number, 0) + 1
    print("got", number, flush=True)
    if number == signal.SIGTERM:
        print("counts", *(f"{one}:{count}" for one, count in sorted(counts.items())), "end", flush=True)
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, count)
print("ready", flush=True)
while True:
    signal.pause()
"""
"""A job that says which signals it got, and how often, and ends with 7 at SIGTERM."""


@pytest.fixture
def in_a_terminal(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The counting job, recorded in the foreground of a terminal of its own; with the terminal's other end."""
    ours, its = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(its), os.O_RDWR))  # the first one that a session's leader opens is its own

    process = started(
        "--", sys.executable, "-c", COUNTING, cwd=tmp_path, stdin=its, stdout=its, stderr=its, preexec_fn=take_terminal
    )
    os.close(its)
    try:
        read_until(ours, b"ready")
        yield process, ours
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


@contextlib.contextmanager
def counting(cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The counting job, recorded, in a process group of its own; its handlers are in place."""
    process = started("--", sys.executable, "-c", COUNTING, cwd=cwd, start_new_session=True)
    assert process.stdout is not None
    try:
        read_until(process.stdout.fileno(), b"ready")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def output(process: subprocess.Popen[bytes], until: bytes) -> str:
    assert process.stdout is not None
    return read_until(process.stdout.fileno(), until).decode()


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_jobs(code: int, tmp_path: Path) -> None:
    ran = record("--", sys.executable, "-c", f"raise SystemExit({code})", cwd=tmp_path)
    assert ran.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT])
def test_a_job_that_dies_by_a_signal_takes_us_along(number: signal.Signals, tmp_path: Path) -> None:
    ran = record("--", "sh", "-c", f"kill -{int(number)} $$", cwd=tmp_path)
    assert ran.returncode == -number
    assert not list(tmp_path.glob("core*"))


def test_what_is_not_there_is_127_and_leaves_nothing(tmp_path: Path) -> None:
    ran = record("--", "no-such-program", cwd=tmp_path)
    assert ran.returncode == 127
    assert "memtrace: error[command]: no-such-program: command not found\n" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [("#!/bin/sh\n", 0o644, "Permission denied"), ("#!/no/such/sh\n", 0o755, "first line"), ("a\0b", 0o755, "format")],
)
def test_what_cannot_be_executed_is_126(content: str, mode: int, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text(content)
    script.chmod(mode)
    ran = record("--", script, cwd=tmp_path)
    assert ran.returncode == 126
    assert reason in ran.stderr


def test_a_script_without_a_first_line_is_the_shells(tmp_path: Path) -> None:
    script = tmp_path / "my job.sh"
    script.write_text('echo "$0: $1"\nexit 5\n')
    script.chmod(0o755)
    ran = record("./my job.sh", "a b", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (5, "./my job.sh: a b\n")


def test_both_streams_are_the_jobs(tmp_path: Path) -> None:
    ran = record("--", "sh", "-c", "cat; echo out; echo err >&2", cwd=tmp_path)
    assert ran.stdout == "out\n"
    assert [line for line in ran.stderr.splitlines() if not line.startswith("memtrace: ")] == ["err"]


def test_descriptors_are_inherited(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = started(
        "--", sys.executable, "-c", f"import os; os.write({writer}, b'through')", cwd=tmp_path, pass_fds=[writer]
    )
    os.close(writer)
    with open(reader) as stream:
        assert stream.read() == "through"
    process.communicate()
    assert process.returncode == 0


def test_words_arrive_as_they_are(tmp_path: Path) -> None:
    words = ["a b", "", "--", "-q", "*", "é", "--json"]
    code = "import json, sys; json.dump(sys.argv[1:], sys.stdout)"
    for separator in (["--"], []):
        ran = record(*separator, sys.executable, "-c", code, *words, cwd=tmp_path)
        assert ran.stdout == '["a b", "", "--", "-q", "*", "\\u00e9", "--json"]'


def test_the_environment_has_ours_first() -> None:
    settings = Settings("/runs/my job", every=5)
    changed = launch.environment(settings, {"PYTHONPATH": "/a:/b", "HOME": "/h"})
    assert changed["PYTHONPATH"] == "/runs/my job/.bootstrap:/a:/b"
    assert changed["HOME"] == "/h"
    assert decode(changed[VARIABLE]) == decode(changed[TWIN]) == settings
    for before in ({}, {"PYTHONPATH": ""}):
        assert launch.environment(settings, before)["PYTHONPATH"] == "/runs/my job/.bootstrap"


def test_a_script_of_a_simulated_world_knows_its_rank() -> None:
    settings = Settings("/runs/a", world=8, rank=7)
    assert launch.environment(settings, {}, ["python3.12", "train.py"])["RANK"] == "7"
    assert launch.environment(settings, {}, ["python", "train.py"])["WORLD_SIZE"] == "8"
    for command, one in ((["torchrun", "train.py"], settings), (["python", "train.py"], Settings("/runs/a"))):
        assert "RANK" not in launch.environment(one, {}, command)


def test_the_recorder_is_in_every_python_below(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    code = "import sys; print('memtrace_inside' in sys.modules, any('.bootstrap' in one for one in sys.path))"
    ran = record("--", "sh", "-c", f'"{sys.executable}" -c "{code}"; exec "{sys.executable}" -c "{code}"', cwd=folder)
    assert ran.stdout == "True False\n" * 2


def test_a_job_unrecorded_has_its_environment(tmp_path: Path) -> None:
    nowhere = os.devnull + "/x"
    code = "import os; print(sorted(name for name in os.environ if 'MEMTRACE_RECORD' in name))"
    blocked = {"XDG_STATE_HOME": nowhere, "MEMTRACE_DIR": nowhere, "TMPDIR": nowhere}
    ran = record("--", sys.executable, "-c", code, cwd=tmp_path, env=blocked)
    assert ran.returncode == 0
    assert "memtrace: cannot record in /dev/null/x: Not a directory\n" in ran.stderr


def test_what_is_sent_to_us_alone_is_passed_on_once(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
            output(process, f"got {int(number)}\n".encode())
        process.send_signal(signal.SIGTERM)
        assert "counts 1:1 2:1 10:1 15:1 end" in output(process, b"end")
        assert process.wait() == 7


def test_what_is_sent_to_the_group_is_not_passed_on(tmp_path: Path) -> None:
    """As Slurm does, timeout(1), and a shell that hangs up."""
    with counting(tmp_path) as process:
        for number in (signal.SIGHUP, signal.SIGINT):
            os.killpg(process.pid, number)
            output(process, f"got {int(number)}\n".encode())
        process.send_signal(signal.SIGTERM)
        assert "counts 1:1 2:1 15:1 end" in output(process, b"end")
        assert process.wait() == 7


def test_ctrl_c_reaches_the_job_once(in_a_terminal: tuple[subprocess.Popen[bytes], int]) -> None:
    process, terminal = in_a_terminal
    os.write(terminal, b"\x03")
    read_until(terminal, b"got 2\r\n")
    process.send_signal(signal.SIGTERM)
    assert b"counts 2:1 15:1 end" in read_until(terminal, b"end")
    assert process.wait() == 7


def test_ctrl_c_ends_a_job_that_does_not_mind(tmp_path: Path) -> None:
    process = started(
        "--", sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()",
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    output(process, b"ready")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert said.count(b"KeyboardInterrupt") == 1, "the job's own traceback, and none of ours"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_ctrl_z_stops_the_job_and_fg_goes_on(tmp_path: Path) -> None:
    job = (
        "import signal; signal.signal(signal.SIGCONT, lambda *_: print('on' + 'ward', flush=True)); "
        "print('rea' + 'dy', flush=True); signal.pause()"
    )
    words = shlex.join([*RECORD, "-q", "--", sys.executable, "-c", job])
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, words.encode() + b"\n")
        read_until(terminal, b"ready")
        os.write(terminal, b"\x1a")
        read_until(terminal, b"Stopped")
        os.write(terminal, b"fg\n")
        read_until(terminal, b"onward")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def test_the_job_has_the_mask_and_the_handlers_that_we_were_given(tmp_path: Path) -> None:
    code = (
        "import signal; print(sorted(map(int, signal.pthread_sigmask(0, []))), "
        "*(int(signal.getsignal(one) or 0) if not callable(signal.getsignal(one)) else 'own' "
        "for one in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)))"
    )

    def changed() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # some daemons
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    process = started("--", sys.executable, "-c", code, cwd=tmp_path, preexec_fn=changed)
    out, _ = process.communicate()
    assert out.decode() == f"[{int(signal.SIGUSR1)}] 1 0 1 0\n"
    assert process.returncode == 0


def test_the_exit_code_is_known_where_dead_children_are_ignored(tmp_path: Path) -> None:
    process = started(
        "--", "sh", "-c", "exit 9", cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    process.communicate()
    assert process.returncode == 9


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends children with their parent")
def test_killing_us_kills_the_job(tmp_path: Path) -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    process = started("--", sys.executable, "-c", code, cwd=tmp_path)
    job = int(output(process, b"\n"))
    process.kill()
    try:
        process.communicate(timeout=DEADLINE_SECONDS)  # ends when nobody holds the pipes any more
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGKILL)


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-I", "x.py"],
        ["python3.11", "-uE", "x.py"],
        ["srun", "-n", "2", "/usr/bin/python3", "-s", "-S", "-c"],
    ],
)
def test_an_interpreter_that_will_not_let_us_in_is_named(words: list[str]) -> None:
    assert (launch.obstacle(words) or "").startswith(("python -I", "python3.11 -uE", "python3 -S"))


@pytest.mark.parametrize(
    "words",
    [["python", "x.py", "-I"], ["python", "-m", "pkg", "-S"], ["python", "-c", "pass", "-E"], ["python", "-sP", "x.py"],
     ["python", "-Werror::EncodingWarning", "x.py"], ["deepspeed", "-I"], ["python"], []],
)  # fmt: skip
def test_others_are_not(words: list[str]) -> None:
    assert launch.obstacle(words) is None


@pytest.mark.parametrize("first", ["#!/usr/bin/python3 -I", "#!/usr/bin/env -S python3 -u -E", "#! /opt/x/python -S"])
def test_nor_do_scripts_hide_it(first: str, tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text(f"{first}\npass\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert "through which the recorder comes in" in (launch.obstacle([str(script)]) or "")
    script.write_text("#!/usr/bin/env python3\npass\n")
    assert launch.obstacle([str(script)]) is None


def test_it_is_said_before_and_after(tmp_path: Path) -> None:
    ran = record("--", sys.executable, "-I", "-c", "import sys; print(sys.flags.isolated)", cwd=tmp_path)
    assert ran.stdout == "1\n"
    said = ran.stderr.splitlines()
    assert "-I ignores PYTHONPATH" in said[0]
    assert said[-1].startswith("memtrace: no process of the command reported")


def test_no_user_site_is_no_obstacle(tmp_path: Path) -> None:
    code = "import sys; print('memtrace_inside' in sys.modules)"
    ran = record("--", sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONNOUSERSITE": "1"})
    assert ran.stdout == "True\n"
    assert "ignores" not in ran.stderr
