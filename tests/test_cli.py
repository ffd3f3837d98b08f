"""The command line: every capability has a command, and every mistake an answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pipelab
from pipelab.cli import app, targets
from pipelab.errors import LoadError

RIGHT = """
import pipelab
from pipelab import B, F


class MySchedule(pipelab.Schedule):
    def actions(self, rank):
        for m in range(self.microbatches):
            yield F(m)
        for m in range(self.microbatches):
            yield B(m)


class Chatty(MySchedule):
    def __init__(self, ranks, microbatches, words="none"):
        super().__init__(ranks, microbatches)
        self.words = words

    def __repr__(self):
        return f"Chatty({self.words})"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pipelab_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process; return its exit code, output and error output."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipelab", *arguments])
        code = 0
        try:
            app.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            targets_loaded = [name for name in sys.modules if name in {"mine", "broken"}]
            for name in targets_loaded:
                del sys.modules[name]
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.mark.parametrize("name", pipelab.schedules)
def test_every_registered_schedule_checks_out(pipelab_command, name):
    code, output, _ = pipelab_command("check", name, "--ranks", "4", "--microbatches", "8")
    assert code == 0
    actions = sum(len(row) for row in pipelab.schedules[name](4, 8).plan().program.rows)
    assert f"is right: {actions} actions, no fault" in output


def test_schedules_are_listed_with_their_sources(pipelab_command):
    code, output, _ = pipelab_command("schedules")
    assert code == 0
    for name, kind in pipelab.schedules.items():
        assert name in output
        assert kind.source.split()[0] in output


def test_a_students_file_is_checked_simulated_and_drawn(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT)
    assert pipelab_command("check", "mine.py:MySchedule")[0] == 0
    code, output, _ = pipelab_command("simulate", "mine.py:MySchedule", "-r", "2", "-m", "2", "-o", "t.json")
    assert code == 0
    assert "makespan 9 units" in output
    assert pipelab.Trace.load("t.json").makespan == 9
    code, output, _ = pipelab_command("draw", "mine.py:MySchedule", "-o", "t.svg", "-o", "t.html", "-o", "t.txt")
    assert code == 0
    assert all(Path(f"t.{suffix}").stat().st_size > 500 for suffix in ("svg", "html", "txt"))
    assert output.count("wrote ") == 3


def test_conformance_compares_the_sizes_that_are_asked_for(pipelab_command, folder):
    code, output, _ = pipelab_command("conformance", "-s", "1f1b", "-s", "delayed", "-r", "2", "-m", "4", "-o", "t.md")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines() if "bit-equal" in line] == ["1f1b", "delayed"]
    assert Path("t.md").read_text().count("| 1 | equal | 1 | bit-equal | equal |") == 2


def test_conformance_with_another_order_ends_with_exit_code_1(pipelab_command, monkeypatch):
    monkeypatch.setitem(pipelab.schedules, "1f1b", pipelab.GPipe)
    code, output, _ = pipelab_command("conformance", "-s", "1f1b", "-r", "2", "-m", "4")
    assert code == 1
    assert "GPipe(ranks=2, microbatches=4): rank 0 differs at position 2" in output
    assert "PyTorch | 0F0 0F1 0B0 0F2" in output
    assert "pipelab | 0F0 0F1 0F2 0F3" in output


def test_conformance_of_an_unknown_schedule_names_the_known_ones(pipelab_command):
    code, _, error = pipelab_command("conformance", "-s", "1f1p")
    assert code == 1
    assert "'1f1p' is no schedule; did you mean 1f1b?" in error
    assert "registered: naive" in error


def test_parameters_of_a_schedule_are_set_by_name(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT)
    assert "Chatty(many)" in pipelab_command("check", "mine.py:Chatty", "--set", "words=many")[1]
    code, _, error = pipelab_command("check", "mine.py:Chatty", "--set", "word=many")
    assert code == 1
    assert "--set takes: words" in error
    assert "expected name=value" in pipelab_command("check", "gpipe", "--set", "words")[2]


def test_a_faulty_file_gets_its_faults_and_a_hint_but_no_traceback(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace("yield F(m)", "yield F(m + 1)"))
    code, output, error = pipelab_command("check", "mine.py:MySchedule", "-r", "2", "-m", "2")
    assert code == 1
    assert output == ""
    assert "out-of-range" in error
    assert "missing" in error
    assert "try:" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("import pipelab\nclass Broken(pipelab.Schedule)\n    pass\n", 2, "expected ':'"),
        ("import pipelab\nx = 1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("import pipelap\n", 1, "No module named 'pipelap'"),
    ],
)
def test_a_file_that_cannot_be_imported_gets_its_line(pipelab_command, folder, text, line, words):
    Path("broken.py").write_text(text)
    code, _, error = pipelab_command("check", "broken.py:Broken")
    assert code == 1
    assert f"broken.py, line {line}" in error
    assert words in error
    assert "Traceback" not in error


def test_an_error_inside_actions_gets_its_line(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace("yield B(m)", "yield B(m + self.nothing)"))
    code, _, error = pipelab_command("check", "mine.py:MySchedule")
    assert code == 1
    assert "mine.py, line 11" in error
    assert "has no attribute 'nothing'" in error


def test_what_is_not_there_is_told_with_what_is(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT)
    assert "did you mean gpipe?" in pipelab_command("check", "gpip")[2]
    assert "there is no file yours.py; beside it: mine.py" in pipelab_command("check", "yours.py:MySchedule")[2]
    assert "did you mean mine.py:MySchedule?" in pipelab_command("check", "mine.py:MySchedul")[2]
    assert "it holds MySchedule, Chatty" in pipelab_command("check", "mine.py")[2]
    Path("empty.py").write_text("x = 1\n")
    assert "no class that derives from pipelab.Schedule" in pipelab_command("check", "empty.py:x1")[2]
    assert "x in empty.py is no schedule" in pipelab_command("check", "empty.py:x")[2]


def test_a_plan_in_a_csv_file_is_a_target_too(pipelab_command, folder):
    pipelab.OneFOneB(2, 3).plan().to_csv("plan.csv")
    code, output, _ = pipelab_command("check", "plan.csv")
    assert code == 0
    assert "12 actions" in output
    Path("bad.csv").write_text("0F0,0X0\n")
    assert "bad.csv, line 1, column 2" in pipelab_command("check", "bad.csv")[2]


def test_a_memory_cap_is_a_fault_like_any_other(pipelab_command):
    assert pipelab_command("check", "1f1b", "--memory-cap", "4")[0] == 0
    code, _, error = pipelab_command("check", "gpipe", "--memory-cap", "4")
    assert code == 1
    assert "memory-cap" in error


def test_compare_lays_schedules_side_by_side(pipelab_command, folder):
    code, output, _ = pipelab_command("compare", "gpipe", "1f1b", "delayed", "-o", "c.html", "-o", "c.svg")
    assert code == 0
    assert "87 units" in output
    assert output.count("33 units") == 2
    assert Path("c.html").exists()
    assert Path("c.svg").exists()


def test_a_pipeline_is_replicated(pipelab_command, folder):
    code, output, _ = pipelab_command("check", "1f1b", "-r", "2", "-m", "4", "--replicas", "3")
    assert code == 0
    assert "replicate(OneFOneB(ranks=2, microbatches=4), 3) is right: 54 actions" in output
    assert "the gradients of stages 0, 1, which are on several ranks, are all-reduced" in output
    output = pipelab_command("simulate", "1f1b", "--replicas", "2", "--cost", "all_reduce=4")[1]
    assert "makespan 37 units" in output
    assert pipelab_command("draw", "1f1b", "--replicas", "2", "-o", "t.svg")[0] == 0
    assert pipelab_command("compare", "1f1b", "gpipe", "--replicas", "2")[1].count("rank 7") == 2
    pipelab.OneFOneB(2, 3).plan().to_csv("plan.csv")
    assert "rank 3" in pipelab_command("simulate", "plan.csv", "--replicas", "2")[1]


def test_a_policy_is_set_by_name(pipelab_command):
    settings = ("--set", "priority=forward-first", "--set", "memory_cap=[3, 2]", "--set", "split=True")
    code, output, _ = pipelab_command("simulate", "greedy", "-r", "2", "-m", "4", *settings)
    assert code == 0
    assert output.startswith("Greedy(ranks=2, microbatches=4, priority='forward-first', memory_cap=(3, 2), split=True)")
    assert "expected 'backward-first'" in pipelab_command("check", "greedy", "--set", "priority=fast")[2]


def test_costs_reach_the_simulation(pipelab_command):
    output = pipelab_command("simulate", "naive", "-r", "2", "-m", "1", "-f", "50", "-b", "80", "--unit", "ms")[1]
    assert "makespan 260 ms" in output
    output = pipelab_command("simulate", "naive", "-r", "2", "-m", "1", "--latency", "10")[1]
    assert "makespan 26 units" in output


def test_run_executes_verifies_and_draws(pipelab_command, folder):
    arguments = ("--width", "8", "--depth", "4", "--batch", "12", "--steps", "2", "-m", "3", "-o", "run.html")
    code, output, _ = pipelab_command("run", "1f1b", *arguments)
    assert code == 0
    assert "measured" in output
    assert "bit for bit" in output
    assert Path("run.html").exists()


def test_run_takes_emulated_devices(pipelab_command):
    code, output, _ = pipelab_command(
        "run", "gpipe", "-r", "3", "-m", "2", "--emulate", "1", "2", "--steps", "1", "--batch", "4"
    )
    assert code == 0
    assert "rank 2" in output


def test_run_refuses_fewer_layers_than_stages(pipelab_command):
    code, _, error = pipelab_command("run", "1f1b", "-r", "4", "--depth", "2")
    assert code == 1
    assert "2 layers are too few for 4 stages" in error


@pytest.mark.dot
def test_draw_makes_dependency_graphs(pipelab_command, folder):
    code, _, _ = pipelab_command("draw", "1f1b", "-r", "2", "-m", "2", "--graph", "-o", "g.svg")
    assert code == 0
    assert "<svg" in Path("g.svg").read_text()


def test_settings_are_python_literals_or_text():
    assert targets.settings(["a=1", "b=[1, 2]", "c=text", "d=None"]) == {"a": 1, "b": [1, 2], "c": "text", "d": None}
    with pytest.raises(LoadError):
        targets.settings(["1a=2"])


def test_the_command_is_installed_and_tells_its_version():
    found = subprocess.run([sys.executable, "-m", "pipelab", "--version"], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == pipelab.__version__
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        (
            "    def actions",
            "    def __init__(self, ranks, microbatches):\n        pass\n\n    def actions",
            None,
            "super().__init__",
        ),
        (
            "    def actions",
            "    def __init__(self, ranks, microbatches):\n        1 / 0\n\n    def actions",
            8,
            "ZeroDivisionError",
        ),
        (
            "    def actions",
            "    def refusal(self, ranks, microbatches):\n        1 / 0\n\n    def actions",
            8,
            "ZeroDivisionError",
        ),
        ("    def actions", "    stages = 1.5\n\n    def actions", None, "stages=1.5"),
        ("import pipelab\n", "import pipelab\nraise SystemExit('bye')\n", 3, "SystemExit: bye"),
    ],
)
def test_a_schedule_that_cannot_be_made_gets_its_line(pipelab_command, folder, old, new, line, words):
    Path("mine.py").write_text(RIGHT.replace(old, new, 1))
    code, _, error = pipelab_command("check", "mine.py:MySchedule")
    assert code == 1
    assert words in error
    assert "Traceback" not in error
    if line:
        assert f"mine.py, line {line}" in error


def test_any_cost_can_be_given(pipelab_command):
    costs = ("--cost", "forward=[1, 3]", "--cost", "per=stage", "--latency", "1")
    assert "makespan 10 units" in pipelab_command("simulate", "naive", "-r", "2", "-m", "1", *costs)[1]
    assert "--cost takes: forward" in pipelab_command("simulate", "naive", "--cost", "speed=3")[2]
    assert "CostError" in pipelab_command("simulate", "naive", "--cost", "forward=-3")[2]


def test_files_that_cannot_be_read_or_written_are_told(pipelab_command, folder):
    Path("plan.csv").write_bytes(b"\xff\xfe0F0")
    assert "plan.csv is not text" in pipelab_command("check", "plan.csv")[2]
    code, _, error = pipelab_command("draw", "gpipe", "-o", "nowhere/x.txt")
    assert code == 1
    assert "nowhere" in error
    assert "Traceback" not in error
