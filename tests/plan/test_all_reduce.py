"""All-reduces that nobody lists: each comes to its place, and keeps no plan from running."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from strategies import catalogue_plans, costs, legal_cases, random_cases, shuffled_cases

from pipelab import B, Cost, F, Plan, R, check, simulate


def rows(plan):
    return [" ".join(map(str, row)) for row in plan.rows]


def is_reduce(item):
    return getattr(item, "kind", "") == "R"


def without_reduces(case):
    return case.with_rows([[item for item in row if not is_reduce(item)] for row in case.rows])


def unlisted(case):
    """Return the replicated stages whose all-reduce no rank lists, with their ranks."""
    listed = {item.stage for row in case.rows for item in row if is_reduce(item)}
    groups = {stage: set(case.table[stage :: case.stages]) for stage in range(case.stages)}
    return {stage: ranks for stage, ranks in groups.items() if len(ranks) > 1 and stage not in listed}


# Where they go


@pytest.mark.parametrize(
    ("written", "bound"),
    [
        ("0F0 1F0 1B0 0B0; 0F1 1F1 1B1 0B1", "0F0 1F0 1B0 1R 0B0 0R; 0F1 1F1 1B1 1R 0B1 0R"),
        (
            "0F0 1F0 1I0 1W0 0I0 0W0; 0F1 1F1 1I1 0I1 1W1 0W1",
            "0F0 1F0 1I0 1W0 1R 0I0 0W0 0R; 0F1 1F1 1I1 0I1 1W1 1R 0W1 0R",
        ),
        ("0F0 0B0 1F1 1B1; 1F0 1B0 0F1 0B1", "0F0 0B0 1F1 1B1 1R 0R; 1F0 1B0 0F1 0B1 1R 0R"),  # or they would hang
        ("0F0 1F0 1B0 0B0 1R; 0F1 1F1 1B1 0B1 1R", "0F0 1F0 1B0 0B0 0R 1R; 0F1 1F1 1B1 0B1 0R 1R"),
        ("0F0 1F0 (1F1;1B0)OVERLAP_F_B 1B1 0B0; 0F1 0B1", "0F0 1F0 (1F1;1B0)OVERLAP_F_B 1B1 0B0 0R; 0F1 0B1 0R"),
        (  # early, only pairs in one slot would hang
            "0F0 (0F1;0B0)OVERLAP_F_B 0B1; 1F0 2F0 2B0 1B0; 1F1 2F1 2B1 1B1",
            "0F0 (0F1;0B0)OVERLAP_F_B 0B1; 1F0 2F0 2B0 1B0 2R 1R; 1F1 2F1 2B1 1B1 2R 1R",
        ),
        ("0F0 (1F0;1B0)OVERLAP_F_B 0B0; 0F1 1F1 1B1 0B1", "0F0 (1F0;1B0)OVERLAP_F_B 1R 0B0 0R; 0F1 1F1 1B1 1R 0B1 0R"),
    ],
)
def test_an_all_reduce_goes_right_after_its_stages_last_gradient_or_to_the_end(written, bound):
    plan = Plan.parse(written)
    assert "; ".join(rows(plan)) == bound
    assert "; ".join(" ".join(map(str, row)) for row in plan.written) == written
    assert check(plan) == []


def test_a_plan_with_an_item_that_cannot_stand_shows_what_it_was_given():
    plan = Plan([[F(0, 0), "B0"], [F(1, 0), B(1, 0)]], 1, 2)
    assert rows(plan) == ["0F0 B0", "0F1 0B1"]


# What holds for every plan


@given(legal_cases())
def test_exactly_the_replicated_stages_get_one_on_each_of_their_ranks(case):
    added = [(stage, rank) for stage, ranks in unlisted(case).items() for rank in ranks]
    listed = [(item.stage, rank) for rank, row in enumerate(case.rows) for item in row if is_reduce(item)]
    there = [(item.stage, rank) for rank, row in enumerate(case.plan.rows) for item in row if is_reduce(item)]
    assert sorted(there) == sorted(added + listed)


@given(legal_cases())
def test_all_stand_right_after_the_last_gradient_or_else_all_stand_at_the_end(case):
    groups, sizes = unlisted(case), (case.stages, case.microbatches)
    early, late = ([list(row) for row in case.rows] for _ in range(2))
    for stage, ranks in sorted(groups.items(), reverse=True):
        for rank in ranks:
            late[rank].append(R(stage))
            gradients = (half for item in early[rank] for half in oracle.halves(item))
            last = [half for half in gradients if half.kind in "BW" and half.stage == stage][-1]
            at = next(at for at, item in enumerate(early[rank]) if last in oracle.halves(item))
            early[rank].insert(at + 1, R(stage))

    def by_slots(rows):
        return oracle.clock(rows, *sizes, lasts=lambda _: 1, pair=lambda _: 1) is not None

    runs = oracle.legal(early, *sizes, case.place) and by_slots(early) >= by_slots(case.rows)
    assert case.plan.rows == tuple(map(tuple, early if runs else late))


@given(legal_cases(reduces=False))
def test_a_plan_is_the_same_whether_they_are_written_or_added(case):
    written = case.with_rows(case.plan.rows).plan
    assert written == case.plan
    assert check(written) == []


@given(legal_cases(reduces=False), costs())
def test_they_keep_no_plan_of_pairs_in_one_slot_from_running(case, length):
    bare = oracle.clock(case.rows, case.stages, case.microbatches, lasts=lambda _: 1, pair=lambda _: length)
    if bare is not None:
        assert simulate(case.plan, Cost(forward=1, backward=1, pair=length, per="stage")).makespan > 0


@given(random_cases() | shuffled_cases())
def test_no_fault_speaks_of_one_that_was_not_written(case):
    for fault in check(without_reduces(case).plan):
        assert getattr(fault.action, "kind", "") != "R" or fault.action.microbatch is not None
        assert "all-reduce" not in str(fault)


@given(catalogue_plans())
def test_a_plan_whose_stages_are_all_on_one_rank_is_bound_as_it_was_written(plan):
    if all(len(ranks) == 1 for ranks in plan.replicas.values()):
        assert not plan.bound.automatic
        sizes = plan.stages, plan.microbatches
        again = Plan(plan.written, *sizes, lambda m, s: plan.bound.route(m)[s], after=plan.after)
        assert plan == again


# What they cost


@given(legal_cases(reduces=False), costs())
def test_one_that_costs_nothing_takes_no_time(case, forward):
    trace = simulate(case.plan, Cost(forward=forward))
    assert all(event.start == event.end for event in trace.events if event.action.kind == "R")
