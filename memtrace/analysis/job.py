"""Which training job a recording of DeepSpeed shows: stage, ranks, parameters, dtype, optimizer; what told each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.attribution import Attribution
from memtrace.attribution.theory import (
    FOREACH_TEMP,
    FUSED_TEMP,
    MASTER_BYTES,
    SINGLE_TEMP,
    Knobs,
    Wrapper,
    aligned,
    share,
)
from memtrace.model import SnapshotData, StackTable
from memtrace.timeline import Phase, Timeline

_OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "fused_adam": "FusedAdam",
    "cpu_adam": "CPUAdam",
    "adagrad": "Adagrad",
    "adamax": "Adamax",
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
    "lion": "Lion",
    "fused_lamb": "FusedLamb",
    "lamb": "LAMB",
    "muon": "Muon",
}
_MOST_RANKS = 1 << 20
_SMALLEST_STATE = 1024
"""Bytes: what an optimizer keeps below this are counters of steps."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Job:
    """What a recording shows of its job; None where it cannot be known, and `sources` says why.

    `stage` is ZeRO's. `world` counts data-parallel ranks. `params` are trainable parameters, `numels` their sizes in
    order (empty: not known), `frozen` the others. `partition` counts elements that this rank's optimizer updates,
    `groups` elements of each flat buffer (stages 1 and 2). `*_bytes` are for one parameter. `reduce_bucket` is in
    elements, `buckets` how many are made at once. `releases` is DeepSpeed's range, `last_release` None: up to the
    latest. `built_whole`: whether the model was built outside zero.Init; None: not seen.
    """

    stage: int | None
    world: int | None
    params: int | None
    frozen: int
    dtype: str | None
    optimizer: str | None
    wrapper: Wrapper
    partition: int | None
    param_bytes: int
    grad_bytes: int
    state_bytes: int | None
    temp_bytes: int
    reduce_bucket: int | None
    buckets: int
    sub_groups: tuple[int, ...]
    groups: tuple[int, ...]
    numels: tuple[int, ...]
    rank: int | None
    offloads_optimizer: bool
    releases: str | None
    last_release: str | None
    built_whole: bool | None
    sources: Mapping[str, str] = field(default_factory=dict)


def headline(job: Job) -> str:
    """The job in one line: `ZeRO-3, 8 ranks, DeepSpeed 0.18.6-0.19.1`, without what is not known."""
    parts = [f"ZeRO-{job.stage}" if job.stage is not None else "DeepSpeed, ZeRO stage unknown"]
    if job.world is not None:
        parts.append("1 rank" if job.world == 1 else f"{job.world:,} ranks")
    if job.releases is not None:
        parts.append(f"DeepSpeed {job.releases}")
    return ", ".join(parts)


def infer_job(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    attribution: Attribution,
    *,
    world: int | None = None,
    rank: int | None = None,
) -> Job | None:
    """The job, from sizes and places of blocks; None where no frame is DeepSpeed's. `world`, `rank`: as recorded."""
    facts = attribution.deepspeed
    if facts is None:
        return None
    seen = _Seen.of(data, replay, timeline, attribution)
    stage = facts.stage
    shape = _Shape.of(seen, stage)
    ranks, ranks_from = (world, "the recording's own notes") if world else shape.world
    numels = _sizes(seen, shape, ranks)
    params, params_from = _params(shape, numels, ranks)
    frozen = _frozen(seen, ranks) if stage == 3 else 0
    dtype, dtype_from = _dtype(seen, shape)
    optimizer, state_bytes, optimizer_from = _optimizer(seen, shape)
    bucket, buckets = _bucket(seen, shape.param_bytes)
    gradients = seen.sizes(seen.named("deepspeed.zero3.setup", "grad.partition"))
    grad_bytes = shape.param_bytes
    if gradients and shape.partition:
        grad_bytes = max(1, round(gradients[-1] / shape.partition))
    return Job(
        stage=stage,
        world=ranks,
        params=params,
        frozen=frozen,
        dtype=dtype,
        optimizer=optimizer,
        wrapper=shape.wrapper,
        partition=shape.partition,
        param_bytes=shape.param_bytes,
        grad_bytes=grad_bytes,
        state_bytes=state_bytes,
        temp_bytes=_temporaries(data.stacks),
        reduce_bucket=bucket,
        buckets=buckets,
        sub_groups=shape.masters if stage == 3 else (),
        groups=shape.groups,
        numels=numels,
        rank=rank if rank is not None else _rank(seen, shape, numels, ranks),
        offloads_optimizer=shape.offloads,
        releases=facts.releases,
        last_release=facts.at_most,
        built_whole=_built_whole(seen) if stage == 3 else None,
        sources={
            "stage": facts.stage_from,
            "world": ranks_from,
            "params": params_from,
            "dtype": dtype_from,
            "optimizer": optimizer_from,
        },
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The blocks of DeepSpeed's rules, as columns to ask."""

    requested: NDArray[np.int64]
    born: NDArray[np.int64]
    freed: NDArray[np.int64]
    rule: NDArray[np.int16]
    category: NDArray[np.uint8]
    label: NDArray[np.int16]
    frame: NDArray[np.int32]
    stack: NDArray[np.int32]
    attribution: Attribution
    timeline: Timeline
    stacks: StackTable
    rules: Mapping[str, tuple[int, ...]]
    ready: int
    """Event at which initialisation is over."""

    @classmethod
    def of(cls, data: SnapshotData, replay: Replay, timeline: Timeline, attribution: Attribution) -> _Seen:
        """Columns of all blocks."""
        blocks = replay.lifetimes
        rules: dict[str, list[int]] = {}
        for number, name in enumerate(attribution.rule_ids):
            rules.setdefault(name, []).append(number)
        working = np.flatnonzero((timeline.phase != Phase.INIT) & (timeline.phase != Phase.OTHER))
        first = int(timeline.start[working[0]]) if len(working) else replay.events - 1
        return cls(
            requested=blocks.requested,
            born=blocks.born,
            freed=blocks.freed,
            rule=attribution.rule,
            category=attribution.category,
            label=attribution.label,
            frame=attribution.frame,
            stack=blocks.stack,
            attribution=attribution,
            timeline=timeline,
            stacks=data.stacks,
            rules={name: tuple(numbers) for name, numbers in rules.items()},
            ready=first,
        )

    def by_rule(self, *names: str) -> Rows:
        """Blocks that one of these rules decided, in the order of their birth."""
        codes = [number for name in names for number in self.rules.get(name, ())]
        return self._ordered(np.flatnonzero(np.isin(self.rule, codes)) if codes else np.zeros(0, np.int64))

    def in_category(self, name: str) -> Rows:
        """Blocks of a category, in the order of their birth."""
        return self._ordered(np.flatnonzero(self.category == self.attribution.categories.index(name)))

    def named(self, rule: str, category: str) -> Rows:
        """Blocks of a rule that has several kinds."""
        rows = self.by_rule(rule)
        fits: NDArray[np.bool_] = self.category[rows] == self.attribution.categories.index(category)
        return rows[fits]

    def labels(self, rows: Rows) -> NDArray[np.str_]:
        """The label of each block; empty: the category's own."""
        return np.array((*self.attribution.labels, ""))[self.label[rows]]

    def lasting(self, rows: Rows) -> Rows:
        """Those that are there when initialisation is over."""
        return rows[(self.born[rows] <= self.ready) & (self.freed[rows] > self.ready)]

    def sizes(self, rows: Rows) -> list[int]:
        """Requested bytes of each."""
        sizes: list[int] = self.requested[rows].tolist()
        return sizes

    def in_step(self, rows: Rows, step: int, phase: Phase) -> Rows:
        """Those born in one phase of a step."""
        run = self.timeline.runs(self.born[rows])
        inside: NDArray[np.bool_] = (self.timeline.step[run] == step) & (self.timeline.phase[run] == phase)
        return rows[inside]

    def _ordered(self, rows: Rows) -> Rows:
        return rows[np.argsort(self.born[rows], kind="stable")]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes that the states themselves tell: elements of the masters and of the flat buffers, bytes a parameter."""

    stage: int | None
    wrapper: Wrapper
    masters: tuple[int, ...]
    groups: tuple[int, ...]
    partition: int | None
    param_bytes: int
    bytes_from: str
    world: tuple[int | None, str]
    offloads: bool

    @classmethod
    def of(cls, seen: _Seen, stage: int | None) -> _Shape:
        """From the blocks that are there when initialisation is over."""
        wrapper = _wrapper(seen, stage)
        rows = seen.lasting(seen.in_category("param.master"))
        masters = tuple(size // MASTER_BYTES for size in seen.sizes(rows) if size >= MASTER_BYTES)
        offloads = not masters and _offloads(seen)
        flats = _flat_bytes(seen, stage, wrapper)
        updated = sum(masters) or None
        size, why = _param_bytes(seen, stage, updated, flats)
        if updated is None and stage == 3 and flats:
            updated = sum(flats) // size
        if updated is None and stage == 0:
            updated = sum(flats) // size or None
        groups = tuple(bytes_ // size for bytes_ in flats) if stage in (1, 2) or wrapper is Wrapper.BF16 else ()
        return cls(
            stage,
            wrapper,
            masters,
            groups,
            updated,
            size,
            why,
            _world(seen, stage, wrapper, updated, groups, size),
            offloads,
        )


def _wrapper(seen: _Seen, stage: int | None) -> Wrapper:
    if len(seen.by_rule("deepspeed.bf16.setup", "deepspeed.bf16.gradients")):
        return Wrapper.BF16
    if stage != 0:
        return Wrapper.ZERO
    for wrapper, names in (
        (Wrapper.FP16, ("deepspeed.fp16.setup", "deepspeed.fp16.step")),
        (Wrapper.UNFUSED, ("deepspeed.fp16-unfused.setup", "deepspeed.fp16-unfused.step")),
    ):
        if len(seen.by_rule(*names)):
            return wrapper
    return Wrapper.NONE


def _offloads(seen: _Seen) -> bool:
    """Of a job without lasting masters: whether gradients are sent to the CPU, or room for that was made, or it was
    recorded while it set up its buffers, and so would have shown masters."""
    if len(seen.by_rule("deepspeed.zero12.offload", "deepspeed.zero3.offload-gradients")):
        return True
    buckets = seen.in_category("grad.bucket")
    setup = seen.by_rule("deepspeed.zero3.setup", "deepspeed.zero12.setup", "deepspeed.zero12.flat")
    return bool((seen.labels(buckets) == "offload staging").any() or (seen.born[setup] >= 0).any())


def _flat_bytes(seen: _Seen, stage: int | None, wrapper: Wrapper) -> list[int]:
    """Bytes of the low-precision buffers: partitions at stage 3, else whole flats, else the parameters as they are."""
    if stage == 3:
        rows = seen.lasting(seen.by_rule("deepspeed.zero3.partition-flat", "deepspeed.zero3.partition-flat-utils"))
        return seen.sizes(rows)
    rows = seen.lasting(seen.in_category("param.full"))
    is_flat = seen.labels(rows) == "flat 16-bit parameters"
    if is_flat.any():
        return seen.sizes(rows[is_flat])
    return seen.sizes(rows) if stage == 0 and wrapper is not Wrapper.BF16 else []


def _param_bytes(seen: _Seen, stage: int | None, updated: int | None, flats: Sequence[int]) -> tuple[int, str]:
    """Bytes of a parameter in the model: against its master, else by the default bucket, else assumed."""
    if updated and stage in (0, 3) and flats:
        return max(1, round(sum(flats) / updated)), "bytes of the parameters against those of their fp32 masters"
    if updated and stage in (1, 2):
        made = set(seen.sizes(seen.by_rule("deepspeed.zero12.setup", "deepspeed.zero12.step-gradients",
            "deepspeed.zero12.step-gradients-flat")))  # fmt: skip
        if any(size % 2 == 0 and size // 2 in _parts(seen) for size in made):
            return 2, "16-bit copies of this rank's partition beside the fp32 one"
    buckets = seen.sizes(seen.in_category("grad.bucket"))
    for size in (2, 4):
        if size * Knobs().reduce_bucket in buckets:
            return size, f"a reduce bucket of {size * 500:,} MB: the default's 5e8 elements"
    return 2, "assumed: nothing in the recording tells"


def _parts(seen: _Seen) -> set[int]:
    rows = seen.lasting(seen.in_category("param.master"))
    return {size // MASTER_BYTES for size in seen.sizes(rows)}


def _world(
    seen: _Seen, stage: int | None, wrapper: Wrapper, updated: int | None, groups: Sequence[int], size: int
) -> tuple[int | None, str]:
    """How many ranks share the states."""
    if stage == 0 and wrapper is not Wrapper.BF16:
        return None, "nothing is divided at stage 0, so no size tells how many ranks there are"
    if updated is None:
        return None, "no fp32 master weights in the recording to compare with"
    if groups:
        ranks = sum(groups) / updated
        if abs(ranks - round(ranks)) < 1e-6 * ranks and round(ranks) >= 1:
            return round(ranks), "the flat parameters against this rank's fp32 partition"
        return None, f"the flat parameters are {ranks:.2f} times this rank's fp32 partition, no whole number"
    if stage == 3:
        return _world_of_stage3(seen, updated, size)
    return None, "no flat parameters in the recording to compare with"


def _world_of_stage3(seen: _Seen, updated: int, size: int) -> tuple[int | None, str]:
    for numels in _candidates(seen, size):
        ranks = _ranks_that_fit(numels, updated)
        if ranks is not None:
            return ranks, "the sizes of the whole parameters against their shards"
    low, high = _traffic(seen, updated * size)
    near = round(low)
    if near >= 1 and abs(low - near) < 1e-3 * near:
        return near, "the gradients reduced in one backward against this rank's partition"
    fits = list(range(max(1, int(np.ceil(low - 1e-3))), min(int(high + 1e-3), _MOST_RANKS) + 1))
    if low and len(fits) == 1:
        return fits[0], "the gradients reduced, and the parameters gathered, in one step against this rank's partition"
    if low and fits:
        return None, f"between {fits[0]} and {fits[-1]}: whole parameters are not in the recording"
    return None, "neither whole parameters nor a whole backward are in the recording"


def _candidates(seen: _Seen, size: int) -> list[list[int]]:
    """Lists of sizes, in elements, that may be all trainable parameters in their order."""
    hooks = seen.sizes(seen.by_rule("deepspeed.zero3.hooks"))
    pairs = hooks[::2] if hooks[::2] == hooks[1::2] else []
    init = np.flatnonzero(seen.timeline.phase == Phase.INIT)
    moved = seen.by_rule("torch.module.apply")
    moved = moved[seen.category[moved] == seen.attribution.categories.index("param.full")]
    if len(init):
        moved = moved[seen.born[moved] < seen.ready]
    whole = seen.sizes(seen.by_rule("deepspeed.zero3.whole-before"))
    return [[one // size for one in found] for found in (pairs, hooks, seen.sizes(moved), whole) if found]


def _ranks_that_fit(numels: Sequence[int], updated: int) -> int | None:
    """The N for which these parameters, each padded by itself, make a partition of that size."""
    about = sum(numels) / updated
    for ranks in dict.fromkeys((round(about), int(about) + 1, int(about), int(about) + 2)):
        if 1 <= ranks <= _MOST_RANKS and sum(share(numel, ranks) for numel in numels) == updated:
            return ranks
    return None


def _traffic(seen: _Seen, part_bytes: int) -> tuple[float, float]:
    """How many partitions the gradients reduced in one backward are, at least; the parameters gathered, at most."""
    reduced, gathered = seen.by_rule("deepspeed.zero3.reduce-scatter"), seen.by_rule("deepspeed.zero3.fetch")
    reduced = _without_copies(seen, reduced)
    low, high = 0.0, float(_MOST_RANKS)
    finished = np.unique(seen.timeline.step[seen.timeline.phase == Phase.STEP])
    for step in finished[finished >= 0].tolist():
        amount = int(seen.requested[seen.in_step(reduced, step, Phase.BACKWARD)].sum())
        low = max(low, amount / part_bytes)
    first = finished[finished >= 0][:1].tolist()
    for step in first:
        amount = int(seen.requested[seen.in_step(gathered, step, Phase.FORWARD)].sum())
        if amount:
            high = amount / part_bytes
    return low, high


def _without_copies(seen: _Seen, rows: Rows) -> Rows:
    """Some collectives copy their input: of two blocks of a size that are alive together the first counts."""
    if len(rows) < 2:
        return rows
    size, born, freed = seen.requested[rows], seen.born[rows], seen.freed[rows]
    copy = np.zeros(len(rows), np.bool_)
    copy[1:] = (size[1:] == size[:-1]) & (born[1:] < freed[:-1])
    return rows[~copy]


def _sizes(seen: _Seen, shape: _Shape, ranks: int | None) -> tuple[int, ...]:
    """Elements of each trainable parameter, if some list of them makes up the states exactly."""
    if shape.partition is None:
        return ()
    for numels in _candidates(seen, shape.param_bytes):
        if shape.stage == 3:
            fits = ranks is not None and sum(share(numel, ranks) for numel in numels) == shape.partition
        elif shape.groups:
            padding = 2 * (ranks or 1) * len(shape.groups)
            fits = 0 <= sum(shape.groups) - sum(numels) < padding
        else:
            fits = sum(numels) == shape.partition
        if fits:
            return tuple(numels)
    return ()


def _params(shape: _Shape, numels: Sequence[int], ranks: int | None) -> tuple[int | None, str]:
    if numels:
        return sum(numels), "the size of each parameter, which make up the fp32 partitions exactly"
    if shape.groups:
        return sum(shape.groups), "the flat parameters, padding included"
    if shape.partition is None:
        return None, "neither master weights nor flat parameters are in the recording"
    if shape.stage == 0:
        return shape.partition, "the fp32 master weights" if shape.masters else "the parameters"
    if ranks is None:
        return None, "this rank's partition is known, the number of ranks is not"
    kind = "fp32" if shape.masters else "parameter"
    return shape.partition * ranks, f"the {kind} partition times the number of ranks, padding included"


def _frozen(seen: _Seen, ranks: int | None) -> int:
    """Parameters whose shards never moved into the flat buffer."""
    rows = seen.lasting(seen.by_rule("deepspeed.zero3.partition"))
    return int(seen.requested[rows].sum()) // 2 * (ranks or 1)


def _dtype(seen: _Seen, shape: _Shape) -> tuple[str | None, str]:
    """fp16 and bf16 have one size; whether overflows are looked for tells them apart, where that differs."""
    if shape.param_bytes == 4:
        return "fp32", shape.bytes_from
    if shape.param_bytes != 2:
        return None, f"{shape.param_bytes} bytes a parameter: {shape.bytes_from}"
    if shape.wrapper is Wrapper.BF16:
        return "bf16", "BF16_Optimizer"
    names = _names(seen.stacks, "deepspeed/")
    steps = seen.timeline.has(Phase.STEP)
    if shape.stage == 3 and "has_overflow" in names:
        return "fp16", f"{shape.bytes_from}; gradients are checked for overflow, which bf16 is not by default"
    if steps and shape.stage in (1, 2, 3) and "has_overflow" not in names and "_has_inf_or_nan" not in names:
        return "bf16", f"{shape.bytes_from}; gradients are not checked for overflow, which fp16 always is"
    return "16-bit", f"{shape.bytes_from}; fp16 and bf16 look alike here"


def _names(stacks: StackTable, folder: str) -> set[str]:
    """Names of functions in files of a folder."""
    strings = stacks.strings
    inside = {code for code in np.unique(stacks.filename).tolist() if folder in strings[code].replace("\\", "/")}
    rows = np.isin(stacks.filename, np.array(sorted(inside), np.int64))
    return {strings[code] for code in np.unique(stacks.name[rows]).tolist()}


def _optimizer(seen: _Seen, shape: _Shape) -> tuple[str | None, int | None, str]:
    """Its name from the file that made its states, and the bytes of states it keeps for a parameter."""
    rows = seen.in_category("optim.state")
    rows = rows[seen.requested[rows] >= _SMALLEST_STATE]
    if not len(rows):
        if shape.offloads:
            return None, None, "no optimizer states on the device: they are offloaded"
        if seen.timeline.has(Phase.STEP):
            return None, None, "no optimizer states in the recording: no step was taken, or it was skipped"
        return None, None, "the recording ends before the first optimizer step"
    known = rows[seen.frame[rows] >= 0]
    files = [seen.stacks.frame(frame).filename for frame in np.unique(seen.frame[known]).tolist()]
    stems = sorted({PurePosixPath(file.replace("\\", "/")).stem for file in files})
    name = ", ".join(_OPTIMIZERS.get(stem, stem) for stem in stems) or None
    if not shape.partition:
        return name, None, f"states made in {', '.join(stems)}.py"
    held = int(seen.requested[rows[seen.freed[rows] > _last_step(seen)]].sum()) or int(seen.requested[rows].sum())
    bytes_each = round(held / shape.partition)
    states = "state" if bytes_each == 4 else "states"
    source = f"{bytes_each / 4:g} fp32 {states} a parameter, made in {', '.join(stems)}.py"
    return name, bytes_each, source


def _last_step(seen: _Seen) -> int:
    """The start of the last optimizer step: states made before are there."""
    steps = np.flatnonzero(seen.timeline.phase == Phase.STEP)
    return int(seen.timeline.start[steps[-1]]) if len(steps) else seen.ready


def _temporaries(stacks: StackTable) -> int:
    names = _names(stacks, "torch/optim/")
    if any(name.startswith("_multi_tensor_") for name in names):
        return FOREACH_TEMP
    if any(name.startswith("_single_tensor_") for name in names):
        return SINGLE_TEMP
    return FUSED_TEMP


def _bucket(seen: _Seen, size: int) -> tuple[int | None, int]:
    """Elements of the reduce bucket, and how many are alive together."""
    rows = seen.in_category("grad.bucket")
    rows = rows[(seen.labels(rows) == "reduce bucket") & (seen.requested[rows] >= _SMALLEST_STATE)]
    if not len(rows):
        return None, 1
    born, freed = seen.born[rows], seen.freed[rows]
    together = max(int(((born <= event) & (freed > event)).sum()) for event in born[:64].tolist())
    return int(seen.requested[rows].max()) // size, max(1, together)


def _rank(seen: _Seen, shape: _Shape, numels: Sequence[int], ranks: int | None) -> int | None:
    """The rank whose partition is touched by as many elements as this recording made room for."""
    if shape.stage not in (1, 2) or not numels or ranks is None or len(shape.groups) != 1:
        return None
    made = set(seen.sizes(seen.named("deepspeed.zero12.owned-gradients", "grad.partition")))
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(numels, np.int64))])
    part = aligned(sum(numels), 2 * ranks) // ranks
    for rank in range(min(ranks, 1 << 16)):
        first = int(np.searchsorted(edges[1:], rank * part, side="right"))
        last = int(np.searchsorted(edges[:-1], (rank + 1) * part, side="left"))
        if int(edges[last] - edges[first]) * shape.param_bytes in made:
            return rank
    return None


def _built_whole(seen: _Seen) -> bool | None:
    """Whether whole parameters were moved to the device before they were partitioned."""
    moved, inside = seen.by_rule("torch.module.apply"), seen.by_rule("deepspeed.zero3.whole-before")
    if len(moved) and int(seen.requested[moved].sum()) > int(seen.requested[inside].sum()):
        return True
    return False if len(inside) else None
