"""torch's FSDP1, FSDP2 (`fully_shard`) and DDP. Source: torch 2.11, recordings of it."""

from __future__ import annotations

from memtrace.attribution.rule import By, Rank, Rule
from memtrace.timeline.callsites import Function, names

_FLAT = "torch/distributed/fsdp/_flat_param.py"
_RUNTIME = "torch/distributed/fsdp/_runtime_utils.py"
_PARAM = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
_COLLECTIVES = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_DDP = "torch/nn/parallel/distributed.py"

RULES: tuple[Rule, ...] = (
    Rule(
        id="fsdp2.partition",
        category="param.partition",
        where=Function(_PARAM, names("_init_sharded_param to_sharded_dtensor reset_sharded_param")),
        note="The shard of a parameter that this rank keeps.",
    ),
    Rule(
        id="fsdp2.gathered",
        category="param.gathered",
        where=Function(
            _PARAM, names("alloc_all_gather_outputs init_all_gather_outputs init_unsharded_param alloc_storage")
        ),
        knob="reshard_after_forward",
        note="A whole parameter, from its gather until it is sharded again.",
    ),
    Rule(
        id="fsdp2.gradient",
        category="grad.partition",
        where=Function(
            _COLLECTIVES, names("foreach_reduce foreach_reduce_scatter_copy_in _get_gradient_divide_factors")
        ),
        by=By.GRADIENT,
        knob="reduce_dtype",
        note="Input and output of the reduce-scatter. The output that lives until the step is the sharded gradient.",
    ),
    Rule(
        id="fsdp2.all-gather",
        category="comm",
        where=Function(
            _COLLECTIVES, names("foreach_all_gather foreach_all_gather_copy_out _get_param_all_gather_inputs")
        ),
        rank=Rank.FALLBACK,
        label="all-gather buffers",
        note="The shards of a group cast and put together, and the buffer that the gather fills.",
    ),
    Rule(
        id="fsdp2.accumulation",
        category="grad.full",
        where=Function(_PARAM, ("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed")),
        by=By.BACKWARD,
        note="Unsharded gradients kept between micro-batches.",
    ),
    Rule(
        id="fsdp1.flat",
        category="param.full",
        where=Function(_FLAT, ("flatten_tensors", "flatten_tensors_into_flat_param")),
        label="flat parameters, before sharding",
        note="The parameters of a unit in one tensor, until only a shard of it stays.",
    ),
    Rule(
        id="fsdp1.partition",
        category="param.partition",
        where=Function(_FLAT, names("_get_shard shard _get_unpadded_shard")),
        note="The shard of a flat parameter that this rank keeps.",
    ),
    Rule(
        id="fsdp1.cast",
        category="param.cast",
        where=Function(_FLAT, ("_use_low_precision_shard", "_use_unsharded_flat_param_cast")),
        label="low-precision shards to be gathered",
        note="The shard in the dtype of the forward, as input of the gather.",
    ),
    Rule(
        id="fsdp1.gathered",
        category="param.gathered",
        where=Function(
            _FLAT,
            names(
                "unshard _alloc_padded_unsharded_flat_param init_flat_param_attributes "
                "_all_gather_flat_param unshard_grad"
            ),
        ),
        rank=Rank.FALLBACK,
        knob="sharding_strategy, backward_prefetch",
        note="The whole flat parameter of a unit, from its gather until it is sharded again.",
    ),
    Rule(
        id="fsdp1.gradient",
        category="grad.partition",
        where=Function(
            _RUNTIME,
            names(
                "_reduce_grad _get_reduce_scatter_tensors _accumulate_sharded_grad "
                "_cast_grad_to_param_dtype _reduce_grad_no_shard _post_reduce_grad_callback"
            ),
        ),
        by=By.GRADIENT,
        note="Buffers of the reduce-scatter, and the sharded gradient that lives until the step.",
    ),
    Rule(
        id="ddp.bucket",
        category="grad.bucket",
        where=Function(_DDP, ("_ddp_init_helper", "_pre_forward")),
        rank=Rank.FALLBACK,
        knob="bucket_cap_mb, gradient_as_bucket_view",
        note="The reducer's buckets: as large as all gradients together, for good.",
    ),
    Rule(
        id="ddp.sync",
        category="comm",
        where=Function(
            "torch/distributed/utils.py",
            names("_sync_module_states _sync_params_and_buffers _verify_param_shape_across_processes"),
        ),
        note="Parameters and buffers flattened to be sent to all ranks.",
    ),
    Rule(
        id="ddp.verify",
        category="comm",
        where=Function(_DDP, names("__init__ _sync_buffers _sync_module_buffers")),
        rank=Rank.LAST,
        note="What DDP sends around when it wraps a module, and buffers before a forward.",
    ),
    Rule(
        id="fsdp.inputs",
        category="input",
        where=Function(
            "torch/distributed/utils.py",
            names("_recursive_to _to_kwargs _apply_to_tensors _cast_forward_inputs to_map _p_assert"),
        ),
        note="Inputs moved or cast before the forward.",
    ),
)
