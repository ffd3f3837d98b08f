"""The families of models that people train, from transformers, cut by one line: like plain training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

import pipelab
from pipelab.errors import SplitError

pytest.importorskip("transformers")

from families import FAMILIES, batch, distance, loss, made, part

ROOT = Path(__file__).parents[2]


@pytest.mark.sweep
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_three_steps_are_those_of_plain_training(name, stages):
    ours, theirs = made(name), made(name)
    (x, y), optimizers = (
        batch(name),
        [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-5) for each in (ours, theirs)],
    )
    with pipelab.Pipeline(
        pipelab.split(ours, stages, by="parameters", example=part(x, 0)), pipelab.OneFOneB(stages, 4), loss
    ) as pipe:
        for _ in range(3):
            step, losses = pipe.step(x, y), []
            for index in range(4):
                losses.append(loss(theirs(**part(x, index)), y[2 * index : 2 * index + 2]) / 4)
                losses[-1].backward()
            assert float(step.loss.detach()) == pytest.approx(float(sum(losses).detach()), rel=1e-5)
            grads = [[each.grad for each in model.parameters()] for model in (ours, theirs)]
            assert distance(*grads) < 1e-5
            for each in optimizers:
                each.step()
                each.zero_grad()
    assert distance(ours.parameters(), theirs.parameters()) < 1e-5


@pytest.mark.dist
def test_three_steps_in_two_processes_are_those_of_plain_training():
    ended = processes.run_well(2, "families_trained.py", seconds=220)
    facts = {fact["case"]: fact for fact in ended[0].facts}
    assert {*facts} == {"MixtralForCausalLM", "T5ForConditionalGeneration"}
    for fact in facts.values():
        assert fact["losses"] < 1e-5
        assert fact["weights"] < 1e-5
        assert fact["learned"] > 1e-3


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_written_by_hand_learn_as_the_model_does(name, stages):
    ours, theirs, (x, y) = made(name), made(name), batch(name)
    page, code = ROOT / "docs" / "how_to" / "stages_by_hand.md", dict[str, Any]()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)), code)  # noqa: S102

    def scores_loss(scores, targets):
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    with pipelab.Pipeline(code["stages_of"](ours, stages), pipelab.OneFOneB(stages, 4), scores_loss) as pipe:
        found = pipe.step(x, y).loss
    expected = loss(theirs(**x), y)
    expected.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert distance(*([each.grad for each in model.parameters()] for model in (ours, theirs))) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_lies_between_blocks_and_no_part_is_worse_than_it_must_be(name):
    model, (x, _) = made(name), batch(name)
    stages = pipelab.split(model, 2, by="parameters", example=part(x, 0))
    counts = [sum(each.numel() for each in {*module.parameters()}) for module in stages.modules]
    tied = sum(counts) - sum(each.numel() for each in model.parameters())
    assert max(counts) - tied <= 0.65 * (sum(counts) - tied)
    assert stages.state_dict().keys() == model.state_dict().keys()


def test_an_uneven_cut_is_warned_of_with_the_numbers():
    name = "LlamaForCausalLM"
    with pytest.warns(UserWarning, match=r"18\.6k parameters, 1\.4 times the 13\.4k .*(?s:.)*by='parameters'"):
        pipelab.split(made(name), 4, example=part(batch(name)[0], 0))


def test_stages_begin_at_the_layers_that_are_named():
    name = "BertForMaskedLM"
    x = part(batch(name)[0], 0)
    stages = pipelab.split(made(name), example=x, at=["bert.encoder.layer.1", "cls"])
    assert {each.rpartition("layer.")[2][0] for each, _ in stages.modules[1].named_parameters()} == {"1", "2", "3"}
    assert all("cls" in each for each, _ in stages.modules[2].named_parameters() if "embeddings" not in each)
    for wrong in (["bert.encoder.layer.9"], ["cls", "bert.encoder.layer.1"]):
        with pytest.raises(SplitError, match="try: names in order, such as "):
            pipelab.split(made(name), example=x, at=wrong)
    with pytest.raises(SplitError, match="at= has 1 name for into=3: give 2"):
        pipelab.split(made(name), 3, example=x, at=["cls"])
