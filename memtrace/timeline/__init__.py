"""Phases and steps of a trace, and where each was read from. `find` finds them; this is the answer, quick to import."""

from memtrace.timeline.timeline import PHASES, SOURCES, Phase, Timeline, in_words

__all__ = ["PHASES", "SOURCES", "Phase", "Timeline", "in_words"]
