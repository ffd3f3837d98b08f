"""What layouts predict against what others measured: one number is fitted for each device, the other rows are not."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout
from pipelab.layouts.transformer import Transformer
from pipelab.simulation.published import published

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


def b200() -> list[tuple[str, float, float, float, float]]:
    """Each row of SimuMax's B200 summary: name, measured ms and GiB, estimated ms and GiB."""
    found = []
    for line in (Path(__file__).parent / "b200.txt").read_text().splitlines()[1:]:
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
        estimate = Estimate(model, layout, device("b200"))
        estimated = estimate.seconds * 1e3, max(estimate.bytes) / 2**30
        found.append((name, float(milliseconds), float(gibibytes), *estimated))
    return found


def test_simumax_rows_are_predicted_within_five_percent_in_time_and_three_in_memory():
    rows = b200()
    times = [abs(ours / real - 1) for name, real, _, ours, _ in rows if name not in FITTED]
    memory = [abs(ours / real - 1) for _, _, real, _, ours in rows]
    assert len(times) == 41
    assert median(times) < 0.035
    assert max(times) < 0.16
    assert median(memory) < 0.02
    assert max(memory) < 0.05


def test_the_fitted_rows_are_met():
    assert all(ours == pytest.approx(real, rel=0.01) for name, real, _, ours, _ in b200() if name in FITTED)


GPT = {"vocab": 51200, "sequence": 2048, "gated": False, "flash": False, "dropout": True, "tied": True}

# model: layers, hidden, heads; ranks, stages on each, micro-batches, sequences in each
KORTHIKANTI = {
    "22B": ((48, 6144, 64), (1, 1, 1, 4), (1.42, 1.10), 41.5),
    "175B": ((96, 12288, 96), (8, 3, 64, 1), (18.13, 13.75), 51.4),
    "530B": ((105, 20480, 128), (35, 3, 280, 1), (49.05, 37.83), 56.0),
    "1T": ((128, 25600, 160), (64, 1, 512, 1), (94.42, 71.49), 56.3),
}
"""Tables 3 and 5 of Korthikanti et al. 2022 (arXiv:2205.05198): seconds with full and selective recomputation, MFU."""


def a100(name: str, recompute: str) -> Estimate:
    (layers, hidden, heads), (ranks, stages, microbatches, microbatch), _, _ = KORTHIKANTI[name]
    model = Transformer(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, **GPT)
    layout = Layout(
        tensor=8,
        pipeline=ranks,
        stages_per_rank=stages,
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        microbatches=microbatches,
        microbatch=microbatch,
        recompute=recompute,
        zero=0,
    )
    return Estimate(model, layout, device("a100"))


def test_korthikantis_rows_are_predicted_within_five_percent():
    errors = {}
    for name in ("22B", "175B"):  # the others' pipelines are slow to simulate; the page "Layouts" has them
        measured = KORTHIKANTI[name][2]
        for recompute, real in zip(("full", "selective"), measured, strict=True):
            errors[name, recompute] = abs(a100(name, recompute).seconds / real - 1)
    assert errors.pop(("175B", "selective")) < 0.01  # fitted
    assert median(errors.values()) < 0.05
    assert max(errors.values()) < 0.05


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "layouts.md"


def test_one_answers_terms_are_what_the_page_computes_by_hand():
    estimate, layers, hidden, tokens = a100("175B", "full"), 64 * 12, 12288, 2048 / 8
    products, attention, rings = 312e12 * 0.775, 312e12 * 0.70, 5.5e-6 + 2 * tokens * hidden / (300e9 * 0.67)
    terms = {
        "matrix products": layers * 6 * 12 * hidden**2 * tokens / products,
        "attention's products": layers * 3 * 4 * 2048 * hidden * tokens / attention,
        "tensor parallelism": layers * 10 * 7 * rings,
        "head": 64 * 6 * hidden * 51200 * tokens / products,
    }
    found = estimate.terms
    again = sum(found[name] for name in ("matrix products", "attention's products", "other operations")) / 3
    terms["recomputation"] = again + 0.4 * terms["tensor parallelism"]
    assert {name: found[name] for name in terms} == pytest.approx(terms)
    micro = sum(seconds for name, seconds in found.items() if name not in ("head", "optimizer")) / 64
    waiting = estimate.seconds - sum(found.values())
    assert waiting == pytest.approx((8 - 1) / 3 * micro, rel=0.03)
    page = {**found, "waiting": waiting, "the step": estimate.seconds}
    text = PAGE.read_text(encoding="utf-8")
    for name, seconds in page.items():
        assert seconds == 0 or re.search(rf"^\| {name} \|.*\| {seconds:.3f} \|$", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("name", "heads", "devices"),
    [
        ("39b", 64, 512),
        ("76b", 80, 1024),
        ("146b", 96, 1536),
        ("310b", 128, 1920),
        ("530b", 128, 2520),
    ],
)
def test_megatrons_rows_are_on_the_page_with_their_errors(name, heads, devices):
    setup = published[f"megatron-{name}"]
    sizes = {"layers": setup.layers, "hidden": setup.hidden, "heads": heads, "ffn": 4 * setup.hidden, **GPT}
    cells = [f"{setup.seconds:.2f}"]
    for microbatch in (1, 2):
        layout = Layout(
            tensor=setup.tensor,
            replicas=setup.replicas,
            pipeline=setup.pipeline,
            microbatch=microbatch,
            microbatches=setup.sizes(microbatch)["microbatches"],
            recompute="full",
            zero=0,
        )
        assert layout.devices == setup.devices == devices
        seconds = Estimate(Transformer(**sizes), layout, device("a100")).seconds
        assert abs(seconds / setup.seconds - 1) < 0.08
        cells += [f"{seconds:.2f}", f"{100 * (seconds / setup.seconds - 1):+.1f} %"]
    assert f"| {name.upper()} on {devices:,} | {' | '.join(cells)} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_our_flops_give_the_utilisation_that_the_publication_states(name):
    (*_, microbatches, microbatch), (_, seconds), stated = KORTHIKANTI[name][1:]
    estimate = a100(name, "selective")
    share = estimate.model.flops(microbatches * microbatch) / (seconds * estimate.layout.devices * estimate.device.peak)
    assert 100 * share == pytest.approx(stated, abs=0.5)
