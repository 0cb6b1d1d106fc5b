"""What is kept of a snapshot from one run to the next, with what was decided of it: phases and categories."""

from __future__ import annotations

from collections.abc import Mapping

from memtrace.allocator import Replay
from memtrace.allocator.stored import Peaks, StoredReplays
from memtrace.attribution.result import Attribution
from memtrace.io.bundle import DamagedError
from memtrace.model import SnapshotData
from memtrace.timeline import Timeline


class Stored(StoredReplays):
    """The entry of one file. Decisions are those without the user's rules and without a sidecar."""

    def decisions(self, device: int, replay: Replay, data: SnapshotData) -> tuple[Timeline, Attribution] | None:
        """The timeline and the attribution of a device, if they were kept."""
        try:
            timeline, attribution = (
                self._get(f"timeline {device}", Timeline),
                self._get(f"categories {device}", Attribution),
            )
            if timeline is None or attribution is None:
                return None
            frames = data.stacks.frame_count
            if not timeline.is_sound(len(data.trace(device)), frames):
                raise DamagedError("no timeline of this trace")
            if not attribution.is_sound(len(replay.lifetimes), frames):
                raise DamagedError("no attribution of these blocks")
        except DamagedError:
            self._forget()
            return None
        return timeline, attribution

    def keep(
        self,
        data: SnapshotData,
        replays: Mapping[int, Replay],
        peaks: Mapping[int, Peaks],
        decisions: Mapping[int, tuple[Timeline, Attribution]] | None = None,
    ) -> bool:
        """Keeps a snapshot, its replays and what was decided, if that pays. Whether it is kept now."""
        more: dict[str, tuple[object, type]] = {}
        for device, (timeline, attribution) in (decisions or {}).items():
            more[f"timeline {device}"] = (timeline, Timeline)
            more[f"categories {device}"] = (attribution, Attribution)
        return self.keep_all(data, replays, peaks, more)
