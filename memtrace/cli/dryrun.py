"""`memtrace dryrun`: runs a training job without a GPU, and leaves a recording of the memory it would have taken.

As with `record`, stdout and the exit code are the job's; what is ours goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace import paths
from memtrace.cli import diagnostics, dryrun_again, dryrun_options
from memtrace.cli.output import write_report
from memtrace.cli.record import cannot_fail, exit_as, keep, meta
from memtrace.units import format_bytes, plural

if TYPE_CHECKING:
    from memtrace.cli.dryrun_text import Answer
    from memtrace.dryrun.command import Plan
    from memtrace.dryrun.launch import Standin
    from memtrace.gpus import Gpu
    from memtrace.record.inside.settings import Settings
    from memtrace.record.launch import Outcome

EXAMPLES = """\b
Examples:
  memtrace dryrun -- python train.py                             does it fit on an H200, and what holds the peak
  memtrace dryrun --gpu A100-80 -- deepspeed --num_gpus 8 train.py --deepspeed_config ds.json
  memtrace dryrun --world 64 --rank 0,63 -- torchrun train.py    first and last rank of 64
  memtrace dryrun --gpu-memory 40GiB --steps 2 -- accelerate launch train.py"""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run: the unwrapped command, on which device, as which ranks of how many."""

    plan: Plan
    standin: Standin
    world: int | None
    ranks: tuple[int, ...]

    @property
    def devices(self) -> int:
        """GPUs that the program sees on its node."""
        return max(1, self.plan.local_world or min(self.world or 1, 8))


@click.command("dryrun", epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})
@dryrun_options.options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def command(command: tuple[str, ...], **options: Any) -> int:
    """Runs COMMAND without a GPU, in seconds, and says whether it fits on one and what would hold its memory.

    Torch and the program run for real, on a stand-in device that keeps account of memory and computes nothing: losses
    mean nothing. One rank runs alone, as one of as many as the job has. Needs Linux, a CUDA build of torch and a C++
    compiler. python, deepspeed, torchrun or accelerate; exit code and stdout are the job's own.
    """
    if not command:
        raise click.UsageError("there is no command to run; memtrace dryrun -- python train.py")
    if options["max_gpu_memory"] is not None:
        options["gpu_memory"] = options["max_gpu_memory"]
    if options["band"] and (options["tried"] or options["max_gpu_memory"] is not None):
        raise click.UsageError("--band is for one run, not for trials.")
    if options["report"] is not None and not _can_write(options["report"]):
        raise click.UsageError(f"--report: {options['report']} cannot be written.")
    job = _prepare(command, options)
    if options["tried"] or options["max_gpu_memory"] is not None:
        return _try(job, command, options)
    directory = _directory(command, options)
    settings = _settings(directory, job, options)
    if not options["quiet"]:
        _announce(job, directory)
    outcomes = _run_all(job, settings, command, quiet=options["quiet"])
    outcome = _together(outcomes)
    with cannot_fail("the recording is as the ranks left it"):
        answer = _finish(job, settings, command, outcome, options)
        if options["band"] and answer.fits is not None:
            _band(job, answer, options)
    return exit_as(outcome)


def _can_write(path: Path) -> bool:
    return os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK)


def _try(job: Job, command: Sequence[str], options: dict[str, Any]) -> int:
    """A dry run for each combination of values."""
    from memtrace.cli import dryrun_trials as trials

    folder = _directory(command, options)
    every = trials.Trials(_again(job, options), folder, options["jobs"])
    is_search = options["max_gpu_memory"] is not None
    with dryrun_again.ended_with_us():
        found = (trials.largest if is_search else trials.run)(every, options["tried"])
    trials.show(found)
    for sentence in trials.best(found, trials.searched(options["tried"])) if is_search else ():
        diagnostics.note(sentence)
    for sentence in trials.summary(found, folder):
        diagnostics.note(sentence)
    if options["report"] is not None:
        gpu = job.standin.gpu
        rows = trials.document(found)
        write_report(options["report"], "dryrun", {"gpu": gpu.name, "limit_bytes": gpu.capacity_bytes, "trials": rows})
    return int(all(one.result.fits is None for one in found))


def _again(job: Job, options: dict[str, Any]) -> dryrun_again.Plan:
    """The job with our own options, for a dry run within this one."""
    argv = job.plan.command(job.ranks[0], job.world or 1, 0)
    return dryrun_again.Plan(argv, job.plan.environ, _repeated(job, options))


def _repeated(job: Job, options: dict[str, Any]) -> list[str]:
    gpu = job.standin.gpu
    words = ["--gpu-memory", str(gpu.capacity_bytes), "--sm", f"{gpu.capability / 10:.1f}"]
    words += [] if options["gpu"] is None else ["--gpu", options["gpu"]]
    words += [] if job.world is None else ["--world", str(job.world)]
    words += [] if job.plan.local_world is None else ["--local-world", str(job.plan.local_world)]
    words += ["--rank", ",".join(map(str, job.ranks)), "--steps", str(options["steps"])]
    words += ["--overflow-first", str(options["overflow_first"]), "--stacks", options["stacks"]]
    words += ["--max-entries", str(options["max_entries"])]
    words += [] if options["limit"] is None else ["--limit", str(options["limit"])]
    for key, value in options["assume"].items():
        words += ["--assume", f"{key}={value}"]
    words += [flag for flag in ("--beside-gpu", "--plain-paths", "--plain-host") if options[flag[2:].replace("-", "_")]]
    return words


def _prepare(command: Sequence[str], options: dict[str, Any]) -> Job:
    """Raises what speaks against a dry run, before anything is written."""
    from memtrace.dryrun import build, launch
    from memtrace.dryrun.command import plan
    from memtrace.dryrun.unwrap import UNCOUNTED
    from memtrace.errors import DryRunError

    if not options["beside_gpu"]:
        launch.refuse_a_working_gpu()
    gpu = _gpu(options["gpu"], options["gpu_memory"], options["sm"])
    planned = plan(command, launch.current())
    if options["local_world"] is not None:
        planned = replace(planned, local_world=options["local_world"])
    for text in planned.notes:
        if UNCOUNTED not in text:
            diagnostics.note(text)
        elif options["world"] is None:
            diagnostics.note(f"{text}. It is run as with one; --world N says how many ranks the job has")
    world = options["world"] or planned.world or (1 if planned.ranked else None)
    ranks = _chosen(options["ranks"], world)
    cache = paths.cache_directory()
    if cache is None:
        raise DryRunError(
            "there is no cache directory for the device library",
            hint=f"Set {paths.CACHE_VARIABLE}, and do not set {paths.NO_CACHE_VARIABLE}.",
        )
    torch = build.find_torch(planned.python)
    library = build.library(
        torch, cache / "standin",
        lambda: diagnostics.note(f"compiling the stand-in device for torch {torch.version} (once, some 15 s)"),
    )  # fmt: skip
    standin = launch.Standin(library, gpu, library.parent / "kernels", build.dnn_spans(torch))
    return Job(planned, standin, world, ranks)


def _gpu(name: str | None, memory: int | None, capability: int | None) -> Gpu:
    from memtrace import gpus

    found = gpus.find(name or dryrun_options.DEFAULT_GPU)
    if memory is not None:
        found = replace(found, capacity_bytes=memory)
        if name is None:
            found = replace(found, name="a GPU", is_measured=False)
    if capability is not None and capability != found.capability:
        found = replace(found, capability=capability, is_measured=False)
    return found


def _chosen(ranks: str | tuple[int, ...], world: int | None) -> tuple[int, ...]:
    size = world or 1
    if isinstance(ranks, str):
        return tuple(sorted({0, size - 1}))
    if ranks[-1] >= size:
        there_is = f"ranks 0 to {size - 1}" if size > 1 else "rank 0 only"
        raise click.UsageError(f"a world of {size} has {there_is}, not {ranks[-1]}; --world N makes it larger.")
    return ranks


def _directory(command: Sequence[str], options: dict[str, Any]) -> Path:
    from memtrace.dryrun import launch
    from memtrace.errors import DryRunError
    from memtrace.record import layout

    name = layout.clean_name(options["name"]) if options["name"] else layout.name_of(command)
    place = layout.make(name, options["output"], {launch.PART: launch.INSIDE})
    if place.directory is None:
        raise DryRunError("; ".join(place.notes[:-1]), hint="Nothing was run. Choose another place with -o DIR.")
    for text in place.notes:
        diagnostics.note(text)
    return place.directory


def _settings(directory: Path, job: Job, options: dict[str, Any]) -> Settings:
    """Those of rank 0."""
    from memtrace.dryrun.inside import options as inside
    from memtrace.record import layout
    from memtrace.record.inside.settings import Settings

    gpu = job.standin.gpu
    given = inside.Options(
        gpu=gpu.name,
        limit_bytes=gpu.capacity_bytes,
        is_measured=gpu.is_measured,
        steps=options["steps"],
        limit_s=options["limit"] or 0.0,
        mask=options["assume"].get("mask", inside.Options().mask),
        overflow_first=options["overflow_first"],
        quiet=options["quiet"],
    )
    name = options["name"] or layout.name_of(job.plan.argv)
    return Settings(
        directory=str(directory),
        max_entries=options["max_entries"],
        stacks=options["stacks"],
        ranks="all",
        plain_paths=options["plain_paths"],
        plain_host=options["plain_host"],
        world=job.world or 0,
        name=layout.clean_name(name),
        dryrun=inside.encode(given),
    )


def _announce(job: Job, directory: Path) -> None:
    gpu = job.standin.gpu
    who = "" if job.world is None else f", {plural(len(job.ranks), 'rank')} of {job.world}"
    diagnostics.note(
        f"a dry run on {gpu.name} ({format_bytes(gpu.capacity_bytes)}){who}: no GPU is used, nothing is computed, "
        f"losses mean nothing. Recording to {paths.shown(directory)}"
    )


def _run_all(job: Job, settings: Settings, command: Sequence[str], *, quiet: bool) -> list[Outcome]:
    """Rank after rank; one that fails does not keep the others from running, a signal does."""
    from memtrace.dryrun import launch
    from memtrace.record import layout
    from memtrace.record.launch import CommandError

    directory = Path(settings.directory)
    layout.write_meta(directory, meta(settings, command, None))
    outcomes: list[Outcome] = []
    for rank in job.ranks:
        if len(job.ranks) > 1 and not quiet:
            diagnostics.note(f"rank {rank} of {job.world}:")
        environ = launch.environment(
            job.standin, {**launch.current(), **job.plan.environ}, world=job.world, rank=rank, devices=job.devices
        )
        words = job.plan.command(rank, job.world or 1, 0)
        try:
            outcomes.append(launch.run(words, settings._replace(rank=rank), environ))
        except CommandError:
            if not outcomes:
                layout.discard(directory)
            raise
        if outcomes[-1].signal is not None:
            break
    return outcomes


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    """The first that failed, over the time of all."""
    worst = next((one for one in outcomes if one.signal is not None or one.code), outcomes[0])
    return replace(worst, started_us=outcomes[0].started_us, ended_us=outcomes[-1].ended_us)


def _finish(job: Job, settings: Settings, command: Sequence[str], outcome: Outcome, options: dict[str, Any]) -> Answer:
    from memtrace.cli import dryrun_band, dryrun_text

    directory = Path(settings.directory)
    keep(settings, command, outcome)
    answer = dryrun_text.answer(directory, job.standin.gpu, has_failed=bool(outcome.code or outcome.signal))
    dryrun_text.report(answer, quiet=options["quiet"])
    if options["report"] is not None:
        write_report(options["report"], "dryrun", dryrun_text.document(answer))
    if not (options["band"] or options["quiet"]) and dryrun_band.has_choices(answer.assumptions):
        diagnostics.note("--band runs it again with the other end of what was chosen there")
    return answer


def _band(job: Job, answer: Answer, options: dict[str, Any]) -> None:
    """The other ends, said and added to the report."""
    from memtrace.cli import dryrun_band, dryrun_text

    with dryrun_again.ended_with_us():
        ends = dryrun_band.run(_again(job, options), answer.assumptions, answer.directory)
    for sentence in () if options["quiet"] else dryrun_band.sentences(ends, answer.ranks):
        diagnostics.note(sentence)
    if options["report"] is not None:
        data = {**dryrun_text.document(answer), "band": dryrun_band.document(ends)}
        write_report(options["report"], "dryrun", data)
