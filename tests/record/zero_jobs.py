"""DeepSpeed as rank 0 of many, on CPU, with the hooks of memtrace.record: what they say beside what a spy saw.

    python tests/record/zero_jobs.py --stage 3 --out FILE.json

In a process of its own, on torch's fake process group (see zero_harness.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent.parent))

import zero_harness as harness

Raw = dict[str, Any]


def run(file: Path, *options: object, python: str = sys.executable) -> Raw:
    """The script in a process of its own, and what it found."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONWARN", "DS_"))}
    done = subprocess.run(
        [python, __file__, "--out", str(file), *map(str, options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{options} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return dict(json.loads(file.read_text("utf-8")))


class Spy:
    """Outside of the hooks: lines and parameters of each gather, and where they are once their module has them."""

    def __init__(self) -> None:
        self.gathers: list[Raw] = []
        self.places: dict[str, list[tuple[int, int]]] = {}
        self.names: dict[int, str] = {}
        self.calls = 0

    def install(self) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        mangled = "_PartitionedParameterCoordinator__all_gather_params"
        fetch_sub_module, all_gather = Coordinator.fetch_sub_module, getattr(Coordinator, mangled)

        def fetch(coordinator: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            result = fetch_sub_module(coordinator, module, *args, **kwargs)
            for param in module.parameters(recurse=False):
                places = self.places.setdefault(self.names.get(param.ds_id, str(param.ds_id)), [])
                places.append((param.data_ptr(), param.numel() * param.element_size()))
            return result

        def gather(coordinator: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            missing = [param.ds_id for param in params if param.ds_status.name == "NOT_AVAILABLE"]
            if missing:
                names = [self.names.get(number, str(number)) for number in missing]
                self.gathers.append({"line": sys._getframe(1).f_lineno, "parameters": names})
            return all_gather(coordinator, params, *args, **kwargs)

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
    return {"roles": rows, "truth": rows_of(harness.held_by(engine)), "untouched": before == after, "seconds": seconds}


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
    spy.names = {getattr(param, "ds_id", -1): name for name, param in model.named_parameters()}
    spy.gathers.clear()
    spy.places.clear()
    if options.hooks:
        inside: list[Raw] = []
        model.layers[2].up.register_forward_pre_hook(lambda *_: inside.append(seen_now(engine)))
    losses, seconds = [], []
    for _ in range(options.steps):
        for _ in range(options.gas):
            ids = torch.randint(harness.VOCABULARY, (harness.BATCH, harness.LENGTH))
            began = time.perf_counter()
            loss = engine(ids)
            engine.backward(loss)
            if options.hooks and len(losses) == options.steps * options.gas - 1:
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
    if options.hooks:
        found.update(end=seen_now(engine), in_forward=inside[-1])
    if options.save:
        engine.save_checkpoint(options.save)
    return engine


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
    for name in ("zero-init", "offload", "fp32-grads", "no-overlap", "evaluate", "no-hooks", "no-spy"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    options.hooks = not options.no_hooks
    if options.save and not os.path.isdir(options.save):
        os.makedirs(options.save)
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
    if options.stage == 3 and not options.no_spy:
        spy.install()
    engine = train(options, found, spy, recorder)
    found.update(calls=spy.gathers, places=spy.places, fetches=spy.calls)
    if options.hooks:
        found["gathers"] = deepspeed_hooks.gathers()
        found["config"] = deepspeed_hooks.config(engine)
        found["zero"] = deepspeed_hooks.zero(engine)
        found["phases"] = [one._asdict() for one in recorder.phases.so_far()]
        found["steps"] = recorder.phases.steps_done
        found["engines"] = [one is engine for one in deepspeed_hooks.engines()]
        found["held"] = len(gathers.WATCH.held)
        found["numels"] = {name: harness.numel(param) for name, param in engine.module.named_parameters()}
        found["references"] = sorted(
            {
                type(one).__name__
                for param in engine.module.parameters()
                for one in gc.get_referrers(param)
                if getattr(type(one), "__module__", "").startswith("memtrace")
            }
        )
        params = [weakref.ref(param) for param in engine.module.parameters()]
        mine = {name: sys.getrefcount(param) for name, param in engine.module.named_parameters()}
        found["refcounts"] = mine
        del engine.module
        deepspeed_hooks.remove()
        found["restored"] = not any(
            hasattr(method, "__wrapped__") and "memtrace" in method.__code__.co_filename
            for method in vars(deepspeed.DeepSpeedEngine).values()
            if isinstance(method, types.FunctionType)
        )
        found["notes"] = list(notes.NOTES)
        del params
    options.out.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
