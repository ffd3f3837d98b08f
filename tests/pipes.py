"""What many tests of the engine do with a pipeline, in one call each."""

from __future__ import annotations

import plain
import pytest
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
