"""Mixed precision, gradient accumulation, checkpoints and compiled stages, in both engines."""

from __future__ import annotations

import processes
import pytest
import recipes
import torch

import pipelab


def assert_as_plain(way, found):
    assert found["weights"] == found["norms"] == 0, found
    assert found["losses"] < 1e-6, found
    for ours, plainly in found["scales"]:
        assert ours == plainly
    if "overflow" in way:
        scales = [ours for ours, _ in found["scales"]]
        assert scales[0] == 2.0**118 > scales[-1] == 2.0**116  # two of the four steps were skipped


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # where a scaler skips a step
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # TorchDynamo
@pytest.mark.parametrize("way", recipes.WAYS)
def test_a_loop_trains_as_it_does_plainly(way):
    assert_as_plain(way, recipes.trained(way, pipelab.OneFOneB(2, recipes.MICROBATCHES), "threads"))


@pytest.mark.dist
def test_loops_train_so_in_two_processes():
    ended = processes.run_well(2, "recipe.py")
    for each in ended:
        *facts, masks = each.facts
        assert [fact["way"] for fact in facts] == list(recipes.IN_PROCESSES)
        for fact in facts:
            assert_as_plain(fact["way"], fact)
        assert masks == {"masks": [True, True]}


def test_the_loss_of_a_scaled_step_is_not_scaled_and_its_gradients_are():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with pipelab.Pipeline(model, pipelab.GPipe(2, 4), torch.nn.functional.mse_loss) as pipe:
        plainly = pipe.step(x, y).loss
        gradient = model[0].weight.grad.clone()
        model.zero_grad()
        assert torch.equal(pipe.step(x, y, torch.amp.GradScaler("cpu", init_scale=64)).loss, plainly)
        assert torch.equal(model[0].weight.grad, 64 * gradient)
        model.zero_grad()
        pipe.step(x, y, torch.amp.GradScaler("cpu", enabled=False))
        assert torch.equal(model[0].weight.grad, gradient)
