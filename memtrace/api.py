"""The facade: open a snapshot, ask who owns its memory.

    snapshot = memtrace.load("fixtures/mlp-adamw.pickle.xz")
    snapshot.peak()                       # when, and how many bytes
    snapshot.blame(at="peak", by="stack") # who
    snapshot.replay().lifetimes           # every block, as numpy columns

Everything here is cached on first use; nothing changes the snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.allocator import COUNTERS, POOLS, Replay, series
from memtrace.allocator.stored import Highest, Peaks
from memtrace.analysis import moment
from memtrace.analysis.blame import BYS, Blame, blame_at
from memtrace.analysis.frames import ShownStacks, shown_stacks
from memtrace.attribution import Attribution
from memtrace.attribution.stored import Stored
from memtrace.errors import MissingExtraError, QuestionError
from memtrace.model import Notice, SnapshotData, TorchRange
from memtrace.timeline import Timeline
from memtrace.units import format_bytes, plural

# Others are imported where they are used: what the cache answers needs none of them, and they take their time.
if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memtrace.analysis.address_map import AddressMap
    from memtrace.analysis.block_table import BlockTable
    from memtrace.analysis.curves import Bands
    from memtrace.analysis.event_log import EventLog
    from memtrace.analysis.fits import Fits
    from memtrace.analysis.frame_paths import FramePaths
    from memtrace.analysis.frame_tree import FrameTree
    from memtrace.analysis.given import Given
    from memtrace.analysis.info import DeviceInfo
    from memtrace.analysis.job import Job
    from memtrace.analysis.oom import Desk, Oom
    from memtrace.analysis.reserved import Reserved
    from memtrace.analysis.stretch import Stretch
    from memtrace.analysis.tree import CallTree
    from memtrace.analysis.verify import Verdict
    from memtrace.analysis.whatif import Scenario, Simulation
    from memtrace.analysis.why import Why
    from memtrace.analysis.zero import Comparison
    from memtrace.attribution.rule import Rule
    from memtrace.attribution.user_rules import RulesLike, UserRules
    from memtrace.io.read import Progress
    from memtrace.io.recording import RankFile
    from memtrace.io.sidecar import Sidecar


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which a counter was highest. `event` -1: the state before the first event."""

    of: str
    bytes: int
    event: int
    time_us: int | None

    def __repr__(self) -> str:
        return f"Peak({format_bytes(self.bytes)} {self.of} after event {self.event})"


def load(
    path: str | bytes | os.PathLike[str],
    *,
    rank: int | None = None,
    max_bytes: int | None = None,
    progress: Progress | None = None,
    cache: bool = True,
    rules: RulesLike | None = None,
    at_oom: bool = False,
) -> Snapshot:
    """Opens a snapshot: a pickle of any torch release (plain, .gz, .xz, .zst, torch's plot HTML), or a recording.

    A directory is a recording: `rank` chooses in it (default: the rank with the highest peak, with `at_oom` the one
    that ran out of memory first). `max_bytes` bounds the uncompressed size (default 8 GiB); `progress(done, total)`
    hears about bytes read. A large file that was opened before comes from the user's cache, unless `cache` is False;
    only `Snapshot.remember` writes to it. `rules`: TOML files with rules of your own (docs/rules.md). Raises a
    `memtrace.errors.SourceError` that says what is wrong with the input. Nothing in a file is ever run.

    >>> load("fixtures/mlp-adamw.pickle.xz").peak()
    Peak(545.23 MiB allocated after event 192)
    """
    path = os.fsdecode(path)
    own = None if rules is None else _own_rules(rules)
    source: RankFile | None = None
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises for a name that is too long
        from memtrace.io import recording

        source = (recording.choose_at_oom if at_oom else recording.choose)(Path(path), rank)
        path = os.fspath(source.path)
    elif rank is not None:
        raise QuestionError("--rank chooses in a recording, and this is one file", hint="Leave --rank out.")
    stored = Stored.of(path, max_bytes) if cache else None
    data = None if stored is None else stored.data()
    beside = _sidecar(path)
    if data is not None:
        return Snapshot(data, recording=source, stored=stored, rules=own, sidecar=beside)
    data = _read(path, max_bytes, progress)
    if stored is not None and not stored.file_unchanged:
        stored = None
    return Snapshot(data, recording=source, stored=stored, is_new=True, rules=own, sidecar=beside)


def _sidecar(path: str) -> Sidecar | None:
    from memtrace.io.sidecar import read_sidecar

    return None if path == "-" else read_sidecar(Path(path))


def _own_rules(given: RulesLike) -> UserRules:
    from memtrace.attribution.user_rules import as_rules

    return as_rules(given)


def _read(path: str, max_bytes: int | None, progress: Progress | None) -> SnapshotData:
    from memtrace.io.read import read_snapshot
    from memtrace.io.source import DEFAULT_MAX_BYTES

    return read_snapshot(path, max_bytes=DEFAULT_MAX_BYTES if max_bytes is None else max_bytes, progress=progress)


class Snapshot:
    """One snapshot file, replayed on demand. Bytes are ints, events are indices, times microseconds since 1970.

    `was_read` says whether it was read now; else it came from the cache.
    """

    def __init__(
        self,
        data: SnapshotData,
        *,
        recording: RankFile | None = None,
        stored: Stored | None = None,
        is_new: bool = False,
        rules: UserRules | None = None,
        sidecar: Sidecar | None = None,
    ) -> None:
        self.data = data if sidecar is None or sidecar.torch is None else _of_release(data, sidecar.torch)
        self._as_read = data
        self.sidecar = sidecar
        self.recording = recording
        self.rules = rules
        self._stored = stored
        self.was_read = is_new
        self._has_news = is_new
        self._replays: dict[int, Replay] = {}
        self._peaks: dict[int, Peaks] = {}
        self._timelines: dict[int, Timeline] = {}
        self._attributions: dict[int, Attribution] = {}
        self._bands: dict[tuple[int, str], Bands] = {}
        self._block_tables: dict[int, BlockTable] = {}
        self._event_logs: dict[int, EventLog] = {}
        self._frame_paths: dict[tuple[bool, bool, bool], FramePaths] = {}
        self._simulations: dict[tuple[int, int | None], Simulation] = {}

    def __repr__(self) -> str:
        device = self.default_device
        if device is None:
            return f"Snapshot({self.data.path!r}: {self.data.torch}, empty)"
        peak = self.peak(device=device)
        events = plural(sum(len(trace) for trace in self.data.traces), "event")
        more = f" on {plural(len(self.devices), 'device')}" if len(self.devices) > 1 else ""
        return (
            f"Snapshot({self.data.path!r}: {self.data.torch}, {events}{more}, "
            f"peak {format_bytes(peak.bytes)} allocated after event {peak.event} of device {device})"
        )

    @property
    def devices(self) -> tuple[int, ...]:
        """Ordinals of the devices that have events or segments."""
        return self.data.devices

    @cached_property
    def default_device(self) -> int | None:
        """The device with the highest allocated peak; None in an empty snapshot."""
        if len(self.devices) < 2:
            return self.devices[0] if self.devices else None
        return max(self.devices, key=lambda device: (self.peak(device=device).bytes, -device))

    @property
    def complete(self) -> bool:
        """Whether every device's trace begins before its first allocation and lost nothing."""
        return all(self.replay(device).complete for device in self.devices)

    def notices(self, device: int | None = None) -> tuple[Notice, ...]:
        """What to know before trusting an answer: of the file, and of one device."""
        own = () if self.rules is None else self.rules.idle(self.attribution(device))
        return (*self.file_notices(device), *own)

    def file_notices(self, device: int | None = None) -> tuple[Notice, ...]:
        """The same without what the user's rules have to say: nothing is attributed for these."""
        replay, beside = self.replay(device), self.sidecar
        notices = (*replay.notices, *self.data.notices)
        if beside is None:
            return notices
        if beside.max_entries is not None:
            notices = tuple(self._sure_of_start(notice, replay, beside.max_entries) for notice in notices)
        return (*notices, *beside.notices)

    def _sure_of_start(self, notice: Notice, replay: Replay, max_entries: int) -> Notice:
        """Why a trace is incomplete, where the size of torch's ring is known."""
        if notice.code != "incomplete":
            return notice
        if self._is_ring_full(replay.device):
            cause = (
                f"torch's ring of {max_entries:,} events was full and lost the oldest, at least "
                f"{plural(replay.lost_events_at_least, 'event')}: record with a larger --max-entries"
            )
        else:
            cause = (
                "recording began when memory was allocated already, by at least "
                f"{plural(replay.lost_events_at_least, 'event')}; since then nothing was lost"
            )
        where = f"device {replay.device}: " if len(self.data.traces) > 1 else ""
        exact = "Counters are exact from the trace's start on; peaks before it are not known"
        return Notice(notice.code, f"{where}{cause}. {exact}")

    def _is_ring_full(self, device: int) -> bool:
        """Whether the recorder's ring is known to have been filled by this device's events."""
        most = None if self.sidecar is None else self.sidecar.max_entries
        return most is not None and len(self.data.trace(device)) >= most

    def replay(self, device: int | None = None) -> Replay:
        """Block lifetimes and counters of one device (default: the one with the highest peak)."""
        chosen = self._device(device)
        if chosen not in self._replays:
            self._replays[chosen], self._peaks[chosen] = self._stored_replay(chosen) or self._new_replay(chosen)
        return self._replays[chosen]

    def series(
        self, counter: str = "allocated_bytes", pool: str = "all", device: int | None = None
    ) -> NDArray[np.int64]:
        """One of torch's counters over time: entry 0 before the first event, entry e + 1 after event e."""
        if counter not in COUNTERS:
            raise QuestionError.unknown("counter", counter, COUNTERS, where="torch")
        if pool not in POOLS:
            raise QuestionError.unknown("pool", pool, POOLS, where="torch")
        return series(self.replay(device), counter, pool)

    def peak(self, of: str = "allocated", device: int | None = None) -> Peak:
        """The highest value of `of` (allocated, reserved, requested, active) in bytes, and when it was."""
        counter, chosen = _counter(of), self._device(device)
        replay = self.replay(chosen)
        peaks = self._peaks[chosen]
        if of not in peaks:
            values = series(replay, counter)
            peaks[of] = Highest(int(values.max()), int(values.argmax()) - 1)
        event = peaks[of].event
        times = self.data.trace(chosen).time_us
        return Peak(of, peaks[of].bytes, event, int(times[event]) if times is not None and event >= 0 else None)

    def event(self, at: str | int = "peak", of: str = "allocated", device: int | None = None) -> int:
        """The event index that `at` names: peak, end, oom, an event number, or a time such as `1.42s`."""
        _counter(of)
        chosen = self._device(device)
        if isinstance(at, float):
            raise QuestionError("a moment is an event number or text", hint="Write a time as '1.42s'.")
        if at == "peak":
            return self.peak(of, chosen).event
        return moment.event_at(str(at), of, self.replay(chosen), self.data.trace(chosen))

    def timeline(self, device: int | None = None) -> Timeline:
        """Phases and steps of one device's trace, and where each was read from."""
        chosen = self._device(device)
        if chosen not in self._timelines:
            self._decide(chosen)
        return self._timelines[chosen]

    def attribution(self, device: int | None = None) -> Attribution:
        """What each block of one device is for, in the order of `replay().lifetimes`, and why we think so."""
        chosen = self._device(device)
        if chosen not in self._attributions:
            self._decide(chosen)
        return self._attributions[chosen]

    def _decide(self, device: int) -> None:
        """Timeline and attribution of a device: what was kept, unless rules or a sidecar have a say."""
        replay, plain = self.replay(device), self.rules is None and self.sidecar is None
        found = self._stored.decisions(device, replay, self.data) if plain and self._stored is not None else None
        if found is None:
            found = self._new_decisions(replay)
            self._has_news |= plain
        self._timelines[device], self._attributions[device] = found

    def _new_decisions(self, replay: Replay) -> tuple[Timeline, Attribution]:
        from memtrace.timeline.find import timeline_of

        phases = () if self.sidecar is None else self.sidecar.phases
        timeline = timeline_of(self.data, replay.device, replay.lifetimes, phases)
        return timeline, self._attributed(replay, timeline)

    def _attributed(self, replay: Replay, timeline: Timeline) -> Attribution:
        """What the rules and the recorder say of the blocks of a replay."""
        from memtrace.attribution.attribute import attribute

        labels = None if self.rules is None else self.rules.labels
        return attribute(self.data, replay, timeline, self._rules(), labels, self.sidecar)

    def blame(
        self,
        at: str | int = "peak",
        of: str = "allocated",
        by: str = "category",
        device: int | None = None,
        *,
        cpp: bool = False,
    ) -> Blame:
        """Who owns the bytes of counter `of` at a moment; the rows sum to it. `cpp` keeps C++ frames apart.

        >>> blame = load("fixtures/mlp-adamw.pickle.xz").blame(by="file")
        >>> sum(row.bytes for row in blame.rows) == blame.total_bytes
        True
        """
        if by not in BYS:
            raise QuestionError.unknown("grouping", by, BYS, where="memtrace")
        chosen = self._device(device)
        event = self.event(at, of, chosen)
        shown = self._shown_with_cpp if cpp else self._shown
        return blame_at(
            self.data,
            self.replay(chosen),
            self.timeline(chosen),
            self.attribution(chosen),
            shown,
            event=event,
            of=of,
            by=by,
        )

    def sentence(self, answer: Blame, when: str = "", units: str = "auto") -> str:
        """An answer in one sentence: how much, when, in which job. `when`: as it was asked for (peak, end, oom)."""
        from memtrace.analysis.sentence import job_in_words, sentence

        return sentence(answer, when, job_in_words(self.data, self.job(answer.device), answer.device), units)

    def bands(self, by: str = "category", device: int | None = None) -> Bands:
        """Allocated memory by group, after any event; its groups sum to the counter.

        >>> snapshot = load("fixtures/mlp-adamw.pickle.xz")
        >>> peak = snapshot.peak()
        >>> int(snapshot.bands().at(np.array([peak.event])).sum()) == peak.bytes
        True
        """
        from memtrace.analysis.curves import BANDS, bands_of

        if by not in BANDS:
            raise QuestionError.unknown("grouping", by, BANDS, where="memtrace")
        chosen = self._device(device)
        if (chosen, by) not in self._bands:
            timeline, attribution = self.timeline(chosen), self.attribution(chosen)
            peak = self.peak(device=chosen).event
            self._bands[chosen, by] = bands_of(
                self.data, self.replay(chosen), timeline, attribution, self._shown, by=by, peak=peak
            )
        return self._bands[chosen, by]

    def block_table(self, device: int | None = None) -> BlockTable:
        """Every block of a device as a row for people: which are alive, in what order, which a filter chooses.

        >>> snapshot = load("fixtures/mlp-adamw.pickle.xz")
        >>> table, peak = snapshot.block_table(), snapshot.peak()
        >>> sum(table.row(block).size for block in table.alive(peak.event)) == peak.bytes
        True
        """
        from memtrace.analysis.block_table import BlockTable

        chosen = self._device(device)
        if chosen not in self._block_tables:
            self._block_tables[chosen] = BlockTable(
                self.data, self.replay(chosen), self.timeline(chosen), self.attribution(chosen), self._shown
            )
        return self._block_tables[chosen]

    def event_log(self, device: int | None = None) -> EventLog:
        """Every event of a device as a row for people, with the annotations between them.

        >>> log = load("fixtures/mlp-adamw.pickle.xz").event_log()
        >>> log.row(192).action, log.row(192).phase, log.annotation(0).name
        ('alloc', 'step', 'Optimizer.step#AdamW.step')
        """
        from memtrace.analysis.event_log import EventLog

        chosen = self._device(device)
        if chosen not in self._event_logs:
            self._event_logs[chosen] = EventLog(self.block_table(chosen))
        return self._event_logs[chosen]

    def stretch(self, first: int, last: int, device: int | None = None) -> Stretch:
        """What was allocated and freed in the events `first` to `last`, both included, by category."""
        from memtrace.analysis.stretch import stretch_of

        chosen = self._device(device)
        events = self.replay(chosen).events
        if not 0 <= first <= last < events:
            raise QuestionError(f"no events {first} to {last} in this trace", hint=f"Events are 0 to {events - 1}.")
        return stretch_of(self.replay(chosen), self.attribution(chosen), first, last)

    def ledger(self, at: str | int = "peak", device: int | None = None) -> Reserved:
        """What reserved memory is made of at a moment (`peak`: of reserved): the allocator's own part, by pool and
        stream, who waits, and which blocks pin what is free.

        >>> found = load("fixtures/two-streams.pickle.xz").ledger()
        >>> sum(pin.hostage_bytes for pin in found.pins) == found.ledger.stranded
        True
        """
        from memtrace.analysis.reserved import reserved_at

        chosen = self._device(device)
        return reserved_at(
            self.data,
            self.replay(chosen),
            self.timeline(chosen),
            self.attribution(chosen),
            self._shown,
            event=self.event(at, "reserved", chosen),
            sidecar=self.sidecar,
        )

    def address_map(self, at: str | int = "peak", device: int | None = None) -> AddressMap:
        """What torch holds at a moment (`peak`: of reserved), a row a segment: what lies where, what is free, and which
        blocks keep it. Its sizes sum to the reserved bytes.

        >>> snapshot = load("fixtures/two-streams.pickle.xz")
        >>> int(snapshot.address_map().size.sum()) == snapshot.peak("reserved").bytes
        True
        """
        from memtrace.analysis.address_map import address_map_at

        chosen = self._device(device)
        return address_map_at(self.data, self.replay(chosen), self._shown, self.event(at, "reserved", chosen))

    def why(self, at: str | int = "peak", of: str = "allocated", device: int | None = None) -> tuple[Why, ...]:
        """Which rules decided the categories of a moment, with the bytes and the frame of each, largest first."""
        from memtrace.analysis.why import why_at

        chosen = self._device(device)
        event = self.event(at, of, chosen)
        rules = {rule.id: rule for rule in self._rules()}
        return why_at(self.replay(chosen), self.attribution(chosen), self.data.stacks, rules, event=event, of=of)

    def _rules(self) -> tuple[Rule, ...]:
        """The user's own, then ours."""
        from memtrace.attribution.rules import ALL

        return ALL if self.rules is None else (*self.rules.rules, *ALL)

    def zero(self, at: str | int = "peak", given: Given | None = None, device: int | None = None) -> Comparison:
        """ZeRO's theory against what is allocated at a moment, term by term. `given` beats what the recording tells."""
        from memtrace.analysis.zero import compare

        chosen = self._device(device)
        event = self.event(at, "allocated", chosen)
        replay, timeline, attribution = self.replay(chosen), self.timeline(chosen), self.attribution(chosen)
        return compare(self.data, replay, timeline, attribution, event=event, given=given, **self._place())

    def job(self, device: int | None = None) -> Job | None:
        """What kind of DeepSpeed job was recorded: stage, ranks, parameters, dtype, and what told each. None: none."""
        from memtrace.analysis.job import infer_job

        chosen = self._device(device)
        timeline, attribution = self.timeline(chosen), self.attribution(chosen)
        return infer_job(self.data, self.replay(chosen), timeline, attribution, **self._place())

    def _place(self) -> dict[str, int | None]:
        """World and rank, where the recording says them."""
        world = None if self.recording is None else self.recording.world
        if world is None and self.sidecar is not None:
            world = self.sidecar.world
        beside = None if self.sidecar is None else self.sidecar.rank
        return {"world": world, "rank": beside if self.recording is None else self.recording.rank}

    def ooms(
        self, device: int | None = None, *, capacity: int | None = None, limit: int | None = None
    ) -> tuple[Oom, ...]:
        """Every request of a device that failed for want of memory, in order: what it asked, what was free, and why it
        failed. `capacity`: the device's memory, `limit`: torch's own cap, both in bytes, where the recording does not
        say them or says them wrong."""
        from memtrace.analysis.oom import oom_events
        from memtrace.attribution.asked import purposes

        chosen = self._device(device)
        replay, timeline = self.replay(chosen), self.timeline(chosen)
        events = oom_events(replay, self.data.trace(chosen))
        found = purposes(self.data, replay, timeline, self.attribution(chosen), events, self._attributed)
        return self._desk(chosen, capacity, limit).failed(events, found)

    def would_fit(
        self,
        size: int,
        at: str | int = "peak",
        device: int | None = None,
        *,
        capacity: int | None = None,
        limit: int | None = None,
    ) -> Oom:
        """Whether a request of `size` bytes would have fitted after a moment, and if not, why not."""
        chosen = self._device(device)
        return self._desk(chosen, capacity, limit).supposed(size, self.event(at, "allocated", chosen))

    def _desk(self, device: int, capacity: int | None, limit: int | None) -> Desk:
        from memtrace.analysis.capacity import capacity_of
        from memtrace.analysis.oom import Desk

        known = capacity_of(self.data, device, self.sidecar, capacity, limit)
        return Desk(self.data, self.replay(device), self.timeline(device), known)

    def simulation(
        self, device: int | None = None, *, limit: int | None = None, progress: Progress | None = None
    ) -> Simulation:
        """The recording, ready to be simulated under other settings of the allocator: see `whatif`. `limit`: torch's
        cap in bytes as somebody says it, tried where the recording does not fit without one."""
        from memtrace.analysis.capacity import capacity_of
        from memtrace.analysis.whatif import simulation

        chosen = self._device(device)
        if (chosen, limit) not in self._simulations:
            known = capacity_of(self.data, chosen, self.sidecar).limit_bytes
            replay, timeline = self.replay(chosen), self.timeline(chosen)
            self._simulations[chosen, limit] = simulation(self.data, replay, timeline, known, limit, progress)
        return self._simulations[chosen, limit]

    def whatif(self, device: int | None = None, **changes: Any) -> Scenario:
        """What the allocator would have done under other settings: `expandable_segments`, `max_split_size_mb`,
        `roundup_power2_divisions`, `garbage_collection_threshold`, `large_segment_size_mb`, `limit` (bytes),
        `empty_cache_every_step`, `torch` (a release). Its `prediction` is None where the simulation of the recorded
        setting is not the recording (`simulation().reason` says why).

        >>> load("fixtures/mlp-adamw.pickle.xz").whatif(expandable_segments=True).prediction.outcome.reserved_peak
        610271232
        """
        from memtrace.analysis.settings import Change

        change = Change(**changes)
        return self.simulation(device, limit=change.limit).scenario(change)

    def fits(self, device: int | None = None) -> Fits:
        """The smallest limit under which every request is served, under the recorded setting and the best one. Raises
        QuestionError where the simulation of the recorded setting is not the recording."""
        from memtrace.analysis.fits import fits

        simulation = self.simulation(device)
        if not simulation.is_exact:
            raise QuestionError(f"this recording cannot be simulated: {simulation.reason}")
        return fits(simulation)

    def tree(self, at: str | int = "peak", of: str = "allocated", device: int | None = None) -> CallTree:
        """The call tree of a moment: a networkx DiGraph of frames with edges weighted in bytes."""
        from memtrace.analysis.tree import call_tree

        return call_tree(self.blame(at, of, "tree", device))

    def frame_tree(
        self,
        at: str | int = "peak",
        of: str = "allocated",
        device: int | None = None,
        *,
        inverted: bool = False,
        folded: bool = True,
        cpp: bool = False,
    ) -> FrameTree:
        """The call tree of a moment as columns; its root is the counter `of`. `inverted`: from the allocating frames
        outwards to their callers. `folded`: of consecutive library frames one node, the call that says most. `cpp`
        keeps the C++ frames.

        >>> snapshot = load("fixtures/mlp-adamw.pickle.xz")
        >>> int(snapshot.frame_tree().bytes[0]) == snapshot.peak().bytes
        True
        """
        from memtrace.analysis.frame_paths import paths_of
        from memtrace.analysis.frame_tree import frame_tree_at

        chosen, view = self._device(device), (inverted, folded, cpp)
        event = self.event(at, of, chosen)
        if view not in self._frame_paths:
            shown = self._shown_with_cpp if cpp else self._shown
            self._frame_paths[view] = paths_of(shown, inverted=inverted, folded=folded)
        replay, attribution = self.replay(chosen), self.attribution(chosen)
        return frame_tree_at(replay, attribution, self._frame_paths[view], event=event, of=of)

    def verify(self, truth: Mapping[str, object] | None = None, device: int | None = None) -> Verdict:
        """The replay held against itself, and against `torch.cuda.memory_stats()` of the same moment if given."""
        from memtrace.analysis.verify import verify

        return verify(self.data, self.replay(device), truth)

    def verify_recorded(self, device: int | None = None) -> Verdict:
        """The replay held against itself and against what the recorder noted beside it, at the end and when recording
        began (unless the trace goes back less far, torch's ring having been full)."""
        from memtrace.analysis.verify import verify

        replay, beside = self.replay(device), self.sidecar
        if beside is None:
            return verify(self.data, replay)
        has_start = beside.is_about(replay.device) and (replay.complete or not self._is_ring_full(replay.device))
        return verify(self.data, replay, beside.stats_of(replay.device), beside.start if has_start else None)

    def info(self, device: int | None = None) -> DeviceInfo:
        """One page about a device."""
        from memtrace.analysis.info import device_info

        return device_info(self.data, self.replay(device), None if self.sidecar is None else self.sidecar.device)

    def to_pandas(self, device: int | None = None) -> Any:
        """Every block of a device as a pandas DataFrame. Raises MissingExtraError without pandas."""
        try:
            import pandas as pd  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise MissingExtraError("to_pandas() needs pandas", hint="pip install pandas") from error
        chosen = self._device(device)
        blocks = self.replay(chosen).lifetimes
        columns = {name: getattr(blocks, name) for name in blocks.__slots__ if name not in ("large", "span")}
        pool = np.where(blocks.large, "large", "small")
        attribution = self.attribution(chosen)
        category = np.array(attribution.categories)[attribution.category]
        return pd.DataFrame({**columns, "pool": pool, "category": category})

    def remember(self) -> bool:
        """Keeps the columns and the replays made so far in the user's cache, for the next `load` of this file.

        Whether anything was written: not for standard input, a small file, one that changed while it was read,
        nor when all of it is there. Takes about as long as copying the columns; call it when the answer is out.
        """
        if self._stored is None or not self._has_news:
            return False
        for device in self.devices:
            found = self._stored_replay(device) if device not in self._replays else None
            if found is not None:
                self._replays[device], self._peaks[device] = found
        for device in self._replays:
            self.peak(device=device)
        self._has_news = False
        decisions = {}
        if self.rules is None and self.sidecar is None:
            decisions = {device: (self._timelines[device], one) for device, one in self._attributions.items()}
        return self._stored.keep(self._as_read, self._replays, self._peaks, decisions)

    def _stored_replay(self, device: int) -> tuple[Replay, Peaks] | None:
        return None if self._stored is None else self._stored.replay(device, self.data)

    def _new_replay(self, device: int) -> tuple[Replay, Peaks]:
        from memtrace.allocator.replay import replay

        self._has_news = True
        return replay(self.data, device), {}

    @cached_property
    def _shown(self) -> ShownStacks:
        return shown_stacks(self.data.stacks)

    @cached_property
    def _shown_with_cpp(self) -> ShownStacks:
        return shown_stacks(self.data.stacks, cpp=True)

    def _device(self, device: int | None) -> int:
        chosen = self.default_device if device is None else device
        if chosen is None:
            raise QuestionError("the snapshot is empty: no device has events or segments")
        if chosen not in self.devices:
            raise QuestionError.unknown("device", str(chosen), self.devices)
        return chosen


def _of_release(data: SnapshotData, release: str) -> SnapshotData:
    """The same, recorded by a release of torch that is known; as in ranges, without the number of its patch."""
    short = ".".join(release.split(".")[:2])
    return replace(data, torch=TorchRange(short, short))


def _counter(of: str) -> str:
    if of not in moment.COUNTER:
        raise QuestionError.unknown("size", of, moment.COUNTER, where="torch")
    return moment.COUNTER[of]
