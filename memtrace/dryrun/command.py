"""What a command would run as each rank: which Python, which arguments, which environment, how many ranks.

Launchers are read by their own parsers (`unwrap.py`, in the job's Python) and not started; programs that only run the
rest of their line (`env`, `nohup`, `numactl`) are left out.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrace.dryrun import unwrap
from memtrace.errors import DryRunError
from memtrace.record.launch import NOT_EXECUTABLE, NOT_FOUND, CommandError

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*t?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_HEAD_BYTES = 4096
_SECONDS = 300

_LAUNCHER_SCRIPTS = {
    "torchrun": "torchrun",
    "deepspeed": "deepspeed",
    "deepspeed.pt": "deepspeed",
    "ds": "deepspeed",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
}
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
}
_SUBCOMMAND = ("accelerate", "accelerate.commands.accelerate_cli")  # those that have `launch` as their first word

# Programs that run the rest of their line in their own place: options with a value, words before the command.
_PREFIXES: dict[str, tuple[frozenset[str], int]] = {
    "nohup": (frozenset(), 0),
    "setsid": (frozenset(), 0),
    "time": (frozenset({"-f", "--format", "-o", "--output"}), 0),
    "nice": (frozenset({"-n", "--adjustment"}), 0),
    "ionice": (frozenset({"-c", "--class", "-n", "--classdata"}), 0),
    "stdbuf": (frozenset({"-i", "--input", "-o", "--output", "-e", "--error"}), 0),
    "timeout": (frozenset({"-k", "--kill-after", "-s", "--signal"}), 1),
    "taskset": (frozenset(), 1),
    "numactl": (
        frozenset(
            "-i --interleave -w --weighted-interleave -p --preferred -P --preferred-many -m --membind "
            "-C --physcpubind -N --cpunodebind".split()
        ),
        0,
    ),
}
_RUNNERS = ("uv", "poetry", "pipenv", "pixi", "pdm")  # `uv run COMMAND`: in an environment that they know
_ASK_RUNNER = "import json, os, sys; print('\\n' + json.dumps([sys.executable, dict(os.environ)]))"
_STARTERS = frozenset(
    "srun salloc sbatch mpirun mpiexec mpiexec.hydra orterun horovodrun torchx ray composer fabric lightning pdsh ssh "
    "docker podman singularity apptainer conda mamba micromamba sudo".split()
)
_SHELLS = frozenset("sh bash dash zsh ksh fish csh tcsh".split())
_WRITE_INSTEAD = (
    "Write the Python command behind it: memtrace dryrun -- python train.py, or one of deepspeed, torchrun and "
    "accelerate launch."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a rank is started without its launcher.

    `environ` is what the launcher adds or changes, alike for all ranks. `world` is None where nothing says it, as
    with `python train.py`, or where the launcher would count GPUs; `notes` say the latter. Likewise `local_world`,
    the ranks on a node.
    """

    python: str
    argv: tuple[str, ...]
    environ: dict[str, str]
    world: int | None
    local_world: int | None
    notes: tuple[str, ...]
    ranked: dict[str, str] = field(default_factory=dict)

    def command(self, rank: int, world: int, local_rank: int) -> list[str]:
        """The words that start one rank."""
        fill = self._filling(rank, world, local_rank)
        return [fill(word) for word in self.argv]

    def environment(self, rank: int, world: int, local_rank: int) -> dict[str, str]:
        """What the launcher would add to or change in one rank's environment, RANK and the like included."""
        fill = self._filling(rank, world, local_rank)
        return {**self.environ, **{name: fill(value) for name, value in self.ranked.items()}}

    def _filling(self, rank: int, world: int, local_rank: int) -> Callable[[str], str]:
        local_world = min(self.local_world or world, world)
        values = {
            unwrap.RANK: rank,
            unwrap.WORLD: world,
            unwrap.LOCAL_RANK: local_rank,
            unwrap.LOCAL_WORLD: local_world,
            unwrap.NODE: rank // local_world,
            unwrap.NODES: -(-world // local_world),
        }

        def fill(word: str) -> str:
            for token, value in values.items() if "\0" in word else ():
                word = word.replace(token, str(value))
            return word

        return fill


def plan(command: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """What `command` would start in the environment `environ`. Runs a launcher's parser, but no launcher and no job.

    Raises DryRunError for a command that cannot be taken apart, CommandError for one that is not there.
    """
    bare = _without_prefixes(command, environ)
    now = {**environ, **bare.environ}
    launched = _launcher(bare.words)
    if launched is None:
        python = _python_of(bare.words, now.get("PATH"))
        return Plan(python, tuple(bare.words), bare.environ, None, None, bare.notes)
    launcher, options, words = launched
    python = _python_of(words, now.get("PATH"))
    document = _ask(python, launcher, options, now)
    argv, env = [str(word) for word in document["argv"]], {str(k): str(v) for k, v in document["env"].items()}
    notes = [*bare.notes, *map(str, document["notes"])]
    if argv[0] != python:  # --no_python, PYTHON_EXEC
        inner = _without_prefixes(argv, {**now, **env})
        argv, env = inner.words, {**env, **inner.environ}
        if _launcher(argv) is not None:
            raise DryRunError(
                f"{launcher} starts another launcher, {Path(argv[0]).name}", hint="Leave out one of them."
            )
        python = _python_of(argv, {**now, **env}.get("PATH"))
        notes += inner.notes
    return Plan(
        python,
        tuple(argv),
        {**bare.environ, **env},
        document["world"],
        document["local_world"],
        tuple(notes),
        {str(name): str(value) for name, value in document["ranked"].items()},
    )


def interpreter(command: Sequence[str], path: str | None = None) -> str | None:
    """The Python that runs a command's first word: itself, or its script's; None for any other program.

    `path` is where programs are looked for, as in PATH. Raises CommandError if the program is not there.
    """
    found = _found(command[0], path)
    if _PYTHON.fullmatch(Path(command[0]).name):
        return found
    lines = _head(found).splitlines()
    first = lines[0] if lines else ""
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    if words and Path(words[0]).name == "env":
        words = list(itertools.dropwhile(lambda word: word in ("-S", "--") or _ASSIGNMENT.fullmatch(word), words[1:]))
        if words and words[0].startswith("-S"):
            words[0] = words[0][2:]
    if words and Path(words[0]).name in _SHELLS and len(lines) > 1:
        return _long_shebang(lines[1], found, path)
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    return _found(words[0], path)


@dataclass(frozen=True, slots=True)
class _Bare:
    """A command without the programs before it, and what those change."""

    words: list[str]
    environ: dict[str, str]
    notes: tuple[str, ...] = ()


def _without_prefixes(command: Sequence[str], environ: Mapping[str, str]) -> _Bare:
    words, changed, notes = list(command), dict[str, str](), list[str]()
    while words:
        name = Path(words[0]).name
        if name == "env":
            words = _after_env(words, changed)
        elif name in _PREFIXES:
            rest = _after_prefix(words, *_PREFIXES[name])
            notes.append(f"{shlex.join(words[: len(words) - len(rest)])} is left out")
            words = rest
        elif name in _RUNNERS:
            words = _after_runner(words, {**environ, **changed}, changed)
        elif name in _STARTERS:
            raise DryRunError(f"a dry run cannot look behind {name}", hint=_WRITE_INSTEAD)
        elif name in _SHELLS:
            raise DryRunError(f"a dry run cannot look into what {name} would run", hint=_WRITE_INSTEAD)
        else:
            return _Bare(words, changed, tuple(notes))
    raise DryRunError(
        f"{shlex.join(command) or 'nothing'} names no job", hint="Write: memtrace dryrun -- python train.py"
    )


def _after_env(words: list[str], changed: dict[str, str]) -> list[str]:
    rest = words[1:]
    if rest and rest[0] == "--":
        rest = rest[1:]
    if rest and rest[0].startswith("-"):
        raise DryRunError(
            f"a dry run does not know what env {rest[0]} leaves of the environment",
            hint="Put env before memtrace: env ... memtrace dryrun -- python train.py",
        )
    while rest and "=" in rest[0]:
        name, _, value = rest[0].partition("=")
        changed[name] = value
        rest = rest[1:]
    return rest


def _after_prefix(words: list[str], valued: frozenset[str], positional: int) -> list[str]:
    """The command behind options and `positional` words."""
    index = 1
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        index += 1
        if words[index - 1] == "--":
            break
        if words[index - 1] in valued:
            index += 1
    return words[index + positional :]


def _after_runner(words: list[str], environ: Mapping[str, str], changed: dict[str, str]) -> list[str]:
    """The command behind `uv run`, with its program found where the runner finds it. `changed` gets its variables."""
    runner, rest = words[:2], words[2:]
    called = shlex.join([Path(words[0]).name, *words[1:2]])
    if rest and rest[0] == "--":
        rest = rest[1:]
    if runner[1:] != ["run"] or not rest or rest[0].startswith("-"):
        raise DryRunError(
            f"a dry run reads {Path(words[0]).name} run COMMAND without options only",
            hint="Put it before memtrace, with its options, or write the Python of its environment in its place.",
        )
    _found(words[0], environ.get("PATH"))
    try:
        answer = subprocess.run(  # noqa: S603 - this is what we were asked to run
            [*runner, "python", "-c", _ASK_RUNNER],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
        python, inside = json.loads(answer.stdout.decode().strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise DryRunError(f"{called} python does not run here", hint="Write the Python of its environment.") from error
    changed.update({name: value for name, value in inside.items() if environ.get(name) != value and name != "_"})
    if rest[0].endswith(".py") or _PYTHON.fullmatch(rest[0]):
        return [python, *(rest if rest[0].endswith(".py") else rest[1:])]
    return rest


def _launcher(words: Sequence[str]) -> tuple[str, list[str], list[str]] | None:
    """The launcher that a command names, its options, and the words whose Python runs it. None: it names none.

    >>> _launcher(["python3", "-um", "torch.distributed.run", "--nnodes", "2", "train.py"])
    ('torchrun', ['--nnodes', '2', 'train.py'], ['python3'])
    >>> _launcher(["accelerate", "launch", "train.py"])
    ('accelerate', ['train.py'], ['accelerate'])
    >>> _launcher(["python", "train.py", "-m", "torch.distributed.run"])
    """
    name, runs, rest = Path(words[0]).name, list(words[:1]), list(words[1:])
    launcher = _LAUNCHER_SCRIPTS.get(name)
    if _PYTHON.fullmatch(name):
        module, name, rest = _python_runs(rest)
        if name == "deepspeed.launcher.launch":
            raise DryRunError(
                "deepspeed.launcher.launch is DeepSpeed's own second half", hint="Write: deepspeed train.py"
            )
        launcher = _LAUNCHER_MODULES.get(name) if module else _LAUNCHER_SCRIPTS.get(Path(name).name)
        name = name if module else Path(name).name
    if launcher is None:
        return None
    if name in _SUBCOMMAND:
        if rest[:1] != ["launch"]:
            raise DryRunError(
                f"{shlex.join([name, *rest[:1]])} starts no job", hint="Write: accelerate launch train.py"
            )
        rest = rest[1:]
    return launcher, rest, runs


def _python_runs(words: Sequence[str]) -> tuple[bool, str, list[str]]:
    """What Python's arguments make it run: whether a module, its name or the script's, and the arguments of that.

    >>> _python_runs(["-uX", "dev", "-mpkg.train", "--lr", "1"])
    (True, 'pkg.train', ['--lr', '1'])
    >>> _python_runs(["-W", "error", "train.py", "-m", "x"])
    (False, 'train.py', ['-m', 'x'])
    """
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word, index = words[index], index + 1
        if word == "--check-hash-based-pycs":
            index += 1
        for at, letter in enumerate(word[1:] if not word.startswith("--") else "", 2):
            if letter == "c":
                return False, "", []
            if letter in "mWX":
                value, after = (word[at:], index) if word[at:] else ("".join(words[index : index + 1]), index + 1)
                if letter == "m":
                    return True, value, list(words[after:])
                index = after
                break
    return (False, words[index], list(words[index + 1 :])) if index < len(words) else (False, "", [])


def _python_of(words: Sequence[str], path: str | None) -> str:
    python = interpreter(words, path)
    if python is not None:
        return python
    name = Path(words[0]).name
    first = (_head(_found(words[0], path)).splitlines() or [""])[0]
    if name in _LAUNCHER_SCRIPTS:
        module = next(module for module, launcher in _LAUNCHER_MODULES.items() if launcher == _LAUNCHER_SCRIPTS[name])
        raise DryRunError(
            f"{name} here is no Python script, so that nothing says which Python it would run",
            hint=f"Write: python -m {module} ...",
        )
    what = "a shell script" if first.startswith("#!") else "no Python script"
    raise DryRunError(f"{name} is {what}, and a dry run cannot look into it", hint=_WRITE_INSTEAD)


def _ask(python: str, launcher: str, options: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The document that `unwrap.py` prints, once it says what would be started."""
    if not options:
        raise DryRunError(f"{launcher} is given no script", hint=f"Write: memtrace dryrun -- {launcher} train.py")
    try:
        answer = subprocess.run(  # noqa: S603 - the job's own Python
            [python, unwrap.__file__, launcher, *options],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise DryRunError(
            f"{launcher} was not read within {_SECONDS} s", hint=f"Try: {python} -c 'import torch'"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{python}: cannot be executed: {reason}", NOT_EXECUTABLE) from error
    try:
        document = json.loads(answer.stdout.decode(errors="replace").strip().rpartition("\n")[2])
    except ValueError:
        document = None
    if not isinstance(document, dict):
        last = (answer.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise DryRunError(f"{python} could not read the options of {launcher}: {last}", hint="Does it import torch?")
    if "usage" in document:
        sys.stderr.write(str(document["usage"]))  # the launcher's own words, in its own lines
        shown = document["code"] == 0
        raise DryRunError(
            f"{launcher} would only show this" if shown else f"{launcher} does not take these options",
            hint="Nothing was run.",
        )
    if "error" in document:
        raise DryRunError(f"{launcher}: {document['error']}", hint="Nothing was run.")
    return document


def _found(program: str, path: str | None) -> str:
    """Where a program is; as `record` says it if it is not there or cannot be executed."""
    found = shutil.which(program, path=path)
    if found is not None:
        return found
    if os.sep in program and Path(program).exists():
        raise CommandError(f"{program}: cannot be executed: Permission denied", NOT_EXECUTABLE)
    raise CommandError(f"{program}: command not found", NOT_FOUND)


def _long_shebang(line: str, script: str, path: str | None) -> str | None:
    """The Python in the second line of a script that pip, uv or conda wrote for a path too long for the first."""
    if not line.startswith("'''exec'"):
        return None
    beside = re.search(r"dirname .*/'?([A-Za-z0-9._-]+)'? \"\$0\"", line)
    if beside is not None:
        return str(Path(script).resolve().parent / beside[1])
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    return _found(words[1], path) if len(words) > 1 and _PYTHON.fullmatch(Path(words[1]).name) else None


def _head(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return os.fsdecode(file.read(_HEAD_BYTES))
    except OSError:
        return ""
