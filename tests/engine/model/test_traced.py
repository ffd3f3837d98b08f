"""What the tracer bakes in of a device is taken out again, and a model on several devices is traced by its outline."""

from __future__ import annotations

import threading

import plain
import pytest
import torch
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, split
from pipelab.engine.model.traced import TracedStages, fill, move, outline
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


@pytest.fixture
def several_devices(monkeypatch):
    """Pretend that every model lies on two devices."""
    monkeypatch.setattr(TracedStages, "_homes", lambda self: {CPU, META})


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


def test_an_outline_has_no_numbers_and_leaves_the_model_alone():
    model = Network().eval()
    before = dict(model.named_parameters())
    copy, originals = outline(model)
    assert all(tensor.is_meta for tensor in copy.state_dict().values())
    assert copy.places.shift.is_meta
    assert [module.training for module in copy.modules()] == [False] * 7
    assert {id(tensor) for tensor in originals.values()} >= {id(parameter) for parameter in before.values()}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_an_evaluation_with_stages_on_several_devices_traces_the_outline_with_the_models_own_numbers(several_devices):
    model = Network()
    x, y = plain.batch(8)
    more, _ = plain.batch(10)
    stages = split(model, into=2, example=x[:4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Pipeline(stages, GPipe(2, 2), mse) as pipe:
        for _ in range(3):
            pipe.step(x, y)
            optimizer.step()  # the numbers change; what was traced sees it
            model.eval()
            torch.testing.assert_close(pipe.forward(x), model(x).detach())
            torch.testing.assert_close(pipe.forward(more), model(more).detach())
            model.train()
        again = stages.for_evaluation([more[:5], more[5:]], [5, 5])
        own = {id(parameter) for parameter in model.parameters()}
        assert [id(parameter) in own for module in again for parameter in module.parameters()] == [True] * len(own)


def test_a_model_traced_by_its_outline_trains_like_the_plain_one(several_devices):
    model = Network().eval()
    x, y = plain.batch(12)
    plain.one_after_another(model, mse, x, y, 3)
    expected = plain.taken(model)
    with Pipeline(split(model, into=3, example=x[:4]), OneFOneB(3, 3), mse) as pipe:
        pipe.step(x, y)
        assert plain.difference(plain.taken(model), expected) <= 1e-6


def test_statistics_that_an_evaluation_in_training_mode_gathers_are_the_models(several_devices):
    model = Network().eval()
    x, _ = plain.batch(8)
    with Pipeline(split(model, into=2, example=x[:4]), GPipe(2, 2), mse) as pipe:
        model.train()
        before = model.norm.running_mean.clone()
        pipe.forward(x)
        assert not torch.equal(model.norm.running_mean, before)
        assert int(model.norm.num_batches_tracked) == 2


def test_a_model_that_cannot_be_copied_is_told(several_devices):
    model = Network()
    model.lock = threading.Lock()
    with pytest.raises(
        SplitError, match=r"takes a copy of it.* Network cannot be copied: .*lock.*all ranks on one device"
    ):
        split(model, into=2, example=plain.batch(4)[0])


def test_a_tensor_whose_numbers_are_unknown_is_told_by_name():
    stage = nn.Module()
    stage.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(SplitError, match=r"the numbers of 'table' are known only where all of it is on one"):
        fill(stage, {})


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False")
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]])
def test_a_model_traced_on_the_cpu_trains_and_evaluates_on_gpus(devices):
    model = Network()
    x, y = plain.batch(8)
    more, _ = plain.batch(10)
    stages = split(model, into=2, example=x[:4])
    with Pipeline(stages, GPipe(2, 2), mse, devices=devices) as pipe:
        pipe.step(x, y)
        model.eval()
        evaluated = pipe.forward(more).cpu()
        state = {name: value.cpu() for name, value in pipe.state_dict().items()}
    twin = Network().eval()
    twin.load_state_dict(state)
    torch.testing.assert_close(evaluated, twin(more).detach(), rtol=1e-4, atol=1e-4)
    assert int(model.norm.num_batches_tracked) == 2
