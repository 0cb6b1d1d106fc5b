"""`device_traces`: lists of event dicts -> `Trace` columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import NotASnapshotError
from memtrace.io.columns import check_dicts, check_integer, check_sum, integers
from memtrace.io.intern import Interner
from memtrace.io.roles import MAX_NAMES
from memtrace.model import Action, Trace

_KNOWN_KEYS = frozenset(
    "action addr size stream frames time_us compile_context user_metadata pool_id internal_metadata forward_frames "
    "device_free cpp_frames category".split()
)
_MAX_ACTIONS = 255


@dataclass
class Vocabulary:
    """What the events of a file share: action names, pool ids, and the keys met on the way."""

    actions: list[str] = field(default_factory=lambda: [action.name.lower() for action in Action])
    pools: dict[tuple[int, int], int] = field(default_factory=lambda: {(0, 0): 0})
    event_keys: set[str] = field(default_factory=set)
    unknown_keys: set[str] = field(default_factory=set)

    def see(self, keys: Iterable[str]) -> None:
        """Keys that events have."""
        self.event_keys.update(keys)
        if len(self.event_keys) > MAX_NAMES:
            raise NotASnapshotError("events have more different keys than torch has names for")
        self.unknown_keys.update(set(keys) - _KNOWN_KEYS)

    def pool(self, value: object, where: str) -> int:
        """Index of a pool id: a pair of integers (a list after a trip through JSON)."""
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise NotASnapshotError(f"{where}: a pool id is not a pair of integers")
        pair = (check_integer(value[0], "pool id", where), check_integer(value[1], "pool id", where))
        return self.pools.setdefault(pair, len(self.pools))


def parse_trace(events: list[object], device: int, interner: Interner, words: Vocabulary) -> Trace:
    """One device's events as columns, in the file's order. Raises NotASnapshotError for a value of a wrong kind."""
    where = f"device {device}, event"
    check_dicts(events, where)
    rows: list[dict[str, object]] = events  # type: ignore[assignment]
    keys = {key for shape in set(map(tuple, rows)) for key in shape}
    if not all(type(key) is str for key in keys):
        raise NotASnapshotError(f"{where}: a key is not text")
    words.see(keys)

    action = _actions([row.get("action") for row in rows], where, words)
    without_address = (action == Action.OOM) | (action > Action.OOM)
    addr = _column(rows, "addr", without_address, where)
    size = _column(rows, "size", action > Action.OOM, where)
    check_sum(size, f"device {device}")
    moves = action <= Action.SEGMENT_UNMAP
    if len(rows) and int((addr[moves].astype(np.uint64) + size[moves].astype(np.uint64)).max(initial=0)) > 2**63:
        raise NotASnapshotError(f"device {device}: an event ends beyond the address space")
    stream = _column(rows, "stream", np.ones(len(rows), np.bool_), where)
    cpp_frames = [row.get("cpp_frames") for row in rows] if "cpp_frames" in keys else None
    stack = interner.stacks([row.get("frames") for row in rows], where, cpp_frames)
    ooms = np.flatnonzero(action == Action.OOM).tolist()
    return Trace(
        device=device,
        action=action,
        addr=addr.astype(np.uint64),
        size=size,
        stream=stream.astype(np.uint64),
        stack=stack,
        time_us=integers([row.get("time_us") for row in rows], "time_us", where) if "time_us" in keys else None,
        pool=_pools(rows, where, words) if "pool_id" in keys else None,
        compile_context=_texts(rows, "compile_context", ("", "N/A"), where, interner),
        user_metadata=_texts(rows, "user_metadata", ("",), where, interner),
        device_free={
            event: check_integer(rows[event]["device_free"], "device_free", f"{where} {event}")
            for event in ooms
            if "device_free" in rows[event]
        },
    )


def _actions(names: list[object], where: str, words: Vocabulary) -> NDArray[np.uint8]:
    if not set(map(type, names)) <= {str}:
        bad = next(index for index, name in enumerate(names) if type(name) is not str)
        raise NotASnapshotError(f"{where} {bad}: action is not text")
    distinct = set(names)
    for name in sorted(distinct - set(words.actions)):  # type: ignore[type-var]
        words.actions.append(name)  # type: ignore[arg-type]
    if len(words.actions) > _MAX_ACTIONS:
        raise NotASnapshotError(f"{where}s have {len(words.actions)} kinds of action: not the work of torch")
    code = {name: index for index, name in enumerate(words.actions)}
    return np.fromiter(map(code.__getitem__, names), np.uint8, len(names))  # type: ignore[arg-type]


def _column(rows: list[dict[str, object]], key: str, optional: NDArray[np.bool_], where: str) -> NDArray[np.int64]:
    """Integers under `key`; where `optional`, a missing one is 0."""
    values = [row.get(key) for row in rows]
    if None in values:
        for index in np.flatnonzero(optional).tolist():
            if values[index] is None and key not in rows[index]:
                values[index] = 0
    return integers(values, key, where)


def _pools(rows: list[dict[str, object]], where: str, words: Vocabulary) -> NDArray[np.int32]:
    values = [row.get("pool_id") for row in rows]
    column = np.empty(len(rows), np.int32)
    for index, value in enumerate(values):
        column[index] = -1 if value is None else words.pool(value, f"{where} {index}")
    return column


def _texts(
    rows: list[dict[str, object]], key: str, empty: tuple[str, ...], where: str, interner: Interner
) -> NDArray[np.int32] | None:
    """String ids under `key`, -1 where it says nothing; None when no event says anything."""
    values = [row.get(key) for row in rows]
    kinds = set(map(type, values))
    if not kinds <= {str, type(None)}:
        bad = next(index for index, value in enumerate(values) if not isinstance(value, (str, type(None))))
        raise NotASnapshotError(f"{where} {bad}: {key} is not text")
    said = set(values) - {None, *empty}
    if not said:
        return None
    ids = {text: interner.string(text) for text in sorted(said)}  # type: ignore[type-var, arg-type]
    return np.fromiter((ids.get(value, -1) for value in values), np.int32, len(values))
