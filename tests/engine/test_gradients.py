"""The master test: whatever the schedule, the gradients are those of plain training, and the trace is the plan's."""

from __future__ import annotations

from pipes import assert_trains, mse

import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import EVERY_SCHEDULE, in_order, legal_cases
from traces import assert_obeys, threads_of

from pipelab import B, F, Pipeline, Plan


@pytest.mark.parametrize(("kind", "ranks", "microbatches"), EVERY_SCHEDULE)
def test_gradients_are_those_of_the_plain_loop_and_the_trace_obeys_the_plan(kind, ranks, microbatches):
    plan = kind(ranks, microbatches).plan()
    model = plain.mlp(2 * plan.stages)
    x, y = plain.batch(2 * microbatches + 1)  # rows that the micro-batches do not divide
    loss = plain.one_after_another(model, mse, x, y, microbatches)
    expected = plain.taken(model)
    threads = []
    with Pipeline(model, plan, mse) as pipe:
        for _ in range(2):
            step = pipe.step(x, y)
            gradients = plain.taken(model)
            if in_order(plan):
                assert plain.equal(gradients, expected)
            assert plain.difference(gradients, expected) <= 1e-6
            torch.testing.assert_close(step.loss, loss)
            assert_obeys(step.trace, plan)
            threads.append(threads_of(step.trace))
    assert threads[0] == threads[1]
    assert len(set(threads[0])) == ranks
    plain.at_once(model, mse, x, y)
    assert plain.difference(gradients, plain.taken(model)) <= 1e-6


@given(case=legal_cases(), more=st.integers(0, 3))
def test_gradients_of_any_legal_order_add_up_in_that_order(case, more):
    plan = case.runnable
    model = plain.mlp(2 * plan.stages)
    x, y = plain.batch(plan.microbatches + more)
    alone = plain.each_alone(model, mse, x, y, plan.microbatches)
    expected = plain.gradients(model, mse, x, y, plan.microbatches)
    with Pipeline(model, plan, mse, devices=["cpu"] * plan.ranks) as pipe:
        pipe.step(x, y)
    gradients = plain.taken(model)
    assert plain.difference(gradients, expected) <= 1e-6
    for row in plan.rows:
        for stage in range(plan.stages):
            order = [action.microbatch for action in row if action.kind in "BW" and action.stage == stage]
            for name in (f"{2 * stage}.weight", f"{2 * stage}.bias") if order else ():
                added = alone[order[0]][name].clone()
                for microbatch in order[1:]:
                    added += alone[microbatch][name]
                assert torch.equal(gradients[name], added)


def test_an_overlapped_pair_runs_forward_then_backward():
    rows = [
        [F(0, 0), F(1, 0), F(2, 0) & B(0, 0), B(1, 0), B(2, 0)],
        [F(0, 1), F(1, 1) & B(0, 1), F(2, 1) & B(1, 1), B(2, 1)],
    ]
    model = plain.mlp(4)
    with Pipeline(model, Plan(rows, 2, 3), mse) as pipe:
        step = assert_trains(pipe, model, 6)
    assert [str(event.action) for event in step.trace.events_of(1)] == ["1F0", "1F1", "1B0", "1F2", "1B1", "1B2"]


def test_a_rank_may_have_nothing_to_do():
    model, (x, y) = plain.mlp(2), plain.batch(4)
    plan = Plan([[F(0, 0), B(0, 0), F(1, 0), B(1, 0)], []], stages=1, microbatches=2)
    with Pipeline(model, plan, mse) as pipe:
        step = assert_trains(pipe, model, (x, y))
        assert step.trace.events_of(1) == ()
        assert torch.equal(pipe.forward(x), step.outputs)
