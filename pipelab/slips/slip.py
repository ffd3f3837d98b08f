"""A slip that may have been made: how it is told, and the plan that was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from pipelab.plan.actions import KINDS, Action, Pair
from pipelab.plan.fault import Code, Fault
from pipelab.plan.plan import Plan

__all__ = ["ALL_THERE", "OF_PLACE", "Slip", "names_both", "rewritten"]

OF_PLACE: tuple[Code, ...] = ("out-of-range", "wrong-rank", "ambiguous-stage")
"""What a slip in a stage, a micro-batch or a placement looks like."""
ALL_THERE: tuple[Code, ...] = (*OF_PLACE, "missing")
"""What is left of none of it where everything stands in its place."""


@dataclass(frozen=True, slots=True)
class Slip:
    """How a slip is told, the plan that was meant, and the kinds of faults of which nothing may be left in it."""

    told: Fault
    meant: Plan
    clears: tuple[Code, ...] = ()


def names_both(action: object) -> TypeGuard[Action]:
    """Tell whether something is an action of one micro-batch on one stage."""
    return isinstance(action, Action) and action.kind in KINDS[:4] and None not in (action.microbatch, action.stage)


def rewritten(plan: Plan, change: Callable[[int, int, Action], Action]) -> Plan:
    """Return the plan with every action changed: `change(rank, position, action)`."""

    def other(rank: int, position: int, item: object) -> object:
        if isinstance(item, Pair):
            halves = (other(rank, position, half) for half in (item.forward, item.backward))
            return Pair(*halves)  # type: ignore[arg-type]  # an action stays an action
        return change(rank, position, item) if isinstance(item, Action) else item

    rows = [[other(rank, at, item) for at, item in enumerate(row)] for rank, row in enumerate(plan.written)]
    return Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)
