"""Batches become micro-batches and back, and trees of tensors keep their shape."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pipes import refused

import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelab import GPipe
from pipelab.engine.stage.batch import join, row_counts, rows_of, split_batch, weights_of
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import map_tensors, rebuild, take_apart, tensors_of
from pipelab.errors import BatchError

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - what students' data sets return


@given(rows=st.integers(1, 200), microbatches=st.integers(1, 200))
def test_rows_are_dealt_out_evenly_the_first_micro_batches_taking_the_extra(rows, microbatches):
    if rows >= microbatches:
        counts = [len(piece) for piece in torch.arange(rows).tensor_split(microbatches)]
        assert row_counts(rows, microbatches) == counts
        return
    told = rf"{rows} rows? cannot fill {microbatches} micro-batches: use at most {rows} .*drop_last=True.*evaluate it"
    with pytest.raises(BatchError, match=told):
        row_counts(rows, microbatches)


TREES = [
    torch.arange(10.0).reshape(5, 2),
    (torch.arange(5), torch.arange(15).reshape(5, 3)),
    [torch.arange(5)],
    {"tokens": torch.arange(5), "mask": (torch.ones(5, 1), torch.zeros(5, 2))},
    OrderedDict(a=torch.arange(5), b=torch.ones(5)),
    Pair(torch.arange(5), torch.ones(5)),
]


@pytest.mark.parametrize("value", TREES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_a_batch_split_and_joined_is_the_batch(value, microbatches):
    pieces = split_batch(value, row_counts(5, microbatches))
    assert len(pieces) == microbatches
    assert [rows_of(piece, "piece") for piece in pieces] == row_counts(5, microbatches)
    joined = join(pieces)
    assert type(joined) is type(value)
    assert take_apart(joined)[1] == take_apart(value)[1]
    assert all(torch.equal(ours, whole) for ours, whole in zip(tensors_of(joined), tensors_of(value), strict=True))


def test_micro_batches_are_views_of_the_batch_and_share_what_is_no_tensor():
    x = torch.zeros(5, 2)
    pieces = split_batch({"x": x, "mode": "causal", "none": None}, [3, 2])
    for piece in pieces:
        piece["x"] += 1
    assert torch.equal(x, torch.ones(5, 2))
    assert [piece["mode"] for piece in pieces] == ["causal", "causal"]
    assert join(pieces)["mode"] == "causal"
    assert join(pieces)["none"] is None


def test_a_scalar_beside_the_predictions_gets_a_row_per_micro_batch():
    joined = join([(torch.zeros(2, 3), torch.tensor(1.0)), (torch.ones(1, 3), torch.tensor(2.0))])
    assert joined[0].shape == (3, 3)
    assert torch.equal(joined[1], torch.tensor([1.0, 2.0]))


@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_mean_weighs_by_rows_and_sums_to_one(counts):
    weights = weights_of("mean", counts, [None] * len(counts))
    assert weights == [count / sum(counts) for count in counts]
    assert sum(weights) == pytest.approx(1)


def test_sum_weighs_one():
    assert weights_of("sum", [3, 2], [None, None]) == [1, 1]


def test_an_error_in_the_reduction_itself_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        weights_of(lambda target: 1 / target, [2], [0])


@pytest.mark.parametrize("number", [float, torch.tensor, lambda weight: torch.tensor(weight, dtype=torch.float64)])
def test_a_function_weighs_each_target_and_the_weights_sum_to_one(number):
    weights = weights_of(lambda target: number(target), [2, 2, 2], [1.0, 0.0, 3.0])
    assert [float(weight) for weight in weights] == [0.25, 0.0, 0.75]


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), 1e308])
def test_weights_that_sum_to_nothing_or_to_infinity_are_refused(weight):
    with pytest.raises(BatchError, match="weights of the micro-batches sum to"):
        weights_of(lambda _: weight, [2, 2], [None, None])


@pytest.mark.parametrize(
    "weight",
    [None, torch.ones(2), torch.ones(0), 1j, "many", float("inf"), float("nan"), torch.tensor(torch.nan), -1, -1e-9],
)
def test_what_is_no_weight_is_refused_with_its_micro_batch_and_value(weight):
    told = r"reduction returned .* for micro-batch 1: expected a finite number, 0 or more"
    with pytest.raises(BatchError, match=told) as refused:
        weights_of(lambda target: weight if target else 3.0, [2, 2, 2], [0, 1, 1])
    assert str(weight)[:5] in str(refused.value)


def test_a_reduction_that_returns_no_weight_is_refused_before_anything_runs():
    model, told = plain.mlp(2), "for micro-batch 0: expected a finite number"
    refused(told, model, GPipe(2, 2), 4, error=BatchError, reduction=lambda y: y.sum(1))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trees_are_taken_apart_rebuilt_and_mapped():
    value = {"a": (torch.ones(2), "text"), "b": [None, torch.zeros(1)]}
    assert [tuple(tensor.shape) for tensor in tensors_of(value)] == [(2,), (1,)]
    leaves, spec = take_apart(value)
    assert rebuild(leaves, spec) == value
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert torch.equal(doubled["a"][0], torch.full((2,), 2.0))
    assert doubled["a"][1] == "text"
    assert torch.equal(value["a"][0], torch.ones(2))
    single = torch.ones(1)
    assert tensors_of(single)[0] is single
    assert map_tensors(lambda tensor: tensor + 1, single).item() == 2


def test_replicas_outputs_and_losses_come_to_the_first_microbatchs_device():
    here, there = torch.ones(2, 3, device="meta"), torch.ones(1, 3)
    assert join([here, there]).device.type == "meta"
    assert join([{"a": here}, {"a": there}])["a"].shape == (3, 3)
    loss = Loss(lambda output, target: output, targets=[None, None], weights=[0.5, 0.5])
    loss.values = [torch.ones((), device="meta"), torch.ones(())]
    assert loss.total().device.type == "meta"
