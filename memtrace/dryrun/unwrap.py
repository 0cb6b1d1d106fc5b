"""What a launcher would start: read by the launcher's own parser, in the job's own Python. Starts nothing, asks no GPU.

    PYTHON unwrap.py torchrun|torch.distributed.launch|deepspeed|accelerate OPTIONS... SCRIPT ARGUMENTS...

A script of its own on Python 3.8 or later: nothing of memtrace is imported here. Its last line on stdout is one of

    {"argv": [...], "env": {...}, "ranked": {...}, "world": 8|null, "local_world": 8|null, "notes": [...]}
    {"usage": "the launcher's own text", "code": 2}
    {"error": "why the launcher would not start this"}

`env` is what the launcher adds or changes for every process, `ranked` what differs between them. In `argv` and
`ranked` `<NUL>local_rank<NUL>` and the like stand for a rank's own values: no argument of a program can contain a NUL.
A count is null where the launcher would count GPUs. Devices are those of the machine that the command is meant for.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
    del sys.path[0]  # what lies beside this file must not be imported in place of the job's modules

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RANK, WORLD, LOCAL_RANK, LOCAL_WORLD, NODE, NODES = (
    f"\0{name}\0" for name in ("rank", "world", "local_rank", "local_world", "node", "nodes")
)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU = {_VISIBLE: "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # asked for a GPU, torch does not start the driver
_BY_SSH = "pdsh"  # DeepSpeed's only launcher of many nodes that starts its own launcher on each
_PORT = "29500"


UNCOUNTED = "would count the GPUs"
"""In a note: nothing says how many ranks there are."""


class Unwrapped(NamedTuple):
    """What the launcher would start. Counts are None where it would count GPUs."""

    argv: list[str]
    env: dict[str, str]
    ranked: dict[str, str]
    world: int | None
    local_world: int | None
    notes: list[str]


class Refusal(Exception):
    """The launcher would not start this, or not as processes of a script."""


class Usage(Exception):
    """The launcher's parser ended the process: its text and exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def main(arguments: Sequence[str]) -> int:
    """Prints the document. Whatever else the libraries print goes to stderr."""
    launcher, options = arguments[0], list(arguments[1:])
    document_fd = os.dup(1)
    os.dup2(2, 1)
    sys.argv = [launcher, *options]  # what argparse calls the program
    before = dict(os.environ)
    os.environ.update(_NO_GPU)
    code = 0
    document: dict[str, Any]
    try:
        document = _LAUNCHERS[launcher](options, before)._asdict()
    except Usage as usage:
        document, code = {"usage": usage.text, "code": usage.code}, usage.code
    except Refusal as refusal:
        document, code = {"error": str(refusal)}, 2
    except (ImportError, AttributeError, TypeError) as error:
        where = f"{_version(launcher)} in {sys.executable}"
        document, code = {"error": f"cannot be asked ({where}): {type(error).__name__}: {error}"}, 2
    except Exception as error:  # noqa: BLE001 - the launcher's own checks raise anything
        document, code = {"error": str(error) or type(error).__name__}, 2
    with os.fdopen(document_fd, "w", encoding="ascii") as stream:
        stream.write("\n" + json.dumps(document) + "\n")
    return code


# torchrun and torch.distributed.launch.


def _torchrun(options: list[str], before: Mapping[str, str]) -> Unwrapped:
    run = _module("torch.distributed.run", "torch")
    return _elastic(run, _parsed(run.parse_args, options), dict(os.environ), before)


def _torch_launch(options: list[str], before: Mapping[str, str]) -> Unwrapped:
    launch = _module("torch.distributed.launch", "torch")
    args = _parsed(launch.parse_args, options)
    if args.no_python and not args.use_env:
        raise Refusal("When using the '--no-python' flag, you must also set the '--use-env' flag.")
    return _elastic(_module("torch.distributed.run", "torch"), args, dict(os.environ), before)


def _elastic(run: Any, args: Any, known: Mapping[str, str], before: Mapping[str, str]) -> Unwrapped:
    """What torchrun makes of parsed options. `known`: the environment before the launcher touched it."""
    notes: list[str] = []
    asked, per_node = str(args.nproc_per_node), None
    if asked.isdigit():
        per_node = int(asked)
    elif asked == "cpu":
        per_node = int(run.determine_local_world_size(asked))
    elif asked in ("auto", "gpu", "xpu"):
        notes.append(f"torchrun {UNCOUNTED} (--nproc-per-node {asked})")
    if per_node is not None or notes:
        args.nproc_per_node = str(per_node or 2)  # of several it matters only that there are
    for name, value in (("log_dir", None), ("redirects", "0"), ("tee", "0"), ("logs_specs", None)):
        if hasattr(args, name):
            setattr(args, name, value)  # else it makes directories
    if args.master_port is None:
        args.master_port = int(_PORT)
    config, program, rest = run.config_from_args(args)
    if callable(program):  # --run-path
        program = sys.executable
    rest = _substituted([str(word) for word in rest])
    low, high = run.parse_min_max_nnodes(args.nnodes)
    if low != high:
        notes.append(f"torchrun would run on {low} to {high} nodes (--nnodes {args.nnodes})")
    env = _changed(os.environ, known)
    env.update(
        {
            "ROLE_NAME": str(getattr(config, "role", "default")),
            "MASTER_ADDR": str(args.master_addr) if high > 1 else "127.0.0.1",
            "MASTER_PORT": str(args.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
            "TORCHELASTIC_RUN_ID": str(args.rdzv_id),
            # Not TORCHELASTIC_USE_AGENT_STORE: there is no agent whose store could be used.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": before.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
    )
    ranked = {
        "RANK": RANK,
        "LOCAL_RANK": LOCAL_RANK,
        "WORLD_SIZE": WORLD,
        "LOCAL_WORLD_SIZE": LOCAL_WORLD,
        "GROUP_RANK": NODE,
        "GROUP_WORLD_SIZE": NODES,
        "ROLE_RANK": RANK,
        "ROLE_WORLD_SIZE": WORLD,
    }
    world = None if per_node is None or low != high else per_node * high
    return Unwrapped([str(program), *rest], env, ranked, world, per_node, notes)


def _substituted(words: list[str]) -> list[str]:
    """torchrun replaces `${local_rank}` in every argument."""
    macros = _module("torch.distributed.elastic.utils.api", "torch").macros
    substituted: list[str] = macros.substitute(words, LOCAL_RANK)
    return substituted


# DeepSpeed.


def _deepspeed(options: list[str], before: Mapping[str, str]) -> Unwrapped:
    runner = _module("deepspeed.launcher.runner", "deepspeed")
    args = _parsed(runner.parse_args, options)
    if getattr(args, "autotuning", ""):
        raise Refusal("--autotuning starts many jobs: leave it out")
    module, no_python = getattr(args, "module", False), getattr(args, "no_python", False)
    if module and no_python:
        raise Refusal("Don't use both the '--no_python' flag and the '--module' flag at the same time.")
    notes: list[str] = []
    hosts = _deepspeed_hosts(runner, args, before, notes)
    many = (
        bool(hosts) and (len(hosts) > 1 or getattr(args, "force_multi", False)) and not getattr(args, "no_ssh", False)
    )
    launched = not many or str(getattr(args, "launcher", _BY_SSH)).lower() == _BY_SSH
    if getattr(args, "bind_cores_to_rank", False):
        notes.append("--bind_cores_to_rank is left out")

    argv = [] if no_python else [sys.executable, "-u", *(["-m"] if module else [])]
    argv.append(args.user_script)
    if launched and not getattr(args, "no_local_rank", False):
        argv.append(f"--local_rank={LOCAL_RANK}")
    argv += args.user_args

    env = {"MASTER_ADDR": args.master_addr or "127.0.0.1", "MASTER_PORT": str(args.master_port)}
    if many:
        here = str(Path.cwd())
        env["PYTHONPATH"] = f"{here}{os.pathsep}{before['PYTHONPATH']}" if "PYTHONPATH" in before else here
        env.update(_deepspeed_exports(runner))
    ranked = {"RANK": RANK, "LOCAL_RANK": LOCAL_RANK, "WORLD_SIZE": WORLD, "LOCAL_SIZE": LOCAL_WORLD}
    if launched:
        ranked.update({"CROSS_RANK": NODE, "CROSS_SIZE": NODES})
    if not hosts:
        return Unwrapped(argv, env, ranked, None, None, notes)
    slots = list(hosts.values())
    if launched:
        env[_VISIBLE] = ",".join(map(str, slots[0]))
    sizes = [len(one) for one in slots]
    if len(set(sizes)) > 1:
        notes.append(f"the nodes have different numbers of GPUs: {', '.join(map(str, sizes))}")
    return Unwrapped(argv, env, ranked, sum(sizes), sizes[0] if len(set(sizes)) == 1 else None, notes)


def _deepspeed_hosts(runner: Any, args: Any, before: Mapping[str, str], notes: list[str]) -> dict[str, list[int]]:
    """Each node's GPUs, as DeepSpeed's main() finds them; empty where it would count them."""
    pool: dict[str, int] = runner.fetch_hostfile(args.hostfile) or {}
    visible = before.get(_VISIBLE, "")
    if not pool and visible and not (args.include or args.exclude or args.num_nodes > 1 or args.num_gpus > 0):
        args.include = f"localhost:{visible}"
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise Refusal("Cannot specify num_nodes/gpus with include/exclude")
    if not pool:
        if args.num_nodes > 1:
            raise Refusal("Num nodes is >1 but no extra nodes available via hostfile")
        named = [slot for slots in runner.parse_node_config_list(args.include).values() for slot in slots]
        if args.num_gpus > 0:
            pool = {"localhost": args.num_gpus}
        elif args.include and named:
            pool = {"localhost": max(named) + 1}
        else:
            notes.append(f"deepspeed {UNCOUNTED}: there is neither --num_gpus nor a hostfile")
            return {}
    hosts = dict(runner.parse_inclusion_exclusion(pool, args.include, args.exclude))
    if args.num_nodes > 0:
        hosts = dict(list(hosts.items())[: args.num_nodes])
    if args.num_gpus > 0:
        hosts = {host: list(range(args.num_gpus)) for host in hosts}
    if not hosts:
        raise Refusal("--include and --exclude leave no GPU")
    return hosts


def _deepspeed_exports(runner: Any) -> dict[str, str]:
    """What `.deepspeed_env` files hand to every node."""
    exports: dict[str, str] = {}
    name = getattr(runner, "DEEPSPEED_ENVIRONMENT_NAME", ".deepspeed_env")
    for directory in getattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", ()):
        path = Path(directory, name)
        if path.is_file():
            with path.open(encoding="utf-8") as stream:
                pairs = [line.rstrip("\r\n").partition("=") for line in stream]
            exports.update({key: value for key, equals, value in pairs if equals})
    return exports


# Accelerate.


def _accelerate(options: list[str], before: Mapping[str, str]) -> Unwrapped:
    launch = _module("accelerate.commands.launch", "accelerate")
    prepare = _module("accelerate.utils.launch", "accelerate")
    prepare.is_port_in_use = lambda *_: False  # no port is going to be used
    prepare.get_free_port = lambda *_: int(_PORT)
    args = _parsed(launch.launch_command_parser().parse_args, options)
    known = dict(os.environ)
    uncounted = _accelerate_as_with_gpus(launch, args)
    validated = launch._validate_launch_command(args)
    args, defaults = validated[0], validated[1]
    from_config = len(validated) > 2 and bool(validated[2])  # older ones: two
    if getattr(args, "num_machines", None) is None:
        args.num_machines = 1

    if args.use_deepspeed and not args.cpu:
        found = _accelerate_deepspeed(launch, prepare, args, defaults, from_config, known, before)
    elif not args.cpu and (args.use_fsdp or args.use_megatron_lm or args.multi_gpu):
        found = _accelerate_elastic(launch, prepare, args, prepare.prepare_multi_gpu_env(args), known, before)
    elif not args.cpu and args.tpu:
        raise Refusal("a job for TPUs has no CUDA memory")
    elif _is_sagemaker(defaults):
        raise Refusal("the configuration file is for SageMaker: name another with --config_file")
    elif getattr(args, "mpirun_hostfile", None) is not None:
        raise Refusal("--mpirun_hostfile starts the script by mpirun: leave it out")
    else:
        command, env = prepare.prepare_simple_launcher_cmd_env(args)
        found = Unwrapped(list(command), _changed(env, known), {}, 1, 1, [])
    if uncounted:
        note = f"accelerate {UNCOUNTED}: there is neither --num_processes nor a configuration file"
        return found._replace(world=None, local_world=None, notes=[*found.notes, note])
    return found


def _accelerate_as_with_gpus(launch: Any, args: Any) -> bool:
    """Decides what the launcher would by looking at GPUs. True: it would also take their number for the world."""
    configured = args.config_file is not None or Path(launch.default_config_file).is_file()
    if args.cpu or configured or args.tpu:
        return False
    if args.num_processes is None:
        return True
    if args.num_processes > 1 and not (args.use_deepspeed or args.use_fsdp or args.use_megatron_lm):
        args.multi_gpu = True
    return False


def _accelerate_deepspeed(
    launch: Any,
    prepare: Any,
    args: Any,
    defaults: Any,
    from_config: bool,
    known: Mapping[str, str],
    before: Mapping[str, str],
) -> Unwrapped:
    if not launch.is_deepspeed_available():
        raise Refusal("DeepSpeed is not installed")
    fields = list(defaults.deepspeed_config) if defaults else []
    if from_config:
        fields.append("mixed_precision")
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    command, env = prepare.prepare_deepspeed_cmd_env(args)
    if command is None:
        return _accelerate_elastic(launch, prepare, args, env, known, before)
    inner = _deepspeed(list(command[1:]), before)
    env = {**_changed(env, known), **inner.env}
    if inner.world is None or inner.world == inner.local_world:  # without the hostfile
        return inner._replace(env=env, world=args.num_processes, local_world=args.num_processes // args.num_machines)
    return inner._replace(env=env)


def _accelerate_elastic(
    launch: Any, prepare: Any, args: Any, env: Mapping[str, str], known: Mapping[str, str], before: Mapping[str, str]
) -> Unwrapped:
    """As accelerate hands its options on to torchrun."""
    run = _module("torch.distributed.run", "torch")
    script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    handed_on = (getattr(launch, "_filter_args", None) or prepare._filter_args)(args, run.get_args_parser(), script)
    os.environ.update(env)
    return _elastic(run, handed_on, known, before)


def _is_sagemaker(defaults: Any) -> bool:
    return defaults is not None and "SAGEMAKER" in str(getattr(defaults, "compute_environment", "")).upper()


# Common.

_LAUNCHERS: dict[str, Callable[[list[str], Mapping[str, str]], Unwrapped]] = {
    "torchrun": _torchrun,
    "torch.distributed.launch": _torch_launch,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}


def _parsed(parse: Callable[[list[str]], Any], options: list[str]) -> Any:
    """The launcher's options. Its usage text is caught: it is the user's, unlike what libraries write meanwhile."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
            return parse(options)
    except SystemExit as exit_:
        raise Usage(text.getvalue(), exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))) from None


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == package:
            raise Refusal(f"{package} is not installed in {sys.executable}, or has no {name}") from error
        raise


def _version(launcher: str) -> str:
    package = {"deepspeed": "deepspeed", "accelerate": "accelerate"}.get(launcher, "torch")
    return f"{package} {getattr(sys.modules.get(package), '__version__', 'of an unknown version')}"


def _changed(environ: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """What the launcher added or changed."""
    return {key: value for key, value in environ.items() if known.get(key) != value}


if __name__ == "__main__":
    _code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(_code)  # nothing that the libraries do at the end is wanted
