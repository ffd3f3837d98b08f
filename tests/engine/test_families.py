"""The families of models that people train, from transformers, cut by one line: like plain training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pipelab
from pipelab.errors import SplitError

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "use_cache": False}
NO_DROPOUT_HERE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2, **NO_DROPOUT_HERE}),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "MixtralForCausalLM": ("MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER),
    "BertForMaskedLM": ("BertConfig", {**SIZES, **NO_DROPOUT, "max_position_embeddings": 64}),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "use_cache": False}),
}


def made(name):
    torch.manual_seed(0)
    config, sizes = FAMILIES[name]
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def batch(name):
    torch.manual_seed(1)
    ids, targets = torch.randint(0, 128, (2, 8, 16))
    x = {"input_ids": ids, "attention_mask": (torch.rand(8, 16).sort(descending=True).values > 0.2).long()}
    return (x | {"decoder_input_ids": targets.roll(1, 1)} if name.startswith("T5") else x), targets


def loss(output, targets):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def part(x, index):
    return {name: each[2 * index : 2 * index + 2] for name, each in x.items()}


def distance(ours, theirs):
    """Return how far apart two lists of tensors are, as one vector, relative to the second."""
    ours, theirs = (torch.cat([each.detach().flatten() for each in both]) for both in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())


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
    with pytest.raises(SplitError, match="1 names in at= begin 2 stages, not 3"):
        pipelab.split(made(name), 3, example=x, at=["cls"])
