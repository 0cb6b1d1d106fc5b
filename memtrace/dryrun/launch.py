"""Runs one rank of a job with the stand-in device in the place of CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrace.errors import DryRunError
from memtrace.gpus import Gpu
from memtrace.record import launch
from memtrace.record.inside import world as worlds
from memtrace.record.inside.settings import Settings

INSIDE = Path(__file__).parent / "inside"
PART = "dryrun"
"""The name under which the recorder finds what is in INSIDE."""

_HIDING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")


@dataclass(frozen=True, slots=True)
class Standin:
    """The compiled library, the GPU it is to be, and where kernels compiled for it are kept: away from real ones.

    `dnn_spans`: address space of the libraries in whose place it comes, each in bytes.
    """

    library: Path
    gpu: Gpu
    kernels: Path
    dnn_spans: tuple[int, ...] = ()


def working_gpu() -> str | None:
    """A GPU of this machine that the driver shows; None: there is none."""
    for folder in (Path("/proc/driver/nvidia/gpus"), Path("/dev")):
        try:
            found = sorted(entry for entry in folder.iterdir() if folder.name == "gpus" or _is_gpu(entry.name))
        except OSError:
            continue
        if found:
            return str(found[0])
    return None


def refuse_a_working_gpu() -> None:
    """Raises DryRunError where a job could run for real."""
    found = working_gpu()
    if found is not None:
        raise DryRunError(
            f"this machine has a working GPU ({found}), and a dry run would run as if it were another one",
            hint="memtrace record measures it. To leave it alone and run without it: --beside-gpu",
        )


def environment(
    standin: Standin, environ: Mapping[str, str], *, world: int | None, rank: int, devices: int
) -> dict[str, str]:
    """The rank's environment, but for the recorder's part. `world` None: nothing was said of one."""
    found = {name: value for name, value in environ.items() if name not in _HIDING}
    preloaded = found.get("LD_PRELOAD")
    major, minor = divmod(standin.gpu.capability, 10)
    found.update(
        {
            "LD_PRELOAD": f"{standin.library}:{preloaded}" if preloaded else str(standin.library),
            "TRITON_LIBCUDA_PATH": str(standin.library.parent),
            "TRITON_CACHE_DIR": str(standin.kernels / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(standin.kernels / "inductor"),
            "TORCH_EXTENSIONS_DIR": str(standin.kernels / "extensions"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile workers may outlive the process
            "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}",
            "DS_IGNORE_CUDA_DETECTION": "1",
            "MEMTRACE_GPU_NAME": standin.gpu.name,
            "MEMTRACE_GPU_MEMORY": str(standin.gpu.capacity_bytes),
            "MEMTRACE_GPU_SM": str(standin.gpu.capability),
            "MEMTRACE_GPU_SMS": str(standin.gpu.processors),
            "MEMTRACE_GPU_COUNT": str(devices),
            "MEMTRACE_GPU_DNN_SPANS": ",".join(map(str, standin.dnn_spans)),
        }
    )
    if world is not None:
        found.update(worlds.environment(world, rank, found))
    return found


def run(command: Sequence[str], settings: Settings, environ: Mapping[str, str]) -> launch.Outcome:
    """One rank, to its end. Raises CommandError."""
    return launch.run(command, settings, environ)


def current() -> dict[str, str]:
    """This process's environment."""
    return dict(os.environ)


def _is_gpu(name: str) -> bool:
    return name.startswith("nvidia") and name.removeprefix("nvidia").isdigit()
