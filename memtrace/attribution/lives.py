"""Decisions by a block's life: when it was born and let go of, against forward, backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator import Replay
from memtrace.attribution.draft import Draft, Rows
from memtrace.attribution.matcher import NO_RULE, StackVerdicts
from memtrace.attribution.rule import By, Rank, Rule
from memtrace.attribution.rules.torch import (
    FRAMELESS,
    OWN_FORWARD,
    OWN_INPUT,
    OWN_LOSS,
    OWN_STEP,
    PYTHON_IN_BACKWARD,
)
from memtrace.model import Action, SnapshotData, Trace
from memtrace.model.stacks import NOT_RECORDED
from memtrace.timeline import Phase, Timeline
from memtrace.timeline.timeline import NEVER

_NOTHING = 255
_RECOMPUTED = "recomputed"
_KEPT_IN_EVALUATION = "kept with its graph, no backward came"


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What decisions look at, one row a block: events of birth and of being let go of, and the phase at birth.

    `until` is the event at which the recording looks at what is still alive: its out-of-memory event, else the end.
    `by` is a `By` code (255: no rule, or born before the recording), `depth` counts frames of each stack.
    """

    born: NDArray[np.int64]
    freed: NDArray[np.int64]
    requested: NDArray[np.int64]
    stack: NDArray[np.int32]
    run: NDArray[np.int64]
    phase: NDArray[np.uint8]
    by: NDArray[np.uint8]
    timeline: Timeline
    trace: Trace
    replay: Replay
    verdicts: StackVerdicts
    rules: Sequence[Rule]
    depth: NDArray[np.int64]
    events: int
    until: int

    @classmethod
    def of(
        cls, data: SnapshotData, replay: Replay, timeline: Timeline, verdicts: StackVerdicts, rules: Sequence[Rule]
    ) -> Context:
        """Columns for all blocks of a replay."""
        blocks, trace = replay.lifetimes, data.trace(replay.device)
        run = timeline.runs_in_order(blocks.born)
        phase = timeline.phase[run] if len(timeline) else np.zeros(len(blocks), np.uint8)
        by_rule = np.array([int(rule.by) for rule in rules] + [_NOTHING], np.uint8)
        by_stack = np.append(by_rule[verdicts.rule], np.uint8(_NOTHING))
        by = by_stack[blocks.stack]
        by[: np.searchsorted(blocks.born, 0)] = _NOTHING  # from before the recording: no life to look at
        ooms = np.flatnonzero(trace.action == Action.OOM) if trace.device_free else np.zeros(0, np.int64)
        return cls(
            born=blocks.born,
            freed=blocks.freed,
            requested=blocks.requested,
            stack=blocks.stack,
            run=run,
            phase=phase,
            by=by,
            timeline=timeline,
            trace=trace,
            replay=replay,
            verdicts=verdicts,
            rules=rules,
            depth=np.asarray(np.diff(data.stacks.offsets), np.int64),
            events=replay.events,
            until=int(ooms[-1]) if len(ooms) else replay.events - 1,
        )

    def rows(self, by: By) -> Rows:
        """Blocks born in the recording whose rule is decided so."""
        return np.flatnonzero(self.by == by)

    def outlives(self, rows: Rows, event: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each block was still held at an event of its own; `NEVER`: whether it is held at the end."""
        return np.where(event == NEVER, self.freed[rows] > self.until, self.freed[rows] >= event)


def decide(draft: Draft, context: Context, heads: NDArray[np.bool_], heads_rule: int) -> None:
    """Every block whose rule needs its life, and every block that no rule knows but whose phase says enough."""
    if not len(context.timeline):
        return
    _heads(draft, context, heads, heads_rule)
    _activations(draft, context, context.rows(By.ACTIVATION))
    _logits(draft, context, context.rows(By.LOGITS))
    _optimizer(draft, context, context.rows(By.OPTIMIZER))
    _gradients(draft, context, context.rows(By.GRADIENT))
    _backward(draft, context, context.rows(By.BACKWARD))
    _without_rule(draft, context)


def _heads(draft: Draft, context: Context, heads: NDArray[np.bool_], rule: int) -> None:
    """A linear layer called by the function that calls the loss."""
    if not heads.any():
        return
    by_stack = np.append(heads, False)
    rows = np.flatnonzero(by_stack[context.stack] & (context.born >= 0))
    draft.rule[rows] = rule
    context.by[rows] = By.LOGITS


def _activations(draft: Draft, context: Context, rows: Rows) -> None:
    phase = context.phase[rows]
    base = np.array([rule.category == "act.checkpoint" for rule in context.rules] + [False])
    forward = rows[phase == Phase.FORWARD]
    saved = context.outlives(forward, context.timeline.backward_from[context.run[forward]])
    checkpoint = base[draft.rule[forward]]
    draft.decide(forward[saved & ~checkpoint], "act.saved")
    draft.decide(forward[saved & checkpoint], "act.checkpoint")
    draft.decide(forward[~saved], "fwd.temp")
    evaluation = rows[phase == Phase.EVAL]
    kept = context.freed[evaluation] >= context.timeline.over[context.run[evaluation]]
    draft.decide(evaluation[kept], "act.saved", label=_KEPT_IN_EVALUATION)
    draft.decide(evaluation[~kept], "fwd.temp")
    draft.decide(rows[phase == Phase.BACKWARD], "bwd.temp", label=_RECOMPUTED)
    other = rows[(phase != Phase.FORWARD) & (phase != Phase.EVAL) & (phase != Phase.BACKWARD)]
    gone = context.freed[other] <= context.timeline.over[context.run[other]]
    draft.decide(other[gone], "fwd.temp")
    draft.decide(other[~gone], "act.saved")


def _logits(draft: Draft, context: Context, rows: Rows) -> None:
    backward = context.phase[rows] == Phase.BACKWARD
    draft.decide(rows[~backward], "act.logits")
    draft.decide(rows[backward], "bwd.temp", label="")


def _optimizer(draft: Draft, context: Context, rows: Rows) -> None:
    over = context.timeline.over[context.run[rows]]
    lasting = context.freed[rows] >= over
    unfinished = over >= context.events  # the recording ends in this step: the other steps of the same stack tell
    lasting[unfinished] = np.isin(context.stack[rows[unfinished]], context.stack[rows[lasting & ~unfinished]])
    draft.decide(rows[lasting], "optim.state")
    draft.decide(rows[~lasting], "optim.temp")


def _survivors(draft: Draft, context: Context, rows: Rows) -> NDArray[np.bool_]:
    """Which of the blocks born in backward live into the optimizer's step: gradients.

    Where the recording ends before the step, by size: as the gradients of earlier steps, else as parameters.
    """
    step = context.timeline.step_from[context.run[rows]]
    lives_on = context.freed[rows] >= step
    cut = step == NEVER
    if not cut.any():
        return lives_on
    alive = context.freed[rows] > context.until
    sizes = np.unique(context.requested[rows[lives_on & ~cut]])
    if not len(sizes):
        whole = (draft.category == draft.code("param.full")) | (draft.category == draft.code("param.partition"))
        sizes = np.unique(context.requested[whole])
    finished = context.timeline.over[context.run[rows]] <= context.until
    lives_on[cut] = (alive & (finished | np.isin(context.requested[rows], sizes)))[cut]
    return lives_on


def _gradients(draft: Draft, context: Context, rows: Rows) -> None:
    lives_on = _survivors(draft, context, rows)
    for kept, category in ((True, "grad.partition"), (False, "grad.bucket")):
        draft.decide(rows[lives_on == kept], category)


def _backward(draft: Draft, context: Context, rows: Rows) -> None:
    """Born where autograd runs: temporaries, or gradients. Outside backward the stack says what little is known."""
    inside = rows[context.phase[rows] == Phase.BACKWARD]
    lives_on = _survivors(draft, context, inside)
    draft.decide(inside[lives_on], "grad.full")
    draft.decide(inside[~lives_on], "bwd.temp")


def _without_rule(draft: Draft, context: Context) -> None:
    """Blocks of stacks that no rule knows: frameless ones in backward, and the script's own."""
    rows = np.flatnonzero((draft.rule == NO_RULE) & (context.born >= 0) & (context.stack != NOT_RECORDED))
    if not len(rows):
        return
    phase = context.phase[rows]
    python = context.verdicts.python[context.stack[rows]] > 0
    backward = phase == Phase.BACKWARD
    for which, rule in ((~python, FRAMELESS), (python, PYTHON_IN_BACKWARD)):
        chosen = rows[backward & which]
        draft.apply(chosen, rule)
        _backward(draft, context, chosen)
    _own(draft, context, rows[python & ((phase == Phase.FORWARD) | (phase == Phase.EVAL))])
    step = rows[python & (phase == Phase.STEP)]
    gone = context.freed[step] <= context.timeline.over[context.run[step]]
    draft.apply(step[gone], OWN_STEP)


def _own(draft: Draft, context: Context, rows: Rows) -> None:
    """The script's own tensors around a model's call: inputs before it, the loss after it."""
    modules = np.array([rule.rank == Rank.MODULE or rule.by == By.GATHER for rule in context.rules] + [False])
    calls = np.sort(context.born[modules[draft.rule] & (context.phase != Phase.BACKWARD)])
    end = np.append(context.timeline.start[1:], context.events)[context.run[rows]]
    start = context.timeline.start[context.run[rows]]
    after = np.searchsorted(calls, context.born[rows])
    padded = np.append(calls, NEVER)
    comes = padded[after] < end
    went = np.where(after > 0, padded[after - 1], -1) >= start
    draft.apply(rows[comes], OWN_INPUT)
    draft.apply(rows[~comes & went], OWN_LOSS)
    alone = rows[~comes & ~went]
    draft.apply(alone, OWN_FORWARD)
    _activations(draft, context, alone)
