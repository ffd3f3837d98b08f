"""A stage on several ranks: they train what one device trains, and the user sees one model."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import time
import weakref
from contextlib import contextmanager
from pipes import assert_trains, mse, refused, stepped, verified
from types import SimpleNamespace

import plain
import pytest
import torch
from hypothesis import given
from strategies import legal_cases
from torch import nn
from traces import assert_obeys

from pipelab import B, DualPipe, F, GPipe, I, OneFOneB, Pipeline, Plan, R, Schedule, W, emulated, replicate, schedules
from pipelab.engine import threads
from pipelab.engine.emulation import instantly
from pipelab.engine.stage.replicas import copied
from pipelab.engine.threads import AllReduce
from pipelab.errors import EngineError, StageError, StepTimeoutError

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")

TOLERANCE = 1e-6
"""Relative, per parameter: the ranks' sums are added up, which associates otherwise than one sum over all."""

SIZES = [(1, 2, 2), (2, 1, 2), (2, 3, 2), (2, 2, 3), (3, 2, 2), (4, 4, 2)]
"""(ranks of one copy, its micro-batches, copies)."""

CASES = [
    pytest.param(replicate(kind(ranks, microbatches), copies), id=f"{name}-{ranks}x{microbatches}-{copies}copies")
    for name, kind in schedules.items()
    for ranks, microbatches, copies in SIZES
    if kind.refusal(ranks, microbatches) is None
]


class TwoWays(Schedule):
    """Half of the micro-batches enter at the first rank, the other half at the last one."""

    def place(self, microbatch, stage):
        return stage if 2 * microbatch < self.microbatches else self.ranks - 1 - stage

    def actions(self, rank):
        for kind in (F, B):
            for microbatch in range(self.microbatches):
                yield kind(microbatch)


def two_ranks(*microbatches, split=False):
    """Return a plan of one stage on as many ranks as there are arguments: how many micro-batches each runs."""
    rows, first = [], 0
    for count in microbatches:
        dealt = range(first, first + count)
        rows.append([make(m, 0) for make in ((F, I, W) if split else (F, B)) for m in dealt] + [R(0)])
        first += count
    return Plan(rows, 1, first)


def summed_by_rank(alone, plan, stage):
    """Return the gradients of one stage's parameters, added up within each rank, then over the ranks."""
    total = None
    for row in plan.rows:
        order = [item.microbatch for item in row if item.stage == stage and item.kind in "BW"]
        if not order:
            continue
        own = {name: alone[order[0]][name].clone() for name in alone[0] if name.startswith(f"{2 * stage}.")}
        for microbatch in order[1:]:
            for name in own:
                own[name] += alone[microbatch][name]
        total = own if total is None else {name: total[name] + own[name] for name in own}
    return total


# --- gradients


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", CASES)
def test_replicas_of_any_schedule_have_the_gradients_of_the_plain_loop(schedule):
    plan = schedule.plan()
    model = plain.mlp(2 * plan.stages)
    x, y = plain.batch(2 * plan.microbatches + 1)
    loss = plain.one_after_another(model, mse, x, y, plan.microbatches)
    expected = plain.taken(model)
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(x, y)
        gradients = plain.taken(model)
        assert plain.difference(gradients, expected) <= TOLERANCE
        torch.testing.assert_close(step.loss, loss)
        assert torch.equal(step.outputs, pipe.forward(x))
        assert_obeys(step.trace, plan)
        assert pipe.verify(x, y).largest_difference <= TOLERANCE
        pipe.step(x, y)
        assert plain.equal(plain.taken(model), gradients)  # the same step gives the same bits


@given(case=legal_cases())
def test_any_legal_plan_runs_and_has_the_gradients_of_the_plain_loop(case):
    plan = case.plan
    model = plain.mlp(2 * plan.stages)
    x, y = plain.batch(plan.microbatches + 1)
    expected = plain.gradients(model, mse, x, y, plan.microbatches)
    with Pipeline(model, plan, mse, devices=["cpu"] * plan.ranks) as pipe:
        trace = pipe.step(x, y).trace
    assert plain.difference(plain.taken(model), expected) <= TOLERANCE
    assert_obeys(trace, plan)


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_gradients_are_added_up_within_each_rank_then_in_the_order_of_the_ranks(split):
    plan = two_ranks(2, 1, 3, split=split)
    model = plain.mlp(2)
    x, y = plain.batch(12)
    alone = plain.each_alone(model, mse, x, y, 6)
    with Pipeline(model, plan, mse) as pipe:
        pipe.step(x, y)
    assert plain.equal(plain.taken(model), summed_by_rank(alone, plan, 0))


ONE_RANK_EACH = Plan([[F(0, 0), B(0, 0), R(0)], [F(0, 1), B(0, 1), R(1)]], 2, 1)


@pytest.mark.parametrize("schedule", [replicate(OneFOneB(2, 4), 1), ONE_RANK_EACH], ids=["one replica", "R of one"])
def test_a_stage_on_one_rank_is_equal_bit_for_bit(schedule):
    model = plain.mlp(4)
    with Pipeline(model, schedule, mse) as pipe:
        assert_obeys(assert_trains(pipe, model).trace, pipe.plan)
        assert pipe.verify(*plain.batch(8)).exact


def test_a_step_adds_to_gradients_that_are_there():
    model = plain.mlp(4)
    x, y = plain.batch(8)
    with Pipeline(model, TwoWays(2, 4), mse) as pipe:
        pipe.step(x, y)
        once = plain.taken(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        pipe.step(x, y)
    for name, gradient in plain.taken(model).items():
        torch.testing.assert_close(gradient, once[name] + 1)


def test_a_rank_without_a_gradient_for_a_weight_adds_none():
    weights = nn.ParameterList(torch.ones(1) for _ in range(3))
    model = nn.Sequential(plain.Made(lambda self, x: x * self.weights[int(x[0, 0])], weights=weights))
    stepped(model, two_ranks(1, 1), (torch.tensor([[0.0], [1.0]]), torch.ones(2, 1)))
    assert [parameter.grad is None for parameter in model.parameters()] == [False, False, True]
    assert model[0].weights[1].grad.tolist() == [0.0]


@pytest.mark.parametrize(
    "schedule",
    [
        replicate(OneFOneB(2, 2), 2),
        replicate(OneFOneB(3, 4), 2),
        replicate(GPipe(2, 2), 3),
        TwoWays(4, 8),
        DualPipe(2, 4),
        DualPipe(4, 8),
    ],
    ids=lambda schedule: schedule._name(),
)
def test_five_steps_of_adam_train_what_one_device_trains(schedule):
    plan = schedule.plan()
    ours, theirs = plain.mlp(2 * plan.stages), plain.mlp(2 * plan.stages)
    x, y = plain.batch(3 * plan.microbatches)
    own, plains = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (ours, theirs))
    with Pipeline(ours, plan, mse) as pipe:
        for _ in range(5):
            own.zero_grad()
            plains.zero_grad()
            loss = pipe.step(x, y).loss
            expected = plain.at_once(theirs, mse, x, y)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
            own.step()
            plains.step()
        assert torch.equal(ours(x[:1]), pipe.stages.model(x[:1]))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_users_autocast_holds_in_replicas_too():
    model = plain.mlp(4)
    x, y = plain.batch(16)
    with torch.autocast("cpu", torch.bfloat16), Pipeline(model, replicate(OneFOneB(2, 2), 2), mse) as pipe:
        pipe.verify(x, y)
        assert pipe.step(x, y).outputs.dtype == torch.bfloat16


def test_an_emulated_all_reduce_takes_its_time_on_every_rank_and_none_in_a_warm_up():
    model = emulated(2, forward_ms=1, backward_ms=2, all_reduce_ms=[300, 5])
    assert repr(model[0]) == "EmulatedStage(forward_ms=1, backward_ms=2, all_reduce_ms=300)"
    with Pipeline(model, replicate(OneFOneB(2, 2), 2), mse) as pipe:
        trace = pipe.step(torch.ones(4, 1), torch.ones(4, 1)).trace
        with instantly(model):
            instant = pipe.step(torch.ones(4, 1), torch.ones(4, 1)).trace
    reduces = [event for event in trace.events if event.action.kind == "R"]
    assert [event.rank for event in reduces] == [0, 1, 2, 3]
    lowest, _, other, _ = reduces
    assert lowest.duration >= 300
    assert other.duration >= 250  # it waits for the lowest rank, but may have begun a little later
    assert_obeys(trace, trace.plan)
    assert instant.makespan < 300
    assert model[0].all_reduce_ms == 300


# --- one model


def test_the_user_sees_one_model():
    model = plain.mlp(4)
    with Pipeline(model, replicate(OneFOneB(2, 2), 2), mse) as pipe:
        assert list(map(id, pipe.parameters())) == list(map(id, model.parameters()))
        assert pipe.state_dict().keys() == model.state_dict().keys()
        pipe.step(*plain.batch(8))
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        torch.testing.assert_close(pipe.clip_grad_norm_(1e-3), norm)


def loaded(model, **how):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, **how)


def data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def attribute(model):
    model[0].forward = functools.partial(nn.Linear.forward, model[0])
    model[2].scale = 7
    model[2].register_forward_hook(lambda module, given, made: module.scale * made)


def function(model):
    model[1].activation, model[1].shift = torch.sigmoid, torch.ones(6)
    model[1].register_forward_hook(lambda module, given, made: module.activation(made + module.shift))


def renewed(model):
    model[1].inner = nn.Linear(6, 6)
    model[1].register_forward_hook(lambda module, given, made: module.inner(made))


def quieter(model):
    for layer in (3, 2):
        model[layer].register_parameter("bias", None)


CHANGES = {
    "loaded": loaded,
    "assigned": functools.partial(loaded, assign=True),
    "data": data,
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(6, 6))),
    "frozen": lambda model: model[0].requires_grad_(False),
    "hooked": lambda model: model[2].register_forward_hook(lambda module, given, made: 2 * made),
    "weight hooked": lambda model: model[0].weight.register_hook(lambda gradient: 3 * gradient),
    "attribute": attribute,
    "function": function,
    "double": lambda model: model.double(),
    "renewed": renewed,
    "quieter": quieter,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_replicas_follow_whatever_becomes_of_the_model_between_steps(change):
    model, (x, y) = plain.mlp(4), plain.batch(8)
    with Pipeline(model, replicate(GPipe(2, 2), 2), mse) as pipe:
        pipe.step(x, y)
        model.zero_grad()
        change(model)
        x, y = x.to(model[0].weight), y.to(model[0].weight)
        pipe.step(x, y)
        ours = plain.taken(model)
        assert plain.difference(ours, plain.gradients(model, mse, x, y, 4)) <= TOLERANCE


def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused_at_once():
    model = plain.mlp(4)
    x, y = plain.batch(8)
    with Pipeline(model, replicate(GPipe(2, 2), 2), mse) as pipe:
        hook = model[2].bias.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(EngineError, match=r"stage 1 is on ranks 1, 3, and its 2\.bias has a post-accumulate-grad"):
            pipe.step(x, y)
        assert all(parameter.grad is None for parameter in model.parameters())
        hook.remove()
        pipe.step(x, y)  # the pipeline goes on


def test_a_stage_on_one_rank_keeps_every_hook():
    model, seen = plain.mlp(4), []
    model[2].bias.register_post_accumulate_grad_hook(seen.append)
    stepped(model, GPipe(2, 2))
    assert len(seen) == 2


def test_replicas_follow_the_training_mode():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    x = plain.batch(8)[0]
    with Pipeline(model, two_ranks(2, 2), mse) as pipe:
        pipe.step(x, x)
        model.eval()
        torch.testing.assert_close(pipe.forward(x), model(x).detach())


class Tied(nn.Module):
    """One weight at two places, and parts that are reached through a list, a dict and a bound method."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.order = [self.first, {"second": self.second}]
        self.last = self.second.forward

    def forward(self, x):
        for layer in (self.order[0], self.order[1]["second"]):
            x = torch.tanh(layer(x))
        return self.last(x)


@pytest.mark.parametrize(
    "middle",
    [
        Tied,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        plain.Attention,
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.LSTM(2, 2, batch_first=True), plain.Made(lambda _, x: x[0]), nn.Flatten()
        ),
        lambda: nn.ModuleDict({"only": nn.Linear(6, 6)})["only"],
    ],
    ids=["tied", "parametrized", "attention", "LSTM", "linear"],
)
def test_a_stage_of_any_kind_is_copied(middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), middle(), nn.Linear(6, 6))
    assert verified(model, replicate(GPipe(3, 2), 2), 12).largest_difference <= TOLERANCE


def test_a_copy_shares_the_storage_of_its_parameters_and_nothing_of_their_gradients():
    module = Tied()
    copy = copied(module, CPU)
    for one, other in zip(module.parameters(), copy.parameters(), strict=True):
        assert one is not other
        assert one.data_ptr() == other.data_ptr()
    assert copy.first.weight is copy.second.weight
    assert copy.order[0] is copy.first
    assert copy.order[1]["second"] is copy.second
    assert copy.last.__self__ is copy.second
    copy(torch.ones(1, 6)).sum().backward()
    assert [parameter.grad for parameter in module.parameters()] == [None] * 3


def test_an_object_that_is_changed_between_two_steps_holds_in_the_copies():
    settings = SimpleNamespace(scale=1.0)  # which several layers may share
    scales = plain.Made(lambda self, x: self.settings.scale * self.linear(x), linear=nn.Linear(6, 6), settings=settings)
    with Pipeline(nn.Sequential(nn.Linear(6, 6), scales), replicate(GPipe(2, 2), 2), mse) as pipe:
        for settings.scale in (1.0, 0.5, 2.0):
            assert pipe.verify(*plain.batch(8)).largest_difference < 1e-6


def test_weights_that_are_tied_between_two_steps_are_tied_in_the_copies():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)))
    _, inner = model
    with Pipeline(model, replicate(GPipe(2, 2), 2), mse) as pipe:
        for weight in (inner[0].weight, inner[1].weight):
            inner[2].weight = weight
            assert pipe.verify(*plain.batch(8)).largest_difference < 1e-6


def test_a_copy_shares_what_holds_nothing_of_the_stage():
    module = nn.Linear(2, 2)
    module.notes, module.lock, module.itself = [1, 2], threading.Lock(), []
    module.itself.append(module.itself)
    copy = copied(module, CPU)
    assert copy.notes is module.notes
    assert copy.lock is module.lock
    assert copy.itself is module.itself


def test_nothing_of_a_copy_outlives_its_step():
    model, seen = plain.mlp(2), weakref.WeakSet()
    model[0].register_forward_pre_hook(lambda module, given: seen.add(module))
    with Pipeline(model, two_ranks(1, 1, 1), mse) as pipe:
        pipe.step(*plain.batch(3))
        gc.collect()
        for _ in range(1000):  # a worker lets go just after it has reported
            if set(seen) == {model[0]}:
                break
            time.sleep(0.01)
        assert set(seen) == {model[0]}


def test_a_step_that_failed_leaves_no_gradients_in_the_copies():
    plan = Plan([[F(0, 0), B(0, 0)], [F(2, 0), B(2, 0), F(1, 0), B(1, 0)]], 1, 3)
    with lit(plan, 1, fails) as (pipe, x), pytest.raises(StageError):
        pipe.step(x, x)


def test_a_stage_whose_copy_would_use_the_models_own_weights_is_refused():
    captured = plain.Made(lambda self, x: self.run(x), linear=nn.Linear(6, 6))
    captured.run = lambda x: captured.linear(x)  # reaches its layer in a way that no copy can follow
    told = "the copy of stage 0 on rank 1 uses the model's own 0.linear.weight"
    error = refused(told, nn.Sequential(captured), two_ranks(1, 1), 2)
    assert isinstance(error.__cause__, EngineError)
    assert (error.rank, error.action) == (1, "0F1")


# --- buffers


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


def test_running_statistics_on_several_ranks_are_refused():
    before = set(threading.enumerate())
    with pytest.raises(EngineError, match=r"stage 0 is on ranks 0, 1, and its BatchNorm1d '1' tracks "):
        Pipeline(normed(), two_ranks(1, 1), mse)
    assert set(threading.enumerate()) <= before  # no worker was started


def test_running_statistics_that_rest_are_not_refused_until_they_are_tracked():
    model = normed()
    model[1].eval()
    x, y = plain.batch(8)
    with Pipeline(model, two_ranks(1, 1), mse) as pipe:
        assert pipe.verify(x, y).largest_difference <= TOLERANCE
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.train()
        with pytest.raises(EngineError, match="its BatchNorm1d '1' tracks running statistics"):
            pipe.step(x, y)
        assert all(parameter.grad is None for parameter in model.parameters())  # refused before anything ran
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name])


def test_a_batch_norm_without_statistics_is_not_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False))
    assert verified(model, two_ranks(1, 1)).largest_difference <= TOLERANCE


def test_running_statistics_on_one_rank_are_not_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    rows = [[F(0, 0), F(1, 0), B(0, 0), B(1, 0)], [F(0, 1), B(0, 1)], [F(1, 1), B(1, 1)]]
    stepped(model, Plan(rows, 2, 2))
    assert model[1].num_batches_tracked == 2


def test_the_lowest_ranks_statistics_are_kept_if_asked_for():
    model, twin, (x, y) = normed(), normed(), plain.batch(12)
    stepped(model, two_ranks(2, 1), (x, y), replicated_buffers="lowest")
    for rows in x.split(4)[:2]:
        twin(rows)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name))


def counts_in_place(self, x):
    self.count += 1
    return self.linear(x)


def counts_anew(self, x):
    self.count = self.count + 1
    return self.linear(x)


@pytest.mark.parametrize("does", [counts_in_place, counts_anew])
def test_a_buffer_that_a_copy_writes_into_is_refused_unless_asked_for(does):
    model = nn.Sequential(plain.Made(does, linear=nn.Linear(6, 6)))
    model[0].register_buffer("count", torch.zeros(1))
    told = "stage 0 writes into its buffer '0.count', and rank 1 runs a copy"
    for call, partial in (("step", True), ("forward", False)):
        error = refused(told, model, two_ranks(1, 1), 4, call=call, error=EngineError)
        assert ("gradients are partial now" in str(error)) == partial
        assert model[0].count == 0  # as before
    stepped(model, two_ranks(3, 1), 4, replicated_buffers="lowest")
    assert model[0].count == 3


def test_a_stage_without_shapes_is_refused():
    refused("uninitialized parameter", nn.Sequential(nn.LazyLinear(6)), two_ranks(1, 1), 2, error=ValueError)


# --- what goes wrong


class Fuse(nn.Module):
    """Does what `does` says at the given micro-batch, of which its rows hold the number."""

    def __init__(self, at, does):
        super().__init__()
        self.at, self.does = at, does

    def forward(self, x):
        return self.does(x) if self.does is not None and int(x[0, 0].detach()) == self.at else x * 1


@contextmanager
def lit(schedule, at, does, **settings):
    """A pipeline with a fuse at one of four micro-batches, which hold their numbers, and a batch of them.

    When the fuse is out, the pipeline is right.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Fuse(at, does), nn.Linear(6, 6), nn.Linear(6, 6))
    with Pipeline(model, schedule, mse, **settings) as pipe:
        x = torch.arange(float(pipe.plan.microbatches)).repeat_interleave(2).unsqueeze(1).expand(-1, 6).contiguous()
        yield pipe, x
        model[0].does = None
        model.zero_grad()
        pipe.verify(x, x)


def fails(x):
    return x @ torch.zeros(7, 7)


@pytest.mark.parametrize("at", range(4))
def test_an_exception_in_a_replica_names_its_rank_and_frees_those_who_wait_for_it(at):
    with lit(replicate(OneFOneB(2, 2), 2), at, fails) as (pipe, x):
        with pytest.raises(StageError) as failed:
            pipe.step(x, x)
        assert (failed.value.rank, failed.value.stage, failed.value.action) == (2 * (at % 2), 0, f"0F{at}")


def test_a_rank_that_does_not_come_is_told_and_the_others_are_freed(monkeypatch):
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 0.3)
    release = threading.Event()
    plan = Plan([[F(0, 0), F(1, 0), F(2, 0), B(0, 0), B(1, 0), B(2, 0)], [F(3, 0), B(3, 0)]], 1, 4)
    with lit(plan, 3, lambda x: x * release.wait(20), timeout=0.5) as (pipe, x):
        with pytest.raises(StepTimeoutError) as stuck:
            pipe.step(x, x)
        release.set()
        told = str(stuck.value)
        assert "rank 0 waits, before 0R (stage 0, position 6), for rank 1 to come to it too" in told
        assert "rank 1 was running 0F3 (stage 0, position 0), at " in told


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals on this system")
def test_ctrl_c_frees_those_who_wait_at_an_all_reduce():
    release = threading.Event()

    def interrupt(*_):
        threading.Timer(0.5, release.set).start()  # later than the report of where everybody is
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with lit(two_ranks(3, 1), 3, lambda x: x * release.wait(20)) as (pipe, x):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt) as stopped:
                pipe.step(x, x)
            assert "rank 0 waits, before 0R" in stopped.value.__notes__[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_error_in_an_all_reduce_names_it_and_frees_the_others(monkeypatch):
    def fails_to_add(_):
        raise MemoryError("no room for the sum")

    with lit(two_ranks(1, 1, 2), None, None) as (pipe, x), monkeypatch.context() as patch:
        patch.setattr(AllReduce, "_add_up", fails_to_add)
        with pytest.raises(StageError, match="0R on rank 0 failed: MemoryError: no room") as failed:
            pipe.step(x, x)
        patch.undo()
        assert "stage 0, on cpu" in str(failed.value)
        assert (failed.value.rank, failed.value.action) == (0, "0R")


def test_a_sum_that_is_not_finite_is_told():
    model, x = nn.Sequential(nn.Linear(6, 6)), torch.full((2, 6), 1e38)  # each micro-batch's gradient is finite
    nn.init.zeros_(model[0].weight)
    told = "0R on rank 0 made infinity: the gradient of 0.weight of stage 0, shape"
    how = {"reduction": "sum", "watch_nan": True}
    refused(told, model, two_ranks(1, 1), (x, x), lambda output, target: 2 * output.sum(), **how)


def test_a_batch_of_evaluation_only_needs_no_all_reduce():
    model = plain.mlp(4)
    x = plain.batch(9)[0]
    with Pipeline(model, replicate(OneFOneB(2, 2), 2), mse) as pipe:
        torch.testing.assert_close(pipe.forward(x), model(x))
    assert all(parameter.grad is None for parameter in model.parameters())
