"""What is known of a device from beside its trace: how much memory it has, torch's own cap, and what others hold."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.allocator.simulate.rules import conf_number, fraction_limit
from memtrace.io.sidecar import Sidecar
from memtrace.model import SnapshotData

_OLDEST = "2.0"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes, None where not known. `noted_bytes` is the capacity that the recorder noted: one that was given beats it.
    `outside_bytes`: what of the device was not torch's when the snapshot was taken."""

    capacity_bytes: int | None
    noted_bytes: int | None
    limit_bytes: int | None
    outside_bytes: int | None


def capacity_of(
    data: SnapshotData, device: int, sidecar: Sidecar | None, given: int | None = None, cap: int | None = None
) -> Capacity:
    """What is known of a device; `given` is its capacity, `cap` torch's own, as somebody says them.

    Else the cap is the recorder's word, or the fraction in the settings string, which needs the capacity.
    """
    noted = None if sidecar is None else sidecar.capacity_of(device)
    capacity = noted if given is None else given
    limit = sidecar.limit_of(device) if cap is None and sidecar is not None else cap
    fraction = conf_number(data.settings, "per_process_memory_fraction")
    if limit is None and fraction is not None and capacity is not None:
        limit = fraction_limit(fraction, capacity, data.torch.at_least or _OLDEST)
    return Capacity(capacity, noted, limit, None if sidecar is None else sidecar.outside_of(device))
