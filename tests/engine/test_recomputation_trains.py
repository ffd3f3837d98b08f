"""A forward that runs again within a plan (`C`) trains as one that does not, bit for bit."""

from __future__ import annotations

import copy
import pipes
from functools import partial

import plain
import pytest
import torch
from torch import nn

import pipelab
from pipelab import Plan, with_recompute

LOSS = nn.MSELoss()


def made(ranks, *more):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *(make() for make in more)) for _ in range(ranks)))


def trained(model, plan, steps=1, **options):
    """Return a model's gradients after some steps, and its buffers; the model itself stays as it is."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    x, y = torch.randn(2 * plan.microbatches, 4), torch.randn(2 * plan.microbatches, 4)
    with pipelab.Pipeline(model, plan, LOSS, **options) as pipe:
        losses = [pipe.step(x, y).loss for _ in range(steps)]
    return [*losses, *(each.grad for each in model.parameters()), *model.buffers(), *model.parameters()]


def same(ours, theirs):
    assert [each is None for each in ours] == [each is None for each in theirs]
    return all(one is other or torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "plan",
    [
        pipelab.GPipe(3, 4),
        pipelab.OneFOneB(2, 5),
        pipelab.ZBH1(2, 4),
        pipelab.Interleaved1F1B(2, 4),
        pipelab.DualPipe(2, 4),
        pipelab.replicate(pipelab.GPipe(2, 2), 2),
        pipelab.GPipe(1, 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("ahead", [0, 2])
def test_gradients_are_those_without_it_bit_for_bit(plan, ahead):
    again = with_recompute(plan, ahead=ahead)
    assert sum(getattr(item, "kind", "") == "C" for row in again.rows for item in row) >= 2
    model = made(plan.stages)
    assert same(trained(model, again, 2), trained(model, plan.plan(), 2))


def test_a_few_micro_batches_may_run_again_and_verify_agrees():
    plan = Plan.parse("0F0 0F1 0B0 0C1 0F2 0B1 0B2; 1F0 1B0 1F1 1F2 1C2 1B1 1B2")
    assert pipes.verified(made(2), plan, plain.batch(6, 4)).exact


def test_between_f_and_c_a_rank_keeps_the_input_alone():
    plan = Plan.parse("0F0 0B0 0F1 0B1; 1F0 1C0 1B0 1F1 1B1")
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)))
    with pipelab.Pipeline(wide, plan, LOSS) as pipe:
        use = pipe.memory_use(torch.randn(6, 4), torch.randn(6, 4))
        memory = pipe.memory(torch.randn(6, 4), torch.randn(6, 4))
    held = {str(each.action): each.activations for each in use.curves[1] if each.action}
    assert held["1F0"] == 3 * 4 * 4
    assert memory.inputs == (0, 3 * 4 * 4)
    assert held["1C0"] > held["1F1"] > 10 * held["1F0"]


@pytest.mark.parametrize(("loss", "second"), [(nn.MSELoss(), 8 * 16 * 4), (nn.CrossEntropyLoss(), 0)], ids=str)
def test_on_the_last_stage_the_second_output_counts_if_the_loss_needs_it(loss, second):
    x, y, activations = torch.randn(32, 4), torch.rand(32, 16), []
    for plan in (pipelab.GPipe(2, 4), with_recompute(pipelab.GPipe(2, 4))):
        with pipelab.Pipeline(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16)), plan, loss) as pipe:
            use, memory = pipe.memory_use(x, y), pipe.memory(x, y)
        measured, predicted = (
            [max(each.activations for each in curve) for curve in found.curves]
            for found in (use, pipelab.memory_use(use.trace, memory))
        )
        assert measured == predicted
        activations.append(memory.activations[1])
    assert activations[1] - activations[0] == second


def test_batch_norm_counts_each_micro_batch_once():
    model = made(2, partial(nn.BatchNorm1d, 4))
    once = pipelab.GPipe(2, 3).plan()
    assert same(trained(model, with_recompute(once), 2), trained(model, once, 2))


def test_outputs_with_integers_and_frozen_stages_pass_on_what_has_a_gradient():
    def both(self, given):
        value, at = given if isinstance(given, tuple) else (given, torch.arange(4))
        return self.inner(value)[:, at], at

    torch.manual_seed(0)
    first, second, last = (plain.Made(both, inner=nn.Linear(4, 4)) for _ in range(3))
    last.does = lambda self, given: both(self, given)[0]
    first.requires_grad_(False)
    model, once = nn.Sequential(first, second, last), pipelab.GPipe(3, 2).plan()
    assert same(trained(model, with_recompute(once)), trained(model, once))


def halves(clones):
    """Return a stage that writes into its input: a tensor, or an integer tensor beside one, no leaf with a gradient."""

    def does(self, given):
        value, at = given if isinstance(given, tuple) else (given, torch.zeros(4, dtype=torch.int64))
        written = at if isinstance(given, tuple) else value
        (written.clone() if clones else written).add_(1)
        return (self.inner(value), at)

    return plain.Made(does, inner=nn.Linear(4, 4))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_writes_into_its_input_does_not_run_again(stage):
    plan = with_recompute(pipelab.GPipe(3, 2), stages=[stage])
    last = plain.Made(lambda _, given: given[0] * given[1])
    pipes.stepped([halves(clones=True), halves(clones=True), last], plan, plain.batch(4, 4))
    told = r"wrote into its input.*runs again.*\n.*try: .*clone"
    pipes.refused(told, [halves(clones=False), halves(clones=False), last], plan, plain.batch(4, 4))


@pytest.mark.parametrize("inplace", [nn.ReLU, nn.Hardtanh])
def test_a_stage_whose_layers_are_in_place_runs_again(inplace):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(inplace(inplace=True), nn.Linear(4, 4)) for _ in range(2)))
    once = pipelab.GPipe(2, 2).plan()
    assert same(trained(model, with_recompute(once)), trained(model, once))


def test_autocast_reaches_the_second_forward():
    model, once = made(2), pipelab.GPipe(2, 2).plan()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, without = trained(model, with_recompute(once)), trained(model, once)
    assert same(again, without)
    assert not same(without, trained(model, once))


def test_a_stage_that_draws_runs_again_with_the_same_numbers():
    model, plain = made(2, partial(nn.Dropout, 0.5)), pipelab.GPipe(2, 2).plan()
    found = [trained(model, plan, 2) for plan in (plain, with_recompute(plain), with_recompute(plain, stages=[0]))]
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_with_updates_it_uses_the_version_of_its_forward():
    once = pipelab.PipeDream(2, 5).plan()
    options = {"optimizer": partial(torch.optim.SGD, lr=0.5)}
    model = made(2)
    ours, theirs = (trained(model, plan, **options) for plan in (with_recompute(once), once))
    assert same(ours, theirs)
    assert not torch.equal(ours[-1], list(model.parameters())[-1])


@pytest.mark.parametrize(
    ("schedule", "settings", "told"),
    [
        (pipelab.GPipe(2, 4), {"engine": "torch"}, "recomputation"),
        (pipelab.Seq1F1B(2, 4), {"sequence_dim": 1}, "slices"),
    ],
)
def test_processes_and_slices_do_not_run_it(schedule, settings, told):
    with pytest.raises(pipelab.EngineError, match=told):
        pipelab.Pipeline(made(2), with_recompute(schedule), LOSS, **settings)
