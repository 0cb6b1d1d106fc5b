"""ZeRO's theory against a recording: what is held at one moment, term by term, and why it differs from the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.analysis.given import Given
from memtrace.analysis.job import Job, headline, infer_job
from memtrace.attribution import LABELS, Attribution
from memtrace.attribution import theory as zero
from memtrace.attribution.theory import Knobs, Setup, Term, When, Wrapper
from memtrace.errors import QuestionError
from memtrace.model import Notice, SnapshotData
from memtrace.timeline import Phase, Timeline
from memtrace.units import format_bytes

RETAINED, ROUNDING = "param.retained", "rounding"
FIXED_IN = (0, 19, 4)
"""The release of DeepSpeed from which linear layers keep no gathered weight, wherever the model was built."""
_REDUCE_LABEL, _FLAT_LABEL = "reduce bucket", "flat 16-bit parameters"
_HPZ_LABEL, _BF16_LABEL = "hpZ secondary partitions", "fp32 gradients, not divided by N"
_INIT_LABEL = "zero gradients at initialisation"
ASSUMED = {"dtype": "16-bit", "optimizer": "Adam"}
"""What a plan takes where nothing is said."""
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One term. Bytes; None: the paper, or DeepSpeed's arithmetic, has no figure for it.

    `formula` is the paper's; `is_state` tells what stays between steps from what comes and goes.
    """

    name: str
    label: str
    formula: str
    paper_bytes: int | None
    implementation_bytes: int | None
    measured_bytes: int
    why: str
    is_state: bool

    @property
    def difference(self) -> int:
        """Measured less what theory says this version keeps."""
        return self.measured_bytes - (self.implementation_bytes or 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured bytes of `lines` and `residual_bytes` sum to `peak_bytes`, the allocated bytes after `event`.

    `setup` None: not ZeRO, or too little is known for theory; `headline` and `lacking` say which.
    """

    headline: str
    setup: Setup | None
    stage: int | None
    world: int | None
    params: int | None
    dtype: str | None
    optimizer: str | None
    sources: Mapping[str, str]
    lines: tuple[Line, ...]
    peak_bytes: int
    residual_bytes: int
    event: int
    phase: str | None
    step: int | None
    is_zero: bool
    lacking: tuple[str, ...]
    contradictions: tuple[str, ...]

    @property
    def paper_bytes(self) -> int:
        """What the paper says of the whole."""
        return sum(line.paper_bytes or 0 for line in self.lines)


def compare(
    data: SnapshotData,
    replay: Replay,
    timeline: Timeline,
    attribution: Attribution,
    *,
    event: int,
    given: Given | None = None,
    world: int | None = None,
    rank: int | None = None,
) -> Comparison:
    """Theory and measurement after `event`. `given` beats what is inferred; `world`, `rank`: as recorded."""
    given = Given() if given is None else given
    job = infer_job(data, replay, timeline, attribution, world=world, rank=rank)
    held = _Held.at(replay, timeline, attribution, event)
    phase, step = timeline.at(event)
    if job is None:
        return _measured_only(held, data, event, phase, step)
    lacking, contradictions = _lacking(job, given), _contradictions(job, given)
    setup = None if lacking else _setup(job, given)
    names = _names(held, job, attribution)
    when = _when(held, phase)
    theory = {} if setup is None else _theory(setup, when, held)
    lines, residual = _lines(held, names, theory, job, phase)
    if contradictions:
        lines = tuple(_doubted(line) for line in lines)
    return Comparison(
        headline=headline(job),
        setup=setup,
        stage=_first(given.stage, job.stage),
        world=_first(given.world, job.world),
        params=_first(given.params, job.params),
        dtype=given.dtype or job.dtype,
        optimizer=given.optimizer or job.optimizer,
        sources={**job.sources, **given.sources},
        lines=lines,
        peak_bytes=int(held.size.sum()),
        residual_bytes=residual,
        event=event,
        phase=phase,
        step=step,
        is_zero=True,
        lacking=lacking,
        contradictions=contradictions,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The blocks that the allocated counter counts after an event: one row each, bytes asked for and given."""

    rows: NDArray[np.int64]
    size: NDArray[np.int64]
    requested: NDArray[np.int64]
    category: NDArray[np.str_]
    label: NDArray[np.str_]
    born: NDArray[np.int64]
    freed: NDArray[np.int64]
    event: int
    timeline: Timeline
    state_since: int
    persistent_since: int
    """Events from which the optimizer has states, and parameters stay gathered; after the trace, if they never do."""

    @classmethod
    def at(cls, replay: Replay, timeline: Timeline, attribution: Attribution, event: int) -> _Held:
        blocks = replay.lifetimes
        rows = np.flatnonzero((blocks.born <= event) & (event < blocks.freed))
        state = attribution.category == attribution.categories.index("optim.state")
        stays = attribution.category == attribution.categories.index("param.persistent")
        made, after = blocks.born[state & (blocks.requested >= _SMALL // 1024)], replay.events + 1
        return cls(
            rows=rows,
            size=blocks.size[rows],
            requested=blocks.requested[rows],
            category=np.array(attribution.categories)[attribution.category[rows]],
            label=np.array((*attribution.labels, ""))[attribution.label[rows]],
            born=blocks.born[rows],
            freed=blocks.freed[rows],
            event=event,
            timeline=timeline,
            state_since=int(made.max()) if len(made) else after,
            persistent_since=int(blocks.born[stays].min(initial=after)),
        )

    def bytes_of(self, category: str) -> int:
        """Requested bytes of a category."""
        return int(self.requested[self.category == category].sum())


def _when(held: _Held, phase: str | None) -> When:
    """Which moment of a step the formulas are asked about: gradients and buckets are not there in all of them."""
    if phase == "step":
        copies = (held.category == "optim.temp") & (held.requested >= _SMALL)
        grads = held.category == "grad.partition"
        return When.STEP if copies.any() or grads.any() else When.BETWEEN
    return {"forward": When.FORWARD, "backward": When.BACKWARD}.get(phase or "", When.BETWEEN)


def _names(held: _Held, job: Job, attribution: Attribution) -> NDArray[np.str_]:
    """The term that each block belongs to; empty: none knows it."""
    renamed = {
        "param.master": zero.MASTERS,
        "optim.state": zero.MOMENTS,
        "optim.temp": zero.STEP_TEMPORARIES,
        "grad.partition": zero.GRADIENTS,
        "grad.bucket": zero.COPIES,
        "param.persistent": zero.PERSISTENT,
        "param.gathered": zero.GATHERED,
        "param.prefetched": zero.GATHERED,
        "param.partition" if job.stage == 3 else "param.full": zero.PARAMETERS,
        "unknown": "",
        "prior": "",
    }
    if (job.stage or 0) < 2 and job.wrapper is not Wrapper.BF16:
        renamed["grad.full"] = zero.GRADIENTS
    names = np.array([renamed.get(name, name) for name in attribution.categories], "<U32")
    code = {name: number for number, name in enumerate(attribution.categories)}
    found = names[[code[name] for name in held.category.tolist()]] if len(held.rows) else names[:0]
    found[(held.category == "grad.bucket") & (held.label == _REDUCE_LABEL)] = zero.BUCKET
    found[held.label == _HPZ_LABEL] = _HPZ_LABEL
    found[held.label == _BF16_LABEL] = zero.GRADIENTS
    flat = held.label == _FLAT_LABEL
    if flat.any():  # what was flattened is still there: initialisation
        found[(held.category == "param.full") & ~flat] = "param.full"
    if job.stage == 1 and job.wrapper is Wrapper.ZERO:
        found[_waiting_gradients(held, job)] = zero.GRADIENTS
    if job.stage == 3:
        _name_prior(held, job, found)
    return found


def _waiting_gradients(held: _Held, job: Job) -> NDArray[np.int64]:
    """Stage 1 in backward: of each size as many blocks as there are parameters of it, those that live longest."""
    rows = np.flatnonzero((held.category == "bwd.temp") & (held.requested > 0))
    sizes, counts = np.unique(np.array(job.numels, np.int64) * job.grad_bytes, return_counts=True)
    left = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    chosen = []
    for row in rows[np.argsort(-held.freed[rows], kind="stable")].tolist():
        size = int(held.requested[row])
        if left.get(size, 0):
            left[size] -= 1
            chosen.append(row)
    return np.array(chosen, np.int64)


def _name_prior(held: _Held, job: Job, found: NDArray[np.str_]) -> None:
    """Before the recording, at stage 3: two blocks of the partition's size are the parameters and the gradients."""
    if job.partition is None or zero.PARAMETERS in found or zero.GRADIENTS in found:
        return
    alike = np.flatnonzero((found == "") & (held.requested == job.partition * job.param_bytes))
    if job.grad_bytes == job.param_bytes and len(alike) == 2:
        found[alike] = (zero.PARAMETERS, zero.GRADIENTS)


def _lines(
    held: _Held, names: NDArray[np.str_], theory: Mapping[str, Term], job: Job, phase: str | None
) -> tuple[tuple[Line, ...], int]:
    """All terms, those of the state first; and the bytes that belong to none. Measured is what was asked for."""
    measured = {str(name): int(held.requested[names == name].sum()) for name in np.unique(names)}
    undecided = names == ""
    residual = int(held.size[undecided].sum())
    measured.pop("", None)
    resident = [name for name in zero.RESIDENT if name in theory or name in measured]
    passing = sorted(
        (name for name in {*measured, *theory} - set(zero.RESIDENT)), key=lambda name: -measured.get(name, 0)
    )
    shown = [name for name in passing if measured.get(name) or not theory[name].at_most]
    lines = [_line(name, measured.get(name, 0), theory.get(name), job, phase, held) for name in (*resident, *shown)]
    rounding = int((held.size - held.requested)[~undecided].sum())
    if rounding:
        why = "The allocator gives multiples of 512 B, and does not split off what is small: allocated less requested."
        lines.append(Line(ROUNDING, "rounding up of requests", "", None, None, rounding, why, is_state=False))
    return tuple(lines), residual


def _line(name: str, measured: int, term: Term | None, job: Job, phase: str | None, held: _Held) -> Line:
    state = name in zero.RESIDENT
    if term is None:
        why = _reason(name, job, phase)
        return Line(name, LABELS.get(name, ""), "", None, None, measured, why, state)
    kept, why = term.kept, term.why
    if term.at_most:
        bound = kept or 0
        beyond = "" if measured <= bound else f" That is {format_bytes(measured - bound)} more than settings explain."
        why, kept = f"{why} At most {format_bytes(bound)}.{beyond}", None
    elif state and phase not in ("step", "backward", "forward", None) and measured != kept:
        why = f"{why} At this moment initialisation is still making them."
    elif name == zero.MOMENTS and held.event < held.state_since:
        why = _no_moments(held, job)
    elif state and kept is not None and measured > kept and measured - kept < _SMALL:
        why = f"{why} And counters of steps and norms."
    return Line(name, LABELS.get(name, ""), term.formula, term.paper, kept, measured, why, state)


def _doubted(line: Line) -> Line:
    """Where what was said contradicts the recording, a state that differs may differ for that alone."""
    if not line.is_state or not line.implementation_bytes or abs(line.difference) < _SMALL:
        return line
    return replace(line, why=f"{line.why} The theory is of what was given, and the recording shows another job.")


def _no_moments(held: _Held, job: Job) -> str:
    if job.optimizer is None and not job.offloads_optimizer and held.timeline.has(Phase.STEP):
        return "No optimizer states: every step of this recording was skipped (fp16 overflow), or there are none."
    return "The optimizer makes its states in its first step, and at this moment that is still to come."


_REASONS = {
    "act.saved": "Activations: the paper does not count them. Checkpointing, shorter sequences, smaller batches.",
    "act.checkpoint": "Inputs that activation checkpointing keeps; the paper does not count them.",
    "act.logits": "Logits and loss: tokens x vocabulary, in several copies.",
    "fwd.temp": "Temporaries of forward.",
    "bwd.temp": "Temporaries of backward: gradients of activations, and of weights until they are in the bucket.",
    "grad.full": "Gradients on their way into the bucket, or to be added to the fp32 ones.",
    "grad.fp32": "Gradients in fp32: accumulation (grad_accum_dtype), or zeros at initialisation.",
    "input": "The batch.",
    "buffer": "Buffers of modules: not divided by any stage.",
    "workspace": "cuBLAS keeps a workspace for each thread and stream.",
    "param.full": "Whole parameters beside what ZeRO keeps of them: the model before it is flattened or partitioned.",
    "param.cast": "Autocast's copies of weights.",
    "comm": "Buffers of collectives.",
    "checkpoint_io": "Loaded from a checkpoint, or gathered to be saved.",
    "kv_cache": "The cache of generation.",
    "compiled": "Pools of captured graphs.",
    _HPZ_LABEL: "hpZ keeps a second partition inside each node (zero_hpz_partition_size).",
    zero.STEP_TEMPORARIES: "Norms, overflow checks and flags.",
    zero.GATHERED: "Gathered for use; kept longer than a module's call only within DeepSpeed's settings.",
    zero.COPIES: "Copies of gradients for their reduction.",
}  # fmt: skip


def _reason(name: str, job: Job, phase: str | None) -> str:
    if name == RETAINED:
        return _retained(job)
    if name == zero.GATHERED and phase not in ("forward", "backward"):
        return "Parameters gathered outside forward and backward."
    return _REASONS.get(name, f"{LABELS.get(name, name)[:1].upper()}{LABELS.get(name, name)[1:]}.")


def _retained(job: Job) -> str:
    """Why autograd can still hold parameters that DeepSpeed let go of."""
    base = (
        "DeepSpeed released these parameters in forward, but autograd still holds views of the gathered weights, so "
        "they stay until their backward."
    )
    fix = (
        "Build the model under deepspeed.zero.Init (HF: HfDeepSpeedConfig before from_pretrained), or use DeepSpeed "
        "0.19.4 or later."
    )
    if job.built_whole is False:
        return f"{base} The model was built under zero.Init: look for code that keeps weights, or views of them."
    if job.last_release is not None and _release(job.last_release) < FIXED_IN:
        outside = "The model was built outside zero.Init, and" if job.built_whole else "Outside zero.Init"
        return f"{base} {outside} this DeepSpeed ({job.releases}, before 0.19.4) patches F.linear only inside it. {fix}"
    return f"{base} DeepSpeed before 0.19.4 does so where the model is built outside zero.Init. {fix}"


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _theory(setup: Setup, when: When, held: _Held) -> dict[str, Term]:
    """What the formulas say of this moment."""
    found = {term.name: term for term in zero.terms(setup, when)}
    if when == When.BACKWARD and setup.stage in (1, 2):
        found |= _backward_so_far(setup, held, found)
    if held.event < held.state_since and zero.MOMENTS in found:
        found[zero.MOMENTS] = replace(found[zero.MOMENTS], kept=0)
    if zero.PERSISTENT in found:
        found[zero.PERSISTENT] = _persistent(held, found[zero.PERSISTENT], when)
    if when == When.STEP:
        found |= _step_so_far(setup, held, found)
    return found


def _backward_so_far(setup: Setup, held: _Held, found: Mapping[str, Term]) -> dict[str, Term]:
    """In backward of stages 1 and 2 room for gradients and buckets comes when the first of them is ready."""
    changed = {}
    owned = held.bytes_of("grad.partition")
    bucket = int(held.requested[held.label == _REDUCE_LABEL].sum())
    term = found[zero.GRADIENTS]
    if setup.stage == 2 and not owned:
        changed[zero.GRADIENTS] = replace(term, kept=0, why="No gradient of this rank's own is ready yet.")
    if setup.stage == 1 and setup.wrapper is Wrapper.ZERO and not owned:
        why = "All gradients wait in backward until the last is there; these are those made so far."
        changed[zero.GRADIENTS] = replace(term, kept=None, why=why)
    if not bucket and zero.BUCKET in found:
        why = "The bucket comes with the first gradient to be reduced."
        changed[zero.BUCKET] = replace(found[zero.BUCKET], kept=0, why=why)
    return changed


def _step_so_far(setup: Setup, held: _Held, found: Mapping[str, Term]) -> dict[str, Term]:
    """Within a step some copies are gone, or not yet there: which moment of it this is, sizes tell."""
    changed = {}
    term = found[zero.STEP_TEMPORARIES]
    measured = held.bytes_of("optim.temp")
    near = [one for one in zero.step_moments(setup) if abs(measured - one[0]) <= max(_SMALL, one[0] // 200)]
    kept, why = near[0] if near else (term.kept, term.why)
    changed[zero.STEP_TEMPORARIES] = replace(term, kept=kept, why=why, at_most=not near)
    if setup.stage in (1, 2) and setup.wrapper is Wrapper.ZERO and not held.bytes_of("grad.partition"):
        why = "Gradients are let go of when they are copied for the step."
        changed[zero.GRADIENTS] = replace(found[zero.GRADIENTS], kept=0, why=why)
    return changed


def _persistent(held: _Held, term: Term, when: When) -> Term:
    """They are gathered at the end of a step, and partitioned like the others at the start of the next."""
    if held.bytes_of("param.persistent"):
        return term
    if when == When.STEP or held.event < held.persistent_since:
        why = f"{term.why} From the end of a step to the start of the next; at this moment they are partitioned."
        return replace(term, kept=0, why=why)
    return term


def _first(left: int | None, right: int | None) -> int | None:
    return right if left is None else left


def _lacking(job: Job, given: Given) -> tuple[str, ...]:
    """What theory needs and neither the recording nor the person says."""
    found = []
    if _first(given.stage, job.stage) is None:
        found.append(f"stage: {job.sources['stage']} (--stage)")
    stage = _first(given.stage, job.stage)
    if _first(given.world, job.world) is None and (stage != 0 or job.wrapper is Wrapper.BF16):
        found.append(f"world: {job.sources['world']} (--world)")
    if _first(given.params, job.params) is None:
        found.append(f"params: {job.sources['params']} (--params)")
    return tuple(found)


def _contradictions(job: Job, given: Given) -> tuple[str, ...]:
    """Where what was said is not what the recording shows."""
    found = []
    pairs: tuple[tuple[str, object, object], ...] = (
        ("stage", given.stage, job.stage),
        ("world", given.world, job.world),
        ("params", given.params, job.params),
    )
    for name, said, shown in pairs:
        if said is not None and shown is not None and said != shown:
            by = given.sources.get(name, "given")
            found.append(f"{name} {said:,} ({by}), but the recording shows {shown:,}: {job.sources[name]}")
    if given.dtype and job.dtype and zero.DTYPE_BYTES[given.dtype] != job.param_bytes:
        found.append(f"dtype {given.dtype}, but the recording shows {job.dtype}: {job.sources['dtype']}")
    elif given.dtype and job.dtype not in (None, "16-bit", given.dtype):
        found.append(f"dtype {given.dtype}, but the recording hints at {job.dtype}: {job.sources['dtype']}")
    state = _state_bytes(given.optimizer)
    if state is not None and job.state_bytes is not None and state != job.state_bytes:
        found.append(
            f"optimizer {given.optimizer} keeps {state} bytes a parameter, but the recording shows {job.state_bytes}: "
            f"{job.sources['optimizer']}"
        )
    bucket = given.knobs.get("reduce_bucket")
    if bucket is not None and job.reduce_bucket is not None and bucket != job.reduce_bucket:
        found.append(f"reduce_bucket_size {bucket:,}, but the recording shows {job.reduce_bucket:,}")
    return tuple(found)


def _state_bytes(optimizer: str | None) -> int | None:
    return None if optimizer is None else zero.OPTIMIZER_BYTES.get(_plain(optimizer))


def _plain(optimizer: str) -> str:
    return optimizer.lower().replace("_", "").replace("-", "")


def _setup(job: Job, given: Given) -> Setup:
    """The job for the formulas: what was said, else what was seen, else defaults."""
    params = _first(given.params, job.params) or 0
    numels = given.numels or (job.numels if params == sum(job.numels) else ())
    size = zero.DTYPE_BYTES[given.dtype] if given.dtype else job.param_bytes
    state = _state_bytes(given.optimizer)
    knobs: dict[str, int | bool] = {"offload_optimizer": job.offloads_optimizer}
    if job.reduce_bucket is not None:
        knobs |= {"reduce_bucket": job.reduce_bucket, "overlap_comm": job.buckets > 1}
    same = params == job.params
    return Setup(
        stage=_first(given.stage, job.stage) or 0,
        world=_first(given.world, job.world) or 1,
        params=params,
        frozen=job.frozen,
        param_bytes=size,
        grad_bytes=job.grad_bytes if not given.dtype else size,
        state_bytes=state if state is not None else (8 if job.state_bytes is None else job.state_bytes),
        temp_bytes=job.temp_bytes,
        wrapper=job.wrapper if _first(given.stage, job.stage) == job.stage else Wrapper.ZERO,
        knobs=Knobs(**{**knobs, **given.knobs}),  # type: ignore[arg-type]
        numels=numels,
        groups=job.groups if same and len(job.groups) > 1 else (),
        rank=job.rank,
    )


def _measured_only(held: _Held, data: SnapshotData, event: int, phase: str | None, step: int | None) -> Comparison:
    """A recording without DeepSpeed: its categories, and what it is."""
    files = {data.strings[code].replace("\\", "/") for code in np.unique(data.stacks.filename).tolist()}
    kinds = (
        ("torch/distributed/fsdp/_fully_shard/", "FSDP2 (fully_shard)"),
        ("torch/distributed/fsdp/", "FSDP"),
        ("torch/nn/parallel/distributed.py", "DistributedDataParallel"),
    )
    kind = next((name for part, name in kinds if any(part in file for file in files)), None)
    lines = [
        Line(
            name, LABELS.get(name, ""), "", None, None, int(held.requested[held.category == name].sum()), "",
            name.startswith(("param.", "optim.state", "grad.")),
        )
        for name in dict.fromkeys(held.category.tolist())
        if name not in ("unknown", "prior")
    ]  # fmt: skip
    lines.sort(key=lambda line: -line.measured_bytes)
    undecided = np.isin(held.category, ("unknown", "prior"))
    rounding = int((held.size - held.requested)[~undecided].sum())
    if rounding:
        lines.append(Line(ROUNDING, "rounding up of requests", "", None, None, rounding, "", is_state=False))
    return Comparison(
        headline=f"{kind}, no ZeRO" if kind else "No ZeRO: no frame of DeepSpeed's in this recording",
        setup=None,
        stage=None,
        world=None,
        params=None,
        dtype=None,
        optimizer=None,
        sources={},
        lines=tuple(lines),
        peak_bytes=int(held.size.sum()),
        residual_bytes=int(held.size[undecided].sum()),
        event=event,
        phase=phase,
        step=step,
        is_zero=False,
        lacking=(),
        contradictions=(),
    )


def is_fused(given: Given) -> bool:
    """Whether DeepSpeed builds its own optimizer from such a configuration; without a name, Adam is assumed."""
    return not given.torch_adam and _plain(given.optimizer or ASSUMED["optimizer"]) in zero.FUSED_OPTIMIZERS


def planned(given: Given) -> Setup:
    """A job that is still to run. Raises QuestionError without a number of parameters and of ranks."""
    if given.params is None:
        raise QuestionError(
            "planning needs the number of parameters", hint="Give --params 13e9, or --model-config config.json."
        )
    if given.world is None:
        raise QuestionError("planning needs the number of ranks", hint="Give --world 64.")
    state = _state_bytes(given.optimizer)
    size = zero.DTYPE_BYTES[given.dtype or ASSUMED["dtype"]]
    return Setup(
        stage=3 if given.stage is None else given.stage,
        world=given.world,
        params=given.params,
        param_bytes=size,
        grad_bytes=size,
        state_bytes=8 if state is None else state,
        temp_bytes=zero.FUSED_TEMP if is_fused(given) else zero.FOREACH_TEMP,
        knobs=Knobs(**given.knobs),  # type: ignore[arg-type]
        numels=given.numels,
    )


def notices(given: Given, answer: Comparison | None = None) -> tuple[Notice, ...]:
    """What to know of an answer: settings left to "auto", contradictions, and what theory lacked."""
    found = []
    if given.optimizer and _state_bytes(given.optimizer) is None:
        text = f"memtrace does not know how much {given.optimizer} keeps: 8 bytes a parameter are assumed, as Adam's"
        found.append(Notice("unknown-optimizer", text))
    if given.ignored:
        found.append(Notice("auto-values", f'"auto" counts as not said: {", ".join(given.ignored)}'))
    if answer is not None:
        found += [Notice("contradiction", text) for text in answer.contradictions]
        if answer.lacking:
            found.append(Notice("no-theory", f"measured terms only; not known: {'; '.join(answer.lacking)}"))
    return tuple(found)
