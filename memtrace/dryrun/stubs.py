"""Writes the stubs: an answer for every CUDA function that torch imports and that nobody wrote by hand.

Silence is the danger: a function that says it succeeded and did not fill in what its caller then reads. So there are
three kinds, decided by name: *harmless* ones succeed, *refused* ones fail and are named in the report, and whatever is
neither succeeds and is counted, to be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

OURS = re.compile(r"(?:__)?cuda[A-Z]|cu[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl[A-Z]")
"""Names of CUDA's libraries. Not those of nvrtc, nvJitLink and cupti: these work, or fail, without a device."""

NEVER = frozenset({"cuGetExportTable", "cudaGetExportTable"})
"""Undocumented: whoever asks for them shall find that they are not there."""


class Kind(Enum):
    """What a stub does."""

    HARMLESS = "harmless"
    COUNTED = "counted"
    REFUSED = "refused"


_ALWAYS_HARMLESS = re.compile(r"Destroy|SetStream|SetPointerMode")

REFUSED: tuple[tuple[str, str], ...] = (
    (r"ufferSize|WorkspaceSize|GetWorkspace", "the caller allocates what it answers"),
    (r"Create|cufftMake", "the caller goes on with the object it makes"),
    (r"cudnnFind|cudnnGet|GetAlgo", "the caller chooses a kernel and a workspace by it"),
    (r"nnz|Nnz", "the size of a result that depends on data"),
    (r"cudaIpc|cuFile", "no other process and no file holds memory of this device"),
    (r"nccl", "nobody is at the other end"),
    (r"cusparse|cusolver|cufft|curand", "their handles cannot be made, so nothing of them can be meant"),
)
"""Parts of names, and why a stub may not say that it succeeded."""

HARMLESS: tuple[tuple[str, str], ...] = (
    (r"Destroy|Free$|Trim", "gives something back"),
    (r"Set[A-Z]|Enable|Exchange|Update|Access", "changes a setting that nothing depends on here"),
    (r"Synchronize|Query|Record", "everything is done when it is asked for"),
    (r"Launch|_cuda|Register|Init", "kernels do not run, so they need not be known"),
    (r"Copy|Begin|End|Profiler", "marks, and copies between places that nobody reads"),
    (r"cublas[CDSZGH]|cublas.*Gemm|Matmul", "computes into memory that the caller gave"),
    (r"cudnn(?:Conv|Batch|RNN|Pool|Spatial|CTC|Restore)", "computes into memory that the caller gave"),
)
"""Parts of names, and why success without doing anything is right."""

_RESULTS: tuple[tuple[str, str, str], ...] = (
    (r"nccl.*Get(?:ErrorString|LastError)", "const char*", '"not supported by memtrace\'s stand-in for a GPU"'),
    (r"cusparseGetError(?:String|Name)", "const char*", '"not supported by memtrace\'s stand-in for a GPU"'),
    (r"cuFile(?:Read|Write)", "long", "-1"),
    (r"cuFile", "long", "5001"),  # a structure of two integers: the first is the error
    (r"cudnn", "int", "3000"),  # CUDNN_STATUS_NOT_SUPPORTED
    (r"cublas", "int", "15"),  # CUBLAS_STATUS_NOT_SUPPORTED
    (r"cusparse", "int", "10"),  # CUSPARSE_STATUS_NOT_SUPPORTED
    (r"cusolver", "int", "9"),  # CUSOLVER_STATUS_NOT_SUPPORTED
    (r"cufft", "int", "16"),  # CUFFT_NOT_SUPPORTED
    (r"curand", "int", "999"),  # CURAND_STATUS_INTERNAL_ERROR
    (r"nccl", "int", "3"),  # ncclInternalError
    (r"(?:__)?cuda|cu", "int", "801"),  # cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED
)
"""By name, what a refused function returns: its type, and an error in its library's own numbers."""

_REFUSED = re.compile("|".join(part for part, _ in REFUSED))
_HARMLESS = re.compile("|".join(part for part, _ in HARMLESS))


def kind_of(name: str) -> Kind:
    """What the stub of a function of that name does."""
    if _REFUSED.search(name) and not _ALWAYS_HARMLESS.search(name):
        return Kind.REFUSED
    return Kind.HARMLESS if _HARMLESS.search(name) else Kind.COUNTED


def wanted(imported: Iterable[str], defined: Iterable[str]) -> list[str]:
    """Of the names that torch's libraries import, those that need a stub, sorted."""
    return sorted({name for name in imported if OURS.match(name)} - set(defined) - NEVER)


def source(names: Iterable[str]) -> str:
    """The C++ source with a stub for each name."""
    lines = ['#include "standin.h"', ""]
    lines += [_stub(name) for name in names]
    return "\n".join(lines) + "\n"


def _stub(name: str) -> str:
    kind = kind_of(name)
    if kind is Kind.HARMLESS:
        return f"MEMTRACE_API int {name}() {{ return 0; }}"
    if kind is Kind.COUNTED:
        return f'MEMTRACE_API int {name}() {{ return standin::unknown("{name}"); }}'
    result, error = next((kind, error) for part, kind, error in _RESULTS if re.match(part, name))
    return f'MEMTRACE_API {result} {name}() {{ standin::refuse("{name}", 0); return {error}; }}'
