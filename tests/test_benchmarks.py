"""The benchmarks run to their end, here on the CPU with tiny sizes; of the GPU's, a part that fails is noted."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from pipelab.labs.demo import Setting

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ("naive", "gpipe", "1f1b", "delayed")


def test_every_part_of_the_gpus_benchmark_runs_and_one_that_fails_is_noted(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; "
        "gpu.PARTS = {'broken': lambda setting, out: 1 / 0, **gpu.PARTS}; "
        f"sys.exit(gpu.main(['--device', 'cpu', '--quick', '--out', {str(tmp_path)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts.pop("broken")["error"] == "ZeroDivisionError: division by zero"
    assert list(parts) == [
        "makespans",
        "kernels",
        "memory",
        "overhead",
        "tracer",
        "native",
        "practical",
        "graphs",
    ]
    assert all("error" not in part for part in parts.values())
    assert [row["peak_activations"] for row in parts["memory"]["found"]["rows"]] == [
        [1, 1, 1, 1],
        [4, 4, 4, 4],
        [4, 3, 2, 1],
        [2, 2, 2, 2],
    ]
    for size in parts["native"]["found"].values():
        assert size["largest_gradient_difference"] < 1e-5
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        *(f"gpu-large-{name}.svg" for name in ("schedules", *NAMES)),
        *(f"gpu-practical-{name}.svg" for name in NAMES),
    }
    written = (tmp_path / "gpu.md").read_text()
    assert "failed: ZeroDivisionError: division by zero" in written
    assert "| 1f1b |" in written
    assert "| the part broken runs | ZeroDivisionError: division by zero | **no** |" in written
    assert "| practical 9: all methods compute the same loss | within" in written


def test_all_that_needs_a_gpu_comes_home_whatever_fails(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import on_gpu; "
        "on_gpu.TESTS = {'tests/none.py': 60}; on_gpu.Gathering._about = lambda self: None; "
        "on_gpu.PARTS = {'memory': None, 'none': None}; "
        f"sys.exit(on_gpu.main(['--device', 'cpu', '--quick', '--out', {str(tmp_path)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2, result.stdout + result.stderr
    summary = (tmp_path / "summary.txt").read_text()
    assert "tests/none.py: " in summary
    assert "memory: measured" in summary
    assert "none: its process ended with 2" in summary
    assert "2 failed" in summary
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert len(parts["memory"]["found"]["rows"]) == 4
    assert parts["none"]["error"] == "its process ended with 2"
    assert {path.name for path in tmp_path.iterdir()} >= {"gpu.md", "tests.txt", "log.txt", "everything.tar.gz"}


TINY = {
    "simulation": {"SIZES": ((2, 4), (4, 8)), "PEER_SECONDS": {}, "JOB": (2, 4, 2, 2)},
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


def test_the_help_names_all_that_can_be_measured(benchmarks, capsys):
    run = importlib.import_module("run")
    for words, code in ((["--help"], 0), (["none"], 2)):
        with pytest.raises(SystemExit) as end:
            run.main(words)
        assert end.value.code == code
        printed = capsys.readouterr()
        assert set(run.PARTS) <= set(re.findall(r"\w+", printed.out + printed.err))


def test_the_summary_of_the_predictions_counts_every_row_of_its_page():
    page = (BENCHMARKS.parent / "docs" / "results" / "prediction.md").read_text()
    summary, *engines = re.split(r"^\*\*\w+\*\*, predicted", page, flags=re.MULTILINE)
    largest = re.findall(r" ([+-][\d.]+%) \| [\d.]+ \|$", summary, flags=re.MULTILINE)
    rows = [re.findall(r": ([+-][\d.]+%)", engine) for engine in engines]
    assert [max(errors, key=lambda error: abs(float(error[:-1]))) for errors in rows] == largest
    medians = re.findall(r"\*\*([\d.]+)%\*\*", summary)
    assert [f"{median(abs(float(error[:-1])) for error in errors)}" for errors in rows] == medians


@pytest.mark.dist
def test_the_engines_benchmark_runs_beside_pytorchs_own_processes(benchmarks, monkeypatch):
    module = importlib.import_module("engine")
    monkeypatch.setattr(module, "SIZES", ((8, 2, 2),))
    head, *lines = module.report(module.measure()).splitlines()
    assert "Width 8" in head
    assert [line.split(" | ")[0] for line in lines if line[:3] in ("| 2", "| 4", "| 8")] == ["| 2", "| 4", "| 8"]


def test_what_takes_too_long_is_ended_with_all_that_it_started(benchmarks):
    from gpu import run_for

    assert run_for([sys.executable, "-c", ""], 60) is None
    assert run_for([sys.executable, "-c", "raise SystemExit(3)"], 60) == "its process ended with 3"
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert run_for([sys.executable, "-c", sleeps], 0.5) == "it took more than 0 s"
    assert run_for([sys.executable, "-c", ""], 0) == "no time was left"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def kernel(stream, start, end, name="gemm", context=1):
    where = {"stream": stream, "context": context}
    return {"cat": "kernel", "name": name, "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": where}


def test_kernels_are_held_against_the_spans_of_their_rank(benchmarks):
    from gpu_kernels import Span, compared

    # Two ranks; the profiler's clock is 100 ms ahead; half of the last kernel lies before its span.
    spans = [[Span("F", 0.0, 2.0), Span("B", 4.0, 6.0)], [Span("F", 2.0, 4.0)]]
    seen = [kernel(7, 100.5, 102), kernel(7, 104, 106), kernel(9, 101.0, 103.0), kernel(9, 103, 104)]
    caller = [kernel(0, 106.0, 106.1), {"cat": "cpu_op", "ts": 0, "dur": 5}]
    first, second = compared([*seen, *caller], spans)["rows"]
    assert (first["kernels"], first["spans_ms"]) == (2, 4.0)
    assert first["inside_spans"] == pytest.approx(1.0)
    assert first["largest_difference"] == pytest.approx(0.25)  # the forward's kernel fills 1.5 of 2 ms
    assert second["kernels_ms"] == pytest.approx(3.0)
    assert second["inside_spans"] == pytest.approx(2 / 3)


def test_streams_of_two_parts_may_have_the_same_number(benchmarks):
    from gpu_kernels import Span, compared

    spans = [[Span("F", 0.0, 2.0)], [Span("F", 2.0, 4.0)]]
    first, second = compared([kernel(7, 0, 2, context=2), kernel(7, 2, 4, context=3)], spans)["rows"]
    assert first["inside_spans"] == second["inside_spans"] == pytest.approx(1.0)
    with pytest.raises(RuntimeError, match="saw kernels on 1 streams, and there are 2 ranks"):
        compared([kernel(7, 0, 2)], spans)


@pytest.mark.parametrize(
    ("third", "same", "without"), [("gemm", True, 0), ("copy", False, 0), (None, False, 1)], ids=str
)
def test_an_action_has_the_same_kernels_each_time(benchmarks, third, same, without):
    from gpu_kernels import Span, compared

    spans = [[Span("F", 0.0, 2.0), Span("F", 2.0, 4.0), Span("F", 4.0, 6.0), Span("B", 6.0, 8.0)]]
    names = ["gemm", "gemm", third, "backward"]
    seen = [kernel(7, 2 * at, 2 * at + 2, name) for at, name in enumerate(names) if name is not None]
    (row,) = compared(seen, spans)["rows"]
    assert (row["same_kernels"], row["actions_without_kernels"]) == (same, without)


@pytest.mark.dist
def test_the_memory_of_every_process_is_measured():
    command = [sys.executable, str(BENCHMARKS / "rank_memory.py"), "64", "meta"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    _, _, *rows = found.stdout.splitlines()
    assert [re.match(r"\| meta \| (\d) \| 0\.1 MB \| [\d.-]+ MB \| [\d.-]+ MB \|$", row)[1] for row in rows] == list(
        "0123"
    )
