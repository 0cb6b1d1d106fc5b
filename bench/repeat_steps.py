"""A longer recording out of a real one: its steps again and again, every event an object of its own as torch writes.

    python bench/repeat_steps.py FILE.pickle[.xz] LONG.pickle --times 4

Looks for two moments with the same memory map (the same blocks in use, the same segments) and repeats what lies
between them. The result is a legal trace that leads to the same segments. Needs about 8 times the size of LONG in
memory. Whose file it is does not matter, but it is loaded with `pickle`: only use your own.
"""

from __future__ import annotations

import argparse
import gc
import lzma
import pickle
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def longest_repeatable(events: list[Event]) -> tuple[int, int]:
    """The two moments furthest apart with the same map: what lies between them can be repeated."""
    state = 0
    first: dict[int, int] = {}
    best = (0, 0)
    for index, event in enumerate(events):
        action = event["action"]
        if action in ("oom", "snapshot", "annotate"):
            continue
        kind = "segment" if action.startswith("segment") else "pending" if action == "free_completed" else "used"
        state ^= hash((kind, event["addr"], event["size"]))
        if action == "free_requested":
            state ^= hash(("pending", event["addr"], event["size"]))
        begin = first.setdefault(state, index + 1)
        if index + 1 - begin > best[1] - best[0]:
            best = begin, index + 1
    return best


def repeated(events: list[Event], times: int) -> list[Event]:
    """The trace `times` as long."""
    begin, end = longest_repeatable(events)
    copies = max(1, round(len(events) * (times - 1) / max(1, end - begin)))
    duration = events[end - 1]["time_us"] - events[begin - 1]["time_us"] + 1
    print(f"events {begin:,} to {end:,} of {len(events):,} {copies} times more")
    result = events[:end]
    for copy in range(1, copies + 1):
        stacks: dict[int, list[Any]] = {}
        for event in events[begin:end]:
            again = dict(event, time_us=event["time_us"] + copy * duration)
            if "compile_context" in again:  # torch makes a text of its own for every event
                again["compile_context"] = again["compile_context"].encode().decode()
            frames = again.get("frames")
            if frames is not None:
                if id(frames) not in stacks:
                    stacks[id(frames)] = list(frames)
                again["frames"] = stacks[id(frames)]
            result.append(again)
    for event in events[end:]:
        event["time_us"] += copies * duration
    return result + events[end:]


def main() -> None:
    """Writes LONG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("long", type=Path)
    parser.add_argument("--times", type=int, default=4)
    options = parser.parse_args()
    gc.disable()
    with (lzma.open if options.file.suffix == ".xz" else open)(options.file, "rb") as source:
        snapshot = pickle.load(source)
    snapshot["device_traces"] = [
        repeated(events, options.times) if events else events for events in snapshot["device_traces"]
    ]
    with options.long.open("wb") as target:
        pickle.dump(snapshot, target)
    print(f"{options.long}: {options.long.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
