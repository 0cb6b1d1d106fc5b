"""DeepSpeed as rank 0 of many, on CPU, with the hooks of memtrace.record: what they say beside what a spy saw.

    python tests/record/zero_jobs.py --stage 3 --out FILE.json

In a process of its own, on torch's fake process group (see zero_harness.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent.parent))

import zero_harness as harness
from record.module_jobs import storages

Raw = dict[str, Any]


@functools.cache
def found(*options: str, python: str = sys.executable) -> Raw:
    """The script in a process of its own, and what it found. Once a session for the same options."""
    with tempfile.TemporaryDirectory() as folder:
        save = ("--save", f"{folder}/saved") if "--save" in options else ()
        options = tuple(option for option in options if option != "--save")
        return run(Path(folder, "found.json"), *options, *save, python=python)


def run(file: Path, *options: object, python: str = sys.executable) -> Raw:
    """The same, uncached."""
    from zero_harness import run_script  # not there for the script itself

    run_script(__file__, "--out", file, *options, python=python)
    return dict(json.loads(file.read_text("utf-8")))


class Spy:
    """Outside of the hooks: lines and parameters of each gather, and where they are once their module has them."""

    def __init__(self) -> None:
        self.gathers: list[Raw] = []
        self.places: dict[str, set[tuple[int, int]]] = {}
        self.names: dict[int, str] = {}
        self.params: list[Any] = []

    def install(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        let_go = Init._partition
        mangled = "_PartitionedParameterCoordinator__all_gather_params"
        fetch_sub_module, all_gather = Coordinator.fetch_sub_module, getattr(Coordinator, mangled)

        def look() -> None:
            for param in self.params:
                if param.ds_status.name == "AVAILABLE":
                    places = self.places.setdefault(self.names[param.ds_id], set())
                    places.add((param.data_ptr(), param.numel() * param.element_size()))

        def fetch(coordinator: Any, *args: Any, **kwargs: Any) -> Any:
            result = fetch_sub_module(coordinator, *args, **kwargs)
            look()
            return result

        def partition(init: Any, *args: Any, **kwargs: Any) -> Any:
            look()  # one that was fetched in vain
            return let_go(init, *args, **kwargs)

        def gather(coordinator: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            missing = [param.ds_id for param in params if param.ds_status.name == "NOT_AVAILABLE"]
            if missing:
                names = [self.names.get(number, str(number)) for number in missing]
                self.gathers.append({"line": sys._getframe(1).f_lineno, "parameters": names})
            return all_gather(coordinator, params, *args, **kwargs)

        Init._partition = partition
        Coordinator.fetch_sub_module = fetch
        setattr(Coordinator, mangled, gather)


def rows_of(pairs: Any) -> list[list[Any]]:
    """[role, name, address, bytes] of (role, name, tensor) with memory."""
    found = []
    for role, name, tensor in pairs:
        for _, one in harness.tensors_in(tensor):
            if one.numel() and one.device.type == "cpu" and one.untyped_storage().nbytes():
                found.append([role, name, one.data_ptr(), one.numel() * one.element_size()])
    return found


def seen_now(engine: Any) -> Raw:
    """Roles by the hooks and by the harness, and whether looking changed anything."""
    from memtrace.record.inside import roles

    params = list(engine.module.parameters())
    before = [(param.data_ptr(), str(getattr(param, "ds_status", ""))) for param in params]
    began = time.perf_counter()
    rows = roles.collect([engine], [engine.optimizer, engine.basic_optimizer], [engine, engine.module])
    seconds = time.perf_counter() - began
    after = [(param.data_ptr(), str(getattr(param, "ds_status", ""))) for param in params]
    return {
        "roles": rows,
        "truth": rows_of(harness.held_by(engine)),
        "storages": [[address, *what] for address, what in storages().items()],
        "untouched": before == after,
        "seconds": seconds,
    }


def config(options: argparse.Namespace) -> Raw:
    """The harness's, with what is asked for."""
    made = harness.deepspeed_config(options.stage, options.dtype)
    zero = made["zero_optimization"]
    made["gradient_accumulation_steps"] = options.gas
    made["wandb"] = {"enabled": False, "team": "me", "project": "p"}
    if options.hpz > 1:
        zero["zero_hpz_partition_size"] = options.hpz
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if options.offload and options.stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if options.fp32_grads:
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.stage == 3 and options.no_overlap:
        zero["overlap_comm"] = False
    return made


def train(options: argparse.Namespace, found: Raw, spy: Spy, recorder: Any) -> Any:
    """The job. `found` gets the losses, and what was seen at the end of it and in the middle of a forward."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    made = config(options)
    if options.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=made):
            model = harness.make_model()
    else:
        model = harness.make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=made)
    if options.stage == 3:
        spy.params = list(model.parameters())
        spy.names = {param.ds_id: name for name, param in model.named_parameters()}
    spy.gathers.clear()
    spy.places.clear()
    if options.compile:
        engine.compile(backend="eager")
    inside: list[Raw] = []
    looks = options.hooks and not options.compile and not options.blind
    if looks:
        model.layers[2].up.register_forward_pre_hook(lambda *_: inside.append(seen_now(engine)))
    losses, seconds = [], []
    for _ in range(options.steps):
        for _ in range(options.gas):
            ids = torch.randint(harness.VOCABULARY, (harness.BATCH, harness.LENGTH))
            began = time.perf_counter()
            loss = engine(ids)
            engine.backward(loss)
            if looks and len(losses) == options.steps * options.gas - 1:
                found["before_step"] = seen_now(engine)
            engine.step()
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss.detach()).hex())
    if options.evaluate:
        engine.eval()
        with torch.no_grad():
            losses.append(float(engine(ids)).hex())
        engine.train()
    found.update(losses=losses, seconds=seconds)
    if looks:
        found.update(end=seen_now(engine), in_forward=inside[-1])
    found["refcounts"] = {name: sys.getrefcount(param) for name, param in model.named_parameters()}
    if options.save:
        engine.save_checkpoint(options.save)
    return engine


def left_over(deepspeed: Any) -> list[str]:
    """What still has our replacements."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator

    owners = [deepspeed, deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine]
    owners += [one for one in vars(partition_parameters).values() if isinstance(one, type)]
    owners.append(partitioned_param_coordinator.PartitionedParameterCoordinator)
    return [
        name
        for owner in owners
        for name, one in vars(owner).items()
        if isinstance(one, types.FunctionType) and "record/inside" in one.__code__.co_filename
    ]


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gas", type=int, default=1)
    parser.add_argument("--hpz", type=int, default=1)
    parser.add_argument("--save")
    for name in ("zero-init", "offload", "fp32-grads", "no-overlap", "evaluate", "compile", "blind", "no-hooks"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    options.hooks = not options.no_hooks
    harness.join_fake_group(options.world)
    import deepspeed
    import torch

    harness.tame_deepspeed()
    found: Raw = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
    spy = Spy()
    recorder = None
    if options.hooks:
        from memtrace.record.inside import deepspeed_hooks, gathers, notes
        from memtrace.record.inside.phases import PhaseLog

        settings = types.SimpleNamespace(plain_paths=False)
        recorder = types.SimpleNamespace(phases=PhaseLog(), settings=settings)
        deepspeed_hooks.install(recorder)
        deepspeed_hooks.install(recorder)  # the second time changes nothing
    if options.stage == 3 and options.world > 1 and options.hooks and not (options.compile or options.blind):
        spy.install()
    engine = train(options, found, spy, recorder)
    found.update(calls=spy.gathers, places={name: sorted(places) for name, places in spy.places.items()})
    spy.params.clear()
    if options.hooks:
        found["gathers"] = deepspeed_hooks.gathers()
        found["config"] = deepspeed_hooks.config(engine)
        found["zero"] = deepspeed_hooks.zero(engine)
        found["phases"] = [one._asdict() for one in recorder.phases.so_far()]
        found["steps"] = recorder.phases.steps_done
        found["engines"] = [one is engine for one in deepspeed_hooks.engines()]
        found["held"] = len(gathers.WATCH.held)
        found["names"] = sorted(name for name, _ in engine.module.named_parameters())
        found["numels"] = {name: harness.numel(param) for name, param in engine.module.named_parameters()}
        deepspeed_hooks.remove()
        found["left_over"] = left_over(deepspeed)
        found["notes"] = list(notes.NOTES)
    options.out.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
