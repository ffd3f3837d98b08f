"""A list of stages made of a model's layers, compiled ones too: names and state are the model's."""

from __future__ import annotations

import copy
from pipes import refused

import plain
import processes
import pytest
import torch
from torch import nn

import pipelab
from pipelab import Pipeline
from pipelab.errors import SplitError, StageError, UsageError

LOSS = nn.MSELoss()
PLAN = pipelab.OneFOneB(3, 4)


def runs(self, x):
    x = self.embed(x)
    for block in self.blocks:
        x = block(x)
    return self.head(x)


def entire():
    """Return an entry, blocks and a head."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
    return plain.Made(runs, embed=nn.Linear(4, 6), blocks=blocks, head=nn.Linear(6, 2))


def stages(model):
    return [nn.Sequential(model.embed, model.blocks[0]), nn.Sequential(*model.blocks[1:]), model.head]


def batch():
    return torch.randn(8, 4), torch.randn(8, 2)


def test_state_parameters_and_optimizer_have_the_models_names():
    model = entire()
    with Pipeline(stages(model), PLAN, LOSS, whole_model=model) as pipe:
        pipe.step(*batch())
        assert pipe.state_dict().keys() == model.state_dict().keys()
        assert dict(pipe.named_parameters()) == dict(model.named_parameters())
        state = pipe.optimizer_state_dict(torch.optim.SGD(pipe.parameters(), lr=0.5))
        assert state["param_groups.blocks.1.0.weight.lr"] == 0.5
        assert pipe.verify(*batch()).parameters == len(list(model.parameters()))
        pipe.eval()
        assert not any(part.training for each in (model, *pipe.stages.modules) for part in each.modules())


def test_errors_name_the_models_layers():
    model = entire()
    with Pipeline(stages(model), PLAN, LOSS, whole_model=model, watch_nan=True) as pipe:
        handle = model.blocks[2][0].register_forward_pre_hook(lambda *_: (torch.zeros(2, 5),))
        with pytest.raises(StageError, match=r"in layer blocks\.2\.0, Linear"):
            pipe.step(*batch())
        handle.remove()
        model.head.bias.register_hook(lambda gradient: gradient / 0)
        with pytest.raises(StageError, match=r"gradient of head\.bias of stage 2"):
            pipe.step(*batch())
        with torch.no_grad():
            model.blocks[1][0].weight[0] = torch.nan
        with pytest.raises(StageError, match=r"NaN in blocks\.1\.0\.weight of stage 1"):
            pipe.step(*batch())


def test_a_wrong_gradient_is_named_by_the_model():
    model = entire()
    with Pipeline(stages(model), PLAN, LOSS, whole_model=model) as pipe:
        right = pipe.run
        pipe.run = lambda *given, **more: (right(*given, **more), model.blocks[2][1].bias.grad.mul_(2))[0]
        with pytest.raises(pipelab.VerificationError, match=r"blocks\.2\.1\.bias \(stage 1\)"):
            pipe.verify(*batch())


def test_a_part_that_is_not_of_the_model_or_of_no_stage_is_refused():
    model = entire()
    strange = nn.Sequential(*stages(model)[2:], nn.Linear(2, 2))
    copied = nn.Sequential(*model.blocks[1:])
    copied[1][1] = copy.deepcopy(model.blocks[2][1])
    for parts, words in (
        ([*stages(model)[:2], strange], r"parameter '1\.weight' of stage 2, of shape \[2, 2\]"),
        (
            [nn.Sequential(), nn.Sequential(*model.blocks), model.head],
            "'embed.weight' of the whole model is in no stage",
        ),
        (
            [*stages(model)[:1], nn.Sequential(model.blocks[1], nn.BatchNorm1d(6, affine=False)), model.head],
            "buffer '1.r",
        ),
    ):
        with pytest.raises(SplitError, match=words):
            Pipeline(parts, PLAN, LOSS, whole_model=model)
    for whole in (nn.Sequential(*stages(model)), pipelab.split(nn.Sequential(*stages(model)), 3)):
        with pytest.raises(UsageError, match="list of stages"):
            Pipeline(whole, PLAN, LOSS, whole_model=model)


def test_a_layer_of_the_model_replaced_later_and_a_hook_on_it_are_refused():
    model = entire()
    with Pipeline(stages(model), PLAN, LOSS, whole_model=model) as pipe:
        handle = model.register_forward_hook(lambda *_: None)
        with pytest.raises(SplitError, match="the whole model has 1 forward hook"):
            pipe.step(*batch())
        handle.remove()
        model.head = nn.Linear(6, 2)
        with pytest.raises(SplitError, match="layer 'head' was replaced"):
            pipe.step(*batch())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_compiled_stages_train_as_plain_ones_and_keep_the_names(name):
    model, other = entire().eval(), entire().eval()
    other.load_state_dict(model.state_dict())
    compiled = [torch.compile(stage, backend="aot_eager") for stage in stages(model)]
    with Pipeline(compiled, pipelab.schedules[name](3, 4), LOSS, whole_model=model) as pipe:
        both = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (pipe, other)]
        for _ in range(3):
            x, y = batch()
            for optimizer in both:
                optimizer.zero_grad()
            pipe.step(x, y)
            plain.one_after_another(other, LOSS, x, y, 4)
            for optimizer in both:
                optimizer.step()
        assert pipe.verify(x, y).exact
        assert plain.equal(pipe.state_dict(), other.state_dict())


def test_a_compiled_stage_on_several_ranks_is_refused_in_threads():
    model = entire().eval()
    compiled = [torch.compile(stage, backend="eager") for stage in stages(model)]
    refused("a compiled function", compiled, pipelab.replicate(PLAN, 2), batch(), LOSS, whole_model=model)


@pytest.mark.dist
def test_processes_train_compiled_stages_under_the_models_names():
    ended = processes.run_well(2, "compiled.py")
    for each in ended:
        for fact in each.facts:
            assert fact["equal"], fact
            assert fact["exact"], fact
    first, second = (each.facts[0]["names"] for each in ended)
    assert first + second == [
        f"{layer}.{kind}" for layer in ("0.0", "1.0", "2.0", "3.0") for kind in ("weight", "bias")
    ]
