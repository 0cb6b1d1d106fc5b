"""The sentence that opens an answer: how much, of what, when, in which job."""

from __future__ import annotations

from memtrace.analysis.blame import Blame
from memtrace.analysis.frames import display_frame, own_frames
from memtrace.analysis.job import Job, headline
from memtrace.model import Action, SnapshotData
from memtrace.timeline import in_words
from memtrace.units import format_bytes, format_seconds

_NAMES = {"peak": "Peak", "end": "End", "oom": "Out of memory"}


def sentence(answer: Blame, when: str, job: str, units: str = "auto") -> str:
    """`Peak: 55.21 GiB allocated, in backward of step 1 (event 52,840 of 66,942, 12.345 s in)  (ZeRO-3, torch 2.11)`.

    `when`: as it was asked for (peak, end, oom, or anything else); `job`: in words.
    """
    total = format_bytes(answer.total_bytes, units)
    slack = format_bytes(answer.slack_bound, units)
    bound = f" (up to {slack} more: block sizes not all known)" if answer.slack_bound else ""
    phase, where = in_words(answer.phase, answer.step), moment(answer)
    where = f", in {phase} ({where})" if phase else f", {where}"
    return f"{_NAMES.get(when, 'Then')}: {total} {answer.of}{bound}{where}  ({job})"


def moment(answer: Blame) -> str:
    """The event and the time: `event 52,840 of 66,942, 12.345 s in`."""
    if answer.event < 0:
        return "before the first event" if answer.events else "when the snapshot was taken"
    where = f"event {answer.event:,} of {answer.events:,}"
    if answer.time_us is None or answer.first_us is None:
        return where
    return f"{where}, {format_seconds(answer.time_us - answer.first_us)} in"


def job_in_words(data: SnapshotData, job: Job | None, device: int) -> str:
    """`ZeRO-3, 8 ranks, torch 2.10-2.11`, as far as the file tells; the device where there are several."""
    parts = [] if job is None else [headline(job)]
    parts.append(str(data.torch))
    if len(data.devices) > 1:
        parts.append(f"device {device}")
    return ", ".join(parts)


def request_in_words(data: SnapshotData, device: int, event: int, units: str = "auto") -> str | None:
    """At an out-of-memory event: what was asked for, where, and what the driver still had. None at all others."""
    trace = data.trace(device)
    if not 0 <= event < len(trace) or trace.action[event] != Action.OOM:
        return None
    free = trace.device_free.get(event)
    frames = data.stacks.frames(int(trace.stack[event]))
    own = own_frames(frames)
    by = f" by {display_frame((own or [*frames])[0])}" if frames else ""
    left = "" if free is None else f"; the device had {format_bytes(free, units)} free"
    return f"Asked{by}: {format_bytes(int(trace.size[event]), units)}{left}."
