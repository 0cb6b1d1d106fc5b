"""Which DeepSpeed an anonymous recording is from, told by where it allocates; and its ZeRO stage."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from memtrace.attribution.matcher import NO_RULE, StackVerdicts
from memtrace.attribution.result import DeepSpeedFacts
from memtrace.attribution.rule import Rule, lines
from memtrace.attribution.rules.deepspeed import FETCH_LINES
from memtrace.io.sidecar import Sidecar
from memtrace.model import StackTable
from memtrace.timeline.callsites import Function, FunctionIndex

_RELEASES = ("0.9.4", "0.12.6", "0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8")
_LATEST = _RELEASES[-1]


LINES = {
    "deepspeed.zero12.flat+": lines("312-316 338-342 352-362 353-363 355-365 391-401 420-437 505-524"),
    "deepspeed.zero12.master": lines("346-350 372-376 393-397 394-398 401-405 437-441 472-473 560-561"),
    "deepspeed.zero12.owned-gradients": lines("1186 1304 1350 1345 1358 1442 1527 2192"),
    "deepspeed.zero3.bucket": lines("392-394 483-485 489-491 525-527 538-540 562-564 624-626 782-784"),
    "deepspeed.zero3.master": lines("747 850-853 863-867 894-897 902-905 922-925 1022-1036 1158-1172"),
    "deepspeed.zero3.partition": lines("1167 1489 1589 1600 1609 1702 1715 1836"),
}
"""Lines (first, last) of a statement in each of `_RELEASES`. Source: deepspeed-memory-map, table in 2.1."""

_CALLS: tuple[tuple[str, Function], ...] = (
    ("deepspeed.zero12.flat+", Function("deepspeed/runtime/zero/stage_1_and_2.py", ("__init__",))),
    ("deepspeed.zero12.master", Function("deepspeed/runtime/zero/stage_1_and_2.py", ("__init__",))),
    (
        "deepspeed.zero12.owned-gradients",
        Function("deepspeed/runtime/zero/stage_1_and_2.py", ("copy_grads_in_partition",)),
    ),
    ("deepspeed.zero3.bucket", Function("deepspeed/runtime/zero/stage3.py", ("_setup_for_real_optimizer",))),
    ("deepspeed.zero3.master", Function("deepspeed/runtime/zero/stage3.py", ("_create_fp32_partitions",))),
    ("deepspeed.zero3.partition", Function("deepspeed/runtime/zero/partition_parameters.py", ("_partition_param",))),
)
_FETCH = Function(
    "deepspeed/runtime/zero/partitioned_param_coordinator.py", ("fetch_sub_module", "_fetch_sub_module_impl")
)
_SINCE: tuple[tuple[str, Function], ...] = (
    ("0.18.3", Function("deepspeed/runtime/zero/stage_1_and_2.py", ("setup_buckets",))),
    ("0.18.6", Function("deepspeed/runtime/zero/partitioned_param_coordinator.py", ("_fetch_sub_module_impl",))),
    ("0.19.0", Function("deepspeed/runtime/zero/utils.py", ("defragment",))),
    ("0.17.6", Function("deepspeed/runtime/zero/*.py", ("step_with_gradscaler",))),
    ("0.18.5", Function("deepspeed/runtime/zero/partition_parameters.py", ("_all_gather_sequential",))),
)
"""Functions that appear with a release. Source: deepspeed-memory-map section 8."""

_STAGE3 = Function("deepspeed/runtime/zero/stage3.py")
_STAGE12 = Function("deepspeed/runtime/zero/stage_1_and_2.py")
_STAGE1_ONLY = Function("deepspeed/runtime/zero/stage_1_and_2.py", ("reduce_gradients",))
_ENGINE = Function("deepspeed/runtime/engine.py")
_BF16 = Function("deepspeed/runtime/bf16_optimizer.py", ("_setup_for_real_optimizer", "step"))


def deepspeed_facts(
    stacks: StackTable, verdicts: StackVerdicts, rules: Sequence[Rule], sidecar: Sidecar | None = None
) -> DeepSpeedFacts | None:
    """What the sidecar says, else the frames; None where neither shows DeepSpeed."""
    functions = [
        _ENGINE,
        _BF16,
        _STAGE3,
        _STAGE12,
        _STAGE1_ONLY,
        _FETCH,
        *(one for _, one in _SINCE),
        *(one for _, one in _CALLS),
    ]
    at: dict[Function, set[int]] = {function: set() for function in functions}
    for frame, found in enumerate(FunctionIndex(functions).frames(stacks)):
        for number in found:
            at[functions[number]].add(int(stacks.line[frame]))
    if not any(at.values()):
        return None
    stage, why = _stage(at, verdicts, rules)
    low, high, told = _release(at, verdicts, rules)
    if sidecar is not None and sidecar.stage is not None:
        stage, why = sidecar.stage, "the recorder"
    if sidecar is not None and sidecar.deepspeed is not None:
        low, high, told = sidecar.deepspeed, sidecar.deepspeed, "the recorder"
    return DeepSpeedFacts(stage, why, low, high, told)


def _stage(at: dict[Function, set[int]], verdicts: StackVerdicts, rules: Sequence[Rule]) -> tuple[int | None, str]:
    if at[_STAGE3]:
        return 3, "frames of zero/stage3.py"
    if at[_FETCH]:
        return 3, "parameters are fetched"
    if at[_STAGE12]:
        if at[_STAGE1_ONLY]:
            return 1, "reduce_gradients of zero/stage_1_and_2.py: gradients are reduced when all are there"
        used = {rules[rule].id for rule in np.unique(verdicts.rule[verdicts.rule != NO_RULE]).tolist()}
        if used & {"deepspeed.zero12.owned-gradients", "deepspeed.zero12.reduce"}:
            return 2, "zero/stage_1_and_2.py: gradients are reduced while backward runs"
        return None, "frames of zero/stage_1_and_2.py"
    if at[_BF16]:
        return 1, "BF16_Optimizer divides states as stage 1 does, also where the configuration says 0"
    return 0, "frames of DeepSpeed's engine, none of ZeRO's"


def _release(
    at: dict[Function, set[int]], verdicts: StackVerdicts, rules: Sequence[Rule]
) -> tuple[str | None, str | None, str]:
    """The narrowest range that some table gives."""
    fetch = next((number for number, rule in enumerate(rules) if rule.id == "deepspeed.zero3.fetch"), None)
    seen = set(verdicts.site_lines.get(fetch, {})) if fetch is not None else set()
    for releases, pair in FETCH_LINES.items():
        if seen and seen <= set(pair):
            return *_ends(releases), "the lines of the fetch function"
    low, told = None, ""
    for release, function in _SINCE:
        if at[function] and (low is None or _key(release) > _key(low)):
            low, told = release, f"{function.names[0]} exists since"
    agreeing = set(_RELEASES)
    for name, function in _CALLS:
        having = {
            release
            for release, (first, last) in zip(_RELEASES, LINES[name], strict=True)
            if any(first <= line <= last for line in at[function])
        }
        if agreeing & having:
            agreeing, told = agreeing & having, f"the line of {function.names[0]}"
    if agreeing == set(_RELEASES):
        return low, None, told
    first_release, last_release = min(agreeing, key=_key), max(agreeing, key=_key)
    low = max(_minor(first_release), low or "", key=_key)
    return low, None if last_release == _LATEST else last_release, told


def _ends(releases: str) -> tuple[str, str | None]:
    low, _, high = releases.partition("-")
    return low, (high or low) if (high or low) != _LATEST else None


def _minor(release: str) -> str:
    """A release that was read stands for its minor version: the lines of its neighbours were not all read."""
    return ".".join(release.split(".")[:2]) + ".0"


def _key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))
