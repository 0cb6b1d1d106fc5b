"""One rank of several: what others would tell it is made up where memory does not depend on it, and else refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from standin import dryrun, needs_standin

from memtrace.dryrun.inside import messages
from memtrace.dryrun.inside.guesses import Guesses


class Received:
    """A tensor, as far as a message is looked at."""

    def __init__(self, count: int, *, is_float: bool = False) -> None:
        self.dtype = SimpleNamespace(is_floating_point=is_float, is_complex=False)
        self._count = count

    def numel(self) -> int:
        return self._count


def told(what: str, place: Any) -> list[dict[str, Any]]:
    world, guesses = SimpleNamespace(on_message=None), Guesses()
    messages.install(world, guesses)
    world.on_message(what, place)
    return guesses.rows()


def test_activations_and_shared_objects_are_made_up_and_counted() -> None:
    (row,) = told("numbers", Received(8, is_float=True))
    assert (row["code"], row["text"], row["count"]) == ("message", "numbers from another rank: zeros", 1)
    assert [row["code"] for row in told("numbers", Received(4096))] == ["message"]
    assert [row["code"] for row in told("a shared object", [None])] == ["message"]


@pytest.mark.parametrize(("what", "place"), [("numbers", Received(256)), ("an object", [{}])])
def test_what_may_be_a_size_is_refused(what: str, place: Any) -> None:
    with pytest.raises(messages.MessageError, match=f"waits for {what} from another one.*--rank 0"):
        told(what, place)


PIPELINE = """
import deepspeed, torch, torch.nn as nn
from deepspeed.pipe import PipelineModule, LayerSpec
deepspeed.init_distributed()
net = PipelineModule([LayerSpec(nn.Linear, 512, 512) for _ in range(8)], num_stages=2, loss_fn=nn.MSELoss())
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
          "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
def batches():
    while True:
        yield torch.randn(4, 512), torch.randn(4, 512)
batch = batches()
for _ in range(3):
    engine.train_batch(batch)
"""


@needs_standin
@pytest.mark.slow
def test_the_first_stage_of_a_pipeline_runs_and_the_second_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    first = dryrun(tmp_path / "0", PIPELINE, "--world", "2")
    assert first.code == 0, first.err
    assert first.sidecar()["steps"] == 3
    message = next(row for row in first.report["assumptions"] if row["code"] == "message")
    assert message["where"].startswith("0/job.py:14 ")
    second = dryrun(tmp_path / "1", PIPELINE, "--world", "2", "--rank", "1")
    assert second.code == 1
    assert "MessageError: this rank waits for numbers from another one" in second.err
    assert second.report["fits"] is None


@needs_standin
@pytest.mark.slow
def test_a_tensor_parallel_rank_has_its_part(tmp_path: Path) -> None:
    script = """
import torch, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (4,))
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
before = torch.cuda.memory_allocated()
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
after = torch.cuda.memory_allocated()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(8, 1024, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
print(before, after)
"""
    run = dryrun(tmp_path, script, "--world", "4", "--rank", "1")
    assert run.code == 0, run.err
    assert run.sidecar(1)["steps"] == 3
    whole, part = map(int, run.out.split())
    assert whole == 4 * (2 * 1024 * 4096 + 4096 + 1024)
    assert part == 4 * (2 * 1024 * 1024 + 1024 + 1024)  # of each matrix a quarter; the second bias is everybody's
    assert "unwaited" not in run.err


@needs_standin
def test_an_object_for_all_comes_from_the_rank_that_sends_it(tmp_path: Path) -> None:
    script = """
import torch.distributed as dist
dist.init_process_group("nccl")
mine, theirs = ["mine"], [None]
dist.broadcast_object_list(mine, src=1)
dist.broadcast_object_list(theirs, src=0)
print(mine, theirs)
dist.recv_object_list([None], src=0)
"""
    run = dryrun(tmp_path, script, "--world", "2", "--rank", "1")
    assert (run.code, run.out) == (1, "['mine'] [None]\n")
    assert "waits for an object from another one" in run.err
    (message,) = [row for row in run.report["assumptions"] if row["code"] == "message"]
    assert (message["count"], message["where"].rpartition(" ")[0]) == (1, f"{tmp_path.name}/job.py:6")
