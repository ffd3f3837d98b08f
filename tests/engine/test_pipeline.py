"""What users of PyTorch type out of habit is done, or answered with what to type instead."""

from __future__ import annotations

import plain
import pytest
import torch
from torch import nn

import pipelab
from pipelab import GPipe, OneFOneB, Pipeline

mse = nn.functional.mse_loss


@pytest.fixture
def pipe():
    with Pipeline(plain.mlp(4), GPipe(2, 2), mse) as made:
        yield made


def test_eval_and_train_set_the_models_mode_as_a_modules_do():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
    x, _ = plain.batch(8)
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        assert pipe.eval() is pipe
        assert not any(module.training for module in model.modules())
        with torch.no_grad():
            torch.testing.assert_close(pipe.forward(x), model(x))
        assert pipe.train() is pipe
        assert all(module.training for module in model.modules())
        assert pipe.train(False) is pipe
        assert not model.training


def test_the_mode_reaches_a_list_of_stages():
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Dropout()), nn.Linear(6, 6)]
    with Pipeline(stages, GPipe(2, 2), mse) as pipe:
        pipe.eval()
    assert not any(part.training for stage in stages for part in stage.modules())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_says_how_to_get_the_loss_alone(pipe, without):
    with without(), pytest.raises(pipelab.UsageError, match=r"try: pipe.evaluate\(x, y\)"):
        pipe.step(*plain.batch(4))
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("engine", ["threads", "torch"])
def test_no_engine_sends_activations_away(engine):
    plan = pipelab.Plan.parse("0F0 0OFFLOAD0 0LOAD0 0B0")
    with pytest.raises(pipelab.EngineError, match=r"OFFLOAD \(offload\), LOAD \(load\)"):
        pipelab.Pipeline(nn.Sequential(nn.Linear(2, 2)), plan, nn.MSELoss(), engine=engine)
