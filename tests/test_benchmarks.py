"""The GPU's benchmark runs to its end, here on the CPU with tiny sizes; a part that fails is noted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_part_of_the_gpus_benchmark_runs_and_one_that_fails_is_noted(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu, gpu_report; "
        "gpu.PARTS = {'broken': lambda setting, out: 1 / 0, **gpu.PARTS}; gpu_report._TITLES['broken'] = 'Broken'; "
        f"sys.exit(gpu.main(['--device', 'cpu', '--quick', '--out', {str(tmp_path)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts.pop("broken")["error"] == "ZeroDivisionError: division by zero"
    assert list(parts) == ["makespans", "fits", "memory", "overhead", "native", "tracer"]
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
        f"gpu-{name}.svg" for name in ("schedules", "naive", "gpipe", "1f1b", "delayed")
    }
    written = (tmp_path / "gpu.md").read_text()
    assert "failed: ZeroDivisionError: division by zero" in written
    assert "| 1f1b |" in written


@pytest.fixture
def compared(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_parts import compared

    return compared


def kernel(stream, start, end):
    return {"cat": "kernel", "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": {"stream": stream}}


def test_kernels_are_held_against_the_spans_of_their_rank(compared):
    # Two ranks; the profiler's clock is 100 ms ahead; half of the last kernel lies before its span.
    spans = [[(0.0, 2.0), (4.0, 6.0)], [(2.0, 4.0)]]
    kernels = [kernel(7, 100.5, 102), kernel(7, 104, 106), kernel(9, 101.0, 103.0), kernel(9, 103, 104)]
    caller = [kernel(0, 106.0, 106.1), {"cat": "cpu_op", "ts": 0, "dur": 5}]
    first, second = compared([*kernels, *caller], spans)["rows"]
    assert (first["kernels"], first["spans_ms"]) == (2, 4.0)
    assert first["inside_spans"] == pytest.approx(1.0)
    assert second["kernels_ms"] == pytest.approx(3.0)
    assert second["inside_spans"] == pytest.approx(2 / 3)
