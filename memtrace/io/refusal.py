"""Why a pickle is refused, in words: one table for both readers."""

from __future__ import annotations

from memtrace.errors import NotAPickleError, NotASnapshotError, SourceError, TruncatedError, UnsafePickleError
from memtrace.io.roles import MAX_DEPTH, MAX_INTEGER_BYTES, MAX_KEYS, MAX_TEXT_BYTES

HOW_TO_WRITE = "A snapshot is what torch.cuda.memory._dump_snapshot('snapshot.pickle') writes."
COPY_AGAIN = "Copy the file again from where it was made, or record anew: its writer may have been killed."
NOTHING_RUN = "Nothing was run. Do not open this file with pickle.load: torch's snapshots hold plain data only."
_FILLS_MEMORY = "No snapshot is written so; it would fill the memory."

Reason = tuple[type[SourceError], str, str]

REASONS: dict[str, Reason] = {
    "no_beginning": (TruncatedError, "is damaged: it has the end of a list without its beginning", COPY_AGAIN),
    "not_there": (TruncatedError, "is damaged: it has an operation on values that are not there", COPY_AGAIN),
    "no_container": (TruncatedError, "is damaged: it has values for no list or dict that could take them", COPY_AGAIN),
    "kept_twice": (TruncatedError, "is damaged: it has a container kept twice", COPY_AGAIN),
    "no_value": (TruncatedError, "is damaged: it has a key without its value", COPY_AGAIN),
    "not_kept": (TruncatedError, "is damaged: it fetches a value that was never kept", COPY_AGAIN),
    "negative_length": (TruncatedError, "is damaged: it has an integer of negative length", COPY_AGAIN),
    "not_utf8": (TruncatedError, "is damaged: it has a text that is not UTF-8", COPY_AGAIN),
    "left_over": (TruncatedError, "is damaged: it ends with more than one value", COPY_AGAIN),
    "itself": (NotASnapshotError, "holds a list or dict that contains itself", HOW_TO_WRITE),
    "numbering": (UnsafePickleError, "does not number what it keeps one by one", _FILLS_MEMORY),
    "keeps_number": (NotASnapshotError, "keeps a number to fetch it again, as no pickler does", HOW_TO_WRITE),
    "too_deep": (NotASnapshotError, f"nests more than {MAX_DEPTH} lists and dicts", HOW_TO_WRITE),
    "bad_key": (NotASnapshotError, "holds a dict whose keys are not short strings", HOW_TO_WRITE),
    "too_heavy": (UnsafePickleError, "holds more lists and dicts than a file of its length should", _FILLS_MEMORY),
    "too_many_values": (UnsafePickleError, "has more values at once than a file of its length should", _FILLS_MEMORY),
    "too_many_keys": (
        NotASnapshotError,
        f"has a dict of more than {MAX_KEYS} keys",
        HOW_TO_WRITE,
    ),
    "long_integer": (NotASnapshotError, f"holds an integer of more than {MAX_INTEGER_BYTES} bytes", HOW_TO_WRITE),
    "long_text": (NotASnapshotError, f"holds a text of more than {MAX_TEXT_BYTES:,} bytes", HOW_TO_WRITE),
    "shared": (NotASnapshotError, "has a list or dict in two places that torch writes once", HOW_TO_WRITE),
    "misplaced": (NotASnapshotError, "has a list or dict where a snapshot has another", HOW_TO_WRITE),
    "too_many_devices": (NotASnapshotError, "has events of more devices than any machine has", HOW_TO_WRITE),
    "too_many_containers": (NotASnapshotError, "holds more segments than any machine has", HOW_TO_WRITE),
    "too_many_names": (NotASnapshotError, "has more different keys than torch has names for", HOW_TO_WRITE),
    "too_many_actions": (NotASnapshotError, "has more kinds of events than torch knows", HOW_TO_WRITE),
}
"""What a walk stopped at -> (error, what the pickle does, hint)."""

_RUNS_CODE = {
    0x63: "import something by name",  # GLOBAL
    0x93: "import something by name",  # STACK_GLOBAL
    0x69: "create an object (INST)",
    0x6F: "create an object (OBJ)",
    0x81: "create an object (NEWOBJ)",
    0x92: "create an object (NEWOBJ_EX)",
    0x52: "call a function (REDUCE)",
    0x62: "set an object's state (BUILD)",
    0x50: "resolve a persistent id (PERSID)",
    0x51: "resolve a persistent id (BINPERSID)",
    0x82: "use an extension code (EXT1)",
    0x83: "use an extension code (EXT2)",
    0x84: "use an extension code (EXT4)",
}

_ANOTHER_PICKLE = {
    **dict.fromkeys((0x42, 0x43, 0x8E), "bytes"),
    **dict.fromkeys((0x54, 0x55), "Python 2 byte strings"),
    0x96: "a bytearray",
    **dict.fromkeys((0x97, 0x98), "a buffer outside the file"),
    **dict.fromkeys((0x8F, 0x90), "a set"),
    0x91: "a frozenset",
    **dict.fromkeys((0x49, 0x4C, 0x46, 0x53, 0x56, 0x70, 0x67, 0x32), "values of pickle protocol 0"),
    **dict.fromkeys((0x64, 0x6C), "lists and dicts of pickle protocol 0"),
    **dict.fromkeys((0x30, 0x31), "values that are thrown away"),
}


def refusal(failure: str, at: int) -> SourceError:
    """The error for a reason in `REASONS`, met at byte `at` of the pickle."""
    error, what, hint = REASONS[failure]
    return error(f"at byte {at:,} the pickle {what}", hint=hint)


def cut_off(size: int) -> SourceError:
    """The error for a pickle that ends before its end."""
    return TruncatedError(f"the pickle is cut off: {size:,} bytes and no end", hint=COPY_AGAIN)


def opcode_refusal(at: int, here: bytes, texts: tuple[str, str] | None) -> SourceError:
    """The error for an opcode that no snapshot has. `here`: the pickle from it on; `texts`: the two right before it."""
    opcode = here[0]
    place = f"at byte {at:,} the pickle"
    if opcode in _RUNS_CODE:
        name = ""
        if opcode == 0x63:
            lines = here[1:400].split(b"\n", 2)
            if len(lines) == 3:
                name = import_name(lines[0].decode("utf-8", "replace"), lines[1].decode("utf-8", "replace"))
        elif opcode == 0x93 and texts is not None:
            name = import_name(*texts)
        wish = f"import {name}" if name else _RUNS_CODE[opcode]
        return UnsafePickleError(f"{place} asks to {wish}", hint=NOTHING_RUN)
    if opcode in _ANOTHER_PICKLE:
        what = f"holds {_ANOTHER_PICKLE[opcode]}, as no snapshot does: it is another pickle"
        return NotASnapshotError(f"{place} {what}", hint=HOW_TO_WRITE)
    if at == 2:
        return NotAPickleError(f"{place} has {here[:1]!r}, which is no pickle operation", hint=HOW_TO_WRITE)
    return TruncatedError(
        f"{place} is damaged: it has {here[:1]!r}, which means nothing in a snapshot", hint=COPY_AGAIN
    )


def import_name(module: str, name: str) -> str:
    """`module.name` of something a pickle asks for, safe to show and short."""
    return ascii(f"{module[:200]}.{name[:200]}"[:200])
