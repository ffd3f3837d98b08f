"""What the command line may be given: a name, a file of one's own, a plan, a trace; and how a mistake in it is told."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from commands import RIGHT

import pipelab
from pipelab.cli import targets
from pipelab.cli.options import whole_numbers
from pipelab.errors import UsageError


def test_parameters_of_a_schedule_are_set_by_name(succeeds, refused, folder):
    Path("mine.py").write_text(RIGHT)
    assert "Chatty(many)" in succeeds("check", "mine.py:Chatty", "--set", "words=many")
    assert "it takes: words" in refused("check", "mine.py:Chatty", "--set", "word=many")
    assert "expected name=value" in refused("check", "gpipe", "--set", "words")


def test_only_parameters_that_may_differ_are_offered_and_recomputation_is_named(succeeds, refused, folder):
    error = refused("check", "gpipe(recompute=True)")
    assert "takes no recompute" in error
    assert "it takes: nothing" in error
    assert "try: pipelab.with_recompute" in error
    pipelab.with_recompute(pipelab.GPipe(2, 3)).to_csv("again.csv")
    succeeds("check", "again.csv")
    error = refused("check", "interleaved-1f1b(lag=1)")
    assert "it takes: stages_per_rank" in error
    assert "with_recompute" not in error


def test_a_faulty_file_gets_its_faults_and_a_hint_but_no_traceback(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace("yield F(m)", "yield F(m + 1)"))
    code, output, error = pipelab_command("check", "mine.py:MySchedule", "-r", "2", "-m", "2")
    assert code == 1
    assert output == ""
    assert "out-of-range" in error
    assert "missing" in error
    assert "try:" in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import pipelab\nclass Broken(pipelab.Schedule)\n    pass\n", "line 2: expected ':'"),
        ("import pipelap\nclass Broken(pipelap.Schedule): ...\n", "No module named 'pipelap'"),
        (RIGHT.replace("yield B(m)", "yield B(m + self.nothing)"), "has no attribute 'nothing'"),
    ],
)
def test_a_file_that_cannot_be_imported_or_run_gets_its_line(refused, folder, text, words):
    Path("broken.py").write_text(text)
    error = refused("check", "broken.py:MySchedule")
    assert "broken.py, line " in error
    assert words in error


_HEAD = "import json, os, broken\nimport pipelab\n\nclass Mine(pipelab.GPipe): ...\n"


@pytest.mark.parametrize(
    ("mine", "broken", "place", "words"),
    [
        ("open('missing.txt')", "", "mine.py, line 5", "FileNotFoundError: [Errno 2]"),
        ("os.makedirs('file/inside/it')", "", "mine.py, line 5", "NotADirectoryError: [Errno 20]"),  # os is frozen
        ("json.loads('{')", "", "mine.py, line 5", "JSONDecodeError: Expecting property name"),
        ("raise SystemExit('bye')", "", "mine.py, line 5", "SystemExit: bye\n"),
        ("def deep(): return deep()\ndeep()", "", "mine.py, line 5", "RecursionError: maximum recursion depth"),
        ("broken.fail()", "def fail(): {}['key']", "broken.py, line 1", "KeyError: 'key'"),
        ("", "x = 1\ny = 1 / 0", "broken.py, line 2", "ZeroDivisionError: division by zero"),
        ("", "x = 1\ny = = 2", "broken.py, line 2", "invalid syntax"),
        ("eval('1 +')", "", "mine.py, line 5", "SyntaxError: invalid syntax"),
        ("compile('x = = 1', 'made.py', 'exec')", "", "mine.py, line 5", "SyntaxError: invalid syntax"),
        ("raise RuntimeError", "", "mine.py, line 5", "RuntimeError\n"),
    ],
)
def test_an_error_of_an_import_names_the_students_own_line(refused, folder, mine, broken, place, words):
    Path("file").touch()
    Path("mine.py").write_text(f"{_HEAD}{mine}\n")
    Path("broken.py").write_text(f"{broken}\n")
    for command in ("check", "simulate", "draw", "run", "compare"):
        error = refused(command, "mine.py:Mine")
        assert place in error
        assert words in error
        assert "try: fix that line" in error or "line 2: invalid syntax\n    y = = 2\n        ^" in error


def test_profiles_of_all_ranks_are_named_by_a_pattern_and_a_step(succeeds, refused, folder):
    profiles = Path(__file__).parents[1] / "hub" / "profiles" / "interleaved-1f1b-slow-rank-1"
    pattern = f"{profiles}/rank*.json.gz"
    assert "measured, step 0 of 0 to 1" in succeeds("draw", f"{pattern}(step=0)")
    assert "rank*, measured, step 0 of 0 to 1" in succeeds("draw", f"{profiles}/rank*(step=0)")
    output = succeeds("why", pattern, "--delays")
    assert [line.split(" of ")[0] for line in output.splitlines()] == [
        f"without rank {rank}'s delay" for rank in (0, 1)
    ]
    assert "wait" in succeeds("why", pattern)
    assert "rank*.json.gz" in succeeds("compare", pattern, "interleaved-1f1b")
    for arguments, words in (
        (["draw", f"{profiles}/rank0.json.gz"], "give the files of all ranks"),
        (["draw", f"{pattern}(step=2)"], "the files hold steps 0 to 1"),
        (["draw", f"{profiles}/nothing*.json"], "no file has such a name"),
        (["draw", pattern, "--ranks", "2"], "leave out --ranks"),
        (["why", pattern, "--delays", "--at", "3", "--rank", "0"], "leave out --save and --at"),
    ):
        error = refused(*arguments)
        assert words in " ".join(error.split())


@pytest.mark.parametrize("suffix", ["py", "csv", "json"])
def test_a_folder_or_a_pipe_with_a_files_name_is_refused(refused, folder, suffix):
    Path(f"folder.{suffix}").mkdir()
    os.mkfifo(f"pipe.{suffix}")
    for name in (f"folder.{suffix}", f"pipe.{suffix}"):
        assert f"{name} is not a file" in refused("check", name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x7fELF\0\0\xff", "importing broken.py raised"),
        (b"x = '\xff'\n", "broken.py, line 1"),
        (b"", "no class that derives"),
        (b"x = '\x1b[31m'; 1 / 0; from mine import *\nclass A(B): pass", "ZeroDivisionError"),
        (b"(" * 500, "broken.py, line 1"),
    ],
    ids=["binary", "latin-1", "empty", "escape", "nested"],
)
def test_a_file_that_is_no_python_gets_a_clear_error(refused, folder, data, words):
    Path("broken.py").write_bytes(data)
    error = refused("check", "broken.py")
    assert words in error
    assert "\x1b" not in error


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("gpip", "did you mean gpipe?"),
        ("onefoneb", "did you mean 1f1b?"),
        ("nothing", "'nothing' is not a schedule\n  registered: naive"),
        ("mine:MySchedule", "is not a schedule"),
        ("mime.py:MySchedule", "there is no file mime.py; did you mean mine.py?"),
        ("link.py", "there is no file link.py"),
        ("mine.py:MySchedul", "did you mean mine.py:MySchedule?"),
        ("mine.py:Other", "has no schedule 'Other': it holds MySchedule, Chatty; name one: mine.py:MySchedule"),
        ("mine.py", "it holds MySchedule, Chatty"),
        ("empty.py:x1", "empty.py holds no class that derives from pipelab.Schedule"),
        ("empty.py", "empty.py holds no class that derives from pipelab.Schedule"),
        ("empty.py:x", "write class x(pipelab.Schedule)"),
        ("imports.py:GPipe", "GPipe is imported in imports.py"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(refused, folder, target, words):
    Path("mine.py").write_text(RIGHT)
    Path("empty.py").write_text("x = 1\n")
    Path("imports.py").write_text("from pipelab import GPipe\n")
    Path("link.py").symlink_to("gone")
    assert words in refused("check", target)


@pytest.mark.parametrize("name", ["bpipe", "pipe-offload", "pipedream", "2bw"])
def test_a_schedule_beside_the_catalogue_is_found_by_name(succeeds, name):
    assert name not in pipelab.schedules
    succeeds("check", name)


def test_a_plan_in_a_csv_file_is_a_target_too(succeeds, refused, folder):
    pipelab.OneFOneB(2, 3).plan().to_csv("plan.csv")
    assert "12 actions" in succeeds("check", "plan.csv")
    Path("bad.csv").write_text("0F0,0X0\n")
    assert "bad.csv, line 1, column 2" in refused("check", "bad.csv")


def test_a_saved_trace_is_a_target(succeeds, refused, folder):
    pipelab.simulate(pipelab.OneFOneB(2, 3), pipelab.Cost(forward=7, unit="ms")).save("m.json")
    succeeds("draw", "m.json", "-o", "m.txt")
    assert "A step takes 36 ms" in Path("m.txt").read_text()
    assert "12 actions, no fault" in succeeds("check", "m.json")
    assert "A step takes 12 units" in succeeds("simulate", "m.json")
    output = succeeds("compare", "m.json", "gpipe", "-r", "3", "-m", "2")
    assert "36 ms" in output
    assert "12 units" in output
    assert "ranks=2 and microbatches=3 already: leave out --ranks" in refused("check", "m.json", "-r", "2")
    assert "leave out --microbatches" in refused("compare", "m.json", "gpipe", "-m", "2,4")
    assert "m.json: a trace has its own times" in refused("draw", "m.json", "-f", "3", "-o", "m.txt")
    Path("other.json").write_text("{}")
    assert "not a trace saved by pipelab" in refused("draw", "other.json", "-o", "m.txt")


def test_a_file_in_a_folder_and_a_file_with_one_schedule_need_no_more_words(succeeds, folder):
    Path("F1 homework").mkdir()  # like an action, and yet no plan
    Path("F1 homework/mine.py").write_text(RIGHT)
    Path("mine.py").write_text(RIGHT.split("class Chatty", maxsplit=1)[0])
    for target in ("F1 homework/mine.py:MySchedule", "mine.py"):
        assert "MySchedule(ranks=4, microbatches=8) is right" in succeeds("check", target)


@pytest.mark.sweep
@pytest.mark.parametrize("name", pipelab.schedules)
def test_a_schedule_is_found_by_its_name_and_by_its_class(succeeds, name):
    schedule = pipelab.schedules[name](4, 8)
    actions = sum(map(len, schedule.plan().bound.computing))
    for target in (name, type(schedule).__name__, f"pipelab.{type(schedule).__name__}"):
        assert f"{schedule!r} is right: {actions} actions, no fault" in succeeds("check", target)


def test_settings_are_python_literals_or_text():
    assert targets.settings(["a=1", "b=[1, 2]", "c=text", "d=None"]) == {"a": 1, "b": [1, 2], "c": "text", "d": None}
    with pytest.raises(UsageError):
        targets.settings(["1a=2"])


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ("def __init__(self, ranks, microbatches):\n        pass", "", "super().__init__"),
        (
            "def __init__(self, ranks):\n        super().__init__(ranks, 4)",
            "mine.py, line 7",
            "pipelab calls MySchedule(ranks, microbatches), but it is written MySchedule(ranks)",
        ),
        (
            "def __init__(self, ranks, microbatches, cap):\n        pass",
            "mine.py, line 7",
            "MySchedule(ranks, microbatches, cap): missing a required argument: 'cap'",
        ),
        ("def __init__(self, ranks, microbatches):\n        1 / 0", "mine.py, line 8", "ZeroDivisionError"),
        ("def refusal(self, ranks, microbatches):\n        1 / 0", "mine.py, line 8", "ZeroDivisionError"),
        ("stages = 1.5", "", "stages=1.5"),
    ],
)
def test_a_schedule_that_cannot_be_made_gets_its_line(refused, folder, lines, line, words):
    Path("mine.py").write_text(RIGHT.replace("    def actions", f"    {lines}\n\n    def actions", 1))
    error = refused("check", "mine.py:MySchedule")
    assert words in error
    assert line in error


@pytest.mark.parametrize(("broken", "hinted"), [("self.half = self.ranks // 2", True), ("1 / 0", False)])
def test_the_hint_to_make_the_schedule_first_follows_only_where_that_was_left_out(refused, folder, broken, hinted):
    own = f"    def __init__(self, ranks, microbatches):\n        {broken}\n\n    def actions"
    Path("mine.py").write_text(RIGHT.replace("    def actions", own, 1))
    error = refused("check", "mine.py:MySchedule")
    assert ("calls super().__init__(ranks, microbatches) first" in error) == hinted


NEEDY = RIGHT.replace("Chatty(MySchedule)", "Needy(MySchedule)").replace('words="none"', "words, *, loud")


@pytest.mark.parametrize(("given", "name"), [([], "words"), (["--set", "words=1"], "loud")])
def test_a_parameter_without_a_default_is_asked_for_by_name(succeeds, refused, folder, given, name):
    Path("mine.py").write_text(NEEDY)
    error = refused("check", "mine.py:Needy", *given)
    assert "written Needy(ranks, microbatches, words, *, loud): missing a required" in error
    assert f"argument: '{name}'" in error
    assert "mine.py, line 15, in __init__: def __init__(self, ranks, microbatches, words, *, loud):" in error
    assert "--set name=value" in error
    succeeds("check", "mine.py:Needy", "--set", "loud=1", "--set", "words=few")


def test_sizes_are_given_by_name_wherever_they_stand_and_an_init_without_them_gets_its_line(succeeds, refused, folder):
    Path("mine.py").write_text(RIGHT.replace('ranks, microbatches, words="none"', 'words="x", microbatches=1, ranks=2'))
    assert "Chatty(x) is right: 64 actions" in succeeds("check", "mine.py:Chatty")
    Path("mine.py").write_text(RIGHT.replace('ranks, microbatches, words="none"', "ranks"))
    error = refused("check", "mine.py:Chatty")
    assert error.startswith("pipelab calls Chatty(ranks, microbatches), but it is written Chatty(ranks)")
    assert "mine.py, line 15, in __init__: def __init__(self, ranks):" in error
    assert "try: write def __init__(self, ranks, microbatches)" in error


# Plans as text

ROWS = "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    "text", [ROWS, ROWS.replace("; ", "\n"), "rank 0 | 0F0,0F1,0B0,0B1\nrank 1 | 1F0 1B0 1F1 1B1\n"]
)
def test_a_plan_is_given_in_the_command_itself(succeeds, refused, folder, text):
    assert "Plan(ranks=2, stages=2, microbatches=2) is right: 8 actions" in succeeds("check", text)
    succeeds("draw", text, "-o", "plan.csv")
    assert pipelab.Plan.from_csv("plan.csv") == pipelab.Plan.parse(text)
    assert succeeds("compare", text, "gpipe", "-r", "2", "-m", "2").count("  9 units") == 2
    assert "rank 1, position 4: 'oops' is not an action" in refused("check", f"{ROWS} oops")
    error = refused("check", text, "-r", "3")
    assert "ranks=2 and microbatches=2 already: leave out --ranks" in error


@pytest.mark.parametrize("content", [ROWS.replace("; ", "\n").replace(" ", ","), ROWS.replace("; ", "\n")])
def test_a_plan_is_read_from_stdin(pipelab_command, monkeypatch, content):
    def piped(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return pipelab_command("check", "-")

    assert "stdin is right: 8 actions" in piped(content.encode())[1]
    assert "stdin, line 2, column" in piped(content.replace("1F1", "1X1").encode())[2]
    assert "stdin holds no plan" in piped(b"\n")[2]
    assert "stdin is not text in UTF-8" in piped(content.encode("utf-16"))[2]


# Parameters

LAGGED = (
    RIGHT.split("class Chatty", maxsplit=1)[0]
    + """
class Lagged(MySchedule):
    def __init__(self, ranks, microbatches, lag=1):
        if lag > 9:
            raise pipelab.UsageError(f"lag={lag}: at most 9")
        super().__init__(ranks, microbatches)
        self.lag = lag


class Needy(Lagged):
    def __init__(self, ranks, microbatches, words, lag):
        super().__init__(ranks, microbatches, lag)
"""
)


def test_a_target_may_have_its_parameters_in_parentheses(succeeds, refused, folder):
    Path("mine.py").write_text(LAGGED)
    assert "Lagged(ranks=4, microbatches=8, lag=3) is right" in succeeds("check", "mine.py:Lagged(lag=3)")
    found = targets.find("greedy(priority=forward-first, memory_cap=[3, 2], split=True)", 2, 4)
    assert repr(found) == repr(pipelab.Greedy(2, 4, 1, "forward-first", [3, 2], None, True))
    shown = "Interleaved1F1B(ranks=2, microbatches=3, stages_per_rank=4)"
    assert f"{shown} is right" in succeeds("check", shown)
    assert "has its own number of ranks: leave out --ranks 4" in refused("check", shown, "-r", "4")
    for wrong in ("(3)", "(lag=)", "(**x)", "(lag=1)(lag=2)"):
        assert "expected name=value between the parentheses" in refused("check", f"mine.py:Lagged{wrong}")


def test_one_schedule_is_compared_with_itself_at_other_parameters(succeeds, folder):
    both = ("interleaved-1f1b", "interleaved-1f1b(stages_per_rank=4)")
    output = succeeds("compare", *both, "-o", "c.csv")
    assert [line.split(",")[0] for line in Path("c.csv").read_text().splitlines()[1:]] == list(both)
    assert "28.5 units" in output
    assert "26.25 units" in output
    assert both[1] in succeeds("compare", *both, "-m", "4,8")


@pytest.mark.parametrize(
    ("given", "sets", "found"),
    [
        ("1f1b interleaved-1f1b", "stages_per_rank=4", "1f1b interleaved-1f1b(stages_per_rank=4)"),
        ("mine.py:Lagged gpipe", "lag=3", "mine.py:Lagged(lag=3) gpipe"),
        ("mine.py:Lagged(lag=2) mine.py:Lagged", "lag=3", "mine.py:Lagged(lag=2) mine.py:Lagged(lag=3)"),
        ("mine.py:Lagged looped-bfs", "lag=3 stages_per_rank=1", "mine.py:Lagged(lag=3) looped-bfs(stages_per_rank=1)"),
        ("plan.csv greedy", "priority=oldest-first", "plan.csv greedy(priority='oldest-first')"),
        ("gpipe", "lag=3", "gpipe(lag=3)"),
        ("greedy(ranks=3) gpipe", "memory_cap=[3,2,1]", "greedy(ranks=3, memory_cap=[3, 2, 1]) gpipe"),
        ("mine.py:Needy mine.py:Lagged", "lag=2 words=a", "mine.py:Needy(lag=2, words='a') mine.py:Lagged(lag=2)"),
        ("gpipe mine.py:Lagged", "lag=10", "gpipe mine.py:Lagged(lag=10)"),
    ],
)
def test_set_reaches_those_targets_that_accept_the_parameter(folder, given, sets, found):
    Path("mine.py").write_text(LAGGED.replace("class MySchedule", "class _Base").replace("(MySchedule)", "(_Base)"))
    assert " ".join(targets.with_settings(given.split(), sets.split())) == found


def test_a_parameter_that_no_target_has_is_refused(refused, folder):
    assert "takes no lag" in refused("compare", "gpipe", "greedy", "--set", "lag=3")
    assert "memory_cap='many'" in refused("compare", "gpipe", "greedy", "--set", "memory_cap=many")
    pipelab.OneFOneB(2, 3).plan().to_csv("plan.csv")
    assert "plan.csv has its own parameters: leave out --set lag" in refused("check", "plan.csv", "--set", "lag=3")


# Files that run when they are imported

MARK = "open('it ran', 'w').close()\n"


@pytest.mark.parametrize(
    "text",
    [
        "import pipelab as p\nclass Mine(p.GPipe): ...\n",
        "from pipelab import GPipe as G\nclass Mine(G): ...\n",
        "from pipelab.catalogue import *\nclass Mine(GPipe): ...\n",
        "from base import *\nclass Mine(Base): ...\n",
        "import sched\nclass Mine(sched.Base): ...\n",
        "from base import Base\nclass _Middle(Base): ...\nclass Mine(_Middle): ...\ndel _Middle\n",
        "import pipelab\nobject = pipelab.GPipe\nclass Mine(object): ...\n",
        "import pipelab\nexec('class Mine(pipelab.GPipe): ...')\n",
        "import pipelab\ndef make(base):\n    class Mine(base): ...\n    return Mine\nMine = make(pipelab.GPipe)\n",
    ],
)
def test_a_schedule_is_found_however_its_base_is_named(pipelab_command, folder, monkeypatch, text):
    for name in ("base", "sched"):  # the second hides a module of Python
        Path(f"{name}.py").write_text("import pipelab\nBase = pipelab.GPipe\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("mine.py").write_text(MARK + text)
    _, output, error = pipelab_command("check", "mine.py")
    assert "Mine(ranks=4, microbatches=8) is right" in output, error
    assert Path("it ran").exists()


def test_a_file_is_imported_once_for_a_whole_table(succeeds, folder):
    Path("mine.py").write_text("with open('log', 'a') as log:\n    log.write('x')\n" + LAGGED)
    succeeds("compare", "mine.py:Lagged", "mine.py:MySchedule", "-m", "2,4,8", "--set", "lag=2")
    assert Path("log").read_text() == "x"


def test_of_several_targets_those_that_accept_a_parameter_get_it():
    found = targets.with_settings(["1f1b", "interleaved-1f1b"], ["stages_per_rank=4"])
    assert found == ["1f1b", "interleaved-1f1b(stages_per_rank=4)"]
    assert targets.settings(["stages_per_rank=2", "policy=eager"]) == {"stages_per_rank": 2, "policy": "eager"}
    assert targets._parameters("my.py:Lagged(lag=3, policy=eager)") == ("my.py:Lagged", {"lag": 3, "policy": "eager"})


def test_each_number_of_an_option_counts_once():
    assert whole_numbers("--ranks", "2,4,2") == [2, 4]
