"""Our code in the middle of what torch.compile compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memtrace.record.inside.eager import eagerly, untraced

# Torch's own, while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def torch() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch._dynamo.testing")
    torch._dynamo.reset()
    yield torch
    torch._dynamo.reset()


def frames_compiled(torch: Any, hook: Callable[[Any], Any]) -> int:
    """How many frames Dynamo compiles when a region calls `hook` where the graph is broken."""

    def region(value: Any) -> Any:
        value = value + 1
        torch._dynamo.graph_break()
        hook(value)
        return value * 2

    counter = torch._dynamo.testing.CompileCounter()
    assert torch.compile(region, backend=counter)(torch.ones(2)).tolist() == [4, 4]
    return int(counter.frame_count)


def test_dynamo_leaves_our_functions_alone(torch: Any) -> None:
    def inner(value: Any) -> Any:
        return value - 1

    def hook(value: Any) -> Any:
        return inner(value) + inner(value)

    @untraced
    def nothing(value: Any) -> None:
        return None

    @untraced
    def ours(value: Any) -> Any:
        return eagerly(hook, value)

    bare = frames_compiled(torch, nothing)
    assert frames_compiled(torch, ours) == bare == 2


def test_dynamo_is_back_after_an_exception(torch: Any) -> None:
    def hook(value: Any) -> None:
        raise ValueError("inside")

    @untraced
    def ours(value: Any) -> None:
        with pytest.raises(ValueError, match="inside"):
            eagerly(hook, value)

    assert frames_compiled(torch, ours) == 2


def test_without_torch_a_function_is_just_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert eagerly(untraced(lambda one, two: one + two), 1, 2) == 3
