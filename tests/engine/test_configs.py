"""A config.json says as many parameters as the model that transformers builds from it, without memory for weights."""

from __future__ import annotations

import json

import pytest
import torch

from pipelab.layouts.devices import table
from pipelab.layouts.transformer import Transformer

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KNOWN = {kind: row for kinds, row in table("config.toml")["types"].items() for kind in kinds.split()}
LAYERS = {
    **dict.fromkeys(("bloom", "codegen", "gpt2", "gpt_bigcode", "gptj"), "n_layer"),
    "gpt_neo": "num_layers",
    "mpt": "n_layers",
    "xglm": "num_layers",
}
MORE = {  # what these classes do not leave out
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoeshared": {"shared_intermediate_size": 2048},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
FALCON = {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True}
OTHER = [
    ("cohere2", {"tie_word_embeddings": False}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("falcon", FALCON),
    ("falcon", {"multi_query": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 64}),
]


def made(kind, more):
    """Return a configuration of four layers, or one whose text model has them."""
    sizes = {LAYERS.get(kind, "num_hidden_layers"): 4, **MORE.get(kind, {}), **more}
    return CONFIG_MAPPING[kind](
        **({"text_config": sizes} if "text_config" in CONFIG_MAPPING[kind].sub_configs else sizes)
    )


def read(said, path):
    path.write_text(json.dumps(said))
    return Transformer.load(path, 2048)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in KNOWN), *OTHER])
def test_a_model_has_as_many_parameters_as_its_configuration_says(tmp_path, kind, more):
    config = made(kind, more)
    said = json.loads(config.to_json_string())
    model = read(said, tmp_path / "config.json")
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config.get_text_config())
    assert model.layers == 4
    assert model.parameters == pytest.approx(sum(each.numel() for each in built.parameters()), rel=0.001)
    if not more:  # what a row of the table has, a configuration may leave out
        assert read(without(said, {*KNOWN[kind], "layer_types", "attention_layers"}), tmp_path / "config.json") == model
    kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    if "full" not in KNOWN[kind] or len({*kinds}) > 1:
        assert model.windowed == len(kinds) - kinds.count("full_attention")


def without(said, names):
    return {
        name: without(each, names) if name == "text_config" else each
        for name, each in said.items()
        if name not in names
    }


def test_the_table_names_what_transformers_has():
    refused = {kind for kinds in table("config.toml")["refused"].values() for kind in kinds.split()}
    assert len(KNOWN) + len(refused) > 40
    assert not {*KNOWN} & refused
    assert {*KNOWN, *refused} <= {*CONFIG_MAPPING}
