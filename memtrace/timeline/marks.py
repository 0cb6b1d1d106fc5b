"""Which functions tell the phase, as data; and what each stack says.

Walked from the outermost frame inwards: the outermost telling frame decides, because a model called by `evaluate` is
evaluation and a layer recomputed under `backward` is backward. Only an optimizer's closure is the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.model import StackTable
from memtrace.places import Side
from memtrace.timeline.callsites import Function, FunctionIndex, any_in_stack, frame_sides, names
from memtrace.timeline.timeline import Phase

UNMARKED = 7
"""A Python stack in which no function tells the phase."""
FRAMELESS = 8
"""A thread that runs no Python: autograd's, most of the time."""
CLEARING = 9
"""Gradients are cleared."""
UNRECORDED = 10
"""No stack was recorded."""

_ENGINE = "deepspeed/runtime/engine.py"
_STAGE12 = "deepspeed/runtime/zero/stage_1_and_2.py"
_STAGE3 = "deepspeed/runtime/zero/stage3.py"
_TRAINER = "transformers/trainer.py"

LOSSES = (
    "cross_entropy",
    "linear_cross_entropy",
    "nll_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "ctc_loss",
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "margin_ranking_loss",
    "hinge_embedding_loss",
    "cosine_embedding_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "soft_margin_loss",
)
"""Functions of torch.nn.functional that make a loss."""

MARKS: tuple[tuple[Phase, Function], ...] = (
    (Phase.INIT, Function("deepspeed/__init__.py", ("initialize", "init_inference"))),
    (Phase.INIT, Function("deepspeed/runtime/zero/partition_parameters.py", ("wrapper", "_post_init_method"))),
    (Phase.INIT, Function("transformers/modeling_utils.py", names("from_pretrained _from_config from_config"))),
    (Phase.INIT, Function("peft/mapping_func.py", ("get_peft_model",))),
    (Phase.INIT, Function("torch/nn/modules/module.py", ("_apply", "to_empty"))),
    (Phase.INIT, Function("torch/nn/modules/*.py", ("__init__", "reset_parameters"))),
    (Phase.INIT, Function("torch/nn/init.py")),
    (Phase.INIT, Function("torch/nn/parallel/distributed.py", ("__init__",))),
    (Phase.INIT, Function("torch/distributed/fsdp/fully_sharded_data_parallel.py", ("__init__",))),
    (Phase.INIT, Function("torch/distributed/fsdp/_fully_shard/_fully_shard.py", ("fully_shard",))),
    (Phase.INIT, Function("accelerate/accelerator.py", ("prepare",))),
    (Phase.FORWARD, Function("torch/nn/modules/module.py", names("_call_impl _wrapped_call_impl inner"))),
    (Phase.FORWARD, Function("torch/nn/functional.py", LOSSES)),
    (Phase.FORWARD, Function(_ENGINE, ("forward",))),
    (Phase.FORWARD, Function("deepspeed/runtime/pipe/engine.py", ("_exec_forward_pass", "_exec_load_micro_batch"))),
    (Phase.BACKWARD, Function("torch/_tensor.py", ("backward",))),
    (Phase.BACKWARD, Function("torch/autograd/__init__.py", ("backward", "grad"))),
    (Phase.BACKWARD, Function("torch/autograd/graph.py", ("_engine_run_backward",))),
    (Phase.BACKWARD, Function("torch/utils/checkpoint.py", names("backward unpack_hook recompute_fn"))),
    (
        Phase.BACKWARD,
        Function(
            "torch/distributed/fsdp/_runtime_utils.py",
            names("_pre_backward_hook _post_backward_hook _post_backward_final_callback _post_backward_reshard"),
        ),
    ),
    (
        Phase.BACKWARD,
        Function(
            "torch/distributed/fsdp/_fully_shard/_fsdp_state.py",
            (
                "_pre_backward",
                "_root_post_backward_final_callback",
            ),
        ),
    ),
    (
        Phase.BACKWARD,
        Function(
            "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
            (
                "post_backward",
                "pre_backward",
            ),
        ),
    ),
    (Phase.BACKWARD, Function(_ENGINE, names("backward allreduce_gradients _backward_prologue_per_tensor"))),
    (Phase.BACKWARD, Function("deepspeed/runtime/pipe/engine.py", ("_exec_backward_pass", "_exec_reduce_grads"))),
    (
        Phase.BACKWARD,
        Function(
            _STAGE3,
            names(
                "backward reduce_partition_and_remove_grads reduce_leaf_module_grads backward_epilogue "
                "reduce_ready_partitions_and_remove_grads independent_gradient_partition_epilogue"
            ),
        ),
    ),
    (
        Phase.BACKWARD,
        Function(
            _STAGE12,
            names(
                "backward reduce_partition_and_remove_grads grad_handling_hook reduce_gradients "
                "independent_gradient_partition_epilogue backward_epilogue backward_prologue"
            ),
        ),
    ),
    (
        Phase.BACKWARD,
        Function(
            "deepspeed/runtime/zero/parameter_offload.py",
            names("backward _run_before_backward_function _run_after_backward_function"),
        ),
    ),
    (Phase.BACKWARD, Function("deepspeed/runtime/zero/linear.py", ("backward",))),
    (Phase.BACKWARD, Function("deepspeed/runtime/activation_checkpointing/checkpointing.py", ("backward",))),
    (Phase.BACKWARD, Function("accelerate/accelerator.py", ("backward",))),
    (Phase.STEP, Function(_ENGINE, ("step", "_take_model_step"))),
    (Phase.STEP, Function(_STAGE3, ("step",))),
    (Phase.STEP, Function(_STAGE12, ("step",))),
    (Phase.STEP, Function("deepspeed/runtime/bf16_optimizer.py", ("step",))),
    (Phase.STEP, Function("deepspeed/runtime/fp16/*.py", ("step",))),
    (Phase.STEP, Function("deepspeed/ops/*/*.py", ("step",))),
    (Phase.STEP, Function("deepspeed/runtime/pipe/engine.py", ("_exec_optimizer_step",))),
    (Phase.STEP, Function("torch/optim/*.py", ("step",))),
    (Phase.STEP, Function("torch/optim/optimizer.py", ("wrapper", "profile_hook_step"))),
    (Phase.STEP, Function("torch/amp/grad_scaler.py", names("step unscale_ update"))),
    (Phase.STEP, Function("torch/nn/utils/clip_grad.py")),
    (Phase.STEP, Function("accelerate/optimizer.py", ("step",))),
    (Phase.STEP, Function("accelerate/accelerator.py", names("clip_grad_norm_ clip_grad_value_ unscale_gradients"))),
    (Phase.EVAL, Function(_TRAINER, names("evaluate evaluation_loop prediction_step predict"))),
    (Phase.EVAL, Function("transformers/generation/utils.py", ("generate",))),
    (Phase.EVAL, Function("deepspeed/runtime/pipe/engine.py", ("eval_batch",))),
    (Phase.CHECKPOINT, Function("torch/serialization.py", ("save", "load"))),
    (Phase.CHECKPOINT, Function(_TRAINER, names("_save_checkpoint save_model _load_from_checkpoint"))),
    (
        Phase.CHECKPOINT,
        Function(
            _ENGINE, names("save_checkpoint load_checkpoint save_16bit_model _zero3_consolidated_16bit_state_dict")
        ),
    ),
    (Phase.CHECKPOINT, Function("torch/optim/optimizer.py", ("load_state_dict",))),
)
"""(phase, functions that run in no other). Sources: deepspeed-memory-map section 3; torch 2.11, transformers 5.17."""

ZEROING = (Function("torch/optim/*.py", ("zero_grad",)), Function("accelerate/optimizer.py", ("zero_grad",)))
"""Part of the step where it follows one or a backward; many scripts call it between forward and backward instead."""

GATHERING = (
    Function("deepspeed/runtime/zero/partition_parameters.py"),
    Function("torch/distributed/fsdp/_fully_shard/_fsdp_param.py"),
    Function("torch/distributed/fsdp/_flat_param.py"),
)
"""Where sharded parameters are put together."""

_THREAD_ROOTS = frozenset({"<module>", "_bootstrap", "_bootstrap_inner", "run", "_run_module_as_main", "_main", "main"})
"""Outermost frames of threads that run Python code of their own: the main one's, threading's."""

_BACKWARD_FUNCTION = Function("torch/autograd/function.py", ("apply",))
"""Outermost on autograd's thread: the Python side of a `torch.autograd.Function` in backward."""


@dataclass(frozen=True, slots=True, eq=False)
class StackMarks:
    """One row a stack: its `Phase` code, or UNMARKED or FRAMELESS; the frame that told (-1: none); whether it gathers
    a parameter, which any forward may do for another."""

    code: NDArray[np.uint8]
    frame: NDArray[np.int32]
    gathers: NDArray[np.bool_]


def mark_stacks(stacks: StackTable) -> StackMarks:
    """What each stack says of the phase."""
    index = FunctionIndex([*(function for _, function in MARKS), *ZEROING])
    frame_mark = np.full(stacks.frame_count, UNMARKED, np.uint8)
    for frame, found in enumerate(index.frames(stacks)):
        if found:
            frame_mark[frame] = MARKS[found[0]][0] if found[0] < len(MARKS) else CLEARING
    gathering = np.array([bool(found) for found in FunctionIndex(GATHERING).frames(stacks)], np.bool_)
    sides = frame_sides(stacks)
    code = np.full(len(stacks), FRAMELESS, np.uint8)
    decider = np.full(len(stacks), -1, np.int32)
    roots = np.full(len(stacks), -1, np.int64)
    ids, offsets = stacks.frame_ids, stacks.offsets.tolist()
    is_python = (sides != Side.CPP)[ids] if len(ids) else np.zeros(0, np.bool_)
    for stack in range(len(stacks)):
        first, last = offsets[stack], offsets[stack + 1]
        python = np.flatnonzero(is_python[first:last])
        if not len(python):
            continue
        frames = ids[first:last][python]
        roots[stack] = frames[-1]
        marks = frame_mark[frames]
        code[stack], told = _outermost(marks)
        decider[stack] = frames[told] if told >= 0 else -1
    _mark_autograd_thread(stacks, code, roots)
    return StackMarks(code, decider, any_in_stack(stacks, gathering))


def _outermost(marks: NDArray[np.uint8]) -> tuple[int, int]:
    """The phase of a stack by the marks of its frames, innermost first, and which of them told."""
    state, told = UNMARKED, -1
    for place in np.flatnonzero(marks != UNMARKED)[::-1].tolist():
        mark = int(marks[place])
        closure = state == Phase.STEP and mark in (Phase.FORWARD, Phase.BACKWARD)
        if state == UNMARKED or closure or (state == Phase.FORWARD and mark == Phase.BACKWARD):
            state, told = mark, place
    return state, told


def _mark_autograd_thread(stacks: StackTable, code: NDArray[np.uint8], roots: NDArray[np.int64]) -> None:
    """Hooks run on autograd's thread: their outermost frame is the hook's own, not a module's or a thread's."""
    main = set(roots[(code == Phase.FORWARD) | (code == Phase.STEP) | (code == Phase.INIT)].tolist())
    if not main:
        return  # nothing to tell a hook's thread from
    hook: dict[int, bool] = {}
    for stack in np.flatnonzero((code == UNMARKED) | (code == Phase.FORWARD)).tolist():
        root = int(roots[stack])
        if root not in hook:
            frame = stacks.frame(root)
            hook[root] = _BACKWARD_FUNCTION.holds(frame.filename, frame.name) or (
                root not in main and frame.name not in _THREAD_ROOTS
            )
        if hook[root] and (code[stack] == UNMARKED or _is_backward_root(stacks, root)):
            code[stack] = Phase.BACKWARD


def _is_backward_root(stacks: StackTable, root: int) -> bool:
    frame = stacks.frame(root)
    return _BACKWARD_FUNCTION.holds(frame.filename, frame.name)
