"""The extension modules, all optional: without a C compiler the reference implementations in Python do the work.

Everything else about the build is in pyproject.toml.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
ARGUMENTS = ["/O2"] if sys.platform == "win32" else ["-O3"]


def extensions() -> list[Extension]:
    """One module a `.pyx` file. `optional`: a failing compiler is a warning, not an error."""
    return [
        Extension(
            ".".join(source.relative_to(ROOT).with_suffix("").parts),
            [source.relative_to(ROOT).as_posix()],
            extra_compile_args=ARGUMENTS,
            optional=True,
        )
        for source in sorted(ROOT.glob("memtrace/**/_*.pyx"))
    ]


setup(ext_modules=extensions())
