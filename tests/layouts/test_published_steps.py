"""What layouts predict against what others measured: one number is fitted for each device, the other rows are not."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest
from published_steps import (
    KORTHIKANTI,
    Step,
    a100,
    b200,
    groups,
    korthikanti,
    llama,
    megascale,
    megatron,
    summary,
    torchtitan,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "layouts.md"
B200 = b200()


def light(steps: list[Step]) -> list[Step]:
    """Leave out the pipelines that take a second or more to simulate; `steps.py` prints them too."""
    return [each for each in steps if len(each.estimate.stages) * each.estimate.layout.microbatches <= 5000]


def test_simumax_rows_are_predicted_within_five_percent_in_time_and_three_in_memory():
    times = [abs(each.error) for each in B200 if not each.fitted]
    memory = [abs(each.memory_error) for each in B200]
    assert len(times) == 41
    assert median(times) < 0.035
    assert max(times) < 0.16
    assert median(memory) < 0.02
    assert max(memory) < 0.05


@pytest.mark.parametrize(
    ("steps", "most"),
    [(korthikanti(), 0.04), (megatron(), 0.10), (megascale(), 0.06), (llama(), 0.02), (torchtitan(), 0.07)],
)
def test_steps_are_predicted_as_the_page_says(steps, most):
    text = PAGE.read_text(encoding="utf-8")
    for each in light(steps):
        assert abs(each.error) < most
        assert each.row in text


def test_the_fitted_rows_are_met():
    fitted = [each for steps in groups() for each in steps if each.fitted]
    assert len(fitted) == 4
    assert all(abs(each.error) < 0.01 for each in fitted)


def test_the_page_has_the_errors_of_all_b200_rows():
    text = PAGE.read_text(encoding="utf-8")
    for group in {each.group for each in B200}:
        assert summary([each for each in B200 if each.group == group]) in text


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


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_our_flops_give_the_utilisation_that_the_publication_states(name):
    (*_, microbatches, microbatch), (_, seconds), stated = KORTHIKANTI[name][1:]
    estimate = a100(name, "selective")
    share = estimate.model.flops(microbatches * microbatch) / (seconds * estimate.layout.devices * estimate.device.peak)
    assert 100 * share == pytest.approx(stated, abs=0.5)
