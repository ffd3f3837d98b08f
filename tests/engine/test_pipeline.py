"""What users of PyTorch type out of habit is done, or answered with what to type instead."""

from __future__ import annotations

import copy
import pickle

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


# --- a pipeline is no module


def test_calling_a_pipeline_says_how_to_evaluate_and_how_to_train(pipe):
    x, y = plain.batch(4)
    for arguments in ((x,), (x, y)):
        with pytest.raises(pipelab.UsageError, match=r"pipe\.forward\(x\).*pipe\.step\(x, y\)"):
            pipe(*arguments)


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


@pytest.mark.parametrize("name", ["zero_grad", "load_state_dict", "named_parameters", "to"])
def test_what_only_a_module_has_is_the_models(pipe, name):
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=rf"Pipeline has no '{name}'.*model\.{name}"):
        getattr(pipe, name)


def test_what_nobody_has_is_an_ordinary_attribute_error(pipe):
    with pytest.raises(AttributeError, match=r"^'Pipeline' object has no attribute 'nonsense'$"):
        _ = pipe.nonsense


# --- the backward has already run


def test_a_backward_of_the_loss_says_that_it_has_already_run(pipe):
    step = pipe.step(*plain.batch(4))
    with pytest.raises(pipelab.UsageError, match=r"has already run.*optimizer\.step\(\)"):
        step.loss.backward()
    with pytest.raises(pipelab.UsageError, match="has already run"):
        step.backward()


def test_a_step_that_is_taken_for_its_loss_says_where_the_loss_is(pipe):
    step = pipe.step(*plain.batch(4))
    with pytest.raises(AttributeError, match=r"step\.loss\.item"):
        step.item()
    with pytest.raises(AttributeError, match=r"^'Step' object has no attribute 'nonsense'$"):
        _ = step.nonsense


def test_the_loss_is_a_tensor_like_any_other(pipe, tmp_path):
    loss = pipe.step(*plain.batch(4)).loss
    assert isinstance(loss, torch.Tensor)
    assert repr(loss) == repr(torch.tensor(loss.item()))
    assert f"{loss} {loss:.3f}" == f"{loss.item()} {loss.item():.3f}"
    assert loss.tolist() == float(loss) == loss.numpy() == loss.item()
    assert type(loss + 1) is type(loss.detach()) is type(torch.stack([loss])) is torch.Tensor
    for twin in (copy.deepcopy(loss), copy.copy(loss), pickle.loads(pickle.dumps(loss))):  # noqa: S301 - our own
        assert torch.equal(twin, loss)
    torch.save({"loss": loss}, tmp_path / "loss.pt")
    assert torch.equal(torch.load(tmp_path / "loss.pt")["loss"], loss)
    torch.testing.assert_close(loss, torch.tensor(loss.item()))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_says_how_to_get_the_loss_alone(pipe, without):
    with without(), pytest.raises(pipelab.UsageError, match=r"loss_fn\(pipe.forward\(x\), y\) for the loss alone"):
        pipe.step(*plain.batch(4))
    assert all(parameter.grad is None for parameter in pipe.parameters())
