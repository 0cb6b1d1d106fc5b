"""Commands taken apart: programs before the job, Pythons of scripts, and launchers by their own parsers."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from memtrace.dryrun import unwrap
from memtrace.dryrun.command import Plan, interpreter, plan
from memtrace.errors import DryRunError
from memtrace.record.launch import CommandError

PYTHON = standin.PYTHON or sys.executable
"""Whose launchers are asked: those of the environment with a CUDA build of torch, if there is one."""


@functools.cache
def has(module: str) -> bool:
    asked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", asked], check=False).returncode == 0


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(module), reason=f"needs {module}")


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Without what launchers read from it."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ACCELERATE", "CUDA_", "DS_", "HF_", "OMP_"))
    }
    return {**kept, "HOME": str(home), "HF_HOME": str(home), "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.defpath}"}


# Without a launcher.


@pytest.mark.parametrize(
    "words",
    [
        "train.py --lr 1",
        "-u -X dev -m pkg.train --num_gpus 8",
        "-c pass",
        "train.py -m torch.distributed.run --nnodes 2",
    ],
)
def test_python_itself_is_run_as_it_is_written(words: str, environ: dict[str, str]) -> None:
    command = [PYTHON, *words.split()]
    found = plan(command, environ)
    assert found == Plan(PYTHON, tuple(command), {}, None, None, ())
    assert found.command(3, 8, 3) == command


def test_python_is_looked_for_in_the_path_of_the_job(tmp_path: Path) -> None:
    python = script(tmp_path / "python3", "#!/bin/sh\n")
    assert plan(["python3", "a.py"], {"PATH": str(tmp_path)}).python == python
    found = plan(["env", f"PATH={tmp_path}", "A=1", "python3", "a.py"], {"PATH": "/nowhere"})
    assert (found.python, found.environ) == (python, {"PATH": str(tmp_path), "A": "1"})


@pytest.mark.parametrize(
    "prefix",
    [
        "nohup",
        "nice -n 5",
        "nice -10",
        "time -v",
        "numactl -N 0 --membind=0 --",
        "numactl --cpunodebind 0 -l",
        "taskset -c 0-3",
        "timeout -k 5 1h",
        "stdbuf -oL",
        "env A=1 nohup",
    ],
)
def test_programs_that_run_the_rest_are_left_out(prefix: str, environ: dict[str, str]) -> None:
    found = plan([*prefix.split(), PYTHON, "-u", "a.py", "-n", "2"], environ)
    assert found.argv == (PYTHON, "-u", "a.py", "-n", "2")
    assert found.environ == ({"A": "1"} if "A=1" in prefix else {})
    assert found.notes == (f"{prefix.removeprefix('env A=1 ')} is left out",)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("srun -N 2 python train.py", "srun"),
        ("mpirun -np 8 python train.py", "mpirun"),
        ("bash run.sh", "bash"),
        ("nohup sh -c true", "sh"),
        ("env -i python train.py", "env -i"),
        ("uv run --with torch train.py", "uv run"),
        ("uv sync", "uv run"),
        ("python -m deepspeed.launcher.launch --world_info=e30= train.py", "second half"),
        ("accelerate config", "starts no job"),
        ("nohup", "names no job"),
        ("env A=1", "names no job"),
        (f"{PYTHON} -m torch.distributed.run", "no script"),
    ],
)
def test_what_cannot_be_looked_into_is_refused_with_what_to_write(
    command: str, says: str, environ: dict[str, str]
) -> None:
    with pytest.raises(DryRunError, match=says) as caught:
        plan(command.split(), environ)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_a_program_that_is_not_there_ends_as_it_does_under_record(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(CommandError, match="command not found") as caught:
        plan(["no-such-program"], environ)
    assert caught.value.exit_code == 127
    with pytest.raises(CommandError, match="Permission denied") as caught:
        plan([script(tmp_path / "train.py", "#!/usr/bin/env python3\n", 0o644)], environ)
    assert caught.value.exit_code == 126


@pytest.mark.parametrize(
    "head",
    [
        f"#!{PYTHON} -u\n",
        "#!/usr/bin/env python3\n",
        "#!/usr/bin/env -S python3 -u\n",
        "#!/bin/sh\n'''exec' \"{here}/python3\" \"$0\" \"$@\"\n' '''\n",
        "#!/bin/sh\n'''exec' '{here}/python3' \"$0\" \"$@\"\n' '''\n",
        "#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python3' \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_script_s_python_is_the_one_of_its_first_lines(head: str, tmp_path: Path) -> None:
    here = tmp_path / "a long directory"
    here.mkdir()
    python = script(here / "python3", "#!/bin/sh\n")
    expected = PYTHON if PYTHON in head else python
    found = script(here / "train", head.replace("{here}", str(here)) + "print(1)\n")
    assert interpreter([found, "--lr", "1"], str(here)) == expected
    assert plan([found, "--lr", "1"], {"PATH": str(here)}) == Plan(expected, (found, "--lr", "1"), {}, None, None, ())


def test_launchers_and_jobs_that_are_shell_scripts_are_refused(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    script(tmp_path / "torchrun", '#!/usr/bin/env bash\nexec pyenv exec "$@"\n')
    with pytest.raises(DryRunError) as caught:
        plan(["torchrun", "train.py"], environ)
    assert caught.value.hint == "Write: python -m torch.distributed.run ..."
    script(tmp_path / "run", "#!/bin/sh\npython train.py\n")
    assert interpreter(["run"], str(tmp_path)) is None
    with pytest.raises(DryRunError, match="run is a shell script"):
        plan(["run"], environ)


def test_uv_run_is_asked_for_its_python_and_variables(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f'#!/bin/sh\nexec {shlex.quote(PYTHON)} "$@"\n')
    script(tmp_path / "uv", f'#!/bin/sh\nshift\nshift\nexport INSIDE=1\nexec {shlex.quote(PYTHON)} "$@"\n')
    for job in (["python", "-u", "a.py"], ["python3", "-u", "a.py"]):
        found = plan(["uv", "run", *job], {"PATH": str(tmp_path)})
        assert found.argv[1:] == ("-u", "a.py")
        assert found.python == found.argv[0] != python
        assert found.environ["INSIDE"] == "1"
    assert plan(["uv", "run", "a.py"], {"PATH": str(tmp_path)}).argv == (found.python, "a.py")


def test_a_rank_s_values_are_filled_in_and_nothing_else_is() -> None:
    ranked = {"RANK": unwrap.RANK, "LOCAL_WORLD_SIZE": unwrap.LOCAL_WORLD, "GROUP_RANK": unwrap.NODE}
    argv = ("python", "a.py", f"--local_rank={unwrap.LOCAL_RANK}", "{local_rank}", "$rank", "rank")
    found = Plan("python", argv, {"A": "{rank}"}, 16, 8, (), ranked)
    assert found.command(11, 16, 3)[2:] == ["--local_rank=3", "{local_rank}", "$rank", "rank"]
    assert found.environment(11, 16, 3) == {"A": "{rank}", "RANK": "11", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}
    assert found.environment(3, 4, 3)["LOCAL_WORLD_SIZE"] == "4"


def test_a_library_that_is_not_there_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    empty = [PYTHON, "-S", "-E", unwrap.__file__, "torchrun", "a.py"]
    ran = subprocess.run(empty, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "torch is not installed in" in ran.stdout


# The launchers' own parsers.


def tail(found: Plan, rank: int = 0) -> list[str]:
    """Behind the Python, which is the one that ran the launcher."""
    words = found.command(rank, found.world or 8, rank % 4)
    assert words[0] == found.python == PYTHON
    return words[1:]


def torchrun(options: str, environ: dict[str, str]) -> Plan:
    return plan([PYTHON, "-m", "torch.distributed.run", *options.split()], environ)


@needs("torch")
def test_torchrun(environ: dict[str, str]) -> None:
    found = torchrun("--nproc-per-node 4 --nnodes 2 -m pkg.train --nproc-per-node 9 -m x --at=${local_rank}", environ)
    assert (found.world, found.local_world, found.notes) == (8, 4, ())
    assert tail(found, 6) == ["-u", "-m", "pkg.train", "--nproc-per-node", "9", "-m", "x", "--at=2"]
    assert found.environ["OMP_NUM_THREADS"] == "1"
    assert found.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    given = found.environment(6, 8, 2)
    assert {"RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items() <= given.items()
    assert {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}.items() <= given.items()
    assert "CUDA_VISIBLE_DEVICES" not in given


@needs("torch")
def test_torchrun_without_numbers(environ: dict[str, str], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = f"--standalone --nproc-per-node=gpu --log-dir {logs} -r 3 --no-python {PYTHON} a.py --standalone"
    found = torchrun(options, {**environ, "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1"})
    assert (found.world, found.local_world) == (None, None)
    assert "count the GPUs" in found.notes[0]
    assert tail(found) == ["a.py", "--standalone"]
    assert "OMP_NUM_THREADS" not in found.environ
    assert not logs.exists()
    found = torchrun("--nnodes 1:4 --nproc_per_node 8 a.py", environ)
    assert (found.world, found.local_world) == (None, 8)
    assert "1 to 4 nodes" in found.notes[0]
    found = torchrun("a.py", {**environ, "PET_NPROC_PER_NODE": "2"})
    assert (found.world, found.local_world) == (2, 2)


@needs("torch")
def test_torch_distributed_launch_hands_the_local_rank_over(environ: dict[str, str]) -> None:
    found = plan([PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node=4", "a.py", "b"], environ)
    assert tail(found, 3) == ["-u", "a.py", "--local-rank=3", "b"]


@needs("torch")
def test_usage_errors_are_the_launcher_s_own(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DryRunError, match="does not take these options"):
        torchrun("--no-such-option a.py", environ)
    assert "torchrun: error: " in capfd.readouterr().err
    with pytest.raises(DryRunError, match="would only show this"):
        torchrun("--help", environ)
    assert "usage: torchrun" in capfd.readouterr().err
    with pytest.raises(DryRunError, match="Unsupported nproc_per_node value: many"):
        torchrun("--nproc-per-node many a.py", environ)
    with pytest.raises(DryRunError, match="look into what sh would run"):
        torchrun("--no-python /bin/sh a.sh", environ)


def deepspeed(options: str, environ: dict[str, str]) -> Plan:
    return plan([PYTHON, "-m", "deepspeed.launcher.runner", *options.split()], environ)


@needs("deepspeed")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        ("--num_gpus 8 a.py --num_gpus 3", 8, ["-u", "a.py", "--local_rank=1", "--num_gpus", "3"]),
        ("--num_gpus=4 --module pkg.a --deepspeed", 4, ["-u", "-m", "pkg.a", "--local_rank=1", "--deepspeed"]),
        (f"--num_gpus 2 --no_python {PYTHON} -u", 2, ["--local_rank=1", "-u"]),
        ("--num_gpus 2 --no_local_rank a.py -i x", 2, ["-u", "a.py", "-i", "x"]),
        ("--include localhost:1,3 a.py", 2, ["-u", "a.py", "--local_rank=1"]),
        ("a.py --num_gpus 8", None, ["-u", "a.py", "--local_rank=1", "--num_gpus", "8"]),
    ],
)
def test_deepspeed(options: str, world: int | None, expected: list[str], environ: dict[str, str]) -> None:
    found = deepspeed(options, environ)
    assert (found.world, found.local_world) == (world, world)
    assert bool(found.notes) == (world is None)
    assert tail(found, 1) == expected
    devices = {"localhost:1,3": "1,3", None: None}.get(
        options.split()[1] if world == 2 else world, "0,1,2,3,4,5,6,7"[: 2 * (world or 0) - 1]
    )
    assert found.environ.get("CUDA_VISIBLE_DEVICES") == devices
    assert found.environment(1, 8, 1)["RANK"] == "1"


@needs("deepspeed")
@pytest.mark.slow
def test_deepspeed_with_a_hostfile(environ: dict[str, str], tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# nodes\na slots=4\nb slots=4\nc slots=2\n")
    found = deepspeed(f"-H {hostfile} --include a@b:0,1,2,3 --master_addr a a.py", environ)
    assert (found.world, found.local_world, found.notes) == (8, 4, ())
    assert tail(found, 5) == ["-u", "a.py", "--local_rank=1"]
    assert found.environ["MASTER_ADDR"] == "a"
    assert found.environment(5, 8, 1)["CROSS_RANK"] == "1"
    found = deepspeed(f"-H {hostfile} a.py", environ)
    assert (found.world, found.local_world) == (10, None)
    assert found.notes == ("the nodes have different numbers of GPUs: 4, 4, 2",)
    found = deepspeed(f"-H {hostfile} --num_nodes 2 --num_gpus 2 --launcher openmpi a.py", environ)
    assert (found.world, found.local_world) == (4, 2)
    assert tail(found) == ["-u", "a.py"]
    with pytest.raises(DryRunError, match="not found in hostfile"):
        deepspeed(f"-H {hostfile} -e d a.py", environ)
    with pytest.raises(DryRunError, match="Cannot specify num_nodes/gpus with include/exclude"):
        deepspeed(f"-H {hostfile} -e c --num_gpus 2 a.py", environ)


@needs("deepspeed")
@pytest.mark.slow
def test_deepspeed_takes_the_devices_that_are_visible(environ: dict[str, str]) -> None:
    found = deepspeed("a.py", {**environ, "CUDA_VISIBLE_DEVICES": "2,3,5"})
    assert (found.world, found.environ.get("CUDA_VISIBLE_DEVICES")) == (3, "2,3,5")


def accelerate(options: str, environ: dict[str, str]) -> Plan:
    return plan([PYTHON, "-m", "accelerate.commands.launch", *options.split()], environ)


@needs("accelerate")
@pytest.mark.slow
def test_accelerate_with_deepspeed(environ: dict[str, str]) -> None:
    if not has("deepspeed"):
        pytest.skip("needs deepspeed")
    options = "--num_processes 8 --use_deepspeed --deepspeed_config_file ds.json --mixed_precision bf16"
    found = accelerate(f"{options} a.py --num_processes 3", environ)
    assert (found.world, found.local_world, found.notes) == (8, 8, ())
    assert tail(found) == ["-u", "a.py", "--num_processes", "3"]
    assert found.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert found.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds.json"
    assert found.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert found.environment(7, 8, 7)["LOCAL_RANK"] == "7"


@needs("accelerate")
@pytest.mark.slow
def test_accelerate_with_fsdp_on_two_machines(environ: dict[str, str]) -> None:
    where = "--num_machines 2 --machine_rank 0 --main_process_ip a --main_process_port 29501"
    found = accelerate(f"--num_processes 8 {where} --use_fsdp --fsdp_version 2 -m pkg.a --use_fsdp", environ)
    assert (found.world, found.local_world) == (8, 4)
    assert tail(found) == ["-u", "-m", "pkg.a", "--use_fsdp"]
    assert {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items() <= found.environ.items()


@needs("accelerate")
@pytest.mark.slow
def test_accelerate_takes_its_configuration_file(environ: dict[str, str], tmp_path: Path) -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: fp16\nnum_machines: 1\n"
        "num_processes: 4\nmachine_rank: 0\nmain_training_function: main\nuse_cpu: false\n"
        "fsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text(text)
    named = accelerate(f"--config_file {config} a.py", environ)
    default = Path(environ["HF_HOME"], "accelerate", "default_config.yaml")
    default.parent.mkdir()
    default.write_text(text)
    for found in (named, accelerate("a.py", environ)):
        assert (found.world, found.local_world, found.notes) == (4, 4, ())
        assert found.environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
        assert found.environ["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"


@needs("accelerate")
@pytest.mark.slow
def test_accelerate_without_a_number_or_a_launcher(environ: dict[str, str]) -> None:
    found = accelerate("a.py", environ)
    assert found.world is None
    assert "count the GPUs" in found.notes[0]
    assert accelerate("--num_processes 1 a.py", environ).world == 1
    several = accelerate("--num_processes 4 a.py", environ)
    assert (several.world, several.ranked["RANK"]) == (4, unwrap.RANK)
    with pytest.raises(DryRunError, match="only use one of"):
        accelerate("--cpu --multi_gpu a.py", environ)
