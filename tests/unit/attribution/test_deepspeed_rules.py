"""DeepSpeed's rules one by one, at the lines each release has (deepspeed-memory-map, tables in 2.1 and 2.2)."""

# ruff: noqa: E501 - a call chain is one line

from __future__ import annotations

from pathlib import Path

import pytest
from stacks import BACKWARD, CALL, MODULE, SCRIPT, STEP, Job, MiB, chain

RELEASES = ("0.9.4", "0.12.6", "0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8")
ZERO = "deepspeed/runtime/zero"
STAGE12, STAGE3 = f"{ZERO}/stage_1_and_2.py", f"{ZERO}/stage3.py"
PARTITION, COORDINATOR = f"{ZERO}/partition_parameters.py", f"{ZERO}/partitioned_param_coordinator.py"
BF16 = "deepspeed/runtime/bf16_optimizer.py"
INIT = f"deepspeed/runtime/engine.py:1600 _configure_zero_optimizer; deepspeed/__init__.py:200 initialize; {SCRIPT}"
TAKE_STEP = (
    "deepspeed/runtime/engine.py:2700 _take_model_step; deepspeed/runtime/engine.py:2800 step; train.py:12 <module>"
)
HOOK = f"{STAGE3}:1333 reduce_partition_and_remove_grads"

LINES = {
    "flat": (314, 340, 354, 355, 357, 393, 422, 507),
    "master12": (348, 374, 395, 396, 403, 439, 473, 560),
    "staging12": (429, 451, 477, 478, 485, 537, 570, 660),
    "bucket12": (1884, 2002, 2046, 2041, 2050, 2211, 2311, 3266),
    "owned12": (1186, 1304, 1350, 1345, 1358, 1442, 1527, 2192),
    "step12": (1711, 1830, 1888, 1883, 1901, 2064, 2167, 3114),
    "bucket3": (392, 483, 489, 525, 538, 562, 624, 782),
    "grads3": (401, 492, 498, 534, 547, 571, 633, 791),
    "master3": (747, 850, 863, 894, 902, 922, 1022, 1158),
    "zeros3": (854, 970, 984, 1024, 1032, 1056, 1170, 1306),
    "step3": (1636, 1772, 1851, 1895, 1894, 1917, 2241, 2686),
    "bf16-flat": (101, 105, 140, 140, 141, 143, 151, 166),
    "bf16-master": (118, 122, 156, 156, 157, 159, 167, 182),
    "bf16-grads": (124, 128, 162, 162, 163, 165, 173, 191),
}
"""One line of each statement in each of `RELEASES`."""

FETCHES = {
    "0.9.4": (254, 338),
    "0.10.0": (278, 371),
    "0.10.1": (280, 375),
    "0.12.6": (284, 379),
    "0.13.1": (285, 380),
    "0.14.2": (290, 385),
    "0.15.2": (291, 386),
    "0.15.3": (296, 391),
    "0.15.4": (306, 401),
    "0.16.2": (305, 400),
    "0.16.3": (308, 406),
    "0.16.7": (314, 412),
    "0.16.9": (315, 413),
    "0.18.5": (317, 415),
    "0.19.1": (362, 460),
    "0.19.2": (365, 463),
    "0.19.8": (381, 484),
}
"""Lines of the demand and the prefetch call."""


def lines(release: str) -> dict[str, int]:
    """The line of each statement in one release."""
    return {name: row[RELEASES.index(release)] for name, row in LINES.items()}


def gather(line: int, caller: str = "pre_sub_module_forward_function", function: str = "fetch_sub_module") -> str:
    """The stack of a gather that was asked for at a line of the fetch function."""
    return (
        f"{PARTITION}:1290 all_gather_coalesced; {COORDINATOR}:520 __all_gather_params; {COORDINATOR}:{line} {function}; "
        f"{ZERO}/parameter_offload.py:475 {caller}; {MODULE}"
    )


def in_backward(line: int) -> str:
    """The same, asked for by a hook on autograd's thread."""
    return (
        f"{PARTITION}:1290 all_gather_coalesced; {COORDINATOR}:520 __all_gather_params; {COORDINATOR}:{line} fetch_sub_module; "
        f"{ZERO}/parameter_offload.py:509 pre_sub_module_backward_function; {ZERO}/parameter_offload.py:419 backward"
    )


@pytest.mark.parametrize("release", RELEASES)
def test_the_constructor_of_stages_1_and_2(release: str, tmp_path: Path) -> None:
    at, job = lines(release), Job()
    for name in ("flat", "master12", "staging12"):
        job.alloc(f"{STAGE12}:{at[name]} __init__; {INIT}")
    assert job.categories(tmp_path) == ["param.full", "param.master", "grad.bucket"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("name", "category"), [("flat", "param.full"), ("master12", "param.master")])
def test_one_site_of_it_alone_is_known_by_its_line(release: str, name: str, category: str, tmp_path: Path) -> None:
    if (release, name) == ("0.17.6", "flat"):
        pytest.skip("another release has another statement at that line")
    job = Job()
    job.alloc(f"{STAGE12}:{lines(release)[name]} __init__; {INIT}")
    assert job.categories(tmp_path) == [category]


def test_a_release_of_which_no_line_is_known_is_read_by_the_order_of_its_sites(tmp_path: Path) -> None:
    job = Job()
    for line in (5505, 5560, 5659):
        job.alloc(f"{STAGE12}:{line} __init__; {INIT}")
    for line in (7782, 7791):
        job.alloc(f"{STAGE3}:{line} _setup_for_real_optimizer; {INIT}")
    assert job.categories(tmp_path) == ["param.full", "param.master", "grad.bucket", "grad.bucket", "grad.partition"]


def test_flattened_on_the_device(tmp_path: Path) -> None:
    job = Job()
    flatten = f"torch/_utils.py:582 _flatten_dense_tensors; {STAGE12}:1399 flatten_dense_tensors_aligned; "
    job.alloc(f"{flatten}{STAGE12}:507 __init__; {INIT}")
    job.alloc(f"{STAGE12}:560 __init__; {INIT}")
    job.alloc(f"{flatten}{STAGE12}:3114 step; {TAKE_STEP}")
    assert job.categories(tmp_path) == ["param.full", "param.master", "optim.temp"]


@pytest.mark.parametrize("release", RELEASES)
def test_gradients_of_stages_1_and_2(release: str, tmp_path: Path) -> None:
    at, job = lines(release), Job()
    hook = f"{STAGE12}:1372 reduce_partition_and_remove_grads"
    function = "setup_buckets" if release >= "0.18.3" else "backward_prologue" if release >= "0.16.5" else "backward"
    job.alloc(MODULE)
    job.alloc(f"{STAGE12}:{at['bucket12']} {function}; {hook}")
    job.alloc(f"{STAGE12}:{at['owned12']} copy_grads_in_partition; {STAGE12}:2271 reduce_ipg_grads; {hook}")
    job.alloc(f"{STAGE12}:1500 allreduce_bucket; {STAGE12}:1600 allreduce_and_copy_with_multiple_ranks; {hook}")
    job.alloc(f"{STAGE12}:{at['step12']} step; {TAKE_STEP}")
    assert job.categories(tmp_path)[1:] == ["grad.bucket", "grad.partition", "grad.bucket", "optim.temp"]


@pytest.mark.parametrize("release", RELEASES)
def test_what_stage_3_keeps(release: str, tmp_path: Path) -> None:
    at, job = lines(release), Job()
    job.alloc(f"{PARTITION}:1715 _partition_param; {PARTITION}:900 _convert_to_deepspeed_param; {INIT}")
    where = f"{ZERO}/utils.py" if release >= "0.19" else STAGE3
    job.alloc(f"{where}:237 defragment; {STAGE3}:837 _create_fp16_partitions_with_defragmentation; {INIT}")
    job.alloc(f"{STAGE3}:{at['master3']} _create_fp32_partitions; {STAGE3}:605 _setup_for_real_optimizer; {INIT}")
    job.alloc(f"{STAGE3}:{at['zeros3']} initialize_optimizer_states; {STAGE3}:600 _setup_for_real_optimizer; {INIT}")
    job.alloc(f"{STAGE3}:{at['bucket3']} _setup_for_real_optimizer; {INIT}")
    job.alloc(f"{STAGE3}:{at['grads3']} _setup_for_real_optimizer; {INIT}")
    assert job.categories(tmp_path) == [
        "param.partition",
        "param.partition",
        "param.master",
        "grad.fp32",
        "grad.bucket",
        "grad.partition",
    ]


def test_without_contiguous_gradients_there_is_no_bucket(tmp_path: Path) -> None:
    for line in (791, 9999):
        job = Job()
        job.alloc(f"{STAGE3}:{line} _setup_for_real_optimizer; {INIT}")
        assert job.categories(tmp_path) == ["grad.partition"]


@pytest.mark.parametrize("release", RELEASES)
def test_gradients_of_stage_3(release: str, tmp_path: Path) -> None:
    job = Job()
    job.alloc(MODULE)
    job.alloc(f"deepspeed/runtime/comm/coalesced_collectives.py:199 reduce_scatter_coalesced; {HOOK}")
    job.alloc(f"{STAGE3}:1500 partition_grads; {STAGE3}:1400 __reduce_and_partition_ipg_grads; {HOOK}")
    job.alloc(f"{STAGE3}:{lines(release)['step3']} _prepare_fp32_grad_for_sub_group; {STAGE3}:2478 step; {TAKE_STEP}")
    job.alloc(f"{STAGE3}:2457 get_grad_norm_direct; {STAGE3}:2470 step; {TAKE_STEP}")
    assert job.categories(tmp_path)[1:] == ["grad.bucket", "grad.partition", "optim.temp", "optim.temp"]


@pytest.mark.parametrize("release", FETCHES)
def test_of_the_two_calls_in_the_fetch_function_the_first_is_demand(release: str, tmp_path: Path) -> None:
    demand, prefetch = FETCHES[release]
    function = "_fetch_sub_module_impl" if release in ("0.19.1", "0.19.2", "0.19.8") else "fetch_sub_module"
    job = Job()
    job.alloc(MODULE)
    for line in (demand, prefetch):
        job.free(job.alloc(gather(line, function=function)))
    assert job.categories(tmp_path)[1:] == ["param.gathered", "param.prefetched"]
    facts = job.snapshot(tmp_path).attribution().deepspeed
    assert facts is not None
    assert facts.stage is None or facts.stage == 3
    assert facts.at_least is not None
    assert (facts.at_most or "0.19.8") >= facts.at_least


def test_one_call_alone_is_demand_unless_its_line_is_known(tmp_path: Path) -> None:
    for line, category in ((4444, "param.gathered"), (415, "param.prefetched"), (317, "param.gathered")):
        job = Job()
        job.free(job.alloc(gather(line)))
        assert job.categories(tmp_path) == [category]


def wait_job(padding: int = 0) -> Job:
    """Two fetches of two parameters each, a demand and a prefetch, put together when they are waited for."""
    job = Job()
    job.alloc(MODULE)
    wait = f"{PARTITION}:767 wait; {COORDINATOR}:337 fetch_sub_module; {ZERO}/parameter_offload.py:475 f; {MODULE}"
    flats = [job.alloc(gather(line), 2 * size + padding) for line, size in ((317, 3 * MiB), (415, 5 * MiB))]
    for flat, size in zip(flats, (3 * MiB, 5 * MiB), strict=True):
        parts = [job.alloc(wait, size) for _ in range(2)]
        job.free(flat)
        job.free(*parts)
    return job


def test_what_wait_makes_is_of_the_fetch_whose_buffer_is_freed_then(tmp_path: Path) -> None:
    assert wait_job().categories(tmp_path)[3:] == ["param.gathered"] * 2 + ["param.prefetched"] * 2
    rule = wait_job(512).snapshot(tmp_path).attribution()
    assert [rule.categories[code] for code in rule.category[3:]] == ["param.gathered"] * 2 + ["param.prefetched"] * 2
    assert set(rule.confidence[3:].tolist()) == {2}  # inferred


def test_a_buffer_of_another_size_is_not_its(tmp_path: Path) -> None:
    assert set(wait_job(64 * MiB).categories(tmp_path)[3:]) == {"param.gathered"}


def retained_job(*, again: bool, finish: bool = True) -> Job:
    """A parameter gathered in forward that lives until its backward, in which it is gathered `again` or not."""
    job = Job()
    weight = job.alloc(gather(317), 8 * MiB)
    saved = job.alloc(MODULE)
    start = job.alloc(f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}")
    if again:
        job.free(job.alloc(in_backward(317), 8 * MiB))
    job.free(job.alloc(None, 2 * MiB))
    if finish:
        job.free(weight, saved, start)
        job.step()
    return job


def test_gathered_again_while_the_first_copy_lives_is_retained(tmp_path: Path) -> None:
    assert retained_job(again=True).categories(tmp_path)[0] == "param.retained"


def test_kept_and_used_again_is_not(tmp_path: Path) -> None:
    job = retained_job(again=False)
    assert job.categories(tmp_path)[0] == "param.gathered"
    snapshot = job.snapshot(tmp_path)
    row = next(row for row in snapshot.blame(at=1, by="block").rows if row.category == "param.gathered")
    assert row.label == "kept from forward to backward"


def test_what_outlives_backward_is_persistent_if_it_is_small(tmp_path: Path) -> None:
    for size, category in ((64 << 10, "param.persistent"), (8 * MiB, "param.gathered")):
        job = Job()
        weight = job.alloc(gather(317), size)
        job.free(job.alloc(MODULE))
        job.free(job.alloc(f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}"))
        job.step()
        job.free(weight)
        assert job.categories(tmp_path)[0] == category


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        (f"{PARTITION}:2142 _allgather_params_sequential; {PARTITION}:1323 all_gather; {STAGE3}:2880 _post_step; {STAGE3}:2478 step; {TAKE_STEP}", "param.persistent"),
        (f"{PARTITION}:1323 all_gather; {STAGE3}:3000 checkpoint_event_epilogue; {SCRIPT}", "param.persistent"),
        (f"{PARTITION}:2142 _allgather_params; {PARTITION}:1323 all_gather; {STAGE3}:1310 create_reduce_and_remove_grad_hooks; {INIT}", "param.gathered"),
        (f"{PARTITION}:1323 all_gather; {PARTITION}:2465 __enter__; {SCRIPT}", "param.gathered"),
        (f"{PARTITION}:1323 all_gather; {PARTITION}:2465 __enter__; deepspeed/runtime/engine.py:4000 get_layer_state_dict; {SCRIPT}", "checkpoint_io"),
        (f"{PARTITION}:1915 _partition_param_sec; {PARTITION}:1604 partition; {SCRIPT}", "param.partition"),
        (f"{PARTITION}:1214 _convert_to_zero_parameters; {INIT}", "param.full"),
        (f"{PARTITION}:400 wrapped_fn; torch/nn/modules/linear.py:100 __init__; model.py:5 __init__; {PARTITION}:500 wrapper; {SCRIPT}", "param.full"),
        (f"deepspeed/runtime/engine.py:1469 _configure_distributed_model; {INIT}", "param.full"),
        (f"{STAGE3}:1068 _create_momentum_buffer; {INIT}", "optim.state"),
        (f"{STAGE3}:3668 load_hp_checkpoint_state_from_checkpoint_dir_stage3; {SCRIPT}", "optim.state"),
        (f"deepspeed/runtime/utils.py:950 all_gather_dp_groups; {STAGE12}:3150 step; {TAKE_STEP}", "comm"),
        (f"{STAGE12}:1040 _fill_param_grad_accum_attribute; {STAGE12}:1372 reduce_partition_and_remove_grads", "grad.fp32"),
        (f"deepspeed/runtime/engine.py:3000 allreduce_bucket; deepspeed/runtime/engine.py:3010 allreduce_and_copy; deepspeed/runtime/engine.py:2500 allreduce_gradients; {SCRIPT}", "grad.bucket"),
        (f"deepspeed/runtime/fp16/fused_optimizer.py:286 step; {TAKE_STEP}", "optim.temp"),
        (f"deepspeed/runtime/fp16/unfused_optimizer.py:222 step; {TAKE_STEP}", "optim.temp"),
        (f"deepspeed/runtime/fp16/unfused_optimizer.py:78 <listcomp>; deepspeed/runtime/fp16/unfused_optimizer.py:78 __init__; {INIT}", "param.master"),
        (f"{BF16}:300 _update_hp_grad; {BF16}:290 update_hp_grads; {SCRIPT}", "grad.fp32"),
        (f"{STAGE3}:3093 _fp32_state_allgather; {SCRIPT}", "comm"),
    ],
)  # fmt: skip
def test_each_other_place(stack: str, category: str, tmp_path: Path) -> None:
    job = Job()
    job.alloc(MODULE)
    job.alloc(stack)
    job.alloc(BACKWARD)
    job.step()
    assert job.categories(tmp_path)[1] == category


@pytest.mark.parametrize("release", RELEASES)
def test_bf16_optimizer(release: str, tmp_path: Path) -> None:
    at, job = lines(release), Job()
    job.alloc(f"{BF16}:60 _flatten_dense_tensors_aligned; {BF16}:{at['bf16-flat']} _setup_for_real_optimizer; {INIT}")
    job.alloc(f"{BF16}:{at['bf16-master']} _setup_for_real_optimizer; {INIT}")
    job.alloc(f"{BF16}:{at['bf16-grads']} _setup_for_real_optimizer; {INIT}")
    assert job.categories(tmp_path) == ["param.full", "param.master", "grad.fp32"]


@pytest.mark.parametrize(("flat", "master"), [(64, 70), (77, 83), (91, 97), (94, 100), (1094, 1100)])
def test_fp16_optimizer(flat: int, master: int, tmp_path: Path) -> None:
    job, fused = Job(), "deepspeed/runtime/fp16/fused_optimizer.py"
    job.alloc(f"{fused}:{flat} <listcomp>; {fused}:{flat} __init__; {INIT}")
    job.alloc(f"torch/_utils.py:582 _flatten_dense_tensors; {fused}:{flat} __init__; {INIT}")
    job.alloc(f"{fused}:{master} __init__; {INIT}")
    assert job.categories(tmp_path) == ["param.full", "param.full", "param.master"]


def test_states_are_those_that_outlive_the_step(tmp_path: Path) -> None:
    fused = "deepspeed/ops/adam/fused_adam.py:150 step; " + TAKE_STEP
    job = Job()
    job.alloc(MODULE)
    job.free(job.alloc(f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}"))
    job.alloc(fused)
    job.free(job.alloc(f"torch/optim/adam.py:450 _single_tensor_adam; {STEP}"))
    job.alloc(MODULE)
    assert job.categories(tmp_path)[2:4] == ["optim.state", "optim.temp"]


def test_the_wrapped_linear_layer(tmp_path: Path) -> None:
    linear = f"{ZERO}/linear.py:73 forward; torch/nn/modules/linear.py:134 forward; {CALL}; {MODULE}"
    job = Job()
    kept, gone = job.alloc(linear), job.alloc(linear)
    job.free(gone)
    job.alloc(f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}")
    passing = job.alloc(f"{ZERO}/linear.py:101 backward; torch/autograd/function.py:311 apply")
    gradient = job.alloc(f"{ZERO}/linear.py:107 backward; torch/autograd/function.py:311 apply")
    job.free(passing, kept)
    job.step()
    job.free(gradient)
    job.alloc(MODULE)
    assert job.categories(tmp_path)[:5] == ["act.saved", "fwd.temp", "bwd.temp", "bwd.temp", "grad.full"]


@pytest.mark.parametrize(
    "stack",
    [
        "/home/me/train_stage3.py:783 _setup_for_real_optimizer; /home/me/train_stage3.py:1 <module>",
        "/home/me/mydeepspeed/runtime/zero/stage3.py:783 _setup_for_real_optimizer; train.py:1 <module>",
        "/home/me/deepspeed/notes.py:783 _setup_for_real_optimizer; train.py:1 <module>",
        "/home/me/deepspeed/runtime/zero/stage3.py.bak/x.py:783 _setup_for_real_optimizer; train.py:1 <module>",
        "/home/me/mytorch/optim/adam.py:178 _init_group; train.py:1 <module>",
        "/home/me/optim/adam.py:178 _init_group; train.py:1 <module>",
        "/home/me/loader.py:12 forward; /home/me/loader.py:30 __iter__; train.py:1 <module>",
        "/data/coalesced_collectives.py:3 reduce_scatter_coalesced; train.py:1 <module>",
        "C:\\work\\torch_serialization.py:3 load; train.py:1 <module>",
    ],
)
def test_a_path_that_merely_contains_the_word_is_nobodys(stack: str, tmp_path: Path) -> None:
    job = Job()
    job.alloc(stack)
    assert job.categories(tmp_path) == ["unknown"]


@pytest.mark.parametrize(
    "folder", ["/src/DeepSpeed/", "C:\\envs\\x\\Lib\\site-packages\\", "/opt/conda/lib/python3.12/site-packages/"]
)
def test_the_library_itself_is_known_wherever_it_is_installed(folder: str, tmp_path: Path) -> None:
    job = Job()
    path = f"{folder}deepspeed/runtime/zero/stage3.py"
    job.alloc(
        f"{path.replace('/', chr(92)) if chr(92) in folder else path}:1170 _create_fp32_partitions; train.py:1 <module>"
    )
    assert job.categories(tmp_path) == ["param.master"]


@pytest.mark.parametrize(("count", "retained"), [(2, 0), (12, 10)])
def test_out_of_memory_in_forward_with_more_gathered_than_deepspeed_keeps(
    count: int, retained: int, tmp_path: Path
) -> None:
    job = Job()
    for _ in range(count):
        job.alloc(gather(317), 400 * MiB)
    job.builder.oom(512 * MiB, stack=chain(gather(317)))
    found = job.categories(tmp_path)
    assert found == ["param.retained"] * retained + ["param.gathered"] * (count - retained)


@pytest.mark.parametrize("skipped", [True, False])
def test_gradients_that_outlive_a_skipped_step_are_stale(skipped: bool, tmp_path: Path) -> None:
    owned = f"{STAGE12}:1350 copy_grads_in_partition; {STAGE12}:1372 reduce_partition_and_remove_grads"
    job = Job()
    previous: list[int] = []
    for _ in range(2):
        job.alloc(MODULE)
        job.free(job.alloc(f"torch/autograd/__init__.py:231 _make_grads; {BACKWARD}"))
        gradients = job.alloc(owned)
        job.free(*previous)
        job.free(job.alloc(f"{STAGE12}:1890 step; {TAKE_STEP}"))
        previous = [gradients]
        if not skipped:
            job.free(*previous)
            previous = []
    rows = job.rows(tmp_path, at=9 if skipped else 8)
    labels = {row.label for row in rows.values() if row.category == "grad.partition"}
    assert ("of an earlier step, still there" in labels) == skipped
