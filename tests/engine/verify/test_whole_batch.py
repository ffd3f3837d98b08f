"""Where the whole batch has other gradients than its micro-batches, `verify` names the cause by what it tries out."""

from __future__ import annotations

import re
from functools import partial
from pipes import mse, refused, stepped, verified

import plain
import pytest
import torch
from torch import nn

from pipelab import ZBH1, GPipe, OneFOneB, Pipeline, diagnose
from pipelab.engine.verify.causes import CAUSES
from pipelab.errors import StageError, UsageError, VerificationError

cross_entropy = nn.functional.cross_entropy


def contrasts(output, _target):
    """Every row against every other: the two halves of a row belong together."""
    one, other = output.chunk(2, -1)
    return cross_entropy(one @ other.T, torch.arange(len(output)))


def balance(chances):
    """How unevenly experts are used, as Switch Transformers have it: no sum over rows."""
    used = nn.functional.one_hot(chances.argmax(-1), chances.shape[-1]).float().mean(0)
    return chances.shape[-1] * (used * chances.mean(0)).sum()


class Experts(nn.Module):
    """Four experts and a router; the auxiliary loss goes the way that `how` says."""

    def __init__(self, how, first=False):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6) / 3)
        self.how, self.first, self.aux = how, first, None

    def forward(self, given):
        x, before = given if isinstance(given, tuple) else (given, given.new_zeros(len(given)))
        chances = self.router(x).softmax(-1)
        made = x + torch.einsum("be,bd,edf->bf", chances, x, self.experts)
        if self.how == "travels":
            return made, before + 0.1 * balance(chances)
        if self.how == "chances":
            return made, chances
        if self.how in ("injected", "its share"):
            return Injects.apply(made, balance(chances) * (len(x) / 8 if self.how == "its share" else 1))
        self.aux = 0.1 * balance(chances)
        return made


class Injects(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made, aux):
        return made.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(()) * 0.1


def with_its_own(output, target):
    return mse(output[0], target) + output[1].mean()


def balanced(output, target):
    return mse(output[0], target) + balance(output[1])


class Centers(nn.Module):
    """Subtracts a moving average of earlier calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        made = x - self.average
        self.average.lerp_(x.detach().mean(0), 0.5)
        return made * made


def reads_the_last(stages):
    return lambda output, target: mse(output, target) + stages[-1].aux


SEQUENCES = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4, 6)
ROWS = plain.batch(8)
OFFSETS = {"ids": torch.arange(16).view(4, 4) % 6, "offsets": torch.tensor([0, 3, 9, 16])}, torch.zeros(4, 4, 6)


def documents(self, given):
    """Every token gets the mean of its document; documents begin at the offsets, in the batch's tokens."""
    rows = self.table(given["ids"])
    flat = rows.flatten(0, 1)
    where = torch.bucketize(torch.arange(len(flat)), given["offsets"], right=True)
    same = (where[:, None] == where).float()
    return (same / same.sum(1, keepdim=True) @ flat).view_as(rows)


class Last(nn.Module):
    def forward(self, given):
        return given[0]


def attends(**settings):
    return nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, **settings)


def linear(*more):
    return nn.Sequential(nn.Linear(6, 6), *more, nn.Linear(6, 6))


def scales(self, given):
    return self.linear(given["x"]) * given["scale"].mean()


torch.manual_seed(1)  # with a few seeds, such as 0, experts are used alike in both micro-batches
CASES = {
    "pairs": (linear(), contrasts, ROWS, "loss_fn compares rows with each other: one row alone has no gradient"),
    "in the loss": ([nn.Linear(6, 6), Experts("chances")], balanced, ROWS, "not a weighted sum of the micro-batches'"),
    "a sum": (linear(), partial(mse, reduction="sum"), ROWS, r"weighs the micro-batches .*0\.5.* they weigh 1 1$"),
    "moving average": (linear(Centers()), mse, ROWS, r"1\.average changes in a forward, and with it the next output"),
    "attention": (
        linear(attends()),
        mse,
        SEQUENCES,
        r"right for parts of it along dimension 1: 1\.self_attn has batch_first=False",
    ),
    "lstm": (
        [nn.Linear(6, 6), nn.Sequential(nn.LSTM(6, 6), Last())],
        mse,
        SEQUENCES,
        r"right for parts of it along dimension 1: 1\.0 has batch_first=False",
    ),
    "offsets": (
        [plain.Made(documents, table=nn.Embedding(6, 6)), nn.Linear(6, 6)],
        mse,
        OFFSETS,
        r'other rows of x\["ids"\] \(\[4, 4\] int64\), x\["offsets"\] \(\[4\] int64\)',
    ),
    "a leaf": (
        [plain.Made(scales, linear=nn.Linear(6, 6)), nn.Linear(6, 6)],
        mse,
        ({"x": ROWS[0], "scale": torch.arange(8.0)}, ROWS[1]),
        r'depend on other rows of x\["scale"\] \(\[8\] float32\): ',
    ),
    "travels": (
        [Experts("travels"), Experts("travels")],
        with_its_own,
        ROWS,
        r"output\[1\] depends on the other rows of its micro-batch, and output\[0\] does not",
    ),
    "injected": ([Experts("injected"), Experts("injected")], mse, ROWS, "Injects adds .* as much for each of the 2"),
    "its share": (
        [Experts("its share"), Experts("its share")],
        mse,
        ROWS,
        "Injects adds .*: all micro-batches together",
    ),
    "branch": (
        linear(plain.Made(lambda _, x: x if x.sum() > -1e3 * len(x) ** 2 / 64 and len(x) > 4 else x * 2)),
        mse,
        ROWS,
        "1 has other values for the same rows in the whole batch, .*branches on values",
    ),
    "statistic": (linear(plain.Made(lambda _, x: x - x.mean(0))), mse, ROWS, "1 is the first layer that gives"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", [OneFOneB(2, 2), ZBH1(2, 2)], ids=["1f1b", "zb-h1"])
@pytest.mark.filterwarnings("ignore:the losses of two micro-batches:UserWarning", "ignore:.*batch_first:UserWarning")
def test_the_cause_is_named_by_evidence(case, schedule):
    torch.manual_seed(0)
    model, loss_fn, batch, told = CASES[case]
    error = refused("their sum is not the whole", model, schedule, batch, loss_fn, "verify", VerificationError)
    _, cause, hint = str(error).split("\n")
    assert re.search(told, cause)
    assert hint.startswith("  try: ")
    stages = [model[:1], model[1:]] if isinstance(model, nn.Sequential) else model
    error = refused("their sum is not the whole", stages, schedule, batch, loss_fn, "verify", VerificationError)
    assert hint in str(error)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("injected", "its share")])
def test_diagnose_says_that_a_step_is_right_for_its_micro_batches_and_not_for_the_batch(case):
    torch.manual_seed(0)
    model, loss_fn, (x, y), told = CASES[case]
    model = nn.Sequential(*model)

    def step(x, y):
        parts = ({name: part.chunk(2) for name, part in x.items()} if isinstance(x, dict) else {"": x.chunk(2)}).items()
        for half, targets in enumerate(y.chunk(2)):
            rows = {name: both[half] for name, both in parts}
            (loss_fn(model(rows.get("", rows)), targets) / (1 if case == "a sum" else 2)).backward()

    reduction = "mean" if case in ("pairs", "in the loss") else None  # for which `diagnose` asks
    found = diagnose(step, model, x, y, loss_fn, microbatches=2, reduction=reduction)
    assert {each.right for each in found.parameters.values()} == {True}
    if case == "a sum":  # the step weighs its micro-batches as the loss does
        assert (found.code, len(str(found).splitlines())) == ("right", 1)
        return
    _, fact, cause, hint = str(found).splitlines()
    assert fact.startswith("Right for these micro-batches, not for the batch: their sum is not the whole batch's: ")
    assert found.code in CAUSES
    assert re.search(told, cause)
    assert hint.startswith("  try: ")


def test_a_loss_that_the_last_stage_leaves_on_a_module_is_named():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), Experts("left")]
    told = r"the loss depends on 1\.aux, beside the model's output"
    refused(told, stages, OneFOneB(2, 2), 8, reads_the_last(stages), "verify", VerificationError)


@pytest.mark.parametrize("case", ["pairs", "in the loss", "travels", "injected", "its share", "statistic"])
@pytest.mark.filterwarnings("ignore:the losses of two micro-batches:UserWarning")
def test_what_each_micro_batch_has_for_itself_is_right_against_the_micro_batches(case):
    torch.manual_seed(0)
    model, loss_fn, batch, _ = CASES[case]
    with Pipeline(model, OneFOneB(2, 4), loss_fn) as pipe:
        proof = pipe.verify(*batch, against="microbatches")
        assert (proof.exact, proof.whole_batch_difference, proof.unproven) == (True, None, ())
        with pytest.raises(UsageError, match="against='rows': expected 'batch' or 'microbatches'"):
            pipe.verify(*batch, against="rows")


def test_what_is_right_for_the_whole_batch_is_none_of_these():
    torch.manual_seed(0)
    assert verified(linear(attends(batch_first=True)), OneFOneB(2, 4), SEQUENCES).whole_batch_difference < 1e-5


@pytest.mark.parametrize("schedule", [OneFOneB(2, 4), ZBH1(2, 4), GPipe(2, 4)], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_that_an_earlier_stage_leaves_on_a_module_fails_with_the_cause(schedule, which):
    torch.manual_seed(0)
    stages = [Experts("left"), nn.Linear(6, 6) if which else Experts("left")]
    loss_fn = lambda output, target: mse(output, target) + stages[0].aux  # noqa: E731
    error = refused(r"has been through this stage's graph: .* left on a module", stages, schedule, 8, loss_fn)
    assert "second time" not in str(error)
    assert "try: return it beside the output, as in (h, aux)" in str(error)
    assert error.__cause__ is not None


def test_a_loss_that_is_no_number_is_warned_of_once():
    model, (x, y) = linear(), plain.batch(8)
    y[3, 2] = float("nan")
    with pytest.warns(UserWarning, match=r"the loss of this step is nan\n  try: Pipeline\(\.\.\., watch_nan=True\)"):
        step = stepped(model, OneFOneB(2, 4), (x, y))
    assert step.loss.isnan()
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        with pytest.warns(UserWarning, match="the loss of this step is inf"):
            pipe.step(x, y.nan_to_num(float("inf")))
        pipe.step(x, y)  # once is enough: a second warning would be an error
    model.zero_grad()
    with pytest.raises(StageError, match="^1F1 on rank 1 made NaN: the loss of stage 1"):
        stepped(model, OneFOneB(2, 4), (x, y), watch_nan=True)


@pytest.mark.parametrize("case", ["statistic", "travels"])
def test_the_cause_is_named_with_rows_along_another_dimension(case):
    """Rows are along dimension 1, and what is wrong with them is seen there."""
    torch.manual_seed(0)
    statistic = linear(plain.Made(lambda _, x: x - x.mean((0, 1))))
    pooled = plain.Made(lambda _, x: (x, x.mean((0, 1)).expand(x.shape[1], 6)))
    model, loss_fn, told = {
        "statistic": (statistic, mse, "1 is the first layer that gives"),
        "travels": ([nn.Linear(6, 6), pooled], balanced_pool, r"output\[1\] depends .*, and output\[0\] does not"),
    }[case]
    told = f"their sum is not the whole batch's(?s:.*){told}"
    batch = torch.randn(4, 8, 6), torch.randn(4, 8, 6)
    refused(told, model, OneFOneB(2, 2), batch, loss_fn, "verify", VerificationError, batch_dim=1)
    right = verified(linear(attends()), OneFOneB(2, 4), (torch.randn(3, 8, 6), torch.randn(3, 8, 6)), batch_dim=1)
    assert right.whole_batch_difference < 1e-5


def balanced_pool(output, target):
    return mse(output[0], target) + output[1].square().mean()
