"""What many tests of the engine do with a pipeline, in one call each."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import plain
import pytest
import torch
from strategies import in_order
from torch import nn

from pipelab import Pipeline
from pipelab.errors import StageError

mse = nn.functional.mse_loss


def given(batch):
    """Return a batch: as many rows as a number says, or what it is."""
    return plain.batch(batch) if isinstance(batch, int) else batch


def stepped(model, schedule, batch=8, loss=mse, **settings):
    """Return what one step returns."""
    with Pipeline(model, schedule, loss, **settings) as pipe:
        return pipe.step(*given(batch))


def verified(model, schedule, batch=8, loss=mse, **settings):
    """Return what `verify` proves."""
    with Pipeline(model, schedule, loss, **settings) as pipe:
        return pipe.verify(*given(batch))


def refused(told, model, schedule, batch=8, loss=mse, call="step", error=StageError, **settings):
    """Return the error of a call, whose message matches."""
    with Pipeline(model, schedule, loss, **settings) as pipe:
        rows = given(batch)
        with pytest.raises(error, match=told) as caught:
            getattr(pipe, call)(*(rows[:1] if call == "forward" else rows))
    return caught.value


def assert_trains(pipe, model, batch=8, loss=mse, within=None):
    """Assert that the next step has the gradients of plain micro-batches, bit for bit if the plan has their order.

    Return the step.
    """
    x, y = given(batch)
    model.zero_grad()
    expected = plain.gradients(model, loss, x, y, pipe.plan.microbatches)
    step = pipe.step(x, y)
    gradients = plain.taken(model)
    if within is None and in_order(pipe.plan):
        assert plain.equal(gradients, expected)
    else:
        assert plain.difference(gradients, expected) <= (within or 1e-6)
    return step


@contextmanager
def no_trace(*modules):
    """Assert that parameters, buffers, gradients, modes and random numbers are as before."""
    parts = [part for module in modules for part in module.modules()]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    held, modes = [parameter.grad for parameter in parameters], [part.training for part in parts]
    kept, random_state = copy.deepcopy((held, [module.state_dict() for module in modules])), torch.get_rng_state()
    yield
    assert [part.training for part in parts] == modes
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, held, strict=True))
    torch.testing.assert_close((held, [module.state_dict() for module in modules]), kept, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
