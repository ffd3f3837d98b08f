"""Hugging Face's GPT-2, tied weights and all: cut between its blocks, with the gradients of plain training."""

from __future__ import annotations

import re
from pathlib import Path

import processes
import pytest
import torch

import pipelab
from pipelab import Pipeline, split
from pipelab.errors import BatchError, SplitError

pytest.importorskip("transformers")

import gpt2
from transformers import BatchEncoding


def test_gradients_and_weights_are_those_of_plain_training():
    facts = gpt2.train(gpt2.model(), pipelab.OneFOneB(4, 4), "threads")
    assert facts["losses"] < 1e-5
    assert facts["gradients"] < 1e-5
    assert facts["norms"] == pytest.approx([1, 1, 1], rel=1e-4)
    assert facts["verified"] < 1e-5


def test_it_is_cut_between_its_blocks_under_its_own_names():
    model = gpt2.model()
    stages = split(model, 4, example=gpt2.batch(2))
    assert sum(stages.sizes) == 4 + 5  # two embeddings and a dropout before the blocks, a norm and the head behind them
    assert stages.state_dict().keys() == model.state_dict().keys()


def test_names_come_in_any_order_and_constants_must_be_the_examples():
    model = gpt2.model()
    batch = gpt2.batch(4)
    example = {name: each[:2] for name, each in batch.items()} | {"use_cache": False}
    other = {name: batch[name] for name in reversed(batch)}
    with Pipeline(split(model, 2, example=example), pipelab.GPipe(2, 2), gpt2.loss, reduction=gpt2.counted) as pipe:
        torch.testing.assert_close(pipe.forward({**other, "use_cache": False}).logits, model(**batch).logits.detach())
        with pytest.raises(BatchError, match=r"traced with .*'use_cache': False.* and the batch is"):
            pipe.step(batch, batch["labels"])
        with pytest.raises(BatchError, match="'use_cache': True"):
            pipe.step({**batch, "use_cache": True}, batch["labels"])


def test_a_cache_among_the_results_is_refused():
    model = gpt2.model()
    model.config.use_cache = True
    with pytest.raises(SplitError, match=r"returns a DynamicCache.*\n.*use_cache = False"):
        split(model, 2, example=gpt2.batch(2))


def test_the_pages_code_trains():
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text(encoding="utf-8")
    made = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(block, made)  # noqa: S102 - it is the page's own
    assert len(made["stages"]) == 4
    assert made["model"].lm_head.weight is made["model"].transformer.wte.weight
    assert made["step"].loss.isfinite()


@pytest.mark.dist
def test_two_processes_train_it():
    ended = processes.run_well(2, "gpt2_trained.py")
    for each in ended:
        fact = each.facts[0]
        assert fact["losses"] < 1e-5 or fact["losses"] is None
        assert fact["gradients"] < 1e-5
        assert fact["norms"] == pytest.approx([1, 1, 1], rel=1e-4)
        assert fact["verified"] < 1e-5


def test_mixed_precision_with_a_scaler_is_as_near_as_its_rounding():
    facts = gpt2.train(gpt2.model(), pipelab.OneFOneB(2, 4), "threads", torch.float16)
    rounding = torch.finfo(torch.float16).eps
    assert facts["losses"] < rounding
    assert facts["gradients"] < 4 * rounding
    assert facts["norms"] == pytest.approx([1, 1, 1], rel=rounding)


def test_what_a_tokenizer_returns_is_a_batch():
    torch.manual_seed(3)
    x = gpt2.batch(8)
    ours, losses = gpt2.model(), []
    stages = pipelab.split(ours, 2, example=BatchEncoding(gpt2.batch(2)))
    with pipelab.Pipeline(stages, pipelab.OneFOneB(2, 4), gpt2.loss, reduction=gpt2.counted) as pipe:
        losses = [pipe.step(given, x["labels"]).loss for given in (BatchEncoding(x), x)]
        assert torch.equal(*losses)
        assert pipe.verify(BatchEncoding(x), x["labels"]).largest_difference < 1e-5
