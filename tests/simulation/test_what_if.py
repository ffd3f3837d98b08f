"""What one rank's delay costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from strategies import costs, legal_cases

import pipelab
from pipelab import Cost, Trace, simulate, what_if
from pipelab.errors import UsageError
from pipelab.hub import profiles
from pipelab.trace.replay import Order, listed

PROFILES = Path(__file__).parent.parent / "hub" / "profiles"


def replayed(trace):
    """Run a trace again with its own times."""
    order = Order(trace, {code: number for number, code in enumerate(listed(trace))})
    return order.again(order.times, "again")


def assert_again(trace):
    """Assert that a trace, run again with its own times, is the same trace."""
    again = replayed(trace)
    assert [*map(list, again.ends)] == [pytest.approx(list(ends)) for ends in trace.ends]
    assert again.makespan == pytest.approx(trace.makespan)


@given(legal_cases(), costs(), costs(), costs())
def test_a_simulated_trace_runs_again_as_it_did(case, forward, backward, latency):
    assert_again(simulate(case.plan, Cost(forward=forward, backward=backward, latency=latency, per="stage")))


@pytest.mark.parametrize("pair", [None, 2.5])
@pytest.mark.parametrize("kind", [pipelab.DualPipe, pipelab.DualPipeV, pipelab.ZBH1])
def test_all_reduces_and_pairs_run_again_as_they_did(kind, pair):
    assert_again(simulate(kind(4, 8), Cost(pair=pair, all_reduce=3, latency=0.5)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zbv"])
def test_a_measured_trace_runs_again_as_it_did(name):
    trace = profiles.load(PROFILES / name / "rank*.json.gz")
    assert replayed(trace).makespan == pytest.approx(trace.makespan, rel=0.01)


@given(legal_cases(), costs())
def test_ranks_that_all_do_the_same_have_no_delay(case, time):
    trace = simulate(case.plan, Cost(forward=time, backward=time, input_grad=time, weight_grad=time, per="stage"))
    for rank in range(trace.ranks):
        assert what_if(trace, rank).delay == 0
        assert what_if(trace, rank).trace.makespan == pytest.approx(trace.makespan)


def test_without_its_delay_a_slow_rank_is_as_quick_as_the_others():
    plan = pipelab.OneFOneB(ranks=4, microbatches=8).plan()
    for slow in range(4):
        times = [3 if stage == slow else 1 for stage in range(4)]
        found = what_if(simulate(plan, Cost(forward=times, backward=[2 * time for time in times], per="stage")), slow)
        assert found.delay == 8 * 2 * 3
        assert found.trace.makespan == 33
        assert found.change == pytest.approx(33 / found.before.makespan - 1)
        assert [transfer.end for transfer in found.trace.transfers] == [each.end for each in simulate(plan).transfers]


def test_the_first_stage_whose_backward_is_not_split_is_no_delay_of_anybody():
    trace = profiles.load(PROFILES / "zbv" / "rank*.json.gz")
    assert what_if(trace, 0).delay < 6  # four W of 4 ms, which are whole backwards
    assert what_if(trace, 1).delay < 10  # eight I of 4 ms, where the median with the empty ones would be 2 ms


def noisy(slow=None):
    """Return a measured trace whose actions take 10 % more or less by turns; the slow rank's 10 longer."""

    def time(of):
        return lambda m, s: of * (1 + 0.1 * (-1) ** (m + s)) + 10 * (s == slow)

    ideal = simulate(pipelab.OneFOneB(4, 8), Cost(forward=time(10), backward=time(20)))
    return Trace(ideal.plan, ideal.starts, ideal.ends, source="measured")


def test_noise_alone_saves_nothing_if_it_stays():
    trace = noisy()
    for rank in range(4):
        found = what_if(trace, rank)
        assert found.trace.makespan < trace.makespan  # too good: the rank's noise counts as delay
        assert found.noisy.makespan == pytest.approx(trace.makespan)
        assert f"({trace.makespan:.4g}, +0.0 %, if its noise stays)" in str(found)
    assert what_if(noisy(slow=1), 1).noisy.makespan == pytest.approx(trace.makespan)
    cost = Cost(forward=[1, 3, 1, 1], backward=[2, 6, 2, 2])
    found = what_if(simulate(pipelab.OneFOneB(4, 8), cost), 1)  # without noise, both answers are the same
    assert found.noisy.makespan == pytest.approx(found.trace.makespan)
    assert "noise" not in str(found)


def test_a_ranks_slow_gathers_are_a_delay_and_its_waiting_for_them_is_none():
    plan = pipelab.with_gathers(pipelab.OneFOneB(4, 8), 1)
    even, uneven = (simulate(plan, Cost(gather=times)) for times in (2, [2, 2, 5, 2]))
    assert uneven.makespan > even.makespan
    assert what_if(uneven, 2).trace.moves == even.moves
    assert what_if(uneven, 2).trace == even
    assert what_if(even, 2).delay == 0


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0, "0"])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(UsageError, match="ranks 0 to 3"):
        what_if(simulate(pipelab.OneFOneB(4, 8)), rank)
