"""The report, claim by claim: right values, how they follow, and verdicts."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pipelab_course
from pipelab import B, F, OneFOneB
from pipelab.errors import NO_TORCH
from pipelab_course import report as claims
from pipelab_course.report import CLAIMS, READINGS, rows, verdict

PER_STAGE, PER_STAGE_IN_ALL, SPLIT, SPLIT_IN_ALL = READINGS

BY_ABOUT = {claim.about.partition(" for ")[0]: claim for claim in CLAIMS}
SLOTS = "The notebook's timeline, 3 stages and 6 micro-batches"
EARLY = "The notebook's timeline, backwards before their forwards"
BYTES = "The notebook's bytes in int8 of all devices, without and with scales"

VERDICTS = {
    "right": ["Table 3, steps", BYTES],
    "cannot be decided here": ["Measured, a share of the time", "The notebook's replicas after compression"],
    "right under one reading": [
        *("The batch", "Total time", "Communication", "Peak memory", "Table 1, compute", "Table 2, warm-up"),
        *("Table 2, steady state", "Table 2, cooldown", "Table 3, time", "Measured, one GPU", "Measured, four GPUs"),
        *("Communication, elsewhere", "Memory that 1F1B saves"),
    ],
    "wrong": [
        *("Speed-up on 4 GPUs", "Speed-up, elsewhere", "Bubble of GPipe", "Bubble of 1F1B", "Table 1, communication"),
        *("Ring all-reduce, from 2 to 4, 8, 16 replicas", "Table 1, total", "Table 1, speed-up", "Table 2, total"),
        *("Table 3, share", "Measured, communication", "Measured, peak memory", "Measured, speed-up"),
        *("Fill and drain", "Memory that 1F1B saves, elsewhere", "Labels of the first device's row", SLOTS, EARLY),
    ],
}


def total(reading, stages, replicas, microbatches, step=20):
    """Return what a pipeline with an all-reduce takes, from the closed form."""
    share, each = (stages if reading.split else 1), microbatches // (replicas if reading.in_all else 1)
    return (each + stages - 1) * 130 / share + 2 * (replicas - 1) * step


def alone(reading, stages, replicas, microbatches):
    """Return what one device takes for the same work."""
    return microbatches * (1 if reading.in_all else replicas) * (1 if reading.split else stages) * 130


def test_every_claim_has_its_verdict():
    assert {name: verdict(claim) for name, claim in BY_ABOUT.items()} == {
        name: said for said, names in VERDICTS.items() for name in names
    }


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_totals_and_speed_ups_are_those_of_the_closed_forms(reading):
    (time,), (times,) = BY_ABOUT["Total time"].value(reading), BY_ABOUT["Speed-up on 4 GPUs"].value(reading)
    assert time == total(reading, 2, 2, 8)
    assert times == pytest.approx(alone(reading, 2, 2, 8) / total(reading, 2, 2, 8))
    assert BY_ABOUT["Measured, communication"].value(reading) == [pytest.approx(100 * 40 / total(reading, 2, 2, 8))]
    assert BY_ABOUT["Communication"].value(reading) == [pytest.approx(100 * 60 / (total(reading, 2, 2, 8) + 20))]
    assert BY_ABOUT["Table 1, total"].value(reading) == [total(reading, 2, 2, count) for count in (2, 4, 8, 16)]
    assert BY_ABOUT["Table 1, speed-up"].value(reading) == [
        pytest.approx(alone(reading, 2, 2, count) / total(reading, 2, 2, count)) for count in (2, 4, 8, 16)
    ]
    assert BY_ABOUT["Table 3, share"].value(reading) == [
        pytest.approx(100 * 40 * (count - 1) / total(reading, 2, count, 8)) for count in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize("reading", [PER_STAGE, SPLIT], ids=str)
def test_the_phases_of_a_deeper_pipeline_add_up_to_its_total(reading):
    phases = [BY_ABOUT[f"Table 2, {phase}"].value(reading) for phase in ("warm-up", "steady state", "cooldown")]
    expected = [total(reading, stages, 1, 8) for stages in (1, 2, 4, 8)]
    assert BY_ABOUT["Table 2, total"].value(reading) == expected == [sum(each) for each in zip(*phases, strict=True)]


def test_gpipe_and_1f1b_have_one_bubble_and_different_peaks():
    for reading, bubble, peaks in ((PER_STAGE, 1 / 9, [20, 80]), (SPLIT_IN_ALL, 1 / 5, [20, 40])):
        for kind in ("GPipe", "1F1B"):
            assert BY_ABOUT[f"Bubble of {kind}"].value(reading) == [pytest.approx(100 * bubble)]
        assert BY_ABOUT["Peak memory"].value(reading) == peaks


def test_the_reports_share_of_communication_is_right_by_its_own_definition():
    row = next(rows(BY_ABOUT["Communication"]))
    assert (row["reading"], row["value"], row["verdict"]) == (str(PER_STAGE), "4.9 %", "right")


def test_only_the_last_share_of_table_3_divides_by_another_total():
    ten = next(rows(BY_ABOUT["Table 3, share"]))
    assert ten["verdict"] == "3 of 4 right"
    assert [round(100 * ring / (1170 + ring), 1) for ring in (0, 20, 60)] == [0, 1.7, 4.9]
    assert round(100 * 140 / 1210, 2) == 11.57


def test_fill_and_drain_are_one_forward_and_one_backward_of_each_other_stage():
    assert [BY_ABOUT["Fill and drain"].value(reading) for reading in (PER_STAGE, SPLIT)] == [[130], [65]]


def test_the_first_devices_row_has_7_pairs_between_one_forward_and_one_backward():
    row = [str(each) for each in OneFOneB(2, 8).plan().rows[0]]
    assert [word[1] for word in row] == ["F", *("F", "B") * 7, "B"]
    assert BY_ABOUT["Labels of the first device's row"].value(PER_STAGE) == [1, 7, 1]


def test_1f1b_saves_what_gpipe_holds_more():
    saved = BY_ABOUT["Memory that 1F1B saves"]
    assert [saved.value(reading) for reading in (PER_STAGE, PER_STAGE_IN_ALL)] == [[75], [50]]


def test_the_notebooks_job_takes_16_slots_and_no_backward_is_too_early():
    assert BY_ABOUT[SLOTS].value(PER_STAGE) == [16]
    assert BY_ABOUT[EARLY].value(PER_STAGE) == [0]


def test_a_backward_before_its_forward_would_be_counted():
    def event(kind, start, end):
        return SimpleNamespace(rank=0, start=start, end=end, action=kind(0))

    job = SimpleNamespace(trace=SimpleNamespace(events=[event(F, 1, 2), event(B, 0, 1)]))
    assert claims.FIGURES["too_early"](job) == 1
    job.trace.events[1] = event(B, 2, 3)
    assert claims.FIGURES["too_early"](job) == 0


def test_bytes_and_steps_are_those_of_a_ring_that_runs():
    ring = pipelab_course.ring_all_reduce([torch.ones(120)] * 4, "int8")
    assert BY_ABOUT[BYTES].value(PER_STAGE) == [3 * ring.payload_bytes, 3 * (ring.payload_bytes + ring.scale_bytes)]
    steps = [len(pipelab_course.ring_all_reduce([torch.zeros(count)] * count).steps) for count in (1, 2, 4, 8)]
    assert BY_ABOUT["Table 3, steps"].value(PER_STAGE) == steps


def test_the_report_is_checked_without_pytorch_and_other_labs_say_what_to_install():
    others = ["lab hw1", "lab hybrid", "demo"]
    code = f"""
import sys
sys.modules["torch"] = None
from pipelab.cli.app import main
for words in {["lab report", *others]}:
    sys.argv = ["pipelab", *words.split()]
    try:
        main()
        print("ended well")
    except SystemExit as stop:
        print("exit code", stop.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr == "".join(f"pipelab {words}: {NO_TORCH}\n" for words in others)
    report, *ends = re.split(r"ended well\n|exit code 0\n", done.stdout)
    assert "Of 35 claims" in report
    assert "".join(ends) == "exit code 1\n" * 3


def test_each_value_follows_as_it_is_said_to():
    for claim in CLAIMS:
        for row in rows(claim):
            steps = re.findall(r"([\d(][\d. x/()+\-]*|min\(\d+, \d+\) x \d+) = ([\d.]+)", row["how"])
            assert steps, row
            for formula, result in steps:
                assert eval(formula.replace(" x ", " * ")) in (  # noqa: S307 - our own formulas
                    pytest.approx(float(result), abs=0.005),
                    pytest.approx(float(result) / 100, abs=0.0005),
                ), row
            last = re.findall(r"[\d.]+", row["value"])[-1]
            assert any(float(result) == pytest.approx(float(last), abs=0.05) for _, result in steps), row


def test_values_are_computed_from_the_setting(monkeypatch):
    monkeypatch.setattr(claims, "FORWARD", 100)
    assert next(rows(BY_ABOUT["Total time"]))["value"] == f"{9 * 180 + 40} ms"
    assert verdict(BY_ABOUT["Total time"]) == "wrong"


def test_the_command_prints_and_saves_every_claim(pipelab_command, folder):
    names = [f"claims.{suffix}" for suffix in ("csv", "md", "html", "txt")]
    saved = [word for name in names for word in ("-o", name)]
    code, output, error = pipelab_command("lab", "report", *saved, "--save-figures", "figures.svg")
    assert code == 0, error
    prose = " ".join(output.split())
    for number, claim in enumerate(CLAIMS, start=1):
        assert f"{number}. {claim.about}: the report says {claim.says}: {verdict(claim)}" in prose
    assert "these are right: 2; right under one reading: 13; wrong: 18; open: 2" in prose
    assert "one device alone 4,160 ms" in prose
    lines = list(csv.DictReader(Path("claims.csv").read_text().splitlines()))
    assert len(lines) == sum(len(claim.readings) for claim in CLAIMS)
    assert {line["in_all"] for line in lines} == set(VERDICTS)
    for name in names:
        assert "8 in all" in Path(name).read_text()
    assert Path("figures.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize("option", ["-o", "--save-figures"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(refused, monkeypatch, option):
    monkeypatch.setattr(claims, "text", lambda _: pytest.fail("it worked"))
    assert "use one of .csv" in refused("lab", "report", option, "claims.json")


@pytest.mark.teacher
def test_the_documentation_shows_what_the_command_prints(pipelab_command):
    page = Path(claims.__file__).parents[1] / "teacher" / "site" / "transcripts" / "report.md"
    (shown,) = re.findall(r"```console\n\$ pipelab lab report\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    _, output, _ = pipelab_command("lab", "report")
    assert shown == output.rstrip()
