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
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.checking.memory import ACTIVATIONS, Memory
from pipelab.errors import CostError, UsageError, require_caps
from pipelab.plan.actions import Item, Pair
from pipelab.plan.plan import Plan
from pipelab.simulation.bounds import Holding, Work, lower_bound, work_of
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost, as_cost

if TYPE_CHECKING:
    from pipelab.checking.checker import ScheduleLike
    from pipelab.trace.trace import Trace

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
    millionth of the longest. The bound still holds, and "proven" is true to within this much for each action.

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
        CostError: if a list of the cost does not have one number per stage, or if forwards take no time and there is a
            memory cap; or if all-reduces run beside computing.
        TypeError: if it is neither a plan nor a schedule, or if `cost` is not a `Cost`.
    """
    if not (isinstance(seconds, (int, float)) and 0 < seconds < inf):
        raise UsageError(f"seconds={seconds!r}: expected how long the solver may take, a positive number")
    work = _orderable(plan, cost, memory)
    caps = None if memory_cap is None else require_caps(memory_cap, work.plan.ranks)
    bound = lower_bound(work.plan, cost, memory_cap=memory_cap, memory=memory)
    best = _best_guess(work, caps, cost, bound)
    if best.makespan <= bound * (1 + _ROUNDED):
        return Optimum(best, min(bound, best.makespan), proven=True)
    tick, exact = _tick(work)
    order, found = _Program(work, caps, tick, bound, best).solve(seconds)
    if order:
        best = min(best, simulate(_in_order(work, order), cost), key=lambda trace: trace.makespan)
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


def _best_guess(work: Work, caps: Sequence[int] | None, cost: Cost | None, bound: float) -> Trace:
    """Return the quickest order within the caps that needs no solver: no further one is tried if it reaches the bound.

    Tried are the plan's own, two policies, and one micro-batch after another.
    """
    rooms = None if caps is None else work.rooms(caps)
    if rooms is not None and caps is not None:
        _require_room(work, rooms, caps)
    best: Trace | None = None
    for plan in _orders(work, rooms):
        if caps is None or all(map(le, _peaks(work, plan), caps)):
            trace = simulate(plan, cost)
            best = trace if best is None else min(best, trace, key=lambda trace: trace.makespan)
            if best.makespan <= bound * (1 + _ROUNDED):
                break
    if best is None:
        raise UsageError(
            f"memory_cap={list(caps or [])}: the plan holds {_peaks(work, work.plan)}, and no order was found "
            "that holds less with each overlapped pair as one slot, or each slice after the one before it\n"
            "  try: a higher cap, or a cost without pair"
        )
    return best


def _require_room(work: Work, rooms: Sequence[int], caps: Sequence[int]) -> None:
    """Refuse caps under which a rank has no room for a single micro-batch."""
    codes = work.plan.bound.codes
    for rank, (held, room) in enumerate(zip(work.held, rooms, strict=True)):
        visits = Counter[int]()
        for code, size in ((work.jobs[made].codes[0], size) for made, _, size in held):
            visits[codes.microbatch[code]] += size * codes.forward[code]
        for microbatch, least in visits.most_common(1):
            if room < least:
                what = "activations" if work.memory is ACTIVATIONS else "bytes"
                raise UsageError(
                    f"memory_cap={caps[rank]} on rank {rank}: no order keeps it, because micro-batch {microbatch} "
                    f"alone has {least} {what} there\n  try: a cap of at least {least + caps[rank] - room}"
                )


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

    Return `None` if the room that is left is too small for all that could start.
    """
    jobs, follows = work.jobs, work.network(None).follows
    lacks = [len(before) for before in follows]
    later = defaultdict[int, list[tuple[int, float]]](list)
    for after, links in enumerate(follows):
        for before, what in links:
            later[before].append((after, work.lags[what]))
    room = _Room(work, rooms)
    free, earliest = [0.0] * work.plan.ranks, [0.0] * len(jobs)
    ready = {index for index, many in enumerate(lacks) if not many}
    order: list[int] = []
    while ready:
        starts = {
            index: max(earliest[index], *(free[rank] for rank in jobs[index].ranks))
            for index in ready
            if room.has(index)
        }
        if not starts:
            return None
        now = min(starts.values())
        first = (index for index, start in starts.items() if start == now)
        index = max(first, key=lambda index: (urgency[index], -index))
        ready.remove(index)
        order.append(index)
        room.take(index)
        end = now + jobs[index].time
        for rank in jobs[index].ranks:
            free[rank] = end
        for after, lag in later[index]:
            earliest[after] = max(earliest[after], end + lag)
            lacks[after] -= 1
            if not lacks[after]:
                ready.add(after)
    return order


class _Room:
    """How much room is left on each rank."""

    def __init__(self, work: Work, rooms: Sequence[int] | None) -> None:
        self._rank = [job.ranks[0] for job in work.jobs]
        self._more, self._less = Counter[int](), Counter[int]()
        self._left = [inf] * work.plan.ranks
        for rank, most in enumerate(rooms or ()):
            self._left[rank] = most - sum(size for _, size in work.gradients[rank])
        for made, released, size in chain.from_iterable(work.held):
            self._more[made] += size
            if released is not None:
                self._less[released] += size

    def has(self, job: int) -> bool:
        """Whether a job adds nothing, fits, or frees something."""
        more = self._more[job]
        return not more or more <= self._left[self._rank[job]] or bool(self._less[job])

    def take(self, job: int) -> None:
        self._left[self._rank[job]] += self._less[job] - self._more[job]


class _Program:
    """A plan's work as a constraint program, in ticks."""

    def __init__(self, work: Work, caps: Sequence[int] | None, tick: float, bound: float, best: Trace) -> None:
        """Write the program: what needs what, one action at a time on each rank, the caps; and the best order."""
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise UsageError(f"the solver, OR-tools, is not installed ({error})\n  try: pip install ortools") from error
        self.cp, self.tick = cp_model, tick
        self.times = times = [floor(job.time / tick + _ROUNDED) for job in work.jobs]
        rooms = None if caps is None else work.rooms(caps)
        if rooms is not None and any(not times[made] for held in work.held for made, *_ in held):
            raise CostError("with a memory_cap, forwards must take time: at least a millionth of the longest action")
        model = self.model = cp_model.CpModel()
        last = ceil(best.makespan / tick * (1 + _ROUNDED))
        self.starts = [model.new_int_var(0, last, "") for _ in times]
        ends = [start + time for start, time in zip(self.starts, times, strict=True)]
        self._order(work, rooms, ends)
        for rank, room in enumerate(rooms or ()):
            self._keep(room, ends, last, work.held[rank], work.gradients[rank])
        makespan = model.new_int_var(floor(bound / tick * (1 - _ROUNDED)), last, "")
        for end in ends:
            model.add(end <= makespan)
        begun = dict(zip(chain(*best.plan.bound.computing), chain(*best.starts), strict=True))
        for start, job in zip(self.starts, work.jobs, strict=True):
            model.add_hint(start, round(begun[job.codes[0]] / tick))
        model.add_hint(makespan, round(best.makespan / tick))
        model.minimize(makespan)

    def _order(self, work: Work, rooms: Sequence[int] | None, ends: list[Any]) -> None:
        """Let jobs follow what they need, and never overlap on a rank."""
        for start, links in zip(self.starts, work.network(rooms).follows, strict=True):
            for before, what in links:
                self.model.add(start >= ends[before] + floor(work.lags[what] / self.tick + _ROUNDED))
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

    def solve(self, seconds: float) -> tuple[list[int], float]:
        """Return the jobs in the best order found, none if none was, and a lower bound in the cost's unit."""
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
            return [], bound
        starts = [solver.value(start) for start in self.starts]
        # Of jobs that start together, those without length come first; among them, what others need.
        places = [
            (start, start + time, index) for index, (start, time) in enumerate(zip(starts, self.times, strict=True))
        ]
        return [index for *_, index in sorted(places)], bound


def _tick(work: Work) -> tuple[float, bool]:
    """Return the unit of time in which the solver counts, and whether all times are multiples of it."""
    times = {job.time for job in work.jobs} | {work.lags[what] for job in work.jobs for _, what in job.needs}
    longest = max(times)
    parts = {time: Fraction(time).limit_denominator(_FINEST) for time in times}
    shared = lcm(*(part.denominator for part in parts.values()))
    near = all(abs(part - Fraction(time)) <= _ROUNDED * longest for time, part in parts.items())
    if near and longest * shared <= _FINEST:
        return 1 / shared, True
    return longest / _FINEST or 1.0, False


def _in_order(work: Work, order: Sequence[int]) -> Plan:
    """Return the plan whose rows have the jobs in this order."""
    plan, codes = work.plan, work.plan.bound.codes
    rows: list[list[Item]] = [[] for _ in range(plan.ranks)]
    for job in map(work.jobs.__getitem__, order):
        actions = [codes.action(code) for code in job.codes]
        for rank in job.ranks:
            rows[rank].append(Pair(*actions) if len(actions) == 2 else actions[0])
    return plan.with_rows(rows, f"best order of {plan.name}")
