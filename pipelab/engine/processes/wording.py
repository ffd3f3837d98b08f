"""Say what this process is doing, or waiting for, in words."""

from __future__ import annotations

from pipelab.engine.processes.passage import Passage
from pipelab.plan.plan import Plan

__all__ = ["doing", "met_rank"]


def doing(plan: Plan, call: str, passage: Passage | None) -> str:
    """Return what this process is doing, as in "rank 0 waits …".

    Args:
        plan: the plan.
        call: the call that it is in, such as `"step(x, y)"`.
        passage: its part of a step, if it is in the middle of one.
    """
    if passage is None:
        return f"waits for all processes in {call}"
    if passage.position >= len(passage.row):
        return f"is done with its part of {call}, and waits for all processes"
    action = passage.row[passage.position]
    place = f"{action} (position {passage.position})"
    if passage.computing:
        return f"was running {place}"
    numbering = plan.program.numbering
    giver = _giver(plan, passage)
    if giver is None:
        return f"was about to run {place}"
    rank = plan.program.rank_of[giver]
    return f"waits, before {place}, for what {numbering.action(giver)} on rank {rank} gives"


def met_rank(plan: Plan, passage: Passage | None) -> int | None:
    """Return the rank with which this process exchanges a value now: one that it waits for, or else sends to, say.

    At the end of the row it waits for all that it has sent, to whichever rank: then it is nobody in particular.
    """
    if passage is None or passage.computing or passage.position >= len(passage.row):
        return None
    if not passage.waiting:
        return passage.peer
    giver = _giver(plan, passage)
    return None if giver is None else plan.program.rank_of[giver]


def _giver(plan: Plan, passage: Passage) -> int | None:
    """Return the code of the action on another rank whose value the next action needs, if there is one."""
    numbering, rank_of = plan.program.numbering, plan.program.rank_of
    code = numbering.code(passage.row[passage.position])
    for value in numbering.needs(code):
        giver = plan.program.giver(value)
        if rank_of[giver] != rank_of[code]:
            return giver
    return None
