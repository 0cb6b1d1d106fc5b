"""The recorder of one process: when it starts, what makes it dump, how it ends."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import history, importing, notes, process, sidecar
from . import settings as settings_module
from .dump import Dumper
from .eager import eagerly, untraced
from .frameworks import Frameworks
from .limits import Limits
from .notes import guard
from .phases import PhaseLog, now_us
from .roots import Roots
from .signals import Signals
from .torch_hooks import TorchHooks

_LAST_TRIES = 3
"""Of the dump at the end: as often may somebody press Ctrl-C."""

RECORDER: Optional[Recorder] = None


def enter(torch: Any, text: str = "") -> None:
    """After torch was imported in a process of a recorded job."""
    global RECORDER
    settings = settings_module.decode(text) if text else settings_module.from_environment(os.environ)
    if settings is None or RECORDER is not None or process.is_launcher():
        return
    RECORDER = Recorder(torch, settings)
    RECORDER.arm()
    if settings.dryrun:  # the launcher put this part beside us
        importlib.import_module(".dryrun", __package__).enter(RECORDER)


class Recorder:
    """One process of a job. `state`: armed (CUDA is not in use yet), recording, done."""

    def __init__(self, torch: Any, settings: Any) -> None:
        self.torch, self.settings = torch, settings
        self.state = "armed"
        self.started_us: Optional[int] = None
        self.stats_start: Dict[int, Dict[str, int]] = {}
        self.segments_start: Optional[List[Any]] = None
        self.oom: Optional[Dict[str, int]] = None
        self.dumps: Dict[str, int] = {}
        self.phases = PhaseLog(self._step_done)
        self.hooks = TorchHooks(torch, self.phases)
        self.roots = Roots(torch, self.phases)
        self.frameworks = Frameworks(self)
        self.limits = Limits(self)
        self.signals = Signals()
        self.dumper = Dumper(settings.directory, settings.dump_jobs)
        self.dryrun: Any = None
        self._stem: Optional[Tuple[Optional[int], str]] = None
        self._pid = os.getpid()
        self._observed = False
        self._signals_wanted = True
        self._undo_watch: Callable[[], None] = lambda: None

    # How it begins.

    @guard
    def arm(self) -> None:
        """Waits for the first use of CUDA. Nothing is written, and no signal touched, before that."""
        notes.configure(self.settings.directory)
        for entry in (Recorder.on_oom, Recorder.dump, Recorder.on_signal):
            untraced(entry)
        if self.settings.world:
            from . import world

            world.install(self.settings.world, self.settings.rank)
        self.hooks.install()
        self.roots.install()
        self.frameworks.install()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forked)
        atexit.register(self.at_exit)
        self.watch_history()
        if self.torch.cuda.is_initialized():
            self.start()
        else:
            self.torch.cuda._lazy_call(self.start)

    @guard
    def start(self) -> None:
        """In torch's first use of CUDA, before its first allocation. Must not ask torch to queue anything: deadlock."""
        if self.state == "forked":  # a child that trains: a rank of its own
            self.state, self._pid = "armed", os.getpid()
        if self.state != "armed":
            return
        if not self._is_chosen():
            notes.log("this rank is not among those to be recorded")
            self.stop()
            return
        self.state = "recording"
        self.limits.begin()
        if not self.settings.threaded_backward:
            self.hooks.backward_here()
        if "oom" in self.settings.on and not self._observed:
            self._observed = True
            self.torch._C._cuda_attach_out_of_memory_observer(self.on_oom)
        self.hold_signals()

    @guard
    def begin_history(self) -> None:
        """Torch's own recording begins. What is there already is noted, so that it need not be guessed."""
        self.stats_start = history.all_stats(self.torch)
        if any(stats.get("active_bytes.all.current") for stats in self.stats_start.values()):
            self.segments_start = history.segments(self.torch)
        self.started_us = now_us()
        annotate = history.begin(self.torch, self.settings.max_entries, self.settings.stacks)
        self.phases.tell_torch(history.metadata_setter(self.torch), annotate)
        if self.settings.modules:
            self.frameworks.tag_modules()

    def _is_chosen(self) -> bool:
        """Whether this rank is to be recorded."""
        ranks, rank, world = self.settings.ranks, process.rank(), process.world()
        if ranks == "all" or rank is None:
            return True
        if ranks == "auto":
            if world is None or world <= settings_module.MOST_RANKS:
                return True
            return rank == world - 1 or process.local_rank() in (0, None)
        return rank in ranks

    def hold_signals(self) -> None:
        """Signals can only be taken on the main thread; where CUDA began on another, the next mark on it does."""
        if not self._signals_wanted or "signal" not in {word.split(":")[0] for word in self.settings.on}:
            return
        if threading.current_thread() is threading.main_thread():
            self._signals_wanted = False
            asked = tuple(settings_module.signals_of(self.settings.on))
            self.signals.install(self.on_signal, self.settings.grace_s, asked, before_exit=self.at_exit)

    # What makes it dump.

    @guard
    def on_oom(self, device: int, asked: int, total: int, free: int) -> None:
        """Torch's observer: inside the call that fails, before anything is unwound. The first one is kept."""
        if self.state != "recording" or self.oom is not None:
            return
        self.oom = {"device": device, "asked_bytes": asked, "total_bytes": total, "free_bytes": free}
        self.oom.update(steps_done=self.phases.steps_done, time_us=now_us())
        self.dump("oom", ".oom")

    @guard
    def on_signal(self, reason: str, signum: int) -> bool:
        """On the watcher's thread. A signal that was asked for dumps and goes on; the others may be the end."""
        asked = signum in settings_module.signals_of(self.settings.on)
        return self.dump("signal", ".signal" if asked else "") is not None

    def _step_done(self, number: int) -> None:
        self.roots.stop_looking()
        if self.state == "recording":
            self.hold_signals()
            self.limits.step_done(number)

    @guard
    def at_exit(self) -> None:
        """The end of the process, by any way that still runs Python."""
        if os.getpid() != self._pid or self.state not in ("armed", "recording"):
            return
        reason = "exit" if getattr(sys, "last_type", None) is None else "exception"
        if self.state == "recording":
            self._last_dump(reason)
        elif self._is_rank():
            self.describe_only(reason)
        self.stop()

    def _last_dump(self, reason: str) -> None:
        """The job's handlers of signals may raise into it (Ctrl-C). The file is owed all the same, and the watcher has
        to be done with the one that it began for the signal: the interpreter ends when we are back."""
        raised: Optional[BaseException] = None
        is_written = "exit" not in self.settings.on
        for _ in range(_LAST_TRIES):
            try:
                self.signals.finish()
                if not is_written and not self._ended_by_oom():
                    self.dump(reason)
                is_written = True
                self.signals.silence()
                self.signals.finish()
                break
            except Exception:  # ours
                raise
            except BaseException as error:  # noqa: BLE001 - the job's, and handed on when we are done
                raised = error
        if raised is not None:
            raise raised

    def _ended_by_oom(self) -> bool:
        """An OOM ended the job: the snapshot of that moment is the one to keep."""
        if self.oom is None or ".oom" not in self.dumps or self.phases.steps_done > self.oom["steps_done"]:
            return False
        ended_by = getattr(sys, "last_type", None)
        if ended_by is None or "OutOfMemory" not in ended_by.__name__:
            return False
        stem = self.stem()
        return bool(self.dumper.promote(f"{stem}.oom", stem))

    def _is_rank(self) -> bool:
        """Whether a process without CUDA took part in the training: it has something to say."""
        if process.has_group() or self.frameworks.engines:
            return not process.is_worker() or process.has_group()
        return self.phases.steps_done > 0 and not process.is_worker()

    # Dumping.

    def stem(self) -> str:
        """The name of this process's files, claimed once; a rank that is known only later is another name."""
        rank = process.rank()
        if self._stem is None or (self._stem[0] is None and rank is not None and not self.dumps):
            self._stem = (rank, self.dumper.choose_stem(rank or 0))
        return self._stem[1]

    def dump(self, reason: str, tag: str = "") -> Optional[str]:
        """Writes snapshot and sidecar; the path, or None where that could not be done (and was said)."""
        if self.state != "recording" or self.started_us is None:
            return None
        return eagerly(self._dump, reason, tag)

    def _dump(self, reason: str, tag: str) -> Optional[str]:
        taken: Dict[str, Any] = {}

        began_us = now_us()

        def take() -> Any:
            snapshot, stats, steady = history.snapshot(self.torch)
            taken.update(stats=stats, steady=steady, dumped_us=now_us())
            return snapshot

        self.signals.dumping(here=True)
        try:
            path = self.dumper.write(self.stem() + tag, take, lambda: sidecar.describe(self, reason, taken), reason)
        finally:
            self.signals.dumping(here=False)
        if path is not None:
            self.dumps[tag] = self.phases.steps_done
            taken_s, written_s = (taken["dumped_us"] - began_us) / 1e6, (now_us() - taken["dumped_us"]) / 1e6
            notes.log(f"{reason}: wrote {os.path.basename(path)} (snapshot {taken_s:.2f} s, file {written_s:.2f} s)")
        return path

    def describe_only(self, reason: str) -> None:
        """A rank without CUDA has phases, roles and a configuration, and no snapshot."""
        rank = process.rank()
        notes.note(f"no CUDA device in rank {0 if rank is None else rank}: nothing to record")
        self.dumper.write(self.stem(), None, lambda: sidecar.describe(self, reason, {}), reason)

    # How it ends.

    @guard
    def finish(self, reason: str) -> None:
        """The end of a `with memtrace.recording()`: writes, and leaves the process as it was."""
        global RECORDER
        if self.state == "recording" and self.started_us is not None:
            self.dump(reason)
            self.end_history()
        elif self.state == "armed" and self._is_rank():
            self.describe_only(reason)
        self.stop()
        RECORDER = None

    def end_history(self) -> None:
        """Torch stops recording; nothing of ours is left in the job but the marks."""
        history.end(self.torch)
        self.started_us = None
        self.phases.tell_torch(None, None)
        self.state = "done"

    @guard
    def stop(self) -> None:
        """Takes everything back."""
        self.state = "done"
        self.roots.remove()
        self.hooks.threads_again()
        self.hooks.remove()
        self.frameworks.remove()
        self._undo_watch()
        importing.forget()
        self.signals.disarm()

    @guard
    def forked(self) -> None:
        """In a child made by fork: no handlers, no watcher, no dump. If it uses CUDA itself, it starts anew."""
        if self.state == "done":
            return
        self.signals.disarm()
        self._signals_wanted = True
        self.state = "forked"
        self.dumps, self._stem, self.oom = {}, None, None
        self.phases.notes.clear()
        self.frameworks.forked()
        self.phases.tell_torch(None, None)

    def watch_history(self) -> None:
        """A job that switches torch's recording off itself would empty it: what we have is written before that."""
        memory = self.torch.cuda.memory
        original = memory._record_memory_history

        def _record_memory_history(enabled: Any = "all", *args: Any, **kwargs: Any) -> Any:
            self._before_the_jobs_own(enabled)
            return original(enabled, *args, **kwargs)

        _record_memory_history.__wrapped__ = original  # type: ignore[attr-defined]
        memory._record_memory_history = _record_memory_history
        self._undo_watch = lambda: setattr(memory, "_record_memory_history", original)

    @guard
    def _before_the_jobs_own(self, enabled: Any) -> None:
        if self.state != "recording" or self.started_us is None or history.is_ours():
            return
        if not enabled:
            notes.note("the job switched torch's recording off: what was recorded until then was written before that")
            self.dump("api")
            self.started_us, self.state = None, "done"
        else:
            notes.note("the job set torch's recording itself: its own settings are in force from then on")
