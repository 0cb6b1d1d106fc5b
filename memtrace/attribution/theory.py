"""ZeRO's arithmetic: what the paper says a rank holds, and what DeepSpeed really keeps there.

Pure functions of a `Setup`. The paper's column is that of "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (arXiv 1910.02054); DeepSpeed's is of deepspeed-memory-map, sections 1 and 5, read in the releases
0.9.4 to 0.19.8. Psi is the number of trainable parameters, N the number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from itertools import accumulate

STAGES = (0, 1, 2, 3)
MASTER_BYTES = 4
"""Of a master weight: DeepSpeed keeps them in fp32."""
DTYPE_BYTES = {"fp16": 2, "bf16": 2, "16-bit": 2, "fp32": 4}
OPTIMIZER_BYTES = {
    "adam": 8,
    "adamw": 8,
    "fusedadam": 8,
    "cpuadam": 8,
    "onebitadam": 8,
    "zerooneadam": 8,
    "lamb": 8,
    "onebitlamb": 8,
    "adagrad": 4,
    "lion": 4,
    "muon": 4,
    "rmsprop": 4,
    "momentum": 4,
    "sgd": 0,
}
"""Bytes of fp32 states that an optimizer keeps for a parameter."""
FUSED_OPTIMIZERS = ("adam", "adamw", "fusedadam", "cpuadam", "lamb", "lion")
"""Names for which DeepSpeed builds an optimizer of its own, which updates in place; all others it takes from torch."""
FUSED_TEMP, FOREACH_TEMP, SINGLE_TEMP = 0, 4, 8
"""Bytes of temporaries in the step of torch's Adam, for a parameter of what it updates at once."""
_ALIGNMENT = 2
"""Stages 1 and 2 and BF16_Optimizer pad their flat buffers to this many elements a rank."""
_ENGINE_BUCKET = 500_000_000
"""Elements in which the engine itself reduces gradients where no ZeRO does."""


class When(IntEnum):
    """What the program is doing: some memory is there only then."""

    BETWEEN = 0
    FORWARD = 1
    BACKWARD = 2
    STEP = 3


class Wrapper(Enum):
    """DeepSpeed's class around the optimizer, where stage 0 (or 1) leaves a choice."""

    ZERO = "ZeRO"
    NONE = "none"
    FP16 = "FP16_Optimizer"
    UNFUSED = "FP16_UnfusedOptimizer"
    BF16 = "BF16_Optimizer"


@dataclass(frozen=True, slots=True)
class Knobs:
    """Settings of DeepSpeed that change bytes; buckets, thresholds and distances in elements. Defaults are its own."""

    reduce_bucket: int = 500_000_000
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    sub_group: int = 1_000_000_000
    prefetch_bucket: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    persistence: int = 100_000
    offload_optimizer: bool = False
    offload_param: bool = False
    hpz: int = 1

    @property
    def buckets(self) -> int:
        """How many reduce buckets stages 1 and 2 make."""
        return 2 if self.overlap_comm else 1


@dataclass(frozen=True, slots=True)
class Setup:
    """A job as the formulas see it. `params` are trainable ones, `frozen` the others; bytes are for one parameter.

    `numels` are the sizes of the trainable parameters in their order, if known: with them padding is exact. `groups`
    are the optimizer's parameter groups (stages 1 and 2; empty: one). `rank` decides whose boundary parameters count.
    """

    stage: int
    world: int
    params: int
    frozen: int = 0
    param_bytes: int = 2
    grad_bytes: int = 2
    state_bytes: int = 8
    temp_bytes: int = FOREACH_TEMP
    wrapper: Wrapper = Wrapper.ZERO
    knobs: Knobs = Knobs()
    numels: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    rank: int | None = None

    @property
    def sized(self) -> bool:
        """Whether the size of every trainable parameter is known."""
        return sum(self.numels) == self.params > 0


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that a rank holds. `paper` and `kept` in bytes, None: no figure for it. `why` is one sentence.

    `at_most`: `kept` is a bound on what comes and goes, not a figure to be met. `formula` is the paper's.
    """

    name: str
    formula: str
    paper: int | None
    kept: int | None
    why: str
    at_most: bool = False


PARAMETERS, GRADIENTS, MASTERS, MOMENTS = "parameters", "gradients", "masters", "moments"
STATES = (PARAMETERS, GRADIENTS, MASTERS, MOMENTS)
BUCKET, PERSISTENT = "reduce bucket", "persistent parameters"
RESIDENT = (*STATES, BUCKET, PERSISTENT)
GATHERED, COPIES, STEP_TEMPORARIES = "gathered parameters", "reduction copies", "step temporaries"
ORDER = (*RESIDENT, GATHERED, COPIES, STEP_TEMPORARIES)
"""All terms, as they are shown."""


def aligned(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple.

    >>> aligned(10, 4), aligned(8, 4)
    (12, 8)
    """
    return -(-count // multiple) * multiple


def share(count: int, ranks: int) -> int:
    """The padded part of one rank."""
    return -(-count // ranks)


def partition(setup: Setup) -> int:
    """Elements that this rank's optimizer updates: all of them at stage 0, one padded N-th from stage 1 on."""
    if setup.stage == 0 and setup.wrapper is not Wrapper.BF16:
        return setup.params
    if setup.stage == 3:
        return sum(shards(setup)) if setup.sized else share(setup.params, setup.world)
    return flat(setup) // setup.world


def flat(setup: Setup) -> int:
    """Elements of the flat low-precision buffers of stages 1 and 2, padding included."""
    return sum(aligned(group, _ALIGNMENT * setup.world) for group in setup.groups or (setup.params,))


def shards(setup: Setup) -> tuple[int, ...]:
    """Elements of this rank's shard of each parameter at stage 3: every parameter is padded by itself."""
    return tuple(share(numel, setup.world) for numel in setup.numels)


def sub_groups(setup: Setup) -> tuple[int, ...]:
    """Elements of what is stepped at once at stage 3: parameters are added until a sub-group is full."""
    whole, limit = partition(setup), setup.knobs.sub_group
    if whole <= limit:
        return (whole,)
    if not setup.sized:
        full, rest = divmod(whole, limit)
        return (limit,) * full + ((rest,) if rest else ())
    groups, size = [], 0
    for part in shards(setup):
        size += part
        if size >= limit:
            groups.append(size)
            size = 0
    return (*groups, size) if size else tuple(groups)


def owned(setup: Setup, rank: int) -> int:
    """Elements of every parameter that touches the partition of `rank` at stages 1 and 2: those at its ends, whole."""
    first = partition(setup) * rank
    last = first + partition(setup)
    start = total = 0
    for numel in setup.numels:
        if first <= start < last or start < first < start + numel:
            total += numel
        start += numel
    return total


def fullest_rank(setup: Setup) -> int:
    """The rank whose partition touches most elements of parameters, at stages 1 and 2."""
    size = partition(setup)
    change = [0] * (setup.world + 1)
    start = 0
    for numel in setup.numels:
        change[start // size] += numel
        change[(start + max(numel, 1) - 1) // size + 1] -= numel
        start += numel
    touched = list(accumulate(change[:-1]))
    return touched.index(max(touched))


def paper_terms(setup: Setup) -> dict[str, tuple[str, int]]:
    """The paper's four terms: formula and bytes. Master weights and moments are its "optimizer states"."""
    stage, psi, ranks = setup.stage, setup.params, setup.world
    sizes = (setup.param_bytes, setup.grad_bytes, MASTER_BYTES, setup.state_bytes)
    since = (3, 2, 1, 1)
    return {
        name: (
            f"{size}Ψ/N" if stage >= first else f"{size}Ψ",
            size * share(psi, ranks) if stage >= first else size * psi,
        )
        for name, size, first in zip(STATES, sizes, since, strict=True)
    }


def terms(setup: Setup, when: When) -> tuple[Term, ...]:
    """What DeepSpeed keeps on a rank at such a moment, beside what the paper says; activations are not of it."""
    return (*_states(setup, when), *_constants(setup, when), *_passing(setup, when))


def _states(setup: Setup, when: When) -> tuple[Term, ...]:
    paper = paper_terms(setup)
    kept = {
        PARAMETERS: _parameters(setup),
        GRADIENTS: _gradients(setup, when),
        MASTERS: _masters(setup),
        MOMENTS: _on_device(setup, setup.state_bytes * partition(setup), "the optimizer's states"),
    }
    return tuple(Term(name, *paper[name], *kept[name]) for name in STATES)


def _parameters(setup: Setup) -> tuple[int, str]:
    size = setup.param_bytes
    if setup.stage == 3:
        if setup.knobs.offload_param:
            return 0, "Parameters are offloaded: no partition stays on the device."
        frozen = size * share(setup.frozen, setup.world)
        more = " Frozen parameters are partitioned too." if setup.frozen else ""
        return size * partition(setup) + frozen, f"One N-th of every parameter, each padded by itself.{more}"
    if setup.stage == 0 and setup.wrapper is not Wrapper.BF16:
        return size * (setup.params + setup.frozen), "Every rank holds all parameters."
    return (
        size * (flat(setup) + setup.frozen),
        "Every rank holds all parameters, flat, padded to a multiple of 2N elements.",
    )


def _gradients(setup: Setup, when: When) -> tuple[int, str]:
    size, part = setup.grad_bytes, partition(setup)
    if setup.wrapper is Wrapper.BF16:
        return (
            MASTER_BYTES * flat(setup),
            "BF16_Optimizer keeps fp32 gradients of all parameters, which no number of ranks divides.",
        )
    if setup.stage == 3:
        if setup.knobs.offload_optimizer:
            return 0, "Gradients are offloaded with the optimizer."
        return size * part, "A flat buffer for this rank's gradients, there from initialisation on."
    if when in (When.BETWEEN, When.FORWARD):
        return 0, "Gradients exist only from backward until the step."
    if setup.stage == 0 or (setup.stage == 1 and when == When.BACKWARD):
        return size * setup.params, "All gradients are kept until the last of them is there."
    if setup.knobs.offload_optimizer:
        return 0, "Gradients are offloaded with the optimizer."
    if setup.sized and setup.rank is not None and len(setup.groups) < 2:
        return (
            setup.param_bytes * owned(setup, setup.rank),
            "Room for every parameter that touches this rank's partition: those at its two ends count whole.",
        )
    return size * part, "This rank's part, and the parameters at its two ends whole: more than 1/N."


def _masters(setup: Setup) -> tuple[int, str]:
    if setup.wrapper is Wrapper.NONE:
        return 0, "The parameters are fp32 and are updated themselves."
    return _on_device(setup, MASTER_BYTES * partition(setup), "the fp32 master weights")


def _on_device(setup: Setup, size: int, what: str) -> tuple[int, str]:
    if setup.knobs.offload_optimizer and setup.stage > 0:
        return 0, f"Offloaded: {what} are in host memory."
    if setup.stage == 0 and setup.wrapper is not Wrapper.BF16:
        return size, f"Every rank keeps {what} of all parameters."
    return size, f"One N-th of {what}."


def _constants(setup: Setup, when: When) -> tuple[Term, ...]:
    """Memory whose size settings decide."""
    found = []
    knobs, size = setup.knobs, setup.param_bytes
    if setup.stage > 0 and setup.wrapper is Wrapper.ZERO and knobs.contiguous_gradients:
        bucket = size * knobs.reduce_bucket
        if setup.stage == 3:
            why = "One bucket of reduce_bucket_size elements, kept for good."
        else:
            bucket *= knobs.buckets if when == When.BACKWARD else 0
            number = "Two buckets (overlap_comm)" if knobs.overlap_comm else "One bucket"
            why = f"{number} of reduce_bucket_size elements, in backward only."
        found.append(Term(BUCKET, "", None, bucket, why))
    if setup.stage == 3 and setup.sized:
        small = sum(numel for numel in setup.numels if numel <= knobs.persistence)
        why = "Parameters up to stage3_param_persistence_threshold elements stay whole."
        found.append(Term(PERSISTENT, "", None, size * small, why))
    return tuple(found)


def _passing(setup: Setup, when: When) -> tuple[Term, ...]:
    """What comes and goes within a step."""
    found = []
    knobs, size, psi = setup.knobs, setup.param_bytes, setup.params + setup.frozen
    if setup.stage == 3 and when in (When.FORWARD, When.BACKWARD):
        most = min(psi, knobs.prefetch_bucket + knobs.reuse_distance // 2 + 2 * max(setup.numels, default=0))
        why = (
            "Gathered ahead (stage3_prefetch_bucket_size), or kept around the turn to backward because they are needed "
            "again soon (stage3_max_reuse_distance)."
        )
        if not setup.sized:
            why += " And the largest parameter twice, whose size is not known."
        found.append(Term(GATHERED, "", None, size * most, why, at_most=True))
    if when == When.BACKWARD:
        bucket = knobs.reduce_bucket if setup.stage and setup.wrapper is Wrapper.ZERO else _ENGINE_BUCKET
        why = "A bucket's gradients, put together once more for their reduction."
        found.append(Term(COPIES, "", None, size * min(bucket, psi), why, at_most=True))
    if when == When.STEP:
        found.append(Term(STEP_TEMPORARIES, "", None, *_step(setup)))
    return tuple(found)


def _step(setup: Setup) -> tuple[int, str]:
    return max(step_moments(setup), key=lambda moment: moment[0])


def step_moments(setup: Setup) -> tuple[tuple[int, str], ...]:
    """Bytes beyond the states, with a sentence, at two moments of a step: while gradients are copied, and after."""
    if setup.knobs.offload_optimizer and setup.stage > 0:
        return ((0, "The step runs on the CPU."),)
    temp = setup.temp_bytes
    if setup.stage == 3:
        at_once, copies = max(sub_groups(setup)), setup.grad_bytes + MASTER_BYTES
        of = "one sub-group" if len(sub_groups(setup)) > 1 else "this rank's partition"
        knob = " (sub_group_size bounds it)"
    elif setup.stage and setup.wrapper is Wrapper.ZERO:
        groups = setup.groups or (setup.params,)
        at_once = max(aligned(group, _ALIGNMENT * setup.world) // setup.world for group in groups)
        copies, of, knob = setup.param_bytes + MASTER_BYTES, "this rank's partition", " (sub_group_size does not count)"
    elif setup.wrapper is Wrapper.FP16:
        at_once, copies, of, knob = setup.params, 2 * MASTER_BYTES, "all parameters", ""
    elif setup.wrapper is Wrapper.UNFUSED:
        at_once, copies, of, knob = setup.params, MASTER_BYTES, "all parameters", ""
    else:
        return ((temp * partition(setup), "The optimizer's own temporaries."),)
    first = f"The gradients of {of} are put together and made fp32 for the step: {copies} bytes a parameter{knob}."
    then = f"The gradients of {of} in fp32, 4 bytes a parameter{knob}, and {temp} of the optimizer's own temporaries."
    return (copies * at_once, first), ((MASTER_BYTES + temp) * at_once, then)


def total(found: Sequence[Term]) -> int:
    """Bytes of all terms that have a figure."""
    return sum(term.kept or 0 for term in found)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a job that is still to run: terms in bytes, and their sums at four moments.

    `resident` is kept between steps, `backward` and `step` are what comes on top of it at most, without activations.
    """

    stage: int
    paper: int
    terms: tuple[Term, ...]
    resident: int
    backward: int
    step: int


def plan(setup: Setup) -> tuple[StagePlan, ...]:
    """All stages of one job, side by side."""
    return tuple(_stage_plan(_at_stage(setup, stage)) for stage in STAGES)


def _at_stage(setup: Setup, stage: int) -> Setup:
    wrapper = Wrapper.ZERO
    if stage == 0:
        fused = Wrapper.FP16 if setup.temp_bytes == FUSED_TEMP else Wrapper.UNFUSED
        wrapper = fused if setup.param_bytes < MASTER_BYTES else Wrapper.NONE
    at_stage = replace(setup, stage=stage, wrapper=wrapper, rank=None)
    return replace(at_stage, rank=fullest_rank(at_stage)) if stage in (1, 2) and setup.sized else at_stage


def _stage_plan(setup: Setup) -> StagePlan:
    between, backward, step = (terms(setup, when) for when in (When.BETWEEN, When.BACKWARD, When.STEP))
    merged: dict[str, Term] = {}
    for term in sorted((*between, *backward, *step), key=lambda term: ORDER.index(term.name)):
        if term.name not in merged or (term.kept or 0) > (merged[term.name].kept or 0):
            merged[term.name] = term
    return StagePlan(
        stage=setup.stage,
        paper=sum(size for _, size in paper_terms(setup).values()),
        terms=tuple(merged.values()),
        resident=total(between),
        backward=total(backward),
        step=total(step),
    )
