"""What the tracer bakes in of a device is taken out again."""

from __future__ import annotations

from pipes import mse

import plain
import pytest
import torch
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, diagnose, split
from pipelab.engine.model.traced import move
from pipelab.errors import SplitError

CPU, META = torch.device("cpu"), torch.device("meta")


def places(self, x):
    """Add what is made on the input's device, a buffer, and a tensor that is a plain attribute."""
    x = torch.tanh(self.entry(x))
    at = torch.arange(x.shape[1], device=x.device)
    zeros = torch.zeros(x.shape[1], device=x.device)
    x = x * self.scale + self.embedding(at).sum(0) + zeros + self.shift.to(x.device)
    return self.head(self.dropout(self.norm(x)))


def network(width=6):
    """Return no sequence, so it is traced; with statistics and dropout, so its mode matters."""
    torch.manual_seed(0)
    made = plain.Made(
        places,
        entry=nn.Linear(width, width),
        embedding=nn.Embedding(width, width),
        norm=nn.BatchNorm1d(width),
        dropout=nn.Dropout(0.5),
        head=nn.Linear(width, width),
        shift=torch.linspace(-1, 1, width),
    )
    made.register_buffer("scale", torch.linspace(1, 2, width))
    return made


def thirds(model):
    return split(model, into=3, example=plain.batch(4)[0])


def test_traced_stages_go_to_another_device_with_all_that_they_make_there_and_the_models_buffers():
    model = network()
    stages = thirds(model)
    stages.place([META] * 3)
    value = torch.empty(4, 6, device="meta")
    for module in stages.modules:
        value = module(value)  # which would fail if anything were left on the CPU
    assert value.is_meta
    buffers = {id(buffer) for module in stages.modules for buffer in module.buffers()}
    assert all(buffer.is_meta for buffer in model.buffers())
    assert {id(buffer) for buffer in model.buffers()} <= buffers
    assert all(value.is_meta for value in stages.state_dict().values())


def test_a_single_traced_stage_goes_with_all_that_it_makes_there():
    stages = thirds(network())
    stages.place_stage(1, META)
    assert stages.modules[1](torch.empty(4, 6, device="meta")).is_meta
    assert [next(module.parameters()).is_meta for module in stages.modules] == [False, True, False]


def test_a_model_on_several_devices_is_not_traced_again():
    model = network()
    x, _ = plain.batch(4)
    stages = split(model, into=2, example=x)
    stages.place_stage(1, META)
    assert stages.ready([x], [4]) is stages.modules
    with pytest.raises(SplitError, match=r"(?s)Made with \[2, 6\] float32: .* try: "):
        stages.ready([x[:2], x[2:]], [2, 2])


def test_statistics_that_an_evaluation_in_training_mode_gathers_are_the_models():
    model = network().eval()
    x, _ = plain.batch(8)
    with Pipeline(split(model, into=2, example=x[:4]), GPipe(2, 2), mse) as pipe:
        model.train()
        before = model.norm.running_mean.clone()
        pipe.forward(x)
        assert not torch.equal(model.norm.running_mean, before)
        assert int(model.norm.num_batches_tracked) == 2


def test_moving_to_where_a_stage_is_already_changes_nothing():
    model, (x, _) = network(), plain.batch(4)
    first, second = split(model, into=2, example=x).modules

    def tensors():
        return [id(each) for module in (first, second) for each in module.state_dict(keep_vars=True).values()]

    before = tensors()
    for module in (first, second):
        move(module, CPU, model)
    assert tensors() == before
    assert second(first(x)).shape == (4, 6)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # PyTorch's, of the first backward on a GPU
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]])
def test_a_model_traced_on_the_cpu_trains_and_evaluates_on_gpus(devices):
    model = network()
    x, y = plain.batch(8)
    more, _ = plain.batch(10)
    stages = split(model, into=2, example=x[:4])
    with Pipeline(stages, GPipe(2, 2), mse, devices=devices) as pipe:
        pipe.step(x, y)
        model.eval()
        if "cpu" in devices:
            with pytest.raises(SplitError, match=r"cannot trace Made with \[5, 6\]"):
                pipe.forward(more)
            return
        evaluated = pipe.forward(more).cpu()
        state = {name: value.cpu() for name, value in pipe.state_dict().items()}
    twin = network().eval()
    twin.load_state_dict(state)
    torch.testing.assert_close(evaluated, twin(more).detach(), rtol=1e-4, atol=1e-4)
    assert int(model.norm.num_batches_tracked) == 2


class Drops(nn.Module):
    """Layers and functions that draw: one layer at several places, functions between blocks, some that are at rest."""

    def __init__(self):
        super().__init__()
        shared = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), drop) for drop in (shared, nn.Dropout(0.2), shared))
        self.shared, self.head = shared, nn.Linear(6, 6)

    def forward(self, x):
        for block, p in zip(self.blocks, (0.3, 0.0, 0.3), strict=True):
            x = nn.functional.dropout(self.shared(block(x)), p)
        heads = self.head(x)[None]
        still = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(still, heads, heads, dropout_p=0.2)[0])


def test_a_traced_model_draws_what_it_would_draw_by_itself_at_any_number_of_stages():
    x, y = plain.batch(8)
    found = []
    for stages in (1, 2, 4):
        torch.manual_seed(0)
        model = Drops()
        with Pipeline(split(model, stages, example=x[:2]), OneFOneB(stages, 4), mse) as pipe:
            proof = pipe.verify(x, y)
            assert (proof.exact, proof.compared) == (True, True)
            torch.manual_seed(7)
            found.append([pipe.step(x, y).loss.item() for _ in range(2)])
            model.zero_grad()
            told = diagnose(pipe.step, model, x, y, mse, microbatches=4)
            assert told.code == "right"
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]
