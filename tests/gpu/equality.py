"""Is backward on the calling thread the same backward? The table of the recorder's "Threads of backward".

    python3 tests/gpu/equality.py --out $OUT --wheels .whl

Each case runs in fresh processes, twice with torch's default (`a`) and twice with
`torch.autograd.set_multithreading_enabled(False)` (`b`), all with deterministic algorithms. Compared bit for bit:
losses, gradients and parameters at the end, the 111 counters of `memory_stats()` and the allocator's whole trace. What
differs between two runs of the same mode differs by itself and proves nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
WORLD, STEPS = 8, 3
WIDTH, LAYERS, HEADS, WORDS, BATCH, LENGTH = 256, 4, 4, 1000, 4, 128
NAMES = "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes"
COUNTERS = [
    f"{name}.{pool}.{which}"
    for name in (*NAMES.split(), "requested_bytes")
    for pool in ("all", "small_pool", "large_pool")
    for which in ("current", "peak", "allocated", "freed")
] + ["num_device_alloc", "num_device_free", "num_ooms"]
FIELDS = ("losses", "gradients", "parameters", "counters", "trace")
Facts = dict[str, Any]


# One run. Everything below until `main` happens in a process of its own.


class Run:
    """What the cases share."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.losses: list[str] = []
        self.gradients: dict[str, str] = {}
        self.model: Any = None

    def batches(self) -> Iterator[Any]:
        for _ in range(STEPS):
            yield self.torch.randint(0, WORDS, (BATCH, LENGTH), device=self.device)

    def note(self, loss: Any) -> None:
        self.losses.append(float(loss.detach()).hex())

    def note_gradients(self) -> None:
        self.gradients = {
            name: digest(parameter.grad)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def train(self, forward: Callable[[Any], Any], optimizer: Any = None) -> None:
        optimizer = optimizer or self.torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for ids in self.batches():
            optimizer.zero_grad()
            loss = forward(ids)
            loss.backward()
            self.note(loss)
            self.note_gradients()
            optimizer.step()


def digest(tensor: Any) -> str:
    import torch

    local = getattr(tensor, "_local_tensor", tensor).detach().contiguous().reshape(-1)
    return hashlib.sha256(local.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def transformer(checkpointing: str = "", streams: bool = False) -> Any:
    """A small decoder of plain torch. `checkpointing`: reentrant or not."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.side = torch.cuda.Stream() if streams and torch.cuda.is_available() else None

        def attention(self, x: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = (
                part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1)
            )
            mask = torch.full((length, length), float("-inf"), dtype=q.dtype, device=x.device).triu(1)
            weights = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + mask).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))

        def mlp(self, x: Any) -> Any:
            return self.down(functional.gelu(self.up(self.between(x))))

        def forward(self, x: Any) -> Any:
            if not streams:
                x = x + self.attention(x)
                return x + self.mlp(x)
            if self.side is None:  # no GPU: the branches only
                return x + self.attention(x) + self.mlp(x)
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                other = self.mlp(x)
            x = x + self.attention(x)
            torch.cuda.current_stream().wait_stream(self.side)
            other.record_stream(torch.cuda.current_stream())
            return x + other

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=checkpointing == "reentrant") if checkpointing else block(x)
            logits = self.head(x)[:, :-1].float()
            return functional.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1))

    torch.manual_seed(0)
    return Decoder()


def join(world: int = WORLD) -> None:
    """One rank of many, as `memtrace record --simulate-world` makes it."""
    sys.path.insert(0, str(REPOSITORY / "memtrace" / "record"))  # the package above needs more than the job has
    simulated = importlib.import_module("inside.world")
    simulated.install(world, 0)


def plain(run: Run) -> None:
    run.model = transformer().to(run.device)
    run.train(run.model)


def autocast(run: Run) -> None:
    run.model = transformer().to(run.device)

    def forward(ids: Any) -> Any:
        with run.torch.autocast(run.device, run.torch.bfloat16):
            return run.model(ids)

    run.train(forward)


def checkpointing(how: str) -> Callable[[Run], None]:
    def case(run: Run) -> None:
        run.model = transformer(how).to(run.device)
        run.train(run.model)

    return case


def compiled(run: Run) -> None:
    run.model = transformer().to(run.device)
    run.train(run.torch.compile(run.model))


def streams(run: Run) -> None:
    run.model = transformer(streams=True).to(run.device)
    run.train(run.model)


def deep(run: Run) -> None:
    """A chain of 3,000 nodes that are Python functions, which the engine calls one by one."""
    torch = run.torch

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x + 0.001 * x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, weight = ctx.saved_tensors
            return gradient + 0.001 * gradient * weight, 0.001 * (gradient * x).sum(0)

    run.model = torch.nn.Linear(WIDTH, WIDTH).to(run.device)

    def forward(ids: Any) -> Any:
        x = run.model(ids[:, :1].float().expand(-1, WIDTH) / WORDS)
        for _ in range(3000):
            x = Step.apply(x, run.model.bias)
        return x.square().mean()

    run.train(forward)


def nested(run: Run) -> None:
    """Reentrant checkpoints in each other, 100 deep: beyond 60 the engine hands over to threads of a pool."""
    from torch.utils.checkpoint import checkpoint

    run.model = run.torch.nn.Linear(WIDTH, WIDTH).to(run.device)

    def level(x: Any, depth: int) -> Any:
        x = run.torch.tanh(run.model(x))
        return x if depth == 0 else checkpoint(level, x, depth - 1, use_reentrant=True)

    def forward(ids: Any) -> Any:
        x = (ids[:, :1].float().expand(-1, WIDTH) / WORDS).clone().requires_grad_()
        return level(x, 100).square().mean()

    run.train(forward)


def double_backward(run: Run) -> None:
    """A gradient penalty."""
    run.model = transformer().to(run.device)
    parameters = list(run.model.parameters())

    def forward(ids: Any) -> Any:
        loss = run.model(ids)
        gradients = run.torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)

    run.train(forward)


def ddp(run: Run) -> None:
    """In a world of one: the reducer, its buckets and its hooks are those of any world. NCCL where there is a GPU."""
    dist = run.torch.distributed
    dist.init_process_group(
        "nccl" if run.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # fmt: skip
    run.model = run.torch.nn.parallel.DistributedDataParallel(transformer().to(run.device))
    run.train(run.model)
    run.model = run.model.module


def fsdp1(run: Run) -> None:
    join()
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch = run.torch
    torch.distributed.init_process_group("nccl")
    inner = transformer().to(run.device)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = ModuleWrapPolicy({type(inner.blocks[0])})
    run.model = FullyShardedDataParallel(
        inner,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        use_orig_params=True,
        device_id=torch.device(run.device, 0) if run.device == "cuda" else torch.device("cpu"),
    )
    run.train(run.model)


def fsdp2(run: Run) -> None:
    join()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=run.torch.bfloat16, reduce_dtype=run.torch.float32)
    mesh = init_device_mesh(run.device, (WORLD,))
    run.model = transformer().to(run.device)
    for block in run.model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(run.model, mesh=mesh, mp_policy=policy)
    run.train(run.model)


def zero(stage: int, checkpoints: str = "", direct: bool = False) -> Callable[[Run], None]:
    """DeepSpeed. `direct`: the job calls `loss.backward()` itself."""

    def case(run: Run) -> None:
        join()
        import deepspeed

        if run.device == "cpu":  # it would be compiled
            vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
        deepspeed.init_distributed()
        run.model = transformer(checkpoints)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 500_000},
        }
        engine, *_ = deepspeed.initialize(model=run.model, model_parameters=run.model.parameters(), config=config)
        held = engine.optimizer
        for ids in run.batches():
            loss = engine(ids)
            if direct:
                loss.backward()
            else:
                engine.backward(loss)
            run.note(loss)
            run.gradients = shards(held)
            engine.step()
        run.model = held

    return case


def shards(optimizer: Any) -> dict[str, str]:
    """The gradients that the optimizer of ZeRO is about to use, and its masters."""
    found = {}
    averaged = getattr(optimizer, "averaged_gradients", None) or {}
    for group, gradients in dict(averaged).items():
        for index, gradient in enumerate(gradients or ()):
            found[f"{group}.{index}"] = digest(gradient)
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or getattr(
        optimizer, "single_partition_of_fp32_groups", ()
    )
    for index, master in enumerate(masters):
        found[f"master.{index}"] = digest(master)
    return found


CASES: dict[str, Callable[[Run], None]] = {
    "plain": plain,
    "autocast": autocast,
    "checkpoint-reentrant": checkpointing("reentrant"),
    "checkpoint-non-reentrant": checkpointing("non-reentrant"),
    "checkpoint-nested-100": nested,
    "compile": compiled,
    "streams": streams,
    "deep-3000": deep,
    "double-backward": double_backward,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3-checkpoint-reentrant": zero(3, "reentrant"),
    "zero3-loss-backward": zero(3, direct=True),
}
NEEDS_DEEPSPEED = {name for name in CASES if name.startswith("zero")}


def one(name: str, mode: str) -> Facts:
    """One run in this process."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    run = Run()
    if run.device == "cuda":
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=1_000_000)
    torch.manual_seed(0)
    if mode == "b":
        torch.autograd.set_multithreading_enabled(False)
    began = time.perf_counter()
    CASES[name](run)
    facts: Facts = {"losses": run.losses, "gradients": run.gradients, "seconds": time.perf_counter() - began}
    if hasattr(run.model, "named_parameters"):
        facts["parameters"] = {name: digest(parameter) for name, parameter in run.model.named_parameters()}
    else:
        facts["parameters"] = shards(run.model)
    facts["peak_bytes"] = facts["allocations"] = facts["without_frames"] = 0
    facts["counters"], facts["trace"] = {}, []
    if run.device == "cuda":
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        facts["counters"] = {counter: stats.get(counter) for counter in COUNTERS}
        facts["peak_bytes"] = stats["allocated_bytes.all.peak"]
        facts.update(trace_of(torch.cuda.memory._snapshot()))
    return facts


def trace_of(snapshot: Facts) -> Facts:
    """The trace with addresses counted from their segment, since the driver may place segments anywhere."""
    segments: dict[int, tuple[int, int]] = {}
    lines, streams = [], {0: 0}
    allocations = without_frames = 0
    for event in snapshot["device_traces"][0]:
        action, address = event["action"], event.get("addr", 0)
        if action in ("segment_alloc", "segment_map"):
            segments[address] = (len(lines), event["size"])
        base = next((start for start, (_, size) in segments.items() if start <= address < start + size), 0)
        number = segments[base][0] if base else -1
        stream = streams.setdefault(event["stream"], len(streams))
        lines.append(f"{action} {number}+{address - base} {event['size']} {stream}")
        if action == "segment_free":
            segments.pop(address, None)
        if action == "alloc":
            allocations += 1
            without_frames += not event.get("frames")
    return {"trace": lines, "allocations": allocations, "without_frames": without_frames}


# All runs.


def spawn(name: str, number: str, options: argparse.Namespace) -> Facts:
    """The run `number` ("a1") of a case, in a process of its own."""
    out = options.work / f"{name}.{number}.json"
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "DS_IGNORE_CUDA_DETECTION": "1",
        "OMP_NUM_THREADS": "2",
        "TORCHINDUCTOR_CACHE_DIR": str(options.work / "inductor"),
        "TRITON_CACHE_DIR": str(options.work / "triton"),
        "MASTER_PORT": str(30000 + abs(hash((name, number))) % 2000),
        "PYTHONHASHSEED": "0",
    }
    if options.wheels is not None:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(options.work / "site"), os.environ.get("PYTHONPATH")])
        )
    if not options.gpu:
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, __file__, "--one", name, "--mode", number[0], "--out", str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=options.case_limit)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {options.case_limit} s"}
    if done.returncode or not out.exists():
        return {"error": f"exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"}
    facts: Facts = json.loads(out.read_text())
    return facts


def compare(runs: dict[str, Facts]) -> Facts:
    """The verdict on a case: for each field `equal`, `differs by itself` or `DIFFERENT`, and where."""
    errors = {number: facts["error"] for number, facts in runs.items() if "error" in facts}
    if errors:
        return {"verdict": "failed", "errors": errors}
    a1, a2, b1, b2 = (runs[number] for number in ("a1", "a2", "b1", "b2"))
    row: Facts = {"fields": {}, "where": {}}
    for name in FIELDS:
        values = [facts[name] for facts in (a1, a2, b1, b2)]
        if all(value == values[0] for value in values):
            row["fields"][name] = "equal"
        elif values[0] != values[1] or values[2] != values[3]:
            row["fields"][name] = "differs by itself"
            row["where"][name] = {
                "a1-a2": where(*values[:2]),
                "b1-b2": where(*values[2:]),
                "a1-b1": where(*values[::2]),
            }
        else:
            row["fields"][name] = "DIFFERENT"
            row["where"][name] = where(values[0], values[2])
    row["verdict"] = next(
        (word for word in ("DIFFERENT", "differs by itself") if word in row["fields"].values()), "equal"
    )  # fmt: skip
    for mode, facts in (("a", a1), ("b", b1)):
        row[mode] = {name: facts[name] for name in ("allocations", "without_frames", "peak_bytes", "seconds")}
        row[mode]["events"] = len(facts["trace"])
    row["losses"] = [float.fromhex(loss) for loss in a1["losses"]]
    row["compared"] = {name: len(a1[name]) for name in FIELDS}
    return row


def where(one: Any, other: Any) -> Any:
    """The first few places in which two values differ."""
    if isinstance(one, dict):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        return {"count": len(names), "first": {name: [one.get(name), other.get(name)] for name in names[:6]}}
    places = [index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
    lengths = [len(one), len(other)]
    return {"count": len(places), "lengths": lengths, "first": [[i, one[i], other[i]] for i in places[:4]]}


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/memtrace-equality"))
    parser.add_argument("--wheels", type=Path, help="as for record_driver.py")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    parser.add_argument("--case-limit", type=float, default=120)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=("a", "b"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.out.write_text(json.dumps(one(options.one, options.mode)))
        return
    began = time.monotonic()
    shutil.rmtree(options.work, ignore_errors=True)
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    options.gpu = shutil.which("nvidia-smi") is not None
    if options.wheels is not None:
        from record_driver import unpack

        unpack((options.wheels / "job").glob("*.whl"), options.work / "site")
    chosen = [name for name in CASES if not options.only or name in options.only.split(",")]
    results: dict[str, dict[str, Facts]] = {name: {} for name in chosen}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        warm = pool.submit(spawn, "compile", "a0", options) if "compile" in chosen else None  # fills the caches
        waiting = {}
        for name in sorted(chosen, key=lambda name: (name == "compile", name not in NEEDS_DEEPSPEED)):
            if name == "compile" and warm is not None:
                warm.result()
            for number in ("a1", "b1", "a2", "b2"):
                waiting[pool.submit(spawn, name, number, options)] = (name, number)
        for future in concurrent.futures.as_completed(waiting):
            name, number = waiting[future]
            results[name][number] = future.result()
    rows = {name: compare(results[name]) for name in chosen}
    (options.out / "equality.json").write_text(json.dumps(rows, indent=1))
    for name, row in rows.items():
        if row["verdict"] == "failed":
            print(f"{name:28} failed: {str(row['errors'])[-600:]}")
            continue
        differing = [f"{field}: {word}" for field, word in row["fields"].items() if word != "equal"]
        a, b = row["a"], row["b"]
        print(
            f"{name:28} {row['verdict']:18} {row['compared']['counters']} counters, {a['events']} events; "
            f"without frames {a['without_frames']} -> {b['without_frames']} of {b['allocations']}; "
            f"{a['seconds']:.1f} s, {b['seconds']:.1f} s {'; '.join(differing)}"
        )
        if differing:
            print("    ", json.dumps(row["where"])[:700])
    print(f"{len(rows)} cases in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
