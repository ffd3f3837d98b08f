"""Buffers and random state are kept and put back."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from pipelab.engine.stage.snapshot import BatchSnapshot, BufferSnapshot, RandomSnapshot, unchanged


def test_buffers_get_their_values_and_their_places_back():
    norm = nn.BatchNorm1d(3)
    mean, variance = norm.running_mean, norm.running_var
    kept = BufferSnapshot([nn.Sequential(norm)])
    norm.running_mean.add_(1)
    norm.running_var = torch.zeros(3)
    kept.restore()
    assert norm.running_mean is mean
    assert norm.running_var is variance
    assert mean.tolist() == [0.0] * 3
    assert variance.tolist() == [1.0] * 3


@pytest.mark.parametrize("buffer", [torch.zeros(1).expand(4), torch.eye(2).to_sparse(), torch.full((2,), torch.nan)])
def test_buffers_of_any_layout_can_be_kept(buffer):
    module = nn.Module()
    module.register_buffer("buffer", buffer)
    BufferSnapshot([module]).restore()
    assert module.buffer is buffer


def test_attributes_get_their_values_back_also_inside_lists_and_dicts():
    module = nn.Sequential(nn.BatchNorm1d(3))
    part, last = module[0], torch.zeros(2)
    part.mean, part.seen, part.rows, part.last = 0.0, {"a": 1}, deque([1]), last
    with unchanged([module], attributes=True):
        part.train(False).running_mean.add_(1)
        part.mean, part.last, part.new = 5.0, part.last.add_(1) + 1, 3
        part.rows.append(2)
        part.seen["b"] = 2
        part.weight = weight = nn.Parameter(torch.zeros(3))  # as a layer that is spread over processes does
    assert (part.mean, part.seen, part.rows, part.last is last, last.tolist()) == (
        0,
        {"a": 1},
        deque([1]),
        True,
        [0, 0],
    )
    assert (part.training, hasattr(part, "new"), part.running_mean.tolist()) == (True, False, [0] * 3)
    assert part.weight is weight


def test_the_same_random_numbers_come_again():
    kept = RandomSnapshot()
    assert kept == RandomSnapshot()
    first = torch.rand(3)
    assert kept != RandomSnapshot()
    kept.restore()
    assert torch.equal(torch.rand(3), first)


def test_an_error_leaves_nothing_changed():
    norm, kept = nn.BatchNorm1d(3), RandomSnapshot()

    def fail():
        norm(torch.randn(4, 3))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), unchanged([norm]):
        fail()
    assert norm.num_batches_tracked == 0
    assert kept == RandomSnapshot()


def test_a_batch_that_nobody_wrote_into_is_not_written_into_again():
    """A graph of the caller's that has saved it would find it changed."""
    numbers = [torch.tensor([1.0, torch.nan]), torch.tensor([True]), torch.tensor([3]), torch.tensor([1 + 2j])]
    kept = BatchSnapshot(numbers)
    versions = [each._version for each in numbers]
    kept.restore()
    assert [each._version for each in numbers] == versions
    numbers[0][0] = 5
    numbers[2][0] = 5
    kept.restore()
    assert (float(numbers[0][0]), int(numbers[2][0])) == (1.0, 3)
    with torch.inference_mode():
        unwritable = torch.ones(2)
        kept = BatchSnapshot([unwritable])
        unwritable += 1
    kept.restore()
    assert unwritable.tolist() == [2, 2]  # a batch that cannot be written into is left as the model left it
