"""What was measured obeys the plan: raw readings of one clock, no tolerance anywhere."""

from __future__ import annotations

import threading
import time
import weakref
from pipes import mse, stepped

import plain
import pytest
import torch
from strategies import near
from torch import nn
from traces import assert_obeys, threads_of

import pipelab
from pipelab import Cost, GPipe, OneFOneB, Pipeline, Plan, compare, emulated, schedules, simulate


def test_every_rank_runs_on_a_thread_of_its_own_and_not_on_the_callers():
    def where(self, x):
        self.threads.add(str(threading.get_native_id()))
        return self.linear(x)

    stages = [plain.Made(where, linear=nn.Linear(6, 6), threads=set()) for _ in range(4)]
    trace = stepped(stages, OneFOneB(4, 5), 5).trace
    assert [stage.threads for stage in stages] == [{thread} for thread in threads_of(trace)]
    assert str(threading.get_native_id()) not in threads_of(trace)


def test_a_simulated_and_a_measured_trace_compare_and_a_measured_one_is_saved_and_read_again(tmp_path):
    plan = OneFOneB(2, 4).plan()
    measured, simulated = stepped(plain.mlp(4), plan).trace, simulate(plan, Cost(forward=1, backward=2))
    assert type(simulated) is type(measured)
    assert measured.peak_activations == simulated.peak_activations
    assert 0 <= measured.bubble < 1
    assert str(compare(simulated, measured))
    assert pipelab.Trace.load(measured.save(tmp_path / "measured.json")) == measured


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


@pytest.mark.parametrize(
    ("schedule", "busy"), [(GPipe(4, 8), 4), (OneFOneB(4, 8), 4), (schedules["naive"](4, 3), 1), (GPipe(8, 16), 8)]
)
def test_ranks_work_side_by_side_and_no_action_takes_less_than_its_time(schedule, busy):
    trace = run_emulated(schedule)
    assert busy_ranks(trace) == busy
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
    assert stepped(plain.mlp(4), Plan.parse(["0F0 0B0", "1F0 1B0"], name="by hand"), 2).trace.name == "by hand"
