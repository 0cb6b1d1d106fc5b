"""Recording from within a program: `with memtrace.recording():`. The same files as `memtrace record` writes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memtrace.record import layout
from memtrace.record.inside import notes, process
from memtrace.record.inside.settings import Settings, encode


class Recording:
    """One recording of this process. `directory` None: under `memtrace record`, or where nothing could be written."""

    def __init__(self, directory: Path | None, recorder: Any) -> None:
        self.directory = directory
        self._recorder = recorder

    def dump(self) -> Path | None:
        """Writes what was recorded so far, beside the file that the end writes. The path, or None."""
        written = None if self._recorder is None else self._recorder.dump("api", ".api")
        return None if written is None else Path(written)


@contextlib.contextmanager
def recording(
    directory: str | os.PathLike[str] | None = None,
    *,
    name: str = "",
    max_entries: int = 1_000_000,
    stacks: str = "python",
    threaded_backward: bool = True,
    modules: bool = False,
    every: int = 0,
    on: tuple[str, ...] = ("exit", "oom"),
) -> Iterator[Recording]:
    """Records the memory of this process for as long as the context lasts, and writes it at its end, by any way out.

    Best around everything that uses the GPU, the model's making too: what is older can only be named by its size.
    `directory` (default: a new one in `.memtrace`) must be one that all ranks share. Other arguments are the options of
    `memtrace record`. Where that is already recording, this does nothing. Raises only what the body raises, and
    ImportError without torch.
    """
    import torch

    from memtrace.record.inside import recorder as inside

    outer: Any = sys.modules.get("memtrace_inside.recorder")
    if inside.RECORDER is not None or (outer is not None and outer.RECORDER is not None):
        yield Recording(None, None)
        return
    place = _place(name or layout.name_of(sys.argv), directory)
    for text in place.notes:
        notes.say(text)
    if place.directory is None:
        yield Recording(None, None)
        return
    settings = Settings(
        directory=str(place.directory),
        max_entries=max_entries,
        stacks=stacks,
        threaded_backward=threaded_backward,
        modules=modules,
        every=every,
        on=on,
        ranks="all",
        name=name,
    )
    started_us = time.time_ns() // 1000
    inside.enter(torch, encode(settings))
    recorder = inside.RECORDER
    try:
        yield Recording(place.directory, recorder)
    finally:
        if recorder is not None:
            recorder.finish("api")
        if not process.rank():
            meta = {"name": name, "started_us": started_us, "ended_us": time.time_ns() // 1000}
            _finish(place.directory, {**meta, "settings": layout.described(settings)})


def _place(name: str, directory: str | os.PathLike[str] | None) -> layout.Place:
    """Ranks of one launcher come to the same directory without a word between them: by when it was started."""
    if directory is None and (process.world() or 1) <= 1:
        return layout.make(name)
    if directory is None:
        directory = Path(".memtrace", f"{_launched()}-{name}")
    wanted = Path(directory).expanduser().absolute()
    with contextlib.suppress(OSError):
        wanted.mkdir(parents=True, exist_ok=True)
        return layout.Place(wanted)
    return layout.make(name, wanted)


def _launched() -> str:
    """When the process that started this one was started itself."""
    try:
        ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text("ascii").rpartition(")")[2].split()[19])
        booted = next(
            int(line.split()[1]) for line in Path("/proc/stat").read_text("ascii").splitlines() if line[:5] == "btime"
        )
        moment = time.localtime(booted + ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, StopIteration):
        return f"launcher-{os.getppid()}"
    return time.strftime("%Y%m%d-%H%M%S", moment)


def _finish(directory: Path, meta: dict[str, Any]) -> None:
    try:
        layout.write_meta(directory, meta)
        layout.tidy(directory)
        for problem in layout.pack(directory):
            notes.say(problem)
        layout.remember(directory)
    except Exception as error:  # noqa: BLE001 - the program goes on; its snapshot is written
        notes.say(f"{directory}: {notes.described(error)}")
