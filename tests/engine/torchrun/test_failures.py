"""What processes tell each other when something goes wrong, and how one is looked after: without any other process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import processes
import pytest
import torch.distributed as dist

import pipelab.engine.torchrun.supervisor
from pipelab import BatchError, RankError, StepTimeoutError, UsageError
from pipelab.engine.torchrun.failures import Notice, Notices
from pipelab.engine.torchrun.store import AnsweringStore
from pipelab.engine.torchrun.supervisor import Doing, Watch, told_before_the_end

HERE = {"host": "node-a", "processes": "pid:[1]"}


def everyone(*pids):
    return [{**HERE, "pid": pid} for pid in pids]


def ended_process():
    """Return the number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


class Gone:
    """A store whose process is gone."""

    def __getattr__(self, name):
        def lost(*_):
            raise dist.DistNetworkError("Connection was likely closed")

        return lost


class Silent:
    """A store that no network leads to: whoever asks it waits."""

    def __init__(self):
        self.asked = 0
        self.back = threading.Event()

    def __getattr__(self, name):
        def stuck(*_):
            self.asked += 1
            self.back.wait()

        return stuck


@pytest.fixture
def silent():
    store = Silent()
    yield store
    store.back.set()


def test_an_answering_store_passes_on_what_the_store_answers_and_raises():
    store = AnsweringStore(dist.HashStore(), timeout=1)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.compare_set("b", "", "2") == b"2"
    with pytest.raises(dist.DistNetworkError, match="likely closed"):
        AnsweringStore(Gone(), timeout=1).check(["a"])


def test_a_store_that_does_not_answer_is_waited_for_once(silent, monkeypatch):
    monkeypatch.setattr("pipelab.engine.torchrun.store._SHORTEST_SECONDS", 0.2)
    notices = Notices(AnsweringStore(silent, timeout=0.1), 0, everyone(os.getpid(), os.getpid()))
    words = "this job's store has not answered for 0.2 s: its host, or the network to it, is gone"
    assert notices.news() == Notice(-1, words, alive=False)
    began = time.monotonic()
    watch = Watch(0, notices, timeout=50, threads=1)
    with pytest.raises(RankError, match=f"^{words}\n  rank 0 computes$"):
        watch.attend(lambda: time.sleep(1), Doing(lambda: "computes"))
    watch.close()
    assert time.monotonic() - began < 20
    assert silent.asked == 1


@pytest.mark.parametrize(("timeout", "seconds"), [(1, 10), (60, 60), (900, 300), (None, 300)])
def test_a_store_may_take_as_long_as_a_step_within_limits(timeout, seconds):
    assert AnsweringStore(dist.HashStore(), timeout).seconds == seconds


def test_the_first_to_fail_is_the_one_that_all_are_told_of():
    store = dist.HashStore()
    first, second = (Notices(store, rank, everyone(os.getpid(), os.getpid())) for rank in range(2))
    assert first.news() is None
    told: list[Notice] = []
    telling = threading.Thread(target=lambda: told.append(second.tell(1, "rank 1 failed: a bug", alive=True)))
    telling.start()
    while (notice := first.news()) is None:
        time.sleep(0.01)
    first.hear(notice)
    telling.join()
    assert notice == Notice(1, "rank 1 failed: a bug", alive=True)
    assert told == [notice]
    assert first.tell(0, "rank 0 failed later", alive=True) == notice


def test_a_process_that_ended_is_gone_and_one_that_closed_its_pipeline_too():
    store = dist.HashStore()
    own, dead = os.getpid(), ended_process()
    assert Notices(store, 0, everyone(own, own, own)).gone() is None
    rank, told = Notices(store, 0, everyone(own, own, dead)).gone()
    assert (rank, told) == (2, f"rank 2 is gone: process {dead} on node-a was killed, or ended")
    Notices(store, 1, everyone(own, own, own)).leave("it closed its pipeline")
    assert Notices(store, 0, everyone(own, own, own)).gone() == (1, "rank 1 is gone: it closed its pipeline")


@pytest.mark.parametrize("elsewhere", [{"host": "node-b"}, {"processes": "pid:[2]"}])
def test_nothing_is_said_of_processes_whose_numbers_mean_nothing_here(elsewhere):
    there = {**HERE, "pid": ended_process(), **elsewhere}
    assert Notices(dist.HashStore(), 0, [*everyone(os.getpid()), there]).gone() is None


def test_where_the_store_is_gone_its_holder_is():
    notices = Notices(Gone(), 1, everyone(os.getpid(), os.getpid()))
    assert notices.news().rank == 0
    assert "the process that holds this job's store is gone" in notices.news().told
    assert notices.tell(1, "rank 1 failed", alive=True).told == "rank 1 failed"  # who fails knows it without a store
    notices.hear(notices.news())
    notices.leave("it closed its pipeline")


ENDS = """
import os, sys
import torch.distributed as dist
from pipelab.engine.torchrun.failures import Notices
from pipelab.engine.torchrun.supervisor import Watch

facts = {"pid": os.getpid(), "host": "node-a", "processes": "pid:[1]"}
notices = Notices(dist.FileStore(sys.argv[1], 2), 1, [facts, facts])
watch = Watch(1, notices, timeout=1, threads=1)
"""


def test_a_process_says_that_it_ends_before_others_lose_their_connection_to_it(tmp_path):
    file = str(tmp_path / "store")
    store = dist.FileStore(file, 2)
    subprocess.run([sys.executable, "-c", ENDS, file], check=True, env=processes.environment(), timeout=60)
    assert Notices(store, 0, everyone(os.getpid(), os.getpid())).gone() == (1, "rank 1 is gone: its script ended")


def test_a_process_that_lets_go_of_its_pipeline_says_that_and_not_that_it_ends():
    store = dist.HashStore()
    own, others = os.getpid(), Notices(store, 0, everyone(os.getpid(), os.getpid()))
    watch = Watch(1, Notices(store, 1, everyone(own, own)), timeout=1, threads=1)
    assert others.gone() is None
    del watch
    gc.collect()
    assert others.gone() == (1, "rank 1 is gone: it let go of its pipeline, which it did not close")


def test_a_fork_of_a_process_does_not_leave_for_it():
    store = dist.HashStore()
    Notices(store, 0, everyone(os.getpid() + 1)).leave("its script ended")
    assert not store.check(["left/0"])


def test_what_a_process_gave_before_it_left_is_waited_for(monkeypatch):
    monkeypatch.setattr(pipelab.engine.torchrun.supervisor, "_PATIENCE_SECONDS", 0.1)
    store = dist.HashStore()
    pids = everyone(os.getpid(), os.getpid())
    Notices(store, 1, pids).leave("it closed its pipeline")
    watch = Watch(0, Notices(store, 0, pids), timeout=5, threads=1)
    assert watch.attend(lambda: time.sleep(0.7) or "arrived", WORKS) == "arrived"
    watch.close()


def test_a_process_that_waits_too_long_names_those_who_have_not_come():
    store = dist.HashStore()
    pids = everyone(*[os.getpid()] * 4)
    for rank, number in ((1, 1), (3, 1)):
        Notices(store, rank, pids).wait(number)
    for rank in (1, 2, 3):
        Notices(store, rank, pids).hear(Notice(0, "it waits too long", alive=True))  # nobody is waited for
    watch = Watch(0, Notices(store, 0, pids), timeout=0.3, threads=1)
    doing = Doing(lambda: "waits for all processes in step(x, y)")
    with pytest.raises(StepTimeoutError, match=r"in step\(x, y\); rank 2 has not come to this call$"):
        watch.attend(lambda: time.sleep(0.6), doing)
    assert store.get("waits/0") == b"1"
    watch.close()
    store.delete_key("failed")
    watch = Watch(0, Notices(store, 0, pids), timeout=0.3, threads=1)
    doing = Doing(lambda: "waits for what 1F0 on rank 2 gives", together=lambda: True)
    words = "gives; rank 2 came to this call and has said nothing since: it is stopped, cut off, or in C code that lets"
    with pytest.raises(StepTimeoutError, match=words):
        watch.attend(lambda: time.sleep(0.6), doing)
    assert Notices(store, 0, pids).absent(2) == [1, 2, 3]
    watch.close()


@pytest.fixture
def watch():
    watch = Watch(0, Notices(dist.HashStore(), 0, everyone(os.getpid())), timeout=0.3, threads=1)
    yield watch
    watch.close()


def raising(error):
    def work():
        raise error

    return work


WORKS = Doing(lambda: "was at work")


def test_a_process_ends_well_where_its_store_was_never_asked():
    code = "import torch.distributed as dist; from pipelab.engine.torchrun.store import AnsweringStore"
    code += "; store = AnsweringStore(dist.HashStore(), None)"
    subprocess.run([sys.executable, "-c", code], check=True, env=processes.environment(), timeout=60)


def test_what_is_looked_after_runs_in_a_thread_of_its_own_and_returns(watch):
    name = watch.attend(lambda: threading.current_thread().name, WORKS)
    assert name == "pipelab-rank-0"
    assert watch.attend(lambda: 5, WORKS) == 5


def test_an_error_that_all_processes_raise_alike_ends_nothing(watch):
    with pytest.raises(BatchError, match="all alike"):
        watch.attend(raising(BatchError("all alike")), WORKS)
    assert watch.attend(lambda: 5, WORKS) == 5


def test_any_other_error_ends_the_pipeline(watch):
    with pytest.raises(ZeroDivisionError):
        watch.attend(raising(ZeroDivisionError("by zero")), WORKS)
    with pytest.raises(UsageError, match="rank 0 failed: ZeroDivisionError: by zero"):
        watch.attend(lambda: 5, WORKS)


def test_a_lost_connection_is_blamed_on_the_rank_that_a_value_was_exchanged_with(watch):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:4711")
    doing = Doing(lambda: "waits for rank 3", meets=lambda: 3)
    expected = r"^rank 3 is gone: a connection to it was lost .*\n  rank 0 waits for rank 3$"
    with pytest.raises(RankError, match=expected) as told:
        watch.attend(raising(lost), doing)
    assert told.value.rank == 3
    assert told.value.__cause__ is lost


def test_work_that_gets_on_may_take_longer_than_the_timeout(watch):
    steps = []

    def work():
        for step in range(6):
            time.sleep(0.1)
            steps.append(step)
        return "done"

    assert watch.attend(work, Doing(lambda: "was at work", progress=lambda: len(steps))) == "done"
    with pytest.raises(StepTimeoutError, match=r"^nothing moved on rank 0 for [\d.]+ s: it was at work$"):
        watch.attend(lambda: time.sleep(1), WORKS)


TERMINATED = """
import io, signal, sys, time
from pipelab.engine.torchrun.supervisor import told_before_the_end

if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: (print("mine too", flush=True), sys.exit(7)))
with told_before_the_end(lambda: "rank 0 waits for rank 1"):
    if sys.argv[1] == "elsewhere":
        sys.stderr = io.StringIO()
    print("ready", flush=True)
    time.sleep(20)
"""


def terminated(case):
    """Return how a process ended that was sent a SIGTERM: its exit code, and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, case],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=processes.environment(),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


LAST_WORDS = "pipelab: told to stop (SIGTERM): rank 0 waits for rank 1\n"


def test_a_sigterm_is_obeyed_after_the_last_words():
    assert terminated("none") == (-signal.SIGTERM, "", LAST_WORDS)
    assert terminated("own") == (7, "mine too\n", LAST_WORDS)


def test_last_words_are_not_lost_in_a_traceback_that_is_being_written():
    """PyTorch's hook for exceptions has `sys.stderr` collect the text, to write a rank before each line."""
    assert terminated("elsewhere") == (-signal.SIGTERM, "", LAST_WORDS)


def test_a_sigterm_is_obeyed_where_nothing_can_be_said(monkeypatch):
    """As where the signal comes in the middle of a write, which Python does not enter again."""

    class Busy:
        def write(self, words):
            raise RuntimeError(f"reentrant call, of {words!r}")

    obeyed = []
    before = signal.signal(signal.SIGTERM, lambda *_: obeyed.append(True))
    try:
        monkeypatch.setattr(sys, "stderr", Busy())
        with told_before_the_end(lambda: "rank 0 waits for rank 1"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert obeyed == [True]


def test_of_processes_told_to_stop_one_after_the_other_each_names_the_one_that_was_gone_first(capsys):
    """torchrun stops the others where one was killed: for the last of them, several are gone."""
    store, own, dead = dist.HashStore(), os.getpid(), ended_process()
    seen_by = {1: everyone(own, own, dead, own), 3: everyone(own, dead, dead, own)}
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # this script goes on
    try:
        for rank, seen in seen_by.items():
            watch = Watch(rank, Notices(store, rank, seen), timeout=None, threads=1)
            words = f"rank 2 is gone: process {dead} on node-a was killed, or ended\n  rank {rank} computes"
            with pytest.raises(RankError, match=f"^{words}$"):
                watch.attend(lambda: os.kill(own, signal.SIGTERM) or time.sleep(5), Doing(lambda: "computes"))
            assert capsys.readouterr().err == f"pipelab: told to stop (SIGTERM): {words}\n"
    finally:
        signal.signal(signal.SIGTERM, before)
