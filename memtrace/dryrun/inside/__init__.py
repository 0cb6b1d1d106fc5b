"""What runs inside each rank of a dry run, beside the recorder: values, worlds, and what has to be said afterwards.

The launcher copies this folder into the recorder's own (`memtrace_inside.dryrun`), so it keeps to the same rules:
standard library only, Python 3.8 on. The device itself is the preloaded library (memtrace/dryrun/device).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def enter(recorder: Any) -> None:
    """After torch was imported and the recorder is armed. What fails here ends the process: the rest would be wrong."""
    from . import options, rank

    services = rank.Services(*(importlib.import_module(f"{_recorders_package(recorder)}.{name}")
                              for name in ("notes", "importing", "world")))  # fmt: skip
    try:
        recorder.dryrun = rank.DryRun(recorder, options.decode(recorder.settings.dryrun), services)
        recorder.dryrun.begin()
    except Exception as error:  # noqa: BLE001 - as said
        services.notes.say(f"the dry run cannot begin: {type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(70)


def _recorders_package(recorder: Any) -> str:
    return str(type(recorder).__module__).rpartition(".")[0]
