"""A layer or a parameter replaced after the model was cut: the pipeline trains the new one, or refuses to run."""

from __future__ import annotations

from pipes import mse

import plain
import pytest
import torch
from torch import nn

from pipelab import OneFOneB, Pipeline, split
from pipelab.errors import SplitError


def head():
    """Return no sequence, so it is traced."""
    body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return plain.Made(lambda self, x: self.head(self.body(x)), body=body, head=nn.Linear(6, 6))


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def sequence():
    return nn.Sequential(*plain.mlp(3), nn.Linear(6, 6))


def change_of(name, value):
    return lambda model: setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value)


CASES = [
    (sequence, lambda model: model.__setitem__(1, nn.ReLU()), "layer '1' was replaced"),
    (sequence, lambda model: model.append(nn.ReLU()), "layer '4' was added"),
    (sequence, lambda model: model.pop(3), "layer '3' was removed"),
    (head, change_of("head", nn.Linear(6, 6)), "layer 'head' was replaced"),
    (head, change_of("body.0", nn.Linear(6, 6)), "layer 'body.0' was replaced"),
    (head, change_of("head.bias", nn.Parameter(torch.ones(6))), "parameter 'head.bias' was replaced"),
    (head, assign, "parameter 'body.0.weight' was replaced"),
    (head, lambda model: model.body.append(nn.ReLU()), "layer 'body.2' was added"),
    (head, change_of("head.bias", None), "parameter 'head.bias' was removed"),
]


@pytest.mark.parametrize("call", ["step", "forward", "verify"])
@pytest.mark.parametrize(("make", "change", "told"), CASES)
def test_a_model_of_which_stages_have_an_earlier_part_is_refused(make, change, told, call):
    model = make()
    x, y = plain.batch(8)
    stages = split(model, 2, example=x[:2])
    with Pipeline(stages, OneFOneB(2, 4), mse) as pipe:
        pipe.step(x, y)
        pipe.forward(x)
        pipe.verify(x, y)
        plain.taken(model)
        change(model)
        with pytest.raises(SplitError, match=told) as refused:
            getattr(pipe, call)(*((x,) if call == "forward" else (x, y)))
        assert "make the pipeline anew" in str(refused.value)
        assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize(
    "change",
    [
        assign,
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(6, 6))),
        lambda model: model[3].__setitem__(0, nn.Linear(6, 6)),
    ],
    ids=["assigned parameters", "a parameter", "a layer in a layer"],
)
def test_what_is_replaced_inside_a_layer_of_a_sequence_is_trained(change):
    model = nn.Sequential(*plain.mlp(3), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    x, y = plain.batch(8)
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        pipe.step(x, y)
        change(model)
        plain.taken(model)
        expected = plain.gradients(model, mse, x, y, 4)
        pipe.step(x, y)
        assert plain.equal(plain.taken(model), expected)
        assert pipe.verify(x, y).exact


@pytest.mark.parametrize("make", [sequence, head])
def test_what_replaces_no_part_of_a_model_is_not_refused(make):
    model = make()
    x, y = plain.batch(8)
    with Pipeline(split(model, 2, example=x[:2]), OneFOneB(2, 4), mse) as pipe:
        model.load_state_dict(model.state_dict())
        model.to(torch.float64)
        model.to(torch.float32).eval().train().requires_grad_(False).requires_grad_(True)
        pipe.step(x, y)
        model.eval()
        pipe.forward(x)
        pipe.forward(x[:4])  # a traced model is traced again
        model.train()
        assert pipe.verify(x, y).exact
