"""The extension modules, all optional: without a compiler the reference implementations in Python do the work. One is
in C++: its first line says so.

Everything else about the build is in pyproject.toml.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
ARGUMENTS = ["/O2", "/EHsc"] if sys.platform == "win32" else ["-O3", "-g0"]
# One build serves every Python from 3.11 on (the buffer protocol is in the stable ABI since); measured to cost nothing.
STABLE_ABI = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")


def extensions() -> list[Extension]:
    """One module a `.pyx` file. `optional`: a failing compiler is a warning, not an error."""
    return [
        Extension(
            ".".join(source.relative_to(ROOT).with_suffix("").parts),
            [source.relative_to(ROOT).as_posix()],
            depends=[part.relative_to(ROOT).as_posix() for part in sorted(ROOT.glob("memtrace/**/_*.pxi"))],
            extra_compile_args=ARGUMENTS,
            define_macros=[("Py_LIMITED_API", "0x030B0000"), ("CYTHON_LIMITED_API", "1")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            optional=True,
        )
        for source in sorted(ROOT.glob("memtrace/**/_*.pyx"))
    ]


setup(
    ext_modules=extensions(),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
