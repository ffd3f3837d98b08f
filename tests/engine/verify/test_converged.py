"""`verify` where training has converged: no right pipeline is accused, and every fault is found all the same."""

from __future__ import annotations

from pipes import mse, no_trace, refused, verified

import plain
import pytest
import torch
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline
from pipelab.engine.stage.stage import Stage
from pipelab.errors import VerificationError

ROWS = 20


def rounds():
    """Return a stage that rounds the whole batch otherwise than a part of it, as a matrix product may."""
    return plain.Made(lambda _, x: x + 1e-6 * (len(x) == ROWS))


def converged(*layers, steps=600):
    """Return a model that has learnt what it can compute exactly, and its batch: residuals are rounding errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6))
    x = torch.randn(ROWS, 6)
    y = x @ torch.randn(6, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-2 * (1 - step / steps)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return model, x, y


def test_a_right_pipeline_is_not_accused_when_rounding_decides_its_gradients():
    model, x, y = converged(rounds())
    with Pipeline(model, OneFOneB(2, 8), mse) as pipe:
        assert pipe.step(x, y).loss < 1e-9
        with no_trace(model):
            proof = pipe.verify(x, y)
    assert proof.exact
    assert proof.nearby
    assert proof.whole_batch_difference < 1e-4
    assert "with slightly different weights" in str(proof)


def test_a_relu_whose_input_is_within_rounding_of_zero_is_no_fault():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), rounds(), nn.ReLU(), nn.Linear(6, 6))
    x, y = plain.batch(ROWS)
    with torch.no_grad():
        model[0].bias.copy_(-(model[0].weight @ x[3]) - 5e-7)  # in the whole batch it is 5e-7 instead
    proof = verified(model, OneFOneB(2, 4), (x, y))
    assert proof.exact
    assert proof.nearby


@pytest.mark.parametrize("fault", [0.0, 0.05])
def test_where_kernels_differ_some_of_millions_of_relus_are_always_within_rounding_of_zero(monkeypatch, fault):
    monkeypatch.setattr("pipelab.engine.verify.causes._OTHER_KERNELS", {"cpu"})  # as on a GPU
    monkeypatch.setattr("pipelab.engine.verify.causes._LAST_BITS", 4e-6)  # `rounds` is as coarse
    torch.manual_seed(0)
    mixes = plain.Made(lambda _, x: x * (1 + fault * x.mean(0)))
    model = nn.Sequential(mixes, nn.Linear(6, 200_000), rounds(), nn.ReLU(), nn.Linear(200_000, 6))
    if fault:
        refused("not the whole batch's", model, OneFOneB(2, 2), ROWS, call="verify", error=VerificationError)
    else:
        proof = verified(model, OneFOneB(2, 2), ROWS)
        assert proof.exact
        assert proof.nearby


@pytest.mark.parametrize("fault", [0.01, 0.03])
def test_a_small_fault_is_found_beside_relus(fault):
    torch.manual_seed(0)
    mixes = plain.Made(lambda _, x: x - fault * x.mean(0))
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model, batch = nn.Sequential(nn.Linear(64, 64), mixes, *layers), plain.batch(64, 64)
    refused("not the whole batch's", model, OneFOneB(2, 4), batch, call="verify", error=VerificationError)


def test_weights_come_back_bit_for_bit_when_the_plain_model_fails_nearby():
    def fails(self, x):
        self.calls += 1
        if self.calls == 12:
            raise ValueError("enough")
        return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), rounds(), plain.Made(fails, calls=0), nn.Linear(6, 6))
    x, _ = plain.batch(ROWS)
    # The first 2 calls; then the pipeline's 4, plain training's 4, the whole batch's, and, nearby, the 12th.
    y = torch.cat([model(rows).detach() for rows in x.split(10)])
    with no_trace(model):
        refused("enough", model, OneFOneB(2, 4), (x, y), call="verify", error=ValueError)


def test_moved_weights_are_not_left_in_the_cache_of_the_callers_autocast():
    model, x, y = converged(rounds())
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe, torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        pipe.verify(x, y)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("layer", "loss", "reduction", "told"),
    [
        (nn.Identity(), lambda output, target: (output - target).pow(2).sum(), "mean", "reduction is"),
        (nn.Identity(), mse, "sum", "reduction is"),
        (nn.Identity(), mse, lambda y: len(y) ** 2, "reduction is"),
        (plain.Made(lambda _, x: x - 1e-2 * x.mean(0)), mse, "mean", "not the whole batch's"),
        (plain.Remembers(), mse, "mean", r"1\.weight \(stage 0\) differs from the plain"),
    ],
    ids=["a sum taken for a mean", "a mean taken for a sum", "wrong weights", "mixed rows", "state"],
)
def test_what_is_wrong_is_found_at_converged_weights(layer, loss, reduction, told):
    model, x, y = converged(layer)
    how = {"reduction": reduction, "call": "verify", "error": VerificationError}
    refused(told, model, GPipe(2, 8), (x, y), loss, **how)


@pytest.mark.parametrize("factor", [0.0, 2.0], ids=["missing", "doubled"])
def test_a_micro_batchs_gradient_that_is_missing_or_doubled_is_found(monkeypatch, factor):
    backward = Stage.backward

    def wrong(stage, microbatch, gradients, *rest):
        here = (stage.index, microbatch) == (0, 2)
        return backward(stage, microbatch, gradients * factor if here else gradients, *rest)

    model, x, y = converged(nn.Identity())
    monkeypatch.setattr(Stage, "backward", wrong)
    told = r"of 0\.\w+ \(stage 0\) differs from the plain model's by .*\nmicro-batch 2 is the first"
    refused(told, model, OneFOneB(2, 4), (x, y), call="verify", error=VerificationError)


@pytest.mark.parametrize("width", [3, 5, 7, 13])
def test_a_first_layer_in_place_at_an_odd_width_is_verified_bit_for_bit(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, 9), nn.Linear(9, width))
    assert verified(model, OneFOneB(2, 6), plain.batch(33, width)).exact
