"""The command line: every capability has a command, and every mistake an answer."""

from __future__ import annotations

import csv
import os
import re
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
    assert "'1f1p' is no registered schedule; did you mean 1f1b?" in error
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


def test_run_takes_two_ranks_unless_they_are_emulated_or_given(pipelab_command):
    work = ("--width", "4", "--depth", "4", "--batch", "8", "--steps", "1", "-m", "2")
    assert "GPipe(ranks=2, microbatches=2)" in pipelab_command("run", "gpipe", *work)[1]
    assert "GPipe(ranks=4, microbatches=2)" in pipelab_command("run", "gpipe", *work, "--emulate", "1", "1")[1]
    assert "GPipe(ranks=3, microbatches=2)" in pipelab_command("run", "gpipe", *work, "-r", "3")[1]


def test_run_lays_several_schedules_side_by_side(pipelab_command, folder):
    work = ("--width", "4", "--depth", "4", "--batch", "8", "--steps", "1", "-m", "2")
    code, output, _ = pipelab_command("run", "gpipe", "1f1b", *work, "-o", "both.svg")
    assert code == 0
    assert output.count("gpipe, measured") == output.count("1f1b, measured") == 2  # in the table, and above its lanes
    assert "gradients of all 2 runs equal to the same micro-batches one after another, bit for bit" in output
    assert Path("both.svg").stat().st_size > 500


# --- tables over numbers of micro-batches


def cells(output: str, head: str) -> dict[str, list[str]]:
    """Return one block of a table: what stands beside each name."""
    (block,) = [part for part in output.split("\n\n") if part.startswith(head)]
    return {name: rest for name, *rest in (line.split() for line in block.splitlines()[1:])}


def test_compare_over_micro_batches_shares_one_batch_among_them(pipelab_command):
    names, counts = ("naive", "gpipe", "delayed", "1f1b"), (1, 2, 4, 8)
    code, output, _ = pipelab_command("compare", *names, "-r", "2", "-m", "1,2,4,8", "-f", "8", "-b", "16")
    assert code == 0
    assert "for all of it a rank takes 8 forward and 16 backward" in output
    makespans = {
        "naive": [2 * 24 for _ in counts],
        "gpipe": [(m + 1) * 24 / m for m in counts],
        "delayed": [(2 * (m - 1) + 1) * 24 / m if m > 1 else 48 for m in counts],
        "1f1b": [(m + 1) * 24 / m for m in counts],
    }
    for name, told in cells(output, "time of a step, units").items():
        assert [float(each) for each in told] == makespans[name]
    assert cells(output, "bubble")["gpipe"] == ["50.0", "%", "33.3", "%", "20.0", "%", "11.1", "%"]
    assert cells(output, "peak")["1f1b"] == ["100", "%", "100", "%", "50", "%", "25", "%"]


def test_run_over_micro_batches_measures_one_batch_and_verifies_every_run(pipelab_command, folder):
    code, output, _ = pipelab_command(
        "run", "naive", "gpipe", "-m", "2,4", "--emulate", "8", "16", "-r", "2", "--steps", "1", "--batch", "8",
        "-o", "table.csv", "-o", "table.txt",
    )  # fmt: skip
    assert code == 0
    assert "gradients of all 4 runs equal to the same micro-batches one after another, bit for bit" in output
    table = list(csv.DictReader(Path("table.csv").read_text().splitlines()))
    assert [(row["schedule"], row["microbatches"]) for row in table] == [
        ("naive", "2"), ("naive", "4"), ("gpipe", "2"), ("gpipe", "4"),
    ]  # fmt: skip
    assert all(float(row["step_time"]) >= 48 for row in table[:2])  # what is emulated takes no less
    assert {row["unit"] for row in table} == {"ms"}
    losses = [float(row["loss"]) for row in table]
    assert losses == pytest.approx([losses[0]] * 4)
    assert Path("table.txt").read_text().startswith("time of a step, ms")


def test_a_table_tells_who_refuses_a_size(pipelab_command, folder):
    Path("mine.py").write_text(
        RIGHT.replace(
            "    def actions",
            "    @classmethod\n    def refusal(cls, ranks, microbatches):\n"
            "        return 'an even number, please' if microbatches % 2 else None\n\n    def actions",
            1,
        )
    )
    code, output, _ = pipelab_command("compare", "mine.py:MySchedule", "gpipe", "-m", "2,3")
    assert code == 0
    assert cells(output, "time of a step")["mine.py:MySchedule"][1] == "-"
    assert "mine.py:MySchedule with 3: an even number, please" in output
    code, output, _ = pipelab_command("compare", "mine.py:MySchedule", "-m", "3,5")
    assert code == 0
    assert output.count("an even number, please") == 2


def test_a_faulty_schedule_stops_a_table(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace("yield B(m)", "yield B(0)"))
    code, _, error = pipelab_command("compare", "gpipe", "mine.py:MySchedule", "-m", "2,4")
    assert code == 1
    assert "duplicate" in error


@pytest.mark.parametrize("numbers", ["x", "0", "2,-1", ",", "1.5"])
def test_numbers_of_micro_batches_that_are_none_are_refused(pipelab_command, numbers):
    for command in ("compare", "run"):
        code, _, error = pipelab_command(command, "gpipe", f"--microbatches={numbers}")
        assert code == 1
        assert f"--microbatches {numbers}: expected whole numbers, at least 1, such as 8 or 2,4,8" in error


def test_a_table_is_no_picture(pipelab_command, folder):
    code, _, error = pipelab_command("compare", "gpipe", "-m", "2,4", "-o", "table.svg")
    assert code == 1
    assert "use one of .csv .txt" in error


# --- what a target may be


def test_a_saved_trace_is_a_target(pipelab_command, folder):
    pipelab.simulate(pipelab.OneFOneB(2, 3), pipelab.Cost(forward=7, unit="ms")).save("m.json")
    assert pipelab_command("draw", "m.json", "-o", "m.txt")[0] == 0
    assert "makespan 36 ms" in Path("m.txt").read_text()
    assert "12 actions, no fault" in pipelab_command("check", "m.json")[1]
    assert "makespan 12 units" in pipelab_command("simulate", "m.json")[1]
    code, output, _ = pipelab_command("compare", "m.json", "gpipe", "-r", "3", "-m", "2")
    assert code == 0
    assert "36 ms" in output
    assert "12 units" in output
    assert "2 ranks and 3 micro-batches: leave out --ranks" in pipelab_command("check", "m.json", "-r", "2")[2]
    assert "leave out --microbatches" in pipelab_command("compare", "m.json", "gpipe", "-m", "2,4")[2]
    assert "m.json: a trace has its own times" in pipelab_command("draw", "m.json", "-f", "3", "-o", "m.txt")[2]
    Path("other.json").write_text("{}")
    assert "not a trace saved by pipelab" in pipelab_command("draw", "other.json", "-o", "m.txt")[2]


@pytest.mark.parametrize(
    "target", ["mine.py:MySchedule", "mine.py::MySchedule", "mine.py.MySchedule", "mine:MySchedule", "mine.MySchedule"]
)
def test_other_ways_to_name_a_class_in_a_file_are_understood(pipelab_command, folder, target):
    Path("mine.py").write_text(RIGHT)
    assert "MySchedule(ranks=4, microbatches=8) is right" in pipelab_command("check", target)[1]


@pytest.mark.parametrize("target", ["folder/mine.py:MySchedule", "folder.mine:MySchedule", "folder.mine.MySchedule"])
def test_a_file_in_a_folder_may_be_named_as_a_module(pipelab_command, folder, target):
    Path("folder").mkdir()
    Path("folder/mine.py").write_text(RIGHT)
    assert "MySchedule(ranks=4, microbatches=8) is right" in pipelab_command("check", target)[1]


def test_a_module_with_one_schedule_needs_no_name(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.split("class Chatty", maxsplit=1)[0])
    assert "MySchedule(ranks=4, microbatches=8) is right" in pipelab_command("check", "mine")[1]


@pytest.mark.parametrize("name", sorted({kind.__name__ for kind in pipelab.schedules.values()}))
def test_a_class_of_the_catalogue_is_its_schedule(pipelab_command, name):
    for target in (name, f"pipelab.{name}"):
        assert f"{getattr(pipelab, name)(4, 8)!r} is right" in pipelab_command("check", target)[1]


@pytest.mark.parametrize(
    ("target", "guess"),
    [
        ("gpip", "did you mean gpipe?"),
        ("onefoneb", "did you mean 1f1b?"),
        ("MySchedule", "did you mean mine.py:MySchedule?"),
        ("Mine.MySchedule", "did you mean mine.py?"),
        ("mime.py:MySchedule", "there is no file mime.py; did you mean mine.py?"),
    ],
)
def test_a_near_miss_gets_a_guess(pipelab_command, folder, target, guess):
    Path("mine.py").write_text(RIGHT)
    code, _, error = pipelab_command("check", target)
    assert code == 1
    assert guess in error


@pytest.mark.parametrize("command", ["", "schedules", "check", "simulate", "draw", "compare", "run", "demo"])
def test_help_fits_eighty_columns_and_says_every_default(command):
    arguments = [sys.executable, "-m", "pipelab", *command.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    found = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    assert max(map(len, found.stdout.splitlines())) <= 80
    if "--ranks" in found.stdout:
        told = " ".join(found.stdout.replace("│", " ").split())
        assert f"workers of the pipeline; by default {'2, with --emulate 4' if command == 'run' else 4}" in told


def test_run_refuses_fewer_layers_than_stages(pipelab_command):
    code, _, error = pipelab_command("run", "1f1b", "-r", "4", "--depth", "2")
    assert code == 1
    assert "2 layers are too few for 4 stages" in error


@pytest.mark.dot
def test_draw_makes_dependency_graphs(pipelab_command, folder):
    code, _, _ = pipelab_command("draw", "1f1b", "-r", "2", "-m", "2", "--graph", "-o", "g.svg")
    assert code == 0
    assert "<svg" in Path("g.svg").read_text()


DOCUMENTS = [Path(__file__).parents[1] / name for name in ("README.md", "docs/command.md")]
NAIVE_ON_RANK_0 = """
import pipelab
from pipelab import B, F


class MySchedule(pipelab.Schedule):
    def actions(self, rank):
        if rank == 0:
            for m in range(self.microbatches):
                yield F(m)
                yield B(m)
        else:
            yield from pipelab.GPipe(self.ranks, self.microbatches).actions(rank)
"""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_the_documents_show_is_what_the_command_prints(pipelab_command, folder, document):
    Path("my_file.py").write_text(NAIVE_ON_RANK_0)
    shown = re.findall(r"```console\n\$ pipelab (.*)\n((?:.*\n)+?)```", document.read_text(encoding="utf-8"))
    assert shown
    for command, printed in shown:
        _, output, error = pipelab_command(*command.split())
        assert (output + error).strip() == printed.strip()


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
            "    def __init__(self, ranks):\n        super().__init__(ranks, 4)\n\n    def actions",
            7,
            "pipelab calls MySchedule(ranks, microbatches), but it is written MySchedule(ranks)",
        ),
        (
            "    def actions",
            "    def __init__(self, ranks, microbatches, cap):\n        pass\n\n    def actions",
            7,
            "MySchedule needs cap too",
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
