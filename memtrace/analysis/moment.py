"""`--at peak|end|oom|EVENT|1.42s`: which event is meant."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np

from memtrace.allocator import Replay, series
from memtrace.errors import QuestionError
from memtrace.model import Action, Trace

Of = Literal["allocated", "reserved", "requested", "active"]
COUNTER: dict[str, str] = {of: f"{of}_bytes" for of in ("allocated", "reserved", "requested", "active")}

_SECONDS = re.compile(r"([0-9]{1,18}(?:\.[0-9]*)?|\.[0-9]+)s", re.ASCII)
_EVENT = re.compile(r"-1|[0-9][0-9,]{0,24}")


def peak_event(replay: Replay, of: str = "allocated") -> int:
    """The first event after which the counter is highest; -1 when that is the state before the first event."""
    return int(series(replay, COUNTER[of]).argmax()) - 1


def event_at(at: str, of: str, replay: Replay, trace: Trace) -> int:
    """The event that `at` names, -1 being before the first. Raises QuestionError if there is none."""
    last = replay.events - 1
    if at == "peak":
        return peak_event(replay, of)
    if at == "end":
        return last
    if at == "oom":
        ooms = np.flatnonzero(trace.action[: replay.events] == Action.OOM)
        if not len(ooms):
            raise QuestionError("no out-of-memory event in this trace", hint="Try --at peak or --at end.")
        return int(ooms[-1])
    if seconds := _SECONDS.fullmatch(at):
        return _event_at_time(float(seconds[1]), replay, trace)
    if _EVENT.fullmatch(at):
        event = int(at.replace(",", ""))
        if event > last:
            raise QuestionError(
                f"no event {at} in this trace",
                hint=f"Events are 0 to {last}; -1 is before the first." if last >= 0 else "It has none.",
            )
        return event
    raise QuestionError(
        f"--at takes peak, end, oom, an event number or a time, not {at!r}",
        hint="For example --at 52840 or --at 1.42s (seconds since the first event).",
    )


def _event_at_time(seconds: float, replay: Replay, trace: Trace) -> int:
    """The last event no later than `seconds` after the first one."""
    if trace.time_us is None:
        raise QuestionError("this trace has no times (torch before 2.2)", hint="Name an event number instead.")
    if not replay.events:
        raise QuestionError("this trace has no events", hint="Only --at end can be answered.")
    span = (int(trace.time_us[replay.events - 1]) - int(trace.time_us[0])) / 1e6
    if seconds > span:
        raise QuestionError(f"the trace ends after {span:,.3f} s", hint="Use --at end for its last event.")
    wanted = int(trace.time_us[0]) + round(seconds * 1e6)
    return int(np.searchsorted(trace.time_us[: replay.events], wanted, side="right")) - 1
