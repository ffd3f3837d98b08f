"""Losses of PyTorch's that do not average over rows are refused before they make other gradients than the batch."""

from __future__ import annotations

from pipes import mse, refused, stepped, verified

import plain
import pytest
import torch
from torch import nn

from pipelab import OneFOneB, Pipeline
from pipelab.errors import LossError, StageError

CLASSES = 3
WEIGHT = torch.tensor([1.0, 2.0, 4.0])


def data(*ignored):
    torch.manual_seed(0)
    target = torch.arange(12) % CLASSES
    target[list(ignored)] = -100
    return torch.randn(12, 4), target


def pipeline(loss, **options):
    torch.manual_seed(0)
    return Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES)), OneFOneB(2, 3), loss, **options)


def assert_right(loss, x, target, **options):
    """Assert that a pipeline with this loss makes the gradients of the whole batch."""
    with pipeline(loss, **options) as pipe:
        assert pipe.verify(x, target).whole_batch_difference < 1e-5


def counted(target):
    return (target != -100).sum()


OF_KEPT = r"weight\[target\[target != -100\]\]\.sum\(\)\)"
LEFT_OUT = (
    r"ignores targets that are -100 .* micro-batches have 2, 3, 4: "
    r"reduction='mean'.*\n  try: Pipeline\(\.\.\., reduction=lambda target: \(target != -100\)\.sum\(\)\)"
)


@pytest.mark.parametrize(
    ("loss", "ignored", "told", "reduction"),
    [
        (nn.CrossEntropyLoss(), (0, 1, 5), LEFT_OUT, counted),
        (nn.functional.cross_entropy, (0, 1, 5), LEFT_OUT, counted),
        (nn.NLLLoss(), (0, 1, 5), LEFT_OUT, counted),
        (nn.CrossEntropyLoss(weight=WEIGHT), (), OF_KEPT, lambda target: WEIGHT[target].sum()),
        (nn.CrossEntropyLoss(weight=WEIGHT), (0, 1, 5), OF_KEPT, lambda target: WEIGHT[target[target != -100]].sum()),
    ],
)
def test_weights_and_targets_left_out_are_told_with_what_to_write(loss, ignored, told, reduction):
    x, target = data(*ignored)
    with pipeline(loss) as pipe, pytest.raises(LossError, match=told):
        pipe.step(x, target)
    assert_right(loss, x, target, reduction=reduction)


def test_a_loss_of_ones_own_that_may_leave_targets_out_is_warned_of():
    def own(output, target):
        return nn.functional.cross_entropy(output, target)

    x, target = data(0, 1, 5)
    told = r"(?s)have 2, 3, 4 others: .*reduction=lambda"
    with pipeline(own) as pipe, pytest.warns(UserWarning, match=told) as warned:
        pipe.step(x, target)
    assert [each.filename for each in warned] == [__file__]  # one warning is enough
    assert_right(own, x, target, reduction=counted)
    assert_right(own, *data(0, 4, 8))  # as many of each
    with pipeline(own, reduction=len) as pipe:  # it is meant
        pipe.step(x, target)


def test_as_many_left_out_of_each_micro_batch_and_targets_of_one_class_harm_nothing():
    assert_right(nn.CrossEntropyLoss(), *data(0, 4, 8))
    assert_right(nn.CrossEntropyLoss(ignore_index=7), *data())
    x, target = data()
    assert_right(nn.CrossEntropyLoss(weight=WEIGHT), x, torch.zeros_like(target))


def test_a_loss_with_a_forward_of_its_own_is_not_judged_by_its_base():
    class ByRows(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return nn.functional.cross_entropy(output, target, reduction="sum") / len(target)

    assert_right(ByRows(), *data(0, 1, 5), reduction=len)


def test_equal_weights_of_a_coarse_type_and_targets_of_bytes_pass():
    x, target = data()
    assert_right(nn.CrossEntropyLoss(weight=torch.full((CLASSES,), 1 / 3)), x, target.to(torch.uint8))
    coarse = nn.CrossEntropyLoss(weight=torch.full((CLASSES,), 0.3, dtype=torch.bfloat16))
    with pipeline(coarse) as pipe:
        pipe.stages.model.bfloat16()
        x, target = torch.randn(100, 4, dtype=torch.bfloat16), torch.randint(CLASSES, (100,))
        pipe.step(x, target)


def test_weighing_by_rows_all_the_same_can_be_asked_for():
    x, target = data(0, 1, 5)
    with pipeline(nn.CrossEntropyLoss(), reduction=len) as pipe:
        loss = pipe.step(x, target).loss
        parts = [nn.functional.cross_entropy(pipe.forward(x)[m : m + 4], target[m : m + 4]) for m in (0, 4, 8)]
    assert torch.allclose(loss, torch.stack(parts).mean())


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [(nn.CrossEntropyLoss(reduction="sum"), "sum"), (nn.CrossEntropyLoss(label_smoothing=0.1), "mean")],
)
def test_what_averages_over_rows_or_not_at_all_passes(loss, reduction):
    x, target = data()
    assert_right(loss, x, target, reduction=reduction)
    if reduction == "mean":
        probabilities = torch.rand(12, CLASSES).softmax(-1)
        assert_right(nn.CrossEntropyLoss(weight=WEIGHT), x, probabilities)


def test_a_class_that_is_not_there_is_told_by_the_loss_itself():
    x, target = data()
    target[3] = CLASSES
    with pipeline(nn.CrossEntropyLoss()) as pipe, pytest.raises(StageError, match=r"Target 3 is out of bounds"):
        pipe.step(x, target)
    with pipeline(nn.CrossEntropyLoss(weight=WEIGHT)) as pipe, pytest.raises(LossError, match="weight of its class"):
        pipe.step(x, target)


def summed(output, target):
    return ((output - target) ** 2).sum()


def ignoring(output, target):
    return nn.functional.cross_entropy(output, target, ignore_index=5)


@pytest.mark.filterwarnings("ignore:the loss of this step is nan:UserWarning")  # a micro-batch ignores all its targets
@pytest.mark.parametrize(
    ("loss", "target"),
    [(summed, torch.randn(8, 6)), (ignoring, torch.tensor([1, 5, 2, 3, 5, 5, 1, 0]))],
    ids=["a sum", "ignored targets"],
)
def test_the_first_step_warns_if_a_loss_of_ones_own_does_not_average_over_rows(loss, target):
    with Pipeline(plain.mlp(2), OneFOneB(2, 4), loss) as pipe:
        with pytest.warns(UserWarning, match="two micro-batches average to .* together is"):
            pipe.step(plain.batch(8)[0], target)
        pipe.step(plain.batch(8)[0], target)  # once is enough


class Moving(nn.Module):
    """A loss over its own moving average, which it keeps in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.kept = way, [torch.ones(())]
        if way == "buffer":
            self.register_buffer("mean", torch.ones(()))
        else:
            self.mean = torch.ones(())

    def forward(self, output, target):
        value = mse(output, target)
        moved = 0.9 * self.mean + 0.1 * value.detach()
        if self.way == "written into":
            self.mean.copy_(moved)
        else:
            self.mean = moved
        self.kept.append(moved)
        return value * self.kept[-2]


class Holds:
    """A loss that is no module, and has one."""

    def __init__(self):
        self.loss, self.calls = Moving("buffer"), 0

    def __call__(self, output, target):
        self.calls += 1
        return self.loss(output, target) * self.calls


@pytest.mark.parametrize("way", ["buffer", "attribute", "written into", "held"])
def test_what_a_loss_keeps_moves_once_for_each_micro_batch(way):
    """Nor is it told of its average: its losses depend on more than output and target."""
    (x, y), losses = plain.batch(8), []
    loss, model = Holds() if way == "held" else Moving(way), plain.mlp(4)
    for _ in range(2):
        each = [loss(model(rows), targets) for rows, targets in zip(x.split(2), y.split(2), strict=True)]
        losses.append(float(sum(each).detach()) / 4)
    with Pipeline(plain.mlp(4), OneFOneB(2, 4), Holds() if way == "held" else Moving(way)) as pipe:
        assert [float(pipe.step(x, y).loss) for _ in range(2)] == pytest.approx(losses)


def test_a_loss_that_draws_is_not_told_of_its_average_and_draws_no_more():
    def noisy(output, target):
        return mse(output + torch.randn_like(output), target)

    states = []
    with Pipeline(plain.mlp(2), OneFOneB(2, 4), noisy) as pipe:
        for _ in range(2):
            torch.manual_seed(0)
            pipe.step(*plain.batch(8))
            states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("answer", "part"),
    [(lambda loss: {"loss": loss}, r"\['loss'\]"), (lambda loss: (loss, 1), r"\[0\]")],
    ids=["dict", "tuple"],
)
def test_a_loss_with_extra_values_is_refused_with_the_line_to_write(answer, part):
    told = rf"(?s)the loss function returned.*your_loss\(output, target\){part}"
    refused(told, plain.mlp(2), OneFOneB(2, 4), loss=lambda output, target: answer(mse(output, target)))


def test_an_auxiliary_loss_travels_with_the_values_of_the_stages():
    def balances(self, given):
        value, extra = given if isinstance(given, tuple) else (given, 0.0)
        value = self.layer(value)
        return value, extra + value.pow(2).mean()

    def loss(output, target):
        return mse(output[0], target) + 0.01 * output[1]

    stages = [plain.Made(balances, layer=nn.Linear(6, 6)) for _ in range(2)]
    assert verified(stages, OneFOneB(2, 4), loss=loss).exact
    stepped(stages, OneFOneB(2, 4), loss=loss)
