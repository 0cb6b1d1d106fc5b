"""The terminal app for memtrace snapshots, on top of `memtrace.api`. `memtrace tui` finds it by name.

Nothing is here yet; the package holds the name and the place.
"""
