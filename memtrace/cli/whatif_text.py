"""The page of `memtrace whatif` for people: what would come of it, how far to trust that, and what it rests on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from memtrace.analysis.whatif import Scenario, Simulation, assumptions
from memtrace.api import Snapshot
from memtrace.cli.options import Common
from memtrace.cli.output import Column, Page
from memtrace.timeline import in_words
from memtrace.units import format_bytes, in_unit, plural, unit_of


def write(
    opened: Snapshot,
    device: int,
    simulation: Simulation,
    scenarios: Sequence[Scenario],
    shared: Common,
    *,
    is_sweep: bool,
) -> None:
    """Prints the page."""
    page = Page(shared.color)
    if not simulation.is_exact:
        page.line(f"No prediction: {simulation.reason}{_at(simulation)}.", "bold")
        if simulation.check is not None:
            page.line(
                "The recorded setting was simulated first, and is not what was recorded: what the simulation says of "
                "other settings would be worth nothing."
            )
        return
    teller = _Teller(opened, device, simulation, shared)
    page.line(teller.best(scenarios) if is_sweep else teller.sentence(scenarios[0]), "bold")
    page.line(teller.credential())
    page.line()
    _table(page, [simulation.recorded, *scenarios], teller)
    page.line()
    for notice in assumptions(simulation, scenarios):
        page.line(f"Assumed: {notice.message}.")
    for line in teller.closing(scenarios, is_sweep=is_sweep):
        page.line(line, wrap=False)


def _at(simulation: Simulation) -> str:
    event = None if simulation.check is None else simulation.check.event
    return "" if event is None else f" (event {event:,})"


def _table(page: Page, scenarios: Sequence[Scenario], teller: _Teller) -> None:
    """The settings side by side. A column that says nothing of any is left out: names are longer than a terminal."""
    columns = [
        Column("setting"),
        Column(f"reserved {teller.unit}", right=True),
        Column("change", right=True),
        Column("allocated", right=True),
        Column("mallocs", right=True),
        Column("frees", right=True),
        Column("retries", right=True),
        Column("out of memory", grow=True),
    ]
    rows = [teller.row(scenario) for scenario in scenarios]
    shown = [index for index in range(len(columns)) if any(row[index] not in ("", "0") for row in rows)]
    page.table([columns[index] for index in shown], [[row[index] for index in shown] for row in rows])


class _Teller:
    def __init__(self, opened: Snapshot, device: int, simulation: Simulation, shared: Common) -> None:
        self._opened, self._device, self._simulation, self._shared = opened, device, simulation, shared
        recorded = simulation.recorded.prediction
        assert recorded is not None, "only told of what proved itself"
        self._before = recorded.outcome
        unit = unit_of(self._before.reserved_peak)
        self.unit = {"auto": unit, "bytes": "B"}.get(shared.units, shared.units)

    def _full(self, size: int) -> str:
        return format_bytes(size, self._shared.units)

    def sentence(self, scenario: Scenario) -> str:
        """What would come of one setting."""
        prediction = scenario.prediction
        assert prediction is not None, "only told of what proved itself"
        before, after = self._before.reserved_peak, prediction.outcome.reserved_peak
        name = scenario.change.in_words()
        if scenario.oom_event is not None or not scenario.is_sure:
            return f"With {name}: {self._failure(scenario)}."
        change = "no change" if before == after else f"{_percent(before, after)}"
        text = f"With {name}: reserved peak {self._full(before)} -> {self._full(after)} ({change})"
        if prediction.low != prediction.high:
            text += f", {self._full(prediction.low)} to {self._full(prediction.high)} as segments may lie"
        served = "; every request is served" if scenario.settings.limit is not None else ""
        return f"{text}{served}."

    def best(self, scenarios: Sequence[Scenario]) -> str:
        """Which of a sweep's settings is worth it."""
        good = [scenario for scenario in scenarios if scenario.completes]
        before = self._before
        if good:
            first = good[0]
            assert first.prediction is not None, "one that completes was predicted"
            if first.prediction.high < before.reserved_peak or before.ooms:
                return f"Best of {len(scenarios)}: {self.sentence(first)}"
            return (
                f"None of {len(scenarios)} settings reserves less than the recorded {self._full(before.reserved_peak)}."
            )
        if not scenarios:
            return "There is nothing to try that is not set already."
        return f"None of {len(scenarios)} settings surely serves every request."

    def credential(self) -> str:
        """Why to believe it."""
        work = self._simulation.work
        placed = int(work.is_simulated.sum())
        return (
            f"Self-check exact: the recorded setting, simulated with the recorded addresses, places {placed:,} blocks "
            f"and makes {plural(len(work.recorded), 'segment event')} as recorded."
        )

    def row(self, scenario: Scenario) -> list[str]:
        """A line of the table; a range in the second line."""
        prediction = scenario.prediction
        assert prediction is not None, "only told of what proved itself"
        outcome, before = prediction.outcome, self._before.reserved_peak
        reserved = in_unit(outcome.reserved_peak, self.unit)
        if prediction.low != prediction.high:
            reserved += f"\n{in_unit(prediction.low, self.unit)}-{in_unit(prediction.high, self.unit)}"
        return [
            scenario.change.in_words(),
            reserved,
            "" if scenario.change.is_nothing else _percent(before, outcome.reserved_peak),
            in_unit(outcome.allocated_peak, self.unit),
            f"{outcome.device_allocs:,}",
            f"{outcome.device_frees:,}",
            f"{outcome.retries:,}",
            self._outcome(scenario),
        ]

    def _outcome(self, scenario: Scenario) -> str:
        if scenario.oom_event is None:
            return "" if scenario.is_sure else "maybe"
        return f"{'' if scenario.is_sure else 'maybe '}event {scenario.oom_event:,}"

    def _failure(self, scenario: Scenario) -> str:
        """Where memory runs out, and in how many of the ways for segments to lie."""
        prediction = scenario.prediction
        assert prediction is not None, "only told of what proved itself"
        limit = scenario.settings.limit
        under = "" if limit is None else f" under {self._full(limit)}"
        if scenario.oom_event is None:
            return f"it may run out of memory{under}: in {prediction.out_of_memory} of {prediction.draws} simulations"
        phase = in_words(*self._opened.timeline(self._device).at(scenario.oom_event))
        where = f"event {scenario.oom_event:,}" + (f", in {phase}" if phase else "")
        recorded = self._simulation.recorded.oom_event
        same = ", the same request as recorded" if scenario.oom_event == recorded else ""
        if not scenario.is_sure:
            return (
                f"whether it runs out of memory{under} cannot be told for sure; where segments lie by the driver's own "
                f"rules it does, at {where}{same}"
            )
        return f"out of memory{under} at {where}{same}"

    def closing(self, scenarios: Sequence[Scenario], *, is_sweep: bool) -> Iterator[str]:
        """Where to go next."""
        path = self._opened.data.path
        name = "FILE" if path == "-" else shlex.quote(path if not path.startswith("-") else f"./{path}")
        here = f" -d {self._device}" if len(self._opened.devices) > 1 else ""
        best = next((one for one in scenarios if one.completes and one.change.conf()), None)
        steps = []
        if best is not None and best.prediction is not None and best.prediction.high < self._before.reserved_peak:
            steps.append(f"PYTORCH_CUDA_ALLOC_CONF={best.change.conf()} memtrace record -- COMMAND")
        if not is_sweep:
            steps.append(f"memtrace whatif {name} --sweep{here}")
        steps += [f"memtrace fits {name} --gpu A100-40{here}", f"memtrace blame {name} --of reserved{here}"]
        yield f"next: {steps[0]}"
        for step in steps[1:]:
            yield f"      {step}"


def _percent(before: int, after: int) -> str:
    return f"{100 * (after - before) / before:+.1f} %" if before else ""
