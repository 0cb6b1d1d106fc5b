"""Text that came from a file, made harmless (contract.md, last section).

A snapshot's function names, paths and annotations are written by somebody else. Control characters
(C0, C1, DEL), bidirectional overrides and line separators could move the cursor, write to the clipboard
or reorder what a person reads; each becomes the replacement character. Markup is not handled here: the
command line hands rich `Text` objects, never markup strings.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, embeddings, overrides, isolates
    "\u2028\u2029\ufeff"  # line and paragraph separator, byte order mark
    "\ud800-\udfff]"  # lone surrogates: no terminal encoding takes them
)


def printable(text: str) -> str:
    """`text` with every character that could act on a terminal replaced by U+FFFD, one for one.

    >>> printable("ok\\x1b]52;c;AAAA\\x07")
    'ok\ufffd]52;c;AAAA\ufffd'
    """
    return _UNSAFE.sub("\ufffd", text)
