"""GPUs by name: how much memory torch sees of each, and what kind of device it is.

The H200's figures were read from one. Of the others, `capacity_bytes` is what torch says in its out-of-memory reports
("has a total capacity of 79.10 GiB"), to two digits of a GiB: boards, ECC and drivers differ by up to 0.3 %.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memtrace.errors import QuestionError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """`capability` as CUDA counts it (90 is 9.0), `processors` its streaming multiprocessors. `is_measured`: read from
    the device itself."""

    name: str
    capacity_bytes: int
    capability: int
    processors: int
    is_measured: bool = False


def _gpu(name: str, gib: float, capability: int, processors: int) -> Gpu:
    return Gpu(name, int(gib * _GIB), capability, processors)


GPUS = {
    "B200": _gpu("NVIDIA B200", 178.35, 100, 148),
    "H200": Gpu("NVIDIA H200", 150_109_880_320, 90, 132, is_measured=True),
    "GH200": _gpu("NVIDIA GH200 480GB", 95.00, 90, 132),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 79.10, 90, 132),
    "H100-PCIE": _gpu("NVIDIA H100 PCIe", 79.10, 90, 114),
    "H100-NVL": _gpu("NVIDIA H100 NVL", 93.11, 90, 132),
    "H20": _gpu("NVIDIA H20", 95.22, 90, 78),
    "A100-80": _gpu("NVIDIA A100-SXM4-80GB", 79.15, 80, 108),
    "A100-40": _gpu("NVIDIA A100-SXM4-40GB", 39.39, 80, 108),
    "L40S": _gpu("NVIDIA L40S", 44.42, 89, 142),
    "L40": _gpu("NVIDIA L40", 44.42, 89, 142),
    "L4": _gpu("NVIDIA L4", 22.03, 89, 58),
    "A10G": _gpu("NVIDIA A10G", 21.99, 86, 80),
    "A40": _gpu("NVIDIA A40", 44.42, 86, 84),
    "A6000": _gpu("NVIDIA RTX A6000", 47.53, 86, 84),
    "RTX6000-ADA": _gpu("NVIDIA RTX 6000 Ada Generation", 47.50, 89, 142),
    "5090": _gpu("NVIDIA GeForce RTX 5090", 31.36, 120, 170),
    "4090": _gpu("NVIDIA GeForce RTX 4090", 23.64, 89, 128),
    "3090": _gpu("NVIDIA GeForce RTX 3090", 23.69, 86, 82),
    "V100-32": _gpu("Tesla V100-SXM2-32GB", 31.74, 70, 80),
    "V100-16": _gpu("Tesla V100-SXM2-16GB", 15.77, 70, 80),
    "T4": _gpu("Tesla T4", 14.57, 75, 40),
}
_ALIASES = {"A100": "A100-80", "V100": "V100-32", "A10": "A10G", "6000-ADA": "RTX6000-ADA"}
_WORDS = re.compile(r"NVIDIA|GEFORCE|TESLA|RTX(?=[- ]?[A345])|SXM[0-9]?|HBM[0-9]?E?|GENERATION|(?<=[0-9])GB")


def find(name: str) -> Gpu:
    """The GPU of that name, however it is written. Raises QuestionError.

    >>> find("a100-40gb").capacity_bytes >> 30, find("NVIDIA H200").capability
    (39, 90)
    """
    key = "-".join(re.split(r"[\s_-]+", _WORDS.sub("", name.upper()).strip(" -_")))
    found = GPUS.get(_ALIASES.get(key, key)) or GPUS.get(key.removesuffix("-80"))
    if found is None:
        raise QuestionError.unknown("GPU", name, GPUS, where="the table of GPUs")
    return found
