"""What each worker thread does in a step: it runs its rank's instructions one by one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from pipelab.engine.step import run_action
from pipelab.engine.threads.instructions import ThreadsStep

_SWITCH_SECONDS = 5e-6

_guard = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let a thread that wants the interpreter lock have it at once, instead of after Python's usual 5 milliseconds.

    A rank whose backward has ended needs the lock to go on; another rank that is running a forward gives it up and
    takes it back many times in a row, each time too briefly for a sleeping thread to wake up. With a short interval it
    has to wait for its turn. The setting is the whole process's, so it is restored after the step.
    """
    global _inside, _before  # noqa: PLW0603 - it guards a setting of the process
    with _guard:
        if _inside == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_before)


def run_row(step: ThreadsStep, rank: int) -> None:  # noqa: PLR0912 - one loop, so that no call stands between actions
    """Run one rank's row. This is the hot loop: at small sizes its own time is what a step costs."""
    mine, values, ready, loss = step.ranks[rank], step.values, step.ready, step.loss
    stream = mine.stream
    send, receive = stream.send, stream.receive
    with ExitStack() as stack:
        if receive is not None:
            stream.enter(stack)
        step.caller.enter(stack)
        if loss is None:
            stack.enter_context(torch.no_grad())
        for each in step.rows[rank]:
            # [1] wait for what the action needs
            if each.needs is not None:
                if each.receives:
                    ready[each.needs].acquire()
                if step.stopped:
                    return
                given = values.pop(each.needs)
                if each.receives and receive is not None:
                    given = receive(given)
            elif each.all_reduce is not None:
                given = step.barriers[each.action]
                try:
                    given.meet(rank, stream)
                except threading.BrokenBarrierError:
                    return
            else:
                given = step.inputs[each.microbatch] if each.forward else None
                if receive is not None:
                    given = receive(given)
            if step.stopped:
                return
            if receive is not None and loss is not None and each.forward and each.stage.is_last:
                loss.targets[each.microbatch] = receive(loss.targets[each.microbatch])
            # [2] compute, between two readings of the clock
            made = run_action(step, mine, each.stage, each.action, each.act, each.microbatch, given)
            # [3] pass on the value
            if each.gives is not None:
                values[each.gives] = send(made) if each.sends and send is not None else made
                if each.sends:
                    lock = ready[each.gives]
                    if lock.locked():
                        lock.release()
            elif each.forward:
                step.outputs[each.microbatch] = made
