"""Greedy: list scheduling turns a policy into an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from pipelab.catalogue.list_scheduling import Moment, Priority, list_schedule
from pipelab.checking.memory import Memory
from pipelab.errors import PipelabError, UsageError, require_caps
from pipelab.plan.actions import Action
from pipelab.plan.fault import ScheduleError, misfit, raised
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation.cost import Cost, as_cost


def _backward_first(action: Action, rank: int, moment: Moment) -> Any:  # noqa: ARG001 - every priority takes these
    return "WFIB".index(action.kind)


def _forward_first(action: Action, rank: int, moment: Moment) -> Any:  # noqa: ARG001
    return "WIBF".index(action.kind)


def _oldest_first(action: Action, rank: int, moment: Moment) -> Any:  # noqa: ARG001
    return action.traits.forward or action.traits.backward, -(action.microbatch or 0)


policies: dict[str, Priority] = {
    "backward-first": _backward_first,
    "forward-first": _forward_first,
    "oldest-first": _oldest_first,
}
"""The named priorities. Weight gradients come last in all of them, because no rank waits for one."""


class Greedy(Schedule):
    """State a policy instead of an order: whenever a rank is free, it runs the ready action that the policy prefers.

    A priority ranks the actions whose inputs are ready, and a memory cap limits how many activations a rank holds. With
    the times of a `Cost`, this gives an order, and so a plan like any other. Two known schedules are policies.
    Backwards first, with a cap of as many activations as there are ranks from here to the last, is 1F1B. Forwards
    first, without a cap, is GPipe.

    The result is good, but not the best order: a rank that can run an action never waits for a better one.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds.
        priority: `"backward-first"`, `"forward-first"` or `"oldest-first"` (the lowest micro-batch); or a function
            `(action, rank, moment)` that returns a number or a tuple of numbers. The action with the largest number
            runs first; among equals, the lowest micro-batch, then the last stage. The
            [`Moment`][pipelab.catalogue.list_scheduling.Moment] is the state of the rank: the `time`, how many
            activations are `held`, and the `last` action.
        memory_cap: how many stage activations a rank may hold, or bytes if there is a `memory`: one number, or one per
            rank; `None` for no limit. If a micro-batch visits a rank twice, a cap can end in a deadlock; the error
            names the rank.
        cost: the times of actions and transfers; by default forward 1, backward 2 and free transfers.
        split: whether to split backwards into `I` and `W`, so that weight gradients fill the idle time.
        memory: how many bytes each stage takes; room for gradients and outputs is reserved from the start.

    Example:
        What does memory buy?

        >>> import pipelab
        >>> for cap in (1, 2, 3, 4, 5):
        ...     trace = pipelab.simulate(pipelab.Greedy(ranks=4, microbatches=8, memory_cap=cap, split=True))
        ...     print(cap, "activations:", trace.makespan, "units")
        1 activations: 72.0 units
        2 activations: 41.0 units
        3 activations: 33.0 units
        4 activations: 29.0 units
        5 activations: 27.0 units

        Your own policy is a function. In this one, weight gradients come last until the rank holds 5 activations;
        then they come first, because they release them.

        >>> def frugal(action, rank, moment):
        ...     return ("WFIB" if moment.held < 5 else "FWIB").index(action.kind)
        >>> for priority in ("backward-first", frugal):
        ...     trace = pipelab.simulate(pipelab.Greedy(4, 32, priority=priority, split=True))
        ...     print(trace.makespan, trace.peak_activations)
        99.0 (32, 32, 32, 32)
        99.0 (7, 5, 5, 5)

    Raises:
        UsageError: if a number is not a positive whole number, if `memory_cap` does not have one number per rank, or
            if `priority` is neither a policy's name nor a function.
        TypeError: if `cost` is not a `Cost`.
    """

    source = "Graham 1969, Bounds on Multiprocessing Timing Anomalies (SIAM J. Appl. Math. 17): list scheduling"

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        stages_per_rank: int | None = None,
        priority: str | Priority = "backward-first",
        memory_cap: int | Sequence[int] | None = None,
        cost: Cost | None = None,
        split: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """Check and keep the sizes and the policy."""
        super().__init__(ranks, microbatches, stages_per_rank)
        if not callable(priority) and priority not in list(policies):
            known = ", ".join(map(repr, policies))
            raise UsageError(f"priority={priority!r}: expected {known}, or a function of (action, rank, moment)")
        self.priority = priority
        self.memory_cap: int | tuple[int, ...] | None = None
        if memory_cap is not None:
            caps = require_caps(memory_cap, self.ranks)
            self.memory_cap = tuple(caps) if isinstance(memory_cap, Sequence) else caps[0]
        self.cost = None if cost is None else as_cost(cost)
        self.split = split
        self.memory = memory

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the rank's actions in the order that list scheduling found."""
        yield from self._rows[rank]

    def draft(self) -> Plan:
        """Return the plan without checking it.

        Raises:
            ScheduleError: if the memory cap ends in a deadlock, or if the priority raises.
        """
        if callable(self.priority) and (fault := misfit("priority", self.priority, "action", "rank", "moment")):
            raise ScheduleError([fault], self._name())
        try:
            self._rows  # noqa: B018 - computed here, so that its errors are not reported as errors of `actions`
        except ScheduleError as error:
            raise ScheduleError(error.faults, self._name()) from None
        except PipelabError:
            raise
        except Exception as error:
            own = self.priority if callable(self.priority) else None
            hint = "fix that line: return a number for every action"
            raise ScheduleError([raised("asking the priority", error, own, hint)], self._name()) from error
        return super().draft()

    @cached_property
    def _rows(self) -> list[list[Action]]:
        """Each rank's actions."""
        blank = Plan([[]] * self.ranks, self.stages, self.microbatches, self.place, after=self._after)
        bound = blank.bound
        if bound.faults:  # of `place`
            raise ScheduleError(bound.faults)
        cost = self.cost or Cost()
        lasts = bound.codes.by_code(cost.times(blank))
        delays = bound.codes.by_value(*cost.transfer_times(blank))
        priority = self.priority if callable(self.priority) else policies[self.priority]
        caps = None if self.memory_cap is None else require_caps(self.memory_cap, self.ranks)
        return list_schedule(bound, lasts, delays, priority, caps, self.split, self.memory)
