"""Run lowered rows for real, in four processes, and say whether they hang.

Each line of standard input is `{"rows": [["0F0", "0SEND_F0", ...], ...], "transport": "rank"}`; the answer is a line
with `true` (it hangs), `false`, or the reason why there is none. It knows nothing of pipelab.

Each process runs a rank: one thread computes, which takes no time. On the transports `rank`, `pair` and `edge`, one
thread for each queue sends and receives: a send blocks until its receive has been reached, and a receive until its send
has. On `holding`, the thread that computes receives too, where its row says so. On `buffered`, what it needs is there
as soon as the other rank has computed it.

It hangs if nobody can move: every thread that is not at its end waits for a semaphore that was released as often as it
was acquired. Each has one thread that releases it and one that acquires it, so its two counts tell this exactly.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import threading
import time
from contextlib import suppress

RANKS, SLOTS, THREADS = 4, 32, 8
SECONDS = 20.0
"""After how long a run counts as neither: a bug of this script."""
KINDS = ("made", "offered", "taken", "there")
QUEUES = ("rank", "pair", "edge")
VALUES = 2 * SLOTS  # outputs, then input gradients
REDUCES = 8 * RANKS * RANKS  # by stage, from rank, to rank
RUNNING, ENDED = -1, -2

fork = multiprocessing.get_context("fork")
semaphores = [fork.Semaphore(0) for _ in range(len(KINDS) * VALUES + REDUCES)]
released = fork.RawArray("i", len(semaphores))
acquired = fork.RawArray("i", len(semaphores))
waits_for = fork.RawArray("i", [ENDED] * (RANKS * THREADS))
stop = fork.RawValue("i", 0)


class StoppedError(Exception):
    """The run is over, because nobody can move."""


def semaphore(kind: str, value: int) -> int:
    return KINDS.index(kind) * VALUES + value


def release(number: int) -> None:
    released[number] += 1
    semaphores[number].release()


def acquire(number: int, thread: int) -> None:
    waits_for[thread] = number
    semaphores[number].acquire()
    if stop.value:
        raise StoppedError
    waits_for[thread] = RUNNING
    acquired[number] += 1


def parsed(word: str) -> tuple[str, int, int]:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", word).groups()
    return kind, int(stage), int(microbatch or 0)


def number_of(direction: str, stage: int, microbatch: int, microbatches: int) -> int:
    """Return a value's number: the output (F) or the input gradient (B) of a stage."""
    return (direction == "B") * SLOTS + stage * microbatches + microbatch


class Rank:
    """What a process does in one run."""

    def __init__(self, rank: int, rows: list[list[str]], transport: str) -> None:
        self.rank, self.rows, self.transport = rank, rows, transport
        words = [parsed(word) for row in rows for word in row if "(" not in word and "REDUCE" not in word]
        self.microbatches = 1 + max((m for _, _, m in words), default=0)
        self.senders = {self.value(word): at for at, row in enumerate(rows) for word in row if "SEND" in word}
        self.receivers = {self.value(word): at for at, row in enumerate(rows) for word in row if "RECV" in word}

    def value(self, word: str) -> int:
        """Return the value that a word sends or receives; a receive names the stage that needs it."""
        kind, stage, microbatch = parsed(word)
        giver = stage + ((kind == "RECV_B") - (kind == "RECV_F"))
        return number_of(kind[-1], giver, microbatch, self.microbatches)

    def compute(self, thread: int) -> None:
        """Run the actions in order."""
        for word in self.rows[self.rank]:
            if "SEND" in word or "RECV" in word:
                if self.transport == "holding" and "SEND" in word:
                    release(semaphore("there", self.value(word)))
                elif self.transport == "holding":
                    acquire(semaphore("there", self.value(word)), thread)
                continue
            if "REDUCE" in word:
                self.reduce(word, thread)
                continue
            halves = word[1:].removesuffix(")OVERLAP_F_B").split(";") if "(" in word else [word]
            given = []
            for half in halves:
                kind, stage, microbatch = parsed(half)
                if kind == "W":
                    continue
                direction, before = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
                needed = number_of(direction, before, microbatch, self.microbatches)
                if before >= 0 and self.receivers.get(needed) == self.rank and self.transport != "holding":
                    acquire(semaphore("there", needed), thread)
                value = number_of(direction, stage, microbatch, self.microbatches)
                if self.senders.get(value) == self.rank:
                    given.append(value)
                    if self.transport == "buffered":
                        release(semaphore("there", value))
            for value in given if self.transport in QUEUES else ():
                release(semaphore("made", value))

    def reduce(self, word: str, thread: int) -> None:
        """Meet the other ranks that reduce a stage's gradients."""
        stage = parsed(word)[1]
        others = [rank for rank, row in enumerate(self.rows) if word in row and rank != self.rank]
        first = len(KINDS) * VALUES + stage * RANKS * RANKS
        for other in others:
            release(first + self.rank * RANKS + other)
        for other in others:
            acquire(first + other * RANKS + self.rank, thread)

    def transfer(self, words: list[str], thread: int) -> None:
        """Send and receive, in order."""
        for word in words:
            value = self.value(word)
            if "SEND" in word:
                acquire(semaphore("made", value), thread)
                release(semaphore("offered", value))
                acquire(semaphore("taken", value), thread)
            else:
                acquire(semaphore("offered", value), thread)
                release(semaphore("taken", value))
                release(semaphore("there", value))

    def in_queues(self) -> list[list[str]]:
        """Return the sends and receives, queue by queue."""
        found: dict[object, list[str]] = {}
        for word in self.rows[self.rank]:
            if "SEND" in word or "RECV" in word:
                sends, value = "SEND" in word, self.value(word)
                peer = (self.receivers if sends else self.senders)[value]
                found.setdefault({"rank": 0, "pair": peer, "edge": (peer, sends)}[self.transport], []).append(word)
        return list(found.values())

    def run(self) -> None:
        first = self.rank * THREADS
        queues = self.in_queues() if self.transport in QUEUES else []
        tasks = [(self.compute, first), *((self.transfer, queue, first + 1 + at) for at, queue in enumerate(queues))]
        for _, *arguments in tasks:
            waits_for[arguments[-1]] = RUNNING
        threads = [threading.Thread(target=self.until_stopped, args=task) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def until_stopped(self, task, *arguments) -> None:
        with suppress(StoppedError):
            task(*arguments)
        waits_for[arguments[-1]] = ENDED


def serve(rank: int, pipe) -> None:
    """Run a rank again and again."""
    while (job := pipe.recv()) is not None:
        if rank < len(job["rows"]):
            Rank(rank, job["rows"], job["transport"]).run()
        pipe.send("done")


def nobody_can_move() -> bool:
    """Tell whether every thread waits in vain; read twice, because threads go on while this one reads."""
    before = (list(waits_for), list(released), list(acquired))
    waiting = [number for number in before[0] if number != ENDED]
    stuck = all(number >= 0 and before[1][number] == before[2][number] for number in waiting)
    return bool(waiting) and stuck and before == (list(waits_for), list(released), list(acquired))


def hangs(job: dict, pipes: list) -> bool | str:
    """Run the rows in all processes."""
    for rank in range(len(job["rows"])):
        waits_for[rank * THREADS] = RUNNING  # it is, as soon as its process has read the job
    for pipe in pipes:
        pipe.send(job)
    until = time.monotonic() + SECONDS
    left, hung, late = list(pipes), False, False
    while left:
        left = [pipe for pipe in left if not (pipe.poll() and pipe.recv())]
        late = time.monotonic() > until
        if left and not stop.value and (late or nobody_can_move()):
            hung = True
            stop.value = 1
            for number in range(len(semaphores)):
                for _ in range(2):
                    semaphores[number].release()
        time.sleep(0.0002)
    if hung or stop.value:
        for each in semaphores:
            while each.acquire(block=False):
                pass
    stop.value = 0
    for number in range(len(semaphores)):
        released[number] = acquired[number] = 0
    return "no end, though somebody could move" if late else hung


def main() -> None:
    pairs = [fork.Pipe() for _ in range(RANKS)]
    ranks = [fork.Process(target=serve, args=(rank, pairs[rank][1]), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for line in sys.stdin:
        print(json.dumps(hangs(json.loads(line), [pipe for pipe, _ in pairs])), flush=True)
    for pipe, _ in pairs:
        pipe.send(None)
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
