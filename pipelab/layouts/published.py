"""Published training set-ups, to simulate their pipelines, and the model FLOPs utilisation (MFU) of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelab.errors import UsageError, require_size

_A100 = 312e12
"""Peak of an NVIDIA A100 in BF16 and FP16 without sparsity, FLOP/s: NVIDIA's data sheet."""
_H100 = 989e12
"""Peak of an NVIDIA H100 SXM in BF16 without sparsity, FLOP/s: NVIDIA's data sheet."""


def model_flops(parameters: float, layers: int, hidden: int, sequence: int, tokens: float) -> float:
    """Return the floating-point operations of one training step that the model itself needs.

    A token costs `6 * parameters` in matrix products, two thirds of them in the backward, and
    `12 * layers * hidden * sequence` in attention (PaLM, arXiv:2204.02311, appendix B, where `hidden` is `H * Q`, heads
    times their size). What a program computes twice to save memory does not count.

    Example:
        >>> f"{model_flops(parameters=175e9, layers=96, hidden=12288, sequence=2048, tokens=1536 * 2048):.3g}"
        '3.39e+18'
    """
    return tokens * (6 * parameters + 12 * layers * hidden * sequence)


def mfu(flops: float, seconds: float, devices: int, peak: float) -> float:
    """Return the model FLOPs utilisation of a step: which share of the devices' peak the model's own work is, 0 to 1.

    Example:
        A bubble of a quarter limits a step that otherwise runs at full speed to 75 %:

        >>> mfu(flops=75e15, seconds=10.0, devices=8, peak=1.25e15)
        0.75
    """
    if not (seconds > 0 and peak > 0):
        raise UsageError(f"seconds={seconds:g}, peak={peak:g}: expected positive numbers")
    return flops / (seconds * require_size("devices", devices) * peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """How a large model was trained: what its publication states, and what follows.

    Attributes:
        source: the publication, and the table.
        parameters: how many parameters the model has.
        layers: how many transformer layers.
        hidden: the width of a layer.
        sequence: how many tokens a sequence has.
        batch: how many sequences a step trains on.
        tensor: how many devices share every layer (tensor parallelism).
        pipeline: how many ranks the pipeline has.
        replicas: how many copies of the pipeline share the batch.
        rate: floating-point operations per second and device, as stated.
        peak: the device's most in a second.
        recomputes: whether `rate` includes a second forward, by which activations are recomputed.
    """

    source: str
    parameters: float
    layers: int
    hidden: int
    sequence: int
    batch: int
    tensor: int
    pipeline: int
    replicas: int
    rate: float
    peak: float
    recomputes: bool

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def flops(self) -> float:
        """The model FLOPs of a step; see `model_flops`."""
        return model_flops(self.parameters, self.layers, self.hidden, self.sequence, self.batch * self.sequence)

    @property
    def seconds(self) -> float:
        """How long a step takes by the stated rate, all FLOPs included that the rate counts."""
        again = self.batch * self.sequence * self.layers * self.hidden**2 * (24 + 4 * self.sequence / self.hidden)
        return (self.flops + again * self.recomputes) / (self.devices * self.rate)

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation, 0 to 1; see `mfu`."""
        return mfu(self.flops, self.seconds, self.devices, self.peak)

    def sizes(self, microbatch: int = 1) -> dict[str, int]:
        """Return the size of one pipeline: `OneFOneB(**setup.sizes())`."""
        sequences = self.batch // self.replicas
        if sequences % require_size("microbatch", microbatch):
            raise UsageError(f"microbatch={microbatch}: a replica's {sequences} sequences are not a multiple of it")
        return {"ranks": self.pipeline, "microbatches": sequences // microbatch}


_MEGATRON: dict[str, Any] = {
    "source": "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), table 1",
    "sequence": 2048,
    "peak": _A100,
    "recomputes": True,  # in the rate: section 5.1, equation 3
}
_LLAMA: dict[str, Any] = {  # of table 4, the two rows with sequences of 8,192 tokens
    "source": "Grattafiori et al. 2024, The Llama 3 Herd of Models (arXiv:2407.21783), tables 3 and 4",
    "sequence": 8192,
    "peak": _H100,
    "recomputes": False,
}


def _row(
    paper: dict[str, Any], billions: float, layers: int, hidden: int, pipeline: int, devices: int, batch: int, rate: int
) -> TrainingSetup:
    """Return a row of a paper's table, with a rate in TFLOP/s and 8 devices sharing every layer."""
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "batch": batch, "tensor": 8, "pipeline": pipeline}
    replicas = devices // (8 * pipeline)
    return TrainingSetup(parameters=billions * 1e9, replicas=replicas, rate=rate * 1e12, **sizes, **paper)


published: dict[str, TrainingSetup] = {
    "megatron-39b": _row(_MEGATRON, 39.1, 48, 8192, 2, 512, 1536, 138),
    "megatron-76b": _row(_MEGATRON, 76.1, 60, 10240, 4, 1024, 1792, 140),
    "megatron-146b": _row(_MEGATRON, 145.6, 80, 12288, 8, 1536, 2304, 148),
    "megatron-310b": _row(_MEGATRON, 310.1, 96, 16384, 16, 1920, 2160, 155),
    "megatron-530b": _row(_MEGATRON, 529.6, 105, 20480, 35, 2520, 2520, 163),
    "megatron-1t": _row(_MEGATRON, 1008.0, 128, 25600, 64, 3072, 3072, 163),
    "llama3-405b-8192": _row(_LLAMA, 405, 126, 16384, 16, 8192, 2048, 430),
    "llama3-405b-16384": _row(_LLAMA, 405, 126, 16384, 16, 16384, 2048, 400),
}
"""Published set-ups by name; the number at the end of Llama's counts its GPUs."""

errors: dict[str, tuple[int, int, int]] = {
    "dense": (42, -24, 6),
    "dense, recomputed": (64, -17, 7),
    "small model": (19, -36, -10),
    "long sequences": (19, -48, 2),
    "mixture of experts": (16, -17, 94),
}
"""For each kind of step: how many published ones were predicted, and between which percents 90 % of the errors are."""
