"""What may pass between stages: tensors of all kinds in tuples and dicts, frozen parts, operations in place."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import plain
import pytest
import torch
from strategies import in_order, with_stages
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, schedules
from pipelab.errors import LossError, StageError

mse = nn.functional.mse_loss


class Fork(nn.Module):
    """Gives a tuple: two tensors that learn, one of integers, one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.left(x), torch.arange(len(x)), self.right(x), self.right(x) * 2


class Merge(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        left, index, right, _ = given
        return {"sum": self.linear(left + right), "index": index, "note": "text"}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        assert given["note"] == "text"
        return self.linear(given["sum"]) * (given["index"] + 1).unsqueeze(1)


@pytest.mark.parametrize("name", schedules)
def test_tuples_dicts_integers_and_unused_outputs_pass_between_stages(name):
    torch.manual_seed(0)
    model = nn.Sequential(Fork(), Merge(), Head(), nn.Tanh())
    x, y = plain.batch(10)
    plan = with_stages(name, 4, 4)
    expected = plain.gradients(model, mse, x, y, plan.microbatches)
    with Pipeline(model, plan, mse) as pipe:
        step = pipe.step(x, y)
        gradients = plain.taken(model)
        assert plain.equal(gradients, expected) if in_order(plan) else plain.difference(gradients, expected) <= 1e-6
        assert torch.equal(pipe.forward(x), step.outputs)


def test_a_batch_may_be_a_dict_and_so_may_targets_and_outputs():
    class Entry(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 6)

        def forward(self, batch):
            return self.embedding(batch["tokens"]) * batch["mask"].unsqueeze(-1)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return {"labels": self.linear(x), "norm": x.norm()}

    def loss(output, target):
        return nn.functional.cross_entropy(output["labels"].flatten(0, 1), target["labels"].flatten())

    torch.manual_seed(0)
    model = nn.Sequential(Entry(), nn.Linear(6, 6), Heads())
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
    model = plain.mlp(6)
    for stage in frozen:
        model[2 * stage].requires_grad_(False)
    x, y = plain.batch(7)
    plain.one_after_another(model, mse, x, y, 3)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with Pipeline(model, OneFOneB(3, 3), mse) as pipe:
        pipe.step(x, y)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None)
            assert parameter.grad is None or torch.equal(parameter.grad, expected[name])
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


def test_a_frozen_model_may_pass_gradients_to_its_input():
    model = plain.mlp(6).requires_grad_(False)
    x, y = plain.batch(6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain.one_after_another(model, mse, theirs, y, 3)
    with Pipeline(model, OneFOneB(3, 3), mse) as pipe:
        pipe.step(ours, y)
    assert torch.equal(ours.grad, theirs.grad)


def test_a_loss_may_learn_where_the_model_does_not():
    model = plain.mlp(6).requires_grad_(False)
    x, y = plain.batch(6)
    scale = nn.Parameter(torch.ones(()))
    with Pipeline(model, OneFOneB(3, 3), lambda output, target: scale * mse(output, target)) as pipe:
        step = pipe.step(x, y)
    torch.testing.assert_close(scale.grad, step.loss)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_stage_may_have_no_parameters(place):
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
    layers.insert(place, nn.Tanh())
    with Pipeline(nn.Sequential(*layers), OneFOneB(4, 5), mse) as pipe:
        assert pipe.verify(*plain.batch(9)).exact


def test_a_stage_may_hand_on_what_it_was_given():
    with Pipeline([nn.Linear(6, 6), nn.Identity(), nn.Identity(), nn.Linear(6, 6)], OneFOneB(4, 5), mse) as pipe:
        assert pipe.verify(*plain.batch(9)).exact


@pytest.mark.parametrize("name", schedules)
def test_a_stage_may_begin_with_an_operation_in_place(name):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(6, 6)),
    )
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


class Fills(nn.Module):
    """Writes into what it is given, with operations of its own that nobody sees from outside."""

    def forward(self, x):
        x[:, 0] = 0
        x += 1
        return x


@pytest.mark.parametrize("name", schedules)
def test_a_first_stage_may_write_into_the_batch_as_in_plain_training(name):
    """The slices of one batch must not look as if they overwrote each other: a linear layer saves its input."""
    torch.manual_seed(0)
    model = nn.Sequential(Fills(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    plan = with_stages(name, 4, 4)
    x, y = plain.batch(2 * plan.microbatches)
    reference = plain.gradients(model, mse, x.clone(), y, plan.microbatches)
    with Pipeline(model, plan, mse) as pipe:
        pipe.step(x, y)
        assert plain.difference(plain.taken(model), reference) < 1e-6


def test_a_stage_that_writes_into_what_a_backward_needs_is_refused():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x):
            self.scale += 1
            return x * self.scale

    model = nn.Sequential(nn.Linear(6, 6), Grows(), nn.Linear(6, 6))
    with Pipeline(model, GPipe(2, 2), mse) as pipe, pytest.raises(StageError, match="modified by an inplace operation"):
        pipe.step(*plain.batch(4))


class Box:
    def __init__(self, held):
        self.held = held


@dataclass
class Record:
    held: torch.Tensor


class Gives(nn.Module):
    """Gives an object with its output in it, or takes it out again."""

    def __init__(self, made):
        super().__init__()
        self.linear, self.made = nn.Linear(6, 6), made

    def forward(self, given):
        return self.made(self.linear(given))


class Opens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        return self.linear(given.held)


@pytest.mark.parametrize(
    "made", [Box, Record, lambda x: (x, {"more": [SimpleNamespace(held=x)]}), lambda x: {x}, lambda x: lambda: x]
)
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_an_object_that_may_hide_tensors_is_refused(name, made):
    model = [nn.Linear(6, 6), Gives(made), Opens()]
    told = "stage 1 returned an object of class (Box|Record|SimpleNamespace|set|function), and tensors inside it"
    with Pipeline(model, schedules[name](3, 3), mse) as pipe:
        with pytest.raises(StageError, match=told):
            pipe.step(*plain.batch(6))
        with pytest.raises(StageError, match=told):
            pipe.forward(plain.batch(6)[0])


def test_plain_values_pass_beside_tensors():
    class Passes(nn.Module):
        def forward(self, x):
            return {"x": x, "plain": [None, True, 2, 0.5, 1j, "text", b"bytes", x.shape, x.dtype, x.device]}

    class Uses(nn.Module):
        def forward(self, given):
            return given["x"] * given["plain"][2]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Passes(), Uses(), nn.Linear(6, 6))
    with Pipeline(model, schedules["zb-h1"](4, 4), mse) as pipe:
        assert pipe.verify(*plain.batch(8)).exact


def test_a_dataclass_that_pytorch_has_been_told_of_passes():
    @dataclass
    class Known:
        held: torch.Tensor

    torch.export.register_dataclass(Known)
    with Pipeline([nn.Linear(6, 6), Gives(Known), Opens()], schedules["zb-h1"](3, 3), mse) as pipe:
        assert pipe.verify(*plain.batch(6)).exact


@pytest.mark.parametrize("returned", [None, "text", 3.0], ids=str)
def test_a_stage_that_returns_nothing_is_named_and_not_the_next_one(returned):
    class Forgets(nn.Module):
        def forward(self, x):
            return returned

    with Pipeline([nn.Linear(6, 6), Forgets(), nn.Linear(6, 6)], OneFOneB(3, 2), mse) as pipe:
        told = rf"^1F0 on rank 1 failed: stage 1 returned {returned!r}, not a tensor: does the forward of"
        with pytest.raises(StageError, match=told):
            pipe.step(*plain.batch(4))
        with pytest.raises(StageError, match=told):
            pipe.forward(plain.batch(4)[0])


def test_a_stage_that_writes_into_its_input_by_hand_is_told_its_line():
    class Adds(nn.Module):
        def forward(self, x):
            x += 1  # autograd forbids it: what a stage is given is a leaf
            return x

    with (
        Pipeline([nn.Linear(6, 6), Adds()], GPipe(2, 2), mse) as pipe,
        pytest.raises(StageError, match=r"in-place[^$]*x \+= 1"),
    ):
        pipe.step(*plain.batch(4))


def test_a_batch_that_wants_its_gradient_gets_it():
    model = plain.mlp(4)
    x, y = plain.batch(7)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain.one_after_another(model, mse, theirs, y, 3)
    with Pipeline(model, OneFOneB(2, 3), mse) as pipe:
        pipe.step(ours, y)
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_number_types_pass_between_stages(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=dtype) for _ in range(3)))
    x, y = (tensor.to(dtype) for tensor in plain.batch(7))

    def loss(output, target):
        return (output - target).abs().pow(2).mean()

    expected = plain.gradients(model, loss, x, y, 3)
    with Pipeline(model, OneFOneB(3, 3), loss) as pipe:
        pipe.step(x, y)
        assert plain.equal(plain.taken(model), expected)
        pipe.verify(x, y)


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
    x, y = plain.batch(16)
    stages = [nn.Linear(6, 6), nn.Linear(6, 6)]
    stages[place] = WritesAgain(rooms, view)
    scale = nn.Parameter(torch.ones(()))  # so that there is something to learn in the last place, too
    loss = (lambda output, target: mse(scale * output, target)) if place else mse
    told = rf"^{place}F{rooms} on rank {place} failed: .*wrote into its output for an earlier micro-batch"
    with (
        Pipeline(stages, schedule(2, 4), loss) as pipe,
        pytest.raises(StageError, match=told),
    ):
        pipe.step(x, y) if call == "step" else pipe.forward(x)


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


class Sums(nn.Module):
    """Adds up what it is given, and may write into it first."""

    def __init__(self, writes=False):
        super().__init__()
        self.writes, self.linear = writes, nn.Linear(6, 6)

    def forward(self, given):
        one, other = given
        if self.writes:
            other.mul_(2)
        return self.linear(one + other)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("way", ["numpy", "windows", "last"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_what_a_stage_has_handed_on_is_compared_before_its_backward(name, way, learns):
    stages = [Recycles(way, learns), Sums(), nn.Linear(6, 6), nn.Linear(6, 6)]
    told = r"(?s)^0[BI]\d on rank 0 failed: .*written into.*return a clone.*stage 0, micro-batch \d"
    with Pipeline(stages, with_stages(name, 4, 8), mse) as pipe, pytest.raises(StageError, match=told):
        pipe.step(*plain.batch(32))


def test_what_the_next_stage_writes_into_what_it_is_given_is_found_too():
    stages = [Recycles(), Sums(writes=True)]
    stages[0].quiet = True
    with Pipeline(stages, GPipe(2, 4), mse) as pipe, pytest.raises(StageError, match=r"(?s)^0B.*written into.*clone"):
        pipe.step(*plain.batch(16))


def test_later_steps_compare_no_contents_and_verify_does():
    x, y = plain.batch(16)
    stages = [Recycles(), Sums()]
    stages[0].quiet = True
    with Pipeline(stages, GPipe(2, 4), mse) as pipe:
        pipe.step(x, y)
        pipe.forward(x)
        stages[0].quiet = False
        pipe.step(x, y)
        with pytest.raises(StageError, match="written into"):
            pipe.verify(x, y)


class OfEveryType(nn.Module):
    """Gives tensors of every type, and such as have no elements, no dimensions, gaps, or the same memory often."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        made = self.linear(x)
        types = [*NUMBERS, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex128]
        odd = [x[:, :0], x.sum(), x.T, x[:1].expand(3, 6), x[:, ::2], torch.complex(x, x).conj(), x.to_sparse(), None]
        return made, [x.detach().abs().to(each) for each in types], odd, made.to(torch.bfloat16), self.linear.weight


NUMBERS = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.complex64)


class First(nn.Module):
    def forward(self, given):
        return given[0] + given[3].float()


def test_outputs_of_every_type_are_compared_and_found_the_same():
    x, y = plain.batch(8)
    with Pipeline([OfEveryType(), First()], GPipe(2, 4), mse) as pipe:
        for _ in range(3):
            pipe.step(x, y)
        assert pipe.verify(x, y).largest_difference <= 1e-6


def test_what_a_stage_hands_on_is_not_held_for_its_guard():
    seen = []

    class Sees(nn.Module):
        def forward(self, x):
            seen.append(weakref.ref(x))
            return x * 1

    with Pipeline([nn.Linear(6, 6), Sees()], GPipe(2, 4), mse) as pipe, torch.no_grad():
        pipe.forward(plain.batch(16)[0])
    assert [each() for each in seen] == [None] * 4


@pytest.mark.parametrize(
    "first", [nn.Identity(), nn.ReLU(inplace=True), nn.Flatten()], ids=lambda each: type(each).__name__
)
def test_an_evaluation_may_pass_on_what_it_was_given_and_write_into_its_own(first):
    x, _ = plain.batch(16)
    stages = [first, nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))]
    with Pipeline(stages, GPipe(2, 4), mse) as pipe:
        found = pipe.forward(x.clone())
    torch.testing.assert_close(found, nn.Sequential(*stages)(x).detach())


class Constant(nn.Module):
    """Gives the same rows for every micro-batch."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        return self.rows.expand(len(x), -1)


def test_an_evaluation_may_give_the_same_memory_again_if_nobody_writes_into_it():
    x, _ = plain.batch(16)
    stages = [Constant(), nn.Linear(6, 6)]
    with Pipeline(stages, GPipe(2, 4), mse) as pipe:
        torch.testing.assert_close(pipe.forward(x), stages[1](stages[0](x)).detach())


class Selects(nn.Module):
    """Gives a dense tensor that learns, and a sparse one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x), x.detach().relu().to_sparse()


class Adds(nn.Module):
    def forward(self, given):
        dense, sparse = given
        return dense + sparse.to_dense()


def test_a_sparse_tensor_passes_between_stages_in_a_step_and_in_an_evaluation():
    x, y = plain.batch(8)
    model = nn.Sequential(Selects(), Adds())
    with Pipeline(model, GPipe(2, 4), mse) as pipe:
        torch.testing.assert_close(pipe.step(x, y).outputs, model(x).detach())
        torch.testing.assert_close(pipe.forward(x), model(x).detach())


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.CrossEntropyLoss()], ids=["size", "class"])
def test_an_error_in_the_loss_says_so_with_what_it_was_given(loss):
    target = torch.randn(8) if loss is nn.functional.mse_loss else torch.full((8,), 99)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with Pipeline(model, GPipe(2, 4), loss) as pipe, pytest.raises(StageError) as failed:
        pipe.step(torch.randn(8, 6), target)
    kind = str(target.dtype).removeprefix("torch.")
    assert f"\n  in the loss of an output [2, 3] float32 and a target [2] {kind}\n  at " in str(failed.value)
