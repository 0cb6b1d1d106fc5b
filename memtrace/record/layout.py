"""A recording's directory: made before the job, packed and listed after it. Nothing here may keep a job from running.

<when>-<name>/
    meta.json  log                       the run as a whole
    .bootstrap/                          what each rank imports, of this version of memtrace
    rank0000.pickle.zst  rank0000.json   a snapshot, and what the recorder knows beside it
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from memtrace import paths
from memtrace._version import __version__
from memtrace.record.inside.settings import Settings

BOOTSTRAP = ".bootstrap"
PACKAGE = "memtrace_inside"
META = "meta.json"
META_SCHEMA = "memtrace.recording/1"

_HERE = Path(__file__).parent
_PICKLE = re.compile(r"rank[0-9]+(?:-[0-9]+)?(?:\.[a-z]+)?\.pickle")
_RANK = re.compile(r"rank([0-9]{1,9})(?:-[0-9]+)?(?:\.[a-z]+)?\.(?:json|pickle(?:\.zst)?)")
_TRANSIENT = re.compile(r"\.dump-.+-[0-9]+|\.rank[0-9]+(?:-[0-9]+)?\.claim")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._]+")
_LONGEST_NAME = 40
_MOST_WITH_ONE_NAME = 1000
_RECENT = 50
_COPY_BYTES = 1 << 20
_JSON_BYTES = 1 << 20
_ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is recorded. `directory` None: nowhere, since nothing can be written; `notes` say why."""

    directory: Path | None
    notes: tuple[str, ...] = ()


def name_of(command: Sequence[str]) -> str:
    """What to call a recording: after the script, else the module, else the program.

    >>> name_of(["deepspeed", "--num_gpus", "8", "src/train.py", "--lr", "1e-4"])
    'train'
    >>> name_of(["python", "-m", "pkg.finetune"]), name_of(["bash", "-c", "true"])
    ('finetune', 'bash')
    """
    for word in command:
        if word.endswith((".py", ".sh")):
            return clean_name(Path(word).stem)
    for before, word in itertools.pairwise(command):
        if before in ("-m", "--module"):
            return clean_name(word.rpartition(".")[2])
    return clean_name(Path(command[0]).name) if command else "job"


def clean_name(name: str) -> str:
    """`name` as part of a directory's name.

    >>> clean_name("my run/3"), clean_name("...")
    ('my-run-3', 'job')
    """
    return _NOT_IN_NAMES.sub("-", name)[:_LONGEST_NAME].strip("-.") or "job"


def make(name: str, output: Path | None = None, parts: Mapping[str, Path] = MappingProxyType({})) -> Place:
    """A new directory with the bootstrap in it: `output` itself, else one in the usual place, else where one can be.

    `parts`: folders of modules that become sub-packages of the one that runs in each rank.
    """
    notes = []
    for where, new in _choices(name, output, parts):
        try:
            directory = new()
        except (OSError, RuntimeError) as error:
            notes.append(f"cannot record in {where}: {_reason(error)}")
            continue
        if notes or (output is not None and directory.name != output.name):
            notes.append(f"recording in {directory}")
        return Place(directory, tuple(notes))
    return Place(None, (*notes, "nothing can be written: the job runs unrecorded"))


def write_meta(directory: Path, meta: Mapping[str, Any]) -> None:
    """Writes `meta.json` whole or not at all."""
    content = {"schema": META_SCHEMA, "memtrace": __version__, **meta}
    _write_atomically(directory / META, (json.dumps(content, indent=1) + "\n").encode())


def described(settings: Settings) -> dict[str, Any]:
    """The settings as `meta.json` has them: without the directory, a path of this machine."""
    return {key: value for key, value in settings._asdict().items() if key != "directory"}


def reported(directory: Path) -> list[int]:
    """The ranks that left anything, a snapshot or only what they know beside it."""
    found = (_RANK.fullmatch(entry.name) for entry in _entries(directory))
    return sorted({int(match[1]) for match in found if match})


def size_of(directory: Path) -> int:
    """Bytes of everything the ranks left."""
    total = 0
    for entry in _entries(directory):
        with contextlib.suppress(OSError):
            if entry.name.startswith("rank") and entry.is_file():
                total += entry.stat().st_size
    return total


def pack(directory: Path) -> list[str]:
    """Packs every plain snapshot with zstd. What cannot be packed stays as it is; returns what went wrong."""
    problems = []
    for path in _entries(directory):
        if not _PICKLE.fullmatch(path.name) or path.is_symlink() or path.with_name(path.name + ".zst").exists():
            continue
        try:
            _pack_one(path)
        except (OSError, ImportError) as error:
            problems.append(f"{path.name} stays unpacked: {_reason(error)}")
    return problems


def tidy(directory: Path) -> None:
    """Removes what the ranks only needed among themselves: claims to names, places in the queue of dumps."""
    for entry in _entries(directory):
        if _TRANSIENT.fullmatch(entry.name):
            with contextlib.suppress(OSError):
                entry.unlink()


def remember(directory: Path) -> None:
    """Puts a recording first in the index of recent ones."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        index = paths.recent_index()
        this = str(directory.absolute())
        others = [item for item in _listed(index) if item != this]
        _make_folder(index.parent)
        _write_atomically(index, json.dumps({"recordings": [this, *others][:_RECENT]}, indent=1).encode())


def discard(directory: Path) -> None:
    """Removes a recording in which nothing happened, and the folder around it if that was made for it."""
    shutil.rmtree(directory / BOOTSTRAP, ignore_errors=True)
    with contextlib.suppress(OSError):
        (directory / META).unlink(missing_ok=True)
        directory.rmdir()
        if directory.parent.name == paths.RECORDINGS_NAME and _names(directory.parent) == [".gitignore"]:
            shutil.rmtree(directory.parent)


def _choices(name: str, output: Path | None, parts: Mapping[str, Path]) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Places and the ways to a new directory there, the one asked for first. Only the call writes anything."""
    dated = f"{time.strftime('%Y%m%d-%H%M')}-{name}"
    named = os.environ.get(paths.RECORDINGS_VARIABLE) or paths.RECORDINGS_NAME
    if output is not None:
        yield str(output), lambda: _new(_expanded(output), parts, may_exist=True)
    else:
        yield named, lambda: _new(_root(_expanded(Path(named))) / dated, parts)
    yield "your state directory", lambda: _new(paths.recent_index().parent / "recordings" / dated, parts)
    yield "the temporary directory", lambda: _filled(Path(tempfile.mkdtemp(prefix="memtrace-")), parts)


def _root(folder: Path) -> Path:
    """The folder that holds recordings; git is told to ignore `.memtrace`."""
    _make_folder(folder)
    ignore = folder / ".gitignore"
    if folder.name == paths.RECORDINGS_NAME and not ignore.exists():
        _write_atomically(ignore, b"*\n")
    return folder


def _listed(index: Path) -> list[str]:
    """What the index holds; nothing when it is broken."""
    content = _read_json(index)
    listed = content.get("recordings") if isinstance(content, dict) else None
    return [item for item in listed if isinstance(item, str)] if isinstance(listed, list) else []


def _read_json(path: Path) -> Any:
    """A small document; None when there is none that is readable."""
    try:
        return json.loads(path.read_text("utf-8")) if path.stat().st_size <= _JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _expanded(path: Path) -> Path:
    return path.expanduser().absolute()


def _new(wanted: Path, parts: Mapping[str, Path], *, may_exist: bool = False) -> Path:
    """Makes `wanted`, or `wanted-2` and so on, and fills it. `may_exist`: without a recording in it, it is the one."""
    if os.pathsep in str(wanted):
        raise OSError(errno.EINVAL, f"a path with {os.pathsep!r} cannot stand in PYTHONPATH", str(wanted))
    _make_folder(wanted.parent)
    for number in range(1, _MOST_WITH_ONE_NAME):
        directory = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if may_exist and directory.is_dir() and not (directory / META).exists() and not reported(directory):
            return _filled(directory, parts)
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return _filled(directory, parts)
    raise OSError(errno.EEXIST, "too many recordings of this name", str(wanted))


def _filled(directory: Path, parts: Mapping[str, Path]) -> Path:
    """Copies the bootstrap; leaves nothing behind if that fails."""
    try:
        target = directory / BOOTSTRAP / PACKAGE
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_HERE / "sitecustomize.py", directory / BOOTSTRAP / "sitecustomize.py")
        for folder, modules in ((target, _HERE / "inside"), *((target / part, path) for part, path in parts.items())):
            folder.mkdir(exist_ok=True)
            for source in modules.glob("*.py"):
                shutil.copyfile(source, folder / source.name)
        write_meta(directory, {})
    except OSError:
        discard(directory)
        raise
    return directory


def _pack_one(path: Path) -> None:
    target = path.with_name(path.name + ".zst")
    with path.open("rb") as source, _replacing(target) as file:
        zstd: Any = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        with zstd.ZstdFile(file, "w", level=_ZSTD_LEVEL) as packed:
            shutil.copyfileobj(source, packed, _COPY_BYTES)
    shutil.copystat(path, target)
    path.unlink()


def _write_atomically(path: Path, content: bytes) -> None:
    with _replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes `path`'s place once it is whole and on disk; on any error there is no trace of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system and system can
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in _entries(directory)]


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
