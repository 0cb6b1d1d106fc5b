"""`memtrace whatif`: the recorded run under other settings of torch's allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memtrace.cli import diagnostics, options
from memtrace.cli.options import Common

if TYPE_CHECKING:
    from memtrace.analysis.settings import Change
    from memtrace.analysis.whatif import Scenario, Simulation
    from memtrace.api import Snapshot

EXAMPLES = """\b
Examples:
  memtrace whatif snapshot.pickle --expandable-segments
  memtrace whatif snapshot.pickle --sweep                   what people are told to set, ranked
  memtrace whatif snapshot.pickle --max-split-size-mb 128 --garbage-collection-threshold 0.8 --limit 40GiB
  memtrace whatif snapshot.pickle --empty-cache-every-step --json
  memtrace whatif snapshot.pickle --torch 2.15              another release's allocator"""


@click.command("whatif", epilog=EXAMPLES)
@options.snapshot_argument
@click.option(
    "--expandable-segments/--no-expandable-segments",
    default=None,
    help="Segments that grow, or cudaMalloc's (default: as recorded; so for every option).",
)
@click.option("--max-split-size-mb", type=int, metavar="N", help="Blocks of this and more are not split; 0: unlimited.")
@click.option(
    "--roundup-power2-divisions", type=int, metavar="N", help="Sizes are rounded to 1/N of a power of two; 0: off."
)
@click.option(
    "--garbage-collection-threshold",
    type=float,
    metavar="F",
    help="Share of the limit from which on unused segments are freed; 0: off.",
)
@click.option("--large-segment-size-mb", type=int, metavar="N", help="Segments for requests of 1 to 10 MiB (20).")
@click.option("--limit", metavar="SIZE", callback=options.size, help="Torch's cap on what it reserves: 40GiB.")
@click.option("--empty-cache-every-step", is_flag=True, help="torch.cuda.empty_cache() after each step.")
@click.option("--torch", "release", metavar="RELEASE", help="The allocator of another release: 2.15.")
@click.option("--sweep", is_flag=True, help="Try the settings that people are told to set, on top of those given.")
@options.device_option
@options.common
def command(
    common: Common,
    snapshot: str | None,
    expandable_segments: bool | None,
    max_split_size_mb: int | None,
    roundup_power2_divisions: int | None,
    garbage_collection_threshold: float | None,
    large_segment_size_mb: int | None,
    limit: int | None,
    empty_cache_every_step: bool,
    release: str | None,
    sweep: bool,
    device: int | None,
) -> None:
    """What torch's caching allocator would have reserved for SNAPSHOT's program under other settings.

    The recorded setting is simulated first and held against the recording, event by event: without an exact match there
    is no prediction. All options of one call make one setting, on top of the recorded one; --sweep makes several.
    """
    from memtrace.analysis.settings import Change

    change = Change(
        expandable_segments=expandable_segments,
        max_split_size_mb=max_split_size_mb,
        roundup_power2_divisions=roundup_power2_divisions,
        garbage_collection_threshold=garbage_collection_threshold,
        large_segment_size_mb=large_segment_size_mb,
        limit=limit,
        empty_cache_every_step=empty_cache_every_step or None,
        torch=release,
    )
    if change.is_nothing and not sweep:
        raise click.UsageError("nothing to change: name a setting, or --sweep")
    opened: Snapshot = options.open_snapshot(snapshot, common)
    chosen = options.choose_device(opened, device, common)
    simulation, scenarios = _simulated(opened, chosen, change, sweep, common)
    from memtrace.analysis.whatif import assumptions

    notices = (*opened.file_notices(chosen), *assumptions(simulation, scenarios))
    options.show_notices(opened.file_notices(chosen), common)
    if common.json:
        from memtrace.cli import whatif_json

        whatif_json.write(opened, chosen, simulation, scenarios, notices)
    else:
        from memtrace.cli import whatif_text

        whatif_text.write(opened, chosen, simulation, scenarios, common, is_sweep=sweep)


def _simulated(
    opened: Snapshot, device: int, change: Change, sweep: bool, shared: Common
) -> tuple[Simulation, tuple[Scenario, ...]]:
    """The self-check, and the scenarios: the one asked for, or of a sweep all, the best first."""
    from memtrace.analysis import whatif

    shown = shared.progress and not shared.quiet
    with diagnostics.progress("simulating", enabled=shown, amount=_events) as progress:
        simulation = opened.simulation(device, limit=change.limit, progress=progress)
        if not sweep:
            return simulation, (simulation.scenario(change, progress),)
        asked = (() if change.is_nothing else (change,)) + whatif.sweep(simulation, change)
        found = []
        for number, one in enumerate(asked):
            part = None if progress is None else _part(progress, number, len(asked))
            found.append(simulation.scenario(one, part))
    return simulation, whatif.ranked(found)


def _events(done: int) -> str:
    return f"{done:,} events"


def _part(progress: options.Advance, number: int, parts: int) -> options.Advance:
    """The progress of one of several scenarios as that of all."""

    def hear(done: int, total: int | None) -> None:
        progress(number * (total or 0) + done, parts * (total or 0))

    return hear
