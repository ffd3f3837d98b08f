"""The backward in two halves: right gradients whatever the graph, nothing made twice, and nothing kept after `W`."""

from __future__ import annotations

import weakref
from pipes import mse, refused, stepped, verified

import plain
import pytest
import torch
from strategies import split_plan
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipelab import GPipe, Pipeline, Plan, emulated
from pipelab.engine.stage.split_backward import input_gradients, weight_gradients
from pipelab.engine.stage.stage import Stage

WIDTH = 6


# --- models, each a stage of its own between two linear ones


def linear(does, **parts):
    """Return a stage with a linear layer, and what it does."""
    return plain.Made(does, linear=nn.Linear(WIDTH, WIDTH), **parts)


def attends_across(self, x):
    """Its packed weight is cut in pieces, which two forks use."""
    x = x.reshape(len(x), 1, WIDTH)
    return self.attention(x, 2 * x, 2 * x)[0].reshape(len(x), WIDTH)


def convolution():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Flatten())


def recurrent():
    lstm = nn.LSTM(2, WIDTH, batch_first=True)
    return plain.Made(lambda self, x: self.lstm(x.reshape(len(x), 3, 2))[0][:, -1], lstm=lstm)


def used_twice():
    """Return one linear layer, one behind the other."""
    return linear(lambda self, x: self.linear(torch.tanh(self.linear(x))))


def shares_a_mask(self, x):
    """A weight that is made first, then used at two places and given away."""
    masked = self.weight * torch.ones(WIDTH, WIDTH).triu()
    return (x @ masked).tanh() @ masked + self.own, masked.sum()


def shared_mask():
    weight, own = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
    takes_two = linear(lambda self, given: self.linear(given[0]) * given[1])
    return plain.Made(shares_a_mask, weight=weight, own=own), takes_two


class Multiply(torch.autograd.Function):
    """Makes both gradients at once, and may be run backward only once."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = [(x, weight)]
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.kept.pop()
        return gradient * weight, (gradient * x).sum(dim=0)


def custom():
    return linear(lambda self, x: Multiply.apply(self.linear(x), self.weight), weight=nn.Parameter(torch.randn(WIDTH)))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant=False):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant, self.forwards = use_reentrant, 0
        self.inner.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.forwards += 1

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


def writes_into_a_part(self, x):
    x = self.linear(x)
    x[:, 1:3] *= self.part
    x[:, 4:].add_(self.part)
    return x


def beside():
    """Return a stage that gives what depends on its input, what does not, a parameter as it is, and a tensor twice.

    And the next stage, that takes them.
    """

    def gives(self, x):
        y = self.linear(x)
        return {"y": y, "scale": self.scale.exp(), "bias": self.bias, "again": y}

    def takes(self, given):
        return self.linear(given["y"] * given["scale"] + given["bias"] + given["again"])

    scale, bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
    return linear(gives, scale=scale, bias=bias), linear(takes)


def unused():
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    return linear(lambda self, x: self.frozen(self.linear(x)), unused=nn.Linear(WIDTH, WIDTH), frozen=frozen)


def embeds(self, x):
    return x * self.table(torch.arange(len(x)) % 4) + self.table(torch.zeros(1, dtype=torch.long))


def layers(*middle):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))


MODELS = {
    "linear layers": lambda: layers(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())),
    "in place": lambda: layers(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))),
    "attention": lambda: layers(plain.Attention()),
    "cross attention": lambda: layers(
        plain.Made(attends_across, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))
    ),
    "convolution and batch norm": lambda: layers(convolution()),
    "LSTM": lambda: layers(recurrent()),
    "layer norm": lambda: layers(nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.LayerNorm(6))),
    "used twice": lambda: layers(used_twice()),
    "shared mask": lambda: layers(*shared_mask()),
    "custom function": lambda: layers(custom()),
    "checkpoint": lambda: layers(Checkpointed()),
    "reentrant checkpoint": lambda: layers(Checkpointed(use_reentrant=True)),
    "writes into a part": lambda: layers(linear(writes_into_a_part, part=nn.Parameter(torch.randn(2)))),
    "ignores its input": lambda: layers(
        plain.Made(lambda self, x: self.weight.expand(len(x), -1) * 2, weight=nn.Parameter(torch.randn(WIDTH)))
    ),
    "outputs beside the input": lambda: layers(*beside()),
    "unused and frozen": lambda: layers(unused()),
    "frozen stage": lambda: layers(nn.Linear(6, 6).requires_grad_(requires_grad=False)),
    "nothing that learns": lambda: layers(nn.Tanh()),
    "identity": lambda: layers(nn.Identity()),
    "parametrized": lambda: layers(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
    "dropout": lambda: layers(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))),
    "embedding": lambda: nn.Sequential(
        nn.Linear(6, 6), plain.Made(embeds, table=nn.Embedding(4, 6, sparse=True)), nn.Linear(6, 6)
    ),
}


def gradients_of(model):
    """Return all gradients, `None` where there is none, as dense tensors; clear them."""
    found = {
        name: None if each.grad is None else each.grad.to_dense().clone() for name, each in model.named_parameters()
    }
    model.zero_grad()
    return found


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient is None) == (theirs[name] is None), name
        assert gradient is None or torch.equal(gradient, theirs[name]), name


def gradients_of_a_step(model, plan, x, y, steps=1):
    torch.manual_seed(1)
    with Pipeline(model, plan, mse) as pipe:
        for _ in range(steps):
            pipe.step(x, y)
    return gradients_of(model)


def plans(stages):
    """Return a plan with `B` and one with `I` and `W`."""
    return GPipe(stages, 3).plan(), split_plan(stages, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2, None], ids=["one stage", "two stages", "a stage for each layer"])
def test_gradients_of_a_split_backward_are_those_of_the_full_one_bit_for_bit(name, stages):
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = plain.batch(10)
    full, halves = plans(stages or len(model))
    assert_equal(gradients_of_a_step(model, halves, x, y), gradients_of_a_step(model, full, x, y))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_split_backward_are_those_of_the_plain_loop_bit_for_bit(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = plain.batch(10)
    torch.manual_seed(1)
    plain.one_after_another(model, mse, x, y, 3)
    expected = gradients_of(model)
    full, halves = plans(len(model))
    found = gradients_of_a_step(model, halves, x, y)
    if name not in ("in place", "dropout"):  # one gets a copy, and that changes last bits; the other draws otherwise
        assert_equal(found, expected)
    if name not in ("dropout", "embedding"):
        assert verified(model, halves, 9).exact
    # a second step adds to gradients that are there
    assert_equal(*(gradients_of_a_step(model, plan, x, y, steps=2) for plan in (halves, full)))


def test_a_split_backward_runs_outside_of_autocast_as_a_full_one_does():
    model = layers(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(*(gradients_of_a_step(model, plan, *plain.batch(8)) for plan in (GPipe(3, 4), split_plan(3, 4))))


# --- hooks


def tripled(gradient):
    return 3 * gradient


def with_hooks(kind):
    """Return a model with a hook that changes gradients."""
    torch.manual_seed(0)
    twice = kind == "shared weight"
    model = layers(used_twice() if twice else nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    layer = model[1].linear if twice else model[1][0]
    if kind == "activation":
        layer.register_forward_hook(lambda module, given, made: made.register_hook(tripled) and None)
    elif kind == "module":
        layer.register_full_backward_hook(lambda module, given, made: (3 * given[0],))
    else:
        layer.weight.register_hook(tripled)
    return model


@pytest.mark.parametrize("kind", ["weight", "shared weight", "activation", "module"])
def test_a_hook_that_changes_a_gradient_changes_it_once(kind):
    model, (x, y) = with_hooks(kind), plain.batch(9)
    assert_equal(*(gradients_of_a_step(model, plan, x, y) for plan in (split_plan(3, 3), GPipe(3, 3))))


@pytest.mark.parametrize("middle", [nn.Linear(6, 6), used_twice(), custom()], ids=["linear", "used twice", "custom"])
def test_a_weights_hooks_run_once_for_each_microbatch(middle):
    seen = []
    for parameter in middle.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    stepped(layers(middle), split_plan(3, 4))
    assert sorted(map(id, seen)) == sorted(4 * list(map(id, middle.parameters())))


# --- what I does, what W does


class Calls(TorchDispatchMode):
    """Counts calls of some kernels."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.overloadpacket.__name__ in self.names
        return function(*arguments, **(options or {}))


def products_of(work):
    """Return how many matrix products some work takes, and what it returns."""
    with Calls("mm", "bmm") as products:
        result = work()
    return products.count, result


def halves(model, x):
    """Run a model forward, then its backward in halves; return how many matrix products each half took."""
    leaf = x.clone().requires_grad_()
    made = model(leaf)
    first, (_, left) = products_of(lambda: input_gradients((made,), (torch.ones_like(made),), (leaf,)))
    second, _ = products_of(lambda: weight_gradients(left))
    return first, second


def test_no_matrix_product_is_made_twice():
    x = plain.batch(4)[0]
    assert halves(plain.mlp(15), x) == (8, 8)
    torch.manual_seed(0)
    attention = plain.Attention()  # four linear layers, and two products with two gradients each that lead to the input
    made = attention(leaf := x.clone().requires_grad_())
    full, _ = products_of(lambda: made.backward(torch.ones_like(made)))
    first, second = halves(attention, x)
    assert (first + second, second) == (full, 4)
    assert leaf.grad is not None


def learned_queries(self, x):
    keys = x.reshape(1, 1, len(x), WIDTH)
    return nn.functional.scaled_dot_product_attention(self.queries, keys, keys)


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (
            plain.Made(
                lambda self, x: self.lstm(x.reshape(len(x), 1, WIDTH).expand(-1, 3, -1))[0],
                lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True),
            ),
            "mkldnn_rnn_layer_backward",
        ),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH)), "_prelu_kernel_backward"),
        (
            plain.Made(learned_queries, queries=nn.Parameter(torch.ones(1, 1, 2, WIDTH))),
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    ],
    ids=["LSTM", "PReLU", "learned queries"],
)
def test_what_makes_all_its_gradients_at_once_runs_in_both_halves_and_adds_each_once(model, kernel):
    leaf = plain.batch(4)[0].requires_grad_()
    made = model(leaf)
    wanted = torch.autograd.grad(made.sum(), [leaf, *model.parameters()], retain_graph=True)
    with Calls(kernel) as in_i:
        (given,), left = input_gradients((made,), (torch.ones_like(made),), (leaf,))
    assert all(parameter.grad is None for parameter in model.parameters())
    with Calls(kernel) as in_w:
        weight_gradients(left)
    assert (in_i.count, in_w.count) == (1, 1)
    found = [given, *(parameter.grad for parameter in model.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_weight_that_is_used_twice_gets_its_gradient_in_i():
    assert halves(used_twice(), plain.batch(4)[0]) == (4, 0)


@pytest.mark.parametrize("more", [[], [nn.LayerNorm(WIDTH, bias=False)]], ids=["all weights", "a fork without one"])
def test_a_checkpoint_runs_its_forward_again_once(more):
    checkpointed = Checkpointed()
    checkpointed.inner.extend(more)
    stepped(layers(checkpointed), split_plan(3, 4))
    assert checkpointed.forwards == 2 * 4


def test_on_stage_0_i_does_nothing_and_w_is_the_whole_backward():
    stage = Stage(0, plain.mlp(4), 2)
    kept = {}
    made = stage.forward(0, plain.batch(4)[0], kept, None)
    assert products_of(lambda: stage.backward_input(0, torch.ones_like(made), kept, None)) == (0, [])
    assert products_of(lambda: stage.backward_weight(0, None, kept, None))[0] == 3  # two weights, the second's input
    assert 0 not in kept


def test_a_measured_trace_shows_what_i_and_w_take():
    plan = split_plan(3, 2)
    with Pipeline(emulated(3, forward_ms=1, backward_ms=12, input_grad_ms=9), plan, mse) as pipe:
        trace = pipe.step(*plain.batch(4)).trace
    for event in trace.events:
        kind, stage = event.action.kind, event.action.stage
        least = {"F": 1, "I": 9 if stage else 0, "W": 3 if stage else 12}[kind]
        assert event.end - event.start >= least
        assert stage or kind != "I" or event.end - event.start < 9


@pytest.mark.parametrize("stages", [1, 3])
def test_a_full_backward_of_an_emulated_stage_sleeps_once(stages, monkeypatch):
    from pipelab.engine import emulation

    slept = []
    monkeypatch.setattr(emulation, "_sleep_until", slept.append)
    loss = emulated(stages, forward_ms=1, backward_ms=12, input_grad_ms=9)(torch.ones(2, 1)).sum()
    assert len(slept) == stages
    for _ in range(2):  # through a graph that is kept, too
        slept.clear()
        loss.backward(retain_graph=True)
        assert len(slept) == stages


def test_an_emulated_stage_with_a_frozen_weight_sleeps_for_its_input_alone(monkeypatch):
    from pipelab.engine import emulation

    model, slept = emulated(2, forward_ms=0, backward_ms=12, input_grad_ms=9), []
    model[1].weight.requires_grad_(requires_grad=False)
    monkeypatch.setattr(emulation, "since", lambda: 0)
    monkeypatch.setattr(emulation, "_sleep_until", slept.append)
    model(torch.ones(2, 1)).sum().backward()
    assert slept == [0, 0, 9_000_000, 12_000_000]  # two forwards, then the backwards, the last stage first


# --- memory


class Holds(nn.Module):
    """Notes at each of its forwards how many activations of earlier ones are alive."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.alive, self.seen = nn.Linear(6, 6), nn.Linear(6, 6), weakref.WeakSet(), []

    def forward(self, x):
        self.seen.append(len(self.alive))
        between = self.first(x)
        self.alive.add(between)
        last = self.second(between * between)  # the product keeps its factor
        self.alive.add(last)
        return last * last


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("row", "seen"),
    [
        ("F0 I0 W0 F1 I1 W1 F2 I2 W2", [[0, 0, 0]] * 3),  # with W all is let go
        ("F0 I0 F1 I1 W0 F2 I2 W1 W2", [[0, 2, 2], [0, 1, 1], [0, 1, 1]]),  # with I what lies behind the last weight
    ],
)
def test_what_a_microbatch_held_is_let_go(row, seen, stage):
    model = nn.Sequential(*(Holds() if each == stage else nn.Linear(6, 6) for each in range(3)))
    plan = Plan.parse([" ".join(f"{s}{action}" for action in row.split()) for s in range(3)])
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(*plain.batch(8))
        assert model[stage].seen == seen[stage]
        assert len(model[stage].alive) == 0
        assert step.outputs is not None


# --- faults


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.reshape(5, 5, 5)


@pytest.mark.parametrize(
    ("half", "does"),
    [
        ("I", lambda self, x: Blocks.apply(self.linear(x))),
        ("W", lambda self, x: nn.functional.linear(x, Blocks.apply(self.linear.weight))),
    ],
)
def test_an_exception_names_the_half_in_which_it_was_raised(half, does):
    told = rf"^1{half}0 on rank 1 failed: RuntimeError: shape '\[5, 5, 5\]' is invalid"
    error = refused(told, layers(linear(does)), split_plan(3, 2), 4)
    assert (error.rank, error.stage, error.action) == (1, 1, f"1{half}0")
    assert "in backward: return gradient.reshape(5, 5, 5)" in str(error)


def test_a_weights_gradient_is_watched_in_w():
    told = "1W0 on rank 1 made (NaN|infinity): the gradient of 1.weight"
    refused(told, layers(plain.root_of_weight()), split_plan(3, 2), 4, watch_nan=True)
