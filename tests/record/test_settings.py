"""The settings on their way into a rank."""

from __future__ import annotations

import base64
import json
import re

import pytest

import memtrace
from memtrace.record.inside.settings import TWIN, VARIABLE, Settings, decode, encode, from_environment
from memtrace.record.inside.version import VERSION

EVERYTHING = Settings(
    directory="/runs/a b/\udc80é",
    max_entries=5,
    stacks="all",
    threaded_backward=False,
    modules=True,
    on=("exit", "peak", "signal:USR1"),
    every=7,
    steps=(3, 6),
    skip_first=2,
    duration_s=1.5,
    ranks=(0, 7),
    grace_s=3.0,
    dump_jobs=2,
    plain_paths=True,
    plain_host=True,
    world=8,
    rank=3,
    name="train",
    dryrun="{}",
)


def text_of(**changed: object) -> str:
    content = {"directory": "/runs/a", **changed}
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode()


@pytest.mark.parametrize("settings", [EVERYTHING, Settings("/runs/a"), Settings("/runs/a", ranks="all")])
def test_they_arrive_as_they_were_sent(settings: Settings) -> None:
    assert decode(encode(settings)) == settings


def test_the_ranks_say_the_release_that_they_were_copied_from() -> None:
    assert memtrace.__version__ == VERSION


def test_every_option_is_in_the_example() -> None:
    defaults = Settings._field_defaults
    assert [name for name in defaults if getattr(EVERYTHING, name) == defaults[name]] == []


@pytest.mark.parametrize("directory", ["/a", "/ab", "/abc", "/runs/a b;c,d"])
def test_no_launcher_has_to_quote_them(directory: str) -> None:
    assert re.fullmatch("[A-Za-z0-9_-]+", encode(Settings(directory)))


def test_a_later_release_may_say_more() -> None:
    assert decode(text_of(colour="red", every=3)) == Settings("/runs/a", every=3)


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "é", "====", "A", "a b",
        base64.urlsafe_b64encode(b"[1]").decode(),
        base64.urlsafe_b64encode(b"{}").decode(),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
        base64.urlsafe_b64encode(b"[" * 9999).decode(),
        text_of(directory=7), text_of(directory=""), text_of(max_entries="5"), text_of(max_entries=-1),
        text_of(max_entries=True), text_of(stacks="none"), text_of(stacks=[]), text_of(modules=1), text_of(on="exit"),
        text_of(on=[3]), text_of(steps=[1]), text_of(steps=[1, "2"]), text_of(duration_s=float("nan")),
        text_of(grace_s=float("inf")), text_of(ranks="some"), text_of(ranks=[-1]), text_of(name=None),
    ],
)  # fmt: skip
def test_anything_else_is_no_recording(text: str) -> None:
    assert decode(text) is None


def test_the_forwarded_name_will_do() -> None:
    text = encode(EVERYTHING)
    assert from_environment({VARIABLE: text}) == from_environment({TWIN: text}) == EVERYTHING
    assert TWIN.startswith("PYTHON")
    assert from_environment({}) is None
