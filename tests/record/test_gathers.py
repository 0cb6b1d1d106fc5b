"""Marks of ZeRO-3's gathers, beside the rule of the lines they are asked for in, and where a spy saw the parameters."""

from __future__ import annotations

import collections
import enum
import gc
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import zero_harness
from record import zero_jobs

from memtrace.record.inside import gathers, notes

needs_deepspeed = pytest.mark.skipif(not zero_harness.is_available(), reason="needs torch and deepspeed")
JOBS = {
    "converted": ("--stage", "3"),
    "zero.Init": ("--stage", "3", "--zero-init"),
    "accumulating": ("--stage", "3", "--gas", "2", "--evaluate", "--save"),
    "offload": ("--stage", "3", "--offload"),
    "hpz": ("--stage", "3", "--hpz", "4"),
    "fp32": ("--stage", "3", "--dtype", "fp32", "--no-overlap"),
}
ELEMENT = {"fp32": 4}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"element": ELEMENT.get(request.param, 2), **zero_jobs.found(*JOBS[request.param])}


@needs_deepspeed
@pytest.mark.slow
class TestOfARealEngine:
    def test_demand_and_prefetch_are_those_of_the_lines(self, job: dict[str, Any]) -> None:
        """The map's rule for stacks: of the two calls in a fetch the first asks for what is needed at once."""
        lines = sorted({call["line"] for call in job["calls"]})
        assert len(lines) == 2
        kinds = dict(zip(lines, ("demand", "prefetch"), strict=True))
        said = Counter((name, kinds[call["line"]]) for call in job["calls"] for name in call["parameters"])
        assert Counter((mark["parameter"], mark["kind"]) for mark in job["gathers"]) == said
        assert set(kinds.values()) == {mark["kind"] for mark in job["gathers"]}

    def test_they_are_where_the_parameters_were(self, job: dict[str, Any]) -> None:
        for mark in job["gathers"]:
            assert mark["bytes"] == job["numels"][mark["parameter"]] * job["element"]
            assert [mark["address"], mark["bytes"]] in job["places"][mark["parameter"]]

    def test_each_is_let_go_of_after_it_came(self, job: dict[str, Any]) -> None:
        marks = job["gathers"]
        assert all(mark["time_us"] <= mark["released_us"] for mark in marks)
        assert [mark["time_us"] for mark in marks] == sorted(mark["time_us"] for mark in marks)
        begin, end = job["phases"][0]["begin_us"], max(phase["end_us"] for phase in job["phases"])
        assert all(begin <= mark["time_us"] <= end for mark in marks)
        assert job["held"] == 0

    def test_no_parameter_has_two_gathers_at_once(self, job: dict[str, Any]) -> None:
        until: dict[str, int] = {}
        for mark in job["gathers"]:
            assert until.get(mark["parameter"], 0) <= mark["time_us"]
            until[mark["parameter"]] = mark["released_us"]

    def test_persistent_ones_say_so(self, job: dict[str, Any]) -> None:
        limit = zero_harness.PERSISTENCE_THRESHOLD
        for mark in job["gathers"]:
            assert mark.get("persistent", False) == (job["numels"][mark["parameter"]] <= limit)

    def test_nothing_went_wrong(self, job: dict[str, Any]) -> None:
        assert job["notes"] == []
        assert job["left_over"] == []


@needs_deepspeed
@pytest.mark.slow
def test_one_rank_gathers_nothing() -> None:
    assert zero_jobs.found("--stage", "3", "--world", "1")["gathers"] == []


# Stand-ins for DeepSpeed's classes.


class Status(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Param:
    def __init__(self, number: int) -> None:
        self.ds_id, self.ds_numel, self.ds_persist = number, 8, False
        self.ds_status, self.ds_tensor = Status.NOT_AVAILABLE, None
        self.address = 0

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return 8 if self.address else 0

    def element_size(self) -> int:
        return 2


class Handle:
    def __init__(self, params: list[Param]) -> None:
        self.params, self.complete = params, False

    def wait(self, handle_dependency: bool = True) -> str:
        for param in [] if self.complete else self.params:
            param.ds_status, param.address = Status.AVAILABLE, 4096 * (param.ds_id + 1)
        self.complete = True
        return f"waited {handle_dependency}"


class OddHandle(Handle):
    def wait(self, **kwargs: Any) -> str:
        return "odd " + super().wait(**kwargs)


class Init:
    def _partition(self, param_list: list[Param], has_been_updated: bool = False) -> str:
        for param in param_list:
            param.ds_status, param.address = Status.NOT_AVAILABLE, 0
        return f"partitioned {has_been_updated}"


class PartitionedParameterCoordinator:
    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> str:
        self.__all_gather_params(current_submodule.params, forward)
        self.__all_gather_params(current_submodule.later, forward)
        if forward is None:
            raise ValueError("a fetch fails")
        return f"fetched {forward}"

    def __all_gather_params(self, params: list[Param], forward: bool) -> None:
        for param in params:
            param.ds_status = Status.INFLIGHT


@pytest.fixture
def stand_ins() -> Iterator[tuple[Any, Any]]:
    coordinator = types.SimpleNamespace(
        PartitionedParameterCoordinator=PartitionedParameterCoordinator,
        iter_params=lambda module, recurse=False: module.params,
    )
    partition = types.SimpleNamespace(Init=Init, ZeroParamStatus=Status, AllGatherCoalescedHandle=Handle)
    gathers.forget()
    gathers.install(coordinator, partition)
    yield coordinator, partition
    gathers.remove()
    gathers.forget()
    notes.NOTES.clear()


def module(*numbers: int, later: tuple[int, ...] = ()) -> Any:
    """A module that has the first parameter itself, and the others from elsewhere."""
    params = [Param(one) for one in numbers]
    own = dict(enumerate(params[:1]))
    return types.SimpleNamespace(params=params, later=[Param(one) for one in later], _parameters=own)


def test_what_the_job_sees_is_unchanged(stand_ins: Any) -> None:
    one = module(1, 2, later=(3,))
    assert PartitionedParameterCoordinator().fetch_sub_module(one, forward=True) == "fetched True"
    assert PartitionedParameterCoordinator().fetch_sub_module(current_submodule=one, forward=False) == "fetched False"
    assert Handle(one.params).wait(handle_dependency=False) == "waited False"
    assert Init()._partition(one.params, has_been_updated=True) == "partitioned True"
    assert Handle.wait.__doc__ is None
    assert Handle.wait.__name__ == "wait"


def test_a_mark_is_made_and_closed(stand_ins: Any) -> None:
    one = module(1, 2, later=(3, 4))
    PartitionedParameterCoordinator().fetch_sub_module(one, True)
    assert gathers.marks({}) == []
    Handle(one.params).wait()
    OddHandle(one.later).wait()  # a class that DeepSpeed or somebody else made of ours, with a `wait` of its own
    Init()._partition(one.params)
    marks = gathers.marks({1: "a", 2: "b", 3: "c"})
    assert [(mark["address"], mark["bytes"], mark["parameter"], mark["kind"]) for mark in marks] == [
        (8192, 16, "a", "demand"),
        (12288, 16, "b", "demand"),
        (16384, 16, "c", "prefetch"),
        (20480, 16, "", "prefetch"),
    ]
    assert [mark["released_us"] is None for mark in marks] == [False, False, True, True]
    Init()._partition(one.later)
    Init()._partition(one.later)
    assert all(mark["released_us"] for mark in gathers.marks({}))
    assert len(gathers.marks({})) == 4


@pytest.mark.parametrize("external", [{}, {"a": 1}, None])
def test_parameters_of_others_that_a_module_asks_for_are_demanded(stand_ins: Any, external: Any) -> None:
    one = module(1, 2)
    one._parameters = {"weight": None}
    if external is not None:
        one._external_params = external
    PartitionedParameterCoordinator().fetch_sub_module(one, True)
    Handle(one.params).wait()
    kind = "prefetch" if external == {} else "demand"
    assert {mark["kind"] for mark in gathers.marks({})} == {kind}


def test_one_that_came_by_an_unknown_way_is_marked_when_it_leaves(stand_ins: Any) -> None:
    one = module(1)
    PartitionedParameterCoordinator().fetch_sub_module(one, True)
    one.params[0].address = 4096
    Init()._partition(one.params)
    assert [(mark["address"], mark["released_us"] is None) for mark in gathers.marks({})] == [(4096, False)]


def test_gathers_outside_a_fetch_are_not_marked(stand_ins: Any) -> None:
    one = module(1)
    Handle(one.params).wait()
    Init()._partition(one.params)
    assert gathers.marks({}) == []


def test_a_failing_fetch_raises_as_before_and_leaves_no_module(stand_ins: Any) -> None:
    one = module(1)
    with pytest.raises(ValueError, match="a fetch fails"):
        PartitionedParameterCoordinator().fetch_sub_module(one, None)  # type: ignore[arg-type]
    assert gathers.WATCH.here.module is None


def test_what_is_not_understood_is_noted_and_not_raised(stand_ins: Any) -> None:
    one = module(1)
    del one.params[0].ds_id
    assert PartitionedParameterCoordinator().fetch_sub_module(one, True) == "fetched True"
    gathers.WATCH.wanted[1] = "demand"
    assert Handle([Param(1)]).wait() == "waited True"
    assert Init()._partition(one.params) == "partitioned False"
    assert all("was not marked: AttributeError" in note for note in notes.NOTES)
    assert notes.NOTES


def test_it_installs_once_and_goes_without_a_trace(stand_ins: Any) -> None:
    ours = Handle.wait, Init._partition, PartitionedParameterCoordinator.fetch_sub_module
    gathers.install(*stand_ins)
    assert (Handle.wait, Init._partition, PartitionedParameterCoordinator.fetch_sub_module) == ours
    gathers.remove()
    assert not any(hasattr(one, "__wrapped__") for one in (Handle.wait, OddHandle.wait, Init._partition))
    assert not hasattr(PartitionedParameterCoordinator.fetch_sub_module, "__wrapped__")


def test_a_method_replaced_after_us_is_left_alone(stand_ins: Any) -> None:
    ours = Handle.wait

    def theirs(self: Handle, handle_dependency: bool = True) -> str:
        return ours(self, handle_dependency)

    Handle.wait = theirs  # type: ignore[method-assign]
    try:
        gathers.remove()
        assert Handle.wait is theirs
    finally:
        Handle.wait = ours.__wrapped__  # type: ignore[method-assign, attr-defined]


def test_a_version_without_the_names_goes_unmarked() -> None:
    gathers.install(types.SimpleNamespace(), types.SimpleNamespace())
    assert notes.NOTES == ["this DeepSpeed's gathers are not where they are looked for: none is marked"]
    notes.NOTES.clear()


def test_marks_are_bounded(stand_ins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathers, "MOST_MARKS", 3)
    gathers.WATCH.marks = collections.deque(maxlen=3)
    one = module(1)
    for _ in range(5):
        PartitionedParameterCoordinator().fetch_sub_module(one, True)
        Handle(one.params).wait()
        Init()._partition(one.params)
    assert len(gathers.marks({})) == 3
    assert notes.NOTES == ["2 gathers before the last 3 are not listed"]


def test_no_parameter_is_kept_alive(stand_ins: Any) -> None:
    one = module(1, later=(2,))
    PartitionedParameterCoordinator().fetch_sub_module(one, True)
    Handle(one.params).wait()
    alive = weakref.ref(one.params[0]), weakref.ref(one.later[0])
    del one
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
