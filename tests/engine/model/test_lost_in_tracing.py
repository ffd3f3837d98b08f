"""What PyTorch's tracer would lose: custom backwards, tensor hooks, and what changes after the model was traced."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from pipes import mse, no_trace, stepped, verified
from types import SimpleNamespace

import plain
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pipelab import GPipe, OneFOneB, Pipeline, split
from pipelab.errors import SplitError


def passing(name, onward, back):
    """Return a function with a backward of its own."""

    methods = {"forward": lambda ctx, x: onward(x), "backward": lambda ctx, gradient: back(gradient)}
    kind = torch.autograd.Function
    return type(kind)(name, (kind,), {each: staticmethod(method) for each, method in methods.items()})


Turns = passing("Turns", lambda x: x.view_as(x), lambda gradient: -gradient)
Rounds = passing("Rounds", torch.round, lambda gradient: gradient)
Clips = passing("Clips", lambda x: x.view_as(x), lambda gradient: gradient.clamp(-1e6, 1e6))  # which none reaches


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x


class Three(nn.Module):
    """Three layers, and a function after the first."""

    def __init__(self, function=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.function = function or nn.Identity()

    def forward(self, x):
        x = self.function(self.layers[0](x))
        return self.layers[2](self.dropout(torch.tanh(self.layers[1](x))))


# --- custom backwards and hooks


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("function", [Turns, Rounds, Clips])
def test_a_custom_backward_that_the_tracer_would_drop_is_refused_by_its_name(function, dropout):
    with pytest.raises(SplitError, match=rf"(?s){function.__name__}.*backward.*try: a list of stage modules"):
        split(Three(function.apply, dropout), 3, example=plain.batch(4)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_tensor_hook_that_the_tracer_would_drop_is_refused_at_the_first_gradient_that_it_changes(dropout):
    with pytest.raises(SplitError, match=r"(?s)layers\.0\.weight another gradient.*hook.*try: a list of stage modules"):
        split(Three(hooked, dropout), 3, example=plain.batch(4)[0])


def test_a_custom_backward_that_is_refused_trains_in_a_list_of_stages():
    function = plain.Made(lambda _, x: hooked(Turns.apply(x)))
    first, *others = Three().layers
    assert verified([nn.Sequential(first, function), *others], OneFOneB(3, 4)).exact


def test_a_custom_backward_that_the_tracer_keeps_is_no_reason_to_refuse():
    """PyTorch's own way to give an operation a backward: a custom operator."""

    @torch.library.custom_op("pipelab_tests::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    turned.register_fake(torch.empty_like)
    turned.register_autograd(lambda _, gradient: -gradient)
    x, y = plain.batch(8)
    assert verified(split(Three(turned), 3, example=x[:2]), OneFOneB(3, 4), (x, y)).exact


def test_a_custom_backward_in_another_training_mode_is_refused_when_that_is_traced():
    model = Three(lambda x: x if model.training else Turns.apply(x))
    x, y = plain.batch(8)
    with Pipeline(split(model, 3, example=x[:2]), OneFOneB(3, 4), mse) as pipe:
        pipe.step(x, y)
        for _ in range(2):
            with pytest.raises(SplitError, match="Turns"):
                pipe.eval().step(x, y)
        pipe.train().step(x, y)


def unlike(self, words):
    """Give outputs with and without a history."""
    made = self.head(self.norm(self.frozen(self.table(words))))
    return made, made.argmax(1), made.detach() * 2


@pytest.mark.parametrize("mode", [True, False])
def test_the_comparison_with_the_example_leaves_gradients_buffers_and_random_state(mode):
    model = plain.Made(
        unlike,
        table=nn.Embedding(9, 6, sparse=True),
        frozen=nn.Linear(6, 6).requires_grad_(requires_grad=False),
        norm=nn.BatchNorm1d(6),
        head=nn.Linear(6, 6),
        idle=nn.Linear(2, 2),
    ).train(mode)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with no_trace(model):
        split(model, 2, example=torch.arange(8))


def test_models_without_anything_to_learn_are_compared_by_their_outputs_alone():
    split(Three().requires_grad_(requires_grad=False), 3, example=plain.batch(4)[0])
    waves = plain.Made(lambda self, x: self.second(self.first(x)), first=nn.Tanh(), second=nn.ReLU())
    split(waves, 2, example=plain.batch(4)[0])


@pytest.mark.parametrize("normed", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_learns_as_in_plain_training_and_its_vectors_are_the_models(norm, normed):
    ours, theirs = Three(), Three()
    for model in (ours, theirs):
        torch.manual_seed(1)
        for index in normed:
            model.layers[index] = norm(model.layers[index])
    x, y = plain.batch(8)
    stages = split(ours, 3, example=x[:2])
    theirs.load_state_dict(ours.state_dict())
    plain.one_after_another(theirs, mse, x, y, 4)
    with Pipeline(stages, OneFOneB(3, 4), mse) as pipe:
        pipe.step(x, y)
    assert plain.difference(plain.taken(ours), plain.taken(theirs)) <= 1e-6
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))


# --- what changes after the model was traced


@dataclass
class Config:
    """A config as students write them, with a smaller one inside."""

    factor: float = 1.0
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(shift=0.0, kind=torch.tanh))


class Adjustable(nn.Module):
    """What it computes depends on attributes of every kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.alpha, self.factors, self.shifts = 1.0, {"second": 1.0}, [0.0, [0.0]]
        self.config, self.activation, self.mask = Config(), torch.tanh, torch.ones(6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        x = self.activation(self.first(x)) * self.alpha * self.mask
        x = self.config.inner.kind(self.second(x)) * self.factors["second"] + self.shifts[0] + self.shifts[1][0]
        return self.third(x * self.config.factor + self.config.inner.shift) * self.scale


def doubled(x):
    return 2 * nn.functional.linear(x, torch.eye(6))


CHANGES = {
    "an attribute": lambda model: setattr(model, "alpha", 2.0),
    "an attribute of another type": lambda model: setattr(model, "alpha", 2),
    "an entry of a dict": lambda model: model.factors.update(second=2.0),
    "an entry of a list": lambda model: model.shifts.__setitem__(0, 1.0),
    "an entry of a list in a list": lambda model: model.shifts[1].__setitem__(0, 1.0),
    "a field of a config": lambda model: setattr(model.config, "factor", 2.0),
    "a field of a config in a config": lambda model: setattr(model.config.inner, "shift", 1.0),
    "a function of a config": lambda model: setattr(model.config.inner, "kind", torch.sin),
    "another config": lambda model: setattr(model, "config", Config(factor=2.0)),
    "another function": lambda model: setattr(model, "activation", torch.sin),
    "another tensor": lambda model: setattr(model, "mask", torch.full((6,), 2.0)),
    "another buffer": lambda model: setattr(model, "scale", torch.full((6,), 2.0)),
    "a forward of its own": lambda model: setattr(model.second, "forward", doubled),
    "a forward hook": lambda model: model.second.register_forward_hook(lambda *given: given[-1] * 2),
    "a forward pre-hook": lambda model: model.second.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_on_a_traced_models_layers_is_traced_anew_at_the_next_step(change):
    model = Adjustable()
    x, y = plain.batch(8)
    parameters = list(map(id, model.parameters()))
    stages = split(model, 3, example=x[:2])
    with Pipeline(stages, OneFOneB(3, 4), mse) as pipe:
        before = pipe.step(x, y).outputs
        CHANGES[change](model)
        expected = model(x).detach()
        assert not torch.equal(expected, before) or change == "an attribute of another type"
        torch.testing.assert_close(pipe.step(x, y).outputs, expected)
        assert pipe.verify(x, y).exact
        assert stages.ready([x[:2]], [2]) is stages.ready([x[:2]], [2])
    assert list(map(id, model.parameters())) == parameters
    assert {id(each) for module in stages.modules for each in module.parameters()} <= set(parameters)


def test_a_change_between_the_split_and_the_pipeline_is_traced_anew_too():
    model, (x, y) = Adjustable(), plain.batch(8)
    stages = split(model, 3, example=x[:2])
    model.alpha = 2.0
    torch.testing.assert_close(stepped(stages, OneFOneB(3, 4), (x, y)).outputs, model(x).detach())


def test_an_attribute_that_changes_at_every_step_leaves_no_trace_behind():
    model = Adjustable()
    x, y = plain.batch(4)
    stages = split(model, 2, example=x[:2])
    traces = []
    with Pipeline(stages, GPipe(2, 2), mse) as pipe:
        for step in range(5):
            model.alpha = float(step)
            torch.testing.assert_close(pipe.step(x, y).outputs, model(x).detach())
            traces.append(weakref.ref(stages.modules[0]))
        gc.collect()
        assert [each() is None for each in traces] == [True] * 4 + [False]


def test_a_counter_that_changes_nothing_is_no_reason_to_trace_anew():
    class Counts(Adjustable):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Counts()
    x, y = plain.batch(5)
    stages = split(model, 2, example=x[:2])
    with Pipeline(stages, GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)  # of three rows, too
        traced = stages.modules
        pipe.step(x, y)
        assert stages.modules is traced
