"""Recomputation in a plan: a stage's forward runs again for its backward, when its rank has time.

A rank that waits for its first gradient:

    kept        F0 F1 ......... B0 B1          two activations
    again       F0 F1 C0 ...... B0 C1 B1       one at a time, and the inputs of both
    ahead=1     F0 F1 C0 C1 ... B0 B1          two, but for a shorter time
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pipelab.checking.checker import as_plan, require_legal
from pipelab.errors import UsageError, require_size
from pipelab.plan.actions import Action, Item, Pair, halves_of
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace


def with_recompute(
    plan: Schedule | Plan, stages: Collection[int] | None = None, *, ahead: int = 0, cost: Cost | None = None
) -> Plan:
    """Return a plan in which forwards keep only their inputs, and run again (`C`) right before their backwards.

    A `C` needs nothing from other ranks, so a rank runs it while it waits for the gradient (Huang et al. 2019, GPipe,
    section 2.3). A forward right before its own backward keeps its activations, because nothing would be saved. A
    forward whose activations the plan sends away keeps them too.

    With `ahead`, a rank that waits runs later `C` too, if they end before it would go on. So with these costs no action
    starts later than without `ahead` (Liu et al. 2025, "Mario", PPoPP '25, moves recomputation into bubbles this way).

    Args:
        plan: the plan or schedule.
        stages: the stages whose forwards run again; by default, all.
        ahead: how many activations a rank may hold more than if each `C` comes right before its backward.
        cost: how long actions and transfers take, for `ahead`; by default forward 1, backward 2 and free transfers.

    Example:
        >>> import pipelab
        >>> plan = with_recompute(pipelab.OneFOneB(ranks=2, microbatches=3))
        >>> print(plan)
        rank 0 | 0F0 0F1 0C0 0B0 0F2 0C1 0B1 0C2 0B2
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2

        In GPipe, only the last rank's `C` cost time: the others run theirs while they wait.

        >>> inside = pipelab.simulate(pipelab.GPipe(4, 8), pipelab.Cost(backward=1 + 2))
        >>> trace = pipelab.simulate(with_recompute(pipelab.GPipe(4, 8)))
        >>> inside.makespan, trace.makespan, trace.peak_activations
        (44.0, 41.0, (1, 1, 1, 1))

    Raises:
        ScheduleError: if the plan has faults.
        UsageError: if the plan lacks one of `stages`; if `ahead` is neither 0 nor a positive whole number; or if the
            plan gathers weights and `ahead` is not 0.
    """
    most = 0 if ahead == 0 else require_size("ahead", ahead)
    plan = as_plan(plan)
    require_legal(plan)
    if most and any(move.action.traits.gathers for move in plan.bound.moves):
        raise UsageError(
            f"ahead={ahead}: the plan gathers weights, and a C that moves ahead could come before its gather\n"
            f"  try: with_gathers(with_recompute(schedule, ahead={ahead}))"
        )
    wanted = range(plan.stages) if stages is None else stages
    if unknown := sorted(set(wanted) - set(range(plan.stages))):
        raise UsageError(f"stages={unknown}: {plan.name} has stages 0 to {plan.stages - 1}")
    rows = [list(_again(plan.bound.items(rank), wanted)) for rank in range(plan.ranks)]
    plan = plan.with_rows(rows, f"{plan.name}, recomputed")
    if not most:
        return plan
    trace = simulate(plan, cost)
    return plan.with_rows([list(_ahead(trace, rank, most)) for rank in range(plan.ranks)], plan.name)


def _again(row: Sequence[Item], stages: Collection[int]) -> Iterator[Item]:
    """Yield a row with a `C` before each backward of these stages that has none and does not follow its forward."""
    listed = {each for item in row for each in halves_of(item)}
    before: tuple[Action, ...] = ()
    for item in row:
        backward = halves_of(item)[-1]
        own, again, away = (Action(kind, backward.microbatch, backward.stage) for kind in ("F", "C", "OFFLOAD"))
        wanted = backward.traits.backward and backward.stage in stages
        if wanted and listed.isdisjoint((again, away)) and own not in (*before, *halves_of(item)):
            yield again
        yield item
        if backward.traits.computes:
            before = halves_of(item)


def _ahead(trace: Trace, rank: int, most: int) -> Iterator[Item]:
    """Yield a rank's row with each `C` in the first time in which the rank waits long enough for it."""
    row = trace.plan.bound.items(rank)
    times = {event.action: (event.start, event.end) for event in trace.events_of(rank)}
    waiting = [item for item in row if isinstance(item, Action) and item.traits.again]
    done, moved, free = set[Action](), set[Item](), trace.start
    for item in row:
        if item in moved:  # from here on, the rank would hold its activation anyway
            moved.remove(item)
            continue
        if item in times or isinstance(item, Pair):
            start = min(times[half][0] for half in halves_of(item))
            while waiting and len(moved) < most:
                coming = waiting[0]
                last = times[coming][1] - times[coming][0]
                if coming == item or free + last > start or Action("F", coming.microbatch, coming.stage) not in done:
                    break
                yield waiting.pop(0)
                moved.add(coming)
                free += last
            free = max(times[half][1] for half in halves_of(item))
        if waiting and waiting[0] == item:
            waiting.pop(0)
        done.update(halves_of(item))
        yield item
