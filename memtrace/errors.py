"""Every error a person can meet, each with its code and its exit code.

    MemtraceError
    ├── SourceError (exit 3): a named snapshot cannot be used
    │   ├── MissingFileError      missing-file
    │   ├── UnreadableError       unreadable
    │   ├── NotARecordingError    not-a-recording
    │   ├── GitLfsPointerError    git-lfs-pointer
    │   ├── NotAPickleError       not-a-pickle
    │   ├── UnsafePickleError     unsafe-pickle
    │   ├── TruncatedError        truncated
    │   ├── TooLargeError         too-large
    │   └── NotASnapshotError     not-a-snapshot
    ├── NoRecordingError (exit 4) no-recording
    ├── QuestionError (exit 2): the snapshot is fine, the question does not fit it
    ├── RulesError (exit 2)       bad-rules
    ├── DryRunError (exit 2)      dryrun
    └── MissingExtraError (exit 5) missing-extra

Only `memtrace.cli.diagnostics` prints them. Texts may quote the file: they are escaped there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MemtraceError(Exception):
    """Base of all errors that are the input's or the caller's, not ours.

    `code` is stable and machine readable; `hint` says what to do next.
    """

    code = "error"
    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}. {self.hint}"


class SourceError(MemtraceError):
    """A named snapshot cannot be used."""

    code = "unusable"
    exit_code = 3

    def about(self, path: str) -> SourceError:
        """The same error, saying which file it is about."""
        hint = self.hint or "torch did not write it so: it is damaged or edited. Copy it again, or record anew."
        return type(self)(self.message if path in self.message else f"{path}: {self.message}", hint=hint)


class MissingFileError(SourceError):
    """Nothing is at that path."""

    code = "missing-file"


class UnreadableError(SourceError):
    """The operating system or the decompressor refused."""

    code = "unreadable"


class NotARecordingError(SourceError):
    """A directory without recorded snapshots."""

    code = "not-a-recording"


class GitLfsPointerError(SourceError):
    """The small text file that Git-LFS leaves in place of the real one."""

    code = "git-lfs-pointer"


class NotAPickleError(SourceError):
    """The bytes are no pickle at all."""

    code = "not-a-pickle"


class UnsafePickleError(SourceError):
    """The pickle asks for code to be run, or is built to exhaust memory."""

    code = "unsafe-pickle"


class TruncatedError(SourceError):
    """The file ends too early or is damaged."""

    code = "truncated"


class TooLargeError(SourceError):
    """The input grows beyond what was allowed."""

    code = "too-large"


class NotASnapshotError(SourceError):
    """A readable pickle whose content is not a memory snapshot."""

    code = "not-a-snapshot"


class NoRecordingError(MemtraceError):
    """No snapshot was named and none was found."""

    code = "no-recording"
    exit_code = 4


class QuestionError(MemtraceError):
    """The snapshot is fine, the question does not fit it (unknown device, no OOM, ...)."""

    code = "usage"
    exit_code = 2

    @classmethod
    def unknown(cls, what: str, given: str, known: Iterable[object], *, where: str = "this snapshot") -> QuestionError:
        """An unknown device, rank or name: lists the valid ones and the nearest."""
        names = [str(name) for name in known]
        listed = ", ".join(names) if names else "none"
        nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
        meant = f" Did you mean {nearest[0]}?" if nearest else ""
        return cls(f"no {what} {given!r} in {where}", hint=f"There is: {listed}.{meant}")


class RulesError(MemtraceError):
    """A file of the user's own rules says something that is no rule. The message begins with file and line."""

    code = "bad-rules"
    exit_code = 2


class DryRunError(MemtraceError):
    """A dry run cannot be made of this: the command, the GPU or the machine does not allow it."""

    code = "dryrun"
    exit_code = 2


class MissingExtraError(MemtraceError):
    """An optional dependency is not installed."""

    code = "missing-extra"
    exit_code = 5
