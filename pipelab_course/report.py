"""The report on a hybrid-parallel simulator, claim by claim: is it right, and how does the right value follow?

`CLAIMS` is read from `claims.toml`: what the report says, and the name of the right figure, which is simulated. In one
line, how it follows is the teacher's. The setting can be read in four ways, and each claim is checked in all that make
a difference:

    >>> for reading in READINGS:
    ...     job = reading.job()
    ...     print(f"{reading}: {job.response_time:g} ms; one device {job.alone.makespan:g} ms")
    per stage, 8 per replica: 1210 ms; one device 4160 ms
    per stage, 8 in all: 690 ms; one device 2080 ms
    split, 8 per replica: 625 ms; one device 2080 ms
    split, 8 in all: 365 ms; one device 1040 ms

Examples:
    >>> for row in rows(CLAIMS[1]):
    ...     print(row["reading"], "|", row["value"], "|", row["verdict"])
    per stage, 8 per replica | 1210 ms | right
    per stage, 8 in all | 690 ms | wrong
    split, 8 per replica | 625 ms | wrong
    split, 8 in all | 365 ms | wrong
    >>> verdict(CLAIMS[1])
    'right under one reading'
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import pairwise
from operator import attrgetter
from typing import Any

from pipelab.catalogue import GPipe, OneFOneB, schedules
from pipelab.errors import UsageError
from pipelab.files import teacher
from pipelab.table import Column, Table
from pipelab_course.hybrid import Hybrid, same_work

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


_NUMBERS, _SCALE_BYTES = 120, 4
"""Numbers of a stage's gradient, one byte each in int8, and the bytes of a message's scale."""

_READINGS = {
    "all": READINGS,
    "counts": (Reading(name="8 per replica"), Reading(in_all=True, name="8 in all")),
    "times": (Reading(name="per stage"), Reading(split=True, name="split")),
    "any": (Reading(name="every reading"),),
    "none": (),
    "steps": (Reading(ring_step=10, name="10 ms for a step"), Reading(name="20 ms for a step")),
    "ten": (
        *(Reading(each.split, each.in_all, 10, f"{each}, 10 ms") for each in READINGS),
        Reading(name=f"{READINGS[0]}, 20 ms"),
    ),
    "many": tuple(Reading(each.split, each.in_all, name=str(each).replace("8", "M")) for each in READINGS),
}
_SIZES: dict[str, list[dict[str, Any]]] = {
    "microbatches": [{"microbatches": count} for count in (2, 4, 8, 16)],
    "stages": [{"stages": count, "replicas": 1} for count in (1, 2, 4, 8)],
    "replicas": [{"replicas": count} for count in (1, 2, 4, 8)],
}
"""The columns of Tables 1, 2 and 3."""


def _ring(job: Hybrid) -> float:
    return job.response_time - job.pipeline.makespan


def _steps(job: Hybrid) -> int:
    return round(_ring(job) / job.ring_step)


def _phases(job: Hybrid) -> tuple[float, float, float]:
    """Return the warm-up, the steady state and the cooldown: before, while and after the last stage works."""
    last = job.trace.events_of(job.stages - 1)
    return last[0].start, last[-1].end - last[0].start, job.trace.end - last[-1].end


def _pairs(job: Hybrid) -> int:
    """Return how often a backward follows a forward on the first device."""
    row = [event.action.traits.forward for event in job.trace.events_of(0) if not event.action.traits.collective]
    return sum(first and not second for first, second in pairwise(row))


def _backwards(job: Hybrid) -> list[bool]:
    """Return for each backward of the timeline whether its forward on the same stage has ended before."""
    events = [event for event in job.trace.events if not event.action.traits.collective]
    ended = {(event.rank, event.action.microbatch): event.end for event in events if event.action.traits.forward}
    backwards = [event for event in events if not event.action.traits.forward]
    return [ended[event.rank, event.action.microbatch] <= event.start for event in backwards]


def _bytes(job: Hybrid) -> tuple[int, int]:
    """Return the bytes of the gradients that all devices send in int8, without the scales and with them."""
    payload = job.stages * _steps(job) * _NUMBERS
    return payload, payload + job.devices * _steps(job) * _SCALE_BYTES


FIGURES: Mapping[str, Callable[[Hybrid], Any]] = {
    "m": attrgetter("microbatches"),
    "p": attrgetter("stages"),
    "d": attrgetter("replicas"),
    "f": attrgetter("forward"),
    "b": attrgetter("backward"),
    "step": attrgetter("ring_step"),
    "all": attrgetter("all_microbatches"),
    "rows": lambda job: job.all_microbatches * job.rows,
    "each": lambda job: job.forward + job.backward,
    "total": attrgetter("response_time"),
    "pipeline": attrgetter("pipeline.makespan"),
    "busy": lambda job: job.pipeline.busy[0],
    "alone": attrgetter("alone.makespan"),
    "speed_up": attrgetter("speed_up"),
    "bubble": lambda job: 100 * job.pipeline.bubble,
    "over_ideal": lambda job: 100 * job.pipeline.bubble / (1 - job.pipeline.bubble),
    "ring": _ring,
    "share": lambda job: 100 * job.communication_cost,
    "exchange": lambda job: _ring(job) + SYNCHRONISATION,
    "exchanged": lambda job: 100 * (_ring(job) + SYNCHRONISATION) / (job.response_time + SYNCHRONISATION),
    "spared": lambda job: job.response_time - job.pipeline.busy[0],
    "not_computing": lambda job: 100 * (1 - job.pipeline.busy[0] / job.response_time),
    "steps": _steps,
    "growth": lambda job: _steps(job) / _steps(replace(job, replicas=2)),
    "peak": attrgetter("peak_memory"),
    "peak_of_1f1b": lambda job: replace(job, schedule=OneFOneB).peak_memory,
    "saved": lambda job: 100 * (1 - job.peak_memory / replace(job, schedule=GPipe).peak_memory),
    "warm_up": lambda job: _phases(job)[0],
    "steady": lambda job: _phases(job)[1],
    "cooldown": lambda job: _phases(job)[2],
    "fill_and_drain": lambda job: _phases(job)[0] + _phases(job)[2],
    "pairs": _pairs,
    "labels": lambda job: (job.microbatches - _pairs(job), _pairs(job), job.microbatches - _pairs(job)),
    "backwards": lambda job: len(_backwards(job)),
    "in_time": lambda job: sum(_backwards(job)),
    "too_early": lambda job: len(_backwards(job)) - sum(_backwards(job)),
    "payload": lambda job: _bytes(job)[0],
    "sent": lambda job: _bytes(job)[1],
    "ring_bytes": _bytes,
}
"""The right figures of a job, in the order of its setting, its time and its memory; shares in per cent."""


def answers(name: str) -> dict[str, Any]:
    """Return a teacher's answers to an assignment; nothing in a students' copy."""
    try:
        return tomllib.loads(teacher(name).read_text(encoding="utf-8"))
    except UsageError:
        return {}


def _claim(given: dict[str, Any]) -> Claim:
    """Return a claim from what `claims.toml` says."""
    jobs = given.pop("jobs", [{}])
    sizes = _SIZES[jobs] if isinstance(jobs, str) else jobs
    named = [each | {"schedule": schedules[each["schedule"]]} if "schedule" in each else each for each in sizes]
    within = given.pop("within", None)
    ranges = [[(1 - within) * each, (1 + within) * each] if within else each for each in given.pop("reported", [])]
    return Claim(
        reported=tuple(tuple(each) if isinstance(each, list) else each for each in ranges),
        figure=FIGURES[given.pop("figure", "total")],
        how=partial(_line, given.pop("how", "")),
        jobs=named,
        readings=_READINGS[given.pop("readings", "all")],
        **given,
    )


def _line(how: str, job: Hybrid) -> str:
    return how.format_map({name: FIGURES[name](job) for name in re.findall(r"{(\w+)", how)})


_GIVEN = tomllib.loads(files("pipelab_course").joinpath("claims.toml").read_text("utf-8"))["claim"]
_KEY = answers("claims.toml")
CLAIMS = tuple(_claim(given | _KEY.get(given["about"], {})) for given in _GIVEN)
