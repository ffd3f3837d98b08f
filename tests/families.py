"""The families of models that people train, from transformers, in small: what they are made of, and a batch."""

from __future__ import annotations

import torch
import transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "use_cache": False}
NO_DROPOUT_HERE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2, **NO_DROPOUT_HERE}),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "MixtralForCausalLM": ("MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER),
    "BertForMaskedLM": ("BertConfig", {**SIZES, **NO_DROPOUT, "max_position_embeddings": 64}),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "use_cache": False}),
}


def made(name):
    torch.manual_seed(0)
    config, sizes = FAMILIES[name]
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def batch(name):
    torch.manual_seed(1)
    ids, targets = torch.randint(0, 128, (2, 8, 16))
    x = {"input_ids": ids, "attention_mask": (torch.rand(8, 16).sort(descending=True).values > 0.2).long()}
    return (x | {"decoder_input_ids": targets.roll(1, 1)} if name.startswith("T5") else x), targets


def loss(output, targets):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def part(x, index):
    return {name: each[2 * index : 2 * index + 2] for name, each in x.items()}


def distance(ours, theirs):
    """Return how far apart two lists of tensors are, as one vector, relative to the second."""
    ours, theirs = (torch.cat([each.detach().flatten() for each in both]) for both in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())
