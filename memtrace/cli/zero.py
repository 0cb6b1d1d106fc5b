"""`memtrace zero`: ZeRO's theory against a recording, or for a job that is still to run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace.cli import options
from memtrace.cli.options import Common
from memtrace.errors import QuestionError

if TYPE_CHECKING:
    from memtrace.analysis.given import Given
    from memtrace.api import Snapshot

EXAMPLES = """\b
Examples:
  memtrace zero snapshot.pickle                          theory against this recording
  memtrace zero snapshot.pickle --at end --json
  memtrace zero snapshot.pickle --config ds_config.json
  memtrace zero --params 13e9 --world 64                 no recording: all stages, to choose
  memtrace zero --model-config config.json --world 64 --config ds_config.json"""
_MAX_CONFIG_BYTES = 16 << 20
_MOST_PARAMS = 10**18
_MOST_RANKS = 1 << 24
_COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([KMBTkmbt]?)", re.ASCII)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _count(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """A number of parameters: 13e9, 13B, 12853473280."""
    if value is None:
        return None
    match = _COUNT.fullmatch(value.strip())
    number = float(re.sub("[_,]", "", match[1])) * _FACTORS[match[2].upper()] if match else 0
    if not match or not 1 <= number <= _MOST_PARAMS:
        raise click.BadParameter(f"{value!r} is not a number of parameters (13e9, 13B, 12853473280)")
    return int(match[1]) if match[1].isdigit() and not match[2] else round(number)


@click.command("zero", epilog=EXAMPLES)
@options.snapshot_argument
@click.option(
    "--config", type=click.Path(path_type=Path), help="The DeepSpeed configuration; 'auto' counts as not said."
)
@click.option(
    "--model-config", type=click.Path(path_type=Path), help="A transformers config.json: its parameters are counted."
)
@click.option("--params", metavar="COUNT", callback=_count, help="Trainable parameters: 13e9, 350M.")
@click.option("--world", type=click.IntRange(1, _MOST_RANKS), help="Data-parallel ranks.")
@click.option("--stage", type=click.IntRange(0, 3), help="ZeRO stage.")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="Of the parameters in the model.")
@click.option("--optimizer", metavar="NAME", help="adam, adamw, fusedadam, lamb, lion, adagrad, muon, momentum, sgd.")
@click.option("--at", metavar="WHEN", help="peak (default), end, oom, an event number, or seconds: 1.42s.")
@options.device_option
@options.common
def command(
    common: Common,
    snapshot: str | None,
    config: Path | None,
    model_config: Path | None,
    params: int | None,
    world: int | None,
    stage: int | None,
    dtype: str | None,
    optimizer: str | None,
    at: str | None,
    device: int | None,
) -> None:
    """What ZeRO should keep on a rank, what this DeepSpeed keeps, and what SNAPSHOT shows, term by term.

    The job is read from the recording; what is given here or in --config beats that. Without SNAPSHOT, --params (or
    --model-config) and --world plan a job: all stages side by side. Else the newest recording is taken.
    """
    if params is not None and model_config is not None:
        raise click.UsageError("--params and --model-config both say how many parameters there are")
    given = _given(config, model_config, params=params, world=world, stage=stage, dtype=dtype, optimizer=optimizer)
    if snapshot is None and given.params is not None:
        if at is not None or device is not None:
            raise click.UsageError("--at and --device need a SNAPSHOT")
        _plan(given, common)
    else:
        _compare(snapshot, given, at or "peak", device, common)


def _given(config: Path | None, model_config: Path | None, **said: Any) -> Given:
    """Flags, then the model's configuration, then DeepSpeed's."""
    from memtrace.analysis.given import Given, read_config
    from memtrace.attribution.theory import OPTIMIZER_BYTES

    name = said["optimizer"]
    if name is not None and name.lower().replace("_", "").replace("-", "") not in OPTIMIZER_BYTES:
        raise QuestionError.unknown("optimizer", name, OPTIMIZER_BYTES, where="memtrace's table")
    sources = {key: f"--{key}" for key, value in said.items() if value is not None}
    given = Given(**said, sources=sources)
    if model_config is not None:
        from memtrace.attribution.theory_meta import model_sizes

        sizes = model_sizes(_text(model_config), str(model_config))
        given = given.over(Given(params=sizes.params, numels=sizes.numels, sources={"params": sizes.source}))
    if config is not None:
        given = given.over(read_config(_json(config), str(config)))
    return given


def _text(path: Path) -> str:
    from memtrace.errors import SourceError, TooLargeError
    from memtrace.io.opening import read_small

    try:
        return read_small(str(path), _MAX_CONFIG_BYTES).decode("utf-8-sig")
    except TooLargeError as error:
        raise QuestionError(f"{path} is too large for a configuration") from error
    except SourceError as error:
        raise QuestionError(error.message, hint="A configuration is a JSON file.") from error
    except UnicodeDecodeError as error:
        raise QuestionError(f"{path} is not text", hint="A configuration is a JSON file in UTF-8.") from error


def _json(path: Path) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    text = _text(path)
    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise QuestionError(f"{path} is nested too deep for a configuration") from error
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
        comments = "//" in line or "/*" in line or line.lstrip().startswith("#")
        hint = (
            "JSON has no comments: take them out."
            if comments
            else "DeepSpeed reads plain JSON: no comments, no trailing commas."
        )
        raise QuestionError(
            f"{path}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}", hint=hint
        ) from error
    except ValueError as error:
        what = str(error) if "is no number" in str(error) else "a number in it is far too long"
        raise QuestionError(f"{path}: {what}", hint="Write a plain number.") from error


def _plan(given: Given, shared: Common) -> None:
    from memtrace.analysis.zero import notices, planned
    from memtrace.attribution.theory import plan

    setup = planned(given)
    stages = plan(setup)
    options.show_notices(notices(given), shared)
    if shared.json:
        from memtrace.cli import zero_json

        zero_json.write_plan(given, setup, stages, notices(given))
    else:
        from memtrace.cli import zero_text

        zero_text.write_plan(given, setup, stages, shared)


def _compare(snapshot: str | None, given: Given, at: str, device: int | None, shared: Common) -> None:
    from memtrace.analysis.zero import notices

    opened: Snapshot = options.open_snapshot(snapshot, shared)
    chosen = options.choose_device(opened, device, shared)
    answer = opened.zero(at, given, chosen)
    said = (*notices(given, answer), *opened.notices(chosen))
    options.show_notices(said, shared)
    if shared.json:
        from memtrace.cli import zero_json

        zero_json.write(opened, chosen, answer, said)
    else:
        from memtrace.cli import zero_text

        zero_text.write(opened, answer, at, shared)
