"""The benchmarks run to their end, here on the CPU with tiny sizes; of the GPU's, a task that fails is noted."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

import pipelab
from pipelab.cli.demo import Setting

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "lines"), [("overhead", 8), ("kernels", 4), ("memory", 4), ("prediction", 14)])
@pytest.mark.filterwarnings("ignore:timings vary by")
def test_every_part_of_the_gpus_benchmark_runs(benchmarks, tmp_path, capsys, part, lines):
    on_gpu = importlib.import_module("on_gpu")
    assert on_gpu.main(["--device", "cpu", "--quick", "--part", part, "--out", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_whatever_fails_or_hangs_the_rest_is_gathered(benchmarks, monkeypatch, tmp_path):
    on_gpu = importlib.import_module("on_gpu")
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    programs = {"broken": "print('half'); 1 / 0", "hangs": sleeps, "fine": "print('all')"}
    monkeypatch.setattr(on_gpu, "_SECONDS", 1.0)
    monkeypatch.setattr(
        on_gpu, "tasks", lambda _: {name: [sys.executable, "-c", program] for name, program in programs.items()}
    )
    assert on_gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    summary = (tmp_path / "summary.txt").read_text()
    assert "broken: its process ended with 1" in summary
    assert "ZeroDivisionError" in summary
    assert "hangs: it took more than 1 s" in summary
    assert "fine: done\n  all\n2 failed" in summary
    assert on_gpu.main(["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)]) == 3
    assert "fine: no time was left" in (tmp_path / "summary.txt").read_text()


TINY = {
    "simulation": {
        "SIZES": ((2, 4), (4, 8)),
        "PEER_SECONDS": {},
        "JOB": (2, 4, 2, 2),
        "ALONE": {"tiny": ("m = 4", "pipelab.frontier(2, m)")},
    },
    "split": {"SIZES": ((8, 2), (4, 2))},
    "emulation": {"SETTINGS": ((0.1, 0.2, 2),)},
    "drawing": {"SIZES": ((2, 4),), "PAGES": {(2, 4): "its targets"}, "ROUNDS": 1},
    "memory": {"SETTING": Setting(blocks=2, width=16, length=8)},
}


@pytest.mark.parametrize("part", TINY)
def test_the_processors_benchmark_runs_and_reports(benchmarks, monkeypatch, part):
    module = importlib.import_module(part)
    for name, value in TINY[part].items():
        monkeypatch.setattr(module, name, value)
    blocks = [block.splitlines() for block in module.report(module.measure()).split("\n\n")]
    tables = [[line.count("|") for line in block if line.startswith("|")] for block in blocks]
    assert any(tables)
    assert all(len(columns) > 2 and len(set(columns)) == 1 for columns in tables if columns)


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["none"], 2)])
def test_the_help_names_all_that_can_be_measured(benchmarks, capsys, words, code):
    run, on_gpu = map(importlib.import_module, ("run", "on_gpu"))
    assert all((BENCHMARKS.parent / test).exists() for test in on_gpu.TESTS)
    with pytest.raises(SystemExit) as end:
        run.main(words)
    assert end.value.code == code
    printed = capsys.readouterr()
    assert set(run.PARTS) <= set(re.findall(r"\w+", printed.out + printed.err))


def test_the_summary_of_the_predictions_counts_every_row_of_its_page():
    page = (BENCHMARKS.parent / "docs" / "results" / "prediction.md").read_text()
    summary, *engines = re.split(r"^\*\*\w+\*\*, predicted", page, flags=re.MULTILINE)
    largest = re.findall(r" ([+-][\d.]+%) \| [\d.]+% \| [\d.]+ times \| [\d.]+ \|$", summary, flags=re.MULTILINE)
    rows = [re.findall(r": ([+-][\d.]+%)", engine) for engine in engines]
    assert [max(errors, key=lambda error: abs(float(error[:-1]))) for errors in rows] == largest
    medians = re.findall(r"\*\*([\d.]+)%\*\*", summary)
    assert [f"{median(abs(float(error[:-1])) for error in errors)}" for errors in rows] == medians


@pytest.mark.thorough
@pytest.mark.dist
def test_the_engines_benchmark_runs_beside_pytorchs_own_processes(benchmarks, monkeypatch):
    module = importlib.import_module("engine")
    monkeypatch.setattr(module, "SIZES", ((8, 2, 2),))
    head, *lines = module.report(module.measure()).splitlines()
    assert "Width 8" in head
    assert [line.split(" | ")[0] for line in lines if line[:3] in ("| 2", "| 4", "| 8")] == ["| 2", "| 4", "| 8"]


def kernel(stream, start, end):
    return {"cat": "kernel", "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": {"stream": stream}}


def test_kernels_are_held_against_the_spans_of_their_rank(benchmarks):
    on_gpu = importlib.import_module("on_gpu")
    trace = pipelab.simulate(
        pipelab.GPipe(2, 1), pipelab.Cost(forward=2)
    )  # F 0-2 and B 6-8 on rank 0; F 2-4, B 4-6 on 1
    # The profiler's clock is 100 ms ahead; half of rank 1's first kernel lies before its span.
    seen = [kernel(7, 100.5, 102), kernel(7, 106, 108), kernel(9, 101.0, 103.0), kernel(9, 104, 106)]
    caller = [kernel(0, 108.0, 108.1), {"cat": "cpu_op", "ts": 0, "dur": 5}]
    (inside, off, middle), (half, _, _) = on_gpu.agreement([*seen, *caller], trace)
    assert inside == pytest.approx(1.0)
    assert off == pytest.approx(0.25)  # the forward's kernel fills 1.5 of 2 ms
    assert middle == pytest.approx(0.125)  # the backward's fills all of it
    assert half == pytest.approx(3 / 4)
    with pytest.raises(RuntimeError, match="saw kernels on 1 streams, and there are 2 ranks"):
        on_gpu.agreement(caller, trace)


@pytest.mark.thorough
@pytest.mark.dist
def test_the_memory_of_every_process_is_measured():
    command = [sys.executable, str(BENCHMARKS / "rank_memory.py"), "64", "meta"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    _, _, *rows = found.stdout.splitlines()
    assert [re.match(r"\| meta \| (\d) \| 0\.1 MB \| [\d.-]+ MB \| [\d.-]+ MB \|$", row)[1] for row in rows] == list(
        "0123"
    )
