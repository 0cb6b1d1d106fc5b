"""DeepSpeed, ZeRO stages 0 to 3, releases 0.9 to 0.19.

Source of places, sizes and line numbers: deepspeed-memory-map (read in the releases 0.9.4, 0.12.6, 0.14.5, 0.15.4,
0.16.9, 0.17.6, 0.18.9 and 0.19.8). Line numbers only break ties.
"""

from __future__ import annotations

from memtrace.attribution.rule import By, Rank, Rule, Site, lines
from memtrace.timeline.callsites import Function, names

_ENGINE = "deepspeed/runtime/engine.py"
_STAGE3 = "deepspeed/runtime/zero/stage3.py"
_STAGE12 = "deepspeed/runtime/zero/stage_1_and_2.py"
_PARTITION = "deepspeed/runtime/zero/partition_parameters.py"
_COORDINATOR = "deepspeed/runtime/zero/partitioned_param_coordinator.py"
_OFFLOAD = "deepspeed/runtime/zero/parameter_offload.py"
_LINEAR = "deepspeed/runtime/zero/linear.py"
_ZERO_UTILS = "deepspeed/runtime/zero/utils.py"
_UTILS = "deepspeed/runtime/utils.py"
_BF16 = "deepspeed/runtime/bf16_optimizer.py"
_FUSED = "deepspeed/runtime/fp16/fused_optimizer.py"
_UNFUSED = "deepspeed/runtime/fp16/unfused_optimizer.py"
_CHECKPOINTING = "deepspeed/runtime/activation_checkpointing/checkpointing.py"

_GATHER_CALLS = (Function(_COORDINATOR, ("__all_gather_params", "__all_gather_params_")),)
_FETCH = ("fetch_sub_module", "_fetch_sub_module_impl")

FETCH_LINES = {
    "0.9.4-0.9.5": (254, 338),
    "0.10.0": (278, 371),
    "0.10.1": (280, 375),
    "0.10.2-0.12.6": (284, 379),
    "0.13.0-0.13.1": (285, 380),
    "0.13.2-0.14.2": (290, 385),
    "0.14.3-0.15.2": (291, 386),
    "0.15.3": (296, 391),
    "0.15.4": (306, 401),
    "0.16.0-0.16.2": (305, 400),
    "0.16.3": (308, 406),
    "0.16.4-0.16.7": (314, 412),
    "0.16.8-0.16.9": (315, 413),
    "0.17.0-0.18.5": (317, 415),
    "0.18.6-0.19.1": (362, 460),
    "0.19.2": (365, 463),
    "0.19.3-0.19.8": (381, 484),
}
"""Releases -> lines of the demand and the prefetch call in the fetch function (map, table 2.2)."""

_DEMAND_LINES, _PREFETCH_LINES = (
    tuple(sorted({(pair[side], pair[side]) for pair in FETCH_LINES.values()})) for side in (0, 1)
)

RULES: tuple[Rule, ...] = (
    # Stage 3: parameters.
    Rule(
        id="deepspeed.zero3.fetch",
        category="param.gathered",
        where=Function(_COORDINATOR, _FETCH),
        child=_GATHER_CALLS,
        by=By.GATHER,
        sites=(
            Site("param.gathered", "gathered when needed", _DEMAND_LINES),
            Site("param.prefetched", "gathered ahead", _PREFETCH_LINES, optional=True),
        ),
        gap=8,
        knob="stage3_prefetch_bucket_size, stage3_max_live_parameters",
        note="A module's parameters are gathered: of the two calls in the fetch function the first is for the module "
        "itself, the second for those that follow. Alive when backward starts: nobody let go of them.",
    ),
    Rule(
        id="deepspeed.zero3.wait",
        category="param.gathered",
        where=Function(_PARTITION, ("wait",)),
        by=By.WAIT,
        knob="stage3_allgather_sequential",
        note="Several parameters gathered in one flat buffer are put together one by one when the gather is waited "
        "for. The stack is the same for demand and prefetch; the flat buffer that is freed then tells which it was.",
    ),
    Rule(
        id="deepspeed.zero3.persistent",
        category="param.persistent",
        where=Function(_STAGE3, ("_post_step",)),
        knob="stage3_param_persistence_threshold",
        note="After a step the parameters smaller than the threshold are gathered and stay.",
    ),
    Rule(
        id="deepspeed.zero3.persistent-epilogue",
        category="param.persistent",
        where=Function(_STAGE3, ("checkpoint_event_epilogue",)),
        knob="stage3_param_persistence_threshold",
        note="After a checkpoint the persistent parameters are gathered again.",
    ),
    Rule(
        id="deepspeed.zero3.consolidate",
        category="checkpoint_io",
        where=Function(_ENGINE, ("_zero3_consolidated_16bit_state_dict", "get_layer_state_dict")),
        label="gathered to be saved",
        knob="stage3_gather_16bit_weights_on_model_save",
        note="Saving 16-bit weights gathers one module's own parameters at a time, on every rank.",
    ),
    Rule(
        id="deepspeed.zero3.gathered-parameters",
        category="param.gathered",
        where=Function(_PARTITION, ("__enter__",)),
        rank=Rank.FALLBACK,
        label="gathered by GatheredParameters",
        note="A script (or a library for it) gathers parameters for the length of a `with` block.",
    ),
    Rule(
        id="deepspeed.zero3.hooks",
        category="param.gathered",
        where=Function(_STAGE3, ("create_reduce_and_remove_grad_hooks", "_create_reduce_and_remove_grad_hooks")),
        label="gathered to set up hooks",
        note="At initialisation each parameter is gathered once to reach its gradient accumulator.",
    ),
    Rule(
        id="deepspeed.zero3.secondary",
        category="param.partition",
        where=Function(_PARTITION, ("_partition_param_sec",)),
        label="hpZ secondary partitions",
        since="0.10.0",
        knob="zero_hpz_partition_size",
        note="hpZ keeps a second partition of each parameter, sized by the group inside one node.",
    ),
    Rule(
        id="deepspeed.zero3.partition",
        category="param.partition",
        where=Function(_PARTITION, ("_partition_param",)),
        note="The shard of one parameter: until the shards move into the flat buffer, for good where it is frozen.",
    ),
    Rule(
        id="deepspeed.zero3.partition-flat",
        category="param.partition",
        where=Function(_STAGE3, ("defragment",)),
        until="0.18.9",
        note="The flat buffer that holds all shards (through the CPU and back, to leave no holes).",
    ),
    Rule(
        id="deepspeed.zero3.partition-flat-utils",
        category="param.partition",
        where=Function(_ZERO_UTILS, ("defragment",)),
        since="0.19.0",
        note="The flat buffer that holds all shards (through the CPU and back, to leave no holes).",
    ),
    Rule(
        id="deepspeed.zero3.whole-before",
        category="param.full",
        where=Function(_PARTITION, names("_convert_to_zero_parameters _post_init_method wrapped_fn new_tensor")),
        rank=Rank.FALLBACK,
        label="whole until it is partitioned",
        knob="zero.Init",
        note="A parameter exists whole before `_partition_param` leaves a shard of it.",
    ),
    Rule(
        id="deepspeed.zero3.gather-other",
        category="param.gathered",
        where=Function(
            _PARTITION,
            names(
                "all_gather all_gather_coalesced _all_gather _allgather_params "
                "_allgather_params_coalesced _allgather_params_sequential _allgather_param"
            ),
        ),
        rank=Rank.FALLBACK,
        by=By.GATHER,
        note="A gather that none of the known callers asked for.",
    ),
    # Stage 3: optimizer and gradients.
    Rule(
        id="deepspeed.zero3.setup",
        category="grad.partition",
        where=Function(_STAGE3, ("_setup_for_real_optimizer",)),
        direct=True,
        sites=(
            Site(
                "grad.bucket",
                "reduce bucket",
                lines("392-394 483-485 489-491 525-527 538-540 562-564 624-626 782-784"),
                optional=True,
            ),
            Site(
                "grad.partition",
                "",
                lines("401-403 492-494 498-500 534-536 547-549 571-573 633-635 791-793"),
            ),
        ),
        gap=3,
        knob="reduce_bucket_size, contiguous_gradients, grad_accum_dtype",
        note="Two buffers for good: first the bucket in which gradients wait for their reduction, then the partition "
        "in which reduced gradients wait for the step.",
    ),
    Rule(
        id="deepspeed.zero3.master",
        category="param.master",
        where=Function(_STAGE3, ("_create_fp32_partitions",)),
        knob="offload_optimizer, sub_group_size",
        note="The fp32 copy of this rank's partition, one block per sub-group. Since 0.18.3 it is made twice.",
    ),
    Rule(
        id="deepspeed.zero3.momentum",
        category="optim.state",
        where=Function(_STAGE3, ("_create_momentum_buffer",)),
        note="Muon's momentum, kept beside the optimizer.",
    ),
    Rule(
        id="deepspeed.zero3.step-gradients",
        category="optim.temp",
        where=Function(_STAGE3, ("_prepare_fp32_grad_for_sub_group",)),
        label="fp32 copies of gradients for the step",
        knob="sub_group_size",
        note="One sub-group's gradients are flattened, then made fp32: both copies are alive at once.",
    ),
    Rule(
        id="deepspeed.zero3.reduce-scatter",
        category="grad.bucket",
        where=Function("deepspeed/runtime/comm/coalesced_collectives.py"),
        label="reduce-scatter buffer",
        knob="reduce_bucket_size",
        note="Gradients of a bucket are put together, padded, for one reduce-scatter; its results are views of it.",
    ),
    Rule(
        id="deepspeed.zero3.reduce",
        category="grad.bucket",
        where=Function(
            _STAGE3,
            names(
                "__avg_scatter_contiguous_grads __avg_scatter_grads allreduce_bucket allreduce_and_copy "
                "get_reducible_portion"
            ),
        ),
        label="reduction copies",
        knob="reduce_bucket_size, communication_data_type",
        note="Copies of a bucket for its reduction, and casts to the dtype of the communication.",
    ),
    Rule(
        id="deepspeed.zero3.partition-gradients",
        category="grad.partition",
        where=Function(
            _STAGE3,
            names(
                "partition_grads independent_gradient_partition_epilogue get_flat_partition "
                "_finalize_offload_gradient_accumulation"
            ),
        ),
        note="Reduced gradients on their way into this rank's partition.",
    ),
    Rule(
        id="deepspeed.zero3.offload-gradients",
        category="grad.bucket",
        where=Function(_STAGE3, ("_offload_grad_partition_at_boundary",)),
        label="offload staging",
        since="0.19.5",
        note="A gradient shard made fp32 on its way to the CPU.",
    ),
    Rule(
        id="deepspeed.zero3.leaf-gradients",
        category="grad.full",
        where=Function(_STAGE3, ("reduce_leaf_module_grads", "set_none_gradients_to_zero")),
        by=By.BACKWARD,
        note="Zeros for parameters of a leaf module that got no gradient.",
    ),
    # Stages 1 and 2.
    Rule(
        id="deepspeed.zero12.step-gradients-flat",
        category="optim.temp",
        where=Function(_STAGE12, ("flatten_dense_tensors_aligned",)),
        inside=(Function(_STAGE12, ("step",)),),
        label="copies of gradients for the step",
        note="The partition's gradients flattened for the step.",
    ),
    Rule(
        id="deepspeed.zero12.flat",
        category="param.full",
        where=Function(_STAGE12, ("flatten_dense_tensors_aligned",)),
        label="flat 16-bit parameters",
        since="0.18.7",
        note="All parameters of a group in one buffer, made on the device when there is room for both copies.",
    ),
    Rule(
        id="deepspeed.zero12.setup",
        category="param.full",
        where=Function(_STAGE12, ("__init__",)),
        direct=True,
        sites=(
            Site(
                "param.full",
                "flat 16-bit parameters",
                lines("312-316 338-342 352-362 363 365 391 420-437 505-524"),
                optional=True,
            ),
            Site(
                "param.master",
                "",
                lines("346-350 372-376 393-397 398 401-405 440-441 472-473 560-561"),
            ),
            Site(
                "grad.bucket",
                "offload staging",
                lines("428-430 450-452 476-479 484-486 536-538 569-571 659-661"),
                optional=True,
            ),
        ),
        gap=24,
        knob="offload_optimizer",
        note="In the order of the constructor: the flat 16-bit parameters, the fp32 copy of this rank's partition, and "
        "with offload one buffer of the size of the largest parameter.",
    ),
    Rule(
        id="deepspeed.zero12.bucket",
        category="grad.bucket",
        where=Function(_STAGE12, names("backward backward_prologue setup_buckets reduce_gradients")),
        label="reduce bucket",
        direct=True,
        knob="reduce_bucket_size, overlap_comm",
        note="The bucket in which gradients wait for their reduction; two with overlap_comm. Released after backward.",
    ),
    Rule(
        id="deepspeed.zero12.reduce",
        category="grad.bucket",
        where=Function(
            _STAGE12,
            names(
                "allreduce_bucket average_tensor gradient_reduction_w_predivide allreduce_and_copy "
                "allreduce_and_scatter allreduce_and_copy_with_multiple_ranks get_gradient_for_reduction"
            ),
        ),
        label="reduction copies",
        knob="reduce_bucket_size, communication_data_type",
        note="Copies of a bucket for its reduction, and casts to the dtype of the communication.",
    ),
    Rule(
        id="deepspeed.zero12.owned-gradients",
        category="grad.partition",
        where=Function(
            _STAGE12,
            names(
                "copy_grads_in_partition _build_compact_grad_partition_buffer get_flat_partition "
                "get_all_grad_tensors _get_preflattened_grad_partition"
            ),
        ),
        note="Room for the gradients of every parameter that touches this rank's partition: more than 1/N.",
    ),
    Rule(
        id="deepspeed.zero12.accumulation",
        category="grad.fp32",
        where=Function(_STAGE12, ("_fill_param_grad_accum_attribute", "fill_grad_accum_attribute")),
        knob="grad_accum_dtype",
        note="Gradients accumulated in fp32 between micro-batches.",
    ),
    Rule(
        id="deepspeed.zero12.offload",
        category="grad.bucket",
        where=Function(
            _STAGE12,
            names(
                "async_accumulate_grad_in_cpu_via_gpu async_inplace_copy_grad_to_fp32_buffer_from_gpu "
                "copy_gradients_to_cpu update_offload_overflow_tracker_for_param_grad"
            ),
        ),
        label="offload staging",
        note="A gradient on its way to the CPU.",
    ),
    Rule(
        id="deepspeed.zero12.step-gradients",
        category="optim.temp",
        where=Function(_STAGE12, ("step",)),
        rank=Rank.FALLBACK,
        label="copies of gradients for the step",
        note="The partition's gradients flattened and made fp32, both at once: 6 bytes a parameter of the partition, "
        "whatever sub_group_size says.",
    ),
    Rule(
        id="deepspeed.gather-after-step",
        category="comm",
        where=Function(_UTILS, ("all_gather_dp_groups", "all_gather_into_tensor_dp_groups")),
        knob="allgather_bucket_size",
        note="Updated partitions are gathered; up to 0.12.3 through a flat copy.",
    ),
    Rule(
        id="deepspeed.zero.flags",
        category="optim.temp",
        where=Function("deepspeed/runtime/zero/*.py", ("__init__", "step")),
        rank=Rank.LAST,
        label="flags and norms",
        note="Scalars that ZeRO's optimizers keep: norms, overflow flags.",
    ),
    Rule(
        id="deepspeed.optimizer.flags",
        category="optim.temp",
        where=Function("deepspeed/ops/*/*.py", ("__init__",)),
        rank=Rank.LAST,
        label="flags and norms",
        note="Scalars that DeepSpeed's optimizers keep: overflow flags.",
    ),
    # All stages.
    Rule(
        id="deepspeed.init-gradients",
        category="grad.fp32",
        where=Function("deepspeed/runtime/*/*.py", ("initialize_optimizer_states",)),
        rank=Rank.FALLBACK,
        label="zero gradients at initialisation",
        note="Zeros the size of the gradients; up to 0.13.1 for a first step of the optimizer, since then for nothing.",
    ),
    Rule(
        id="deepspeed.bf16.init-gradients",
        category="grad.fp32",
        where=Function(_BF16, ("initialize_optimizer_states",)),
        rank=Rank.FALLBACK,
        label="zero gradients at initialisation",
        until="0.15.0",
        note="Zeros for a first step of the optimizer at initialisation.",
    ),
    Rule(
        id="deepspeed.optimizer",
        category="optim.temp",
        where=Function("deepspeed/ops/*/*.py", ("step",)),
        rank=Rank.FALLBACK,
        by=By.OPTIMIZER,
        note="DeepSpeed's own optimizers: what outlives the step is a state.",
    ),
    Rule(
        id="deepspeed.module",
        category="param.full",
        where=Function(_ENGINE, ("_configure_distributed_model", "_cast_module_mixed_precision")),
        rank=Rank.FALLBACK,
        label="the whole module, moved or cast",
        knob="zero.Init",
        note="deepspeed.initialize puts the whole module on the device unless it was built under zero.Init.",
    ),
    Rule(
        id="deepspeed.norms",
        category="optim.temp",
        where=Function(
            "deepspeed/runtime/*.py",
            names(
                "get_grad_norm_direct get_global_norm_of_tensors get_weight_norm "
                "clip_tensors_by_global_norm get_flattened_grad_norm get_grad_norm "
                "combine_grad_norm_groups has_inf_or_nan _has_inf_or_nan has_overflow has_overflow_serial "
                "check clip_gradients unscale_and_clip_grads scaled_global_norm"
            ),
        ),
        label="norms and overflow checks",
        note="Upcasts of one gradient at a time for its norm; masks for infinities.",
    ),
    Rule(
        id="deepspeed.zero.norms",
        category="optim.temp",
        where=Function(
            "deepspeed/runtime/*/*.py",
            names(
                "get_grad_norm_direct _constant_buffered_norm2 has_overflow has_overflow_serial "
                "has_overflow_partitioned_grads_serial _has_inf_or_nan has_inf_or_nan "
                "_overflow_check_and_loss_scale_update scaled_global_norm set_norm_for_param_grad_in_gpu "
                "set_norm_for_param_grad unscale_and_clip_grads "
                "complete_grad_norm_calculation_for_cpu_offload get_param_coordinator_norm "
                "_get_norm_groups _loco_err_buf_update"
            ),
        ),
        label="norms and overflow checks",
        note="Upcasts of one gradient at a time for its norm; masks for infinities.",
    ),
    Rule(
        id="deepspeed.allreduce",
        category="grad.bucket",
        where=Function(
            _ENGINE,
            names(
                "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback "
                "_reduce_non_expert_gradients _reduce_expert_gradients"
            ),
        ),
        label="reduction copies",
        knob="communication_data_type",
        note="Stage 0 and BF16_Optimizer: gradients are flattened in buckets of 5e8 elements to be reduced.",
    ),
    Rule(
        id="deepspeed.loss-scale",
        category="act.logits",
        where=Function("deepspeed/runtime/*.py", names("backward scale_if_loss _scale_loss_by_gas scale")),
        rank=Rank.FALLBACK,
        by=By.LOGITS,
        label="the loss, scaled",
        note="The loss is scaled before backward.",
    ),
    Rule(
        id="deepspeed.loss-scaler",
        category="act.logits",
        where=Function("deepspeed/runtime/fp16/loss_scaler.py"),
        rank=Rank.FALLBACK,
        by=By.LOGITS,
        label="the loss, scaled",
        note="The loss is scaled before backward.",
    ),
    # Stage 0 wrappers and BF16_Optimizer.
    Rule(
        id="deepspeed.fp16.setup",
        category="param.master",
        where=Function(_FUSED, ("__init__",)),
        rank=Rank.FALLBACK,
        sites=(
            Site("param.full", "flat 16-bit parameters", lines("64 77 91 94")),
            Site("param.master", "", lines("70 83 97 100")),
        ),
        gap=3,
        note="FP16_Optimizer: every 16-bit parameter is cloned and flattened, then the flat buffer is made fp32.",
    ),
    Rule(
        id="deepspeed.fp16.step",
        category="optim.temp",
        where=Function(_FUSED, ("step", "step_fused_adam")),
        rank=Rank.FALLBACK,
        label="fp32 copies of gradients for the step",
        note="FP16_Optimizer: fp32 copies of all gradients, then flattened: 8 bytes a parameter at once.",
    ),
    Rule(
        id="deepspeed.fp16-unfused.setup",
        category="param.master",
        where=Function(_UNFUSED, ("__init__", "<listcomp>")),
        rank=Rank.FALLBACK,
        note="FP16_UnfusedOptimizer: an fp32 copy of each parameter.",
    ),
    Rule(
        id="deepspeed.fp16-unfused.step",
        category="optim.temp",
        where=Function(_UNFUSED, ("step", "step_fused_lamb")),
        rank=Rank.FALLBACK,
        label="fp32 copies of gradients for the step",
        note="FP16_UnfusedOptimizer: an fp32 copy of each gradient for the step.",
    ),
    Rule(
        id="deepspeed.bf16.setup",
        category="param.master",
        where=Function(_BF16, ("_setup_for_real_optimizer",)),
        rank=Rank.FALLBACK,
        sites=(
            Site("param.full", "flat 16-bit parameters", lines("101-102 105-106 140-144 151-152 166-167")),
            Site("param.master", "", lines("118 122 156-159 167 182")),
            Site(
                "grad.fp32",
                "fp32 gradients, not divided by N",
                lines("124 128 162-165 173-174 191-192"),
            ),
        ),
        gap=3,
        knob="grad_accum_dtype",
        note="BF16_Optimizer: flat 16-bit parameters, the fp32 copy of this rank's partition, and fp32 gradients of "
        "all parameters, which no number of ranks divides.",
    ),
    Rule(
        id="deepspeed.bf16.gradients",
        category="grad.fp32",
        where=Function(
            _BF16, names("_update_hp_grad update_hp_grads _update_hp_grads_func accumulate_hp_grads_and_remove_lp")
        ),
        label="gradients cast to be added up",
        note="BF16_Optimizer: each 16-bit gradient is cast and added to the fp32 ones.",
    ),
    # Modules.
    Rule(
        id="deepspeed.linear.backward",
        category="bwd.temp",
        where=Function(_LINEAR, ("backward",)),
        by=By.BACKWARD,
        note="DeepSpeed's linear layer: gradients of its input, weight and bias, with a Python frame.",
    ),
    Rule(
        id="deepspeed.checkpointing",
        category="act.checkpoint",
        where=Function(_CHECKPOINTING, names("forward partition_activations checkpoint non_reentrant_checkpoint")),
        rank=Rank.FALLBACK,
        by=By.ACTIVATION,
        knob="partition_activations, cpu_checkpointing, contiguous_memory_optimization",
        note="Inputs that DeepSpeed's activation checkpointing keeps.",
    ),
    Rule(
        id="deepspeed.checkpointing.recompute",
        category="bwd.temp",
        where=Function(_CHECKPOINTING, ("backward", "gather_partitioned_activations")),
        rank=Rank.FALLBACK,
        label="recomputed",
        note="What activation checkpointing computes again in backward.",
    ),
    # Checkpoints.
    Rule(
        id="deepspeed.load-universal",
        category="optim.state",
        where=Function(_STAGE3, ("load_hp_checkpoint_state_from_checkpoint_dir_stage3", "load_hp_checkpoint_state")),
        label="loaded from a universal checkpoint",
        note="One tensor a sub-group and key; those of the moments become the state.",
    ),
    Rule(
        id="deepspeed.full-state",
        category="comm",
        where=Function(_STAGE3, names("_fp32_state_allgather get_fp32_grad_for_param get_full_hp_param")),
        label="a whole fp32 parameter for safe_get_*",
        note="The debugging API gathers a whole fp32 tensor on every rank.",
    ),
)
