"""What a dry run had to choose is said by kind and shape, and `--band` runs the job at the other end of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from standin import PYTHON, dryrun, needs_standin

from memtrace.cli import dryrun_band, dryrun_text
from memtrace.cli.dryrun_again import Result
from memtrace.cli.dryrun_text import Assumption

CONVOLUTION = "convolution workspace guessed as {} bytes: forward, input {}x3x8x8, weights 4x3x3x3, 4 bytes an element"


def guess(size: int, batch: int, count: int = 1) -> Assumption:
    return Assumption("convolution", CONVOLUTION.format(size, batch), count, None)


def test_convolutions_are_one_row_with_the_largest() -> None:
    unknown = Assumption("convolution", "convolution workspace taken as 0: of unknown shape", 2, None)
    other = Assumption("world", "one of 8", 1, None)
    found = list(dryrun_text._short([guess(900, 1, 3), other, guess(4 << 20, 2), guess(1000, 3), unknown]))
    assert [(one.code, one.count) for one in found] == [("convolution", 5), ("world", 1), ("convolution", 2)]
    assert found[0].text == (
        "workspaces of 3 shapes, guessed; the largest 4.00 MiB: "
        "forward, input 2x3x8x8, weights 4x3x3x3, 4 bytes an element"
    )


def end(index: int, fits: bool | None, allocated: int | None, reserved: int | None) -> dryrun_band.End:
    return dryrun_band.End(dryrun_band.CHOICES[index], Result(fits, allocated, reserved, 1 << 30, (), 1.0))


def test_the_ends_of_the_band_in_words() -> None:
    class Rank:
        def __init__(self, allocated: int, reserved: int) -> None:
            self.allocated, self.reserved = allocated, reserved

    ranks = [Rank(2 << 30, 2 << 30), Rank(1 << 30, 3 << 30)]
    ends = [end(0, True, 2 << 30, 4 << 30), end(1, False, 1 << 30, 3 << 30), end(1, None, None, None)]
    assert [one.partition(": ")[2] for one in dryrun_band.sentences(ends, ranks)] == [  # type: ignore[arg-type]
        "peak allocated the same, reserved 4.00 GiB (+1.00 GiB); it fits with 1.00 GiB to spare",
        "peak allocated 1.00 GiB (-1.00 GiB), reserved the same; it does not fit",
        "not known, the job failed",
    ]
    assert "nothing that was chosen has another end" in next(iter(dryrun_band.sentences([], [])))


STREAMS = """
import torch
side = torch.cuda.Stream()
convolution = torch.nn.Conv2d(3, 64, 3).cuda()
for step in range(4):
    for _ in range(6):
        held = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            held.add_(1)
        held.record_stream(side)
        del held
    convolution(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
torch.cuda.synchronize()
"""


@needs_standin
@pytest.mark.slow
def test_a_band(tmp_path: Path) -> None:
    run = dryrun(tmp_path, STREAMS, "--band")
    assert run.code == 0, run.err
    (rank,) = run.report["ranks"]
    late, without = run.report["band"]
    assert (late["assumption"], without["assumption"]) == ("streams", "convolution")
    # Nobody waits before the end: each of the 24 blocks needs a place of its own, where else they share one.
    assert late["reserved_peak_bytes"] - rank["reserved_peak_bytes"] >= 22 * (16 << 20)
    assert late["room_bytes"] == run.report["room_bytes"] - (late["reserved_peak_bytes"] - rank["reserved_peak_bytes"])
    assert without["allocated_peak_bytes"] <= rank["allocated_peak_bytes"]
    assert "if work on other streams is done only when the program waits: peak" in run.err
    assert [path.name for path in (tmp_path / "rec").glob(".again*")] == []


@needs_standin
@pytest.mark.slow
def test_what_was_chosen_is_named(tmp_path: Path) -> None:
    script = """
import torch
q = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for step in range(2):
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
x = torch.randn(2, 64, 16, 16, device="cuda")
torch.nn.functional.conv2d(x, torch.ones(64, 64, 3, 3, device="cuda"), padding=1)
"""
    run = dryrun(tmp_path, script)
    assert run.code == 0, run.err
    texts = {row["code"]: (row["text"], row["count"]) for row in run.report["assumptions"]}
    text, count = texts["attention"]
    assert count == 2
    assert re.fullmatch(r"(flash|cuDNN) attention, as torch chooses on this GPU", text)
    text, _ = texts["convolution"]
    copies = (2 * 64 * 16 * 16 * 2 + 64 * 64 * 9) * 4 + 16  # of input, output and weights: what an H200 takes
    shape = "input 2x64x16x16, weights 64x64x3x3, 4 bytes an element"
    assert text == f"convolution workspace guessed as {copies} bytes: forward, {shape}"
    assert "--band runs it again" in run.err
    assert "band" not in run.report


@needs_standin
def test_a_job_that_a_signal_ended_is_told_as_such(tmp_path: Path) -> None:
    script = """
import os, signal, torch
x = torch.ones(8, device="cuda")
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = dryrun(tmp_path, script)
    assert run.code == -9
    assert "the command was ended by SIGKILL" in run.err
    assert "no process of the command reported" not in run.err
    assert run.report["fits"] is None


@needs_standin
@pytest.mark.slow
def test_an_extension_with_a_runtime_of_its_own_is_named(tmp_path: Path) -> None:
    site = Path(PYTHON).parent.parent / "lib"
    runtime = next(iter(site.glob("python*/site-packages/nvidia/*/lib/libcudart_static.a")), None)
    if runtime is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and libcudart_static.a")
    source, library = tmp_path / "own.cpp", tmp_path / "libown.so"
    source.write_text(
        'extern "C" int cudaMalloc(void**, unsigned long);\n'
        'extern "C" int take() { void* p; return cudaMalloc(&p, 4096); }\n'
    )
    hidden = ["-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL"]
    command = ["g++", "-shared", "-fPIC", *hidden, "-o", library, source, runtime, "-lpthread", "-ldl", "-lrt"]
    subprocess.run(command, check=True)
    run = dryrun(
        tmp_path,
        f"""
import ctypes, torch
x = torch.ones(8, device="cuda")
print(ctypes.CDLL({str(library)!r}).take() != 0)
""",
    )
    assert (run.code, run.out) == (0, "True\n"), run.err
    (text,) = [row["text"] for row in run.report["assumptions"] if row["code"] == "refused"]
    assert text.startswith("libown.so has a CUDA runtime of its own linked in")
