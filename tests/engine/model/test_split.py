"""Models become stages: contiguous, even, and with the model's own parameters."""

from __future__ import annotations

import itertools
import logging
import warnings
from importlib import import_module
from pipes import assert_trains, mse, no_trace, stepped, verified

import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipelab import GPipe, OneFOneB, Pipeline, replicate, split
from pipelab.engine.model.split import cut
from pipelab.errors import SplitError, UsageError

# --- cut: deal layers out


def loads(weights, bounds):
    return [sum(weights[start:stop]) for start, stop in bounds]


def every_cut(count, into):
    """Return every way to cut `count` layers into `into` parts, none empty."""
    for inner in itertools.combinations(range(1, count), into - 1):
        yield list(itertools.pairwise([0, *inner, count]))


@st.composite
def layers_and_parts(draw):
    weights = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@given(layers_and_parts())
def test_a_cut_is_the_best_of_all_cuts(case):
    weights, into = case
    bounds = cut(weights, into)

    def rank(bounds):
        parts = loads(weights, bounds)
        return max(parts), sum(part**2 for part in parts), [start - stop for start, stop in bounds]

    assert bounds == min(every_cut(len(weights), into), key=rank)


@given(count=st.integers(1, 60), into=st.integers(1, 60))
def test_equal_layers_differ_by_at_most_one_the_first_parts_taking_the_extra(count, into):
    if into <= count:
        each, more = divmod(count, into)
        assert [stop - start for start, stop in cut([1.0] * count, into)] == [
            each + (part < more) for part in range(into)
        ]


def test_twenty_layers_in_three_are_7_7_6():
    assert split(plain.mlp(20), 3).sizes == (7, 7, 6)


# --- split: sequences and lists


def test_stages_hold_the_models_own_layers_in_order():
    model = plain.mlp(7)
    stages = split(model, 3)
    assert [layer for module in stages.modules for layer in module] == list(model)
    assert len(stages) == 3


def test_stages_show_their_layers_and_parameters_in_few_characters():
    model = nn.Sequential(nn.Linear(99, 100), nn.ReLU(), nn.Linear(100, 120), nn.Linear(120, 9_000), nn.LazyLinear(2))
    stages = split(model, 4)
    assert stages.sizes == (2, 1, 1, 1)
    assert repr(stages) == "Stages(2, 1, 1, 1 layers; 10k, 12.1k, 1.09M, 0 parameters, the largest 3.9 times the mean)"


def test_a_split_by_parameters_evens_the_parameters_out():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    assert split(model, 2, by="parameters").sizes == (1, 3)
    assert split(model, 2, by="layers").sizes == (2, 2)


class Slow(nn.Module):
    def forward(self, x):
        for _ in range(200):
            x = x + 0.001
        return x


def test_a_split_by_time_puts_a_slow_layer_by_itself_and_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(
        Slow(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(6, 6)
    )
    with no_trace(model):
        assert split(model, 2, by="time", example=plain.batch(8)[0]).sizes == (1, 5)


def test_a_split_by_time_takes_integer_inputs():
    model = nn.Sequential(nn.Embedding(5, 6), Slow(), nn.Linear(6, 6))
    assert len(split(model, 2, by="time", example=torch.tensor([[1, 2], [3, 4]]))) == 2


def test_a_list_of_modules_is_one_stage_each():
    modules = [plain.mlp(3), nn.Linear(6, 6)]
    assert split(modules, 2).modules == modules
    with pytest.raises(SplitError, match="2 stage modules for 3 stages"):
        split(modules, 3)
    with pytest.raises(TypeError, match="str is not a Module subclass"):
        split([nn.Linear(6, 6), "relu"], 2)


def test_what_was_split_is_taken_as_it_is():
    stages = split(plain.mlp(6), 3, by="parameters")
    assert split(stages, 3) is stages
    with pytest.raises(SplitError, match="has 3 stages, but the plan has 2"):
        Pipeline(stages, GPipe(2, 2), mse)


def test_a_layer_in_two_stages_is_refused_with_what_to_do():
    shared = nn.Linear(6, 6)
    with pytest.raises(SplitError, match=r"(?s)layer '0' is used by stage 0 and stage 2.*second.weight = first.weight"):
        split([shared, nn.Linear(6, 6), nn.Sequential(nn.Tanh(), shared)], 3)
    assert len(split(nn.Sequential(shared, nn.Tanh(), shared), 1)) == 1


def test_a_layer_without_parameters_may_stand_twice():
    activation = nn.Tanh()
    assert verified(nn.Sequential(nn.Linear(6, 6), activation, nn.Linear(6, 6), activation), OneFOneB(4, 4)).exact


def test_a_sequence_with_a_constructor_of_its_own_is_a_sequence():
    class Network(nn.Sequential):
        def __init__(self, width):
            super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    assert split(Network(6), 2).sizes == (2, 1)
    verified(Network(6), GPipe(3, 2), 4)


def test_a_sequence_with_a_forward_of_its_own_is_traced():
    class Skipping(nn.Sequential):
        """Dealing out its layers would lose what it does besides."""

        def forward(self, x):
            return super().forward(x) + x

    model, (x, y) = Skipping(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), plain.batch(6)
    with pytest.raises(SplitError, match="Skipping is not a plain nn.Sequential"):
        split(model, 2)
    verified(split(model, 2, example=x[:2]), GPipe(2, 3), (x, y))


# --- split: any model, by PyTorch's tracer


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)))


class Residual(nn.Module):
    """Residual blocks, and one connection that skips several of them."""

    def __init__(self, width=6, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        x = first = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x + first))


def layers(does, many=3, **parts):
    """Return a model of linear layers, and what it does with them."""
    torch.manual_seed(0)
    return plain.Made(does, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(many)), **parts)


def test_a_traced_model_gives_the_plain_gradients():
    model, (x, y) = Residual().eval(), plain.batch(12)
    stages = split(model, 3, example=x[:3])
    assert sum(stages.sizes) == 7
    with Pipeline(stages, OneFOneB(3, 4), mse) as pipe:
        step = assert_trains(pipe, model, (x, y), within=1e-6)
        torch.testing.assert_close(step.outputs, model(x).detach())
        assert list(pipe.state_dict()) == list(model.state_dict())
        pipe.verify(x, y)


def test_tracing_leaves_the_model_unmodified():
    model = Residual()
    x, _ = plain.batch(4)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    identities = [id(parameter) for parameter in model.parameters()]
    levels = [logging.getLogger(name).level for name in ("torch.distributed.pipelining", "torch.export")]
    with no_trace(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        split(model, 2, by="parameters", example=x)
        split(model, 3, by="parameters", example=x)
        split(model, 2, by="time", example=x)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert [logging.getLogger(name).level for name in ("torch.distributed.pipelining", "torch.export")] == levels
    assert model(x).shape == x.shape


@pytest.mark.parametrize("schedule", [OneFOneB(3, 5), replicate(GPipe(3, 5), 2)], ids=["1f1b", "replicas"])
def test_a_traced_model_takes_any_number_of_rows(schedule):
    model, (x, y) = Residual().eval(), plain.batch(80)
    with Pipeline(split(model, 3, example=x[:3]), schedule, mse) as pipe:
        for rows in (37, 80, 12, 37):
            assert pipe.verify(x[:rows], y[:rows]).largest_difference <= 1e-6
            torch.testing.assert_close(pipe.forward(x[:rows]), model(x[:rows]).detach())


def test_stages_that_cannot_tell_numbers_of_rows_apart_are_refused():
    def does(self, x):
        entry, body, head = self.layers
        return head(body(entry(x).sum(0))).expand(len(x), 6)

    x, y = plain.batch(6)
    with Pipeline(split(layers(does), 2, example=x[:3]), GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)
        with pytest.raises(SplitError, match="stage 1 takes values of the same shapes with 2 rows"):
            pipe.step(x[:4], y[:4])


# --- blocks that hold layers


class Encoder(nn.Module):
    """Holds its layers as torchvision's transformers do, and calls them as one or one by one."""

    def __init__(self, box, many, looped, block=lambda: nn.Linear(8, 8)):
        super().__init__()
        layers = [block() for _ in range(many)]
        self.layers = box(*layers) if box is nn.Sequential else box(layers)
        self.norm, self.looped = nn.LayerNorm(8), looped

    def forward(self, x):
        for layer in self.layers if self.looped else [self.layers]:
            x = layer(x)
        return self.norm(x)


def seeing(encoder):
    """Return a model as torchvision's VisionTransformer is: entry, encoder, head."""
    return plain.Made(
        lambda self, x: self.head(self.encoder(self.entry(x))),
        entry=nn.Linear(8, 8),
        encoder=encoder,
        head=nn.Linear(8, 5),
    )


@pytest.mark.parametrize(
    ("box", "looped"), [(nn.ModuleList, True), (nn.Sequential, True), (nn.Sequential, False)], ids=str
)
@pytest.mark.parametrize(("by", "sizes"), [("parameters", (2, 1, 1, 3)), ("layers", (2, 2, 2, 1))])
def test_a_block_is_cut_inside_alike_however_it_holds_its_layers(box, looped, by, sizes):
    torch.manual_seed(0)
    model, x, y = seeing(Encoder(box, 4, looped)), torch.randn(8, 8), torch.randn(8, 5)
    stages = split(model, 4, by=by, example=x[:2])
    assert stages.sizes == sizes
    assert verified(stages, OneFOneB(4, 4), (x, y)).largest_difference < 1e-6


def residual():
    return plain.Made(lambda self, x: x + self.mlp(x), mlp=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))


def test_a_block_too_large_for_a_stage_is_cut_between_its_own_blocks_and_not_inside_those():
    model, x = seeing(Encoder(nn.Sequential, 6, looped=False, block=residual)), torch.randn(4, 8)
    stages = split(model, 2, example=x)
    assert stages.sizes == (5, 4)  # of the entry, six blocks, the norm and the head
    assert repr(stages) == "Stages(5, 4 layers; 648, 349 parameters)"
    blocks = [residual() for _ in range(4)]
    even = plain.Made(lambda self, x: self.d(self.c(self.b(self.a(x)))), **dict(zip("abcd", blocks, strict=True)))
    assert split(even, 2, example=x).sizes == (2, 2)
    assert sum(split(even, 5, example=x).sizes) == 12  # too few blocks: their layers
    assert split(even, at=["b", "c.mlp.2"], example=x).sizes == (1, 3, 2)


def test_a_layer_of_a_sequence_that_is_too_large_for_a_stage_is_cut_inside_if_there_is_an_example():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model, x = nn.Sequential(nn.Linear(8, 16), encoder, nn.Linear(16, 8)), torch.randn(8, 5, 8)
    with pytest.warns(UserWarning, match=r"9032 parameters, 2 times the 4592 .*\n  try: .*example=x.* inside '1' too"):
        assert split(model, 2, by="parameters").sizes == (1, 2)
    with pytest.raises(SplitError, match=r"too few for 4 stages: .*\n  try: .*example=x.* inside '1' too"):
        split(model, 4)
    stages = split(model, 2, example=x[:2])
    assert repr(stages) == "Stages(3, 3 layers; 4592, 4584 parameters)"
    assert verified(stages, OneFOneB(2, 4), (x, torch.randn(8, 5, 8))).largest_difference < 1e-6
    even = nn.Sequential(*(Encoder(nn.Sequential, 2, looped=False) for _ in range(4)))
    assert split(even, 2, example=torch.randn(2, 8)).modules[0][0] is even[0]  # even as it is: not traced


def test_a_sequence_that_its_parameters_would_cut_more_evenly_is_warned_of():
    model = nn.Sequential(*plain.mlp(3), nn.Linear(6, 30), *(nn.Linear(30, 30) for _ in range(3)))
    with pytest.warns(UserWarning, match=r"the largest stage of nn.Sequential has .* times .*\n  try: .*'parameters'"):
        split(model, 2)


# --- what the tracer would lose without a word


class TiedTokens(nn.Module):
    """GPT-2's way: the embedding of the tokens is the head's weight, too."""

    def __init__(self, function=False):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.function = function
        if not function:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = torch.tanh(self.body(self.embedding(tokens)))
        return x @ self.embedding.weight.T + self.head(x) if self.function else self.head(x)


@pytest.mark.parametrize(("function", "stages"), [(False, 1), (False, 3), (True, 3)])
def test_a_parameter_that_is_used_twice_in_one_traced_stage_or_two_trains_as_one(function, stages):
    torch.manual_seed(0)
    model, tokens = TiedTokens(function), torch.arange(8)
    with Pipeline(split(model, stages, example=tokens[:4]), GPipe(stages, 2), nn.CrossEntropyLoss()) as pipe:
        proof = pipe.verify(tokens, tokens)
        assert (proof.parameters, proof.largest_difference <= 1e-6) == (len(list(model.parameters())), True)
        pipe.step(tokens, tokens)
        model.embedding.weight.data += 1  # the stages see it
        torch.testing.assert_close(pipe.forward(tokens), model(tokens))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_activation_checkpoint_that_the_tracer_would_drop_is_refused(reentrant):
    class Checkpointed(Residual):
        def forward(self, x):
            x = self.entry(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.training else block(x)
            return self.head(x)

    x, _ = plain.batch(4)
    with pytest.raises(SplitError, match=r"(?s)Checkpointed .*checkpoint.* list of stage modules"):
        split(Checkpointed(), 2, example=x)
    split(Checkpointed().eval(), 2, example=x)


def stateful(scale):
    """Return a model that may compute something else in each call."""
    return layers(lambda self, x: self.layers[2](scale(self) * self.layers[1](self.layers[0](x))))


def counted(model):
    model.layers[1].calls = getattr(model.layers[1], "calls", 0) + 1
    return model.layers[1].calls


NUMBERS = itertools.count(1)


@pytest.mark.parametrize(
    ("scale", "why"),
    [(counted, r"as its layers\.1\.calls does"), (lambda _: next(NUMBERS), "for instance by Python's own")],
)
def test_a_forward_that_changes_from_call_to_call_is_refused(scale, why):
    model = stateful(scale)
    model.layers[1].calls = 0
    with pytest.raises(SplitError, match=rf"(?s)other outputs than Made.*from call to call, {why}"):
        split(model, 2, example=plain.batch(4)[0])


def test_what_is_made_once_in_the_first_call_is_no_state():
    def once(model):
        model.scale_made = getattr(model, "scale_made", 2)
        return model.scale_made

    x, y = plain.batch(4)
    assert verified(split(stateful(once), 2, example=x[:2]), GPipe(2, 2), (x, y)).largest_difference <= 1e-6


def test_another_training_mode_is_traced_when_it_comes():
    model = Residual()
    x, y = plain.batch(4)
    with Pipeline(split(model, 2, example=x[:2]), GPipe(2, 2), mse) as pipe:
        assert pipe.verify(x, y).unproven  # dropout
        model.dropout.eval()
        assert pipe.verify(x, y).whole_batch_difference < 1e-5
        model.train()
        assert not torch.equal(pipe.step(x, y).outputs, pipe.step(x, y).outputs)


def test_an_evaluation_traces_again_for_other_rows_and_the_other_mode():
    model = Residual()
    x, y = plain.batch(4)
    more, _ = plain.batch(10)
    with Pipeline(split(model, 2, example=x[:2]), GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)
        model.eval()
        torch.testing.assert_close(pipe.forward(x), model(x).detach())  # dropout is off
        torch.testing.assert_close(pipe.forward(more), model(more).detach())
        assert not model.training
        torch.testing.assert_close(pipe.forward(x[:3]), model(x[:3]).detach())
        evaluated = pipe.forward(x)
        model.train()
        assert not torch.allclose(pipe.step(x, y).outputs, evaluated)  # the stages of training are back, with dropout


def skips(self, x):
    """The input and the first layer's output are needed again in the last layers."""
    entry, left, right, head = self.layers
    first = entry(x)
    second = torch.tanh(left(first))
    third = torch.tanh(right(second))
    return head(third * torch.sigmoid(first) + x) + second


def early(self, x):
    """Return what an earlier stage makes, too."""
    first = self.layers[0](x)
    return self.layers[3](self.layers[2](self.layers[1](first))), first


def again(self, x):
    """One norm runs after each layer."""
    for layer in self.layers[:3]:
        x = self.norm(layer(x))
    return self.layers[3](x)


def in_place(self, x):
    for layer in self.layers:
        x = self.relu(layer(x))
    return x


def loss_of_both(made, target):
    return mse(made[0], target) + mse(made[1], target) if isinstance(made, tuple) else mse(made, target)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("does", [skips, early, again, in_place])
def test_a_value_that_skips_stages_and_a_layer_that_runs_again_train_as_plainly(does, stages):
    model, (x, y) = layers(does, 4, norm=nn.LayerNorm(6), relu=nn.ReLU(inplace=True)), plain.batch(8)
    with Pipeline(split(model, stages, example=x[:2]), OneFOneB(stages, 4), loss_of_both) as pipe:
        assert_trains(pipe, model, (x, y), loss_of_both, within=1e-6)
        torch.testing.assert_close(pipe.forward(x), model(x))


def test_a_traced_model_may_return_several_values_by_name():
    def does(self, x):
        code = self.layers[1](self.layers[0](x))
        return {"prediction": self.layers[2](code), "code": code}

    def loss(output, target):
        return mse(output["prediction"], target) + 0.1 * output["code"].pow(2).mean()

    x, y = plain.batch(6)
    with Pipeline(split(layers(does), 2, example=x[:2]), OneFOneB(2, 3), loss) as pipe:
        pipe.verify(x, y)
        assert pipe.step(x, y).outputs.keys() == {"prediction", "code"}


def test_a_traced_model_may_take_several_arguments():
    model = layers(lambda self, x, scale: self.layers[1](torch.tanh(self.layers[0](x)) * scale), 2)
    x, y = plain.batch(4)
    scale = torch.arange(4.0).reshape(4, 1)
    loss = mse(model(x, scale), y).detach()
    with Pipeline(split(model, 2, example=(x[:2], scale[:2])), GPipe(2, 2), mse) as pipe:
        torch.testing.assert_close(pipe.step((x, scale), y).loss, loss)
        pipe.verify((x, scale), y)


def test_what_the_tracer_cannot_follow_is_told():
    def branches(self, x):
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else self.layers[1](-x)

    with pytest.raises(SplitError, match=r"(?s)Made with \[4, 6\] float32: .*list of stage modules"):
        split(layers(branches, 2), 2, example=plain.batch(4)[0])


def test_an_example_that_does_not_fit_says_so_and_at_which_layer_and_leaves_no_trace():
    body = nn.Sequential(nn.Linear(5, 6), nn.Linear(7, 6))
    model = plain.Made(lambda self, x: self.body(self.norm(x)), norm=nn.BatchNorm1d(5), body=body)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        split(model, into=2, example=torch.randn(4, 5))
    (note,) = raised.value.__notes__
    assert note.endswith("in layer body.1, Linear(in_features=7, out_features=6, bias=True)")
    assert model.norm.num_batches_tracked == 0


def test_tracing_leaves_the_mode_of_every_module_as_it_was():
    first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = plain.Made(lambda self, x: self.second(self.first(x)), first=first, second=nn.Linear(4, 4))
    first.eval()  # frozen on purpose
    split(model, into=2, example=torch.randn(2, 4))
    assert [module.training for module in model.modules()] == [True, False, False, False, True]


def test_what_was_traced_for_evaluation_is_kept():
    model = layers(lambda self, x: self.layers[1](self.drop(self.layers[0](x))), 2, drop=nn.Dropout(0.5))
    x, _ = plain.batch(4)
    stages = split(model, into=2, example=x[:2])
    with Pipeline(stages, GPipe(2, 2), mse) as pipe:
        model.eval()
        first = pipe.forward(x)
        assert stages.ready([x[:2], x[2:]], [2, 2]) is stages.ready([x[:2], x[2:]], [2, 2])
        torch.testing.assert_close(first, model(x))


@pytest.mark.parametrize("kind", ["forward", "forward-pre", "full-backward", "full-backward-pre"])
def test_a_hook_on_the_whole_model_is_refused_because_it_would_never_run(kind):
    model, (x, y) = plain.mlp(4), plain.batch(4)
    told = rf"the whole model has 1 {kind.removeprefix('full-')} hook .* register the hook on a layer"
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        handle = getattr(model, f"register_{kind.replace('-', '_')}_hook")(lambda *_: None)
        for call in (lambda: pipe.step(x, y), lambda: pipe.forward(x), lambda: split(model, into=2)):
            with pytest.raises(SplitError, match=told):
                call()
        handle.remove()
        pipe.step(x, y)


@pytest.mark.parametrize("package", ["pipelab.trace", "pipelab_course.hw3"])
def test_a_hook_of_pipelabs_own_is_not_refused(package):
    hook, model = lambda *_: None, plain.mlp(4)
    hook.__module__ = import_module(package).__name__
    model.register_forward_hook(hook)
    assert len(split(model, into=2)) == 2


def test_a_hook_on_a_layer_runs_for_every_microbatch():
    model, seen = plain.mlp(4), []
    model[2].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    stepped(model, GPipe(2, 2), 4)
    assert seen == ["forward"] * 2 + ["backward"] * 2


def test_a_backward_hook_is_refused_where_the_tracer_would_lose_it():
    model = Residual()
    model.get_submodule(next(name for name, _ in model.named_children())).register_full_backward_hook(lambda *_: None)
    with pytest.raises(SplitError, match=r"layer '.*' has 1 backward hook .* tracer drops it"):
        split(model, into=2, example=torch.randn(2, 6))


TWICE = plain.Made(lambda self, x: self.head(self.inner(self.inner(x))), inner=nn.Linear(6, 6), head=nn.Linear(6, 6))


NORM = nn.BatchNorm1d(4, affine=False)


@pytest.mark.parametrize(
    ("model", "into", "more", "told"),
    [
        (plain.mlp(4), 2, {"by": "time"}, "pass example=x"),
        (plain.mlp(4), 2, {"by": "size"}, "by='size': expected 'layers', 'parameters' or 'time'"),
        (plain.mlp(3), 4, {}, "nn.Sequential has 3 layers, too few for 4 stages: use at most 3 stages"),
        (nn.Sequential(NORM, NORM), 2, {}, "buffer '0.running_mean' is used by stage 0 and stage 1"),
        (Residual, 2, {}, "^expected a module, .* got the class Residual$"),
        (None, 2, {}, "^expected a module, or a list of one per stage, got None$"),
        (3, 2, {}, "^expected a module, or a list of one per stage, got 3$"),
        (nn.DataParallel(plain.mlp(2)), 2, {}, r"DataParallel runs the whole model on every device.*model\.module"),
        (Residual(), 2, {}, r"(?s)Residual is not a plain nn.Sequential.*example=x"),
        (Residual(), 8, {"example": torch.zeros(4, 6)}, "Residual has 7 layers, too few for 8 stages"),
        (TWICE, 2, {"example": torch.zeros(4, 6)}, "too few for 2 stages.*'inner', which runs 2 times"),
        *((plain.mlp(3), into, {}, "into") for into in (0, -1, 2.0, True, None)),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(model, into, more, told):
    with pytest.raises((SplitError, UsageError), match=told):
        split(model, into, **more)
