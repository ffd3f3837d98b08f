"""Attacks on `optimum` and `lower_bound`: random plans, costs and caps, against all orders by brute force."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from random import Random

import oracle
from best_order import shortest

from pipelab import (
    Action,
    B,
    C,
    Cost,
    F,
    I,
    Memory,
    Plan,
    ScheduleError,
    W,
    check,
    lower_bound,
    memory_use,
    optimum,
    simulate,
)
from pipelab.errors import CostError, UsageError

MOST = 20
"""How many actions the plans have."""


def random_plan(random: Random) -> Plan:
    """Return a legal plan: one or several stages a rank, replicas, split backwards, recomputations, slices, pairs."""
    while True:
        ranks, per_rank, microbatches = random.randint(1, 3), random.randint(1, 3), random.randint(1, 4)
        stages = ranks * per_rank
        if 2 * stages * microbatches <= MOST and stages * microbatches > 1:
            break
    homes = random.choice(
        [
            [s % ranks for s in range(stages)],
            [s // per_rank for s in range(stages)],
            [min(s % (2 * ranks), 2 * ranks - 1 - s % (2 * ranks)) for s in range(stages)],
            random.sample([s % ranks for s in range(stages)], stages),
        ]
    )
    mirrored = random.random() < 0.35
    sliced = not mirrored and microbatches > 1 and random.random() < 0.15

    def place(m: int, s: int) -> int:
        return ranks - 1 - homes[s] if mirrored and m % 2 else homes[s]

    def after(m: int, s: int) -> list[int]:
        return [m - 1] if m % 2 else []

    split, again = random.choice([0, 0, 0.5, 1]), random.choice([0, 0, 0, 0.4])
    left, todo = MOST - 2 * stages * microbatches, []
    for m in range(microbatches):
        for s in range(stages):
            todo.append(F(m, s))
            more = [random.random() < split and left > 0]
            left -= more[0]
            more.append(random.random() < again and left > 0)
            left -= more[1]
            todo += [I(m, s), W(m, s)] if more[0] else [B(m, s)]
            todo += [C(m, s)] * more[1]
    return dealt(random, todo, ranks, stages, microbatches, place, after if sliced else None)


def dealt(random: Random, todo: list, ranks: int, stages: int, microbatches: int, place, after) -> Plan:
    """Return the plan whose actions are dealt to their ranks in some order in which they could run."""
    again = {value for action in todo for value in oracle.gives(action) if value[0] == "again"}
    rows: list[list] = [[] for _ in range(ranks)]
    done: set[oracle.Value] = set()
    paired = random.random() < 0.4
    while todo:
        ready = [each for each in todo if oracle.needs(each, stages, microbatches, after, again) <= done]
        lasts = {rank: row[-1] for rank, row in enumerate(rows) if row and row[-1].kind == "F"}
        homes = [(each, lasts.get(place(each.microbatch, each.stage))) for each in ready if each.kind == "B"]
        after_forward = [each for each, last in homes if last and last.microbatch != each.microbatch]
        action = random.choice(after_forward if paired and after_forward else ready)
        todo.remove(action)
        done |= oracle.gives(action)
        rows[place(action.microbatch, action.stage)].append(action)
    if paired:
        rows = [joined(row, random) for row in rows]
    return Plan(rows, stages, microbatches, place, after=after)


def random_cost(random: Random, plan: Plan) -> Cost:
    """Return a cost of small whole numbers; sometimes one kind of backward takes no time."""
    times = {
        name: [random.randint(1, 4) for _ in range(plan.stages)] if random.random() < 0.5 else random.randint(1, 4)
        for name in ("forward", "backward", "input_grad", "weight_grad", "recompute", "all_reduce")
    }
    if random.random() < 0.05:
        times[random.choice(["backward", "input_grad", "weight_grad"])] = 0
    pair = {"pair": random.randint(2, 6)} if plan.bound.pairs and random.random() < 0.8 else {}
    first = random.choice(["uniform", "uniform", "as-run"])
    return Cost(**times, **pair, latency=random.choice([0, 0, 0.5, 2]), per="stage", first_stage=first)


def random_memory(random: Random, plan: Plan) -> Memory | None:
    """Return sizes, mostly uneven; or `None`, to count activations."""
    if random.random() < 0.1:
        return None

    def sizes(least: int, most: int) -> int | list[int]:
        several = [random.randint(least, most) for _ in range(plan.stages)]
        return several if random.random() < 0.7 else several[0]

    return Memory(
        weights=sizes(0, 9),
        optimizer=random.choice([0, 5]),
        gradients=random.choice([0, sizes(0, 20)]),
        activations=sizes(4, 25),
        inputs=random.randint(0, 4),
        for_weight_grad=random.choice([None, sizes(0, 30)]),
        outputs=random.choice([0, 0, 3]),
    )


def random_caps(random: Random, plan: Plan, memory: Memory | None) -> list[int]:
    """Return caps about what the plan itself holds."""
    peaks = simulate(plan).peak_activations if memory is None else memory_use(plan, memory).peaks
    share = random.choice([0.5, 0.7, 0.85, 1])
    return [max(1, round(peak * random.uniform(share, 1))) for peak in peaks]


def joined(row: list, random: Random) -> list:
    """Return a row in which some forwards and the backwards right after them are overlapped pairs."""
    found: list = []
    for item in row:
        pair = found and isinstance(found[-1], Action) and (found[-1].kind, item.kind) == ("F", "B")
        often = 0.7 if pair and found[-1].microbatch != item.microbatch else 0.1
        found[-1:] = [found[-1] & item] if pair and random.random() < often else [*found[-1:], item]
    return found


def fuzz_orders(number: int) -> str | None:
    """Compare the optimum under a cap, and whether there is one, with all orders; the bounds are not above it."""
    if importlib.util.find_spec("ortools") is None:
        return None
    random = Random(number)
    plan = random_plan(random)
    cost, memory = random_cost(random, plan), random_memory(random, plan)
    limits = {"memory_cap": random_caps(random, plan, memory), "memory": memory}
    try:
        simulate(plan, cost)
    except ScheduleError:  # with each pair as one slot, it would deadlock
        return None
    expected = shortest(plan, cost, limits["memory_cap"], memory)
    beside = replace(cost, all_reduce_runs="beside")
    for costs, least in ((cost, expected), (beside, expected and shortest(plan, beside, limits["memory_cap"], memory))):
        if least is not None and (bound := lower_bound(plan, costs, **limits)) > least + 1e-9:
            return f"bound {bound} above {least}"
    try:
        best = optimum(plan, cost, **limits, seconds=30)
    except UsageError as error:
        return None if expected is None else f"{expected} is refused: {error}"
    except CostError as error:
        return None if 0 in (cost.backward, cost.input_grad, cost.weight_grad) else str(error)
    if (best.makespan, best.proven) != (expected, True) or check(best.plan, **limits):
        return f"{best}: expected {expected}, {check(best.plan, **limits)}"
    return None


fuzz_orders.seeds = 20
