"""One slip that many faults come from: found by trying out what was meant.

A student who writes `F(rank, m)` for `F(m, rank)`, or `place(self, stage, microbatch)`, makes one mistake; a list of a
hundred faults would hide it. So what may have been meant is checked as a plan of its own: if less is wrong with it, the
slip is told first, and after it only what would still be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipelab.plan.fault import Fault
from pipelab.plan.plan import Plan
from pipelab.slips.miscounting import chunks_for_stages, counted_from_one, forgotten_stages, more_stages, too_far
from pipelab.slips.mistyping import alone_with_its_number, standing_twice
from pipelab.slips.slip import OF_PLACE, Slip
from pipelab.slips.swapping import everybodys_actions, numbers_swapped, place_swapped

__all__ = ["led_by_a_slip"]


def led_by_a_slip(
    plan: Plan, faults: Sequence[Fault], judge: Callable[[Plan], list[Fault]]
) -> tuple[Fault | None, Plan, list[Fault]]:
    """Return the slip that explains the most faults, if any does, the plan that was meant, and what is wrong with it.

    Args:
        plan: what is wrong.
        faults: all that is wrong with it.
        judge: returns the faults of another plan.
    """
    best: tuple[Fault | None, Plan, list[Fault]] = (None, plan, list(faults))
    for slip in _slips(plan, faults):
        left = judge(slip.meant)
        if len(left) < len(best[2]) and not any(fault.code in slip.clears for fault in left):
            then = "then the schedule is right" if not left else "what would still be wrong follows"
            best = replace(slip.told, hint=f"{slip.told.hint}; {then}"), slip.meant, left
        if not left:
            break
    return best


def _slips(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Yield every slip that may have been made."""
    of_place = any(fault.code in OF_PLACE for fault in faults)
    if of_place:
        yield from numbers_swapped(plan, faults)
        yield from place_swapped(plan)
        yield from everybodys_actions(plan, faults)
        yield from more_stages(plan, faults)
        yield from chunks_for_stages(plan, faults)
    yield from forgotten_stages(plan, faults)
    if of_place:
        yield from counted_from_one(plan, faults)
        yield from too_far(plan, faults)
    elif any(fault.code == "missing" for fault in faults) and plan.place is None:
        yield from alone_with_its_number(plan)
    yield from standing_twice(plan, faults)
