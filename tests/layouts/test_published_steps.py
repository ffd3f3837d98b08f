"""What layouts predict against what others measured: one number is fitted for each device, the other rows are not."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import pytest
from published_steps import BLOOM, KORTHIKANTI, PAGE, a100, bloom, groups, kinds, summary

from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout
from pipelab.layouts.published import errors

REFERENCE = PAGE.parents[1] / "reference" / "layouts.md"
STEPS = [each for steps in groups() for each in steps]
B200 = [each for each in STEPS if "B200" in each.group]
SLOW = ("530B, full", "1T, full", "TP 2, EP 8, PP 32")  # they take a second or more to simulate


def test_simumax_rows_are_predicted_within_four_percent_in_time_and_two_in_memory():
    times = [abs(each.error) for each in B200 if not each.fitted]
    memory = [abs(each.memory_error) for each in B200]
    assert len(times) == 41
    assert median(times) < 0.04
    assert max(times) < 0.14
    assert (round(median(memory), 3), round(max(memory), 3)) == (0.014, 0.040)


def test_the_page_has_every_step_as_measured_and_as_estimated():
    text = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"(fitted|[-+]\d+\.\d %) \|$", text, re.MULTILINE)) == len(STEPS) == 164
    for each in STEPS:
        assert (f"| {each.name} | {each.seconds:.2f} |" if each.name in SLOW else each.row) in text
    assert all(summary(steps) in text for steps in groups() if not {each.name for each in steps} & {*SLOW})


def test_the_fitted_rows_are_met():
    fitted = [each for each in STEPS if each.fitted]
    assert len(fitted) == 4
    assert all(abs(each.error) < 0.01 for each in fitted)


def test_the_error_to_expect_holds_for_90_percent_of_the_steps_of_each_kind_and_no_narrower_one_does():
    text = PAGE.read_text(encoding="utf-8")
    slow = {name: re.search(rf"^\| {name} \|.* \| (\S+) % \|$", text, re.MULTILINE)[1] for name in SLOW}
    wrong = [float(slow[each.name]) if each.name in SLOW else 100 * each.error for each in STEPS]
    ours = [(each.estimate.kind, error) for each, error in zip(STEPS, wrong, strict=True) if not each.fitted]
    assert kinds(ours) == errors
    page = REFERENCE.read_text(encoding="utf-8")
    assert all(f"| {kind} | {rows} | {least:+} to {most:+} % |" in page for kind, (rows, least, most) in errors.items())
    middle = [f"{median(e for k, e in ours if k == kind):.0f} %" for kind in ("long sequences", "small model", "dense")]
    middle.append(f"{median(error for kind, error in ours if kind == 'dense, recomputed'):.0f} %")
    text = " ".join(page.split())
    assert f"Of these {len(ours)} estimates, {sum(error < 0 for _, error in ours)} are too short." in text
    assert "{} with long sequences and {} in small models, but {} and {} in dense models".format(*middle) in text


def test_blooms_layouts_are_ranked_as_the_tutorial_says():
    tutorial = (PAGE.parents[2] / "tutorials" / "which_layout.py").read_text(encoding="utf-8")
    assert all(f"    {sizes}: {timed},\n" in tutorial for sizes, timed in BLOOM.items())
    model = replace(
        bloom()[0].estimate.model, layers=70, heads=112, kv_heads=112, head=128
    )  # the layout that BLOOM was trained with
    layout = Layout(tensor=4, replicas=8, pipeline=12, microbatches=128, microbatch=2, recompute="full")
    assert round(max(Estimate(model, layout, device("a100")).bytes) / 1e9) == 34


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
    text = REFERENCE.read_text(encoding="utf-8")
    for name, seconds in page.items():
        assert seconds == 0 or re.search(rf"^\| {name} \|.*\| {seconds:.3f} \|$", text, re.MULTILINE), name


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_our_flops_give_the_utilisation_that_the_publication_states(name):
    (*_, microbatches, microbatch), (_, seconds), stated = KORTHIKANTI[name][1:]
    estimate = a100(name, "selective")
    share = estimate.model.flops(microbatches * microbatch) / (seconds * estimate.layout.devices * estimate.device.peak)
    assert 100 * share == pytest.approx(stated, abs=0.5)
