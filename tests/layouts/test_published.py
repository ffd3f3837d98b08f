"""Published set-ups agree with what their publications state beside them."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import pipelab
from pipelab.errors import UsageError
from pipelab.layouts.published import mfu, model_flops, published

MEGATRON = {  # GPUs, percentage of the theoretical peak, aggregate PFLOP/s: the last columns of table 1
    "megatron-39b": (512, 44, 70.8),
    "megatron-76b": (1024, 45, 143.8),
    "megatron-146b": (1536, 47, 227.1),
    "megatron-310b": (1920, 50, 297.4),
    "megatron-530b": (2520, 52, 410.2),
    "megatron-1t": (3072, 52, 502.0),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_a_row_of_megatrons_table_agrees_with_its_other_columns_and_formulas(name):
    setup = published[name]
    layers, hidden, sequence, words = setup.layers, setup.hidden, setup.sequence, 51200
    devices, percentage, petaflops = MEGATRON[name]
    assert setup.devices == devices
    assert setup.rate / setup.peak * 100 == pytest.approx(percentage, abs=0.51)
    assert devices * setup.rate == pytest.approx(petaflops * 1e15, rel=0.004)  # the rate is rounded
    counted = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (words + sequence) / (12 * layers * hidden))
    assert setup.parameters == pytest.approx(counted, abs=0.05e9)  # equation 2
    flops = 96 * setup.batch * sequence * layers * hidden**2
    flops *= 1 + sequence / (6 * hidden) + words / (16 * layers * hidden)  # equation 3
    assert setup.seconds == pytest.approx(flops / (devices * setup.rate), rel=0.002)


def test_a_trillion_parameters_on_450_billion_tokens_take_84_days_as_megatron_states():
    setup = published["megatron-1t"]
    steps = 450e9 / (setup.batch * setup.sequence)
    assert steps * setup.seconds / 86400 == pytest.approx(84, abs=2)


def test_what_is_recomputed_is_no_work_of_the_model():
    setup = published["megatron-1t"]
    assert setup.mfu == pytest.approx(0.75 * setup.rate / setup.peak, rel=0.002)


@pytest.mark.parametrize(
    ("name", "devices", "share"), [("llama3-405b-8192", 8192, 43), ("llama3-405b-16384", 16384, 41)]
)
def test_llamas_rows_have_the_stated_gpus_tokens_and_mfu(name, devices, share):
    setup = published[name]
    assert setup.devices == devices
    assert setup.batch * setup.sequence == 2**24  # "16M" tokens
    assert 100 * setup.mfu == pytest.approx(share, abs=1)


@pytest.mark.parametrize("name", published)
def test_a_set_ups_pipeline_can_be_planned_and_simulated(name):
    setup = published[name]
    sizes = setup.sizes()
    assert sizes["microbatches"] * setup.replicas == setup.batch
    trace = pipelab.simulate(pipelab.OneFOneB(**sizes), pipelab.Cost(all_reduce=1), setup.replicas)
    assert trace.ranks == setup.pipeline
    assert 0 < trace.bubble < 1 - setup.mfu
    assert "arXiv" in setup.source


def test_mfu_is_the_share_of_the_peak():
    flops = model_flops(parameters=1e9, layers=10, hidden=100, sequence=50, tokens=1000)
    assert flops == 1000 * (6e9 + 12 * 10 * 100 * 50)
    assert mfu(flops, seconds=2, devices=4, peak=flops) == 1 / 8


def test_sizes_and_rates_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="512 sequences are not a multiple"):
        published["megatron-1t"].sizes(microbatch=3)
    with pytest.raises(UsageError, match="microbatch=0"):
        published["megatron-1t"].sizes(microbatch=0)
    with pytest.raises(UsageError, match="positive"):
        mfu(1, seconds=0, devices=1, peak=1)
    with pytest.raises(UsageError, match="devices=0"):
        mfu(1, seconds=1, devices=0, peak=1)


@pytest.mark.parametrize(("name", "many"), [("simulation", 3), ("simulation_details", 8)])
def test_the_examples_of_a_reference_page_give_what_it_prints(name, many):
    pytest.importorskip("ortools")
    page = Path(__file__).parents[2] / "docs" / "reference" / f"{name}.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, many)
