"""What a reader of a replay must know: what is missing in the file, and what to do about it."""

from __future__ import annotations

from memtrace.allocator.result import Replay
from memtrace.model import Action, Notice, SnapshotData, Trace
from memtrace.units import format_bytes, plural

_ROUND_NUMBERS = (1000, 1 << 10)


def notices_of(data: SnapshotData, trace: Trace, replay: Replay) -> tuple[Notice, ...]:
    """The notices of one device, the gravest first."""
    where = f"device {trace.device}: " if len(data.traces) > 1 else ""
    found = [
        _conflicts(replay),
        _one_event(trace),
        _no_trace(data, trace),
        _revised(replay),
        _skipped(trace, replay),
        _silent_frees(data, trace, replay),
        _late(replay),
        _unsure(replay),
    ]
    return tuple(Notice(notice.code, where + notice.message) for notice in found if notice is not None)


def _conflicts(replay: Replay) -> Notice | None:
    if not replay.conflicts:
        return None
    first = replay.conflicts[0]
    place = "" if first.event is None else f" at event {first.event:,}"
    return Notice(
        "inconsistent",
        f"the trace contradicts itself or the segments in {plural(len(replay.conflicts), 'place')} (first{place}: "
        f"{first.reason}); what follows is what the trace alone supports",
    )


def _one_event(trace: Trace) -> Notice | None:
    if len(trace) != 1:
        return None
    return Notice(
        "one-event",
        "the trace holds one event, as history in mode 'state' leaves it: only the moment of the snapshot is known. "
        "Record with torch.cuda.memory._record_memory_history(max_entries=...) to see the peak",
    )


def _no_trace(data: SnapshotData, trace: Trace) -> Notice | None:
    """A device without events beside one that has some (a file without any says so itself)."""
    if len(trace) or not any(len(other) for other in data.traces):
        return None
    return Notice("no-trace", "this device has no events: only the moment of the snapshot is known")


def _revised(replay: Replay) -> Notice | None:
    if not replay.revised_sizes:
        return None
    return Notice(
        "settings-changed",
        f"the sizes of {plural(replay.revised_sizes, 'block')} do not follow from the allocator settings at the end: "
        "they were changed while recording. Sizes of other blocks that are gone may be off, too",
    )


def _skipped(trace: Trace, replay: Replay) -> Notice | None:
    """Kinds of events that must have happened and are nowhere in the trace (skip_actions, torch 2.11)."""
    if len(trace) <= 1:
        return None
    kinds = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    missing = [kind.name.lower() for kind in kinds if not (trace.action == kind).any()]
    born_and_freed = bool(((replay.lifetimes.born >= 0) & (replay.lifetimes.died < replay.events)).any())
    if not missing or (len(missing) < len(kinds) and not born_and_freed and not replay.conflicts):
        return None
    return Notice(
        "skipped-actions",
        f"the trace has no {', '.join(missing)} events: they were left out while recording (skip_actions). "
        "What they would tell is known only as far as the other events do",
    )


def _silent_frees(data: SnapshotData, trace: Trace, replay: Replay) -> Notice | None:
    if data.torch.at_most != "2.0" or replay.complete or len(trace) <= 1:
        return None
    return Notice(
        "silent-frees",
        "torch 2.0 does not record the frees of blocks made before the recording: before the end, bytes may be missing",
    )


def _late(replay: Replay) -> Notice | None:
    if replay.complete or replay.events == 0 or replay.conflicts:
        return None
    full = any(replay.events % unit == 0 for unit in _ROUND_NUMBERS)
    cause = (
        f"the ring of exactly {replay.events:,} events was probably full: record with a larger max_entries"
        if full
        else "recording began late or its ring was full: record from before the first allocation, or raise max_entries"
    )
    return Notice(
        "incomplete",
        f"at least {plural(replay.lost_events_at_least, 'event')} happened before this trace ({cause}). Counters are "
        "exact from its start on; peaks before it are not known",
    )


def _unsure(replay: Replay) -> Notice | None:
    bounds = replay.lifetimes.slack_bound
    count = int((bounds > 0).sum())
    if not count:
        return None
    return Notice(
        "size-bound",
        f"the size of {plural(count, 'block')} from before the recording is known only within "
        f"{format_bytes(int(bounds.max()))} each, until it is freed",
    )
