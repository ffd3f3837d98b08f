"""What the command line may be given: a name, a file of one's own, a plan, a trace; and how a mistake in it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import RIGHT

import pipelab
from pipelab.cli import targets
from pipelab.errors import UsageError


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


@pytest.mark.parametrize("suffix", ["py", "csv", "json"])
def test_a_folder_or_a_pipe_with_a_files_name_is_refused(pipelab_command, folder, suffix):
    Path(f"folder.{suffix}").mkdir()
    os.mkfifo(f"pipe.{suffix}")
    for command in ("check", "compare", "run"):
        code, _, error = pipelab_command(command, f"folder.{suffix}")
        assert (code, f"folder.{suffix} is a folder" in error) == (1, True)
        code, _, error = pipelab_command(command, f"pipe.{suffix}")
        assert (code, f"pipe.{suffix} is a pipe" in error) == (1, True)
    code, _, error = pipelab_command("check", "nothing")  # looks for it in all files beside
    assert (code, "'nothing' is not a schedule" in error) == (1, True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x7fELF\0\0\xff", "broken.py is not text"),
        (b"x = '\xff'\n", "broken.py, line 1"),
        (b"#" * (1 << 20) + b"\n", "broken.py has 1,048,577 bytes"),
        (b"", "no class that derives"),
        (b"x = '\x1b[31m'; 1 / 0", "ZeroDivisionError"),
        (b"(" * 500, "broken.py, line 1"),
    ],
    ids=["binary", "latin-1", "huge", "empty", "escape", "nested"],
)
def test_a_file_that_is_no_python_gets_a_clear_error(pipelab_command, folder, data, words):
    Path("broken.py").write_bytes(data)
    code, _, error = pipelab_command("check", "broken.py")
    assert code == 1
    assert words in error
    assert "\x1b" not in error


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
    assert "write class x(pipelab.Schedule)" in pipelab_command("check", "empty.py:x")[2]


@pytest.mark.parametrize(("suffix", "words"), [("html", "a picture"), ("svg", "a picture"), ("pt", "a saved state")])
def test_a_picture_is_no_schedule_and_a_script_of_its_name_does_not_run(pipelab_command, folder, suffix, words):
    Path("mine.py").write_text("print('it runs')")
    Path(f"mine.{suffix}").write_text("")
    code, output, error = pipelab_command("check", f"mine.{suffix}")
    assert code == 1
    assert "it runs" not in output
    assert f"mine.{suffix} holds no schedule: " in error
    assert words in error
    _, _, error = pipelab_command("check", f"other.{suffix}")
    assert f"there is no file other.{suffix}" in error


def test_a_plan_in_a_csv_file_is_a_target_too(pipelab_command, folder):
    pipelab.OneFOneB(2, 3).plan().to_csv("plan.csv")
    code, output, _ = pipelab_command("check", "plan.csv")
    assert code == 0
    assert "12 actions" in output
    Path("bad.csv").write_text("0F0,0X0\n")
    assert "bad.csv, line 1, column 2" in pipelab_command("check", "bad.csv")[2]


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


def test_settings_are_python_literals_or_text():
    assert targets.settings(["a=1", "b=[1, 2]", "c=text", "d=None"]) == {"a": 1, "b": [1, 2], "c": "text", "d": None}
    with pytest.raises(UsageError):
        targets.settings(["1a=2"])


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
            "MySchedule needs a value for cap",
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


@pytest.mark.parametrize(("broken", "hinted"), [("self.half = self.ranks // 2", True), ("1 / 0", False)])
def test_the_hint_to_make_the_schedule_first_follows_only_where_that_was_left_out(
    pipelab_command, folder, broken, hinted
):
    own = f"    def __init__(self, ranks, microbatches):\n        {broken}\n\n    def actions"
    Path("mine.py").write_text(RIGHT.replace("    def actions", own, 1))
    error = pipelab_command("check", "mine.py:MySchedule")[2]
    assert "mine.py, line 8" in error
    assert ("calls super().__init__(ranks, microbatches) first" in error) == hinted


NEEDY = RIGHT.replace("Chatty(MySchedule)", "Needy(MySchedule)").replace('words="none"', "words, *, loud")


def test_a_parameter_without_a_default_is_asked_for_by_name(pipelab_command, folder):
    Path("mine.py").write_text(NEEDY)
    code, _, error = pipelab_command("check", "mine.py:Needy")
    assert code == 1
    assert error.startswith("Needy needs a value for words and loud: its __init__ has no default\n")
    assert "mine.py, line 15, in __init__: def __init__(self, ranks, microbatches, words, *, loud):" in error
    assert error.endswith("  try: --set words=... --set loud=...\n")
    error = pipelab_command("check", "mine.py:Needy", "--set", "loud=1")[2]
    assert error.startswith("Needy needs a value for words: its __init__ has no default\n")
    assert pipelab_command("check", "mine.py:Needy", "--set", "loud=1", "--set", "words=few")[0] == 0


def test_sizes_are_given_by_name_wherever_they_stand(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace('ranks, microbatches, words="none"', 'words="x", microbatches=1, ranks=2'))
    assert "Chatty(x) is right: 64 actions" in pipelab_command("check", "mine.py:Chatty")[1]


def test_an_init_that_takes_no_sizes_gets_its_line(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace('ranks, microbatches, words="none"', "ranks"))
    code, _, error = pipelab_command("check", "mine.py:Chatty")
    assert code == 1
    assert error.startswith("pipelab calls Chatty(ranks, microbatches), but it is written Chatty(ranks)")
    assert "mine.py, line 15, in __init__: def __init__(self, ranks):" in error
    assert "try: write def __init__(self, ranks, microbatches)" in error
