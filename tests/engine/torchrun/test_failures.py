"""What processes report to each other when something goes wrong, and how one is supervised: in one process."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time

import processes
import pytest
import torch.distributed as dist

import pipelab.engine.torchrun.supervisor
from pipelab import BatchError, RankError, StepTimeoutError, UsageError
from pipelab.engine.torchrun.supervisor import AnsweringStore, Failure, Failures, PublishedStatus, Status, Supervisor

HERE = {"host": "node-a", "processes": "pid:[1]"}


def everyone(*pids):
    return [{**HERE, "pid": pid} for pid in pids]


def all_here(many=2):
    """Return as many processes, which are all this one."""
    return everyone(*[os.getpid()] * many)


def ended_process():
    """Return the number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


class Answers:
    """A store that answers everything alike."""

    def __init__(self, answer):
        self.answer = answer

    def __getattr__(self, name):
        return self.answer


def lost(*_):
    raise dist.DistNetworkError("Connection was likely closed")


GONE = Answers(lost)
"""A store whose process is gone."""


@pytest.fixture
def silent():
    """A store that no network leads to, so that whoever asks it waits; and who has asked it."""
    asked, back = [], threading.Event()
    yield Answers(lambda *given: asked.append(given) or back.wait()), asked
    back.set()


def test_an_answering_store_passes_on_what_the_store_answers_and_raises():
    store = AnsweringStore(dist.HashStore(), timeout=1)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert (store.check(["a"]), store.check(["a", "b"])) == (True, False)
    assert store.compare_set("b", "", "2") == b"2"
    with pytest.raises(dist.DistNetworkError, match="likely closed"):
        AnsweringStore(GONE, timeout=1).check(["a"])


def test_a_store_that_does_not_answer_is_waited_for_once(silent, monkeypatch):
    store, asked = silent
    monkeypatch.setattr("pipelab.engine.torchrun.supervisor._SHORTEST_SECONDS", 0.2)
    failures = Failures(AnsweringStore(store, timeout=0.1), 0, all_here())
    words = "this job's store has not answered for 0.2 s: its host, or the network to it, is gone"
    assert failures.first_failure() == Failure(-1, words, alive=False)
    began = time.monotonic()
    supervisor = Supervisor(0, failures, timeout=50, threads=1)
    with pytest.raises(RankError, match=f"^{words}\n  rank 0 computes$"):
        supervisor.run(lambda: time.sleep(1), Status(lambda: "computes"))
    supervisor.close()
    assert time.monotonic() - began < 20
    assert len(asked) == 1


@pytest.mark.parametrize(("timeout", "seconds"), [(1, 10), (60, 60), (900, 300), (None, 300)])
def test_a_store_may_take_as_long_as_a_step_within_limits(timeout, seconds):
    assert AnsweringStore(dist.HashStore(), timeout).seconds == seconds


def test_the_first_to_fail_is_the_one_that_all_are_told_of():
    store = dist.HashStore()
    first, second = (Failures(store, rank, all_here()) for rank in range(2))
    assert first.first_failure() is None
    told: list[Failure] = []
    telling = threading.Thread(target=lambda: told.append(second.report(1, "rank 1 failed: a bug", alive=True)))
    telling.start()
    while (failure := first.first_failure()) is None:
        time.sleep(0.01)
    first.acknowledge(failure)
    telling.join()
    assert failure == Failure(1, "rank 1 failed: a bug", alive=True)
    assert told == [failure]
    assert first.report(0, "rank 0 failed later", alive=True) == failure


def test_a_process_that_ended_is_gone_and_one_that_closed_its_pipeline_too():
    store = dist.HashStore()
    own, dead = os.getpid(), ended_process()
    assert Failures(store, 0, everyone(own, own, own)).find_dead_rank() is None
    rank, told = Failures(store, 0, everyone(own, own, dead)).find_dead_rank()
    assert (rank, told) == (2, f"rank 2 is gone: process {dead} on node-a was killed, or ended")
    Failures(store, 1, everyone(own, own, own)).announce_exit("it closed its pipeline")
    assert Failures(store, 0, everyone(own, own, own)).find_dead_rank() == (1, "rank 1 is gone: it closed its pipeline")


@pytest.mark.parametrize("elsewhere", [{"host": "node-b"}, {"processes": "pid:[2]"}])
def test_nothing_is_said_of_processes_whose_numbers_mean_nothing_here(elsewhere):
    there = {**HERE, "pid": ended_process(), **elsewhere}
    assert Failures(dist.HashStore(), 0, [*everyone(os.getpid()), there]).find_dead_rank() is None


def test_where_the_store_is_gone_its_holder_is():
    failures = Failures(GONE, 1, all_here())
    assert failures.first_failure().rank == 0
    assert "the process that holds this job's store is gone" in failures.first_failure().message
    assert failures.report(1, "rank 1 failed", alive=True).message == "rank 1 failed"  # it needs no store for that
    failures.acknowledge(failures.first_failure())
    failures.announce_exit("it closed its pipeline")


DROPPED = "its script ended, or dropped its pipeline, without closing it"


def test_a_process_says_that_it_ends_before_others_lose_their_connection_to_it(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    processes.run_well(1, "ends.py", str(tmp_path / "store"))
    assert Failures(store, 0, all_here()).find_dead_rank() == (1, f"rank 1 is gone: {DROPPED}")


def test_a_process_that_drops_its_pipeline_tells_the_others():
    store = dist.HashStore()
    others = Failures(store, 0, all_here())
    supervisor = Supervisor(1, Failures(store, 1, all_here()), timeout=1, threads=1)
    assert others.find_dead_rank() is None
    del supervisor
    gc.collect()
    assert others.find_dead_rank() == (1, f"rank 1 is gone: {DROPPED}")


def test_a_fork_of_a_process_does_not_leave_for_it():
    store = dist.HashStore()
    Failures(store, 0, everyone(os.getpid() + 1)).announce_exit("its script ended")
    assert not store.check(["left/0"])


def test_what_a_process_gave_before_it_left_is_waited_for(monkeypatch):
    monkeypatch.setattr(pipelab.engine.torchrun.supervisor, "_PATIENCE_SECONDS", 0.1)
    store = dist.HashStore()
    Failures(store, 1, all_here()).announce_exit("it closed its pipeline")
    supervisor = Supervisor(0, Failures(store, 0, all_here()), timeout=5, threads=1)
    assert supervisor.run(lambda: time.sleep(0.7) or "arrived", WORKS) == "arrived"
    supervisor.close()


def timed_out(statuses, call=1, computing=False):
    """Return what rank 0 raises after a timeout, and reports, when these are what the other ranks published."""
    store = dist.HashStore()
    pids = all_here(4)
    for rank in (1, 2, 3):
        if rank in statuses:
            Failures(store, rank, pids).publish(PublishedStatus(call, *statuses[rank]))
        store.set(f"done/{rank}", "")  # nobody is waited for
    supervisor = Supervisor(0, Failures(store, 0, pids), timeout=0.3, threads=1)
    with pytest.raises(StepTimeoutError) as error:
        supervisor.run(lambda: time.sleep(0.6), Status(lambda: "waits for rank 1", computing=lambda: computing))
    assert store.check(["status/0"])
    supervisor.close()
    return str(error.value), Failures(store, 1, pids).first_failure()


WAITS, HANGS = ("waits for rank 2", False), ("was running 2F0, at line 7", True)
OWN = r"nothing moved on rank 0 for 0\.\d+ s: it waits for rank 1"
TIMED_OUT = {
    "another hangs": (
        {1: WAITS, 2: HANGS, 3: WAITS},
        {},
        "rank 2 holds up the others: it was running 2F0, at line 7\n  ",
    ),
    "one is silent": ({1: WAITS, 3: WAITS}, {}, "no sign of rank 2 in this call: .*\n  "),
    "all are in an earlier call": (
        dict.fromkeys((1, 2, 3), WAITS),
        {"call": 0},
        "no sign of rank 1, 2, 3 in this call: .*\n  ",
    ),
    "all wait": (dict.fromkeys((1, 2, 3), WAITS), {}, ""),
    "this rank computes": ({2: HANGS}, {"computing": True}, ""),
}


@pytest.mark.parametrize("case", TIMED_OUT)
def test_after_a_timeout_the_rank_that_hangs_or_is_silent_is_named_and_not_the_one_that_waited(case):
    statuses, how, lead = TIMED_OUT[case]
    told, failure = timed_out(statuses, **how)
    assert re.fullmatch(lead + OWN, told)
    named = re.match(r"(?:no sign of )?rank (\d)", told)
    assert (failure.rank, failure.message, failure.alive) == (int(named[1]) if named else 0, told, True)


@pytest.fixture
def supervisor():
    supervisor = Supervisor(0, Failures(dist.HashStore(), 0, all_here(1)), timeout=0.3, threads=1)
    yield supervisor
    supervisor.close()


def raising(error):
    def work():
        raise error

    return work


WORKS = Status(lambda: "was at work")


def test_a_process_ends_well_where_its_store_was_never_asked():
    code = "import torch.distributed as dist; from pipelab.engine.torchrun.supervisor import AnsweringStore"
    code += "; store = AnsweringStore(dist.HashStore(), None)"
    subprocess.run([sys.executable, "-c", code], check=True, env=processes.environment(), timeout=60)


def test_what_is_looked_after_runs_in_a_thread_of_its_own_and_returns(supervisor):
    assert supervisor.run(lambda: threading.current_thread().name, WORKS) == "pipelab-rank-0"


def test_an_error_that_all_processes_raise_alike_ends_nothing_and_any_other_the_pipeline(supervisor):
    with pytest.raises(BatchError, match="all alike"):
        supervisor.run(raising(BatchError("all alike")), WORKS)
    assert supervisor.run(lambda: 5, WORKS) == 5
    with pytest.raises(ZeroDivisionError):
        supervisor.run(raising(ZeroDivisionError("by zero")), WORKS)
    with pytest.raises(UsageError, match="rank 0 failed: ZeroDivisionError: by zero"):
        supervisor.run(lambda: 5, WORKS)


def test_a_lost_connection_is_blamed_on_the_rank_that_a_value_was_exchanged_with(supervisor):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:4711")
    status = Status(lambda: "waits for rank 3", peer=lambda: 3)
    expected = r"^rank 3 is gone: a connection to it was lost .*\n  rank 0 waits for rank 3$"
    with pytest.raises(RankError, match=expected) as told:
        supervisor.run(raising(lost), status)
    assert told.value.rank == 3
    assert told.value.__cause__ is lost


def test_work_that_gets_on_may_take_longer_than_the_timeout(supervisor):
    steps = []

    def work():
        for step in range(6):
            time.sleep(0.1)
            steps.append(step)
        return "done"

    assert supervisor.run(work, Status(lambda: "was at work", progress=lambda: len(steps))) == "done"
    with pytest.raises(StepTimeoutError, match=r"^nothing moved on rank 0 for [\d.]+ s: it was at work$"):
        supervisor.run(lambda: time.sleep(1), WORKS)
