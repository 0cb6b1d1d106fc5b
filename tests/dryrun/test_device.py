"""The compiled library, called as CUDA programs call it. Needs a C++ compiler and CUDA's headers, no GPU.

MEMTRACE_CUDA_PYTHON names an interpreter that has a CUDA build of torch; without it these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from memtrace.dryrun import build
from memtrace.errors import DryRunError

PYTHON = os.environ.get("MEMTRACE_CUDA_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="MEMTRACE_CUDA_PYTHON names no interpreter with a CUDA build of torch"
)

PRELUDE = """
import ctypes, os, sys
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p, create_string_buffer
M = 1 << 20
lib = ctypes.CDLL(sys.argv[1])
lib.memtrace_report.restype = ctypes.c_char_p
lib.memtrace_reserved_bytes.restype = lib.memtrace_outside_bytes.restype = c_ulonglong

def ok(error): assert error == 0, error
def malloc(mib):
    p = c_void_p(); ok(lib.cudaMalloc(byref(p), c_size_t(int(mib * M)))); return p.value
def free(p): return lib.cudaFree(c_void_p(p))
def available():
    f, t = c_size_t(), c_size_t(); ok(lib.cudaMemGetInfo(byref(f), byref(t))); return f.value
def report():
    lines = (line.split("\\t") for line in lib.memtrace_report().decode().splitlines())
    return {name: (kind, int(count)) for kind, count, name in lines}
def handle(make, *rest):
    h = c_void_p(); ok(make(byref(h), *rest)); return h
def kind(p):
    a = (c_int * 32)(); ok(lib.cudaPointerGetAttributes(a, c_void_p(p))); return a[0], a[1]
def reserve(mib):
    p, zero = c_ulonglong(), c_ulonglong(0)
    ok(lib.cuMemAddressReserve(byref(p), c_size_t(mib * M), c_size_t(0), zero, zero)); return p.value
def create(mib, device=0):
    h = c_ulonglong(); prop = (c_int * 32)(1, 0, 1, device)
    return lib.cuMemCreate(byref(h), c_size_t(mib * M), prop, c_ulonglong(0)), h.value
def map_(p, mib, h): return lib.cuMemMap(c_ulonglong(p), c_size_t(mib * M), c_size_t(0), c_ulonglong(h), c_ulonglong(0))
def unmap(p, mib): return lib.cuMemUnmap(c_ulonglong(p), c_size_t(mib * M))
def release(h): return lib.cuMemRelease(c_ulonglong(h))
"""


@pytest.fixture(scope="module")
def device_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build.library(build.find_torch(PYTHON), tmp_path_factory.mktemp("device"), lambda: None)
    except DryRunError as error:
        if "did not compile" in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def run(device_library: Path) -> Callable[..., str]:
    """Runs a program in a process of its own: its address space is a fresh one."""

    def program(body: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(device_library)],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return program


def test_first_places(run: Callable[..., str]) -> None:
    run("""
        small, large = malloc(2), malloc(20)
        a = large - 8 * M
        assert a % (32 * M) == 0
        assert small == a - 66 * M
        assert malloc(4) == a + 28 * M  # what is left of the older slab
        assert malloc(1) % (32 * M) == 0  # all is full: a new slab
    """)


def test_the_smallest_hole_of_the_newest_slab(run: Callable[..., str]) -> None:
    run("""
        for mib in (2, 24): malloc(mib)  # fills the driver's own slabs
        older = [malloc(size) for size in (2, 6, 2, 4, 2, 16)]  # 32: one slab
        newer = malloc(2050)  # 2080: 30 are left
        assert newer % (32 * M) == 0
        assert malloc(20) == newer + 2050 * M
        ok(free(older[1])); ok(free(older[3]))
        assert malloc(4) == newer + 2070 * M  # the newest slab that can, although 4 would fit exactly in the older
        assert malloc(6) == newer + 2074 * M
        assert malloc(4) == older[3]  # smallest hole that fits
        assert malloc(4) == older[1]  # the low end
        ok(free(older[2]))
        assert malloc(4) == older[1] + 4 * M  # neighbours have joined: 2 and 2
    """)


def test_an_empty_slab_is_given_back(run: Callable[..., str]) -> None:
    run("""
        for mib in (2, 24): malloc(mib)
        p = malloc(20)
        assert kind(p) == (2, 0) and kind(p + 20 * M) == (2, 0)
        ok(free(p))
        assert kind(p)[0] == 0
        assert not any(line.startswith(f"{p:x}-") for line in open("/proc/self/maps"))
        assert malloc(20) == p  # the highest free range, again
    """)


def test_out_of_memory_comes_at_the_limit(run: Callable[..., str]) -> None:
    run(
        """
        assert lib.memtrace_outside_bytes() == 200 * M
        assert available() == 824 * M
        p = malloc(800)
        assert lib.memtrace_reserved_bytes(0) == 800 * M
        q = c_void_p()
        assert lib.cudaMalloc(byref(q), c_size_t(25 * M)) == 2 and not q.value
        assert lib.cudaMalloc(byref(q), c_size_t(2**64 - 1)) == 2
        assert lib.cudaGetLastError() == 2 and lib.cudaGetLastError() == 0
        malloc(24); assert available() == 0
        ok(free(p)); assert available() == 800 * M
        ok(lib.cudaFree(None))
        """,
        MEMTRACE_GPU_MEMORY=str(1 << 30),
        MEMTRACE_GPU_CONTEXT=str(200 << 20),
    )


def test_larger_kernels_move_the_drivers_memory(run: Callable[..., str]) -> None:
    """The block for local memory is given up, and torch's segments go where it was."""
    run("""
        small = malloc(2)  # at the end of the slab whose first 414 MiB the driver has
        for mib in (24, 32): malloc(mib)
        lib.__getattr__("__cudaRegisterFunction")(None, c_void_p(32), None, b"reduce_kernelI", *[None] * 6)
        launch = lib.cudaLaunchKernel
        launch.argtypes = [c_void_p] + [c_uint] * 6 + [c_void_p, c_size_t, c_void_p]
        ok(launch(32, 1, 1, 1, 1, 1, 1, None, 0, None))
        assert malloc(20) == small - 414 * M
        handle(lib.cublasCreate_v2)  # its 64 MiB; its kernels lie beside the first
        assert malloc(20) == small - 414 * M + 84 * M
    """)


def test_memory_outside_torch_is_that_of_the_h200(run: Callable[..., str]) -> None:
    """As cudaMemGetInfo told there: a training loop, with attention by cuDNN, with side streams."""
    run("""
        def outside(): return lib.memtrace_outside_bytes() / M
        launch = lib.cudaLaunchKernel
        launch.argtypes = [c_void_p] + [c_uint] * 6 + [c_void_p, c_size_t, c_void_p]
        ok(lib.cudaFree(None))
        assert outside() == 526.8125
        register = lib.__getattr__("__cudaRegisterFunction")  # as nvcc's code does before main
        small, large = c_void_p(16), c_void_p(32)
        register(None, small, None, b"_ZN2at6native29distribution_elementwise_grid_stride_kernelIfLi4EE", *[None] * 6)
        register(None, large, None, b"_ZN2at6native29vectorized_elementwise_kernelILi4EE", *[None] * 6)
        for _ in range(2): ok(launch(small, 1, 1, 1, 1, 1, 1, None, 0, None))
        assert outside() == 528.8125
        for _ in range(2): ok(launch(large, 1, 1, 1, 1, 1, 1, None, 0, None))
        assert outside() == 618.8125
        handle(lib.cublasCreate_v2); handle(lib.cublasCreate_v2)  # the program's thread, and autograd's
        assert outside() == 750.8125
        handle(lib.cudnnCreate); handle(lib.cudnnCreate)
        assert outside() == 766.8125
        for _ in range(128): handle(lib.cudaStreamCreateWithPriority, c_uint(1), c_int(0))
        assert outside() == 836.8125
        before = available()
        malloc(2)
        assert before - available() == 2 * M and outside() == 836.8125
    """)


def test_bad_arguments(run: Callable[..., str]) -> None:
    run("""
        assert lib.cudaSetDevice(1) == 101 and lib.cudaSetDevice(-1) == 101
        assert lib.cudaDeviceGetAttribute(byref(c_int()), 16, 1) == 101
        assert lib.cuDeviceGet(byref(c_int()), 1) == 101
        p = malloc(2)
        assert free(p + 512) == 1 and free(id(p)) == 1
        ok(free(p)); assert free(p) == 1
        assert report()["free of an unknown pointer"] == ("note", 3)
        assert lib.cudaMemset(c_void_p(id(p)), 0, c_size_t(1)) == 1
        assert lib.cudaIpcGetMemHandle(None, None) == 801
        assert report()["cudaIpcGetMemHandle"] == ("refused", 1)
        f = c_void_p()
        assert lib.cuGetProcAddress_v2(b"cuGetExportTable", byref(f), 12000, c_ulonglong(0), None) == 500
        assert not f.value
    """)


def test_virtual_memory_is_used_until_released_and_unmapped(run: Callable[..., str]) -> None:
    run(
        """
        before = available()
        p = reserve(64)
        assert available() == before and kind(p) == (2, 0)
        error, h = create(20); ok(error)
        assert available() == before - 20 * M
        ok(map_(p, 20, h)); assert map_(p, 20, h) == 1 and map_(p + 60 * M, 20, h) == 1
        ok(release(h)); assert available() == before - 20 * M  # still mapped
        assert unmap(p, 10) == 1 and unmap(p + 20 * M, 20) == 1
        ok(unmap(p, 20)); assert available() == before
        assert release(h) == 1 and map_(p, 20, h) == 1
        error, h = create(20); ok(map_(p, 20, h)); ok(unmap(p, 20)); assert available() == before - 20 * M
        ok(release(h)); assert available() == before
        error, a = create(2); error, b = create(2)
        ok(map_(p, 2, a)); ok(map_(p + 2 * M, 2, b)); ok(release(a)); ok(release(b))
        assert lib.cuMemAddressFree(c_ulonglong(p), c_size_t(64 * M)) == 1
        ok(unmap(p, 4)); assert available() == before  # two mappings at once
        ok(lib.cuMemAddressFree(c_ulonglong(p), c_size_t(64 * M))); assert kind(p)[0] == 0
        assert create(1)[0] == 1 and create(2, 5)[0] == 101
        assert create(4096)[0] == 2
        """,
        MEMTRACE_GPU_MEMORY=str(2 << 30),
    )


def test_several_devices(run: Callable[..., str]) -> None:
    run(
        """
        n = c_int(); ok(lib.cudaGetDeviceCount(byref(n))); assert n.value == 2
        active = c_int(); ok(lib.cuDevicePrimaryCtxGetState(1, byref(c_uint()), byref(active))); assert not active.value
        p = malloc(2); ok(lib.cudaSetDevice(1)); before = available(); q = malloc(2)
        assert kind(p) == (2, 0) and kind(q) == (2, 1) and before - available() == 2 * M
        assert lib.memtrace_reserved_bytes(0) == lib.memtrace_reserved_bytes(1) == 2 * M
        r = reserve(2); error, h = create(2, 1); ok(error); ok(map_(r, 2, h)); assert kind(r) == (2, 1)
        one, other = handle(lib.cuCtxGetCurrent), handle(lib.cuDevicePrimaryCtxRetain, 0)
        assert one.value != other.value
        ok(lib.cuCtxSetCurrent(other)); d = c_int(); ok(lib.cudaGetDevice(byref(d))); assert d.value == 0
        ok(free(q)); assert lib.memtrace_reserved_bytes(1) == 2 * M
        """,
        MEMTRACE_GPU_COUNT="2",
    )


def test_pinned_memory(run: Callable[..., str]) -> None:
    run("""
        p = handle(lib.cudaHostAlloc, c_size_t(3 * M), 0).value
        assert kind(p) == (1, 0) and kind(p + 3 * M - 1) == (1, 0)
        ok(lib.cudaFreeHost(c_void_p(p))); assert kind(p)[0] == 0 and lib.cudaFreeHost(c_void_p(p)) == 1
        mine = create_string_buffer(9000); at = ctypes.addressof(mine)
        ok(lib.cudaHostRegister(c_void_p(at), c_size_t(9000), 0)); assert kind(at)[0] == 1
        assert lib.cudaHostRegister(c_void_p(at + 5), c_size_t(5), 0) == 712
        ok(lib.cudaHostUnregister(c_void_p(at))); assert kind(at)[0] == 0
        assert lib.cudaHostUnregister(c_void_p(at)) == 713
    """)


def test_copies_and_answers(run: Callable[..., str]) -> None:
    run(
        """
        p = malloc(4); text = create_string_buffer(b"hello", 8); back = create_string_buffer(8)
        ok(lib.cudaMemcpy(c_void_p(p), text, c_size_t(8), 1)); ok(lib.cudaMemcpy(back, c_void_p(p), c_size_t(8), 2))
        assert back.value == b"hello"
        lib.memtrace_answer(c_ulonglong(41), 8); lib.memtrace_answer(c_ulonglong(42), 8)
        for wanted in (41, 42):
            n = c_ulonglong(); ok(lib.cudaMemcpy(byref(n), c_void_p(p), c_size_t(8), 2)); assert n.value == wanted
        lib.memtrace_answer(c_ulonglong(1), 4); assert lib.memtrace_answers_left() == 1
        ok(lib.cudaMemcpy(back, c_void_p(p), c_size_t(8), 2)); assert back.value == b"hello"
        lib.memtrace_answer(c_ulonglong(0), 0); assert lib.memtrace_answers_left() == 0
        big = create_string_buffer(b"x" * 5000); ok(lib.cudaMemcpy(c_void_p(p), big, c_size_t(5000), 1))
        ok(lib.cudaMemcpy(back, c_void_p(p), c_size_t(8), 2)); assert back.value == b"hello"  # above the limit: skipped
        """,
        MEMTRACE_GPU_COPY_LIMIT="4096",
    )


def test_capture(run: Callable[..., str]) -> None:
    run("""
        s, t = handle(lib.cudaStreamCreate), handle(lib.cudaStreamCreate); e = handle(lib.cudaEventCreate)
        def capturing(stream):
            n = c_int(9); ok(lib.cudaStreamIsCapturing(stream, byref(n))); return n.value
        ok(lib.cudaStreamBeginCapture(s, 0)); assert capturing(s) == 1 and capturing(t) == 0
        assert lib.cudaStreamBeginCapture(s, 0) == 401 and lib.cudaStreamBeginCapture(None, 0) == 900
        ok(lib.cudaEventRecord(e, s)); ok(lib.cudaStreamWaitEvent(t, e, 0)); assert capturing(t) == 1
        assert lib.cudaStreamSynchronize(s) == 900
        u = handle(lib.cudaStreamCreate); ok(lib.cudaStreamBeginCapture(u, 0))
        graph = handle(lambda g: lib.cudaStreamEndCapture(s, g))
        assert (capturing(s), capturing(t), capturing(u)) == (0, 0, 1)  # another's capture goes on
        ok(lib.cudaStreamWaitEvent(t, e, 0)); assert capturing(t) == 0
        assert lib.cudaStreamEndCapture(s, byref(c_void_p())) == 401
        x = handle(lib.cudaGraphInstantiate, graph, c_ulonglong(0)); ok(lib.cudaGraphLaunch(x, s))
        nodes = c_size_t(); ok(lib.cudaGraphGetNodes(graph, None, byref(nodes))); assert nodes.value == 1
    """)


def test_events(run: Callable[..., str]) -> None:
    body = """
        a, b = handle(lib.cudaEventCreate), handle(lib.cudaEventCreate); f = c_float()
        assert lib.cudaEventElapsedTime(byref(f), a, b) == 400
        ok(lib.cudaEventRecord(a, None)); ok(lib.cudaEventRecord(b, None))
        ok(lib.cudaEventElapsedTime(byref(f), a, b)); assert f.value == 1
        ok(lib.cudaEventElapsedTime(byref(f), b, a)); assert f.value == -1
        print(lib.cudaEventQuery(a)); ok(lib.cudaDeviceSynchronize()); print(lib.cudaEventQuery(a))
    """
    assert run(body).split() == ["0", "0"]
    assert run(body, MEMTRACE_GPU_LATE_EVENTS="1").split() == ["600", "0"]


def test_which_gpu(run: Callable[..., str]) -> None:
    body = """
        n = c_int()
        for which in (75, 76, 16, 39, 81, 97, 106, 120):
            ok(lib.cudaDeviceGetAttribute(byref(n), which, 0)); print(n.value)
    """
    assert run(body).split() == "9 0 132 2048 233472 232448 32 1".split()
    assert run(body, MEMTRACE_GPU_SM="80").split() == "8 0 108 2048 167936 166912 32 0".split()
    ada = run(body, MEMTRACE_GPU_SM="89", MEMTRACE_GPU_SMS="142")
    assert ada.split() == "8 9 142 1536 102400 101376 24 0".split()


def test_threads_and_forks(run: Callable[..., str]) -> None:
    run("""
        import threading
        def work():
            for i in range(300): ok(free(malloc(2 + i % 40)))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads: t.start()
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                malloc(2); lib.memtrace_report(); os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        for t in threads: t.join()
        assert lib.memtrace_reserved_bytes(0) == 0
    """)


def test_other_programs_run_under_it(device_library: Path) -> None:
    for program in (["/bin/sh", "-c", "echo fine"], [sys.executable, "-c", "print('fine')"]):
        environment = {**os.environ, "LD_PRELOAD": str(device_library)}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert (done.stdout, done.stderr) == ("fine\n", "")


def test_it_shows_only_cuda_names_and_needs_only_the_c_library(device_library: Path) -> None:
    from memtrace.dryrun import elf

    shown = elf.names(device_library).defined
    own = {name for name in shown if not name.startswith(("cu", "__cuda", "nccl", "memtrace_"))}
    assert own == {"_ZN3c104impl21dispatch_mode_enabledEv", "_ZN3c104cuda17get_fabric_accessEa"}
    assert not {"cuGetExportTable", "cudaGetExportTable"} & shown
    assert {"memtrace_report", "memtrace_answer", "memtrace_can_hide"} <= shown
