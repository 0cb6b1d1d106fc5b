"""A loaded snapshot object of any torch release -> `SnapshotData`. The only module that knows the top-level layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memtrace.errors import NotASnapshotError
from memtrace.io import versions
from memtrace.io.columns import check_dicts, check_list, integers
from memtrace.io.events import Vocabulary, parse_trace
from memtrace.io.intern import Interner, StackIds
from memtrace.io.ours import without_recorder
from memtrace.io.state import MAX_DEVICES, State, listed_blocks, parse_state
from memtrace.model import Action, Annotations, Notice, SnapshotData, StackTable, Trace
from memtrace.model.snapshot import Setting

_TOP_KEYS = frozenset(
    "segments device_traces allocator_settings external_annotations host_segments host_traces categories".split()
)
_MAX_TABLE = 64
_HINT = "memtrace reads what torch.cuda.memory._dump_snapshot() writes"


@dataclass(frozen=True, slots=True)
class Parsed:
    """What either reader has made of a file, before it is put together."""

    top: dict[str, object]
    is_bare_list: bool
    traces: list[Trace]
    state: State
    words: Vocabulary
    annotations: Annotations
    stacks: StackTable


def parse(loaded: object, *, path: str, file_bytes: int) -> SnapshotData:
    """Columns of a snapshot. Raises NotASnapshotError (with the place) when `loaded` is something else."""
    top = top_of(loaded)
    interner, words = Interner(), Vocabulary()
    raw_traces = check_list(top.get("device_traces", []), "device_traces")
    if len(raw_traces) > MAX_DEVICES:
        raise NotASnapshotError(f"device_traces has {len(raw_traces):,} lists: no machine has so many devices")
    lists = [check_list(events, f"device_traces[{index}]") for index, events in enumerate(raw_traces)]
    if len({id(events) for events in lists if events}) < sum(1 for events in lists if events):
        raise NotASnapshotError("two devices share one list of events")
    check_dicts([event for events in lists for event in events] if len(lists) > 1 else [], "event")
    traces = [parse_trace(events, device, interner, words) for device, events in enumerate(lists)]
    segments = check_list(top.get("segments", []), "segments")
    state = parse_state(segments, interner, words, lambda rows: listed_blocks(rows, interner))
    annotations = parse_annotations(top.get("external_annotations"), interner)
    parsed = Parsed(top, isinstance(loaded, list), traces, state, words, annotations, interner.tables())
    return assemble(parsed, path=path, file_bytes=file_bytes)


def assemble(parsed: Parsed, *, path: str, file_bytes: int) -> SnapshotData:
    """The snapshot: with what the keys say of the torch it is from, and what to know before trusting it."""
    top, state, words = parsed.top, parsed.state, parsed.words
    settings = _settings(top.get("allocator_settings"))
    notices = _notices(top, parsed.traces, state, words)
    traces, reordered = _in_order(parsed.traces)
    data = SnapshotData(
        path=path,
        file_bytes=file_bytes,
        traces=_present(traces, state),
        segments=state.segments,
        blocks=state.blocks,
        stacks=parsed.stacks,
        strings=parsed.stacks.strings,
        pools=tuple(words.pools),
        actions=tuple(words.actions),
        settings=settings,
        annotations=parsed.annotations,
        torch=versions.infer(
            top=None if parsed.is_bare_list else top.keys(),
            settings=settings.keys() if "allocator_settings" in top else None,
            blocks=state.block_keys,
            events=words.event_keys,
            actions=words.actions[len(Action) :] + _used(traces),
        ),
        has_segments="segments" in top,
        tiled=state.tiled,
        notices=tuple(notices + reordered),
    )
    return without_recorder(data)


def top_of(loaded: object) -> dict[str, object]:
    """The dict at the top; of a bare list of segments, one made for it. Raises NotASnapshotError."""
    if type(loaded) is list:  # torch 1.13, or torch.cuda.memory_snapshot() of any release
        if loaded and not (type(loaded[0]) is dict and "blocks" in loaded[0]):
            raise NotASnapshotError("the file holds a list that is no list of segments", hint=_HINT)
        return {"segments": loaded, "device_traces": []}
    if type(loaded) is not dict:
        raise NotASnapshotError(f"the file holds a {type(loaded).__name__}, not a memory snapshot", hint=_HINT)
    if "segments" not in loaded and "device_traces" not in loaded:
        raise NotASnapshotError("the file holds a dict without segments or device_traces", hint=_HINT)
    return loaded


def _settings(raw: object) -> dict[str, Setting]:
    """Scalars and one level of dicts of integers; anything else is left out (nothing of ours reads it)."""
    if raw is None:
        return {}
    if type(raw) is not dict:
        raise NotASnapshotError(f"allocator_settings is a {type(raw).__name__}, expected a dict")
    check_dicts([raw], "allocator_settings")
    settings: dict[str, Setting] = {}
    for key, value in raw.items():
        if isinstance(value, float) and not math.isfinite(value):
            continue  # no setting, and no JSON
        if isinstance(value, (str, int, float)):
            settings[str(key)] = value
        elif type(value) is dict and len(value) <= _MAX_TABLE and all(type(item) is int for item in value.values()):
            settings[str(key)] = {str(name): item for name, item in value.items()}
    return settings


def parse_annotations(raw: object, interner: StackIds) -> Annotations:
    """`external_annotations` as columns. Raises NotASnapshotError."""
    rows = check_list([] if raw is None else raw, "external_annotations")
    check_dicts(rows, "annotation")
    name, start, device = [], [], []
    for index, row in enumerate(rows):
        text, stage, ordinal = row.get("name"), row.get("stage"), row.get("device", 0)  # type: ignore[attr-defined]
        if (
            type(text) is not str
            or stage not in ("START", "END")
            or type(ordinal) is not int
            or ordinal.bit_length() > 31
        ):
            raise NotASnapshotError(f"annotation {index} needs a name, a stage (START or END) and a device")
        name.append(interner.string(text))
        start.append(stage == "START")
        device.append(ordinal)
    return Annotations(
        name=np.array(name, np.int32),
        start=np.array(start, np.bool_),
        device=np.array(device, np.int32),
        time_us=integers([row.get("time_us") for row in rows], "time_us", "annotation"),  # type: ignore[attr-defined]
    )


def _in_order(traces: list[Trace]) -> tuple[list[Trace], list[Notice]]:
    """Traces in the order of their clock. A ring that was resized while recording is written out of order."""
    ordered, notices = [], []
    for trace in traces:
        if trace.time_us is None or bool((trace.time_us[1:] >= trace.time_us[:-1]).all()):
            ordered.append(trace)
            continue
        order = np.argsort(trace.time_us, kind="stable")
        back = int((np.diff(trace.time_us) < 0).sum())
        ordered.append(trace.take(order))
        notices.append(
            Notice(
                "order-broken",
                f"device {trace.device}: the clock goes back {back} times (max_entries was changed while recording); "
                "events were put in the order of time, and some may be missing",
            )
        )
    return ordered, notices


def _present(traces: list[Trace], state: State) -> tuple[Trace, ...]:
    """One trace per device that has events or segments; an empty one where only segments are known."""
    with_segments = set(state.segments.device.tolist())
    by_device = {trace.device: trace for trace in traces if len(trace) or trace.device in with_segments}
    for device in with_segments - by_device.keys():
        by_device[device] = _empty_trace(device)
    return tuple(by_device[device] for device in sorted(by_device))


def _empty_trace(device: int) -> Trace:
    return parse_trace([], device, Interner(), Vocabulary())


def _used(traces: list[Trace]) -> list[str]:
    return ["annotate"] if any(bool((trace.action == Action.ANNOTATE).any()) for trace in traces) else []


def _notices(top: dict[str, object], traces: list[Trace], state: State, words: Vocabulary) -> list[Notice]:
    notices = []
    unknown = {str(key) for key in top if key not in _TOP_KEYS} | words.unknown_keys | state.unknown_keys
    if unknown:
        shown = _listed(sorted(unknown))
        notices.append(Notice("unknown-keys", f"{len(unknown)} keys this memtrace does not know were ignored: {shown}"))
    strange = words.actions[len(Action) :]
    if strange:
        shown = _listed(strange)
        notices.append(
            Notice("unknown-actions", f"kinds of events this memtrace does not know are not replayed: {shown}")
        )
    if "segments" not in top:
        notices.append(Notice("no-segments", "the file has no segments: nothing can be checked against the final map"))
    if not state.tiled or not state.totals_agree:
        notices.append(
            Notice("segments-inconsistent", "blocks and segments do not add up: torch does not write such a file")
        )
    if state.blocks.state.size and bool(((state.blocks.state != 0) & (state.blocks.requested < 0)).any()):
        notices.append(
            Notice("requested-unknown", "torch 1.13 does not write what was requested: block sizes stand in its place")
        )
    if not any(len(trace) for trace in traces):
        notices.append(
            Notice(
                "no-trace",
                "no events: only the moment of the snapshot is known. Record with "
                "torch.cuda.memory._record_memory_history(max_entries=...) to see the peak",
            )
        )
    return notices


def _listed(names: list[str]) -> str:
    """A few names, cut: they are the file's, and may be anything."""
    return ", ".join(name[:60] for name in names[:5]) + (", ..." if len(names) > 5 else "")
