"""How a job is to be run without a GPU: what the launcher decided. The device's own facts are in the environment."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Options(NamedTuple):
    """`steps` 0: to the job's own end, else begin no further one; `limit_s` 0: no limit of time.

    `mask`: the share of a large mask that is taken as true. `overflow_first`: steps whose gradients overflow. `gpu` as
    the user named it, `limit_bytes` its memory, `is_measured` whether what lies outside torch was measured on one.
    """

    gpu: str = ""
    limit_bytes: int = 0
    is_measured: bool = True
    steps: int = 0
    limit_s: float = 0.0
    mask: float = 0.5
    overflow_first: int = 0
    quiet: bool = False


def encode(options: Options) -> str:
    """As text."""
    return json.dumps(options._asdict(), separators=(",", ":"))


def decode(text: str) -> Options:
    """What `encode` was given; keys of another release are left out. Raises ValueError.

    >>> decode(encode(Options(gpu="H100", steps=3))).steps
    3
    """
    content: Any = json.loads(text)
    return Options(**{key: content[key] for key in Options._fields if key in content})
