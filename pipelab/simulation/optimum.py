"""The best order: OR-tools' CP-SAT solver looks for it, and proves that there is no better one."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import ceil, floor, inf, lcm
from operator import attrgetter, le
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.checking.memory import Memory
from pipelab.errors import CostError, UsageError, require_caps
from pipelab.plan.actions import Item, Pair
from pipelab.plan.plan import Plan
from pipelab.simulation.bounds import Holding, Work, lower_bound, work_of
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost, as_cost

if TYPE_CHECKING:
    from pipelab.checking.checker import ScheduleLike
    from pipelab.trace.trace import Trace

_LARGEST = 2**60
"""What all holdings, times the length of the slowest order, may be in ticks: the solver's numbers end at 2**63."""
_FINEST = 1_000_000
"""How many ticks the longest action may have: times are rounded down to ticks if they are no multiples of one."""
_ROUNDED = 1e-9
"""Makespans that differ by less than this factor are equal: the sum of floats depends on their order."""


@dataclass(frozen=True)
class Optimum:
    """The best order that was found; made by `optimum`.

    Attributes:
        trace: the simulation of the best plan found.
        bound: no order of the same actions on the same ranks has a shorter makespan than this, in `trace.unit`.
        proven: whether the plan is proven to be optimal: its makespan is the bound.
    """

    trace: Trace
    bound: float
    proven: bool

    @property
    def plan(self) -> Plan:
        """The best plan found: `check` accepts it, and engines run it."""
        return self.trace.plan

    @property
    def makespan(self) -> float:
        """The makespan of the plan."""
        return self.trace.makespan

    @property
    def gap(self) -> float:
        """By how much the makespan is above the bound, at most, as a share of the bound: 0 if it is optimal."""
        return max(0.0, self.makespan / self.bound - 1) if self.bound else 0.0

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Draw the best plan found; the suffix is the format: see `Trace.save`. Return the path."""
        return self.trace.save(path)

    def __repr__(self) -> str:
        unit = f" {self.trace.unit}" if self.trace.unit else ""
        status = "optimal" if self.proven else f"at most {self.gap:.1%} above the optimum, bound {self.bound:g}{unit}"
        return f"<{self.plan.name}: makespan {self.makespan:g}{unit}, {status}>"


def optimum(
    plan: Plan | ScheduleLike,
    cost: Cost | None = None,
    *,
    memory_cap: int | Sequence[int] | None = None,
    memory: Memory | None = None,
    seconds: float = 10.0,
) -> Optimum:
    """Return the quickest order of a plan's actions on its ranks, and whether it is proven to be the quickest.

    The plan gives the stages of each rank, and whether backwards are split. Its own order does not matter. The solver
    stops when it has a proof, or when the time is over. Then it returns the best order and the best bound that it has
    found. About 100 actions take seconds, a few thousand take too long for a proof.

    The solver counts in whole numbers. If the times have no common unit, like measured ones, it rounds them down to a
    millionth of the longest, or less finely if a cap of very many bytes needs the digits. The bound still holds, and
    "proven" is true to within this much for each action.

    The solver is OR-tools, an extra: `pip install ortools`, or `pip install -e ".[optimum]"` in pipelab's folder.

    Args:
        plan: the plan or schedule. Overlapped pairs may be taken apart, unless the cost has a `pair`.
        cost: how long actions and transfers take; by default forward 1, backward 2 and free transfers.
        memory_cap: how many stage activations a rank may hold, or how many bytes if there is a `memory`: one number, or
            one per rank; `None` for any number.
        memory: how many bytes each stage takes.
        seconds: how long the solver may take at most.

    Example:
        1F1B is optimal in its memory. In less, the best order takes 39, and with split backwards 31:

        >>> import pipelab
        >>> optimum(pipelab.OneFOneB(ranks=4, microbatches=8), memory_cap=4).makespan
        33.0
        >>> best = optimum(pipelab.OneFOneB(ranks=4, microbatches=8), memory_cap=3)
        >>> best
        <best order of OneFOneB(ranks=4, microbatches=8): makespan 39, optimal>
        >>> pipelab.check(best.plan, memory_cap=3)
        []
        >>> optimum(pipelab.ZBH1(ranks=4, microbatches=8), memory_cap=3).makespan
        31.0

    Raises:
        ScheduleError: if the plan has faults.
        UsageError: if OR-tools is not installed; if no order keeps the memory cap, or none was found in time; if the
            plan gathers or offloads; if `memory_cap` is not a positive whole number, or one per rank; or if `seconds`
            is not a positive number.
        CostError: if a list of the cost does not have one number per stage; or if all-reduces run beside computing.
        TypeError: if it is neither a plan nor a schedule, or if `cost` is not a `Cost`.
    """
    if not (isinstance(seconds, (int, float)) and 0 < seconds < inf):
        raise UsageError(f"seconds={seconds!r}: expected how long the solver may take, a positive number")
    work = _orderable(plan, cost, memory)
    caps = None if memory_cap is None else require_caps(memory_cap, work.plan.ranks)
    bound = lower_bound(work.plan, cost, memory_cap=memory_cap, memory=memory)
    traces: list[Trace] = []
    for trace in _guesses(work, caps, cost):
        if trace.makespan <= bound * (1 + _ROUNDED):
            return Optimum(trace, min(bound, trace.makespan), proven=True)
        traces.append(trace)
    tick, exact = _tick(work, capped=caps is not None)
    program = _Program(work, caps, tick, bound, min(traces, key=attrgetter("makespan"), default=None))
    order, found = program.solve(seconds)
    traces += [simulate(_in_order(work, order), cost)] if order else []
    if not traces:
        raise _without_order(work, caps or (), seconds, proven=order is None)
    best = min(traces, key=attrgetter("makespan"))
    bound, lost = max(bound, found), 0.0 if exact else tick * len(work.jobs)
    return Optimum(best, min(bound, best.makespan), proven=best.makespan <= bound * (1 + _ROUNDED) + lost)


def _orderable(plan: Plan | ScheduleLike, cost: Cost | None, memory: Memory | None) -> Work:
    """Return what any order has to do; refuse what does not compute, which an order would leave out."""
    if as_cost(cost).all_reduce_runs == "beside":
        raise CostError("optimum orders all-reduces in rows: leave out all_reduce_runs='beside'")
    work = work_of(plan, cost, memory)
    for move in work.plan.bound.moves:
        raise UsageError(
            f"{work.plan.name} has {move.action}: optimum orders what computes, and would leave it out\n"
            "  try: the plan without gathers and offloads"
        )
    return work


def _without_order(work: Work, caps: Sequence[int], seconds: float, *, proven: bool) -> UsageError:
    """Return why there is no optimum: no order keeps the caps, or none was found in time."""
    pairs = any(len(job.codes) > 1 for job in work.jobs)
    what = "no order keeps it" if proven else "no order was found that keeps it"
    tried = (
        "has ruled out all others"
        if proven
        else f"found none in {seconds:g} seconds, and neither did the simple policies"
    )
    ways = ["a higher cap", *["more seconds"] * (not proven), *["a cost without pair"] * pairs]
    return UsageError(
        f"memory_cap={list(caps)}: {what}{' with each overlapped pair in one slot' * pairs}: the plan's own holds "
        f"{_peaks(work, work.plan)}, and the solver {tried}\n  try: {', or '.join(ways)}"
    )


def _guesses(work: Work, caps: Sequence[int] | None, cost: Cost | None) -> Iterator[Trace]:
    """Yield those of some orders that keep the caps: the plan's own, two policies, a micro-batch after another."""
    for plan in _orders(work, None if caps is None else work.rooms(caps)):
        if caps is None or all(map(le, _peaks(work, plan), caps)):
            yield simulate(plan, cost)


def _orders(work: Work, rooms: Sequence[int] | None) -> Iterator[Plan]:
    yield work.plan
    tails = work.network(rooms).rests([job.time for job in work.jobs], work.lags)
    backward = [work.plan.bound.codes.traits(job.codes[0]).backward for job in work.jobs]
    for urgency in (tails, list(zip(backward, tails, strict=True))):
        if (order := _dispatched(work, rooms, urgency)) is not None:
            yield _in_order(work, order)
    if rooms is not None and all(len(job.codes) == 1 for job in work.jobs):
        yield _in_order(work, range(len(work.jobs)))


def _peaks(work: Work, plan: Plan) -> list[int]:
    """Return the most activations, or bytes, that each rank of a plan holds."""
    return [max(work.memory.held(plan.bound, rank), default=0) for rank in range(plan.ranks)]


def _dispatched(work: Work, rooms: Sequence[int] | None, urgency: Sequence[Any]) -> list[int] | None:
    """Return the jobs in the order of a policy: next is what can start first, and of several the most urgent.

    A job may come next if it adds nothing, fits in the room that is left, or frees something. `None`: none may.
    """
    jobs, follows = work.jobs, work.network(None).follows
    lacks = [len(before) for before in follows]
    later = defaultdict[int, list[tuple[int, float]]](list)
    for after, links in enumerate(follows):
        for before, what in links:
            later[before].append((after, work.lags[what]))
    more, less = Counter[int](), Counter[int | None]()
    for made, released, size in chain(*work.held):
        more[made] += size
        less[released] += size
    kept = [sum(size for _, size in own) for own in work.gradients]
    room = [most - least for most, least in zip(rooms or (inf for _ in kept), kept, strict=True)]
    free, earliest = [0.0] * work.plan.ranks, [0.0] * len(jobs)
    ready = {index for index, many in enumerate(lacks) if not many}
    order: list[int] = []
    while ready:
        starts = {
            index: max(earliest[index], *(free[rank] for rank in jobs[index].ranks))
            for index in ready
            if not more[index] or more[index] <= room[jobs[index].ranks[0]] or less[index]
        }
        if not starts:
            return None
        now = min(starts.values())
        first = (index for index, start in starts.items() if start == now)
        index = max(first, key=lambda index: (urgency[index], -index))
        ready.remove(index)
        order.append(index)
        room[jobs[index].ranks[0]] += less[index] - more[index]
        end = now + jobs[index].time
        for rank in jobs[index].ranks:
            free[rank] = end
        for after, lag in later[index]:
            earliest[after] = max(earliest[after], end + lag)
            lacks[after] -= 1
            if not lacks[after]:
                ready.add(after)
    return order


class _Program:
    """A plan's work as a constraint program, in ticks."""

    def __init__(self, work: Work, caps: Sequence[int] | None, tick: float, bound: float, best: Trace | None) -> None:
        """Write the program: what needs what, one action at a time on each rank, the caps; the order to begin with."""
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise UsageError(f"the solver, OR-tools, is not installed ({error})\n  try: pip install ortools") from error
        self.cp, self.tick = cp_model, tick
        times, lags = (
            [floor(time / tick + _ROUNDED) for time in each] for each in ([job.time for job in work.jobs], work.lags)
        )
        # Jobs without length get one part of a tick, so that each has its place: all of them are less than a tick.
        short = times.count(0)
        parts = short + 1
        self.times, self.lags = [time * parts or 1 for time in times], [lag * parts for lag in lags]
        rooms = None if caps is None else work.rooms(caps)
        model = self.model = cp_model.CpModel()
        if best is None:  # no order is slower than one action after another, each after its slowest value
            last = sum(times) + sum(max((lags[what] for _, what in job.needs), default=0) for job in work.jobs)
        else:
            last = ceil(best.makespan / tick * (1 + _ROUNDED))
        makespan = model.new_int_var(floor(bound / tick * (1 - _ROUNDED)), last, "")
        last = last * parts + short
        self.starts = [model.new_int_var(0, last, "") for _ in times]
        ends = [start + time for start, time in zip(self.starts, self.times, strict=True)]
        self._order(work, rooms, ends)
        for rank, room in enumerate(rooms or ()):
            self._keep(room, ends, last, work.held[rank], work.gradients[rank])
        for end in ends:
            model.add(end <= makespan * parts + short)
        model.minimize(makespan)
        if best is not None:
            begun = dict(zip(chain(*best.plan.bound.computing), chain(*best.starts), strict=True))
            for start, job in zip(self.starts, work.jobs, strict=True):
                model.add_hint(start, round(begun[job.codes[0]] / tick) * parts)
            model.add_hint(makespan, round(best.makespan / tick))

    def _order(self, work: Work, rooms: Sequence[int] | None, ends: list[Any]) -> None:
        """Let jobs follow what they need, and never overlap on a rank."""
        for start, links in zip(self.starts, work.network(rooms).follows, strict=True):
            for before, what in links:
                self.model.add(start >= ends[before] + self.lags[what])
        timed = zip(self.starts, self.times, strict=True)
        spans = [self.model.new_fixed_size_interval_var(start, time, "") for start, time in timed]
        for rank in range(work.plan.ranks):
            self.model.add_no_overlap([span for span, job in zip(spans, work.jobs, strict=True) if rank in job.ranks])

    def _keep(
        self, room: int, ends: list[Any], last: int, held: Sequence[Holding], gradients: Sequence[tuple[Any, int]]
    ) -> None:
        """Let a rank never hold more than there is room for."""
        model = self.model
        spans = [(self.starts[made], last if to is None else ends[to], size) for made, to, size in held]
        for first, size in gradients:
            begin = model.new_int_var(0, last, "")
            model.add_min_equality(begin, [self.starts[job] for job in first])
            spans.append((begin, last, size))
        sizes = [size for *_, size in spans]
        if room < sum(sizes):
            kept = [model.new_interval_var(start, model.new_int_var(0, last, ""), end, "") for start, end, _ in spans]
            model.add_cumulative(kept, sizes, room)

    def solve(self, seconds: float) -> tuple[list[int] | None, float]:
        """Return the jobs in the best order found, `None` if there is none, and a lower bound in the cost's unit."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 8  # each looks in its own way; they share the cores that there are
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C kills Python from then on: no KeyboardInterrupt
        with ThreadPoolExecutor(1) as pool:  # an interrupt reaches the main thread only where it runs Python
            solving = pool.submit(solver.solve, self.model)
            try:
                while not wait([solving], timeout=0.2).done:
                    pass
            except KeyboardInterrupt:
                while not wait([solving], timeout=0.1).done:  # a search that is only about to begin cannot be stopped
                    solver.stop_search()
                raise
            status = solving.result()
        bound = solver.best_objective_bound * self.tick
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None if status == self.cp.INFEASIBLE else [], bound
        starts = [solver.value(start) for start in self.starts]
        return sorted(range(len(starts)), key=starts.__getitem__), bound


def _tick(work: Work, *, capped: bool) -> tuple[float, bool]:
    """Return the unit of time in which the solver counts, and whether all times are multiples of it."""
    times = {job.time for job in work.jobs} | {work.lags[what] for job in work.jobs for _, what in job.needs}
    longest, short = max(times), sum(not job.time for job in work.jobs)
    held = sum(size for *_, size in chain(*work.held)) + sum(size for _, size in chain(*work.gradients))
    finest = max(1, min(_FINEST, _LARGEST // (2 * len(work.jobs) * (short + 1) * (held * capped + 1))))
    parts = {time: Fraction(time).limit_denominator(finest) for time in times}
    shared = lcm(*(part.denominator for part in parts.values()))
    near = all(abs(part - Fraction(time)) <= _ROUNDED * longest for time, part in parts.items())
    if near and longest * shared <= finest:
        return 1 / shared, True
    return longest / finest or 1.0, False


def _in_order(work: Work, order: Sequence[int]) -> Plan:
    """Return the plan whose rows have the jobs in this order."""
    plan, codes = work.plan, work.plan.bound.codes
    rows: list[list[Item]] = [[] for _ in range(plan.ranks)]
    for job in map(work.jobs.__getitem__, order):
        actions = [codes.action(code) for code in job.codes]
        for rank in job.ranks:
            rows[rank].append(Pair(*actions) if len(actions) == 2 else actions[0])
    return plan.with_rows(rows, f"best order of {plan.name}")
