"""Every rank gets a device, and optimizers follow their parameters."""

from __future__ import annotations

from pipes import mse
from types import SimpleNamespace

import plain
import pytest
import torch
from torch import nn

import pipelab
from pipelab import GPipe, Pipeline
from pipelab.engine.device import RankDevice, rank_devices, share_evenly
from pipelab.errors import DeviceError, UsageError

CPU = torch.device("cpu")


def gpus(count):
    return [torch.device("cuda", index) for index in range(count)]


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has so many GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(("count", "slots"), [(0, [CPU] * 3), (4, gpus(3))])
def test_every_rank_has_a_gpu_of_its_own_or_there_is_none(machine, count, slots):
    machine(count)
    assert pipelab.devices(3) == slots


def test_with_fewer_gpus_they_are_shared_and_it_is_said(machine):
    machine(2)
    with pytest.warns(UserWarning, match="3 ranks share 2 GPUs") as told:
        slots = pipelab.devices(3)
    assert "rank 0 on cuda:0 (1 of 2), rank 1 on cuda:0 (2 of 2), rank 2 on cuda:1\n" in str(told[0].message)
    assert "a stream each" in str(told[0].message)
    assert [slot.device for slot in slots] == [*gpus(1) * 2, gpus(2)[1]]
    assert [str(slot) for slot in slots] == ["cuda:0 (1 of 2)", "cuda:0 (2 of 2)", "cuda:1"]


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_a_number_of_ranks_that_is_none_is_refused(n):
    with pytest.raises(UsageError, match="n="):
        pipelab.devices(n)


def test_seven_ranks_share_three_devices_as_3_2_2_neighbours_together():
    slots = share_evenly(gpus(3), 7)
    assert [slot.device.index for slot in slots] == [0, 0, 0, 1, 1, 2, 2]
    assert [slot.share for slot in slots] == ["1 of 3", "2 of 3", "3 of 3", "1 of 2", "2 of 2", "1 of 2", "2 of 2"]


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("n", range(1, 12))
def test_shares_differ_by_at_most_one(count, n):
    slots = share_evenly(gpus(count), n)
    assert len(slots) == n
    shares = [sum(slot.device.index == index for slot in slots) for index in range(count)]
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)
    assert [slot.device.index for slot in slots] == sorted(slot.device.index for slot in slots)


def test_devices_may_be_shares_devices_or_names(machine):
    machine(2)
    first, second = map(RankDevice, gpus(2))
    wanted = [RankDevice(CPU, "mine"), torch.device("cuda", 1), "cuda", "cpu"]
    assert rank_devices(wanted, 4) == [RankDevice(CPU, "mine"), second, first, RankDevice(CPU)]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (["cpu"], "1 device for 2 ranks: pass one per rank"),
        (["cpu"] * 3, "3 devices for 2 ranks"),
        ([], "0 devices for 2 ranks"),
        ("cpu", r"devices='cpu': expected a list .* \['cpu'\] \* 2"),
        (["meta", "cpu"], "devices has meta: pipelab runs on 'cpu' and 'cuda' devices"),
    ],
)
def test_devices_that_do_not_fit_are_refused(machine, wanted, told):
    machine(2)
    with pytest.raises(DeviceError, match=told):
        rank_devices(wanted, 2)


def test_without_devices_a_pipeline_takes_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(
        "pipelab.engine.device.devices", lambda n: [RankDevice(CPU, f"{rank} of {n}") for rank in range(n)]
    )
    with Pipeline(plain.mlp(4), GPipe(2, 2), mse) as pipe:
        assert repr(pipe).endswith("on cpu (0 of 2), cpu (1 of 2))")


# --- optimizers whose state was left behind


def test_moving_brings_all_state_to_its_parameter_but_the_step_count():
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    stranger = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adam([parameter, stranger])
    for each in (parameter, stranger):
        optimizer.state[each] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(each.shape), "note": "text"}
    model = nn.Module()
    model.weight = parameter
    pipe = SimpleNamespace(stages=SimpleNamespace(model=model))
    Pipeline.move_optimizer_state(pipe, optimizer)
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    assert optimizer.state[parameter]["step"].device == CPU
    assert optimizer.state[parameter]["note"] == "text"
    assert optimizer.state[stranger]["exp_avg"].device == CPU


def test_a_pipeline_moves_the_state_of_its_own_parameters():
    model, twin = plain.mlp(4), plain.mlp(4)
    optimizer, plainly = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, twin))
    for each, its in ((model, optimizer), (twin, plainly)):
        plain.one_after_another(each, mse, *plain.batch(4), 2)
        its.step()
        its.zero_grad()
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        pipe.move_optimizer_state(optimizer)
        pipe.step(*plain.batch(4))
        optimizer.step()
    plain.one_after_another(twin, mse, *plain.batch(4), 2)
    plainly.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
