"""Steps that others measured, what layouts predict for them, and the tables of the page "Layouts".

`PYTHONPATH=. python tests/published_steps.py` writes them to docs/results/layouts.md.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout
from pipelab.layouts.published import published
from pipelab.layouts.transformer import Transformer

PAGE = Path(__file__).parents[1] / "docs" / "results" / "layouts.md"
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
        group = "4 layers of DeepSeek-V2 or V3" if "deepseek" in kind else "12 layers of Llama 3 70B, or 4 of 405B,"
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


# --- MosaicML llm-foundry, scripts/train/benchmarking/README.md: MPT in 16 bits on H100, whose links it does not state

MPT = {  # layers, hidden, heads: scripts/train/yamls/pretrain; the parameters that they give are the table's
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def mpt() -> list[Step]:
    """Each row of H100 in 16 bits; FSDP's FULL_SHARD is ZeRO 3, and its SHARD_GRAD_OP ZeRO 2."""
    found = []
    for line in (Path(__file__).parent / "layouts" / "mpt.txt").read_text(encoding="utf-8").splitlines()[1:]:
        name, *numbers, recompute = line.split()
        sequence, gpus, size, microbatches, rate, zero = map(int, numbers)
        layers, hidden, heads = MPT[name]
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 50368}
        model = Transformer(**sizes, sequence=sequence, gated=False, tied=True)
        more = {"microbatches": microbatches, "microbatch": size, "recompute": recompute}
        estimate = Estimate(model, Layout(replicas=gpus, zero=zero, **more), device("h100"))
        row = f"{name} on {gpus}, {sequence:,} tokens, {microbatches} x {size}, {recompute}"
        group = "MPT 760M to 70B on 8 to 512 H100 (llm-foundry 2024)"
        found.append(Step(group, row, gpus * microbatches * size * sequence / rate, estimate))
    return found


# --- BLOOM (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md): layouts of February 25, 2022 ---

BLOOM = {  # replicas, tensor, ranks, micro-batch: sequences of a step, seconds; the first of two equal rows
    (8, 8, 6, 4): (2048, 114.11),
    (4, 8, 12, 4): (2048, 117.07),
    (4, 8, 12, 2): (2048, 128.82),
    (6, 8, 8, 4): (2016, 113.16),
    (12, 8, 4, 2): (2016, 125.52),
    (12, 8, 4, 4): (2016, 114.81),
    (24, 8, 2, 1): (2016, 145.45),
    (24, 8, 2, 2): (2016, 136.13),
    (8, 4, 12, 4): (2048, 111.89),
    (8, 4, 12, 2): (2048, 110.48),
    (16, 4, 6, 4): (2048, 117.11),
    (16, 4, 6, 2): (2048, 111.71),
    (16, 2, 12, 2): (2048, 112.5),
    (8, 2, 24, 1): (2048, 119.53),
    (8, 2, 24, 2): (2048, 122.75),
    (4, 4, 24, 1): (2048, 130.6),
}


def bloom() -> list[Step]:
    """Each layout of 384 A100s whose micro-batches are a power of two; nodes have four links of 100 Gb/s."""
    found, nodes = [], device("a100", between=4 * 12.5e9 / 8)
    model = Transformer(layers=72, hidden=14336, heads=64, ffn=4 * 14336, **(GPT | {"vocab": 250880}))
    for (replicas, tensor, ranks, size), (batch, seconds) in BLOOM.items():
        sizes = {"replicas": replicas, "tensor": tensor, "pipeline": ranks, "microbatch": size, "zero": 1}
        layout = Layout(**sizes, microbatches=batch // replicas // size, recompute="full", overlap=False)
        name = f"TP {tensor}, DP {replicas}, PP {ranks}, {size} in a micro-batch, batch {batch:,}"
        group = "181B on 384 A100 (BLOOM 2022)"
        found.append(Step(group, name, seconds, Estimate(model, layout, nodes)))
    return found


# --- Qwen3 235B (yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md): every row of it with a step's seconds

QWEN = {  # tensor, expert, ranks, stages on each, replicas; micro-batch, recomputation, ZeRO; seconds
    "TP 2, EP 32, PP 8": ((2, 32, 8, 4, 16), (1, "none", 1), 19.7),
    "TP 2, EP 32, PP 8, all-to-all overlapped": ((2, 32, 8, 4, 16), (1, "none", 1), 17.6),
    "TP 2, EP 8, FSDP": ((2, 8, 1, 1, 128), (4, "full", 3), 17.6),
    "TP 2, EP 8, PP 32": ((2, 8, 32, 3, 4), (1, "none", 1), 24.2),
    "TP 4, EP 8, PP 8": ((4, 8, 8, 4, 8), (1, "none", 1), 29.0),
}


def qwen() -> list[Step]:
    """Each row on 256 H100s; that norms and activations are computed again is left out."""
    found = []
    sizes = {"layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "head": 128, "ffn": 12288, "vocab": 151936}
    model = Transformer(**sizes, sequence=4096, experts=128, active=8, expert_ffn=1536)
    for name, ((tensor, expert, ranks, stages, replicas), (size, recompute, zero), seconds) in QWEN.items():
        layout = Layout(
            tensor=tensor,
            expert=expert,
            pipeline=ranks,
            stages_per_rank=stages,
            replicas=replicas,
            schedule="interleaved-1f1b" if stages > 1 else "1f1b",
            microbatches=2048 // replicas // size,
            microbatch=size,
            recompute=recompute,
            zero=zero,
        )
        group = "Qwen3 235B, 128 experts, on 256 H100 (Megatron-MoE-ModelZoo 2025)"
        found.append(Step(group, name, seconds, Estimate(model, layout, device("h100"))))
    return found


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


@cache
def groups() -> list[list[Step]]:
    """All steps, by group."""
    every = [*b200(), *korthikanti(), *megatron(), *megascale(), *llama(), *torchtitan(), *mpt(), *bloom(), *qwen()]
    return [[each for each in every if each.group == group] for group in dict.fromkeys(each.group for each in every)]


def kinds(wrong: list[tuple[str, float]]) -> dict[str, tuple[int, int, int]]:
    """Return for each kind how many errors there are, and the narrowest range of percents that 90 % of them are in."""
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in wrong):
        own = sorted(error for each, error in wrong if each == kind)
        most = len(own) - len(own) // 10
        *_, start = min((own[at + most - 1] - own[at], at) for at in range(len(own) - most + 1))
        found[kind] = (len(own), math.floor(own[start]), math.ceil(own[start + most - 1]))
    return found


def page() -> str:
    """Return the tables of docs/results/layouts.md: every group, and every step."""
    lines = [
        "| what was measured | steps predicted | median error, step time | largest | median error, memory | largest |",
        "|---|---|---|---|---|---|",
        *map(summary, groups()),
    ]
    for steps in groups():
        head = f"| {steps[0].group} | measured, s | predicted, s | error |"
        lines += ["", head, "|---|---|---|---|", *(each.row for each in steps)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    predicted = [each for steps in groups() for each in steps if not each.fitted]
    sys.stdout.write(f"{kinds([(each.estimate.kind, 100 * each.error) for each in predicted])}\n")
