"""DeepSpeed ZeRO run for real, as rank 0 of eight on CPU (see zero_harness.py): what memtrace says against the engine.

The first half of this file needs no rules: it checks the harness, and the map of DeepSpeed that the rules stand on.
"""

from __future__ import annotations

import json
import pickle
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle
import pytest
import zero_harness

import memtrace
from memtrace.analysis.blame import BlockFacts, Row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not zero_harness.is_available(), reason="needs torch and deepspeed"),
]

JOBS = {
    "stage 1": ("--stage", 1),
    "stage 2": ("--stage", 2),
    "stage 3": ("--stage", 3),
    "stage 3, zero.Init": ("--stage", 3, "--zero-init"),
}
BF16, FP32 = 2, 4
Role = tuple[str, str, int, int]  # role, name, address, bytes

# Section 2.2 of the map: from this DeepSpeed on, the lines of demanded and prefetched gathers in fetch_sub_module.
FETCH_LINES = [
    ((0, 10, 2), (284, 379)),
    ((0, 13, 0), (285, 380)),
    ((0, 13, 2), (290, 385)),
    ((0, 14, 3), (291, 386)),
    ((0, 15, 3), (296, 391)),
    ((0, 15, 4), (306, 401)),
    ((0, 16, 0), (305, 400)),
    ((0, 16, 3), (308, 406)),
    ((0, 16, 4), (314, 412)),
    ((0, 16, 8), (315, 413)),
    ((0, 17, 0), (317, 415)),
    ((0, 18, 6), (362, 460)),
    ((0, 19, 2), (365, 463)),
    ((0, 19, 3), (381, 484)),
]
LINEAR_KEEPS_NOTHING = (0, 19, 4)  # from here on a released weight is freed also without zero.Init


@dataclass
class Job:
    """One finished job."""

    path: Path
    truth: dict[str, Any]

    @cached_property
    def snapshot(self) -> memtrace.Snapshot:
        return memtrace.load(self.path, cache=False)

    @cached_property
    def raw(self) -> dict[str, Any]:
        found: dict[str, Any] = pickle.loads(self.path.read_bytes())
        return found

    @property
    def stage(self) -> int:
        stage: int = self.truth["stage"]
        return stage

    @property
    def deepspeed(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.truth["versions"]["deepspeed"].split(".")[:3])

    @property
    def end(self) -> list[Role]:
        roles: list[Role] = self.truth["roles"]
        return roles

    def moment(self, what: str) -> tuple[int, list[Role]]:
        """The event and the roles at a mark of the last step."""
        return next((item["event"], item["roles"]) for item in self.truth["earlier"] if item["what"] == what)

    @property
    def world(self) -> int:
        world: int = self.truth["world"]
        return world

    def partition(self) -> int:
        """Elements of one rank's partition, with padding."""
        numels = self.truth["numels"].values()
        if self.stage == 3:
            return sum(-(-numel // self.world) for numel in numels)
        return -(-sum(numels) // (2 * self.world)) * 2

    def live(self) -> list[dict[str, Any]]:
        """Raw blocks allocated at the end."""
        blocks = [block for segment in self.raw["segments"] for block in segment["blocks"]]
        return [block for block in blocks if block["state"] == "active_allocated"]

    def rows(self, at: str | int) -> list[tuple[BlockFacts, Row]]:
        """The blocks of a moment, without what the allocator added to them."""
        rows = self.snapshot.blame(at=at, by="block").rows
        return [(row.block, row) for row in rows if row.block is not None and not row.category.startswith("alloc.")]

    def stack_counts(self) -> Counter[tuple[tuple[str, int, str], ...]]:
        """How often each stack allocated."""
        return Counter(
            tuple((frame["filename"], frame["line"], frame["name"]) for frame in event["frames"])
            for event in self.raw["device_traces"][0]
            if event["action"] == "alloc"
        )


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(*zero_harness.run(tmp_path_factory.mktemp("zero"), *JOBS[request.param]))


def bytes_of(roles: Iterable[Role], *wanted: str) -> int:
    """Bytes that the roles cover together; views of one block count once."""
    total = end = 0
    for start, size in sorted((address, size) for role, _, address, size in roles if role in wanted):
        total += max(start + size - max(start, end), 0)
        end = max(end, start + size)
    return total


# The harness itself.


def test_is_a_legal_snapshot(job: Job) -> None:
    replayed = oracle.replay(job.raw)
    assert oracle.block_map(replayed.segments()) == oracle.block_map(oracle.segments_of(job.raw))
    assert job.snapshot.complete
    verdict = job.snapshot.verify(job.truth["stats"])
    assert not verdict.failed
    assert verdict.equal == verdict.compared == 111


def test_everything_the_engine_holds_is_in_a_live_block(job: Job) -> None:
    assert job.truth["unplaced"] == []
    replayed = oracle.replay(job.raw)
    for at in ("end", "forward", "backward"):
        event, roles = (len(replayed.events) - 1, job.end) if at == "end" else job.moment(at)
        ranges = [(block["addr"], block["addr"] + block["requested"]) for block in replayed.live_at(event)]
        for role, name, address, size in roles:
            inside = [start for start, stop in ranges if start <= address and address + size <= stop]
            assert len(inside) == 1, (at, role, name)


def test_stacks_look_like_those_of_a_gpu(job: Job) -> None:
    stacks = job.stack_counts()
    names = {name for stack in stacks for _, _, name in stack}
    assert not names & {"_engine_run_backward", "__torch_dispatch__", "note", "_allocate", "fetch", "gather", "_used"}
    assert names >= {"<module>", "forward", "step", "initialize"}
    assert stacks[()] > 100, "C++ autograd nodes have no Python stack"
    roots = {stack[-1][::2] for stack in stacks if stack}
    hooks = {(file, name) for file, name in roots if name != "<module>"}
    assert hooks or job.stage == 1, "hooks run on the thread of backward"
    assert all("deepspeed" in file or file.endswith("torch/autograd/function.py") for file, _ in hooks)


# The map of DeepSpeed (shared/spec/deepspeed-memory-map.md).


def test_gathers_come_from_the_lines_of_the_table(job: Job) -> None:
    lines = set()
    for stack in job.stack_counts():
        frames = [frame for frame in stack if frame[2] not in ("wrapped_fn", "decorate_context")]
        for (_, _, inner), (file, line, name) in pairwise(frames):
            if inner == "__all_gather_params" and name.endswith(("fetch_sub_module", "_fetch_sub_module_impl")):
                assert file.endswith("partitioned_param_coordinator.py")
                lines.add(line)
    if job.stage < 3:
        assert not lines
        return
    known = bisect_right(FETCH_LINES, job.deepspeed, key=lambda item: item[0])
    assert known, "an older DeepSpeed than the table has"
    demand, prefetch = FETCH_LINES[known - 1][1]
    assert lines == {demand, prefetch}
    # and so says the other rule: only the fetched module's own parameters are demanded
    assert job.truth["fetch_lines"] == {"demand": [demand], "prefetch": [prefetch]}


def test_persistent_memory_is_what_theory_says(job: Job) -> None:
    partition = job.partition()
    assert bytes_of(job.end, "param.master") == FP32 * partition
    assert bytes_of(job.end, "optim.state.exp_avg") == FP32 * partition
    assert bytes_of(job.end, "optim.state.exp_avg_sq") == FP32 * partition
    numels = job.truth["numels"].values()
    if job.stage == 3:
        persistent = [numel for numel in numels if numel <= zero_harness.PERSISTENCE_THRESHOLD]
        assert len(persistent) > 10
        assert bytes_of(job.end, "param.flat") == BF16 * partition
        assert bytes_of(job.end, "param.flat", "param.partition") == BF16 * partition, "one block for both"
        assert bytes_of(job.end, "param.gathered") == BF16 * sum(persistent)
        assert bytes_of(job.end, "grad.partition") == BF16 * partition
        assert bytes_of(job.end, "grad.bucket") == BF16 * zero_harness.BUCKETS["reduce_bucket_size"]
    else:
        assert bytes_of(job.end, "param.flat") == BF16 * partition * job.world
        assert bytes_of(job.end, "param.flat", "param") == BF16 * partition * job.world, "views of the flat buffer"
        assert bytes_of(job.end, "grad", "grad.partition", "grad.bucket") == 0
    assert sum(numels) < partition * job.world, "sizes are odd, so there is padding"


def test_gradients_after_backward_are_what_theory_says(job: Job) -> None:
    _, roles = job.moment("backward")
    assert bytes_of(roles, "grad.partition") == BF16 * job.partition()


def test_only_older_releases_keep_released_weights(job: Job) -> None:
    retained = job.truth["retained_bytes"]
    if job.stage == 3 and not job.truth["zero_init"] and job.deepspeed < LINEAR_KEEPS_NOTHING:
        padding = retained[0] - job.truth["linear_bytes"]
        assert 0 <= padding < 1000, "all of them, the first time"
    else:
        assert retained == [0] * job.truth["steps"]


# The rules.


def test_rows_sum_to_what_is_live(job: Job) -> None:
    blame = job.snapshot.blame(at="end", by="block")
    assert blame.total_bytes == sum(block["size"] for block in job.live()) == sum(row.bytes for row in blame.rows)


def expected(job: Job, role: str) -> tuple[str, ...] | None:
    """Categories that a block of this role may have; None: not compared."""
    whole = "param.partition" if job.stage == 3 else "param.full"
    # Whether any are retained is decided for a step, so that those gathered anew in time for backward count too.
    retained = ("param.retained",) if job.truth["retained_bytes"][-1] else ()
    if role.startswith("optim.state."):
        return ("optim.state",)
    return {
        "param": ("param.full",),
        "param.flat": (whole,),
        "param.partition": ("param.partition",),
        "param.gathered": ("param.persistent", "param.gathered", "param.prefetched", *retained),
        "param.master": ("param.master",),
        "grad": ("grad.full", "grad.partition"),
        "grad.partition": ("grad.partition", "grad.full"),
        "grad.bucket": ("grad.bucket",),
    }.get(role)


def wrong_categories(job: Job, at: str | int, roles: Iterable[Role]) -> Counter[tuple[str, str, str]]:
    """(role, category, innermost frames) of blocks that have a category they may not have, and how many there are."""
    blame = job.snapshot.blame(at=at, by="block")
    rows = [(row.block, row) for row in blame.rows if row.block is not None and not row.category.startswith("alloc.")]
    wrong: Counter[tuple[str, str, str]] = Counter()
    for role, _, address, _ in roles:
        allowed = expected(job, role)
        for block, row in rows:
            if allowed and block.address <= address < block.address + block.size and row.category not in allowed:
                frames = [f"{Path(f.filename).name}:{f.line} {f.name}" for f in blame.frames(row)[:4]]
                wrong[role, row.category, " < ".join(frames)] += 1
    return wrong


def test_categories_at_the_end(job: Job) -> None:
    assert not wrong_categories(job, "end", job.end)


def test_persistent_parameters_are_told_from_gathered_ones(job: Job) -> None:
    """After a step DeepSpeed gathers these by themselves, so their stack tells."""
    gathered = {address for role, _, address, _ in job.end if role == "param.gathered"}
    assert bool(gathered) == (job.stage == 3)
    found = Counter(row.category for block, row in job.rows("end") if block.address in gathered)
    assert set(found) <= {"param.persistent"}, found


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_categories_in_the_last_step(job: Job, what: str) -> None:
    at, roles = job.moment(what)
    assert not wrong_categories(job, at, roles)


def test_retained_parameters_are_those_that_were_released(job: Job) -> None:
    at, roles = job.moment("forward")
    found = sum(block.requested for block, row in job.rows(at) if row.category == "param.retained")
    retained = job.truth["retained_bytes"][-1]
    assert retained <= found <= (retained + bytes_of(roles, "param.gathered") if retained else 0)


def test_prefetched_parameters_are_told_from_demanded_ones(job: Job) -> None:
    """In the last step: the first has no prefetch."""
    start = next(event for mark, event in job.truth["marks"] if mark == f"step {job.truth['steps'] - 2}")
    gathers = {gather["event"]: gather for gather in job.truth["gathers"] if gather["event"] > start}
    assert bool(gathers) == (job.stage == 3)
    found: Counter[tuple[str, str]] = Counter()
    for event, gather in gathers.items():
        category = next(row.category for block, row in job.rows(event) if block.born == event)
        found[gather["kind"], category] += 1
    by_kind = {"demand": "param.gathered", "prefetch": "param.prefetched"}
    by_life = {"param.persistent", "param.retained"}
    assert all(category in {by_kind[kind], *by_life} for kind, category in found), found


def test_memory_of_no_known_owner_is_small(job: Job) -> None:
    """At the end all is DeepSpeed's: what has no category can only be flags and scalars."""
    unknown = sum(row.bytes for _, row in job.rows("end") if row.category == "unknown")
    assert unknown <= 2048, json.dumps(sorted(Counter(row.category for _, row in job.rows("end")).items()))
