"""The best order: OR-tools' CP-SAT solver looks for it, and proves that there is no better one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.errors import CostError, UsageError, require_caps
from pipelab.plan.actions import Item, Pair
from pipelab.plan.plan import Plan
from pipelab.simulation.bounds import Work, lower_bound, work_of
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
        memory_cap: how many stage activations a rank may hold: one number, or one per rank; `None` for any
            number.
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
        UsageError: if OR-tools is not installed; if no order keeps the memory cap, or none was found in time; if
            `memory_cap` is not a positive whole number, or one per rank; or if `seconds` is not a positive number.
        CostError: if a list of the cost does not have one number per stage, or if forwards take no time and there is a
            memory cap; or if all-reduces run beside computing.
        TypeError: if it is neither a plan nor a schedule, or if `cost` is not a `Cost`.
    """
    if not (isinstance(seconds, (int, float)) and 0 < seconds < float("inf")):
        raise UsageError(f"seconds={seconds!r}: expected how long the solver may take, a positive number")
    if as_cost(cost).all_reduce_runs == "beside":
        raise CostError("optimum orders all-reduces in rows: leave out all_reduce_runs='beside'")
    work = work_of(plan, cost)
    caps = None if memory_cap is None else require_caps(memory_cap, work.plan.ranks)
    bound = lower_bound(work.plan, cost, memory_cap=memory_cap)
    best: Trace | None = None
    for guess in _guesses(work, caps, cost):
        best = guess if best is None or guess.makespan < best.makespan else best
        if best.makespan <= bound * (1 + _ROUNDED):
            return Optimum(best, min(bound, best.makespan), proven=True)
    assert best is not None  # or `_guesses` has raised
    tick, exact = _tick(work)
    order, found = _Program(work, caps, tick, bound, best).solve(seconds)
    if order:
        best = min(best, simulate(_in_order(work, order), cost), key=lambda trace: trace.makespan)
    bound, lost = max(bound, found), 0.0 if exact else tick * len(work.jobs)
    return Optimum(best, min(bound, best.makespan), proven=best.makespan <= bound * (1 + _ROUNDED) + lost)


def _guesses(work: Work, caps: Sequence[int] | None, cost: Cost | None) -> Iterator[Trace]:
    """Yield orders within the caps that need no solver: the plan's own, two policies, one micro-batch after another.

    Raises:
        UsageError: if no order keeps the caps.
    """
    codes = work.plan.bound.codes
    for rank, (held, cap) in enumerate(zip(work.activations, caps or (), strict=False)):
        makers = (work.jobs[made].codes[0] for made, _ in held)
        visits = Counter(codes.microbatch[code] for code in makers if codes.forward[code])
        if cap < max(visits.values(), default=0):
            microbatch, least = visits.most_common(1)[0]
            raise UsageError(
                f"memory_cap={cap} on rank {rank}: no order keeps it, because micro-batch {microbatch} alone has "
                f"{least} activations there\n  try: a cap of at least {least}"
            )
    given = simulate(work.plan, cost)
    fits = caps is None or all(peak <= cap for peak, cap in zip(given.peak_activations, caps, strict=True))
    if fits:
        yield given
    network, lags = work.network(work.edges(caps))
    tails = network.rests([job.time for job in work.jobs], lags)
    backward = ["gin(m,s)" in codes.traits(job.codes[0]).gives for job in work.jobs]
    for urgency in (tails, list(zip(backward, tails, strict=True))):
        order = _dispatched(work, caps, urgency)
        if order is not None:
            fits = True
            yield simulate(_in_order(work, order), cost)
    if caps is not None and all(len(job.codes) == 1 for job in work.jobs):
        one_by_one = simulate(_in_order(work, range(len(work.jobs))), cost)
        if all(peak <= cap for peak, cap in zip(one_by_one.peak_activations, caps, strict=True)):
            fits = True
            yield one_by_one
    if not fits:
        raise UsageError(
            f"memory_cap={list(caps or [])}: the plan holds {list(given.peak_activations)}, and no order was found "
            "that holds less with each overlapped pair as one slot, or each slice after the one before it\n"
            "  try: a higher cap, or a cost without pair"
        )


def _dispatched(work: Work, caps: Sequence[int] | None, urgency: Sequence[Any]) -> list[int] | None:
    """Return the jobs in the order of a policy: next is what can start first, and of several the most urgent.

    Return `None` if the caps leave nothing to start.
    """
    jobs, edges = work.jobs, work.edges(None)
    lacks = Counter(after for _, after, _ in edges)
    later: list[list[tuple[int, float]]] = [[] for _ in jobs]
    for before, after, lag in edges:
        later[before].append((after, lag))
    makes = {made: rank for rank, held in enumerate(work.activations) for made, _ in held}
    releases = {released: rank for rank, held in enumerate(work.activations) for _, released in held}
    room = [len(jobs)] * work.plan.ranks if caps is None else list(caps)
    free = [0.0] * work.plan.ranks
    earliest = [0.0] * len(jobs)
    ready = {index for index in range(len(jobs)) if not lacks[index]}
    order: list[int] = []
    while ready:
        starts = {
            index: max(earliest[index], *(free[rank] for rank in jobs[index].ranks))
            for index in ready
            if index not in makes or room[makes[index]] or index in releases
        }
        if not starts:
            return None
        now = min(starts.values())
        index = max(
            (index for index, start in starts.items() if start == now), key=lambda index: (urgency[index], -index)
        )
        ready.remove(index)
        order.append(index)
        end = now + jobs[index].time
        for rank in jobs[index].ranks:
            free[rank] = end
        if index in makes:
            room[makes[index]] -= 1
        if index in releases:
            room[releases[index]] += 1
        for after, lag in later[index]:
            earliest[after] = max(earliest[after], end + lag)
            lacks[after] -= 1
            if not lacks[after]:
                ready.add(after)
    return order


class _Program:
    """A plan's work as a constraint program, in ticks."""

    def __init__(self, work: Work, caps: Sequence[int] | None, tick: float, bound: float, best: Trace) -> None:
        """Write the program: what needs what, one action at a time on each rank, the caps; and the best order so far.

        Raises:
            UsageError: if OR-tools is not installed.
            CostError: if forwards take no time and there is a cap.
        """
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise UsageError(f"the solver, OR-tools, is not installed ({error})\n  try: pip install ortools") from error
        self.cp = cp_model
        self.tick = tick
        self.times = times = [floor(job.time / tick + _ROUNDED) for job in work.jobs]
        if caps is not None and any(not times[made] for held in work.activations for made, _ in held):
            raise CostError("with a memory_cap, forwards must take time: at least a millionth of the longest action")
        model = self.model = cp_model.CpModel()
        last = ceil(best.makespan / tick * (1 + _ROUNDED))
        self.starts = [model.new_int_var(0, last, "") for _ in times]
        ends = [start + time for start, time in zip(self.starts, times, strict=True)]
        makespan = model.new_int_var(floor(bound / tick * (1 - _ROUNDED)), last, "")
        for end in ends:
            model.add(end <= makespan)
        for before, after, lag in work.edges(caps):
            model.add(self.starts[after] >= ends[before] + floor(lag / tick + _ROUNDED))
        spans = [model.new_fixed_size_interval_var(*each, "") for each in zip(self.starts, times, strict=True)]
        for rank in range(work.plan.ranks):
            model.add_no_overlap([span for span, job in zip(spans, work.jobs, strict=True) if rank in job.ranks])
        for held, cap in zip(work.activations, caps or (), strict=False):
            if cap < len(held):
                kept = [
                    model.new_interval_var(self.starts[made], model.new_int_var(0, last, ""), ends[released], "")
                    for made, released in held
                ]
                model.add_cumulative(kept, [1] * len(kept), cap)
        begun: dict[int, float] = {}
        for row, starts in zip(best.plan.bound.rows, best.starts, strict=True):
            begun.update(zip(row, starts, strict=True))
        for start, job in zip(self.starts, work.jobs, strict=True):
            model.add_hint(start, round(begun[job.codes[0]] / tick))
        model.add_hint(makespan, round(best.makespan / tick))
        model.minimize(makespan)

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
    times = {job.time for job in work.jobs} | {lag for job in work.jobs for _, lag in job.needs}
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
