"""Attacks on `check(plan, order=..., transport=...)`: real processes hang exactly where it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

from strategies import WIRES

from pipelab import B, F, I, Plan, ScheduleError, W, check, lower
from pipelab.plan.transfers import lowered

SCRIPTS = Path(__file__).parents[1] / "scripts"
ON_GLOO = {"posted": "buffered", "holding": "holding", "blocking": "rank"}
"""What a rank does with its sends and receives on gloo, and the transport that this is: blocking, without all-reduces,
which in a script come after the transfers before them and so may hang too."""
PLANS = 20


def legal_plan(seed: int) -> Plan:
    """Return a legal plan of 2 to 4 ranks, its rows in any order that the values allow.

    Stages stand anywhere: several on a rank, or one on several ranks. Some backwards are split, and some pairs overlap.
    """
    random = Random(seed)
    ranks, stages, microbatches = random.randint(2, 4), random.randint(2, 6), random.randint(1, 5)
    home = [random.randrange(ranks) for _ in range(stages)]
    several = random.random() < 0.3
    place = [[random.randrange(ranks) if several else home[s] for s in range(stages)] for _ in range(microbatches)]
    split = random.choice((0.0, 0.5, 1.0))
    # By micro-batch, what is to be done of it, in order; a W may come any time after its I.
    chains = [
        [F(m, s) for s in range(stages)]
        + [(I if random.random() < split else B)(m, s) for s in range(stages - 1, -1, -1)]
        for m in range(microbatches)
    ]
    rows: list[list[object]] = [[] for _ in range(ranks)]
    patience = random.random()
    while any(chains):
        chain = random.choice([chain for chain in chains if chain][: 1 + int(patience * microbatches)])
        action = chain.pop(0)
        rows[place[action.microbatch][action.stage]].append(action)
        if action.kind == "I":
            chains.append([W(action.microbatch, action.stage)])
    if random.random() < 0.3:
        rows = [paired(row, random) for row in rows]
    return Plan(rows, stages, microbatches, lambda m, s: place[m][s])


def paired(row: list, random: Random) -> list:
    """Join some forwards with the backward right after them."""
    joined = list(row)
    for at, (one, other) in reversed(list(enumerate(pairwise(row)))):
        if one.kind == "F" and other.kind == "B" and random.random() < 0.5:
            joined[at : at + 2] = [one & other]
    return joined


@contextmanager
def processes(script: str = "rendezvous.py") -> Iterator[subprocess.Popen[str]]:
    """Yield the script that runs rows for real in processes: it stays for many plans."""
    command = [sys.executable, SCRIPTS / script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as real:
        try:
            yield real
        finally:
            real.stdin.close()
            real.wait(timeout=60)


def happened(real: subprocess.Popen[str], rows: Sequence[Sequence[str]], transport: str) -> bool | str:
    """Run lowered rows in the processes; return whether they hang, or why that is not known."""
    real.stdin.write(json.dumps({"rows": rows, "transport": transport}) + "\n")
    real.stdin.flush()
    return json.loads(real.stdout.readline())


def on_gloo(real: subprocess.Popen[str], *jobs: tuple[Sequence[Sequence[str]], str], unit: float = 0.0) -> list:
    """Run lowered rows on gloo, each in its way; return how many units they took, or `None` if they hang."""
    real.stdin.write(json.dumps([{"rows": rows, "how": how, "unit": unit} for rows, how in jobs]) + "\n")
    real.stdin.flush()
    return json.loads(real.stdout.readline())


def compare(seeds: range) -> tuple[list[str], int, int]:
    """Compare plans with reality; return what differs, how many runs there were, and how many of them hung."""
    wrong: list[str] = []
    runs = hung = 0
    with processes() as real:
        for seed in seeds:
            plan = legal_plan(seed)
            for wire in WIRES:
                try:
                    rows = lower(plan, **wire).rows
                except ScheduleError:  # a pair that needs its own output: only these rows exist
                    if wire["order"] != "at-use":
                        continue
                    rows = lowered(plan.bound, "at-use").words()
                predicted, hangs = bool(check(plan, **wire)), happened(real, rows, wire["transport"])
                runs += 1
                hung += hangs is True
                if hangs is not predicted:
                    wrong.append(f"seed {seed}, {wire}: predicted {predicted}, happened {hangs}\n{plan}")
    return wrong, runs, hung


def fuzz_wire(number: int) -> str | None:
    """Compare twenty plans: hang or no hang."""
    wrong, _, _ = compare(range(number * PLANS, (number + 1) * PLANS))
    return "\n".join(wrong) or None


def fuzz_gloo(number: int) -> str | None:
    """Compare a plan without pairs, in an order of its own, with what happens on gloo: hang or no hang."""
    plan = legal_plan(number)
    order = Random(number).choice(WIRES)["order"]
    if plan.bound.pairs:
        return None
    rows = lower(plan, order=order).rows
    ways = {how: ON_GLOO[how] for how in ON_GLOO if how != "blocking" or not plan.bound.reduces}
    predicted = [bool(check(plan, order=order, transport=transport)) for transport in ways.values()]
    with processes("gloo_rows.py") as real:
        hangs = [each is None for each in on_gloo(real, *((rows, how) for how in ways))]
    return None if hangs == predicted else f"{order}, {[*ways]}: predicted {predicted}, happened {hangs}\n{plan}"


fuzz_wire.dist = fuzz_gloo.dist = True
