"""An optimizer's state goes on with other ranks and cuts, as if training had never stopped."""

from __future__ import annotations

import copy

import plain
import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from training_run import KINDS, batch, make, make_optimizer, plain_run

import pipelab
from pipelab import Pipeline
from pipelab.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LOSS = nn.MSELoss()


def train(pipe, optimizer, scheduler, steps):
    for step in steps:
        optimizer.zero_grad()
        pipe.step(*batch(step))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()


def resume(pipe, optimizer, scheduler, folder):
    state = saved(pipe, optimizer, scheduler)
    dcp.load(state, checkpoint_id=folder)
    pipe.load_optimizer_state_dict(optimizer, state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def saved(pipe, optimizer, scheduler):
    return {
        "model": pipe.state_dict(),
        "optimizer": pipe.optimizer_state_dict(optimizer),
        "scheduler": scheduler.state_dict(),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plans", [(pipelab.OneFOneB(4, 4), pipelab.ZBV(2, 4)), (pipelab.GPipe(2, 4),) * 2])
def test_a_checkpoint_goes_on_with_another_plan_bit_for_bit(kind, plans, tmp_path):
    expected, _ = plain_run(kind, 4)
    first, second = make(kind), make(kind, seed=9)
    with Pipeline(first, plans[0], LOSS) as pipe:
        optimizer, scheduler = make_optimizer(kind, pipe, first)
        train(pipe, optimizer, scheduler, range(2))
        dcp.save(saved(pipe, optimizer, scheduler), checkpoint_id=tmp_path)
    with Pipeline(second, plans[1], LOSS) as pipe:
        optimizer, scheduler = make_optimizer(kind, pipe, second)
        resume(pipe, optimizer, scheduler, tmp_path)
        train(pipe, optimizer, scheduler, range(2, 4))
        found = pipe.state_dict()
    assert plain.equal(found, expected)


@pytest.mark.parametrize("plan", [pipelab.OneFOneB(4, 4), pipelab.replicate(pipelab.OneFOneB(2, 2), 2)])
def test_a_tied_weight_and_replicas_go_on_bit_for_bit_with_the_same_plan(plan, tmp_path):
    model = make("tied")
    with Pipeline(model, plan, LOSS) as pipe:
        optimizer, scheduler = make_optimizer("tied", pipe, model)
        train(pipe, optimizer, scheduler, range(2))
        dcp.save(saved(pipe, optimizer, scheduler), checkpoint_id=tmp_path)
        train(pipe, optimizer, scheduler, range(2, 4))
        expected = pipe.state_dict()
    model = make("tied", seed=9)
    with Pipeline(model, plan, LOSS) as pipe:
        optimizer, scheduler = make_optimizer("tied", pipe, model)
        resume(pipe, optimizer, scheduler, tmp_path)
        train(pipe, optimizer, scheduler, range(2, 4))
        assert plain.equal(pipe.state_dict(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_pytorch_reads_the_state_and_writes_the_same(kind):
    model = make(kind)
    with Pipeline(model, pipelab.OneFOneB(2, 4), LOSS) as pipe:
        optimizer, scheduler = make_optimizer(kind, pipe, model)
        train(pipe, optimizer, scheduler, range(2))
        ours = pipe.optimizer_state_dict(optimizer)
    theirs = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(
        *({name: each for name, each in state.items() if torch.is_tensor(each)} for state in (ours, theirs)),
        rtol=0,
        atol=0,
    )
    other = copy.deepcopy(model)
    other.zero_grad()  # where there are gradients, PyTorch's function loads nothing
    fresh, _ = make_optimizer(kind, other, other)
    set_optimizer_state_dict(other, fresh, copy.deepcopy(ours), options=FLAT)
    for each in (optimizer, fresh):
        each.zero_grad()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = another.grad = torch.ones_like(one)
    optimizer.step()
    fresh.step()
    assert plain.equal(model.state_dict(), other.state_dict())


def test_a_state_saved_before_the_first_step_changes_nothing():
    expected, _ = plain_run("adamw", 2)
    model = make("adamw")
    with Pipeline(model, pipelab.OneFOneB(2, 4), LOSS) as pipe:
        optimizer, scheduler = make_optimizer("adamw", pipe, model)
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("a step"))
        state = pipe.optimizer_state_dict(optimizer)
        assert not optimizer.state
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer, scheduler = make_optimizer("adamw", pipe, model)
        pipe.load_optimizer_state_dict(optimizer, state)
        assert not optimizer.state
        train(pipe, optimizer, scheduler, range(2))
        assert plain.equal(pipe.state_dict(), expected)


class Students(torch.optim.Optimizer):
    """A momentum of one's own, with a factor that no group has."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, {"lr": 0.1})
        self.factor = factor

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["moment"] = self.factor * state.get("moment", 0) + parameter.grad
                parameter -= group["lr"] * state["moment"]


def test_an_optimizer_of_ones_own_is_saved_and_loaded():
    model = make("sgd")
    with Pipeline(model, pipelab.OneFOneB(2, 4), LOSS) as pipe:
        optimizer, other = (Students(pipe.parameters(), 0.5) for _ in range(2))
        fresh = pipe.optimizer_state_dict(optimizer)
        assert fresh["state.0.0.weight.count"] == 0
        pipe.step(*batch(0))
        optimizer.step()
        state = pipe.optimizer_state_dict(optimizer)
        assert state.keys() == fresh.keys()
        pipe.load_optimizer_state_dict(other, state)
    assert [other.state[each]["count"] for each in model.parameters()] == [1] * len(list(model.parameters()))
    assert all(torch.equal(other.state[each]["moment"], each.grad) for each in model.parameters())


def test_a_parameter_without_a_gradient_so_far_and_a_frozen_one_are_kept_so():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].weight.requires_grad_(False)
    with Pipeline(model, pipelab.GPipe(2, 2), LOSS) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        model[3].bias.requires_grad_(False)
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        optimizer.step()
        model[3].bias.requires_grad_(True)
        state = pipe.optimizer_state_dict(optimizer)
        assert "state.0.weight.exp_avg" not in state
        assert state["state.3.bias.step"] == 0
        other = torch.optim.AdamW(pipe.parameters())
        pipe.load_optimizer_state_dict(other, state)
    assert other.state.keys() == optimizer.state.keys()
    assert model[3].bias not in other.state


def test_a_group_that_is_empty_here_keeps_its_own_settings():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Pipeline(model, pipelab.GPipe(2, 2), LOSS) as pipe:
        state = pipe.optimizer_state_dict(torch.optim.SGD(pipe.parameters(), lr=0.5))
        groups = [{"params": [], "lr": 0.25}, {"params": list(pipe.parameters()), "lr": 0.125}]
        optimizer = torch.optim.SGD(groups)
        pipe.load_optimizer_state_dict(optimizer, state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(layer.parameters()), "lr": lr} for layer, lr in zip(model, (0.1, 0.2), strict=True)]
    with Pipeline(model, pipelab.GPipe(2, 2), LOSS) as pipe:
        state = pipe.optimizer_state_dict(torch.optim.SGD(groups))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for given, words in (
            (state, r"group 0.*'0.weight'.*lr = 0.1.*'1.weight'.*lr = 0.2"),
            ({}, "no '0.weight'"),
            (optimizer.state_dict(), "no '0.weight'"),
        ):
            with pytest.raises(UsageError, match=words):
                pipe.load_optimizer_state_dict(optimizer, given)
            assert optimizer.param_groups[0]["lr"] == 0.5
        with pytest.raises(UsageError, match=r"shape \[3\]"):
            pipe.optimizer_state_dict(torch.optim.SGD([nn.Parameter(torch.zeros(3))]))


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_four_processes_two_and_one_go_on_with_each_others_checkpoints(tmp_path):
    for ranks in (4, 2):
        ended = processes.run_well(ranks, "resumed.py", str(tmp_path))
        for fact in ended[0].facts:
            assert fact["difference"] <= (1e-5 if fact["kind"] == "tied" else 0), fact
    for kind in (*KINDS, "tied", "bare"):
        model = make(kind, seed=9)
        optimizer, scheduler = make_optimizer(kind, model, model)
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
            "scheduler": scheduler.state_dict(),
        }
        dcp.load(state, checkpoint_id=tmp_path / f"{kind}-2")
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
        scheduler.load_state_dict(state["scheduler"])
        expected, reference = plain_run(kind, 4)
        largest = 1e-5 if kind == "tied" else 0
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=largest)
        ours, theirs = optimizer.state_dict(), reference.state_dict()
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=largest)
        assert [group["lr"] for group in ours["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
