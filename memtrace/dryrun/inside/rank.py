"""One rank of a dry run: what is put in place, when it ends, what it has to say."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Dict, List, NamedTuple

from . import assumptions, frames, libraries, messages, worlds
from .device import Device
from .guesses import Guesses
from .overflows import Overflows
from .peaks import Peaks
from .sizes import Sizes
from .values import Presence, Values

TIMED_OUT = 124
"""The exit code of a run that reached its limit of time, as timeout(1) has it."""


class Services(NamedTuple):
    """The recorder's own modules, which lie beside this package under either name."""

    notes: Any
    importing: Any
    world: Any


class DryRun:
    """`options` as the launcher decided. The recorder asks for `describe`."""

    def __init__(self, recorder: Any, options: Any, services: Services) -> None:
        self._recorder, self.options, self._services = recorder, options, services
        self._torch = recorder.torch
        self.nn_module = recorder.torch.nn.Module
        self._began = time.monotonic()
        self.stopped_after: Any = None
        self.guesses = Guesses()
        self.device = Device()
        self.values = Values(self._torch, self.guesses)
        self.presence = Presence(self._torch, self.values, self.device)
        self._peaks = Peaks(self._torch)
        self.is_mode_hidden = self.device.can_hide_mode

    def begin(self) -> None:
        """Everything, before the program uses the device."""
        torch, options = self._torch, self.options
        sizes = Sizes(torch, self.values, self.presence, self.device, self.guesses, options.mask)
        sizes.install()
        self.values.sizes = sizes
        if options.overflow_first:
            self.values.overflows = Overflows(options.overflow_first)
        messages.install(self._services.world, self.guesses)
        if not self._recorder.settings.world:
            worlds.follow_the_script(self._services.world)
        libraries.install(self)
        frames.install(torch)
        self._peaks.install()
        if not self.is_mode_hidden:
            libraries.leave_backward_alone(self.presence)
        self.presence.enter()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.presence.leave)
        self._recorder.phases.on_next = self.step_begins
        if options.limit_s:
            threading.Thread(target=self._end_in_time, name="memtrace-limit", daemon=True).start()

    def after_import(self, name: str, callback: Any) -> None:
        """As the recorder's importing has it."""
        self._services.importing.after_import(name, callback)

    def step_begins(self, number: int) -> None:
        """Step `number` is about to begin. Where enough have been made the program ends here, in good order."""
        steps = self.options.steps
        if steps and number >= steps:
            self.stopped_after = f"{steps} steps" if steps > 1 else "1 step"
            raise SystemExit(0)
        self._say(f"step {number - 1} done")

    def describe(self) -> Dict[str, Any]:
        """For the sidecar."""
        return {
            "gpu": self.options.gpu,
            "limit_bytes": self.options.limit_bytes,
            "outside_bytes": self.device.outside_bytes,
            "room_bytes": self.device.room_bytes,
            "peaks_before_reset": self._peaks.before_reset,
            "stopped_after": self.stopped_after,
            "seconds": round(time.monotonic() - self._began, 3),
            "assumptions": self._assumptions(),
        }

    def _assumptions(self) -> List[Dict[str, Any]]:
        return assumptions.rows(self)

    def _end_in_time(self) -> None:
        time.sleep(self.options.limit_s)
        self.stopped_after = f"{self.options.limit_s:g} s"
        self._services.notes.say(f"the limit of {self.options.limit_s:g} s is reached: the dry run ends here")
        self._recorder.dump("signal")
        sys.stderr.flush()
        os._exit(TIMED_OUT)

    def _say(self, what: str) -> None:
        if not self.options.quiet:
            self._services.notes.say(f"{what}, {time.monotonic() - self._began:.0f} s")
