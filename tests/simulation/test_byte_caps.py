"""Caps in bytes: `Greedy`, `optimum` and `lower_bound` count what `check` counts."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest

import pipelab
from pipelab import Cost, Greedy, Memory, Plan, check, lower_bound
from pipelab.errors import UsageError

ONE = Memory(activations=1)
FALLING = Memory(weights=100, gradients=100, optimizer=200, activations=[40, 30, 20, 10])


def by_brute_force(plan, cost, cap, memory):
    """Return the shortest makespan of all orders that `check` accepts, each forward before its backward; or `None`."""

    def rows(row):
        for order in permutations(row):
            place = {str(action): at for at, action in enumerate(order)}
            before = {"B": "FC", "I": "FC", "C": "F", "W": "I", "F": ""}
            pairs = ((a, str(a).replace(a.kind, kind)) for a in order for kind in before[a.kind])
            if all(place.get(first, -1) < place[str(a)] for a, first in pairs):
                yield order

    orders = (plan.with_rows(each) for each in product(*map(list, map(rows, plan.rows))))
    kept = (each for each in orders if all(max(memory.held(each.bound, rank)) <= cap[rank] for rank in range(2)))
    return min((pipelab.simulate(each, cost).makespan for each in kept if not check(each)), default=None)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("cap", [1, 2, 4])
def test_with_activations_of_one_byte_all_three_do_what_they_do_with_a_cap_in_activations(cap, split):
    counted, weighed = Greedy(3, 6, memory_cap=cap, split=split), Greedy(3, 6, memory_cap=cap, split=split, memory=ONE)
    assert weighed.plan().rows == counted.plan().rows
    assert lower_bound(counted, memory_cap=cap) == lower_bound(counted, memory_cap=cap, memory=ONE)
    pytest.importorskip("ortools")
    best = pipelab.optimum(counted, memory_cap=cap, memory=ONE, seconds=5)
    assert best.makespan == pipelab.optimum(counted, memory_cap=cap, seconds=5).makespan


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_in_bytes_is_what_brute_force_finds(seed):
    pytest.importorskip("ortools")
    draw = random.Random(seed)  # noqa: S311 - for tests
    texts = ("0F0 0F1 0B0 0B1; 1F0 1F1 1B0 1B1", "0F0 0F1 0C0 0B0 0B1; 1F0 1F1 1B0 1B1", "0F0 0I0 0W0; 1F0 1I0 1W0")
    plan = Plan.parse(texts[seed % 3])
    sizes = {name: [draw.randint(1, 20) for _ in range(2)] for name in ("activations", "gradients", "for_weight_grad")}
    memory = Memory(weights=draw.randint(0, 9), optimizer=[0, 5], inputs=1, outputs=draw.choice([0, 3]), **sizes)
    cost = Cost(forward=[1, draw.randint(1, 3)], backward=draw.randint(1, 4), latency=1)
    cap = [peak - draw.choice([0, 0, 3]) for peak in pipelab.memory_use(plan, memory).peaks]
    expected = by_brute_force(plan, cost, cap, memory)
    if expected is None:
        with pytest.raises(UsageError, match="memory_cap"):
            pipelab.optimum(plan, cost, memory_cap=cap, memory=memory)
        return
    best = pipelab.optimum(plan, cost, memory_cap=cap, memory=memory)
    assert (best.makespan, best.proven) == (expected, True)
    assert check(best.plan, memory_cap=cap, memory=memory) == []
    assert lower_bound(plan, cost, memory_cap=cap, memory=memory) <= expected


def test_a_rank_with_small_activations_holds_more_of_them():
    schedule = Greedy(4, 8, memory_cap=560, memory=FALLING)
    assert pipelab.simulate(schedule).peak_activations == (4, 4, 4, 1)
    assert check(schedule, memory_cap=560, memory=FALLING) == []
    assert pipelab.memory_use(schedule, FALLING).peaks == (560, 520, 480, 410)


@pytest.mark.parametrize("seed", range(6))
def test_greedy_never_passes_a_cap_in_bytes(seed):
    draw = random.Random(seed)  # noqa: S311 - for tests
    sizes = {name: [draw.randint(0, 30) for _ in range(6)] for name in ("weights", "gradients", "activations")}
    memory = Memory(**sizes, for_weight_grad=draw.choice([None, 12]), outputs=draw.choice([0, 2]))
    for cap in (160, 200, 260):
        schedule = Greedy(3, 6, stages_per_rank=2, memory_cap=cap, memory=memory, split=draw.random() < 0.5)
        try:
            plan = schedule.plan()
        except (UsageError, pipelab.ScheduleError):  # no room, or a deadlock
            continue
        assert check(plan, memory_cap=cap, memory=memory) == []
        assert lower_bound(plan, memory_cap=cap, memory=memory) <= pipelab.simulate(plan).makespan


def test_a_cap_without_room_for_one_activation_is_refused_with_its_rank():
    for call in (
        lambda: Greedy(4, 8, memory_cap=330, memory=FALLING).plan(),
        lambda: lower_bound(pipelab.OneFOneB(4, 8), memory_cap=330, memory=FALLING),
    ):
        with pytest.raises(UsageError, match=r"330 on rank 0.*no room for 40"):
            call()


def test_a_cap_in_bytes_bounds_by_area_and_by_the_stage_alone():
    bounds = [lower_bound(pipelab.OneFOneB(4, 8), memory_cap=cap, memory=FALLING) for cap in (900, 380, 340)]
    assert bounds[0] == 33 < bounds[1] < bounds[2]


def test_plans_whose_bytes_depend_on_more_than_their_order_are_refused():
    for plan in (pipelab.PipeDream(2, 4), pipelab.with_gathers(pipelab.GPipe(2, 2))):
        with pytest.raises(UsageError, match="bytes"):
            lower_bound(plan, memory_cap=1000, memory=ONE)
