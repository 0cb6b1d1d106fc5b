"""C++ frames, where they were recorded (`stacks="all"`): a part of the demangled name. Source: torch 2.11."""

from __future__ import annotations

from memtrace.attribution.rule import By, Rank, Rule
from memtrace.timeline.callsites import Function, names

CPP = "c++"
"""The `file` of a function that is matched by a part of its name."""

RULES: tuple[Rule, ...] = (
    Rule(
        id="cpp.workspace",
        category="workspace",
        where=Function(CPP, names("setWorkspaceForHandle getCUDABlasLtWorkspace cudnn_workspace getWorkspace")),
        label="cuBLAS workspace",
        knob="CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE",
        note="torch sets aside a workspace for a cuBLAS handle.",
    ),
    Rule(
        id="cpp.ddp",
        category="grad.bucket",
        where=Function(CPP, ("c10d::Reducer::initialize_buckets",)),
        note="The buckets of DDP's reducer.",
    ),
    Rule(
        id="cpp.backward",
        category="bwd.temp",
        where=Function(CPP, ("torch::autograd::generated::", "torch::autograd::AccumulateGrad")),
        rank=Rank.LAST,
        by=By.BACKWARD,
        note="A node of autograd's graph, on its own thread.",
    ),
)
