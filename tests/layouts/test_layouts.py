"""The formulas of a transformer's memory, collectives, and the search."""

from __future__ import annotations

import json

import pytest

import pipelab
from pipelab.catalogue.bases import BothWays
from pipelab.errors import FormatError, UsageError
from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout, cut
from pipelab.layouts.transformer import Transformer

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "sequence": 2048, "gated": False}
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "sequence": 4096}


def test_a_layer_keeps_what_korthikantis_equations_say():
    layer, hidden, matrices = Transformer(**GPT3, flash=False, dropout=True).layer(0), 12288, 5 * 96 * 2048 / 12288
    assert layer.whole + layer.cut + layer.matrices == hidden * (34 + matrices)  # equation 1, for each token
    assert layer.whole + (layer.cut + layer.matrices) / 8 == hidden * (10 + 24 / 8 + matrices / 8)  # equation 2
    assert layer.whole + layer.cut == hidden * 34  # equation 6, which equation 4 divides by the tensor-parallel ranks


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
    few = pipelab.layout(model, gpus=4, memory=12, batch=8, top=3)
    every = pipelab.layout(model, gpus=4, memory=12, batch=8, top=10**6)
    assert few.rows == every.rows[:3]
    for estimate in every.estimates:
        assert estimate.at_least <= estimate.seconds * (1 + 1e-9)
        assert estimate.bytes_at_least <= max(estimate.bytes) <= 12e9
        assert [each - estimate.working for each in estimate.bytes] == pytest.approx(estimate.use.peaks)


def test_an_answer_begins_with_the_question_and_what_to_expect():
    found = pipelab.layout(Transformer(**SMALL), gpus=2, batch=4, top=1)
    assert {**found.rows[0], "sequence": 4096, "device": "h100"} == found.rows[0]
    said = " ".join(str(found).split())
    assert said.startswith("0.2 billion parameters; 4 sequences of 4,096 tokens; 2 h100 of 80 GB, 6 % of it left for")
    assert "Fitted: Llama 3 (arXiv:2407.21783), table 4: 8,192 GPUs." in said
    assert "Error to expect (small model): -36 to -10 %, as in 90 % of 19 published steps." in said
    experts = Transformer(**SMALL, experts=8, active=2, expert_ffn=1024)
    doubted = pipelab.layout(experts, gpus=2, batch=4, top=1, device="mi300x", memory=100, margin=0.1)
    said = doubted.question
    assert said.startswith(
        "Neither the times nor the order of these layouts is reliable: a mixture of experts, and nothing was fitted to"
        " mi300x. 0.3 billion"
    )
    assert f"({experts.active_parameters / 1e9:.1f} active)" in said
    assert experts.active_parameters == experts.parameters - 8 * 6 * 3 * 1024 * 1024  # 2 of 8 experts in 8 layers
    assert "100 GB, 10 % of it left" in said
    assert said.endswith("Fitted: nothing. Error to expect (mixture of experts): unknown.")
    assert not [name for name in ("a100", "h100", "h200", "b200") if not device(name).fitted]
    assert not [name for name in ("h800", "mi300x", "mi355x") if device(name).fitted]


def test_a_saved_answer_has_its_doubts(tmp_path):
    sure, doubted = Transformer(**SMALL), Transformer(**SMALL, experts=8, active=2, expert_ffn=1024)
    for model, device_name, doubts in (
        (sure, "h100", ""),
        (doubted, "h100", "a mixture of experts"),
        (sure, "mi300x", "nothing was fitted to mi300x"),
    ):
        found = pipelab.layout(model, gpus=2, batch=4, top=2, device=device_name)
        assert {row["doubts"] for row in found.rows} == {doubts}
        for suffix in ("csv", "txt", "md", "html"):
            text = " ".join(found.save(tmp_path / f"layouts.{suffix}").read_text(encoding="utf-8").split())
            assert ("order of these layouts" in text) == (bool(doubts) and suffix != "csv")
            assert doubts in text
            assert ("The step of the quickest" in text and "one backward" in text) == (suffix != "csv")


def test_without_a_sequence_a_configurations_longest_is_not_taken(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2}
    config |= {"intermediate_size": 512, "vocab_size": 1000}
    path = tmp_path / "config.json"
    for longest, taken in ((131072, "8,192 tokens (assumed: the model allows 131,072);"), (1024, "1,024 tokens;")):
        path.write_text(json.dumps(config | {"max_position_embeddings": longest}))
        assert taken in pipelab.layout(path, gpus=1, batch=1, top=1).question
        assert "2,048 tokens;" in pipelab.layout(path, gpus=1, batch=1, sequence=2048, top=1).question


def test_the_margin_stays_free():
    model, few = Transformer(**SMALL), {"gpus": 2, "batch": 4, "memory": 4, "schedules": ["1f1b"]}
    (least,) = pipelab.layout(model, **few, margin=0, top=1).estimates
    margin = 1 - 1.001 * max(least.bytes) / 4e9
    assert max(pipelab.layout(model, **few, margin=margin, top=1).best.bytes) <= 4e9 * (1 - margin)
    with pytest.raises(UsageError, match=r"fits into 0.04 GB \(99 % are left for the runtime\): each needs"):
        pipelab.layout(model, **few, margin=0.99)


@pytest.mark.parametrize("speed", [1e9, 25e9])
def test_zero_1_and_2_take_the_same_time_where_they_send_the_same(speed):
    slow = device("a100", between=speed, inside=8 * speed)
    times = [Estimate(Transformer(**SMALL), Layout(replicas=16, zero=zero), slow).seconds for zero in (1, 2)]
    assert times[0] == pytest.approx(times[1], rel=1e-12)
    many = [Estimate(Transformer(**SMALL), Layout(replicas=16, zero=zero, microbatches=4), slow) for zero in (1, 2)]
    assert many[0].sent["data"] < many[1].sent["data"]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 2), (4, 8), (6, 12)])
def test_no_schedule_undercuts_the_time_that_ends_the_search_or_the_bytes_that_leave_it_out(ranks, microbatches):
    for name, kind in pipelab.schedules.items():
        own = kind(ranks, microbatches) if kind.refusal(ranks, microbatches) is None else None
        if own and own.slices == 1 and name != "bitpipe" and not isinstance(own, BothWays):
            sizes = {"pipeline": ranks, "stages_per_rank": own.stages_per_rank, "microbatches": microbatches}
            model = Transformer(**SMALL | {"layers": 24})
            estimate = Estimate(model, Layout(**sizes, schedule=name), device("h100"))
            assert estimate.at_least <= estimate.seconds * (1 + 1e-9), name
            assert estimate.bytes_at_least <= max(estimate.bytes), name


def test_what_fits_nowhere_is_refused_with_the_least_that_is_needed():
    with pytest.raises(UsageError, match="each needs .* the smallest that was found needs"):
        pipelab.layout(Transformer(**SMALL), gpus=2, memory=0.1, batch=2)
    with pytest.raises(UsageError, match="does not divide 8 heads"):
        Estimate(Transformer(**SMALL), Layout(tensor=3), device("h100"))


FALCON = {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024}
BLOOM = {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
GEMMA = {"num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 24576, "vocab_size": 256000}
GPT2 = {"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
STARCODER = {"n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "vocab_size": 49152}
QWEN = {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 151936}
QWEN |= {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
TEXT = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "hidden_act": "silu"}


@pytest.mark.parametrize(
    ("kind", "said", "parameters"),  # as published
    [
        ("falcon", FALCON | {"num_kv_heads": 71, "multi_query": True}, 6_921_720_704),
        ("bloom", BLOOM, 176_247_271_424),
        ("gemma", GEMMA | {"num_attention_heads": 16, "hidden_act": "gelu"}, 8_537_680_896),
        ("gpt2", GPT2, 124_439_808),
        ("gpt_bigcode", STARCODER, 15_517_456_384),
        ("qwen2_moe", QWEN | {"num_attention_heads": 16, "num_experts_per_tok": 4}, 14_315_784_192),
        ("gemma3", {"vision_config": {"hidden_size": 1152}, "text_config": TEXT}, 3_880_099_328),
        ("llama", LLAMA, 8_030_261_248),
    ],
)
def test_a_hugging_face_configuration_is_read(tmp_path, kind, said, parameters):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind} | said))
    assert Transformer.load(path, 4096).parameters == pytest.approx(parameters, rel=0.001)


def test_a_file_without_all_sizes_is_refused(tmp_path):
    (tmp_path / "model.toml").write_text("layers = 2\n")
    with pytest.raises(FormatError, match="hidden"):
        Transformer.load(tmp_path / "model.toml")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"model_type": "jamba"}, r"no estimate for model_type 'jamba' \(layers without attention\)\n  try: a TOML of"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' .linear attention"),
        ({"model_type": "t5"}, "'t5' .an encoder beside its decoder"),
        ({"model_type": "my_model"}, "'my_model' .not in the table.*those of apertus, arcee, biogpt"),
        ({"model_type": None}, "model_type 'None'"),
        ({"model_type": ["llama"]}, "no estimate for model_type"),
        ({"model_type": "gemma3", "text_config": {"model_type": "mamba"}}, "'mamba'"),
        ({"model_type": "llama4", "interleave_moe_layer_step": 2}, "interleave_moe_layer_step=2, only for 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers=\[3\], only for \[\]"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim=512 beside hidden=4096"),
        ({"model_type": "llama", "layer_types": ["full_attention", "mamba"]}, "a layer of 'mamba', only of full_att"),
    ],
)
def test_a_configuration_that_no_estimate_fits_is_refused_by_name(tmp_path, said, told):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | said))
    with pytest.raises(FormatError, match=f"(?s){told}") as error:
        Transformer.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("kind", "windowed"),
    [
        ("mistral", 32),
        ("starcoder2", 32),
        ("gemma2", 16),
        ("gpt_oss", 16),
        ("cohere2", 24),
        ("gemma3", 27),
        ("qwen3", 0),
    ],
)
def test_a_configurations_window_is_in_the_layers_that_its_model_type_gives_one(tmp_path, kind, windowed):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": kind, "sliding_window": 1024, "head_dim": 128}))
    model = Transformer.load(path)
    assert (model.window, model.windowed) == (1024, windowed)


def test_a_windows_products_are_those_inside_the_mask():
    sizes = SMALL | {"sequence": 64, "window": 16, "windowed": 6}
    pairs = [sum(min(token + 1, window) for token in range(64)) for window in (16, 64)]
    expected = (6 * pairs[0] + 2 * pairs[1]) / (8 * pairs[1])
    full = Transformer(**sizes | {"windowed": 0}).layer(0).attention
    assert Transformer(**sizes).layer(0).attention / full == pytest.approx(expected, rel=0.03)  # half a token's mask
    assert Transformer(**sizes | {"window": 64}).layer(0).attention == full


def test_learned_positions_lie_on_the_first_stage():
    more = [
        Estimate(Transformer(**SMALL, positions=count), Layout(pipeline=2, microbatches=2), device("h100"))
        for count in (0, 4096)
    ]
    held = [[*each.memory.weights] for each in more]
    assert [second - first for first, second in zip(*held, strict=True)] == [2 * 1024 * 4096, 0]


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
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"n_routed_experts": 8, "n_shared_experts": 10**9, "moe_intermediate_size": "x" * 100}, "ate_size='xxx"),
        ({"kv_lora_rank": 512, "num_attention_heads": None}, "lacks heads"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path, sizes, told):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}
    config |= {"model_type": "deepseek_v3", "intermediate_size": 128, "n_positions": 8}
    own = not {*sizes} & {"num_hidden_layers", "hidden_size", "n_routed_experts", "kv_lora_rank"}
    path = tmp_path / ("model.toml" if own else "config.json")
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in (SMALL | sizes).items())
    path.write_text(lines if own else json.dumps(config | sizes))
    with pytest.raises(FormatError, match=told) as error:
        Transformer.load(path)
    assert str(path) in str(error.value)
