"""What a rule is. Rules are data: the modules of `memtrace.attribution.rules` list them, one module a library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from memtrace.timeline import Phase
from memtrace.timeline.callsites import Function


class By(IntEnum):
    """What decides the category of a block whose stack a rule matched; all but STACK look at the block itself too."""

    STACK = 0
    ACTIVATION = 1
    LOGITS = 2
    OPTIMIZER = 3
    BACKWARD = 4
    GRADIENT = 5
    GATHER = 6
    WAIT = 7


BY_TEXT = {
    By.STACK: "the stack alone",
    By.ACTIVATION: "its life: saved if it is held when backward starts, else a temporary",
    By.LOGITS: "its phase: made in backward it is a temporary, before that it belongs to the loss",
    By.OPTIMIZER: "its life: a state if it is held when the step is over, else a temporary",
    By.BACKWARD: "its life: a gradient if it is held when the optimizer steps, else a temporary",
    By.GRADIENT: "its life: a gradient if it is held when the optimizer steps, else a bucket",
    By.GATHER: "its life: retained if held past the forward yet gathered again, persistent if held past the backward",
    By.WAIT: "the fetch it completes, by order and size; then its life",
}
"""What `memtrace rules` says of each."""

OUTCOMES = {
    By.ACTIVATION: ("act.saved", "act.checkpoint", "fwd.temp", "bwd.temp"),
    By.LOGITS: ("act.logits", "bwd.temp"),
    By.OPTIMIZER: ("optim.state", "optim.temp"),
    By.BACKWARD: ("grad.full", "bwd.temp"),
    By.GRADIENT: ("grad.partition", "grad.bucket"),
    By.GATHER: ("param.gathered", "param.prefetched", "param.persistent", "param.retained"),
    By.WAIT: ("param.gathered", "param.prefetched", "param.persistent", "param.retained"),
}
"""Categories that a rule so decided may give, beside its own."""


class Rank(IntEnum):
    """Of the rules that match the frames of a stack the lowest rank decides; of equals the innermost frame.

    The user's own rules are matched apart (`user_match`): the first in their order decides, wherever its frame is.
    """

    USER = -1
    DECIDES = 0
    FALLBACK = 1
    MODULE = 2
    LAST = 3


def lines(text: str) -> tuple[tuple[int, int], ...]:
    """(first, last) lines, from "312-316 338"."""
    parts = (span.partition("-") for span in text.split())
    return tuple((int(first), int(last or first)) for first, _, last in parts)


@dataclass(frozen=True, slots=True)
class Site:
    """One of several call sites of a function, in their order in the file, with a category of its own.

    `lines`: where (first, last) that statement was in releases that were read; they help where a recording does not
    show all sites. `optional`: some jobs do not reach it.
    """

    category: str
    label: str = ""
    lines: tuple[tuple[int, int], ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """Blocks whose stack has a frame in `where` are of this `category`, if the other conditions hold.

    `child`: the next frame inwards (decorators skipped) is in one of these. `inside`: a frame further out is.
    `outermost`: no frame further out is in `where`. `direct`: no frame of the same package further in.
    `sites`: the category follows from the order of the call sites of the function; lines at most `gap` apart are one.
    `by`: what of the block decides as well. `since`, `until`: the releases that have it. `knob`: the setting that
    changes the bytes. `label`: more exact than the category's own. `note`: why, for `memtrace rules`.
    The user's own rules alone have `min_bytes`, `max_bytes` (of the requested size), `phases` (at birth; none: any),
    `lines` (first and last, of the frame; none: any) and `was` (what ours say of the block; none: anything).
    """

    id: str
    category: str
    where: Function
    note: str
    by: By = By.STACK
    rank: Rank = Rank.DECIDES
    child: tuple[Function, ...] = ()
    inside: tuple[Function, ...] = ()
    outermost: bool = False
    direct: bool = False
    sites: tuple[Site, ...] = ()
    gap: int = 0
    label: str = ""
    since: str = ""
    until: str = ""
    knob: str = ""
    min_bytes: int = 0
    max_bytes: int | None = None
    phases: tuple[Phase, ...] = ()
    lines: tuple[tuple[int, int], ...] = ()
    was: tuple[str, ...] = ()

    @property
    def categories(self) -> frozenset[str]:
        """All that it may give. "unknown" stands for what the recording itself says."""
        return frozenset((self.category, *OUTCOMES.get(self.by, ()), *(site.category for site in self.sites)))

    @property
    def looks_at_the_block(self) -> bool:
        """Whether a block whose stack matches may still not be of this rule."""
        return bool(self.min_bytes or self.phases or self.was) or self.max_bytes is not None
