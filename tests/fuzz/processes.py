"""Attacks on jobs of several processes: one rank does something odd in a random action."""

from __future__ import annotations

import sys
from random import Random

import processes

ODD = ("raises", "exits", "leaves", "hangs", "freezes", "SIGKILL", "SIGTERM", "SIGSEGV", "SIGINT")
SECONDS = 50.0
"""Within which all ranks end: they start, wait for `timeout=3`, and say who is missing."""


def fuzz_processes(number: int) -> str | None:
    """Let one rank misbehave: all end soon, none as if nothing had happened, and the others name that rank."""
    random = Random(number)
    ranks = random.choice([2, 3])
    culprit, odd, moment = random.randrange(ranks), random.choice(ODD), random.randint(1, 24)
    # Fresh processes: a fork shares its modules' state with the one that ends it.
    ended = processes.run_in(
        ranks, "misbehaving.py", str(culprit), odd, str(moment), seconds=SECONDS, fresh=sys.platform != "linux"
    )
    told = f"rank {culprit} of {ranks} {odd} at call {moment}\n{processes.shown(ended)}"
    if all(each.code == 0 for each in ended):
        return f"nothing happened: {told}"
    for rank, each in enumerate(ended):
        if rank != culprit and each.code == 0:
            return f"rank {rank} ended as if all were well: {told}"
        if rank != culprit and f"rank {culprit}" not in each.err:
            return f"rank {rank} does not name rank {culprit}: {told}"
    return None


fuzz_processes.seconds = SECONDS + 20
fuzz_processes.seeds = 2
fuzz_processes.dist = True
