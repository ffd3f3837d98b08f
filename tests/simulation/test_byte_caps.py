"""Caps in bytes: `Greedy`, `optimum` and `lower_bound` count what `check` counts."""

from __future__ import annotations

import random

import pytest
from best_order import shortest
from fuzz.orders import fuzz_orders

import pipelab
from pipelab import Cost, Greedy, Memory, check, lower_bound
from pipelab.errors import UsageError

ONE = Memory(activations=1)
FALLING = Memory(weights=100, gradients=100, optimizer=200, activations=[40, 30, 20, 10])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("cap", [1, 2, 4])
def test_with_activations_of_one_byte_all_three_do_what_they_do_with_a_cap_in_activations(cap, split):
    counted, weighed = Greedy(3, 6, memory_cap=cap, split=split), Greedy(3, 6, memory_cap=cap, split=split, memory=ONE)
    assert weighed.plan().rows == counted.plan().rows
    assert lower_bound(counted, memory_cap=cap) == lower_bound(counted, memory_cap=cap, memory=ONE)
    pytest.importorskip("ortools")
    best = pipelab.optimum(counted, memory_cap=cap, memory=ONE, seconds=5)
    assert best.makespan == pipelab.optimum(counted, memory_cap=cap, seconds=5).makespan


def test_the_optimum_under_random_caps_is_what_brute_force_finds():
    pytest.importorskip("ortools")
    without_length = (159, 618, 646)  # where some actions take no time, and an order in whole ticks would hold less
    assert [found for seed in (*range(40), *without_length) if (found := fuzz_orders(seed))] == []


ZBV = pipelab.schedules["zbv"](ranks=2, microbatches=3)
UNEVEN = {"weights": 50, "gradients": 50, "activations": 100, "for_weight_grad": 170, "outputs": 1}


def test_the_solver_finds_an_order_where_no_policy_does_and_refuses_what_no_order_keeps():
    pytest.importorskip("ortools")
    memory = Memory(**UNEVEN)
    cost, cap = Cost(latency=9), {"memory_cap": 473, "memory": memory}
    best = pipelab.optimum(ZBV, cost, **cap)
    assert (best.proven, check(best.plan, **cap)) == (True, [])
    assert best.makespan == shortest(ZBV.plan(), cost, [473] * 2, memory)
    assert shortest(ZBV.plan(), cost, [472] * 2, memory) is None
    with pytest.raises(UsageError, match=r"622, 710\], and the solver has ruled out all others\n  try: a higher cap$"):
        pipelab.optimum(ZBV, memory_cap=472, memory=memory)
    with pytest.raises(UsageError, match=r"found none in 1e-06 seconds, .*\n  try: a higher cap, or more seconds$"):
        pipelab.optimum(ZBV, memory_cap=473, memory=memory, seconds=1e-6)


def test_a_cap_of_very_many_bytes_is_no_larger_than_the_solvers_numbers():
    pytest.importorskip("ortools")
    memory = Memory(**{name: 2 * 10**9 * size + 7 for name, size in UNEVEN.items()})
    plan, cost, cap = pipelab.schedules["zbv"](2, 2).plan(), Cost(forward=1.2345678, backward=3.1415926), 10**12
    best = pipelab.optimum(plan, cost, memory_cap=cap, memory=memory)
    assert best.proven
    assert best.makespan == pytest.approx(shortest(plan, cost, [cap] * 2, memory), rel=1e-3)


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
        with pytest.raises(UsageError, match=r"330 on rank 0.*(no room for|needs) 40"):
            call()


def test_a_cap_in_bytes_bounds_by_area_and_by_the_stage_alone():
    bounds = [lower_bound(pipelab.OneFOneB(4, 8), memory_cap=cap, memory=FALLING) for cap in (900, 380, 340)]
    assert bounds[0] == 33 < bounds[1] < bounds[2]


def test_all_reduces_beside_computing_take_no_bytes():
    plan, cap = (
        pipelab.replicate(pipelab.LoopedBFS(1, 2), 2).plan(),
        {"memory_cap": 40, "memory": Memory(activations=10)},
    )
    bounds = [lower_bound(plan, Cost(all_reduce=3, all_reduce_runs=runs), **cap) for runs in ("in-row", "beside")]
    assert bounds == [shortest(plan, Cost(all_reduce=3, all_reduce_runs=runs)) for runs in ("in-row", "beside")]


def test_plans_whose_bytes_depend_on_more_than_their_order_are_refused():
    for plan in (pipelab.PipeDream(2, 4), pipelab.with_gathers(pipelab.GPipe(2, 2))):
        with pytest.raises(UsageError, match="bytes"):
            lower_bound(plan, memory_cap=1000, memory=ONE)
