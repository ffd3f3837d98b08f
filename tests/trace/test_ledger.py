"""Idle times and their reasons: together they are exactly the time in which a rank does not work."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EVERY_SCHEDULE, costs, legal_cases

import pipelab
from pipelab import B, Cost, F, Plan, R
from pipelab.trace.events import Transfer
from pipelab.trace.ledger import REASONS


def assert_partition(trace):
    """Assert that work and idle times fill each rank's makespan, without gap or overlap."""
    for rank in range(trace.ranks):
        spans = [(each.start, each.end) for each in trace.events_of(rank) if each.end > each.start]
        spans += [(each.start, each.end) for each in trace.idle if each.rank == rank]
        spans = sorted(set(spans))  # the halves of a pair share a slot
        assert spans[0][0] == trace.start
        assert spans[-1][1] == trace.end
        assert all(mine[1] == following[0] for mine, following in pairwise(spans))
        assert sum(trace.ledger[rank].values()) == pytest.approx(trace.makespan - trace.busy[rank])
    assert all(each.reason in REASONS and each.end > each.start for each in trace.idle)
    total = sum(trace.ledger.total.values()) + sum(trace.busy)
    assert total == pytest.approx(trace.makespan * trace.ranks)


@pytest.mark.parametrize(("kind", "ranks", "microbatches"), EVERY_SCHEDULE)
def test_reasons_partition_the_idle_time_of_every_schedule(kind, ranks, microbatches):
    cost = Cost(forward=1, backward=2, latency=0.25, all_reduce=2, pair=2.5)
    assert_partition(pipelab.simulate(kind(ranks, microbatches), cost))


@given(legal_cases(), costs(), costs(), st.sampled_from([0, 0.5, 3]))
@settings(deadline=None)
def test_reasons_partition_the_idle_time_of_any_legal_plan(case, forward, backward, latency):
    trace = pipelab.simulate(case.plan, Cost(forward=forward, backward=backward, latency=latency, all_reduce=1))
    assert_partition(trace)
    assert not any(each.reason == "order" for each in trace.idle)  # a simulated rank never dawdles


def test_idle_time_of_gpipe_in_closed_form():
    ranks, microbatches = 4, 8
    ledger = pipelab.simulate(pipelab.GPipe(ranks, microbatches), Cost(forward=1, backward=2)).ledger
    for rank in range(ranks):
        found = {"fill": rank, "wait": (ranks - 1 - rank) * 3, "drain": 2 * rank}
        assert ledger[rank] == {reason: time for reason, time in found.items() if time}


def test_a_transfer_is_told_from_what_is_not_computed():
    trace = pipelab.simulate(pipelab.Naive(2, 1), Cost(forward=1, backward=2, latency=0.5))
    found = [(each.rank, each.start, each.end, each.reason) for each in trace.idle]
    assert found == [(0, 1.0, 4.5, "wait"), (0, 4.5, 5.0, "transfer"), (1, 0.0, 1.5, "fill"), (1, 4.5, 7.0, "drain")]


def test_a_transfer_that_waits_for_another_and_a_late_start_are_reasons_of_their_own():
    plan = Plan([[F(0, 0), B(0, 0)], [F(0, 1), B(0, 1)]], stages=2, microbatches=1)
    behind = Transfer(1, 0, B(0, 1), B(0, 0), 5.0, 6.0)
    there = Transfer(0, 1, F(0, 0), F(0, 1), 1.0, 1.0)
    trace = pipelab.Trace(plan, [[0, 6], [1, 2]], [[1, 8], [2, 4]], transfers=[there, behind])
    assert trace.ledger[0] == {"wait": 3.0, "behind another transfer": 1.0, "transfer": 1.0}
    assert "waits behind another" in trace.why(0, 4.5)
    late = pipelab.Trace(pipelab.Naive(1, 1).plan(), [[0, 3]], [[1, 4]], source="measured")
    assert late.ledger[0] == {"order": 2.0}


@pytest.mark.parametrize("latency", [0, 0.25])
def test_time_behind_other_transfers_is_the_same_in_the_ledger_and_the_trace(latency):
    trace = pipelab.simulate(pipelab.Interleaved1F1B(8, 16), Cost(latency=latency), transport="rank")
    assert_partition(trace)
    behind = [row.get("behind another transfer", 0) for row in trace.ledger]
    assert behind == pytest.approx(trace.queued, abs=1e-9)
    assert sum(behind) > 10
    stood = next(each for each in trace.idle if each.reason == "behind another transfer")
    assert ", but its " in trace.why(stood.rank, stood.start)


def test_an_all_reduce_waits_for_its_last_rank():
    plan = Plan([[F(0, 0), B(0, 0), R(0)], [F(1, 0), B(1, 0), F(2, 0), B(2, 0), R(0)]], 1, 3, lambda m, s: min(m, 1))
    trace = pipelab.simulate(plan, Cost(forward=1, backward=2, all_reduce=1))
    assert list(trace.ledger) == [{"all-reduce": 3.0}, {}]
    assert "runs 0B2 until 6" in trace.why(0, 4)


def test_the_chain_goes_back_to_the_first_action():
    trace = pipelab.simulate(pipelab.OneFOneB(4, 8))
    told = trace.why(rank=0, at=4, lines=99).splitlines()
    assert told[0].startswith("Rank 0 is idle from 4 to 10 (6 units, wait): 0B0 needs 1B0, which ends at 10.")
    assert [line.split()[0] for line in told[1:]] == ["1B0", "2B0", "3B0", "3F0", "2F0", "1F0", "0F0"]
    assert " more steps" in trace.why(rank=0, at=4, lines=2).splitlines()[-1]


@pytest.mark.parametrize(("rank", "at", "told"), [(4, 1, "ranks 0 to 3"), (0, 34, "from 0 to 33"), (0, -1, "from 0")])
def test_a_place_that_is_not_in_the_trace_is_refused(rank, at, told):
    with pytest.raises(pipelab.UsageError, match=told):
        pipelab.simulate(pipelab.OneFOneB(4, 8)).why(rank, at)


def test_the_table_has_a_row_for_each_rank_and_one_for_all():
    rows = pipelab.simulate(pipelab.OneFOneB(4, 8)).ledger.table.rows
    assert [row["rank"] for row in rows] == ["0", "1", "2", "3", "all"]
    assert rows[-1]["idle"] == 36
    assert Fraction(rows[-1]["share"]).limit_denominator(100) == Fraction(3, 11)


def test_a_ledgers_table_has_a_row_for_each_rank_and_one_for_all():
    lines = str(pipelab.simulate(pipelab.GPipe(2, 2)).ledger.table).splitlines()
    assert lines[0] == "rank  work  fill  wait  drain  idle  idle share"
    assert lines[2:4] == [
        "1        6     1     -      2     3      33.3 %",
        "all     12     1     3      2     6      33.3 %",
    ]
    assert lines[-1] == "2 ranks x 9 = 18 = work 12 + fill 1 + wait 3 + drain 2"
