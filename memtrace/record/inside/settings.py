"""How a job is to be recorded: what the launcher decided, and how it travels to the ranks."""

from __future__ import annotations

import base64
import json
import signal
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

VARIABLE = "MEMTRACE_RECORD"
TWIN = "PYTHONMEMTRACE_RECORD"
"""The same value: DeepSpeed's launcher takes variables to other nodes only if their names begin with PYTHON."""

MOST_RANKS = 64
"""Above as many, `auto` records one rank a node and the last."""

_MOST_TEXT = 1 << 16


class Settings(NamedTuple):
    """The options of `memtrace record`. `directory` is absolute, `_s` are seconds, steps count from 0.

    `steps` are the first and the last step to record; `world` 0: the real one, else a simulated one with this `rank`.
    `dryrun`: the options of a run without a GPU, as memtrace.dryrun encodes them; empty: a real one.
    """

    directory: str
    max_entries: int = 1_000_000
    stacks: str = "python"
    threaded_backward: bool = True
    modules: bool = False
    on: Tuple[str, ...] = ("exit", "oom", "signal")
    every: int = 0
    steps: Optional[Tuple[int, int]] = None
    skip_first: int = 0
    duration_s: float = 0.0
    ranks: Union[str, Tuple[int, ...]] = "auto"
    grace_s: float = 20.0
    dump_jobs: int = 4
    plain_paths: bool = False
    plain_host: bool = False
    world: int = 0
    rank: int = 0
    name: str = ""
    dryrun: str = ""


def encode(settings: Settings) -> str:
    """As text of letters, digits, `-` and `_`: some launchers quote nothing."""
    text = json.dumps(settings._asdict(), separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode("ascii")).decode("ascii").rstrip("=")


def decode(text: str) -> Optional[Settings]:
    """What `encode` was given; None for anything else. Keys of a later release are left out.

    >>> decode(encode(Settings("/runs/a", ranks=(0, 7), steps=(3, 6)))).ranks
    (0, 7)
    >>> decode("nonsense") is None
    True
    """
    if not text or len(text) > _MOST_TEXT:
        return None
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        return _checked(json.loads(base64.b64decode(padded, b"-_", validate=True).decode("ascii")))
    except (ValueError, RecursionError):
        return None


def from_environment(environ: Mapping[str, str]) -> Optional[Settings]:
    """The settings that this process was started with."""
    return decode(environ.get(VARIABLE) or environ.get(TWIN) or "")


def signals_of(on: Tuple[str, ...]) -> List[int]:
    """The numbers of the signals asked for as `signal:USR1`.

    >>> signals_of(("exit", "signal:USR1")) == [int(signal.SIGUSR1)]
    True
    """
    names = [word.partition(":")[2].upper() for word in on if word.startswith("signal:")]
    found = [getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None) for name in names]
    return [int(one) for one in found if isinstance(one, signal.Signals)]


def _checked(content: Any) -> Optional[Settings]:
    """Every value in the form of its field, lists as tuples; None if any is not."""
    if not isinstance(content, dict) or not content.get("directory"):
        return None
    known: Dict[str, Any] = {key: content[key] for key in Settings._fields if key in content}
    if not all(_FORMS[key](value) for key, value in known.items()):
        return None
    for key, value in known.items():
        known[key] = tuple(value) if isinstance(value, list) else value
    return Settings(**known)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


_FORMS: Dict[str, Callable[[Any], bool]] = {
    "directory": _is_text,
    "max_entries": _is_count,
    "stacks": lambda value: value in ("python", "all"),
    "threaded_backward": _is_flag,
    "modules": _is_flag,
    "on": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "every": _is_count,
    "steps": lambda value: value is None or (_is_counts(value) and len(value) == 2),
    "skip_first": _is_count,
    "duration_s": _is_seconds,
    "ranks": lambda value: value in ("auto", "all") or _is_counts(value),
    "grace_s": _is_seconds,
    "dump_jobs": _is_count,
    "plain_paths": _is_flag,
    "plain_host": _is_flag,
    "world": _is_count,
    "rank": _is_count,
    "name": _is_text,
    "dryrun": _is_text,
}
