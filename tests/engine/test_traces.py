"""What was measured obeys the plan: raw readings of one clock, no tolerance anywhere."""

from __future__ import annotations

import time
import weakref

import plain
import pytest
import torch
from hypothesis import given
from strategies import legal_cases, near
from torch import nn
from traces import assert_obeys, threads_of

import pipelab
from pipelab import Cost, GPipe, OneFOneB, Pipeline, Plan, compare, emulated, schedules, simulate

mse = nn.functional.mse_loss


@given(case=legal_cases())
def test_a_measured_trace_of_any_legal_order_obeys_it(case):
    plan = case.runnable
    with Pipeline(plain.mlp(2 * plan.stages), plan, mse, devices=["cpu"] * plan.ranks) as pipe:
        assert_obeys(pipe.step(*plain.batch(plan.microbatches)).trace, plan)


def test_every_rank_runs_on_a_thread_of_its_own_and_not_on_the_callers():
    import threading

    seen = {}

    class Where(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage, self.linear = stage, nn.Linear(6, 6)

        def forward(self, x):
            seen.setdefault(self.stage, set()).add(str(threading.get_native_id()))
            return self.linear(x)

    with Pipeline([Where(stage) for stage in range(4)], OneFOneB(4, 5), mse) as pipe:
        trace = pipe.step(*plain.batch(5)).trace
        assert [seen[rank] for rank in range(4)] == [{thread} for thread in threads_of(trace)]
        assert str(threading.get_native_id()) not in threads_of(trace)


def test_a_simulated_and_a_measured_trace_compare():
    plan = OneFOneB(2, 4).plan()
    with Pipeline(plain.mlp(4), plan, mse) as pipe:
        measured = pipe.step(*plain.batch(8)).trace
    simulated = simulate(plan, Cost(forward=1, backward=2))
    assert type(simulated) is type(measured)
    assert measured.peak_activations == simulated.peak_activations
    assert 0 <= measured.bubble < 1
    assert str(compare(simulated, measured))


def test_a_trace_is_saved_and_read_again(tmp_path):
    with Pipeline(plain.mlp(4), OneFOneB(2, 3), mse) as pipe:
        trace = pipe.step(*plain.batch(6)).trace
    assert pipelab.Trace.load(trace.save(tmp_path / "measured.json")) == trace
    assert str(trace)


def test_a_trace_may_be_read_after_the_pipeline_was_closed_and_other_steps_were_run():
    plan = GPipe(2, 2).plan()
    with Pipeline(plain.mlp(4), plan, mse) as pipe:
        first = pipe.step(*plain.batch(4))
        pipe.step(*plain.batch(4))
    assert_obeys(first.trace, plan)


@pytest.mark.parametrize("name", schedules)
def test_a_rank_holds_as_many_activations_as_the_plan_says(name):
    plan = near(name, 4, 6)
    model = nn.Sequential(*(plain.Held() for _ in range(plan.stages)))
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(*plain.batch(12))
        alone = [stage for stage, ranks in plan.replicas.items() if len(plan.rows[ranks[0]]) == 2 * plan.microbatches]
        for stage in alone:
            assert model[stage].peak == step.trace.peak_activations[plan.replicas[stage][0]]
        assert [len(stage.outputs) for stage in model] == [0] * plan.stages
        assert [len(stage.given) for stage in model[:-1]] == [0] * (plan.stages - 1)  # the last stage's are the step's


def test_an_idle_pipeline_holds_on_to_nothing_of_its_last_step():
    x, y = plain.batch(4)
    model, kept = plain.mlp(4), []
    model[0].register_forward_pre_hook(lambda module, given: kept.append(weakref.ref(given[0])))
    with Pipeline(model, OneFOneB(2, 2), mse) as pipe:
        step = pipe.step(x, y)
        kept += [weakref.ref(x), weakref.ref(step.outputs)]
        del x, y, step
        for _ in range(1000):  # a worker lets go just after it has reported
            if not any(reference() is not None for reference in kept):
                break
            time.sleep(0.01)
        assert [reference() for reference in kept] == [None] * 4


# --- emulated stages: they take time, so that what overlaps is sure


def busy_ranks(trace):
    """Return the most ranks that were busy at one moment."""
    moments = sorted(
        [(event.start, 1) for event in trace.events] + [(event.end, -1) for event in trace.events]
    )  # an end sorts before a start at the same reading
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def run_emulated(schedule):
    plan = schedule.plan()
    model = emulated(plan.stages, forward_ms=5, backward_ms=10)
    x, y = torch.randn(16, 3), torch.randn(16, 3)
    twin = emulated(plan.stages, 0, 0)
    plain.one_after_another(twin, mse, x, y, plan.microbatches)
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(x, y)
    assert plain.equal(plain.taken(model), plain.taken(twin))
    assert_obeys(step.trace, plan)
    return step.trace


def test_gpipes_ranks_work_side_by_side():
    assert busy_ranks(run_emulated(GPipe(4, 8))) == 4


def test_1f1bs_ranks_work_side_by_side():
    assert busy_ranks(run_emulated(OneFOneB(4, 8))) == 4


def test_naives_ranks_never_work_side_by_side():
    assert busy_ranks(run_emulated(schedules["naive"](4, 3))) == 1


def test_more_ranks_than_cores_work_side_by_side():
    assert busy_ranks(run_emulated(GPipe(8, 16))) == 8


def test_an_emulated_stage_takes_at_least_its_time_forward_and_backward():
    trace = run_emulated(OneFOneB(2, 3))
    assert all(event.end - event.start >= (5 if event.action.kind == "F" else 10) for event in trace.events)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"forward_ms": [1, 2]}, "forward_ms has 2 numbers for 3 stages"),
        ({"backward_ms": -1}, "a time is 0 or more"),
        ({"backward_ms": [1, -2, 3]}, "a time is 0 or more"),
    ],
)
def test_times_that_cannot_be_are_refused(arguments, told):
    with pytest.raises(pipelab.errors.CostError, match=told):
        emulated(3, **arguments)


def test_emulated_stages_tell_their_times():
    assert [(stage.forward_ms, stage.backward_ms) for stage in emulated(2, [1, 2], 3)] == [(1, 3), (2, 3)]
    with pytest.raises(pipelab.errors.UsageError):
        emulated(0)


def test_a_trace_of_a_plan_by_hand_names_it():
    plan = Plan.parse(["0F0 0B0", "1F0 1B0"], name="by hand")
    with Pipeline(plain.mlp(4), plan, mse) as pipe:
        assert pipe.step(*plain.batch(2)).trace.name == "by hand"


class Given(nn.Module):
    """Counts how many of its inputs are alive at each of its forwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inputs, self.peak = weakref.WeakSet(), 0

    def forward(self, x):
        self.inputs.add(x)
        self.peak = max(self.peak, len(self.inputs))
        return self.linear(x).tanh()


def test_a_backward_frees_what_it_used_although_outputs_and_losses_are_kept():
    plan = schedules["1f1b"](4, 6).plan()
    model = nn.Sequential(*(Given() for _ in range(4)))
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(*plain.batch(12))
    assert len(step.outputs) == 12
    assert [stage.peak for stage in model[1:]] == list(step.trace.peak_activations)[1:]
