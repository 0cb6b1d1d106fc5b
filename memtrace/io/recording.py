"""Recordings on disk: a directory with one snapshot a rank and a sidecar (JSON) beside each.

Layout: `.memtrace/<when>-<name>/rank0003.pickle.zst` and `rank0003.json` (schema memtrace.sidecar/1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memtrace import paths
from memtrace.errors import NoRecordingError, NotARecordingError, QuestionError

_RANK_FILE = re.compile(r"rank([0-9]{1,9})\.pickle(?:\.(?:gz|xz|zst))?")
_SIDECAR_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RankFile:
    """The snapshot of one rank in a recording; `world` None when no sidecar says it."""

    path: Path
    directory: Path
    rank: int
    world: int | None


def ranks_of(directory: Path) -> list[RankFile]:
    """The rank files in a recording, by rank. Empty when the directory is none."""
    found: dict[int, Path] = {}
    for entry in _entries(directory):
        match = _RANK_FILE.fullmatch(entry.name)
        if match and entry.is_file():
            found.setdefault(int(match[1]), entry)
    return [RankFile(path, directory, rank, _world(sidecar(directory, rank))) for rank, path in sorted(found.items())]


def choose(directory: Path, rank: int | None = None) -> RankFile:
    """The snapshot to open in a directory: of `rank`, else of the rank with the highest peak by the sidecars.

    A directory of recordings means the newest one. Raises NotARecordingError, or QuestionError for the rank.
    """
    files = ranks_of(directory)
    if not files:
        newest = newest_in(directory)
        if newest is None:
            raise NotARecordingError(
                f"{directory} is a directory without recorded snapshots (rank0000.pickle...)",
                hint="Name a snapshot file.",
            )
        files = ranks_of(newest)
    if rank is None:
        return max(files, key=lambda item: (_peak(sidecar(item.directory, item.rank)), -item.rank))
    for item in files:
        if item.rank == rank:
            return item
    raise QuestionError.unknown("rank", str(rank), [item.rank for item in files])


def newest() -> Path:
    """The newest recording that can be found without being named. Raises NoRecordingError."""
    for root in paths.recording_roots():
        if ranks_of(root):
            return root
        found = newest_in(root)
        if found is not None:
            return found
    raise NoRecordingError(
        "no recording found here",
        hint="Name a snapshot file, or set MEMTRACE_DIR. To make one: torch.cuda.memory._dump_snapshot('x.pickle').",
    )


def newest_in(root: Path) -> Path | None:
    """The newest recording directly inside a directory."""
    inside = [entry for entry in _entries(root) if entry.is_dir() and paths.is_ours(entry) and ranks_of(entry)]
    return max(inside, key=lambda entry: (entry.stat().st_mtime, entry.name), default=None)


def sidecar(directory: Path, rank: int) -> dict[str, object]:
    """What the recorder wrote beside a rank's snapshot; empty when there is nothing readable."""
    for name in (f"rank{rank:04d}.json", f"rank{rank}.json"):
        path = directory / name
        try:
            if path.is_file() and path.stat().st_size <= _SIDECAR_BYTES:
                content = json.loads(path.read_text("utf-8"))
                return content if isinstance(content, dict) else {}
        except (OSError, ValueError, RecursionError):
            continue
    return {}


def _entries(directory: Path) -> Iterator[Path]:
    try:
        yield from sorted(directory.iterdir())
    except OSError:
        return


def _world(content: dict[str, object]) -> int | None:
    world = content.get("world")
    return world if type(world) is int else None


def _peak(content: dict[str, object]) -> int:
    stats = content.get("stats")
    peak = stats.get("allocated_bytes.all.peak") if isinstance(stats, dict) else None
    return peak if type(peak) is int else -1
