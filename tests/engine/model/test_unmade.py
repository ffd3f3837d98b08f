"""Layers on the meta device that are made in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipelab import OneFOneB, Pipeline
from pipelab.errors import SplitError


class Scale(nn.Module):
    """A layer whose `reset_parameters` may forget its mask."""

    def __init__(self, masks):
        super().__init__()
        self.weight, self.masks = nn.Parameter(torch.empty(4)), masks
        self.register_buffer("mask", torch.ones(4))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        if self.masks:
            self.mask.fill_(1)

    def forward(self, x):
        return x * self.weight * self.mask


def test_numbers_that_nothing_fills_are_refused():
    with torch.device("meta"):
        right, wrong = (nn.Sequential(Scale(masks), Scale(masks)) for masks in (True, False))
    with Pipeline(right, OneFOneB(2, 2), nn.functional.mse_loss) as pipe:
        assert float(pipe.step(torch.ones(4, 4), torch.zeros(4, 4)).loss) == 1
    with pytest.raises(SplitError, match=r"layer '\d', Scale, leaves a parameter or a buffer without numbers"):
        Pipeline(wrong, OneFOneB(2, 2), nn.functional.mse_loss)
