"""Signals in processes of their own, which do with the recorder's handlers what jobs do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memtrace.record import inside

DEADLINE_SECONDS = 60
PYTHON = os.environ.get("MEMTRACE_TEST_PYTHON", sys.executable)

# A process that uses CUDA has threads, and is warned of forking, without us.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore:This process:DeprecationWarning"}

BEGIN = """
import asyncio, ctypes, faulthandler, multiprocessing, os, signal, subprocess, sys, threading, time
from memtrace_inside import notes, signals as signals_module, watcher
from memtrace_inside.signals import Signals
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGTERM, SIGUSR1

notes.configure(sys.argv[1])
signals = Signals()
libc = ctypes.CDLL(None)
locked = ctypes.create_string_buffer(128)
begun = threading.Event()

def wrote(text):
    with open(os.path.join(sys.argv[1], "dumps"), "a") as file:
        file.write(text + "\\n")

def dump(reason, signum):
    assert signal.Signals(signum).name == reason
    begun.set()
    wrote(reason)
    return True

def send(signum=SIGTERM):
    os.kill(os.getpid(), signum)

def install(asked=(), grace_s=30.0, dump=dump, **options):
    assert signals.install(dump, grace_s, asked, **options)

def dumped(count=1):
    # Until so many dumps were written.
    while True:
        try:
            with open(os.path.join(sys.argv[1], "dumps")) as file:
                if len(file.read().split()) >= count:
                    return
        except OSError:
            pass
        time.sleep(0.005)

def wait():
    print("ready", flush=True)
    while True:
        time.sleep(600)

def stuck():
    # In C, and no signal gets the thread out of it.
    libc.pthread_mutex_lock(locked)
    print("ready", flush=True)
    libc.pthread_mutex_lock(locked)
"""


@dataclass
class Ended:
    """How a process ended, and what it left."""

    code: int
    out: str
    err: str
    dumps: list[str]
    log: str


@pytest.fixture(scope="session")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is in a rank."""
    folder = tmp_path_factory.mktemp("bootstrap")
    shutil.copytree(Path(inside.__file__).parent, folder / "memtrace_inside")
    return folder


class Processes:
    """Starts scripts, and kills what is left of them."""

    def __init__(self, bootstrap: Path, directory: Path) -> None:
        self._bootstrap, self.directory = bootstrap, directory
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *before: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*before, PYTHON, "-c", BEGIN + script, str(self.directory)],
            env={**os.environ, "PYTHONPATH": str(self._bootstrap), **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def ready(self, script: str, *before: str) -> subprocess.Popen[str]:
        """Started, and come to where it prints `ready`."""
        process = self.start(script, *before)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", (line, process.communicate(timeout=DEADLINE_SECONDS))
        return process

    def ended(self, process: subprocess.Popen[str]) -> Ended:
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
        return Ended(process.returncode, out, err, self._lines("dumps"), self._text("log"))

    def run(self, script: str) -> Ended:
        return self.ended(self.start(script))

    def _text(self, name: str) -> str:
        path = self.directory / name
        return path.read_text("utf-8") if path.exists() else ""

    def _lines(self, name: str) -> list[str]:
        return self._text(name).splitlines()


@pytest.fixture
def job(bootstrap: Path, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(bootstrap, tmp_path)
    yield processes
    for process in processes.started:
        if process.poll() is None:
            process.kill()
            process.communicate()


SIMPLE_DEATHS = {
    "asleep": "install(); wait()",
    "in C": "install(); stuck()",
    "in a lock": "install(); lock = threading.Lock(); lock.acquire(); print('ready', flush=True); lock.acquire()",
    "running": "install(); print('ready', flush=True)\nwhile True: pass",
    "a thread runs": "install(); threading.Thread(target=time.sleep, args=(600,)).start(); wait()",
    "the dump fails": "def fails(*_):\n    dump(*_); raise ValueError\ninstall(dump=fails); wait()",
    "the job set the default": "install(); assert signal.signal(SIGTERM, SIG_DFL) is SIG_DFL; wait()",
    "the job put the default back": (
        "install(); before = signal.signal(SIGTERM, print); signal.signal(SIGTERM, before); wait()"
    ),
    "standard streams are closed": "os.close(0); os.close(2); install(); wait()",
    "a job's handler interrupts": (
        "def interrupt(*_): raise KeyboardInterrupt\nsignal.signal(SIGUSR1, interrupt)\n"
        "def dump_and_send(*_): dump(*_); send(SIGUSR1); send(SIGUSR1)\ninstall(dump=dump_and_send); wait()"
    ),
}


@pytest.mark.parametrize("script", SIMPLE_DEATHS.values(), ids=SIMPLE_DEATHS)
def test_sigterm_dumps_and_kills(job: Processes, script: str) -> None:
    process = job.ready(script)
    process.terminate()
    ended = job.ended(process)
    assert (ended.code, ended.dumps, ended.err) == (-signal.SIGTERM, ["SIGTERM"], "")


def test_the_job_sees_no_handler(job: Processes) -> None:
    ended = job.run(
        "originals = signal.signal, signal.getsignal, signal.set_wakeup_fd, os._exit\n"
        "install(asked=(SIGUSR1,), before_exit=print)\n"
        "assert signal.getsignal(SIGTERM) is SIG_DFL and signal.getsignal(15) is SIG_DFL\n"
        "assert signal.getsignal(SIGUSR1) is SIG_DFL\n"
        "assert signal.getsignal(SIGINT) is signal.default_int_handler\n"
        "assert signal.signal(SIGTERM, print) is SIG_DFL and signal.getsignal(SIGTERM) is print\n"
        "assert signal.signal(SIGTERM, SIG_IGN) is print and signal.getsignal(SIGTERM) is SIG_IGN\n"
        "assert signal.signal(SIGTERM, 0) is SIG_IGN and signal.getsignal(SIGTERM) is SIG_DFL\n"
        "assert signal.signal(SIGTERM, SIG_DFL) is SIG_DFL\n"
        "signals.disarm()\n"
        "assert (signal.signal, signal.getsignal, signal.set_wakeup_fd, os._exit) == originals\n"
        "assert signal.getsignal(SIGTERM) is SIG_DFL and signal.set_wakeup_fd(-1) == -1\n"
        "send(SIGUSR1)\n"
    )
    assert (ended.code, ended.dumps, ended.err) == (-signal.SIGUSR1, [], "")


ERRORS = [
    "signal.signal(SIGTERM, None)",
    "signal.signal(SIGTERM, 'no')",
    "signal.signal([], SIG_DFL)",
    "signal.signal(15.0, SIG_DFL)",
    "signal.signal(999, SIG_DFL)",
    "signal.signal(signal.SIGKILL, print)",
    "signal.getsignal(999)",
    "signal.getsignal('x')",
    "signal.set_wakeup_fd(999)",
    "signal.set_wakeup_fd('x')",
    "signal.set_wakeup_fd(sys.stdout.fileno())",
    "signal.set_wakeup_fd(-1, True)",
    "os._exit('x')",
    "elsewhere(signal.signal, SIGTERM, SIG_DFL)",
    "elsewhere(signal.signal, SIGTERM, print)",
    "elsewhere(signal.set_wakeup_fd, -1)",
]


def test_errors_are_those_of_python(job: Processes) -> None:
    ended = job.run(
        "def elsewhere(call, *args):\n"
        "    raised = []\n"
        "    def run():\n"
        "        try: call(*args)\n"
        "        except Exception as error: raised.append(error)\n"
        "    thread = threading.Thread(target=run); thread.start(); thread.join()\n"
        "    if raised: raise raised[0]\n"
        "def said(text):\n"
        "    try: return repr(eval(text))\n"
        "    except Exception as error: return f'{type(error).__name__}: {error}'\n"
        f"errors = {ERRORS!r}\n"
        "before = [said(text) for text in errors]\n"
        "install(before_exit=print)\n"
        "for text, expected in zip(errors, before):\n"
        "    found = said(text)\n"
        "    assert found == expected and ':' in found, (text, found, expected)\n"
        "assert signal.getsignal(SIGTERM) is SIG_DFL\n"
        "send()"
    )
    assert (ended.code, ended.dumps, ended.err) == (-signal.SIGTERM, ["SIGTERM"], "")


def test_a_handler_set_later_takes_our_place(job: Processes) -> None:
    ended = job.run(
        "install()\n"
        "def handler(signum, frame): print('theirs', signum, frame is not None)\n"
        "assert signal.signal(SIGTERM, handler) is SIG_DFL\n"
        "send(); dumped(); print('goes on'); sys.exit(7)"
    )
    assert (ended.code, ended.out, ended.dumps) == (7, "theirs 15 True\ngoes on\n", ["SIGTERM"])


def test_a_handler_set_behind_our_back(job: Processes) -> None:
    ended = job.run(
        "from signal import signal as early\ninstall()\n"
        "def handler(*_): dumped(); print('theirs', flush=True)\n"
        "early(SIGTERM, handler); send(); send()\n"
        "signals.disarm(); assert signal.getsignal(SIGTERM) is handler; sys.exit(7)"
    )
    assert (ended.code, ended.out, ended.err) == (7, "theirs\ntheirs\n", "")


def test_a_handler_set_before_comes_after_the_dump(job: Processes) -> None:
    ended = job.run(
        "def handler(signum, frame): wrote(f'theirs {signum} {frame.f_code.co_name}')\n"
        "signal.signal(SIGTERM, handler); install()\n"
        "assert signal.getsignal(SIGTERM) is handler\n"
        "send()\n"
        "assert signal.signal(SIGTERM, SIG_DFL) is handler\n"
        "send()"
    )
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, ["SIGTERM", "theirs 15 send", "SIGTERM"])


def test_a_handler_set_before_and_a_stuck_main_thread(job: Processes) -> None:
    process = job.ready("signal.signal(SIGTERM, print)\ndef later(): dumped(); os._exit(6)\ninstall()\n"
                        "threading.Thread(target=later).start(); stuck()")  # fmt: skip
    process.terminate()
    assert (job.ended(process).code, process.returncode) == (6, 6)


HANDLED = ["signal.signal(SIGTERM, handler); install()", "install(); signal.signal(SIGTERM, handler)"]


@pytest.mark.parametrize("first", HANDLED)
@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("sys.exit(9)", 9),
        ("os._exit(9)", 9),
        ("raise KeyError", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("signal.signal(SIGTERM, SIG_DFL); os.kill(os.getpid(), SIGTERM)", -signal.SIGTERM),
    ],
)  # fmt: skip
def test_the_job_ends_as_its_handler_says(job: Processes, first: str, does: str, code: int) -> None:
    ended = job.run(f"def handler(*_): {does}\n{first}\nsend(); wait()")
    assert ended.code == code, ended.err
    assert ended.out == ""


def test_a_handler_that_leaves_the_next_signal_to_the_default(job: Processes) -> None:
    script = (
        "install()\n"
        "def once(*_): signal.signal(SIGTERM, SIG_DFL)\n"
        "for count in range(1, 30):\n"
        "    signal.signal(SIGTERM, once); send(); assert signal.getsignal(SIGTERM) is SIG_DFL\n"
        "print('alive', flush=True); send()"
    )
    ended = job.run(script)
    assert (ended.code, ended.out) == (-signal.SIGTERM, "alive\n")


IGNORED = ["signal.signal(SIGTERM, SIG_IGN); install()", "install(); signal.signal(SIGTERM, SIG_IGN)"]


@pytest.mark.parametrize("first", IGNORED)
def test_an_ignored_signal_stays_ignored(job: Processes, first: str) -> None:
    ended = job.run(f"{first}\nassert signal.getsignal(SIGTERM) is SIG_IGN\nsend(); print('on'); sys.exit(4)")
    assert (ended.code, ended.out, ended.dumps) == (4, "on\n", [])


def test_handlers_that_are_not_pythons_are_left_alone(job: Processes) -> None:
    ended = job.run(
        "faulthandler.register(SIGUSR1); install(asked=(SIGUSR1, signal.SIGKILL))\nsend(SIGUSR1); sys.exit(3)"
    )
    assert (ended.code, ended.dumps) == (3, [])
    assert "most recent call first" in ended.err
    assert "not Python's" in ended.log
    assert f"signal {signal.SIGKILL:d} cannot be handled" in ended.log


def test_interrupt_is_the_jobs(job: Processes) -> None:
    process = job.ready("import atexit; atexit.register(signals.finish); install(); wait()")
    process.send_signal(signal.SIGINT)
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (-signal.SIGINT, ["SIGINT"])
    assert ended.err.endswith("KeyboardInterrupt\n")


def test_interrupts_dump_once(job: Processes) -> None:
    ended = job.run(
        "install()\n"
        "for _ in range(5):\n"
        "    try: send(SIGINT); time.sleep(600)\n"
        "    except KeyboardInterrupt: dumped()\n"
        "sys.exit(2)"
    )
    assert (ended.code, ended.dumps) == (2, ["SIGINT"])


def test_a_signal_asked_for_goes_on(job: Processes) -> None:
    ended = job.run("install(asked=(SIGUSR1,))\nfor _ in range(3): send(SIGUSR1)\nprint('on'); sys.exit(5)")
    assert (ended.code, ended.out, ended.dumps) == (5, "on\n", ["SIGUSR1"] * 3)


def test_a_signal_asked_for_while_the_main_thread_is_stuck(job: Processes) -> None:
    process = job.ready("def later(): dumped(); os._exit(6)\ninstall(asked=(SIGUSR1,))\n"
                        "threading.Thread(target=later).start(); stuck()")  # fmt: skip
    process.send_signal(signal.SIGUSR1)
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (6, ["SIGUSR1"])


LIGHTNING = """
class Requeue:
    # lightning.pytorch.trainer.connectors.signal_connector
    def __init__(self):
        self.got, self.before = [], {s: signal.getsignal(s) for s in (SIGTERM, SIGUSR1)}
        if signal.getsignal(SIGUSR1) in (None, SIG_DFL):
            signal.signal(SIGUSR1, self.requeue)
        if signal.getsignal(SIGTERM) in (None, SIG_DFL):
            signal.signal(SIGTERM, self.term)
    def requeue(self, *_): self.got.append("requeue")
    def term(self, *_): self.got.append("term")
    def teardown(self):
        for signum, handler in self.before.items(): signal.signal(signum, handler)
"""


@pytest.mark.parametrize("asked", ["()", "(SIGUSR1,)"])
def test_lightnings_requeue(job: Processes, asked: str) -> None:
    ended = job.run(
        f"{LIGHTNING}\ninstall(asked={asked})\nlightning = Requeue()\nsend(SIGUSR1); send(); dumped()\n"
        "assert lightning.got == ['requeue', 'term'], lightning.got\n"
        "lightning.teardown(); assert signal.getsignal(SIGTERM) is SIG_DFL; print('on', flush=True); send()"
    )
    assert (ended.code, ended.out, ended.err) == (-signal.SIGTERM, "on\n", "")
    assert "SIGTERM" in ended.dumps


def test_signals_nobody_asked_for_are_untouched(job: Processes) -> None:
    ended = job.run("install(); assert signal.getsignal(SIGUSR1) is SIG_DFL; send(SIGUSR1); wait()")
    assert (ended.code, ended.dumps) == (-signal.SIGUSR1, [])


ASYNCIO = """
async def main():
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(SIGTERM, came.set)
    {install}
    send()
    await came.wait()
    loop.remove_signal_handler(SIGTERM)
    assert signal.getsignal(SIGTERM) is SIG_DFL
    print("handled", flush=True)
"""


@pytest.mark.parametrize("inner", [True, False])
def test_asyncio_gets_its_signals(job: Processes, inner: bool) -> None:
    script = ASYNCIO.format(install="install()" if inner else "") + ("" if inner else "install()\n")
    ended = job.run(script + "asyncio.run(main()); dumped(); assert signal.set_wakeup_fd(-1) == -1\nsend()")
    assert (ended.code, ended.out, ended.err) == (-signal.SIGTERM, "handled\n", "")
    assert set(ended.dumps) == {"SIGTERM"}


def test_asyncio_and_an_interrupt(job: Processes) -> None:
    process = job.ready(
        "install()\nasync def main(): print('ready', flush=True); await asyncio.sleep(600)\n"
        "try: asyncio.run(main())\nexcept KeyboardInterrupt: dumped(); sys.exit(8)"
    )
    process.send_signal(signal.SIGINT)
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (8, ["SIGINT"])


def test_a_wakeup_descriptor_of_the_job(job: Processes) -> None:
    ended = job.run(
        "first, second = os.pipe(), os.pipe()\n"
        "for one in first + second: os.set_blocking(one, False)\n"
        "signal.set_wakeup_fd(first[1]); install()\n"
        "signal.signal(SIGUSR1, lambda *_: None)\n"
        "assert signal.set_wakeup_fd(second[1], warn_on_full_buffer=False) == first[1]\n"
        "os.set_blocking(second[0], True); send(SIGUSR1); assert os.read(second[0], 9) == bytes([SIGUSR1])\n"
        "signals.disarm(); assert signal.set_wakeup_fd(-1) == second[1]"
    )
    assert (ended.code, ended.err) == (0, "")


def test_a_wakeup_descriptor_taken_behind_our_back(job: Processes) -> None:
    ended = job.run(
        "take = signal.set_wakeup_fd; install(); pipe = os.pipe(); os.set_blocking(pipe[1], False); take(pipe[1])\n"
        "send(); wait()"
    )
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, ["SIGTERM"])


def test_a_forked_child_is_not_ours(job: Processes) -> None:
    ended = job.run(
        "real = os._exit; install(asked=(SIGUSR1,), before_exit=lambda: wrote('exit'))\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    assert os._exit is real and signal.set_wakeup_fd(-1) == -1 and threading.active_count() == 1\n"
        "    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    send(); os._exit(1)\n"
        "assert os.waitpid(pid, 0)[1] == SIGTERM\n"
        "send(SIGUSR1); send()"
    )
    assert (ended.code, ended.dumps, ended.err) == (-signal.SIGTERM, ["SIGUSR1", "SIGTERM"], "")


def test_a_child_killed_as_soon_as_it_is_born(job: Processes) -> None:
    ended = job.run(
        "install()\n"
        "for _ in range(100):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        while True: time.sleep(600)\n"
        "    os.kill(pid, SIGTERM)\n"
        "    assert os.waitpid(pid, 0)[1] == SIGTERM\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "sys.exit(11)"
    )
    assert (ended.code, ended.dumps, ended.err) == (11, [], "")


def test_children_of_multiprocessing(job: Processes) -> None:
    ended = job.run(
        "install(before_exit=lambda: wrote('exit'))\n"
        "context = multiprocessing.get_context('fork')\n"
        "one = context.Process(target=time.sleep, args=(600,)); one.start(); one.terminate(); one.join()\n"
        "other = context.Process(target=sys.exit, args=(3,)); other.start(); other.join()\n"
        "assert (one.exitcode, other.exitcode) == (-SIGTERM, 3), (one.exitcode, other.exitcode)"
    )
    assert (ended.code, ended.dumps, ended.err) == (0, [], "")


def test_programs_started_by_the_job_have_the_usual_signals(job: Processes) -> None:
    program = "import signal; print(signal.getsignal(signal.SIGTERM), open('/proc/self/status').read())"
    ended = job.run(
        f"program = [sys.executable, '-c', {program!r}]\n"
        "def status():\n"
        "    text = subprocess.run(program, stdout=subprocess.PIPE, check=True).stdout.decode()\n"
        "    return [line for line in text.splitlines() if line.startswith(('Sig', 'Handlers'))][:-1]\n"
        "def masks(): return [line for line in status() if 'SigQ' not in line]\n"
        "before = masks(); install(asked=(SIGUSR1,)); assert masks() == before, (masks(), before)"
    )
    assert (ended.code, ended.err) == (0, "")


BLOCKED = {
    "a lock": "threading.Event().wait()",
    "C": "libc.pthread_mutex_lock(locked); libc.pthread_mutex_lock(locked)",
    "C, with the interpreter's lock": (
        "ctypes.PyDLL(None).pthread_mutex_lock(locked); ctypes.PyDLL(None).pthread_mutex_lock(locked)"
    ),
}


@pytest.mark.parametrize("where", ["wait()", "print('ready', flush=True); libc.pause(); wait()"])
@pytest.mark.parametrize("blocks", BLOCKED.values(), ids=BLOCKED)
def test_a_dump_that_blocks_does_not_keep_the_job_alive(job: Processes, blocks: str, where: str) -> None:
    process = job.ready(f"def block(*_): {blocks}\ninstall(dump=block, grace_s=0.2); {where}")
    process.terminate()
    ended = job.ended(process)
    assert ended.code == -signal.SIGTERM
    if "PyDLL" not in blocks:
        assert ended.err == f"memtrace: SIGTERM: {_LOST}\n"
        assert _LOST in ended.log


_LOST = "no snapshot in time (the driver or the allocator is busy): it is lost"


def test_a_blocked_dump_that_was_asked_for_does_not_keep_the_job_alive(job: Processes) -> None:
    process = job.ready(
        "def block(*_): print('blocks', flush=True); threading.Event().wait()\n"
        "install(asked=(SIGUSR1,), dump=block, grace_s=0.2); wait()"
    )
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "blocks\n"
    process.terminate()
    assert job.ended(process).code == -signal.SIGTERM


def test_the_end_during_a_dump_that_was_asked_for_is_written_too(job: Processes) -> None:
    process = job.ready(
        "turn = threading.Lock()\n"
        "def slow(*args):\n"
        "    with turn:\n"
        "        print('begun', flush=True)\n"
        "        while not os.path.exists(os.path.join(sys.argv[1], 'go')): time.sleep(0.005)\n"
        "        dump(*args)\n"
        "install(asked=(SIGUSR1,), dump=slow); wait()"
    )
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    (job.directory / "go").touch()
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, ["SIGUSR1", "SIGTERM"])


@pytest.mark.parametrize("where", ["wait()", "stuck()"])
def test_a_second_signal_does_not_begin_a_second_dump(job: Processes, where: str) -> None:
    process = job.ready(
        "def slow(*args):\n"
        "    dump(*args); print('begun', flush=True)\n"
        "    while not os.path.exists(os.path.join(sys.argv[1], 'go')): time.sleep(0.005)\n"
        "    wrote('whole')\n"
        f"install(dump=slow); {where}"
    )
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    (job.directory / "go").touch()
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, ["SIGTERM", "whole"])


def test_a_signal_during_a_dump_of_the_main_thread(job: Processes) -> None:
    ended = job.run(
        "turn = threading.Lock()\n"
        "def take_turn(*args):\n    with turn: dump(*args)\n"
        "install(dump=take_turn)\n"
        "signals.dumping(here=True)\n"
        "with turn: send(); wrote('whole')\n"
        "signals.dumping(here=False)\n"
        "print('never')"
    )
    assert (ended.code, ended.dumps, ended.out) == (-signal.SIGTERM, ["whole", "SIGTERM"], "")


@pytest.mark.parametrize(("signum", "code"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", 0)])
def test_a_signal_while_the_interpreter_ends(job: Processes, signum: str, code: int) -> None:
    """From 3.12 on no thread can be started then."""
    ended = job.run(
        "import atexit, contextlib\n"
        "def at_exit():\n"
        f"    with contextlib.suppress(KeyboardInterrupt): send({signum}); time.sleep(0.5)\n"
        "    signals.finish()\n"
        "atexit.register(at_exit); install()"
    )
    assert (ended.code, ended.dumps) == (code, [signum])


def test_the_end_waits_for_a_dump_that_main_is_at(job: Processes) -> None:
    """As where a rank fails because another died, and the launcher ends it while it writes."""
    ended = job.run(
        "import atexit\n"
        "turn = threading.Lock()\n"
        "def take_turn(*args):\n    with turn: dump(*args)\n"
        "def at_exit():\n"
        "    signals.dumping(here=True)\n"
        "    with turn: send(); time.sleep(0.5); wrote('whole')\n"
        "    signals.dumping(here=False)\n"
        "atexit.register(at_exit); install(dump=take_turn)"
    )
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, ["whole", "SIGTERM"])


@pytest.mark.parametrize("code", [0, 3, 255])
def test_os_exit_dumps_and_keeps_its_code(job: Processes, code: int) -> None:
    ended = job.run(f"install(before_exit=lambda: wrote('exit')); os._exit({code})")
    assert (ended.code, ended.dumps) == (code, ["exit"])


@pytest.mark.parametrize("blocks", BLOCKED.values(), ids=BLOCKED)
def test_os_exit_of_a_thread_does_not_wait_for_ever(job: Processes, blocks: str) -> None:
    ended = job.run(
        f"signals_module._EXIT_PATIENCE_S = 0.2\ndef block(): {blocks}\ninstall(before_exit=block)\n"
        "threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(600)"
    )
    assert ended.code == 3


def test_os_exit_during_a_dump_does_not_wait_for_itself(job: Processes) -> None:
    ended = job.run("install(before_exit=lambda: wrote('exit')); signals.dumping(here=True); os._exit(3)")
    assert (ended.code, ended.dumps) == (3, [])


def test_off_the_main_thread_nothing_is_installed(job: Processes) -> None:
    ended = job.run(
        "thread = threading.Thread(target=lambda: print(signals.install(dump, 1.0))); thread.start(); thread.join()\n"
        "assert signal.set_wakeup_fd(-1) == -1; send()"
    )
    assert (ended.code, ended.out, ended.dumps) == (-signal.SIGTERM, "False\n", [])
    assert "main thread" in ended.log


def test_disarmed_off_the_main_thread(job: Processes) -> None:
    ended = job.run(
        "install(); thread = threading.Thread(target=signals.disarm); thread.start(); thread.join(); send()"
    )
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, [])


def test_no_descriptors_left(job: Processes) -> None:
    ended = job.run(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\n"
        "assert not signals.install(dump, 1.0); assert signal.set_wakeup_fd(-1) == -1; send()"
    )
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, [])


def test_a_job_that_waits_for_signals_itself(job: Processes) -> None:
    ended = job.run(
        "signal.signal(signal.SIGCHLD, lambda *_: print('child'))\n"
        "install(asked=(SIGUSR1,))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {SIGTERM, SIGUSR1})\n"
        "for signum in (SIGTERM, SIGUSR1): send(signum); assert signal.sigwait({signum}) == signum\n"
        "send(signal.SIGCHLD); sys.exit(12)"
    )
    assert (ended.code, ended.out, ended.dumps) == (12, "child\n", [])


def test_installed_and_disarmed_again_and_again(job: Processes) -> None:
    ended = job.run(
        "def open_ones(): return len(os.listdir('/proc/self/fd'))\n"
        "install(); signals.disarm(); before = open_ones()\n"
        "for _ in range(30): install(); signals.disarm()\n"
        "while threading.active_count() > 1 or open_ones() > before: time.sleep(0.005)\n"
        "install(); send()"
    )
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, ["SIGTERM"])


def test_after_the_end_signals_kill_at_once(job: Processes) -> None:
    process = job.ready("import atexit; atexit.register(wait); install(); atexit.register(signals.disarm)")
    process.terminate()
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (-signal.SIGTERM, [])


def test_the_first_process_of_a_container_lives_on(job: Processes) -> None:
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no container to be had")
    process = job.start("assert os.getpid() == 1; install(); send(); sys.exit(13)", *alone)
    ended = job.ended(process)
    assert (ended.code, ended.dumps) == (13, ["SIGTERM"]), ended.err
