"""The optimum is what brute force finds, and what the literature's small cases have."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations, product
from math import inf, nan
from pathlib import Path

import oracle
import pytest
from best_order import shortest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import costs, legal_cases, reduced

import pipelab
from pipelab import Cost, Plan, ScheduleError, check, optimum, simulate
from pipelab.errors import CostError, UsageError

pytest.importorskip("ortools")


def by_brute_force(plan, cost, cap=None):
    """Return the shortest makespan of all legal orders of a plan's actions."""
    best = inf
    for rows in product(*(permutations(row) for row in plan.rows)):
        other = plan.with_rows(rows)
        if not check(other, memory_cap=cap):
            best = min(best, simulate(other, cost).makespan)
    return best


@pytest.mark.parametrize(
    ("schedule", "cost", "cap", "makespan"),
    [
        (pipelab.Interleaved1F1B(3, 4), Cost(forward=1, backward=1, per="stage"), 6, 20),
        (pipelab.OneFOneB(4, 8), Cost(forward=1, backward=2), None, 33),
        (pipelab.OneFOneB(4, 8), Cost(forward=1, backward=2), 3, 39),
        (pipelab.GPipe(4, 8), Cost(forward=1, backward=2), 3, 39),
        (pipelab.ZBH1(4, 8), Cost(forward=1, backward=2), 4, 27),
        (pipelab.ZBH1(4, 8), Cost(forward=1, backward=2), 3, 31),
    ],
)
def test_the_known_optima_come_out_proven(schedule, cost, cap, makespan):
    best = optimum(schedule, cost, memory_cap=cap, seconds=60)
    assert (best.makespan, best.bound, best.proven, best.gap) == (makespan, makespan, True, 0)
    assert check(best.plan, memory_cap=cap) == []
    assert simulate(best.plan, cost).makespan == makespan


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "cap"),
    [
        (pipelab.GPipe(2, 2), None),
        (pipelab.GPipe(2, 2), 1),
        (pipelab.GPipe(2, 2), [2, 1]),
        (pipelab.GPipe(1, 3), 2),
        (pipelab.ZBH1(2, 1), None),
        (pipelab.GPipe(3, 1), 1),
        (pipelab.Seq1F1B(2, 2), None),
    ],
)
@pytest.mark.parametrize("cost", [Cost(), Cost(forward=3, backward=1, latency=2), Cost(weight_grad=3, latency=0.5)])
def test_the_optimum_is_what_brute_force_finds(schedule, cap, cost):
    plan = schedule.plan()
    best = optimum(plan, cost, memory_cap=cap)
    caps = [cap] * plan.ranks if isinstance(cap, int) else cap
    assert best.proven
    assert best.makespan == by_brute_force(plan, cost, cap) == shortest(plan, cost, caps)


@settings(deadline=None, max_examples=25)
@given(legal_cases(), st.data())
def test_the_optimum_of_a_random_plan_is_legal_and_no_slower(case, data):
    plan = case.plan
    per_stage = st.lists(costs(), min_size=plan.stages, max_size=plan.stages)
    times = {name: data.draw(per_stage) for name in ("forward", "backward", "input_grad", "weight_grad")}
    reduce = [3.0 * (stage in reduced(plan)) for stage in range(plan.stages)]
    cost = Cost(**times, all_reduce=reduce, latency=data.draw(st.sampled_from([0, 0.5])), per="stage")
    trace = simulate(plan, cost)
    peaks = [max(1, peak) for peak in trace.peak_activations]
    best = optimum(plan, cost, memory_cap=peaks, seconds=5)
    assert check(best.plan, memory_cap=peaks) == []
    assert sorted(map(str, best.plan.graph())) == sorted(map(str, plan.graph()))
    assert best.bound <= best.makespan <= trace.makespan
    assert best.makespan == simulate(best.plan, cost).makespan


def test_an_interrupt_ends_the_search_and_ctrl_c_stays_python_s():
    optimum(pipelab.ZBH1(4, 8), memory_cap=3)
    handled = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    assert int(handled.split()[1], 16) & 1 << signal.SIGINT - 1
    hard = pipelab.Interleaved1F1B(6, 24), Cost(forward=lambda m, s: 7 + s % 5 + m % 3, backward=13)
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
    start = time.monotonic()
    gc.disable()  # Hypothesis looks on at each collection, and an interrupt that falls into its function is lost
    try:
        with pytest.raises(KeyboardInterrupt):
            optimum(*hard, memory_cap=9, seconds=60)
    finally:
        gc.enable()
    assert time.monotonic() - start < 30


def test_with_no_time_the_result_is_legal_and_says_what_is_not_proven():
    cost = Cost(forward=[1, 1.5, 1, 2], backward=[2, 1.5, 3, 2], latency=0.25)
    best = optimum(pipelab.ZBH1(4, 12), cost, memory_cap=3, seconds=1e-3)
    assert check(best.plan, memory_cap=3) == []
    assert not best.proven
    assert best.bound < best.makespan
    assert best.gap == best.makespan / best.bound - 1
    assert "above the optimum" in repr(best)


def test_times_that_share_no_small_unit_are_rounded_down_and_still_proven():
    cost = Cost(forward=1.2345678, backward=2.3456789, latency=0.1234567)
    best = optimum(pipelab.OneFOneB(3, 5), cost, memory_cap=[3, 2, 1], seconds=60)
    assert best.proven
    assert best.bound <= best.makespan <= best.bound + 1e-4


def test_actions_without_length_keep_their_order():
    cost = Cost(first_stage="as-run", weight_grad=0, input_grad=2, latency=0.5)
    best = optimum(pipelab.ZBH1(3, 4), cost, memory_cap=3)
    assert check(best.plan, memory_cap=3) == []
    for some in (cost, Cost(forward=[0, 1], latency=0.5), Cost(backward=0)):
        best = optimum(pipelab.OneFOneB(2, 3), some, memory_cap=2)
        assert (best.makespan, best.proven) == (shortest(best.plan, some, [2, 2]), True)


def test_replicas_all_reduces_and_pairs_are_part_of_the_order():
    best = optimum(pipelab.replicate(pipelab.GPipe(2, 3), 2), Cost(all_reduce=2), memory_cap=3)
    assert check(best.plan, memory_cap=3) == []
    assert sum(item.kind == "R" for row in best.plan.rows for item in row) == 4
    best = optimum(pipelab.DualPipe(2, 4), Cost(pair=2.5))
    assert any(isinstance(item, pipelab.Pair) for row in best.plan.rows for item in row)
    assert check(best.plan) == []


def test_the_optimum_of_slices_keeps_their_order_and_the_cap():
    schedule = pipelab.Seq1F1B(2, 4)  # two sequences of two slices: with two activations, one after the other
    best = optimum(schedule, memory_cap=2)
    assert (best.makespan, best.proven, best.trace.peak_activations) == (18, True, (2, 2))
    assert best.plan.after is not None
    assert oracle.legal(best.plan.rows, 2, 4, best.plan.place, schedule.after)
    assert check(optimum(pipelab.Interleaved1F1B(3, 4), memory_cap=2, seconds=1).plan, memory_cap=2) == []


@pytest.mark.parametrize(
    ("plan", "options", "error", "told"),
    [
        *((pipelab.GPipe(2, 2), {"seconds": each}, UsageError, "seconds=") for each in (0, -1, inf, nan, "10", None)),
        (Plan.parse("0F0; 1B0"), {}, ScheduleError, "missing"),
        (pipelab.GPipe(2, 2), {"cost": Cost(all_reduce_runs="beside")}, CostError, "all-reduces in rows"),
        ("1f1b", {}, TypeError, "expected a plan or a schedule"),
        (pipelab.Interleaved1F1B(3, 4), {"memory_cap": 1}, UsageError, r"rank 0.* 2 activations[\s\S]*of 2 or more"),
        (pipelab.Seq1F1B(2, 4, slices=4), {}, UsageError, r"\[4, 4\], and the solver has ruled out all others"),
        (
            pipelab.DualPipe(2, 4),
            {"cost": Cost(pair=2.5), "memory_cap": 1},
            UsageError,
            "keeps it with each overlapped pair in",
        ),
    ],
)
def test_what_has_no_optimum_is_refused(plan, options, error, told):
    with pytest.raises(error, match=told):
        optimum(plan, **{"memory_cap": 3} | options)


def test_without_or_tools_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['ortools'] = None\n"
        "import pipelab\n"
        "try: pipelab.optimum(pipelab.ZBH1(4, 8), memory_cap=3)\n"
        "except pipelab.UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install ortools" in done.stdout
