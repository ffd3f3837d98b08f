"""Attacks on jobs of several processes: one rank does something odd in a random action."""

from __future__ import annotations

from random import Random

import processes

ODD = ("raises", "exits", "leaves", "hangs", "freezes", "SIGKILL", "SIGTERM", "SIGSEGV", "SIGINT")
SECONDS = 50.0
"""Within which all ranks end: they start, wait for `timeout=6`, and say who is missing."""


def fuzz_processes(number: int) -> str | None:
    """Let one rank misbehave: all end soon, none as if nothing had happened, and the others name that rank."""
    random = Random(number)
    ranks = random.choice([2, 3])
    culprit, odd, moment = (
        random.randrange(ranks),
        random.choice(ODD),
        random.randint(1, 16),
    )  # in the first two steps of three
    ended = processes.run_in(ranks, "misbehaving.py", str(culprit), odd, str(moment), seconds=SECONDS)
    told = f"rank {culprit} of {ranks} {odd} at call {moment}\n{processes.shown(ended)}"
    if all(each.code == 0 for each in ended):
        return f"nothing happened: {told}"
    for rank, each in enumerate(ended):
        if rank != culprit and each.code == 0:
            return f"rank {rank} ended as if all were well: {told}"
        named = f"rank {culprit}" in each.err or (culprit == 0 and "this job's store" in each.err)  # which rank 0 holds
        if rank != culprit and not named:
            return f"rank {rank} does not name rank {culprit}: {told}"
    return None


fuzz_processes.seconds = SECONDS + 20
fuzz_processes.seeds = 2
fuzz_processes.dist = True
