"""The simulation: everything starts as soon as it can, and takes what its cost says."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogue_plans, costs, legal_cases, reduced

import pipelab
from pipelab import B, Cost, F, I, Plan, R, ScheduleError, W, simulate
from pipelab.errors import CostError


class Interleaved(pipelab.LoopedBFS):
    """Two stages per rank, all forwards, then all backwards."""


def by_stage(microbatch, stage):
    return stage


def spans(trace):
    return {(event.rank, event.action): (event.start, event.end) for event in trace.events}


def times_per_stage(stages):
    return st.lists(costs(), min_size=stages, max_size=stages)


# Against brute force


@given(legal_cases(), st.data())
def test_everything_starts_as_soon_as_it_can(case, data):
    plan = case.plan
    forward, inputs, weights, backward, reduce = (data.draw(times_per_stage(case.stages)) for _ in range(5))
    reduce = [time if stage in reduced(plan) else 0 for stage, time in enumerate(reduce)]
    outputs, gradients = (data.draw(times_per_stage(case.stages)) for _ in range(2))
    latency = data.draw(st.sampled_from([0, 0.25, 4]))
    cost = Cost(
        forward=forward,
        backward=backward,
        input_grad=inputs,
        weight_grad=weights,
        all_reduce=reduce,
        latency=latency,
        bandwidth=2,
        activation_bytes=outputs,
        boundary_gradient_bytes=gradients,
    )
    lasts = {"F": forward, "B": backward, "I": inputs, "W": weights, "R": reduce}
    expected = oracle.clock(
        plan.rows,
        case.stages,
        case.microbatches,
        lasts=lambda action: lasts[action.kind][action.stage],
        lag=lambda value: latency + {"out": outputs, "gin": gradients}[value[0]][value[2]] / 2,
    )
    assert spans(simulate(plan, cost)) == {(rank, action): (start, end) for rank, action, start, end in expected}


@given(legal_cases(), costs(), st.sampled_from([0, 0.5]))
def test_a_pair_as_one_slot_starts_with_its_last_input_and_ends_as_one(case, length, latency):
    plan = case.plan
    cost = Cost(forward=1, backward=2, pair=[length] * case.stages, latency=latency, per="stage")
    expected = oracle.clock(
        plan.rows,
        case.stages,
        case.microbatches,
        lasts=lambda action: {"F": 1, "B": 2, "I": 1, "W": 1, "R": 0}[action.kind],
        lag=lambda _: latency,
        pair=lambda _: length,
    )
    if expected is None:
        with pytest.raises(ScheduleError, match="with each overlapped pair as one slot") as refusal:
            simulate(plan, cost)
        assert {fault.code for fault in refusal.value.faults} == {"deadlock"}
    else:
        assert spans(simulate(plan, cost)) == {(rank, action): (start, end) for rank, action, start, end in expected}


# What a number stands for


@pytest.mark.parametrize(("per", "stages"), [("rank", 2), ("stage", 1)])
def test_a_number_is_one_ranks_share_of_the_model_or_one_stages(per, stages):
    times = Cost(forward=4, backward=8, all_reduce=2, per=per).times(Interleaved(2, 3).plan())
    whole = {"F": 4, "C": 4, "B": 8, "I": 4, "W": 4, "R": 2, "U": 0}
    assert times == {kind: [time / stages] * 4 for kind, time in whole.items()}
    listed = Cost(forward=[1, 2, 3, 4], backward=8, per=per).times(Interleaved(2, 3).plan())
    assert listed["F"] == [1, 2, 3, 4]


def test_missing_halves_are_half_of_the_backward_even_where_it_is_a_list():
    times = Cost(backward=[1, 2, 3, 4]).times(Interleaved(2, 3).plan())
    assert times["I"] == times["W"] == [0.5, 1, 1.5, 2]
    times = Cost(backward=4, input_grad=3).times(pipelab.GPipe(2, 1).plan())
    assert (times["I"], times["W"]) == ([3, 3], [2, 2])
    sizes = Cost(latency=1, bandwidth=2, activation_bytes=8, boundary_gradient_bytes=4)  # only times are scaled
    assert sizes.transfer_times(Interleaved(2, 1).plan()) == ([5.0] * 4, [3.0] * 4)


def test_a_ranks_share_counts_the_ranks_that_one_micro_batch_visits():
    replicated = Plan.parse(["0F0 0B0", "1F0 1B0", "0F1 0B1", "1F1 1B1"])
    assert Cost(forward=1).times(replicated)["F"] == [1, 1]
    one_rank = Plan.parse(["0F0 1F0 1B0 0B0"])
    assert Cost(forward=1).times(one_rank)["F"] == [0.5, 0.5]


# Transfers


@given(legal_cases(), st.sampled_from([0.25, 1]), st.sampled_from([0, 0.25, 4]))
def test_a_busy_rank_goes_on_when_all_that_it_sends_has_arrived(case, time, latency):
    reduce = 1 if reduced(case.plan) else 0
    trace = simulate(
        case.plan, Cost(forward=time, backward=2 * time, latency=latency, sender="busy", all_reduce=reduce, per="stage")
    )
    lasts = {"F": time, "B": 2 * time, "I": time, "W": time, "R": 1}
    for rank in range(case.plan.ranks):
        free = 0.0
        for event in trace.events_of(rank):
            there = [each.end for each in trace.transfers if each.target == rank and each.needer == event.action]
            sent = [each.end for each in trace.transfers if each.source == rank and each.start <= free]
            begins = max([free, *there, *sent])
            assert event.start >= begins if event.action.kind == "R" else event.start == pytest.approx(begins)
            assert event.duration == pytest.approx(lasts[event.action.kind])
            free = event.end


def test_pairs_in_one_slot_and_moves_wait_for_what_their_rank_sends():
    slots = simulate(pipelab.DualPipe(2, 4), Cost(pair=2.5, latency=1, sender="busy"))
    for rank in range(2):
        starts = [event.start for event in slots.events_of(rank)]
        sent = [each for each in slots.transfers if each.source == rank]
        assert sent
        assert not any(each.start < start < each.end for each in sent for start in starts)
    offloads = simulate(pipelab.BPipe(4, 6), Cost(latency=1, sender="busy"))
    sent = {rank: [each for each in offloads.transfers if each.source == rank] for rank in range(4)}
    assert not any(each.start < move.start < each.end for move in offloads.moves for each in sent[move.rank])


@pytest.mark.parametrize("queues", [{"transport": "rank"}, {"max_outstanding_sends": 2}])
def test_transfers_in_queues_do_not_keep_ranks_busy_as_well(queues):
    with pytest.raises(CostError, match="busy sender needs buffered"):
        simulate(pipelab.GPipe(2, 2), Cost(sender="busy"), **queues)


def test_activations_and_gradients_have_sizes_of_their_own_which_matter_with_a_bandwidth():
    cost = Cost(forward=1, backward=1, bandwidth=4, activation_bytes=[8, 99], boundary_gradient_bytes=[99, 2])
    trace = simulate(Plan.parse(["0F0 0B0", "1F0 1B0"]), cost)
    assert [(transfer.start, transfer.end) for transfer in trace.transfers] == [(5, 5.5), (1, 3)]
    assert simulate(pipelab.GPipe(2, 2), Cost(activation_bytes=10**9)).makespan == 9


# Split backwards


def test_as_run_the_first_stages_backward_is_its_weight_gradient_alone():
    plan = Plan([[F(0), I(0), W(0)], [F(0), I(0), W(0)]], 2, 1, by_stage)
    times = {"forward": 1, "backward": 4, "input_grad": 1, "weight_grad": 2}
    for first_stage, durations in (("uniform", [1, 1, 2, 1, 1, 2]), ("as-run", [1, 0, 4, 1, 1, 2])):
        trace = simulate(plan, Cost(**times, first_stage=first_stage))
        assert [event.duration for event in trace.events] == durations
    for whole in (pipelab.OneFOneB(3, 4), pipelab.GPipe(1, 1).plan()):  # a full backward is the same as run
        assert simulate(whole, Cost(first_stage="as-run")) == simulate(whole)


# All-reduces


def test_an_all_reduce_starts_when_its_last_rank_arrives():
    plan = Plan.parse(["0F0 0B0 0R", "0F1 0B1 0F2 0B2 0R"])
    trace = simulate(plan, Cost(forward=1, backward=2, all_reduce=5))
    assert spans(trace)[0, R(0)] == spans(trace)[1, R(0)] == (6, 11)
    assert trace.busy == (8, 11)


# Overlapped pairs


def test_a_pair_is_its_forward_then_its_backward_unless_it_has_a_time_of_its_own():
    plan = Plan([[F(0), F(1) & B(0), B(1)]])
    assert simulate(plan, Cost(forward=1, backward=2)).makespan == 6
    one_slot = simulate(plan, Cost(forward=1, backward=2, pair=2.5))
    assert [(event.start, event.end) for event in one_slot.events] == [(0, 1), (1, 3.5), (1, 3.5), (3.5, 5.5)]
    assert one_slot.busy == (5.5,)
    assert one_slot.bubble == 0
    assert one_slot.peak_activations == (2,)


def test_a_pairs_time_is_scaled_as_other_times_are():
    plan = Plan([[F(0, 0), F(0, 1), B(0, 1), F(1, 0) & B(0, 0), F(1, 1), B(1, 1), B(1, 0)]])
    durations = {
        per: [event.duration for event in simulate(plan, Cost(forward=1, backward=1, pair=3, per=per)).events]
        for per in ("rank", "stage")
    }
    assert durations["rank"] == [0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 0.5, 0.5]
    assert durations["stage"] == [1, 1, 1, 3, 3, 1, 1, 1]
    listed = simulate(plan, Cost(forward=1, backward=1, pair=[7, 9]))
    assert listed.events[3].duration == 7


# What a cost may be


TIMES = ["forward", "backward", "input_grad", "weight_grad", "pair", "all_reduce", "latency", "bandwidth"]
BYTES = ["activation_bytes", "boundary_gradient_bytes"]
IMPOSSIBLE = [float("nan"), float("inf"), "1", "", 1j, object(), [1, -1], [1, None], [[1]]]


REFUSED = [
    *((field, -1, "") for field in TIMES + BYTES),
    *(("forward", value, "") for value in IMPOSSIBLE),
    *((field, None, "") for field in ("forward", "backward", "all_reduce", "latency", "activation_bytes")),
    *((field, [1, 2], ".*expected one number, not a list") for field in ("latency", "bandwidth")),
    ("bandwidth", 0, "0: nothing would ever arrive"),
    *(
        (field, value, f"{value!r}: expected '")
        for field, value in (("per", "model"), ("first_stage", "real"), ("per", None), ("sender", "lazy"))
    ),
]


@pytest.mark.parametrize(("field", "value", "told"), REFUSED)
def test_what_cannot_be_a_time_a_size_or_a_word_is_refused(field, value, told):
    with pytest.raises(CostError, match=f"^{field}={told}"):
        Cost(**{field: value})


@pytest.mark.parametrize(
    "field", ["forward", "backward", "pair", "input_grad", "weight_grad", "all_reduce", "activation_bytes"]
)
def test_a_list_has_one_number_per_stage(field):
    plan = Plan([[F(0), F(1) & B(0), B(1)], [F(0), B(0), F(1), B(1)]])
    with pytest.raises(CostError, match=f"{field} has 3 numbers for 2 stages: give one number, or one per stage"):
        simulate(plan, Cost(**{field: [1, 2, 3]}))


def test_a_cost_is_a_value():
    assert Cost(forward=[1, 2]) == Cost(forward=(1, 2))
    assert hash(Cost(forward=[1, 2])) == hash(Cost(forward=(1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cost().forward = 3
    with pytest.raises(TypeError):
        Cost(1, 2)


# What is simulated


@given(catalogue_plans())
def test_a_cost_may_be_left_out(plan):
    assert simulate(plan) == simulate(plan, Cost(forward=1, backward=2))
    nothing = simulate(plan, Cost(forward=0, backward=0))
    assert (nothing.makespan, nothing.bubble) == (0, 0)
    with pytest.raises(TypeError, match=r"cost=\(1, 2\): expected a Cost, such as pipelab.Cost\("):
        simulate(plan, (1, 2))


def test_a_trace_notes_what_was_not_as_usual():
    more = {"order": "at-use", "transport": "edge", "max_outstanding_sends": 2}
    noted = simulate(pipelab.ZBH1(2, 4), Cost(first_stage="as-run"), **more).note
    assert noted == "stage 0 as run, order at-use, at most 2 sends under way, transport edge"
    assert simulate(pipelab.OneFOneB(2, 4), Cost(first_stage="as-run"), order="at-use").note == ""
