"""Finds a CUDA build of torch, and compiles the stand-in device library for it on first use.

Standard library only. Nothing of torch is imported here, and nothing is installed into its environment: the library
goes into memtrace's cache, one for each version of torch, of its CUDA headers, of our sources and of the compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from memtrace.dryrun import elf, stubs
from memtrace.errors import DryRunError

SOURCES = Path(__file__).parent / "device"
LIBRARY = "libcuda.so.1"  # torch and Triton open the driver by this name
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-w")
_COMPILERS = ("g++", "c++", "clang++")
_HEADERS = ("cuda.h", "cuda_runtime_api.h", "cudnn.h")
_ASK_S = 60
_COMPILE_S = 300
_LAST_LINES = 12
_CUDA_WHEELS = "Install a build of torch for CUDA, as the job itself needs it: on Linux `pip install torch` brings one"

# Every process of the job has the library in front of all others. It may not bring the C++ library of this compiler:
# a conda environment has a newer one of its own, which would then not be loaded. Nor may it show templates of its own.
_EXPORTS = """{
  global: cu*; __cuda*; nccl*; memtrace_*; _ZN3c10*;
  local: *;
};
"""

_DNN_PARTS = ("graph", "ops", "engines_runtime_compiled", "engines_precompiled", "heuristic")
"""The libraries that cuDNN 9 loads for graphs."""

_QUESTION = """
import importlib.util, sys
found = importlib.util.find_spec("torch")
print("memtrace-torch=" + (found.origin if found is not None and found.origin else ""))
print("memtrace-prefix=" + sys.prefix)
"""


@dataclass(frozen=True)
class Torch:
    """A CUDA build of torch, found without importing it."""

    python: str  # the interpreter that has it
    root: Path  # .../site-packages/torch
    version: str
    cuda: str
    includes: tuple[Path, ...]  # where the CUDA headers are


def find_torch(python: str) -> Torch:
    """The torch that this interpreter would import. DryRunError says what is missing and what to install."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        where = f"{platform.system()} on {platform.machine()}"
        raise DryRunError(f"dry runs work on Linux on x86-64, this is {where}", hint="Run it there; no GPU is needed")
    root, prefix = _ask(python)
    version, cuda = _build_of(root, python)
    includes = _includes(root, prefix)
    missing = [header for header in _HEADERS if not any((folder / header).is_file() for folder in includes)]
    if missing:
        raise DryRunError(
            f"the headers {', '.join(missing)} of CUDA are not beside torch in {root.parent}",
            hint="The wheels of torch bring them (nvidia-cuda-runtime, nvidia-cudnn); a toolkit is found by $CUDA_HOME",
        )
    return Torch(python=python, root=root, version=version, cuda=cuda, includes=includes)


def dnn_spans(torch: Torch) -> tuple[int, ...]:
    """Bytes of address space that each part of this torch's cuDNN would take; empty where they are not found.

    The stand-in takes cuDNN's place, and none of them is loaded; where device memory lies depends on what else does.
    """
    for folder in torch.includes:
        found = [next(iter(sorted((folder.parent / "lib").glob(f"libcudnn_{part}.so*"))), None) for part in _DNN_PARTS]
        if all(found):
            with contextlib.suppress(OSError, ValueError):
                return tuple(elf.span(path) for path in found if path)
    return ()


def library(torch: Torch, cache: Path, on_build: Callable[[], None]) -> Path:
    """The library for this torch, from the cache or compiled now (`on_build` is called before that: about 15 s).

    Several may build at once: the first to finish is taken, the others' work is dropped.
    """
    compiler = find_compiler()
    folder = cache / _key(torch, compiler)
    made = folder / LIBRARY
    if made.is_file():
        return made
    on_build()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as temporary:
            work = Path(temporary)
            _compile(torch, compiler, work)
            ready = work / "ready"
            ready.mkdir()
            (work / LIBRARY).rename(ready / LIBRARY)
            _publish(ready, folder)
    except OSError as error:
        raise DryRunError(f"the device library cannot be written to {cache}: {error.strerror or error}") from error
    return made


def find_compiler() -> tuple[str, ...]:
    """The user's C++ compiler as a command: `$CXX`, else the first of g++, c++ and clang++."""
    named = os.environ.get("CXX", "").split()
    if named and shutil.which(named[0]):
        return tuple(named)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return (found,)
    raise DryRunError(
        "no C++ compiler was found: a dry run compiles a small library on its first use",
        hint="Install g++ or clang++ (Debian, Ubuntu: apt install g++; conda: conda install gxx), or set $CXX",
    )


def _ask(python: str) -> tuple[Path, Path]:
    """Where torch is for this interpreter, and the interpreter's prefix."""
    try:
        asked = subprocess.run(  # noqa: S603 - the interpreter of the job that we were asked to run
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DryRunError(f"{python} cannot be asked where torch is: {error}") from error
    # A start-up file of the environment may print too: the last such lines are ours.
    said = dict(re.findall(r"^memtrace-(torch|prefix)=(.*)$", asked.stdout, re.MULTILINE))
    if asked.returncode or "prefix" not in said:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise DryRunError(f"{python} cannot be asked where torch is: {last}")
    if not said.get("torch"):
        raise DryRunError(
            f"{python} has no torch",
            hint="If the job's environment is another one, name its Python (memtrace dryrun -- ENVIRONMENT/bin/python "
            f"train.py), or put its bin first in $PATH. {_CUDA_WHEELS}",
        )
    return Path(said["torch"]).parent, Path(said["prefix"])


def _build_of(root: Path, python: str) -> tuple[str, str]:
    """Version of torch and of its CUDA, from torch/version.py."""
    try:
        text = (root / "version.py").read_text("utf-8")
    except OSError as error:
        raise DryRunError(f"{root} is no complete torch: {error.strerror}", hint=_CUDA_WHEELS) from error

    def word(name: str) -> str:
        found = re.search(rf"^{name}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
        return found.group(1) if found else ""

    version, cuda = word("__version__"), word("cuda")
    if word("hip") or word("rocm"):
        raise DryRunError(f"the torch {version} of {python} is built for ROCm", hint=_CUDA_WHEELS)
    if not cuda:
        raise DryRunError(
            f"the torch {version} of {python} is a CPU build, which has none of the code that runs on a GPU: "
            "a CPU build cannot do it",
            hint=f"{_CUDA_WHEELS}, without a GPU too; with an index of CPU wheels configured, name a CUDA one instead",
        )
    return version, cuda


def _includes(root: Path, prefix: Path) -> tuple[Path, ...]:
    wheels = root.parent / "nvidia"
    folders = [*sorted(wheels.glob("*/include")), prefix / "targets/x86_64-linux/include", prefix / "include"]
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders += [Path(home) / "include" for home in homes if home]
    return tuple(
        folder for folder in folders if any((folder / header).is_file() for header in (*_HEADERS, "cublas_api.h"))
    )


def _libraries(torch: Torch) -> list[Path]:
    return sorted((torch.root / "lib").glob("lib*.so"))


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))


def _key(torch: Torch, compiler: Sequence[str]) -> str:
    """A hash over all that the library depends on."""
    digest = hashlib.sha256()
    said = [torch.version, torch.cuda, _blas_version(torch.includes), *compiler, *_FLAGS]
    for path in (*_libraries(torch), Path(shutil.which(compiler[0]) or compiler[0])):
        try:
            status = path.stat()
        except OSError:
            continue
        said.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    ours = (*_sources(), Path(stubs.__file__), Path(__file__))
    said += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in ours]
    for item in said:
        digest.update(item.encode() + b"\0")
    return digest.hexdigest()[:24]


def _blas_version(includes: Iterable[Path]) -> str:
    """Major, minor and patch of cuBLAS, with commas between; empty where there is no header to say so."""
    for folder in includes:
        try:
            text = (folder / "cublas_api.h").read_text("utf-8", "replace")
        except OSError:
            continue
        parts = dict(re.findall(r"^#define CUBLAS_VER_(MAJOR|MINOR|PATCH)\s+(\d+)", text, re.MULTILINE))
        if len(parts) == 3:
            return ",".join(parts[part] for part in ("MAJOR", "MINOR", "PATCH"))
    return ""


def _compile(torch: Torch, compiler: Sequence[str], work: Path) -> None:
    options = [*_FLAGS, f"-I{SOURCES}"]
    for folder in torch.includes:
        options += ["-isystem", str(folder)]
    options += ["-idirafter", str(SOURCES)]  # for the header that the wheels leave out
    if version := _blas_version(torch.includes):
        options.append(f"-DMEMTRACE_BLAS_VERSION={version}")

    def compiled(source: Path) -> Path:
        target = work / f"{source.stem}.o"
        _run([*compiler, *options, "-c", str(source), "-o", str(target)], work)
        return target

    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
        objects = list(pool.map(compiled, [path for path in _sources() if path.suffix == ".cpp"]))
    generated = work / "stubs.cpp"
    generated.write_text(stubs.source(_missing(torch, objects)), "utf-8")
    objects.append(compiled(generated))
    exports = work / "exports.map"
    exports.write_text(_EXPORTS, "utf-8")
    link = [*compiler, "-shared", f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={exports}"]
    link += ["-o", str(work / LIBRARY), *map(str, objects), "-ldl", "-pthread"]
    try:
        _run([*link, "-static-libstdc++", "-static-libgcc"], work)
    except DryRunError:  # not every compiler has its library in that form
        _run(link, work)


def _missing(torch: Torch, objects: Iterable[Path]) -> list[str]:
    """The names that torch's libraries want from CUDA's and that our own objects do not define."""
    imported: set[str] = set()
    for path in _libraries(torch):
        with contextlib.suppress(OSError, ValueError):  # a text file that names the real one
            imported |= elf.names(path).imported
    if not any(name.startswith("cudaMalloc") for name in imported):
        raise DryRunError(f"the libraries in {torch.root / 'lib'} do not use CUDA", hint=_CUDA_WHEELS)
    defined: set[str] = set()
    for path in objects:
        defined |= elf.names(path).defined
    return stubs.wanted(imported, defined)


def _run(command: Sequence[str], work: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    environment.pop("LD_PRELOAD", None)  # the compiler needs no GPU
    try:
        done = subprocess.run(  # noqa: S603 - the user's compiler
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=_COMPILE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DryRunError(f"the C++ compiler could not be run: {error}") from error
    if done.returncode:
        last = " | ".join((done.stderr + done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise DryRunError(
            f"the device library did not compile: {last}",
            hint=f"The compiler was {command[0]}; name another in $CXX, C++17 is needed",
        )


def _publish(ready: Path, folder: Path) -> None:
    try:
        ready.rename(folder)
    except OSError:
        if not (folder / LIBRARY).is_file():  # else somebody else was faster: theirs is the same
            raise
