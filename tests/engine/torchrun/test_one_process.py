"""The torch engine in one process: a world of one, where PyTorch's runtime runs without any network."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import pipes
import time
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from pipes import mse

import networkx
import plain
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_cases
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import pipelab
from pipelab import (
    BatchError,
    DeviceError,
    EngineError,
    GPipe,
    LossError,
    OneFOneB,
    Pipeline,
    Plan,
    R,
    StageError,
    StepTimeoutError,
    Trace,
    UsageError,
)
from pipelab.engine.stage.autograd import CallerContext
from pipelab.engine.torchrun.exchange import describe_batch
from pipelab.engine.torchrun.start import backend_of, describe_model, describe_plan, device_of, warn_of_one_queue

PLAN = Plan.parse(["0F0 1F0 0F1 1I0 1F1 0I0 1B1 0W0 1W0 0B1"])
"""Two stages, two micro-batches, one rank; one backward of each stage is split."""


def piped(model, loss_fn=mse, **settings):
    """Return a pipeline of the torch engine that runs the plan."""
    return Pipeline(model, PLAN, loss_fn, engine="torch", **settings)


refused = functools.partial(pipes.refused, schedule=PLAN, batch=4, engine="torch")


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def both(plan, x, y, layers=None, loss_fn=mse, **settings):
    """Return gradients, loss and outputs of one step, by the torch engine and by the threads engine."""
    found = []
    for engine in ("torch", "threads"):
        model = layers() if layers else plain.mlp(2 * plan.stages)
        with Pipeline(model, plan, loss_fn, engine=engine, **settings) as pipe:
            step = pipe.step(x, y)
        stages = nn.ModuleList(model) if isinstance(model, list) else model
        found.append((plain.taken(stages), step.loss, step.outputs))
    return found


@given(case=legal_cases(), more=st.integers(0, 3))
def test_any_order_gives_the_same_bits_as_in_the_threads_engine(case, more):
    order = [action for action in networkx.topological_sort(case.plan.graph()) if action.kind != "R"]
    plan = Plan([order], case.stages, case.microbatches)
    (gradients, *ours), (expected, *theirs) = both(plan, *plain.batch(plan.microbatches + more))
    assert plain.equal(gradients, expected)
    assert all(map(torch.equal, ours, theirs))


def test_the_trace_holds_every_action_in_the_plans_order(tmp_path):
    with piped(plain.mlp(4)) as pipe:
        trace = pipe.step(*plain.batch(6)).trace
    assert tuple(event.action for event in trace.events) == PLAN.rows[0]
    assert all(event.start < event.end for event in trace.events)
    assert all(one.end <= other.start for one, other in pairwise(trace.events))
    assert (trace.source, trace.unit) == ("measured", "ms")
    assert trace.note == "1 process, clocks within 0 ms of rank 0's"
    assert pipe.transport == "buffered"
    assert trace.lanes == (f"cpu, process {os.getpid()} on {os.uname().nodename}",)
    assert Trace.load(trace.save(tmp_path / "trace.json")) == trace


def test_an_all_reduce_of_a_stage_on_one_rank_does_nothing_and_shows():
    plan = Plan([[*PLAN.rows[0], R(1), R(0)]], 2, 2)
    model, (x, y) = plain.mlp(4), plain.batch(6)
    trace = pipes.stepped(model, plan, (x, y), engine="torch").trace
    assert [str(event.action) for event in trace.events[-2:]] == ["1R", "0R"]
    assert plain.equal(plain.taken(model), both(PLAN, x, y)[1][0])


def test_learning_the_shapes_draws_no_random_number():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh())
    x, y = plain.batch(4)
    found = []
    for engine in ("torch", "threads"):
        torch.manual_seed(3)
        found.append(pipes.stepped(copy.deepcopy(model), GPipe(1, 1), (x, y), engine=engine).outputs)
    assert torch.equal(*found)


def test_learning_the_shapes_leaves_a_buffer_unmade():
    def averages(self, x):
        self.mean = x.detach().mean(0) if self.mean is None else (self.mean + x.detach().mean(0)) / 2
        return self.linear(x)

    found = []
    for engine in ("torch", "threads"):
        model = [plain.Made(averages, linear=nn.Linear(6, 6)), nn.Linear(6, 6)]
        model[0].register_buffer("mean", None)
        pipes.stepped(model, PLAN, 4, engine=engine)
        found.append(model[0].mean)
    assert torch.equal(*found)


def test_learning_the_shapes_leaves_attributes_as_they_were():
    def averages(self, x):
        self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
        self.seen.append(self.mean)
        return self.linear(x) * (1 + self.mean)

    found = []
    for engine in ("torch", "threads"):
        model = [plain.Made(averages, linear=nn.Linear(6, 6), mean=0.0, seen=[]), nn.Linear(6, 6)]
        pipes.stepped(model, PLAN, 4, engine=engine)
        found.append((model[0].mean, model[0].seen))
    assert found[0] == found[1]


def test_verify_proves_and_restores():
    model, (x, y) = plain.mlp(4), plain.batch(7)
    with piped(model) as pipe:
        pipe.step(x, y)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        proof = pipe.verify(x, y)
        assert (proof.exact, proof.parameters) == (True, 4)
        assert proof.whole_batch_difference < 1e-6
        assert all(map(torch.equal, before, [parameter.grad for parameter in model.parameters()]))


def test_a_layer_that_was_replaced_is_refused():
    model, (x, y) = plain.mlp(4), plain.batch(4)
    with piped(model) as pipe:
        pipe.step(x, y)
        model[1] = nn.ReLU()
        for call in (pipe.step, pipe.verify):
            with pytest.raises(pipelab.SplitError, match="layer '1' was replaced"):
                call(x, y)


@pytest.mark.parametrize("norm_type", [2, "inf", 0, -1, 0.5])
def test_clipping_gives_the_type_and_the_bits_that_pytorch_gives(norm_type):
    found = []
    for engine in ("torch", "threads"):
        model = plain.mlp(4)
        model[0].unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        with Pipeline(model, PLAN, mse, engine=engine) as pipe:
            pipe.step(*plain.batch(4))
            norm = pipe.clip_grad_norm_(0.01, norm_type)
        found.append((norm.dtype, norm.item(), model[0].weight.grad.tolist()))
    assert found[0] == found[1]


def test_a_model_without_gradients_has_a_norm_of_zero():
    with piped(plain.mlp(4)) as pipe:
        assert pipe.clip_grad_norm_(1.0, float("-inf")) == 0


def test_the_callers_autocast_holds_in_forwards():
    model, seen = plain.mlp(4), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with piped(model, lambda output, target: mse(output.float(), target)) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.step(*plain.batch(4))
            assert set(seen) == {torch.bfloat16}
            assert pipe.verify(*plain.batch(4)).exact
        seen.clear()
        pipe.step(*plain.batch(4))
        assert set(seen) == {torch.float32}


def test_the_callers_context_variables_hold_in_the_worker():
    factor = ContextVar("factor", default=1)
    model, (x, y) = plain.mlp(4), plain.batch(4)
    model[0].register_forward_hook(lambda module, inputs, output: output * factor.get())
    with piped(model) as pipe:
        token = factor.set(3)
        torch.testing.assert_close(pipe.step(x, y).outputs, model(x).detach())
        assert pipe.verify(x, y).exact
        factor.reset(token)
        torch.testing.assert_close(pipe.forward(x), model(x).detach())


def test_what_a_stage_has_handed_on_to_its_own_rank_is_compared_before_its_backward():
    room = torch.zeros(2, 6)

    def rewrite(_module, _inputs, output):
        room.numpy()[:] = output.detach().numpy()
        return Aliases.apply(output, room)

    model = plain.mlp(4)
    model[1].register_forward_hook(rewrite)
    refused(r"(?s)^0[IB]0.*written into", model)


class Aliases(torch.autograd.Function):
    """Returns one tensor's numbers in another one's memory."""

    @staticmethod
    def forward(ctx, made, room):
        return room.view_as(made)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_emulated_stages_take_their_time():
    with piped(pipelab.emulated(2, 4, 8)) as pipe:
        rows = torch.ones(2, 1)
        pipe.step(rows, rows)
        trace = pipe.step(rows, rows).trace
    assert all(event.duration >= 3.99 for event in trace.events if event.action.kind == "F")


# --- what is refused


def bug(_, x):
    raise ValueError("a bug of mine")


def hangs(self, x):
    time.sleep(1.5)  # it comes back, and adds to nothing that matters
    return self.linear(x)


@pytest.mark.parametrize(
    ("does", "error", "told"),
    [
        (bug, StageError, r"1F0 on rank 0 failed: ValueError: a bug of mine\n  stage 1, .* on cpu\n"),
        (hangs, StepTimeoutError, r"nothing moved on rank 0 .* running 1F0 .* time\.sleep\(1\.5\)"),
    ],
)
def test_a_stage_that_raises_or_hangs_is_told_with_its_line_and_the_pipeline_is_over(does, error, told, recwarn):
    model = [nn.Linear(6, 6), plain.Made(does, linear=nn.Linear(6, 6))]
    with piped(model, timeout=0.4) as pipe:
        with pytest.raises(error, match=told):
            pipe.step(*plain.batch(4))
        with pytest.raises(UsageError, match=f"this pipeline has failed: start all processes anew\n  {told[:8]}"):
            pipe.step(*plain.batch(4))
    assert dist.get_backend(pipe.engine.group) == "gloo"  # its connections may be in use for ever
    torch.manual_seed(1)
    pipe.engine._supervisor._thread.thread.join(3)  # what is over says nothing of random numbers, and moves none
    assert not [each for each in recwarn if "random numbers" in str(each.message)]


def test_nan_is_named_with_its_maker():
    x, y = plain.batch(4)
    x[3, 0] = float("nan")
    told = "0F1 on rank 0 made NaN: the output of stage 0, micro-batch 1"
    refused(told, plain.mlp(4), batch=(x, y), watch_nan=True)


CLASSES = torch.tensor([-100, 1, 2, 3])


@pytest.mark.parametrize(
    ("loss_fn", "wrong", "right", "error", "told"),
    [
        (mse, plain.batch(1), plain.batch(2), BatchError, "a batch of 1 row cannot fill 2 micro-batches"),
        (
            nn.CrossEntropyLoss(),
            (plain.batch(4)[0], CLASSES),
            (plain.batch(4)[0], CLASSES.clamp_min(0)),
            LossError,
            "ignores targets that are -100",
        ),
    ],
)
def test_what_is_wrong_with_a_batch_leaves_the_pipeline_as_it_was(loss_fn, wrong, right, error, told):
    with piped(plain.mlp(4), loss_fn) as pipe:
        with pytest.raises(error, match=told):
            pipe.step(*wrong)
        assert pipe.verify(*right).whole_batch_difference < 1e-5


def odd(usual, other):
    """Return a stage that returns something else in the third call; the first one learns the shapes."""
    calls = itertools.count(1)
    return plain.Made(lambda self, x: (other if next(calls) == 3 else usual)(self.linear(x)), linear=nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("usual", "other", "error", "told"),
    [
        (lambda y: (y, len(y)), None, EngineError, "stage 0 returned an object of class int: between processes"),
        (
            lambda y: y,
            lambda y: y.detach(),
            StageError,
            r"0F1 on rank 0 returned \[2, 6\] float32 without gradient, .* it returned \[2, 6\] float32:",
        ),
        (
            lambda y: {"a": y, "b": 2 * y},
            lambda y: {"b": 2 * y, "a": y},
            StageError,
            r"^0F1 on rank 0 returned .*'b', 'a'.* it returned .*'a', 'b'",
        ),
    ],
)
def test_an_output_that_cannot_travel_is_refused(usual, other, error, told):
    takes = plain.Made(lambda self, x: self.linear(x["a"] if isinstance(x, dict) else x), linear=nn.Linear(6, 6))
    refused(told, [odd(usual, other), takes], error=error)


def test_the_number_of_processes_must_be_the_plans():
    with pytest.raises(EngineError, match=r"the plan has 2 ranks and torchrun started 1 process: .*\n  try: torchrun"):
        Pipeline(plain.mlp(4), OneFOneB(2, 2), mse, engine="torch")


def test_who_typed_pipelab_launch_is_told_to_type_it_again(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "pipelab-1")
    with pytest.raises(EngineError, match=r"pipelab launch started 1 process: .*\n  try: pipelab launch "):
        Pipeline(plain.mlp(4), OneFOneB(2, 2), mse, engine="torch")


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(RuntimeError, match="uninitialized parameter"):
        piped([nn.Linear(6, 6), nn.Sequential(nn.LazyLinear(6))])


def test_a_process_started_alone_is_told_how_to_start_several(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    told = r"^engine='torch' .* started alone\n  try: pipelab launch .* --ranks 1\n  or: torchrun .*-per-node 1 "
    with pytest.raises(EngineError, match=told):
        Pipeline([nn.Linear(2, 2)], GPipe(1, 1), mse, engine="torch")


def test_a_pipeline_in_threads_under_torchrun_warns(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.warns(UserWarning, match="each of the 2 processes runs all ranks of this pipeline"),
        Pipeline(plain.mlp(2), pipelab.GPipe(2, 2), mse) as pipe,
    ):
        assert pipe.step(*plain.batch(4)).loss > 0  # it runs all the same


def test_what_travels_is_described_for_people():
    rows = [torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(2, 4)]
    assert describe_batch(rows) == "2 x [3, 4] float32 and 1 x [2, 4] float32"
    assert describe_batch([{"a": torch.zeros(3, dtype=torch.int64)}]).startswith("1 x [3] int64 in ")


def test_the_plan_and_model_are_described_so_that_they_can_be_compared():
    assert describe_plan(PLAN)[:2] == ["ranks=1, stages=2, microbatches=2", "0F0 at position 0 of row 0"]
    assert describe_model([nn.Linear(2, 3), nn.BatchNorm1d(3)])[:3] == [
        "weight of stage 0: [3, 2] float32",
        "bias of stage 0: [3] float32",
        "weight of stage 1: [3] float32",
    ]


@pytest.mark.parametrize(
    ("gpus", "backend", "warning"),
    [
        (["", "", ""], "gloo", None),
        (["GPU-1", "GPU-2", "GPU-3"], "nccl", None),
        (["GPU-1", "GPU-2", "GPU-1"], "gloo", "the processes share GPUs"),
        (["GPU-1", "", "GPU-2"], "gloo", "the processes run on GPUs and on CPUs"),
    ],
)
def test_nccl_connects_processes_that_have_a_gpu_each_and_gloo_all_others(gpus, backend, warning):
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        assert backend_of([{"gpu": gpu} for gpu in gpus]) == backend


def test_a_plan_that_one_queue_of_nccl_makes_longer_is_warned_of_with_both_makespans():
    with pytest.warns(UserWarning, match=r"about 33\.5 units .* about 28\.5"):
        warn_of_one_queue(pipelab.Interleaved1F1B(4, 8).plan())
    warn_of_one_queue(pipelab.OneFOneB(4, 8).plan())  # as long on both
    warn_of_one_queue(pipelab.Plan.parse("(0F0;0B0)OVERLAP_F_B; 1F0 1B0"))  # no pair of this plan can run as one


def test_each_process_takes_its_own_device_of_those_that_were_asked_for():
    assert device_of(["cpu", "cpu"], 1, 2) == torch.device("cpu")
    assert device_of(["cuda:7", "cpu"], 1, 2) == torch.device("cpu")  # the other one may be on another machine
    with pytest.raises(DeviceError, match="devices has meta"):
        device_of(["meta", "cpu"], 1, 2)  # every process says so, not rank 0 alone
    with pytest.raises(DeviceError, match="2 devices for 1 rank:"):
        piped(plain.mlp(4), devices=["cpu", "cpu"])


# --- what learns may change between steps


def test_a_stage_that_is_unfrozen_after_the_first_step_learns_from_then_on():
    model, (x, y) = plain.mlp(4), plain.batch(6)
    first = model[:2].requires_grad_(False)
    with piped(model) as pipe:
        pipe.step(x, y)
        assert all(parameter.grad is None for parameter in first.parameters())
        first.requires_grad_(True)
        model.zero_grad()
        pipe.step(x, y)
    assert plain.equal(plain.taken(model), both(PLAN, x, y)[1][0])


def test_a_process_that_froze_other_parameters_would_be_told():
    model = plain.mlp(4)
    with piped(model) as pipe:
        x, _ = plain.batch(4)

        def shapes(learning=True):
            return pipe.engine._about(CallerContext(), learning=learning)

        before, evaluating = shapes(), shapes(learning=False)
        assert before.endswith("; frozen nothing")
        model[0].bias.requires_grad_(False)
        assert shapes().endswith("; frozen 0.bias of stage 0")
        assert shapes(learning=False) == evaluating  # nothing comes back
        model[0].weight.requires_grad_(False)
        assert shapes().endswith("; frozen stage 0")
        x.requires_grad_(True)
        pipe.forward(x)
        assert pipe.engine._shapes.endswith("[2, 6] float32; x wants a gradient")


def test_a_stage_keeps_nothing_of_a_step_for_another_stage_of_its_rank():
    model, during = plain.mlp(4), []
    with piped(model) as pipe:
        stages = pipe.engine._stages
        model[2].register_forward_hook(lambda *_: during.append(len(stages[0].made)))
        pipe.step(*plain.batch(4))
        assert during == [0] * len(during)
        for stage in stages.values():
            assert not hasattr(stage, "passage")
            assert [stage.given, stage.made, stage.gradients, stage.back] == [{}, {}, {}, {}]
        pipe.step(*plain.batch(4))


def weighted():
    """Return a loss that learns."""
    return plain.Made(
        lambda self, output, target: mse(output * self.weight, target), weight=nn.Parameter(torch.ones(6))
    )


@pytest.mark.parametrize(
    ("learns", "told"),
    [(True, "the loss has a parameter 'weight', and the last stage is on ranks 0, 1"), (False, "the plan has 2 ranks")],
)
def test_a_loss_that_learns_is_refused_where_several_ranks_would_train_it(learns, told):
    plan = pipelab.replicate(OneFOneB(1, 2), 2)
    with pytest.raises(EngineError, match=told):
        Pipeline(plain.mlp(2), plan, weighted().requires_grad_(learns), engine="torch")


def test_a_loss_that_learns_may_do_so_on_one_rank():
    losses = {"torch": weighted(), "threads": weighted()}
    for engine, loss in losses.items():
        pipes.stepped(plain.mlp(4), PLAN, 4, loss, engine=engine)
    assert torch.equal(*(loss.weight.grad for loss in losses.values()))


def test_a_closed_pipeline_leaves_no_connections_behind():
    def groups():
        return len(distributed_c10d._world.pg_map)

    def threads():
        found = 0
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended since the folder was listed
                found += (task / "comm").read_text().strip() == "pt_gloo_runloop"
        return found

    before, threads_before = groups(), threads()
    for _ in range(3):
        with piped(plain.mlp(4)) as pipe:
            pipe.step(*plain.batch(4))
            pipe.state_dict()
            assert groups() == before + 1
            assert threads() > threads_before
        assert groups() == before
        assert threads() <= threads_before  # they would let go of tensors while the process ends, which aborts it
        pipe.close()  # once more does no harm
        with pytest.raises(UsageError, match="this pipeline is closed"):
            pipe.step(*plain.batch(4))


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_draws_of_dtensors_keep_their_own_random_state():
    mesh, masks = init_device_mesh("cpu", (1,)), []

    def spread(self, x):
        made = self.drop(DTensor.from_local(x, mesh) @ self.weight).full_tensor()
        masks.append(made.detach() != 0)
        return made

    weight = nn.Parameter(distribute_tensor(torch.eye(6), mesh))
    stage, (x, y) = plain.Made(spread, drop=nn.Dropout(0.5), weight=weight), plain.batch(4)
    torch.manual_seed(7)
    expected = [(stage(rows) != 0).detach() for rows in x.chunk(2)]
    with Pipeline([stage], GPipe(1, 2), mse, engine="torch") as pipe:
        for _ in range(2):
            torch.manual_seed(7)
            with pytest.warns(UserWarning, match="does not see") if len(masks) == 2 else contextlib.nullcontext():
                pipe.step(x, y)
            assert all(map(torch.equal, masks[-2:], expected))
