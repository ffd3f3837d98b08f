"""Layers that functions make, or that are on the meta device, made where their stage is."""

from __future__ import annotations

from functools import partial

import plain
import pytest
import torch
from torch import nn

import pipelab
from pipelab import Pipeline, SplitError

mse = nn.functional.mse_loss
x, y = plain.batch(8)


def layer(index):
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6) if index % 2 else nn.Tanh())


def meta(layers=4):
    with torch.device("meta"):
        return nn.Sequential(*map(layer, range(layers)))


def functions(layers=4):
    return [partial(layer, index) for index in range(layers)]


def started(model, ranks, seed=0):
    """Return the state with which a pipeline starts."""
    torch.manual_seed(seed)
    with Pipeline(model, pipelab.OneFOneB(ranks, 4), mse) as pipe:
        assert bool(pipe.step(x, y).loss > 0)
        return {name: each.clone() for name, each in pipe.state_dict().items()}


@pytest.mark.parametrize("make", [meta, functions])
def test_every_number_of_ranks_starts_with_the_same_weights_and_another_seed_with_others(make):
    one, two, four = (started(make(), ranks) for ranks in (1, 2, 4))
    assert plain.equal(one, two)
    assert plain.equal(one, four)
    assert list(one) == list(nn.Sequential(*map(layer, range(4))).state_dict())
    weights = [one[f"{index}.0.weight"] for index in range(4)]
    assert len({float(each.sum()) for each in weights}) == 4  # every layer has its own
    assert 0.1 < float(torch.stack(weights).std()) < 0.4  # a uniform one within 1 / sqrt(6), as that of nn.Linear
    assert not torch.equal(one["0.0.weight"], started(make(), 2, seed=1)["0.0.weight"])


def test_a_function_makes_its_layer_as_it_would_alone():
    def filled():
        made = nn.Linear(6, 6)
        nn.init.constant_(made.weight, 0.5)
        made.note = "mine"
        return made

    with Pipeline([filled, nn.Identity()], pipelab.OneFOneB(2, 4), mse) as pipe:
        made, _ = pipe.stages.model
        assert bool((made.weight == 0.5).all())
        assert made.note == "mine"
        assert pipe.stages.modules[0][0] is made
        assert pipe.verify(x, y).exact


def test_layers_are_shared_out_evenly_by_number_or_by_parameters():
    wide = [partial(nn.Linear, 6, 60), partial(nn.Linear, 60, 6), *functions(3)]
    assert pipelab.split(wide, into=2).sizes == (3, 2)
    assert pipelab.split(wide, into=2, by="parameters").sizes == (1, 4)
    assert pipelab.split(wide, at=["2", "4"]).sizes == (2, 2, 1)
    with pytest.raises(SplitError, match=r"has 5 layers, too few for 6 stages"):
        pipelab.split(wide, into=6)


def test_a_weight_of_two_layers_is_filled_as_the_first_ones():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11))
        model[2].weight = model[0].weight
    with Pipeline(model, pipelab.GPipe(3, 2), lambda made, _: made.mean()) as pipe:
        assert pipe.stages.model[0].weight is pipe.stages.model[2].weight
        assert float(pipe.stages.model[0].weight.detach().std()) > 0.7  # normal, where that of nn.Linear is within 0.41
        assert len(list(pipe.parameters())) == 4


def test_what_a_parameter_was_told_before_it_was_made_holds():
    model = meta()
    model[0][0].weight.requires_grad_(False)
    model[1][0].weight.decays = False
    with Pipeline(model, pipelab.OneFOneB(2, 4), mse) as pipe:
        pipe.step(x, y)
        assert model[0][0].weight.grad is None
        assert model[1][0].weight.decays is False
        assert model[1][0].weight.grad is not None


@pytest.mark.parametrize("model", [meta(), functions()])
def test_layers_that_are_not_made_cannot_be_timed(model):
    with pytest.raises(SplitError, match=r"'time' measures the layers, which are not made"):
        pipelab.split(model, into=2, by="time", example=x)


def test_a_meta_model_that_must_be_traced_is_refused_with_what_to_write():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = meta()

        def forward(self, value):
            return self.layers(value)

    with pytest.raises(
        SplitError, match=r"Network is on the meta device and not a plain nn\.Sequential: .*\n  try: a fun"
    ):
        pipelab.split(Network(), into=2, example=x)
