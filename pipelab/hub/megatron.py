"""Megatron-Core's `--pipeline-model-parallel-layout`: which layers each stage has, as a string; and the best string.

Et*3|(tt|)*29,m|L      stages are split by |, x*n and (xy)*n repeat, commas are ignored
                       E embedding, t decoder layer, m layer for multi-token prediction, L loss
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from pipelab.checking.checker import ScheduleLike, as_plan
from pipelab.errors import FormatError, UsageError
from pipelab.plan.actions import finite
from pipelab.plan.fault import shorten
from pipelab.plan.order import network_of
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

LayerTimes = Mapping[str, float | tuple[float, float]]
"""By letter, how long a layer's forward takes, and its backward twice as long; or both."""

_Place = tuple[tuple[int, ...], int]  # how many decoder layers each stage has, and which stage has all m
_VALID = re.compile(r"E[t|]*m*\|*L\|*")
_NAMED = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_COSMETIC = re.compile(r"""[\s,'"\\]""")  # what Megatron ignores, and what scripts and tables put around a layout
_REPEATED = re.compile(r"(?:\(([^()]+)\)|(.))\*(\d{1,6})")
_MOST = 10_000
"""Letters and bars of a layout, in short and at length: 126 layers are many."""


def read_layout(text: str | Sequence[Sequence[str]]) -> list[str]:
    """Return the stages of a layout, each with a letter for each of its layers. A list of lists may be text, too.

    Example:
        >>> read_layout("Et*3|(tt|)*2,m|L")
        ['Ettt', 'tt', 'tt', 'm', 'L']
        >>> read_layout([["embedding", "decoder"], [], ["decoder", "loss"]])
        ['Et', '', 'tL']
        >>> write_layout(["Ettt", "tt", "tt", "tt", "m", "L"])
        'Et*3|(tt|)*3m|L'

    Raises:
        FormatError: if the text is none, or if `E` is not its first layer alone, `L` its last one, or any `m` not in
            one stage and behind every `t`.
    """
    given = str(text)
    if "[" in given:
        rows = (re.findall(r"\w+", row) for row in re.findall(r"\[([^\[\]]*)\]", given))
        given = "|".join("".join(_NAMED.get(name.lower(), "?") for name in row) for row in rows)
    before, found = "", _COSMETIC.sub("", given)
    while found != before:
        longer = sum(len(group or letter) * int(many) for group, letter, many in _REPEATED.findall(found))
        if len(found) + longer > _MOST:
            raise FormatError(f"{shorten(text)} is not a layout: it has more than {_MOST} letters and bars")
        before, found = found, _REPEATED.sub(lambda each: (each[1] or each[2]) * int(each[3]), found)
    if not _VALID.fullmatch(found):
        stages = found.split("|")  # of which the right one has as many decoder layers, each in its stage
        last = max((number for number, stage in enumerate(stages) if set("tm") & set(stage)), default=0)
        right = _letters([stage.count("t") for stage in stages], last, found.count("m"))
        raise FormatError(f"{shorten(text)} is not a layout: {_wrong(found)}\n  try: {write_layout(right)}")
    return found.split("|")


def _wrong(found: str) -> str:
    """Return what a text without repetitions has that no layout has."""
    layers, strange = found.replace("|", ""), "".join(sorted(set(found) - set("EtmL|")))
    rules = (
        (f"{strange!r} is neither E, t, m, L nor |", bool(strange)),
        ("E has to be its first layer, once", layers.count("E") != 1 or layers[0] != "E"),
        ("L has to be its last layer, once", layers.count("L") != 1 or layers[-1] != "L"),
        ("all m have to be in one stage", sum("m" in stage for stage in found.split("|")) > 1),
        ("every t has to come before every m", "t" in layers.partition("m")[2]),
    )
    return ", ".join(words for words, broken in rules if broken)


def write_layout(stages: Sequence[str]) -> str:
    """Return a layout as short text."""
    short = [re.sub(r"(.)\1\1+", lambda run: f"{run[1]}*{len(run[0])}", stage) for stage in stages]
    runs = [(stage, len(list(run))) for stage, run in groupby(short[:-1])]
    return "".join(f"({stage}|)*{many}" if many > 2 else f"{stage}|" * many for stage, many in runs) + short[-1]


def layout_cost(stages: Sequence[str], times: LayerTimes, cost: Cost | None = None) -> Cost:
    """Return the cost of stages: times of work from their layers, and what transfers take from `cost`.

    Example:
        >>> cost = layout_cost(["Ett", "tt", "tL"], {"E": 0.5, "t": 1, "L": (1, 1.5)})
        >>> cost.forward, cost.backward
        ((2.5, 2, 2), (5.0, 4, 3.5))

    Raises:
        UsageError: if a layer has no time, or a time is none.
    """
    for name, time in times.items():
        numbers = time if isinstance(time, tuple) else (time, time)
        if name not in set("EtmL") or len(numbers) != 2 or None in map(finite, numbers):
            raise UsageError(f"time {name}={time!r}: expected E, t, m or L, and numbers, such as t=1 or t=(1, 2.5)")
    if lacking := sorted(set("".join(stages)) - set(times)):
        raise UsageError(f"no time is given for {', '.join(lacking)}\n  try: --time {lacking[0]}=1")
    both = {name: time if isinstance(time, tuple) else (time, 2 * time) for name, time in times.items()}
    forward, backward = ([sum(both[layer][which] for layer in stage) for stage in stages] for which in (0, 1))
    return replace(cost or Cost(), per="stage", forward=forward, backward=backward, input_grad=None, weight_grad=None)


def simulate_layout(
    schedule: Plan | ScheduleLike, text: str | Sequence[Sequence[str]], times: LayerTimes, cost: Cost | None = None
) -> Trace:
    """Return the step of a schedule with a layout; `best_layout` says what the arguments are.

    Example:
        >>> import pipelab
        >>> trace = simulate_layout(pipelab.OneFOneB(2, 4), "Ettt|ttL", {"E": 0.2, "t": 1, "L": 0.8})
        >>> trace.makespan, pipelab.lower_bound(trace)
        (45.6, 43.2)

    Raises:
        UsageError: if the layout does not fit the schedule, or a layer has no time.
    """
    plan, stages = as_plan(schedule), read_layout(text)
    ranks = plan.bound.rank_of[plan.bound.codes.of_kind["F"].start :]
    if any(ranks[stage] != stage % plan.ranks for stage in range(plan.stages)):
        raise UsageError(f"{plan.name}: Megatron-Core has stage s on rank s % ranks, as 1f1b and interleaved-1f1b do")
    if len(stages) != plan.stages or "m" in "".join(stages[: -plan.ranks]):
        raise UsageError(
            f"{str(text)!r} has {len(stages)} stages: expected {plan.stages}, m only in the last {plan.ranks}"
        )
    return simulate(plan, layout_cost(stages, times, cost))


def best_layout(
    schedule: Plan | ScheduleLike, decoders: int, times: LayerTimes, *, mtp: int = 0, cost: Cost | None = None
) -> str:
    """Return the quickest layout of so many layers that a search finds.

    It begins with even stages. In each round it moves a decoder layer from stage to stage, or all `m`, in every way,
    and goes on with the quickest results, until two rounds bring nothing. A round's layouts are simulated together.

    Args:
        schedule: the schedule, or a plan, with stage `s` on rank `s % ranks`.
        decoders: how many decoder layers there are.
        times: how long each kind of layer takes.
        mtp: how many layers for multi-token prediction there are.
        cost: what transfers take, and actions that are not a layer's.

    Example:
        >>> import pipelab
        >>> best_layout(pipelab.Interleaved1F1B(4, 8), 18, {"E": 0.2, "t": 1, "m": 1.4, "L": 0.9}, mtp=1)
        'Ett|tt|tt|(t*3|)*4mL'

    Raises:
        UsageError: if stages are elsewhere, or a layer has no time; if the cost has a `pair` or a busy
            sender, which the search does not count.
    """
    import numpy

    cost = cost or Cost()
    if cost.pair is not None or cost.sender == "busy":
        raise UsageError("a search for layouts has no pairs in one slot and no busy senders: leave them out")
    plan = as_plan(schedule).reducing(beside=cost.all_reduce_runs == "beside")
    codes, (jobs, network) = plan.bound.codes, network_of(plan.bound, ())
    lasts, delay = cost.lengths(plan)
    moves, lags, latest = lasts[codes.first_move :], codes.by_need(delay), numpy.maximum.reduce

    def ranked(places: Sequence[_Place]) -> list[tuple[float, _Place]]:
        costs = (layout_cost(_letters(*place, mtp), times, cost) for place in places)
        lasts = numpy.array([codes.by_code(each.times(plan)) + moves for each in costs]).T
        spent = [lasts[slot[0]] for _, slot in jobs]
        starts = network.starts(spent, lags, latest)
        return sorted(zip(latest([*map(numpy.add, starts, spent)]).tolist(), places, strict=True))

    each, more = divmod(decoders, plan.stages)
    start = (tuple(each + (stage < more) for stage in range(plan.stages)), plan.stages - 1)
    width = max(1, min(16, 10**7 // (len(jobs) * plan.stages**2)))  # so that a round takes a few seconds at most
    best = (simulate_layout(plan, write_layout(_letters(*start, mtp)), times, cost).makespan, start)
    front, seen, idle = [best], {start}, 0
    while idle < 2 and (near := {place for _, each in front for place in _near(*each, plan.ranks, mtp)} - seen):
        seen |= near
        front = ranked(list(near))[:width]
        idle = 0 if front[0][0] < best[0] * (1 - 1e-9) else idle + 1
        best = min(best, front[0])
    return write_layout(_letters(*best[1], mtp))


def _letters(counts: Sequence[int], at: int, mtp: int) -> list[str]:
    stages = ["t" * count + "m" * mtp * (stage == at) for stage, count in enumerate(counts)]
    return f"E{'|'.join(stages)}L".split("|")


def _near(counts: tuple[int, ...], at: int, ranks: int, mtp: int) -> Iterator[_Place]:
    """Yield what one move makes: a decoder layer from stage to stage, or all `m`; decoders stay before these."""
    for taken, count in enumerate(counts):
        for given in range(at + 1) if count else ():
            moved = list(counts)
            moved[taken] -= 1
            moved[given] += 1
            yield tuple(moved), at
    for other in range(len(counts) - ranks, len(counts)) if mtp else ():
        moved = [*counts[: other + 1], *[0] * (len(counts) - 1 - other)]
        for _ in range(sum(counts) - sum(moved)):
            moved[min(range(other + 1), key=moved.__getitem__)] += 1
        yield tuple(moved), other
