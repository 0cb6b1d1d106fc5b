"""What a snapshot's pickle may be made of: the limits and the roles of containers, for both readers.

`scan` walks a pickle by these rules before Python loads it; `_decode` reads one by them. Both refuse the same.

A *role* says what a dict or list is, from where it is made: the dict at the top, a list of events, an event. Every
container with a role stands in the file once, in its place, and is never fetched from the memo: torch writes so, and
a reader that makes columns can forget an event once it has its row. All else (stacks and their frames, what memtrace
does not read) is *other* and may be shared.
"""

from __future__ import annotations

from enum import IntEnum

MAX_DEPTH = 30  # snapshots are 7 deep
MAX_INTEGER_BYTES = 9  # unsigned 64 bits and a sign
MAX_KEY_BYTES = 1024  # two equal long keys, looked up again and again, would compare for minutes
MAX_TEXT_BYTES = 1 << 20
MAX_DEVICES = 512
MAX_CONTAINERS = 500_000  # segments above all: of 2 MiB each they are 1 TB
MAX_NAMES = 1000  # different keys of events; of blocks
MAX_KEYS = 64  # of a dict with a role; torch's have at most 18
FREE_VALUES = 1_000_000  # at once on the stack; more must come with 16 bytes of file each, as C++ writes events

# Containers are what a short pickle can make most memory with: at worst a dict takes 240 bytes and is written in 5.
# A dict weighs 12, a list or tuple 6, and a pickle may weigh 3/4 of its length. Real ones weigh 1/6, at most 1/2.
# With strings, at worst 22 bytes in memory per byte, 8 MiB stay below 300 MB.
DICT_WEIGHT = 12
SEQUENCE_WEIGHT = 6
FREE_WEIGHT = 65536


class Role(IntEnum):
    """What a dict or a list is."""

    OTHER = 0
    TOP = 1
    TRACES = 2
    TRACE = 3
    EVENT = 4
    SEGMENTS = 5
    SEGMENT = 6
    BLOCKS = 7
    BLOCK = 8
    HISTORY = 9
    PAST = 10
    SETTINGS = 11
    TABLE = 12
    NOTES = 13
    NOTE = 14


# The keys under which a container has a role: (role of the dict, key) -> (is it a dict?, role).
BY_KEY = {
    (Role.TOP, "device_traces"): (False, Role.TRACES),
    (Role.TOP, "segments"): (False, Role.SEGMENTS),
    (Role.TOP, "allocator_settings"): (True, Role.SETTINGS),
    (Role.TOP, "external_annotations"): (False, Role.NOTES),
    (Role.SEGMENT, "blocks"): (False, Role.BLOCKS),
    (Role.BLOCK, "history"): (False, Role.HISTORY),
}
# What MAX_CONTAINERS counts: of these objects are made.
COUNTED = frozenset(
    {Role.TOP, Role.SEGMENTS, Role.SEGMENT, Role.HISTORY, Role.PAST, Role.SETTINGS, Role.TABLE, Role.NOTES}
)
# Dicts in which `frames` is a stack: a list of dicts that hold no lists or dicts.
WITH_STACK = frozenset({Role.EVENT, Role.SEGMENT, Role.BLOCK, Role.PAST})
# What the items of a list with a role are: (is it a dict?, role).
ITEMS = {
    Role.TRACES: (False, Role.TRACE),
    Role.TRACE: (True, Role.EVENT),
    Role.SEGMENTS: (True, Role.SEGMENT),
    Role.BLOCKS: (True, Role.BLOCK),
    Role.HISTORY: (True, Role.PAST),
    Role.NOTES: (True, Role.NOTE),
}
