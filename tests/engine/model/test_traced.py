"""What the tracer bakes in of a device is taken out again."""

from __future__ import annotations

import plain
import pytest
import torch
from torch import nn

from pipelab import GPipe, Pipeline, split
from pipelab.engine.model.traced import move
from pipelab.errors import SplitError

mse = nn.functional.mse_loss
CPU, META = torch.device("cpu"), torch.device("meta")


class Places(nn.Module):
    """Adds what is made on the input's device, a buffer, and a tensor that is a plain attribute."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(width, width)
        self.register_buffer("scale", torch.linspace(1, 2, width))
        self.shift = torch.linspace(-1, 1, width)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        zeros = torch.zeros(x.shape[1], device=x.device)
        return x * self.scale + self.embedding(places).sum(0) + zeros + self.shift.to(x.device)


class Network(nn.Module):
    """No sequence, so it is traced; with statistics and dropout, so its mode matters."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(width, width)
        self.places = Places(width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.places(torch.tanh(self.entry(x))))))


def test_a_traced_stage_goes_to_another_device_with_all_that_it_makes_there():
    model = Network()
    stages = split(model, into=3, example=plain.batch(4)[0])
    stages.place([META] * 3)
    value = torch.empty(4, 6, device="meta")
    for module in stages.modules:
        value = module(value)  # which would fail if anything were left on the CPU
    assert value.is_meta


def test_a_single_traced_stage_goes_with_all_that_it_makes_there():
    model = Network()
    stages = split(model, into=3, example=plain.batch(4)[0])
    stages.place_stage(1, META)
    assert stages.modules[1](torch.empty(4, 6, device="meta")).is_meta
    assert [next(module.parameters()).is_meta for module in stages.modules] == [False, True, False]


def test_the_models_buffers_go_where_its_stages_go():
    model = Network()
    stages = split(model, into=3, example=plain.batch(4)[0])
    stages.place([META] * 3)
    buffers = {id(buffer) for module in stages.modules for buffer in module.buffers()}
    assert all(buffer.is_meta for buffer in model.buffers())
    assert {id(buffer) for buffer in model.buffers()} <= buffers
    assert all(value.is_meta for value in stages.state_dict().values())


def test_a_model_on_several_devices_is_not_traced_again():
    model = Network()
    x, _ = plain.batch(4)
    stages = split(model, into=2, example=x)
    stages.place_stage(1, META)
    assert stages.ready([x], [4]) is stages.modules
    with pytest.raises(SplitError, match=r"(?s)Network with 2 rows: .* try: "):
        stages.ready([x[:2], x[2:]], [2, 2])


def test_statistics_that_an_evaluation_in_training_mode_gathers_are_the_models():
    model = Network().eval()
    x, _ = plain.batch(8)
    with Pipeline(split(model, into=2, example=x[:4]), GPipe(2, 2), mse) as pipe:
        model.train()
        before = model.norm.running_mean.clone()
        pipe.forward(x)
        assert not torch.equal(model.norm.running_mean, before)
        assert int(model.norm.num_batches_tracked) == 2


def test_moving_to_where_a_stage_is_already_changes_nothing():
    model = Network()
    stages = split(model, into=2, example=plain.batch(4)[0])
    tensors = [id(tensor) for module in stages.modules for tensor in module.state_dict(keep_vars=True).values()]
    for module in stages.modules:
        move(module, CPU, model)
    assert [id(tensor) for module in stages.modules for tensor in module.state_dict(keep_vars=True).values()] == tensors
    assert stages.modules[1](stages.modules[0](plain.batch(4)[0])).shape == (4, 6)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]])
def test_a_model_traced_on_the_cpu_trains_and_evaluates_on_gpus(devices):
    model = Network()
    x, y = plain.batch(8)
    more, _ = plain.batch(10)
    stages = split(model, into=2, example=x[:4])
    with Pipeline(stages, GPipe(2, 2), mse, devices=devices) as pipe:
        pipe.step(x, y)
        model.eval()
        if "cpu" in devices:
            with pytest.raises(SplitError, match="5 rows"):
                pipe.forward(more)
            return
        evaluated = pipe.forward(more).cpu()
        state = {name: value.cpu() for name, value in pipe.state_dict().items()}
    twin = Network().eval()
    twin.load_state_dict(state)
    torch.testing.assert_close(evaluated, twin(more).detach(), rtol=1e-4, atol=1e-4)
    assert int(model.norm.num_batches_tracked) == 2
