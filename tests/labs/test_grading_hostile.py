"""Submissions that misbehave: each is graded as failed with its reason, in bounded time, and the next one goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from homework import BACKWARD, SOLUTION, changed, first, inside

from pipelab.labs.grading import runner
from pipelab.labs.grading.runner import GraderError, Limits, grade, submissions
from pipelab.labs.grading.tasks import Assignment, Grade

pytestmark = pytest.mark.dist

OWN = runner._Server
OUTSIDE = Path(__file__).parent / "written_by_a_submission.txt"
MARK = f"pipelab-left-behind-{os.getpid()}"


SLEEPER = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{MARK}']"
RESULT = "{'done': {'marks': [], 'note': ''}}"

# What each does, and words of the reason.
HOSTILE: dict[str, tuple[str, str]] = {
    "sys_exit": (first("import sys; sys.exit(0)"), "sys.exit(0)"),
    "sys_exit_inside": (inside("raise SystemExit(0)"), "sys.exit(0)"),
    "exit_builtin": (first("exit()"), "ends the interpreter"),
    "os_exit": (first("import os; os._exit(0)"), "exit code 0"),
    "os_exit_inside": (inside("import os; os._exit(0)"), "exit code 0 with 4 micro-batches"),
    "exits_in_a_finally": (
        SOLUTION + "\nimport atexit, os\natexit.register(os._exit, 0)\nraise SystemExit\n",
        "sys.exit",
    ),
    "segmentation_fault": (first("import ctypes; ctypes.string_at(0)"), "SIGSEGV"),
    "aborts": (first("import os; os.abort()"), "SIGABRT"),
    "kills_itself": (first("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "os.kill"),
    "kills_its_parent": (first("import os, signal; os.kill(os.getppid(), signal.SIGKILL)"), "os.kill"),
    "raises_a_signal": (first("import signal; signal.raise_signal(signal.SIGTERM)"), "SIGTERM"),
    "keyboard_interrupt": (first("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    "memory": (first("x = bytearray(3 << 30)"), "MB of memory"),
    "memory_in_tensors": (first("import torch; x = torch.ones(1 << 30)"), "memory"),
    "memory_inside": (inside("x = torch.ones(1 << 30)"), "MB of memory"),
    "memory_piece_by_piece": (first("x = []\nwhile True: x.append(bytearray(1 << 24))"), "MB of memory"),
    "prints_a_megabyte": (first("print('x' * 1_000_000)"), "256 kB"),
    "prints_without_end": (inside("while True: print('F0 B0' * 100)"), "256 kB"),
    "prints_errors_without_end": (first("import os\nwhile True: os.write(2, b'x' * 1000)"), "256 kB"),
    "forks": (first("import os; os.fork()"), "os.fork"),
    "forks_in_c": (
        first("import ctypes, time\nwhile True:\n    if not ctypes.CDLL(None).fork(): time.sleep(600)"),
        "too many processes",
    ),
    "forks_inside_and_hides_it": (
        inside("import os, contextlib\n    with contextlib.suppress(Exception): os.fork()"),
        "os.fork",
    ),
    "multiprocessing": (first("import multiprocessing as m; p = m.Process(target=print); p.start()"), "os.fork"),
    "execs": (first("import os; os.execv('/bin/true', ['true'])"), "os.exec"),
    "many_programs": (first("import subprocess\nfor _ in range(99): subprocess.run(['true'])"), "too many programs"),
    "leaves_a_child": (first(f"import subprocess, sys; {SLEEPER})"), "left 1 process running"),
    "leaves_a_daemon": (first(f"import subprocess, sys; {SLEEPER}, start_new_session=True)"), "left 1 process running"),
    "leaves_a_child_and_exits": (first(f"import os, subprocess, sys; {SLEEPER}); os._exit(0)"), "left 1 process"),
    "leaves_a_child_without_environment": (
        first(f"import subprocess, sys; {SLEEPER}, start_new_session=True, env={{}})"),
        "left 1",
    ),
    "replaces_backward": (
        first("import torch; torch.autograd.backward = lambda *a, **k: None"),
        "torch.autograd.backward",
    ),
    "replaces_tensor_backward": (
        first("import torch; torch.Tensor.backward = lambda *a, **k: None"),
        "Tensor.backward",
    ),
    "replaces_backward_in_disguise": (
        first(
            "import functools, torch\n@functools.wraps(torch.autograd.backward)\ndef f(*a, **k): pass\n"
            "torch.autograd.backward = f"
        ),
        "torch.autograd.backward",
    ),
    "replaces_to": (first("import torch; torch.Tensor.to = lambda self, *a, **k: self"), "torch.Tensor.to"),
    "replaces_the_judge": (
        first("from pipelab.labs.grading import homework4\nhomework4.judge = lambda *a: ([], 'all right')"),
        "replaces pipelab.labs.grading.homework4.judge",
    ),
    "replaces_a_check": (
        inside("from pipelab.labs.grading import tasks; tasks.Mark.passed = True"),
        "replaces pipelab.labs.grading.tasks.Mark.passed",
    ),
    "replaces_a_builtin": (first("import builtins; builtins.sum = lambda *a: 0"), "builtins.sum"),
    "forges_the_result": (
        first(
            "import contextlib, json, os\nfor fd in range(3, 99):\n    with contextlib.suppress(OSError):\n"
            f"        os.write(fd, json.dumps({RESULT}).encode() + b'\\n')"
        ),
        "grader's own file",
    ),
    "closes_everything": (first("import os; os.closerange(0, 256)"), "exit code"),
    "writes_outside": (first(f"open({str(OUTSIDE)!r}, 'w').write('here')"), "outside its folder"),
    "writes_beside_by_a_link": (
        first(f"import os; os.symlink({str(OUTSIDE.parent)!r}, 'link')\nopen('link/{OUTSIDE.name}', 'w')"),
        "outside its folder",
    ),
    "deletes_outside": (first(f"import os; os.remove({str(Path(__file__))!r})"), "outside its folder"),
    "does_not_parse": (first("def broken(:"), "line 1"),
    "wrong_indentation": (changed((BACKWARD, f"  {BACKWARD}\n  pass")), "not Python"),
    "null_bytes": ("x = 1\0", "not Python"),
    "empty": ("", "no function run_1F1B_homework; it defines no function"),
    "imports_what_is_not_there": (first("import tensorflow_of_my_own"), "tensorflow_of_my_own"),
    "imports_a_neighbour": (first("import right"), "imports right"),
    "other_name": (changed(("run_1F1B_homework", "run_1f1b_homework")), "did you mean run_1f1b_homework?"),
    "not_a_function": ("run_1F1B_homework = 3", "no function"),
    "wrong_signature": (changed(("(model, micro_batches, loss_fn):", "(model):")), "(model)"),
    "raises_on_import": (first("1 / 0"), "ZeroDivisionError"),
    "raises_its_own": (first("class Mine(BaseException): pass\nraise Mine('what')"), "Mine: what"),
    "reads_standard_input": (first("input('how many?')"), "EOFError"),
    "recurses": (first("def f(): return f()\nf()"), "RecursionError"),
}

ENDLESS = {
    "fork_bomb": (first("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"), "still running"),
    "loops_on_import": (first("while True: pass"), "s while it is imported"),
    "loops_inside": (inside("while True: pass"), "s with 4 micro-batches"),
    "loops_at_one_size": (inside("while len(micro_batches) == 1: pass"), "s with 1 micro-batch"),
    "sleeps": (first("import time; time.sleep(600)"), "still running"),
    "catches_everything": (
        inside("while True:\n        try: [].pop()\n        except BaseException: pass"),
        "still running",
    ),
    "ignores_signals": (
        first("import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"),
        "still running",
    ),
    "waits_for_a_thread": (
        first("import threading; e = threading.Event(); t = threading.Thread(target=e.wait); t.start(); t.join()"),
        "still running",
    ),
}

RIGHT = {
    "right": SOLUTION,
    "right_with_a_thread": first("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()"),
    "right_and_writes_beside": first("open('log.txt', 'w').write('here'); import tempfile; tempfile.mkstemp()"),
    "right_and_starts_a_program": first("import subprocess; subprocess.run(['true'])"),
    "right_and_trains_on_import": SOLUTION + "\nmain()\n",
    "right_in_double": first("import torch; torch.set_default_dtype(torch.float64)"),
    "right_and_plots": first("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.savefig('a.png')"),
    "right_and_prints": inside("print('F0', i := 0)"),
    "random": SOLUTION,  # named like a module of Python's
    "with blanks-and.dots": SOLUTION,
}


def graded(texts: dict[str, str], folder: Path, limits: Limits) -> dict[str, Grade]:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    found = grade(submissions(folder)[0], Assignment(), limits, workers=2)
    return {each.submission.removesuffix(".py"): each for each in found}


@pytest.fixture(scope="module")
def misbehaved(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    texts = {name: text for name, (text, _) in HOSTILE.items()} | RIGHT
    return graded(texts, tmp_path_factory.mktemp("hostile"), Limits(seconds=30))


@pytest.fixture(scope="module")
def endless(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    texts = {name: text for name, (text, _) in ENDLESS.items()}
    return graded(texts, tmp_path_factory.mktemp("endless"), Limits(seconds=1))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_submission_fails_with_its_reason(name, misbehaved):
    found = misbehaved[name]
    assert (found.passed, found.score, found.max_score) == (False, 0, 100)
    assert HOSTILE[name][1] in found.reason


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_submission_fails_in_bounded_time(name, endless):
    assert (endless[name].passed, endless[name].score) == (False, 0)
    assert ENDLESS[name][1] in endless[name].reason
    assert endless[name].seconds < 30


@pytest.mark.parametrize("name", RIGHT)
def test_right_submissions_among_hostile_ones_keep_their_points(name, misbehaved):
    assert misbehaved[name].reason == ""
    assert misbehaved[name].score == 100


def test_nothing_is_left_behind(misbehaved, endless):
    del misbehaved, endless
    assert not OUTSIDE.exists()
    assert Path(__file__).exists()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if MARK in line]


def test_what_was_printed_is_kept_but_not_all_of_it(misbehaved):
    assert "F0 0" in misbehaved["right_and_prints"].output
    assert len(misbehaved["prints_a_megabyte"].output) < 10_000


def test_closing_the_iterator_ends_what_is_running(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(SOLUTION)
    for name in "bcdef":
        (tmp_path / f"{name}.py").write_text(first("import time; time.sleep(600)"))
    monkeypatch.setattr(runner, "_Server", OWN)
    rows = grade(submissions(tmp_path)[0], Assignment(), Limits(seconds=300), workers=2)
    assert next(rows).submission == "a.py"
    began = time.monotonic()
    rows.close()
    assert time.monotonic() - began < 60


def test_a_folder_with_a_helper_is_one_submission(kept_servers, tmp_path):
    handed_in = tmp_path / "all" / "ada"
    handed_in.mkdir(parents=True)
    (handed_in / "pipeline_homework.py").write_text(first("import helper"))
    (handed_in / "helper.py").write_text("import sys\n")
    (found,) = grade(submissions(tmp_path / "all")[0], Assignment())
    assert (found.submission, found.passed) == ("ada", True)
    for alone in (handed_in, handed_in / "pipeline_homework.py"):  # as their author grades it
        (found,) = grade(submissions(alone)[0], Assignment())
        assert found.passed
        assert found.submission == alone.name


def test_a_submission_that_cannot_be_read_fails_and_the_next_goes_on(kept_servers, tmp_path):
    (tmp_path / "a.py").mkdir()
    (tmp_path / "a.py" / "pipeline_homework.py").symlink_to(tmp_path / "gone.py")
    (tmp_path / "b.py").write_text(SOLUTION)
    found = {each.submission: each for each in grade(submissions(tmp_path)[0], Assignment())}
    assert not found["a.py"].passed
    assert found["b.py"].passed


def test_ctrl_c_keeps_the_grades_that_are_done_and_leaves_nothing_running(tmp_path):
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "a.py").write_text(SOLUTION)
    (folder / "b.py").write_text(first("import time; time.sleep(600)"))
    command = [
        sys.executable,
        "-m",
        "pipelab",
        "grade",
        "all",
        "--workers",
        "1",
        "--seconds",
        "500",
        "--save",
        "all.csv",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("a.py")
            listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=True)
            (server,) = listed.stdout.decode().split()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2
    assert (tmp_path / "all.csv").read_text().count("\n") == 2
    assert not Path(f"/proc/{server}").exists()


def test_the_grader_says_so_when_its_own_process_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(SOLUTION)
    monkeypatch.setattr(runner, "_Server", OWN)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(GraderError):
        list(grade(submissions(tmp_path)[0], Assignment()))
