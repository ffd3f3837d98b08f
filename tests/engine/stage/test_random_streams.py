"""Random numbers hold: the same in every run, schedule and cut, and again in whatever runs again."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import plain
import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from pipelab import (
    ZBH1,
    ZBV,
    DualPipe,
    GPipe,
    Interleaved1F1B,
    Naive,
    OneFOneB,
    Pipeline,
    StageError,
    replicate,
    with_recompute,
)
from pipelab.engine.stage.streams import _DRAW, StepStreams, Streams

mse = nn.functional.mse_loss

WAYS = {
    "not reentrant": {"use_reentrant": False},
    "not reentrant, unchecked": {"use_reentrant": False, "determinism_check": "none"},
    "not reentrant, to its end": {"use_reentrant": False, "early_stop": False},
    "not reentrant, forgetful": {"use_reentrant": False, "preserve_rng_state": False},
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
    "twice": nn.Sequential(*[nn.Dropout(0.3)] * 2),
}
"""What draws random numbers, and makes gradients depend on them."""


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Checkpointed(nn.Module):
    """A linear layer and something else, under an activation checkpoint; without a way, without one."""

    def __init__(self, then, **way):
        super().__init__()
        self.linear, self.then, self.way = nn.Linear(6, 6), then, way

    def inner(self, x):
        return self.then(self.linear(x))

    def forward(self, x):
        return checkpoint(self.inner, x, **self.way) if self.way else self.inner(x)


class Masks(nn.Module):
    """A dropout that notes its masks, by the first number of the rows."""

    def __init__(self, drop=None):
        super().__init__()
        self.drop, self.masks = drop or nn.Dropout(0.5), {}

    def forward(self, x):
        mask = self.drop(torch.ones(64))
        self.masks.setdefault(int(x[0, 0]), []).append(mask > 0)
        return x * 1.0 + 0 * mask.sum()


def whole(layers=8, drop=None):
    """Return a model and a batch of whole numbers: their sums are the same in any order, bit for bit."""
    torch.manual_seed(0)
    drop = drop or (lambda: nn.Dropout(0.5))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), drop()) for _ in range(layers))).double()
    for parameter in model.parameters():
        parameter.data = (parameter.data * 4).round()
    return model, torch.randint(-2, 3, (16, 6)).double(), torch.randint(-2, 3, (16, 6)).double()


def added(output, target):
    return (output * target).sum()


def stepped(model, schedule, x, y, steps=2, loss_fn=added, **options):
    """Return losses and gradients of some steps after the same seed."""
    model.zero_grad()
    with Pipeline(model, schedule, loss_fn, reduction="sum", **options) as pipe:
        torch.manual_seed(7)
        losses = [pipe.step(x, y).loss for _ in range(steps)]
    return torch.stack([*losses, *(parameter.grad.sum() for parameter in model.parameters())])


SCHEDULES = [
    *(GPipe(ranks, 8) for ranks in (1, 2, 4)),
    *(kind(4, 8) for kind in (Naive, OneFOneB, ZBH1, Interleaved1F1B, ZBV, DualPipe)),
    ZBH1(1, 8),
    replicate(OneFOneB(2, 4), 2),
    with_recompute(GPipe(2, 8)),
    with_recompute(OneFOneB(4, 8), stages=[1]),
]


@pytest.fixture(scope="module")
def expected():
    return stepped(whole()[0], GPipe(1, 8), *whole()[1:])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_schedule_and_number_of_ranks_has_the_same_numbers_in_every_run(schedule, expected):
    for _ in range(2):
        model, x, y = whole()
        assert torch.equal(stepped(model, schedule, x, y), expected)
    assert not torch.equal(stepped(whole(drop=nn.Identity)[0], schedule, x, y), expected)


def masks_of(model):
    found = [
        mask for layer in model.modules() if isinstance(layer, Masks) for each in layer.masks.values() for mask in each
    ]
    return torch.stack(found)


def test_layers_micro_batches_and_steps_have_masks_of_their_own():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), Masks()) for _ in range(4))).double()
    for each in model:
        each[0].weight.data, each[0].bias.data = torch.eye(2).double(), torch.zeros(2).double()
    x = torch.arange(4).double()[:, None].expand(4, 2)
    with Pipeline(model, OneFOneB(4, 4), mse) as pipe:
        for seed in (7, None, 7):
            if seed:
                torch.manual_seed(seed)
            pipe.step(x, x)
    masks = masks_of(model).reshape(4, 4, 3, 64)
    assert torch.equal(masks[:, :, 0], masks[:, :, 2])
    own = masks[:, :, :2].reshape(-1, 64)
    alike = torch.stack([(own == other).double().mean(1) for other in own]) - torch.eye(len(own))
    assert alike.fill_diagonal_(0.5).min() > 0.1
    assert alike.max() < 0.9


def test_one_dropout_at_several_places_draws_for_each_of_them_at_any_number_of_ranks():
    found, one = [], nn.Dropout(0.5)
    for ranks in (1, 2, 4):
        model, x, y = whole(4, drop=lambda: one)
        found.append(stepped(model, OneFOneB(ranks, 8), x, y))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    shared = Masks()
    with Pipeline([shared, nn.Sequential(nn.Linear(2, 2), shared)], GPipe(2, 1), mse) as pipe:
        pipe.step(torch.zeros(2, 2), torch.zeros(2, 2))
    first, second = masks_of(shared)
    assert not torch.equal(first, second)


def test_the_callers_generator_moves_by_one_number_if_something_draws():
    model, x, y = whole(2)
    for training, draws in ((True, 1), (False, 0)):
        model.train(training)
        with Pipeline(model, GPipe(2, 2), added, reduction="sum") as pipe:
            for step in (partial(pipe.step, x, y), partial(pipe.forward, x)):
                torch.manual_seed(3)
                torch.empty((), dtype=torch.int64).random_() if draws else None
                moved = torch.get_rng_state()
                torch.manual_seed(3)
                step()
                assert torch.equal(torch.get_rng_state(), moved)


def test_an_evaluation_in_training_mode_drops_what_a_step_drops():
    model, x, y = whole(4)
    with Pipeline(model, OneFOneB(4, 8), added, reduction="sum") as pipe:
        torch.manual_seed(7)
        outputs = pipe.forward(x)
        torch.manual_seed(7)
        assert torch.equal(pipe.step(x, y).outputs, outputs)


def test_a_dropout_that_is_on_in_evaluation_draws_the_same_from_the_first_step_on():
    found = []
    for ranks in (1, 2, 4):
        model, x, y = whole(4, drop=lambda: Calls(partial(dropout, p=0.5)))
        found.append(stepped(model.eval(), OneFOneB(ranks, 8), x, y))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# what runs again


def slope_is_right(model, schedule, x, y, loss_fn=mse):
    """Compare a step's gradients with the slope of its loss, twice: a step that learns what draws, and a later one."""
    parameters = list(model.parameters())
    along = [torch.randn_like(each) for each in parameters]
    with Pipeline(model, schedule, loss_fn) as pipe:
        for _ in range(2):
            losses = []
            for sign in (1, -1):
                for parameter, way in zip(parameters, along, strict=True):
                    parameter.data += sign * 1e-6 * way
                torch.manual_seed(7)
                losses.append(pipe.step(x, y).loss)
                for parameter, way in zip(parameters, along, strict=True):
                    parameter.data -= sign * 1e-6 * way
            model.zero_grad()
            torch.manual_seed(7)
            pipe.step(x, y)
            slope = sum((each.grad * way).sum() for each, way in zip(parameters, along, strict=True))
            torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, slope, rtol=1e-5, atol=1e-8)
    return True


def batch():
    return [each.double() for each in plain.batch(8)]


def around(*layers):
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(*layers), nn.Linear(6, 6)).double()


@pytest.mark.parametrize("way", [*WAYS, "none"])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_runs_again_draws_what_its_forward_drew(draw, way):
    """Every two of a draw, a way and a schedule meet."""
    kinds = [GPipe(3, 4), ZBH1(3, 4), with_recompute(GPipe(3, 4))]
    schedule = kinds[([*DRAWS].index(draw) + [*WAYS, "none"].index(way)) % 3]
    model = around(Checkpointed(DRAWS[draw], **WAYS.get(way, {})), nn.Dropout(0.2))
    assert slope_is_right(model, schedule, *batch())


@pytest.mark.parametrize("draw", DRAWS)
def test_a_checkpoint_changes_no_number(draw):
    found = []
    for way in ({}, *WAYS.values()):
        torch.manual_seed(0)
        model = around(Checkpointed(DRAWS[draw], **way), nn.Dropout(0.2))
        found.append(stepped(model, GPipe(3, 4), *batch(), loss_fn=mse))
        torch.testing.assert_close(found[-1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_one_dropout_under_several_checkpoints(way):
    one = nn.Dropout(0.5)
    model = around(one, *(Checkpointed(one, **WAYS[way]) for _ in range(3)), one)
    assert slope_is_right(model, GPipe(3, 2), *batch())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", [dropout, nn.Dropout(0.5)], ids=["a function", "a layer"])
def test_several_parts_of_one_layer(way, function):
    def parts(x):
        for _ in range(3):
            x = checkpoint(lambda each: function(torch.tanh(each)), dropout(x, 0.1), **WAYS[way])
        return x

    assert slope_is_right(around(Calls(parts)), GPipe(3, 2), *batch())


@pytest.mark.filterwarnings("ignore:the losses of two micro-batches average")
def test_a_loss_that_draws_under_a_checkpoint():
    def loss(output, target):
        return checkpoint(lambda made: mse(dropout(made, 0.5), target), output, use_reentrant=False)

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()

    assert slope_is_right(made(), GPipe(2, 2), *batch(), loss_fn=loss)
    found = [stepped(made(), GPipe(ranks, 2), *batch(), loss_fn=loss) for ranks in (1, 2)]
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("then", ["a layer", "a layer of several places", "dropout"])
def test_a_checkpoint_in_a_checkpoint(way, then):
    drop = DRAWS.get(then, nn.Dropout(0.5))
    first = drop if then == "a layer of several places" else nn.Identity()
    model = around(first, Checkpointed(Checkpointed(drop, **WAYS[way]), **WAYS[way]))
    assert slope_is_right(model, GPipe(3, 2), *batch())


class Force(nn.Module):
    """Returns the gradient of an energy by its input: what is checkpointed there runs again within a forward."""

    def __init__(self, **way):
        super().__init__()
        self.energy = Checkpointed(lambda x: dropout(x, 0.5) ** 2, **way)

    def forward(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = self.energy(place).sum()
            return x + torch.autograd.grad(energy, place, retain_graph=True)[0] + energy


def test_a_checkpoint_that_runs_again_within_a_forward_changes_no_number():
    found = []
    for way in ({}, WAYS["not reentrant"], WAYS["not reentrant, forgetful"]):
        torch.manual_seed(0)
        found.append(stepped(nn.Sequential(nn.Linear(6, 6), Force(**way)), GPipe(2, 4), *plain.batch(8), loss_fn=mse))
        assert torch.equal(found[-1], found[0])


class Again(torch.autograd.Function):
    """A checkpoint that is not PyTorch's."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.function(x)
        made.backward(gradient)
        return x.grad, None


class AnotherCheckpoint(nn.Module):
    def __init__(self, function, before=None):
        super().__init__()
        self.function, self.before = function, before or nn.Identity()

    def forward(self, x):
        return Again.apply(self.before(x), self.function)


def test_another_checkpoint_runs_layers_again_and_is_refused_where_numbers_cannot_be_known():
    one = nn.Dropout(0.5)
    assert slope_is_right(around(AnotherCheckpoint(one)), GPipe(3, 2), *batch())
    for model, why in ((AnotherCheckpoint(one, one), "drew 2 times"), (AnotherCheckpoint(dropout), "a function")):
        with pytest.raises(StageError, match=why):
            slope_is_right(around(model), GPipe(3, 2), *batch())


def test_noise_on_gradients_is_the_same_in_every_run():
    def noisy(x):
        x = x * 1
        x.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Calls(noisy), nn.Linear(6, 6))
    found = [stepped(model, GPipe(3, 4), *plain.batch(8), loss_fn=mse) for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# what is learned


def hooks_of(model):
    return [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]


def test_no_layer_gets_a_hook():
    seen = []
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Calls(lambda x: seen.append(hooks_of(model)) or x))
    with Pipeline(model, GPipe(3, 1), mse) as pipe:
        pipe.step(*plain.batch(4))
        pipe.eval().forward(plain.batch(4)[0])
    assert seen == [[(0, 0)] * 4] * 2


def test_a_model_that_draws_nothing_has_no_generators_and_no_names(monkeypatch):
    attention = Calls(lambda x: scaled_dot_product_attention(x[None], x[None], x[None])[0])
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), attention, nn.Dropout(0.5).eval(), nn.Linear(6, 6))
    x, y = plain.batch(8)
    with Pipeline(model, GPipe(5, 2), mse) as pipe:
        for name in ("_Drawing.generator", "_inside"):
            monkeypatch.setattr(f"pipelab.engine.stage.streams.{name}", Mock(side_effect=AssertionError))
        for mode in (model.train, model.eval):
            mode()
            model[3].eval()
            pipe.step(x, y)
            pipe.forward(x)


def test_a_probability_a_mode_or_a_layer_that_changes_is_noticed():
    model, x, y = whole(2)
    changes = [
        lambda: model.eval(),
        lambda: model[0][1].train(),
        lambda: setattr(model[0][1], "p", 0.0),
        lambda: setattr(model[0], "1", nn.Dropout(0.25)),
        lambda: model.train(),
    ]
    with Pipeline(model, GPipe(2, 8), added, reduction="sum") as pipe:
        pipe.step(x, y)
        for change in changes:
            change()
            torch.manual_seed(7)
            model.zero_grad()
            ours = torch.stack([pipe.step(x, y).loss, model[0][0].weight.grad.sum()])
            theirs = stepped(model, GPipe(1, 8), x, y, steps=1)
            assert torch.equal(ours, theirs[:2])


def test_what_begins_to_draw_unseen_is_learned_in_the_next_step():
    model, x, y = whole(2)
    model[1][1] = Calls(lambda made: dropout(made, 0.5) if model.late else made)
    model.late = False
    with Pipeline(model, OneFOneB(2, 8), added, reduction="sum") as pipe:
        pipe.step(x, y)
        model.late = True
        pipe.step(x, y)
        torch.manual_seed(7)
        model.zero_grad()
        losses = [pipe.step(x, y).loss for _ in range(2)]
        ours = torch.stack([*losses, *(parameter.grad.sum() for parameter in model.parameters())])
    assert torch.equal(ours, stepped(model, GPipe(1, 8), x, y))


def test_random_numbers_that_are_not_seen_are_said_once():
    def unseen(x):
        torch.default_generator.manual_seed(torch.initial_seed() + 1)
        return x

    with Pipeline(nn.Sequential(nn.Linear(6, 6), Calls(unseen)), GPipe(2, 2), mse) as pipe:
        with pytest.warns(UserWarning, match="random numbers that pipelab does not see"):
            pipe.step(*plain.batch(4))
        pipe.step(*plain.batch(4))


def test_a_stage_that_sets_its_own_seed_is_refused():
    def seeded(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return x @ torch.randn(6, 6)

    with Pipeline(nn.Sequential(nn.Linear(6, 6), Calls(seeded)), GPipe(2, 2), mse) as pipe:
        for run in (pipe.step, pipe.evaluate):
            with pytest.raises(StageError, match=r"1F0 .*sets PyTorch's seed to 3 .*stage 1(?s:.)*torch\.Generator"):
                run(*plain.batch(4))


def test_a_generator_of_the_models_own_stays_its_own():
    own = torch.Generator()
    model = nn.Sequential(nn.Linear(6, 6), Calls(lambda x: x + torch.randn(x.shape, generator=own)))
    before = torch.get_rng_state()
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        found = []
        for _ in range(2):
            own.manual_seed(0)
            found.append(pipe.step(*plain.batch(4)).loss)
    assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
def test_compiled_code_stays_compiled_and_draws_the_same():
    torch._dynamo.reset()  # it stops compiling a function that other tests have had compiled often
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: dropout(x, 0.5) * 2, backend=backend)
    layers = [torch.compile(nn.Dropout(0.5), backend=backend), Calls(function), nn.Dropout(0.5)]
    layers[-1].compile(backend=backend)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), layer) for layer in layers))
    found = []
    with Pipeline(model, GPipe(3, 2), mse) as pipe:
        for _ in range(4):
            torch.manual_seed(7)
            found.append(pipe.step(*plain.batch(4)).loss)
    assert len(compiled) >= 2
    assert all(torch.equal(each, found[0]) for each in found)
    assert not is_in_torch_dispatch_mode()


def test_a_subclass_of_tensor_is_made_in_any_step():
    attention = Calls(
        lambda x: scaled_dot_product_attention(*[x[None]] * 3, causal_lower_right(2, 2), dropout_p=0.5)[0]
    )
    found = []
    with Pipeline(nn.Sequential(nn.Linear(6, 6), attention), GPipe(2, 2), mse) as pipe:
        for _ in range(3):
            torch.manual_seed(7)
            found.append(pipe.step(*plain.batch(4)).loss)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_error_leaves_a_thread_with_its_own_random_numbers():
    def fails(x):
        raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Dropout(0.5), Calls(fails)))
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        for _ in range(2):
            with pytest.raises(StageError, match="on purpose"):
                pipe.step(*plain.batch(4))
        model[1][1].function = dropout
        found = []
        for _ in range(2):
            torch.manual_seed(7)
            found.append(pipe.step(*plain.batch(4)).loss)
    assert torch.equal(*found)


CASES = [
    lambda p: dropout(p),
    lambda p: torch.native_dropout(p, 0.5, True),
    lambda p: nn.functional.rrelu(-p, training=True),
    lambda p: torch.multinomial(p, 2),
    lambda p: torch.normal(p, p),
    lambda p: torch.normal(p, 2.0),
    lambda p: torch.normal(2.0, p),
    lambda p: torch.randperm(50),
    lambda p: torch.randint(300, (9,)),
    lambda p: torch.rand(9),
    lambda p: torch.rand_like(p),
    lambda p: torch.randn_like(p),
    lambda p: torch.poisson(9 * p),
    lambda p: torch.binomial(9 * p, p),
    lambda p: torch.bernoulli(p),
    lambda p: p.clone().bernoulli_(p),
    lambda p: p.clone().cauchy_(),
    lambda p: p.clone().geometric_(0.5),
    lambda p: p.clone().log_normal_(),
    lambda p: p.clone().random_(99),
    lambda p: p.clone().exponential_(),
    lambda p: torch._standard_gamma(p),
    lambda p: torch._sample_dirichlet(p),
    lambda p: scaled_dot_product_attention(p[None], p[None], p[None], dropout_p=0.5),
    lambda p: nn.functional.gumbel_softmax(p),
]


@pytest.mark.parametrize("case", CASES)
def test_what_draws_asks_for_a_generator_alone_on_its_thread(case):
    Streams(nn.Identity())
    p = torch.rand(4, 4) / 2 + 0.25
    torch.manual_seed(7)
    plainly = case(p)
    torch.manual_seed(7)
    assert str(case(p)) == str(plainly)
    state, step, found = torch.get_rng_state(), StepStreams(7), []
    for microbatch in (0, 0, 1):
        with step.running(0, microbatch, "F", forward=True):
            found.append(str(case(p)))
        assert step.drew
    assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1] != found[2]


def test_every_operation_that_draws_is_known():
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        draws = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
        if draws and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            tagged.add(name.removeprefix("aten::"))
    draw_nothing = {name for name in tagged if "backward" in name or name == "_fused_sdp_choice" or "for_cpu" in name}
    assert tagged - draw_nothing <= set(_DRAW.split())
