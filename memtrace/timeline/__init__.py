"""Phases and steps of a trace, and where each was read from."""

from memtrace.timeline.find import timeline_of
from memtrace.timeline.timeline import PHASES, SOURCES, Phase, Timeline, in_words

__all__ = ["PHASES", "SOURCES", "Phase", "Timeline", "in_words", "timeline_of"]
