"""The sidecar that the recorder would have written for a recording whose truth file says what was alive at the end."""

from __future__ import annotations

from typing import Any

from truths import SHARDED, Role, roles_of

_PERSISTENT_BYTES = 400_000
_HELD = {
    "fp32_partitioned_groups_flat": "param.master",
    "single_partition_of_fp32_groups": "param.master",
    "fp32_groups_flat": "param.master",
    "fp32_groups_flat_partition": "param.master",
    "fp32_groups": "param.master",
    "fp16_partitioned_groups_flat": "param.flat",
    "lp_param_buffer": "param.flat",
    "bit16_groups_flat": "param.flat",
    "bf16_groups_flat": "param.flat",
    "fp16_groups_flat": "param.flat",
    "grad_partitions_flat_buffer": "grad.partition",
    "all_grad_tensors": "grad.partition",
    "averaged_gradients": "grad.partition",
    "ipg_bucket_flat_buffer": "grad.bucket",
    "ipg_buckets": "grad.bucket",
    "temp_grad_buffer_for_gpu_offload": "grad.bucket",
    "fp32_groups_gradients_flat": "grad",
}
"""Attributes of DeepSpeed's optimizers -> roles, as `memtrace/record/inside/roles.py` has them."""


def recorded_roles(name: str, truth: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of `roles`; tensors that the recorder does not look for are not there."""
    found = ((role, _recorded(name, role)) for role in roles_of(name, truth))
    return [
        {"role": recorded, "name": role.name, "address": role.address, "bytes": role.bytes}
        for role, recorded in found
        if recorded is not None and role.bytes
    ]


def _recorded(name: str, role: Role) -> str | None:
    if role.role == "param":
        if "zero3" in name:
            return "param.persistent" if role.bytes <= _PERSISTENT_BYTES else "param.gathered"
        return "param.partition" if any(part in name for part in SHARDED) else "param"
    if role.role == "ds_tensor":
        return "param.partition"
    if role.role == "grad":
        return "grad.partition" if any(part in name for part in SHARDED) else "grad"
    if role.role.startswith("state."):
        return f"optim.{role.role}"
    return "buffer" if role.role == "buffer" else _HELD.get(role.role.removeprefix("attr."))
