"""Interrupts while a pipeline is made: no worker thread stays behind. `make fuzz` interrupts at random moments."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
from torch import nn

import pipelab
from pipelab.engine import threads
from pipelab.engine.worker import Outcome, Together, Worker


def ranks() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipelab-rank-")}


def test_a_worker_that_nobody_has_ends():
    worker = Worker("pipelab-rank-0", threads=1)
    thread = worker.thread
    del worker
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_while_the_workers_start_leaves_no_thread(monkeypatch, at):
    class Interrupted(Worker):
        def __init__(self, name, threads):
            super().__init__(name, threads)
            if name.endswith(str(at)):
                raise KeyboardInterrupt

    before = ranks()
    monkeypatch.setattr(threads, "Worker", Interrupted)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        pipelab.Pipeline(model, pipelab.GPipe(4, 2), nn.MSELoss(), devices=["cpu"] * 4)
    started = ranks() - before
    assert len(started) == at + 1
    del interrupt
    gc.collect()  # the interrupt's traceback holds the workers
    for thread in started:
        thread.join(5)
    assert ranks() - before == set()


def test_no_line_of_python_runs_when_a_worker_goes():
    worker, calls = Worker("goes", 1), []
    worker.end()
    worker.join()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    del worker
    sys.setprofile(None)
    assert not calls


def test_the_last_outcome_wakes_the_caller_or_an_error():
    worker, wrong = Worker("done", 1), ValueError("wrong")
    done = Together(3)
    done.put(Outcome(worker, 1, None))
    done.put(Outcome(worker, 2, None))
    assert done.empty()
    done.put(Outcome(worker, 3, None))
    assert done.get().result == 3
    failing = Together(3)
    failing.put(Outcome(worker, None, wrong))
    assert failing.get().error is wrong
    failing.put(Outcome(worker, 2, None))
    assert failing.empty()  # no later outcome passes for the last one
