"""Bytes per rank over time: what forwards keep, what `I` leaves for `W`, and what passes a cap."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest

import pipelab
from pipelab import Cost, CostError, Memory, memory_use, simulate

UNIT = Memory(activations=1)


@pytest.mark.parametrize("name", pipelab.schedules)
def test_an_activation_of_one_byte_makes_the_peak_of_activations(name):
    trace = simulate(pipelab.schedules[name](4, 8))
    assert memory_use(trace, UNIT).peaks == trace.peak_activations


@pytest.mark.parametrize("name", pipelab.schedules)
def test_after_a_step_only_weights_gradients_optimizer_and_outputs_are_left(name):
    plan = pipelab.schedules[name](4, 8).plan()
    memory = Memory(weights=7, gradients=5, optimizer=14, activations=100, for_weight_grad=130, outputs=3)
    use = memory_use(plan, memory)
    for rank, curve in enumerate(use.curves):
        own = len(plan.bound.stages_of[rank])
        last = curve[-1]
        assert (last.weights, last.gradients, last.optimizer, last.activations) == (7 * own, 5 * own, 14 * own, 0)
        assert all(before.time <= after.time for before, after in pairwise(curve))
        assert min(held.activations for held in curve) == 0
    assert sum(curve[-1].outputs for curve in use.curves) == 3 * 8
    assert use.at_peak == tuple(max(curve, key=lambda held: held.total) for curve in use.curves)
    assert use.curves[1:] == tuple(use.curves)[1:]
    assert pickle.loads(pickle.dumps(use)) == use == memory_use(plan, memory)  # noqa: S301 - our own


def test_the_bytes_of_gpipe_and_1f1b_have_their_closed_forms():
    memory = Memory(weights=[1, 2, 3, 4], gradients=10, activations=[100, 200, 300, 400])
    gpipe, one = (memory_use(kind(4, 8), memory).peaks for kind in (pipelab.GPipe, pipelab.OneFOneB))
    assert gpipe == tuple(10 + (rank + 1) * (1 + 100 * 8) for rank in range(4))
    assert one == tuple(10 + (rank + 1) * (1 + 100 * (4 - rank)) for rank in range(4))


def test_gradients_come_with_the_first_backward_of_their_stage():
    (curve,) = memory_use(pipelab.GPipe(1, 2), Memory(gradients=9)).curves
    assert [(held.time, str(held.action), held.gradients) for held in curve] == [(0, "None", 0), (2, "0B0", 9)]


def test_gradients_that_are_under_way_count_if_they_are_asked_for():
    late = simulate(pipelab.GPipe(2, 4), Cost(latency=5))  # a gradient leaves every 2, so three are under way
    assert memory_use(late, Memory()).peaks == (0, 0)
    (none, curve) = memory_use(late, Memory(), sent_gradient=7).curves
    assert max(held.activations for held in none) == 0
    assert [held.activations for held in curve] == [0, 7, 14, 21, 14, 21, 14, 7, 0]
    bounded = simulate(pipelab.GPipe(2, 4), Cost(latency=5), max_outstanding_sends=1)
    assert memory_use(bounded, Memory(), sent_gradient=7).peaks == (0, 14)  # one under way, one that waits for it
    assert memory_use(pipelab.GPipe(2, 4), Memory(), sent_gradient=7).peaks == (0, 0)


def test_a_split_backward_holds_what_it_leaves_from_its_first_half_to_its_second():
    plan = pipelab.Plan.parse(["0F0 0I0 0W0"])
    for left in (60, 100, 130):
        (curve,) = memory_use(simulate(plan), Memory(activations=100, for_weight_grad=left)).curves
        held = {(each.time, str(each.action)): each.activations for each in curve}
        assert held[0, "0F0"] == 100
        assert max(each.activations for each in curve) == max(100, left)
        assert held[3, "0W0"] == 0
        assert left == 100 or held[2 if left < 100 else 1, "0I0"] == left


def test_the_peak_does_not_depend_on_how_long_actions_take():
    memory = Memory(activations=[5, 7, 1, 3], for_weight_grad=[6, 2, 9, 4])
    plan = pipelab.ZBH1(4, 8).plan()
    costs = (Cost(), Cost(forward=[3, 1, 4, 1], backward=[5, 9, 2, 6], latency=2), Cost(forward=0, backward=0))
    assert len({memory_use(simulate(plan, cost), memory).peaks for cost in costs}) == 1


def test_a_pair_in_one_slot_holds_both_of_its_halves():
    plan = pipelab.DualPipe(4, 8).plan()
    apart, together = (memory_use(simulate(plan, Cost(pair=pair)), UNIT).peaks for pair in (None, 3))
    assert apart == together


@pytest.mark.parametrize("name", pipelab.schedules)
def test_a_cap_in_bytes_at_the_peaks_is_kept_and_one_byte_less_is_not(name):
    plan = pipelab.schedules[name](4, 8).plan()
    memory = Memory(weights=7, gradients=5, optimizer=14, activations=100, for_weight_grad=130, outputs=3)
    peaks = memory_use(plan, memory).peaks
    assert pipelab.check(plan, memory_cap=peaks, memory=memory) == []
    for rank in range(4):
        caps = [peak - (other == rank) for other, peak in enumerate(peaks)]
        (fault,) = pipelab.check(plan, memory_cap=caps, memory=memory)
        assert (fault.code, fault.rank) == ("memory-cap", rank)


@pytest.mark.parametrize(
    ("cap", "position", "action", "words"),
    [(349, 2, "0F2", "350 bytes (cap 349)"), (456, 4, "0B0", "fewer forwards"), (149, 0, "0F0", "no order holds less")],
)
def test_the_first_action_that_passes_a_cap_in_bytes_is_named(cap, position, action, words):
    memory = Memory(weights=50, activations=100, gradients=7)
    (fault,) = pipelab.check(pipelab.GPipe(1, 4), memory_cap=cap, memory=memory)
    assert (fault.position, str(fault.action)) == (position, action)
    assert words in str(fault)


def test_an_early_weight_gradient_is_the_hint_where_one_is_pending():
    plan = pipelab.Plan.parse(["0F0 0I0 0F1 0W0 0I1 0W1"])
    (fault,) = pipelab.check(plan, memory_cap=199, memory=Memory(activations=100))
    assert (str(fault.action), fault.hint[:9]) == ("0F1", "run 0W0 b")


def test_bytes_are_counted_only_where_nothing_else_is_wrong():
    plan = pipelab.Plan.parse(["0F0 0B0 0B0"])
    (fault,) = pipelab.check(plan, memory_cap=1, memory=Memory(activations=[1, 2, 3]))
    assert fault.code == "duplicate"


@pytest.mark.parametrize("wrong", [-1, "x", float("inf"), [], [1, None]])
def test_a_size_that_is_no_number_of_bytes_is_refused(wrong):
    with pytest.raises(CostError, match="weights"):
        Memory(weights=wrong)
    with pytest.raises(CostError, match="activations has 3 numbers for 2 stages"):
        memory_use(pipelab.GPipe(2, 2), Memory(activations=[1, 2, 3]))
