"""The shortest makespan of all orders of a plan's actions: brute force that knows the oracle's table and the clock.

What is done says which actions may come next, and what each rank holds. So it goes from one set of done actions to the
next ones, and keeps, of each set, the times that are not later than others everywhere.
"""

from __future__ import annotations

from functools import cache
from operator import le

import oracle


def shortest(plan, cost, cap=None, memory=None):
    """Return the shortest makespan in which no rank holds more than its cap; `None` if no order keeps the caps.

    The overlapped pairs of the plan stay together if the cost has a `pair`, all of whose numbers are per stage.
    """
    beside = cost.all_reduce_runs == "beside"
    times, sizes = cost.times(plan), (plan.stages, plan.microbatches)
    slots = {}  # what runs at once -> on which ranks
    for rank, row in enumerate(plan.rows):
        for item in row:
            halves = oracle.halves(item)
            for slot in [halves] if cost.pair is not None else [(half,) for half in halves]:
                slots.setdefault(slot, []).append(rank)
    jobs = list(slots)
    on = [tuple(r + plan.ranks * (beside and job[0].kind == "R") for r in slots[job]) for job in jobs]
    again = {value for job in jobs for value in oracle.gives(job[0]) if value[0] == "again"}
    giver = {value: at for at, job in enumerate(jobs) for action in job for value in oracle.gives(action)}
    needs = []
    for job in jobs:
        wanted = set().union(*(oracle.needs(action, *sizes, plan.after, again) for action in job))
        needs.append({giver[value] for value in wanted if value in giver})
    before = [sum(1 << at for at in needed) for needed in needs]
    apart = [sum(1 << at for at, needed in enumerate(needs) if job in needed and not set(on[job]) & set(on[at]))
             for job in range(len(jobs))]  # fmt: skip
    lasts = [_last(job, times, cost) for job in jobs]
    lag = [[0 if jobs[job][0].kind == "R" or on[job] == on[at] else cost.latency for at in range(len(jobs))]
           for job in range(len(jobs))]  # fmt: skip
    keeps = _keeper(plan, jobs, on, cap, memory)

    whole = (1 << len(jobs)) - 1
    level = {0: [((0,) * 2 * plan.ranks, (0,) * len(jobs))]}
    for _ in jobs:
        coming = {}
        for done, states in level.items():
            for job in range(len(jobs)):
                if done >> job & 1 or before[job] & ~done or not keeps(done, job):
                    continue
                now = done | 1 << job
                over = [each for each in range(len(jobs)) if now >> each & 1 and not apart[each] & ~now]
                fresh = {_after(state, job, on[job], needs[job], lag[job], lasts[job], over) for state in states}
                coming.setdefault(now, set()).update(fresh)
        level = {done: _best(states) for done, states in coming.items()}
    return min((max(free) for free, _ in level.get(whole, ())), default=None)


def _last(job, times, cost):
    kind, stage = job[0].kind, job[0].stage
    if len(job) == 1:
        return times[kind][stage]
    return cost.pair if isinstance(cost.pair, (int, float)) else cost.pair[stage]


def _after(state, job, ranks, needs, lag, last, over):
    """Return the state after a job: when each rank is free, and when what others still wait for has ended."""
    free, ends = list(state[0]), list(state[1])
    start = max([*(free[rank] for rank in ranks), *(ends[at] + lag[at] for at in needs)])
    ends[job] = start + last
    for rank in ranks:
        free[rank] = start + last
    for each in over:
        ends[each] = 0
    return tuple(free), tuple(ends)


def _best(states):
    """Return the states that are not later than another one everywhere."""
    kept = []
    for state in sorted(states, key=lambda state: sum(state[0]) + sum(state[1])):
        if not any(all(map(le, free, state[0])) and all(map(le, ends, state[1])) for free, ends in kept):
            kept.append(state)
    return kept


def _keeper(plan, jobs, on, cap, memory):
    """Return a function that tells whether a job may come after a set of done ones, without too much on its rank."""
    if cap is None:
        return lambda done, job: True
    stages, last = range(plan.stages), plan.stages - 1

    def of(name, stage):
        if memory is None:
            return int(name in ("activations", "for_weight_grad"))
        value = getattr(memory, "activations" if getattr(memory, name) is None else name)
        return value if isinstance(value, (int, float)) else value[stage]

    weights = {(stage, rank) for job, ranks in zip(jobs, on, strict=True) if job[0].kind != "R"
               for stage in {action.stage for action in job} for rank in ranks}  # fmt: skip
    always = [sum(of("weights", s) + of("optimizer", s) for s in stages if (s, rank) in weights)
              for rank in range(plan.ranks)]  # fmt: skip
    again = {(action.microbatch, action.stage) for job in jobs for action in job if action.kind == "C"}

    def kept(m, s, kinds):
        total = of("outputs", s) if s == last and "F" in kinds else 0
        if "F" in kinds and not kinds & {"B", "I"}:
            total += of("inputs" if (m, s) in again and "C" not in kinds else "activations", s)
        return total + (of("for_weight_grad", s) if "I" in kinds and "W" not in kinds else 0)

    @cache
    def allows(done, job):
        if jobs[job][0].kind == "R":
            return True
        rank = on[job][0]
        there = {}
        for at, other in enumerate(jobs):
            if done >> at & 1 and on[at] == (rank,):
                for action in other:
                    there.setdefault((action.microbatch, action.stage), set()).add(action.kind)
        for action in jobs[job]:
            slot = action.microbatch, action.stage
            kinds = there.get(slot, set())
            rest = sum(kept(*each, found) for each, found in there.items() if each != slot)
            here = max(kept(*slot, kinds), kept(*slot, kinds | {action.kind}))
            there[slot] = kinds | {action.kind}
            begun = {s for (_, s), found in there.items() if found & {"B", "W"}}
            if always[rank] + rest + here + sum(of("gradients", s) for s in begun) > cap[rank]:
                return False
        return True

    return allows
