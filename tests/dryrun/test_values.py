"""What a program reads back, and the errors it gets, where no kernel runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin import dryrun, needs_standin

pytestmark = [needs_standin, pytest.mark.slow]


def test_a_check_for_what_is_not_finite_finds_nothing(tmp_path: Path) -> None:
    """As older DeepSpeeds check the gradients of fp16: numbers are made of a mask, and their maximum is read."""
    run = dryrun(
        tmp_path,
        """
import torch
for count in (100, 20480, 1 << 24):  # all small; small masks but large numbers; all large
    x = torch.ones(count, device="cuda", dtype=torch.float16)
    numbers = x.float()
    print(numbers.isnan().logical_or(numbers.isinf()).float().max().item())
print(torch.ones(1 << 24, device="cuda").max().item())
x = torch.full((4,), float("inf"), device="cuda")
print(x.isinf().float().max().item())
""",
    )
    assert (run.code, run.out.split()) == (0, ["0.0", "0.0", "0.0", "1.0", "1.0"])


def test_out_of_memory_in_backward_is_what_the_program_gets(tmp_path: Path) -> None:
    """And nothing of the step that failed stays alive: a program may go on with a smaller one."""
    run = dryrun(
        tmp_path,
        """
import time
import torch
layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)]
model = torch.nn.Sequential(*layers).cuda()
before = torch.cuda.memory_allocated()
torch.cuda.set_per_process_memory_fraction(760 * 2**20 / torch.cuda.get_device_properties(0).total_memory)
for rows in (512, 4096):
    try:
        loss = model(torch.empty(rows, 4096, device="cuda")).sum()
        if rows == 512: loss.backward()
    except torch.OutOfMemoryError as error:
        print("out of memory", "Tried to allocate 64.00 MiB" in str(error))
    loss = None
    model.zero_grad()
    torch._C._cuda_clearCublasWorkspaces()
    for _ in range(100):  # autograd's thread lets go of what failed when it comes to it
        if torch.cuda.memory_allocated() > before: time.sleep(0.05)
    print(torch.cuda.memory_allocated() == before)
""",
    )
    assert (run.code, run.out.splitlines()) == (0, ["out of memory True", "True"] * 2)


def test_subclasses_with_and_without_a_say_in_every_operator(tmp_path: Path) -> None:
    """bitsandbytes has parameters of the first kind (its own class, memory as ever), DTensor tensors of the second."""
    run = dryrun(
        tmp_path,
        """
import torch

class Quantized(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
    def __init__(self, inner):
        self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = lambda one: one.inner if isinstance(one, Wrapper) else one
        return Wrapper(func(*torch.utils._pytree.tree_map(inner, args), **(kwargs or {})))

p = Quantized(torch.tensor([1.0, 2.0]), requires_grad=False)
q = p.detach().contiguous().cuda()
print((q * 2).tolist(), type(p.data).__name__)
w = Wrapper(torch.tensor([3, 4], device="cuda"))
print((w + 1).inner.tolist(), (w + w).inner.tolist())
""",
    )
    assert (run.code, run.out.splitlines()) == (0, ["[2.0, 4.0] Tensor", "[4, 5] [6, 8]"]), run.err
