"""Plain torch: modules, optimizers, autograd, checkpointing, data. Source: torch 2.11 and recordings of it."""

from __future__ import annotations

from memtrace.attribution.rule import By, Rank, Rule, Site
from memtrace.timeline.callsites import Function, names
from memtrace.timeline.marks import LOSSES

_MODULE = "torch/nn/modules/module.py"
_CHECKPOINT = "torch/utils/checkpoint.py"

MODULE_CALL = Function(_MODULE, names("_call_impl _wrapped_call_impl inner"))

RULES: tuple[Rule, ...] = (
    Rule(
        id="torch.module.apply",
        category="param.full",
        where=Function(_MODULE, ("_apply",)),
        child=(Function(_MODULE, ("convert", "<lambda>")),),
        sites=(
            Site("param.full", "", ((964, 965),)),
            Site("grad.full", "", ((1008, 1009),), optional=True),
            Site("buffer", "", ((1034, 1035),), optional=True),
        ),
        gap=6,
        note="Module.to, .cuda, .half and their like: first parameters, then their gradients, last buffers.",
    ),
    Rule(
        id="torch.module.apply-other",
        category="param.full",
        where=Function("torch/nn/modules/*.py", ("_apply", "flatten_parameters")),
        rank=Rank.FALLBACK,
        note="Parameters that Module._apply hands to a function of the caller's own, or that RNNs flatten.",
    ),
    Rule(
        id="torch.module.load",
        category="checkpoint_io",
        where=Function(_MODULE, ("load_state_dict", "_load_from_state_dict")),
        note="Module.load_state_dict.",
    ),
    Rule(
        id="torch.module.make",
        category="param.full",
        where=Function("torch/nn/modules/*.py", names("__init__ reset_parameters _reset_parameters")),
        rank=Rank.FALLBACK,
        note="A module made on the device: its parameters (and buffers).",
    ),
    Rule(
        id="torch.module.init",
        category="param.full",
        where=Function("torch/nn/init.py"),
        rank=Rank.LAST,
        label="parameters being initialised",
        note="torch.nn.init: parameters, and what initialising them takes.",
    ),
    Rule(
        id="torch.parameter.copy",
        category="param.full",
        where=Function("torch/nn/parameter.py", ("__deepcopy__",)),
        label="copies of parameters",
        note="copy.deepcopy of a model.",
    ),
    Rule(
        id="torch.optim.state",
        category="optim.state",
        where=Function("torch/optim/*.py", ("_init_group",)),
        note="States are made in the first step, one per parameter and moment.",
    ),
    Rule(
        id="torch.optim.load",
        category="optim.state",
        where=Function("torch/optim/optimizer.py", ("load_state_dict", "_process_value_according_to_param_policy")),
        label="loaded optimizer states",
        note="Optimizer.load_state_dict copies states to the device of their parameters.",
    ),
    Rule(
        id="torch.optim.step",
        category="optim.temp",
        where=Function("torch/optim/*.py"),
        by=By.OPTIMIZER,
        rank=Rank.FALLBACK,
        knob="foreach, fused",
        note="In an optimizer's step: what outlives the step is a state, the rest are temporaries (foreach: as large "
        "as the parameters; fused: none).",
    ),
    Rule(
        id="torch.clip",
        category="optim.temp",
        where=Function("torch/nn/utils/clip_grad.py"),
        label="gradient clipping",
        note="Norms of gradients, and their products.",
    ),
    Rule(
        id="torch.scaler.scale",
        category="act.logits",
        where=Function("torch/amp/grad_scaler.py", ("scale", "apply_scale")),
        rank=Rank.FALLBACK,
        by=By.LOGITS,
        label="the loss, scaled",
        note="GradScaler.scale.",
    ),
    Rule(
        id="torch.scaler.state",
        category="optim.state",
        where=Function("torch/amp/grad_scaler.py", ("_lazy_init_scale_growth_tracker",)),
        label="the loss scale",
        note="GradScaler's own two numbers.",
    ),
    Rule(
        id="torch.scaler.step",
        category="optim.temp",
        where=Function("torch/amp/grad_scaler.py"),
        rank=Rank.LAST,
        by=By.OPTIMIZER,
        note="GradScaler: unscaling and infinity checks.",
    ),
    Rule(
        id="torch.loss",
        category="act.logits",
        where=Function("torch/nn/functional.py", LOSSES),
        by=By.LOGITS,
        note="A loss function: log-softmax of the logits and what follows.",
    ),
    Rule(
        id="torch.loss.module",
        category="act.logits",
        where=Function("torch/nn/modules/loss.py", ("forward",)),
        by=By.LOGITS,
        note="A loss module.",
    ),
    Rule(
        id="torch.backward.start",
        category="bwd.temp",
        where=Function("torch/autograd/__init__.py", ("_make_grads",)),
        label="the gradient of the loss",
        note="backward starts with ones.",
    ),
    Rule(
        id="torch.backward",
        category="bwd.temp",
        where=Function("torch/autograd/graph.py", ("_engine_run_backward",)),
        rank=Rank.LAST,
        by=By.BACKWARD,
        note="Backward on the calling thread: what autograd's own nodes allocate.",
    ),
    Rule(
        id="torch.checkpoint",
        category="act.checkpoint",
        where=Function(_CHECKPOINT, names("checkpoint forward _checkpoint_without_reentrant_generator")),
        rank=Rank.FALLBACK,
        by=By.ACTIVATION,
        note="What outlives a checkpointed function is the input of the next.",
    ),
    Rule(
        id="torch.checkpoint.recompute",
        category="bwd.temp",
        where=Function(_CHECKPOINT, names("backward unpack_hook recompute_fn")),
        rank=Rank.FALLBACK,
        label="recomputed",
        note="What checkpointing computes again in backward.",
    ),
    Rule(
        id="torch.module.call",
        category="act.saved",
        where=MODULE_CALL,
        rank=Rank.MODULE,
        by=By.ACTIVATION,
        note="Made by a module's forward: kept for backward if it is alive when backward starts, else a temporary.",
    ),
    Rule(
        id="torch.load",
        category="checkpoint_io",
        where=Function("torch/serialization.py", names("load _load _legacy_load")),
        note="torch.load made it, and nothing else claimed it.",
    ),
    Rule(
        id="torch.data",
        category="input",
        where=Function("torch/utils/data/*.py"),
        rank=Rank.LAST,
        note="A data loader.",
    ),
    Rule(
        id="torch.data.workers",
        category="input",
        where=Function("torch/utils/data/_utils/*.py"),
        rank=Rank.LAST,
        note="A data loader's collating and pinning.",
    ),
    Rule(
        id="torch.graph",
        category="compiled",
        where=Function("torch/cuda/graphs.py", ("capture_begin", "capture_end")),
        label="CUDA graph capture",
        note="What capturing a graph needs itself.",
    ),
    Rule(
        id="torch.graph.trees",
        category="compiled",
        where=Function("torch/_inductor/cudagraph_trees.py"),
        rank=Rank.LAST,
        label="CUDA graphs of torch.compile",
        note="mode=reduce-overhead keeps inputs and outputs of its graphs.",
    ),
)

WORKSPACE = Rule(
    id="torch.workspace",
    category="workspace",
    where=Function("*", ()),
    label="cuBLAS workspace",
    knob="CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE",
    note="Made by the first matrix product of a thread and stream, of a known size, and kept for good.",
)
CAST = Rule(
    id="torch.autocast",
    category="param.cast",
    where=Function("*", ()),
    note="Autocast copies a weight: half of a parameter's size, made before the product's own output.",
)
FRAMELESS = Rule(
    id="torch.backward.frameless",
    category="bwd.temp",
    where=Function("*", ()),
    by=By.BACKWARD,
    note="Autograd's thread runs no Python. What it makes in backward is a gradient if it lives until the step.",
)
PYTHON_IN_BACKWARD = Rule(
    id="torch.backward.python",
    category="bwd.temp",
    where=Function("*", ()),
    by=By.BACKWARD,
    note="Python code that no rule knows, run in backward: hooks and custom functions.",
)
OWN_INPUT = Rule(
    id="script.input",
    category="input",
    where=Function("*", ()),
    note="Made by the script itself just before the model is called.",
)
OWN_LOSS = Rule(
    id="script.loss",
    category="act.logits",
    where=Function("*", ()),
    by=By.LOGITS,
    note="Made by the script itself between the model's last module and backward.",
)
OWN_FORWARD = Rule(
    id="script.forward",
    category="act.saved",
    where=Function("*", ()),
    by=By.ACTIVATION,
    note="Made by the script itself in forward, outside any module.",
)
OWN_STEP = Rule(
    id="script.step",
    category="optim.temp",
    where=Function("*", ()),
    note="Made by the script itself between backward and the end of the step, and gone by then.",
)
OWN_LOGITS = Rule(
    id="script.logits",
    category="act.logits",
    where=Function("*", ()),
    by=By.LOGITS,
    note="A linear layer called by the function that then calls the loss: the logits.",
)
CAPTURED = Rule(
    id="torch.graph.pool",
    category="compiled",
    where=Function("*", ()),
    label="a captured graph's pool",
    note="In the private pool of a CUDA graph: the graph's own tensors, kept as long as it is.",
)
KEPT_BUFFER = Rule(
    id="torch.module.buffer",
    category="buffer",
    where=Function("*", ()),
    label="kept by a module",
    note="Made in the first forward only, at a place that later forwards pass without making it again, and kept.",
)
OWN_PARAMETER = Rule(
    id="script.parameter",
    category="param.full",
    where=Function("*", ()),
    note="Made by the script itself before the first forward, alive in every step, and of the size of a gradient.",
)
PRIOR_BUCKET = Rule(
    id="deepspeed.prior.bucket",
    category="grad.bucket",
    where=Function("*", ()),
    label="reduce bucket",
    note="From before the recording: exactly 5e8 elements of 2 bytes, DeepSpeed's default bucket.",
)
PRIOR_MASTER = Rule(
    id="deepspeed.prior.master",
    category="param.master",
    where=Function("*", ()),
    note="From before the recording: as large as the optimizer states that this recording shows being made.",
)

RECORDED_ROLE = Rule(
    id="recorded.role",
    category="unknown",
    where=Function("*", ()),
    note="The recorder walked the live objects of the job and wrote down what each tensor was.",
)
RECORDED_GATHER = Rule(
    id="recorded.gather",
    category="param.gathered",
    where=Function("*", ()),
    note="The recorder marked the gather when it was asked for, and when DeepSpeed let go of it.",
)

DERIVED: tuple[Rule, ...] = (
    WORKSPACE,
    CAST,
    FRAMELESS,
    PYTHON_IN_BACKWARD,
    OWN_INPUT,
    OWN_LOSS,
    OWN_FORWARD,
    OWN_STEP,
    OWN_LOGITS,
    CAPTURED,
    KEPT_BUFFER,
    OWN_PARAMETER,
    PRIOR_BUCKET,
    PRIOR_MASTER,
    RECORDED_ROLE,
    RECORDED_GATHER,
)
"""Decisions that look at more than a stack: size, order, place between others. No frame matches them."""
