"""Recordings on disk: a directory with the snapshots of each rank and a sidecar (JSON) beside each.

    <when>-<name>/
        meta.json                              the run as a whole
        rank0003.pickle.zst  rank0003.json     a rank's last snapshot
        rank0003.every.pickle.zst  ...         others of that rank: all that is left of one that was killed
        rank0003-2.pickle.zst  ...             a second process of that rank
        rank0004.json                          a rank without CUDA: no snapshot

Nothing in a file is believed unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from memtrace import paths
from memtrace.errors import NoRecordingError, NotARecordingError, QuestionError, SourceError
from memtrace.io.sidecar import natural, read_json, sidecar_path

META_SCHEMA = "memtrace.recording/1"

_NAME = re.compile(
    r"rank(?P<rank>[0-9]{1,9})(?:-(?P<process>[0-9]{1,9}))?(?:\.(?P<tag>[a-z]{1,20}))?"
    r"\.(?:json|(?P<snapshot>pickle(?:\.(?:gz|xz|zst))?))"
)
_TAGS = ("", "oom", "every", "signal", "peak")
"""What a rank's snapshots were taken for, the one to open first. Plain is the last; a killed rank has only others."""
_META_BYTES = 1 << 20
_LISTED = 8


class NothingRecordedError(SourceError):
    """A recording in which no rank left a snapshot."""

    code = "nothing-recorded"


@dataclass(frozen=True, slots=True)
class RankFile:
    """A snapshot in a recording. `process` counts those of a rank from 1; `tag` says what it was taken for, "" being
    the rank's last; `world` and `peak_bytes` (allocated) are None where no sidecar says them. `oom_us`: when a request
    of this process first failed for want of memory, in microseconds since 1970; None: none did."""

    path: Path
    directory: Path
    rank: int
    process: int
    tag: str
    world: int | None
    peak_bytes: int | None
    oom_us: int | None = None


class Unrecorded(NamedTuple):
    """A rank that left only its sidecar. `is_lost`: there was a device, so there should be a snapshot."""

    rank: int
    is_lost: bool

    @property
    def why(self) -> str:
        return f"rank {self.rank} left no snapshot" if self.is_lost else f"no CUDA device in rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Meta:
    """What `meta.json` says of a run as a whole; None where it does not say."""

    name: str | None
    started_us: int | None
    ended_us: int | None
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True, order=True)
class _Stem:
    """What the files of one dump are called, in the order of what to open."""

    rank: int
    process: int
    order: int
    tag: str


class _Dump(NamedTuple):
    """The files of one dump; `snapshot` None where there is only the sidecar, which need not be there either."""

    snapshot: Path | None
    sidecar: Path


def ranks_of(directory: Path) -> list[RankFile]:
    """One snapshot a rank, by rank: its last, of the process with the highest peak. Empty when it is no recording."""
    best: dict[int, RankFile] = {}
    seen = set()
    for stem, dump in _dumps(directory).items():
        if (stem.rank, stem.process) in seen or (item := _described(directory, stem, dump)) is None:
            continue
        seen.add((stem.rank, stem.process))
        if stem.rank not in best or _peak(item) > _peak(best[stem.rank]):
            best[stem.rank] = item
    return list(best.values())


def snapshots_of(directory: Path) -> list[RankFile]:
    """Every snapshot in a recording, by rank and process, the last one of each first."""
    found = (_described(directory, stem, dump) for stem, dump in _dumps(directory).items())
    return [item for item in found if item is not None]


def unrecorded(directory: Path) -> list[Unrecorded]:
    """The ranks that left only a sidecar."""
    dumps = _dumps(directory)
    recorded = {stem.rank for stem, dump in dumps.items() if dump.snapshot is not None}
    missing = sorted({stem.rank for stem in dumps} - recorded)
    contents = [sidecar(directory, rank) for rank in missing]
    return [
        Unrecorded(rank, not content or content.get("device") is not None)
        for rank, content in zip(missing, contents, strict=True)
    ]


def choose(directory: Path, rank: int | None = None) -> RankFile:
    """The snapshot to open in a directory: of `rank`, else of the rank with the highest peak by the sidecars.

    A directory of recordings means the newest one. Raises NotARecordingError, NothingRecordedError, or QuestionError
    for the rank.
    """
    directory = recording_at(directory)
    files = ranks_of(directory)
    if rank is None and files:
        return max(files, key=lambda item: (_peak(item), -item.rank))
    for item in files:
        if item.rank == rank:
            return item
    empty = [one for one in unrecorded(directory) if rank in (None, one.rank)]
    if empty:
        raise _nothing(directory, empty)
    raise QuestionError.unknown("rank", str(rank), [item.rank for item in files])


def choose_at_oom(directory: Path, rank: int | None = None) -> RankFile:
    """The same of `rank`, else of the rank that ran out of memory first; of the highest peak where none did."""
    directory = recording_at(directory)
    found = [item for item in snapshots_of(directory) if item.oom_us is not None and rank in (None, item.rank)]
    return min(found, key=lambda item: item.oom_us or 0) if found else choose(directory, rank)


def recording_at(directory: Path) -> Path:
    """The directory if it is a recording, else the newest recording in it. Raises NotARecordingError."""
    if _dumps(directory):
        return directory
    found = newest_in(directory)
    if found is None:
        raise NotARecordingError(
            f"{directory} is a directory without recorded snapshots (rank0000.pickle...)", hint="Name a snapshot file."
        )
    return found


def newest() -> Path:
    """The newest recording that can be found without being named. Raises NoRecordingError."""
    for root in paths.recording_roots():
        if _dumps(root):
            return root
        found = newest_in(root)
        if found is not None:
            return found
    raise NoRecordingError(
        "no recording found here",
        hint="Name a snapshot file, or set MEMTRACE_DIR. To make one: memtrace record -- COMMAND",
    )


def newest_in(root: Path) -> Path | None:
    """The newest recording directly inside a directory, by when it was started."""
    inside = [entry for entry in _entries(root) if entry.is_dir() and paths.is_ours(entry) and _dumps(entry)]
    return max(inside, key=lambda entry: (started_us(entry, read_meta(entry)), entry.name), default=None)


def sidecar(directory: Path, rank: int) -> dict[str, object]:
    """What the recorder wrote beside a rank's last snapshot, or in its place; empty when there is nothing readable."""
    dumps = [(dump.snapshot is None, stem, dump) for stem, dump in _dumps(directory).items() if stem.rank == rank]
    found = (read_json(dump.sidecar) for _, _, dump in sorted(dumps))
    return next((content for content in found if content), {})


def read_meta(directory: Path) -> Meta:
    """What `meta.json` says; what has another form than it should is as if it were not there."""
    content = read_json(directory / "meta.json", _META_BYTES)
    if content.get("schema") != META_SCHEMA:
        content = {}
    name = content.get("name")
    return Meta(
        name=name if isinstance(name, str) else None,
        started_us=natural(content.get("started_us")),
        ended_us=natural(content.get("ended_us")),
        exit_code=natural(content.get("exit_code")),
        signal=natural(content.get("signal")),
    )


def started_us(directory: Path, meta: Meta) -> int:
    """When a recording began, in microseconds since 1970; where that is not said, when its directory last changed."""
    return directory.stat().st_mtime_ns // 1000 if meta.started_us is None else meta.started_us


def _dumps(directory: Path) -> dict[_Stem, _Dump]:
    """What the ranks left, by name."""
    found: dict[_Stem, _Dump] = {}
    for entry in _entries(directory):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_file():
            continue
        tag = match["tag"] or ""
        order = _TAGS.index(tag) if tag in _TAGS else len(_TAGS)
        stem = _Stem(int(match["rank"]), int(match["process"] or 1), order, tag)
        if match["snapshot"] is None:
            found.setdefault(stem, _Dump(None, entry))
        elif stem not in found or found[stem].snapshot is None:
            found[stem] = _Dump(entry, sidecar_path(entry))
    return dict(sorted(found.items()))


def _described(directory: Path, stem: _Stem, dump: _Dump) -> RankFile | None:
    if dump.snapshot is None:
        return None
    content = read_json(dump.sidecar)
    stats, oom = content.get("stats"), content.get("oom")
    oom_us = natural(oom.get("time_us")) if isinstance(oom, dict) else None
    if oom_us is None and stem.tag == "oom":
        oom_us = dump.snapshot.stat().st_mtime_ns // 1000
    return RankFile(
        path=dump.snapshot,
        directory=directory,
        rank=stem.rank,
        process=stem.process,
        tag=stem.tag,
        world=natural(content.get("world")),
        peak_bytes=natural(stats.get("allocated_bytes.all.peak")) if isinstance(stats, dict) else None,
        oom_us=oom_us,
    )


def _peak(item: RankFile) -> int:
    return -1 if item.peak_bytes is None else item.peak_bytes


def _nothing(directory: Path, ranks: Sequence[Unrecorded]) -> NothingRecordedError:
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return NothingRecordedError(
        f"{', '.join(one.why for one in ranks[:_LISTED])}{more}: nothing was recorded in {directory}",
        hint="The .json files there hold phases, roles and the configuration. Record where torch uses CUDA.",
    )


def _entries(directory: Path) -> Iterator[Path]:
    try:
        yield from sorted(directory.iterdir())
    except OSError:
        return
