"""The claims of the report, and how each right value is computed.

`CLAIMS` is read from `claims.toml`: what the report says, and the name of the right figure, which is simulated. In one
line, how it follows is the teacher's.

Examples:
    >>> from pipelab.labs.report.claim import rows, verdict
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

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources import files
from itertools import pairwise
from operator import attrgetter
from typing import Any

from pipelab.catalogue import GPipe, OneFOneB, schedules
from pipelab.errors import UsageError
from pipelab.files import teacher
from pipelab.labs.hybrid import Hybrid
from pipelab.labs.report.claim import READINGS, SYNCHRONISATION, Claim, Reading

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
_COLUMNS: dict[str, list[dict[str, Any]]] = {
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


class _Named:
    """The figures of one job, by name, for a line of text."""

    def __init__(self, job: Hybrid) -> None:
        self.job = job

    def __getitem__(self, name: str) -> Any:
        return FIGURES[name](self.job)


def _answers() -> dict[str, dict[str, str]]:
    """Return how each claim's figure follows, and what can be learned; nothing without the teacher's folder."""
    try:
        return tomllib.loads(teacher("claims.toml").read_text(encoding="utf-8"))
    except UsageError:
        return {}


def _claim(given: dict[str, Any]) -> Claim:
    """Return a claim from what `claims.toml` says."""
    jobs = given.pop("jobs", [{}])
    sizes = _COLUMNS[jobs] if isinstance(jobs, str) else [_sizes(each) for each in jobs]
    within = given.pop("within", None)
    ranges = [[(1 - within) * each, (1 + within) * each] if within else each for each in given.pop("reported", [])]
    return Claim(
        reported=tuple(tuple(each) if isinstance(each, list) else each for each in ranges),
        figure=FIGURES[given.pop("figure", "total")],
        how=partial(_line, given.pop("how", "")),
        jobs=sizes,
        readings=_READINGS[given.pop("readings", "all")],
        **given,
    )


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    return given | ({"schedule": schedules[given["schedule"]]} if "schedule" in given else {})


def _line(how: str, job: Hybrid) -> str:
    return how.format_map(_Named(job))


_GIVEN = tomllib.loads(files("pipelab.labs.report").joinpath("claims.toml").read_text("utf-8"))["claim"]
_KEY = _answers()
CLAIMS = tuple(_claim(given | _KEY.get(given["about"], {})) for given in _GIVEN)
