"""Where one of several processes fails, the last words say which one, and why."""

from __future__ import annotations

import json
import subprocess
import sys

import processes
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipelab.engine.torchrun.launch import decisive, run_script

STAGE = "StageError: 2F1 on rank 2 failed: ValueError: odd\n  stage 2, micro-batch 1, on cpu"
HEARD = "RankError: rank 2 is gone: process 7 on here was killed, or ended\n  rank 1 waits"


@pytest.fixture
def failure(tmp_path):
    """Make how a process ended: its exit code, and the error that it left, if it left one."""

    def made(rank, code, words=None, second=100, stack=""):
        path = tmp_path / f"{rank}.json"
        if words is not None:
            extra = {"py_callstack": stack, "timestamp": str(second)}
            path.write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}))
        found = ProcessFailure(rank, 1000 + rank, code, str(path))
        found.timestamp = second
        return found

    return made


def test_the_first_error_of_a_process_itself_is_repeated(failure):
    later = failure(3, 1, "KeyError: 'x'", second=101)
    failures = {0: failure(0, -15), 1: failure(1, 1, HEARD, second=99), 2: failure(2, 1, STAGE), 3: later}
    assert decisive(failures) == f"pipelab: rank 2 failed first:\n{STAGE}"


def test_an_error_that_several_processes_raised_is_repeated_once_with_their_ranks(failure):
    words = "NameError: name 'modell' is not defined"
    same = {rank: failure(rank, code, words, second=99 + rank) for rank, code in ((0, -15), (1, 1), (3, 1))}
    assert decisive(same | {2: failure(2, -15)}) == f"pipelab: rank 0, 1, 3 failed first:\n{words}"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-9, "killed by SIGKILL, as the system does where memory runs out"),
        (-11, "killed by SIGSEGV"),
        (-99, "killed by signal 99"),
        (7, "with exit code 7: what it printed, if anything, is above"),
    ],
)
def test_where_nobody_said_anything_the_one_that_ended_first_is_named(failure, code, how):
    failures = {0: failure(0, -15), 1: failure(1, -15), 2: failure(2, code, second=102)}
    assert decisive(failures) == f"pipelab: rank 2 ended first, {how}"


def test_how_a_process_ended_counts_more_than_what_others_report_of_it(failure):
    failures = {1: failure(1, 1, HEARD), 2: failure(2, -11), 0: failure(0, -15)}
    assert decisive(failures) == "pipelab: rank 2 ended first, killed by SIGSEGV"
    ended = {0: failure(0, -15), 1: failure(1, 1, HEARD)}  # torchrun's own SIGTERM is no beginning
    assert decisive(ended) == f"pipelab: rank 1 says:\n{HEARD}"


def test_a_process_that_waited_in_vain_is_not_called_the_one_that_failed(failure):
    words = "StepTimeoutError: rank 0 holds up the others: it was running 0F0\n  nothing moved on rank 1: it waits"
    assert decisive({1: failure(1, 1, words)}) == f"pipelab: a call timed out:\n{words}"


def test_sigterm_counts_where_there_is_nothing_else(failure):
    assert decisive({1: failure(1, -15)}) == "pipelab: rank 1 ended first, killed by SIGTERM"


def test_the_line_of_the_script_that_raised_is_added_to_an_error_that_names_none(failure):
    stack = 'Traceback (most recent call last):\n  File "mine.py", line 7, in train\n    1 / 0\n'
    stack += f'  File "{json.__file__}", line 9, in loads\nZeroDivisionError: by zero\n'
    told = decisive({1: failure(1, 1, "ZeroDivisionError: by zero", stack=stack)})
    assert told == "pipelab: rank 1 failed first:\nZeroDivisionError: by zero\n  at mine.py, line 7, in train"
    assert decisive({2: failure(2, 1, STAGE + "\n  at x.py, line 3", stack=stack)}).endswith("\n  at x.py, line 3")


# --- the whole


def test_a_script_is_run_as_python_runs_it_and_its_error_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("told = 'beside'")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside\nraise ValueError(__name__, beside.told, sys.argv[1:])")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["launch.py", str(script), "--steps", "3"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(ValueError, match="__main__"):
        run_script()
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: ('__main__', 'beside', ['--steps', '3'])"


def test_importing_pipelab_sets_no_hook_of_the_interpreter():
    code = "import sys; hook = sys.excepthook; import pipelab; assert sys.excepthook is hook is sys.__excepthook__"
    env = processes.environment(TORCHELASTIC_ERROR_FILE="error.json")
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


@pytest.mark.dist
def test_launch_says_that_a_rank_ended_without_an_error(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, time\nif os.environ['RANK'] != '1':\n    time.sleep(60)\nos._exit(7)\n"
    )
    assert "\npipelab: rank 1 ended first, with exit code 7" in processes.launched(2, tmp_path / "train.py").stderr


@pytest.mark.dist
def test_launch_repeats_at_the_end_what_failed(tmp_path):
    script, end = tmp_path / "train.py", "raise ValueError('odd')"
    script.write_text(f"import os, time\nimport pipelab\nif os.environ['RANK'] != '1':\n    time.sleep(60)\n{end}\n")
    found = processes.launched(2, script)
    assert found.returncode == 1
    assert found.stderr.endswith(f"\nValueError: odd\n  at {script}, line 5, in <module>: {end}\n")
    assert "pipelab: rank 1 " in found.stderr
    assert "FAILED" not in found.stderr  # nor is there torchrun's own report


@pytest.mark.dist
def test_an_error_of_all_processes_has_one_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import pipelab\nraise ValueError('odd')\n")
    found = processes.launched(2, script)
    assert found.stderr.count("Traceback") == 1, found.stderr
    assert found.stderr.count("ValueError: odd") == 2  # and in the last lines


@pytest.mark.dist
def test_a_schedule_that_every_process_refuses_is_explained_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import pipelab, torch\n"
        "plan = pipelab.Plan.parse(['0B0 0F0', '1F0 1B0'])\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
        "pipelab.Pipeline(model, plan, torch.nn.MSELoss(), engine='torch')\n"
    )
    found = processes.launched(2, script)
    assert found.returncode == 1
    assert (found.stdout + found.stderr).count("unordered: 0B0 on rank 0") == 1, found.stderr
    assert f"{script}, line 4" in found.stderr.partition("failed first:\nScheduleError: 1 fault")[2]
