"""Standard output that is full, closed or no longer read; Ctrl-C. In processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT

COMMAND = [sys.executable, "-m", "memtrace", "blame", "--by", "block", "--json"]
SNAPSHOT = "fixtures/opt13b-zero3-deepspeed0.18.9.pickle.xz"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*COMMAND, SNAPSHOT], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert ran.returncode == 2
    assert ran.stderr.startswith("memtrace: error[output]: the answer cannot be written")
    assert len(ran.stderr.splitlines()) == 2


@pytest.mark.parametrize("command", [[*COMMAND, SNAPSHOT], [sys.executable, "-m", "memtrace", "verify", SNAPSHOT]])
def test_a_reader_that_leaves_is_no_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_closed_streams() -> None:
    ran = subprocess.run(["sh", "-c", '"$0" -m memtrace info "$1" >&-', sys.executable, SNAPSHOT],
                         stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.startswith("memtrace: error[output]: ")
    ran = subprocess.run(["sh", "-c", '"$0" -m memtrace info none.pickle 2>&-', sys.executable],
                         stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)  # fmt: skip
    assert (ran.returncode, ran.stdout) == (3, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_job_is_recorded_whatever_is_closed(closed: str, tmp_path: Path) -> None:
    job = f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(3)"
    command = f'exec "$0" -m memtrace record -o "$1" -- "$0" -c "$2" {closed}'
    ran = subprocess.run(["sh", "-c", command, sys.executable, str(tmp_path / "out"), job], cwd=ROOT, check=False)
    assert (ran.returncode, (tmp_path / "ran").exists()) == (3, True)


def test_an_encoding_without_our_characters(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    ran = subprocess.run(
        [sys.executable, "-m", "memtrace", "info", str(tmp_path / "ünïcode.pickle")],
        capture_output=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert ran.returncode == 3
    assert ran.stderr.isascii()
    assert b"Traceback" not in ran.stderr


def test_ctrl_c_is_130_without_a_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = subprocess.Popen([sys.executable, "-m", "memtrace", "blame", str(pipe)], stderr=subprocess.PIPE, cwd=ROOT,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    writer = os.open(pipe, os.O_WRONLY)  # returns once the child has opened it to read
    os.write(writer, b"\x80\x04}\x94")
    child.send_signal(signal.SIGINT)
    _, error = child.communicate()
    os.close(writer)
    assert child.returncode == 130
    assert error.strip() == b""
