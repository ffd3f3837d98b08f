"""Attacks with Ctrl-C: one interrupt at a random moment, in a step or while the pipeline is made."""

from __future__ import annotations

import gc
import signal
import threading
import time
from random import Random

import torch
from torch import nn

import pipelab

SECONDS = 2.0
"""How long an interrupted step or constructor may go on."""
KINDS = (pipelab.GPipe, pipelab.OneFOneB, pipelab.ZBH1)


def fuzz_interrupts(number: int) -> str | None:
    """Interrupt steps or constructors: each ends soon, the next step is right, and no thread stays behind."""
    random = Random(number)
    before = set(threading.enumerate())
    ranks, kind = random.randint(2, 4), random.choice(KINDS)
    model = nn.Sequential(*(layer for _ in range(ranks) for layer in (nn.Linear(64, 64), nn.ReLU())))
    x, y = torch.randn(16, 64), torch.randn(16, 64)

    def make() -> pipelab.Pipeline:
        return pipelab.Pipeline(model, kind(ranks, 8), nn.MSELoss(), devices=["cpu"] * ranks)

    def make_and_close() -> None:
        make().close()

    with make() as pipe:
        pipe.step(x, y)  # the first one takes longer
        attacked = random.choice([lambda: pipe.step(x, y), make_and_close])
        start = time.monotonic()
        attacked()
        late = _interrupted(attacked, random.random() * 1.2 * (time.monotonic() - start))
        if late > SECONDS:
            return f"an interrupt took {late:.1f} s"
        model.zero_grad()
        pipe.step(x, y)
        pipe.verify(x, y)
    gc.collect()
    left = set(threading.enumerate()) - before
    for thread in left:
        if thread.ident is not None:  # else: the interrupt struck before the thread began
            thread.join(SECONDS)
    alive = [thread.name for thread in left if thread.is_alive()]
    return f"still alive: {', '.join(sorted(alive))}" if alive else None


fuzz_interrupts.seeds = 12


def _interrupted(attacked, delay: float) -> float:
    """Do something again and again, and interrupt it after a delay; return how long it went on after that."""
    struck = []
    go = threading.Event()

    def strike() -> None:
        go.wait()
        time.sleep(delay)
        struck.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)  # Python's handler runs in the main thread

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        go.set()
        while True:
            attacked()
    except KeyboardInterrupt:
        late = time.monotonic() - struck[0]
    thread.join()
    return late
