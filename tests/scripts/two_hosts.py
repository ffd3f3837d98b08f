"""A step on two hosts, and one in which rank 2 says "now" and is killed, or slow: by the argument."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import facts
import plain
from torch import nn

import pipelab

what = sys.argv[1]
rank = int(os.environ["RANK"])
x, y = plain.batch(16)


class Odd(nn.Module):
    """Does something odd on one rank of the second host, at the fourth micro-batch once it is time."""

    seen, time_to = 0, False

    def forward(self, value):
        self.seen += self.time_to
        if rank == 2 and self.seen == 4:
            print("now", flush=True)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return value


def say(**more):
    facts.say(rank=rank, host=socket.gethostname(), **more)


layers = list(plain.mlp(8))
stages = [nn.Sequential(*layers[2 * at : 2 * at + 2], Odd()) for at in range(4)]
with pipelab.Pipeline(stages, pipelab.OneFOneB(4, 8), nn.functional.mse_loss, engine="torch", timeout=6) as pipe:
    step = pipe.step(x, y)
    trace = step.trace
    start = {event.action: event.start for event in trace.events}
    end = {event.action: event.end for event in trace.events}
    say(
        clock=time.perf_counter(),
        loss=float(step.loss),
        exact=pipe.verify(x, y).exact,
        makespan=trace.makespan,
        error=step.clock_error_ms,
        note=trace.note,
        earliest=min(start[b] - end[a] for a, b in trace.plan.graph().edges),
    )
    Odd.time_to, began = True, time.monotonic()
    try:
        pipe.step(x, y)
    except pipelab.PipelabError as error:
        say(kind=type(error).__name__, told=str(error), seconds=time.monotonic() - began)
        raise SystemExit(1) from None
