"""Sizes: what is too large is refused at once, and time follows the actions, not the numbers that they name."""

from __future__ import annotations

from itertools import count, repeat

import pytest

import pipelab
from pipelab import Action, B, F, GPipe, Greedy, I, Plan, R, ScheduleError, W, check
from pipelab.errors import MOST_SLOTS, UsageError

HUGE = 10**10


@pytest.mark.parametrize("kind", pipelab.schedules.values())
@pytest.mark.parametrize("which", ["ranks", "microbatches"])
def test_a_schedule_with_a_number_above_the_bound_is_refused(kind, which):
    with pytest.raises(UsageError, match=f"={HUGE}: .*at most {MOST_SLOTS}"):
        kind(**{"ranks": 4, "microbatches": 8, which: HUGE}).plan()


@pytest.mark.parametrize("which", ["stages", "microbatches"])
def test_a_plan_with_a_number_above_the_bound_is_refused_but_a_cap_may_be_any_number(which):
    with pytest.raises(UsageError, match=f"{which}={HUGE}: .*at most {MOST_SLOTS}"):
        Plan([[F(0), B(0)]], **{which: HUGE})
    assert check(GPipe(2, 2), memory_cap=HUGE) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: check(GPipe(4, MOST_SLOTS // 4 + 1)),
        lambda: check(Greedy(4, MOST_SLOTS // 4 + 1)),
        lambda: check(pipelab.replicate(GPipe(4, 4), MOST_SLOTS // 16 + 1)),
        lambda: check(pipelab.Interleaved1F1B(2, MOST_SLOTS // 4 + 1)),
        lambda: Plan([[F(0), B(0)]], 4, MOST_SLOTS // 4 + 1),
        lambda: Plan([[F(0), B(0)]] * 4, microbatches=MOST_SLOTS // 4 + 1),
    ],
)
def test_stages_times_microbatches_above_the_bound_are_refused_with_the_next_move(make):
    with pytest.raises(UsageError, match=f"at most {MOST_SLOTS:,}\n  try: {MOST_SLOTS // 4:,} micro-batches or fewer"):
        make()


def test_a_refused_size_is_written_in_one_style_of_numbers():
    with pytest.raises(UsageError) as refused:
        check(GPipe(4096, 4096))
    assert str(refused.value) == (
        "4,096 stages x 4,096 micro-batches are 16,777,216: a plan may have at most 4,194,304\n"
        "  try: 1,024 micro-batches or fewer"
    )


def test_schedules_that_never_end_are_read_no_further_than_the_largest_plan(monkeypatch):
    monkeypatch.setattr("pipelab.schedule.MOST_ACTIONS", 1000)

    class Forever(pipelab.Schedule):
        def actions(self, rank):
            asked.append(rank)
            yield from repeat(F(0))

    asked = []
    (fault,) = check(Forever(ranks=64, microbatches=1))
    assert (fault.code, fault.rank) == ("endless", 1)
    assert asked == [0, 1]


@pytest.mark.parametrize(
    "rows",
    [
        lambda: repeat([]),
        lambda: repeat([F(0)]),
        lambda: ((F(m) for m in count()) for _ in count()),
        lambda: [range(10**15)],
        lambda: [[F(0)] * 1001],
    ],
)
def test_rows_that_never_end_are_refused(monkeypatch, rows):
    monkeypatch.setattr("pipelab.plan.plan.MOST_ACTIONS", 1000)
    with pytest.raises(UsageError, match="more than 1000 actions"):
        Plan(rows())


@pytest.mark.thorough
@pytest.mark.timeout(30)  # a look at all stages for each of them takes minutes
def test_stages_that_nobody_runs_cost_no_more_than_others():
    few = [F(0, 0)] * 4096
    faults = check(Plan([[*few, R(32767)]]))
    assert sum(fault.code == "missing" for fault in faults) == 2 * 32768 - 1
    last = faults[-1]
    assert last.message == "micro-batch 0 has no forward on stage 32767"
    assert last.hint == "yield F(0, stage=32767)"


@pytest.mark.parametrize("sizes", [{"microbatches": 1000}, {"stages": 1000}])
def test_a_slip_beside_one_given_size_makes_no_large_table(sizes):
    plan = Plan([[F(4000, 4000), F(0, 0), B(0, 0)]], **sizes)
    assert plan.stages * plan.microbatches <= 1 << 16
    assert {"stages": plan.stages, "microbatches": plan.microbatches}.items() >= sizes.items()
    assert "out-of-range" in [fault.code for fault in check(plan)]


def test_ranks_without_actions_cost_nothing():
    plan = Plan([[F(4000, 0)], *[[]] * 20_000])
    assert plan.microbatches == 4001
    assert {fault.code for fault in check(plan)} == {"missing"}


@pytest.mark.thorough
@pytest.mark.timeout(60)
def test_a_backward_beside_its_halves_is_found_sixty_thousand_times():
    plan = Plan([[kind(m, 0) for m in range(60_000) for kind in (F, B, I)]])
    faults = check(plan)
    assert [fault.position for fault in faults] == list(range(2, 180_000, 3))


def test_of_many_faults_with_one_code_only_the_first_have_an_excerpt(monkeypatch):
    monkeypatch.setattr("pipelab.checking.checker._MOST_EXCERPTS", 3)
    row = [F(0, 0), F(1, 0), B(0, 0), B(1, 0)]
    faults = check(Plan([row, row, ["junk"]]))
    shown = [bool(fault.excerpt) for fault in faults]
    assert [fault.code for fault in faults] == ["not-an-action", *["duplicate"] * 4]
    assert shown == [True, True, True, True, False]


def test_of_many_deadlocks_only_the_first_have_their_repair_tried_out(monkeypatch):
    pair = [[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]]
    rows = [[Action(each.kind, each.microbatch + 2 * (rank // 2)) for each in pair[rank % 2]] for rank in range(4)]
    plan = Plan(rows, 2, 4, lambda m, stage: 2 * (m // 2) + 1 - stage)
    first, second = check(plan)
    assert (first.code, second.code) == ("deadlock", "deadlock")
    assert "yield F(1) before B(0)" in first.hint
    assert "yield F(3) before B(2)" in second.hint
    monkeypatch.setattr("pipelab.checking.deadlock._MOST_TRIED", 0)
    assert [fault.hint for fault in check(plan)] == [first.hint, "fix the cycles before this one, then check again"]


def test_the_first_late_gradient_is_the_one_that_an_all_reduce_waits_for():
    plan = Plan([[F(0), F(1), F(2), B(0), R(), W(1), I(1), B(2)]])
    fault = next(fault for fault in check(plan) if fault.action == R(0))
    assert (
        "0R on rank 0, position 4 comes before weight gradient 0W1 at position 5, which gives it the weight gradient"
        in str(fault)
    )
    with pytest.raises(ScheduleError):
        pipelab.simulate(plan)
