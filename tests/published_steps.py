"""Steps that others measured, what layouts predict for them, and the tables of the page "Layouts".

`PYTHONPATH=. python tests/published_steps.py` prints the tables.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout
from pipelab.layouts.published import published
from pipelab.layouts.transformer import Transformer

GPT = {"vocab": 51200, "sequence": 2048, "gated": False, "flash": False, "dropout": True, "tied": True}


@dataclass(frozen=True)
class Step:
    """A step: its name, what was measured, and what pipelab predicts; `fitted` if a share of the device is from it."""

    group: str
    name: str
    seconds: float
    estimate: Estimate
    gibibytes: float | None = None
    fitted: bool = False

    @cached_property
    def predicted(self) -> float:
        return self.estimate.seconds

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return max(self.estimate.bytes) / 2**30 / self.gibibytes - 1 if self.gibibytes else None

    @property
    def row(self) -> str:
        predicted = "fitted" if self.fitted else f"{100 * self.error:+.1f} %"
        return f"| {self.name} | {self.seconds:.2f} | {self.predicted:.2f} | {predicted} |"


# --- SimuMax 1.2: docs/b200/b200_release_v1.2_summary.md, with the models of its configs/models ---------------------

MODELS = {
    "llama3_70b": {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "llama3_405b": {"hidden": 16384, "heads": 128, "kv_heads": 16, "ffn": 53248, "vocab": 128256},
    "deepseekv2": {"hidden": 5120, "ffn": 12288, "vocab": 102400, "experts": 160, "active": 6, "expert_ffn": 1536}
    | {"shared_ffn": 3072},
    "deepseekv3": {"hidden": 7168, "ffn": 18432, "vocab": 129280, "experts": 256, "active": 8, "expert_ffn": 2048}
    | {"shared_ffn": 2048},
}
LATENT = {"heads": 128, "head": 128, "dense_layers": 1, "q_rank": 1536, "kv_rank": 512, "rope": 64}
FITTED = {"llama3_70b_tp2_pp1_dp4_l12_mbc8", "deepseekv2_tp1_ep8_pp1_dp8_l4_mbc8"}


def b200() -> list[Step]:
    """Each row of SimuMax's summary for B200."""
    found = []
    for line in (Path(__file__).parent / "layouts" / "b200.txt").read_text(encoding="utf-8").splitlines()[1:]:
        name, milliseconds, gibibytes = line.split()

        def size(letters: str, default: int = 1, name: str = name) -> int:
            match = re.search(rf"_{letters}(\d+)", name)
            return int(match[1]) if match else default

        kind = next(each for each in MODELS if name.startswith(each))
        sizes = MODELS[kind] | (LATENT if "deepseek" in kind else {})
        layout = Layout(
            tensor=size("tp"),
            context=size("cp"),
            expert=size("ep"),
            pipeline=size("pp"),
            replicas=size("dp"),
            microbatches=size("mbc"),
            overlap=False,
        )
        model = Transformer(layers=size("l"), sequence=size("seq", 4096), **sizes)
        group = "DeepSeek-V2 and V3" if "deepseek" in kind else "Llama 3 70B and 405B"
        estimate = Estimate(model, layout, device("b200"))
        seconds = float(milliseconds) / 1e3
        found.append(
            Step(f"{group} on 8 B200 (SimuMax 1.2)", name, seconds, estimate, float(gibibytes), name in FITTED)
        )
    return found


# --- Korthikanti et al. 2022 (arXiv:2205.05198): tables 3 and 5, and section 6.3 for the 530B with 8 copies ---------

KORTHIKANTI = {  # layers, hidden, heads; ranks, stages on each, micro-batches, sequences in each; seconds; MFU
    "22B": ((48, 6144, 64), (1, 1, 1, 4), (1.42, 1.10), 41.5),
    "175B": ((96, 12288, 96), (8, 3, 64, 1), (18.13, 13.75), 51.4),
    "530B": ((105, 20480, 128), (35, 3, 280, 1), (49.05, 37.83), 56.0),
    "1T": ((128, 25600, 160), (64, 1, 512, 1), (94.42, 71.49), 56.3),
}


def a100(name: str, recompute: str, replicas: int = 1) -> Estimate:
    (layers, hidden, heads), (ranks, stages, microbatches, microbatch), *_ = KORTHIKANTI[name]
    return _gpt(layers, hidden, heads, ranks, stages, microbatches, microbatch, recompute=recompute, replicas=replicas)


def _gpt(
    layers: int, hidden: int, heads: int, ranks: int, stages: int, microbatches: int, microbatch: int, **more: Any
) -> Estimate:
    """Return a GPT on A100s; replicas send their gradients after the backward if nothing else is said."""
    sizes: dict[str, Any] = {"tensor": 8, "zero": 0, "overlap": False, "pipeline": ranks, "stages_per_rank": stages}
    sizes |= {"schedule": "interleaved-1f1b" if stages > 1 else "1f1b", "microbatches": microbatches}
    model = Transformer(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, **GPT)
    return Estimate(model, Layout(**(sizes | {"microbatch": microbatch} | more)), device("a100"))


def korthikanti() -> list[Step]:
    """Each step with full and with selective recomputation."""
    group = "22B to 1T on 8 to 2,240 A100 (Korthikanti et al. 2022)"
    found = []
    for name, (*_, measured, _) in KORTHIKANTI.items():
        for recompute, seconds in zip(("full", "selective"), measured, strict=True):
            fitted = (name, recompute) == ("175B", "selective")
            found.append(Step(group, f"{name}, {recompute}", seconds, a100(name, recompute), None, fitted))
    return [*found, Step(group, "530B, selective, 8 copies", 39.15, a100("530B", "selective", 8))]


# --- Narayanan et al. 2021 (arXiv:2104.04473): table 1, with the micro-batch, the stages on a rank and the overlap of
# --- Megatron-LM's script for it, examples/academic_paper_scripts/sc21/run_table_1.sh --------------------------------

MEGATRON = {  # layers, hidden, heads; tensor, ranks, stages on each; GPUs, sequences, micro-batch; TFLOP/s of a GPU
    "1.7B": ((24, 2304, 24), (1, 1, 1), (32, 512, 16), 137),
    "3.6B": ((30, 3072, 32), (2, 1, 1), (64, 512, 16), 138),
    "7.5B": ((36, 4096, 32), (4, 1, 1), (128, 512, 16), 142),
    "18.4B": ((40, 6144, 48), (8, 1, 1), (256, 1024, 8), 135),
    "39B": ((48, 8192, 64), (8, 2, 1), (512, 1536, 4), 138),
    "76B": ((60, 10240, 80), (8, 4, 3), (1024, 1792, 2), 140),
    "146B": ((80, 12288, 96), (8, 8, 2), (1536, 2304, 2), 148),
    "310B": ((96, 16384, 128), (8, 16, 2), (1920, 2160, 1), 155),
    "530B": ((105, 20480, 128), (8, 35, 3), (2520, 2520, 1), 163),
    "1T": ((128, 25600, 160), (8, 64, 1), (3072, 3072, 1), 163),
}


def megatron() -> list[Step]:
    """Each row; its seconds are those of equation 3 at the stated rate."""
    found = []
    for name, ((layers, hidden, heads), (tensor, ranks, stages), (gpus, batch, size), rate) in MEGATRON.items():
        replicas = gpus // (tensor * ranks)
        counted = 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        seconds = 96 * batch * 2048 * layers * hidden**2 * counted / (gpus * rate * 1e12)
        more = {"tensor": tensor, "replicas": replicas, "recompute": "full", "overlap": ranks == 1}
        estimate = _gpt(layers, hidden, heads, ranks, stages, batch // replicas // size, size, **more)
        group = "1.7B to 1T on 32 to 3,072 A100 (Megatron-LM 2021, table 1)"
        found.append(Step(group, f"{name} on {gpus:,}", seconds, estimate))
    return found


# --- Jiang et al. 2024, MegaScale (arXiv:2402.15627): tables 1 and 2, its baseline Megatron-LM, section 6.1 ----------


def megascale() -> list[Step]:
    """Each row of Megatron-LM, on eight ranks of six stages; micro-batches of one sequence are assumed."""
    rows = {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9, 3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}
    found = []
    for gpus, seconds in rows.items():
        replicas, batch = gpus // 64, 768 if gpus <= 1024 else 6144
        more = {"replicas": replicas, "recompute": "selective", "zero": 1}
        estimate = _gpt(96, 12288, 128, 8, 6, batch // replicas, 1, **more)
        estimate = replace(estimate, model=replace(estimate.model, vocab=64000))
        group = "175B on 256 to 12,288 A100 (MegaScale 2024, table 2: Megatron-LM)"
        found.append(Step(group, f"175B on {gpus:,}, batch {batch:,}", seconds, estimate))
    return found


# --- torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: 70B in 16 bits without asynchronous TP --------


def torchtitan() -> list[Step]:
    """The row of 70B: 597.3 tokens a second for each H100, whose memory is slower than others'."""
    model = Transformer(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, sequence=8192)
    layout = Layout(tensor=8, replicas=32, zero=3, microbatch=16, recompute="full")
    estimate = Estimate(model, layout, device("h100", bandwidth=2.4e12, memory=96e9))
    group = "Llama 3 70B on 256 H100 (torchtitan, June 2025)"
    return [Step(group, "70B on 256 GPUs, FSDP 32, TP 8", 16 * 8192 / 8 / 597.3, estimate)]


# --- Llama 3 (arXiv:2407.21783): table 4, rows of 8,192 tokens --------------------------------------------------------


def llama() -> list[Step]:
    """Both rows; the first and the last of a rank's chunks have no layer (section 3.3.2), so the others have one."""
    model = Transformer(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, sequence=8192)
    found = []
    for gpus in (8192, 16384):
        setup = published[f"llama3-405b-{gpus}"]
        layout = Layout(
            tensor=8,
            pipeline=16,
            stages_per_rank=8,
            schedule="interleaved-1f1b",
            replicas=setup.replicas,
            microbatches=setup.batch // setup.replicas,
        )
        estimate = Estimate(model, layout, device("h100"))
        group = "Llama 3 405B on 16,384 H100 (arXiv:2407.21783, table 4)"
        found.append(Step(group, f"{gpus:,} GPUs", setup.seconds, estimate, None, gpus == 8192))
    return found


def summary(steps: list[Step]) -> str:
    """Return the row of a group: how many steps are predicted, and the errors of times and of memory."""
    times = [abs(each.error) for each in steps if not each.fitted]
    memory = [abs(each.memory_error) for each in steps if each.memory_error is not None]
    cells = [f"{100 * error:.1f} %" for errors in (times, memory) if errors for error in (median(errors), max(errors))]
    return f"| {steps[0].group} | {len(times)} | " + " | ".join(cells + ["not stated", ""][: 4 - len(cells)]) + " |"


def groups() -> list[list[Step]]:
    """All steps, by group."""
    every = [*b200(), *korthikanti(), *megatron(), *megascale(), *llama(), *torchtitan()]
    return [[each for each in every if each.group == group] for group in dict.fromkeys(each.group for each in every)]


if __name__ == "__main__":
    lines = [*map(summary, groups())]
    for steps in groups():
        lines += ["", steps[0].group, *(each.row for each in steps)]
    sys.stdout.write("\n".join([*lines, ""]))
