"""The page on balanced experts: its code trains in threads and in processes, and its weights are right."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch
from commands import ran

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "balanced_experts.md"


def plain_losses(made):
    """Return the losses of plain training: each micro-batch's loss, auxiliary loss included, weighs its rows."""
    torch.manual_seed(0)
    stages = torch.nn.Sequential(made["Experts"](), made["Experts"]())
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
    x, y = torch.randn(30, 16), torch.randn(30, 16)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        shares = [
            made["loss_fn"](stages(rows), targets) * len(rows) / 30
            for rows, targets in zip(x.split([8, 8, 7, 7]), y.split([8, 8, 7, 7]), strict=True)
        ]
        sum(shares).backward()
        optimizer.step()
        losses.append(float(sum(shares).detach()))
    return losses


def test_the_code_trains_in_threads_and_balance_is_what_it_says(capsys):
    made = ran(PAGE)
    said = "All 6 gradients match plain training with the same 4 micro-batches bit for bit."
    assert capsys.readouterr().out.splitlines() == [said]
    assert made["losses"] == pytest.approx(plain_losses(made), rel=1e-5)
    assert made["losses"][-1] < made["losses"][0]
    balance, used = made["balance"], torch.eye(4)
    assert (float(balance(used)), float(balance(used[:1].expand(4, 4)))) == (1, 4)


@pytest.fixture(scope="module")
def both():
    return processes.run_well(2, "experts.py")


@pytest.mark.dist
def test_the_code_trains_in_processes_with_the_same_losses(both):
    expected = ran(PAGE)["losses"]
    for ended in both:
        fact, _ = ended.facts
        assert (fact["losses"], fact["exact"], fact["parameters"]) == (expected, True, 6)


@pytest.mark.dist
def test_a_loss_that_another_process_cannot_see_is_told_of_once(both):
    told, none = (ended.facts[1]["told"] for ended in both)
    assert none == []
    (message,) = told
    assert message.startswith("stage 0 left aux, a tensor with a history, on a module: loss_fn, if it reads that ")
    assert "try: return it beside the output, as in (h, aux)" in message
