"""The page of questions: its code runs from top to bottom, and gives what the page says."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran
from torch import nn

import pipelab

PAGE = Path(__file__).parents[1] / "docs" / "questions.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run the page; return what it has made."""
    return ran(PAGE)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # TorchDynamo
@pytest.mark.parametrize(("name", "many"), [("training", 2), ("inputs", 5)])
def test_the_code_of_a_page_runs_and_prints_what_it_says(capsys, monkeypatch, tmp_path, name, many):
    monkeypatch.chdir(tmp_path)  # a page may save files
    page = PAGE.with_name(f"{name}.md")
    ran(page)
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"print\(.*\)  # (.*?)(?: …)?$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    printed = [line for line in printed if not line.startswith("  try: ")]
    assert len(said) == len(printed) == many
    assert all(map(str.startswith, printed, said))


def test_costs_are_those_of_one_microbatch(names):
    same, larger, best = (names[name] for name in ("same_cut", "larger_batch", "at_best"))
    cost, schedule = dataclasses.replace(names["cost"], latency=0, bandwidth=None), pipelab.OneFOneB(2, 16)
    halved, whole = (pipelab.simulate(schedule, each).makespan for each in (cost.shared(2), cost))
    assert halved == pytest.approx(whole / 2)
    assert best.makespan >= halved  # a transfer takes as long for half the rows
    assert names["finer_cut"].plan == best.plan
    work = sum(names["cost"].times(same.plan)[kind][0] for kind in "FB")
    assert same.makespan > 8 * work
    assert larger.makespan > 16 * work


def test_what_a_forward_keeps_are_the_inputs_of_its_layers_and_its_output(names):
    layer = 32 * 512 * 4
    assert names["memory"].activations == (4 * layer, 5 * layer)  # the batch is stage 0's first; the loss's squares
    predicted = pipelab.memory_use(pipelab.GPipe(2, 8), names["memory"])
    said, found = (
        [max(held.activations for held in curve) for curve in use.curves] for use in (predicted, names["stepped"])
    )
    assert said == found == [8 * size for size in names["memory"].activations]


def test_loss_and_accuracy_are_those_of_the_plain_model_which_trains_on(names):
    model, data = names["trained_model"], names["validation"]
    assert model.training
    model.eval()
    right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in data)
    assert names["accuracy"] == right / 72
    whole = nn.functional.cross_entropy(
        *map(torch.cat, zip(*((model(each), labels) for each, labels in data), strict=True))
    )
    assert names["validation_loss"] == pytest.approx(float(whole.detach()), rel=1e-6)


def test_padding_is_weighed_as_the_whole_batch_weighs_it(names):
    assert names["padded"].whole_batch_difference < 1e-5
    with (
        pipelab.Pipeline(names["classifier"], pipelab.OneFOneB(2, 8), nn.CrossEntropyLoss()) as pipe,
        pytest.raises(pipelab.LossError, match=r"reduction=lambda target: \(target != -100\)\.sum\(\)"),
    ):
        pipe.step(names["x"], names["labels"])


def test_a_loop_that_sums_is_named_as_the_page_prints_it(names):
    assert (names["found"].code, names["found"].factor) == ("times-microbatches", 8)
    assert all(f"# {line}" in PAGE.read_text(encoding="utf-8") for line in str(names["found"]).splitlines())


def test_a_trace_of_whole_backwards_gives_halves(names):
    trace = pipelab.simulate(pipelab.ZBH1(2, 8), names["cost"])
    first, last = ({event.action.kind: event.duration for event in trace.events_of(rank)} for rank in (0, 1))
    assert last["I"] == pytest.approx(last["W"])
    assert first["I"] == pytest.approx(0)
    assert first["W"] == pytest.approx(names["cost"].backward[0])
    assert names["coarse"].plan.stages == 2


def test_a_timeout_names_ranks_and_the_line(names):
    class Sleeps(nn.Module):
        def forward(self, x):
            time.sleep(1)
            return x

    stages = [nn.Linear(512, 512), Sleeps()]
    with (
        pipelab.Pipeline(stages, pipelab.OneFOneB(2, 8), names["loss_fn"], timeout=0.3) as pipe,
        pytest.raises(pipelab.StepTimeoutError) as raised,
    ):
        pipe.step(names["x"], names["y"])
    told = str(raised.value)
    assert "rank 0 waits" in told
    assert "time.sleep(1)" in told
