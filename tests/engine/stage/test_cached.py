"""Slices of a sequence on real tensors: causal attention with a cache has the gradients of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import pipelab
from pipelab import BatchError, Pipeline, StageError, VerificationError


class Block(nn.Module):
    """A transformer block with causal attention: of the slices so far, unless it has no cache."""

    def __init__(self, width=8, heads=2, cache=True):
        super().__init__()
        self.heads, self.cache = heads, cache
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        """Return `[rows, tokens, width]`."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.cache:
            k, v = pipelab.cached(k, v)
        mask = causal_lower_right(q.shape[-2], k.shape[-2])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Split(pipelab.Greedy):
    """Slices with split backwards, in the order of list scheduling."""

    slices = 4

    def __init__(self, ranks, microbatches):
        super().__init__(ranks, microbatches, split=True)


def made(schedule, layer=Block, engine="threads", **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer(**options) for _ in range(2 * schedule.stages))).double()
    devices = None if engine == "torch" else ["cpu"] * schedule.ranks
    return model, Pipeline(model, schedule, nn.functional.mse_loss, devices, engine, sequence_dim=1)


def batch():
    torch.manual_seed(1)
    return torch.randn(6, 16, 8).double(), torch.randn(6, 16, 8).double()


def matches_whole_sequences(model, pipe):
    """Hold one step against the whole batch through the model: loss, outputs and gradients."""
    x, y = batch()
    step = pipe.step(x, y)
    ours = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    assert torch.allclose(step.loss, loss, rtol=1e-12)
    assert torch.allclose(step.outputs, model(x), rtol=1e-12)
    assert torch.allclose(pipe.forward(x), model(x), rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours.pop(0), parameter.grad, rtol=1e-9, atol=1e-14), name


@pytest.mark.parametrize(
    "schedule",
    [
        pipelab.Seq1F1B(3, 12, slices=4),
        pipelab.Seq1F1B(1, 6, slices=2),
        pipelab.SlimPipe(2, 6, stages_per_rank=3),
        Split(3, 12),
        pipelab.replicate(pipelab.Seq1F1B(2, 4), 2),
    ],
    ids=str,
)
def test_gradients_of_slices_are_those_of_whole_sequences(schedule):
    model, pipe = made(schedule)
    with pipe:
        matches_whole_sequences(model, pipe)
        verification = pipe.verify(*batch())
        assert verification.compared
        assert verification.whole_batch_difference < 1e-12


def test_gradients_of_slices_are_the_same_on_pytorchs_runtime():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, pipe = made(pipelab.SlimPipe(1, 6, slices=2), engine="torch")
        with pipe:
            matches_whole_sequences(model, pipe)
    finally:
        dist.destroy_process_group()


def test_slices_as_rows_are_told_from_slices_of_a_sequence():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block().double() for _ in range(2)))
    x, y = batch()
    with Pipeline(model, pipelab.Seq1F1B(2, 6), nn.functional.mse_loss, ["cpu"] * 2) as pipe:
        assert pipe.verify(x, y).compared  # six micro-batches of whole sequences, which know nothing of each other


def test_attention_without_the_cache_does_not_verify():
    _, pipe = made(pipelab.Seq1F1B(2, 6), cache=False)
    with pipe, pytest.raises(VerificationError, match="the sequence of micro-batches 0, 1 is the first"):
        pipe.verify(*batch())


def test_nothing_of_a_step_is_kept_for_the_next_one():
    model, pipe = made(pipelab.Seq1F1B(2, 6, slices=3))
    x, y = batch()
    with pipe:
        first = pipe.step(x[:, :15], y[:, :15]).loss
        model.zero_grad()
        assert torch.equal(pipe.step(x[:, :15], y[:, :15]).loss, first)
        pipe.step(x[:, :9], y[:, :9])


class Again(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("layer", "tokens", "error", "told"),
    [
        (Block, 16, BatchError, "dimension 1 of x has 16 tokens"),
        (Again, 15, StageError, "under an activation checkpoint"),
    ],
)
def test_sequences_that_cannot_be_cut_evenly_and_a_cache_under_a_checkpoint_are_refused(layer, tokens, error, told):
    _, pipe = made(pipelab.Seq1F1B(2, 6, slices=3), layer)
    x, y = batch()
    with pipe, pytest.raises(error, match=told):
        pipe.step(x[:, :tokens], y[:, :tokens])


def test_micro_batches_that_are_no_multiple_of_the_slices_are_refused():
    with pytest.raises(BatchError, match="into 1 slice and some into 3"):
        made(pipelab.Seq1F1B(2, 4, slices=3))
