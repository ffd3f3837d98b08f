"""What pytest says of tests that need what the machine lacks, and how to run those alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bare_pytest(tmp_path: Path):
    """Run pytest where no program is on the path; return what it says at its end, and what it noted as not run."""

    def run(*arguments: str) -> tuple[list[str], list[str]]:
        noted = tmp_path / "not-run"
        env = {**os.environ, "PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "NOT_RUN": str(noted)}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plugins = [f"-p{name}" for name in ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin")]
        command = [sys.executable, "-m", "pytest", *plugins, "-n", "1", *arguments]
        said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
        return said.splitlines()[-3:], noted.read_text().splitlines()

    return run


@pytest.mark.thorough
def test_one_line_for_each_need_counts_the_skipped_tests_of_all_runs_which_can_be_run_alone(
    bare_pytest, tmp_path: Path
) -> None:
    dot = "not run: 3 tests (needs Graphviz: sudo apt install graphviz)"
    said, _ = bare_pytest("tests/draw/test_graph.py::test_graphviz_draws_it")
    assert said[-2] == dot
    said, noted = bare_pytest("tests/test_playground.py::test_a_site_without_python_says_why_beside_the_picture")
    assert said[-3:-1] == [dot, "not run: 1 test (needs Chromium: sudo apt install chromium)"]
    again = tmp_path / "again"
    again.write_text("".join(line.partition("\t")[0] + "\n" for line in noted))
    said, twice = bare_pytest(f"@{again}")
    assert twice == noted * 2
    assert "passed" not in said[-1]
