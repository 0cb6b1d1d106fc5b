"""Which workspaces cuDNN takes for convolutions, by shape: on a GPU, or what a dry run says in their place.

    python bench/convolutions.py truth.json                                    # on a GPU
    memtrace dryrun -o run -- python bench/convolutions.py said.json           # anywhere
    python bench/convolutions.py bench/convolutions-h200.json.xz said.json     # compares them

Each case is one convolution: its shapes, and for each pass the bytes of every allocation, in order. The first case is
for warming up.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

Case = dict[str, Any]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PLAIN: list[tuple[int, int, int, int, int, int, int]] = [
    # channels in and out, height (= width), window, stride, padding, groups
    (3, 64, 224, 7, 2, 3, 1), (64, 64, 56, 1, 1, 0, 1), (64, 64, 56, 3, 1, 1, 1), (64, 256, 56, 1, 1, 0, 1),
    (256, 128, 56, 1, 1, 0, 1), (128, 128, 56, 3, 2, 1, 1), (256, 512, 56, 1, 2, 0, 1), (128, 512, 28, 1, 1, 0, 1),
    (256, 256, 28, 3, 2, 1, 1), (256, 256, 14, 3, 1, 1, 1), (512, 512, 7, 3, 1, 1, 1), (1024, 2048, 14, 1, 2, 0, 1),
    (512, 2048, 7, 1, 1, 0, 1), (3, 64, 224, 3, 1, 1, 1), (64, 128, 112, 3, 1, 1, 1), (512, 512, 28, 3, 1, 1, 1),
    (3, 768, 224, 16, 16, 0, 1), (3, 1024, 224, 14, 14, 0, 1), (3, 96, 224, 4, 4, 0, 1), (96, 192, 56, 2, 2, 0, 1),
    (3, 32, 32, 3, 1, 1, 1), (32, 64, 32, 3, 1, 1, 1), (64, 128, 16, 3, 2, 1, 1), (1, 32, 28, 3, 1, 1, 1),
    (32, 64, 26, 3, 1, 1, 1), (1, 6, 28, 5, 1, 2, 1), (6, 16, 14, 5, 1, 0, 1), (16, 16, 32, 3, 1, 1, 1),
    (4, 320, 64, 3, 1, 1, 1), (320, 320, 64, 3, 1, 1, 1), (320, 640, 32, 3, 1, 1, 1), (640, 320, 32, 1, 1, 0, 1),
    (320, 4, 64, 3, 1, 1, 1), (320, 320, 64, 3, 2, 1, 1), (64, 64, 64, 3, 1, 1, 1), (128, 64, 64, 3, 1, 1, 1),
    (96, 96, 56, 7, 1, 3, 96), (32, 32, 112, 3, 1, 1, 32), (64, 64, 56, 3, 1, 1, 4), (128, 128, 28, 5, 1, 2, 1),
    (12, 12, 20, 3, 1, 1, 1), (33, 65, 17, 3, 1, 1, 1), (64, 64, 33, 2, 1, 0, 1), (256, 21, 65, 1, 1, 0, 1),
]  # fmt: skip
LINES: list[tuple[int, int, int, int, int, int]] = [
    (1, 512, 16000, 10, 5, 0), (512, 512, 3199, 3, 2, 0), (80, 512, 3000, 3, 1, 1), (512, 512, 3000, 3, 2, 1),
    (64, 64, 1000, 5, 1, 2), (768, 768, 512, 1, 1, 0),
]  # fmt: skip
VOLUMES: list[tuple[int, int, int, int, int, int]] = [
    (3, 64, 16, 3, 1, 1), (64, 64, 16, 3, 1, 1), (32, 64, 32, 3, 2, 1), (64, 32, 16, 1, 1, 0),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every case: by element type, layout and batch."""
    for dtype in BYTES:
        for last in (False, True):
            for batch in (1, 8, 32):
                for one in PLAIN:
                    yield _case(2, dtype, last, batch, one)
            for one in VOLUMES:
                yield _case(3, dtype, last, 2, (*one, 1))
        for batch in (1, 8):
            for one in LINES:
                yield _case(1, dtype, False, batch, (*one, 1))
    for batch, one in ((256, PLAIN[20]), (256, PLAIN[21]), (128, PLAIN[23]), (4, PLAIN[29]), (2, PLAIN[34])):
        yield _case(2, "float32", False, batch, one)
        yield _case(2, "float16", True, batch, one)


def _case(axes: int, dtype: str, last: bool, batch: int, one: tuple[int, ...]) -> Case:
    channels, outputs, size, window, stride, padding, groups = one
    return {
        "x": [batch, channels] + [size] * axes, "w": [outputs, channels // groups] + [window] * axes, "stride": stride,
        "padding": padding, "groups": groups, "dtype": dtype, "channels_last": last,
    }  # fmt: skip


def measured(case: Case) -> Case:
    """The case with the requests of its forward, its input's and its weights' gradient."""
    import torch

    dtype, axes = getattr(torch, case["dtype"]), len(case["x"]) - 2
    layout = torch.contiguous_format
    if case["channels_last"]:
        layout = torch.channels_last_3d if axes == 3 else torch.channels_last
    x = torch.empty(case["x"], device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.empty(case["w"], device="cuda", dtype=dtype).to(memory_format=layout)
    rest = ([case["stride"]] * axes, [case["padding"]] * axes, [1] * axes, False, [0] * axes, case["groups"])

    def requests(of: Any) -> list[int]:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
        try:
            kept = of()
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
        finally:
            torch.cuda.memory._record_memory_history(None)
        del kept
        return [entry["size"] for entry in trace if entry["action"] == "alloc"]

    forward = requests(lambda: torch.ops.aten.convolution(x, w, None, *rest))
    y = torch.ops.aten.convolution(x, w, None, *rest)
    g = torch.empty_like(y)
    found = {"y": list(y.shape), "forward": forward}
    del y
    for name, mask in (("data", [True, False, False]), ("weights", [False, True, False])):
        found[name] = requests(lambda: torch.ops.aten.convolution_backward(g, x, w, None, *rest, mask))  # noqa: B023
    return {**case, **found}


def measured_or_failed(case: Case) -> Case:
    """As `measured`; a shape for which cuDNN has no kernel has the error's text, and no requests."""
    try:
        return measured(case)
    except RuntimeError as error:
        return {**case, "error": str(error)[:200], "forward": [], "data": [], "weights": []}


def compare(truth: list[Case], said: list[Case]) -> str:
    """The calls that differ, how many of each pass do not, and how much of the workspaces' bytes is off."""
    lines: list[str] = []
    equal: Counter[tuple[str, ...]] = Counter()
    every: Counter[tuple[str, ...]] = Counter()
    off = total = 0
    for one, other in zip(truth, said, strict=True):
        for name, result in (("forward", "y"), ("data", "x"), ("weights", "w")):
            key = (one["dtype"], "channels last" if one["channels_last"] else "", f"{len(one['x']) - 2}d", name)
            every[key] += 1
            equal[key] += one[name] == other[name]
            off += abs(sum(one[name]) - sum(other[name]))
            total += sum(one[name]) - prod(one[result]) * BYTES[one["dtype"]]
            if one[name] != other[name]:
                shape = f"x {one['x']} w {one['w']} stride {one['stride']}"
                lines.append(f"{' '.join(key)}: {shape}: {one[name]}, said {other[name]}")
    lines += [f"{equal[key]:4} of {every[key]:4} {' '.join(key)}" for key in sorted(every)]
    lines.append(f"off by {off / total:.1%} of the bytes of all workspaces")
    return "\n".join([*lines, f"{sum(equal.values())} of {sum(every.values())} equal"])


def loaded(path: Path) -> list[Case]:
    """What `main` wrote, plain or packed by xz."""
    data = path.read_bytes()
    cases: list[Case] = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
    return cases


def main(arguments: list[str]) -> int:
    """Measures into the one file, or compares the two."""
    if len(arguments) == 2:
        print(compare(*(loaded(Path(one))[1:] for one in arguments)))
        return 0
    found = [measured_or_failed(case) for case in cases()]
    Path(arguments[0]).write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
