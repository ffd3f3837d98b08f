"""What may pass between stages: tensors of all kinds in tuples and dicts, frozen parts, operations in place."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pipes import assert_trains, mse, refused, stepped, verified
from types import SimpleNamespace

import plain
import pytest
import torch
from strategies import in_order, with_stages
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, schedules
from pipelab.errors import LossError, StageError


def linear(does=lambda self, x: self.linear(x), **parts):
    """Return a stage with a linear layer, and what it does."""
    return plain.Made(does, linear=nn.Linear(6, 6), **parts)


def function(does):
    """Return a stage that is a function of its input."""
    return plain.Made(lambda _, x: does(x))


def fork():
    """Return a stage that gives a tuple: two tensors that learn, one of integers, one that nobody uses."""
    return linear(
        lambda self, x: (self.linear(x), torch.arange(len(x)), self.right(x), self.right(x) * 2), right=nn.Linear(6, 6)
    )


def merge():
    return linear(lambda self, x: {"sum": self.linear(x[0] + x[2]), "index": x[1], "note": "text"})


def head():
    def does(self, given):
        assert given["note"] == "text"
        return self.linear(given["sum"]) * (given["index"] + 1).unsqueeze(1)

    return linear(does)


@pytest.mark.parametrize("name", schedules)
def test_tuples_dicts_integers_and_unused_outputs_pass_between_stages(name):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(fork(), merge(), head(), nn.Tanh()), plain.batch(10)
    with Pipeline(model, with_stages(name, 4, 4), mse) as pipe:
        step = assert_trains(pipe, model, (x, y))
        assert torch.equal(pipe.forward(x), step.outputs)


def test_a_batch_may_be_a_dict_and_so_may_targets_and_outputs():
    def loss(output, target):
        return nn.functional.cross_entropy(output["labels"].flatten(0, 1), target["labels"].flatten())

    torch.manual_seed(0)
    model = nn.Sequential(
        plain.Made(lambda self, x: self.table(x["tokens"]) * x["mask"].unsqueeze(-1), table=nn.Embedding(7, 6)),
        nn.Linear(6, 6),
        plain.Made(lambda self, x: {"labels": self.linear(x), "norm": x.norm()}, linear=nn.Linear(6, 3)),
    )
    x = {"tokens": torch.randint(7, (6, 4)), "mask": torch.ones(6, 4)}
    y = {"labels": torch.randint(3, (6, 4))}
    total = plain.at_once(model, loss, x, y)
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(3, 3), loss) as pipe:
        step = pipe.step(x, y)
        torch.testing.assert_close(step.loss, total)
        assert step.outputs["labels"].shape == (6, 4, 3)
        assert step.outputs["norm"].shape == (3,)  # one for each micro-batch
        assert plain.difference(plain.taken(model), expected) <= 1e-6
        pipe.verify(x, y)


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_frozen_stages_pass_gradients_on_and_get_none(frozen):
    model, (x, y) = plain.mlp(6), plain.batch(7)
    for stage in frozen:
        model[2 * stage].requires_grad_(False)
    expected = plain.gradients(model, mse, x, y, 3)
    with Pipeline(model, OneFOneB(3, 3), mse) as pipe:
        pipe.step(x, y)
        assert plain.equal(plain.taken(model), expected)
        assert {int(name[0]) // 2 for name, each in expected.items() if each is None} == {*frozen}
        pipe.verify(x, y)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_that_is_frozen_everywhere_is_refused_as_plain_training_refuses_it(ranks):
    model = plain.mlp(6).requires_grad_(False)
    x, y = plain.batch(6)
    with pytest.raises(RuntimeError, match="does not require grad"):
        plain.at_once(model, mse, x, y)
    with Pipeline(model, OneFOneB(ranks, 3), mse) as pipe:
        with pytest.raises(StageError, match="some parameter must require a gradient") as refusal:
            pipe.step(x, y)
        assert isinstance(refusal.value.__cause__, LossError)
        model[-2].requires_grad_(True)
        assert pipe.verify(x, y).exact


@pytest.mark.parametrize("frozen", [False, True])
def test_a_batch_that_wants_its_gradient_gets_it(frozen):
    model, (x, y) = plain.mlp(6).requires_grad_(not frozen), plain.batch(7)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain.one_after_another(model, mse, theirs, y, 3)
    stepped(model, OneFOneB(3, 3), (ours, y))
    assert torch.equal(ours.grad, theirs.grad)


def test_a_loss_may_learn_where_the_model_does_not():
    scale = nn.Parameter(torch.ones(()))
    model = plain.mlp(6).requires_grad_(False)
    step = stepped(model, OneFOneB(3, 3), 6, lambda output, target: scale * mse(output, target))
    torch.testing.assert_close(scale.grad, step.loss)


PLAIN_VALUES = [None, True, 2, 0.5, 1j, "text", b"bytes", torch.float32, torch.Size([2])]
PASSES = {
    **{
        f"no parameters at stage {place}": [nn.Tanh() if each == place else nn.Linear(6, 6) for each in range(4)]
        for place in range(4)
    },
    "what it was given": [nn.Linear(6, 6), nn.Identity(), nn.Identity(), nn.Linear(6, 6)],
    "plain values": [
        nn.Linear(6, 6),
        function(lambda x: {"x": x, "plain": [*PLAIN_VALUES, x.shape, x.dtype, x.device]}),
        function(lambda given: given["x"] * given["plain"][2]),
        nn.Linear(6, 6),
    ],
}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", PASSES.values(), ids=PASSES)
def test_a_stage_may_pass_on(stages, name):
    assert verified(nn.Sequential(*stages), schedules[name](4, 5), 9).exact


@pytest.mark.parametrize("name", schedules)
def test_a_stage_may_begin_with_an_operation_in_place(name):
    torch.manual_seed(0)
    last = nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(6, 6))
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), last)
    x, y = plain.batch(8)
    plan = with_stages(name, 4, 4)
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(x, y)
        assert pipe.verify(x, y).exact or not in_order(plan)
        assert torch.equal(step.outputs, pipe.forward(x))


def test_an_operation_in_place_on_the_batch_leaves_the_batch_alone():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 6))
    x, y = plain.batch(4)
    before = x.clone()
    with Pipeline(model, GPipe(3, 2), mse) as pipe:
        pipe.step(x, y)
        pipe.forward(x)
    assert torch.equal(x, before)


def fills(x):
    """Write into what is given, with operations that nobody sees from outside."""
    x[:, 0] = 0
    x += 1
    return x


@pytest.mark.parametrize("name", schedules)
def test_a_first_stage_may_write_into_the_batch_as_in_plain_training(name):
    """The slices of one batch must not look as if they overwrote each other: a linear layer saves its input."""
    torch.manual_seed(0)
    model = nn.Sequential(function(fills), *(nn.Linear(6, 6) for _ in range(4)))
    plan = with_stages(name, 4, 4)
    x, y = plain.batch(2 * plan.microbatches)
    reference = plain.gradients(model, mse, x.clone(), y, plan.microbatches)
    with Pipeline(model, plan, mse) as pipe:
        pipe.step(x, y)
        assert plain.difference(plain.taken(model), reference) < 1e-6


def adds(self, x):
    x += 1  # autograd forbids it: what a stage is given is a leaf
    return x


def grows(self, x):
    self.scale += 1
    return x * self.scale


@pytest.mark.parametrize(
    ("does", "told"), [(grows, "modified by an inplace operation"), (adds, r"in-place[^$]*x \+= 1")]
)
def test_a_stage_that_writes_into_what_a_backward_needs_is_refused(does, told):
    stages = [nn.Linear(6, 6), plain.Made(does, scale=torch.ones(6)), nn.Linear(6, 6)]
    refused(told, stages, GPipe(3, 2), 4)


class Box:
    def __init__(self, held):
        self.held = held


@dataclass
class Record:
    held: torch.Tensor


def opens():
    return linear(lambda self, given: self.linear(given.held))


@pytest.mark.parametrize("call", ["step", "forward"])
@pytest.mark.parametrize(
    "made", [Box, Record, lambda x: (x, {"more": [SimpleNamespace(held=x)]}), lambda x: {x}, lambda x: lambda: x]
)
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_an_object_that_may_hide_tensors_is_refused(name, made, call):
    model = [nn.Linear(6, 6), linear(lambda self, x: made(self.linear(x))), opens()]
    told = "stage 1 returned an object of class (Box|Record|SimpleNamespace|set|function), and tensors inside it"
    refused(told, model, schedules[name](3, 3), 6, call=call)


def test_a_dataclass_that_pytorch_has_been_told_of_passes():
    @dataclass
    class Known:
        held: torch.Tensor

    torch.export.register_dataclass(Known)
    model = [nn.Linear(6, 6), linear(lambda self, x: Known(self.linear(x))), opens()]
    assert verified(model, schedules["zb-h1"](3, 3), 6).exact


@pytest.mark.parametrize("call", ["step", "forward"])
@pytest.mark.parametrize("returned", [None, "text", 3.0], ids=str)
def test_a_stage_that_returns_nothing_is_named_and_not_the_next_one(returned, call):
    told = rf"^1F0 on rank 1 failed: stage 1 returned {returned!r}, not a tensor: does the forward of"
    refused(told, [nn.Linear(6, 6), function(lambda _: returned), nn.Linear(6, 6)], OneFOneB(3, 2), 4, call=call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_number_types_pass_between_stages(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=dtype) for _ in range(3)))
    batch = tuple(tensor.to(dtype) for tensor in plain.batch(7))

    def loss(output, target):
        return (output - target).abs().pow(2).mean()

    with Pipeline(model, OneFOneB(3, 3), loss) as pipe:
        assert_trains(pipe, model, batch, loss)
        pipe.verify(*batch)


class WritesAgain(nn.Module):
    """Writes every micro-batch's output into the same memory, as code that saves allocations does."""

    def __init__(self, rooms, view):
        super().__init__()
        self.view, self.calls = view, 0
        self.rooms = [torch.zeros(4, 6) for _ in range(rooms)]

    def forward(self, x):
        room = self.rooms[self.calls % len(self.rooms)]
        self.calls += 1
        return (room[: len(x)] if self.view else room).copy_(x.detach() * 2)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("schedule", "rooms"), [(GPipe, 1), (GPipe, 2), (OneFOneB, 1)])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", ["step", "forward"])
def test_a_stage_that_writes_into_an_output_that_it_has_handed_on_is_refused(call, place, schedule, rooms, view):
    stages = [nn.Linear(6, 6), nn.Linear(6, 6)]
    stages[place] = WritesAgain(rooms, view)
    scale = nn.Parameter(torch.ones(()))  # so that there is something to learn in the last place, too
    loss = (lambda output, target: mse(scale * output, target)) if place else mse
    told = rf"^{place}F{rooms} on rank {place} failed: .*wrote into its output for an earlier micro-batch"
    refused(told, stages, schedule(2, 4), 16, loss, call)


class Recycles(nn.Module):
    """Returns what it computes, and a copy of it in memory that it uses again, in a way that PyTorch does not count."""

    def __init__(self, way="numpy", learns=True):
        super().__init__()
        self.way, self.linear, self.quiet = way, nn.Linear(6, 6).requires_grad_(learns), False
        self.room, self.last, self.calls = torch.zeros(16, 6), torch.zeros(4, 6), 0

    def forward(self, x):
        made = self.linear(x)
        if self.quiet:
            return made, made.detach()
        if self.way == "last":
            self.last.data.copy_(made)
            self.last = made
            return made, made.detach()
        self.calls += 1
        start = self.calls % 3 if self.way == "windows" else 0
        self.room[start : start + len(x)].numpy()[:] = made.detach().numpy()
        return made, self.room[start : start + len(x)]


def sums(writes=False):
    """Return a stage that adds up what it is given, and may write into it first."""

    def does(self, given):
        one, other = given
        if writes:
            other.mul_(2)
        return self.linear(one + other)

    return linear(does)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("way", ["numpy", "windows", "last"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_what_a_stage_has_handed_on_is_compared_before_its_backward(name, way, learns):
    stages = [Recycles(way, learns), sums(), nn.Linear(6, 6), nn.Linear(6, 6)]
    told = r"(?s)^0[BI]\d on rank 0 failed: .*written into.*return a clone.*stage 0, micro-batch \d"
    refused(told, stages, with_stages(name, 4, 8), 32)


def test_what_the_next_stage_writes_into_what_it_is_given_is_found_too():
    stages = [Recycles(), sums(writes=True)]
    stages[0].quiet = True
    refused(r"(?s)^0B.*written into.*clone", stages, GPipe(2, 4), 16)


def test_later_steps_compare_no_contents_and_verify_does():
    x, y = plain.batch(16)
    stages = [Recycles(), sums()]
    stages[0].quiet = True
    with Pipeline(stages, GPipe(2, 4), mse) as pipe:
        pipe.step(x, y)
        pipe.forward(x)
        stages[0].quiet = False
        pipe.step(x, y)
        with pytest.raises(StageError, match="written into"):
            pipe.verify(x, y)


NUMBERS = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.complex64)


def of_every_type(self, x):
    """Give tensors of every type, and such as have no elements, no dimensions, gaps, or the same memory often."""
    made = self.linear(x)
    types = [*NUMBERS, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex128]
    odd = [x[:, :0], x.sum(), x.T, x[:1].expand(3, 6), x[:, ::2], torch.complex(x, x).conj(), x.to_sparse(), None]
    return made, [x.detach().abs().to(each) for each in types], odd, made.to(torch.bfloat16), self.linear.weight


def test_outputs_of_every_type_are_compared_and_found_the_same():
    x, y = plain.batch(8)
    stages = [linear(of_every_type), function(lambda given: given[0] + given[3].float())]
    with Pipeline(stages, GPipe(2, 4), mse) as pipe:
        for _ in range(3):
            pipe.step(x, y)
        assert pipe.verify(x, y).largest_difference <= 1e-6


def test_what_a_stage_hands_on_is_not_held_for_its_guard():
    seen = []
    sees = function(lambda x: seen.append(weakref.ref(x)) or x * 1)
    with Pipeline([nn.Linear(6, 6), sees], GPipe(2, 4), mse) as pipe, torch.no_grad():
        pipe.forward(plain.batch(16)[0])
    assert [each() for each in seen] == [None] * 4


IN_PLACE = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))
CONSTANT = plain.Made(lambda self, x: self.rows.expand(len(x), -1), rows=nn.Parameter(torch.randn(1, 6)))


@pytest.mark.parametrize(
    "stages",
    [
        [nn.Identity(), IN_PLACE],
        [nn.ReLU(inplace=True), IN_PLACE],
        [nn.Flatten(), IN_PLACE],
        [CONSTANT, nn.Linear(6, 6)],  # the same memory again, into which nobody writes
    ],
)
def test_an_evaluation_may_pass_on_what_it_was_given_and_write_into_its_own(stages):
    x, _ = plain.batch(16)
    with Pipeline(stages, GPipe(2, 4), mse) as pipe:
        found = pipe.forward(x.clone())
    torch.testing.assert_close(found, nn.Sequential(*stages)(x).detach())


def test_a_sparse_tensor_passes_between_stages_in_a_step_and_in_an_evaluation():
    x, y = plain.batch(8)
    model = nn.Sequential(
        linear(lambda self, x: (self.linear(x), x.detach().relu().to_sparse())),
        function(lambda given: given[0] + given[1].to_dense()),
    )
    with Pipeline(model, GPipe(2, 4), mse) as pipe:
        torch.testing.assert_close(pipe.step(x, y).outputs, model(x).detach())
        torch.testing.assert_close(pipe.forward(x), model(x).detach())


@pytest.mark.parametrize(
    ("loss", "target", "kind"),
    [(mse, torch.randn(8), "float32"), (nn.CrossEntropyLoss(), torch.full((8,), 99), "int64")],
    ids=["size", "class"],
)
def test_an_error_in_the_loss_says_so_with_what_it_was_given(loss, target, kind):
    told = rf"\n  in the loss of an output \[2, 3\] float32 and a target \[2\] {kind}\n  at "
    refused(told, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), GPipe(2, 4), (torch.randn(8, 6), target), loss)
