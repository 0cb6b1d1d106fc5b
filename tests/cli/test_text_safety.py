"""Text from a file is shown as text: no markup, no control characters, no crash (contract.md, last section)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builders import SnapshotBuilder
from running import memtrace

NASTY = [
    "foo[/bar].py",
    "[red]text[/red]",
    "[bold",
    "\x1b]52;c;AAAA\x07",
    "\x1b[2J\x1b[31m",
    "line\nbreak\r\tand tab",
    "\u202egnp.exe\u2066",
    "\x9b31m",
    "\ud800 lone",
    "nul\x00",
    "x" * 100_000,
    ":smile:",
]
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def snapshot(path: Path, text: str) -> Path:
    raw = SnapshotBuilder().alloc(0x7F0000000000, 4 << 20, stack="f;g").annotation("a", "START").build()
    for event in raw["device_traces"][0]:
        for frame in event.get("frames", []):
            frame["name"] = frame["filename"] = text
    raw["external_annotations"][0]["name"] = text
    raw["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = text
    raw[text[:500]] = 1
    raw["device_traces"][0][-1]["compile_context"] = text
    raw["device_traces"][0].append({"action": text, "addr": 0, "size": 0, "stream": 0, "time_us": 2**60})
    import pickle

    path.write_bytes(pickle.dumps(raw))
    return path


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
@pytest.mark.parametrize("command", [("blame",), ("blame", "--by", "stack", "--full-stack"), ("blame", "--by", "tree"),
                                     ("blame", "--by", "file"), ("blame", "--by", "frame"), ("blame", "--by", "block"),
                                     ("info",), ("verify",), ("oom", "--if", "1GiB")], ids=" ".join)  # fmt: skip
def test_names_do_no_harm(tmp_path: Path, text: str, command: tuple[str, ...]) -> None:
    ran = memtrace(*command, snapshot(tmp_path / "x.pickle", text))
    assert ran.code in (0, 1)
    assert not UNSAFE.search(ran.out)
    assert not UNSAFE.search(ran.err)
    if text.startswith("[") and command[0] == "blame":
        assert text in ran.out


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_json_keeps_the_text_and_stays_ascii(tmp_path: Path, text: str) -> None:
    ran = memtrace("blame", "--by", "frame", "--json", snapshot(tmp_path / "x.pickle", text))
    assert ran.out.isascii()
    names = {frame["name"] for row in ran.document["data"]["rows"] for frame in row["stack"]}
    assert json.dumps(text) in {json.dumps(name) for name in names}


def test_colour_is_ours_alone(tmp_path: Path) -> None:
    path = snapshot(tmp_path / "x.pickle", "\x1b[35mpurple")
    assert "\x1b[35m" not in memtrace("blame", "--color", "always", path).out
    assert "\x1b" in memtrace("blame", "--color", "always", path).out


def test_a_nasty_path_is_safe_in_errors(tmp_path: Path) -> None:
    ran = memtrace("blame", str(tmp_path / "\x1b]52;c;x\x07\n[red].pickle"))
    assert ran.code == 3
    assert not UNSAFE.search(ran.err)
    assert len(ran.err.splitlines()) == 2


def test_a_newline_in_a_name_makes_no_row(tmp_path: Path) -> None:
    path = snapshot(tmp_path / "x.pickle", "x\n999.00  99.9  1  INJECTED")
    for command in (("--by", "stack"), ("--by", "file"), ("--by", "frame"), ("--by", "tree"), ("--by", "block"), ()):
        lines = memtrace("blame", *command, path).out.splitlines()
        assert not [line for line in lines if line.strip().startswith("999.00")]
