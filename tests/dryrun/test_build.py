"""Finding torch, reading its imports, choosing stubs: none of it needs torch or a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memtrace.dryrun import build, elf, stubs
from memtrace.errors import DryRunError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="dry runs are for Linux")
CUDA_VERSION_FILE = "__version__ = '2.99.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with a torch that nobody could import, with headers that nobody could compile."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    torch = tmp_path / "site" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").write_text("raise RuntimeError('imported')")
    (torch / "version.py").write_text(CUDA_VERSION_FILE)
    include = tmp_path / "site" / "nvidia" / "cu13" / "include"
    include.mkdir(parents=True)
    for header in ("cuda.h", "cuda_runtime_api.h", "cudnn.h"):
        (include / header).write_text("#error a header of the test\n")
    return tmp_path / "site"


def test_torch_is_found_without_being_imported(site: Path) -> None:
    found = build.find_torch(sys.executable)
    assert (found.root, found.version, found.cuda) == (site / "torch", "2.99.0+cu130", "13.0")
    assert found.includes[0] == site / "nvidia" / "cu13" / "include"


def test_what_a_start_up_file_prints_does_not_matter(site: Path) -> None:
    (site / "sitecustomize.py").write_text("print('welcome')")
    assert build.find_torch(sys.executable).version == "2.99.0+cu130"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("__version__ = '2.99.0+cpu'\ncuda: Optional[str] = None\n", "a CPU build cannot do it"),
        ("__version__ = '2.13.0'\ncuda = None\nhip = None\n", "a CPU build cannot do it"),
        ("__version__ = '2.99.0'\ncuda = None\nhip: Optional[str] = '6.4'\n", "ROCm"),
    ],
)
def test_another_build_is_refused(site: Path, content: str, said: str) -> None:
    (site / "torch" / "version.py").write_text(content)
    with pytest.raises(DryRunError, match=said) as error:
        build.find_torch(sys.executable)
    assert error.value.exit_code == 2
    assert error.value.code == "dryrun"
    assert "Install a build of torch for CUDA" in str(error.value)
    assert "http" not in str(error.value)


def test_no_torch(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho memtrace-torch=\necho memtrace-prefix=/usr\n")
    fake.chmod(0o755)
    with pytest.raises(DryRunError, match="has no torch"):
        build.find_torch(str(fake))


@pytest.mark.parametrize("script", ["echo 'no such thing' >&2; exit 3", "exit 0"])
def test_an_interpreter_that_does_not_answer(tmp_path: Path, script: str) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    with pytest.raises(DryRunError, match="cannot be asked"):
        build.find_torch(str(fake))
    with pytest.raises(DryRunError, match="cannot be asked"):
        build.find_torch(str(tmp_path / "absent"))


def test_missing_headers_are_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_HEADERS", ("cuda.h", "nobody_has_this.h"))
    with pytest.raises(DryRunError, match=r"headers nobody_has_this\.h"):
        build.find_torch(sys.executable)


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(DryRunError, match="x86-64"):
        build.find_torch(sys.executable)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "nothing-of-this-name")
    with pytest.raises(DryRunError, match=r"no C\+\+ compiler"):
        build.find_compiler()


def test_a_failed_build_shows_the_compiler_and_leaves_nothing(site: Path, tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    cache = tmp_path / "cache"
    calls: list[None] = []
    with pytest.raises(DryRunError, match="did not compile"):
        build.library(build.find_torch(sys.executable), cache, lambda: calls.append(None))
    assert len(calls) == 1
    assert list(cache.iterdir()) == []


def test_a_finished_library_is_taken_from_the_cache(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(torch: build.Torch, compiler: object, work: Path) -> None:
        (work / build.LIBRARY).write_text("compiled")
        rival = tmp_path / "cache" / build._key(torch, ("true",))
        rival.mkdir()  # somebody else is faster
        (rival / build.LIBRARY).write_text("theirs")

    monkeypatch.setattr(build, "find_compiler", lambda: ("true",))
    monkeypatch.setattr(build, "_compile", compiled)
    torch = build.find_torch(sys.executable)
    calls: list[None] = []
    first = build.library(torch, tmp_path / "cache", lambda: calls.append(None))
    second = build.library(torch, tmp_path / "cache", lambda: calls.append(None))
    assert first == second
    assert first.name == "libcuda.so.1"
    assert first.read_text() == "theirs"
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.parent.name]


def test_the_key_follows_torch(site: Path) -> None:
    torch = build.find_torch(sys.executable)
    before = build._key(torch, ("true",))
    (site / "torch" / "lib" / "libtorch_cuda.so").write_bytes(b"another")
    assert build._key(torch, ("true",)) != before
    assert build._key(torch, ("false",)) != build._key(torch, ("true",))


def test_names_of_a_library_and_of_an_object(tmp_path: Path) -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    source = tmp_path / "a.c"
    source.write_text(
        "int wanted(void); static int own(void) { return 1; } int given(void) { return wanted() + own(); }"
    )
    subprocess.run(["gcc", "-fPIC", "-c", source, "-o", tmp_path / "a.o"], check=True)
    subprocess.run(["gcc", "-shared", tmp_path / "a.o", "-o", tmp_path / "a.so"], check=True)
    for name in ("a.o", "a.so"):
        found = elf.names(tmp_path / name)
        assert "wanted" in found.imported
        assert "given" in found.defined
        assert not {"own", "given"} & found.imported
        assert "own" not in found.defined


@pytest.mark.parametrize(
    "content", [b"GROUP ( libtorch.so )", b"\x7fELF\x02\x01" + bytes(20), b"", b"\x7fELF\x01\x01" + bytes(99)]
)
@pytest.mark.parametrize("read", [elf.names, elf.span])
def test_what_is_no_library(tmp_path: Path, content: bytes, read: Callable[[Path], object]) -> None:
    (tmp_path / "x.so").write_bytes(content)
    with pytest.raises(ValueError, match=r"ELF|damaged|empty|nothing of it"):
        read(tmp_path / "x.so")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cublasSgemm_v2", "harmless"),
        ("cudnnConvolutionForward", "harmless"),
        ("cudaLaunchKernel", "harmless"),
        ("cusolverDnDestroy", "harmless"),
        ("cusparseSetStream", "harmless"),
        ("cudaGraphAddNode", "counted"),
        ("cublasIsamax_v2", "counted"),
        ("cusolverDnSgetrf_bufferSize", "refused"),
        ("cudnnGetConvolutionForwardWorkspaceSize", "refused"),
        ("ncclAllReduce", "refused"),
        ("cudaIpcGetMemHandle", "refused"),
        ("cufftSetWorkArea", "refused"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert stubs.kind_of(name).value == kind


def test_stubs_are_for_the_names_of_cuda_that_nobody_defines() -> None:
    imported = {"cudaMalloc", "cudaNew", "malloc", "nvrtcCompileProgram", "cuptiActivity", "cuGetExportTable", "curve"}
    assert stubs.wanted(imported, {"cudaMalloc"}) == ["cudaNew"]


def test_a_refused_stub_returns_an_error_of_its_library() -> None:
    text = stubs.source(["ncclSend", "ncclGetErrorString", "cufftCreate", "cudaIpcOpenMemHandle", "cuFileRead"])
    assert 'int ncclSend() { standin::refuse("ncclSend", 0); return 3; }' in text
    assert "const char* ncclGetErrorString()" in text
    assert "return 16;" in text
    assert "return 801;" in text
    assert "long cuFileRead()" in text


def test_all_device_sources_are_in_the_wheel() -> None:
    folders = {path.parent.relative_to(build.SOURCES) for path in build._sources()}
    assert folders == {Path(), Path("crt")}  # pyproject.toml names these two
    assert all(os.fspath(path).isascii() for path in build._sources())


def test_a_library_takes_as_much_room_as_the_loader_gives_it() -> None:
    import _ctypes  # whose file is mapped now

    path = Path(_ctypes.__file__)
    ends = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
    ]
    mapped = max(int(end, 16) for _, end in ends) - min(int(begin, 16) for begin, _ in ends)
    assert mapped <= elf.span(path) <= mapped + (1 << 16)  # data that is zero has no page of the file


def test_room_of_cudnn_is_that_of_its_libraries_or_not_known(site: Path) -> None:
    import _ctypes

    folder = site / "nvidia" / "cu13" / "lib"
    folder.mkdir()
    found = build.find_torch(sys.executable)
    for part in build._DNN_PARTS:
        assert build.dnn_spans(found) == ()
        (folder / f"libcudnn_{part}.so.9").write_bytes(Path(_ctypes.__file__).read_bytes())
    assert build.dnn_spans(found) == (elf.span(Path(_ctypes.__file__)),) * len(build._DNN_PARTS)
    (folder / "libcudnn_ops.so.9").write_bytes(b"damaged")
    assert build.dnn_spans(found) == ()
