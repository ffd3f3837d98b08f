"""The formulas of a transformer's memory, collectives, and the search."""

from __future__ import annotations

import json

import pytest

import pipelab
from pipelab.errors import FormatError, UsageError
from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout, cut
from pipelab.layouts.transformer import Transformer

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "sequence": 2048, "gated": False}
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "sequence": 4096}


def test_a_layer_keeps_what_korthikantis_equations_say():
    model, sbh, matrices = Transformer(**GPT3, flash=False, dropout=True), 2048 * 12288, 5 * 96 * 2048 / 12288
    assert model.activation_bytes() == sbh * (34 + matrices)
    assert model.activation_bytes(tensor=8, sequence_parallel=False) == sbh * (10 + 24 / 8 + matrices / 8)
    assert model.activation_bytes(tensor=8) == sbh * (34 + matrices) / 8
    assert model.activation_bytes(tensor=8, recompute="selective") == sbh * 34 / 8
    assert model.activation_bytes(recompute="full") == 2 * sbh


def test_flops_are_megatrons_equation_without_what_is_recomputed():
    model, batch, layers, hidden, sequence = Transformer(**GPT3), 4, 96, 12288, 2048
    terms = 1 + sequence / (6 * hidden) + 51200 / (12 * layers * hidden)
    assert model.flops(batch) == pytest.approx(72 * batch * layers * sequence * hidden**2 * terms, rel=1e-12)


@pytest.mark.parametrize("zero", range(4))
def test_zero_divides_what_its_level_names(zero):
    layout = Layout(replicas=8, zero=zero, microbatches=1)
    estimate = Estimate(Transformer(**SMALL), layout, device("h100"))
    held, memory = estimate.model.parameters, estimate.memory
    expected = [held * size / (8 if zero >= level else 1) for size, level in ((2, 3), (4, 2), (12, 1))]
    assert [memory.weights[0], memory.gradients[0], memory.optimizer[0]] == pytest.approx(expected)


def test_zero_sends_what_rajbhandari_counts_in_units_of_parameters():
    sent = []
    for zero in range(4):
        estimate = Estimate(Transformer(**SMALL), Layout(replicas=8, zero=zero), device("h100"))
        sent.append(estimate.sent["data"][0] / (estimate.model.parameters * 7 / 8))
    assert sent == [2 * 4, 4 + 2, 4 + 2, 4 + 2 * 2]  # gradients have 4 bytes, weights 2


def test_the_first_and_the_last_stage_have_fewer_layers():
    assert [len(each) for each in cut(10, 4)] == [2, 3, 3, 2]


def test_stages_of_as_many_layers_but_of_another_kind_have_their_own_sizes():
    sizes = SMALL | {"layers": 4, "experts": 8, "active": 2, "expert_ffn": 1024, "dense_layers": 2}
    estimate = Estimate(Transformer(**sizes), Layout(pipeline=4, microbatches=4, expert=1), device("h100"))
    parameters = [estimate.model.layer(stage).parameters + estimate.model.layer(stage).experts for stage in range(4)]
    assert estimate.memory.weights[1:3] == tuple(2 * each for each in parameters[1:3])
    assert parameters[1] != parameters[2]


def test_a_search_finds_what_trying_everything_finds():
    model = Transformer(**SMALL)
    few = pipelab.layout(model, gpus=4, memory=12, batch=8, top=3, schedules=["1f1b", "interleaved-1f1b"])
    every = pipelab.layout(model, gpus=4, memory=12, batch=8, top=10**6, schedules=["1f1b", "interleaved-1f1b"])
    assert few.rows == every.rows[:3]
    for estimate in every.estimates:
        assert estimate.at_least <= estimate.seconds * (1 + 1e-9)
        assert estimate.one_microbatch <= max(estimate.bytes) <= 12e9
        assert [each - estimate.working for each in estimate.bytes] == pytest.approx(estimate.use.peaks)


def test_what_fits_nowhere_is_refused_with_the_least_that_is_needed():
    with pytest.raises(UsageError, match="each needs"):
        pipelab.layout(Transformer(**SMALL), gpus=2, memory=0.1, batch=2)
    with pytest.raises(UsageError, match="does not divide 8 heads"):
        Estimate(Transformer(**SMALL), Layout(tensor=3), device("h100"))


def test_a_hugging_face_configuration_is_read(tmp_path):
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "hidden_act": "silu"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert Transformer.load(path, 4096).parameters == pytest.approx(8.03e9, rel=0.001)  # as Llama 3 8B states
    (tmp_path / "model.toml").write_text("layers = 2\n")
    with pytest.raises(FormatError, match="hidden"):
        Transformer.load(tmp_path / "model.toml")


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"layers": 10**9}, "layers=1000000000: expected a whole number from 1 to 10000"),
        ({"hidden": 10**400}, "hidden=1000.*…: expected a whole number"),
        ({"vocab": -3}, "vocab=-3"),
        ({"kv_heads": "8"}, "kv_heads='8': expected a whole number"),
        ({"gated": "yes"}, "gated='yes': expected true or false"),
        ({"tied": 2}, "tied=2"),
        ({"experts": [8]}, "experts="),
        ({"num_hidden_layers": 10**9}, "layers=1000000000"),
        ({"hidden_size": "4096"}, "hidden='4096'"),
        ({"n_routed_experts": 8, "n_shared_experts": 10**9, "moe_intermediate_size": "x" * 100}, "expert_ffn='xxx"),
        ({"kv_lora_rank": 512, "num_attention_heads": None}, "lacks heads"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path, sizes, told):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9, "n_positions": 8}
    own = not {*sizes} & {"num_hidden_layers", "hidden_size", "n_routed_experts", "kv_lora_rank"}
    path = tmp_path / ("model.toml" if own else "config.json")
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in (SMALL | sizes).items())
    path.write_text(lines if own else json.dumps(config | sizes))
    with pytest.raises(FormatError, match=told) as error:
        Transformer.load(path)
    assert str(path) in str(error.value)
