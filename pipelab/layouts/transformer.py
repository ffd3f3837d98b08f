"""The sizes of a transformer, and what follows: parameters, floating-point operations, bytes that a layer keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pipelab.errors import FormatError, UsageError
from pipelab.files import read_data
from pipelab.layouts.devices import table
from pipelab.layouts.published import model_flops
from pipelab.plan.fault import shorten


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer is, for each of its tokens; numbers of 16 bits take two bytes.

    What a layer keeps follows Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4.

    Attributes:
        parameters: which every token passes, without routed experts.
        experts: of all routed experts together.
        routed: of the routed experts that a token passes.
        attention: floating-point operations of a forward in the attention's two products of queries, keys and values.
        whole: bytes kept for the backward that tensor parallelism divides only with sequence parallelism.
        cut: bytes kept that tensor parallelism divides.
        matrices: bytes kept for the matrices of attention, which FlashAttention does not keep.
        elementwise: bytes that a forward's operations without matrix products read and write.
        sent: bytes that a token's way to its experts takes, and as many back.
        keys: bytes of keys and values.
    """

    parameters: int
    experts: int
    routed: int
    attention: float
    whole: float
    cut: float
    matrices: float
    elementwise: float
    sent: float
    keys: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The sizes of a transformer.

    Norms and biases are left out: they are less than a thousandth of the parameters.

    Attributes:
        layers: how many layers.
        hidden: the width of a layer, `h`.
        heads: how many heads attention has, `a`.
        ffn: the width between the two matrices after the attention.
        vocab: how many different words.
        sequence: how many tokens a sequence has, `s`.
        kv_heads: how many heads keys and values have; 0 for as many as `heads`.
        head: the width of a head; 0 for `hidden / heads`.
        gated: whether there are two matrices up, as in SwiGLU.
        tied: whether embedding and head are one matrix.
        flash: whether attention's matrices are computed again instead of kept (FlashAttention, Dao et al. 2022).
        dropout: whether there is dropout, which keeps a byte for each number.
        experts: how many routed experts a layer has; 0 for none.
        active: how many routed experts a token passes.
        expert_ffn: an expert's `ffn`.
        shared_ffn: the `ffn` that every token passes beside its experts.
        dense_layers: how many of the first layers have no experts.
        q_rank, kv_rank, rope: of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the widths
            of compressed queries, of compressed keys and values, and of a head's part with positions; 0 without it.
        positions: how many positions have a learned vector, added to the embedding's.
        window: how many tokens back attention looks in layers with a window.
        windowed: how many layers have a window. Each layer is counted as the mean of all.

    Example:
        >>> sizes = {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "sequence": 2048}
        >>> gpt3 = Transformer(**sizes, gated=False, tied=True)
        >>> f"{gpt3.parameters:.4g}"
        '1.746e+11'
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    kv_heads: int = 0
    head: int = 0
    gated: bool = True
    tied: bool = False
    flash: bool = True
    dropout: bool = False
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    positions: int = 0
    window: int = 0
    windowed: int = 0

    def __post_init__(self) -> None:
        """Fill in what follows from other sizes, and refuse what cannot be."""
        for each in fields(self):
            value, least = getattr(self, each.name), int(each.default is MISSING)
            most = 1 if each.type == "bool" else 10_000 if each.name == "layers" else 1 << 31
            if not (isinstance(value, int) and least <= value <= most):
                wanted = "true or false" if most == 1 else f"a whole number from {least} to {most}"
                raise UsageError(f"{each.name}={shorten(value)}: expected {wanted}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head", self.head or self.hidden // self.heads)

    @classmethod
    def load(cls, path: str | os.PathLike[str], sequence: int | None = None) -> Transformer:
        """Read a model's sizes from a TOML file with the names above, or from a Hugging Face model's `config.json`.

        Args:
            path: the file.
            sequence: how many tokens a sequence has, instead of the file's number.

        Raises:
            FormatError: if the file is neither, or lacks a size.
        """
        toml = Path(path).suffix != ".json"
        read = read_data(path, "a model's sizes", toml)
        given = read if toml else _sizes(read, path)
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise FormatError(f"{path}: {', '.join(unknown)}: expected {', '.join(sorted(known))}")
        given |= {"sequence": sequence} if sequence else {}
        if lacking := [each.name for each in fields(cls) if each.default is MISSING and each.name not in given]:
            raise FormatError(f"{path} lacks {', '.join(lacking)}\n  try: a TOML of sizes, or a model's config.json")
        try:
            return cls(**given)
        except UsageError as error:
            raise FormatError(f"{path}: {error}") from None

    def layer(self, number: int) -> Layer:
        """Return what the layer with this number is; numbers count from 0."""
        h, a, q, kv = self.hidden, self.heads, self.heads * self.head, self.kv_heads * self.head
        routed = self.experts > 0 and number >= self.dense_layers
        up, ffn = 2 if self.gated else 1, self.shared_ffn if routed else self.ffn
        if self.kv_rank:
            queries = a * (self.head + self.rope)
            kept = 2 * self.q_rank + 2 * self.kv_rank + self.rope + 2 * queries + 3 * q
            parameters = (self.q_rank * (h + queries) or h * queries) + self.kv_rank * (h + 2 * q) + h * (self.rope + q)
            turned = 2 * queries
        else:
            queries, kept, parameters, turned = q, 2 * q + 2 * kv, 2 * h * (q + kv), q + kv
        expert = h * self.expert_ffn * (up + 1)
        inside = self.active * (2 * h + (up + 1) * self.expert_ffn) * routed
        return Layer(
            parameters=parameters + h * ffn * (up + 1),
            experts=self.experts * expert * routed,
            routed=self.active * expert * routed,
            attention=2 * self.seen * (queries + q),
            whole=8 * h + 2 * h * self.dropout,
            cut=2 * (kept + (up + 1) * ffn + inside),
            matrices=0 if self.flash else (5 if self.dropout else 2) * a * self.sequence,
            elementwise=2 * (10 * h + (up + 1) * ffn + 2 * turned + 2 * inside),
            sent=2 * h * self.active * routed,
            keys=4 * kv,
        )

    @property
    def seen(self) -> float:
        """With how many tokens attention compares each, counted without the mask, in the mean of the layers."""
        window = min(self.window or self.sequence, self.sequence)
        return self.sequence - min(1, self.windowed / self.layers) * (self.sequence - window) ** 2 / self.sequence

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        layers, ends = [self.layer(number) for number in range(self.layers)], self.vocab * (2 - self.tied)
        return sum(each.parameters + each.experts for each in layers) + self.hidden * (ends + self.positions)

    @property
    def active_parameters(self) -> int:
        """How many of them a token passes."""
        return self.parameters - sum(each.experts - each.routed for each in map(self.layer, range(self.layers)))

    def flops(self, sequences: int) -> float:
        """Return the model FLOPs of a step on so many sequences; see `model_flops`.

        Without experts and with `ffn=4 * hidden` it is equation 3 of Megatron-LM (Narayanan et al. 2021,
        arXiv:2104.04473) without what is computed twice: `72 B L s h² (1 + s / 6h + V / 12hL)`.
        """
        passed = self.active_parameters - self.hidden * self.vocab * (not self.tied)
        width = self.heads * (self.head + self.rope / 2)
        tokens = sequences * self.sequence
        return model_flops(passed, self.layers, width, self.seen, tokens)  # type: ignore[arg-type]


_WINDOW = {"full_attention": 0, "global": 0, "sliding_attention": 1, "chunked_attention": 1, "local": 1}
"""Which of a configuration's kinds of layers have a window."""


def _said(config: Mapping[str, Any], path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of a configuration's `model_type`, and what it says, its text model included."""
    known = table("config.toml")
    types = {kind: row for kinds, row in known["types"].items() for kind in kinds.split()}
    refused = {kind: reason for reason, kinds in known["refused"].items() for kind in kinds.split()}
    text = config.get("text_config")
    inner = {**config, **text} if isinstance(text, dict) else config
    for kind in (str(config.get("model_type")), str(inner.get("model_type"))):
        if kind not in types:
            raise FormatError(
                f"{path}: no estimate for model_type {shorten(kind)} ({refused.get(kind, 'not in the table')})\n"
                f"  try: a TOML of sizes, if its layers are those of {', '.join(sorted(types))}"
            )
    said = types[kind] | {name: value for name, value in inner.items() if value is not None}
    for name, value in known["only"].items():
        if said.get(name, value) != value:
            raise FormatError(f"{path}: no estimate for {name}={shorten(said[name])}, only for {value}")
    return types[kind], said


def _sizes(config: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the sizes in a Hugging Face model's configuration."""
    row, said = _said(config, path)
    found: dict[str, Any] = {"gated": row.get("gated", True)}
    for name, theirs in table("config.toml")["names"].items():
        for each in filter(said.get, theirs.split()):
            if not isinstance(said[each], int):
                raise FormatError(f"{path}: {each}={shorten(said[each])}: expected a whole number")
            if found.setdefault(name, said[each]) != said[each]:
                raise FormatError(f"{path}: no estimate for {each}={said[each]} beside {name}={found[name]}")
    if not found["gated"]:
        found.setdefault("ffn", 4 * found.get("hidden", 0))
    if said.get("multi_query") and not said.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    if "learned" in row:
        found["positions"] = found.get("sequence", 0) + row["learned"]
    latent, shared = found.pop("latent", 0), found.pop("shared", 0)
    if found.get("kv_rank"):
        found["head"], found["kv_heads"] = latent, found.get("heads", 0)
    if found.get("experts"):
        found.setdefault("expert_ffn", found.get("ffn", 0))  # Mixtral's name for it
        found.setdefault("shared_ffn", shared * found["expert_ffn"])
    layers, kinds = found.get("layers", 0), said.get("layer_types", said.get("attention_layers"))
    if isinstance(kinds, list):
        if other := [each for each in map(str, kinds) if each not in _WINDOW]:
            raise FormatError(f"{path}: no estimate for a layer of {shorten(other[0])}, only of {', '.join(_WINDOW)}")
        found["windowed"] = sum(map(_WINDOW.__getitem__, kinds))
    elif "full" in row:
        found["windowed"] = layers - layers // (row["full"] or layers + 1)
    return found
