"""Random numbers in several processes: those of the threads, from the seed of rank 0's process."""

from __future__ import annotations

import processes
import pytest
import random_steps
import torch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said():
    return [ended.facts for ended in processes.run_in(2, "random_numbers.py")]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in a forward alone
@pytest.mark.parametrize("model", random_steps.MODELS)
@pytest.mark.parametrize("schedule", random_steps.SCHEDULES, ids=str)
def test_processes_draw_what_threads_draw(said, model, schedule):
    ours = [next(f for f in rank if (f["model"], f["schedule"]) == (model, str(schedule))) for rank in said]
    theirs = random_steps.told(model, schedule, "threads", seed=7)
    for rank in ours:
        assert rank["losses"] == theirs["losses"]
        assert rank["outputs"] == theirs["outputs"]
    assert {**ours[0]["gradients"], **ours[1]["gradients"]} == theirs["gradients"]
    assert ours[0]["drawn"] == theirs["drawn"]
    torch.manual_seed(8)  # rank 1's: it moves by as many numbers
    for _ in range(5):
        torch.empty((), dtype=torch.int64).random_()
    assert ours[1]["drawn"] == torch.rand(()).item()
