"""Random numbers under an activation checkpoint, where ranks share a generator."""

from __future__ import annotations

import pipes
from pipes import mse
from unittest.mock import Mock

import plain
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from pipelab import ZBH1, GPipe, LoopedBFS, OneFOneB, Pipeline, replicate
from pipelab.engine.stage.checkpoint_rng import _draws, _shared
from pipelab.errors import EngineError

WAYS = {
    "not reentrant": {"use_reentrant": False},
    "not reentrant, unchecked": {"use_reentrant": False, "determinism_check": "none"},
    "not reentrant, to its end": {"use_reentrant": False, "early_stop": False},
    "reentrant": {"use_reentrant": True},
}
"""How to checkpoint."""

DRAWS = {
    "dropout": lambda x: dropout(x, 0.5),
    "in place": lambda x: dropout(x * 1, 0.5, inplace=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "noise": lambda x: x + torch.randn_like(x) * x,
    "attention": lambda x: scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "a layer": nn.Dropout(0.5),
}
"""What draws random numbers, and makes gradients depend on them."""


class Checkpointed(nn.Module):
    """A linear layer and something else, under an activation checkpoint."""

    def __init__(self, then, **way):
        super().__init__()
        self.linear, self.then, self.way = nn.Linear(6, 6), then, way or WAYS["not reentrant"]

    def inner(self, x):
        return self.then(self.linear(x))

    def forward(self, x):
        return checkpoint(self.inner, x, **self.way)


def refused(model, schedule, loss_fn=mse, told="activation checkpoint"):
    """Return why a step is refused: the first, or the second if other ranks' checkpoints hid the draws of the first."""
    with Pipeline(model, schedule, loss_fn) as pipe, pytest.raises(EngineError, match=told) as error:
        two_steps(pipe)
    return str(error.value)


def two_steps(pipe):
    for _ in range(2):
        pipe.step(*plain.batch(8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", DRAWS)
def test_what_draws_under_a_checkpoint_is_refused_where_ranks_share_a_generator(way, draw):
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(DRAWS[draw], **WAYS[way]))
    lead = "on rank 1 failed: stage 1 draws random numbers under an activation checkpoint"
    assert "engine='torch'" in refused(model, GPipe(2, 2), told=rf"1B0 {lead} \(aten\.")
    if draw == "dropout":
        refused(model, ZBH1(2, 2), told=f"1I0 {lead}")


@pytest.mark.parametrize(
    ("place", "stages", "schedule", "told"),
    [
        (0, 2, GPipe(2, 2), "0B0 on rank 0"),
        (0, 2, ZBH1(2, 2), "0W0 on rank 0"),
        (3, 4, LoopedBFS(2, 2), "3B0 on rank 1"),
        (1, 2, replicate(OneFOneB(2, 2), 2), "1B0 on rank 1"),
    ],
)
def test_it_is_refused_wherever_the_checkpoint_runs_again(place, stages, schedule, told):
    layers = [Checkpointed(dropout) if stage == place else nn.Linear(6, 6) for stage in range(stages)]
    refused(nn.Sequential(*layers), schedule, told=f"{told} failed: .*activation checkpoint")


def test_it_is_refused_in_the_loss():
    def loss(output, target):
        return checkpoint(lambda made: mse(dropout(made, 0.5), target), output, use_reentrant=False)

    assert "stage 1 draws" in refused(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), GPipe(2, 2), loss)


def test_verify_refuses_it_and_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(dropout))
    pipes.refused("activation checkpoint", model, GPipe(2, 2), 4, call="verify", error=EngineError)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", DRAWS)
def test_what_draws_under_a_checkpoint_runs_on_one_rank(way, draw):
    torch.manual_seed(0)
    assert pipes.verified(nn.Sequential(nn.Linear(6, 6), Checkpointed(DRAWS[draw], **WAYS[way])), GPipe(1, 1), 4).exact


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", [GPipe(2, 2), ZBH1(2, 2)], ids=str)
def test_a_checkpoint_is_welcome_where_nothing_is_drawn(way, schedule):
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(nn.Dropout(0.5), **WAYS[way]))
    x, y = plain.batch(4)
    with Pipeline(model, schedule, mse) as pipe:
        model.eval()
        assert pipe.verify(x, y).exact
        model.train()
        with pytest.raises(EngineError, match="activation checkpoint"):
            pipe.step(x, y)
        model[1].then.p = 0.0
        assert pipe.verify(x, y).exact


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", [GPipe(2, 2), ZBH1(2, 2)], ids=str)
def test_a_checkpoint_is_welcome_beside_what_draws(way, schedule, monkeypatch):
    looked = Mock(wraps=_draws)
    monkeypatch.setattr("pipelab.engine.stage.checkpoint_rng._draws", looked)
    draws = plain.Made(lambda _, x: x + 0 * dropout(x))  # so that gradients can be compared
    attends = Checkpointed(lambda x: scaled_dot_product_attention(x[None], x[None], x[None])[0], **WAYS[way])
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(draws, attends, nn.LayerNorm(6), draws))
    with Pipeline(model, schedule, mse) as pipe:
        assert pipe.verify(*plain.batch(4)).exact
    assert looked.called


def test_ranks_share_the_generators_of_the_cpu_and_of_a_shared_device():
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert _shared([cpu], 0) == _shared([first], 0) == set()
    assert _shared([cpu, cpu], 0) == {cpu}
    assert [_shared([first, second, second], rank) for rank in range(3)] == [{cpu}, {cpu, second}, {cpu, second}]


def test_dropout_beside_other_hooks_on_saved_tensors_is_no_checkpoint():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    with torch.autograd.graph.save_on_cpu():
        pipes.stepped(model, GPipe(2, 2), 4)


def test_only_a_stage_that_gives_cause_is_looked_at_closely(monkeypatch):
    monkeypatch.setattr("pipelab.engine.stage.checkpoint_rng._RefusesDraws", Mock(side_effect=AssertionError))
    for last in (nn.Dropout(0.5), Checkpointed(nn.Identity())):
        pipes.stepped(nn.Sequential(nn.Linear(6, 6), last), GPipe(2, 2), 4)


class Trains(Checkpointed):
    def forward(self, x):
        return super().forward(x) if self.training else self.inner(x)


def drops(stage):
    stage.then.p = 0.5


@pytest.mark.parametrize(
    ("stage", "later"),
    [
        (Checkpointed(dropout).requires_grad_(False), lambda stage: stage.requires_grad_(True)),
        (Trains(nn.Dropout(0.5)).eval(), lambda stage: stage.train()),
        (Checkpointed(nn.Dropout(0.0)), drops),
    ],
    ids=["learns", "trains", "drops"],
)
def test_a_stage_that_begins_to_draw_later_is_refused_then(stage, later):
    with Pipeline([nn.Linear(6, 6).requires_grad_(False), stage, nn.Linear(6, 6)], GPipe(3, 2), mse) as pipe:
        pipe.step(*plain.batch(4))
        later(stage)
        with pytest.raises(EngineError, match="activation checkpoint"):
            pipe.step(*plain.batch(4))


def test_what_draws_is_told_from_what_only_might():
    aten, p = torch.ops.aten, torch.full((2,), 0.5)
    assert _draws(aten.bernoulli.default, (p,), {})
    assert _draws(aten.native_dropout.default, (p, 0.5, None), {})
    assert _draws(aten.rrelu_with_noise.default, (p, p, 0.1, 0.3, True), {})
    assert _draws(aten._scaled_dot_product_flash_attention.default, (p, p, p, 0.5), {})
    assert not _draws(aten._scaled_dot_product_flash_attention.default, (p, p, p), {})
    assert not _draws(aten._scaled_dot_product_efficient_attention.default, (p, p, p, None, True), {"dropout_p": 0.0})
    assert not _draws(aten._scaled_dot_product_efficient_attention_backward.default, (p,) * 9 + (0.5,), {})
    assert not _draws(aten.rrelu_with_noise.default, (p, p), {})
    assert not _draws(aten.bernoulli.default, (p,), {"generator": torch.Generator()})
    assert not _draws(aten.mm.default, (p, p), {})
