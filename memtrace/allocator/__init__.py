"""torch's caching allocator in numbers: size classes, exact replay, and the state before a trace began."""

from memtrace.allocator.counters import COUNTERS, POOLS, series, stats
from memtrace.allocator.replay import replay
from memtrace.allocator.result import Conflict, Lifetimes, Replay, Spans

__all__ = ["COUNTERS", "POOLS", "Conflict", "Lifetimes", "Replay", "Spans", "replay", "series", "stats"]
