"""A claim of the report: how its setting can be read, the right value in each reading, and the verdict.

The setting can be read in four ways, and each claim is checked in all that make a difference:

    >>> for reading in READINGS:
    ...     job = reading.job()
    ...     print(f"{reading}: {job.response_time:g} ms; one device {job.alone.makespan:g} ms")
    per stage, 8 per replica: 1210 ms; one device 4160 ms
    per stage, 8 in all: 690 ms; one device 2080 ms
    split, 8 per replica: 625 ms; one device 2080 ms
    split, 8 in all: 365 ms; one device 1040 ms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelab.draw.table import Column, Table
from pipelab.labs.hybrid import Hybrid, same_work

FORWARD, BACKWARD, RING_STEP, ROWS, ACTIVATION = 50, 80, 20, 32, 10
"""Milliseconds of a micro-batch forward and backward, and of a ring's step; rows of a micro-batch; units of memory."""

SYNCHRONISATION = 20
"""Milliseconds that the report counts for synchronisation between stages, and leaves out of its total."""

SETTING = (
    "The report's setting: 50 ms forward and 80 ms backward per micro-batch, 2 stages x 2 replicas, 8 micro-batches, "
    "an all-reduce of 2 (D - 1) steps of 20 ms for D replicas. Two things can be read in two ways each:\n"
    "- per stage: each stage takes 50 + 80 ms; split: the whole model does, and each of 2 stages takes 25 + 40 ms;\n"
    "- 8 per replica: each replica runs 8 micro-batches; in all: both replicas together run 8, so each runs 4."
)


@dataclass(frozen=True)
class Reading:
    """One way to read the report's setting.

    Attributes:
        split: whether the whole model takes 50 + 80 ms, and a stage its part; otherwise each stage takes as long.
        in_all: whether all replicas together run the micro-batches; otherwise each replica runs so many.
        ring_step: milliseconds of one step of the all-reduce.
        name: what the reading is called; by default it follows from the others.
    """

    split: bool = False
    in_all: bool = False
    ring_step: float = RING_STEP
    name: str = ""

    def job(self, stages: int = 2, replicas: int = 2, microbatches: int = 8, **more: Any) -> Hybrid:
        """Return the job that the report means, with other sizes if need be."""
        share = stages if self.split else 1
        each = microbatches // replicas if self.in_all else microbatches
        times = {"forward": FORWARD / share, "backward": BACKWARD / share, "ring_step": self.ring_step}
        given = times | {"rows": ROWS, "activation": ACTIVATION} | more
        return Hybrid(stages=stages, replicas=replicas, microbatches=each, **given)

    def __str__(self) -> str:
        return self.name or f"{'split' if self.split else 'per stage'}, 8 {'in all' if self.in_all else 'per replica'}"


READINGS = tuple(Reading(split, in_all) for split in (False, True) for in_all in (False, True))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure of the report, or a row of figures, and how to compute it.

    Attributes:
        about: what it says something about.
        says: what it says, in its own figures.
        reported: these figures; a range is a pair.
        figure: computes a right one from a job, or several.
        how: says in one line, with numbers, how it follows, for the last job.
        jobs: for each figure, what its job has in place of the setting's.
        readings: the readings under which the values differ.
        unit: the unit of all figures.
        digits: how many decimals of the right value are shown.
        off: how much a right figure may be off, for it is rounded.
        remark: what a reader can learn from it.
        undecided: whether what is known of the report does not say if it is right.
    """

    about: str
    says: str
    reported: tuple[float | tuple[float, float], ...]
    figure: Callable[[Hybrid], Any]
    how: Callable[[Hybrid], str]
    jobs: Sequence[Mapping[str, Any]] = ({},)
    readings: tuple[Reading, ...] = READINGS
    unit: str = ""
    digits: int = 2
    off: float = 0.5
    remark: str = ""
    undecided: bool = False

    def value(self, reading: Reading) -> list[float]:
        """Return the right figures in a reading."""
        found = [self.figure(reading.job(**sizes)) for sizes in self.jobs]
        return [*found[0]] if isinstance(found[0], tuple) else found


_COLUMNS = (
    Column("verdict", "report is", left=True),
    Column("value", "right value"),
    Column("how", "how it follows", left=True),
)
_VALUE = (Column("value", "simulated"),)


def rows(claim: Claim) -> Iterator[dict[str, Any]]:
    """Yield a row for each reading of a claim: the right value, how it follows, and whether the report agrees."""
    for reading in claim.readings:
        values = claim.value(reading)
        right = [_agrees(*each, claim.off) for each in zip(claim.reported, values, strict=True)]
        some = f"{sum(right)} of {len(right)} right"
        yield {
            "about": claim.about,
            "says": claim.says,
            "reading": str(reading),
            "value": " ".join([*(f"{round(value, claim.digits):g}" for value in values), claim.unit]).strip(),
            "verdict": "open" if claim.undecided else "right" if all(right) else some if any(right) else "wrong",
            "how": claim.how(reading.job(**claim.jobs[-1])),
        }


def verdict(claim: Claim) -> str:
    """Return whether a claim is right, wrong, or right under some of its readings; or that this cannot be decided."""
    if claim.undecided:
        return "cannot be decided here"
    right = [row["verdict"] == "right" for row in rows(claim)]
    if all(right):
        return "right"
    if not any(right):
        return "wrong"
    return "right under one reading" if sum(right) == 1 else f"right under {sum(right)} of {len(right)} readings"


def table(claims: Sequence[Claim], answered: bool = True) -> Table:
    """Return claims with all their readings as one table, for a file; with the answers or without."""
    numbered = enumerate(claims, start=1)
    listed = [{"claim": number, **row, "in_all": verdict(each)} for number, each in numbered for row in rows(each)]
    if not answered:
        listed = [{key: row[key] for key in ("claim", "about", "says", "reading", "value")} for row in listed]
    words = [
        Column(key, head, left=True) for key, head in (("about", ""), ("says", "the report says"), ("reading", ""))
    ]
    answers = (*_COLUMNS, Column("in_all", "the claim is", left=True))
    return Table(listed, [Column("claim"), *words, *(answers if answered else _VALUE)])


def text(claim: Claim, answered: bool = True) -> str:
    """Return a claim's readings for people: the right value, and if answered, how it follows and the verdict."""
    return Table(list(rows(claim)), [Column("reading"), *(_COLUMNS if answered else _VALUE)]).text(width=120)


def summary(claims: Sequence[Claim]) -> str:
    """Return how many claims are right."""
    verdicts = [verdict(each) for each in claims]
    words = ("right", "right under", "wrong", "cannot")
    counts = {each: sum(found.startswith(each) for found in verdicts) for each in words}
    return (
        f"Of {len(verdicts)} claims, these are right: {counts['right'] - counts['right under']}; right under one "
        f"reading: {counts['right under']}; wrong: {counts['wrong']}; open: {counts['cannot']}."
    )


def figures() -> list[Hybrid]:
    """Return the report's job and others that do the same work, read per stage and 8 per replica."""
    layouts = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4)]
    more = {"ring_step": RING_STEP, "rows": ROWS, "activation": 2 * ACTIVATION}
    return same_work(layouts, 16, 2 * FORWARD, 2 * BACKWARD, **more)


def _agrees(reported: float | tuple[float, float], value: float, off: float) -> bool:
    low, high = reported if isinstance(reported, tuple) else (reported - off, reported + off)
    return low - 1e-9 <= value <= high + 1e-9
