"""`--try`: a job's command and configuration with other values in it.

A key is a path into the DeepSpeed configuration (`zero_optimization.stage`), `micro_batch`, an option of the script
(`--seq-length`), or a variable of the environment (`PYTORCH_ALLOC_CONF`: capitals).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.errors import DryRunError

MICRO_BATCH = "micro_batch"

_CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
_CONFIG_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_BATCH_OPTIONS = ("--per_device_train_batch_size", "--micro_batch_size", "--micro-batch-size")
_BATCH_KEY = "train_micro_batch_size_per_gpu"
_DEPENDENT = ("train_batch_size",)
"""What DeepSpeed checks against the micro-batch, and works out where it is not given."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_MOST, _MOST_IN_A_RANGE = 1_000, 100_000
_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Axis:
    """A key and the values it is to take. `is_range`: all integers between the first and the last."""

    key: str
    values: tuple[str, ...]
    is_range: bool = False


def axis(text: str) -> Axis:
    """Raises ValueError.

    >>> axis("zero_optimization.stage=2,3").values, axis("micro_batch=1..4").values
    (('2', '3'), ('1', '2', '3', '4'))
    """
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key or not rest.strip():
        raise ValueError(f"{text!r} is no KEY=VALUE,VALUE or KEY=FIRST..LAST")
    match = _RANGE.fullmatch(rest.strip())
    if match is None:
        return Axis(key, tuple(value.strip() for value in rest.split(",")))
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise ValueError(f"{text!r}: {last} comes before {first}")
    if last - first >= _MOST_IN_A_RANGE:
        raise ValueError(f"{text!r} has more than {_MOST_IN_A_RANGE:,} values")
    return Axis(key, tuple(map(str, range(first, last + 1))), is_range=True)


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination, the last key changing fastest. Raises DryRunError where there are too many.

    >>> grid([Axis("a", ("1", "2")), Axis("b", ("x",))])
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    count = math.prod(len(one.values) for one in axes)
    if count > _MOST:
        raise DryRunError(f"{count:,} combinations are more than {_MOST:,}", hint="Try fewer values.")
    keys = [one.key for one in axes]
    if len(set(keys)) < len(keys):
        raise DryRunError("a key is given twice", hint="Put all its values into one --try KEY=A,B.")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(one.values for one in axes))]


@dataclass(frozen=True, slots=True)
class Changed:
    """A command and what its environment gets in addition; `config` is a file to be written before it runs."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    config: tuple[Path, str] | None


def change(argv: Sequence[str], environ: Mapping[str, str], values: Mapping[str, str], folder: Path) -> Changed:
    """The command with other values. A changed configuration goes into `folder`. Raises DryRunError for a key that has
    no place in this command."""
    words, added, settings = list(argv), dict[str, str](), dict[str, str]()
    for key, value in values.items():
        if key == MICRO_BATCH:
            given = [option for option in _BATCH_OPTIONS if _find(words, option) is not None]
            for option in given:
                _set_option(words, option, value)
            if _config_of(words, environ) is not None:
                settings[_BATCH_KEY] = value
            elif not given:
                raise DryRunError(
                    "micro_batch has no place in this command: there is no DeepSpeed configuration, and none of "
                    + ", ".join(_BATCH_OPTIONS),
                    hint="Name the script's own option: --try --batch-size=1,2,4",
                )
        elif key.startswith("-"):
            _set_option(words, key, value)
        elif _VARIABLE.fullmatch(key):
            added[key] = value
        else:
            settings[key] = value
    config = None
    if settings:
        config = _changed_config(words, {**environ, **added}, settings, folder, added)
    return Changed(tuple(words), added, config)


def _changed_config(
    words: list[str], environ: Mapping[str, str], settings: Mapping[str, str], folder: Path, added: dict[str, str]
) -> tuple[Path, str]:
    place = _config_of(words, environ)
    if place is None:
        raise DryRunError(
            f"{next(iter(settings))} is no place in this command: it names no DeepSpeed configuration file",
            hint=f"Give it one ({_CONFIG_OPTIONS[0]} ds.json), or try an option of the script: --try --lr=1,2",
        )
    source = Path(place)
    content = _read_config(source)
    for key, value in settings.items():
        _set(content, key, _number(value))
        if key == _BATCH_KEY:
            for other in _DEPENDENT:
                content.pop(other, None)
    target = folder / source.name
    for option in _CONFIG_OPTIONS:
        if _named_config(words, option) is not None:
            _set_option(words, option, str(target))
    if _CONFIG_VARIABLE in environ:
        added[_CONFIG_VARIABLE] = str(target)
    return target, json.dumps(content, indent=1) + "\n"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8")) if path.stat().st_size <= _CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise DryRunError(f"the DeepSpeed configuration {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DryRunError(f"{path} is no DeepSpeed configuration: no JSON object")
    return content


def _config_of(words: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The DeepSpeed configuration file that the command names."""
    named = (_named_config(words, option) for option in _CONFIG_OPTIONS)
    return next((value for value in named if value is not None), None) or environ.get(_CONFIG_VARIABLE)


def _named_config(words: Sequence[str], option: str) -> str | None:
    """The file that an option names: `--deepspeed` may also be a switch before other options."""
    at = _find(words, option)
    value = None if at is None else _value(words, at)
    return value if value is not None and value.endswith(".json") else None


def _find(words: Sequence[str], option: str) -> int | None:
    for index, word in enumerate(words):
        if word == option or word.startswith(option + "="):
            return index
    return None


def _value(words: Sequence[str], at: int) -> str | None:
    if "=" in words[at]:
        return words[at].partition("=")[2]
    return words[at + 1] if at + 1 < len(words) else None


def _set_option(words: list[str], option: str, value: str) -> None:
    """In its place, else at the end."""
    at = _find(words, option)
    if at is None:
        words += [option, value]
    elif "=" in words[at]:
        words[at] = f"{option}={value}"
    elif at + 1 < len(words):
        words[at + 1] = value
    else:
        words.append(value)


def _set(content: dict[str, Any], path: str, value: Any) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        inner = content.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise DryRunError(f"{path}: {folder} is no group of settings in the DeepSpeed configuration")
        content = inner
    content[name] = value


def _number(text: str) -> Any:
    """As JSON has it; `5e7` is an integer, as DeepSpeed wants its bucket sizes.

    >>> _number("5e7"), _number("true"), _number("1e-5"), _number("cpu")
    (50000000, True, 1e-05, 'cpu')
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


def bisection(low: int, high: int) -> Iterator[int]:
    """Asks `send(fits)` for each number it yields; the largest that fits is the last for which it was told so.

    >>> def largest(limit, low, high):
    ...     asked, search = [], bisection(low, high)
    ...     number = next(search)
    ...     try:
    ...         while True:
    ...             asked.append(number)
    ...             number = search.send(number <= limit)
    ...     except StopIteration:
    ...         return max([one for one in asked if one <= limit], default=None), len(asked)
    >>> largest(5, 1, 64), largest(0, 1, 64), largest(99, 1, 64)
    ((5, 6), (None, 1), (64, 7))
    """
    fitting, number = low - 1, low
    while number <= high:  # doubling first: the small ones are quick, and most of what is large does not fit
        fits = yield number
        if not fits:
            high = number - 1
            break
        fitting = number
        if number == high:
            return
        number = min(number * 2, high)
    while fitting >= low and fitting < high:
        middle = (fitting + high + 1) // 2
        fits = yield middle
        if fits:
            fitting = middle
        else:
            high = middle - 1
