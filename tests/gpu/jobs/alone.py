"""Rank 0 of many by the job's own means: torch's fake group, and collectives that leave finite numbers behind."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


class Done:
    """A handle of something that is done."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def reduce_scatter_tensor(output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:  # noqa: A002
    output.copy_(input.view(-1)[: output.numel()].view_as(output))
    return Done() if async_op else None


def join(world: int) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=world)
    dist.reduce_scatter_tensor = reduce_scatter_tensor
    dist.all_gather_into_tensor = torch.no_grad()(dist.all_gather_into_tensor)
