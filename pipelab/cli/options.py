"""The options that several commands share, in groups."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pipelab.cli.targets import find, has_sizes, settings, with_settings
from pipelab.errors import UsageError
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Order, Transport
from pipelab.schedule import Schedule, replicate
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

Target = Annotated[
    str,
    typer.Argument(
        help="a schedule's name, my_file.py:MySchedule, plan.csv, trace.json, 'rank*.json.gz', or a plan: "
        '"0F0 0B0; 1F0 1B0", or - for one on stdin',
        show_default=False,
    ),
]
Targets = Annotated[
    list[str],
    typer.Argument(
        help='one or more of: a name, "interleaved-1f1b(stages_per_rank=4)", my_file.py:MySchedule, plan.csv',
        show_default=False,
    ),
]
Save = Annotated[
    list[Path] | None,
    typer.Option("--save", "-o", help="a file to write: html svg png pdf json txt, or csv for the plan; repeatable"),
]
SaveComparison = Annotated[
    list[Path] | None, typer.Option("--save", "-o", help="a file to write: html svg png pdf txt csv md; repeatable")
]
Width = Annotated[
    str | None, typer.Option("--width", help="of a figure: inches, or column (3.25), page (6.75), beamer")
]
SaveFaults = Annotated[
    list[Path] | None, typer.Option("--save", "-o", help="a picture of the faults: html svg png pdf txt; repeatable")
]
SaveRun = Annotated[
    list[Path] | None,
    typer.Option(
        "--save", "-o", help="a file to write: html svg png pdf txt csv md; for one run also json; repeatable"
    ),
]
SaveTable = Annotated[
    list[Path] | None, typer.Option("--save", "-o", help="a file to write: csv txt md html; repeatable")
]
PostingOrder = Annotated[
    Order, typer.Option("--order", help="in which order ranks post sends and receives; see the page The wire")
]
TransportWord = Annotated[
    Transport, typer.Option("--transport", help="which sends and receives wait for each other; see the page The wire")
]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        "--cost", help="name=value, another cost, such as --cost 'forward=[1, 2]' or --cost per=stage; repeatable"
    ),
]
_NUMBERS = re.compile(r",*\d[\d,]*")


def whole_numbers(option: str, given: str | None) -> list[int]:
    """Return the numbers in an option's text, each once."""
    words = (given or "").replace(",", " ").split()
    if not all(word.isdecimal() and int(word) for word in words) or (given is not None and not words):
        raise UsageError(f"{option} {given}: expected whole numbers, at least 1, such as 8 or 2,4,8")
    return list(dict.fromkeys(map(int, words)))


@dataclass(frozen=True)
class Sizes:
    """The sizes of schedules and their own parameters; several numbers of micro-batches make a table."""

    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-r", min=1, help="workers of the pipeline; by default 4 (run without --emulate: 2)"),
    ] = None
    microbatches: Annotated[
        str | None,
        typer.Option("--microbatches", "-m", help="slices of the batch; by default 8; 2,4,8 compares or runs several"),
    ] = None
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="copies of the pipeline, each with its own ranks and micro-batches")
    ] = 1
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, a parameter of all schedules that accept it; repeatable"),
    ] = None

    @property
    def counts(self) -> list[int]:
        """The given numbers of micro-batches."""
        return whole_numbers("--microbatches", self.microbatches)

    def counts_beside(self, targets: Sequence[str]) -> list[int]:
        """Return the given numbers of micro-batches, after looking for numbers among the targets, as in `-m 2 4 8`."""
        numbers = [target.strip(",") for target in targets if _NUMBERS.fullmatch(target)]
        if numbers:
            together = ",".join([*map(str, self.counts), *numbers]) if self.counts else "2,4,8, for example"
            raise UsageError(
                f"{', '.join(numbers)}: a number is not a schedule; join several numbers of micro-batches with commas: "
                f"-m {together}"
            )
        return self.counts

    def with_settings(self, targets: Sequence[str]) -> list[str]:
        """Return the targets, each with the parameters that `--set` gives it."""
        return with_settings(targets, self.sets or [])

    def find(self, target: str) -> Schedule | Plan | Trace:
        """Return the schedule, plan or trace that a target names, at this size."""
        if len(self.counts) > 1:
            raise UsageError(f"--microbatches {self.microbatches}: several numbers are for pipelab compare and run")
        (found,) = self.find_all(self.with_settings([target]))
        return found

    def find_all(self, targets: Sequence[str], usual_ranks: int = 4) -> list[Schedule | Plan | Trace]:
        """Return what the targets name; plans and traces among several targets keep their own sizes."""
        count = next(iter(self.counts), None)
        return [
            find(target)
            if len(targets) > 1 and has_sizes(target)
            else _replicated(find(target, self.ranks, count, usual_ranks), self.replicas)
            for target in targets
        ]

    def schedule(self, target: str, microbatches: int, usual_ranks: int = 4) -> Schedule:
        """Return the schedule that a target names, with so many micro-batches."""
        found = find(target, self.ranks, microbatches, usual_ranks)
        assert isinstance(found, Schedule)  # a file refuses other sizes than its own
        return found if self.replicas == 1 else replicate(found, self.replicas)


@dataclass(frozen=True)
class Times:
    """The times of actions and transfers."""

    forward: Annotated[float, typer.Option("--forward", "-f", help="time of a forward")] = 1
    backward: Annotated[float, typer.Option("--backward", "-b", help="time of a backward")] = 2
    latency: Annotated[float, typer.Option(help="time of a transfer between ranks")] = 0
    unit: Annotated[str, typer.Option(help="the unit of these times, for labels")] = ""
    costs: Costs = None

    def cost(self) -> Cost:
        """Return the cost that the options describe; `--cost` overrides the others."""
        given: dict[str, Any] = {"forward": self.forward, "backward": self.backward}
        given |= {"latency": self.latency, "unit": self.unit}
        given |= settings(self.costs or [], "--cost")
        takes = [field.name for field in fields(Cost)]
        if unknown := [name for name in given if name not in takes]:
            raise UsageError(f"--cost {unknown[0]}: there is no such cost\n  --cost takes: {', '.join(takes)}")
        return Cost(**given)

    def traces(self, subjects: Sequence[Schedule | Plan | Trace], targets: Sequence[str]) -> list[Trace]:
        """Return saved traces unchanged, and simulate schedules and plans."""
        if self != type(self)() and all(isinstance(subject, Trace) for subject in subjects):
            raise UsageError(
                f"{' and '.join(targets)}: a trace has its own times; leave out the options for times and costs"
            )
        return [subject if isinstance(subject, Trace) else self.simulated(subject) for subject in subjects]

    def simulated(self, subject: Schedule | Plan, cost: Cost | None = None) -> Trace:
        """Return when everything would happen, with these costs or others."""
        return simulate(subject, cost or self.cost())

    def uneven(self, plans: Sequence[Plan]) -> str:
        """Return a warning if only some of the plans split backwards and `I` and `W` do not add up to `B`."""
        cost = self.cost()
        split = [plan for plan in plans if "I" in plan.bound.kinds]
        if (cost.input_grad is None and cost.weight_grad is None) or len(split) in (0, len(plans)):
            return ""
        times = cost.times(split[0])
        for inputs, weights, backward in zip(times["I"], times["W"], times["B"], strict=True):
            if backward and not math.isclose(inputs + weights, backward):
                over = f"{(inputs + weights) / backward:.3g}"
                return (
                    f"Not the same work: I and W take {over} times as long as B, and not all of these schedules split "
                    "the backward. For a fair comparison, make backward the sum of both."
                )
        return ""


@dataclass(frozen=True)
class WiredTimes(Times):
    """Times, and which sends and receives wait for each other."""

    order: PostingOrder = "pytorch"
    transport: TransportWord = "buffered"

    def simulated(self, subject: Schedule | Plan, cost: Cost | None = None) -> Trace:
        """Return when everything would happen on this wire."""
        return simulate(subject, cost or self.cost(), order=self.order, transport=self.transport)


def _replicated(subject: Schedule | Plan | Trace, replicas: int) -> Schedule | Plan | Trace:
    return subject if replicas == 1 else replicate(untimed(subject), replicas)


def untimed(subject: Schedule | Plan | Trace) -> Schedule | Plan:
    """Return a schedule or plan unchanged, and the plan of a trace."""
    return subject.plan if isinstance(subject, Trace) else subject


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have groups of options: a parameter of one of the classes above becomes its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    flat: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        members = {name: parameter.default}
        types = hints
        if name in groups:
            members = {field.name: field.default for field in fields(groups[name])}
            types = get_type_hints(groups[name], include_extras=True)
        for each, default in members.items():
            flat[each] = inspect.Parameter(each, parameter.KEYWORD_ONLY, default=default, annotation=types[each])

    @wraps(command)
    def with_groups(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    with_groups.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]  # what typer reads
    with_groups.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return with_groups
