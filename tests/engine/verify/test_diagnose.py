"""`diagnose` names the factor that is wrong in any training step, and accuses no right one."""

from __future__ import annotations

import copy
from pipes import given, mse, no_trace

import plain
import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipelab import ZBH1, GPipe, LossError, OneFOneB, Pipeline, UsageError, diagnose, replicate
from pipelab.engine.verify.causes import named
from pipelab.engine.verify.reference import Counts, Sizes

NAN = float("nan")


def found_in(step, model, batch=20, loss=mse, microbatches=5, **more):
    return diagnose(step, model, *given(batch), loss, microbatches=microbatches, **more)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def words(rows=16):
    """Return a language model, [rows, 5] tokens to [rows, 11, 5] scores, and a batch; a third of targets is ignored."""
    torch.manual_seed(0)
    targets = torch.randint(11, (rows, 5))
    targets[torch.rand(rows, 5) < 0.3] = -100
    model = plain.Made(
        lambda self, tokens: self.head(torch.tanh(self.hidden(self.embed(tokens)))).transpose(1, 2),
        embed=nn.Embedding(11, 16),
        hidden=nn.Linear(16, 16),
        head=nn.Linear(16, 11),
    )
    return model, torch.randint(11, (rows, 5)), targets


def pieces(x, y, many):
    return list(zip(x.tensor_split(many), y.tensor_split(many), strict=True))


# ── The six bugs reported in the field ────────────────────────────────────────────────────────────────────────────────


def times_the_tokens():
    """The loss became a sum, to be divided by all valid tokens later; under the pipeline nobody divided."""
    model, x, y = words()

    def step(x, y):
        for tokens, targets in pieces(x, y, 4):
            nn.functional.cross_entropy(model(tokens), targets, reduction="sum").backward()

    found = diagnose(step, model, x, y, nn.CrossEntropyLoss(), microbatches=4)
    return found, "times-tokens", float((y != -100).sum()), ()


def pytorchs_own(model, microbatches, loss=mse, *, scaled):
    """Return PyTorch's 1F1B on one rank."""
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    return Schedule1F1B(stage, microbatches, loss, scale_grads=scaled)


def a_moving_average():
    """PyTorch's `scale_grads` divides all of .grad after each accumulation step, also what was there before."""
    model = plain.mlp(2)
    schedule = pytorchs_own(model, 4, scaled=True)

    def step(x, y):
        for rows, targets in pieces(x, y, 3):
            schedule.step(rows, target=targets)

    return found_in(step, model, 24, microbatches=12), "moving-average", 4.0, ()


def summed_not_averaged():
    """The schedule runs without `scale_grads`, and each micro-batch's loss is a mean."""
    model = plain.mlp(2)
    schedule = pytorchs_own(model, 8, scaled=False)
    found = found_in(lambda x, y: schedule.step(x, target=y), model, 24, microbatches=8)
    return found, "times-microbatches", 8.0, ()


def averaged_twice():
    """The loss is divided by the number of micro-batches, and the schedule divides again."""
    model = plain.mlp(2)
    schedule = pytorchs_own(model, 8, lambda output, target: mse(output, target) / 8, scaled=True)
    found = found_in(lambda x, y: schedule.step(x, target=y), model, 24, microbatches=8)
    return found, "divided-by-microbatches", 1 / 8, ()


def only_the_last_counted():
    """The optimizer's gradients are emptied before each micro-batch, not before each step."""
    model = plain.mlp(2)

    def step(x, y):
        for rows, targets in pieces(x, y, 8):
            model.zero_grad()
            mse(model(rows), targets).backward()

    return found_in(step, model, 24, microbatches=8), "missing-microbatches", 8.0, (7,)


def summed_over_replicas():
    """Each replica averages over its own rows; the all-reduce sums."""
    model = plain.mlp(2)

    def step(x, y):
        for rows, targets in pieces(x, y, 3):
            replica = copy.deepcopy(model)
            plain.one_after_another(replica, mse, rows, targets, 4)
            for own, its in zip(model.parameters(), replica.parameters(), strict=True):
                own.grad = its.grad + (0 if own.grad is None else own.grad)

    return found_in(step, model, 24, microbatches=12, replicas=3), "summed-over-replicas", 3.0, ()


@pytest.mark.parametrize(
    "bug",
    [
        times_the_tokens,
        a_moving_average,
        summed_not_averaged,
        averaged_twice,
        only_the_last_counted,
        summed_over_replicas,
    ],
)
def test_each_bug_reported_in_the_field_is_named(bug, one_process):
    found, code, factor, microbatches = bug()
    assert (found.code, found.microbatches) == (code, microbatches)
    assert set(found.wrong) == set(found.parameters)
    assert found.factor == pytest.approx(factor, rel=1e-4)
    assert found.residual < 1e-5
    assert "try: " in str(found)


# ── Other mistakes ────────────────────────────────────────────────────────────────────────────────────────────────────


def looped(model, counts, after=lambda: None):
    """Return a loop over micro-batches, each of which counts so often."""

    def step(x, y):
        for count, (rows, targets) in zip(counts, pieces(x, y, len(counts)), strict=True):
            (count * len(rows) / len(x) * mse(model(rows), targets)).backward()
        after()

    return step


@pytest.mark.parametrize(
    ("counts", "code", "factor", "microbatches"),
    [
        ([1, 1, 1, 1, 1], "right", 1, ()),
        ([0, 1, 0, 1, 0], "missing-microbatches", 1, (1, 3)),
        ([1, 1, 2, 1, 1], "repeated-microbatches", 1, (2,)),
        ([2, 1, 1, 1, 0], "repeated-microbatches", 1, (0,)),
        ([-1, -1, -1, -1, -1], "sign", -1, ()),
        ([-5, -5, -5, -5, -5], "sign", -5, ()),
        ([1, 1, 1, -1, 1], "sign", 1, (3,)),
        ([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], "moving-average", 2, ()),
        ([0.125, 0.125, 0.25, 0.5, 1], "moving-average", 2, ()),  # grad = (grad + new) / 2, from the second one on
        ([0.9**4, 0.9**3, 0.9**2, 0.9, 1], "moving-average", 1 / 0.9, ()),
        ([22, 22, 22, 22, 22], "times-tokens", 22, ()),
        ([7.5, 7.5, 7.5, 7.5, 7.5], "scaled", 7.5, ()),
        ([0.3, 1.3, 2.3, 3.3, 4.3], "other-weights", None, ()),
    ],
)
def test_how_often_each_microbatch_counts_names_the_mistake(counts, code, factor, microbatches):
    model = plain.mlp(2)
    found = found_in(looped(model, counts), model, 22)
    assert (found.code, found.microbatches) == (code, microbatches)
    assert found.factor == (factor and pytest.approx(factor, rel=1e-4))
    assert found.counts == pytest.approx(counts, abs=1e-4)


@pytest.mark.parametrize(("counts", "undivided"), [([1, 1, 1, 4], "3 counts 4"), ([4, 1, 4, 1], "0, 2 count 4")])
def test_a_loss_that_alone_is_not_divided_is_called_so(counts, undivided):
    model = plain.mlp(2)
    for factor in (1, 1 / 4):  # the others are right, or are divided twice
        found = found_in(looped(model, [factor * count for count in counts]), model, 22, microbatches=4)
        assert f"{undivided} times as much as the others, as if not divided by 4" in found.sentence


@pytest.mark.parametrize(
    ("counts", "rows", "shares", "code", "microbatches"),
    [
        ([2, 1, 1, NAN, 1, NAN], [2, 2, 2, 2, 1, 1], [1, 2, 2, 0, 1, 0], "repeated-microbatches", (0,)),
        ([1, 1, 1, NAN, NAN, NAN, NAN, NAN, 2], [1] * 9, [1] * 9, "repeated-microbatches", (8,)),
        ([0.25, NAN, 1, 2], [1] * 4, [1] * 4, "moving-average", ()),
        ([0.25, 0.5, 1, NAN], [1] * 4, [1] * 4, "moving-average", ()),
        ([0.5, 1], [1] * 2, [1] * 2, "moving-average", ()),
        ([1, 2], [1] * 2, [1] * 2, "repeated-microbatches", (1,)),
    ],
)
def test_microbatches_that_add_nothing_mislead_no_name(counts, rows, shares, code, microbatches):
    sizes = Sizes(rows, [each / sum(shares) for each in shares], 1, {})
    found = named(Counts(torch.tensor(counts).double(), 2e-3, sizes))
    assert (found.code, found.microbatches) == (code, microbatches)


@pytest.mark.parametrize(
    ("code", "weigh"),
    [
        ("weighed-alike", lambda targets, all_targets: 1 / 4),
        ("weighed-by-rows", lambda targets, all_targets: len(targets) / 15),
        ("right", lambda targets, all_targets: (targets != -100).sum() / (all_targets != -100).sum()),
    ],
)
def test_microbatches_weighed_alike_or_by_rows_are_named_if_the_loss_does_otherwise(code, weigh):
    model, x, y = words(15)
    loss = nn.CrossEntropyLoss()

    def step(x, y):
        for tokens, targets in pieces(x, y, 4):
            (weigh(targets, y) * loss(model(tokens), targets)).backward()

    found = diagnose(step, model, x, y, loss, microbatches=4)
    assert (found.code, found.factor) == (code, pytest.approx(1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_itself_decides_how_much_a_microbatch_weighs(reduction):
    model, x, y = words(14)
    y[:3] = -100  # of the first micro-batch nothing counts
    loss = nn.CrossEntropyLoss(reduction=reduction, weight=torch.rand(11))
    found = diagnose(lambda x, y: loss(model(x), y).backward(), model, x, y, loss, microbatches=5)
    assert (found.code, found.microbatches) == ("right", ())


def test_a_stage_without_gradients_is_named_and_the_others_are_explained():
    model = plain.mlp(4)

    def detached(x, y):
        mse(model[2:](model[:2](x).detach()), y).backward()

    first = [name for name, _ in model.named_parameters() if name < "2"]
    found = found_in(detached, model)
    assert (found.code, found.factor, list(found.wrong)) == ("missing-gradients", 1, first)
    assert "others are right" in str(found)

    def detached_and_summed(x, y):
        for rows, targets in pieces(x, y, 5):
            detached(rows, targets)

    found = found_in(detached_and_summed, model)
    assert (found.code, found.factor, found.wrong) == ("missing-gradients", 5, tuple(found.parameters))
    factors = {name: each.factor for name, each in found.parameters.items()}
    assert factors == pytest.approx({name: 0 if name in first else 5 for name in found.parameters})
    assert "number of micro-batches" in str(found)
    assert found_in(lambda x, y: None, model).code == "no-gradients"


@pytest.mark.parametrize(("factor", "code"), [(5.0, "times-microbatches"), (-1.0, "sign")])
def test_a_mistake_in_one_stage_only_names_its_parameters(factor, code):
    model = plain.mlp(4)
    late = {name: each for name, each in model.named_parameters() if name >= "2"}

    def after():
        for parameter in late.values():
            parameter.grad *= factor

    found = found_in(looped(model, [1] * 5, after), model)
    assert (found.code, found.factor, found.wrong) == (code, factor, tuple(late))


def test_each_parameter_is_listed_with_its_own_factor():
    model, (x, y) = plain.mlp(6), plain.batch(20)
    weights = dict(model.named_parameters())

    def scaled():
        weights["0.weight"].grad *= 0.5
        weights["2.weight"].grad *= 3
        weights["2.bias"].grad.zero_()
        weights["4.bias"].grad += torch.arange(6.0)

    found = found_in(looped(model, [1] * 5, scaled), model)
    assert found.wrong == ("0.weight", "2.weight", "2.bias", "4.bias")
    factors = {name: each.factor for name, each in found.parameters.items()}
    assert factors.pop("4.bias") is None
    of_all = {"0.weight": 0.5, "0.bias": 1, "2.weight": 3, "2.bias": 0, "4.weight": 1}
    assert factors == pytest.approx(of_all, rel=1e-5)
    assert found.parameters["0.weight"].off == pytest.approx(0.5 * shared(model, x, y, "0.weight"), rel=1e-3)
    assert found.parameters["4.weight"].off < 1e-6
    for line in ("  right: 0.bias, 4.weight", "  wrong, 3 times: 2.weight", "  wrong, no multiple: 4.bias"):
        assert line in str(found).splitlines()
    model.append(nn.Linear(6, 6))
    model.forward = lambda x: model[:5](x)  # the last layer is not used
    found = found_in(looped(model, [5] * 5), model)
    assert {*found.parameters} - {*found.wrong} == {"6.weight", "6.bias"}
    right = found_in(looped(model, [1] * 5), model)
    assert (right.wrong, {each.factor for each in right.parameters.values()}) == ((), {1})


def shared(model, x, y, name):
    """Return how large a parameter's gradient is, relative to the sum of what five micro-batches add to it."""
    alone = [each[name] for each in plain.each_alone(model, mse, x, y, 5)]
    return float(sum(alone).norm() / sum(each.norm() for each in alone))


def test_microbatches_that_cannot_be_told_apart_are_named_and_nothing_else():
    model, (x, y) = plain.mlp(2), plain.batch(20)
    x[4:8], y[4:8] = x[:4], y[:4]  # micro-batches 0 and 1 are the same
    assert found_in(looped(model, [2, 0, 1, 1, 1]), model, (x, y)).code == "right"  # the gradient is
    found = found_in(looped(model, [1, 0, 1, 1, 1]), model, (x, y))
    assert (found.code, found.microbatches, found.factor) == ("collinear", (0, 1), None)
    x[:], y[:] = x[:4].repeat(5, 1), y[:4].repeat(5, 1)
    found = found_in(looped(model, [1, 0, 1, 0, 1]), model, (x, y))
    assert (found.code, found.microbatches) == ("collinear", (0, 1, 2, 3, 4))
    assert found.factor == pytest.approx(0.6)


def test_a_number_with_two_meanings_is_not_given_one():
    model = plain.mlp(2)
    found = found_in(looped(model, [4] * 4), model, microbatches=4, replicas=4)
    assert (found.code, found.factor) == ("scaled", 4)
    assert "the number of micro-batches, and the number of replicas" in str(found)


def test_random_numbers_and_nan_are_said():
    (x, y), model = plain.batch(20), nn.Sequential(nn.Dropout(0.5), *plain.mlp(2))
    backwards = lambda x, y: mse(model(x.flip(0)), y.flip(0)).backward()  # noqa: E731
    found = found_in(backwards, model)
    assert found.code == "not-compared"
    assert "not verified: dropout draws other random numbers than the plain model: set model.eval()" in str(found)
    model.eval()
    assert found_in(backwards, model).code == "right"
    x[3, 0] = torch.nan
    assert found_in(backwards, model, (x, y)).code == "not-finite"


def test_learned_targets_leave_rounding_and_no_accusation():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(6, 8)
    batch = x, model(x).detach() * (1 + 1e-7)
    step = lambda x, y: mse(model(x), y).backward()  # noqa: E731
    assert found_in(step, model, batch, microbatches=6).code in ("right", "rounding")
    assert found_in(looped(model, [6] * 6), model, batch, microbatches=6).code == "rounding"


# ── Right steps ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pipeline_is_right_with_replicas_and_uneven_rows():
    model, (x, y) = plain.mlp(4), plain.batch(23)
    for plan, replicas in ((OneFOneB(2, 5), 1), (replicate(OneFOneB(2, 6), 2), 2)):
        with Pipeline(model, plan, mse) as pipe:
            many = pipe.plan.microbatches
            found = diagnose(pipe.step, model, x, y, mse, microbatches=many, replicas=replicas)
        assert (found.code, found.counts) == ("right", (1.0,) * many)
        assert found.residual < 1e-6


def test_batchnorm_is_compared_with_the_same_microbatches():
    model = nn.Sequential(*plain.mlp(2), nn.BatchNorm1d(6))
    assert found_in(looped(model, [1] * 5), model).code == "right"
    assert float(model[-1].running_mean.abs().sum()) == 0
    assert found_in(looped(model, [5] * 5), model).code == "times-microbatches"


def test_a_step_with_everything_leaves_no_trace():
    model, (x, y) = plain.mlp(2), plain.batch(20)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rows = x.clone()

    def step(x, y):
        torch.rand(1)
        mse(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        x.zero_()

    def breaks(x, y):
        step(x, y)
        raise KeyError

    with no_trace(model):
        assert diagnose(step, model, x, y, mse, microbatches=4).code == "right"
        with pytest.raises(KeyError):
            diagnose(breaks, model, x, y, mse, microbatches=4)
    assert torch.equal(rows, x)


def in_bfloat16(model, counts, enabled=True):
    """Return a step that computes in bfloat16 itself, and whose micro-batches count so often; gradients are float32."""

    def step(x, y):
        for (rows, targets), count in zip(pieces(x, y, len(counts)), counts, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = mse(model(rows), targets)
            (count * len(rows) / len(x) * loss).backward()

    return step


def learned(steps):
    """Return a model that has trained for so long, and its batch of 24 rows."""
    model, (x, y) = plain.mlp(4), plain.batch(24)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, x, y


@pytest.mark.parametrize("steps", [0, 300])
@pytest.mark.parametrize("cut", [1, 6, 24])
def test_a_right_step_that_computes_in_bfloat16_is_not_accused_however_it_cuts(steps, cut):
    model, x, y = learned(steps)
    found = diagnose(in_bfloat16(model, [1] * cut), model, x, y, mse, microbatches=6)
    assert found.code == "right", found
    assert "bfloat16" in str(found)
    assert found.residual < 0.02


@pytest.mark.parametrize("where", ["step", "around", "model"])
@pytest.mark.parametrize(
    ("counts", "code", "microbatches"),
    [
        ([1.0] * 23 + [0.0], "missing-microbatches", tuple(range(23))),  # off by less than bfloat16 may round
        ([1.0] * 7 + [2.0] + [1.0] * 16, "repeated-microbatches", (7,)),
        ([24.0] * 24, "times-microbatches", ()),
        ([1.0] * 24, "right", ()),
    ],
)
def test_what_is_wrong_in_bfloat16_is_named_wherever_autocast_is(where, counts, code, microbatches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    x, y = torch.randn(48, 32), torch.randn(48, 32)
    if where == "model":
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        found = diagnose(in_bfloat16(model, counts, where == "step"), model, x, y, mse, microbatches=24)
    assert (found.code, found.microbatches) == (code, microbatches), found


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", ["sent", "sent back", "added up"])
def test_numbers_that_were_cast_on_their_way_round_as_their_type_does(kind, cast):
    model = plain.mlp(6)
    there = lambda value: value.to(kind).to(value.dtype)  # noqa: E731

    def step(x, y, late=0.0):
        for rows, targets in pieces(x, y, 4):
            value = model[:4](rows)
            given = (there(value) if cast == "sent" else value).detach().requires_grad_()
            (mse(model[4:](given), targets + late) / 4).backward()
            value.backward(there(given.grad) if cast == "sent back" else given.grad)
        for parameter in model.parameters() if cast == "added up" else ():
            parameter.grad = there(parameter.grad)

    found = found_in(step, model, 24, microbatches=4)
    assert found.code == "right"
    assert found.residual < 1e-3 or str(kind).removeprefix("torch.") in str(found)
    assert found_in(lambda x, y: step(x, y, 1.0), model, 24, microbatches=4).code != "right"


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("where", ["sent", "sent back"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda value: value.bfloat16().float(), "right"),
        (lambda value: value.to(FLOAT8).float(), ""),
        (lambda value: (value * 0.97).bfloat16().float(), ""),
    ],
    ids=["bfloat16", "float8", "scaled"],
)
def test_what_happens_to_be_bfloat16_is_rounding_only_as_far_as_that_rounds(where, change, code):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    x, y = torch.randn(16, 8), torch.randn(16, 8)

    def step(x, y):
        for rows, targets in pieces(x, y, 4):
            value = model[:2](rows)
            given = (change(value) if where == "sent" else value).detach().requires_grad_()
            (mse(model[2:](given), targets) / 4).backward()
            value.backward(change(given.grad) if where == "sent back" else given.grad)

    found = diagnose(step, model, x, y, mse, microbatches=4)
    assert (found.code == "right") == (code == "right"), found


def test_steps_of_an_eighth_are_no_rounding_and_autocast_is_in_one_type():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    x, y = torch.randn(16, 8), torch.randn(16, 8)

    def step(x, y):
        for rows, targets in pieces(x, y, 4):
            value = model[:2](rows)
            given = ((value * 8).round() / 8).detach().requires_grad_()
            (mse(model[2:](given), targets) / 4).backward()
            value.backward(given.grad)

    assert diagnose(step, model, x, y, mse, microbatches=4).code == "unexplained"
    found = diagnose(in_bfloat16(model, [1] * 4), model, x, y, mse, microbatches=4)
    assert str(found).endswith(", in bfloat16.")


def test_layers_run_as_often_however_the_sequence_is_cut():
    """A recurrent layer also returns its last states, which are more where the sequence is cut."""
    lstm = plain.Made(lambda self, x: self.head(self.lstm(x)[0]), lstm=nn.LSTM(8, 8), head=nn.Linear(8, 4))
    x, y = torch.randn(8, 8, 8), torch.randn(8, 8, 4)

    def step(x, y):
        for rows, targets in pieces(x, y, 4):
            (mse(lstm(rows), targets) / 4).backward()

    assert diagnose(step, lstm, x, y, mse, microbatches=4, batch_dim=1).code == "unexplained"


def test_a_wrong_step_in_float32_is_not_taken_for_rounding():
    model = plain.mlp(4)
    found = found_in(lambda x, y: mse(model(x), y + 1e-2 * y.roll(1, 0)).backward(), model, 24, microbatches=6)
    assert found.code == "unexplained"
    assert found.residual < 0.02
    assert " 0.0" not in str(found)  # the share is said, however small


def test_what_cannot_be_verified_is_said():
    model = nn.Sequential(*plain.mlp(2), nn.BatchNorm1d(6), nn.Dropout(0.5))
    found = found_in(looped(model, [1] * 5), model)
    assert found.code == "right"
    assert [line.split()[2] for line in str(found).splitlines()[1:]] == ["dropout", "BatchNorm"]
    assert "not verified" not in str(found_in(looped(model.eval(), [1] * 5), model))


@pytest.mark.parametrize("schedule", [OneFOneB(2, 5), ZBH1(2, 5), GPipe(1, 5)], ids=str)
def test_a_pipeline_with_dropout_is_compared(schedule):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), *plain.mlp(2), nn.Dropout(0.5))
    with Pipeline(model, schedule, mse) as pipe:
        for times, code in ((1, "right"), (5, "times-microbatches")):

            def step(x, y, times=times):
                pipe.step(x, y)
                for parameter in model.parameters():
                    parameter.grad *= times

            found = found_in(step, model)
            assert found.code == code
            assert ("so the whole batch is not compared" in str(found)) == (code == "right")


def test_a_pipeline_whose_stages_have_other_names_is_not_compared_with_dropout():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5))
    with Pipeline([model[:1], model[1:]], GPipe(2, 5), mse) as pipe:
        assert "draws other random numbers" in str(found_in(pipe.step, model))


# ── What a step trains ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_diagnoses_the_stages_that_it_trains():
    model = plain.mlp(4)
    copied = copy.deepcopy(model)

    def step(x, y):
        for rows, targets in pieces(x, y, 5):
            mse(copied(rows), targets).backward()

    found = found_in(step, model, trained=[copied])
    assert (found.code, len(found.wrong)) == ("times-microbatches", 4)
    assert all(each.grad is None for each in copied.parameters())
    part = found_in(looped(model, [5] * 5), model, trained=[model[2:]])
    assert (part.code, part.wrong) == ("times-microbatches", ("2.weight", "2.bias"))  # names are the model's
    with torch.no_grad():
        copied[2].weight += 1
    for trained, name in ((copied, "2.weight"), (nn.Sequential(*copied[2:]), "0.weight")):
        with pytest.raises(UsageError, match=f"{name} in trained has other weights than the model's"):
            found_in(step, model, trained=[trained])


@pytest.mark.dist
def test_processes_of_pytorchs_own_schedule_diagnose_their_stages():
    for each in processes.run_in(2, "diagnosed.py"):
        assert each.code == 0, processes.shown([each])
        assert [(fact["code"], fact["factor"]) for fact in each.facts] == [("right", 1), ("times-microbatches", 4)]
        assert [fact["right"] for fact in each.facts] == [[True] * 2, [False] * 2]  # a weight and a bias


def test_what_cannot_be_compared_is_refused():
    model = plain.mlp(2)
    step = looped(model, [1] * 5)
    contrast = lambda output, target: (output @ target.T).softmax(0).trace()  # noqa: E731 - rows against rows
    with pytest.raises(UsageError, match="microbatches=0: expected a whole number"):
        diagnose(step, model, torch.randn(20, 6), torch.randn(20, 6), mse, microbatches=0)
    with pytest.raises(UsageError, match="19 rows, and the batch has 20"):
        found_in(step, model, microbatches=[10, 9])
    with pytest.raises(LossError, match="not a weighted sum"):
        found_in(step, model, loss=contrast)
    assert found_in(step, model, loss=contrast, reduction="mean").code == "unexplained"
    with pytest.raises(UsageError, match="no parameter"):
        found_in(step, model.requires_grad_(False))


def test_a_model_with_several_inputs_is_called_as_you_say():
    model = plain.Made(
        lambda self, ids, mask: {"scores": self.layer(ids) * mask, "length": mask.sum()}, layer=nn.Linear(6, 6)
    )
    rows, y = plain.batch(12)
    loss = lambda output, target: mse(output["scores"], target)  # noqa: E731
    step = lambda x, y: loss(model(**x), y).backward()  # noqa: E731
    batch = {"ids": rows, "mask": torch.ones(12, 1)}, y
    assert found_in(step, model, batch, loss, microbatches=3, forward=lambda x: model(**x)).code == "right"
