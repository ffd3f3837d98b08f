"""The page of questions: its code runs from top to bottom, and gives what the page says."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran
from torch import nn

import pipelab
from pipelab.engine.verify.causes import CAUSES

PAGE = Path(__file__).parents[1] / "docs" / "questions.md"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the page; return what it has made, and what it has printed."""
    with (
        contextlib.chdir(tmp_path_factory.mktemp("page")),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        made = ran(PAGE)
        return made | {"printed": printed.getvalue(), "saved": torch.load("run.pt")}


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
    model, validated = names["classifier"], names["validated"]
    assert model.training
    outputs = model.eval()(names["x"])
    assert torch.allclose(validated.outputs, outputs, atol=1e-6)
    labels = names["labels"]
    assert names["accuracy"] == (validated.outputs.argmax(1) == labels).float().mean()
    assert torch.isclose(validated.loss, nn.functional.cross_entropy(outputs, labels))


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(names):
    def trained(model, optimizer):
        with pipelab.Pipeline(model, names["schedule"], names["loss_fn"]) as pipe:
            for _ in range(2):
                optimizer.zero_grad()
                pipe.step(names["x"], names["y"])
                optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    weights, state, random = names["saved"]
    again = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(again.parameters())
    again.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert state["state"]
    assert len(random) == len(torch.get_rng_state())
    assert all(map(torch.equal, trained(again, optimizer), trained(names["model"], names["optimizer"])))


def test_padding_is_weighed_as_the_whole_batch_weighs_it(names):
    assert names["padded"].whole_batch_difference < 1e-5
    with (
        pipelab.Pipeline(names["tagger"], pipelab.OneFOneB(2, 8), nn.CrossEntropyLoss()) as pipe,
        pytest.raises(pipelab.LossError, match=r"reduction=lambda target: \(target != -100\)\.sum\(\)"),
    ):
        pipe.step(names["x"], names["targets"])


def test_a_loop_that_sums_is_named_as_the_page_prints_it(names):
    assert (names["found"].code, names["found"].factor) == ("times-microbatches", 8)


def test_the_page_prints_what_it_says(names):
    said = re.findall(r"print\((?:error|found)\)\n((?:# .*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert len(said) == 2
    assert all(lines.replace("\n# ", "\n").removeprefix("# ") in names["printed"] for lines in said)


def test_every_answer_that_the_reference_lists_is_one_of_diagnose():
    page = PAGE.with_name("reference") / "execution.md"
    codes = set(re.findall(r"^\|.*\| `([a-z-]+)`[^|]*\|$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(codes) > 25
    assert codes <= {*CAUSES, "right", "scaled"}


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
