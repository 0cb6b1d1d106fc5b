"""What the first bytes of a file are: a pickle, markup, or something else that deserves its own hint."""

from __future__ import annotations

import re

from memtrace.errors import GitLfsPointerError, NotAPickleError, NotASnapshotError, SourceError
from memtrace.io.opening import COPY_AGAIN

_HOW_TO_WRITE = "A snapshot is what torch.cuda.memory._dump_snapshot('snapshot.pickle') writes."


def is_pickle(head: bytes) -> bool:
    """Whether a pickle of protocol 2 or newer begins so."""
    return head[:1] == b"\x80" and not head.startswith(_TORCH_SAVE_BEFORE_1_6)


def is_markup(head: bytes) -> bool:
    """Whether HTML or XML begins so."""
    return head[:256].removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<"


_TORCH_SAVE_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_PICKLES = (b"(dp", b"(lp", b"}q\x00", b"]q\x00", b"}q\x01", b"]q\x01")
_TEXT = re.compile(rb"[\t\n\f\r\x1b\x20-\x7e\x80-\xff]+")


def no_pickle(head: bytes, shown: str) -> SourceError:
    """What `head`, the beginning of something else, is instead."""
    if not head:
        return NotAPickleError(f"{shown} is empty", hint=COPY_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        hint = "Fetch the file itself: git lfs pull"
        return GitLfsPointerError(f"{shown} is a Git-LFS pointer, not the file it stands for", hint=hint)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        message = f"{shown} is a zip archive, as torch.save writes; snapshots are plain pickles"
        return NotAPickleError(message, hint=_HOW_TO_WRITE + " If one is inside, unzip it first.")
    if head.startswith(_TORCH_SAVE_BEFORE_1_6):
        return NotAPickleError(f"{shown} was written by torch.save", hint=_HOW_TO_WRITE)
    if head.startswith(b"BZh"):
        return NotAPickleError(f"{shown} is bzip2, which is not read", hint="Unpack it first: bunzip2")
    if head.startswith(_OLD_PICKLES):
        message = f"{shown} is a pickle of protocol 0 or 1; torch writes 2 or newer"
        return NotASnapshotError(message, hint=_HOW_TO_WRITE)
    return NotAPickleError(f"{shown} is {_kind_of_text(head)}", hint=_HOW_TO_WRITE)


def _kind_of_text(head: bytes) -> str:
    start = head[:256].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"<":
        return "a web page without a snapshot of torch's plot tool in it"
    if start[:1] in (b"{", b"["):
        return "JSON, not a pickle"
    if _TEXT.fullmatch(head[:1024]) and head.isascii():
        return "text, not a pickle"
    return f"no pickle: it begins with {head[:8]!r}"
