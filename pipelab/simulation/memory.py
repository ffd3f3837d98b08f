"""How many bytes every rank holds over the time of a trace, predicted from what its stages take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice, repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab.checking.checker import ScheduleLike
from pipelab.checking.memory import Memory
from pipelab.display import show
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate
from pipelab.trace.events import Transfer
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.table import Table


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds, in bytes, from a time on, until its next change.

    Attributes:
        time: since when, in the trace's unit.
        action: the action that starts or ends then; `None` for what was there before the step.
        weights: of parameters and buffers, of all versions in use, and those that are gathered.
        gradients: of the parameters' gradients.
        optimizer: of the optimizer's state.
        activations: of what forwards keep for backwards, what `I` leaves for `W`, and gradients that are being sent.
        outputs: of the model's outputs.
    """

    time: float
    action: Action | None
    weights: int
    gradients: int
    optimizer: int
    activations: int
    outputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.outputs


@dataclass(frozen=True)
class MemoryUse:
    """How many bytes every rank holds, over the time of a trace: predicted or measured.

    Attributes:
        trace: when the actions ran.
        memory: the bytes of each stage, from which it is predicted; `None` if it was measured.
        sent_gradient: in a prediction, the bytes of one gradient that goes to another rank.
        measured: the curves, if it was measured.
        allocated: if it was measured on GPUs, the most bytes that PyTorch's allocator gave out during the step, by
            device, with all that was on the device before.
    """

    trace: Trace
    memory: Memory | None = None
    sent_gradient: int = 0
    measured: Sequence[Sequence[Held]] = field(default=(), repr=False)
    allocated: Mapping[str, int] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """`"predicted"` or `"measured"`."""
        return "measured" if self.memory is None else "predicted"

    @cached_property
    def curves(self) -> Sequence[Sequence[Held]]:
        """For each rank, what it holds after each change, in order. Several changes may have one time."""
        return self.measured or tuple(map(self._curve, range(self.trace.ranks)))

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each rank, the most bytes that it holds at any time."""
        return tuple(held.total for held in self.at_peak)

    @property
    def at_peak(self) -> tuple[Held, ...]:
        """For each rank, what it holds when it first holds the most."""
        memory, bound, ranks = self.memory, self.trace.plan.bound, range(self.trace.ranks)
        if memory and not self.sent_gradient and not bound.moves:  # then times do not matter: only up to the peaks
            stops = (held.index(max(held)) + 1 if held else 0 for held in map(memory.held, repeat(bound), ranks))
            curves: Iterable[Sequence[Held]] = map(self._curve, ranks, stops)
        else:
            curves = self.curves
        return tuple(max(curve, key=attrgetter("total")) for curve in curves)

    @property
    def table(self) -> Table:
        """What each rank holds at its peak, part by part."""
        return show(self, "table")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table; the suffix is the format: see `Table.save`. Return the path."""
        return self.table.save(path)

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table)

    @cached_property
    def _sent(self) -> list[list[Transfer]]:
        """By rank, the gradients that it holds on their way."""
        sent: list[list[Transfer]] = [[] for _ in range(self.trace.ranks)]
        for value in self.trace.transfers if self.sent_gradient else ():
            if not value.giver.traits.forward and value.end > value.start - value.queued:
                sent[value.source].append(value)
        return sent

    def _curve(self, rank: int, stop: int | None = None) -> Sequence[Held]:
        """Return what a rank holds after each change, of so many actions."""
        trace, memory, bound, size = self.trace, self.memory, self.trace.plan.bound, self.sent_gradient
        assert memory is not None
        sent = self._sent[rank]  # the tuples: weights, gradients, activations, outputs
        found = [(value.end, value.giver, (0, 0, -size, 0)) for value in sent]
        for (code, start, end), change in islice(zip(trace.ran(rank), memory.changes(bound, rank), strict=True), stop):
            action = bound.codes.action(code)
            found += [
                (start, action, (change.weights, change.gradients, change.activations, change.outputs)),
                (end, action, (-change.forgotten, -change.dropped, -change.freed, 0)),
            ]
        found += [(value.start - value.queued, value.giver, (0, 0, size, 0)) for value in sent]
        weights, optimizer = memory.always(bound, rank)
        gradients = activations = outputs = 0
        held = [Held(trace.start, None, weights, gradients, optimizer, activations, outputs)]
        for time, action, more in sorted(found, key=itemgetter(0)):  # stable: at one time, in this order
            if any(more):
                weights, gradients = weights + more[0], gradients + more[1]
                activations, outputs = activations + more[2], outputs + more[3]
                held.append(Held(time, action, weights, gradients, optimizer, activations, outputs))
        return tuple(held)


def memory_use(plan: Trace | Plan | ScheduleLike, memory: Memory, *, sent_gradient: int = 0) -> MemoryUse:
    """Return how many bytes every rank holds over time, predicted from the bytes of its stages.

    Without `sent_gradient`, the peaks depend only on the order of a rank's actions, not on their times, unless the plan
    gathers or offloads. They do not include what an operation needs while it runs, values that arrive, and the batch
    itself. What two neighbouring stages of one rank share, as at the turn of a V, counts twice.

    Args:
        plan: a trace, simulated or measured; or a plan or schedule, which is simulated first.
        memory: the bytes of each stage.
        sent_gradient: bytes of one gradient that goes to another rank: held from its backward until it has arrived. An
            output is held for its backward anyway.

    Example:
        >>> import pipelab
        >>> memory = pipelab.Memory(weights=1000, gradients=1000, optimizer=2000, activations=100)
        >>> pipelab.memory_use(pipelab.GPipe(ranks=4, microbatches=8), memory).peaks
        (4800, 4800, 4800, 4800)
        >>> use = pipelab.memory_use(pipelab.OneFOneB(ranks=4, microbatches=8), memory)
        >>> print(use)
        rank  peak, bytes  weights  gradients  optimizer  activations  outputs
        0           4,400    1,000      1,000      2,000          400        0
        1           4,300    1,000      1,000      2,000          300        0
        2           4,200    1,000      1,000      2,000          200        0
        3           4,100    1,000      1,000      2,000          100        0

    Raises:
        CostError: if a list of the sizes does not have one number per stage.
        ScheduleError: if a plan has faults.
    """
    trace = plan if isinstance(plan, Trace) else simulate(plan)
    for each in fields(memory):
        memory.of(each.name, trace.plan.stages)  # refuses a list of another length
    return MemoryUse(trace, memory, sent_gradient)
