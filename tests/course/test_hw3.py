"""Homework 3: where layers land, what `.to()` moves, and the memory of each device."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from pipelab.draw import wording
from pipelab.errors import SplitError
from pipelab_course import hw3


def test_layers_are_spread_evenly_or_in_the_homeworks_halves():
    for depth, devices, sizes in ((20, 3, [7, 7, 6]), (20, 5, [4] * 5), (7, 5, [2, 2, 1, 1, 1]), (3, 1, [3])):
        assert hw3.evenly(depth, devices) == sizes
    for depth in (2, 6, 7, 20):
        places = [0 if i < depth // 2 else 1 for i in range(depth)]
        assert hw3.halves(depth) == [places.count(0), places.count(1)]


@pytest.mark.parametrize("sizes", [[10, 10], [7, 7, 6], [4] * 5, [3]])
def test_every_layer_calls_to_and_only_the_input_and_the_crossings_move(sizes):
    assert hw3.count_transfers(sizes) == hw3.Transfers(calls=sum(sizes), input=1, between=len(sizes) - 1)


def test_transfers_are_counted_and_not_assumed(monkeypatch):
    def there_and_back(self: hw3.LinearStack, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.devices[0])
        return x.to(self.devices[-1]).to(self.devices[0]).to(torch.float64)

    monkeypatch.setattr(hw3.LinearStack, "forward", there_and_back)
    assert hw3.count_transfers([1, 1]) == hw3.Transfers(calls=4, input=1, between=2)
    monkeypatch.setattr(hw3.LinearStack, "forward", lambda _, x: x)
    assert hw3.count_transfers([1, 1]) == hw3.Transfers(calls=0, input=0, between=0)


@pytest.mark.gpu
def test_on_a_gpu_the_counted_model_moves_its_input_alone():
    model = hw3.LinearStack(8, ["cuda:0"] * 3).cuda()
    assert hw3.transfers_of(lambda: model(torch.ones(2, 8))) == hw3.Transfers(calls=3, input=1, between=0)


def test_each_device_has_parameters_gradients_and_activations_of_its_own_layers():
    width, batch = 16, 8
    (halves, even) = hw3.measurements([5], [3], width=width, batch=batch, steps=1)
    assert (halves["layers"], even["layers"]) == ((2, 3), (2, 2, 1))
    of_a_layer = 4 * (width * width + width)
    assert even["parameters_mb"] == even["gradients_mb"] == tuple(n * of_a_layer / 1e6 for n in (2, 2, 1))
    # What came in, and the output of each layer; a Linear's own output is not saved, because ReLU keeps its result.
    assert even["activations_mb"] == tuple((n + 1) * 4 * width * batch / 1e6 for n in (2, 2, 1))
    parts = zip(even["parameters_mb"], even["gradients_mb"], even["activations_mb"], strict=True)
    assert even["memory_mb"] == pytest.approx([sum(each) for each in parts])
    assert even["most_mb"] == max(even["memory_mb"])
    assert even["step_time_ms"] > 0


def test_the_command_says_which_layer_landed_where_and_what_moved(succeeds, folder):
    output = succeeds(
        "lab", "hw3", "--depth", "20", "--devices", "3", "--width", "8", "--batch", "4", "--steps", "1",
        "-o", "table.csv", "-o", "plot.svg",
    )  # fmt: skip
    assert "7 7 6" in output
    halves, even = csv.DictReader(Path("table.csv").read_text().splitlines())
    assert (halves["layers"], halves["calls"], halves["moves"]) == ("10 10", "20", "1 1")
    assert (even["layers"], even["calls"], even["moves"]) == ("7 7 6", "20", "1 2")
    assert Path("plot.svg").read_text().count("<svg") == 1


def test_a_sweep_has_every_depth_in_halves_and_on_every_number_of_devices():
    rows = list(hw3.measurements([4, 6], [2, 4], width=4, batch=2, steps=1))
    assert [(row["depth"], row["split"], row["devices"]) for row in rows] == [
        (depth, split, devices) for depth in (4, 6) for split, devices in (("halves", 2), ("even", 2), ("even", 4))
    ]
    assert {row["model"] for row in hw3.table(rows).rows} == {"i < depth // 2", "even, 2 devices", "even, 4 devices"}
    assert hw3.table(rows).axes == ("depth", ("step_time_ms", "most_mb"))
    assert hw3.table(rows[:3]).axes == ("devices", ("step_time_ms", "most_mb"))


def test_the_numbers_say_where_layers_are_and_what_moved():
    found = hw3.numbers(list(hw3.measurements([10, 20], [3], width=8, batch=4, steps=1)))
    assert found["even"] == "layers 0 to 6 on device 0, 7 to 13 on device 1, 14 to 19 on device 2"
    assert found["copies"] == "2 of 20 calls on 2 devices and 3 of 20 calls on 3 devices"
    assert (found["depth"], found["half"]) == ("20", "10")  # layer 10 is the first one of the second half
    assert (found["deepest"], found["flattest"]) == ("20 layers", "10")


def test_one_number_of_devices_is_named_once():
    found = hw3.numbers(list(hw3.measurements([4], [2], width=8, batch=4, steps=1)))
    assert (found["times"] + found["most"] + found["copies"]).count("2 devices") == 3
    assert "shorter" not in found


def test_a_time_that_more_devices_cannot_reach_is_marked():
    rows = list(hw3.measurements([5], [5], width=4, batch=2, steps=1))
    few, many = (row | {"step_time_ms": time, "others": 0.0} for row, time in zip(rows, (100.0, 80.0), strict=True))
    assert "80*" in str(hw3.table([few, many]))
    why, *_ = hw3.table([few, many]).notes  # there is no prediction, and a question asks whether more devices help
    assert not any(word in why for word in ("predict", "devices"))
    assert "*" not in str(hw3.table([few, many | {"step_time_ms": 130.0}])).partition("MB:")[0]
    assert "130*" in str(hw3.table([few, many | {"step_time_ms": 130.0, "others": 0.2}]))


def test_a_step_that_more_devices_made_shorter_is_not_called_longer():
    rows = list(hw3.measurements([5], [5], width=4, batch=2, steps=1))
    for of_two, of_five, surprising in ((640.6, 428.5, True), (225.7, 255.0, False), (100.0, 99.0, True)):
        for row, step_time in zip(rows, (of_two, of_five), strict=True):
            row |= {"step_time_ms": step_time, "others": 0.0}
        found = hw3.numbers(rows)
        assert ("shorter" in found) == surprising
        assert found["times"].startswith(f"2 devices: {wording.number(of_two)} ms; 5 devices: ")


def test_fewer_layers_than_devices_are_refused_before_any_work():
    with pytest.raises(SplitError, match="too few layers for 5 stages, 2"):
        next(hw3.measurements([6, 2], [5], width=4, batch=2))


@pytest.mark.parametrize(("words", "said"), [(("--depth", "0"), "--depth 0"), (("-o", "t.json"), "use one of .csv")])
def test_what_cannot_be_done_is_refused_before_any_work(refused, monkeypatch, words, said):
    monkeypatch.setattr(hw3, "measurements", lambda *_, **__: pytest.fail("it worked"))
    assert said in refused("lab", "hw3", *words)
