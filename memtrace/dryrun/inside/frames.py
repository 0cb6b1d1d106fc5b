"""Takes our own frames out of a snapshot: the stacks are those of a job that ran without us."""

from __future__ import annotations

import functools
import os
from typing import Any, Iterator, List, Set, Tuple

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INNER = {("_ops.py", "__call__")}
"""Torch's frame between our dispatch mode and the operator it runs."""
_OUTER = {("eval_frame.py", "_fn"), ("_compile.py", "inner")}
"""Those that some releases put around every dispatch mode."""


def install(torch: Any) -> None:
    """Whoever takes a snapshot, the program itself or the recorder, gets one without our frames."""
    original = torch._C._cuda_memorySnapshot

    @functools.wraps(original)
    def snapshot(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        clean(found)
        return found

    torch._C._cuda_memorySnapshot = snapshot


def clean(snapshot: Any, ours: str = _OURS) -> None:
    """In place. Lists that several events share are cleaned once."""
    seen: Set[int] = set()
    for frames in _stacks(snapshot):
        if id(frames) not in seen:
            seen.add(id(frames))
            if any(_is_ours(frame, ours) for frame in frames):
                frames[:] = _without(frames, ours)


def _without(frames: List[Any], ours: str) -> List[Any]:
    """Innermost first, as torch has them: ours go, and the call that ours make of each operator."""
    kept: List[Any] = []
    is_after_ours = False
    for frame in frames:
        if _is_ours(frame, ours):
            if kept and _place(kept[-1]) in _INNER:
                kept.pop()
            is_after_ours = True
        elif not (is_after_ours and _place(frame) in _OUTER):
            is_after_ours = False
            kept.append(frame)
    return kept


def _place(frame: Any) -> Tuple[str, str]:
    return os.path.basename(frame["filename"]), frame["name"]


def _is_ours(frame: Any, ours: str) -> bool:
    return bool(frame["filename"].startswith(ours))


def _stacks(snapshot: Any) -> Iterator[List[Any]]:
    for segment in snapshot.get("segments", ()):
        for holder in (segment, *segment.get("blocks", ())):
            yield from _frames(holder)
            for entry in holder.get("history", ()):
                yield from _frames(entry)
    for trace in snapshot.get("device_traces", ()):
        for event in trace:
            yield from _frames(event)


def _frames(holder: Any) -> Iterator[List[Any]]:
    frames = holder.get("frames")
    if frames:
        yield frames
