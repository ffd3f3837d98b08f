"""When a process of several goes wrong: all others end soon, and name it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import processes
import pytest

pytestmark = pytest.mark.dist

FAULTS = '''
import json, os, signal, threading, time
import plain, torch
from torch import nn
import pipelab
from pipelab import GPipe, OneFOneB, Pipeline

mse = nn.functional.mse_loss
rank = int(os.environ["RANK"])
odd = rank == 1
x, y = plain.batch(12)


def attempt(case, act, **settings):
    """Say how a case ends on this process, and after how long."""
    began = time.monotonic()
    try:
        act(**settings)
        told = kind = ""
    except BaseException as error:
        kind, told = type(error).__name__, str(error)
    print(json.dumps({"case": case, "kind": kind, "told": told, "seconds": time.monotonic() - began}), flush=True)


def pipeline(model=None, plan=None, **settings):
    return Pipeline(model or plain.mlp(6), plan or OneFOneB(3, 4), mse, engine="torch", **{"timeout": 60} | settings)


# --- before anything communicates
version = torch.__version__
torch.__version__ = "2.9.1" if odd else version
attempt("version", pipeline)
torch.__version__ = version
attempt("plan", lambda: pipeline(plan=GPipe(3, 4) if odd else None))
attempt("sizes", lambda: pipeline(plan=OneFOneB(3, 5) if odd else None))
attempt("ranks", lambda: pipeline(plan=OneFOneB(2, 4) if odd else None, timeout=1))
attempt("all ranks", lambda: pipeline(plan=OneFOneB(2, 4)))
attempt("model", lambda: pipeline(model=plain.mlp(6, width=8) if odd else None))
attempt("reduction", lambda: pipeline(reduction="sum" if odd else "mean"))
attempt("buffers", lambda: pipeline(replicated_buffers="lowest" if odd else "refuse"))


# --- all the same, and then not
def disagree():
    with pipeline() as pipe:
        pipe.step(x, y)
        attempt("another call", lambda: pipe.state_dict() if odd else pipe.step(x, y))
        attempt("another batch", lambda: pipe.step(*plain.batch(11 if odd else 12)))
        attempt("other rows", lambda: pipe.step(*plain.batch(12, seed=7 if odd else 1)))
        attempt("another mode", lambda: pipe.forward(x) if odd else pipe.eval().forward(x))
        pipe.train()
        pipe.step(x, y)  # as if nothing had been


attempt("disagree", disagree)


class Odd(nn.Module):
    """Does something odd on rank 1, at the so-many-th micro-batch, of which the first is to learn shapes; or at all."""

    def __init__(self, what, at):
        super().__init__()
        self.what, self.at, self.seen = what, at, 0

    def forward(self, value):
        self.seen += 1
        if odd and self.at in (self.seen, None):
            value = self.what(value)
        return value


def raises(value):
    raise ValueError("a bug of mine")


def run(what, at=6, **settings):
    layers = list(plain.mlp(6))
    stages = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:4], Odd(what, at)), nn.Sequential(*layers[4:])]
    with pipeline(stages, **settings) as pipe:
        for _ in range(4):
            pipe.step(x, y)


attempt("raises", lambda: run(raises))
attempt("narrow", lambda: run(lambda value: value[:, :4], at=None))
attempt("narrow later", lambda: run(lambda value: value[:, :4]))


class Reuses(nn.Module):
    """Gives every micro-batch in the same memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("room", torch.zeros(3, 6))

    def forward(self, value):
        return self.room.copy_(value.detach())


def overwrites():
    with pipeline([nn.Linear(6, 6), Reuses(), nn.Linear(6, 6)]) as pipe:
        pipe.step(x, y)


attempt("overwrites", overwrites)
attempt("hangs", lambda: run(lambda value: time.sleep(2) or value, timeout=0.8))


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background


def interrupted(value):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    return value


attempt("interrupted", lambda: run(interrupted))


def leaves():
    with pipeline() as pipe:
        pipe.step(x, y)
        if not odd:
            pipe.step(x, y)


attempt("leaves", leaves)


def script_raises():
    with pipeline() as pipe:
        pipe.step(x, y)
        if odd:
            raise KeyError("a slip of mine")
        pipe.step(x, y)


attempt("script", script_raises)

# --- and at last, one does not even begin
attempt("absent", lambda: time.sleep(2) if odd else pipeline(timeout=0.5))
'''


@pytest.fixture(scope="module")
def ends():
    """How each case ended on each of three processes."""
    ended = processes.run_in(3, FAULTS, seconds=200)
    assert [each.code for each in ended] == [0] * 3, processes.shown(ended)
    assert [each.err for each in ended] == [""] * 3
    facts = [{fact["case"]: fact for fact in map(json.loads, each.out.splitlines())} for each in ended]

    def of(case):
        return [each[case] for each in facts]

    return of


def assert_told(facts, kind, told):
    """Assert that every process raised this kind of error with these words."""
    for fact in facts:
        assert fact["kind"] == kind, fact
        assert re.search(told, fact["told"]), fact


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("version", r"^rank 1 has torch 2\.9\.1, rank 0 has torch [\d.]+$"),
        ("plan", r"^rank 1 has a plan with 0F3 at position 3 of row 0, rank 0 has a plan with 0B0 at "),
        ("sizes", r"3 ranks, 3 stages, 5 micro-batches, rank 0 has a plan with 3 ranks, 3 stages, 4 micro-batches$"),
        (
            "model",
            r"^rank 1 has a model with 0\.weight of stage 0: \[8, 8\] float32, rank 0 has",
        ),
        ("reduction", r"^rank 1 has reduction sum, rank 0 has reduction mean$"),
        ("buffers", r"^rank 1 has replicated_buffers lowest, rank 0 has replicated_buffers refuse$"),
    ],
)
def test_what_differs_between_processes_is_told_on_all_of_them_before_they_connect(ends, case, told):
    assert_told(ends(case), "RankError", told)


def test_a_process_that_refuses_its_plan_is_missed_by_those_who_were_given_another(ends):
    first, odd, last = ends("ranks")
    told = "the plan has 2 ranks and torchrun started 3 processes: there must be one process per rank"
    assert_told([odd], "EngineError", f"^{told}")
    assert_told([first, last], "RankError", "^rank 1 made no Pipeline within 1")
    assert_told(ends("all ranks"), "EngineError", f"^{told}")


def test_a_process_that_makes_no_pipeline_is_missed(ends):
    first, absent, last = ends("absent")
    assert_told([first, last], "RankError", r"^rank 1 made no Pipeline within 0\.\d+ s")
    assert absent["kind"] == ""


ABSENT = """
import os, sys, time
import plain
from torch import nn
import pipelab

os.environ["WORLD_SIZE"] = "3"  # the others do not come
if sys.argv[1:] == ["only rank 1"]:
    os.environ["RANK"] = "1"
elif sys.argv[1:] == ["no port"]:
    del os.environ["MASTER_PORT"]
try:
    pipelab.Pipeline(plain.mlp(6), pipelab.GPipe(3, 3), nn.functional.mse_loss, engine="torch", timeout=1)
except pipelab.EngineError as error:
    print(error)
    if sys.argv[1:] == ["no rank 2"] and os.environ["RANK"] == "0":
        time.sleep(2)  # the store is here, and rank 1 still asks it
"""


@pytest.mark.parametrize(
    ("case", "come", "told"),
    [
        ("no rank 2", 2, r"rank 2 made no Pipeline within 1"),
        ("only rank 1", 1, r"rank 0 has not opened a store at 127\.0\.0\.1:\d+, where all processes meet: "),
        ("no port", 1, r"MASTER_ADDR='127\.0\.0\.1' and MASTER_PORT='' do not say where rank 0 is"),
    ],
)
def test_where_rank_0_holds_the_store_too_processes_that_do_not_come_are_missed(case, come, told):
    """Such as under mpirun; torchrun has a store of its own."""
    ended = processes.run_in(come, ABSENT, case)
    assert [bool(re.match(told, each.out)) for each in ended] == [True] * come, processes.shown(ended)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "another call",
            r"^rank 1: state_dict\(\).*; rank 0: step\(x, y\)",
        ),
        (
            "another batch",
            r"^rank 1: x 3 x \[3, 6\] \w+ and 1 x \[2, 6\] \w+; y [^;]*; weights [^;]*; rank 0: x 4 x ",
        ),
        (
            "other rows",
            r"^rank 1 has other rows than rank 0, of the same shape: .*\n  try: no DistributedSampler",
        ),
        ("another mode", r"^rank 1: modes train train train; rank 0: modes eval eval eval\n"),
    ],
)
def test_processes_that_do_not_mean_the_same_step_all_refuse_it_and_go_on(ends, case, told):
    assert_told(ends(case), "BatchError", told)
    assert [fact["kind"] for fact in ends("disagree")] == [""] * 3


def test_a_stage_that_raises_is_told_on_every_process_with_what_it_was_waiting_for(ends):
    first, failed, last = ends("raises")
    lead = r"^1F0 on rank 1 failed: ValueError: a bug of mine\n  stage 1, micro-batch 0, on cpu\n  in layer 2, Odd\(\)"
    lead += r"\n  at .*script\.py, "
    assert_told([failed], "StageError", lead)
    assert_told([first, last], "RankError", lead)
    assert re.search(
        r"\n  rank 0 waits, before 0B0 \(stage 0, position 3\), for .*, given by 1B0 on rank 1$", first["told"]
    )
    assert re.search(
        r"\n  rank 2 waits, before 2F0 \(stage 2, position 0\), for .*, given by 1F0 on rank 1$", last["told"]
    )


def test_shapes_that_do_not_fit_are_found_before_they_are_sent(ends):
    told = r"^2F0 on rank 2 failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied \(3x4 and 6x6\)"
    first, second, third = ends("narrow")
    assert_told([third], "StageError", told)
    assert_told([first, second], "RankError", told)
    told = r"^1F0 on rank 1 returned \[3, 4\] float32, .* of 3 rows it returned \[3, 6\] float32: "
    first, second, third = ends("narrow later")
    assert_told([second], "StageError", told)
    assert_told([first, third], "RankError", told)


def test_what_is_overwritten_after_it_was_given_is_refused_as_it_may_leave_before_or_after(ends):
    first, failed, last = ends("overwrites")
    told = r"^1F\d on rank 1 (returned a tensor that stage 1 wrote into|failed: the stage wrote into its output)"
    assert_told([failed], "StageError", told)
    assert_told([first, last], "RankError", told)


def test_a_stage_that_hangs_is_given_up_on_every_process(ends):
    for fact in ends("hangs"):
        assert fact["kind"] in ("StepTimeoutError", "RankError")
        assert re.search(r"^(nothing moved on rank 1 for 0\.\d+ s|rank 1 holds up the others): it ", fact["told"])
        assert re.search(
            r": it was running 1F0 \(stage 1, position 0\), at .*script\.py, line .*time\.sleep", fact["told"]
        )


def test_an_interruption_is_told_to_the_others(ends):
    first, interrupted, last = ends("interrupted")
    assert interrupted["kind"] == "KeyboardInterrupt"
    assert_told([first, last], "RankError", r"^rank 1 was interrupted \(KeyboardInterrupt\)\n  rank \d waits, before ")


def test_a_process_that_leaves_is_missed(ends):
    first, left, last = ends("leaves")
    assert left["kind"] == ""
    told = (
        r"^rank 1 is gone: it closed its pipeline without this call, which every process must make\n"
        r"  rank \d waits for all processes in step\(x, y\)$"
    )
    assert_told([first, last], "RankError", told)


def test_a_script_that_fails_between_steps_is_told_to_the_others(ends):
    first, failed, last = ends("script")
    assert failed["kind"] == "KeyError"
    assert_told([first, last], "RankError", r"^rank 1 is gone: its script raised KeyError\('a slip of mine'\)\n  rank ")


def test_nobody_waits_long(ends):
    """Generous, for a busy machine: what is waited for at most adds up to it."""
    for case in ("raises", "narrow", "narrow later", "hangs", "interrupted", "leaves", "script"):
        assert max(fact["seconds"] for fact in ends(case)) < 40, case


KILLED = """
import os, signal, sys
import plain, torch
from torch import nn
import pipelab

rank = int(os.environ["RANK"])


class Dies(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, value):
        self.seen += 1
        if rank == 1 and self.seen == 8:  # 1F2 of the second step (one forward was to learn shapes): others are in it
            os.kill(os.getpid(), signal.SIGKILL)
        return value


ranks = int(os.environ["WORLD_SIZE"])
stages = [nn.Sequential(nn.Linear(6, 6), Dies()) for _ in range(ranks)]
with pipelab.Pipeline(stages, pipelab.OneFOneB(ranks, 4), nn.functional.mse_loss, engine="torch", timeout=60) as pipe:
    for _ in range(4):
        pipe.step(*plain.batch(8))
"""


GONE = r"rank 1 is gone: process \d+ on \S+ was killed, or ended"


def without_prefix(text):
    """Return tracebacks without the rank that PyTorch writes before each of their lines."""
    return re.sub(r"^\[rank\d\]: ", "", text, flags=re.MULTILINE)


def test_a_process_that_is_killed_is_named_by_all_others():
    ended = processes.run_in(3, KILLED)
    assert [each.code for each in ended] == [1, -9, 1], processes.shown(ended)
    for rank in (0, 2):
        told = rf"RankError: {GONE}\n  rank {rank} (waits|was)\b.*rank \d"
        assert re.search(told, without_prefix(ended[rank].err)), processes.shown(ended)


def launched(tmp_path, script, ranks):
    """Return what `pipelab launch` of a script that fails wrote to standard error."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "pipelab", "launch", str(file), "--ranks", str(ranks)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=processes.environment(), check=False
    )
    assert found.returncode == 1
    started = f"torchrun --standalone --nproc-per-node {ranks} -m pipelab.engine.torchrun.launch {file}"
    assert found.stdout.splitlines()[0] == started
    return found.stderr


def test_launch_says_at_the_end_which_process_was_killed(tmp_path):
    assert "\npipelab: rank 1 ended first, killed by SIGKILL" in launched(tmp_path, KILLED, 3)


def test_launch_says_at_the_end_which_rank_hangs_and_at_which_line(tmp_path):
    hangs = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(60)").replace("timeout=60", "timeout=2")
    said = launched(tmp_path, hangs.replace("import os, signal, sys", "import os, sys, time"), 3)
    last = said[said.index("\npipelab: ") :]
    assert "StepTimeoutError: " in last
    assert re.search(r"rank 1( holds up the others| for [\d.]+ s): it was running 1F2 .*line \d+, in forward: ", last)


STOPPED = """
import os, signal, subprocess
import plain, pipelab
from torch import nn

rank = int(os.environ["RANK"])
with pipelab.Pipeline(plain.mlp(3), pipelab.OneFOneB(3, 4), nn.MSELoss(), engine="torch", timeout=2) as pipe:
    pipe.step(*plain.batch(8))
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {os.getpid()}"])  # nobody else would end it
        os.kill(os.getpid(), signal.SIGSTOP)
    pipe.step(*plain.batch(8))
"""


def test_a_process_that_is_stopped_is_named_and_the_others_end():
    ended = processes.run_in(3, STOPPED)
    assert [each.code for each in ended] == [1, -9, 1], processes.shown(ended)
    for rank in (0, 2):
        told = r"(StepTimeout|Rank)Error: no sign of rank 1 in this call: "
        assert re.search(told, without_prefix(ended[rank].err)), processes.shown(ended)


KILLED_ELSEWHERE = """
import os, signal, time
import plain, torch
from torch import nn
import pipelab
from pipelab.engine.torchrun import start

rank = int(os.environ["RANK"])
info = start.process_info()
start.process_info = lambda: info | {"processes": f"host {rank}"}  # nobody can look for the processes of other hosts


class Acts(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage, self.seen = stage, 0

    def forward(self, value):
        self.seen += 1
        if self.stage == 2 and self.seen == 5:  # 2F0 of the second step
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stage == 1 and self.seen == 7:  # 1F1, as one forward was to learn shapes: meanwhile
            time.sleep(0.7)
        if self.stage == 0 and self.seen == 8:  # 0F2: for which rank 1 would wait next
            time.sleep(2.5)
        return value


stages = [nn.Sequential(nn.Linear(6, 6), Acts(stage)) for stage in range(3)]
with pipelab.Pipeline(stages, pipelab.GPipe(3, 4), nn.functional.mse_loss, engine="torch", timeout=60) as pipe:
    for _ in range(2):
        pipe.step(*plain.batch(8))
"""


def test_a_rank_that_cannot_be_sent_to_is_named_and_not_the_one_that_is_waited_for_next():
    ended = processes.run_in(3, KILLED_ELSEWHERE)
    for rank in (0, 1):
        told = without_prefix(ended[rank].err)
        assert "RankError: rank 2 is gone: a connection to it was lost" in told, processes.shown(ended)
