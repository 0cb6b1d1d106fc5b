"""The rules of plain torch, FSDP, DDP, transformers, accelerate and peft, one by one; and decisions by size and place."""

# ruff: noqa: E501 - a call chain is one line

from __future__ import annotations

from pathlib import Path

import pytest
from builders import SnapshotBuilder
from stacks import BACKWARD, CALL, MODULE, SCRIPT, STEP, Job, MiB, chain

import memtrace

MODULE_PY = "torch/nn/modules/module.py"
MOVE = f"{MODULE_PY}:965 _apply; {MODULE_PY}:1384 to; {SCRIPT}"
START = f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}"
LINEAR = f"torch/nn/modules/linear.py:134 forward; {CALL}; {MODULE}"
FSDP2 = "torch/distributed/fsdp/_fully_shard"


def after_training(job: Job) -> None:
    """Backward, a step, and the next forward: what a block's life is measured against."""
    job.free(job.alloc(START))
    job.step()
    job.free(job.alloc(MODULE))


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        (f"{MODULE_PY}:1097 <lambda>; {MOVE}", "param.full"),
        (f"torch/nn/modules/linear.py:100 __init__; model.py:3 __init__; {SCRIPT}", "param.full"),
        (f"torch/nn/init.py:50 _no_grad_uniform_; torch/nn/modules/linear.py:110 reset_parameters; {SCRIPT}", "param.full"),
        (f"torch/nn/parameter.py:60 __deepcopy__; /usr/lib/python3.11/copy.py:100 deepcopy; {SCRIPT}", "param.full"),
        (f"torch/optim/adam.py:178 _init_group; {STEP}", "optim.state"),
        (f"torch/optim/optimizer.py:900 _process_value_according_to_param_policy; torch/optim/optimizer.py:950 load_state_dict; {SCRIPT}", "optim.state"),
        (f"torch/nn/utils/clip_grad.py:70 clip_grad_norm_; {SCRIPT}", "optim.temp"),
        (f"torch/amp/grad_scaler.py:217 scale; {SCRIPT}", "act.logits"),
        (f"torch/amp/grad_scaler.py:176 _lazy_init_scale_growth_tracker; torch/amp/grad_scaler.py:212 scale; {SCRIPT}", "optim.state"),
        (f"torch/nn/functional.py:3504 cross_entropy; {SCRIPT}", "act.logits"),
        (f"torch/nn/functional.py:3800 mse_loss; torch/nn/modules/loss.py:500 forward; {CALL}; {SCRIPT}", "act.logits"),
        (f"torch/storage.py:289 to; torch/serialization.py:734 default_restore_location; torch/serialization.py:1500 load; {SCRIPT}", "checkpoint_io"),
        (f"torch/utils/data/_utils/pin_memory.py:60 pin_memory; torch/utils/data/dataloader.py:700 __next__; {SCRIPT}", "input"),
        (f"torch/cuda/graphs.py:115 capture_begin; {SCRIPT}", "compiled"),
        (f"{FSDP2}/_fsdp_param.py:390 _init_sharded_param; {FSDP2}/_fully_shard.py:210 fully_shard; {SCRIPT}", "param.partition"),
        (f"{FSDP2}/_fsdp_param.py:693 alloc_all_gather_outputs; {FSDP2}/_fsdp_param_group.py:395 wait_for_unshard; {MODULE}", "param.gathered"),
        (f"{FSDP2}/_fsdp_collectives.py:59 allocate; {FSDP2}/_fsdp_collectives.py:263 foreach_all_gather; {MODULE}", "comm"),
        (f"torch/distributed/fsdp/_flat_param.py:1137 _get_shard; torch/distributed/fsdp/fully_sharded_data_parallel.py:493 __init__; {SCRIPT}", "param.partition"),
        (f"torch/distributed/fsdp/_flat_param.py:1409 _alloc_padded_unsharded_flat_param; torch/distributed/fsdp/_flat_param.py:1382 unshard; {MODULE}", "param.gathered"),
        (f"torch/distributed/utils.py:184 _alloc_storage; torch/distributed/fsdp/_flat_param.py:1347 _use_low_precision_shard; {MODULE}", "param.cast"),
        (f"torch/nn/parallel/distributed.py:1200 _ddp_init_helper; torch/nn/parallel/distributed.py:900 __init__; {SCRIPT}", "grad.bucket"),
        (f"torch/distributed/utils.py:300 _sync_module_states; torch/nn/parallel/distributed.py:900 __init__; {SCRIPT}", "comm"),
        (f"torch/distributed/utils.py:100 _recursive_to; {MODULE}", "input"),
        (f"transformers/loss/loss_utils.py:59 ForCausalLMLoss; {MODULE}", "act.logits"),
        (f"torch/nn/modules/linear.py:134 forward; {CALL}; transformers/models/llama/modeling_llama.py:480 forward; {CALL}; {SCRIPT}", "act.logits"),
        (f"transformers/cache_utils.py:146 update; {MODULE}", "kv_cache"),
        (f"transformers/trainer.py:2000 _prepare_input; {SCRIPT}", "input"),
        (f"transformers/generation/utils.py:894 _prepare_position_ids_for_generation; transformers/generation/utils.py:2701 generate; {SCRIPT}", "input"),
        (f"accelerate/utils/operations.py:160 send_to_device; accelerate/data_loader.py:596 __iter__; {SCRIPT}", "input"),
        (f"accelerate/utils/operations.py:800 convert_to_fp32; {MODULE}", "act.logits"),
        (f"peft/tuners/tuners_utils.py:2750 cast_adapter_dtype; peft/peft_model.py:180 __init__; {SCRIPT}", "param.full"),
        (f"peft/tuners/lora/layer.py:200 update_layer; peft/tuners/lora/layer.py:900 __init__; {SCRIPT}", "param.full"),
    ],
)  # fmt: skip
def test_what_each_place_makes(stack: str, category: str, tmp_path: Path) -> None:
    job = Job()
    job.free(job.alloc(MODULE))
    job.alloc(stack)
    after_training(job)
    assert job.categories(tmp_path)[1] == category


@pytest.mark.parametrize(
    ("lines", "categories"),
    [
        ((965, 1035), ["param.full", "buffer"]),
        ((965, 1009, 1035), ["param.full", "grad.full", "buffer"]),
        ((2965, 3009, 3035), ["param.full", "grad.full", "buffer"]),
        ((1035,), ["buffer"]),
        ((777,), ["param.full"]),
    ],
)
def test_parameters_gradients_and_buffers_are_moved_in_this_order(
    lines: tuple[int, ...], categories: list[str], tmp_path: Path
) -> None:
    job = Job()
    for line in lines:
        job.alloc(
            f"{MODULE_PY}:1370 convert; {MODULE_PY}:{line} _apply; {MODULE_PY}:934 _apply; {MODULE_PY}:1384 to; {SCRIPT}"
        )
    assert job.categories(tmp_path) == categories


def test_saved_is_what_lives_when_backward_starts(tmp_path: Path) -> None:
    job = Job()
    saved, temporary = job.alloc(MODULE), job.alloc(MODULE)
    job.free(temporary)
    job.alloc(START)
    job.free(saved)
    job.step()
    assert job.categories(tmp_path)[:2] == ["act.saved", "fwd.temp"]


def test_gradients_are_what_lives_until_the_step(tmp_path: Path) -> None:
    job = Job()
    saved = job.alloc(MODULE)
    job.alloc(START)
    gradient, temporary = job.alloc(None), job.alloc(None)
    hook = job.alloc("mine.py:3 hook")
    job.free(temporary, saved, hook)
    job.step()
    job.free(gradient)
    job.alloc(MODULE)
    assert job.categories(tmp_path)[2:5] == ["grad.full", "bwd.temp", "bwd.temp"]


def test_a_backward_that_breaks_off_is_judged_by_size(tmp_path: Path) -> None:
    job = Job()
    job.alloc(f"{MODULE_PY}:1370 convert; {MOVE}", 6 * MiB)
    job.alloc(MODULE)
    job.alloc(START)
    job.alloc(None, 6 * MiB)
    job.alloc(None, 7 * MiB)
    job.builder.oom(64 * MiB, stack=None)
    assert job.categories(tmp_path)[3:] == ["grad.full", "bwd.temp"]


def test_single_threaded_backward_is_the_same(tmp_path: Path) -> None:
    engine = f"torch/autograd/graph.py:829 _engine_run_backward; torch/autograd/__init__.py:280 backward; {BACKWARD}"
    job = Job()
    saved = job.alloc(MODULE)
    job.alloc(START)
    gradient, temporary = job.alloc(engine), job.alloc(engine)
    job.free(temporary, saved)
    job.step()
    job.free(gradient)
    assert job.categories(tmp_path)[2:4] == ["grad.full", "bwd.temp"]


@pytest.mark.parametrize(
    "file",
    [
        "torch/optim/sgd.py",
        "torch/optim/adafactor.py",
        "transformers/optimization.py",
        "deepspeed/ops/lamb/fused_lamb.py",
    ],
)
def test_an_optimizers_states_outlive_its_step(file: str, tmp_path: Path) -> None:
    job = Job()
    job.alloc(MODULE)
    job.free(job.alloc(START))
    job.alloc(f"{file}:300 step; torch/optim/optimizer.py:500 wrapper; {SCRIPT}")
    job.free(job.alloc(f"{file}:301 step; torch/optim/optimizer.py:500 wrapper; {SCRIPT}"))
    job.alloc(MODULE)
    assert job.categories(tmp_path)[2:4] == ["optim.state", "optim.temp"]


def test_sharded_gradients_and_reduce_scatter_buffers(tmp_path: Path) -> None:
    reduce = f"{FSDP2}/_fsdp_collectives.py:59 allocate; {FSDP2}/_fsdp_collectives.py:522 foreach_reduce; {FSDP2}/_fsdp_param_group.py:567 post_backward; {FSDP2}/_fsdp_param_group.py:902 backward"
    job = Job()
    job.alloc(MODULE)
    job.alloc(START)
    buffer, shard = job.alloc(reduce), job.alloc(reduce)
    job.free(buffer)
    job.step()
    job.free(shard)
    assert job.categories(tmp_path)[2:4] == ["grad.bucket", "grad.partition"]


def test_checkpointing_keeps_inputs_and_computes_the_rest_again(tmp_path: Path) -> None:
    checkpointed = f"model.py:9 forward; torch/utils/checkpoint.py:512 checkpoint; {MODULE}"
    job = Job()
    kept, gone = job.alloc(checkpointed), job.alloc(checkpointed)
    job.free(gone)
    job.alloc(START)
    again = job.alloc(
        f"model.py:9 forward; {CALL}; torch/utils/checkpoint.py:1120 recompute_fn; torch/utils/checkpoint.py:900 unpack_hook"
    )
    job.free(again, kept)
    job.step()
    snapshot = job.snapshot(tmp_path)
    rows = {row.label for row in snapshot.blame(at=9, by="block").rows}
    assert job.categories(tmp_path)[:2] == ["act.checkpoint", "fwd.temp"]
    assert job.categories(tmp_path)[3] == "bwd.temp"
    assert "recomputed" in rows


def test_the_scripts_own_tensors(tmp_path: Path) -> None:
    job = Job()
    job.alloc(f"{MODULE_PY}:1370 convert; {MOVE}")
    batch = job.alloc("train.py:5 <module>")
    output = job.alloc(MODULE)
    loss = job.alloc("train.py:7 <module>")
    job.alloc(START)
    job.free(batch, output, loss)
    job.step()
    assert job.categories(tmp_path)[1:4] == ["input", "act.saved", "act.logits"]


def test_a_script_that_trains_nothing_is_unknown_with_its_line(tmp_path: Path) -> None:
    job = Job()
    job.alloc("train.py:5 main; train.py:9 <module>")
    row = job.snapshot(tmp_path).blame().rows[0]
    assert (row.category, row.label, row.confidence) == ("unknown", "no rule for train.py:5 main", "unknown")
    assert row.evidence is None


def test_logits_are_the_last_linear_layer_before_the_loss_in_the_same_call(tmp_path: Path) -> None:
    caller = f"model.py:30 forward; {CALL}; {SCRIPT}"
    other = f"model.py:12 forward; {CALL}; model.py:28 forward; {CALL}; {SCRIPT}"
    job = Job()
    blocks = [
        job.alloc(f"torch/nn/modules/linear.py:134 forward; {CALL}; {other}"),
        job.alloc(f"torch/nn/modules/linear.py:134 forward; {CALL}; {caller}"),
        job.alloc(f"torch/nn/functional.py:3504 cross_entropy; {caller.replace(':30', ':33')}"),
    ]
    job.alloc(START)
    job.free(*blocks)
    job.step()
    assert job.categories(tmp_path)[:3] == ["act.saved", "act.logits", "act.logits"]


@pytest.mark.parametrize("size", [32 * MiB, 8_519_680])
def test_workspaces_have_a_known_size_come_first_and_stay(size: int, tmp_path: Path) -> None:
    job = Job()
    job.alloc(LINEAR, 4 * MiB)
    job.alloc(LINEAR, size)
    job.alloc(LINEAR, 1 * MiB)  # cuBLASLt's, right after it
    saved = job.alloc(LINEAR, size)
    job.alloc(START)
    job.alloc(None, size)
    job.free(saved)
    job.step()
    job.alloc(MODULE)
    categories = job.categories(tmp_path)
    assert categories[1:3] == ["workspace", "workspace"]
    assert categories[3] == "act.saved"
    assert categories[5] == "workspace"


def test_activations_of_a_workspaces_size_that_pile_up_are_none(tmp_path: Path) -> None:
    job = Job()
    for _ in range(4):
        job.alloc(LINEAR, 1 * MiB)
    job.alloc(START)
    assert set(job.categories(tmp_path)[:4]) == {"act.saved"}


def test_autocast_copies_a_weight_between_its_input_and_the_product(tmp_path: Path) -> None:
    job = Job()
    job.alloc(f"{MODULE_PY}:1370 convert; {MOVE}", 8 * MiB)
    blocks = [job.alloc(LINEAR, size * MiB) for size in (3, 4, 5)]
    job.alloc(START)
    job.free(*blocks)
    job.step()
    assert job.categories(tmp_path)[1:4] == ["act.saved", "param.cast", "act.saved"]


def test_without_autocast_a_product_of_that_size_is_none(tmp_path: Path) -> None:
    job = Job()
    job.alloc(f"{MODULE_PY}:1370 convert; {MOVE}", 8 * MiB)
    blocks = [
        job.alloc(f"torch/nn/modules/linear.py:134 forward; {CALL}; model.py:{line} forward; {CALL}; {SCRIPT}")
        for line in range(9)
    ]
    job.alloc(START)
    job.free(*blocks)
    job.step()
    assert set(job.categories(tmp_path)[1:10]) == {"act.saved"}


def test_made_in_the_first_forward_only_and_kept_is_a_buffer(tmp_path: Path) -> None:
    job = Job()
    table = f"model.py:77 forward; {CALL}; {SCRIPT}"
    job.alloc(table)
    for _ in range(2):
        saved = job.alloc(MODULE)
        job.free(job.alloc(START))
        job.free(saved)
        job.step()
    assert job.categories(tmp_path)[0] == "buffer"


def test_tensors_in_a_captured_graphs_pool(tmp_path: Path) -> None:
    builder = SnapshotBuilder(torch="2.12")
    builder.segment(0x7F0000000000, 20 * MiB, pool=(0, 1)).segment(0x7E0000000000, 2 * MiB, pool=(0, 1))
    builder.alloc(0x7E0000000000, 8, stack=chain(f"torch/cuda/graphs.py:115 capture_begin; {SCRIPT}"))
    builder.alloc(0x7F0000000000, 4 * MiB, stack=chain(MODULE))
    rows = {
        row.block.address: row
        for row in memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False).blame(by="block").rows
        if row.block
    }
    assert rows[0x7F0000000000].category == "compiled"


def test_memory_from_before_the_recording_is_named_by_size_only_where_that_is_sound(tmp_path: Path) -> None:
    job = Job()
    sizes = {"bucket": 1_000_000_000, "master": 48 * MiB, "other": 24 * MiB}
    for size in sizes.values():
        job.alloc("setup.py:1 <module>", size)
    job.builder.start_recording()
    job.alloc(MODULE)
    job.alloc(
        "deepspeed/runtime/zero/stage3.py:1659 __avg_scatter_grads; deepspeed/runtime/zero/stage3.py:1333 reduce_partition_and_remove_grads"
    )
    for _ in range(2):
        job.alloc(f"torch/optim/adam.py:178 _init_group; {STEP}", 48 * MiB)
    rows = job.rows(tmp_path)
    found = [(rows[handle].category, rows[handle].confidence) for handle in range(3)]
    assert found == [("grad.bucket", "inferred"), ("param.master", "inferred"), ("prior", "unknown")]


def test_cpp_frames_name_a_workspace_and_a_node(tmp_path: Path) -> None:
    builder = SnapshotBuilder()
    python = chain(MODULE)
    builder.alloc(
        0x7F0000000000,
        7 * MiB,
        stack=f"??:0 at::cuda::setWorkspaceForHandle(cublasContext*);??:0 at::cuda::getCurrentCUDABlasHandle();{python}",
    )
    builder.alloc(0x7F1000000000, 4 * MiB, stack=chain(START))
    builder.alloc(0x7F2000000000, 4 * MiB, stack="VariableType.cpp:0 torch::autograd::generated::MmBackward0::apply()")
    builder.free(0x7F2000000000)
    builder.alloc(0x7F3000000000, 4 * MiB, stack=chain(STEP))
    snapshot = memtrace.load(builder.pickle(tmp_path / "x.pickle"), cache=False)
    attribution = snapshot.attribution()
    rules = {
        attribution.categories[c]: attribution.rule_ids[r]
        for c, r in zip(attribution.category, attribution.rule, strict=True)
    }
    assert rules["workspace"] == "cpp.workspace"
    assert rules["bwd.temp"] in ("cpp.backward", "torch.backward.start")
