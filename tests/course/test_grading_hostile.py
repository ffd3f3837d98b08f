"""Submissions that misbehave: each is graded as failed with its reason, in bounded time, and the next one goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from homework import BACKWARD, ROOT, SOLUTION, changed, first, inside

from pipelab_course.grading import runner
from pipelab_course.grading.runner import GraderError, Limits, grade, submissions
from pipelab_course.grading.tasks import HOMEWORKS, Assignment, Grade

TEMPLATE = HOMEWORKS["hw4"].template

pytestmark = pytest.mark.dist

OWN = runner._Server
OUTSIDE = Path(__file__).parent / "written_by_a_submission.txt"
MARK = f"pipelab-left-behind-{os.getpid()}"


HOLES = TEMPLATE.read_text(encoding="utf-8")
SLEEPER = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{MARK}']"

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
    "kills_itself": (first("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "SIGKILL while it is imported"),
    "execs": (first("import os; os.execv('/bin/true', ['true'])"), "exit code 0"),
    "writes_what_is_no_record": (first("import os; os.write(3, b'{{')"), "grader's own file"),
    "sends_nothing": (first("import os; os.write(3, b'{\"done\": {}}'); os._exit(0)"), "sent nothing"),
    "raises_a_signal": (first("import signal; signal.raise_signal(signal.SIGTERM)"), "SIGTERM"),
    "keyboard_interrupt": (first("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    "memory": (first("x = bytearray(3 << 30)"), "MB of memory"),
    "memory_in_tensors": (first("import torch; x = torch.ones(1 << 30)"), "memory"),
    "memory_inside": (inside("x = torch.ones(1 << 30)"), "MB of memory"),
    "memory_piece_by_piece": (first("x = []\nwhile True: x.append(bytearray(1 << 24))"), "MB of memory"),
    "prints_a_megabyte": (first("print('x' * 1_000_000)"), "256 kB"),
    "prints_without_end": (inside("while True: print('F0 B0' * 100)"), "256 kB"),
    "prints_errors_without_end": (first("import os\nwhile True: os.write(2, b'x' * 1000)"), "256 kB"),
    "forks_in_c": (
        first("import ctypes, time\nwhile True:\n    if not ctypes.CDLL(None).fork(): time.sleep(600)"),
        "too many processes",
    ),
    "leaves_a_child": (first(f"import subprocess, sys; {SLEEPER})"), "left 1 process running"),
    "leaves_a_daemon": (first(f"import subprocess, sys; {SLEEPER}, start_new_session=True)"), "left 1 process running"),
    "leaves_a_child_and_exits": (first(f"import os, subprocess, sys; {SLEEPER}); os._exit(0)"), "left 1 process"),
    "leaves_a_child_without_environment": (
        first(f"import subprocess, sys; {SLEEPER}, start_new_session=True, env={{}})"),
        "left 1",
    ),
    "closes_everything": (first("import os; os.closerange(0, 256)"), "exit code"),
    "does_not_parse": (first("def broken(:"), "line 1"),
    "wrong_indentation": (changed((BACKWARD, f"  {BACKWARD}\n  pass")), "not Python"),
    "null_bytes": ("x = 1\0", "null bytes"),
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

TEACHER = ROOT / "teacher" / "homework4"
GRADER = "import gc, json, os, sys\nfrom pipelab_course.grading import homework4, recording, schedules, tasks\n"
EVENTS = "homework4._order(4)"
HIT = f"each._events[:] = {EVENTS}\n"
RUN = {"began": 0, "targets": {}, "own_loss": False, "error": "", "weights": [], "gradients": [None] * 4}
MADE = (
    f"run = {RUN} | {{'events': {EVENTS}}}\n"
    "record = {'runs': [run] * 3, 'training': run | {'steps': []}, 'hidden': [run] * 2}\n"
)
SENT = "os.write(3, json.dumps({'done': %s}).encode() + b'\\n'); os._exit(0)"
FOUND = "homework4._Found(True)"

# Empty homework that reaches for the judge. What it changes in its own process changes no grade.
FORGED = {
    "replaces_the_checks": f"homework4._CHECKS = dict.fromkeys(homework4._CHECKS, lambda run: {FOUND})",
    "replaces_a_check": f"homework4._forwards.__code__ = (lambda run: {FOUND}).__code__",
    "widens_the_tolerance": "homework4.TOLERANCE = recording.TOLERANCE = 1e9",
    "replaces_the_judge": "homework4.judge = lambda *a: ([], 'all right')",
    "replaces_the_judges_code": "homework4.judge.__code__ = (lambda data, seed: ([], '')).__code__",
    "replaces_the_module": "sys.modules['__main__'].homework4 = None",
    "passes_all_marks": "tasks.Mark.passed = tasks.Grade.passed = True",
    "hides_no_sizes": "homework4._hidden = lambda seed: []",
    "sends_marks": SENT % "{'marks': [], 'reason': '', 'note': ''}",
    "sends_a_record": MADE + SENT % "{'record': record}",
    "encodes_another_record": MADE + "json.dumps = lambda *a: repr({'done': {'record': record}}).replace(\"'\", '\"')",
    "records_another_run": f"{MADE}recording.Recorded.record = lambda *a: run",
    "finds_the_recorder": (
        f"def found():\n    for each in gc.get_objects():\n        if type(each) is recording.Recorded: {HIT}"
    ),
    "traces_the_recorder": (
        "def trace(frame, event, arg):\n    each = frame.f_locals.get('self')\n"
        f"    if hasattr(each, '_events'): {HIT}    return trace\nsys.settrace(trace)"
    ),
    "calls_the_recorders_hooks": (
        "def hooked(model):\n    given = recording.torch.zeros(4, 1)\n"
        "    for hook in model.second._forward_hooks.values(): hook(model.second, (given,), given)"
    ),
    "sends_infinity": SENT % "{'record': {'runs': float('inf')}}",
    "sends_backwards_without_gradients": (
        "def record(self, function):\n    weights = [each.tolist() for each in self.weights]\n"
        "    targets = {m: ['cpu:2', True] for m in range(len(self.rows))}\n"
        "    events = homework4._order(len(self.rows))\n"
        "    return {'events': events, 'targets': targets, 'own_loss': False, 'error': '', 'weights': weights}"
        " | {'gradients': [None] * 4}\nrecording.Recorded.record = record"
    ),
    "sends_weights_that_training_would_find": (
        "call = recording.Recorded.call\n"
        "def forged(self, function):\n    left = call(self, function)\n"
        "    for _ in range(20): self.descend(0.1 / len(self.rows), self.gradients())\n"
        "    return left | {'weights': [each.tolist() for each in self.weights]}\nrecording.Recorded.call = forged"
    ),
    "replaces_backward": "recording.torch.autograd.backward = recording.torch.Tensor.backward = lambda *a, **k: None",
    "replaces_a_builtin": "import builtins; builtins.all = builtins.any = lambda *a: True",
}
# Nothing to kill or to stop there: the grader is its first process.
SPARED = {
    "kills_everybody": "import contextlib, os\nwith contextlib.suppress(OSError): os.kill(-1, 9)",
    "kills_its_parent": "import os; os.kill(os.getppid(), 9)",
    "stops_its_parent": "import os; os.kill(os.getppid(), 19)",
}

IN_ITS_FUNCTION = {"finds_the_recorder": "found()", "calls_the_recorders_hooks": "hooked(model)"}

# What only a sandbox holds, and words of the reason.
CONFINED = {
    "reads_the_solution": (f"exec(open({str(next(TEACHER.glob('*.py')))!r}).read())", "FileNotFoundError"),
    "reads_a_classmate": ("exec(open('FOLDER/right.py').read())", "FileNotFoundError"),
    "reads_the_grades": ("import os; os.listdir('FOLDER')", "FileNotFoundError"),
    "reads_the_graders_memory": ("import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "PermissionError"),
    "answers_for_the_grader": ("import os; open(f'/proc/{os.getppid()}/fd/1', 'w')", "PermissionError"),
    "answers_for_the_first_process": ("open('/proc/1/fd/1', 'w')", "PermissionError"),
    "writes_to_the_graders_terminal": ("open('/proc/1/fd/2', 'w')", "PermissionError"),
    "changes_the_kernel": ("open('/proc/sys/kernel/core_pattern', 'a')", "Read-only"),
    "starts_programs_in_a_thread": (
        "import subprocess, threading, time\n"
        "go = lambda: [subprocess.Popen(['sleep', '600']) for _ in range(20)] and time.sleep(600)\n"
        "t = threading.Thread(target=go); t.start(); t.join()",
        "too many processes",
    ),
    "writes_outside": (f"open({str(OUTSIDE)!r}, 'w')", "FileNotFoundError"),
    "writes_by_number": (f"import os; os.open({str(OUTSIDE)!r}, os.O_CREAT | os.O_WRONLY)", "FileNotFoundError"),
    "writes_by_a_link": (
        f"import os; os.symlink({str(OUTSIDE.parent)!r}, 'to'); open('to/{OUTSIDE.name}', 'w')",
        "NotFound",
    ),
    "writes_by_a_program": (
        f"import subprocess; subprocess.run('echo > {OUTSIDE}', shell=True, check=True)",
        "CalledProcess",
    ),
    "writes_a_database": (f"import sqlite3; sqlite3.connect({str(OUTSIDE)!r})", "OperationalError"),
    "writes_into_the_package": ("import pipelab; open(pipelab.__file__, 'a')", "OSError"),
    "deletes_a_file": (f"import os; os.remove({str(Path(__file__))!r})", "FileNotFoundError"),
    "deletes_by_a_program": (
        f"import subprocess; subprocess.run(['rm', {str(Path(__file__))!r}], check=True)",
        "CalledProcess",
    ),
    "lifts_its_limit": (
        "import resource as r; r.setrlimit(r.RLIMIT_DATA, (-1, -1)); x = bytearray(3 << 30)",
        "ValueError",
    ),
    "lifts_its_limit_by_a_program": (
        "import os, subprocess; subprocess.run(['prlimit', f'--pid={os.getpid()}', '--data=-1'], check=True)",
        "CalledProcess",
    ),
    "kills_the_grader": ("import subprocess; subprocess.run(['pkill', '-9', '-f', 'pipelab'])", "ended"),
    "uses_the_network": ("import socket; socket.create_connection(('127.0.0.1', PORT))", "ConnectionRefused"),
    "fills_the_disk": (
        "import itertools\nfor n in itertools.count(): open(str(n), 'wb').write(bytes(1 << 24))",
        "No space",
    ),
    "plants_a_file": ("open('/tmp/planted', 'wb').write(bytes(60 << 20)); raise OSError('as planned')", "as planned"),
    "nests_folders": (
        "import os\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')",
        "recursion",
    ),
}

ENDLESS = {
    "fork_bomb": (first("import os\nwhile True: os.fork()"), "too many processes"),
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
    "right_and_forks": first("import os\nif not os.fork(): os._exit(0)\nos.wait()"),
    "right_and_starts_many_programs": first("import subprocess\nfor _ in range(20): subprocess.run(['true'])"),
    "right_and_leaves_what_cannot_be_removed": first("import os; os.makedirs('a/b'); os.chmod('a', 0)"),
    "right_and_plots": first("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.savefig('a.png')"),
    "right_and_prints": inside("print('F0', i := 0)"),
    "random": SOLUTION,  # named like a module of Python's
    "with blanks-and.dots": SOLUTION,
}


def forged(name: str) -> str:
    """Return the homework without a solution, and what reaches for the judge in front of it."""
    hole = "    outputs, targets = [], []"
    assert hole in HOLES
    return f"{GRADER}{FORGED[name]}\n{HOLES.replace(hole, f'    {IN_ITS_FUNCTION.get(name, 0)}' + chr(10) + hole)}"


def graded(texts: dict[str, str], folder: Path, limits: Limits) -> dict[str, Grade]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name, text in texts.items():
            text = text.replace("FOLDER", str(folder)).replace("PORT", str(listening.getsockname()[1]))
            (folder / f"{name}.py").write_text(text)
        found = grade(submissions(folder)[0], Assignment(), limits, workers=2)
        return {each.submission.removesuffix(".py"): each for each in found}


@pytest.fixture(scope="module")
def misbehaved(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    texts = {name: text for name, (text, _) in HOSTILE.items()} | RIGHT
    texts |= {"holes": HOLES} | {name: forged(name) for name in FORGED}
    return graded(texts, tmp_path_factory.mktemp("hostile"), Limits(seconds=30))


@pytest.fixture(scope="module")
def confined(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    texts = {name: first(text) for name, (text, _) in CONFINED.items()} | RIGHT
    texts |= {name: first(text) for name, text in SPARED.items()}
    return graded(texts, tmp_path_factory.mktemp("confined"), Limits(seconds=30))


@pytest.fixture(scope="module")
def endless(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    texts = {name: text for name, (text, _) in ENDLESS.items()}
    return graded(texts, tmp_path_factory.mktemp("endless"), Limits(seconds=1))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_submission_fails_with_its_reason(name, misbehaved):
    found = misbehaved[name]
    assert (found.passed, found.score, found.max_score) == (False, 0, 100)
    assert HOSTILE[name][1] in found.reason


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_earns_no_more_than_the_homework_without_it(name, misbehaved):
    assert misbehaved[name].score <= misbehaved["holes"].score < 30
    assert not misbehaved[name].passed


@pytest.mark.bwrap
@pytest.mark.parametrize("name", CONFINED)
def test_a_sandbox_holds_what_python_cannot(name, confined):
    found = confined[name]
    assert (found.passed, found.score) == (False, 0)
    assert CONFINED[name][1] in found.reason


@pytest.mark.bwrap
@pytest.mark.parametrize("name", [*RIGHT, *SPARED])
def test_nobody_in_a_sandbox_changes_anothers_grade(name, confined):
    assert (confined[name].reason, confined[name].score) == ("", 100)
    assert not OUTSIDE.exists()


def test_without_bubblewrap_submissions_are_graded_all_the_same(tmp_path, monkeypatch):
    texts = {"right": SOLUTION, "ends": HOSTILE["kills_itself"][0], "forged": forged("replaces_the_checks")}
    monkeypatch.setattr(runner, "_Server", OWN)
    monkeypatch.setattr(runner, "sandbox", list)
    found = graded(texts, tmp_path, Limits(seconds=30))
    assert {name: each.score >= 30 for name, each in found.items()} == {"right": True, "ends": False, "forged": False}


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
    words = ["-m", "pipelab", "grade", "all", "--workers", "1", "--seconds", "500", "--save", "all.csv"]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
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
