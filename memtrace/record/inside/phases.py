"""What the job is doing, and in which step: noted with the trace's clock, and told to torch where it keeps notes."""

from __future__ import annotations

import collections
import functools
import threading
import time
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional

from .notes import guard

_MOST_NOTES = 400_000
_NESTED = {"forward": ("forward", "eval", "backward"), "eval": ("eval", "backward", "forward"), "init": ("init",)}
"""A phase that begins inside one of these is a part of it: recomputation in backward, the engine's own model."""


class PhaseNote(NamedTuple):
    """One stretch of time, in microseconds since 1970."""

    phase: str
    step: Optional[int]
    begin_us: int
    end_us: int
    source: str


class Token:
    """An open stretch; `owner` is whose it is, so that a second beginning of the same closes the first."""

    __slots__ = ("annotation", "begin_us", "owner", "phase", "source", "step")

    def __init__(self, phase: str, step: Optional[int], source: str, owner: int) -> None:
        self.phase, self.step, self.source, self.owner = phase, step, source, owner
        self.begin_us = now_us()
        self.annotation: Any = None


class PhaseLog:
    """The phases of one process. Marks come from the thread that trains; those of other threads are not taken.

    `on_step` is called with the number of each step whose optimizer has run, on the thread that trains; `on_next`, if
    it is set, with the number of each further step when it begins.
    """

    def __init__(self, on_step: Optional[Callable[[int], None]] = None) -> None:
        self.notes: Deque[PhaseNote] = collections.deque(maxlen=_MOST_NOTES)
        self.dropped = 0
        self.step = 0
        self.on_step = on_step
        self.on_next: Optional[Callable[[int], None]] = None
        self._stepped = False
        self._open: List[Token] = []
        self._thread: Optional[int] = None
        self._set_text: Optional[Callable[[str], Any]] = None
        self._annotate: Optional[Callable[[str], Any]] = None
        self._texts: Dict[Any, str] = {}

    def tell_torch(self, set_text: Optional[Callable[[str], Any]], annotate: Optional[Callable[[str], Any]]) -> None:
        """From now on marks are also written into the trace: `set_text` labels what this thread allocates, `annotate`
        makes a named range."""
        self._set_text, self._annotate = set_text, annotate
        self._say()

    @property
    def steps_done(self) -> int:
        """How many steps have had their optimizer's step."""
        return self.step + self._stepped

    @property
    def current(self) -> Optional[str]:
        """The innermost open phase."""
        return self._open[-1].phase if self._open else None

    @guard
    def begin(self, phase: str, source: str, owner: int = 0) -> Optional[Token]:
        """Opens a phase; None when it says nothing new. Give the result to `end`."""
        here = threading.get_ident()
        if not self._open:
            self._thread = here
        elif here != self._thread:
            return None
        if owner:
            self.close_stale(owner)
        if self.current is not None and self.current in _NESTED.get(phase, (phase,)):
            return None
        if self._stepped and phase in ("forward", "backward"):
            self.step += 1
            self._stepped = False
            for one in self._open:  # a closure: the optimizer's step that calls it is of the same round
                one.step = self.step if one.phase == "step" else one.step
            if self.on_next is not None:
                self.on_next(self.step)
        inside = phase in ("forward", "backward", "step")
        token = Token(phase, self.step if inside or self._open else None, source, owner)
        self._open.append(token)
        if self._annotate is not None:
            token.annotation = self._annotate(f"memtrace: {self.text()}")
        self._say()
        return token

    @guard
    def end(self, token: Optional[Token]) -> None:
        """Closes it, and what was left open inside it by an exception."""
        if token not in self._open:
            return
        now = now_us()
        while self._open:
            last = self._open.pop()
            if last.annotation is not None:
                last.annotation.__exit__(None, None, None)
            self.dropped += len(self.notes) == self.notes.maxlen
            self.notes.append(PhaseNote(last.phase, last.step, last.begin_us, now, last.source))
            if last is token:
                break
        self._say()

    @guard
    def step_done(self) -> None:
        """The optimizer has run: the next forward or backward belongs to the next step."""
        if self._stepped:
            return
        self._stepped = True
        if self.on_step is not None:
            self.on_step(self.step)

    def close_stale(self, owner: int) -> None:
        """Closes what `owner` began and never ended, because an exception was caught further out."""
        for token in [token for token in self._open if token.owner == owner]:
            self.end(token)

    def so_far(self) -> List[PhaseNote]:
        """All stretches, the open ones as if they ended now."""
        now = now_us()
        still = [PhaseNote(one.phase, one.step, one.begin_us, now, one.source) for one in self._open]
        return [*self.notes, *still]

    def label(self) -> Optional[Callable[[], None]]:
        """What gives the thread that calls it the label of this moment; None where torch keeps no labels."""
        set_text, text = self._set_text, self.text()
        if set_text is None:
            return None

        def label() -> None:
            set_text(text)

        return label

    def text(self, module: str = "") -> str:
        """What an allocation of this moment is labelled with: `phase=forward;step=3`."""
        top = self._open[-1] if self._open else None
        key = (top.phase if top else "", top.step if top else None, module)
        found = self._texts.get(key)
        if found is None:
            parts = [f"phase={key[0]}"] if key[0] else []
            parts += [f"step={key[1]}"] if key[1] is not None else []
            parts += [f"module={module}"] if module else []
            if len(self._texts) > 10_000:
                self._texts.clear()
            found = self._texts[key] = ";".join(parts)
        return found

    def _say(self) -> None:
        if self._set_text is not None:
            self._set_text(self.text())


def marked(
    original: Callable[..., Any], phases: PhaseLog, phase: str, source: str, is_compiling: Callable[[], bool]
) -> Callable[..., Any]:
    """A function whose calls are stretches of `phase`. What it raises goes through untouched."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        token = phases.begin(phase, source)
        try:
            return original(*args, **kwargs)
        finally:
            phases.end(token)

    return wrapped


def now_us() -> int:
    """Microseconds since 1970, the clock of torch's traces."""
    return time.time_ns() // 1000
