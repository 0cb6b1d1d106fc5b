"""Which process of a job this is."""

from __future__ import annotations

import pytest

from memtrace.record.inside import process

LAUNCHERS = {
    "deepspeed": ["/env/bin/python", "/env/bin/deepspeed", "--num_gpus", "2", "train.py"],
    "deepspeed's launcher": ["/env/bin/python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30="],
    "torchrun": ["/env/bin/python", "/env/bin/torchrun", "--nproc_per_node", "2", "train.py"],
    "torch.distributed.run": ["python", "-m", "torch.distributed.run", "train.py"],
    "accelerate": ["/env/bin/python3.11", "/env/bin/accelerate", "launch", "train.py"],
    "accelerate as a module": ["python", "-maccelerate.commands.launch", "train.py"],
    "with options": ["python", "-W", "ignore", "-X", "utf8", "-m", "torch.distributed.launch", "train.py"],
}  # fmt: skip
RANKS = {
    "a script": ["python", "-u", "train.py", "--local_rank=0"],
    "a script of that name elsewhere": ["python", "my_torchrun.py"],
    "a module": ["python", "-m", "project.train", "deepspeed"],
    "code": ["python", "-c", "import torch", "torchrun"],
    "standard input": ["python", "-"],
    "nothing": ["python"],
    "a package whose name begins so": ["python", "-m", "deepspeed.launcherless"],
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command_line", lambda: LAUNCHERS[name])
    assert process.is_launcher()


@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_not_launchers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command_line", lambda: RANKS[name])
    assert not process.is_launcher()


@pytest.mark.parametrize(
    ("variables", "rank", "world"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "5"}, 3, 8),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2, 4),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "16"}, 7, 16),
        ({"RANK": "", "WORLD_SIZE": "many"}, None, None),
        ({"RANK": "99999999999"}, None, None),
        ({}, None, None),
    ],
)
def test_rank_and_world_come_from_the_launcher(
    variables: dict[str, str], rank: int | None, world: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*process._RANKS, *process._WORLDS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (process.rank(), process.world()) == (rank, world)
