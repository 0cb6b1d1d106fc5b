"""What every Python process of a recorded job runs first. `memtrace record` copies it beside the recording.

It also runs in helper programs of any age: it parses on Python 2.7, and does nothing there.
"""

import sys


def _enter():
    """Lets the recorder wait for torch. The path still holds our folder; the package keeps its own."""
    import os

    if os.environ.get("MEMTRACE_RECORD") or os.environ.get("PYTHONMEMTRACE_RECORD"):
        import memtrace_inside

        memtrace_inside.enter()


def _leave():
    """Undoes us: the path is the job's again, and `sitecustomize` is the next one on it, or none.

    Its errors, and the ImportError if there is none, are the interpreter's to see, as without us.
    """
    here = __file__.replace("\\", "/").rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry.replace("\\", "/") != here]
    us = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    finally:
        del us  # until here: Python 2 empties a module that nobody holds


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 8):
        try:
            _enter()
        except Exception:  # noqa: BLE001, S110 - the job starts as without us, whatever happens here
            pass
    _leave()
