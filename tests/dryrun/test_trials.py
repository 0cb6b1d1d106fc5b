"""`--try`: what of a command is changed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtrace.dryrun import trials
from memtrace.errors import DryRunError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}})
    )
    return path


def changed(config: Path, *words: str, **values: str) -> tuple[list[str], dict[str, object]]:
    folder = config.parent / "trial"
    found = trials.change(words, {}, {key.replace("__", "."): value for key, value in values.items()}, folder)
    assert found.config is not None
    path, text = found.config
    assert path == folder / "ds.json"
    return list(found.argv), json.loads(text)


def test_a_setting_of_deepspeed_goes_into_a_copy(config: Path) -> None:
    before = config.read_text()
    argv, content = changed(config, "train.py", "--deepspeed_config", str(config), zero_optimization__stage="3")
    assert content["zero_optimization"] == {"stage": 3}
    assert content["train_batch_size"] == 64
    assert argv == ["train.py", "--deepspeed_config", str(config.parent / "trial" / "ds.json")]
    assert config.read_text() == before


def test_the_batch_size_that_follows_from_the_micro_batch_is_left_to_deepspeed(config: Path) -> None:
    argv, content = changed(config, "train.py", f"--deepspeed={config}", micro_batch="2")
    assert content == {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    assert argv == ["train.py", f"--deepspeed={config.parent / 'trial' / 'ds.json'}"]


def test_the_trainers_own_option_is_changed_with_it(config: Path) -> None:
    argv, _ = changed(config, "t.py", "--per_device_train_batch_size", "8", "--deepspeed", str(config), micro_batch="4")
    assert argv[1:3] == ["--per_device_train_batch_size", "4"]


def test_options_of_the_script_and_variables(tmp_path: Path) -> None:
    found = trials.change(["t.py", "--seq=5"], {}, {"--seq": "7", "--new": "x", "PYTORCH_ALLOC_CONF": "a:b"}, tmp_path)
    assert (list(found.argv), dict(found.environ), found.config) == (
        ["t.py", "--seq=7", "--new", "x"],
        {"PYTORCH_ALLOC_CONF": "a:b"},
        None,
    )


@pytest.mark.parametrize(
    ("argv", "key", "said"),
    [
        (["t.py"], "micro_batch", "micro_batch has no place"),
        (["t.py"], "zero_optimization.stage", "names no DeepSpeed configuration"),
        (["t.py", "--deepspeed", "ds.json"], "train_batch_size.a", "no group of settings"),
        (["t.py", "--deepspeed", "no.json"], "a", "cannot be read"),
    ],
)
def test_a_key_without_a_place_is_refused(
    config: Path, argv: list[str], key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    with pytest.raises(DryRunError, match=said):
        trials.change(argv, {}, {key: "1"}, config.parent / "trial")


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=5..1", "a=1..999999999"])
def test_what_is_no_axis(text: str) -> None:
    with pytest.raises(ValueError, match=r"KEY=VALUE|comes before|more than"):
        trials.axis(text)


def test_a_grid_of_a_million_is_refused() -> None:
    with pytest.raises(DryRunError, match="1,000,000 combinations"):
        trials.grid([trials.axis("a=1..1000"), trials.axis("b=1..1000")])


def test_a_key_twice_is_refused() -> None:
    with pytest.raises(DryRunError, match="twice"):
        trials.grid([trials.axis("a=1"), trials.axis("a=2")])


@pytest.mark.parametrize("high", [1, 2, 7, 64, 1000])
def test_bisection_finds_the_largest_that_fits(high: int) -> None:
    for limit in range(high + 2):
        search, asked = trials.bisection(1, high), []
        number = next(search)
        try:
            while True:
                asked.append(number)
                number = search.send(number <= limit)  # type: ignore[attr-defined]
        except StopIteration:
            pass
        assert len(asked) == len(set(asked)), (limit, asked)
        assert max((one for one in asked if one <= limit), default=0) == min(limit, high)
        assert len(asked) <= 2 * high.bit_length() + 1


def test_deepspeed_as_a_switch_before_its_configuration(config: Path) -> None:
    """As most scripts are called: `--deepspeed` has no value there, and the next word is an option of its own."""
    argv, content = changed(
        config, "t.py", "--deepspeed", "--deepspeed_config", str(config), zero_optimization__stage="3"
    )
    assert argv == ["t.py", "--deepspeed", "--deepspeed_config", str(config.parent / "trial" / "ds.json")]
    assert content["zero_optimization"] == {"stage": 3}
