"""Costs from measurements: of traces, how long its actions and transfers took; of batches, how long their parts do."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from math import inf
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from pipelab.errors import CostError, counted, require_size
from pipelab.plan.actions import HALVES, TRAITS, finite
from pipelab.plan.fault import shorten
from pipelab.trace import replay
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.plan.codes import Codes
    from pipelab.simulation.cost import Cost

_FEW = 3
"""From fewer measured transfers of one stage than this, its time is not fitted: the times of all stages count."""

_TRUSTED = 0.15
"""By which share half of the repeated actions may differ from the usual one before a fit warns. With nothing else to do
it was 0.02 to 0.1; on two overloaded cores 0.1 to 0.7, and one step's costs predicted half to thrice the usual step."""

_MIDDLES: dict[str, Callable[[list[float]], float]] = {"median": median, "mean": fmean}

Spans = defaultdict[tuple[str, int], list[float]]
"""By kind and stage, how long its actions took, or what they gave travelled; a pair in one slot has the kind "pair"."""


def fitted(traces: Sequence[Trace], split: Sequence[Trace] | float | None, typical: str) -> dict[str, Any]:
    """Return the arguments of a `Cost` per stage that predicts some steps of the same stages; see `Cost.fit`."""
    if typical not in _MIDDLES:
        raise CostError(f"typical={shorten(typical)}: expected 'median' or 'mean'")
    middle, first = _MIDDLES[typical], traces[0]
    measured = first.source == "measured"
    spans, moved = _pooled(traces, first, "traces")
    spans, ratio = _with_halves(spans, split, first)
    times = {each: middle(took) for each, took in spans.items()}
    off = sum(len(took) * median(abs(time - times[each]) for time in took) for each, took in spans.items())
    varies = off / (sum(map(sum, spans.values())) or 1.0)
    if measured and varies > _TRUSTED:
        warnings.warn(
            f"timings vary by {100 * varies:.0f} % or more: the machine is busy, or the micro-batches differ\n"
            "  try: Cost.fit([step.trace, ...]) of five steps or more, while nothing else runs",
            stacklevel=3,
        )
    stages = range(first.plan.stages)
    for stage in stages:
        # Of a measured first stage, PyTorch asks for no input gradient, so nothing is split there.
        _complete(times, stage, 1.0 if measured and stage == 0 else ratio)
    costs: dict[str, str] = {kind: traits.cost for kind, traits in TRAITS.items() if traits.cost} | {"pair": "pair"}
    there = {kind for kind, _ in times} & costs.keys()
    found = {costs[kind]: [times.get((kind, stage), 0.0) for stage in stages] for kind in there}
    more = {"variation": varies, "unit": first.unit} | ({"first_stage": "as-run"} if measured else {})
    more |= {"all_reduce_runs": "beside"} if first.plan.bound.beside else {}
    return {"forward": 0, "backward": 0, **found, **more, **_travel(moved, first, middle)}


def _with_halves(spans: Spans, split: Sequence[Trace] | float | None, first: Trace) -> tuple[Spans, float]:
    """Return the spans, with the halves of split backwards if these were measured; and the ratio `(I + W) / B`."""
    if not isinstance(split, list):
        return spans, 1.0 if split is None else _ratio(split)
    apart, _ = _pooled(split, first, "trace and split")
    halves = {each: took for each, took in apart.items() if each[0] in HALVES}
    if not halves:
        raise CostError(
            f"split is a trace of {split[0].name}, which has no I and W: run one that splits backwards, such as "
            "zb-h1, or give the ratio (I + W) / B"
        )
    return Spans(list, {each: took for each, took in spans.items() if each[0] not in HALVES} | halves), 1.0


def _ratio(split: Any) -> float:
    ratio = None if isinstance(split, bool) else finite(split)
    if ratio is None and not isinstance(split, (int, float)):
        raise TypeError(f"split={shorten(split)}: expected the ratio (I + W) / B, or a trace with split backwards")
    if not ratio:
        raise CostError(f"split={split}: expected a ratio (I + W) / B above 0, such as 1.1")
    return ratio


def listed(traces: Any) -> list[Trace]:
    """Return one trace, or several, as a list; anything else raises a TypeError."""
    found = [*traces] if isinstance(traces, (list, tuple)) and traces else [traces]
    for each in found:
        if not isinstance(each, Trace):
            raise TypeError(f"Cost.fit takes a trace, from step.trace or simulate, or several, got {shorten(each)}")
    return found


def spread(traces: Sequence[Trace], cost: Cost) -> tuple[float, ...]:
    """Return by which share each step took longer than its order takes with these costs, ascending."""
    longer = []
    for trace in traces:
        bound, order = trace.plan.bound, replay.order_of(trace)
        codes = [each.code for each in replay.listed(trace).values()]
        lasts, delays = cost.lengths(trace.plan)
        lags = bound.codes.by_need(delays)
        times = replay.Times([lasts[code] for code in codes], [0.0] * len(codes), lags)
        pairs = cost.pair_times(trace.plan)
        for pair in (turn for turn in order.turns if pairs and len(turn) == 2):
            for half in pair:
                times.durations[half] = pairs[codes[pair[0]]] / 2
        made = order.path(times).length
        longer.append(trace.makespan / made - 1 if made else 0.0)
    return tuple(sorted(longer))


def _pooled(traces: Sequence[Trace], first: Trace, which: str) -> tuple[Spans, Spans]:
    """Return how long the actions of several traces took, and their values travelled: all of one stage together.

    With medians of all, a prediction came nearer to the usual step than with the fastest step's, on a busy machine.
    """
    spans, moved = Spans(list), Spans(list)
    for trace in traces:
        ours, others = ((each.plan.stages, each.source, each.unit or "no unit") for each in (first, trace))
        if ours != others:
            listing = " and ".join(f"{counted(many, 'stage')}, {how} in {unit}" for many, how, unit in (ours, others))
            raise CostError(f"{which} of {listing}: fit traces of the same stages")
        travelled, between = _transfers(trace)
        for found, more in ((spans, _spans(trace, travelled, between)), (moved, travelled)):
            for each, times in more.items():
                found[each].extend(times)
        for move in trace.moves:
            spans[move.action.kind, move.action.stage or 0].append(move.end - move.start)
    return spans, moved


def _complete(times: dict[tuple[str, int], float], stage: int, ratio: float) -> None:
    """Fill in a whole backward from its halves, and halves from a whole one."""
    both, whole = [("I", stage), ("W", stage)], ("B", stage)
    if whole in times and both[0] not in times:
        times.update(dict.fromkeys(both, times[whole] * ratio / 2))
    elif both[0] in times and whole not in times:
        times[whole] = sum(times.get(each, 0.0) for each in both) / ratio


def _transfers(trace: Trace) -> tuple[Spans, float]:
    """Return how long the values that each stage's `F`, and its `B` or `I`, gave travelled to another rank.

    In a measured trace, only values that left when their receiver was idle and waited for nothing else show it: from
    then until the receiver started, less what usually lies between two actions. That is returned too.
    """
    found, between, codes = Spans(list), list[float](), trace.plan.bound.codes
    if trace.source == "simulated":
        for each in trace.transfers:
            found[_sent(codes, codes.code(each.giver))].append(each.end - each.start)
        return found, 0.0
    for _, start, before, inputs in _actions(trace):
        left, giver, away = max(inputs, default=(-inf, 0, False))
        if away and left > before:
            found[_sent(codes, giver)].append(start - left)
        elif before > -inf and not any(away for _, _, away in inputs):
            between.append(start - before)
    usual = median(between or [0.0])
    return Spans(list, {each: [max(time - usual, 0.0) for time in times] for each, times in found.items()}), usual


def _sent(codes: Codes, giver: int) -> tuple[str, int]:
    """Return under what a value's time is kept: `F` for outputs, `B` for gradients; and its stage."""
    return "F" if codes.forward[giver] else "B", codes.stage[giver]


def _actions(trace: Trace) -> Iterator[tuple[int, float, float, list[tuple[float, int, bool]]]]:
    """Yield every action but `R`: code, start, end of the one before it, and by input its end, giver, whether away."""
    bound = trace.plan.bound
    ended = {code: end for rank in range(trace.ranks) for code, _, end in trace.computed(rank)}
    for rank in range(trace.ranks):
        before = -inf
        for code, start, end in trace.computed(rank):
            if not bound.codes.collective[code]:
                givers = (giver for _, giver in bound.inputs(code))
                yield code, start, before, [(ended[giver], giver, bound.rank_of[giver] != rank) for giver in givers]
            before = end


def _spans(trace: Trace, moved: Spans, between: float) -> Spans:
    """Return how long the actions took; in a measured trace, since they could begin."""
    bound, spans = trace.plan.bound, Spans(list)
    kind, stage = bound.codes.kind, bound.codes.stage
    since = _since(trace, moved, between) if trace.source == "measured" else {}
    for row, starts, ends in zip(bound.computing, trace.starts, trace.ends, strict=True):
        previous = -1
        for index, (code, start, end) in enumerate(zip(row, starts, ends, strict=True)):
            if previous in bound.pairs and starts[index - 1] == start and end > start:
                spans["F", stage[previous]].pop()
                spans["pair", stage[previous]].append(end - start)
            else:
                spans[kind[code], stage[code]].append(end - since.get(code, start))
            previous = code
    return spans


def _since(trace: Trace, moved: Spans, between: float) -> dict[int, float]:
    """Return, by code, since when an action could run: when the action before it ended, if the inputs were there.

    Of those that waited for a value, the last part is counted that usually lies between two actions: the rest was the
    wait.
    """
    since: dict[int, float] = {}
    travel = median(chain.from_iterable(moved.values()) if moved else [0.0])
    for code, start, before, inputs in _actions(trace):
        there = max((end + travel * away for end, _, away in inputs), default=-inf)
        if max(there, before) > -inf:
            since[code] = before if before >= there else max(before, start - between)
    return since


def _travel(moved: Spans, trace: Trace, middle: Callable[[list[float]], float]) -> dict[str, Any]:
    """Return latency and, where some stages' values travel longer, their bytes at a bandwidth of 1."""
    times = [time for each in moved.values() for time in each]
    if not times:
        return {}
    enough = _FEW if trace.source == "measured" else 1
    usual = middle(times)
    typical = {each: middle(spans) if len(spans) >= enough else usual for each, spans in moved.items()}
    latency = min(typical.values())
    if max(typical.values()) == latency:
        return {"latency": latency}
    stages = range(trace.plan.stages)
    sizes = {
        name: [typical.get((kind, stage), latency) - latency for stage in stages]
        for name, kind in (("activation_bytes", "F"), ("boundary_gradient_bytes", "B"))
    }
    return {"latency": latency, "bandwidth": 1, **sizes}


def groups(given: int, wanted: int | Sequence[int]) -> Iterator[range]:
    """Yield the stages that go into each merged one."""
    if isinstance(wanted, Sequence):
        sizes = [require_size("stages", each) for each in wanted]
    else:
        count = require_size("stages", wanted)
        sizes = [given // count] * count
    if sum(sizes) != given or 0 in sizes:
        raise CostError(
            f"{counted(given, 'stage')} cannot be merged into {shorten(wanted)}: neighbours are added, never cut, so "
            f"give a number that divides {given}, or how many go into each, {given} in all; for other cuts, run the "
            "model with them"
        )
    yield from (range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))
